"""AdaLoRA, ΔW = c · B (A ⊙ E). Zhang et al. 2023, arXiv:2303.10512, section 3.1.

`c` is α over the *initial* rank of the configuration, whatever rank the pruning has left in the
file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, LowRank, Shape, Shapes, alpha_by, expect_shapes, flat, rank_of, shape_of_pair

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


@dataclass(frozen=True)
class AdaLoraTensors:
    """A truncated singular value decomposition, learned."""

    up: Tensor  # B, [n, out, r]
    down: Tensor  # A, [n, r, cols]
    values: Tensor  # E, [n, r, 1]
    scale: Scalar  # α / (initial rank + 1e-5)


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r), down (r, cols) and values (r, 1); r is 0 where pruning left no rank."""
    (out, cols), rank = flat(target), flat(shapes["down"])[0]
    return expect_shapes(shapes, {"up": (out, rank), "down": (rank, cols), "values": (rank, 1)})


def delta(base: Tensor, t: AdaLoraTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    left, right = factors(base, t)
    return left @ right


def factors(base: Tensor, t: AdaLoraTensors) -> tuple[Tensor, Tensor]:
    """Return B and diag(E) A · scale; `base` is not read."""
    return t.up, t.down * (t.values * t.scale)


def accumulate(acc: Tensor, t: AdaLoraTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    acc.baddbmm_(t.up, t.down * (t.values * (t.scale * strength)))


ADALORA = Algorithm(
    "adalora", AdaLoraTensors, fitted_shapes, delta, "arXiv:2303.10512", row_axes={"up": 0}, accumulate=accumulate,
    scalars_from=alpha_by(),
    scale_from_config=True, low_rank=LowRank(rank_of("down"), factors),
    weight_shape=shape_of_pair,
)  # fmt: skip
