"""DEFT, W' = W + Q (c · R − Pᵀ W), and PaRa, W' = W − Q Pᵀ W. PEFT tuners/deft/layer.py.

From the stored P: `relu` takes Q = P and Pᵀ → relu(P)ᵀ, `qr` takes the orthonormal Q of P for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import AlphaOverRank, Factorisation, Shape, Shapes, expect, expect_shapes, flat, of_factors, rank_of

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class DeftTensors(NamedTuple):
    """The subspace that is removed from the weight, and its new content."""

    subspace: Tensor  # P, [n, out, r]
    scale: Scalar  # c = α / r, or 1
    content: Tensor | None = None  # R, [n, r, cols]; PaRa has none
    method: str = "relu"  # `decomposition_method`


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of subspace (out, r) and content (r, cols)."""
    (out, cols), stored = flat(target), shapes["subspace"]
    expect(
        holds=len(stored) == 2 and stored[0] == out and 0 < stored[1] <= out,
        otherwise=f"subspace is {list(stored)}, the weight has {out} rows",
    )
    expected = {"subspace": stored, "content": (stored[1], cols)}
    return expect_shapes(shapes, {slot: expected[slot] for slot in shapes})


def factors(base: Tensor, t: DeftTensors) -> tuple[Tensor, Tensor]:
    """Return Q and c R − Pᵀ W."""
    import torch

    if t.method == "qr":
        left: Tensor = torch.linalg.qr(t.subspace).Q
        right = left
    else:
        left, right = t.subspace, t.subspace.relu()
    inner = -right.transpose(1, 2) @ base
    return left, inner if t.content is None else inner + t.content * t.scale


DEFT = of_factors(
    "deft", DeftTensors, fitted_shapes, Factorisation(rank_of("subspace", 1), factors), "PEFT", reads_base=True,
    decomposes=True, scalars_from=AlphaOverRank(),
)  # fmt: skip
