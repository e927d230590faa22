"""A converted adapter changes the base as the original does, in every dialect, fused and split, there and back."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.convert import opened, plan
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.form import planned_modules
from lora_merge.adapters_out.groups import places
from lora_merge.errors import FitError, TooLarge, UsageError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.models.components import components
from lora_merge.models.names import Names, names
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.recipes.commands import COMMANDS
from lora_merge.survival import spoken
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.dialects import matrices
from tests.kit.files import index, load, save
from tests.kit.flux import H, flux, of_flux
from tests.kit.models import sd1
from tests.kit.tensors import Tensors, rand

HEADERS = Path(__file__).parents[1] / "headers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("convert")
    save_file(sd1(torch.float32), made / "sd1.safetensors")
    save_file(kohya(sd1()), made / "sd1-lora.safetensors")
    save_file(flux(), made / "flux.safetensors")
    save_file(of_flux(), made / "flux-lora.safetensors")
    save_file(of_flux(dora=True), made / "flux-dora.safetensors")
    save_file(of_flux(loha=True), made / "flux-loha.safetensors")
    return made


def merged(base: Path, adapter: Path) -> Mapping[str, torch.Tensor]:
    return lora_merge.merge_state_dict(load_file(base), [adapter], compute_dtype="fp64")


def check(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], within: float) -> None:
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), rtol=0, atol=within), name


@pytest.mark.parametrize("to", DIALECTS)
def test_every_dialect_is_written_and_read_back(to: str, folder: Path, tmp_path: Path) -> None:
    """A fast test of each row, with the layers that it has names for: the list is not thinned out."""
    found, base = names(index({key: (*value.shape,) for key, value in flux().items()})), folder / "flux.safetensors"
    rows = Counter[str]()
    for view in matrices(found, to).values():
        rows.update({piece.key: piece.stop - piece.start for piece in view.row_slices})
    whole = [key for key, count in rows.items() if count == flux()[key].shape[0]]
    modules = {f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}" for key in whole}
    tensors = {key: value for key, value in of_flux().items() if key.partition(".")[0] in modules}
    first, last = tmp_path / "first.safetensors", tmp_path / "last.safetensors"
    save(tensors, first)
    written = tmp_path / (to if DIALECTS[to].folder else "written.safetensors")
    lora_merge.convert(first, written, to=to, base=base)
    lora_merge.convert(written, last, to="kohya", base=base)
    assert load_file(last).keys() == tensors.keys() != set()
    for adapter in (written, last):
        check(merged(base, first), merged(base, adapter), 1e-6)


CHAINS = [
    ("sd1", "sd1-lora", ("diffusers", "comfy", "lycoris", "onetrainer", "kohya")),
    ("flux", "flux-lora", ("diffusers", "comfy", "peft", "onetrainer", "kohya")),
    ("flux", "flux-dora", ("diffusers", "peft", "kohya")),
    ("flux", "flux-loha", ("comfy", "kohya")),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "adapter", "chain"), CHAINS)
def test_chain_of_dialects_changes_nothing(
    folder: Path, tmp_path: Path, model: str, adapter: str, chain: tuple[str, ...]
) -> None:
    base, first = folder / f"{model}.safetensors", folder / f"{adapter}.safetensors"
    expected, before = merged(base, first), first
    for to in chain:
        output = tmp_path / (to if to == "peft" else f"{to}.safetensors")
        report = lora_merge.convert(before, output, to=to, base=base)
        assert report.verified is not None and report.verified["ok"]
        check(expected, merged(base, output), 1e-6)
        before = output
    assert load_file(before).keys() == load_file(first).keys()


def test_split_layers_are_fused_again_without_rank(folder: Path, tmp_path: Path) -> None:
    """Equal downs are stored once; the ranks of independent parts add up."""
    base = folder / "flux.safetensors"
    split = tmp_path / "split.safetensors"
    lora_merge.convert(folder / "flux-lora.safetensors", split, to="diffusers", base=base)
    fused = lora_merge.convert(split, tmp_path / "fused.safetensors", to="kohya", base=base)
    assert {layer["rank"] for layer in fused.layers.values()} == {3}
    tensors = load_file(split)
    name = next(n for n in tensors if n.endswith("single_transformer_blocks.0.attn.to_k.lora_A.weight"))
    tensors[name] = rand(*tensors[name].shape, seed=9)
    save_file(tensors, tmp_path / "other.safetensors")
    other = lora_merge.convert(tmp_path / "other.safetensors", tmp_path / "sum.safetensors", to="kohya", base=base)
    assert other.layers["lora_unet_single_blocks_0_linear1"]["rank"] == 6
    back = lora_merge.convert(tmp_path / "sum.safetensors", tmp_path / "back.safetensors", to="diffusers", base=base)
    assert back.layers["transformer.single_transformer_blocks.0.attn.to_k"]["rank"] == 3


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{"algorithm": "lora"}, {"algorithm": "full"}, {"rank": "energy:1"}])
def test_algorithms_become_lora_or_whole_matrices(folder: Path, tmp_path: Path, options: Any) -> None:
    base, adapter, output = folder / "flux.safetensors", folder / "flux-loha.safetensors", tmp_path / "out.safetensors"
    to = "kohya" if "full" in options.values() else "diffusers"
    assert lora_merge.convert(adapter, output, to=to, base=base, **options).residual < 1e-6
    check(merged(base, adapter), merged(base, output), 1e-6)


def test_whole_matrices_go_through_every_dialect_that_has_a_place_for_them(folder: Path, tmp_path: Path) -> None:
    """Fused and apart, as differences and as PEFT's new values, which have the digits of the base."""
    base, before = folder / "flux.safetensors", tmp_path / "full.safetensors"
    lora_merge.convert(folder / "flux-loha.safetensors", before, to="kohya", base=base, algorithm="full", dtype="fp16")
    wanted = merged(base, before)
    for n, to in enumerate(("onetrainer", "comfy", "lycoris", "peft", "kohya", "peft", "comfy")):
        output = tmp_path / (f"{n}" if to == "peft" else f"{n}.safetensors")
        lora_merge.convert(before, output, to=to, base=base)
        check(wanted, merged(base, output), 1e-6)
        before = output
    with pytest.raises(FitError, match="cannot store whole matrices"):
        lora_merge.convert(before, tmp_path / "d.safetensors", to="diffusers", base=base)


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [None, "energy:1"])
@pytest.mark.parametrize("to", [name for name, row in DIALECTS.items() if not row.alpha])
def test_alpha_of_ones_own_changes_nothing_where_alpha_is_not_stored(
    folder: Path, tmp_path: Path, to: str, rank: str | None
) -> None:
    base, adapter, output = folder / "flux.safetensors", folder / "flux-lora.safetensors", tmp_path / "out"
    output = output if DIALECTS[to].folder else output.with_suffix(".safetensors")
    if DIALECTS[to].table:  # the attention of Flux alone
        attention = {k: v for k, v in load_file(adapter).items() if "_attn_" in k}
        adapter = tmp_path / "attention.safetensors"
        save_file(attention, adapter)
    lora_merge.convert(adapter, output, to=to, base=base, alpha=7.0, rank=rank)
    check(merged(base, adapter), merged(base, output), 1e-6)


