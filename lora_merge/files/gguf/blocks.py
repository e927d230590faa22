"""The types of GGUF whose values are level · scale − shift: their levels, scales, decoding and encoding.

Scale and shift belong to a sub-block. New values keep the scales of every sub-block whose range still covers them, up
to half a step beyond its ends; the others get the smallest scales that do. So every number is within half a step of
what was merged, and blocks that an adapter hardly changes get no second error. Imported when weights are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..encodings.arithmetic import cached_table, cut_to_fp8, ends_of_each, from_fp8
from ..encodings.base import BARELY, InvalidPart, OutOfRange
from ..encodings.stochastic_rounding import to_integers, to_table
from .bit_layouts import BIT_LAYOUTS, BlockLayout, half, put_half
from .types import GGML_TYPES

E4M3: Final = "F8_E4M3"

NO_NUMBER: Final = {"E8M0": 0xFF, E4M3: 0x7F}
"""Form of scales of one byte → the first byte that is no number; of e4m3, NaN and negative ones. OCP Microscaling
Formats 1.0, 5.4.1."""

IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS. ggml-common.h, kvalues_iq4nl."""

FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Levels of MXFP4: twice the values of e2m1."""

FP8_LARGEST: Final = 448.0
F16_LARGEST: Final = 65504.0
RANGE_SLACK: Final = (
    0.96  # of half a step that the narrow end of a range may be exceeded by; the rest is for rounding of d
)
SURE_STEPS: Final = 0.49  # of a step beyond the end of a range that its scale surely covers
EXACT_STEPS: Final = 2.0**14  # steps in the largest shift for which a level is right to a hundredth


def power_of_two(exponents: Tensor) -> Tensor:
    """Return powers of two in fp32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True)
