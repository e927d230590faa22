"""The table of the values of `--method`: the rules by which several adapters change one weight, and their numbers.

The arithmetic of `sum` and `compose` is in engine/fold.py, and a second time, for the proof, in proof/recomputation.py.

In every rule a strength multiplies the change of its formula, F(W) − W, also where the library that trains the formula
has no strength (PEFT's OFT, BOFT, HRA, RoAd and (IA)³) or applies it elsewhere (LyCORIS's BOFT, in every stage).

PEFT 0.21.2 treats several adapters at once differently for each formula. It composes OFT, BOFT, HRA, RoAd and (IA)³ in
the order given, but OFT's forward pass uses the reverse order of its merge. Forward passes of HiRA and GLoRA add the
changes. DoRA adapters are composed with the norms of the unchanged weight, which is neither rule. If one adapter is
merged into the result of another, `compose` is the rule for all formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from .errors import UsageError
from .text import is_finite, plural, shown


class MergeMethod(NamedTuple):
    """One value of `--method`: how several changes of one weight meet."""

    name: str
    rule: str  # the formula of the new weight, or of the one change that is added to it
    in_turn: bool = False  # whether a formula reads the weight that the adapters before it have changed
    weighs: bool = False  # whether the change is Σ cᵢ τᵢ with numbers cᵢ
    linear: bool = False  # whether it is such a sum of which factors stay factors
    directions: bool = False  # whether the numbers cᵢ are those of directions, which biases and norms have not
    keeps: str = ""  # how each change is thinned out first: by magnitude, at random …
    elects: bool = False  # whether only entries with the sign of the sum are kept
    agrees: bool = False  # whether only entries are kept on whose sign enough adapters agree
    numbers: tuple[str, ...] = ()  # numbers that only this rule takes

    @property
    def combines(self) -> bool:
        """Whether the changes of a weight become one change, which needs all of them as a whole."""
        return not self.in_turn and self.name != SUM

    @property
    def draws(self) -> bool:
        """Whether chance decides which entries are kept."""
        return self.keeps in ("random", "ranked")

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the numbers that the rule takes."""
        further = {"largest": (), "random": ("seed",), "ranked": ("epsilon", "seed"), "middle": ("gamma",)}
        thin = ("density", *further[self.keeps]) if self.keeps else ()
        return (*thin, *(("elect", "normalise") if self.elects else ()),
                *(("agree",) if self.agrees else ()), *self.numbers)  # fmt: skip


ELECTIONS: Final = ("sum", "count")
"""The rules for the sign of an entry, the default first: the sum of all changes, or how many have the sign."""

DIVISORS: Final = ("count", "weight", "none")
"""The divisors of the entries of the elected sign, the default first: their number, their Σ|sᵢ|, or 1."""

SUM: Final = "sum"
"""The default. Recipes do not record it, so that files made before there were other methods keep their bytes."""

MEAN: Final = "mean"
"""The sum, divided by the sum of the strengths."""

COMBINATIONS: Final[Mapping[str, MergeMethod]] = MappingProxyType(
    {
        row.name: row
        for row in (
            MergeMethod(SUM, "W' = W + Σ sᵢ · (Fᵢ(W) − W): adapters commute", weighs=True, linear=True),
            MergeMethod(MEAN, "Σ sᵢτᵢ / Σ sᵢ", weighs=True, linear=True),
            MergeMethod("ties", "the largest entries, of the elected sign", keeps="largest", elects=True),
            MergeMethod("dare", "random entries, divided by density", keeps="random"),
            MergeMethod("dare_ties", "dare, of the elected sign", keeps="random", elects=True),
            MergeMethod("della", "random entries, large ones more often", keeps="ranked"),
            MergeMethod("della_ties", "della, of the elected sign", keeps="ranked", elects=True),
            MergeMethod("breadcrumbs", "neither the largest nor the smallest", keeps="middle"),
            MergeMethod("breadcrumbs_ties", "breadcrumbs, of the elected sign", keeps="middle", elects=True),
            MergeMethod("prune", "the largest entries", keeps="largest"),
            MergeMethod("slerp", "on the arc between two", weighs=True, linear=True, directions=True, numbers=("t",)),
            MergeMethod(
                "karcher", "the mean direction on the sphere, times the mean norm", weighs=True, directions=True
            ),
            MergeMethod("model_stock", "mean, scaled by the agreement of directions", weighs=True, linear=True),
            MergeMethod("consensus", "entries on whose sign enough adapters agree", agrees=True),
        )
    }
)
"""The values of `--method` for `combine`; τᵢ = Fᵢ(W) − W. The arithmetic is in engine/combination.py; the proof has
its own in proof/combination_methods.py."""

