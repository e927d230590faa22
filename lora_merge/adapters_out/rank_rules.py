"""The rules that choose the rank of a layer from its singular values; one grammar for all commands. No torch.

σ₁ ≥ σ₂ … are the singular values of Δ with its strengths and α / r. A share is reached from x·(1 − 1e-12) on.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Final, NamedTuple

from ..errors import UsageError
from ..job import parse_size
from ..models.names import Names
from ..models.parts import NOT_CHANGED, Parts

RANK_FOR: Final = "--rank-for"

EXACT, SAME, COUNT, SIZE, NOISE = "exact", "same", "count", "size", "noise"

NO_NOISE: Final = "noise is that of a checkpoint's dtype, which only extract knows"

SHARES: Final = ("energy", "fro", "sum")
RULE_RANGES: Final = {**dict.fromkeys(SHARES, (0.0, 1.0)), "ratio": (1.0, math.inf), "above": (0.0, math.inf)}
SLACK: Final = 1e-12
HIGHEST_RANK: Final = 2**20
GRAMMAR: Final = "a number, exact, same, energy:x, fro:x, sum:x, ratio:x, above:x or size:100MiB"


@dataclass(frozen=True)
class Rule:
    """One rule for ranks. `value` is its x, its N or its number of bytes; `most` is a ceiling for the result."""

    name: str
    value: float = 0.0
    most: int | None = None

    @property
    def ceiling(self) -> int | None:
        """The largest rank that the rule can give, where the rule alone states it."""
        ranks = [int(self.value)] if self.name == COUNT else []
        return min([*ranks, *([self.most] if self.most is not None else [])], default=None)

    def of_inputs(self, rank: int) -> Rule:
        """Return the rule with the rank of the input in place of `same`; `energy:1` for an input without a rank."""
        if self.name != SAME:
            return self
        return replace(self, name=COUNT, value=rank) if rank else replace(self, name="energy", value=1.0)

    @property
    def leading(self) -> bool:
        """Whether the largest singular values and ‖Δ‖² give the rank."""
        return self.name in (COUNT, *SHARES[:2], "ratio", "above") or self.most is not None

    @property
    def text(self) -> str:
        """The rule as the user writes it."""
        value = f"{self.value:.17g}" if self.value != int(self.value) else str(int(self.value))
        plain = {COUNT: value, **{name: name for name in (EXACT, SAME, NOISE)}}
        return plain.get(self.name, f"{self.name}:{value}")


def parse(text: str | int, most: int | None = None, option: str = "--rank") -> Rule:
    """Return the rule that a text or a number states; UsageError if it states none. `most`: the value of --max-rank."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise _unknown(text, option)
    text = str(text).strip()
    name, _, value = text.partition(":")
    if most is not None and not 1 <= most <= HIGHEST_RANK:
        raise UsageError(f"{most} cannot be a rank", "--max-rank", f"use a whole number from 1 to {HIGHEST_RANK}")
    if re.fullmatch(r"[0-9]{1,7}", name) and not value:
        if not 1 <= int(name) <= HIGHEST_RANK:
            fix = f"`{option} {min(max(int(name), 1), HIGHEST_RANK)}`: ranks are from 1 to {HIGHEST_RANK}"
            raise UsageError(f"{name} cannot be a rank", option, f"write {fix}")
        return Rule(COUNT, int(name), most)
    if name in (EXACT, SAME, NOISE) and not value:
        return Rule(name, most=most)
    if name == SIZE and value:
        return Rule(SIZE, parse_size(value, option), most)
    percent = _number(value.removesuffix("%")) if name in SHARES else None
    if percent is not None and (value.endswith("%") or percent > 1) and 0 < percent <= 100:
        near = f"{name}:{percent / 100:g}"
        raise UsageError(f"{text[:40]!r} is out of range", option, f"did you mean {near}?").instead(text, near)
    number = _number(value)
    if number is None or name not in RULE_RANGES:
        raise _unknown(text, option)
    least, most_value = RULE_RANGES[name]
    if not least <= number <= most_value or (name in SHARES and not number):
        raise UsageError(f"{text[:40]!r} is out of range", option, f"use a number from {least:g} to {most_value:g}")
    return Rule(name, number, most)


