"""What parts of a model mean for each tensor: factors of strengths, and the choice of `--include` and `--exclude`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ..errors import AmbiguousName
from ..job import Adapter
from ..options import BLOCK_LIST, REGEX, a_list, unlike
from ..paths import typed
from ..safe_regex import Steps
from ..text import Note, expression, listed, plural
from .names import Names
from .parts import ABSENT, NOT_CHANGED, Parts, as_typed, by_prefix, hint_of, labels
from .prefixes import innermost
from .weights import WeightView

STRENGTH_FOR: Final = "--strength-for"

EXCLUDE: Final = "--exclude"
CHOOSING_OPTIONS: Final = ("--include", EXCLUDE)


def on_base(adapter: Adapter, names: Names) -> Adapter:
    """Return an adapter whose parts have the labels of the base's networks: `clip_g` is te2 in Stable Diffusion XL."""
    parts = [(label, factor) for part, factor in adapter.parts for label in labels(part, names)]
    return replace(adapter, parts=tuple(parts))


def or_strength_zero(fix: str, keys: Iterable[str]) -> str:
    """Return a fix, and as another one the option with which these weights of the base stay as they are; not for too
    many kinds of them."""
    names = expression(keys)
    return fix + (
        f"; or leave out what does not fit: `{STRENGTH_FOR} {typed([f'{REGEX}^{names}$=0'])}`" if names else ""
    )


class Strengths:
    """One adapter's strength on one base, tensor by tensor."""

    def __init__(self, adapter: Adapter, names: Names, steps: Steps) -> None:
        """Prepare the parts of one adapter. `steps`: how long all regular expressions of the job may search."""
        self.path, self.strength = adapter.path, adapter.strength
        self._factors, self._steps, self.names = on_base(adapter, names).parts, steps, names
        self._labels = {part: labels(part, names) for part, _ in adapter.parts}  # part as typed → those of the base
        self._parts = Parts(STRENGTH_FOR, (part for part, _ in self._factors), names, steps=steps)
        self._absent: frozenset[str] = frozenset()  # networks that the base lacks, with factor 0
        self._set_to_0: dict[str, None] = {}  # keys whose strength was asked for and is 0
        self._used: set[str] = set()  # parts that a strength which was asked for has depended on

    def factor(self, key: str, component: str) -> float:
        """Return the strength for one tensor of the base. `key`: its name in the base; `component`: its network."""
        product = self.strength
        self._steps.allow()
        for part, value in self._factors:
            if (weight := self._parts.factor(part, key, component)) is not None:
                product *= value * weight
                self._used.add(part)
        if not product:
            self._set_to_0[key] = None
        return product

    def leaves_out(self, module: str) -> bool:
        """Return whether a module without a place is of a network that has factor 0 and that the base lacks."""
        encoders = self.names.known.text_encoders if self.names.known else {}
        used = {part for part in self._absent if by_prefix(part, {innermost(module)[0]}, encoders)}
        self._used |= used
        return bool(used)

    def find(self, module: str, parameter: str) -> WeightView | None:
        """Return the rows that an adapter calls `module`, as `Names.find`; if a name fits two networks, factor 0 for
        one of them leaves the other."""
        try:
            return self.names.find(module, parameter)
        except AmbiguousName:
            if not self._off:
                raise
            view = self._others.find(module, parameter)
            self._used |= {*self._off}
            return view

    @cached_property
    def _off(self) -> tuple[str, ...]:
        """The networks of the base that have factor 0."""
        return tuple(part for part, value in self._factors if not value and self._parts.names_network(part))

    @cached_property
    def _others(self) -> Names:
        return self.names.without(
            [p.label for p in self.names.parts if any(self._parts.factor(o, "", p.label) for o in self._off)]
        )

    def notes(self, keys: Iterable[str]) -> Iterator[Note]:
        """Yield notes on lists of block weights if other programs treat some changed tensors differently.

        `keys`: the tensors that the adapter changes, without those whose strength is 0.
        """
        base, keys = self._parts.blocks, [*dict.fromkeys((*keys, *self._set_to_0))]
        for part in (p for p, _ in self._factors if base and p.startswith(BLOCK_LIST)):
            assert base is not None, "there are block weights"
            value = part.removeprefix(BLOCK_LIST)
            if loose := [key for key in keys if base.loose(key)]:
                yield Note(
                    f"lbw={value[:40]}: {plural(len(loose), 'weight')} in no block, such as {loose[0]}: embeddings of "
                    f"time and labels count as {base.order[0]}, the output as {base.order[-1]}; webui leaves them at 1"
                )
            unnamed = base.unnamed(value)
            if silent := [key for key in keys if base.of(key) in unnamed and not base.loose(key)]:
                yield Note(f"lbw={value[:40]}: the list names no {listed(sorted({base.of(k) for k in silent}), 4)}: "
                       f"{plural(len(silent), 'weight')} of the adapter get 0")  # fmt: skip

    def repeated(self) -> Iterator[Note]:
        """Yield notes on parts that are named more than once."""
        for part, count in Counter(part for part, _ in self._factors).items():
            if count > 1:
                yield Note(f"{as_typed(part)} is named {count} times: its factors are multiplied")

    def check(self, components: Mapping[str, str]) -> None:
        """Raise UsageError for a part that covers no tensor of the base. `components`: key → component.

        A network that the base lacks may have factor 0, as long as an adapter has modules of it: `leaves_out`.
        """
        absent = self._parts.absent(components)
        factors = dict(self._factors)
        for part in absent:
            if factors[part] or not hint_of(part):
                error = self._parts.refusal(part, ABSENT, components)
                if hint_of(part) and not error.suggestion:
                    error.instead(f"{part}={factors[part]:g}", f"{part}=0")
                raise error
        self._absent = frozenset(absent)


