"""C3A, ΔW made of circulant blocks, divided by the number of inputs. Chen et al. 2024, arXiv:2407.19342,
section 3.

The kernel [out/b, in/b, b] gives block (i, j) the entries C[p, q] = kernel[i, j, (q − p) mod b].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor


class C3aTensors(NamedTuple):
    """The first row of every block."""

    kernel: Tensor  # [n, out/b, in/b, b]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of kernel (out/b, in/b, b)."""
    stored, (out, cols) = shapes["kernel"], flat(target)
    expect(
        holds=len(stored) == 3 and stored[0] * stored[2] == out and stored[1] * stored[2] == cols,
        otherwise=f"it is {list(stored)}, the weight is {out}×{cols}",
    )
    return {"kernel": stored}


def delta(base: Tensor, t: C3aTensors) -> Tensor:
    """Return ΔW [n, out, cols]; the values of `base` are not read."""
    import torch

    step = torch.arange(t.kernel.shape[3], device=base.device)
    blocks = t.kernel[..., (step - step[:, None]) % len(step)]  # [n, i, j, p, q]
    return blocks.transpose(2, 3).reshape(base.shape) / base.shape[2]


C3A = Algorithm("c3a", C3aTensors, fitted_shapes, delta, "arXiv:2407.19342")