def _number(value: str) -> float | None:
    """Return the finite number that a text holds, or None."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in value else None


def _unknown(text: object, option: str) -> UsageError:
    """Return the error for what is no rule; a share alone, such as 0.9 or 90%, may be meant as that of the energy."""
    names, values = (re.findall(part, str(text).lower()) for part in ("[a-z]+", "[0-9]+(?:[.,][0-9]+)?%?"))
    name = next(iter(get_close_matches("".join(names), SHARES, 1, 0.7) if names else SHARES[:1]), "")
    share = float(values[0].rstrip("%").replace(",", ".")) / (100 if values[0][-1] == "%" else 1) if values else 0.0
    what = f"{str(text)[:40]!r} is not a rule for ranks"
    if name and len(values) == 1 and 0 < share <= 1 and "-" not in str(text):
        near = f"{name}:{share:g}"
        return UsageError(what, option, f"did you mean {near}?").instead(str(text), near)
    number = _number(str(text))
    right = max(round(number), 1) if number is not None and number < HIGHEST_RANK else 16
    return UsageError(what, option, f"write `{option} {right}`, or use {GRAMMAR}")


def choose(rule: Rule, spectrum: Sequence[float], *, total: float | None = None, same: int = 0) -> int:
    """Return the rank of a layer: the smallest k for which the rule holds, at least 1, at most the spectrum's length.

    Parameters:
        rule: Any rule but `size`, which looks at all layers together.
        spectrum: Singular values, the largest first, without those below the numeric rank.
        total: ‖Δ‖², where the spectrum is only the beginning. Default: Σσ².
        same: The rank of the input module, for `same`.
    """
    squares = [s * s for s in spectrum]
    energy = sum(squares) if total is None else total
    if rule.name == COUNT:
        k = int(rule.value)
    elif rule.name == SAME:
        k = same
    elif rule.name in ("energy", "fro"):
        k = _reached(squares, energy * (rule.value if rule.name == "energy" else rule.value**2))
    elif rule.name == "sum":
        k = _reached(spectrum, sum(spectrum) * rule.value)
    elif rule.name in ("ratio", "above"):
        least = rule.value if rule.name == "above" else spectrum[0] / rule.value if spectrum else 0.0
        k = sum(s > least for s in spectrum)
    else:
        k = len(spectrum)
    k = min(k, len(spectrum), k if rule.most is None else rule.most)
    return max(k, 1 if spectrum else 0)


def known_rank(rule: Rule, values: Sequence[float], total: float) -> int | None:
    """Return the rank of a layer where its largest singular values give it; None where more of them are needed.

    Parameters:
        rule: Any rule but `size` and `same`.
        values: The largest singular values, the largest first.
        total: ‖Δ‖².
    """
    k = None
    if rule.name == COUNT and len(values) >= rule.value:
        k = int(rule.value)
    elif rule.name in SHARES[:2]:
        share = rule.value if rule.name == "energy" else rule.value**2
        sums = accumulate(s * s for s in values)
        k = next((n for n, value in enumerate(sums, 1) if value >= total * share * (1 - SLACK)), None)
    elif rule.name in ("ratio", "above") and values:
        least = rule.value if rule.name == "above" else values[0] / rule.value
        k = next((max(n, 1) for n, value in enumerate(values) if value <= least), None)
    if rule.most is not None and len(values) >= rule.most:
        return rule.most if k is None else min(k, rule.most)
    return k


def _reached(terms: Sequence[float], least: float) -> int:
    """Return how many terms, added in order, reach the wanted sum."""
    return next((k for k, s in enumerate(accumulate(terms), 1) if s >= least * (1 - SLACK)), len(terms))


class LayerSpectrum(NamedTuple):
    """The singular values of one layer, the largest first, and the bytes of one direction: of a row and a column."""

    layer: str
    values: Sequence[float]
    width: int


def ranks_by_size(rule: Rule, layers: Iterable[LayerSpectrum]) -> dict[str, int]:
    """Return the rank of each layer by the rule `size`, which looks at all of them."""
    everything = replace(rule, name="energy", value=1.0)
    spectra, widths = dict[str, Sequence[float]](), dict[str, int]()
    for layer, values, width in layers:
        spectra[layer], widths[layer] = values[: choose(everything, values)], width
    return ranks_within(spectra, widths, int(rule.value), rule.most)


def ranks_within(
    spectra: Mapping[str, Sequence[float]], widths: Mapping[str, int], budget: int, most: int | None = None
) -> dict[str, int]:
    """Return the rank of each layer, for the rule `size`: again and again the direction with the largest σ² per byte.

    Every layer gets one direction first, also if that alone is more than the budget: no layer is dropped.

    Parameters:
        spectra: Layer → singular values, the largest first.
        widths: Layer → bytes of one direction: (out + cols) · bytes of a number.
        budget: Bytes of all factors together.
        most: The value of --max-rank.
    """
    ranks = {name: min(1, len(spectrum)) for name, spectrum in spectra.items()}
    left = budget - sum(widths[name] * k for name, k in ranks.items())
    heap = [
        (-spectrum[1] * spectrum[1] / widths[name], name) for name, spectrum in spectra.items() if len(spectrum) > 1
    ]
    heapq.heapify(heap)
    while heap:
        _, name = heapq.heappop(heap)
        if widths[name] > left or (most is not None and ranks[name] >= most):
            continue  # a narrower layer may still fit
        left -= widths[name]
        ranks[name] += 1
        if ranks[name] < len(spectra[name]):
            heapq.heappush(heap, (-spectra[name][ranks[name]] * spectra[name][ranks[name]] / widths[name], name))
    return ranks


@dataclass(frozen=True)
class RankRules:
    """The rules of one run: for linear layers, for convolutions with a kernel, and for parts of the model."""

    linear: Rule
    kernels: Rule
    parts: tuple[tuple[str, Rule], ...] = ()
    layers: Mapping[str, Rule] = field(default_factory=dict)
    """Layer → the rule of its part, once the model is known: see `on`."""

    @classmethod
    def of(
        cls, rank: str | int, conv_rank: str | int | None, most: int | None, rank_for: Sequence[tuple[str, str | int]]
    ) -> RankRules:
        """Return the rules that the options state. `rank_for`: pairs of a part of the model and a rule."""
        linear = parse(rank, most)
        kernels = linear if conv_rank is None else parse(conv_rank, most, "--conv-rank")
        Parts(RANK_FOR, (part for part, _ in rank_for))  # checks expressions
        parts = tuple((part, parse(rule, most, RANK_FOR)) for part, rule in rank_for)
        if any(r.name == SIZE for r in (kernels, *(r for _, r in parts)) if r is not linear):
            raise UsageError("a size is shared by all layers", "--conv-rank or --rank-for", "give it as --rank")
        return cls(linear, kernels, parts)

    @property
    def stated(self) -> tuple[Rule, ...]:
        """All rules."""
        return self.linear, self.kernels, *(rule for _, rule in self.parts)

    def all_are(self, name: str) -> bool:
        """Return whether all rules have this name."""
        return {rule.name for rule in self.stated} == {name}

    def on(self, names: Names | None, layers: Iterable[tuple[str, str, Sequence[str]]]) -> RankRules:
        """Return the rules for the layers of a model; of several parts with a layer, the last one decides.

        UsageError for a part without a layer. `names`: those of the base, None without one; `layers`: the name of a
        layer, its network, and its names in which parts are looked for.
        """
        if not self.parts:
            return self
        layers = [*layers]
        networks = {name: network for _, network, some in layers for name in some}
        rules: dict[str, Rule] = {}
        for text, rule in self.parts:
            part = Parts(RANK_FOR, [text], names, networks.values())
            part.check(networks, NOT_CHANGED)
            rules |= {layer: rule for layer, network, some in layers if part.cover(some, network)}
        return replace(self, layers=rules)

    def of_layer(self, name: str, *, kernel: bool) -> Rule:
        """Return the rule of a layer."""
        return self.layers.get(name, self.kernels if kernel else self.linear)

    def has(self, name: str) -> bool:
        """Return whether a rule of this name is among them."""
        return any(rule.name == name for rule in self.stated)

    @property
    def of_all_layers(self) -> bool:
        """Whether a rule looks at all layers at once."""
        return self.linear.name == SIZE

    def exactly(self) -> RankRules:
        """Return the rules with every `size` replaced by `exact`: what is kept before the size is shared out."""

        def plain(rule: Rule) -> Rule:
            return replace(rule, name=EXACT) if rule.name == SIZE else rule

        return replace(self, linear=plain(self.linear), kernels=plain(self.kernels))