def test_strength_goes_into_the_file(folder: Path, tmp_path: Path) -> None:
    base, adapter, output = folder / "flux.safetensors", folder / "flux-lora.safetensors", tmp_path / "out.safetensors"
    lora_merge.convert((adapter, -0.25), output, to="diffusers", base=base)
    check(lora_merge.merge_state_dict(flux(), [(adapter, -0.25)]), merged(base, output), 1e-6)


def test_dialect_refuses_what_it_cannot_hold(folder: Path, tmp_path: Path) -> None:
    base, output = folder / "flux.safetensors", tmp_path / "out.safetensors"
    with pytest.raises(FitError, match="cannot hold loha"):
        lora_merge.convert(folder / "flux-loha.safetensors", output, to="diffusers", base=base)
    with pytest.raises(FitError, match="no product of two small factors"):
        lora_merge.convert(folder / "flux-dora.safetensors", output, to="kohya", base=base, algorithm="lora")
    with pytest.raises(UsageError, match="one component"):
        lora_merge.convert(folder / "sd1-lora.safetensors", tmp_path / "p", to="peft", base=folder / "sd1.safetensors")
    with pytest.raises(UsageError, match="does not exist"):
        lora_merge.convert(folder / "flux-lora.safetensors", output, to="sdnext", base=base)
    assert not output.exists()


