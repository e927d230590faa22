"""What no format reads is refused by its name; what is read is not refused for what is beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError
from tests.files import quantised_forms
from tests.files.quantised_forms import FORMS, FP8, note
from tests.kit.files import load, save
from tests.kit.quantised import parts, same
from tests.kit.tensors import Tensors, rand

LAYER = "model.layers.0.self_attn.q_proj"


def base(folder: Path, tensors: Tensors, section: dict[str, Any] | None) -> Path:
    folder.mkdir()
    file = save(tensors, folder / "model.safetensors")
    if section is None:
        return file
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": section}))
    return folder


def adapter(path: Path, rows: int = 64, cols: int = 64) -> Path:
    stem = f"base_model.model.{LAYER}.lora"
    return save({f"{stem}_A.weight": rand(4, cols, seed=1), f"{stem}_B.weight": rand(rows, 4, seed=2)}, path)


WORDS = torch.zeros(8, 64, dtype=torch.int32)
BYTES = torch.zeros(64, 64, dtype=torch.uint8)
NAMED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "quark": ({"quant_method": "quark"}, {"weight": BYTES.to(FP8), "weight_scale": torch.tensor(1.0)}, "quark, it has"),
    "bitnet": ({"quant_method": "bitnet"}, {"weight": BYTES, "weight_scale": torch.ones(1)}, "bitnet, it has"),
    "fp_quant": ({"quant_method": "fp_quant"}, {"qweight": BYTES, "scales": BYTES}, "fp_quant, it has"),
    "auto-round's own order": (
        {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}, {"qweight": WORDS},
        r"auto-round \(packing_format: auto_round:gptqmodel\)",
    ),
    "AWQ for another kernel": ({"quant_method": "awq", "version": "gemv"}, {"qweight": WORDS}, r"AWQ \(version: gemv\)"),
    "GPTQ for another kernel": (
        {"quant_method": "gptq", "checkpoint_format": "marlin"}, {"qweight": WORDS}, r"\(checkpoint_format: marlin\)",
    ),
    "sparse weights": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"weight": BYTES.to(FP8), "weight_scale": torch.ones(64, 1)}, r"\(sparse: sparse-24-bitmask\)",
    ),
    "vptq": ({"quant_method": "vptq"}, {"centroids.weight": torch.ones(1, 8)}, "vptq, says its config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_format_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    section, layer, what = NAMED[name]
    source = base(tmp_path / "base", {f"{LAYER}.{last}": value.clone() for last, value in layer.items()}, section)
    with pytest.raises(InputError, match=f"the base is quantised: .*{what}"):
        lora_merge.merge(source, adapter(tmp_path / "lora.safetensors"), tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_svdquant_says_that_nunchaku_needs_no_merge(tmp_path: Path) -> None:
    layer = {
        "qweight": torch.zeros(64, 32, dtype=torch.int8),
        "wscales": torch.ones(1, 64),
        "smooth_factor": torch.ones(64),
    }
    layer |= {"proj_down": rand(64, 32), "proj_up": rand(64, 32, seed=1)}
    file = base(tmp_path / "base", {f"{LAYER}.{last}": value for last, value in layer.items()}, None)
    with pytest.raises(InputError, match="quantised: SVDQuant") as caught:
        lora_merge.merge(file, adapter(tmp_path / "lora.safetensors"), tmp_path / "out.safetensors")
    assert "without a merge" in caught.value.fix


@pytest.mark.parametrize("name", ["ComfyUI int8 rows", "ComfyUI mxfp8", "ComfyUI fp8 rows"])
def test_factors_of_inputs_that_a_format_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    """They are a part of the weight (rule 1.5), and its numbers without them are others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (64, 64))
        layer = (
            FORMS[name].make(rand(64, 64, scale=0.02)) | note(FORMS[name]) | {"pre_quant_scale": torch.full((64,), 2.0)}
        )
    source = base(tmp_path / "base", {f"{LAYER}.{last}": value.clone() for last, value in layer.items()}, None)
    with pytest.raises(InputError, match="factors of its inputs"):
        lora_merge.merge(source, adapter(tmp_path / "lora.safetensors"), tmp_path / "out.safetensors", dtype="bf16")


