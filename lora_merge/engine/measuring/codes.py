"""Measures outputs of codes: the rows that are looked at are encoded once more, and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from ..storing.recoding import Codes, read_back
from ..tensors import Fetch
from .watch import Stored, Watch

if TYPE_CHECKING:
    from ...measure import Measured
    from ..blocks import Block


class Part(NamedTuple):
    """The rows of one block that are looked at, and the codes that the base has for them."""

    block: Block
    height: int  # the first rows of the block
    base: Tensor  # bytes

    def stored(self, values: Tensor, uniform: Tensor | None, fetch: Fetch) -> Tensor | None:
        """Return flat the numbers that the codes of some stand for; None where no scale covers them."""
        first = self.block.first * self.block.cols
        return read_back(self.block.target, first, values, Codes(self.base, uniform), fetch)


def part(watch: Watch, number: int, base: Tensor) -> Part:
    """Return the rows of a block that are looked at. `base`: the stored numbers of the block."""
    block, rows = watch.blocks[number], len(watch.rows[number])
    encoding = block.target.weight.packing.encoding
    return Part(block, rows, base[:0] if encoding.plain else base[: encoding.nbytes(rows * block.cols)])


def measured(
    watch: Watch, parts: Sequence[Part], draws: Sequence[Tensor | Literal[False] | None], fetch: Fetch
) -> tuple[Measured, ...]:
    """Return the measures of blocks, but for those whose codes cannot be made yet (False). `draws`: uniform numbers for
    stochastic rounding."""
    host = watch.on_host()
    target, merged = watch.blocks[0].target, host.work.select(0, 1)

    def held(values: Tensor, draws: Sequence[Tensor | Literal[False] | None]) -> Tensor:
        made = values.clone()
        for own, p, draw in zip(made.unbind(), parts, draws, strict=True):
            found = None if draw is False else p.stored(own, draw, fetch)
            if found is not None:
                own.copy_(found.view(own.shape))
        return made

    stored = None
    if not target.weight.padded:
        same = target.weight.packing.encoding is target.packing.encoding
        stored = Stored(lambda values: held(values, [None] * len(parts)), held(merged, draws), same)
    every = host.measured(host.sums(stored), known=stored is not None)
    return tuple(one for one, draw in zip(every, draws, strict=True) if draw is not False)
