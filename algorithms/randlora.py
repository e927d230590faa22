"""RandLoRA, a sum of scaled random bases. Albert et al. 2025, arXiv:2502.00987, section 3.

With the smaller side s and the larger side l of the weight and N = ⌈s / r⌉ bases: A' = rows (k, i)
of λ[k, i] · A[k, i, :s] · γ[i, :], B' = columns (i, k) of B[:l, i, k], and ΔW = g · B' A', or its
transpose where the inputs are the larger side. The two orders differ; PEFT tuners/randlora/layer.py
has it so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, alpha_by, expect, flat

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


@dataclass(frozen=True)
class RandTensors:
    """Scales of each layer, and the bases that all share."""

    rank_scale: Tensor  # λ, [n, r, N]
    side_scale: Tensor  # γ, [n, N, s]
    down: Tensor  # A, [n, r, 1, widest s]; shared
    up: Tensor  # B, [n, widest l, most N, r]; shared
    scale: Scalar  # `randlora_alpha` / r


def fit(shapes: Shapes, target: Shape) -> Shapes:
    """Shapes as stored; the bases must cover the weight."""
    (small, large), lam, gam = sorted(flat(target)), shapes["rank_scale"], shapes["side_scale"]
    expect(holds=len(lam) == 2 and lam[0] > 0, otherwise=f"λ is {list(lam)}")
    count = -(-small // lam[0])
    expect(
        holds=lam[1] == count and gam == (count, small),
        otherwise=f"λ is {list(lam)}, γ is {list(gam)}, the weight's sides are {small} and {large}",
    )
    down, up = shapes.get("down", ()), shapes.get("up", ())
    expect(holds=bool(down and up), otherwise="the random bases are not stored (`save_projection`)")
    expect(
        holds=len(down) == 3 == len(up) and down[:2] == (lam[0], 1) and down[2] >= small
        and up[0] >= large and up[1] >= count and up[2] == lam[0],
        otherwise=f"bases {list(down)} and {list(up)} do not cover sides {small} and {large}",
    )  # fmt: skip
    return {"rank_scale": lam, "side_scale": gam, "down": down, "up": up}


def delta(base: Tensor, t: RandTensors) -> Tensor:
    """ΔW [n, out, cols]; `base` is not read."""
    n, out, cols = base.shape
    count, small = t.side_scale.shape[1:]
    rows = t.rank_scale.unsqueeze(3) * t.down[..., :small] * t.side_scale.unsqueeze(1)  # [n, r, N, s]
    rows = rows.reshape(n, -1, small) * t.scale
    columns = t.up[:, : max(out, cols), :count].reshape(n, max(out, cols), -1)
    return columns @ rows if small == cols else (columns @ rows).transpose(1, 2)


RANDLORA = Algorithm(
    "randlora", RandTensors, fit, delta, "arXiv:2502.00987", shared=frozenset({"down", "up"}),
    numbers=alpha_by(),
)  # fmt: skip
