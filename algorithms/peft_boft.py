"""BOFT of PEFT, W' = s ⊙ (W · Mᵀ) on the input axis. Liu et al. 2023, arXiv:2311.06243, section 4.

M = M_{N−1} … M_0 with M_i = P_i diag(R_i) P_iᵀ: stage i gathers pairs of half blocks that lie
2^(i−1) blocks apart, R = (I − S)(I + S)⁻¹ and S = ½ (X − Xᵀ). PEFT tuners/boft/layer.py."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, flat
from .oft import stretch
from .peft_oft import PeftRotation, cayley

if TYPE_CHECKING:
    from torch import Tensor


MOST_STAGES = 32  # enough for 2^32 blocks


class BoftTensors(NamedTuple):
    """Butterfly factors, and a scale for every row."""

    blocks: Tensor  # X, [n, N, k, b, b]
    rows: Tensor  # s, [n, out, 1]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of blocks (N, k, b, b) with k·b = cols and rows (out, 1)."""
    stored, (out, cols) = shapes["blocks"], flat(target)
    expect(
        holds=len(stored) == 4
        and stored[2] == stored[3]
        and stored[1] * stored[2] == cols
        and 0 < stored[0] <= MOST_STAGES,
        otherwise=f"blocks is {list(stored)}, the weight has {cols} inputs",
    )
    stages, count, size, _ = stored
    butterfly = stages == 1 or (size % 2 == 0 and count % 2 ** (stages - 1) == 0)
    expect(holds=butterfly, otherwise=f"{stages} stages cannot pair {count} blocks of {size}")
    expect(
        holds=prod(shapes["rows"]) == out,
        otherwise=f"rows is {list(shapes['rows'])}, the weight has {out} rows",
    )
    return {"blocks": stored, "rows": (out, 1)}


def prepare(t: BoftTensors) -> PeftRotation:
    """Return the rotations R = (I − S)(I + S)⁻¹ for S = (X − Xᵀ) / 2."""
    return PeftRotation(cayley((t.blocks - t.blocks.mT) / 2), t.rows)


def delta(base: Tensor, t: PeftRotation) -> Tensor:
    """Return s ⊙ (W Mᵀ) − W, [n, out, cols]: the sum of the changes of all stages, each computed on the result of the
    stages before it."""
    n, stages, count, size, _ = t.turned.shape
    total: Tensor | None = None
    for i in range(stages):
        rotated = base if total is None else base + total
        paired = _swap(rotated, (2, 2**i, size // 2)) if i else rotated
        blocks = paired.reshape(n, -1, count, size).transpose(1, 2)  # [n, k, out, b]
        change = (blocks @ t.turned[:, i].mT).transpose(1, 2).reshape(base.shape)
        change = _swap(change, (2**i, 2, size // 2)) if i else change
        total = change if total is None else total + change
    assert total is not None, "fitted_shapes() allows no file without a stage"
    return stretch(base, total, t.rows)


def _swap(x: Tensor, run: tuple[int, int, int]) -> Tensor:
    """Exchange the two leading axes of every run of columns."""
    return x.reshape(*x.shape[:2], -1, *run).transpose(3, 4).reshape(x.shape)


PEFT_BOFT = Algorithm(
    "peft_boft", BoftTensors, fitted_shapes, delta, "arXiv:2311.06243",
    row_axes={"rows": 0}, reads_base=True, prepare=prepare,
)  # fmt: skip
