"""GGUF files of diffusion models, made of checkpoints in .safetensors: names, types and entries.

Facts from https://github.com/city96/ComfyUI-GGUF: tools/convert.py and tools/lcpp.patch (what is written), loader.py
(what is read). Names are those of the model's own checkpoint, without a prefix. Text encoders and VAE are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final, NamedTuple

from ...dtypes import Shape, StoredTensor
from ..encodings.base import Packing
from .container import MAGIC
from .encoding import ggml
from .layout import FILE_TYPE, FILE_TYPES, QUANTISATION_VERSION, QUANTISATION_VERSION_KEY, sizes, string, unsigned
from .names import ARCHITECTURE
from .types import GGML_TYPES
from .view import ORIGINAL

DIFFUSION_PREFIXES: Final = ("", "model.diffusion_model.", "diffusion_model.", "net.")
"""Prefixes of the diffusion model: none, in a file with other networks, in files of other programs."""

FP32_VALUES: Final = 1024  # values up to which a tensor is stored in fp32
ROW_VALUES: Final = 256  # values of a row of a tensor that is stored in another shape
GGML_AXES: Final = 4  # of a tensor, in ggml


class Diffusion(NamedTuple):
    """One value of `general.architecture`: a file is of it if it has all names of one of the groups."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    reshaped: bool = False
    """Whether matrices whose rows do not fill blocks are stored in rows of 256."""


DIFFUSION_MODELS: Final = (
    Diffusion("hyvid",
        (("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",),
         ("txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight",))),
    Diffusion("flux", (("double_blocks.0.img_attn.proj.weight",),)),
    Diffusion("sd3", (("joint_blocks.0.x_block.attn.qkv.weight",),)),
    Diffusion("aura", (("double_layers.3.modX.1.weight",),)),
    Diffusion("hidream",
        (("caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),)),
    Diffusion("cosmos", (("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),)),
    Diffusion("ltxv",
        (("adaln_single.emb.timestep_embedder.linear_2.weight", "transformer_blocks.0.scale_shift_table",
         "caption_projection.linear_2.weight"),)),
    Diffusion("wan", (("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),)),
    Diffusion("sdxl",
        (("input_blocks.3.0.op.weight", "label_emb.0.0.weight"),
         ("down_blocks.0.downsamplers.0.conv.weight", "add_embedding.linear_1.weight")), reshaped=True),
    Diffusion("sd1",
        (("input_blocks.3.0.op.weight", "input_blocks.9.0.op.weight"), ("down_blocks.0.downsamplers.0.conv.weight",)),
        reshaped=True),
    Diffusion("lumina2", (("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),)),
    Diffusion("qwen_image", (("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),)),
)  # fmt: skip
"""The kinds that ComfyUI-GGUF loads, in the order in which they are tried. Z-Image is a `lumina2`, Chroma a `flux`."""


class DiffusionFile(NamedTuple):
    """The content of a GGUF file that is made of a checkpoint: one network, whose names lose their prefix."""

    kind: Diffusion
    prefix: str

    def name(self, key: str) -> str | None:
        """Return the name of a tensor of the checkpoint in the GGUF file; None for tensors of other networks."""
        return key.removeprefix(self.prefix) if key.startswith(self.prefix) else None


def diffusion_file(tensors: Container[str]) -> DiffusionFile | None:
    """Return what a GGUF file of a checkpoint with these names holds; None for a model of no known kind."""
    for prefix in DIFFUSION_PREFIXES:
        for kind in DIFFUSION_MODELS:
            if any(all(f"{prefix}{name}" in tensors for name in names) for names in kind.signs):
                return DiffusionFile(kind, prefix)
    return None


def missing_signs(tensors: Iterable[str]) -> tuple[Diffusion, tuple[str, ...]] | None:
    """Return the kind that names of a model resemble most, and the names that it is recognised by and that are missing;
    None for names that resemble no kind.

    `tensors`: names of no known kind. A kind is resembled if each of its names begins as some of them do.
    """
    best, result = 0.0, None
    for prefix in DIFFUSION_PREFIXES:
        beginnings = {
            ".".join(parts[:n]) for key in tensors if key.startswith(prefix)
            for parts in (key.removeprefix(prefix).split("."),) for n in range(1, len(parts) + 1)
        }  # fmt: skip
        for kind, names in ((row, signs) for row in DIFFUSION_MODELS for signs in row.signs):
            alike = [max((n for n in range(len(p) + 1) if ".".join(p[:n]) in beginnings), default=0) / len(p)
                     for p in (name.split(".") for name in names)]  # fmt: skip
            if all(alike) and (mean := sum(alike) / len(alike)) > best:
                best, result = mean, (kind, tuple(f"{prefix}{n}" for n in names if n not in beginnings))
    return result


def plain_type(name: str, shape: Shape, dtype: str) -> str:
    """Return the type of a tensor of values of this name and shape that is not quantised.

    Vectors, small tensors, and parameters of no layer, which the loader does not convert, are fp32. So are tensors of
    five axes, which ggml does not know.
    """
    if len(shape) < 2 or prod(shape) <= FP32_VALUES or len(shape) > GGML_AXES or not name.endswith(".weight"):
        return "F32"
    return {"F64": "F32", "F8_E4M3": "F16", "F8_E5M2": "F16"}.get(dtype, dtype)


def new_blocks(file: DiffusionFile, info: StoredTensor, dtype: str) -> Packing | None:
    """Return how a weight of a checkpoint is stored as blocks of a type; None if it is not in the file, or its rows
    do not fill blocks.
    """
    name, total, (block, size) = file.name(info.name), prod(info.shape), GGML_TYPES[dtype].unit
    shape = info.shape
    if shape[-1] % block and file.kind.reshaped and total % ROW_VALUES == 0:
        shape = total // ROW_VALUES, ROW_VALUES
    if name is None or shape[-1] % block:
        return None
    codes = replace(info, dtype=dtype, shape=shape, nbytes=total // block * size, stored=name)
    return Packing(ggml(dtype, new_scales=True), codes)


def empty_header(kind: Diffusion, tensors: Sequence[tuple[str, str, Shape]], shapes: Mapping[str, Shape]) -> bytes:
    """Return a header with entries and no tensors, from which `gguf_layout` makes that of an output.

    `tensors`: (name, type, shape) of all tensors. `shapes`: name → original shape of those that are reshaped.
    """
    count: dict[str, int] = {}
    for _, dtype, shape in tensors:
        count[dtype] = count.get(dtype, 0) + prod(shape)
    types = {dtype: n for dtype, n in count.items() if dtype in FILE_TYPES and dtype != "F32"}
    main = max(types, key=lambda dtype: (GGML_TYPES[dtype].unit[0] > 1, types[dtype])) if types else "F32"
    entries = [
        string(ARCHITECTURE, kind.name), unsigned(QUANTISATION_VERSION_KEY, QUANTISATION_VERSION),
        unsigned(FILE_TYPE, FILE_TYPES[main]),
        *(sizes(f"{ORIGINAL}{name}", shape) for name, shape in shapes.items()),
    ]  # fmt: skip
    return MAGIC + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)
