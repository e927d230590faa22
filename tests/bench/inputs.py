"""Full-size checkpoints and adapters of random values, made from the tables in tests/headers.

Timings do not depend on values: one pool of normal numbers is written again and again, from a different
place for every tensor.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from lora_merge.disk.pages import aligned_buffer
from lora_merge.disk.writer import Writer

HEADERS: Final = Path(__file__).parents[1] / "headers"
ITEM: Final = {"F16": 2, "BF16": 2, "F32": 4}
SMALL: Final = 2**20
POOL: Final = 2**22  # numbers; few, because a child's peak memory counts from that of its parent

Shape = tuple[int, ...]
Table = dict[str, tuple[str, Shape]]  # name → dtype, shape


@dataclass(frozen=True)
class Model:
    """A checkpoint and how adapters name its layers."""

    table: str  # in tests/headers
    layers: Mapping[str, str]  # pattern of base keys → what the adapter calls them


SGM_UNET: Final = {
    r"model\.diffusion_model\.((?:input|middle|output)_.*(?:attn|ff|proj_in|proj_out).*)": r"lora_unet_\1"
}
MODELS: Final = {
    "sd1": Model("single-file/sd1", {
        **SGM_UNET, r"cond_stage_model\.transformer\.(.*(?:self_attn|mlp).*)": r"lora_te_\1",
    }),
    "sdxl": Model("single-file/sdxl", {
        **SGM_UNET,
        r"conditioner\.embedders\.0\.transformer\.(.*(?:self_attn|mlp).*)": r"lora_te1_\1",
        r"conditioner\.embedders\.1\.model\.transformer\.resblocks\.(.*)": r"lora_te2_text_model_encoder_layers_\1",
    }),
    "flux": Model("native/flux-dev", {r"((?:double|single)_blocks\..*)": r"lora_unet_\1"}),
}  # fmt: skip
EVERY_LAYER: Final = {r"model\.diffusion_model\.((?:input|middle|output)_.*)": r"lora_unet_\1"}
"""The U-Net's convolutions and projections too, as LyCORIS trains them with its preset `full`."""

OPENCLIP: Final = {"attn_in_proj": ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj"),
                   "attn_out_proj": ("self_attn_out_proj",), "mlp_c_fc": ("mlp_fc1",), "mlp_c_proj": ("mlp_fc2",)}  # fmt: skip
"""Layers of OpenCLIP's text encoder → what trainers call them; q, k and v are fused there."""


def table(name: str) -> dict[str, Shape]:
    """Key → shape of a full-size model."""
    with gzip.open(HEADERS / f"{name}.json.gz") as f:
        return {key: tuple(shape) for key, shape in json.load(f).items()}


def base(path: Path, model: str, dtype: str = "F16") -> Path:
    """A checkpoint of one of MODELS."""
    return write(path, weights(model, dtype))


def weights(model: str, dtype: str) -> Table:
    """The tensors of one of MODELS."""
    return {key: (dtype, shape) for key, shape in table(MODELS[model].table).items()}


def adapter(path: Path, model: str, algorithm: str = "lora", *, rank: int = 32, every: bool = False,
            seed: int = 0) -> Path:  # fmt: skip
    """An adapter on the attention, feed-forward and text encoder layers of a model, or on every one."""
    tensors: Table = {}
    for layer in layers(model, every=every):
        for slot, size in SLOTS[algorithm](layer.shape, rank).items():
            tensors[f"{layer.name}.{slot}"] = ("F16", size)
    return trained(path, tensors, rank, seed=seed)


def trained(path: Path, tensors: Table, rank: int, *, seed: int = 0) -> Path:
    """An adapter with numbers as small as trained ones, and half its rank as α."""
    return write(path, tensors, {"ss_network_dim": str(rank)}, scale=0.01, seed=seed, alpha=rank / 2)


@dataclass(frozen=True)
class Layer:
    """A weight as an adapter names it: the whole of a base tensor, or rows from `start` on."""

    name: str
    shape: Shape
    key: str
    start: int


def layers(model: str, *, every: bool = False) -> Iterator[Layer]:
    """Each layer that is trained."""
    patterns = {**MODELS[model].layers, **(EVERY_LAYER if every else {})}
    for key, shape in table(MODELS[model].table).items():
        stem = re.sub(r"[._]weight$", "", key)
        if stem == key or len(shape) < 2:
            continue
        found = next((m.expand(new) for old, new in patterns.items() if (m := re.fullmatch(old, stem))), None)
        if found is None:
            continue
        name = found.replace(".", "_")
        fused = next((old for old in OPENCLIP if name.startswith("lora_te2_") and name.endswith(old)), "")
        parts = OPENCLIP.get(fused, ("",))
        rows = shape[0] // len(parts)
        for number, part in enumerate(parts):
            yield Layer(name.removesuffix(fused) + part, (rows, *shape[1:]), key, number * rows)


def _lora(shape: Shape, rank: int) -> dict[str, Shape]:
    ones = (1,) * (len(shape) - 2)
    return {"lora_up.weight": (shape[0], rank, *ones), "lora_down.weight": (rank, *shape[1:]), "alpha": ()}


def _loha(shape: Shape, rank: int) -> dict[str, Shape]:
    a, b = (shape[0], rank), (rank, prod(shape[1:]))
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": b, "alpha": ()}


