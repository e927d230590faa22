"""Small models in GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from tests.kit.gguf_files import Array
from tests.kit.tensors import Tensors, rand

LAYERS = [f"double_blocks.{i}.{s}_attn.qkv" for i in range(2) for s in ("img", "txt")]


TOUCHED = [name for name in LAYERS if "img" in name]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def flux(kind: str) -> dict[str, tuple[Array, str]]:
    """A little of Flux as city96's converter writes it: four quantised layers, others in plain numbers."""
    weights = {f"{name}.weight": (normal(96, 256, seed=n), kind) for n, name in enumerate(LAYERS)}
    weights |= {f"{name}.bias": (normal(96, seed=n), "F32") for n, name in enumerate(LAYERS)}
    weights |= {f"double_blocks.{i}.img_attn.norm.query_norm.scale": (normal(37), "F32") for i in range(2)}
    return weights | {"img_in.weight": (normal(32, 16), "F16"), "final_layer.linear.weight": (normal(16, 32), "BF16")}


def style(layers: list[str] = TOUCHED, rank: int = 4) -> Tensors:
    tensors: Tensors = {}
    for n, name in enumerate(layers):
        stem = "lora_unet_" + name.replace(".", "_")
        tensors[f"{stem}.lora_down.weight"] = rand(rank, 256, seed=n)
        tensors[f"{stem}.lora_up.weight"] = rand(96, rank, seed=n + 50)
    return tensors


def change(name: str, layers: list[str] = TOUCHED) -> Array:
    stem, adapter = "lora_unet_" + name.replace(".", "_"), style(layers)
    return (adapter[f"{stem}.lora_up.weight"] @ adapter[f"{stem}.lora_down.weight"]).double().numpy()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_file(style(), tmp_path / "style.safetensors")
    return tmp_path / "style.safetensors"
