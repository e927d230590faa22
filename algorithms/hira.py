"""HiRA, ΔW = W ⊙ (B A), for embeddings W ⊙ (B A)ᵀ. Huang et al. 2025, ICLR, "HiRA", section 3; no
α."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, factor_pair, flat, same_inputs

if TYPE_CHECKING:
    from torch import Tensor


class HiraTensors(NamedTuple):
    """A pair of factors."""

    up: Tensor  # B, [n, out, r]; of an embedding [n, dim, r]
    down: Tensor  # A, [n, r, cols]; of an embedding [n, r, vocabulary]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r) and down (r, cols)."""
    (out, cols), down = flat(target), shapes["down"]
    expect(
        holds=same_inputs(down[1:], target[1:]),
        otherwise=f"down is {list(down)}, the weight {list(target)}",
    )
    return factor_pair(shapes, out, cols)


def fitted_shapes_embedding(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (dim, r) and down (r, vocabulary)."""
    return factor_pair(shapes, *reversed(flat(target)))


def delta(base: Tensor, t: HiraTensors) -> Tensor:
    """Return W ⊙ (B A) [n, out, cols]."""
    return base * (t.up @ t.down)


def embedding_delta(base: Tensor, t: HiraTensors) -> Tensor:
    """Return W ⊙ (B A)ᵀ [n, vocabulary, dim]."""
    return base * (t.down.transpose(1, 2) @ t.up.transpose(1, 2))


HIRA = Algorithm("hira", HiraTensors, fitted_shapes, delta, "ICLR 2025", row_axes={"up": 0}, reads_base=True)
HIRA_EMBEDDING = Algorithm(
    "hira_embedding", HiraTensors, fitted_shapes_embedding, embedding_delta, "ICLR 2025", row_axes={"down": 1},
    reads_base=True, layout="table",
)  # fmt: skip
