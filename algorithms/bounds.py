"""Whole numbers out of files, each between two ends: the one place that looks at indices, seeds, counts and lengths.

One end is not enough: an index of −1 means the last entry to torch and numpy, and on CUDA an index that is too small
or too large ends the process's GPU. Nor is Python's own reading: `int` takes "٣", "1_0" and, up to a limit that makes
it raise another error, numbers of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

DIGITS: Final = 20
"""Of a number in a text; 2**64 has so many."""


@dataclass(frozen=True)
class Bounds:
    """The whole numbers from `low` up to, but not including, `end`."""

    low: int
    end: int

    def number(self, value: object) -> int | None:
        """Return the number that a value of a file is: a whole number, or a text of ASCII digits; None for any other
        value, and for a number outside."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= DIGITS:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return int(value) if whole and self.low <= value < self.end else None  # type: ignore[operator, call-overload]

    def hold(self, numbers: Tensor) -> bool:
        """Return whether all of these integers (any shape, int64) lie inside."""
        return not numbers.numel() or bool(self.low <= int(numbers.min()) and int(numbers.max()) < self.end)

    def __str__(self) -> str:
        return f"{self.low} to {self.end - 1}" if self.low < self.end else "nothing"


def below(end: int) -> Bounds:
    """0 to end − 1: the indices of `end` things."""
    return Bounds(0, end)


COUNT: Final = below(2**63)
"""What counts things: torch's sizes are 64 bits wide."""

SEED: Final = Bounds(-(2**63), 2**64)
"""What torch.Generator.manual_seed takes."""


def outside(numbers: Tensor, bounds: Sequence[Bounds]) -> Bounds | None:
    """Return the first bounds that these integers leave: one for all of them, or one for each entry of their first
    axis.
    """
    parts = [numbers] if len(bounds) == 1 else numbers.unbind()
    return next((one for part, one in zip(parts, bounds, strict=True) if not one.hold(part)), None)
