"""The places of codes and scales in the blocks of GGUF types. Imported where weights are decoded.

https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h. Blocks are `[blocks, bytes]`, u8; codes are `[blocks,
sub-blocks, elements]`, u8; the scales of sub-blocks are `[blocks, sub-blocks]`, whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import Tensor

SmallScales: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class BitRange:
    """Codes in a range of bytes: each row of `width` bytes holds `fields` rows of codes, the lowest bits first."""

    start: int
    rows: int
    width: int
    bits: int

    @property
    def fields(self) -> int:
        """Return the number of codes in a byte."""
        return 8 // self.bits

    @property
    def stop(self) -> int:
        """Return the first byte behind the range."""
        return self.start + self.rows * self.width

    def unpack(self, blocks: Tensor) -> Tensor:
        """Return the codes, flat: [blocks, rows · fields · width]."""
        raw = blocks[:, self.start : self.stop].reshape(-1, self.rows, self.width)
        if self.bits == 8:
            return raw.reshape(len(raw), -1)
        mask = (1 << self.bits) - 1
        top = 8 - self.bits
        fields = [(raw >> at if at == top else (raw >> at) & mask) if at else raw & mask for at in _shifts(self.bits)]
        return torch.stack(fields, 2).reshape(len(raw), -1)

    def pack(self, codes: Tensor, blocks: Tensor) -> None:
        """Write codes, no wider than the bits, into the blocks."""
        rows = codes.reshape(-1, self.rows, self.fields, self.width)
        into = blocks[:, self.start : self.stop].view(-1, self.rows, self.width)
        if self.bits == 8:
            into.copy_(rows[:, :, 0])
            return
        first, *others = rows.unbind(2)
        for at, field in zip(_shifts(self.bits)[1:], others, strict=True):
            first = torch.add(first, field, alpha=1 << at, out=into)  # a shift of u8 takes ten times as long


@dataclass(frozen=True)
class Digits:
    """Codes 0, 1, 2 in ranges of bytes of so many rows of `width` bytes: a byte holds five digits of base 3, as the
    fraction digits / 3⁵ of 256, rounded up; the last range of TQ1_0 leaves the fifth digit out."""

    ranges: tuple[tuple[int, int, int], ...]  # (first byte, width, digits)
    bits: int = 2

    def unpack(self, blocks: Tensor) -> Tensor:
        """Return the codes, flat."""
        codes = []
        for start, width, digits in self.ranges:
            raw = blocks[:, None, start : start + width].int() * 3 ** torch.arange(digits)[None, :, None]
            codes.append(((raw & 255) * 3 >> 8).to(torch.uint8).flatten(1))
        return torch.cat(codes, 1)

    def pack(self, codes: Tensor, blocks: Tensor) -> None:
        """Write codes into the blocks."""
        at = 0
        for start, width, digits in self.ranges:
            rows = codes[:, at : at + width * digits].reshape(-1, digits, width).int()
            whole = (rows * 3 ** torch.arange(4, 4 - digits, -1)[None, :, None]).sum(1)
            blocks[:, start : start + width] = ((whole * 256 + 242) // 243).to(torch.uint8)
            at += width * digits


@cache
def _shifts(bits: int) -> tuple[int, ...]:
    return tuple(range(0, 8, bits))


@dataclass(frozen=True)
class ScaleBits:
    """The small scales of sub-blocks in a range of bytes."""

    start: int
    stop: int
    unpack: Callable[[Tensor], SmallScales]
    pack: Callable[[SmallScales], Tensor]


def _nibbles(raw: Tensor) -> SmallScales:
    return raw & 15, raw >> 4


def _from_nibbles(parts: SmallScales) -> Tensor:
    low, high = parts
    return low | high << 4


def _six_bit_pairs(raw: Tensor) -> SmallScales:
    """Return sc and mn of Q4_K and Q5_K: eight of six bits each in twelve bytes."""
    a, b, c = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    sc = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], 1)
    mn = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], 1)
    return sc, mn


def _from_six_bit_pairs(parts: SmallScales) -> Tensor:
    sc, mn = parts
    a = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    b = mn[:, :4] | (mn[:, 4:] >> 4) << 6
    return torch.cat([a, b, (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4], 1)


def _q3_scales(raw: Tensor) -> SmallScales:
    """Return the scales of Q3_K: sixteen of six bits, less 32."""
    low = torch.cat([raw[:, :8] & 15, raw[:, :8] >> 4], 1)
    high = torch.cat([(raw[:, 8:] >> at) & 3 for at in (0, 2, 4, 6)], 1)
    return ((low | high << 4).to(torch.int16) - 32,)


def _from_q3_scales(parts: SmallScales) -> Tensor:
    scales = (parts[0] + 32).to(torch.uint8)
    high = [(scales[:, 4 * n : 4 * n + 4] >> 4) << 2 * n for n in range(4)]
    return torch.cat([(scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4, high[0] | high[1] | high[2] | high[3]], 1)


def _signed_bytes(raw: Tensor) -> SmallScales:
    return (raw.contiguous().view(torch.int8).to(torch.int16),)


def _from_signed_bytes(parts: SmallScales) -> Tensor:
    return parts[0].to(torch.int8).view(torch.uint8)


def _iq4_scales(raw: Tensor) -> SmallScales:
    """Return the scales of IQ4_XS: eight of six bits, less 32; two bytes of high bits, four of low ones."""
    low = torch.stack([raw[:, 2:] & 15, raw[:, 2:] >> 4], 2).reshape(-1, 8)
    high = torch.stack([(raw[:, :2] >> at) & 3 for at in (0, 2, 4, 6)], 2).reshape(-1, 8)
    return ((low | high << 4).to(torch.int16) - 32,)


def _from_iq4_scales(parts: SmallScales) -> Tensor:
    scales = (parts[0] + 32).to(torch.uint8)
    low = scales.reshape(-1, 4, 2) & 15
    high = (scales >> 4).reshape(-1, 2, 4)
    top = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    return torch.cat([top, low[..., 0] | low[..., 1] << 4], 1)


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one type."""

    subs: int  # sub-blocks
    low: BitRange | Digits  # the low bits of the codes
    high: BitRange | None = None  # their high bits
    d: int | None = 0  # the first byte of the scale of the block, f16
    m: int | None = None  # that of its minimum, or of the scale of the minima, f16
    scales: ScaleBits | None = None

    def codes(self, blocks: Tensor) -> Tensor:
        """Return the codes: [blocks, sub-blocks, elements]."""
        codes = self.low.unpack(blocks)
        if self.high is not None:
            codes |= self.high.unpack(blocks) << self.low.bits
        return codes.reshape(len(blocks), self.subs, -1)

    def put_codes(self, codes: Tensor, blocks: Tensor) -> None:
        """Write codes into the blocks."""
        flat = codes.reshape(len(blocks), -1)
        if self.high is not None:
            self.high.pack(flat >> self.low.bits, blocks)
        self.low.pack(flat & ((1 << self.low.bits) - 1) if self.high is not None else flat, blocks)


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the f16 at a byte of every block, in fp32: [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def put_half(blocks: Tensor, at: int, values: Tensor) -> None:
    """Write values that f16 holds exactly."""
    blocks[:, at : at + 2] = values.to(torch.float16).view(torch.uint8).reshape(-1, 2)


_PAIRS: Final = (_six_bit_pairs, _from_six_bit_pairs)

BIT_LAYOUTS: Final[Mapping[str, BlockLayout]] = MappingProxyType({
    "Q4_0": BlockLayout(1, BitRange(2, 1, 16, 4)),
    "Q4_1": BlockLayout(1, BitRange(4, 1, 16, 4), m=2),
    "Q5_0": BlockLayout(1, BitRange(6, 1, 16, 4), BitRange(2, 4, 1, 1)),
    "Q5_1": BlockLayout(1, BitRange(8, 1, 16, 4), BitRange(4, 4, 1, 1), m=2),
    "Q8_0": BlockLayout(1, BitRange(2, 1, 32, 8)),
    "Q2_K": BlockLayout(16, BitRange(16, 2, 32, 2), d=80, m=82, scales=ScaleBits(0, 16, _nibbles, _from_nibbles)),
    "Q3_K": BlockLayout(16, BitRange(32, 2, 32, 2), BitRange(0, 1, 32, 1), 108, None,
        ScaleBits(96, 108, _q3_scales, _from_q3_scales)),
    "Q4_K": BlockLayout(8, BitRange(16, 4, 32, 4), m=2, scales=ScaleBits(4, 16, *_PAIRS)),
    "Q5_K": BlockLayout(8, BitRange(48, 4, 32, 4), BitRange(16, 1, 32, 1), m=2, scales=ScaleBits(4, 16, *_PAIRS)),
    "Q6_K": BlockLayout(16, BitRange(0, 2, 64, 4), BitRange(128, 2, 32, 2), 208, None,
        ScaleBits(192, 208, _signed_bytes, _from_signed_bytes)),
    "IQ4_NL": BlockLayout(1, BitRange(2, 1, 16, 4)),
    "IQ4_XS": BlockLayout(8, BitRange(8, 8, 16, 4), scales=ScaleBits(2, 8, _iq4_scales, _from_iq4_scales)),
    "MXFP4": BlockLayout(1, BitRange(1, 1, 16, 4), d=None),
    "NVFP4": BlockLayout(4, BitRange(4, 4, 8, 4), d=None),
    "TQ1_0": BlockLayout(1, Digits(((0, 32, 5), (32, 16, 5), (48, 4, 4))), d=52),
    "TQ2_0": BlockLayout(1, BitRange(0, 2, 32, 2), d=64),
})  # fmt: skip
"""Type → the layout of its blocks."""
