"""One weight of the model with everything that changes it, and the layers that its change is stored as. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

from ...algorithms import ALGORITHMS
from ...disk.files import StoredTensor
from ...matching.patch import Patch, PatchPart
from ...models.weights import RowSlice
from ...shapes import Shape, flat

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Rows of a weight: (first row, end) of consecutive ones."""


class Part(NamedTuple):
    """Rows of a weight that are a module of their own in the adapters, such as q of a fused qkv."""

    name: str
    parameter: str
    runs: Runs  # in the order of the module's rows

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(stop - start for start, stop in self.runs)

    def meets(self, piece: RowSlice) -> bool:
        """Return whether rows of the weight are among these."""
        return any(start < piece.stop and piece.start < stop for start, stop in self.runs)


@dataclass(frozen=True)
class Target:
    """One weight of the model with everything that changes it. `name` and `parameter` are its name in the output."""

    name: str
    parameter: str
    shape: Shape
    uses: tuple[PatchPart, ...]
    values: tuple[tuple[int, StoredTensor, float], ...] = ()  # (adapter, new value of the whole weight, strength)
    key: str = ""  # in the base
    parts: tuple[Part, ...] = ()  # as which the change is stored; (): as one
    runs: Runs = ()  # its rows of the base's weight; (): all
    turned: bool = False
    """Whether the base stores it [in, out], such as GPT-2, and the output [out, in] as all adapters."""

    @property
    def stored(self) -> tuple[Target, ...]:
        """The layers of the output that the change of the weight becomes."""
        return tuple(
            replace(self, name=p.name, parameter=p.parameter, shape=(p.rows, *self.shape[1:]), parts=(), runs=p.runs,
                    uses=tuple(use for use in self.uses if p.meets(use.piece)))
            for p in self.parts
        ) or (self,)  # fmt: skip

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) as the uses see the weight; stacked experts [E, out, in] are E·out rows."""
        cols = self.uses[0].piece.cols if self.uses else 0
        return (prod(self.shape) // cols, cols) if cols else flat(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether the weight is that of several experts."""
        return self.matrix != flat(self.shape)

    @property
    def vector(self) -> bool:
        """Whether it has no factors: one axis, or a bias of any shape, such as [1, out, 1, 1]."""
        return len(self.shape) < 2 or self.parameter == "bias"

    @property
    def norm(self) -> bool:
        """Whether an adapter has it under an ending of norms, such as .w_norm."""
        return any(info.name.endswith("_norm") for use in self.uses for info in use.patch.module.slots.values())

    @property
    def label(self) -> str:
        """The name of the layer for reports."""
        return self.name if self.parameter == "weight" else f"{self.name}.{self.parameter}"


def is_plain(patch: Patch) -> bool:
    """Return whether a patch is a product of two factors with a scale, and nothing else."""
    row = ALGORITHMS[patch.algorithm]
    return {"up", "down"} == patch.module.slots.keys() and row.rank is not None and row.low_rank is not None