def _lokr(shape: Shape, rank: int) -> dict[str, Shape]:
    f = next(f for f in (16, 8, 4, 2, 1) if shape[0] % f == 0 and shape[1] % f == 0)
    return {"lokr_w1": (f, f), "lokr_w2_a": (shape[0] // f, rank), "lokr_w2_b": (rank, prod(shape[1:]) // f),
            "alpha": ()}  # fmt: skip


def _glora(shape: Shape, rank: int) -> dict[str, Shape]:
    ones, inputs = (1,) * (len(shape) - 2), shape[1]
    return {"a1.weight": (inputs, rank, *ones), "a2.weight": (rank, inputs, *ones),
            "b1.weight": (shape[0], rank, *ones), "b2.weight": (rank, *shape[1:]), "alpha": ()}  # fmt: skip


def _oft(shape: Shape, rank: int) -> dict[str, Shape]:
    b = next(b for b in range(rank, 0, -1) if shape[0] % b == 0)
    return {"oft_blocks": (shape[0] // b, b, b)}  # its alpha limits the rotation; LyCORIS trains without by default


def _dora(shape: Shape, rank: int) -> dict[str, Shape]:
    return {**_lora(shape, rank), "dora_scale": (shape[0], *(1,) * (len(shape) - 1))}


SLOTS: Final = {"lora": _lora, "loha": _loha, "lokr": _lokr, "glora": _glora, "oft": _oft, "dora": _dora}
"""Algorithm → suffix and shape of what its trainer stores for a weight, at a rank."""


def tiny(folder: Path) -> tuple[Path, Path]:
    """A base and an adapter so small that only the start of the program counts."""
    weights: Table = {f"model.layers.{i}.self_attn.q_proj.weight": ("F16", (64, 64)) for i in range(4)}
    lora: Table = {
        f"base_model.model.{key.removesuffix('.weight')}.{slot}": ("F16", size)
        for key in weights for slot, size in {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4)}.items()
    }  # fmt: skip
    return write(folder / "tiny.safetensors", weights), write(folder / "tiny-lora.safetensors", lora)


LLM: Final = {"self_attn.q_proj": (3072, 3072), "self_attn.k_proj": (1024, 3072), "self_attn.v_proj": (1024, 3072),
              "self_attn.o_proj": (3072, 3072), "mlp.gate_proj": (2048, 3072), "mlp.up_proj": (2048, 3072),
              "mlp.down_proj": (3072, 2048)}  # fmt: skip
LAYERS: Final = 429  # of seven modules, 3003 in all; 40 GB in fp16 with the embedding


def large(folder: Path) -> tuple[Path, Path]:
    """A 40 GB model with 3003 layers, a hole but for its header, and an adapter with an alpha on every layer."""
    weights: Table = {"model.embed_tokens.weight": ("F16", (320_000, 3072))}
    lora: Table = {}
    for i in range(LAYERS):
        for name, shape in LLM.items():
            weights[f"model.layers.{i}.{name}.weight"] = ("F16", shape)
            for slot, size in _lora(shape, 8).items():
                lora[f"model.layers.{i}.{name}.{slot}"] = ("F16", size)
    return hole(folder / "large.safetensors", weights), trained(folder / "large-lora.safetensors", lora, 8)


def _header(tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * ITEM[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end


def hole(path: Path, tensors: Table) -> Path:
    """Return a file of zeros that takes no room on the disk."""
    header, size = _header(tensors, {})
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + size)
    return path


def write(path: Path, tensors: Table, metadata: Mapping[str, str] | None = None, *, scale: float = 0.02,
          seed: int = 0, alpha: float = 1.0) -> Path:  # fmt: skip
    """The file, unless it is there already and of that size. `alpha`: every tensor without axes."""
    header, size = _header(tensors, metadata or {})
    total = len(header) + size
    if path.exists() and path.stat().st_size == total:
        return path
    part = path.with_suffix(".part")
    part.touch()
    with Writer(part, total) as writer:
        writer.write(memoryview(header), 0)
        at = len(header)
        for chunk in _joined(_bytes(tensors.values(), scale, seed, alpha)):
            writer.write(chunk, at)
            at += len(chunk)
        writer.finish()
    return part.rename(path)


def _joined(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes; those of many small tensors at once."""
    some = bytearray()
    for chunk in chunks:
        if some and len(some) + len(chunk) > SMALL:
            yield memoryview(some)
            some = bytearray()
        if len(chunk) > SMALL:
            yield chunk
        else:
            some += chunk
    if some:
        yield memoryview(some)


def _bytes(tensors: Iterable[tuple[str, Shape]], scale: float, seed: int, alpha: float) -> Iterator[memoryview]:
    single = {"F16": struct.pack("<e", alpha), "F32": struct.pack("<f", alpha), "BF16": struct.pack("<f", alpha)[2:]}
    values = np.random.default_rng(seed).standard_normal(POOL, dtype=np.float32) * np.float32(scale)
    pools: dict[str, memoryview] = {}
    for number, (dtype, shape) in enumerate(tensors):
        if not shape:
            yield memoryview(single[dtype])
            continue
        if dtype not in pools:
            cast = values.astype(np.float16) if dtype == "F16" else values
            cast = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else cast
            pools[dtype] = aligned_buffer(cast.nbytes)
            pools[dtype][:] = memoryview(cast).cast("B")
        pool, left = pools[dtype], prod(shape) * ITEM[dtype]
        at = number * 1013 * ITEM[dtype] % (len(pool) // 2)
        while left:
            chunk = pool[at : at + left]
            yield chunk
            left, at = left - len(chunk), 0
