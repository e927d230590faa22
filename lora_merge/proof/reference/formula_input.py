"""The input of a reference formula: one module's tensors, its scalars, and the weight that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...errors import VerificationFailed
from .floats import Array


@dataclass(frozen=True)
class FormulaInput:
    """One module on one weight. All arrays are float64 (indices int64) and read when a formula uses them."""

    read: Callable[[str, Array | None], Array]  # (slot, entries of axis 0 or all) → the stored tensor
    base: Callable[[Array | None], Array]  # rows of the weight, or all: [rows, cols]
    slots: frozenset[str]
    scalars: Mapping[str, float]  # scale, limit …, as the plan resolved them
    settings: Mapping[str, Any]
    shape: tuple[int, ...]  # of the weight
    rows: Array  # wanted rows of ΔW
    matrix: tuple[int, int]  # (rows, cols) of the weight as a matrix

    def __getitem__(self, slot: str) -> Array:
        """Return a whole stored tensor."""
        return self.read(slot, None)

    def some(self, slot: str) -> Array:
        """Return the wanted rows of a stored tensor that has one entry per row of the weight."""
        return self.read(slot, self.rows)

    def places(self, slot: str, *ends: int, wrapped: int = 0) -> Array:
        """Return stored indices, [len(ends), …], where 0 ≤ index < `ends[k]` in axis k; [count] for a single axis.

        `wrapped` is added to negative indices, where the format stores large ones so. VerificationFailed for any other
        index: numpy would count it from the end, or as one of another row.
        """
        values = self[slot]
        indices = values.astype(np.int64)
        indices = np.where(indices < 0, indices + wrapped, indices)
        indices = indices.reshape(len(ends), *(indices.shape if len(ends) == 1 else indices.shape[1:]))
        for axis, end in zip(indices, ends, strict=True):
            wrong = axis[(axis < 0) | (axis >= end)]
            if wrong.size or (values % 1 != 0).any():
                where = f"{slot} has {wrong.flat[0]} of {end}" if wrong.size else slot
                what, fix = "the adapter's indices point outside of what they count", "use an earlier save of it"
                raise VerificationFailed(what, where, fix)
        return indices if len(ends) > 1 else indices[0]

    @property
    def w(self) -> Array:
        """The wanted rows of the weight, [rows, cols]."""
        return self.base(self.rows)

    @property
    def all_w(self) -> Array:
        """The whole weight, [out, cols]."""
        return self.base(None)

    @property
    def out(self) -> int:
        """Rows of the weight."""
        return self.matrix[0]

    @property
    def cols(self) -> int:
        """Columns of the flattened weight."""
        return self.matrix[1]


Formula: TypeAlias = Callable[[FormulaInput], Array]
"""Returns ΔW at strength 1 for the wanted rows, [rows, cols]."""


@dataclass(frozen=True)
class Reference:
    """A formula and what it costs."""

    formula: Formula
    whole: bool = False  # whether a row costs as much as the whole tensor
    loss: float = 1.0  # how many times more rounding the production formula may show (factorisations)
    linear: str = ""
    """The slot whose columns are those of ΔW, which is a product with it; of modules without a Tucker core."""
