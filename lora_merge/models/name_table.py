"""All names that adapters may use for the tensors of one network, computed form by form.

A form is a name with `#` for its numbers: the 200 000 names of a mixture of experts have thirty forms. The form
decides which rows of the name tables apply to a name. So the tables are applied to forms first; the names of a form
are made only when one of them is looked up, and never for a form that only the tensors' own names have.

Every tensor is first cut into its canonical weights (q, k and v of a fused tensor); every spelling of an architecture
joins canonical weights to the weights that the spelling has names for. Names are built from the base's own keys, so no
underscore has to be interpreted.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Final, TypeAlias

from ..dtypes import Shape
from ..grouping import by_key
from .architectures.notation import Hit, NamePath, Row, RowTable, fill, is_number
from .weights import RowSlice, WeightView, as_matrices, rows_of, stacked, transposed, whole

MOST_EXPERTS: Final = 4096
"""The most experts in a stack. Without a limit, a tensor of no bytes could claim any number."""

Views: TypeAlias = dict[str, WeightView | None]
"""Name → the rows with that name; None if the name fits two places."""

NORM_PARAMETERS: Final = {"scale": "weight", "gamma": "weight", "beta": "bias"}
"""Name of a norm's parameter in a base → its name in adapters."""

INNER: Final = ("model.", "transformer.", "bert.", "vit.", "deit.")
"""First levels that names lack in adapters trained on a model without its head. If `model.` is such a level, the
others are parts of the model instead: HunYuan-VL's `vit.`"""

Place: TypeAlias = tuple[WeightView | None, bool]
"""(rows with a name, whether the name is known); (None, True) for a name that fits two places."""

Way: TypeAlias = tuple[str, str | None]
"""(prefix, suffix) that turn a name into another; the suffix replaces the name's last level, None keeps that level."""

NOT_KNOWN: Final[Place] = (None, False)

_BETWEEN: Final = re.compile(r"\.[0-9]{1,9}(?=\.)")
_DIGITS: Final = re.compile("[0-9]+|#")
MOST_FORMS: Final = 64  # of one flat name; the names of known models have up to four


def put(names: Views, name: str, view: WeightView | None) -> None:
    """Add a name; one that fits two places becomes None."""
    known = names.setdefault(name, view)
    if known is not view and known != view:
        names[name] = None


def canonical(
    bodies: Iterable[str], keys: Mapping[str, str], shapes: Mapping[str, Shape], table: RowTable
) -> tuple[Views, list[tuple[str, WeightView]]]:
    """Return (canonical name → its rows, the tensors' own names with their rows if they differ) of some tensors.

    `bodies`: names in the network; `keys`: name in the network → name in the base, of all tensors; `shapes`: by name in
    the base; `table`: the table of the base's layout.
    """
    views: Views = {}
    halves: dict[str, dict[int, WeightView]] = defaultdict(dict)
    stored_views: list[tuple[str, WeightView]] = []
    for body in bodies:
        key, path = keys[body], tuple(body.split("."))
        hit = None if table.empty else table.canonical(path)
        view = whole(key, shapes[key])
        cut = list(_cut(hit, view, _width(body, keys, shapes))) if hit else []
        if cut and hit and hit.row.stack:
            view = as_matrices(view)  # as `spelled` joins the stack, so that both views are equal
        for name, half, part in cut:
            if half is None:
                put(views, name, part)
            else:
                halves[name][half] = part
        reordered = hit is not None and hit.row.block > 0  # the canonical name means the rows in another order
        if not cut:
            put(views, body, None if reordered else view)
        elif not reordered and body not in (name for name, _, _ in cut):
            stored_views.append((body, view))
    for name, both in halves.items():
        if len(both) == 2:
            put(views, name, stacked((both[0], both[1])))
    return views, stored_views


