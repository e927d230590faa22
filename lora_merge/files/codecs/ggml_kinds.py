"""The types of GGUF whose numbers are level · scale − shift: their levels, and where their scales are. Imported where
weights are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .arithmetic import a_table, cut_to_fp8, from_fp8
from .base import InvalidPart
from .draws import to_integers, to_table
from .ggml_layouts import LAYOUTS, Layout, half, put_half

E4M3: Final = "F8_E4M3"
NO_NUMBER: Final = {"E8M0": 0xFF, E4M3: 0x7F}
"""Form of scales of one byte → the first byte that stands for none; of e4m3, NaN and negative ones. OCP Microscaling
Formats 1.0, 5.4.1."""

IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS. ggml-common.h, kvalues_iq4nl."""

FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Levels of MXFP4: twice the numbers of e2m1."""


def power_of_two(exponents: Tensor) -> Tensor:
    """Return powers of two in fp32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True)
class Levels:
    """The level of each code: code + `first`, or an entry of a table. New codes have levels from low to high."""

    first: int
    low: float
    high: float
    table: tuple[int, ...] = ()

    @property
    def gaps(self) -> tuple[float, float]:
        """Return the steps at the low and the high end."""
        levels = sorted({*self.table}) or [0, 1]
        return float(levels[1] - levels[0]), float(levels[-1] - levels[-2])

    def of(self, codes: Tensor) -> Tensor:
        """Return the levels of codes, in fp32."""
        if self.table:
            return torch.tensor(self.table, dtype=torch.float32)[codes.int()]
        if self.first == -128:
            return codes.view(torch.int8).float()
        return codes.float().add_(self.first) if self.first else codes.float()

    def drawn(self, values: Tensor, uniform: Tensor) -> Tensor:
        """Return the codes of one of both neighbours of each value, by draws from [0, 1)."""
        found = to_table(values, torch.tensor(self.table), uniform) if self.table else to_integers(values, uniform)
        return self.nearest(found)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest levels; `values` is overwritten."""
        if self.table:
            index = values.mul_(2).floor_().clamp_(-256, 255).int()
            return _nearest(self.table)[index.add_(256)]
        values.round_().clamp_(self.low, self.high)
        if self.first not in (0, -128):
            values.sub_(self.first)
        return values.to(torch.int8).view(torch.uint8)  # torch's cast to u8 takes eight times as long


@a_table
def _nearest(table: tuple[int, ...]) -> Tensor:
    """Return the code of the nearest level for n/2 to (n + 1)/2, n from -256 to 255: all middles are such numbers."""
    order = sorted({level: code for code, level in reversed([*enumerate(table)])}.items())
    levels = torch.tensor([float(level) for level, _ in order])
    codes = torch.tensor([code for _, code in order], dtype=torch.uint8)
    return codes[torch.bucketize((torch.arange(-256, 256) + 0.5) / 2, (levels[1:] + levels[:-1]) / 2)]


class Fields(NamedTuple):
    """The scales of some blocks: d and m [blocks, 1] in fp32; sc and mn [blocks, sub-blocks], whole numbers."""

    d: Tensor
    m: Tensor | None = None
    sc: Tensor | None = None
    mn: Tensor | None = None

    def at(self, rows: Tensor | slice) -> Fields:
        """Return those of some blocks."""
        return Fields(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]

    def scale(self) -> Tensor:
        """Return the scale of every sub-block."""
        return self.d if self.sc is None else self.d * self.sc

    def shift(self) -> Tensor | None:
        """Return what is subtracted from the numbers of every sub-block."""
        if self.m is None:
            return None
        return -self.m if self.mn is None else self.m * self.mn


class Kind(NamedTuple):
    """One type: its bytes, its levels, and the largest magnitude of the small scales."""

    layout: Layout
    levels: Levels
    most: int = 0
    one_byte: str = ""  # how scales of one byte are stored: as powers of two (E8M0), or as fp8 (F8_E4M3)

    def fields(self, blocks: Tensor) -> Fields:
        """Return the scales; InvalidPart for those that are not finite numbers."""
        layout = self.layout
        if layout.d is None:
            raw = blocks[:, : layout.subs]
            if bool((raw >= NO_NUMBER[self.one_byte]).any()):
                raise InvalidPart("a scale is not a number")
            if self.one_byte == E4M3:
                return Fields(from_fp8(raw, E4M3, 0.5).view(raw.shape))
            return Fields(power_of_two(raw.int() - 128))
        d = half(blocks, layout.d)
        m = None if layout.m is None else half(blocks, layout.m)
        for found in (d, m):
            if found is not None and not bool(found.isfinite().all()):
                raise InvalidPart("a scale is not a number")
        if layout.scales is None:
            return Fields(d, m)
        return Fields(d, m, *layout.scales.unpack(blocks[:, layout.scales.start : layout.scales.stop]))

    def put_fields(self, fields: Fields, rows: Tensor | slice, blocks: Tensor) -> None:
        """Write the scales of some blocks."""
        layout, found = self.layout, blocks[rows]
        if self.one_byte == E4M3:
            found[:, : layout.subs] = cut_to_fp8(2 * fields.d, E4M3)
        elif layout.d is None:
            found[:, :1] = (torch.frexp(fields.d).exponent + 127).to(torch.uint8)
        else:
            put_half(found, layout.d, fields.d)
        if layout.m is not None and fields.m is not None:
            put_half(found, layout.m, fields.m)
        if layout.scales is not None:
            small = [t for t in (fields.sc, fields.mn) if t is not None]
            if fields.mn is not None:
                small = [t.to(torch.uint8) for t in small]
            found[:, layout.scales.start : layout.scales.stop] = layout.scales.pack(tuple(small))
        blocks[rows] = found


def _kind(name: str, levels: Levels, most: int = 0) -> Kind:
    return Kind(LAYOUTS[name], levels, most, {"MXFP4": "E8M0", "NVFP4": E4M3}.get(name, ""))


KINDS: Final[Mapping[str, Kind]] = MappingProxyType({
    "Q4_0": _kind("Q4_0", Levels(-8, -8, 7)),
    "Q4_1": _kind("Q4_1", Levels(0, 0, 15)),
    "Q5_0": _kind("Q5_0", Levels(-16, -16, 15)),
    "Q5_1": _kind("Q5_1", Levels(0, 0, 31)),
    "Q8_0": _kind("Q8_0", Levels(-128, -127, 127)),
    "Q2_K": _kind("Q2_K", Levels(0, 0, 3), 15),
    "Q3_K": _kind("Q3_K", Levels(-4, -4, 3), 31),
    "Q4_K": _kind("Q4_K", Levels(0, 0, 15), 63),
    "Q5_K": _kind("Q5_K", Levels(0, 0, 31), 63),
    "Q6_K": _kind("Q6_K", Levels(-32, -32, 31), 127),
    "IQ4_NL": _kind("IQ4_NL", Levels(0, -127, 113, IQ4)),
    "IQ4_XS": _kind("IQ4_XS", Levels(0, -127, 113, IQ4), 31),
    "MXFP4": _kind("MXFP4", Levels(0, -12, 12, FP4)),
    "NVFP4": _kind("NVFP4", Levels(0, -12, 12, FP4)),
    "TQ1_0": _kind("TQ1_0", Levels(-1, -1, 1)),
    "TQ2_0": _kind("TQ2_0", Levels(-1, -1, 1)),
})  # fmt: skip
"""Type → how its numbers are made."""
