"""AdaLoRA, ΔW = c · B (A ⊙ E). Zhang et al. 2023, arXiv:2303.10512, section 3.1.

`c` is α over the *initial* rank of the configuration, whatever rank the pruning has left in the
file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import AlphaOverRank, Factorisation, Shape, Shapes, expect_shapes, flat, of_factors, rank_of, shape_of_pair
from .tensors import ScaledPair

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r), down (r, cols) and values (r, 1); r is 0 if pruning left no rank."""
    (out, cols), rank = flat(target), flat(shapes["down"])[0]
    return expect_shapes(shapes, {"up": (out, rank), "down": (rank, cols), "values": (rank, 1)})


def factors(base: Tensor, t: ScaledPair) -> tuple[Tensor, Tensor]:
    """Return B and diag(E) A · scale; `base` is not read."""
    return t.up, t.down * (t.values * t.scale)


def accumulate(acc: Tensor, t: ScaledPair, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    acc.baddbmm_(t.up, t.down * (t.values * (t.scale * strength)))


ADALORA = of_factors(  # the scale is α / (initial rank + 1e-5)
    "adalora", ScaledPair, fitted_shapes, Factorisation(rank_of("down"), factors), "arXiv:2303.10512",
    row_axes={"up": 0}, accumulate=accumulate, scalars_from=AlphaOverRank(), scale_from_config=True,
    weight_shape=shape_of_pair,
)  # fmt: skip
