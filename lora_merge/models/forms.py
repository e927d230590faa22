"""All names under which adapters may speak of the tensors of one network, worked out form by form.

A form is a name with `#` for its numbers: the 200 000 names of a mixture of experts are of thirty forms. What rows of
the name tables apply to a name, and what it may be called, its form tells. So the tables are applied to forms first;
to names only when one of that form is asked for, and not even then where a form is nothing but its tensors' own.
Names are built from the base's own keys, so nothing has to be guessed about underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

from ..algorithms import Shape
from .architectures.notation import Row, Table, is_number
from .cutting import Names, canonical, put, spelled
from .weights import RowSlice, WeightView, whole

PARAMETERS: Final = {"scale": "weight", "gamma": "weight", "beta": "bias"}
"""What a norm calls its parameters → what adapters call them."""

INNER: Final = ("model.", "transformer.", "bert.", "vit.", "deit.")
"""First levels that adapters lack if they were trained on the model inside the model with a head. Beside `model.`
the others are a model's parts: HunYuan-VL's `vit.`"""

Place: TypeAlias = tuple[WeightView | None, bool]
"""(where it lies, whether the name is known); a known name without a place fits two."""

Way: TypeAlias = tuple[str, str | None]
"""How a name becomes another: what to put before, and what behind its module; None: behind all of it."""

UNKNOWN: Final[Place] = (None, False)

_BETWEEN: Final = re.compile(r"\.[0-9]{1,9}(?=\.)")
_DIGITS: Final = re.compile("[0-9]+")


def form(name: str) -> str:
    """`layers.#.attn.to_q.weight` for a name of any layer."""
    if name[:1].isdigit() or name[-1:].isdigit():
        return ".".join("#" if is_number(s) else s for s in name.split("."))
    return ".#".join(_BETWEEN.split(name))


class NameTable:
    """The names of one network.

    `keys`: its tensors' own names → their names in the base; `shapes`: by name in the base; `native`: the table of its
    layout, `spellings`: all tables; `inner`: a first level that names may lack, "" if there is none but the usual.
    """

    def __init__(
        self, keys: Mapping[str, str], shapes: Mapping[str, Shape], native: Table, spellings: Sequence[Table],
        inner: str,
    ) -> None:  # fmt: skip
        self._keys, self._shapes, self._native, self._spellings = keys, shapes, native, spellings
        self._heads = (inner,) if inner else ()
        self._bodies: dict[str, list[str]] = {}  # form → the tensors' own names
        for body in keys:
            self._bodies.setdefault(form(body), []).append(body)
        self._sources: dict[str, dict[str, set[Row]]] = {}
        """Form of a name → forms of the tensors that may lie there, with the rows that say so; none for their own."""
        for body in self._bodies:
            self._trace(body)
        self._made: dict[str, Names] = {}
        self._rules: dict[str, Row | bool] = {}
        self._live: dict[str, list[Way]] = {}  # weak form → the ways to paths that there may be
        self._layers: dict[str, dict[str, set[RowSlice]]] = {}

    def knows(self, name: str) -> bool:
        """Return whether a name, dotted or flat, has a place, but perhaps with other numbers."""
        coarse = _coarse(name)
        return any(coarse in forms for forms in self._flat_forms)

    def dotted(self, name: str) -> Place:
        """Return the place of a parameter by its path, in any spelling."""
        of = form(name)
        found = self._strong(name, of)
        return found if found[1] else self._weak(name, of)

    def flat(self, name: str) -> Place:
        """Return the place of a parameter by a path with underscores for its dots, but for the last."""
        coarse = _coarse(name)
        for forms, find in zip(self._flat_forms, (self._strong, self._weak), strict=True):
            found = _only(find(path, of) for of in forms.get(coarse, ()) for path in _unflattened(of, name))
            if found[1]:
                return found
        return UNKNOWN

    def layers(self, body: str) -> list[RowSlice]:
        """Return the rows of a tensor that are canonical weights, in order; none for rows that do not follow each
        other.
        """
        of = form(body)
        if of not in self._layers:
            forms = [of, *(".".join(path) for _, path in self._native.names_of(tuple(of.split("."))))]
            sources = dict.fromkeys(source for other in forms for source in self._sources[other])
            found, _ = self._canonical(sources)
            there = self._layers[of] = {}
            for pieces in (view.pieces for view in found.values() if view is not None):
                if len(pieces) == 1 and not pieces[0].transposed:
                    there.setdefault(pieces[0].key, set()).add(pieces[0])
        return sorted(self._layers[of].get(self._keys[body], ()))

    def _canonical(self, sources: Iterable[str]) -> tuple[Names, list[tuple[str, WeightView]]]:
        """Of all tensors of these forms."""
        bodies = (body for source in sources for body in self._bodies[source])
        return canonical(bodies, self._keys, self._shapes, self._native)

    def _trace(self, body: str) -> None:
        """Note every form that names of tensors of this form may have."""
        cut = [(row, path) for row, path in self._native.names_of(tuple(body.split(".")))]
        for row, path in [(None, tuple(body.split("."))), *cut]:
            self._note(path, body, [r for r, _ in cut])
            for table in self._spellings:
                for other, spelling in table.spellings_of(path):
                    self._note(spelling, body, [r for r in (row, other) if r])

    def _note(self, path: tuple[str, ...], body: str, rows: Iterable[Row]) -> None:
        self._sources.setdefault(".".join(path), {}).setdefault(body, set()).update(rows)

    def _direct(self, of: str) -> Row | bool:
        """Return whether names of this form can only be the tensors' own, or the one row that these are renamed by."""
        if of not in self._rules:
            ((source, rows), *others) = self._sources[of].items()
            row = next(iter(rows), None)
            unsure = others or len(rows) > 1 or (row and (source == of or self._sources[source][source]))
            self._rules[of] = False if unsure else source == of if row is None else row.renames and row
        return self._rules[of]

    def _strong(self, name: str, of: str) -> Place:
        """By the tensor's own name, or what a spelling calls it."""
        if of not in self._sources:
            return UNKNOWN
        direct = self._direct(of)
        if not direct:
            names = self._names(of)
            return names.get(name), name in names
        body = name if direct is True else ".".join(direct.renamed(tuple(name.split("."))))
        key = self._keys.get(body)
        return UNKNOWN if key is None else (whole(key, self._shapes[key]), True)

    def _names(self, of: str) -> Names:
        """Return all names of one form."""
        if of not in self._made:
            sources = self._sources[of]
            found, own = self._canonical(sources)
            rows = set().union(*sources.values())
            made = self._made[of] = {}
            for name, view in (*found.items(), *own, *spelled(found, self._spellings, rows)):
                if form(name) == of:
                    put(made, name, view)
        return self._made[of]

    def _weak(self, name: str, of: str) -> Place:
        """By another name of a parameter, or without the first level."""
        if of not in self._weak_forms:
            return UNKNOWN
        module, _, leaf = name.rpartition(".")
        if of not in self._live:
            ways = _behind(leaf, self._inner)
            self._live[of] = [way for way in ways if _coarse(_path(way, name, module)) in self._flat_forms[0]]
        paths = (_path(way, name, module) for way in self._live[of])
        return _only(self._strong(path, form(path)) for path in paths if name in _others(path, self._inner))

    @cached_property
    def _inner(self) -> tuple[str, ...]:
        """What names may lack at their beginning."""
        forms = [of for of in self._sources if of.startswith(INNER[0])]
        inside = any(map(self._direct, forms)) or any(map(self._names, forms))
        return (*(INNER[:1] if inside else INNER), *self._heads)

    @cached_property
    def _weak_forms(self) -> frozenset[str]:
        inner = (*self._inner, *(f"{form(start[:-1])}." for start in self._heads))
        return frozenset(form(other) for of in self._sources for other in _others(of, inner))

    @cached_property
    def _flat_forms(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Flat name, `#` for all digits → the forms that it may be of: of strong names, and of weak ones."""
        return _by_flat(self._sources), _by_flat(self._weak_forms)


def _only(places: Iterable[Place]) -> Place:
    """Return the one place of all; none, though known, where they are several."""
    found = UNKNOWN
    for view, known in places:
        if known and (not found[1] or found[0] != view):
            found = (None if found[1] else view), True
    return found


def _others(path: str, inner: tuple[str, ...]) -> Iterator[str]:
    """Yield what else a parameter may be called: `norm.scale` also `norm.weight`, a bare one also `….weight`; and
    without its first level."""
    module, _, leaf = path.rpartition(".")
    if leaf not in ("weight", "bias"):
        yield f"{path}.weight"
        if leaf in PARAMETERS:
            yield f"{module}.{PARAMETERS[leaf]}"
        for ending in ("weight", "bias"):
            if leaf.endswith(f"_{ending}"):
                yield f"{path.removesuffix(f'_{ending}')}.{ending}"
    if path.startswith(inner):
        yield path.split(".", 1)[1]


def _behind(leaf: str, inner: Iterable[str]) -> Iterator[Way]:
    """Yield how to make every path that a name with this last level may mean, and some that it may not: `_others`
    tells.
    """
    if leaf == "weight":
        yield "", ""
    if leaf in ("weight", "bias"):
        yield "", f"_{leaf}"
        for own, theirs in PARAMETERS.items():
            if theirs == leaf:
                yield from (("", f".{own}"), (own, ""))
    yield from ((f"{start.split('.', 1)[0]}.", None) for start in dict.fromkeys(inner))


def _path(way: Way, name: str, module: str) -> str:
    start, end = way
    return f"{start}{name if end is None else module + end}"


def _coarse(path: str) -> str:
    """Return the flat name, with `#` for all digits."""
    module, dot, leaf = path.rpartition(".")
    return _DIGITS.sub("#", f"{module.replace('.', '_')}{dot}{leaf}")


def _by_flat(forms: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for of in forms:
        found.setdefault(_coarse(of), []).append(of)
    return found


@lru_cache(maxsize=10_000)
def _flat_pattern(of: str) -> re.Pattern[str]:
    *module, leaf = ["([0-9]{1,9}|#)" if s == "#" else re.escape(s) for s in of.split(".")]
    return re.compile("_".join(module) + r"\." * bool(module) + leaf)


def _unflattened(of: str, name: str) -> Iterator[str]:
    """Yield the path of this form that a flat name may stand for."""
    if match := _flat_pattern(of).fullmatch(name):
        numbers = iter(match.groups())
        yield ".".join(next(numbers) if s == "#" else s for s in of.split("."))
