"""One parameter of both checkpoints. No torch."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...models.weights import WeightView
from ..places import Place


class Pair(NamedTuple):
    """One parameter: its place in the base, in the words of the dialect, and its rows in the tuned checkpoint."""

    place: Place
    tuned: WeightView
    fresh: bool = False  # whether its new value is stored, as the base lacks it or has other rows; `place` is in tuned
    before: WeightView | None = None  # the rows that the base has of a fresh one
    head: str = ""  # the key of a head whose weight the base shares with its embeddings

    @property
    def name(self) -> str:
        """The parameter as reports and errors name it."""
        return self.place.label

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers in fp32: what the work on it is measured by."""
        return 4 * prod(self.place.view.shape)
