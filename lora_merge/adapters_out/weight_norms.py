"""The norms of the base's weights that layers change, estimated from some of their rows. No torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

import numpy as np

from ..disk.reader import Reader
from .groups import Target
from .sources import NOWHERE, Sources

NORM_SAMPLE: Final = 2**14
"""The numbers of a weight of the base from which its norm is estimated, at least, in whole rows."""


def weight_norms(sources: Sources, reader: Reader) -> Callable[[Target], float | None]:
    """Return a function that returns ‖W‖² of the rows of the base's weight that a layer changes, from some of them that
    are spread evenly; None without a base, and of a weight that is not stored whole."""
    if sources.inputs is None or sources.inputs.base.path == NOWHERE:
        return lambda _: None
    from ..proof.weights import WeightReader

    base = WeightReader(reader, sources.inputs.base)

    def squares(part: Target) -> float | None:
        weight = sources.weights.get(part.key)
        if weight is None or weight.padded:
            return None
        _, cols = part.matrix
        shape = (prod(weight.shape) // max(cols, 1), cols)
        rows = np.concatenate([np.arange(*run) for run in part.runs or ((0, shape[0]),)])
        some = rows[:: max(1, len(rows) // max(1, -(-NORM_SAMPLE // max(cols, 1))))]
        values = base(weight.stored, shape, some)
        return float(np.vdot(values, values)) * len(rows) / max(len(some), 1)

    return squares
