"""Adapters as values: sums and strengths act on ΔW, whatever the factors are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lora_merge
from lora_merge.errors import UsageError
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.flux import flux, of_flux
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

NAME = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
BASE = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loaded")
    save(sd1_sample(torch.float32), made / "base.safetensors")
    save(kohya(sd1_sample()), made / "a.safetensors")
    save(kohya(sd1_sample(), rank=3, seed=5), made / "b.safetensors")
    return made


def test_spectrum_is_that_of_the_change_and_its_length_is_the_rank(folder: Path) -> None:
    a, b = (lora_merge.load_adapter(folder / f"{n}.safetensors") for n in "ab")
    weight = load(folder / "base.safetensors")[BASE]
    for changes, rank in ((a, 4), (b, 3), (0.5 * a - b, 7), (2 * a, 4), (a - a, 0)):
        known = np.linalg.svd(changes.delta(NAME, weight).double().numpy(), compute_uv=False)
        assert changes.rank(NAME) == rank
        assert changes.spectrum(NAME) == pytest.approx(known[:rank], rel=1e-5, abs=1e-9)


def test_strengths_and_sums_obey_the_laws_of_numbers(folder: Path) -> None:
    a, b = (lora_merge.load_adapter(folder / f"{n}.safetensors") for n in "ab")
    weight = load(folder / "base.safetensors")[BASE]
    one, other = a.delta(NAME, weight), b.delta(NAME, weight)
    for changes, known in ((0.5 * a + b, 0.5 * one + other), (2 * (a + b) * 0.25, 0.5 * (one + other)),
                           (sum([a, b]), one + other), (-(a - b), other - one)):  # fmt: skip
        assert torch.allclose(changes.delta(NAME, weight), known, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [{}, {"loha": True}], ids=["lora", "loha"])
def test_delta_needs_no_weight_that_its_formula_does_not_read(kind: dict[str, bool], tmp_path: Path) -> None:
    save(of_flux(**kind), tmp_path / "style.safetensors")
    adapter, base = lora_merge.load_adapter(tmp_path / "style.safetensors"), flux()
    for name in adapter.modules:
        alone = adapter.delta(name)
        weight = rand(*alone.shape, seed=9)
        assert torch.equal(alone, adapter.delta(name, weight)) and alone.shape in {t.shape for t in base.values()}
    assert torch.allclose((2 * adapter - adapter).delta(name), alone)


def test_delta_of_dora_needs_its_weight(tmp_path: Path) -> None:
    save(of_flux(dora=True), tmp_path / "dora.safetensors")
    adapter = lora_merge.load_adapter(tmp_path / "dora.safetensors")
    with pytest.raises(UsageError, match="ΔW of DoRA depends on the base's weight") as e:
        adapter.delta(adapter.modules[0])
    assert e.value.fix == "give it: delta(name, base_weight)"


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["keep", "diffusers"])
def test_saved_sum_changes_the_base_as_its_terms_do(folder: Path, tmp_path: Path, to: str) -> None:
    a, b = (lora_merge.load_adapter(folder / f"{n}.safetensors") for n in "ab")
    report = (0.5 * a + b).save(tmp_path / "c.safetensors", format=to, base=folder / "base.safetensors")
    assert {layer["rank"] for layer in report.layers.values()} == {7}
    base = load_file(folder / "base.safetensors")
    pairs = [(folder / "a.safetensors", 0.5), (folder / "b.safetensors", 1.0)]
    known = lora_merge.merge_state_dict(base, pairs, compute_dtype="fp64")
    made = lora_merge.merge_state_dict(base, [tmp_path / "c.safetensors"], compute_dtype="fp64")
    for name, value in known.items():
        assert torch.allclose(made[name], value, rtol=0, atol=1e-4), name
    (tmp_path / "again").mkdir()  # the name is the title in the metadata
    lora_merge.combine(pairs, tmp_path / "again" / "c.safetensors", format=to, base=folder / "base.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "again" / "c.safetensors").read_bytes()
    a.save(tmp_path / "one.safetensors", rank=2)
    assert lora_merge.load_adapter(tmp_path / "one.safetensors").rank(NAME) == 2


def test_values_that_are_no_strength_or_module_are_refused(folder: Path) -> None:
    a = lora_merge.load_adapter(folder / "a.safetensors")
    with pytest.raises(UsageError, match="no module"):
        a.rank("nose")
    with pytest.raises(UsageError):
        float("nan") * a
    with pytest.raises(TypeError):
        a + 1
    with pytest.raises(TypeError):
        a * "2"  # type: ignore[operator]


def test_sum_is_merged_and_combined_as_its_terms_are(folder: Path, tmp_path: Path) -> None:
    """By every function that takes adapters: on files, on tensors, alone, in a list, and at a further strength."""
    a, b = (lora_merge.load_adapter(folder / f"{n}.safetensors") for n in "ab")
    base, pairs = folder / "base.safetensors", [(folder / "a.safetensors", 0.25), (folder / "b.safetensors", -0.5)]
    known = lora_merge.merge_state_dict(load_file(base), pairs)
    half = a / 2 - b
    for given in ((half, 0.5), [(half, 0.5)], [0.5 * half], 0.5 * half, [a / 4, -0.5 * b], [(a, 0.25), (b, -0.5)]):
        lora_merge.merge(base, given, tmp_path / "merged.safetensors", overwrite=True, verify=False)
        made = load_file(tmp_path / "merged.safetensors"), lora_merge.merge_state_dict(load_file(base), given)
        assert all(torch.equal(one[n], known[n]) for n in known for one in made)
    report = lora_merge.combine([half, (a, 2)], tmp_path / "c.safetensors")
    assert [row["strength"] for row in report.coverage.values()] == [0.5, -1, 2]
    with pytest.raises(UsageError, match="one adapter"):
        lora_merge.resize(a + b, tmp_path / "r.safetensors", rank=2)
    with pytest.raises(TypeError):
        a / 0


def test_rank_of_a_module_is_that_of_its_weight_beside_a_bias(tmp_path: Path) -> None:
    base = save({"a.bias": torch.zeros(6), "a.weight": torch.randn(6, 8)}, tmp_path / "base.safetensors")
    one = {"a.lora_up.weight": torch.randn(6, 3), "a.lora_down.weight": torch.randn(3, 8), "a.diff_b": torch.ones(6)}
    a = lora_merge.load_adapter(save(one, tmp_path / "a.safetensors"))
    assert a.rank("a", base=base) == 3
    assert a.rank("a.bias", base=base) == 1


def test_sums_join_modules_of_two_dialects_as_combine_does(tmp_path: Path) -> None:
    kinds = "lora_unet_down_blocks_0_attentions_0_proj_in", "unet.down_blocks.0.attentions.0.proj_in"
    files = [
        lora_merge.load_adapter(save(
            {f"{name}.lora_up.weight": torch.randn(6, 2), f"{name}.lora_down.weight": torch.randn(2, 8)},
            tmp_path / f"{n}.safetensors"))
        for n, name in enumerate(kinds)
    ]  # fmt: skip
    both, weight = files[0] + files[1], torch.zeros(6, 8)
    assert both.modules == files[0].modules
    wanted = sum(one.delta(one.modules[0], weight) for one in files)
    for (name,) in (files[0].modules, files[1].modules):
        assert torch.allclose(both.delta(name, weight), wanted) and both.rank(name) == 4


def test_tensors_that_all_modules_share_are_no_module(tmp_path: Path) -> None:
    own, shared = "base_model.model.a", "base_model"
    save({f"{own}.vera_lambda_b": torch.ones(6), f"{own}.vera_lambda_d": torch.ones(2),
          f"{shared}.vera_A": torch.ones(2, 8), f"{shared}.vera_B": torch.ones(6, 2)},
         tmp_path / "adapter_model.safetensors")  # fmt: skip
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "VERA", "r": 2, "target_modules": ["a"]}')
    assert lora_merge.load_adapter(tmp_path).modules == (own,)
    assert not lora_merge.inspect(tmp_path)["incomplete"]