class CodeLevels:
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
        neighbours = to_table(values, torch.tensor(self.table), uniform) if self.table else to_integers(values, uniform)
        return self.nearest(neighbours)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest levels; `values` is overwritten."""
        if self.table:
            index = values.mul_(2).floor_().clamp_(-256, 255).int()
            return _nearest(self.table)[index.add_(256)]
        values.round_().clamp_(self.low, self.high)
        if self.first not in (0, -128):
            values.sub_(self.first)
        return values.to(torch.int8).view(torch.uint8)  # torch's cast to u8 takes eight times as long


@cached_table
def _nearest(table: tuple[int, ...]) -> Tensor:
    """Return the code of the nearest level for n/2 to (n + 1)/2, n from -256 to 255: all middles are such values."""
    order = sorted({level: code for code, level in reversed([*enumerate(table)])}.items())
    levels = torch.tensor([float(level) for level, _ in order])
    codes = torch.tensor([code for _, code in order], dtype=torch.uint8)
    return codes[torch.bucketize((torch.arange(-256, 256) + 0.5) / 2, (levels[1:] + levels[:-1]) / 2)]


class BlockScales(NamedTuple):
    """The scales of some blocks: d and m [blocks, 1] in fp32; sc and mn [blocks, sub-blocks], whole numbers."""

    d: Tensor
    m: Tensor | None = None
    sc: Tensor | None = None
    mn: Tensor | None = None

    def at(self, rows: Tensor | slice) -> BlockScales:
        """Return those of some blocks."""
        return BlockScales(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]

    def scale(self) -> Tensor:
        """Return the scale of every sub-block."""
        return self.d if self.sc is None else self.d * self.sc

    def shift(self) -> Tensor | None:
        """Return what is subtracted from the values of every sub-block."""
        if self.m is None:
            return None
        return -self.m if self.mn is None else self.m * self.mn


class BlockType(NamedTuple):
    """One type: its bytes, its levels, and the largest magnitude of the small scales."""

    layout: BlockLayout
    levels: CodeLevels
    most: int = 0
    one_byte: str = ""  # how scales of one byte are stored: as powers of two (E8M0), or as fp8 (F8_E4M3)

    def fields(self, blocks: Tensor) -> BlockScales:
        """Return the scales; InvalidPart for those that are not finite values."""
        layout = self.layout
        if layout.d is None:
            raw = blocks[:, : layout.subs]
            if bool((raw >= NO_NUMBER[self.one_byte]).any()):
                raise InvalidPart("a scale is not a number")
            if self.one_byte == E4M3:
                return BlockScales(from_fp8(raw, E4M3, 0.5).view(raw.shape))
            return BlockScales(power_of_two(raw.int() - 128))
        d = half(blocks, layout.d)
        m = None if layout.m is None else half(blocks, layout.m)
        for scale in (d, m):
            if scale is not None and not bool(scale.isfinite().all()):
                raise InvalidPart("a scale is not a number")
        if layout.scales is None:
            return BlockScales(d, m)
        return BlockScales(d, m, *layout.scales.unpack(blocks[:, layout.scales.start : layout.scales.stop]))

    def put_fields(self, fields: BlockScales, rows: Tensor | slice, blocks: Tensor) -> None:
        """Write the scales of some blocks."""
        layout, chosen = self.layout, blocks[rows]
        if self.one_byte == E4M3:
            chosen[:, : layout.subs] = cut_to_fp8(2 * fields.d, E4M3)
        elif layout.d is None:
            chosen[:, :1] = (torch.frexp(fields.d).exponent + 127).to(torch.uint8)
        else:
            put_half(chosen, layout.d, fields.d)
        if layout.m is not None and fields.m is not None:
            put_half(chosen, layout.m, fields.m)
        if layout.scales is not None:
            small = [t for t in (fields.sc, fields.mn) if t is not None]
            if fields.mn is not None:
                small = [t.to(torch.uint8) for t in small]
            chosen[:, layout.scales.start : layout.scales.stop] = layout.scales.pack(tuple(small))
        blocks[rows] = chosen


BLOCK_KINDS: Final[Mapping[str, BlockType]] = MappingProxyType({
    name: BlockType(BIT_LAYOUTS[name], levels, *more)
    for name, levels, *more in (
        ("Q4_0", CodeLevels(-8, -8, 7)),
        ("Q4_1", CodeLevels(0, 0, 15)),
        ("Q5_0", CodeLevels(-16, -16, 15)),
        ("Q5_1", CodeLevels(0, 0, 31)),
        ("Q8_0", CodeLevels(-128, -127, 127)),
        ("Q2_K", CodeLevels(0, 0, 3), 15),
        ("Q3_K", CodeLevels(-4, -4, 3), 31),
        ("Q4_K", CodeLevels(0, 0, 15), 63),
        ("Q5_K", CodeLevels(0, 0, 31), 63),
        ("Q6_K", CodeLevels(-32, -32, 31), 127),
        ("IQ4_NL", CodeLevels(0, -127, 113, IQ4)),
        ("IQ4_XS", CodeLevels(0, -127, 113, IQ4), 31),
        ("MXFP4", CodeLevels(0, -12, 12, FP4), 0, "E8M0"),
        ("NVFP4", CodeLevels(0, -12, 12, FP4), 0, E4M3),
        ("TQ1_0", CodeLevels(-1, -1, 1)),
        ("TQ2_0", CodeLevels(-1, -1, 1)),
    )
})  # fmt: skip
"""Type → how its values are made."""


def decode(name: str, raw: Tensor) -> Tensor:
    """Return the values of blocks, flat, in fp32; InvalidPart for scales that are not finite. `raw`: u8, flat."""
    kind = BLOCK_KINDS[name]
    blocks = raw.reshape(-1, GGML_TYPES[name].unit[1])
    fields = kind.fields(blocks)
    values = kind.levels.of(kind.layout.codes(blocks)).mul_(fields.scale().unsqueeze(-1))
    shift = fields.shift()
    return (values if shift is None else values.sub_(shift.unsqueeze(-1))).reshape(-1)


def encode(name: str, values: Tensor, raw: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Return blocks of new values, flat, u8. `values`: flat, finite; `raw`: the blocks before the change; `uniform`:
    draws for stochastic rounding.

    Raises OutOfRange for values that the type cannot hold.
    """
    kind = BLOCK_KINDS[name]
    old = raw.reshape(-1, GGML_TYPES[name].unit[1])
    sub_blocks, fields = values.reshape(len(old), kind.layout.subs, -1), kind.fields(old)
    if uniform is not None or not bool(fields.d.any()):
        return _encoded(kind, sub_blocks, old, fields, uniform).reshape(-1)
    # Nearly all blocks keep their scales, as their levels show; the others are read one sub-block at a time.
    levels, new = _levels(sub_blocks, fields.scale(), fields.shift()), old.clone()
    rows = _doubtful(kind.levels, levels, fields)
    kind.layout.put_codes(kind.levels.nearest(levels), new)
    if len(rows):
        new[rows] = _encoded(kind, sub_blocks[rows], old[rows], fields.at(rows), None)
    return new.reshape(-1)