@pytest.mark.parametrize("name", ["ComfyUI fp8 rows", "ComfyUI mxfp8", "ComfyUI nvfp4"])
def test_rotation_of_a_format_that_has_none_is_refused(name: str, tmp_path: Path) -> None:
    """Other programs write such files; what is folded in the stored basis loads, runs and is wrong (rule 1.5)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (64, 64))
        layer = FORMS[name].make(rand(64, 64, scale=0.02))
    mark = json.dumps({**(FORMS[name].note or {}), "params": {"convrot": True, "convrot_groupsize": 64}}).encode()
    layer |= {"comfy_quant": torch.tensor(list(mark), dtype=torch.uint8)}
    source = base(tmp_path / "base", {f"{LAYER}.{last}": value.clone() for last, value in layer.items()}, None)
    with pytest.raises(InputError, match="quantised"):
        lora_merge.merge(source, adapter(tmp_path / "lora.safetensors"), tmp_path / "out.safetensors", dtype="bf16")


def test_scales_of_a_cache_are_kept_and_no_part_of_a_plain_model(tmp_path: Path) -> None:
    form, module = FORMS["ModelOpt fp8"], LAYER.removesuffix("q_proj")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (64, 64))
        layer = {f"{LAYER}.{last}": value for last, value in form.make(rand(64, 64, scale=0.02)).items()}
    caches = {f"{module}k_proj.k_scale": torch.tensor(0.5), f"{module}v_scale": torch.ones(1).bfloat16()}
    norms = {f"{module}q_norm.weight": rand(64), f"{module}k_proj.logit_scale": torch.tensor(2.0)}
    source = base(tmp_path / "base", {**layer, **caches, **norms}, dict(form.config))
    lora = adapter(tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, tmp_path / "kept")
    kept = load(tmp_path / "kept" / "model.safetensors")
    assert all(same(kept[key], value) for key, value in caches.items())
    lora_merge.merge(source, lora, tmp_path / "plain", dtype="bf16")
    assert {*load(tmp_path / "plain" / "model.safetensors")} == {f"{LAYER}.weight", *norms}


def test_layers_of_modelopt_may_have_several_formats(tmp_path: Path) -> None:
    layers = {LAYER: FORMS["ModelOpt fp8"], LAYER.replace("q_proj", "o_proj"): FORMS["ModelOpt nvfp4"]}
    tensors: Tensors = {}
    want: Tensors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (64, 64))
        for n, (name, form) in enumerate(layers.items()):
            found = form.make(rand(64, 64, seed=n, scale=0.02))
            tensors |= {f"{name}.{last}": value for last, value in found.items()}
            want[name] = form.read(found).double()
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    source, lora = base(tmp_path / "base", tensors, section), adapter(tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, tmp_path / "plain", dtype="fp32")
    down, up = load(lora).values()
    want[LAYER] += up.double() @ down.double()
    plain = load(tmp_path / "plain" / "model.safetensors")
    for name in layers:
        torch.testing.assert_close(plain[f"{name}.weight"].double(), want[name], rtol=1e-6, atol=1e-7)
    lora_merge.merge(source, lora, tmp_path / "kept")
    kept = load(tmp_path / "kept" / "model.safetensors")
    assert all(same(kept[key], tensors[key]) for key in tensors if "o_proj" in key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (64, 64))
        made = parts(kept, LAYER)
        half = layers[LAYER].half_step(made, want[LAYER])
        assert ((layers[LAYER].read(made).double() - want[LAYER]).abs() <= 1.001 * half).all()


def test_nvfp4_without_a_mark_says_what_would_show_its_order(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (128, 64))
        layer = FORMS["ComfyUI nvfp4"].make(rand(128, 64, scale=0.02))
    source = base(tmp_path / "base", {f"{LAYER}.{last}": value.clone() for last, value in layer.items()}, None)
    with pytest.raises(InputError, match="nvfp4 without a mark") as caught:
        lora_merge.merge(source, adapter(tmp_path / "lora.safetensors", 128), tmp_path / "o.safetensors", dtype="bf16")
    assert "comfy_quant" in caught.value.fix


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [0.005, 5.0])
@pytest.mark.parametrize("rows", [128, 160])
@pytest.mark.parametrize("name", ["ComfyUI mxfp8", "ComfyUI nvfp4", "ComfyUI nvfp4 with one scale"])
def test_banks_of_experts_are_merged(name: str, rows: int, size: float, tmp_path: Path) -> None:
    """ComfyUI stacks what comfy-kitchen makes of each expert; large changes need new scales of whole weights."""
    form, bank, shared = FORMS[name.partition(" with")[0]], "blocks.0.experts.w1", name.endswith("one scale")
    weights = [rand(rows, 64, seed=n, scale=0.02 * (1 if shared else n + 1)) for n in range(3)]
    for weight in weights if shared else ():
        weight[0, 0] = 0.1  # the largest of each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", (rows, 64))
        experts = [form.make(weight) for weight in weights]
        found = {f"{bank}.{last}": torch.stack([e[last] for e in experts]) for last in experts[0]}
        if shared:
            found[f"{bank}.weight_scale_2"] = experts[0]["weight_scale_2"]
        mark = json.dumps({**(form.note or {}), "num_experts": 3}).encode()
        found[f"{bank}.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
        source, change = base(tmp_path / "base", found, None), torch.zeros(3, rows, 64)
        change[1] = rand(rows, 64, seed=9, scale=size)
        lora, out = save({f"{bank}.diff": change}, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
        if rows % 128 and shared:
            with pytest.raises(InputError, match="quantised"):
                lora_merge.merge(source, lora, out)
            return
        lora_merge.merge(source, lora, out)
        assert lora_merge.verify(out, full=True)["full"]
        lora_merge.merge(source, lora, tmp_path / "drawn.safetensors", rounding="stochastic")
        assert lora_merge.verify(tmp_path / "drawn.safetensors", full=True)["full"]
        lora_merge.merge(source, lora, tmp_path / "plain.safetensors", dtype="fp32")
        made, plain = load(out), load(tmp_path / "plain.safetensors")[f"{bank}.weight"]
        for n, expert in enumerate(experts):
            want = form.read(expert).double() + change[n].double()
            torch.testing.assert_close(plain[n].double(), want, rtol=1e-6, atol=1e-7)
            own = {last: t[n] if t.dim() > 2 or t.shape == (3,) else t for last, t in parts(made, bank).items()}
            half = form.half_step(own, want)
            assert ((form.read(own).double() - want).abs() <= 1.001 * half + 1e-12).all()
            assert n == 1 or (shared and size > 1) or torch.equal(form.read(own), form.read(expert))
