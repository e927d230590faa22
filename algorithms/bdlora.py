"""BD-LoRA: LoRA with one factor block-diagonal and stored as its blocks; PEFT tuners/lora,
`use_bdlora`.

A [r, in / k] means diag(A_1 … A_k) with A_j its j-th r / k rows, or B [out, r / k] for
diag(B_1 … B_k) with B_j its j-th out / k rows. k follows from the shapes; k = 1 is plain LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Algorithm, AlphaOverRank, Factorisation, Shape, Shapes, expect, flat
from .tensors import FactorPair

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up and down, each with an axis of length k: up whole (out, k, r / k) and the blocks of down
    (k, r / k, in / k), or the blocks of up (k, out / k, r / k) and down whole (k, r / k, in)."""
    (out, cols), up, down = flat(target), shapes["up"], shapes["down"]
    expect(holds=len(up) == len(down) == 2, otherwise=f"up is {list(up)}, down {list(down)}; they have two axes")
    (rows, up_rank), (rank, width) = up, down
    expect(holds=rows == out, otherwise=f"up has {rows} rows, the weight has {out}")
    expect(
        holds=width > 0 and cols % width == 0,
        otherwise=f"down has {width} columns, the weight has {cols}",
    )
    expect(
        holds=up_rank > 0 and rank % up_rank == 0,
        otherwise=f"up has rank {up_rank}, down has rank {rank}",
    )
    in_down, in_up = cols // width, rank // up_rank
    expect(
        holds=min(in_down, in_up) == 1 and rank % in_down == 0 and out % in_up == 0,
        otherwise=f"{in_down} blocks in down and {in_up} in up do not divide the rank {rank} and {out} rows",
    )
    if in_up > 1:
        return {"up": (in_up, out // in_up, up_rank), "down": (in_up, up_rank, cols)}
    return {"up": (out, in_down, rank // in_down), "down": (in_down, rank // in_down, width)}


def delta(base: Tensor, t: FactorPair) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    up, blocks = t.up * t.scale.unsqueeze(3), t.down.shape[1]
    if t.down.shape[3] * blocks == base.shape[2]:
        return (up.transpose(1, 2) @ t.down).transpose(1, 2).reshape(base.shape)
    return (up @ t.down).reshape(base.shape)


def factors(base: Tensor, t: FactorPair) -> tuple[Tensor, Tensor]:
    """Return (α / r) · B and A, the factor that is stored in blocks with zeros around them; `base` is not read."""
    (n, out, cols), blocks, rank = base.shape, t.down.shape[1], t.down.shape[2]
    up = t.up * t.scale.unsqueeze(3)
    if t.down.shape[3] * blocks == cols:
        right = t.down.new_zeros(n, blocks, rank, blocks, cols // blocks)
        right.diagonal(dim1=1, dim2=3).copy_(t.down.permute(0, 2, 3, 1))
        return up.reshape(n, out, -1), right.reshape(n, -1, cols)
    left = up.new_zeros(n, blocks, out // blocks, blocks, rank)
    left.diagonal(dim1=1, dim2=3).copy_(up.permute(0, 2, 3, 1))
    return left.reshape(n, out, -1), t.down.reshape(n, -1, cols)


def _rank(shapes: Shapes, _: Shape) -> int:
    return shapes["down"][0] * shapes["down"][1]


BDLORA = Algorithm(
    "bdlora", FactorPair, fitted_shapes, delta, "PEFT",
    scalars_from=AlphaOverRank(lambda shapes: shapes["down"][0] * shapes["down"][1]),
    low_rank=Factorisation(_rank, factors),
)  # fmt: skip
