"""The memory that a decomposition needs, from shapes alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ...text import Note, size
from ..form import Form
from ..rank_rules import Rule

NUMBER_BYTES: Final = 4
"""Bytes of each number of ΔW while it is searched, in fp32."""

FACTOR_BYTES: Final = 40
"""Bytes of each number of its factors: in fp64 as they are found, scaled, stored, and compared."""

Task = tuple[str, tuple[int, int], Rule]
"""The name of a layer, (out, cols), and its rule."""


def bytes_for(task: Task) -> int:
    """Return about how many bytes the decomposition of a ΔW without factors holds at most; a rank that numbers decide
    may be the highest."""
    _, (out, cols), rule = task
    rank = min(out, cols, rule.ceiling or min(out, cols))
    return NUMBER_BYTES * out * cols + FACTOR_BYTES * (out + cols) * rank


def note(layers: Iterable[tuple[str, tuple[int, int], Form]], limit: int) -> list[Note]:
    """Return the note about a layer whose decomposition as a whole matrix may hold more than a limit of bytes, if there
    is one. `layers`: name, (out, cols) and form of each."""
    tasks = ((name, matrix, form.rule) for name, matrix, form in layers if form.dense)
    largest = max(tasks, key=bytes_for, default=None)
    if largest is None or bytes_for(largest) <= limit:
        return []
    name, _, rule = largest
    fix = "" if rule.ceiling is not None else "; --max-rank makes that less"
    return [Note(f"{name} is decomposed as a whole matrix, which takes up to {size(bytes_for(largest))} of memory at "
                 f"once, more than --max-memory{fix}")]  # fmt: skip
