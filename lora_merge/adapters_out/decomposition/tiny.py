"""Many tiny matrices of one shape, decomposed and cut at once: for one alone, the calls take longer than the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .singular_triples import numeric_rank, positive
from .storage_rounding import stored

FEW: Final = 2**10
"""The numbers of a matrix up to which it is tiny."""

TOGETHER: Final = 2**18
"""The most numbers of all tiny matrices that are worked at together."""

Chosen: TypeAlias = Callable[[int, Sequence[float], float], tuple[int, float]]
"""Function of a matrix's number, its singular values and ‖Δ‖² that returns its rank and its α."""


class Factors(NamedTuple):
    """The stored factors of one matrix."""

    up: Tensor  # [out, rank]
    down: Tensor  # [rank, cols]
    alpha: float
    squares: float  # ‖Δ‖²
    lost: float  # ‖Δ − Δ̂‖² of the stored factors


def factors_of(changes: Tensor, noise: float, chosen: Chosen, dtype: torch.dtype) -> list[Factors]:
    """Return the best factors of every matrix of a stack [n, out, cols], none of them zero, as they are stored in
    `dtype`. `noise` as for `of_dense`; LinAlgError where numbers are too large for fp64."""
    wide = changes.double()
    squares = wide.square().sum((1, 2)).tolist()
    long = wide if wide.shape[1] >= wide.shape[2] else wide.mT
    q, r = torch.linalg.qr(long)
    u, values, v = torch.linalg.svd(r)
    left, right = (q @ u, v) if long is wide else (v.mT, (q @ u).mT)
    bound = max(max(wide.shape[1:]) * 2.0**-52, noise)
    cuts: dict[tuple[int, float], list[int]] = {}
    for number, own in enumerate(values.tolist()):
        known = own[: numeric_rank(own, bound)]
        cuts.setdefault(chosen(number, known, squares[number]), []).append(number)
    made: dict[int, Factors] = {}
    for (rank, alpha), numbers in cuts.items():
        some = torch.tensor(numbers)
        root = values[some, :rank].sqrt()
        pair = left[some, :, :rank] * root[:, None], right[some, :rank] * root[..., None]
        ups, downs, off = _cut(wide[some], positive(*pair), alpha / rank if rank else 1.0, dtype)
        for number, up, down, lost in zip(numbers, ups.unbind(), downs.unbind(), off, strict=True):
            made[number] = Factors(up, down, alpha, squares[number], lost)
    return [made[number] for number in range(len(changes))]


def _cut(
    wide: Tensor, pair: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[float]]:  # fmt: skip
    """Return the stored factors of every matrix, and what is lost of it."""
    left, right = pair
    up, down = stored(left if scale == 1 else left / scale, right, dtype)
    off = (wide - (up.double() * scale) @ down.double()).square_().sum((1, 2))
    return up.contiguous(), down.contiguous(), off.tolist()