def check_effect(every: Sequence[Strengths]) -> None:
    """Raise UsageError for a part on which no strength of any adapter has depended."""
    used = set[str]().union(*(strengths._used for strengths in every))
    for strengths in every:
        for part, covered in strengths._labels.items():
            if used.isdisjoint(covered):
                what = ABSENT if strengths._absent.issuperset(covered) else NOT_CHANGED
                factor = dict(strengths._factors)[part]
                raise strengths._parts.refusal(part, what).instead(f"{part}={factor:g}", "")


@dataclass(frozen=True)
class ParameterChoice:
    """A choice of parameters: those in a part of `include`, or all, without those in a part of `exclude`."""

    include: Parts
    exclude: Parts

    @staticmethod
    def of(
        include: Sequence[str], exclude: Sequence[str], names: Names | None, networks: Collection[str] = ()
    ) -> ParameterChoice:
        """Return the choice of the options of a job; see `Parts` for `names` and `networks`, and for errors."""
        return ParameterChoice(
            *(Parts(f, t, names, networks) for f, t in zip(CHOOSING_OPTIONS, (include, exclude), strict=True))
        )

    def takes(self, network: str, names: Iterable[str], *, usual: bool = True) -> bool:
        """Return whether a parameter is chosen; `names`: its names. `usual`: the answer without `--include`."""
        names = [*names]
        if self.exclude.cover(names, network):
            return False
        return self.include.cover(names, network) if self.include.texts else usual

    def check(self, networks: Mapping[str, str], what: str) -> None:
        """Raise UsageError for a part that covers nothing; `networks`: names of parameters → their networks."""
        self.include.check(networks, what)
        self.exclude.check(networks, what)


def or_leave_out(fix: str, keys: Iterable[str], *, alike: bool = False) -> str:
    """Return a fix, and as another one the option that leaves parameters of these keys out; not for too many kinds of
    keys.

    `alike`: and all whose keys differ from these in numbers alone.
    """
    names = expression(keys, alike=alike)
    return fix + (f", or leave that out: `{EXCLUDE} {typed([f'{REGEX}^{names}$'])}`" if names else "")


def parts(value: Any, flag: str) -> tuple[str, ...]:
    """Return the parts that an option names, one or many; UsageError for what is not text."""
    names = (value,) if isinstance(value, str) else tuple(a_list(value, flag, "a list of texts"))
    if wrong := next((p for p in names if not isinstance(p, str) or not p), None):
        raise unlike(wrong, flag, "a component, a block, or re:REGEX")
    return names
