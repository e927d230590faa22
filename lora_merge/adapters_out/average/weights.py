"""The weights of snapshots in an average: equal, given, or of an exponential moving average. No torch.

θ̄₀ = θ₀, θ̄ᵢ = βᵢ θ̄ᵢ₋₁ + (1 − βᵢ) θᵢ, so that wᵢ = (1 − βᵢ) ∏_{j>i} βⱼ, w₀ = ∏ βⱼ, and the weights add up to 1.
Post-hoc EMA: Karras et al. 2023, arXiv:2312.02696, equations 2 and 126 (the width σ_rel gives γ).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from ...errors import UsageError
from ...options import is_finite, shown
from ...text import plural

WIDEST: Final = 12**-0.5
STEPS: Final = 200  # of bisection: more than the bits of a float


def average_weights(
    count: int, *, weights: Sequence[float] | None = None, ema: float | None = None, sigma_rel: float | None = None,
    **others: Any,
) -> list[float]:  # fmt: skip
    """Return the weight of each of so many snapshots, the oldest first; UsageError for values that give none. `others`:
    as `shares` takes them."""
    given = [
        name for name, value in (("weights", weights), ("ema", ema), ("sigma-rel", sigma_rel)) if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both give the weights", f"--{given[1]}", "use one of them")
    if others.get("ema_to") is not None and ema is None:
        raise UsageError("--ema-to is given without --ema", "--ema-to", "give --ema too")
    if weights is not None:
        if len(weights) != count or not all(is_finite(w) for w in weights):
            raise UsageError(
                f"{plural(len(weights), 'weight')} for {plural(count, 'snapshot')}",
                "--weights",
                "give one number for each",
            )
        return [float(w) for w in weights]
    betas = shares(count, ema=ema, sigma_rel=sigma_rel, **others)
    return [1 / max(count, 1)] * count if betas is None else _moving(betas)


def shares(
    count: int, *, ema: float | None = None, ema_to: float | None = None, sigma_rel: float | None = None,
    musubi_t: bool = False,
) -> list[float] | None:  # fmt: skip
    """Return the share βᵢ that each step of a moving average keeps, one fewer than snapshots; None for no such average.
    UsageError for values that give none.

    `musubi_t`: count the steps of a post-hoc EMA as musubi-tuner does, which gives the oldest snapshot the weight 0.
    """
    if ema is not None:
        last = ema if ema_to is None else ema_to
        if not all(is_finite(b) and 0 <= b < 1 for b in (ema, last)):
            raise UsageError(f"ema {shown(ema)} to {shown(last)}", "--ema", "use numbers from 0 to less than 1")
        return [ema + (last - ema) * (i / max(count - 2, 1)) for i in range(count - 1)]
    if sigma_rel is None:
        return None
    power, first = _power(sigma_rel) + 1, 1 if musubi_t else 2  # from t = 2, so that the oldest counts
    return [(1 - 1 / t) ** power for t in range(first, first + count - 1)]


def _moving(betas: Sequence[float]) -> list[float]:
    """Return the weights of a moving average whose i-th step keeps the share βᵢ."""
    return [(1 - b) * prod(betas[i:]) for i, b in enumerate((0.0, *betas))]


def _power(sigma: float) -> float:
    """Return γ ≥ 0 with (γ + 1)^½ (γ + 2)⁻¹ (γ + 3)^-½ = σ, by bisection; the left side falls with γ."""
    if not is_finite(sigma) or not 0 < sigma <= WIDEST:
        raise UsageError(
            "no average has this width", f"--sigma-rel {shown(sigma)}", "use a number above 0, up to 0.288"
        )
    low, high = 0.0, 1.0
    while _width(high) > sigma:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _width(middle) > sigma else (low, middle)
    return high


def _width(power: float) -> float:
    return float((power + 1) ** 0.5 / ((power + 2) * (power + 3) ** 0.5))
