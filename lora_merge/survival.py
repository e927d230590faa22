"""The share of a change that survives in an output, how it is judged, and the words for it.

One measure for all commands, `share` in their reports, as `survived` defines it: the intended change Δ and the change Δ̂
that the output makes are compared by what Δ̂ has of Δ, and by how far it is from Δ. What a rank leaves out is at right
angles to what it keeps: there the share is 1 − ‖Δ − Δ̂‖² / ‖Δ‖², the `energy` in reports of written adapters, and what
the rule `--rank energy:x` keeps at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from .text import Note


class Grade(NamedTuple):
    """A judgement on the share of a change that survives."""

    word: str
    least: float
    style: str  # its colour on a terminal and on a page


GRADES: Final = (
    Grade("good", 0.99, "green"), Grade("fair", 0.95, "cyan"), Grade("weak", 0.9, "yellow"),
    Grade("poor", -math.inf, "red"),
)  # fmt: skip
"""The bounds of judgements, for text, terminals, pages and JSON."""

ENOUGH: Final = GRADES[1].least
"""A share from which on nothing is advised."""

TARGETS: Final = (GRADES[2].least, GRADES[1].least, GRADES[0].least)
"""The shares for which reports have the rank of a layer."""

TWICE: Final = 2.0
"""Warnings name rounding noise that is so many times as large as the change."""

NOTHING, LOST = "nothing", "lost in rounding"
"""A share of nothing in words, and the judgement on it."""


def survived(applied: float, noise: float) -> float:
    """Return the share of a change Δ that survives in the change Δ̂ of the output, 0 to 1: a / (a + n).

    `applied`: a = ⟨Δ̂, Δ⟩, what Δ̂ has of Δ; `noise`: n = ‖Δ̂ − Δ‖², both in the same unit. Of `retained` = a / ‖Δ‖² and
    `noise` = √n / ‖Δ‖ in reports of merges it is retained / (retained + noise²).

    It is 1 if Δ̂ is Δ, and 0 if Δ̂ is nothing, or has nothing of Δ. Of a Δ that is written with rounding noise it is
    ‖Δ‖² / (‖Δ‖² + n), signal / (signal + noise), ½ at noise as large as the change; of a projection of Δ it is ‖Δ̂‖² /
    ‖Δ‖², as of a cut to a rank. As a + n = ‖Δ‖² + ‖Δ̂‖² − a, it is the Jaccard index of real vectors (Tanimoto 1958).
    """
    return applied / (applied + noise) if applied > 0 else 0.0


def grade(share: float) -> Grade:
    """Return the judgement on a share."""
    return next((row for row in GRADES if share >= row.least), GRADES[-1])


def worst(shares: Iterable[float]) -> float | None:
    """Return the share that is judged worst; None without shares."""
    return min(shares, key=lambda share: (-GRADES.index(grade(share)), share), default=None)


def target(share: float) -> float:
    """Return the share to aim at instead of one that is not enough: the lowest better grade."""
    return next(least for least in TARGETS if share < least)


def percent(share: float) -> float:
    """Return a share in percent, 0 to 100, with few digits, which lead to the same judgement as the share itself."""
    rounded = round(100 * share, 0 if 0.01 <= share < GRADES[2].least else 1)
    return rounded if grade(rounded / 100) is grade(share) else math.floor(1000 * share) / 10


def spoken(share: float | None) -> str:
    """Return a share in words: "99.8 %", or "nothing"."""
    return "?" if share is None else f"{percent(share):g} %" if percent(share) else NOTHING


def judged(share: float, of: str = "") -> str:
    """Return a share of something with its judgement: "60 % of the change (poor)"."""
    return f"{spoken(share)}{f' of {of}' * bool(of)} ({grade(share).word if percent(share) else LOST})"


def lost(share: float) -> str:
    """Return the share of a change that does not survive: "40 %"."""
    return f"{100 - percent(share):.3g} %"


def lost_in_rounding(share: float, noise: float, adapter: str, dtypes: str, fix: str) -> Note:
    """Return the warning about a share of an adapter's change that is not enough. `noise`: ‖Δ̂ − Δ‖ / ‖Δ‖; `fix`: what
    can be done."""
    larger = f", which is {float(f'{noise:.2g}'):g} times as large" if noise >= TWICE else ""
    return Note(f"{lost(share)} of the change of {adapter} is lost in the rounding to {dtypes}{larger}; {fix}")


def judgement(adapter: str, share: float | None) -> dict[str, Any]:
    """Return the share of an adapter's change that survives a merge and its judgement, for reports."""
    return {"adapter": adapter, "share": share, "grade": None if share is None else grade(share).word}
