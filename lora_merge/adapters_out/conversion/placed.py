"""The rows of a part of a module in the rows of the module that it becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.by_rows.rows import Rows
from ..places import Place, Share


def placed_rows(change: Rows, share: Share, place: Place) -> Rows:
    """Return the rows of a share in a matrix of the place's rows; the others are zero."""
    (out, _), cols = place.view.matrix, change.shape[1]
    if share.is_all(place):
        return change
    order = torch.full((out,), -1)
    for source, target, count in share.runs:
        order[target : target + count] = torch.arange(source, source + count)

    def read(rows: slice) -> Tensor:
        wanted = order[rows]
        found = torch.zeros(len(wanted), cols, dtype=torch.float64)
        there = wanted >= 0
        found[there] = change.of_rows(wanted[there]).dense().double()
        return found

    return Rows((out, cols), read)


def placed(rows: Tensor, share: Share, out: int) -> Tensor:
    """Return the rows of a share in a matrix of the place's rows; the others are zero."""
    found = rows.new_zeros(out, rows.shape[1])
    for source, target, count in share.runs:
        found[target : target + count] = rows[source : source + count]
    return found
