"""A tiny Stable Diffusion 1."""

from __future__ import annotations

import re

import torch

from tests.kit.tensors import Tensors, rand

UNET = "model.diffusion_model."


TE = "cond_stage_model.transformer."


REPEATED = re.compile(
    r"\.2\.(0\.emb|1\..*(attn1\.to_v|attn2\.to_v|to_out|ff))|attn2\.(to_q|to_out)|layers\.1\.self_attn\.[kvo]"
)
"""Layers whose like the tiny checkpoint has already: each merge and each proof takes a millisecond for a layer."""


def sd1(dtype: torch.dtype = torch.float16, *, repeated: bool = False) -> Tensors:
    """A tiny checkpoint in the single-file layout of Stable Diffusion 1: linear layers, convolutions, norms, integers.

    With `repeated`, its second block and second text layer are whole.
    """
    c, text = 16, 24
    shapes: dict[str, tuple[int, ...]] = {
        f"{UNET}input_blocks.0.0.weight": (c, 4, 3, 3),
        f"{UNET}input_blocks.0.0.bias": (c,),
        f"{UNET}time_embed.0.weight": (4 * c, c),
        f"{UNET}out.2.weight": (4, c, 3, 3),
    }
    for n in (1, 2):
        res, block = f"{UNET}input_blocks.{n}.0", f"{UNET}input_blocks.{n}.1"
        inner = f"{block}.transformer_blocks.0"
        shapes |= {f"{res}.in_layers.0.weight": (c,), f"{res}.in_layers.2.weight": (c, c, 3, 3)}
        shapes |= {f"{res}.in_layers.2.bias": (c,), f"{res}.emb_layers.1.weight": (c, 4 * c)}
        shapes |= {f"{block}.proj_in.weight": (c, c, 1, 1), f"{block}.norm.weight": (c,)}
        for attention, width in (("attn1", c), ("attn2", text)):
            shapes[f"{inner}.{attention}.to_q.weight"] = (c, c)
            shapes[f"{inner}.{attention}.to_k.weight"] = (c, width)
            shapes[f"{inner}.{attention}.to_v.weight"] = (c, width)
            shapes[f"{inner}.{attention}.to_out.0.weight"] = (c, c)
            shapes[f"{inner}.{attention}.to_out.0.bias"] = (c,)
        shapes[f"{inner}.ff.net.0.proj.weight"] = (8 * c, c)
    for n in range(2):
        layer = f"{TE}text_model.encoder.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (text, text) for p in ("q", "k", "v", "out")}
        shapes[f"{layer}.layer_norm1.weight"] = (text,)
    shapes["first_stage_model.decoder.conv_out.weight"] = (3, c, 3, 3)
    tensors = {
        name: rand(*shape, seed=n).to(dtype)
        for n, (name, shape) in enumerate(shapes.items())
        if repeated or not REPEATED.search(name)
    }
    tensors[f"{TE}text_model.embeddings.position_ids"] = torch.arange(77).unsqueeze(0)
    return tensors


SAMPLE = re.compile(
    r"input_blocks\.(0\.|1\.(0\.in_layers|1\.(norm|.*attn1\.to_[qk]|.*attn2\.to_k)))|\.out\.|time_embed|layers\.0\.(self_attn\.q|l)|conv_out"
)


def sd1_sample(dtype: torch.dtype = torch.float16) -> Tensors:
    """Of the tiny checkpoint what it is known by, and five layers for adapters: a merge takes a third of the time."""
    return {name: tensor for name, tensor in sd1(dtype).items() if SAMPLE.search(name)}


def sd3(dtype: torch.dtype = torch.float16, depth: int = 2) -> Tensors:
    """A Stable Diffusion 3 transformer of its authors' names; ComfyUI's loader takes its sizes from the shapes."""
    g, width, text, pooled = torch.Generator().manual_seed(3), 64 * depth, 32, 16
    shapes: dict[str, tuple[int, ...]] = {"pos_embed": (1, 16, width), "x_embedder.proj.weight": (width, 16, 2, 2)}
    linears = {"context_embedder": (width, text), "final_layer.linear": (64, width)}
    linears |= {"final_layer.adaLN_modulation.1": (2 * width, width)}
    linears |= {"t_embedder.mlp.0": (width, 256), "t_embedder.mlp.2": (width, width)}
    linears |= {"y_embedder.mlp.0": (width, pooled), "y_embedder.mlp.2": (width, width)}
    for n in range(depth):
        for side in ("context", "x"):
            block, last = f"joint_blocks.{n}.{side}_block", side == "context" and n == depth - 1
            linears |= {f"{block}.attn.qkv": (3 * width, width)}
            linears |= {f"{block}.adaLN_modulation.1": ((2 if last else 6) * width, width)}
            if not last:
                linears |= {f"{block}.attn.proj": (width, width), f"{block}.mlp.fc1": (4 * width, width)}
                linears |= {f"{block}.mlp.fc2": (width, 4 * width)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()} | {"x_embedder.proj.bias": (width,)}
    return {name: torch.randn(shape, generator=g).mul(0.05).to(dtype) for name, shape in shapes.items()}
