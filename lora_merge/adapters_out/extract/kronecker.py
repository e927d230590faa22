"""The nearest Kronecker product of a difference: w1 ⊗ w2, w2 whole or cut to a rank.

Van Loan and Pitsianis 1993: with Δ[o₁o₂, i₁i₂k] rearranged to [o₁i₁, o₂i₂k], w1 ⊗ w2 becomes the outer product of
both factors' numbers, so the leading singular triple gives the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod

import torch

from ...algorithms.lokr import LOKR
from ...engine.row_matrix import RowMatrix
from ...engine.tensor_moves import FILE_DTYPES
from ..combined_change import tensor_of
from ..decomposition.matrix_svd import of_dense
from ..decomposition.stored_factors import rounded
from ..module_tensors import Layer
from ..rank_rules import COUNT, Rule
from ..rounding import squares_of_rows

Choose = Callable[[list[float], float], int]


def factored(size: int, factor: int) -> tuple[int, int]:
    """Return the two factors of a size, the smaller first, as LyCORIS chooses them (`factorization`): `factor` and the
    rest if it divides the size, else the largest divisor up to it and up to √size; -1: up to √size alone."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = isqrt(size) if factor < 0 else min(isqrt(size), factor)
    small = next(n for n in range(most, 0, -1) if size % n == 0)
    return small, size // small


def kronecker(change: RowMatrix, shape: tuple[int, ...], factor: int, dtype: torch.dtype, choose: Choose) -> Layer:
    """Return the stored tensors of the nearest product, by slot.

    Parameters:
        change: Δ [out, cols].
        shape: The shape of the weight.
        factor: As `factored`.
        dtype: Of the stored tensors.
        choose: Gives the rank of w2 for its singular values and the sum of their squares; a rank below half of the
            longer side of w2 stores it as a product.
    """
    (o1, o2), (i1, i2) = factored(shape[0], factor), factored(shape[1], factor)
    kernel = prod(shape[2:])
    turned = _turned(change, (o1, o2), (i1, i2, kernel))
    squares = squares_of_rows(turned)
    left, right = map(torch.from_numpy, of_dense(turned, Rule(COUNT, 1), squares=squares).pair(1))
    w1, w2 = left.reshape(o1, i1).to(dtype), right.reshape(o2, i2 * kernel)
    triples = of_dense(RowMatrix.of(w2))
    rank = choose(triples.values.tolist(), triples.squares)
    tensors = {"w1": w1.contiguous()}
    if rank < max(o2, i2) / 2:
        up, down = (tensor_of(bits, dtype) for bits in rounded(*triples.pair(rank), FILE_DTYPES[dtype]))
        tensors |= {"w2_a": up, "w2_b": down}
        whole = up.double() @ down.double()
    else:
        rank = 0
        tensors["w2"] = w2.reshape(o2, i2, *shape[2:]).to(dtype).contiguous()
        whole = tensors["w2"].reshape(o2, -1).double()
    lost, column, line = 0.0, w1.double().reshape(-1, 1), whole.reshape(1, -1)
    for rows, block in turned.blocks():
        lost += float((block.double() - column[rows] @ line).square().sum())
    return Layer(tensors, LOKR.name, rank, 0, float(rank) if rank else None, squares, lost)


def _turned(change: RowMatrix, outs: tuple[int, int], ins: tuple[int, int, int]) -> RowMatrix:
    """Return Δ [o₁o₂, i₁i₂k] as [o₁i₁, o₂i₂k]."""
    (o1, o2), (i1, i2, kernel) = outs, ins
    turned = torch.empty(o1 * i1, o2 * i2 * kernel, dtype=change.read(slice(0, 0)).dtype)
    for n in range(o1):
        rows = change.read(slice(n * o2, (n + 1) * o2)).reshape(o2, i1, i2 * kernel)
        turned[n * i1 : (n + 1) * i1] = rows.permute(1, 0, 2).reshape(i1, -1)
    return RowMatrix.of(turned)
