"""Ranges of the whole numbers that files give: indices, seeds, counts and lengths.

Each range has two ends: torch and numpy read the index −1 as the last entry, and on CUDA an index out of range makes
the GPU unusable for the process. Texts are checked before `int` reads them, because `int` accepts "٣" and "1_0".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MOST_DIGITS: Final = 20
"""The most digits of a number in a text; 2**64 has 20."""


class Bounds(NamedTuple):
    """The whole numbers from `low` up to, but not including, `end`."""

    low: int
    end: int

    def number(self, value: object) -> int | None:
        """Return a value of a file, a whole number or a text of ASCII digits, as an int; None for any other value, and
        for a number outside the range."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return int(value) if whole and self.low <= value < self.end else None  # type: ignore[operator, call-overload]

    def hold(self, values: Tensor) -> bool:
        """Return whether all of these integers (any shape, int64) lie in the range."""
        return not values.numel() or bool(self.low <= int(values.min()) and int(values.max()) < self.end)

    def __str__(self) -> str:
        return f"{self.low} to {self.end - 1}" if self.low < self.end else "nothing"


def below(end: int) -> Bounds:
    """Return the range 0 to end − 1, the indices of `end` entries."""
    return Bounds(0, end)


COUNT: Final = below(2**63)
"""The range of counts: torch's sizes are 64 bits wide."""

SEED: Final = Bounds(-(2**63), 2**64)
"""The range of seeds that torch.Generator.manual_seed takes."""


def outside(values: Tensor, bounds: Sequence[Bounds]) -> Bounds | None:
    """Return the first range that these integers exceed, or None; `bounds` has one range for all integers, or one for
    each entry of their first axis."""
    parts = [values] if len(bounds) == 1 else values.unbind()
    return next((allowed for part, allowed in zip(parts, bounds, strict=True) if not allowed.hold(part)), None)