def _encoded(kind: BlockType, values: Tensor, old: Tensor, fields: BlockScales, uniform: Tensor | None) -> Tensor:
    """Return new blocks [blocks, bytes] of values [blocks, sub-blocks, elements]. `fields`: the scales of the old."""
    new, room = old.clone(), torch.empty_like(values)
    low, high = ends_of_each(values, room)
    scale, shift = fields.scale(), fields.shift()
    margin = 0.5 if uniform is None else BARELY
    covered = _covers(kind.levels, scale, shift, (low, high), margin)
    if (rows := _open_rows(covered)) is not None:
        ends = low[rows].float(), high[rows].float()
        refitted = _refitted(kind, fields.at(rows), ends, covered[rows], margin)
        kind.put_fields(refitted, rows, new)
        scale = scale.expand(covered.shape).clone()
        scale[rows] = refitted.scale()
        if shift is not None and (part := refitted.shift()) is not None:
            shift = shift.expand(covered.shape).clone()
            shift[rows] = part
    levels = _levels(values, scale, shift, room)
    codes = kind.levels.nearest(levels) if uniform is None else kind.levels.drawn(levels, uniform.view(levels.shape))
    kind.layout.put_codes(codes, new)
    return new


def _levels(values: Tensor, scale: Tensor, shift: Tensor | None, room: Tensor | None = None) -> Tensor:
    """Return (number + shift) / scale, which `CodeLevels` rounds to codes; `room`: a tensor for the result."""
    divisor = torch.where(scale == 0, torch.inf, scale).unsqueeze(-1).to(values.dtype)  # 0 / inf is code 0
    if shift is None:
        return torch.div(values, divisor, out=room)
    return torch.add(values, shift.unsqueeze(-1), out=room).div_(divisor)


def _doubtful(levels: CodeLevels, new: Tensor, fields: BlockScales) -> Tensor:
    """Return the blocks that may have a sub-block whose scale does not cover it: those with a level close to half a
    step beyond the ends, without a scale, or with a shift so large that levels are not exact."""
    below, above = levels.gaps
    flat, scale, shift = new.flatten(1), fields.scale(), fields.shift()
    open_ = (flat.amin(1) < levels.low - SURE_STEPS * below) | (flat.amax(1) > levels.high + SURE_STEPS * above)
    open_ |= (scale == 0).any(1)
    if shift is not None:
        open_ |= (shift.abs() > scale.abs() * EXACT_STEPS).any(1)
    return open_.nonzero()[:, 0]


def _open_rows(covered: Tensor) -> Tensor | slice | None:
    """Return the blocks that have a sub-block which is not covered; None if there are none."""
    whole = covered.all(1)
    if bool(whole.all()):
        return None
    return whole.logical_not_().nonzero()[:, 0] if bool(whole.any()) else slice(None)


def _covers(
    levels: CodeLevels, scale: Tensor, shift: Tensor | None, of: tuple[Tensor, Tensor], margin: float
) -> Tensor:
    """Return which sub-blocks hold their values with at most half a step of error. `of`: their smallest and largest
    values. `margin`: steps by which a value may be beyond the ends, see `end_margin`."""
    (low, high), (below, above) = of, levels.gaps
    ends = scale * (levels.low - margin * below), scale * (levels.high + margin * above)
    if shift is not None:
        ends = ends[0] - shift, ends[1] - shift
    return (low >= torch.minimum(*ends)) & (high <= torch.maximum(*ends))


def _refitted(
    kind: BlockType, old: BlockScales, ends: tuple[Tensor, Tensor], covered: Tensor, margin: float
) -> BlockScales:
    """Return scales that cover the values from low to high; those that are covered keep theirs if they can."""
    low, high = ends
    if kind.one_byte == E4M3:
        return _fp8(kind.levels, old, torch.maximum(-low, high), covered, margin)
    if kind.one_byte:
        return _power(kind.levels, low, high)
    if kind.layout.m is None:
        return _symmetric(kind, old, ends, covered, margin)
    if kind.layout.scales is None:
        m = f16_beyond(low, up=False)
        return BlockScales(f16_beyond((high - m) / kind.levels.high), m)
    return _affine(kind, old, low, high, covered)


