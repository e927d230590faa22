"""Adapters of a part of a transformers model on the whole of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import AmbiguousName

pytestmark = pytest.mark.filterwarnings("ignore")

TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def _trained(kind: str, folder: Path, **more: Any) -> Any:
    """One tower of a CLIP whose towers are equally wide, with a random adapter that was saved."""
    torch.manual_seed(0)
    text, vision = {**TOWER, "vocab_size": 32}, {**TOWER, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], bias="lora_only", init_lora_weights=False, **more)
    tuned = peft.get_peft_model(getattr(transformers, kind).from_pretrained(folder / "base"), lora)
    for parameter in tuned.parameters():
        parameter.data += 0.1 * parameter.requires_grad
    tuned.save_pretrained(folder / "adapter")
    return tuned


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["CLIPTextModel", "CLIPVisionModel"])
def test_tower_trained_alone_is_changed_alone(kind: str, tmp_path: Path) -> None:
    """Transformers 5 calls the layers of both `encoder.layers…`."""
    tuned = _trained(kind, tmp_path)
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    theirs = tuned.merge_and_unload().state_dict()
    tower = f"{kind[4:-5].lower()}_model."
    before, ours = (transformers.CLIPModel.from_pretrained(tmp_path / f).state_dict() for f in ("base", "ours"))
    wanted = before | {f"{tower}{name}": value for name, value in theirs.items()}
    assert wanted.keys() == ours.keys()
    assert any(not torch.equal(before[name], ours[name]) for name in ours)
    for name, value in ours.items():
        torch.testing.assert_close(value, wanted[name], msg=lambda m, name=name: f"{name}: {m}")


def test_unknown_tower_is_not_guessed(tmp_path: Path) -> None:
    _trained("CLIPTextModel", tmp_path, task_type="FEATURE_EXTRACTION")  # then PEFT does not write down the class
    with pytest.raises(AmbiguousName):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")


@pytest.mark.parametrize("dora", [False, True])
def test_experts_of_gpt_oss_one_by_one(dora: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Unsloth's 4-bit models have a layer for each expert, where transformers stacks them the other way round."""
    torch.manual_seed(0)
    sizes = {**TOWER, "vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3}
    made = transformers.GptOssConfig(**{**sizes, "intermediate_size": 16, "num_experts_per_tok": 2})  # square
    model = transformers.GptOssForCausalLM(made)
    model.save_pretrained(tmp_path / "base")
    factors, wanted = {}, {key: value.clone() for key, value in model.state_dict().items()}
    for key in [key for key in wanted if key.endswith(("gate_up_proj", "down_proj", "router.weight"))]:
        for e, weight in enumerate(wanted[key] if "experts" in key else [wanted[key].mT]):  # [in, out]
            down, up = torch.randn(2, weight.shape[0]), torch.randn(weight.shape[1], 2)
            module = f"base_model.model.{key}s.{e}" if "experts" in key else f"base_model.model.{key[:-7]}.linear"
            factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            turned = weight.mT + 3 * up @ down
            if dora:
                factors[f"{module}.lora_magnitude_vector"] = torch.rand(len(up))
                turned *= (factors[f"{module}.lora_magnitude_vector"] / turned.norm(dim=1))[:, None]
            weight.copy_(turned.mT)
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_dora": dora, "peft_version": "0.17.1"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for key, value in ours.items():
        torch.testing.assert_close(value, wanted[key], msg=lambda m, key=key: f"{key}: {m}")
