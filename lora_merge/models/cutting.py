"""Stored tensors → canonical weights → the weights of each spelling.

Every tensor is first cut into its canonical weights (q, k and v of a fused tensor). Every spelling of an architecture
then joins canonical weights to the weights that the spelling has names for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ..shapes import Shape
from .architectures.notation import Hit, Path, Row, Table, fill
from .weights import RowSlice, WeightView, rows_of, stacked, transposed, whole

MOST_EXPERTS: Final = 4096
"""The most experts in a stack. Without a limit, a tensor of no bytes could claim any number."""

Views: TypeAlias = dict[str, WeightView | None]
"""Name → the rows with that name; None if the name fits two places."""


def put(names: Views, name: str, view: WeightView | None) -> None:
    """Add a name; one that fits two places becomes None."""
    known = names.setdefault(name, view)
    if known is not view and known != view:
        names[name] = None


def canonical(
    bodies: Iterable[str], keys: Mapping[str, str], shapes: Mapping[str, Shape], table: Table
) -> tuple[Views, list[tuple[str, WeightView]]]:
    """Return (canonical name → its rows, the tensors' own names with their rows if they differ) of some tensors.

    `bodies`: names in the network; `keys`: name in the network → name in the base, of all tensors; `shapes`: by name in
    the base; `table`: the table of the base's layout.
    """
    found: Views = {}
    halves: dict[str, dict[int, WeightView]] = defaultdict(dict)
    own: list[tuple[str, WeightView]] = []
    for body in bodies:
        key, path = keys[body], tuple(body.split("."))
        hit = None if table.empty else table.canonical(path)
        view = whole(key, shapes[key])
        cut = list(_cut(hit, view, _width(body, keys, shapes))) if hit else []
        if cut and hit and hit.row.stack:
            view = _matrices(view)  # as `spelled` joins the stack, so that both views are equal
        for name, half, part in cut:
            if half is None:
                put(found, name, part)
            else:
                halves[name][half] = part
        reordered = hit is not None and hit.row.block > 0  # the canonical name means the rows in another order
        if not cut:
            put(found, body, None if reordered else view)
        elif not reordered and body not in (name for name, _, _ in cut):
            own.append((body, view))
    for name, both in halves.items():
        if len(both) == 2:
            put(found, name, stacked((both[0], both[1])))
    return found, own


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
    stack = WeightView(_matrices(view).row_slices, (count * rows, cols))
    for e in range(count):
        bound = {**hit.bound, str(hit.row.stack): str(e)}
        for i, part in enumerate(parts):
            matrix = rows_of(stack, e * rows + i * each, e * rows + (i + 1) * each)
            name = ".".join(fill(part.path, bound) + hit.tail)
            yield name, part.half, transposed(matrix) if part.transposed else matrix


def _matrices(view: WeightView) -> WeightView:
    """Return a stored `[E, out, in]` tensor seen as `E·out` rows of width `in`."""
    count, rows, cols = view.shape
    return WeightView((RowSlice(view.row_slices[0].key, 0, count * rows, cols),), view.shape)


def _sizes(row: Row, rows: int, width: int) -> list[int]:
    """Return the rows of every part; [] if they cannot be divided so."""
    sized = sum(p.sized for p in row.parts)
    rest = rows - sized * width
    each, odd = divmod(rest, len(row.parts) - sized) if len(row.parts) > sized else (0, rest)
    if odd or rest < 0 or (sized and not width) or (len(row.parts) > sized and not each):
        return []
    return [width if p.sized else each for p in row.parts]


def spelled(
    names: Views, tables: Iterable[Table], wanted: Container[Row] | None = None
) -> Iterator[tuple[str, WeightView | None]]:
    """Yield (name, view) of every weight of some spelling whose canonical parts are all present.

    `names`: the canonical names; `wanted`: the only rows of the tables to use, None for all.
    """
    tables = [t for t in tables if not t.empty]
    found: dict[tuple[Row, Path], dict[tuple[int, int], WeightView]] = defaultdict(dict)
    for name, view in names.items():
        path = tuple(name.split("."))
        for hit in (hit for table in tables for hit in table.spelled(path)):
            row, bound = hit.row, hit.bound
            if view is None or row.name == row.parts[0].path or (wanted is not None and row not in wanted):
                continue  # the name fits two places, or the weight is stored transposed under its own name
            nth = int(bound[row.stack]) if row.stack else 0
            found[row, fill(row.name, bound) + hit.tail][nth, hit.part] = view
    for (row, path), parts in found.items():
        made = _joined(row, parts)
        if made is not None or row.block:  # None: the name is known, the order of its rows is not
            yield ".".join(path), made


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
    made = stacked(chosen) if chosen else None
    if made is None or not row.stack:
        return made
    return WeightView(made.row_slices, (count, made.shape[0] // count, made.shape[1])) if len(made.shape) == 2 else None
