"""What a layer's change is like, number by number: the largest, and the share that are not zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ...engine.by_rows.rows import Rows

RUN: Final = 512
"""Numbers whose squares are summed in fp32. The errors of many such sums are within 1e-7 of the whole."""

SMALL, LARGE = 1e-20, 1e20
"""Bounds of a sum of squares between which fp32 holds the squares of all numbers."""

WORK: Final = 2**21
"""Multiplications for the rows of a product of factors that are looked at."""

LEAST: Final = 8
"""Rows of such a product that are looked at at least."""


class Effect(NamedTuple):
    """The numbers of ΔW."""

    of: int
    elements: int  # of them, those that were looked at: whole rows, spread evenly
    changed: int | None  # of these, those that are not zero; None of a product of factors, in which none is zero
    largest: float  # |ΔW| of these

    @property
    def told(self) -> dict[str, Any]:
        """The same for reports, in the words of a merge."""
        share = {} if self.changed is None else {"changed": self.changed / self.elements if self.elements else 0.0}
        return {"of": self.of, "elements": self.elements, **share, "largest": self.largest}


def effect_of_matrix(change: Tensor, of: int | None = None) -> Effect:
    """Return the effect of numbers, all of which are looked at; they stand for `of`."""
    count = change.numel()
    largest = max(-float(change.amin()), float(change.amax())) if count else 0.0  # half the time of aminmax()
    return Effect(of or count, count, int(change.count_nonzero()), largest)


class Totals(NamedTuple):
    """‖Δ‖² and the effect of Δ, or of some of its rows: those of several blocks of rows add up."""

    squares: float  # ‖Δ‖²
    effect: Effect

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        one, two = self.effect, other.effect
        changed = None if one.changed is None or two.changed is None else one.changed + two.changed
        whole = Effect(one.of + two.of, one.elements + two.elements, changed, max(one.largest, two.largest))
        return Totals(self.squares + other.squares, whole)


NOTHING: Final = Totals(0.0, Effect(0, 0, 0, 0.0))


def totals_of(block: Tensor) -> Totals:
    """Return the totals of some rows."""
    return Totals(squares(block), effect_of_matrix(block))


def squares(block: Tensor) -> float:
    """Return the sum of the squares of all numbers.

    Runs of numbers are summed in fp32 where their dtype and size allow it: that takes a quarter of the time of fp64.
    """
    import torch

    if block.dtype in (torch.float32, torch.float16, torch.bfloat16) and block.numel() >= RUN:
        flat = block.reshape(-1)
        end = len(flat) // RUN * RUN
        runs = torch.linalg.vector_norm(flat[:end].view(-1, RUN), dim=1, dtype=torch.float32)
        found = float(runs.double().square().sum()) + float(flat[end:].double().square().sum())
        if SMALL < found < LARGE:
            return found
    return float(block.double().square().sum())


def squares_of_rows(matrix: Rows) -> float:
    """Return the sum of the squares of all numbers."""
    return sum(squares(block) for _, block in matrix.blocks(owned=False))


def totals_of_rows(change: Rows) -> Totals:
    """Return the totals of all rows."""
    return sum((totals_of(block) for _, block in change.blocks(owned=False)), NOTHING)


def effect_of_product(left: Tensor, right: Tensor) -> Effect:
    """Return the effect of the product of two factors, by some of its rows."""
    rows = max(LEAST, WORK // max(right.numel(), 1))
    step = max(1, left.shape[0] // rows)
    return effect_of_matrix(left[::step] @ right, left.shape[0] * right.shape[1])._replace(changed=None)


def together(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the effect of several layers, as reports tell it of one; {} where it is not known of all."""
    every = [*layers]
    if not every or any("largest" not in one for one in every):
        return {}
    numbers, share = sum(one["of"] for one in every), {}
    if all("changed" in one for one in every):
        share = {"changed": fsum(one["changed"] * one["of"] for one in every) / numbers if numbers else 0.0}
    return {
        "of": numbers, "elements": sum(one["elements"] for one in every), **share,
        "largest": max(one["largest"] for one in every),
    }  # fmt: skip
