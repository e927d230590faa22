"""The numbers that methods take, and the checks of their values; each wrong value is a UsageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from .errors import UsageError
from .merge_methods import DIVISORS, ELECTIONS, METHODS
from .options import is_finite, shown
from .text import plural

LEAST_DIVISOR: Final = 1e-12
"""The smallest sum of strengths by which a mean divides."""


@dataclass(frozen=True)
class MethodParameters:
    """The numbers of one method. A method ignores those that it does not take."""

    density: float = 1.0
    gamma: float = 0.0
    epsilon: float = 0.0
    t: float | None = None
    elect: str = "sum"
    normalise: str = "count"
    agree: int | None = None
    scale: float = 1.0
    seed: int = 0


PARAMETER_NAMES: Final = tuple(f.name for f in fields(MethodParameters))

PARAMETER_RANGES: Final = {
    "density": "use a number above 0, at most 1",
    "gamma": "use a number from 0 to less than 1 − density",
    "epsilon": "density − epsilon and density + epsilon must be between 0 and 1",
    "t": "use a number, usually from 0 to 1",
    "agree": "use a whole number from 1 to the number of adapters",
    "elect": f"use {' or '.join(ELECTIONS)}",
    "normalise": f"use {', '.join(DIVISORS)}",
    "scale": "use a finite number",
    "seed": "use a whole number from 0 on",
}


def numbers_of(method: str, options: Mapping[str, Any], strengths: Sequence[float]) -> MethodParameters:
    """Return the numbers of a method for adapters of these strengths; None is one that is not given.

    UsageError for a number that the method does not take, that is missing, or that is out of range.
    """
    row, stated = METHODS[method], {name: options[name] for name in PARAMETER_NAMES if options.get(name) is not None}
    takes = {*row.takes, "seed", *(() if row.in_turn else ("scale",))}
    plain = MethodParameters()
    for name, value in stated.items():
        if name not in takes and value != getattr(plain, name):
            users = [m for m, other in METHODS.items() if name in other.takes] or ["another method"]
            raise UsageError(f"{method} has no {name}", f"--{name}", f"leave it out, or use {' or '.join(users)}")
    numbers = MethodParameters(**stated)
    if wrong := next((name for name, good in _holds(numbers, len(strengths)).items() if not good), None):
        raise UsageError(
            f"{wrong} {shown(getattr(numbers, wrong))} is out of range", f"--{wrong}", PARAMETER_RANGES[wrong]
        )
    if method == "slerp" and len(strengths) != 2:
        raise UsageError(
            f"slerp of {plural(len(strengths), 'adapter')}", "`--method slerp`", "give two, or use karcher"
        )
    if method == "slerp" and numbers.t is None:
        raise UsageError("slerp needs a place on the arc", "--t", "0 is the first adapter, 1 the second, 0.5 between")
    if method == "model_stock" and len(strengths) < 2:
        raise UsageError("model_stock of one adapter", "`--method model_stock`", "give two or more")
    if method == "mean" and abs(sum(strengths)) < LEAST_DIVISOR:
        raise UsageError("the strengths add up to 0", "`--method mean`", "use sum, or other strengths")
    return numbers


def _holds(n: MethodParameters, adapters: int) -> dict[str, bool]:
    """Return name → whether the value is in its range."""
    d, g, e = n.density, n.gamma, n.epsilon
    return {
        "density": is_finite(d) and 0 < d <= 1,
        "gamma": is_finite(g) and is_finite(d) and (g == 0 or 0 <= g < 1 - d),
        "epsilon": is_finite(e) and is_finite(d) and (e == 0 or (e > 0 and d - e > 0 and d + e < 1)),
        "t": n.t is None or is_finite(n.t),
        "agree": n.agree is None or (isinstance(n.agree, int) and n.agree in range(1, adapters + 1)),
        "elect": n.elect in ELECTIONS,
        "normalise": n.normalise in DIVISORS,
        "scale": is_finite(n.scale),
        "seed": isinstance(n.seed, int) and 0 <= n.seed < 2**63,
    }  # fmt: skip
