"""Orthogonal fine-tuning, W' = bd(R)ᵀ W: blocks of output rows are rotated. Qiu et al. 2023,
arXiv:2306.07280, section 3.3.

R = (I + Q)(I − Q)⁻¹ with Q = X − Xᵀ for the stored blocks X. LyCORIS Diag-OFT and kohya's OFT store
the same tensors; `alpha` is not a scale, it limits the norm of all blocks together to α · out
(lycoris/modules/diag_oft.py; sd-scripts networks/oft.py). `oft_diag` of early LyCORIS stores R
itself. The formulas use R − I, which keeps the digits of small rotations.
"""

from __future__ import annotations

from math import inf, isnan
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Bypass, Shape, Shapes, expect, flat, length

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Scalar


class OftTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked; out = k·b."""

    blocks: Tensor  # X, [n, k, b, b]; butterfly [n, m, k, b, b]
    limit: Scalar  # of the Frobenius norm of Q over all blocks; inf: none
    rescale: Tensor | None = None  # [n, out, 1], factors of the rotated rows


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of blocks (k, b, b), with k·b = out, and rescale (out, 1)."""
    stored = shapes["blocks"]
    expect(
        holds=len(stored) == 3 and stored[1] == stored[2] and (stored[0] * stored[1],) == target[:1],
        otherwise=f"blocks are {list(stored)}, the weight is {list(target)}",
    )
    return {"blocks": stored, **fitted_rescale(shapes, target)}


def fitted_rescale(shapes: Shapes, target: Shape) -> dict[str, Shape]:
    """Return the shape of rescale (out, 1), or nothing if it is not stored."""
    if "rescale" not in shapes:
        return {}
    rows = (target[0], 1)
    expect(
        holds=flat(shapes["rescale"]) == rows,
        otherwise=f"rescale is {list(shapes['rescale'])}, the weight is {list(target)}",
    )
    return {"rescale": rows}


def limit(alpha: float | None, _: Shapes, target: Shape) -> Mapping[str, float]:
    """Return limit = α · out; infinity without α, and for α = 0 (LyCORIS' default)."""
    expect(holds=alpha is None or not isnan(alpha), otherwise="alpha is not a number")
    return {"limit": alpha * target[0] if alpha and alpha > 0 else inf}


def turn(blocks: Tensor, norm_limit: Tensor) -> Tensor:
    """Return R − I [n, …, b, b] = 2 (I − Q)⁻¹ Q, for X [n, …, b, b] and a limit [n, 1, 1]."""
    import torch

    q = blocks - blocks.mT
    norm = length(q.flatten(1), (1,))
    q = q * (norm_limit.view_as(norm) / norm).clamp_(max=1).view(-1, *[1] * (q.dim() - 1))
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    turned: Tensor = torch.linalg.solve(eye - q, q)
    return turned.mul_(2)


class Rotation(NamedTuple):
    """The rotations of the blocks."""

    turned: Tensor  # R − I, [n, k, b, b]
    rescale: Tensor | None


def prepare(t: OftTensors) -> Rotation:
    """Return the rotations of the blocks."""
    return Rotation(turn(t.blocks, t.limit), t.rescale)


def delta(base: Tensor, t: Rotation) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`."""
    return stretch(base, _rotated(base, t.turned), t.rescale)


def stretch(base: Tensor, change: Tensor, rescale: Tensor | None) -> Tensor:
    """Return ΔW = rescale ⊙ (base + change) − base; `change` is overwritten."""
    return change if rescale is None else change.mul_(rescale).addcmul_(rescale - 1, base)


def _rotated(base: Tensor, turned: Tensor) -> Tensor:
    """Return bd(R − I)ᵀ W; a single block rotates all row blocks."""
    n, _, cols = base.shape
    return (turned.mT @ base.view(n, -1, turned.shape[-1], cols)).view(base.shape)


class OftDiagTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    blocks: Tensor  # R, [n, k, b, b] or [n, 1, b, b]


def fitted_shapes_diag(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of blocks: (k, b, b) with k·b = out, or (1, b, b) shared by all row blocks."""
    stored = shapes["blocks"]
    k, b = (stored[0] if len(stored) == 3 else 1), (stored[-1] if stored else 0)
    expect(
        holds=len(target) > 0 and stored[-2:] == (b, b) and len(stored) in (2, 3) and b > 0
        and (k * b == target[0] or (k == 1 and target[0] % b == 0)),
        otherwise=f"blocks are {list(stored)}, the weight is {list(target)}",
    )  # fmt: skip
    return {"blocks": (k, b, b)}


def delta_diag(base: Tensor, t: OftDiagTensors) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`."""
    import torch

    eye = torch.eye(t.blocks.shape[-1], dtype=t.blocks.dtype, device=t.blocks.device)
    return _rotated(base, t.blocks - eye)


DIAG_OFT = Algorithm(
    "diag_oft", OftTensors, fitted_shapes, delta, "arXiv:2306.07280",
    scalars_from=limit, row_axes={"blocks": 0, "rescale": 0},
    not_sliceable_with=frozenset({"limit"}), reads_base=True, prepare=prepare,
    bypass=Bypass(with_bias=True, groups="mixed"),
    # ComfyUI's own node stores 1 under dotted names (comfy_extras/nodes_train.py, comfy/weight_adapter/oft.py);
    # LyCORIS and sd-scripts write flat names, and mean α times the number of outputs
    alpha_as_limit=("diffusion_model.", 1.0),
)  # fmt: skip
OFT_DIAG = Algorithm("oft_diag", OftDiagTensors, fitted_shapes_diag, delta_diag, "arXiv:2306.07280",
                     row_axes={"blocks": 0}, reads_base=True)  # fmt: skip
