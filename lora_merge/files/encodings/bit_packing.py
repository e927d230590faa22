"""Packs and unpacks whole numbers of few bits: in bytes, streams of bits and words. Imported when codes are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .arithmetic import in_halves
from .base import whole_bytes

if TYPE_CHECKING:
    from torch import Tensor

PLANES: Final = {
    3: (*(((b, 0, 7, 0),) for b in range(3)), *(((b, 3, 7, 0),) for b in range(3)),
        *(((b, 6, 3, 0), (2, 6 + b, 1, 2)) for b in range(2))),
    5: (*(((b, 0, 31, 0),) for b in range(5)), *(((b, 5, 7, 0), (3 + b, 5, 3, 3)) for b in range(2)),
        ((2, 5, 7, 0), (3, 7, 1, 4), (4, 7, 1, 3))),
    6: (*(((b, 0, 63, 0),) for b in range(3)), ((0, 6, 3, 4), (1, 6, 3, 2), (2, 6, 3, 0))),
    7: (*(((b, 0, 127, 0),) for b in range(7)), tuple((b, 7, 1, 6 - b) for b in range(7))),
}  # fmt: skip
"""Bits → for each number that is packed together its parts: byte, the part's lowest bit there, a mask, its place in the
number. https://github.com/Disty0/sdnq src/sdnq/packed_int/unpack.py."""


def from_nibbles(raw: Tensor) -> Tensor:
    """Return the whole numbers of 4 bits in bytes [..., n], the lower half first, as int16."""
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2).to(torch.int16)


def from_stream(raw: Tensor, bits: int) -> Tensor:
    """Return the whole numbers of 2 to 8 bits in a stream of bytes, lowest bits first; eight take `bits` bytes."""
    if bits == 8:
        return raw.to(torch.int16)
    if bits == 4:
        return from_nibbles(raw)
    places = torch.arange(8)
    words = (raw.view(-1, bits).to(torch.int64) << 8 * places[:bits]).sum(1, keepdim=True)
    return (words >> bits * places).bitwise_and_(2**bits - 1).view(-1)


def in_stream(integers: Tensor, bits: int) -> Tensor:
    """Return the stream of bytes that holds whole numbers of 2 to 8 bits."""
    if bits == 8:
        return integers.to(torch.uint8).view(-1)
    if bits == 4:
        return in_halves(integers.to(torch.uint8), high_first=False)
    places = torch.arange(8)
    words = (integers.reshape(-1, 8).to(torch.int64) << bits * places).sum(1, keepdim=True)
    return (words >> 8 * places[:bits]).bitwise_and_(255).to(torch.uint8).view(-1)


def from_planes(raw: Tensor, bits: int) -> Tensor:
    """Return the whole numbers of 2 to 7 bits in bytes as SDNQ packs them, as uint8.

    Some of the values that are packed together are in the lowest bits of a byte each; of the others, parts are above
    them: the higher a part of the number, the later the byte.
    """
    if bits in (2, 4):
        places = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (raw[:, None] >> places).bitwise_and_(2**bits - 1).view(-1)
    packed, size = whole_bytes(bits)
    words = raw.view(-1, size)
    integers = words.new_zeros(len(words), packed)
    for number, pieces in enumerate(PLANES[bits]):
        for byte, shift, mask, up in pieces:
            integers[:, number] |= (words[:, byte] >> shift & mask) << up
    return integers.view(-1)


def from_rows(raw: Tensor, bits: int, *, dense: bool) -> Tensor:
    """Return the whole numbers in rows of bytes [rows, n]: as many as a row can hold, lowest bits first.

    Dense rows are streams of bits; in others no number spans two words, whose highest bits may then be unused.
    """
    if not dense:
        return from_words(raw.contiguous().view(torch.int32), bits)[..., : 32 // bits].flatten(1)
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % bits)).contiguous()
    return from_stream(padded, bits).view(len(raw), -1)


def in_rows(integers: Tensor, bits: int, nbytes: int, *, dense: bool) -> Tensor:
    """Return the rows of bytes [rows, nbytes] that hold what `from_rows` returned."""
    if dense:
        return in_stream(integers, bits).view(len(integers), -1)[:, :nbytes]
    each = 32 // bits
    words = integers.view(len(integers), -1, each).to(torch.int64) << bits * torch.arange(each)
    return words.sum(2).to(torch.int32).view(torch.uint8)


def by_group(groups: Tensor, size: int) -> Tensor | None:
    """Return the columns in the order of their groups; None unless every group has `size` columns."""
    counts = torch.bincount(groups.clamp(min=0)) if groups.numel() and int(groups.min()) >= 0 else None
    if counts is None or not bool((counts == size).all()):
        return None
    return groups.argsort(stable=True)


def from_words(words: Tensor, bits: int) -> Tensor:
    """Return the whole numbers in words [..., n], from the lowest bits on: [..., n, 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.bitwise_right_shift(words[..., None], shifts).bitwise_and(2**bits - 1)
