"""Weights of torchao as transformers saves them: values of few bits, row by row.

`L.weight` is stored as `L._weight_qdata`, `L._weight_scale` and, with zero points, `L._weight_zero_point`; an entry
`L.weight` of the metadata says of which class the weight is and which block of it shares a scale. The scales of
MXTensor and NVFP4Tensor may be in cuBLAS's tiles; NVFP4Tensor may have a scale of the whole weight.
https://github.com/pytorch/ao torchao/prototype/safetensors/safetensors_support.py, torchao/prototype/mx_formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...disk.reader import read_bytes
from ...dtypes import StoredTensor
from ...text import from_json
from ..encodings.fp4 import NVFP4_COLUMNS, Fp4Tensors, fp4
from ..encodings.scaled_codes import E8M0, MX_COLUMNS, ScaledTensors, scaled
from .base import Checkpoint, Claims, WeightClaim, claimed, positive

NAMES_ENTRY: Final = "tensor_names"
"""Entry of the metadata with the names of all tensors."""

BITS_OF_TYPE: Final = {f"int{bits}": bits for bits in range(2, 9)}
"""Type of whole numbers → their bits."""

ENTRY_LIMIT: Final = 4096  # bytes of the entry of one weight; torchao writes about 400


class TorchaoTensors(NamedTuple):
    """The tensors of one weight, and what its entry says."""

    name: str  # of the weight
    codes: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None
    whole: StoredTensor | None
    settings: Mapping[str, Any]
    label: str
    marks: frozenset[str]


def _blocks(of: TorchaoTensors, dtype: str, **settings: Any) -> WeightClaim | None:
    """Return the claim of a weight of codes of one byte with a scale for each block."""
    codes, scale, zero, marks = of.codes, of.scale, of.zero, of.marks
    block = of.settings.get("block_size")
    if codes.dtype != dtype or not isinstance(block, list) or len(block) != len(codes.shape) or len(block) < 2:
        return None
    if not all(map(positive, block)) or any(n != 1 for n in block[:-2]):
        return None
    if zero is not None and (prod(zero.shape) != prod(scale.shape) or prod(scale.shape) > prod(codes.shape)):
        return None
    if zero is not None and not any(read_bytes(zero)):  # symmetric, and it stays so
        marks, zero = marks | {zero.name}, None
    single = prod(scale.shape) == 1 and zero is None
    stored = ScaledTensors(codes, scale, of.label, marks, zero, None if single else (block[-2], block[-1]))
    return claimed(codes, scaled(stored, **settings), of.name)


def _few_bits(of: TorchaoTensors) -> WeightClaim | None:
    """Return the claim of a weight of whole numbers of 2 to 8 bits in bytes."""
    target = of.settings.get("target_dtype")
    bits = BITS_OF_TYPE.get(str(target.get("_data")), 0) if isinstance(target, Mapping) else 0
    return _blocks(of, "I8", ends=(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) if bits else None


def _mx(of: TorchaoTensors) -> WeightClaim | None:
    """Return the claim of a weight of codes with a power of two for 32 columns."""
    element = of.settings.get("elem_dtype")
    kind = element.get("_data") if isinstance(element, Mapping) else None
    swizzled = bool(of.settings.get("is_swizzled_scales"))
    if of.settings.get("block_size") != MX_COLUMNS or of.zero is not None or of.whole is not None:
        return None
    if (kind, of.codes.dtype) == ("float8_e4m3fn", "F8_E4M3"):
        stored = ScaledTensors.mx(of.codes, of.scale, of.label, of.marks)
        return claimed(of.codes, scaled(stored, swizzled=swizzled), of.name) if stored.kind == E8M0 else None
    return _halves(of, swizzled=swizzled) if kind == "float4_e2m1fn_x2" else None


def _nvfp4(of: TorchaoTensors) -> WeightClaim | None:
    """Return the claim of a weight of 4-bit codes with fp8 scales for 16 columns."""
    if of.settings.get("block_size") != NVFP4_COLUMNS or of.zero is not None:
        return None
    return _halves(of, swizzled=bool(of.settings.get("is_swizzled_scales")), fp8_scales=True)


def _halves(of: TorchaoTensors, *, swizzled: bool, fp8_scales: bool = False) -> WeightClaim | None:
    stored = Fp4Tensors(of.codes, of.scale, of.label, of.whole, of.marks, fp8_scales=fp8_scales)
    return claimed(of.codes, fp4(stored, swizzled=swizzled), of.name, stored.shape)


CLASSES: Final[Mapping[str, Callable[[TorchaoTensors], WeightClaim | None]]] = MappingProxyType({
    "Int8Tensor": lambda of: _blocks(of, "I8"), "Float8Tensor": lambda of: _blocks(of, "F8_E4M3"),
    "IntxUnpackedToInt8Tensor": _few_bits, "MXTensor": _mx, "NVFP4Tensor": _nvfp4,
})  # fmt: skip
"""Class of a weight → how it is read. Others hold packed whole numbers, or codes in the order of a kernel."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of these classes."""
    if NAMES_ENTRY not in checkpoint.metadata:
        return
    for codes in [info for name, info in checkpoint.tensors.items() if name.endswith("_qdata")]:
        stem, _, last = codes.name.rpartition(".")
        parameter = last.removeprefix("_").removesuffix("_qdata")
        name = f"{stem}.{parameter}"
        scale, zero, whole = (
            checkpoint.get(stem, f"_{parameter}_{part}") for part in ("scale", "zero_point", "per_tensor_scale")
        )
        kind, settings = _entry(checkpoint.metadata.get(name, ""))
        if scale is None or kind not in CLASSES:
            continue
        marks = checkpoint.present(stem, f"_{parameter}_act_per_tensor_scale")
        yield CLASSES[kind](TorchaoTensors(name, codes, scale, zero, whole, settings, f"torchao {kind}", marks))


def _entry(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return (class of a weight, its settings) from its metadata; ("", {}) if none."""
    try:
        entry = from_json(text.encode()) if 0 < len(text) <= ENTRY_LIMIT else {}
    except ValueError:
        entry = {}
    inner = entry.get("_data") if isinstance(entry, dict) else None
    kind = entry.get("_type") if isinstance(entry, dict) else None
    return (kind, inner) if isinstance(kind, str) and isinstance(inner, dict) else ("", {})
