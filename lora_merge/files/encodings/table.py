"""Codes that name a number of a table: 4 bits with a scale for each block (bitsandbytes); fp8 without a negative zero.

With double quantisation the scales are codes themselves: map[u8] · n + offset, n for every 256 of them. The offset,
the mean of all scales when the file was written, is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar, Final

from .base import CODES, DRAW, Encoding, InvalidPart, PartValues, end_margin

if TYPE_CHECKING:
    from torch import Tensor

MAP: Final = "map"
ABSMAX: Final = "absmax"
NESTED: Final = "nested"
NESTED_MAP: Final = "nested_map"
REFIT_BELOW: Final = 0.8  # share of a block's scale below which it is fitted again


@dataclass(frozen=True, eq=False)
class TableCodes(Encoding):
    """4-bit codes by a table, times a scale for each block of consecutive values."""

    nested: int = 0  # scales with one scale; 0 without double quantisation
    offset: float = 0.0
    fixed: ClassVar[frozenset[str]] = frozenset((MAP, NESTED_MAP))
    from_zeros: ClassVar[bool] = True

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return map[q] · a in fp32."""
        from . import arithmetic

        values = arithmetic.from_halves(parts[CODES], parts[MAP].tolist(), high_first=True)[:count]
        scale = self._scale(parts)
        whole = count // self.size * self.size
        values[:whole].view(-1, self.size).mul_(scale[: whole // self.size, None])
        if whole < count:
            values[whole:].mul_(scale[-1])
        return values

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes and scales."""
        import torch

        from . import arithmetic, stochastic_rounding
        from .nearest_codes import nearest

        # The blocks whose scales do not cover their values, or are too coarse.
        count = values.numel()
        ragged = -count % self.size
        padded = (torch.nn.functional.pad(values, (0, ragged)) if ragged else values).view(-1, self.size)
        old, largest = self._scale(parts), arithmetic.largest_of_each(padded).float()
        (first, second, *_, before, last), margin = parts[MAP].sort().values.tolist(), end_margin(parts)
        cover = min(last + margin * (last - before), margin * (second - first) - first)
        refit = (largest > old.abs() * cover) | (largest < old.abs() * REFIT_BELOW)
        scales, scale = self._fitted(old, largest, refit & (largest > 0), cover, parts)
        # The nearest codes.
        divisor = torch.where(scale == 0, inf, scale).to(values.dtype)
        levels = (padded / divisor[:, None]).view(-1)
        if DRAW in parts:
            levels[:count] = stochastic_rounding.to_table(levels[:count], parts[MAP], parts[DRAW]).to(levels.dtype)
        codes = nearest(levels, parts[MAP])[: count + count % 2]
        return {CODES: arithmetic.in_halves(codes, high_first=True), **scales}

    def _scale(self, parts: PartValues) -> Tensor:
        """Return the scale of each block; InvalidPart if one is negative or not finite, or for a bad map."""
        scale = parts[ABSMAX]
        for table in (parts[role] for role in (MAP, NESTED_MAP) if role in parts):
            low, high = table.min().item(), table.max().item()
            if not -inf < low < high < inf:  # NaN too
                raise InvalidPart("a number of a map is not finite, or all of them are the same")
        if self.nested:
            spread = parts[NESTED].repeat_interleave(self.nested)[: len(scale)]
            scale = parts[NESTED_MAP][scale.int()] * spread + self.offset
        if not bool(scale.isfinite().all()) or (not self.nested and bool((scale < 0).any())):
            raise InvalidPart("a scale is negative or not a finite number")
        return scale

    def _fitted(
        self, old: Tensor, largest: Tensor, refit: Tensor, cover: float, parts: PartValues
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return scales as stored and as values: the old ones if they cover the values, else new ones."""
        import torch
        from torch.nn.functional import pad

        from .nearest_codes import nearest

        ideal = torch.where(refit, largest, old)
        if not self.nested:
            return {ABSMAX: ideal}, ideal
        # Double quantisation: the scales are codes, with a scale for `size` of them that may have to grow.
        table, size = parts[NESTED_MAP], self.nested
        shifted = pad(ideal - self.offset, (0, -len(ideal) % size)).view(-1, size)
        top, before = shifted.abs().amax(1), parts[NESTED]
        grown = top > before * table.abs().max()
        outer = torch.where(grown, top, before)
        codes = nearest(shifted / torch.where(outer > 0, outer, inf)[:, None], table)
        stored = pad(parts[ABSMAX], (0, codes.numel() - len(old))).view(codes.shape)
        refitted = pad(refit, (0, codes.numel() - len(old))).view(codes.shape) | grown[:, None]
        codes = torch.where(refitted, codes, stored)
        scale = table[codes.int()] * outer[:, None] + self.offset
        # A code whose scale falls short of the largest number is raised by one.
        short = refitted & (pad(largest, (0, codes.numel() - len(old))).view(codes.shape) > scale.abs() * cover)
        codes = torch.where(short, (codes.int() + 1).clamp(max=len(table) - 1).to(codes.dtype), codes)
        scale = table[codes.int()] * outer[:, None] + self.offset
        return {ABSMAX: codes.reshape(-1)[: len(old)], NESTED: outer}, scale.reshape(-1)[: len(old)]


@dataclass(frozen=True, eq=False)
class Fnuz(Encoding):
    """Values of one of these dtypes."""

    dtype: str = ""
    decode_only: ClassVar[str] = "only some AMD devices have these values"

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the values in fp32."""
        from . import arithmetic

        values = arithmetic.byte_values(self.dtype).index_select(0, parts[CODES].view(arithmetic.BYTE).int())
        if bool(values.isnan().any()):
            raise InvalidPart("a code means no finite value")
        return values
