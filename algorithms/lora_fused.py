"""litgpt's LoRA of a fused query-key-value weight: one small LoRA per part, stored together.

A stacks the parts' (r, in), B the parts' (rows, r); part i changes its own rows, ΔW = (α / r) · Bᵢ
Aᵢ, and the rows of untrained parts stay. The file does not store how many rows a part has if
keys and values are grouped, so `parts` gives them. litgpt/lora.py, LoRAQKVLinear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Algorithm, Checks, Factorisation, Shape, Shapes, alpha_over, expect, flat, rank_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Scalar


class LoraFusedTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked; p trained parts."""

    up: Tensor  # B, [n, rows of all trained parts, r]
    down: Tensor  # A, [n, p·r, in]
    scale: Scalar  # α / r
    parts: tuple[tuple[int, int], ...]  # first row and end of each trained part in the weight


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (rows, r) and down (p·r, in), p > 1."""
    out, cols = flat(target)
    (rows, rank), (stacked, width) = flat(shapes["up"]), flat(shapes["down"])
    expect(
        holds=0 < rank < stacked and stacked % rank == 0 and rows <= out and width == cols,
        otherwise=f"up {list(shapes['up'])}, down {list(shapes['down'])}, the weight {list(target)}",
    )
    return {"up": (rows, rank), "down": (stacked, cols)}


def check_settings(settings: Mapping[str, Any], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit unless the parts are ranges of rows, in order, and cover all trained rows."""
    ends = [row for part in settings["parts"] for row in part]
    trained, rank = sum(ends[1::2]) - sum(ends[::2]), shapes["up"][1]
    expect(
        holds=ends == sorted(ends) and (trained, len(ends) // 2 * rank) == (shapes["up"][0], shapes["down"][0])
        and min(ends) >= 0 and ends[-1] <= target[0],
        otherwise=f"parts {settings['parts']} for {dict(shapes)}, the weight is {list(target)}",
    )  # fmt: skip


def delta(base: Tensor, t: LoraFusedTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    change, rank, done = base.new_zeros(base.shape), t.up.shape[2], 0
    for i, (first, end) in enumerate(t.parts):
        rows = t.up[:, done : done + end - first] * t.scale
        change[:, first:end] = rows @ t.down[:, i * rank : (i + 1) * rank]
        done += end - first
    return change


def factors(base: Tensor, t: LoraFusedTensors) -> tuple[Tensor, Tensor]:
    """Return (α / r) · B with the rank of each part in columns of its own, and A; `base` is not read."""
    n, rank, done = base.shape[0], t.up.shape[2], 0
    left = base.new_zeros(n, base.shape[1], t.down.shape[1])
    for i, (first, end) in enumerate(t.parts):
        left[:, first:end, i * rank : (i + 1) * rank] = t.up[:, done : done + end - first] * t.scale
        done += end - first
    return left, t.down


LORA_FUSED = Algorithm(
    "lora_fused", LoraFusedTensors, fitted_shapes, delta, "litgpt", scalars_from=alpha_over("up", 1),
    checks=Checks(settings=check_settings), low_rank=Factorisation(rank_of("down"), factors),
)  # fmt: skip
