"""Folders of quantised language models: transformers loads the merged folder and computes what base and adapter do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from tests.files import quantised_forms
from tests.files.quantised_forms import FORMS
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = torch.arange(12)[None]


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers says that it dequantises, as there is no GPU
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
        with torch.no_grad():
            return model(TOKENS).logits.float()


def quantised(weight: Tensor, size: int | None) -> Tensors:
    """Blocks of 32 x 32, which no axis of gate and up is a multiple of, or one scale; and the numbers in `plain`."""
    if size is None:
        scale = (weight.abs().max() / 448).bfloat16()
        spread = scale.float()
    else:
        high, wide = (-(-n // size) for n in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, wide * size - weight.shape[1], 0, high * size - weight.shape[0]))
        scale = padded.view(high, size, wide, size).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale, "plain": codes.float() * spread}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [32, None])
def test_fp8_loads_and_computes_base_and_adapter(size: int | None, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    plain, packed, lora = {}, {}, {}
    for name, value in model.state_dict().items():
        if "_proj" not in name:
            plain[name] = packed[name] = value.clone()
            continue
        stem = name.removesuffix(".weight")
        parts = quantised(value, size)
        plain[name] = parts.pop("plain")
        packed |= {f"{stem}.{last}": part for last, part in parts.items()}
        if "q_proj" in name or "up_proj" in name:
            down, up = rand(4, value.shape[1], seed=len(lora)), rand(value.shape[0], 4, seed=len(lora) + 1)
            lora |= {f"base_model.model.{stem}.lora_A.weight": down, f"base_model.model.{stem}.lora_B.weight": up}
    base, merged, want = tmp_path / "base", tmp_path / "merged", tmp_path / "want"
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    blocks = [size, size] if size else None
    told = {"quant_method": "fp8", "weight_block_size": blocks, "activation_scheme": "dynamic"}
    for folder, tensors, more in ((base, packed, {"quantization_config": told}), (want, plain, {})):
        folder.mkdir()
        save(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **more}, default=str))
    adapter = save(lora, tmp_path / "lora.safetensors")
    lora_merge.merge(base, adapter, merged)
    lora_merge.merge(base, adapter, tmp_path / "bf16", dtype="fp32")
    lora_merge.merge(want, adapter, tmp_path / "sum")
    right, before = logits(tmp_path / "sum"), logits(want)
    found, clean = logits(merged), logits(tmp_path / "bf16")
    torch.testing.assert_close(clean, right, rtol=1e-4, atol=1e-5)
    change = (right - before).norm()
    assert (found - right).norm() < 0.2 * change
    assert (found - before).norm() > 0.5 * change
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert load(merged / "model.safetensors").keys() == packed.keys()


def test_plain_model_becomes_block_fp8_on_the_way_out(tmp_path: Path) -> None:
    """k and v have 64 rows, no whole block, and keep their numbers, and so does q, which servers join with them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}))
    base, merged = tmp_path / "base", tmp_path / "merged"
    model.save_pretrained(base, max_shard_size="800KB")
    lora = {}
    for name, value in model.state_dict().items():
        if "q_proj" in name or "up_proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            lora[f"{stem}.lora_A.weight"] = rand(4, value.shape[1], seed=len(lora))
            lora[f"{stem}.lora_B.weight"] = rand(value.shape[0], 4, seed=len(lora) + 1, scale=0.02)
    adapter = save(lora, tmp_path / "lora.safetensors")
    lora_merge.merge(base, adapter, merged, dtype="fp8_block")
    lora_merge.merge(base, adapter, tmp_path / "sum")
    right = logits(tmp_path / "sum")
    assert (logits(merged) - right).norm() < 0.06 * right.norm()
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    section = json.loads((merged / "config.json").read_text())["quantization_config"]
    assert len({*index["weight_map"].values()}) > 1
    kept = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "kqv"]
    assert section["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *kept]
    for name, file in index["weight_map"].items():
        if name.endswith("_scale_inv"):
            found = load(merged / file)
            codes = found[name.removesuffix("_scale_inv")]
            spread = found[name].repeat_interleave(128, 0).repeat_interleave(128, 1)
            got, want = codes.double() * spread, load_one(tmp_path / "sum", name.removesuffix("_scale_inv")).double()
            half = spread * 2.0 ** (torch.floor(torch.log2((want.abs() / spread).clamp(min=2.0**-6))) - 4)
            assert ((got - want).abs() <= 1.001 * half).all()


def load_one(folder: Path, name: str) -> Tensor:
    file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    return load(folder / file)[name]


def mxfp4(weight: Tensor) -> Tensors:
    """[experts, out, in] as gpt-oss stores it: 16 bytes and an exponent for every 32 numbers."""
    blocks = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(3) / 6)) + 127
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = blocks / 2.0 ** (exponents - 127)[..., None]
    codes = (levels.abs()[..., None] - table).abs().argmin(4) + 8 * (levels < 0)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"gate_up_proj_blocks": packed, "gate_up_proj_scales": exponents.to(torch.uint8)}


