"""BOFT, W' = B_m … B_1 W with butterfly-permuted block rotations. Liu et al. 2023,
arXiv:2311.06243, section 4; LyCORIS lycoris/modules/boft.py.

Stage i pairs rows at a distance of h = 2^i · b/2. R is that of oft.py, not transposed, with one limit
for all stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Algorithm, Bypass, Shape, Shapes, expect
from .oft import OftTensors, Rotation, fitted_rescale, limit, prepare, stretch

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of blocks (m, k, b, b), with k·b = out, b even and 2^(m−1)·b dividing out, and rescale
    (out, 1)."""
    stored = shapes["blocks"]
    m, k, b = stored[:3] if len(stored) == 4 else (0, 0, 0)
    expect(
        holds=stored[2:] == (b, b) and (k * b,) == target[:1] and b % 2 == 0
        and 0 < m <= (k * b).bit_length() and k * b % (2 ** (m - 1) * b) == 0,
        otherwise=f"blocks are {list(stored)}, the weight is {list(target)}",
    )  # fmt: skip
    return {"blocks": stored, **fitted_rescale(shapes, target)}


def delta(base: Tensor, t: Rotation) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`: the sum of the changes of all stages, each computed on the
    result of the stages before it."""
    _, stages, k, b, _ = t.turned.shape
    n, _, cols = base.shape
    total: Tensor | None = None
    for i in range(stages):
        reach = (b // 2) << i
        rotated = base if total is None else base + total
        pairs = rotated.view(n, -1, 2, reach, cols).transpose(2, 3)
        change = (t.turned[:, i] @ pairs.reshape(n, k, b, cols)).reshape(pairs.shape)
        change = change.transpose(2, 3).reshape(base.shape)
        total = change if total is None else total.add_(change)
    assert total is not None, "fitted_shapes() allows no file without a stage"
    return stretch(base, total, t.rescale)


BOFT = Algorithm(
    "boft", OftTensors, fitted_shapes, delta, "arXiv:2311.06243",
    scalars_from=limit, reads_base=True, prepare=prepare,
    bypass=Bypass(with_bias=True, groups="mixed"),
)  # fmt: skip
