"""The tensors of GGUF files as the rest of the program knows them: names, shapes, and how their values are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from ...dtypes import Shape, StoredTensor
from ...errors import InputError
from ..encodings.base import Packing
from .encoding import ggml
from .names import ARCHITECTURE, FAMILIES, LLAMA_CPP_NAMES, NORM, ROTATED_WEIGHTS, Family, configured, renamed
from .types import DECODED_TYPES, GGML_TYPES, QUANTISED_TYPES

ORIGINAL: Final = "comfy.gguf.orig_shape."
"""Entries of city96's converter: the shape of a tensor that is stored in rows of 256."""

UNQUANTISED: Final = frozenset(("F32", "F16", "BF16"))


@dataclass(frozen=True)
class GgufModel:
    """The kind of the model in GGUF files. A language model has llama.cpp's names and values; others have their own."""

    architecture: str
    language: bool = False
    family: Family | None = None
    """What is known of a language model's names and values; None if only adapters in GGUF fit it."""


@dataclass(frozen=True)
class View:
    """The tensors of a checkpoint, how those are stored that are not plain values, and the configuration."""

    tensors: Mapping[str, StoredTensor]
    packed: Mapping[str, Packing]
    config: Mapping[str, Any]
    model: GgufModel


def viewed(tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]) -> View:
    """Return the tensors of GGUF files with the entries of their headers; InputError if these contradict."""
    arch = str(values.get(ARCHITECTURE, ""))
    foreign = any(LLAMA_CPP_NAMES.match(name) for name in tensors)
    family = FAMILIES.get(arch) if foreign else None
    config = configured(arch, values, tied="output.weight" not in tensors) if family else {}
    claims = [_claimed(info, family, config, values) for info in tensors.values()]
    view = {info.name: info for info, _ in claims}
    if len(view) < len(claims):
        raise InputError("two tensors are the same weight", str(claims[0][0].file), "convert the model again")
    packed = {info.name: packing for info, packing in claims if packing is not None}
    return View(view, packed, config, GgufModel(arch, foreign, family))


def _claimed(
    info: StoredTensor, family: Family | None, config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[StoredTensor, Packing | None]:
    """Return a tensor by the name and shape that the model knows, and how it is stored; None for plain values."""
    name = renamed(info.name, family) if family else info.name
    shape = _shape(info, values)
    packing = Packing(ggml(info.dtype), info) if info.dtype in QUANTISED_TYPES else None
    readable = info.dtype in DECODED_TYPES | UNQUANTISED
    if family and family.permuted and readable and (match := ROTATED_WEIGHTS.fullmatch(info.name)):
        heads = config.get("num_attention_heads" if match[1] == "q" else "num_key_value_heads", 0)
        rows, cols = shape[0] if shape else 0, prod(shape[1:])
        if not heads or not rows or rows % (2 * heads):
            where = f"{info.file}: {info.name} has {rows} rows for {heads} heads"
            raise InputError("the heads of the model do not fit its weights", where, "convert the model again")
        packing = Packing(ggml(info.dtype, head=rows // heads, cols=cols), info)
    elif family and family.norms and info.dtype in UNQUANTISED and NORM.fullmatch(info.name):
        packing = Packing(ggml(info.dtype, offset=family.norms), info)
    if (name, shape) == (info.name, info.shape):
        return info, packing
    return replace(info, name=name, shape=shape, stored=info.name), packing


def _shape(info: StoredTensor, values: Mapping[str, Any]) -> Shape:
    """Return the shape of the weight: that of an entry if the file has one."""
    original = values.get(f"{ORIGINAL}{info.name}")
    if original is None:
        return info.shape
    sizes = isinstance(original, list) and all(isinstance(n, int) and n >= 0 for n in original)
    if not sizes or prod(original) != prod(info.shape):
        raise InputError("the original shape of a tensor does not fit it",
                         f"{info.file}: {ORIGINAL}{info.name} is {original}, the tensor has {list(info.shape)}",
                         "convert the model again")  # fmt: skip
    return tuple(original)


def as_blocks(packing: Packing | None, info: StoredTensor, kind: str) -> Packing | None:
    """Return how a weight of a GGUF file is stored as blocks of this type; None if its rows do not fill blocks.

    `info`: the weight as the model knows it; `packing`: how the file stores it, None for plain values.
    """
    codes = info if packing is None or packing.codes is None else packing.codes
    if not codes.shape or codes.shape[-1] % GGML_TYPES[kind].unit[0]:
        return None
    encoding = packing.encoding.as_type(kind) if packing is not None else ggml(kind, new_scales=True)  # type: ignore[attr-defined]
    return Packing(encoding, replace(codes, dtype=kind, nbytes=encoding.nbytes(prod(codes.shape))))


def as_plain(packing: Packing, dtype: str) -> Packing | None:
    """Return how a weight is stored in the same file with values of this dtype; None for plain values."""
    codes = packing.codes
    assert codes is not None, "a weight of codes has them"
    encoding = packing.encoding.as_plain(dtype)  # type: ignore[attr-defined]
    if encoding is None:
        return None
    count = prod(codes.shape)
    return Packing(encoding, replace(codes, dtype=dtype, nbytes=encoding.nbytes(count)))
