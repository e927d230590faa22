"""Cuts stored tensors into canonical weights, and puts those together to what each spelling calls one weight.

Every tensor is first cut into its canonical weights (q, k and v of a fused tensor); every spelling of an architecture
then puts canonical weights together again, its own way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ..algorithms import Shape
from .architectures.notation import Hit, Path, Row, Table, fill
from .weights import RowSlice, WeightView, rows_of, stacked, transposed, whole

MOST_EXPERTS: Final = 4096
"""A stack of more is no stack of experts; tensors of no bytes may claim any number."""

Names: TypeAlias = dict[str, WeightView | None]
"""Name → place; None if it fits two."""


def put(names: Names, name: str, view: WeightView | None) -> None:
    """Note where a name lies; a name of two places is nobody's."""
    there = names.setdefault(name, view)
    if there is not view and there != view:
        names[name] = None


def canonical(
    bodies: Iterable[str], keys: Mapping[str, str], shapes: Mapping[str, Shape], table: Table
) -> tuple[Names, list[tuple[str, WeightView]]]:
    """(canonical name → where it lies, the tensors' own names where those are different ones), of some tensors.

    `keys`: name in the network → in the base, of all its tensors; `shapes`: by name in the base; `table`: the layout's.
    """
    found: Names = {}
    halves: dict[str, dict[int, WeightView]] = defaultdict(dict)
    own: list[tuple[str, WeightView]] = []
    for body in bodies:
        key, path = keys[body], tuple(body.split("."))
        hit = None if table.empty else table.canonical(path)
        view = whole(key, shapes[key])
        cut = list(_cut(hit, view, _width(body, keys, shapes))) if hit else []
        if cut and hit and hit.row.stack:
            view = _matrices(view)  # as its spelling puts it together again: one place, not two
        for name, half, part in cut:
            if half is None:
                put(found, name, part)
            else:
                halves[name][half] = part
        turned = hit is not None and hit.row.block > 0  # its name means the rows in another order
        if not cut:
            put(found, body, None if turned else view)
        elif not turned and body not in (name for name, _, _ in cut):
            own.append((body, view))
    for name, both in halves.items():
        if len(both) == 2:
            put(found, name, stacked((both[0], both[1])))
    return found, own


def _width(body: str, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> int:
    """Return the input width of the layer that a parameter belongs to; 0 where nothing tells."""
    stem = body.removesuffix("bias").removesuffix("weight")
    shape = shapes[keys.get(stem + "weight", keys[body])]
    return shape[1] if len(shape) > 1 else 0


def _cut(hit: Hit, view: WeightView, width: int) -> Iterator[tuple[str, int | None, WeightView]]:
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
            yield (
                name,
                None,
                WeightView(tuple(p for b in blocks for p in b.pieces), (shape[0] // len(names), *shape[1:])),
            )
        return
    at = 0
    for name, part, rows in zip(names, row.parts, _sizes(row, shape[0] if shape else 1, width), strict=False):
        yield name, part.half, rows_of(view, at, at + rows)
        at += rows


def _cut_stack(hit: Hit, view: WeightView) -> Iterator[tuple[str, int | None, WeightView]]:
    """Yield the matrices of a `[E, out, in]` tensor, each cut in equal parts; of `[E, in, out]`, each turned."""
    count, rows, cols = view.shape
    parts = hit.row.parts
    each, rest = divmod(rows, len(parts))
    if rest or not each or count > MOST_EXPERTS:
        return
    stack = WeightView(_matrices(view).pieces, (count * rows, cols))
    for e in range(count):
        bound = {**hit.bound, str(hit.row.stack): str(e)}
        for i, part in enumerate(parts):
            matrix = rows_of(stack, e * rows + i * each, e * rows + (i + 1) * each)
            name = ".".join(fill(part.path, bound) + hit.tail)
            yield name, part.half, transposed(matrix) if part.transposed else matrix


def _matrices(view: WeightView) -> WeightView:
    """Return a stored `[E, out, in]` tensor seen as `E·out` rows of width `in`."""
    count, rows, cols = view.shape
    return WeightView((RowSlice(view.pieces[0].key, 0, count * rows, cols),), view.shape)


def _sizes(row: Row, rows: int, width: int) -> list[int]:
    """Return the rows of every part; empty where they do not come out even."""
    sized = sum(p.sized for p in row.parts)
    rest = rows - sized * width
    each, odd = divmod(rest, len(row.parts) - sized) if len(row.parts) > sized else (0, rest)
    if odd or rest < 0 or (sized and not width) or (len(row.parts) > sized and not each):
        return []
    return [width if p.sized else each for p in row.parts]


def spelled(
    names: Names, tables: Iterable[Table], wanted: Container[Row] | None = None
) -> Iterator[tuple[str, WeightView | None]]:
    """(name, view) for everything that some spelling calls one weight and that is there as a whole.

    `names`: canonical ones; `wanted`: the only rows to be looked at.
    """
    tables = [t for t in tables if not t.empty]
    found: dict[tuple[Row, Path], dict[tuple[int, int], WeightView]] = defaultdict(dict)
    for name, view in names.items():
        path = tuple(name.split("."))
        for hit in (hit for table in tables for hit in table.spelled(path)):
            row, bound = hit.row, hit.bound
            if view is None or row.name == row.parts[0].path or (wanted is not None and row not in wanted):
                continue  # fits two places, or is stored transposed under its own name
            nth = int(bound[row.stack]) if row.stack else 0
            found[row, fill(row.name, bound) + hit.tail][nth, hit.part] = view
    for (row, path), parts in found.items():
        made = _together(row, parts)
        if made is not None or row.block:  # rows in no known order are nobody's
            yield ".".join(path), made


def _in_turn(views: Sequence[WeightView], block: int) -> list[WeightView]:
    """So many rows of each view in turn; nothing if they do not come out even."""
    rows = views[0].shape[0]
    if rows % block or any(view.shape[0] != rows for view in views):
        return []
    return [rows_of(view, at, at + block) for at in range(0, rows, block) for view in views]


def _together(row: Row, parts: Mapping[tuple[int, int], WeightView]) -> WeightView | None:
    """Return one weight of a spelling from its canonical parts; None where some are missing."""
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
    return WeightView(made.pieces, (count, made.shape[0] // count, made.shape[1])) if len(made.shape) == 2 else None
