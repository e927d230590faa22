"""The difference of two checkpoints as an adapter: merged into the base it gives the tuned checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.errors import FitError, InputError, UsageError
from tests.support import Tensors, in_process, kohya, rand, sd1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in fp32, the base with a LoRA of rank 4 merged, and the same base with every vector changed too."""
    made = tmp_path_factory.mktemp("extract")
    base = sd1(torch.float32)
    save_file(base, made / "base.safetensors")
    save_file(kohya(sd1()), made / "lora.safetensors")
    tuned = {k: v.clone() for k, v in merged(made / "base.safetensors", made / "lora.safetensors").items()}
    save_file(tuned, made / "tuned.safetensors")
    save_file({k: v if v.ndim > 1 else v + 0.5 for k, v in tuned.items()}, made / "all.safetensors")
    return made


def merged(base: Path, adapter: Path) -> Tensors:
    return lora_merge.merge_state_dict(load_file(base), [adapter], compute_dtype="fp64")


def test_a_known_lora_is_found_again_with_its_rank(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.safetensors"
    code, told = in_process("extract", folder / "base.safetensors", folder / "tuned.safetensors", "-o", output,
                            "--rank", "exact")  # fmt: skip
    assert code == 0, told
    found, known = load_file(output), load_file(folder / "lora.safetensors")
    assert found.keys() == known.keys()
    for name in (n.removesuffix(".alpha") for n in known if n.endswith(".alpha")):
        one, other = (
            t[f"{name}.alpha"].double() / t[f"{name}.lora_down.weight"].shape[0]
            * t[f"{name}.lora_up.weight"].flatten(1).double() @ t[f"{name}.lora_down.weight"].flatten(1).double()
            for t in (found, known)
        )  # fmt: skip
        assert found[f"{name}.lora_down.weight"].shape == known[f"{name}.lora_down.weight"].shape
        assert torch.allclose(one, other, rtol=0, atol=1e-6), name


def test_the_adapter_brings_the_base_to_the_tuned_checkpoint(folder: Path, tmp_path: Path) -> None:
    report = lora_merge.extract(
        folder / "base.safetensors", folder / "all.safetensors", tmp_path / "a.safetensors", rank="exact",
        include=["unet", "te", "vae"],
    )  # fmt: skip
    assert report.verified is not None and report.verified["recomputed"] == len(report.layers)
    again, tuned = (
        merged(folder / "base.safetensors", tmp_path / "a.safetensors"),
        load_file(folder / "all.safetensors"),
    )
    for name, value in tuned.items():
        assert torch.allclose(again[name], value, rtol=0, atol=2e-6), name


def test_the_error_of_a_rank_is_the_tail_of_the_singular_values(folder: Path, tmp_path: Path) -> None:
    base, tuned = folder / "base.safetensors", folder / "tuned.safetensors"
    report = lora_merge.extract(base, tuned, tmp_path / "a.safetensors", rank=2)
    made = merged(base, tmp_path / "a.safetensors")
    old, new = load_file(base), load_file(tuned)
    seen = 0
    for key in (k for k in old if old[k].ndim > 1 and not torch.equal(old[k], new[k])):
        wanted = (new[key].double() - old[key].double()).flatten(1).numpy()
        tail = np.sqrt((np.linalg.svd(wanted, compute_uv=False)[2:] ** 2).sum())
        lost = np.linalg.norm(wanted - (made[key].double() - old[key].double()).flatten(1).numpy())
        assert lost == pytest.approx(tail, rel=1e-4, abs=1e-6), key
        seen += 1
    assert seen == len(report.layers)
    assert 0 < report.residual < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_above_the_rounding_noise_is_the_rank_that_was_trained(tmp_path: Path, dtype: torch.dtype) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    base = rand(64, 48, seed=1).to(dtype)
    tuned = (base.float() + 0.5 * rand(64, 3, seed=2) @ rand(3, 48, seed=3)).to(dtype)
    save_file({key: base}, tmp_path / "base.safetensors")
    save_file({key: tuned}, tmp_path / "tuned.safetensors")
    found = lora_merge.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors",
                               tmp_path / "a", rank="noise")  # fmt: skip
    assert [layer["rank"] for layer in found.layers.values()] == [3]
    assert found.dtype == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]


def changed(folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Return a tuned checkpoint with other tensors, or without them."""
    tensors = {**load_file(folder / "tuned.safetensors"), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


KEY = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({KEY: torch.zeros(3, 3)}, FitError, "another shape"),
        ({KEY: None}, FitError, "not in the tuned checkpoint"),
        ({"model.diffusion_model.new.weight": torch.ones(2, 2)}, FitError, "tuned checkpoint alone"),
        ({KEY: torch.full((16, 16), torch.nan)}, InputError, "NaN"),
    ],
)
def test_checkpoints_that_are_not_of_one_model_are_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], words: str
) -> None:
    output = tmp_path / "a.safetensors"
    with pytest.raises(error) as caught:
        lora_merge.extract(folder / "base.safetensors", changed(folder, tmp_path, change), output)
    assert words in str(caught.value) and next(iter(change)) in str(caught.value)
    assert not output.exists()


def test_equal_checkpoints_have_no_difference(folder: Path, tmp_path: Path) -> None:
    base = folder / "base.safetensors"
    with pytest.raises(InputError, match="nothing to extract"):
        lora_merge.extract(base, base, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("rank", "same"), ("others", "half"), ("format", "webp"),
                                               ("include", ["nose"]), ("exclude", ["re:("])])  # fmt: skip
def test_a_wrong_option_is_refused(folder: Path, tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError):
        lora_merge.extract(folder / "base.safetensors", folder / "tuned.safetensors", tmp_path / "a.safetensors",
                           **{option: value})  # type: ignore[arg-type]  # fmt: skip


def test_noise_is_a_rule_of_extract_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="noise"):
        lora_merge.resize(folder / "lora.safetensors", tmp_path / "a.safetensors", rank="noise")


@pytest.mark.parametrize("options", [("--rank", "energy:0.9"), ("--format", "peft", "--include", "unet", "--others",
                                     "skip", "--algorithm", "lora")])  # fmt: skip
def test_it_is_made_again_and_proven_from_its_recipe(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    out = tmp_path / ("o" if "peft" in options else "o.safetensors")
    again = out.with_name(f"again{out.suffix}")
    base, tuned = folder / "base.safetensors", folder / "all.safetensors"
    steps = (
        ("extract", base, tuned, "-o", out, *options),
        ("verify", out, "--search", folder),
        ("replay", out, "-o", again, "--search", folder),
    )
    for step in steps:
        code, told = in_process(*step)
        assert code == 0, told
    for made in [*out.iterdir()] if out.is_dir() else [out]:
        assert made.read_bytes() == (again / made.name if out.is_dir() else again).read_bytes()
