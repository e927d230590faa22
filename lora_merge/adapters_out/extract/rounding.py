"""The rounding errors of stored numbers, which a difference of two checkpoints holds beside what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...engine.by_rows.rows import Rows

DIGITS: Final[Mapping[str, tuple[int, int]]] = {
    "F64": (53, -1021),
    "F32": (24, -125),
    "F16": (11, -13),
    "BF16": (8, -125),
}
"""Dtype → (bits of its significand, the exponent that `frexp` gives its smallest normal number)."""

NARROW: Final = frozenset({"F16", "BF16"})
"""Dtypes of 16 bits, in which a difference may be mostly rounding."""

SAMPLE: Final = 2**16
"""The most numbers of a weight by which its rounding errors are told."""


def mean_square(values: Rows, dtypes: frozenset[str]) -> float | None:
    """Return the mean square of the rounding errors: step² / 12, where a number's step is 2^(exponent − digits)."""
    if len(dtypes) != 1 or not dtypes <= DIGITS.keys():
        return None
    digits, least = DIGITS[next(iter(dtypes))]
    total = 0.0
    for _, some in values.blocks():
        wide = some.double() if some.dtype == torch.float64 else some.float()
        steps = torch.frexp(wide).exponent.clamp_min(least) - least  # counted by size, as there are few sizes
        counts = torch.bincount(steps.reshape(-1)).double()
        total += float((counts * 4.0 ** (torch.arange(len(counts), dtype=torch.float64) + least - digits)).sum())
    return total / max(values.numel(), 1) / 12
