"""BoRA, W' = H · c / ‖H‖ with H = V · r / ‖V‖ and V = W + (α / rank) B A: the norm of each row, then of each column.
Wang et al. 2024, arXiv:2412.06441.

Stable Audio 3 writes it; stable_audio_3/models/lora/model.py. The trainer adds 1e-12 to the norms. Its BoRA-XS has
three factors in place of two (lora_xs.py) and is refused, as a file with both is none of these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, alpha_over, expect_shapes, flat, length

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class BoraTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    up: Tensor  # B, [n, out, rank]
    down: Tensor  # A, [n, rank, cols]
    rows: Tensor  # r, [n, out, 1]
    columns: Tensor  # c, [n, 1, cols]
    scale: Scalar  # α / rank


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, rank), down (rank, cols), rows (out, 1) and columns (1, cols)."""
    (out, cols), rank = flat(target), shapes["down"][0] if shapes["down"] else 0
    expect_shapes(shapes, {"up": (out, rank), "down": (rank, cols), "rows": (out,), "columns": (cols,)})
    return {"up": (out, rank), "down": (rank, cols), "rows": (out, 1), "columns": (1, cols)}


def delta(base: Tensor, t: BoraTensors) -> Tensor:
    """Return ΔW [n, out, cols]."""
    merged = base + (t.up * t.scale) @ t.down
    for magnitude, axis in ((t.rows, 2), (t.columns, 1)):
        merged = merged * (magnitude / length(merged, (axis,)).clamp(min=1e-12))
    return merged - base


BORA = Algorithm("bora", BoraTensors, fitted_shapes, delta, "arXiv:2412.06441",
                 scalars_from=alpha_over("down"), reads_base=True)  # fmt: skip
