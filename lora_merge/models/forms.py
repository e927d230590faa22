"""All names that adapters may use for the tensors of one network, computed form by form.

A form is a name with `#` for its numbers: the 200 000 names of a mixture of experts have thirty forms. The form
decides which rows of the name tables apply to a name. So the tables are applied to forms first; the names of a form
are made only when one of them is looked up, and never for a form that only the tensors' own names have.
Names are built from the base's own keys, so no underscore has to be interpreted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Final, TypeAlias

from ..shapes import Shape
from .architectures.notation import Row, Table, is_number
from .cutting import Views, canonical, put, spelled
from .weights import RowSlice, WeightView, whole

PARAMETERS: Final = {"scale": "weight", "gamma": "weight", "beta": "bias"}
"""Name of a norm's parameter in a base → its name in adapters."""

INNER: Final = ("model.", "transformer.", "bert.", "vit.", "deit.")
"""First levels that names lack in adapters trained on a model without its head. Where `model.` is such a level, the
others are parts of the model instead: HunYuan-VL's `vit.`"""

Place: TypeAlias = tuple[WeightView | None, bool]
"""(rows with a name, whether the name is known); (None, True) for a name that fits two places."""

Way: TypeAlias = tuple[str, str | None]
"""(prefix, suffix) that turn a name into another; the suffix replaces the name's last level, None keeps that level."""

UNKNOWN: Final[Place] = (None, False)

_BETWEEN: Final = re.compile(r"\.[0-9]{1,9}(?=\.)")
_DIGITS: Final = re.compile("[0-9]+|#")
MOST_FORMS: Final = 64  # of one flat name; the names of known models have up to four


def form(name: str) -> str:
    """Return the form of a name: `layers.#.attn.to_q.weight` for any layer."""
    if name[:1].isdigit() or name[-1:].isdigit():
        return ".".join("#" if is_number(s) else s for s in name.split("."))
    return ".#".join(_BETWEEN.split(name))


@cache
def parameter_forms() -> Mapping[str, Set[str]]:
    """Return architecture → forms of the canonical names of its parameters but biases, in all its variants."""
    text = Path(__file__).with_name("module_forms.json").read_text(encoding="ascii")
    return {stem: dict.fromkeys(forms.split()).keys() for stem, forms in json.loads(text).items()}


