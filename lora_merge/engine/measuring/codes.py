"""Measures outputs of codes: the sampled rows are read back from the new codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..storing.recoding import Codes, NewParts, read_back
from ..tensors import Fetch
from .row_sample import RowSample, Stored
from .run_sample import same

if TYPE_CHECKING:
    from ...measure import Measured


def sample_width(sample: RowSample | None) -> int:
    """Return how many of the first numbers of each block are in its sample."""
    return sample.work.shape[2] if sample is not None else 0


def measure_codes(
    own: RowSample, bases: Sequence[Tensor], made: Sequence[NewParts], fetch: Fetch
) -> tuple[Sequence[Measured], Sequence[RowSample]]:
    """Return (measures of blocks, samples that are still to be added up); one of the two is empty.

    `own`: the sample of the blocks, on the host; `bases`: their stored numbers, which new codes may overwrite
    afterwards; `made`: their new codes.
    """
    target = own.blocks[0].target
    if target.weight.padded:
        return own.measured(own.sums(None), known=False), ()
    base, merged, _ = own.work.unbind()
    size = target.weight.packing.encoding.nbytes(sample_width(own))

    def nearest(values: Tensor) -> Tensor:
        """Return what the output would hold for some numbers."""

        def one(n: int, some: Tensor) -> Tensor | None:
            block = own.blocks[n]
            codes = Codes(bases[n][: size if same(target) else 0], None)
            return read_back(block.target, block.first * block.cols, some, codes, fetch)

        return _each(values, one)

    own = replace(own, found=_each(merged, lambda n, _: made[n].seen),
                  before=None if same(target) else nearest(base))  # fmt: skip
    if not own.parts:
        return (), (own.thinned(),)
    return own.measured(own.sums(Stored(nearest, same(target))), known=True), ()


def _each(values: Tensor, of: Callable[[int, Tensor], Tensor | None]) -> Tensor:
    """Return the numbers [n, width] that a function gives for each row; those of the row where it gives none."""
    made = torch.empty_like(values)
    for n, (old, new) in enumerate(zip(values.unbind(), made.unbind(), strict=True)):
        found = of(n, old)
        new.copy_(old if found is None else found.view(new.shape))
    return made