def test_experts_of_gpt_oss_are_merged_as_the_model_knows_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def read(tensors: Tensors) -> Tensor:
        parts = (tensors[f"{stem}gate_up_proj_{last}"] for last in ("blocks", "scales"))
        return convert_moe_packed_tensors(*parts, dtype=torch.float32)

    stem = "model.layers.0.mlp.experts."
    packed = {f"{stem}{last}": part for last, part in mxfp4(rand(3, 64, 96, seed=1, scale=0.02)).items()}
    packed["model.norm.weight"] = rand(8)
    lora = {f"base_model.model.{stem}lora_A.weight": rand(6, 96), f"base_model.model.{stem}lora_B.weight": rand(64, 6)}
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": ["mlp.experts.gate_up_proj"]}
    (tmp_path / "adapter").mkdir()
    save(lora, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    plain = {f"{stem}gate_up_proj": read(packed), "model.norm.weight": packed["model.norm.weight"]}
    found = {}
    quantisation = {"quantization_config": {"quant_method": "mxfp4"}}
    for name, tensors, more in (("base", packed, quantisation), ("want", plain, {})):
        (tmp_path / name).mkdir()
        save(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **more}))
        lora_merge.merge(tmp_path / name, tmp_path / "adapter", tmp_path / f"{name} merged")
        found[name] = load(tmp_path / f"{name} merged" / "model.safetensors")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "clean", dtype="fp32")
    want, got = found["want"][f"{stem}gate_up_proj"], read(found["base"])
    assert found["base"].keys() == packed.keys()
    assert not torch.equal(want, plain[f"{stem}gate_up_proj"])
    scale = 2.0 ** (found["base"][f"{stem}gate_up_proj_scales"].double() - 127)
    half = scale.repeat_interleave(32, 2).mT  # of the widest step
    assert ((got - want).abs() <= half * 1.0001).all()
    made = load(tmp_path / "clean" / "model.safetensors")
    assert made.keys() == plain.keys()
    torch.testing.assert_close(made[f"{stem}gate_up_proj"], want)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "noise"),
    [("fp8", 0.05), ("int8", 0.03), ("int4", 0.2), ("nvfp4", 0.25), ("mxfp4", 0.25), ("mxfp8", 0.06)],
)
def test_compressed_tensors_load_and_compute_base_and_adapter(name: str, noise: float, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "intermediate_size": 128, "num_hidden_layers": 1}))
    form, lora = FORMS[f"compressed-tensors {name}"], {}
    plain, packed = {}, {}
    for key, value in model.state_dict().items():
        plain[key] = packed[key] = value.clone()
        if "_proj" not in key:
            continue
        stem = key.removesuffix(".weight")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantised_forms, "SHAPE", tuple(value.shape))
            layer = form.make(packed.pop(key))
            plain[key] = form.read(layer).float()
        packed |= {f"{stem}.{last}": part for last, part in layer.items()}
        if "q_proj" in key or "up_proj" in key:
            down, up = rand(4, value.shape[1], seed=len(lora)), rand(value.shape[0], 4, seed=len(lora) + 1)
            lora |= {f"base_model.model.{stem}.lora_A.weight": down, f"base_model.model.{stem}.lora_B.weight": up}
    told = {**form.config, "quantization_status": "compressed", "ignore": ["lm_head"]}
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    for folder, tensors, more in (("base", packed, {"quantization_config": told}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}, default=str))
    adapter = save(lora, tmp_path / "lora.safetensors")
    for base, out in (("base", "merged"), ("plain", "sum")):
        lora_merge.merge(tmp_path / base, adapter, tmp_path / out)
    dtype = torch.bfloat16 if name[:2] in {"nv", "mx"} else torch.float32  # as the library decodes them
    right, before, found = (logits(tmp_path / folder, dtype) for folder in ("sum", "plain", "merged"))
    change = (right - before).norm()
    assert (found - right).norm() < noise * change


def bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)


def torchao(kind: str, **options: Any) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, f"{kind}Config")(version=2, **options))


BY_TRANSFORMERS: dict[str, tuple[str, Callable[[], Any], float]] = {
    "nf4": ("bitsandbytes", lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), 0.2),
    "nf4 doubled": (
        "bitsandbytes",
        lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), 0.2,
    ),
    "fp4": ("bitsandbytes", lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"), 0.3),
    "int8": ("bitsandbytes", lambda: bitsandbytes(load_in_8bit=True), 0.05),
    "torchao int8": ("torchao", lambda: torchao("Int8WeightOnly"), 0.03),
    "torchao int8 in and out": ("torchao", lambda: torchao("Int8DynamicActivationInt8Weight"), 0.05),
    "torchao int4 in bytes": ("torchao", lambda: torchao("IntxWeightOnly", weight_dtype=torch.int4), 0.2),
    "torchao float8": ("torchao", lambda: torchao("Float8WeightOnly"), 0.06),
}  # fmt: skip
"""Format → the library by which transformers quantises, its settings, and how much of the change may be noise."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_models_quantised_by_transformers_load_merged(name: str, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    library, settings, noise = BY_TRANSFORMERS[name]
    pytest.importorskip(library, reason=f"{library} is not installed; pip install .[oracles] has it")
    torch.manual_seed(0)
    model, lora = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "intermediate_size": 128})), {}
    model.save_pretrained(tmp_path / "plain")
    options = {"dtype": torch.float32, "device_map": "cpu"}
    packed = Qwen3ForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings(), **options)
    packed.save_pretrained(tmp_path / "base")
    for key, value in model.state_dict().items():
        if "q_proj" in key or "up_proj" in key:
            stem = f"base_model.model.{key.removesuffix('.weight')}.lora"
            lora[f"{stem}_A.weight"] = rand(4, value.shape[1], seed=len(lora))
            lora[f"{stem}_B.weight"] = rand(value.shape[0], 4, seed=len(lora) + 1)
    adapter = save(lora, tmp_path / "lora.safetensors")
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "kept")
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "sum", dtype="fp32")
    lora_merge.merge(tmp_path / "base", (adapter, 0.0), tmp_path / "decoded", dtype="fp32")
    base, found, right, decoded = (logits(tmp_path / folder) for folder in ("base", "kept", "sum", "decoded"))
    assert (base - decoded).norm() < 0.02 * decoded.norm(), "kernels compute with bf16, or round inputs to int8"
    assert (found - right).norm() < noise * (right - decoded).norm()


@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_loads_and_computes_base_and_adapter(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_experts_per_tok=2, rope_scaling=rope))
    stem, packed = "model.layers.0.mlp.experts.", {}
    for key, value in model.state_dict().items():
        if key in (f"{stem}gate_up_proj", f"{stem}down_proj"):
            made = mxfp4(rand(*value.mT.shape, seed=len(packed), scale=0.02))
            packed |= {key + last.removeprefix("gate_up_proj"): part for last, part in made.items()}
        else:
            packed[key] = value.clone()
    told = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": told}
    (tmp_path / "base").mkdir()
    save(packed, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "config.json").write_text(json.dumps(config, default=str))
    factors = {"A": rand(8, 64), "B": rand(128, 8, scale=0.2)}
    lora = {f"base_model.model.{stem}lora_{end}.weight": value for end, value in factors.items()}
    (tmp_path / "lora").mkdir()
    save(lora, tmp_path / "lora" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": ["mlp.experts.gate_up_proj"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    adapter = tmp_path / "lora"
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "kept")
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "sum", dtype="fp32")
    lora_merge.merge(tmp_path / "base", (adapter, 0.0), tmp_path / "decoded", dtype="fp32")
    base, found, right, decoded = (logits(tmp_path / folder) for folder in ("base", "kept", "sum", "decoded"))
    assert torch.equal(base, decoded)
    assert (found - right).norm() < 0.25 * (right - decoded).norm()