class NameTable:
    """The names of one network.

    Strong names are the tensors' own and those of the spellings. Weak names are made of them by `other_names`: another
    name of a parameter, or a name without its first level. A weak name counts only where no strong name fits.

    `keys`: name in the network → name in the base; `shapes`: by name in the base; `native`: the table of the base's
    layout; `spellings`: all tables; `inner`: a first level that names may lack beside INNER, "" for none.
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
        """Form of a name → forms of the tensors that may have it, each with the rows of the tables that say so."""
        tables = native, *spellings
        for body in self._bodies:
            for name, rows in _traced(body, tables):
                self._sources.setdefault(name, {}).setdefault(body, set()).update(rows)
        self._made: dict[str, Views] = {}
        self._rules: dict[str, Row | bool] = {}
        self._live: dict[str, list[Way]] = {}  # weak form → the ways to strong forms
        self._layers: dict[str, list[RowSlice]] = {}

    def knows(self, name: str) -> bool:
        """Return whether a name, dotted or flat, is known with some numbers, perhaps with others than its own."""
        letters = _letters(name)
        return any(forms.knows(letters) for forms in self._flat_forms)

    def dotted(self, name: str) -> Place:
        """Return the place of a parameter by its path, in any spelling."""
        of = form(name)
        found = self._strong(name, of)
        return found if found[1] else self._weak(name, of)

    def flat(self, name: str) -> Place:
        """Return the place of a parameter by a path with underscores for all dots but the last."""
        for forms, find in zip(self._flat_forms, (self._strong, self._weak), strict=True):
            paths = forms.paths(name)
            if paths is None:
                return None, True
            found = _agreed(find(path, of) for path, of in paths)
            if found[1]:
                return found
        return UNKNOWN

    def layers(self, body: str) -> list[RowSlice]:
        """Return the row ranges of a tensor that are canonical weights, in order; only those of consecutive rows."""
        if body not in self._layers:
            of = form(body)
            renamed = [".".join(path) for _, path in self._native.names_of(tuple(of.split(".")))]
            if not renamed and self._sources[of].keys() == {of}:  # nothing is cut: every tensor is one layer
                keys = {one: self._keys[one] for one in self._bodies[of]}
                self._layers |= {one: [*whole(key, self._shapes[key]).row_slices] for one, key in keys.items()}
                return self._layers[body]
            forms = [of, *renamed]
            sources = dict.fromkeys(source for other in forms for source in self._sources[other])
            found, _ = self._canonical(sources)
            slices: dict[str, set[RowSlice]] = {}
            for pieces in (view.row_slices for view in found.values() if view is not None):
                if len(pieces) == 1 and not pieces[0].transposed:
                    slices.setdefault(pieces[0].key, set()).add(pieces[0])
            self._layers |= {one: sorted(slices.get(self._keys[one], ())) for one in self._bodies[of]}
        return self._layers[body]

    def _canonical(self, sources: Iterable[str]) -> tuple[Views, list[tuple[str, WeightView]]]:
        bodies = (body for source in sources for body in self._bodies[source])
        return canonical(bodies, self._keys, self._shapes, self._native)

    def _direct(self, of: str) -> Row | bool:
        """Return True if only tensors have names of this form, the row if one row alone renames them, else False."""
        if of not in self._rules:
            ((source, rows), *others) = self._sources[of].items()
            row = next(iter(rows), None)
            unsure = others or len(rows) > 1 or (row and (source == of or self._sources[source][source]))
            self._rules[of] = False if unsure else source == of if row is None else row.renames and row
        return self._rules[of]

    def _strong(self, name: str, of: str) -> Place:
        """Return the place by the tensor's own name or by a name of a spelling."""
        if of not in self._sources:
            return UNKNOWN
        direct = self._direct(of)
        if not direct:
            names = self._names(of)
            return names.get(name), name in names
        body = name if direct is True else ".".join(direct.renamed(tuple(name.split("."))))
        key = self._keys.get(body)
        return UNKNOWN if key is None else (whole(key, self._shapes[key]), True)

    def _names(self, of: str) -> Views:
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
        """Return the place by another name of a parameter, or by a name without its first level."""
        if of not in self._weak_forms:
            return UNKNOWN
        module, _, leaf = name.rpartition(".")
        if of not in self._live:
            ways = _ways_from(leaf, self._inner)
            self._live[of] = [way for way in ways if self._flat_forms[0].knows(_letters(_path(way, name, module)))]
        paths = (_path(way, name, module) for way in self._live[of])
        return _agreed(self._strong(path, form(path)) for path in paths if name in other_names(path, self._inner))

    @cached_property
    def _inner(self) -> tuple[str, ...]:
        """The first levels that names may lack."""
        forms = [of for of in self._sources if of.startswith(INNER[0])]
        inside = any(map(self._direct, forms)) or any(map(self._names, forms))
        return (*(INNER[:1] if inside else INNER), *self._heads)

    @cached_property
    def _weak_forms(self) -> frozenset[str]:
        inner = (*self._inner, *(f"{form(start[:-1])}." for start in self._heads))
        return frozenset(form(other) for of in self._sources for other in other_names(of, inner))

    @cached_property
    def _flat_forms(self) -> tuple[FlatForms, FlatForms]:
        """The forms of the strong names, and of the weak ones."""
        return FlatForms(self._sources), FlatForms(self._weak_forms)


