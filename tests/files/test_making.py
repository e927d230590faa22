"""New quantised weights: plain numbers are merged and quantised in one pass, and a library reads the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.files.checkpoint import open_checkpoint

from ..support import Tensors, load, rand, save
from .quantised_forms import FORMS, SHAPE, Form

NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
KEPT = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight"

FILE = {
    "fp8_scaled": FORMS["ComfyUI fp8 rows"], "int8": FORMS["ComfyUI int8 rows"], "mxfp8": FORMS["ComfyUI mxfp8"],
    "nvfp4": FORMS["ComfyUI nvfp4"],
}  # fmt: skip
FOLDER = {
    "fp8_block": FORMS["block fp8"], "int8": FORMS["bitsandbytes int8"], "nf4": FORMS["bitsandbytes nf4"],
}  # fmt: skip


def base(folder: Path, *, config: bool = False) -> tuple[Path, Tensors]:
    """Three layers, the last one unchanged; a block, a row and a tile of zeros; one large number."""
    found: Tensors = {KEPT[0]: rand(8).bfloat16(), **{name: rand(64, 64).bfloat16() for name in KEPT[1:]}}
    for number, layer in enumerate(NAMES):
        weight = rand(*SHAPE, seed=number, scale=0.02)
        weight[3] = 0
        weight[128:, 128:] = 0
        weight[7, 9] = 0.5
        found[f"{layer}.weight"] = weight.bfloat16()
    found[f"{NAMES[2]}.weight"] *= 1e-6
    folder.mkdir()
    if config:
        told = {"model_type": "x", "torch_dtype": "bfloat16", "architectures": ["X"]}
        (folder / "config.json").write_text(json.dumps(told))
    file = save(found, folder / "model.safetensors")
    return folder if config else file, found


def adapter(path: Path) -> tuple[Path, Tensors]:
    """An adapter of the first two layers, which leaves a row of zeros, and the sum of base and adapter without it."""
    found, changes = {}, {}
    for number, layer in enumerate(NAMES[:2]):
        up, down = rand(SHAPE[0], 4, seed=20 + number, scale=0.01), rand(4, SHAPE[1], seed=10 + number)
        up[3] = 0
        up[128:] = 0
        found |= {f"base_model.model.{layer}.lora_A.weight": down, f"base_model.model.{layer}.lora_B.weight": up}
        changes[layer] = up.double() @ down.double()
    return save(found, path), changes


def parts(tensors: Tensors, layer: str) -> Tensors:
    return {key.removeprefix(f"{layer}."): value for key, value in tensors.items() if key.startswith(f"{layer}.")}


def as_kitchen(found: Tensors) -> Tensors:
    """The scales of mxfp8 as the library wants them; files hold their bytes."""
    scale = found.get("weight_scale")
    if scale is None or scale.dtype != torch.uint8:
        return found
    return found | {"weight_scale": scale.view(torch.float8_e8m0fnu)}


def half_steps(form: Form, found: Tensors, want: Tensor) -> float:
    half = form.half_step(found, want) + form.slack * want.abs()
    return float(((form.read(found).double() - want).abs() / half.clamp(min=1e-15)).max())


@pytest.mark.parametrize(("name", "form"), FILE.items())
def test_a_file_is_quantised_as_comfyui_reads_it(name: str, form: Form, tmp_path: Path) -> None:
    source, tensors = base(tmp_path / "base")
    lora, changes = adapter(tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    report = lora_merge.merge(source, lora, out, dtype=name)
    made = load(out)
    for layer in NAMES:
        want = tensors[f"{layer}.weight"].double() + changes.get(layer, 0)
        found = parts(made, layer)
        told = json.loads(bytes(found.pop("comfy_quant").tolist()))
        assert told["format"] == form.note["format"]
        assert half_steps(form, as_kitchen(found), want) <= 1.001
        own = form.make(want.float()) if name != "fp8_scaled" else {"weight_scale": (want.abs().max() / 448).float()}
        for last in own.keys() - {"weight"}:
            scales = (t[last].reshape(-1).view(torch.uint8 if t[last].element_size() == 1 else torch.float32).double()
                      for t in (found, own))  # fmt: skip
            pairs = torch.stack([*scales], 1)
            ours, theirs = pairs[(pairs > 1e-29).all(1)].unbind(1)  # which scale a block of zeros has does not matter
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=float(found[last].element_size() == 1))
    assert all(torch.equal(made[name], tensors[name]) for name in KEPT)
    assert report.verified is not None
    assert report.changed == report.verified["tensors"] == 2
    assert {*open_checkpoint(out).packed} == {f"{layer}.weight" for layer in NAMES}
    with out.open("rb") as f:
        data = 8 + int.from_bytes(f.read(8), "little")
    infos = open_checkpoint(out).headers[out].tensors.values()
    assert all((i.offset - data) % min(i.nbytes // max(torch.Size(i.shape).numel(), 1), 8) == 0 for i in infos)


@pytest.mark.parametrize(("name", "form"), FOLDER.items())
def test_a_folder_is_quantised_as_transformers_reads_it(name: str, form: Form, tmp_path: Path) -> None:
    source, tensors = base(tmp_path / "base", config=True)
    lora, changes = adapter(tmp_path / "lora.safetensors")
    out = tmp_path / "out"
    report = lora_merge.merge(source, lora, out, dtype=name)
    made = load(out / "model.safetensors")
    for layer in NAMES:
        want = tensors[f"{layer}.weight"].double() + changes.get(layer, 0)
        found = parts(made, layer)
        assert half_steps(form, found, want) <= 1.001
        own = form.make(want.float())
        assert own.keys() == found.keys()
        for last in own:
            assert (own[last].dtype, own[last].shape) == (found[last].dtype, found[last].shape) or "quant_state" in last
    assert all(torch.equal(made[name], tensors[name]) for name in KEPT)
    told = json.loads((out / "config.json").read_text())
    section = told.pop("quantization_config")
    assert told == json.loads((source / "config.json").read_text())
    assert section["quant_method"] == form.config["quant_method"]
    kept = section.get("modules_to_not_convert", section.get("llm_int8_skip_modules"))
    assert kept == ["lm_head", "model.embed_tokens"]
    assert report.verified is not None
    assert {*open_checkpoint(out).packed} == {f"{layer}.weight" for layer in NAMES}
    assert lora_merge.verify(out)["tensors"] == 2
