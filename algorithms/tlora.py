"""T-LoRA, ΔW = (α / r) · (P diag(λ) Q − P₀ diag(λ₀) Q₀). Soboleva et al. 2025, arXiv:2507.05964;
LyCORIS lycoris/modules/tlora.py.

The start P₀ λ₀ Q₀ is not stored. It is r singular triples of the base weight, so it is computed
again if training began from this base and not from a random matrix (`use_data_init`); the signs of
the singular vectors cancel. Only the metadata says how training began: without `algo` (LyCORIS
network arguments) the file is refused. All ranks are used, as at the end of denoising.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Algorithm, Bypass, Checks, Factorisation, Shape, Shapes, alpha_over, expect, flat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Scalar

SIG_TYPES = ("principal", "last", "middle")


class TloraTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    p: Tensor  # [n, out, r]
    q: Tensor  # [n, r, in]
    lambdas: Tensor  # [n, 1, r]
    scale: Scalar  # α / r
    algo: str  # "tlora"
    sig_type: str = "principal"  # which singular triples
    use_data_init: bool = True


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of p (out, r), q (r, in) and lambdas (1, r); kernels have one pixel, as in LyCORIS' forward."""
    out, cols = flat(target)
    (rows, rank), (q_rank, width) = flat(shapes["p"]), flat(shapes["q"])
    stored = {slot: list(shapes[slot]) for slot in ("p", "q", "lambdas")}
    expect(
        holds=rank == q_rank and shapes["lambdas"] == (1, rank),
        otherwise=f"the ranks of {stored} differ",
    )
    expect(
        holds=(rows, width) == (out, cols) and target[1:2] == (cols,),
        otherwise=f"{stored} for a weight of {list(target)}",
    )
    return {"p": (out, rank), "q": (rank, cols), "lambdas": (1, rank)}


def check_settings(settings: Mapping[str, Any], _: Shapes, __: Shape) -> None:
    """Raise DoesNotFit for a start that does not follow from the base."""
    expect(
        holds=bool(settings.get("use_data_init", True)),
        otherwise="T-LoRA trained from a random matrix, which the file does not hold",
    )
    kind = settings.get("sig_type", "principal")
    expect(holds=kind in SIG_TYPES, otherwise=f"sig_type is {kind}; known are {SIG_TYPES}")


def delta(base: Tensor, t: TloraTensors) -> Tensor:
    """Return ΔW [n, out, cols]; the start follows from the untouched `base`."""
    left, right = _start(base, t)
    return ((t.p * t.lambdas) @ t.q).sub_(left @ right).mul_(t.scale)


def factors(base: Tensor, t: TloraTensors) -> tuple[Tensor, Tensor]:
    """Return (α / r) · [P Λ, −U S] and [Q; Vᵀ], with the start's triples from the untouched `base`."""
    import torch

    left, right = _start(base, t)
    return torch.cat((t.p * t.lambdas, -left), 2) * t.scale, torch.cat((t.q, right), 1)


def _start(base: Tensor, t: TloraTensors) -> tuple[Tensor, Tensor]:
    """Return U S and Vᵀ of the triples that the training began with."""
    import torch

    u, s, vh = torch.linalg.svd(base, full_matrices=False)
    rank, total = t.q.shape[1], s.shape[1]
    # of a rank above the number of triples, LyCORIS takes all, but in the middle the triples that Python's slice gives
    first = {"principal": 0, "last": max(0, total - rank), "middle": (total - rank) // 2}[t.sig_type]
    triples = slice(first, first + rank)
    return u[:, :, triples] * s[:, None, triples], vh[:, triples]


TLORA = Algorithm(
    "tlora", TloraTensors, fitted_shapes, delta, "arXiv:2507.05964", scalars_from=alpha_over("q"),
    checks=Checks(settings=check_settings), reads_base=True, decomposes=True,
    low_rank=Factorisation(lambda shapes, _: 2 * shapes["q"][0], factors),
    bypass=Bypass(groups="other"),
)  # fmt: skip
