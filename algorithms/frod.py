"""FRoD, the weight written anew in a basis that all layers of a kind share: W' = U (S + diag(l)) Vᵀ. PEFT 0.21.2
tuners/frod/layer.py.

V is stored once for all layers that end in the same name. U follows from the untouched weight: its columns are those of
W V⁻ᵀ at length 1. S is zero but for some entries. Nothing of the untouched weight is left beside that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect, flat
from .bounds import below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices

SHORTEST = 1e-12
"""Columns that are shorter are zeros."""


@dataclass(frozen=True)
class FrodTensors:
    """The basis, and what the weight is in it."""

    diagonal: Tensor  # l, [n, in]
    values: Tensor  # of S, [n, m]
    basis: Tensor  # V, [n, in, in]; shared
    places: Indices  # rows and columns of S, [n, 2, m]; shared


def fit(shapes: Shapes, target: Shape) -> Shapes:
    """Shapes as stored."""
    expect(holds=len(target) == 2, otherwise=f"the weight is {list(target)}, FRoD is of linear layers alone")
    cols, count = flat(target)[1], shapes["values"]
    want = {"diagonal": (cols,), "values": count[:1], "basis": (cols, cols), "places": (2, *count)}
    for slot, shape in want.items():
        expect(holds=shapes[slot] == shape, otherwise=f"{slot} is {list(shapes[slot])}, not {list(shape)}")
    return want


def delta(base: Tensor, t: FrodTensors) -> Tensor:
    """ΔW [n, out, in] from the untouched `base`."""
    import torch

    try:
        turned = torch.linalg.solve(t.basis, base.mT).mT
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # singular; PEFT goes on so
        turned = base @ torch.linalg.pinv(t.basis, rtol=1e-6).mT
    length = turned.norm(dim=1, keepdim=True)
    kept = length > SHORTEST
    unit = torch.where(kept, turned / length.where(kept, length.new_ones(())), 0)
    inner = torch.diag_embed(t.diagonal)
    at = t.places[:, 0] * inner.shape[2] + t.places[:, 1]
    inner = inner.flatten(1).scatter_add(1, at, t.values).view_as(inner)
    change: Tensor = unit @ inner @ t.basis.mT - base
    return change


FROD = Algorithm(
    "frod", FrodTensors, fit, delta, "PEFT", reads_base=True, decomposes=True, shared=frozenset({"basis", "places"}),
    bounds={"places": lambda _, target: [below(target[1])]},
)  # fmt: skip