def _width(body: str, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> int:
    """Return the input width of the layer that has a parameter; 0 if unknown."""
    stem = body.removesuffix("bias").removesuffix("weight")
    shape = shapes[keys.get(stem + "weight", keys[body])]
    return shape[1] if len(shape) > 1 else 0


def _cut(hit: Hit, view: WeightView, width: int) -> Iterator[tuple[str, int | None, WeightView]]:
    """Yield (canonical name, half, rows) of every part of a stored tensor; nothing if its rows cannot be cut so."""
    row, shape = hit.row, view.shape
    if row.stack:
        if len(shape) == 3:
            yield from _cut_stack(hit, view)
        return
    names = [".".join(fill(part.path, hit.bound) + hit.tail) for part in row.parts]
    if row.parts[0].transposed:
        if len(shape) == 2:
            yield names[0], None, transposed(view)
        return
    if len(row.parts) == 1 and row.parts[0].half is None:  # a renaming, whatever the shape
        yield names[0], None, view
        return
    if row.block:
        turn = row.block * len(names)
        for i, name in enumerate(names if shape and shape[0] % turn == 0 else ()):
            blocks = [rows_of(view, at, at + row.block) for at in range(i * row.block, shape[0], turn)]
            pieces = tuple(piece for block in blocks for piece in block.row_slices)
            yield name, None, WeightView(pieces, (shape[0] // len(names), *shape[1:]))
        return
    at = 0
    for name, part, rows in zip(names, row.parts, _sizes(row, shape[0] if shape else 1, width), strict=False):
        yield name, part.half, rows_of(view, at, at + rows)
        at += rows


def _cut_stack(hit: Hit, view: WeightView) -> Iterator[tuple[str, int | None, WeightView]]:
    """Yield the matrices of a `[E, out, in]` tensor, each cut in equal parts; of `[E, in, out]`, each transposed."""
    count, rows, cols = view.shape
    parts = hit.row.parts
    each, rest = divmod(rows, len(parts))
    if rest or not each or count > MOST_EXPERTS:
        return
    stack = WeightView(as_matrices(view).row_slices, (count * rows, cols))
    for e in range(count):
        bound = {**hit.bound, str(hit.row.stack): str(e)}
        for i, part in enumerate(parts):
            matrix = rows_of(stack, e * rows + i * each, e * rows + (i + 1) * each)
            name = ".".join(fill(part.path, bound) + hit.tail)
            yield name, part.half, transposed(matrix) if part.transposed else matrix


def _sizes(row: Row, rows: int, width: int) -> list[int]:
    """Return the rows of every part; [] if they cannot be divided so."""
    sized = sum(p.sized for p in row.parts)
    rest = rows - sized * width
    each, odd = divmod(rest, len(row.parts) - sized) if len(row.parts) > sized else (0, rest)
    if odd or rest < 0 or (sized and not width) or (len(row.parts) > sized and not each):
        return []
    return [width if p.sized else each for p in row.parts]


def spelled(
    names: Views, tables: Iterable[RowTable], rows: Container[Row] | None = None
) -> Iterator[tuple[str, WeightView | None]]:
    """Yield (name, view) of every weight of some spelling whose canonical parts are all present.

    `names`: the canonical names; `rows`: the only rows of the tables to use, None for all.
    """
    tables = [t for t in tables if not t.empty]
    pieces: dict[tuple[Row, NamePath], dict[tuple[int, int], WeightView]] = defaultdict(dict)
    for name, view in names.items():
        path = tuple(name.split("."))
        for hit in (hit for table in tables for hit in table.spelled(path)):
            row, bound = hit.row, hit.bound
            if view is None or row.name == row.parts[0].path or (rows is not None and row not in rows):
                continue  # the name fits two places, or the weight is stored transposed under its own name
            nth = int(bound[row.stack]) if row.stack else 0
            pieces[row, fill(row.name, bound) + hit.tail][nth, hit.part] = view
    for (row, path), parts in pieces.items():
        joined = _joined(row, parts)
        if joined is not None or row.block:  # None: the name is known, the order of its rows is not
            yield ".".join(path), joined


def _in_turn(views: Sequence[WeightView], block: int) -> list[WeightView]:
    """Return `block` rows of each view in turn; [] if the row counts differ or `block` does not divide them."""
    rows = views[0].shape[0]
    if rows % block or any(view.shape[0] != rows for view in views):
        return []
    return [rows_of(view, at, at + block) for at in range(0, rows, block) for view in views]


def _joined(row: Row, parts: Mapping[tuple[int, int], WeightView]) -> WeightView | None:
    """Return one weight of a spelling, joined from its canonical parts; None if a part is missing."""
    count = 1 + max(n for n, _ in parts)
    if len(parts) != count * len(row.parts) or (
        row.stack and row.parts[0].transposed
    ):  # a transposed stack has its name already
        return None
    if row.parts[0].transposed:
        (view,) = parts.values()
        return transposed(view) if len(view.shape) == 2 and len(view.row_slices) == 1 else None
    if len(parts) == 1 and row.parts[0].half is None and not row.stack:
        return parts[0, 0]
    chosen = []
    for at, view in sorted(parts.items(), key=lambda item: item[0]):
        half, rows = row.parts[at[1]].half, view.shape[0] if view.shape else 1
        if any(p.transposed for p in view.row_slices) or (half is not None and rows % 2):
            return None
        chosen.append(view if half is None else rows_of(view, half * rows // 2, (half + 1) * rows // 2))
    chosen = _in_turn(chosen, row.block) if row.block else chosen
    whole = stacked(chosen) if chosen else None
    if whole is None or not row.stack:
        return whole
    shape = whole.shape
    return WeightView(whole.row_slices, (count, shape[0] // count, shape[1])) if len(shape) == 2 else None


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
    name of a parameter, or a name without its first level. A weak name counts only if no strong name fits. It is
    made when it is looked up: to make all weak names would take 15 % more processor time for the plan of SDXL.

    `keys`: name in the network → name in the base; `shapes`: by name in the base; `native`: the table of the base's
    layout; `spellings`: all tables; `inner`: a first level that names may lack in addition to INNER, "" for none.
    """

    def __init__(
        self, keys: Mapping[str, str], shapes: Mapping[str, Shape], native: RowTable, spellings: Sequence[RowTable],
        inner: str,
    ) -> None:  # fmt: skip
        self._keys, self._shapes, self._native, self._spellings = keys, shapes, native, spellings
        self._heads = (inner,) if inner else ()
        self._bodies = by_key((form(body), body) for body in keys)  # form → the tensors' own names
        self._sources: dict[str, dict[str, set[Row]]] = {}
        """Form of a name → forms of the tensors that may have it, each with the rows of the tables that say so."""
        tables = native, *spellings
        for body in self._bodies:
            for name, rows in _traced(body, tables):
                self._sources.setdefault(name, {}).setdefault(body, set()).update(rows)
        self._by_form: dict[str, Views] = {}
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
        place = self._strong(name, of)
        return place if place[1] else self._weak(name, of)

    def flat(self, name: str) -> Place:
        """Return the place of a parameter by a path with underscores for all dots but the last."""
        for forms, find in zip(self._flat_forms, (self._strong, self._weak), strict=True):
            paths = forms.paths(name)
            if paths is None:
                return None, True
            place = _agreed(find(path, of) for path, of in paths)
            if place[1]:
                return place
        return NOT_KNOWN

    def layers(self, body: str) -> list[RowSlice]:
        """Return the row ranges of a tensor that are canonical weights, in order; only those of consecutive rows."""
        if body not in self._layers:
            of = form(body)
            renamed = [".".join(path) for _, path in self._native.names_of(tuple(of.split(".")))]
            if not renamed and self._sources[of].keys() == {of}:  # nothing is cut: every tensor is one layer
                keys = {leaf: self._keys[leaf] for leaf in self._bodies[of]}
                self._layers |= {leaf: [*whole(key, self._shapes[key]).row_slices] for leaf, key in keys.items()}
                return self._layers[body]
            forms = [of, *renamed]
            sources = dict.fromkeys(source for other in forms for source in self._sources[other])
            views, _ = self._canonical(sources)
            slices: dict[str, set[RowSlice]] = {}
            for pieces in (view.row_slices for view in views.values() if view is not None):
                if len(pieces) == 1 and not pieces[0].transposed:
                    slices.setdefault(pieces[0].key, set()).add(pieces[0])
            self._layers |= {leaf: sorted(slices.get(self._keys[leaf], ())) for leaf in self._bodies[of]}
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
            return NOT_KNOWN
        direct = self._direct(of)
        if not direct:
            names = self._names(of)
            return names.get(name), name in names
        body = name if direct is True else ".".join(direct.renamed(tuple(name.split("."))))
        key = self._keys.get(body)
        return NOT_KNOWN if key is None else (whole(key, self._shapes[key]), True)

    def _names(self, of: str) -> Views:
        """Return all names of one form."""
        if of not in self._by_form:
            sources = self._sources[of]
            views, stored_views = self._canonical(sources)
            rows = set().union(*sources.values())
            table = self._by_form[of] = {}
            for name, view in (*views.items(), *stored_views, *spelled(views, self._spellings, rows)):
                if form(name) == of:
                    put(table, name, view)
        return self._by_form[of]

    def _weak(self, name: str, of: str) -> Place:
        """Return the place by another name of a parameter, or by a name without its first level."""
        if of not in self._weak_forms:
            return NOT_KNOWN
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
def _traced(body: str, tables: tuple[RowTable, ...]) -> tuple[tuple[str, frozenset[Row]], ...]:
    """Return (form of a name, rows of the tables that say so) for all names that tensors of this form may have.

    The first table is that of the base's layout, the others those of all spellings.
    """
    native, *spellings = tables
    segments = tuple(body.split("."))
    cut = list(native.names_of(segments))
    names: dict[str, set[Row]] = {}
    for row, path in [(None, segments), *cut]:
        names.setdefault(".".join(path), set()).update(r for r, _ in cut)
        for table in spellings:
            for other, spelling in table.spellings_of(path):
                names.setdefault(".".join(spelling), set()).update(r for r in (row, other) if r)
    return tuple((name, frozenset(rows)) for name, rows in names.items())


def _agreed(places: Iterable[Place]) -> Place:
    """Return the place that all known ones agree on; (None, True) if they differ."""
    agreed = NOT_KNOWN
    for view, known in places:
        if known and (not agreed[1] or agreed[0] != view):
            agreed = (None if agreed[1] else view), True
    return agreed


def other_names(path: str, inner: tuple[str, ...]) -> Iterator[str]:
    """Yield the other names of a parameter: `norm.weight` for `norm.scale`, `x.weight` for `x`, `x` for `model.x`."""
    module, _, leaf = path.rpartition(".")
    if leaf not in ("weight", "bias"):
        yield f"{path}.weight"
        if leaf in NORM_PARAMETERS:
            yield f"{module}.{NORM_PARAMETERS[leaf]}"
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
        for parameter, in_adapters in NORM_PARAMETERS.items():
            if in_adapters == leaf:
                yield from (("", f".{parameter}"), (parameter, ""))
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
        # Letters alone → which digits are numbers → the other digits → forms.
        self._forms: dict[str, dict[tuple[bool, ...], dict[tuple[str, ...], list[str]]]] = {}
        for of in forms:
            digits = numbers_in(flattened(of))
            choices = self._forms.setdefault(_letters(of), {})
            by_others = choices.setdefault(tuple(d == "#" for d in digits), {})
            by_others.setdefault(tuple(d for d in digits if d != "#"), []).append(of)

    def knows(self, letters: str) -> bool:
        """Return whether a name of these letters has a form once it has other digits."""
        return letters in self._forms

    def paths(self, name: str) -> list[tuple[str, str]] | None:
        """Return (path, its form) for everything that a flat name may mean; None if that is too much to try it all."""
        digits, forms = numbers_in(name), list[str]()
        choices = self._forms.get(_DIGITS.sub("#", name), {})
        if len(choices) > MOST_FORMS:
            return None
        for numbers, by_others in choices.items():
            others = tuple([d for number, d in zip(numbers, digits, strict=True) if not number])
            if others in by_others and all(is_number(d) or d == "#" for d, n in zip(digits, numbers, strict=True) if n):
                forms += by_others[others]
        return [(filled(of, digits), of) for of in forms] if len(forms) <= MOST_FORMS else None


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
