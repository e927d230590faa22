"""Quantised weights of mlx: whole numbers of few bits in a bit stream, W = q · s + b, with s and b for each group.

A row of `L.weight` is a stream of words: element i of the row begins at bit i · bits. `L.scales` and `L.biases` have
one number for each group of columns. A config.json states `bits`, `group_size` and `mode`, also for single layers. In
the modes mxfp4, mxfp8 and nvfp4 codes are floating-point numbers, scales are bytes, and there are no biases.
https://github.com/ml-explore/mlx mlx/backend/cpu/quantized.cpp; mlx-lm mlx_lm/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...disk.files import StoredTensor
from ...dtypes import ITEM_BYTES
from .base import (
    CODES,
    DRAW,
    FLOATS,
    Checkpoint,
    Claim,
    Encoding,
    OutOfRange,
    Packing,
    Part,
    Parts,
    beyond,
    claimed,
    finite,
)
from .fp4 import Fp4Tensors, fp4
from .packed_ints import WORD
from .scaled import COARSE, E8M0, SCALE, Stored, scaled

if TYPE_CHECKING:
    from torch import Tensor

BIAS: Final = "bias"
BITS: Final = (1, 2, 3, 4, 5, 6, 8)
SIZES: Final = (16, 32, 64, 128)
"""Columns of a group."""


@dataclass(frozen=True, eq=False)
class Affine(Encoding):
    """Whole numbers in a bit stream: q · s + b. A scale may be negative."""

    bits: int = 4
    numbers: str = "BF16"  # dtype of scales and biases
    name: ClassVar[str] = "mlx"
    stochastic: ClassVar[bool] = True
    afresh: ClassVar[bool] = True

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return 1, self.group

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return q · s + b in fp32."""
        from . import few_bits

        levels = few_bits.from_stream(parts[CODES], self.bits).view(-1, self.group).float()
        scale, bias = self._line(parts)
        return levels.mul_(scale).add_(bias)

    def encode(self, values: Tensor, parts: Parts, first: int) -> Parts | None:
        """Return codes, scales and biases; those of a group are kept where they cover the new numbers."""
        from . import draws, few_bits

        groups = values.view(-1, self.group)
        scale, bias = self._fitted(
            (groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)), *self._line(parts), parts
        )
        levels = (groups - bias) / scale.to(values.dtype).where(scale != 0, inf)
        if DRAW in parts:
            levels = draws.to_integers(levels, parts[DRAW].view(levels.shape))
        codes = few_bits.in_stream(levels.round().clamp(0, self._most), self.bits)
        stored = {role: made.to(parts[role].dtype).reshape(-1) for role, made in ((SCALE, scale), (BIAS, bias))}
        return {CODES: codes, **stored}

    @property
    def _most(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    def _line(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return (scales, biases), each [groups, 1] in fp32; InvalidPart if one is not finite."""
        scale, bias = (finite(parts[role], "a scale or a bias").view(-1, 1) for role in (SCALE, BIAS))
        return scale, bias

    def _fitted(self, of: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return (scales, biases) of groups with these ranges: the old ones where they cover the range and use most of
        their codes, else new ones by mlx's rule, a little wider where the stored numbers would not cover the range.

        mlx's rule: one end of the range is the bias, the end that lies farther from zero, and zero is a whole code.
        """
        import torch

        (low, high), margin = of, beyond(parts)
        ends = bias - scale * margin, bias + scale * (self._most + margin)
        over = (low < torch.minimum(*ends)) | (high > torch.maximum(*ends))
        over |= (high - low < (COARSE[False] * self._most - 1) * scale.abs()) & (high > low)
        step = ((high - low) / self._most).clamp(min=1e-7)
        below = low.abs() > high.abs()
        edge, other = low.where(below, high), high.where(below, low)
        step = step.where(below, -step)
        zero = (edge / step).round()
        step = torch.where(zero != 0, edge / zero.where(zero != 0, 1), step)
        made = self._rounded(torch.where(zero != 0, edge, 0.0), up=~below), self._rounded(step)
        short = (other - made[0]) / made[1] > self._most + min(margin, 0.25)
        step = torch.where(short, self._rounded((other - made[0]) / self._most, up=below), made[1])
        if not bool((step.isfinite() & made[0].isfinite() | ~over).all()):
            raise OutOfRange
        over &= step != 0
        return torch.where(over, step, scale), torch.where(over, made[0], bias)

    def _rounded(self, numbers: Tensor, up: Tensor | None = None) -> Tensor:
        """Return numbers as the file can hold them, in fp32: the nearest, or the next one above or below."""
        import torch

        from . import arithmetic

        dtype = arithmetic.FLOAT_DTYPES[self.numbers]
        near = numbers.to(dtype)
        if up is not None:
            inside = torch.where(up, near.to(numbers.dtype) >= numbers, near.to(numbers.dtype) <= numbers)
            near = near.where(inside, arithmetic.neighbour(near, up))
        return near.float()


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of mlx folders."""
    config = found.config
    if "quant_method" in config or not isinstance(config.get("group_size"), int):
        return
    for stem in found.stems("scales"):
        own = config.get(stem)
        made = _weight(found, stem, {**config, **(own if isinstance(own, Mapping) else {})})
        if made is not None:
            yield made


def _weight(found: Checkpoint, stem: str, config: Mapping[str, Any]) -> Claim | None:
    codes, scale, bias = found.get(stem, "weight"), found.tensors[f"{stem}.scales"], found.get(stem, "biases")
    bits, size, mode = config.get("bits"), config.get("group_size"), config.get("mode", "affine")
    if codes is None or bits not in BITS or size not in SIZES:
        return None
    shape = (*scale.shape[:-1], scale.shape[-1] * size) if scale.shape else ()
    if codes.dtype != "U32" or len(shape) < 2 or codes.shape != (*shape[:-1], shape[-1] * bits // WORD):
        return None
    if mode != "affine":
        return _floats(codes, scale, shape, (str(mode), size, bits)) if bias is None else None
    if bias is None or (scale.dtype, scale.shape) != (bias.dtype, bias.shape) or scale.dtype not in FLOATS:
        return None
    each = ITEM_BYTES[scale.dtype]
    parts = {role: Part(info, size, each) for role, info in ((SCALE, scale), (BIAS, bias))}
    encoding = affine(size, bits=bits, numbers=scale.dtype, label=f"mlx {bits} bit")
    return claimed(codes, codes.name, shape, Packing(encoding, codes, parts))


def _floats(
    codes: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], settings: tuple[str, int, int]
) -> Claim | None:
    """Return the claim of a weight of floating-point codes, in one of mlx's other modes."""
    mode, size, bits = settings
    packing, label = None, f"mlx {mode}"
    if settings == ("mxfp8", 32, 8):
        of = Stored(replace(codes, dtype="F8_E4M3", shape=shape), scale, label, block=(1, 32), byte_powers=True)
        packing = scaled(of) if of.kind == E8M0 else None
    elif bits == 4 and {"mxfp4": 32, "nvfp4": 16}.get(mode) == size:
        halves = replace(codes, dtype="U8", shape=(*shape[:-1], shape[-1] // 2))
        packing = fp4(Fp4Tensors(halves, scale, label, None, fp8_scales=mode == "nvfp4"))
    return claimed(codes, codes.name, shape, packing._replace(codes=codes)) if packing else None


def affine(size: int, *, bits: int, **settings: Any) -> Affine:
    """Return the encoding of weights with a scale and a bias for each `size` columns."""
    return Affine.shared((size, size * bits // 8), size, bits=bits, **settings)
