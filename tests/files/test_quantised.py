"""Bases of which a part is quantised. Run: pytest tests/files/test_quantised.py"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.models import sd1
from tests.kit.oracles import assert_rounded, expected
from tests.kit.tensors import Tensors, rand

ATTENTION = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


def gpt_oss(folder: Path) -> Tensors:
    """Experts in MXFP4 with scales in the order of a kernel, which no format reads; all else in bf16."""
    folder.mkdir()
    base = {
        f"{ATTENTION}.weight": rand(16, 8, seed=1).bfloat16(),
        f"{EXPERTS}.gate_up_proj_blocks": torch.randint(0, 256, (4, 16, 1, 16), dtype=torch.uint8),
        f"{EXPERTS}.gate_up_proj_scales": torch.randint(0, 256, (4, 1, 16), dtype=torch.uint8),
        f"{EXPERTS}.gate_up_proj_bias": rand(4, 16, seed=2).bfloat16(),
        "model.layers.0.mlp.router.weight": rand(4, 8, seed=3).bfloat16(),
    }
    save(base, folder / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return base


def peft(path: Path, module: str) -> Path:
    lora = {
        f"base_model.model.{module}.lora_A.weight": rand(2, 8, seed=4),
        f"base_model.model.{module}.lora_B.weight": rand(16, 2, seed=5),
    }
    return save(lora, path)


def test_plain_weights_are_merged_and_quantised_ones_stay(tmp_path: Path) -> None:
    base = gpt_oss(tmp_path / "base")
    adapter = peft(tmp_path / "lora.safetensors", ATTENTION)
    report = lora_merge.merge(tmp_path / "base", [adapter], tmp_path / "out")
    assert any("MXFP4" in note for note in report.notes)
    out, lora = load(tmp_path / "out" / "model.safetensors"), load(adapter)
    down, up = lora.values()
    assert_rounded(out.pop(f"{ATTENTION}.weight"), base[f"{ATTENTION}.weight"].double() + up.double() @ down.double())
    assert all(torch.equal(out[key], base[key]) for key in out)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("module", [f"{EXPERTS}.0.up_proj", f"{EXPERTS}.gate_up_proj"])
def test_adapter_of_what_is_quantised_is_refused(tmp_path: Path, module: str) -> None:
    gpt_oss(tmp_path / "base")
    with pytest.raises(InputError, match="quantised: MXFP4") as caught:
        lora_merge.merge(tmp_path / "base", [peft(tmp_path / "lora.safetensors", module)], tmp_path / "out")
    assert module in caught.value.where
    assert not (tmp_path / "out").exists()


def test_value_for_what_is_quantised_is_refused(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "base")
    lora = load(peft(tmp_path / "lora.safetensors", ATTENTION))
    lora[f"base_model.model.{EXPERTS}.gate_up_proj_bias"] = rand(4, 16)
    with pytest.raises(InputError, match="quantised: MXFP4"):
        lora_merge.merge(tmp_path / "base", [save(lora, tmp_path / "more.safetensors")], tmp_path / "out")


def test_dtype_other_than_keep_is_refused(tmp_path: Path) -> None:
    """It would turn stored codes into numbers."""
    gpt_oss(tmp_path / "base")
    adapter = peft(tmp_path / "lora.safetensors", ATTENTION)
    with pytest.raises(InputError, match="quantised: MXFP4") as caught:
        lora_merge.merge(tmp_path / "base", [adapter], tmp_path / "out", dtype="fp16")
    assert 'dtype="keep"' in caught.value.fix


def test_quantised_text_encoder_beside_a_plain_unet(tmp_path: Path) -> None:
    plain = sd1()
    encoder = "text_encoders.t5xxl.transformer"
    codes = {
        f"{encoder}.scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
        f"{encoder}.encoder.block.0.layer.0.SelfAttention.q.weight": rand(8, 8).to(torch.float8_e4m3fn),
        f"{encoder}.encoder.block.0.layer.0.SelfAttention.q.scale_weight": torch.ones(1),
    }
    lora = kohya(plain, te=False)
    base = save(plain | codes, tmp_path / "base.safetensors")
    adapter = save(lora, tmp_path / "lora.safetensors")
    lora_merge.merge(base, [adapter], tmp_path / "out.safetensors")
    out, exact = load(tmp_path / "out.safetensors"), expected(plain, [(lora, 1.0)])
    for key in plain:
        assert_rounded(out[key], exact[key])
    for key, stored in codes.items():
        assert torch.equal(out[key].view(torch.uint8), stored.view(torch.uint8))


LAYER = "layers.0.attention.to_q"


def sdnq(path: Path, config: dict[str, object]) -> Tensors:
    """A transformer as SDNQ stores it: codes and their scales, but for the last layer; and its folder's config.json."""
    path.parent.mkdir(parents=True)
    stored = {
        f"{LAYER}.weight": rand(16, 8).to(torch.float8_e4m3fn),
        f"{LAYER}.scale": torch.full((16, 1), 0.01),
        "final.weight": rand(16, 8),
        "norm.weight": rand(8),
        "norm.scale": rand(8),
    }
    save(stored, path)
    (path.parent / "config.json").write_text(json.dumps(config))
    return stored


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "sdnq"}}], ids=["scales", "config"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_codes_beside_scales_are_quantised(tmp_path: Path, config: dict[str, object], *, pipeline: bool) -> None:
    """In a file by itself, and in a component of a pipeline; what else is there can be merged into."""
    folder = tmp_path / "base" / "transformer"
    sdnq(folder / "model.safetensors", config)
    (tmp_path / "base" / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "Model"]}))
    base, out = (tmp_path / "base", "out") if pipeline else (folder / "model.safetensors", "out.safetensors")
    refused = nullcontext() if pipeline and config else pytest.raises(InputError, match="quantised: SDNQ")
    with refused:  # only config.json says how the codes are meant
        lora_merge.plan(base, [peft(tmp_path / "lora.safetensors", LAYER)], tmp_path / out)
    lora_merge.plan(base, [peft(tmp_path / "other.safetensors", "final")], tmp_path / out)


