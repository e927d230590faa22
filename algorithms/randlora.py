"""RandLoRA, a sum of scaled random bases. Albert et al. 2025, arXiv:2502.00987, section 3.

With the smaller side s and the larger side l of the weight and N = ⌈s / r⌉ bases: A' = rows (k, i)
of λ[k, i] · A[k, i, :s] · γ[i, :], B' = columns (i, k) of B[:l, i, k], and ΔW = g · B' A', or its
transpose if the inputs are the larger side. The orders (k, i) and (i, k) differ, as in PEFT
tuners/randlora/layer.py.

The bases are stored, or drawn again from `projection_prng_key` on the CPU as in PEFT (model.py): in bf16,
or as −1, 0 and 1 if they are sparse, and divided by their standard deviation."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import SEEDED, Algorithm, AlphaOverRank, Checks, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class RandTensors(NamedTuple):
    """The scales of each layer, and the bases that all layers share."""

    rank_scale: Tensor  # λ, [n, r, N]
    side_scale: Tensor  # γ, [n, N, s]
    scale: Scalar  # `randlora_alpha` / r
    down: Tensor | None = None  # A, [n, r, 1, widest s]
    up: Tensor | None = None  # B, [n, widest l, most N, r]
    seed: int = 0  # `projection_prng_key`
    widest: Shape = ()  # (out, in), each the largest of all layers with this algorithm
    sparse: bool = False
    very_sparse: bool = False


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes; the bases must cover the weight."""
    (small, large), lam, gam = sorted(flat(target)), shapes["rank_scale"], shapes["side_scale"]
    expect(holds=len(lam) == 2 and lam[0] > 0, otherwise=f"λ is {list(lam)}")
    count = -(-small // lam[0])
    expect(
        holds=lam[1] == count and gam == (count, small),
        otherwise=f"λ is {list(lam)}, γ is {list(gam)}, the weight's sides are {small} and {large}",
    )
    if "down" not in shapes and "up" not in shapes:
        return {"rank_scale": lam, "side_scale": gam}
    down, up = shapes.get("down", ()), shapes.get("up", ())
    expect(
        holds=len(down) == 3 == len(up) and down[:2] == (lam[0], 1) and down[2] >= small
        and up[0] >= large and up[1] >= count and up[2] == lam[0],
        otherwise=f"bases {list(down)} and {list(up)} do not cover sides {small} and {large}",
    )  # fmt: skip
    return {"rank_scale": lam, "side_scale": gam, "down": down, "up": up}


def derive(shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the bases, drawn as in training: A first, then B."""
    import torch

    expect(holds="seed" in settings, otherwise="the bases are not stored, and no configuration has their seed")
    rank, (small, large) = shapes["rank_scale"][0], sorted(settings["widest"])
    least, most = sorted(flat(target))
    expect(
        holds=least <= small and most <= large,
        otherwise=f"bases of sides {small} and {large} do not cover sides {least} and {most}",
    )
    count = -(-small // rank)
    generator = torch.Generator(device="cpu").manual_seed(settings["seed"])

    def dense(*shape: int) -> Tensor:
        return torch.nn.init.kaiming_uniform_(torch.empty(shape, dtype=torch.bfloat16), sqrt(5), generator=generator)

    def signs(*shape: int) -> Tensor:
        share = 1 / (2 * (sqrt(small) if settings.get("very_sparse") else 3))
        drawn = torch.rand(shape, generator=generator)
        return (drawn > 1 - share) * torch.ones(1) - (drawn < share) * torch.ones(1)

    if settings.get("sparse") or settings.get("very_sparse"):
        drawn = signs(rank, 1, small), signs(large, count, rank)
    else:
        drawn = dense(rank, 1, small), torch.cat([dense(large, 1, rank) for _ in range(count)], dim=1)
    down, up = (basis / basis.std() * torch.ones(1) for basis in drawn)  # divided in bf16, returned in fp32
    return {"down": down, "up": up}


def delta(base: Tensor, t: RandTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    assert t.up is not None and t.down is not None, "stored or derived"
    n, out, cols = base.shape
    count, small = t.side_scale.shape[1:]
    rows = t.rank_scale.unsqueeze(3) * t.down[..., :small] * t.side_scale.unsqueeze(1)  # [n, r, N, s]
    rows = rows.reshape(n, -1, small) * t.scale
    columns = t.up[:, : max(out, cols), :count].reshape(n, max(out, cols), -1)
    return columns @ rows if small == cols else (columns @ rows).transpose(1, 2)


RANDLORA = Algorithm(
    "randlora", RandTensors, fitted_shapes, delta, "arXiv:2502.00987", scalars_from=AlphaOverRank(), derive=derive,
    checks=Checks(SEEDED), scale_from_config=True,
)  # fmt: skip
