"""GraLoRA, k × k blocks with factors of their own, and optionally a plain LoRA. Jung et al. 2025,
arXiv:2505.20355.

Block (output j, input m) of ΔW is (A[m][:, jρ:(j+1)ρ] · B[j][mρ:(m+1)ρ, :])ᵀ with ρ = r / k.
Section 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, AlphaOverRank, Shape, Shapes, expect, extra_pair, flat

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class GraloraTensors(NamedTuple):
    """The factors of the blocks, and of the plain LoRA."""

    inputs: Tensor  # A, [n, k (m), in/k, k (j), ρ]
    outputs: Tensor  # B, [n, k (j), k (m), ρ, out/k]
    scale: Scalar  # α / (r + r of the plain part)
    down: Tensor | None = None  # [n, r', in]
    up: Tensor | None = None  # [n, out, r']


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of inputs and outputs with the rank cut into k parts, and of down and up."""
    (out, cols), a, b = flat(target), shapes["inputs"], shapes["outputs"]
    expect(holds=len(a) == 3 == len(b), otherwise=f"inputs is {list(a)}, outputs {list(b)}")
    k, rank = a[0], a[2]
    expect(
        holds=k > 0 and a[1] * k == cols and b == (k, rank, out // k) and out % k == 0 and rank % k == 0,
        otherwise=f"inputs {list(a)} and outputs {list(b)} do not make a {out}×{cols} weight",
    )
    blocks = {"inputs": (k, a[1], k, rank // k), "outputs": (k, k, rank // k, b[2])}
    return {**blocks, **extra_pair(shapes, target)}


def delta(base: Tensor, t: GraloraTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    left = t.outputs.permute(0, 1, 2, 4, 3)  # [n, j, m, out/k, ρ]
    right = t.inputs.permute(0, 3, 1, 4, 2)  # [n, j, m, ρ, in/k]
    whole = (left @ right).transpose(2, 3).reshape(base.shape)
    if t.up is not None and t.down is not None:
        whole = whole + t.up @ t.down
    return whole * t.scale


def _rank(shapes: Shapes) -> int:
    return shapes["inputs"][2] * shapes["inputs"][3] + (shapes["down"][0] if "down" in shapes else 0)


GRALORA = Algorithm(
    "gralora", GraloraTensors, fitted_shapes, delta, "arXiv:2505.20355", scalars_from=AlphaOverRank(_rank)
)
