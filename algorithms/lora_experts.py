"""LoRA of stacked experts, ΔW[e] = (α / r) · B_e A_e; PEFT `target_parameters`,
tuners/lora/layer.py.

One pair holds the factors of all experts: row e·r + k of A [E·r, in] and column k·E + e of
B [out, r·E] belong to expert e. The weight is [E, out, in], or [E, in, out]: then every ΔW[e] is
transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, alpha_over, expect
from .tensors import FactorPair

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r, E) and down (E, r, in) for a weight (E, out, in), and of up (1, out, r, E) for
    (E, in, out), by the lengths of its sides; square experts are (E, out, in), because the caller chooses the other row
    for (E, in, out) (target_parameters.py)."""
    return _fitted_shapes(shapes, target, transposed=shapes["up"][:1] != target[1:2])


def fitted_shapes_transposed(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up and down for a weight known to be (E, in, out), square ones included."""
    return _fitted_shapes(shapes, target, transposed=True)


def _fitted_shapes(shapes: Shapes, target: Shape, *, transposed: bool) -> Shapes:
    expect(
        holds=len(target) == 3 and len(shapes["up"]) == 2 and len(shapes["down"]) == 2,
        otherwise=f"these are factors of stacked experts, the weight is {list(target)}",
    )
    (out, ranks), (down_ranks, width), experts = shapes["up"], shapes["down"], target[0]
    expect(holds=ranks == down_ranks, otherwise=f"up has rank {ranks}, down has rank {down_ranks}")
    expect(
        holds=experts > 0 and ranks % experts == 0,
        otherwise=f"{ranks} ranks cannot be shared out to {experts} experts",
    )
    sides = (width, out) if transposed else (out, width)
    expect(
        holds=sides == target[1:],
        otherwise=f"each expert's update is {list(sides)}, its weight {list(target[1:])}",
    )
    rank = ranks // experts
    return {"up": (1,) * transposed + (out, rank, experts), "down": (experts, rank, width)}


def delta(base: Tensor, t: FactorPair) -> Tensor:
    """Return ΔW in the shape of `base`, whose values are not read: [n, E, out·in], or [n, E·out, in] for rows of it."""
    transposed = t.up.dim() == 5
    up = (t.up[:, 0] if transposed else t.up).permute(0, 3, 1, 2) * t.scale.unsqueeze(3)  # [n, E, out, r]
    if transposed:
        return (t.down.transpose(2, 3) @ up.transpose(2, 3)).reshape(base.shape)
    return (up @ t.down).reshape(base.shape)


def _row(name: str, shapes: Callable[[Shapes, Shape], Shapes]) -> Algorithm:
    return Algorithm(
        name, FactorPair, shapes, delta, "arXiv:2106.09685",
        scalars_from=alpha_over("down", 1), row_axes={"up": -1, "down": 0}, layout="experts",
    )  # fmt: skip


LORA_EXPERTS = _row("lora_experts", fitted_shapes)
LORA_EXPERTS_TRANSPOSED = _row("lora_experts_transposed", fitted_shapes_transposed)
