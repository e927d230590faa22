"""Folders of models and adapters as transformers and PEFT write them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.kit.files import save
from tests.kit.tensors import rand


def llama_folder(folder: Path, shards: int = 2) -> dict[str, bytes]:
    """A model of transformers in shards, next to the same weights as a pickle."""
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": rand(32, 16),
        "lm_head.weight": rand(32, 16),
        "model.norm.weight": torch.ones(16),
    }
    for n in range(2):
        tensors |= {f"model.layers.{n}.self_attn.{name}_proj.weight": rand(16, 16, seed=n) for name in "qkvo"}
    names = sorted(tensors)
    parts = {f"model-0000{n + 1}-of-0000{shards}.safetensors": names[n::shards] for n in range(shards)}
    for file, part in parts.items():
        save({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    torch.save(tensors, folder / "pytorch_model.bin")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def peft_folder(folder: Path) -> dict[str, bytes]:
    """An adapter of PEFT for it."""
    folder.mkdir()
    tensors = {}
    for n in range(2):
        at = f"base_model.model.model.layers.{n}.self_attn.q_proj"
        tensors |= {f"{at}.lora_A.weight": rand(4, 16, seed=n), f"{at}.lora_B.weight": rand(16, 4, seed=n + 5)}
    save(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {p.name: p.read_bytes() for p in folder.iterdir()}