PAIRS = [
    *(("flux-dev", "flux-dev"), ("sdxl", "sdxl"), ("sd3", "sd3"), ("zimage-fused", "zimage"), ("mochi", "mochi")),
    *(("wan-i2v-14B", "wan-i2v-14B"), ("cascade-c", "cascade-c"), ("sd15", "sd15")),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("native", "diffusers"), PAIRS)
def test_names_do_not_depend_on_the_layout_of_the_base(native: str, diffusers: str) -> None:
    """A base of either layout gives the same modules with the same shapes, in the words of both."""
    for to in ("comfy", "diffusers"):
        one, other = (_layers(folder, name, to) for folder, name in (("native", native), ("diffusers", diffusers)))
        assert one == other


def _layers(folder: str, name: str, to: str) -> dict[str, tuple[int, ...]]:
    raw = json.loads(gzip.decompress((HEADERS / folder / f"{name}.json.gz").read_bytes()))
    shapes = {key: tuple(shape) for key, shape in raw.items()}
    names = Names(components(shapes, {}, (), None), shapes)
    return {p.prefix + p.module: p.view.shape for p in places(names, DIALECTS[to]) if len(p.view.shape) > 1}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_loads_the_folder_without_missing_or_unexpected_keys(tmp_path: Path) -> None:
    """Also where ranks differ between layers; the model then computes what the merged one does."""
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    tensors: Tensors = {}
    for n, layer in enumerate(("0.self_attn.q_proj", "1.mlp.gate_proj", "1.self_attn.v_proj")):
        out, cols = model.get_submodule(f"model.layers.{layer}").weight.shape
        name = f"lora_te_model_layers_{layer.replace('.', '_')}"
        tensors |= {f"{name}.lora_up.weight": rand(out, 2 + n, seed=n), f"{name}.alpha": torch.tensor(1.0)}
        tensors |= {f"{name}.lora_down.weight": rand(2 + n, cols, seed=n + 9)}
    save_file(tensors, tmp_path / "kohya.safetensors")
    lora_merge.convert(tmp_path / "kohya.safetensors", tmp_path / "peft", to="peft", base=tmp_path / "base")
    ids = torch.arange(8)[None]
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "peft"))  # PEFT warns of missing keys, an error here
    with torch.no_grad():
        seen = loaded(ids).logits
        loaded.unload()
        state = lora_merge.merge_state_dict(model.state_dict(), [tmp_path / "kohya.safetensors"])
        model.load_state_dict(state)
        assert torch.allclose(seen, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("strength", [1, -0.5])
def test_scale_of_a_configuration_alone_goes_into_the_copy(folder: Path, tmp_path: Path, strength: float) -> None:
    """LoKr and LoHa of PEFT keep α in adapter_config.json; the other dialects store it. LoKr of two whole factors is
    read without α: a factor holds the scale. LyCORIS loads no module without one."""
    model = folder / "flux.safetensors"
    base = load_file(model)
    layer = "double_blocks.0.img_attn.proj"
    out, width = base[f"{layer}.weight"].shape
    factors = {
        "LOKR": {"lokr_w1": (4, 4), "lokr_w2_a": (out // 4, 2), "lokr_w2_b": (2, width // 4)},
        "LOHA": {"hada_w1_a": (out, 2), "hada_w1_b": (2, width), "hada_w2_a": (out, 2), "hada_w2_b": (2, width)},
        "LOKR of whole factors": {"lokr_w1": (4, 4), "lokr_w2": (out // 4, width // 4)},
    }
    for method, shapes in factors.items():
        (source := tmp_path / method).mkdir()
        name = f"base_model.model.{layer}"
        tensors = {f"{name}.{last}": rand(*shape, seed=n) for n, (last, shape) in enumerate(shapes.items())}
        save_file(tensors, source / "adapter_model.safetensors")
        config = {"peft_type": method[:4], "r": 2, "alpha": 8, "target_modules": ["proj"]}
        (source / "adapter_config.json").write_text(json.dumps(config))
        output = tmp_path / f"{method}.safetensors"
        told = lora_merge.convert((source, strength), output, to="kohya", base=model).notes
        assert any("in one of their factors" in note for note in told) == (method not in ("LOKR", "LOHA"))
        assert any(key.endswith(".alpha") for key in load_file(output))
        wanted = lora_merge.merge_state_dict(base, [(source, strength)], compute_dtype="fp64")
        check(wanted, lora_merge.merge_state_dict(base, [output], compute_dtype="fp64"), 1e-6)


def test_conversion_is_reproduced_and_proven_from_its_recipe(folder: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    lora_merge.convert(folder / "flux-lora.safetensors", out, to="peft", base=folder / "flux.safetensors",
                       include=["transformer"])  # fmt: skip
    for step in (("verify", out, "--search", folder), ("replay", out, "-o", again, "--search", folder)):
        code, _, told = run(*step)
        assert code == 0, told
    assert all((again / made.name).read_bytes() == made.read_bytes() for made in out.iterdir())


def test_rules_for_kernels_and_parts_hold_for_conversions(folder: Path, tmp_path: Path) -> None:
    base, adapter = folder / "sd1.safetensors", folder / "sd1-lora.safetensors"
    output = tmp_path / "a.safetensors"
    code, _, told = run("convert", adapter, "-o", output, "--to", "lycoris", "--base", base, "--rank", "3",
                            "--conv-rank", "2", "--rank-for", "re:attn2=1", "--alpha", "rank")  # fmt: skip
    assert code == 0, told
    for name, down in load_file(output).items():
        if name.endswith(".lora_down.weight"):
            wanted = 1 if "attn2" in name else 2 if down.ndim == 4 and down.shape[-1] > 1 else 3
            assert down.shape[0] == wanted, name
            assert float(load_file(output)[name.replace("lora_down.weight", "alpha")]) == wanted
    shared = lora_merge.convert(adapter, tmp_path / "b.safetensors", to="kohya", base=base, rank="size:8kB")
    factors = load_file(tmp_path / "b.safetensors")
    assert 7000 < sum(t.nbytes for n, t in factors.items() if not n.endswith("alpha")) <= 8000
    assert len({layer["rank"] for layer in shared.layers.values()}) > 1


@pytest.mark.parametrize("bias", [(H,), None])
def test_peft_has_bias_factors_for_all_layers_or_for_none(tmp_path: Path, bias: tuple[int, ...] | None) -> None:
    """Where a layer's bias does not change its factor is zero, and also where it has none, such as Qwen 2's o_proj."""
    base = {"model.layers.0.mlp.up_proj.weight": rand(H, H), "model.layers.0.mlp.up_proj.bias": rand(H),
            "model.layers.0.mlp.down_proj.weight": rand(H, H, seed=1)}  # fmt: skip
    base |= {"model.layers.0.mlp.down_proj.bias": rand(*bias)} if bias else {}
    adapter = {}
    for name in ("up_proj", "down_proj"):
        adapter[f"diffusion_model.model.layers.0.mlp.{name}.lora_up.weight"] = rand(H, 2, seed=3)
        adapter[f"diffusion_model.model.layers.0.mlp.{name}.lora_down.weight"] = rand(2, H, seed=4)
    adapter["diffusion_model.model.layers.0.mlp.up_proj.diff_b"] = rand(H, seed=5)
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "a.safetensors")
    lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "o", to="peft", base=tmp_path / "base.safetensors")
    check(merged(tmp_path / "base.safetensors", tmp_path / "a.safetensors"),
          merged(tmp_path / "base.safetensors", tmp_path / "o"), 1e-6)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("to", [name for name, row in DIALECTS.items() if not (row.folder or row.table)])
@pytest.mark.parametrize("stem", ["model.layers.{}.self_attn.q_proj", "stack.{}.lin"])
def test_names_of_language_models_and_of_unknown_models_lead_back_to_them(stem: str, to: str, tmp_path: Path) -> None:
    base = {f"{stem.format(n)}.weight": rand(H, H, seed=n) for n in range(2)}
    base |= {"model.embed_tokens.weight": rand(4, H), "model.norm.weight": rand(H)} if "model" in stem else {}
    ends = {"lora_A": (2, H), "lora_B": (H, 2)}
    lora = {f"base_model.model.{stem.format(n)}.{end}.weight": rand(*shape, seed=n + 5)
            for n in range(2) for end, shape in ends.items()}  # fmt: skip
    save_file(base, tmp_path / "base.safetensors")
    save_file(lora, tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.convert(tmp_path / "lora.safetensors", out, to=to, base=tmp_path / "base.safetensors")
    want, got = (merged(tmp_path / "base.safetensors", tmp_path / f"{name}.safetensors") for name in ("lora", "out"))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_factors_of_more_columns_than_the_weight_has_ranks_are_exact_ones(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """As rank 128 on the layer that lets the 64 channels of Flux in."""
    out, cols = shape
    tensors = {"lora_unet_a.lora_up.weight": rand(out, 6), "lora_unet_a.lora_down.weight": rand(6, cols),
               "lora_unet_a.alpha": torch.tensor(3.0)}  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    wanted = 0.5 * tensors["lora_unet_a.lora_up.weight"] @ tensors["lora_unet_a.lora_down.weight"]
    for made in (lora_merge.convert, lambda *paths: lora_merge.combine([paths[0], (paths[0], 1.0)], paths[1])):
        made(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        found = load_file(tmp_path / "b.safetensors")
        up, down = (found[f"lora_unet_a.lora_{side}.weight"] for side in ("up", "down"))
        scale = float(found["lora_unet_a.alpha"]) / len(down)
        assert len(down) == 3
        times = 1 if made is lora_merge.convert else 2
        assert torch.allclose(scale * up @ down, times * wanted, atol=1e-6)
        (tmp_path / "b.safetensors").unlink()


@pytest.mark.slow
def test_folder_is_replaced_by_a_folder_and_takes_a_file_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    base, lora = folder / "sd1.safetensors", folder / "sd1-lora.safetensors"
    for _ in range(2):
        lora_merge.convert(lora, tmp_path / "peft", to="peft", base=base, include=["unet"], overwrite=True)
        lora_merge.resize(lora, tmp_path / "cut", rank=1, format="peft", base=base, include=["unet"], overwrite=True)
        lora_merge.combine([lora, lora], tmp_path, base=base, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"peft", "cut", "sd1-lora+sd1-lora.safetensors"}
    lora_merge.convert(lora, tmp_path, to="comfy", base=base, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} >= {"peft", "cut", "sd1-lora.comfy.safetensors"}


@pytest.mark.parametrize("to", ["comfy", "lycoris", "diffusers"])
def test_factors_that_stay_keep_every_bit(folder: Path, tmp_path: Path, to: str) -> None:
    own = load_file(folder / "sd1-lora.safetensors")
    downs = [name for name in own if name.endswith("lora_down.weight")]
    for name in downs:
        own[name].view(-1)[0] = -0.0  # equal to zero, but not the same bits
    save_file(own, tmp_path / "in.safetensors")
    run("convert", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--to", to,
               "--base", folder / "sd1.safetensors")  # fmt: skip
    stored = load_file(tmp_path / "out.safetensors")
    bits = {tuple(t.reshape(-1).view(torch.uint8).tolist()) for t in stored.values()}
    assert {tuple(own[name].reshape(-1).view(torch.uint8).tolist()) for name in downs} <= bits


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
@pytest.mark.parametrize(
    "options",
    [{"to": "comfy"}, {"to": "diffusers"}, {"to": "kohya", "dtype": "fp16"}, {"to": "kohya", "algorithm": "full"},
     {"to": "diffusers", "rank": 2, "dtype": "bf16"}, {"to": "comfy", "rank": 1, "alpha": 3}],
)  # fmt: skip
def test_plan_shows_the_tensors_of_the_file(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    base, adapter, out = (tmp_path / f"{name}.safetensors" for name in ("base", "adapter", "out"))
    save_file(flux(), base)
    save_file(of_flux(**({} if kind == "lora" else {kind: True})), adapter)
    task = COMMANDS["convert"].job([adapter], out, base, {**options, "overwrite": True})
    if kind == "loha" and options == {"to": "diffusers"}:
        for refused in (lambda: plan(task), lambda: lora_merge.convert(adapter, out, base=base, **options)):
            with pytest.raises(FitError, match="cannot hold loha"):
                refused()
        return
    found = opened(task, CheckpointCache())
    planned = {name: (dtype, shape) for one in planned_modules(found) for name, dtype, shape in one.rows(found.to)}
    made = lora_merge.convert(adapter, out, base=base, **options)
    stored = open_checkpoint(out).tensors
    assert planned == {name: (info.dtype, info.shape) for name, info in stored.items()}
    told = plan(task)
    assert told.dtype == made.dtype
    assert {name: one["rank"] for name, one in told.layers.items()} == {
        n: one["rank"] for n, one in made.layers.items()
    }


@pytest.mark.parametrize("to", ["diffusers", "lycoris"])
def test_magnitudes_of_dora_are_rounded_and_the_loss_is_reported(to: str, tmp_path: Path) -> None:
    """They are near the norms of the weight's rows, so that a small change loses more than its factors do."""
    key, name = "single_blocks.0.linear2.weight", "lora_unet_single_blocks_0_linear2"
    base, out = flux(), tmp_path / "out.safetensors"
    own = {n: v for n, v in of_flux().items() if n.startswith(f"{name}.")}
    own[f"{name}.lora_up.weight"] *= 0.01
    own[f"{name}.dora_scale"] = base[key].norm(dim=1, keepdim=True) * 1.001
    save_file(base, tmp_path / "base.safetensors")
    save_file(own, tmp_path / "a.safetensors")
    report = lora_merge.convert(
        tmp_path / "a.safetensors", out, to=to, base=tmp_path / "base.safetensors", dtype="bf16"
    )
    one, other = (
        merged(tmp_path / "base.safetensors", path)[key] - base[key] for path in (tmp_path / "a.safetensors", out)
    )
    assert report.residual == pytest.approx(float((one - other).norm() / one.norm()), rel=1e-3)
    assert report.residual > 1e-2


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("largest", [6e4, 1e5, -1e5])
@pytest.mark.parametrize("options", [{}, {"rank": "energy:1"}, {"algorithm": "full"}], ids=str)
def test_numbers_too_large_for_the_dtype_of_a_conversion_are_refused(
    dtype: str, largest: float, options: dict[str, Any], tmp_path: Path
) -> None:
    """fp16 holds numbers up to 65504; nothing is written if one is larger, and no other number is refused."""
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    base = save(sd1(torch.float32), tmp_path / "base.safetensors")
    shapes = {k: t.shape for k, t in kohya(sd1()).items() if k.startswith(name)}
    up, down = torch.zeros(shapes[f"{name}.lora_up.weight"]), torch.zeros(shapes[f"{name}.lora_down.weight"])
    up[2, 0], down[0, 3] = (largest, 1.0) if "rank" not in options else (largest, largest)  # balanced where it is cut
    tensors = {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down, f"{name}.alpha": torch.tensor(4.0)}
    source = save(tensors, tmp_path / "a.safetensors")
    output = tmp_path / "out.safetensors"
    scaled = "rank" not in options and "algorithm" not in options  # copied factors share one scale: the other takes it
    if dtype == "fp16" and abs(largest) > 65504 and not scaled:
        with pytest.raises(TooLarge, match="too large for the dtype"):
            lora_merge.convert(source, output, to="lycoris", base=base, dtype=dtype, **options)
        assert not output.exists()
        return
    lora_merge.convert(source, output, to="lycoris", base=base, dtype=dtype, **options)
    assert all(t.isfinite().all() for t in load(output).values())
    weight = torch.zeros(up.shape[0], down.shape[1])
    adapters = [lora_merge.load_adapter(path) for path in (output, source)]
    made, wanted = (adapter.delta(adapter.modules[0], weight) for adapter in adapters)
    torch.testing.assert_close(made, wanted, rtol=2e-3, atol=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"format": "diffusers"}, {"dtype": "fp32", "format": "comfy"}], ids=str)
@pytest.mark.parametrize(("command", "rank"), [("resize", 1), ("resize", 3), ("combine", 2)])
def test_reported_energy_is_the_share_of_the_squares_that_is_written(
    command: str, rank: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of each layer, of its block, and of all: Σ of the largest σ² by all σ², by numpy; also in two steps."""
    base = save(sd1(torch.float32), tmp_path / "base.safetensors")
    source = save({n: t.float() for n, t in kohya(sd1(torch.float32), rank=4).items()}, tmp_path / "a.safetensors")
    tensors, squares = load(source), dict[str, tuple[float, float]]()
    for name in (n.removesuffix(".lora_up.weight") for n in tensors if n.endswith(".lora_up.weight")):
        up, down = (tensors[f"{name}.lora_{k}.weight"].double().flatten(1).numpy() for k in ("up", "down"))
        values = np.linalg.svd(up @ down, compute_uv=False) ** 2
        squares[name] = values[:rank].sum(), values.sum()
    write = lora_merge.combine if command == "combine" else lora_merge.resize
    report = write(source, tmp_path / "out.safetensors", rank=rank, base=base, **options)
    wanted = sorted(kept / every for kept, every in squares.values())
    assert sorted(one["energy"] for one in report.layers.values()) == pytest.approx(wanted, abs=1e-5)
    for one in report.layers.values():
        assert one["energy"] == pytest.approx(1 - one["residual"] ** 2, abs=1e-12)
    kept, every = map(sum, zip(*squares.values(), strict=True))
    assert report.energy == pytest.approx(kept / every, abs=1e-5)
    assert report.residual == pytest.approx(max(0.0, 1 - report.energy) ** 0.5, abs=1e-9)
    assert report.numbers["all"]["energy"] == pytest.approx(report.energy, abs=1e-9)
    assert f"survives: {spoken(report.energy)} of the change" in report.summary
    for kind in ("components", "blocks"):
        rows = report.numbers[kind].values()
        total = sum(row["norm"] ** 2 for row in rows)
        assert sum(row["norm"] ** 2 * row["energy"] for row in rows) / total == pytest.approx(kept / every, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"format": "diffusers"}], ids=str)
def test_reported_energy_is_that_of_both_steps_where_the_first_one_cuts(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A sum of the ranks 4 and 2 is cut to 4; the second step keeps the ranks of the first one."""
    base = save(sd1(torch.float32), tmp_path / "base.safetensors")
    files, changes = list[Path](), dict[str, Any]()
    for rank in (4, 2):
        tensors = {n: t.float() for n, t in kohya(sd1(torch.float32), rank=rank).items()}
        tensors |= {n: torch.tensor(float(rank)) for n in tensors if n.endswith(".alpha")}
        files.append(save(tensors, tmp_path / f"{rank}.safetensors"))
        for name in (n.removesuffix(".lora_up.weight") for n in tensors if n.endswith(".lora_up.weight")):
            up, down = (tensors[f"{name}.lora_{k}.weight"].double().flatten(1).numpy() for k in ("up", "down"))
            changes[name] = changes.get(name, 0.0) + up @ down
    squares = [np.linalg.svd(change, compute_uv=False) ** 2 for change in changes.values()]
    wanted = sorted(one[:4].sum() / one.sum() for one in squares)
    report = lora_merge.combine(files, tmp_path / "out.safetensors", rank="same", base=base, **options)
    assert wanted[0] < 0.98
    assert sorted(one["energy"] for one in report.layers.values()) == pytest.approx(wanted, abs=1e-5)
    lost = sorted(1 - one["residual"] ** 2 for one in report.layers.values())
    assert lost == pytest.approx(wanted, abs=1e-5)
    kept = sum(one[:4].sum() for one in squares) / sum(one.sum() for one in squares)
    assert (report.energy, report.numbers["all"]["energy"]) == pytest.approx((kept, kept), abs=1e-5)
