"""LoHa, ΔW = (α / r) · (A₁ B₁) ⊙ (A₂ B₂). Hyeon-Woo et al. 2021 (FedPara), arXiv:2108.06098,
section 2.2.

Convolutions: the Bs hold the kernel, flattened (LyCORIS) or not (OneTrainer). With Tucker cores
(section 2.3) each half is M[o, c, …] = Σ t[i, j, …] a[i, o] b[j, c]; there, and only there, `a` is
stored as (r, out). LyCORIS lycoris/modules/loha.py; the scale applies once, as in its forward.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from .base import (
    Algorithm,
    Bypass,
    Factorisation,
    Shape,
    Shapes,
    alpha_over,
    expect,
    flat,
    other_inputs,
    same_inputs,
    tucker,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar

ADDED_ELEMENTS: Final = 2**20  # elements that are added at a time: 4 MiB in fp32


class LohaTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    w1_a: Tensor  # [n, out, r]; with a core [n, r, out]
    w1_b: Tensor  # [n, r, cols]; with a core [n, r, in]
    w2_a: Tensor
    w2_b: Tensor
    scale: Scalar  # α / r
    t1: Tensor | None = None  # [n, r, r, k]
    t2: Tensor | None = None


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in LohaTensors; both halves have the same rank."""
    cores = [slot for slot in ("t1", "t2") if slot in shapes]
    expect(holds=len(cores) != 1, otherwise=f"there is {cores}, but not the other core")
    fitted = {**_half("1", shapes, target), **_half("2", shapes, target)}
    ranks = fitted["w1_b"][0], fitted["w2_b"][0]
    expect(holds=ranks[0] == ranks[1], otherwise=f"the halves have ranks {ranks[0]} and {ranks[1]}")
    return fitted


def _half(i: str, shapes: Shapes, target: Shape) -> dict[str, Shape]:
    """Return the fitted shapes of one factor of the Hadamard product."""
    a, b, t = f"w{i}_a", f"w{i}_b", f"t{i}"
    out, cols = flat(target)
    (rank, width), inputs = flat(shapes[b]), target[1:]
    rows = (rank, out) if t in shapes else (out, rank)
    expect(
        holds=flat(shapes[a]) == rows,
        otherwise=f"{a} is {list(shapes[a])}, {b} and the weight need {list(rows)}",
    )
    if t not in shapes:
        expect(
            holds=same_inputs(shapes[b][1:], inputs),
            otherwise=other_inputs(b, shapes[b][1:], inputs),
        )
        return {a: rows, b: (rank, cols)}
    core = rank, rank, *target[2:]
    line = (*core, 1) if len(target) == 3 else core  # PEFT's core of a Conv1d
    expect(
        holds=shapes[t] in (core, line) and inputs[:1] == (width,),
        otherwise=f"{t} is {list(shapes[t])}, {b} {list(shapes[b])}, the weight {list(target)}",
    )
    return {a: rows, b: (rank, width), t: (rank, rank, prod(target[2:]))}


def delta(base: Tensor, t: LohaTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    (rows, cols), (others, width) = _halves(t)
    return ((rows * t.scale) @ cols).mul_(others @ width)


def accumulate(acc: Tensor, t: LohaTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc, some rows at a time: both halves of all rows would not fit into the CPU's caches."""
    (rows, cols), (others, width) = _halves(t)
    rows = rows * (t.scale * strength)
    step = max(
        1, ADDED_ELEMENTS // max(acc.shape[2], 1)
    )  # depends on the width only, so that results do not depend on n
    for first in range(0, acc.shape[1], step):
        count = min(step, acc.shape[1] - first)
        part = rows.narrow(1, first, count) @ cols
        acc.narrow(1, first, count).addcmul_(part, others.narrow(1, first, count) @ width)


def _halves(t: LohaTensors) -> list[tuple[Tensor, Tensor]]:
    """Return the factors [n, out, r] and [n, r, cols] of both halves, not multiplied yet."""
    stored = ((t.w1_a, t.w1_b, t.t1), (t.w2_a, t.w2_b, t.t2))
    return [(a, b) if core is None else (a.transpose(1, 2), tucker(core, b)) for a, b, core in stored]


def factors(base: Tensor, t: LohaTensors) -> tuple[Tensor, Tensor]:
    """Return the products of every column of A₁ with every one of A₂, times α / r, and those of the rows of B₁ and B₂:
    a sum over r² pairs. `base` is not read."""
    (rows, cols), (others, width) = _halves(t)
    left = (rows * t.scale).unsqueeze(3) * others.unsqueeze(2)
    return left.flatten(2), (cols.unsqueeze(2) * width.unsqueeze(1)).flatten(1, 2)


def weight_shape(shapes: Shapes) -> Shape:
    """Return the shape of the weight, as LyCORIS and PEFT store the halves."""
    a, b, core = shapes["w1_a"], shapes["w1_b"], shapes.get("t1")
    return (a[0], *b[1:]) if core is None else (a[-1], b[1], *core[2:])


LOHA = Algorithm(
    "loha", LohaTensors, fitted_shapes, delta, "arXiv:2108.06098",
    scalars_from=alpha_over("w1_b"), row_axes={"w1_a": 0, "w2_a": 0},
    not_sliceable_with=frozenset({"t1", "t2"}), accumulate=accumulate,
    low_rank=Factorisation(lambda shapes, _: shapes["w1_b"][0] ** 2, factors), weight_shape=weight_shape,
    bypass=Bypass(no_magnitude=True),
)  # fmt: skip
