"""MiSS (Bone): one small block D added to every run of r inputs. Kang 2024, arXiv:2409.15371,
section 3.

miss:      D [r, out],       ΔW[o, i] = D[i mod r, o]
miss_mini: D [r, m],         ΔW[o, i] = D[i mod r, o mod m]
miss_bat:  D [out/r, r, r],  ΔW[a, :, b, :] = (W[a, :, b, :] + I) · D[a], with W cut into r × r
           blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Factorisation, Shape, Shapes, expect, flat, rank_of

if TYPE_CHECKING:
    from torch import Tensor


class MissTensors(NamedTuple):
    """The block."""

    block: Tensor  # [n, r, out], [n, r, m] or [n, out/r, r, r]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of block (r, out)."""
    stored, (out, cols) = shapes["block"], flat(target)
    expect(
        holds=len(stored) == 2 and stored[1] == out and 0 < stored[0] <= cols,
        otherwise=f"it is {list(stored)}, the weight is {out}×{cols}",
    )
    return {"block": stored}


def fitted_shapes_mini(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of block (r, m), m a divisor of out."""
    stored, (out, cols) = shapes["block"], flat(target)
    expect(
        holds=len(stored) == 2 and 0 < stored[0] <= cols and stored[1] > 0 and out % stored[1] == 0,
        otherwise=f"it is {list(stored)}, the weight is {out}×{cols}",
    )
    return {"block": stored}


def fitted_shapes_bat(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of block (out/r, r, r), r a divisor of both sides."""
    stored, (out, cols) = shapes["block"], flat(target)
    expect(
        holds=len(stored) == 3
        and stored[1] == stored[2] > 0
        and stored[0] * stored[1] == out
        and cols % stored[2] == 0,
        otherwise=f"it is {list(stored)}, the weight is {out}×{cols}",
    )
    return {"block": stored}


def delta(base: Tensor, t: MissTensors) -> Tensor:
    """Return ΔW [n, out, cols], the block repeated along both axes; `base` is not read."""
    out, cols = base.shape[1:]
    rows = t.block.transpose(1, 2)  # [n, out or m, r]
    return rows.repeat(1, out // rows.shape[1], -(-cols // rows.shape[2]))[..., :cols]


def factors(base: Tensor, t: MissTensors) -> tuple[Tensor, Tensor]:
    """Return the block's rows, repeated down the weight, and the 0/1 matrix that repeats them across its columns."""
    out, cols = base.shape[1:]
    rows = t.block.transpose(1, 2)
    rank = rows.shape[2]
    right = base.new_zeros(rank, cols)
    for j in range(rank):
        right[j, j::rank] = 1
    return rows.repeat(1, out // rows.shape[1], 1), right.expand(len(rows), rank, cols)


def delta_bat(base: Tensor, t: MissTensors) -> Tensor:
    """Return ΔW [n, out, cols] of `miss_bat` from the untouched `base`."""
    n, blocks, rank, _ = t.block.shape
    view = base.reshape(n, blocks, rank, -1, rank)  # [n, a, p, b, q]
    moved = view.reshape(n, blocks, -1, rank) @ t.block
    return (moved.reshape(view.shape) + t.block.unsqueeze(3)).reshape(base.shape)


MISS = Algorithm(
    "miss",
    MissTensors,
    fitted_shapes,
    delta,
    "arXiv:2409.15371",
    row_axes={"block": 1},
    low_rank=Factorisation(rank_of("block"), factors),
)
MISS_MINI = Algorithm(
    "miss_mini",
    MissTensors,
    fitted_shapes_mini,
    delta,
    "arXiv:2409.15371",
    low_rank=Factorisation(rank_of("block"), factors),
)
MISS_BAT = Algorithm("miss_bat", MissTensors, fitted_shapes_bat, delta_bat, "arXiv:2409.15371", reads_base=True)
