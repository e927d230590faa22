"""All names under which adapters may speak of the tensors of one component of a base.

The tables are built from the base's own keys, so nothing has to be guessed about underscores: every tensor is
first cut into its canonical weights (q, k and v of a fused tensor), and every spelling of an architecture then
puts canonical weights together to what it calls one weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

from .algorithms import Shape
from .architectures import IN_SHARDS, Architecture
from .architectures.rows import Hit, Path, Row, Table, fill
from .views import Piece, View, rows_of, stacked, transposed, whole

NO_TABLE: Final = Table(())

PARAMETERS: Final = {"scale": "weight", "gamma": "weight", "beta": "bias"}
"""What a norm calls its parameters → what adapters call them."""

MOST_EXPERTS: Final = 4096
"""A stack of more is no stack of experts; tensors of no bytes may claim any number."""

INNER: Final = ("model.", "transformer.", "bert.", "vit.", "deit.")
"""First levels that adapters lack if they were trained on the model inside the model with a head. Beside `model.`
the others are a model's parts: HunYuan-VL's `vit.`"""

Names: TypeAlias = dict[str, View | None]
"""Name → place; None if it fits two."""


@dataclass
class Component:
    """One network of a checkpoint: a denoiser, a text encoder, a VAE."""

    role: str  # denoiser, te, vae, other
    label: str  # what users call it: unet, transformer, te1 …
    prefix: str  # of its keys in the base
    architecture: Architecture | None = None
    layout: str = "as stored"
    kind: str = ""  # of a text encoder: clip_l, clip_g, t5 …
    number: int = 0  # of a text encoder, where the base counts them
    title: str = ""  # what the base's configuration calls it
    inner: str = ""  # first level of names in a model with a head, of which the model without it knows nothing
    sharded: bool = False  # whether it lies in several files
    keys: dict[str, str] = field(default_factory=dict)  # body → key in the base
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of the whole base, by key

    def find(self, module: str, parameter: str) -> tuple[View | None, bool]:
        """(the place or None, whether the name is known); dotted names first, then flat ones."""
        dotted, flat = self._tables
        name = f"{module}.{parameter}".strip(".")
        if name in dotted:
            return dotted[name], True
        name = f"{module.replace('.', '_')}.{parameter}"
        return flat.get(name), name in flat

    @property
    def other_in_shards(self) -> bool:
        """Whether its names mean other rows where it lies in several files."""
        return self.architecture is not None and self.layout + IN_SHARDS in self.architecture.tables

    @property
    def dotted(self) -> Names:
        """Parameter path → place, in every spelling."""
        return self._tables[0]

    def cut(self, piece: Piece) -> tuple[int, ...]:
        """Rows of every layer that rows of a tensor hold, in order; () if no layers fill them one after the other."""
        there = [p for p in self._layers[piece.key] if piece.start <= p.start and p.stop <= piece.stop]
        bounds = [piece.start, *(p.stop for p in there)]
        return tuple(p.rows for p in there) if bounds == [*(p.start for p in there), piece.stop] else ()

    @cached_property
    def _layers(self) -> Mapping[str, Sequence[Piece]]:
        """Key → its rows as layers, in order; none for layers of rows that do not follow each other."""
        found: dict[str, list[Piece]] = defaultdict(list)
        for view in self._stored[0].values():
            if view is not None and len(view.pieces) == 1 and not view.pieces[0].transposed:
                found[view.pieces[0].key].append(view.pieces[0])
        return defaultdict(list, {key: sorted(set(pieces)) for key, pieces in found.items()})

    @cached_property
    def _spellings(self) -> Mapping[str, Table]:
        spellings = self.architecture.spellings if self.architecture else {}
        return {name: table.settled(self.keys) for name, table in spellings.items()}

    @cached_property
    def _stored(self) -> tuple[Names, list[tuple[str, View]]]:
        """As `_canonical` gives them."""
        shards = self._spellings.get(self.layout + IN_SHARDS) if self.sharded else None
        return _canonical(self.keys, self.shapes, shards or self._spellings.get(self.layout, NO_TABLE))

    @cached_property
    def _tables(self) -> tuple[Names, Names]:
        """Dotted names, and the same with underscores for dots in the module's path.

        Worked out on first use: `inspect`, and text encoders that no adapter speaks of, need none.
        """
        canonical, own = self._stored
        strong = {**canonical}
        tables = [table for name, table in self._spellings.items() if not name.endswith(IN_SHARDS)]
        for path, view in [*own, *_spelled(canonical, tables)]:
            _put(strong, path, view)
        weak: Names = {}
        inner = INNER[:1] if any(path.startswith(INNER[0]) for path in strong) else INNER
        for path, place in strong.items():
            for other in _other_names(path):
                _put(weak, other, place)
            if path.startswith(inner) or (self.inner and path.startswith(self.inner)):
                _put(weak, path.split(".", 1)[1], place)
        return weak | strong, _flattened(weak) | _flattened(strong)


def _put(names: Names, name: str, view: View | None) -> None:
    there = names.setdefault(name, view)
    if there is not view and there != view:
        names[name] = None


def _flattened(names: Names) -> Names:
    """The same with the dots of the module paths replaced; None where two modules become one name."""
    flat: Names = {}
    for path, place in names.items():
        module, dot, leaf = path.rpartition(".")
        _put(flat, f"{module.replace('.', '_')}{dot}{leaf}", place)
    return flat


def _other_names(path: str) -> Iterator[str]:
    """What else a parameter may be called: `norm.scale` also `norm.weight`, a bare one also `….weight`."""
    module, _, leaf = path.rpartition(".")
    if leaf in ("weight", "bias"):
        return
    yield f"{path}.weight"
    if leaf in PARAMETERS:
        yield f"{module}.{PARAMETERS[leaf]}"
    for ending in ("weight", "bias"):
        if leaf.endswith(f"_{ending}"):
            yield f"{path.removesuffix(f'_{ending}')}.{ending}"


def _canonical(
    keys: Mapping[str, str], shapes: Mapping[str, Shape], table: Table
) -> tuple[Names, list[tuple[str, View]]]:
    """(canonical name → where it lies, the tensors' own names where those are different ones)."""
    found: Names = {}
    halves: dict[str, dict[int, View]] = defaultdict(dict)
    own: list[tuple[str, View]] = []
    for body, key in keys.items():
        path = tuple(body.split("."))
        hit = None if table.empty else table.canonical(path)
        view = whole(key, shapes[key])
        cut = list(_cut(hit, view, _width(body, keys, shapes))) if hit else []
        if cut and hit and hit.row.stack:
            view = _matrices(view)  # as its spelling puts it together again: one place, not two
        for name, half, part in cut:
            if half is None:
                _put(found, name, part)
            else:
                halves[name][half] = part
        turned = hit is not None and hit.row.block > 0  # its name means the rows in another order
        if not cut:
            _put(found, body, None if turned else view)
        elif not turned and body not in (name for name, _, _ in cut):
            own.append((body, view))
    for name, both in halves.items():
        if len(both) == 2:
            _put(found, name, stacked((both[0], both[1])))
    return found, own


def _width(body: str, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> int:
    """The input width of the layer that a parameter belongs to; 0 where nothing tells."""
    stem = body.removesuffix("bias").removesuffix("weight")
    shape = shapes[keys.get(stem + "weight", keys[body])]
    return shape[1] if len(shape) > 1 else 0


def _cut(hit: Hit, view: View, width: int) -> Iterator[tuple[str, int | None, View]]:
    """(canonical name, half, rows) of every part of a stored tensor; nothing if it cannot be cut so."""
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
            yield name, None, View(tuple(p for b in blocks for p in b.pieces), (shape[0] // len(names), *shape[1:]))
        return
    at = 0
    for name, part, rows in zip(names, row.parts, _sizes(row, shape[0] if shape else 1, width), strict=False):
        yield name, part.half, rows_of(view, at, at + rows)
        at += rows


def _cut_stack(hit: Hit, view: View) -> Iterator[tuple[str, int | None, View]]:
    """The matrices of a `[E, out, in]` tensor, each cut in equal parts; of `[E, in, out]`, each turned."""
    count, rows, cols = view.shape
    parts = hit.row.parts
    each, rest = divmod(rows, len(parts))
    if rest or not each or count > MOST_EXPERTS:
        return
    stack = View(_matrices(view).pieces, (count * rows, cols))
    for e in range(count):
        bound = {**hit.bound, str(hit.row.stack): str(e)}
        for i, part in enumerate(parts):
            matrix = rows_of(stack, e * rows + i * each, e * rows + (i + 1) * each)
            name = ".".join(fill(part.path, bound) + hit.tail)
            yield name, part.half, transposed(matrix) if part.transposed else matrix


def _matrices(view: View) -> View:
    """A stored `[E, out, in]` tensor seen as `E·out` rows of width `in`."""
    count, rows, cols = view.shape
    return View((Piece(view.pieces[0].key, 0, count * rows, cols),), view.shape)


def _sizes(row: Row, rows: int, width: int) -> list[int]:
    """Rows of every part; empty where they do not come out even."""
    sized = sum(p.sized for p in row.parts)
    rest = rows - sized * width
    each, odd = divmod(rest, len(row.parts) - sized) if len(row.parts) > sized else (0, rest)
    if odd or rest < 0 or (sized and not width) or (len(row.parts) > sized and not each):
        return []
    return [width if p.sized else each for p in row.parts]


def _spelled(canonical: Names, tables: Iterable[Table]) -> Iterator[tuple[str, View | None]]:
    """(name, view) for everything that some spelling calls one weight and that is there as a whole."""
    tables = [t for t in tables if not t.empty]
    found: dict[tuple[Row, Path], dict[tuple[int, int], View]] = defaultdict(dict)
    for name, view in canonical.items():
        path = tuple(name.split("."))
        for hit in (hit for table in tables for hit in table.spelled(path)):
            row, bound = hit.row, hit.bound
            if view is None or row.name == row.parts[0].path:
                continue  # fits two places, or is stored transposed under its own name
            nth = int(bound[row.stack]) if row.stack else 0
            found[row, fill(row.name, bound) + hit.tail][nth, hit.part] = view
    for (row, path), parts in found.items():
        made = _together(row, parts)
        if made is not None or row.block:  # rows in no known order are nobody's
            yield ".".join(path), made


def _in_turn(views: Sequence[View], block: int) -> list[View]:
    """So many rows of each view in turn; nothing if they do not come out even."""
    rows = views[0].shape[0]
    if rows % block or any(view.shape[0] != rows for view in views):
        return []
    return [rows_of(view, at, at + block) for at in range(0, rows, block) for view in views]


def _together(row: Row, parts: Mapping[tuple[int, int], View]) -> View | None:
    """One weight of a spelling from its canonical parts; None where some are missing."""
    count = 1 + max(n for n, _ in parts)
    if len(parts) != count * len(row.parts) or (row.stack and row.parts[0].transposed):  # turned stacks are as stored
        return None
    if row.parts[0].transposed:
        (view,) = parts.values()
        return transposed(view) if len(view.shape) == 2 and len(view.pieces) == 1 else None
    if len(parts) == 1 and row.parts[0].half is None and not row.stack:
        return parts[0, 0]
    chosen = []
    for at, view in sorted(parts.items(), key=lambda item: item[0]):
        half, rows = row.parts[at[1]].half, view.shape[0] if view.shape else 1
        if any(p.transposed for p in view.pieces) or (half is not None and rows % 2):
            return None
        chosen.append(view if half is None else rows_of(view, half * rows // 2, (half + 1) * rows // 2))
    chosen = _in_turn(chosen, row.block) if row.block else chosen
    made = stacked(chosen) if chosen else None
    if made is None or not row.stack:
        return made
    return View(made.pieces, (count, made.shape[0] // count, made.shape[1])) if len(made.shape) == 2 else None