def _symmetric(
    kind: BlockType, old: BlockScales, ends: tuple[Tensor, Tensor], covered: Tensor, margin: float
) -> BlockScales:
    """Return scales without a shift. The wide end of the range takes the larger of both magnitudes."""
    levels, (low, high) = kind.levels, ends
    wide, narrow = -levels.low, levels.high
    if narrow < wide:
        narrow += RANGE_SLACK * margin * levels.gaps[1]
    up = torch.maximum(-low / wide, high / narrow)
    down = torch.maximum(high / wide, -low / narrow)
    needed = torch.where(up <= down, up, -down)
    if old.sc is None:
        return BlockScales(f16_near(needed) if margin > BARELY else f16_beyond(needed.abs()) * needed.sign())
    d = old.d
    sc = torch.where(covered, old.sc.float(), _up(needed, d))
    fits = (covered | (sc.abs() <= kind.most)).all(1, keepdim=True)
    # If a sub-block needs more than the largest small scale, the scale of the block grows, and all are made anew.
    largest = needed.abs().amax(1, keepdim=True)
    d = torch.where(fits, d, f16_beyond(largest / kind.most))
    sc = torch.where(fits, sc, _up(needed, d).clamp_(-kind.most, kind.most))
    return BlockScales(d, None, sc.to(torch.int16))


def _affine(kind: BlockType, old: BlockScales, low: Tensor, high: Tensor, covered: Tensor) -> BlockScales:
    """Return scales and minima. A minimum or step beyond the small values makes all of its kind anew."""
    assert old.m is not None
    assert old.sc is not None
    assert old.mn is not None
    depth, top = (-low).clamp_(min=0), kind.levels.high
    mn = torch.where(covered, old.mn.float(), _up(depth, old.m))
    fits = (old.m >= 0) & (mn <= kind.most).all(1, keepdim=True)
    m = torch.where(fits, old.m, f16_beyond(depth.amax(1, keepdim=True) / kind.most))
    mn = torch.where(fits, mn, _up(depth, m).clamp_(max=kind.most))
    needed = ((high + m * mn) / top).clamp_(min=0)
    sc = torch.where(covered & fits, old.sc.float(), _up(needed, old.d))
    fits = (old.d >= 0) & (sc <= kind.most).all(1, keepdim=True)
    d = torch.where(fits, old.d, f16_beyond(needed.amax(1, keepdim=True) / kind.most))
    sc = torch.where(fits, sc, _up(needed, d).clamp_(max=kind.most))
    return BlockScales(d, m, sc, mn)


def _up(needed: Tensor, unit: Tensor) -> Tensor:
    """Return the least whole numbers, by magnitude, whose multiples of the unit cover what is needed."""
    ratio = needed / unit
    return torch.where(needed == 0, 0.0, torch.where(unit == 0, torch.inf, ratio.abs().ceil() * ratio.sign()))


def _power(levels: CodeLevels, low: Tensor, high: Tensor) -> BlockScales:
    """Return the least powers of two that cover the values."""
    largest = torch.maximum(-low, high) / levels.high
    fraction, exponent = torch.frexp(largest)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    if int(exponent.max()) > 126:
        raise OutOfRange
    return BlockScales(power_of_two(torch.where(largest == 0, -128, exponent.clamp(min=-128))))


def _fp8(levels: CodeLevels, old: BlockScales, largest: Tensor, covered: Tensor, margin: float) -> BlockScales:
    """Return scales of sub-blocks, halves of fp8 values, that cover the values; those that do already stay."""
    needed = 2 * largest / levels.high
    if float(needed.max()) > FP8_LARGEST:
        raise OutOfRange
    codes = cut_to_fp8(needed, E4M3).view(needed.shape)
    reach = from_fp8(codes, E4M3, 0.5).view(needed.shape) * (levels.high + RANGE_SLACK * margin * levels.gaps[1])
    codes = codes + (reach < largest).to(codes.dtype)  # among the smallest fp8 values
    return BlockScales(torch.where(covered, old.d, from_fp8(codes, E4M3, 0.5).view(needed.shape)))


def f16_near(values: Tensor) -> Tensor:
    """Return values of f16 near the values; if f16 is coarse, the next one by magnitude. Result in fp32."""
    near = _f16(values)
    return _moved(near, near.float().abs() < values.abs() * (1 - 2.0**-10), 1)


def f16_beyond(values: Tensor, *, up: bool = True) -> Tensor:
    """Return the nearest values of f16 at or above the values, with `up`, or at or below them. Result in fp32."""
    if not up:
        return -f16_beyond(-values)
    near = _f16(values)
    return _moved(near, near.float() < values, torch.where(values > 0, 1, -1).to(torch.int16))


def _moved(values: Tensor, where: Tensor, step: Tensor | int) -> Tensor:
    """Return f16 values, in fp32, those chosen moved by a step of their magnitude."""
    moved = torch.where(where, (values.view(torch.int16) + step).view(torch.float16), values).float()
    if not bool(moved.isfinite().all()):
        raise OutOfRange
    return moved


def _f16(values: Tensor) -> Tensor:
    if float(values.abs().amax()) > F16_LARGEST:
        raise OutOfRange
    return values.to(torch.float16)
