"""PSOFT, the largest singular triples of the weight turned in their subspace: ΔW = B (R − I) A. OpenReview FSHrinMArK;
PEFT 0.21.2 tuners/psoft/layer.py.

B = V diag(s), A = Uᵀ of W = V diag(s) Uᵀ + …, or with `pissa_init` √s in each; PEFT's α / r cancels out.
R is orthogonal (Cayley's transform of a skew matrix, or the first terms of its series) or free, and may have its rows
and columns scaled. B and A are not stored: they follow from the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import ON_CPU, SEEDED, Algorithm, Checks, LoadedModule, Rebuild, Shape, Shapes, expect, flat
from .bounds import below
from .low_rank_svd import low_rank_svd
from .peft_oft import TERMS, block_size, bounded, cayley, series, skew_blocks

if TYPE_CHECKING:
    from torch import Tensor


class PsoftTensors(NamedTuple):
    """The tensors of R, and the subspace."""

    turn: Tensor  # the upper triangle of a skew matrix [n, 1, r(r−1)/2], row by row; free: R itself [n, r, r]
    rows: Tensor | None = None  # factors of the rows of R, [n, r, 1]
    columns: Tensor | None = None  # of its columns, [n, 1, r]
    left: Tensor | None = None  # B [n, out, r]; never stored
    right: Tensor | None = None  # A [n, r, cols]; never stored
    orthogonal: bool = True  # `psoft_orth`
    terms: int = 0  # of the series; 0: the exact transform
    limit: float = 0.0  # `cayley_neumann_eps`, on the Frobenius norm; 0: none
    balanced: bool = False  # `ab_svd_init`: √s in both factors; the next three settings say how PEFT finds the triples
    low_rank: bool = False  # `psoft_svd`
    rounds: int = 10  # `psoft_svd_lowrank_niter`
    seed: int = 0  # `random_seed`


class TurnedFactors(NamedTuple):
    """The two factors of ΔW."""

    left: Tensor  # B (R − I), [n, out, r]
    right: Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in PsoftTensors."""
    (out, cols), turn = flat(target), shapes["turn"]
    free = len(turn) == 2 and turn[0] == turn[1]
    rank = turn[0] if free else block_size(turn[0]) if len(turn) == 1 else 0
    expect(
        holds=len(target) == 2 and 0 < rank <= min(out, cols),
        otherwise=f"turn is {list(turn)}, the weight {list(target)}",
    )
    want = {"turn": (rank, rank) if free else (1, *turn)}
    known = {"rows": (rank, 1), "columns": (1, rank), "left": (out, rank), "right": (rank, cols)}
    for slot in shapes.keys() & known.keys():
        expect(
            holds=shapes[slot] == (known[slot] if slot in ("left", "right") else (rank,)),
            otherwise=f"{slot} is {list(shapes[slot])}, the rank is {rank}",
        )
        want[slot] = known[slot]
    return want


def check_settings(settings: Mapping[str, Any], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit unless `turn` is a triangle if R is orthogonal, and a matrix if R is free.

    One number is both: R of rank 1, or the triangle of rank 2, for which the weight may be too small.
    """
    count = shapes["turn"][1]
    square = shapes["turn"] == (count, count) and count > 1
    orthogonal = settings.get("orthogonal", True)
    holds = not square and block_size(count) <= min(target) if orthogonal else square or count == 1
    expect(holds=holds, otherwise=f"psoft_orth contradicts the shape {list(shapes['turn'])}")


def prepare(t: PsoftTensors) -> TurnedFactors:
    """Return B (R − I) and A."""
    import torch

    assert t.left is not None and t.right is not None, "rebuilt"
    rank = t.left.shape[2]
    identity = torch.eye(rank, dtype=t.left.dtype, device=t.left.device)
    if t.orthogonal:
        skew = bounded(skew_blocks(t.turn), t.limit)
        turned = (series(skew, t.terms) if t.terms else cayley(-skew))[:, 0]
    else:
        turned = t.turn - identity
    if t.rows is not None or t.columns is not None:
        whole = turned + identity
        whole = whole if t.rows is None else whole * t.rows
        turned = (whole if t.columns is None else whole * t.columns) - identity
    return TurnedFactors(t.left @ turned, t.right)


def delta(base: Tensor, t: TurnedFactors) -> Tensor:
    """Return ΔW [n, out, cols]; the values of `base` are not read."""
    return t.left @ t.right


def rebuild(loaded: LoadedModule) -> Mapping[str, Tensor]:
    """Return B and A, from the leading singular triples of the weight."""
    import torch

    weight, count, settings = loaded.read(""), loaded.shapes["turn"][1], loaded.settings
    rank = block_size(count) if settings.get("orthogonal", True) else count
    if settings.get("low_rank", False):
        left, values, right = low_rank_svd(weight, rank, settings.get("rounds", 10), settings.get("seed", 0))
        triples = left, values, right.mT
    else:
        triples = torch.linalg.svd(weight, full_matrices=False)
    left, values, right = triples[0][:, :rank], triples[1][:rank], triples[2][:rank]
    if settings.get("balanced", False):
        root = values.sqrt()
        return {"left": left * root, "right": root[:, None] * right}
    return {"left": left * values, "right": right}


PSOFT = Algorithm(
    "psoft", PsoftTensors, fitted_shapes, delta, "OpenReview FSHrinMArK", prepare=prepare,
    rebuild=Rebuild(frozenset({"left", "right"}), rebuild, f"its factors are singular vectors of the base, {ON_CPU}"),
    checks=Checks({**TERMS, **SEEDED, "rounds": lambda _shapes, _target: [below(101)]}, settings=check_settings),
)  # fmt: skip
