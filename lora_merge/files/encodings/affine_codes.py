"""Whole numbers of 1 to 8 bits in a bit stream, W = q · s + b, with s and b for each group (mlx, SDNQ)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from .base import CODES, DRAW, Encoding, OutOfRange, PartValues, end_margin, finite
from .scaled_codes import REFIT_BELOW, SCALE

if TYPE_CHECKING:
    from torch import Tensor

BIAS: Final = "bias"


@dataclass(frozen=True, eq=False)
class Affine(Encoding):
    """Whole numbers in a bit stream: q · s + b. A scale may be negative."""

    bits: int = 4
    float_dtype: str = "BF16"  # dtype of scales and biases
    from_zeros: ClassVar[bool] = True

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return q · s + b in fp32."""
        from . import bit_packing

        levels = bit_packing.from_stream(parts[CODES], self.bits).view(-1, self.group).float()
        scale, bias = self._line(parts)
        return levels.mul_(scale).add_(bias)

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes, scales and biases; those of a group are kept if they cover the new values."""
        from . import bit_packing, stochastic_rounding

        groups = values.view(-1, self.group)
        scale, bias = self._fitted(
            (groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)), *self._line(parts), parts
        )
        levels = (groups - bias) / scale.to(values.dtype).where(scale != 0, inf)
        if DRAW in parts:
            levels = stochastic_rounding.to_integers(levels, parts[DRAW].view(levels.shape))
        codes = bit_packing.in_stream(levels.round().clamp(0, self._most), self.bits)
        stored = {role: tensor.to(parts[role].dtype).reshape(-1) for role, tensor in ((SCALE, scale), (BIAS, bias))}
        return {CODES: codes, **stored}

    @property
    def _most(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    def _line(self, parts: PartValues) -> tuple[Tensor, Tensor]:
        """Return (scales, biases), each [groups, 1] in fp32; InvalidPart if one is not finite."""
        scale, bias = (finite(parts[role], "a scale or a bias").view(-1, 1) for role in (SCALE, BIAS))
        return scale, bias

    def _fitted(
        self, ends: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor, parts: PartValues
    ) -> tuple[Tensor, Tensor]:
        """Return (scales, biases) of groups with these ranges: the old ones if they cover the range and use most of
        their codes, else new ones by mlx's rule, a little wider if the stored values would not cover the range.

        mlx's rule: one end of the range is the bias, the end farther from zero, and zero is a whole code.
        """
        import torch

        (low, high), margin = ends, end_margin(parts)
        reach = bias - scale * margin, bias + scale * (self._most + margin)
        over = (low < torch.minimum(*reach)) | (high > torch.maximum(*reach))
        over |= (high - low < (REFIT_BELOW[False] * self._most - 1) * scale.abs()) & (high > low)
        step = ((high - low) / self._most).clamp(min=1e-7)
        below = low.abs() > high.abs()
        edge, other = low.where(below, high), high.where(below, low)
        step = step.where(below, -step)
        zero = (edge / step).round()
        step = torch.where(zero != 0, edge / zero.where(zero != 0, 1), step)
        rounded = self._rounded(torch.where(zero != 0, edge, 0.0), up=~below), self._rounded(step)
        short = (other - rounded[0]) / rounded[1] > self._most + min(margin, 0.25)
        step = torch.where(short, self._rounded((other - rounded[0]) / self._most, up=below), rounded[1])
        if not bool((step.isfinite() & rounded[0].isfinite() | ~over).all()):
            raise OutOfRange
        over &= step != 0
        return torch.where(over, step, scale), torch.where(over, rounded[0], bias)

    def _rounded(self, values: Tensor, up: Tensor | None = None) -> Tensor:
        """Return values as the file can hold them, in fp32: the nearest, or the next one above or below."""
        import torch

        from . import arithmetic

        dtype = arithmetic.FLOAT_DTYPES[self.float_dtype]
        near = values.to(dtype)
        if up is not None:
            inside = torch.where(up, near.to(values.dtype) >= values, near.to(values.dtype) <= values)
            near = near.where(inside, arithmetic.neighbour(near, up))
        return near.float()


def affine(size: int, *, bits: int, **settings: Any) -> Affine:
    """Return the encoding of weights with a scale and a bias for each `size` columns."""
    return Affine.shared((size, size * bits // 8), size, size=size, bits=bits, **settings)
