"""Adapters for the tiny checkpoint."""

from __future__ import annotations

import torch

from tests.kit.models import TE, UNET
from tests.kit.tensors import Tensors, rand


def kohya(base: Tensors, *, te: bool = True, rank: int = 4, alpha: float = 2.0, seed: int = 100) -> Tensors:
    """A LoRA in kohya's names for every linear layer and convolution of the tiny checkpoint."""
    tensors: Tensors = {}
    for name, key in kohya_names(base).items():
        if name.startswith("lora_te") and not te:
            continue
        out, *rest = base[key].shape
        tensors[f"{name}.lora_up.weight"] = rand(out, rank, *[1] * (len(rest) - 1), seed=seed)
        tensors[f"{name}.lora_down.weight"] = rand(rank, *rest, seed=seed + 1)
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def kohya_names(base: Tensors) -> dict[str, str]:
    """kohya's flat name (diffusers words) → key, written down apart from the project's own tables."""
    names: dict[str, str] = {}
    words = {"in_layers.2": "conv1", "emb_layers.1": "time_emb_proj"}
    for key, tensor in base.items():
        if not key.endswith(".weight") or tensor.ndim < 2:
            continue
        path = key.removesuffix(".weight")
        if path.startswith(TE):
            names["lora_te_" + path.removeprefix(TE).replace(".", "_")] = key
        elif path.startswith(f"{UNET}input_blocks.") and ".0.0" not in path:
            number, part, rest = path.removeprefix(f"{UNET}input_blocks.").split(".", 2)
            block = f"down_blocks_0_{'resnets' if part == '0' else 'attentions'}_{int(number) - 1}"
            names[f"lora_unet_{block}_{words.get(rest, rest).replace('.', '_')}"] = key
    return names


def flux_control(width: int) -> Tensors:
    """A control LoRA of Black Forest Labs on a tiny Flux of two heads: twice its four channels come in."""
    block = "single_blocks.0"
    return {
        "img_in.lora_A.weight": rand(2, 8), "img_in.lora_B.weight": rand(width, 2),
        "img_in.lora_B.bias": rand(width, seed=5), f"{block}.norm.key_norm.scale": rand(width // 2, seed=9),
        f"{block}.linear1.lora_A.weight": rand(2, width), f"{block}.linear1.lora_B.weight": rand(7 * width, 2),
    }  # fmt: skip


def unread(name: str, rows: int, cols: int, seed: int = 0) -> Tensors:
    """A module in torchtune's spelling, of which the proof's second reading knows nothing."""
    return {f"{name}.lora_a.weight": rand(4, cols, seed=seed), f"{name}.lora_b.weight": rand(rows, 4, seed=seed + 1)}
