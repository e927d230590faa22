"""A tiny Flux, and an adapter of all its layers."""

from __future__ import annotations

import torch

from tests.kit.tensors import Tensors, rand

H = 8


def flux() -> Tensors:
    """A tiny Flux in its authors' layout, with fused q, k, v and swapped halves at the end."""
    shapes: dict[str, tuple[int, ...]] = {
        "img_in.weight": (H, 4), "txt_in.weight": (H, 6), "final_layer.linear.weight": (4, H),
        "final_layer.adaLN_modulation.1.weight": (2 * H, H), "vector_in.in_layer.weight": (H, 6),
        "single_blocks.0.linear1.weight": (7 * H, H), "single_blocks.0.linear2.weight": (H, 5 * H),
        "single_blocks.0.modulation.lin.weight": (3 * H, H),
    }  # fmt: skip
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}_"
        shapes |= {f"{block}attn.qkv.weight": (3 * H, H), f"{block}attn.proj.weight": (H, H)}
        shapes |= {f"{block}mod.lin.weight": (6 * H, H), f"{block}attn.norm.query_norm.scale": (4,)}
        shapes |= {f"{block}mlp.0.weight": (4 * H, H), f"{block}mlp.2.weight": (H, 4 * H)}
    return {name: rand(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}


def of_flux(*, dora: bool = False, loha: bool = False) -> Tensors:
    """An adapter for every layer of the tiny Flux, in kohya's names; α is not the rank."""
    tensors: Tensors = {}
    for n, (key, weight) in enumerate(flux().items()):
        if weight.ndim < 2:
            continue
        out, cols = weight.shape
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        tensors[f"{name}.alpha"] = torch.tensor(1.5)
        if loha:
            for half in ("w1", "w2"):
                tensors[f"{name}.hada_{half}_a"] = rand(out, 2, seed=n)
                tensors[f"{name}.hada_{half}_b"] = rand(2, cols, seed=n + 50)
            continue
        tensors[f"{name}.lora_up.weight"] = rand(out, 3, seed=n)
        tensors[f"{name}.lora_down.weight"] = rand(3, cols, seed=n + 50)
        if dora:
            tensors[f"{name}.dora_scale"] = rand(out, 1, seed=n).abs()
    return tensors
