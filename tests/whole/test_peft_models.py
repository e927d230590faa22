"""Adapters on models of transformers: the merged folder is what PEFT's merged model saves, file against file.

Tied and transposed weights, whole modules, token rows, biases, and methods other than LoRA; plain LoRA on many models
is in test_transformers.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import lora_merge

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLM = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32}


def causal(kind: str, **more: Any) -> Callable[[], Any]:
    config = getattr(transformers, f"{kind}Config")
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return lambda: getattr(transformers, name)(config(**{**LLM, **more}))


LLAMA, TIED = causal("Llama"), causal("Qwen2", tie_word_embeddings=True)
GPT2 = causal("GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=32)


def lora(targets: Any, **more: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(target_modules=targets, r=3, lora_alpha=6, **more)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "whole modules": (LLAMA, lora(["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "dora of an embedding": (LLAMA, lora(["embed_tokens"], use_dora=True)),
    "tokens": (LLAMA, lora(["q_proj"], trainable_token_indices=[5, 3])),
    "tied tokens": (TIED, lora(["q_proj"], trainable_token_indices=[5, 3])),
    "all biases": (TIED, lora(["q_proj"], bias="all")),
    "transposed dora": (GPT2, lora(["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True)),
    "transposed ia3": (GPT2, lambda: peft.IA3Config(target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"])),
    "vera drawn": (LLAMA, lambda: peft.VeraConfig(target_modules=["q_proj", "down_proj"], r=3, save_projection=False)),
    "norms": (LLAMA, peft.LNTuningConfig),
    "oft": (LLAMA, lambda: peft.OFTConfig(target_modules=["q_proj", "down_proj"], r=0, oft_block_size=4)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_merged_folder_is_what_peft_saves(name: str, tmp_path: Path) -> None:
    make, config = CASES[name]
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, config())
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "theirs")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    base, theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "theirs", "ours"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=2e-6, msg=key)
    assert any(not torch.equal(ours[key], base[key]) for key in base)
    assert ("is tied to" in str(report.coverage)) == (name == "tied tokens")


@pytest.mark.filterwarnings("ignore")
def test_head_of_its_own_for_a_tied_base_is_stored_apart(tmp_path: Path) -> None:
    model = TIED()
    model.save_pretrained(tmp_path / "base")
    peft.get_peft_model(model, lora(["q_proj"], modules_to_save=["lm_head"])()).save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    head = load_file(tmp_path / "adapter" / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["lm_head.weight"], head)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed", [False, True])
def test_module_that_is_saved_inside_one_that_is_saved(changed: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """The model computes with the copy inside the outer one, which nothing trains; the file has another copy."""
    LLAMA().save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, lora(["q_proj"], modules_to_save=["mlp", "down_proj"])()).eval()
    for name, parameter in tuned.named_parameters():
        parameter.data += 0.1 * (parameter.requires_grad and (changed or "down_proj" not in name))
    tuned.save_pretrained(tmp_path / "adapter")
    if changed:
        with pytest.raises(lora_merge.MergeError, match="names a module and one inside it"):
            lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
        return
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval(), torch.arange(9)[None]
    torch.testing.assert_close(ours(tokens).logits, tuned(tokens).logits)