@lru_cache(maxsize=4096)  # models of one architecture have the same few hundred forms
def _traced(body: str, tables: tuple[Table, ...]) -> tuple[tuple[str, frozenset[Row]], ...]:
    """Return (form of a name, rows of the tables that say so) for all names that tensors of this form may have.

    The first table is that of the base's layout, the others those of all spellings.
    """
    native, *spellings = tables
    own = tuple(body.split("."))
    cut = list(native.names_of(own))
    found: dict[str, set[Row]] = {}
    for row, path in [(None, own), *cut]:
        found.setdefault(".".join(path), set()).update(r for r, _ in cut)
        for table in spellings:
            for other, spelling in table.spellings_of(path):
                found.setdefault(".".join(spelling), set()).update(r for r in (row, other) if r)
    return tuple((name, frozenset(rows)) for name, rows in found.items())


def _agreed(places: Iterable[Place]) -> Place:
    """Return the place that all known ones agree on; (None, True) if they differ."""
    found = UNKNOWN
    for view, known in places:
        if known and (not found[1] or found[0] != view):
            found = (None if found[1] else view), True
    return found


def other_names(path: str, inner: tuple[str, ...]) -> Iterator[str]:
    """Yield the other names of a parameter: `norm.weight` for `norm.scale`, `x.weight` for `x`, `x` for `model.x`."""
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


def _ways_from(leaf: str, inner: Iterable[str]) -> Iterator[Way]:
    """Yield the ways from a weak name with this last level to strong names; `other_names` decides which hold."""
    if leaf == "weight":
        yield "", ""
    if leaf in ("weight", "bias"):
        yield "", f"_{leaf}"
        for own, in_adapters in PARAMETERS.items():
            if in_adapters == leaf:
                yield from (("", f".{own}"), (own, ""))
    yield from ((f"{start.split('.', 1)[0]}.", None) for start in dict.fromkeys(inner))


def _path(way: Way, name: str, module: str) -> str:
    start, end = way
    return f"{start}{name if end is None else module + end}"


class FlatForms:
    """Finds the forms that a flat name may have.

    Digits of a flat name are the number of a level (`#` in the form) or belong to a level's name (`h0`). Which digits
    are numbers differs from form to form, but few choices occur, so each of them costs one look-up.
    """

    def __init__(self, forms: Iterable[str]) -> None:
        self._forms: dict[str, list[str]] = {}  # flat form → forms
        self._numbers: dict[str, set[tuple[bool, ...]]] = {}  # letters alone → which digits are numbers
        for of in forms:
            flat = flattened(of)
            self._forms.setdefault(flat, []).append(of)
            self._numbers.setdefault(_letters(flat), set()).add(tuple(d == "#" for d in _DIGITS.findall(flat)))

    def knows(self, letters: str) -> bool:
        """Return whether a name of these letters has a form once other digits stand in it."""
        return letters in self._numbers

    def paths(self, name: str) -> list[tuple[str, str]] | None:
        """Return (path, its form) for everything that a flat name may mean; None if that is too much to try it all."""
        digits, found = _DIGITS.findall(name), list[str]()
        choices = self._numbers.get(_DIGITS.sub("#", name), ())
        if len(choices) > MOST_FORMS:
            return None
        for numbers in choices:
            if all(is_number(d) or d == "#" for number, d in zip(numbers, digits, strict=True) if number):
                written = ["#" if number else d for number, d in zip(numbers, digits, strict=True)]
                found += self._forms.get(filled(name, written), ())
        return [(filled(of, digits), of) for of in found] if len(found) <= MOST_FORMS else None


def numbers_in(name: str) -> list[str]:
    """Return the numbers in a name, in order."""
    return _DIGITS.findall(name)


def _letters(name: str) -> str:
    """Return a name, dotted or flat, as a flat one without its digits."""
    return _DIGITS.sub("#", flattened(name))


def filled(text: str, digits: Sequence[str]) -> str:
    """Return the text with these digits in place of its own."""
    return "".join(chain.from_iterable(zip_longest(_DIGITS.split(text), digits, fillvalue="")))


def flattened(path: str) -> str:
    """Return the path with underscores for all dots but the last."""
    module, dot, leaf = path.rpartition(".")
    return f"{module.replace('.', '_')}{dot}{leaf}"
