"""OSF, the smaller singular triples trained anew: ΔW = U diag(S) V − the same of the untouched
weight.

Nayak et al. 2025, arXiv:2504.07097, section 3. The file stores m triples, which replace the m
smallest triples of the exact base."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Factorisation, Shape, Shapes, expect, flat
from .pissa import triple_factors, triples

if TYPE_CHECKING:
    from torch import Tensor


class OsfTensors(NamedTuple):
    """The trained triples."""

    left: Tensor  # U, [n, out, m]
    values: Tensor  # S, [n, m, 1]
    right: Tensor  # V, [n, m, cols]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of left (out, m), values (m, 1) and right (m, cols)."""
    (out, cols), count = flat(target), shapes["values"][0] if len(shapes["values"]) == 1 else -1
    expect(
        holds=shapes["left"] == (out, count) and shapes["right"] == (count, cols) and count <= min(out, cols),
        otherwise=f"{list(shapes['left'])}, {list(shapes['values'])}, {list(shapes['right'])} for {out}×{cols}",
    )
    return {"left": (out, count), "values": (count, 1), "right": (count, cols)}


def delta(base: Tensor, t: OsfTensors) -> Tensor:
    """Return U S V minus the m smallest singular triples of `base`, [n, out, cols]."""
    total = min(base.shape[1:])
    return t.left @ (t.values * t.right) - triples(base, total - t.values.shape[1], total)


def factors(base: Tensor, t: OsfTensors) -> tuple[Tensor, Tensor]:
    """Return [U, −U₀ S₀] and [S V; V₀], with the m smallest singular triples of `base`."""
    import torch

    total = min(base.shape[1:])
    left, right = triple_factors(base, total - t.values.shape[1], total)
    return torch.cat((t.left, -left), 2), torch.cat((t.values * t.right, right), 1)


OSF = Algorithm(
    "osf", OsfTensors, fitted_shapes, delta, "arXiv:2504.07097", reads_base=True, decomposes=True,
    low_rank=Factorisation(lambda shapes, _: 2 * shapes["values"][0], factors),
)  # fmt: skip
