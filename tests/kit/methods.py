"""Methods of combination on a fused weight."""

from __future__ import annotations

import torch

from tests.kit.tensors import Tensors, rand

W = 8


KEYS = {
    "x_embedder.weight": (W, 4), "transformer_blocks.0.norm1.linear.weight": (6 * W, W),
    "transformer_blocks.0.attn.norm_added_q.weight": (W // 2,),
    "time_text_embed.text_embedder.linear_1.weight": (W, 6),
    **{f"transformer_blocks.0.attn.to_{n}.weight": (W, W) for n in "qkv"},
    **{f"single_transformer_blocks.0.attn.to_{n}.weight": (W, W) for n in "qkv"},
    "single_transformer_blocks.0.proj_mlp.weight": (4 * W, W),
    "single_transformer_blocks.0.proj_out.weight": (W, 5 * W),
}  # fmt: skip
"""A tiny Flux as diffusers stores it: adapters may call q, k and v one weight, or three."""


FUSED, PART = "lora_unet_double_blocks_0_img_attn_qkv", "transformer_transformer_blocks_0_attn_to_{}"


MODULES = {FUSED: (3 * W, W), **{PART.format(n).replace("transformer_", "lora_transformer_", 1): (W, W) for n in "qkv"}}


def flux(*, fused: bool) -> Tensors:
    """The base in float64, q, k and v apart or as one tensor."""
    split = {key: rand(*shape, seed=n, scale=0.5).double() for n, (key, shape) in enumerate(KEYS.items())}
    if not fused:
        return split
    qkv = [split.pop(f"transformer_blocks.0.attn.to_{n}.weight") for n in "qkv"]
    return {
        "double_blocks.0.img_attn.qkv.weight": torch.cat(qkv),
        "double_blocks.0.img_mod.lin.weight": split["transformer_blocks.0.norm1.linear.weight"],
        "single_blocks.0.linear1.weight": rand(7 * W, W, seed=50).double(),
    }


def module(kind: str, name: str, seed: int) -> Tensors:
    """One trained module of a kind, for a weight of the name's shape."""
    out, cols = MODULES[name]

    def draw(*shape: int, scale: float = 0.4) -> torch.Tensor:
        return rand(*shape, seed=seed + len(tensors), scale=scale).double()

    tensors: Tensors = {}
    if kind in ("lora", "dora out", "dora in"):
        tensors |= {"lora_up.weight": draw(out, 2), "lora_down.weight": draw(2, cols), "alpha": torch.tensor(2.0)}
    if kind.startswith("dora"):
        tensors["dora_scale"] = 1 + draw(*((out, 1) if kind == "dora out" else (1, cols))).abs()
    if kind == "diff":
        tensors["diff"] = draw(out, cols)
    if kind == "ia3":
        tensors |= {"weight": draw(out, 1), "on_input": torch.tensor(False)}  # noqa: FBT003
    if kind == "diag-oft":
        tensors["oft_blocks"] = draw(out // 4, 4, 4)
    if kind == "boft":
        tensors["oft_blocks"] = draw(2, out // 4, 4, 4)
    if kind == "glora":
        pairs = {"a1": (cols, 2), "a2": (2, cols), "b1": (out, 2), "b2": (2, cols)}
        tensors |= {f"{slot}.weight": draw(*shape) for slot, shape in pairs.items()} | {"alpha": torch.tensor(2.0)}
    return {f"{name}.{ending}": value for ending, value in tensors.items()}


KINDS = ("lora", "dora out", "dora in", "diff", "ia3", "diag-oft", "boft", "glora")