ADDED_VECTORS: Final = "biases and norms have no direction: they are added"
"""The note on the changes of biases and norms."""

METHODS: Final[Mapping[str, MergeMethod]] = MappingProxyType(
    {
        SUM: COMBINATIONS[SUM],
        "compose": MergeMethod("compose", "Wᵢ = Wᵢ₋₁ + sᵢ · (Fᵢ(Wᵢ₋₁) − Wᵢ₋₁), in the order given", in_turn=True),
        **COMBINATIONS,
    }
)
"""The values of `--method` for merging."""

SAME_COMBINATION: Final[Mapping[str, str]] = MappingProxyType({
    **dict.fromkeys(("cat", "concat", "svd", "task_arithmetic", "linear", "add"), SUM),
    **dict.fromkeys(("average", "lerp", "weighted_average"), MEAN),
    **dict.fromkeys(("magnitude_prune", "magnitude_prune_svd"), "prune"), "ties_svd": "ties", "nuslerp": "slerp",
    **dict.fromkeys(("dare_linear", "dare_linear_svd"), "dare"), "dare_ties_svd": "dare_ties", "della_linear": "della",
})  # fmt: skip
"""Name in PEFT (add_weighted_adapter) and mergekit → row of COMBINATIONS."""

LEAST_DIVISOR: Final = 1e-12
"""The smallest sum of strengths by which a mean divides."""


class MethodParameters(NamedTuple):
    """The numbers of one method. A method ignores the ones that it does not take."""

    density: float = 1.0
    gamma: float = 0.0
    epsilon: float = 0.0
    t: float | None = None
    elect: str = "sum"
    normalise: str = "count"
    agree: int | None = None
    scale: float = 1.0
    seed: int = 0


PARAMETER_NAMES: Final = MethodParameters._fields

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


def method_parameters(method: str, options: Mapping[str, Any], strengths: Sequence[float]) -> MethodParameters:
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
    parameters = MethodParameters(**stated)
    if wrong := next((name for name, good in _holds(parameters, len(strengths)).items() if not good), None):
        value = getattr(parameters, wrong)
        percent = wrong in ("density", "gamma") and is_finite(value) and 1 < value <= 100
        fix = f"write `--{wrong} {value / 100:g}`" if percent else PARAMETER_RANGES[wrong]
        raise UsageError(f"{wrong} {shown(value)} is out of range", f"--{wrong}", fix)
    if method == "slerp" and len(strengths) != 2:
        raise UsageError(
            f"slerp of {plural(len(strengths), 'adapter')}", "`--method slerp`", "give two, or use karcher"
        )
    if method == "slerp" and parameters.t is None:
        raise UsageError("slerp needs t", "--t", "write `--t 0.5`; 0 is the first adapter, 1 the second")
    if method == "model_stock" and len(strengths) < 2:
        raise UsageError("model_stock of one adapter", "`--method model_stock`", "give two or more")
    if method == "mean" and abs(sum(strengths)) < LEAST_DIVISOR:
        raise UsageError("the strengths add up to 0", "`--method mean`", "use sum, or other strengths")
    return parameters


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
