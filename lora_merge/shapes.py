"""Shapes of tensors. Imports nothing, so that whoever names a shape does not load the formulas."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


def flat(shape: Shape) -> tuple[int, int]:
    """Return (rows, cols) of a weight: axis 0, and all other axes flattened; a vector is a column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
