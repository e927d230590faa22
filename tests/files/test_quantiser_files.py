"""What side files tell: ModelOpt's own file, and what was done to a model before it was quantised (rule 1.6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError
from tests.files.quantised_forms import FORMS
from tests.kit.files import load, save
from tests.kit.quantised import NAMES, adapter, base, exact, same
from tests.kit.tensors import rand


def folder(tmp_path: Path, name: str, **section: Any) -> Path:
    """A base whose config.json has other entries in its section."""
    source, _ = base(FORMS[name], tmp_path / "base")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= section
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("name", ["ModelOpt fp8", "ModelOpt nvfp4"])
def test_file_of_modelopt_alone_shows_the_format(name: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    algorithm = FORMS[name].config["quant_algo"]
    (source / "config.json").write_text('{"model_type": "x"}')
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "group_size": 16}}
    (source / "hf_quant_config.json").write_text(json.dumps(told))
    lora = save(adapter(), tmp_path / "lora.safetensors")
    report = lora_merge.merge(source, lora, tmp_path / "kept")
    assert report.verified is not None and report.verified["tensors"] == 2
    for file in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "kept" / file).read_bytes() == (source / file).read_bytes()
    lora_merge.merge(source, lora, tmp_path / "plain", dtype="fp32")
    made, want = load(tmp_path / "plain" / "model.safetensors"), exact(FORMS[name], tensors, NAMES[1])
    assert (made[f"{NAMES[1]}.weight"] - want).abs().max() <= want.abs().max() * 2.0**-6
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("name", "file", "told"),
    [
        ("GPTQ", "quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "damp_percent": 0.01}),
        ("AWQ", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_files_of_older_quantisers_show_the_format(name: str, file: str, told: dict[str, Any], tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    (source / "config.json").write_text('{"model_type": "x"}')
    (source / file).write_text(json.dumps(told))
    lora = save(adapter(), tmp_path / "lora.safetensors")
    report = lora_merge.merge(source, lora, tmp_path / "plain", dtype="fp32")
    made = load(tmp_path / "plain" / "model.safetensors")
    for layer in NAMES[:2]:
        torch.testing.assert_close(
            made[f"{layer}.weight"].double(), exact(FORMS[name], tensors, layer), rtol=1e-6, atol=1e-7
        )
    assert not (tmp_path / "plain" / file).exists()
    assert any("AWQ" in note for note in report.notes) == (name == "AWQ")
    (tmp_path / "plain" / file).write_text(json.dumps(told))  # left over beside plain numbers
    lora_merge.merge(tmp_path / "plain", lora, tmp_path / "again")


def test_modelopts_blocks_are_read(tmp_path: Path) -> None:
    source, tensors = base(FORMS["block fp8"], tmp_path / "base")
    found = {
        key.replace("weight_scale_inv", "weight_scale"): value[:, None, :, None] if "scale_inv" in key else value
        for key, value in tensors.items()
    }
    save({key: value.contiguous() for key, value in found.items()}, source / "model.safetensors")
    section = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    (source / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": section}))
    lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out", dtype="fp32")
    made = load(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(
        made[f"{NAMES[1]}.weight"].double(), exact(FORMS["block fp8"], tensors, NAMES[1]), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("how", ["AWQ", "ModelOpt nvfp4 with factors of inputs", "recipe"])
def test_base_whose_scales_were_moved_says_so(how: str, tmp_path: Path) -> None:
    source = folder(tmp_path, "compressed-tensors int4" if how == "recipe" else how)
    if how == "recipe":
        (source / "recipe.yaml").write_text("stage:\n  modifiers:\n    SmoothQuantModifier: {strength: 0.8}\n")
    report = lora_merge.merge(
        source, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out", dtype="bf16", verify=False
    )
    assert any(("SmoothQuant" if how == "recipe" else "AWQ") in note for note in report.notes)


def test_ordinary_quantised_base_says_nothing_of_it(tmp_path: Path) -> None:
    source = folder(tmp_path, "compressed-tensors int4")
    report = lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out", dtype="bf16")
    assert not any("moved" in note for note in report.notes)


@pytest.mark.parametrize("changed", [NAMES[0], "model.layers.9.self_attn.q_proj"])
def test_rotated_base_is_refused_also_for_its_plain_layers(changed: str, tmp_path: Path) -> None:
    source = folder(
        tmp_path, "compressed-tensors int4", transform_config={"config_groups": {"u": {"type": "hadamard"}}}
    )
    file = source / "model.safetensors"
    save({**load(file), "model.layers.9.self_attn.q_proj.weight": rand(8, 8).bfloat16()}, file)
    factors = {f"base_model.model.{changed}.lora_{x}.weight": rand(8, 8) for x in "AB"}
    with pytest.raises(InputError, match="rotated"):
        lora_merge.merge(source, save(factors, tmp_path / "lora.safetensors"), tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_factors_of_inputs_stay_as_they_are(tmp_path: Path) -> None:
    name = "ModelOpt nvfp4 with factors of inputs"
    source, tensors = base(FORMS[name], tmp_path / "base")
    lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out")
    made, key = load(tmp_path / "out" / "model.safetensors"), f"{NAMES[1]}.pre_quant_scale"
    assert same(made[key], tensors[key])