@pytest.mark.parametrize("dtype", ["keep", "fp16"])
def test_component_whose_configuration_says_so_is_quantised(tmp_path: Path, dtype: str) -> None:
    """Its tensors may look like any others."""
    for part, config in {"transformer": {"quantization_config": {"quant_method": "x"}}, "vae": {}}.items():
        (tmp_path / "base" / part).mkdir(parents=True)
        save({f"{part}_in.weight": rand(16, 8)}, tmp_path / "base" / part / "model.safetensors")
        (tmp_path / "base" / part / "config.json").write_text(json.dumps(config))
    index = {part: ["diffusers", "Model"] for part in ("transformer", "vae")}
    (tmp_path / "base" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"quantised: x, says its .*, in transformer"):
        lora_merge.plan(tmp_path / "base", [peft(tmp_path / "a.safetensors", "transformer_in")], tmp_path / "out")
    adapter = peft(tmp_path / "b.safetensors", "vae_in")
    if dtype == "keep":
        lora_merge.plan(tmp_path / "base", [adapter], tmp_path / "out")
        return
    with pytest.raises(InputError, match="quantised: x"):
        lora_merge.plan(tmp_path / "base", [adapter], tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_adapter_in_fp8_is_read_and_one_of_codes_and_scales_is_refused(tmp_path: Path, kind: str) -> None:
    dtype = getattr(torch, kind)
    base = save({f"{LAYER}.weight": rand(16, 8, seed=1)}, tmp_path / "base.safetensors")
    lora = {key: value.to(dtype) for key, value in load(peft(tmp_path / "wide.safetensors", LAYER)).items()}
    lora_merge.merge(base, save(lora, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors")
    down, up = (value.double() for value in lora.values())
    assert_rounded(
        load(tmp_path / "out.safetensors")[f"{LAYER}.weight"], load(base)[f"{LAYER}.weight"].double() + up @ down
    )
    marks: list[Tensors] = [{}, {"scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn)}]
    for number, last in enumerate(("weight_scale", "scale_weight")):
        scales = {key.removesuffix("weight") + last: torch.tensor(0.5) for key in lora}
        path = save({**lora, **scales, **marks[number]}, tmp_path / f"{last}.safetensors")
        with pytest.raises(InputError, match="an adapter of codes and scales"):
            lora_merge.merge(base, path, tmp_path / "no.safetensors")
