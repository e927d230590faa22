"""LoRA whose initial product was subtracted from the base: ΔW = (α / r) · B A − start(W).

The files of these methods store the trained factors. The factors were trained on the weights W −
start(W), and start(W) follows from W. Without start(W), the error is as large as the weights.

pissa: start = the best approximation of rank r, Meng et al. 2024, arXiv:2404.02948, section 3.
olora: start = (α / r) · Q_r R_r of W = Q R, Büyükakyüz 2024, arXiv:2406.01775, section 3.
kasa:  start = the r *smallest* singular triples, and ΔW has a learned diagonal, Wang et al. 2024,
       arXiv:2412.06071, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Algorithm, Factorisation, Shape, Shapes, alpha_over, expect, expect_shapes, factor_pair, flat
from .tensors import FactorPair, ScaledPair

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r), down (r, cols) and, for KaSA, values (r, 1)."""
    out, cols = flat(target)
    fitted = factor_pair(shapes, out, cols)
    rank = fitted["up"][1]
    expect(
        holds=rank <= min(out, cols),
        otherwise=f"rank {rank} is more than a {out}×{cols} weight has",
    )
    if "values" in shapes:
        expect_shapes(shapes, {"values": (rank,)})
        fitted["values"] = (rank, 1)
    return fitted


def triples(base: Tensor, first: int, last: int) -> Tensor:
    """Return the sum of the singular triples `first` to `last` of `base`, the largest first, [n, out, cols]."""
    left, right = triple_factors(base, first, last)
    return left @ right


def triple_factors(base: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return U S and Vᵀ of the singular triples `first` to `last` of `base`, the largest first."""
    import torch

    u, s, v = torch.linalg.svd(base, full_matrices=False)
    return u[..., first:last] * s[:, None, first:last], v[:, first:last]


def pissa_delta(base: Tensor, t: FactorPair) -> Tensor:
    """Return (α / r) · B A minus the r largest singular triples of `base`, [n, out, cols]."""
    return (t.up * t.scale) @ t.down - triples(base, 0, t.down.shape[1])


def olora_delta(base: Tensor, t: FactorPair) -> Tensor:
    """Return (α / r) · (B A − Q_r R_r) with the QR decomposition of `base`, [n, out, cols]."""
    import torch

    q, r = torch.linalg.qr(base)
    rank = t.down.shape[1]
    change: Tensor = t.up @ t.down - q[..., :rank] @ r[:, :rank]
    return change * t.scale


def kasa_delta(base: Tensor, t: ScaledPair) -> Tensor:
    """Return (α / r) · B diag(values) A minus the r smallest singular triples of `base`, [n, out, cols]."""
    total = min(base.shape[1:])
    return t.up @ (t.down * (t.values * t.scale)) - triples(base, total - t.down.shape[1], total)


def pissa_factors(base: Tensor, t: FactorPair) -> tuple[Tensor, Tensor]:
    """Return [(α / r) · B, −U S] and [A; Vᵀ], with the r largest singular triples of `base`."""
    import torch

    left, right = triple_factors(base, 0, t.down.shape[1])
    return torch.cat((t.up * t.scale, -left), 2), torch.cat((t.down, right), 1)


def olora_factors(base: Tensor, t: FactorPair) -> tuple[Tensor, Tensor]:
    """Return (α / r) · [B, −Q_r] and [A; R_r], with the QR decomposition of `base`."""
    import torch

    q, r = torch.linalg.qr(base)
    rank = t.down.shape[1]
    return torch.cat((t.up, -q[..., :rank]), 2) * t.scale, torch.cat((t.down, r[:, :rank]), 1)


def kasa_factors(base: Tensor, t: ScaledPair) -> tuple[Tensor, Tensor]:
    """Return [B, −U S] and [(α / r) · diag(values) A; Vᵀ], with the r smallest singular triples of `base`."""
    import torch

    total = min(base.shape[1:])
    left, right = triple_factors(base, total - t.down.shape[1], total)
    return torch.cat((t.up, -left), 2), torch.cat((t.down * (t.values * t.scale), right), 1)


def _twice(shapes: Shapes, _: Shape) -> int:
    return 2 * shapes["down"][0]


PISSA = Algorithm(
    "pissa", FactorPair, fitted_shapes, pissa_delta, "arXiv:2404.02948", scalars_from=alpha_over("down"),
    reads_base=True, decomposes=True, without_start="lora", low_rank=Factorisation(_twice, pissa_factors),
)  # fmt: skip
OLORA = Algorithm(
    "olora", FactorPair, fitted_shapes, olora_delta, "arXiv:2406.01775", scalars_from=alpha_over("down"),
    reads_base=True, decomposes=True, without_start="lora", low_rank=Factorisation(_twice, olora_factors),
)  # fmt: skip
KASA = Algorithm(
    "kasa", ScaledPair, fitted_shapes, kasa_delta, "arXiv:2412.06071", scalars_from=alpha_over("down"),
    reads_base=True, decomposes=True, without_start="lora", low_rank=Factorisation(_twice, kasa_factors),
)  # fmt: skip
