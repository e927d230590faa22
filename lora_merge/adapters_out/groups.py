"""The modules of an output, and which rows of which changes belong to each. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ..algorithms import ALGORITHMS
from ..dtypes import FLOATS, Shape, StoredTensor, flat
from ..errors import FitError
from ..matching.patch import Patch, PatchPart
from ..models.names import Names
from ..models.part_factors import or_leave_out
from ..models.weights import RowSlice, WeightView
from ..text import listed
from .dialects import Dialect

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Rows of a weight: (first row, end) of consecutive ones; (): all."""


class Place(NamedTuple):
    """One parameter of an adapter: its name, and the rows of the base's weights that it is."""

    prefix: str
    module: str
    parameter: str
    view: WeightView  # its rows in the base
    component: str = ""
    norm: bool = False  # whether it belongs to a norm: the weight is a vector
    bare: bool = False  # whether it is a parameter of no module

    @property
    def name(self) -> str:
        """The parameter for reports."""
        return self.module if self.parameter == "weight" else f"{self.module}.{self.parameter}"

    @property
    def label(self) -> str:
        """The parameter, unique in the output."""
        return self.prefix + self.name

    @property
    def key(self) -> str:
        """The key of the weight that holds its first rows."""
        return self.view.row_slices[0].key

    @property
    def keys(self) -> list[str]:
        """The keys of the weights that hold it."""
        return [piece.key for piece in self.view.row_slices]

    @property
    def vector(self) -> bool:
        """Whether it has no factors: one axis, or a bias of any shape, such as [1, out, 1, 1]."""
        return len(self.view.shape) < 2 or self.parameter == "bias"

    @property
    def kernel(self) -> bool:
        """Whether it is a convolution whose kernel has more than one number."""
        return any(n > 1 for n in self.view.shape[2:])


@dataclass(frozen=True)
class Target:
    """One weight of the base with everything that changes it: its change is computed as one."""

    key: str
    shape: Shape
    uses: tuple[PatchPart, ...]
    values: tuple[tuple[int, StoredTensor, float], ...] = ()  # (adapter, new value of the whole weight, strength)
    places: tuple[Place, ...] = ()  # the modules with its rows, in the words of the first adapter
    layers: tuple[Runs, ...] = ((),)  # its rows in each module of the output

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) as the uses see the weight; stacked experts [E, out, in] are E·out rows."""
        cols = self.uses[0].piece.cols if self.uses else 0
        return (prod(self.shape) // cols, cols) if cols else flat(self.shape)

    @cached_property
    def ranks(self) -> list[int | None]:
        """The rank of each change; None for one that is not a product of factors."""
        return ranks_of(self.uses)

    @cached_property
    def factored(self) -> bool:
        """Whether its change is a sum of products of stored factors."""
        patches = [use.patch for use in self.uses if use.strength]
        return bool(patches) and not self.vector and not self.values and all(map(has_factors, patches))

    @property
    def stacked(self) -> bool:
        """Whether the weight is that of several experts."""
        return self.matrix != flat(self.shape)

    @property
    def vector(self) -> bool:
        """Whether it has no factors."""
        return self.places[0].vector

    @property
    def label(self) -> str:
        """The name of the weight for reports, that of its first rows."""
        return self.places[0].label


def whole_place(module: str, parameter: str, view: WeightView, uses: Sequence[PatchPart]) -> Place:
    """Return a weight as one module."""
    if parameter not in OF_MODULES:  # such as those of experts, which are named like modules
        module, parameter = f"{module}.{parameter}", "weight"
    return Place("", module, parameter, view, norm=of_norm(uses))


NORM_ENDINGS: Final = (".w_norm", ".b_norm")
"""Endings of the changes of norms in files of LyCORIS and kohya's scripts."""


def of_norm(uses: Iterable[PatchPart]) -> bool:
    """Return whether an adapter has a weight under an ending of norms."""
    return any(info.name.endswith(NORM_ENDINGS) for use in uses for info in use.patch.module.slots.values())


def meets(runs: Runs, piece: RowSlice) -> bool:
    """Return whether rows of a weight are among these."""
    return not runs or any(start < piece.stop and piece.start < stop for start, stop in runs)


def is_plain(patch: Patch) -> bool:
    """Return whether a patch is a product of two factors with a scale, and nothing else."""
    row = ALGORITHMS[patch.algorithm]
    return row.rank is not None and row.low_rank is not None and patch.module.slots.keys() == PAIR


def is_stored_pair(patch: Patch) -> bool:
    """Return whether a change is the product of the two factors that the file stores, and a scale."""
    return is_plain(patch) and ALGORITHMS[patch.algorithm].stores == "factors"


def has_factors(patch: Patch) -> bool:
    """Return whether a change is that of two stored factors alone."""
    slots = patch.module.slots
    return is_stored_pair(patch) and not patch.reads_base and {slots["up"].dtype, slots["down"].dtype} <= FLOATS


def ranks_of(uses: Iterable[PatchPart]) -> list[int | None]:
    """Return the rank of each change; None for one that is not a product of factors."""
    return [rank_of_change(use.patch) for use in uses if use.strength]


def rank_of_change(patch: Patch) -> int | None:
    """Return the rank of a change; None for one that is computed as a matrix: as one without factors, or with more
    columns in them than the matrix has rank."""
    low = ALGORITHMS[patch.algorithm].low_rank
    if low is None or patch.magnitude is not None:
        return None
    rank = low.rank(patch.shapes, patch.view.shape)
    return rank if is_plain(patch) or rank <= min(patch.view.matrix) else None


OF_MODULES: Final = ("weight", "bias")
"""Parameters that belong to a module; others are named like one, such as the stacked weights of experts."""

PAIR: Final = frozenset({"up", "down"})
"""The tensors of a product of two factors."""


def _count(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


class PatchRun(NamedTuple):
    """Consecutive rows of a patch that are rows of a place."""

    source: int
    target: int
    rows: int


class PlaceChange(NamedTuple):
    """The change of one patch in one place."""

    patch: Patch
    strength: float
    runs: tuple[PatchRun, ...]

    def is_all(self, place: Place) -> bool:
        """Return whether the patch is for exactly the rows of the place, in their order."""
        rows = place.view.matrix[0]
        return self.patch.view.matrix[0] == rows and self.runs == (PatchRun(0, 0, rows),)


@dataclass(frozen=True)
class PlacePart:
    """Rows of one weight that are rows of a place."""

    target: Target
    runs: Runs
    rows: tuple[range, ...]  # of the place, in the order of the runs
    turned: RowSlice | None = None  # the slice that the place sees transposed; None: as stored

    @property
    def order(self) -> list[int]:
        """The row of the place that each row of the part is."""
        return [row for rows in self.rows for row in rows]

    @property
    def shape(self) -> Shape:
        """The shape of the rows, as the base stores them."""
        return self.target.shape if not self.runs else (_count(self.runs), *self.target.shape[1:])

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) of the rows."""
        rows, cols = self.target.matrix
        return (_count(self.runs) if self.runs else rows), cols

    @cached_property
    def uses(self) -> tuple[PatchPart, ...]:
        """The uses of the weight that change any of the rows."""
        uses = self.target.uses
        return uses if not self.runs else tuple(use for use in uses if meets(self.runs, use.piece))

    @property
    def ranks(self) -> list[int | None]:
        """The rank of each change; None for one that is not a product of factors."""
        return ranks_of(self.uses) if self.runs else self.target.ranks


class OutputModule(NamedTuple):
    """A place with everything that changes it."""

    place: Place
    shares: tuple[PlaceChange, ...] = ()
    value: tuple[StoredTensor, float] | None = None  # a new value of the whole parameter, and its strength
    parts: tuple[PlacePart, ...] = ()  # the weights whose combined changes it has rows of

    @property
    def alone(self) -> bool:
        """Whether it is one weight, as that is stored."""
        (part, *others) = self.parts
        return not (others or part.turned or part.runs)


HEAD_PREFIX: Final = "lm_head."
"""The head of a language model, which a base without a level above its layers may have too."""

V4: Final = re.compile(r"\.block_sparse_moe\.experts\.\d+\.w[123]\.")
"""In keys of a base: layers of one expert of Mixtral. PEFT knows them by the names of transformers 4 alone.

Source: _MOE_TARGET_MODULE_MAPPING in peft/utils/transformers_weight_conversion.py."""
V4_LAYERS: Final = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
V4_WORDS: Final = re.compile("|".join(rf"(?<=\.){word}(?=\.)" for word in V4_LAYERS))


def places(names: Names, dialect: Dialect) -> Iterator[Place]:
    """Yield every parameter of the base in the words of a dialect."""
    encoders = names.known.text_encoders if names.known else {}
    for part in names.parts:
        prefix = "" if names.has_twins else dialect.prefix(part, encoders)
        views = part.views(dialect.layout(part))
        if dialect.table:
            views = {name: view for name, view in views.items() if part.named_in(dialect.table, name)}
        if dialect.from_top:
            views = {part.in_memory(name): view for name, view in views.items()}
        level = dialect.level_of(part)
        for body, view in views.items():
            if dialect.folder and V4.search(view.row_slices[0].key):
                body = V4_WORDS.sub(lambda word: V4_LAYERS[word[0]], body)
            inside = view.row_slices[0].key.startswith(part.prefix) and not body.startswith(
                HEAD_PREFIX
            )  # a head is outside
            name = level + body if inside else body
            module, dot, parameter = name.rpartition(".")
            if not dot or parameter not in OF_MODULES:
                module, parameter = name, "weight"
            if module:
                weight_view = views.get(f"{module}.weight".removeprefix(level if inside else ""), view)
                norm, bare = len(weight_view.shape) == 1, module == name
                yield Place(prefix, module, parameter, names.as_stored(view), part.label, norm, bare)


def modules_at(targets: Sequence[Target], places: Iterable[Place]) -> list[OutputModule]:
    """Return the places that the targets change, in the order of the adapter; FitError for rows without a place."""
    # Step 1: the places with rows of each weight.
    by_key: dict[str, list[tuple[Place, RowSlice, int]]] = {}
    for place in places:
        for piece, at in place.view.addresses():
            by_key.setdefault(piece.key, []).append((place, piece, at))
    # Step 2: the rows of each change in each place.
    runs: dict[tuple[str, ...], dict[int, tuple[Patch, float, list[PatchRun]]]] = {}
    places_by_key: dict[tuple[str, ...], Place] = {}
    values: dict[tuple[str, ...], tuple[StoredTensor, float]] = {}
    lost: list[str] = []
    for target in targets:
        near = by_key.get(target.key, [])
        for use in target.uses:
            covered = 0
            for place, piece, at in near:
                run = _overlap(use.piece, use.start, piece, at)
                if run is None:
                    continue
                covered += run.rows
                places_by_key[_key(place)] = place
                runs_of_place = runs.setdefault(_key(place), {})
                runs_of_place.setdefault(id(use.patch), (use.patch, use.strength, []))[2].append(run)
            lost += [target.key] if covered < use.piece.rows else []
        for _, info, strength in target.values:
            whole = next((p for p, piece, _ in near if piece.size == prod(target.shape)), None)
            if whole is None:
                lost.append(target.key)
                continue
            places_by_key[_key(whole)], values[_key(whole)] = whole, (info, strength)
    if lost:
        raise FitError("the dialect has no name for rows that the adapter changes", listed(dict.fromkeys(lost), 3),
                       or_leave_out("convert to another dialect", lost))  # fmt: skip
    return [
        OutputModule(
            place, tuple(PlaceChange(p, s, _merged(r)) for p, s, r in runs.get(key, {}).values()), values.get(key)
        )
        for key, place in places_by_key.items()
    ]


def layers_of_weights(targets: Sequence[Target]) -> list[OutputModule]:
    """Return the modules with rows of each weight, in the words of the first adapter."""
    return with_parts(targets, [OutputModule(place) for target in targets for place in target.places])


class _PlaceRows(NamedTuple):
    """The rows of one weight in a place."""

    module: OutputModule
    slices: tuple[tuple[RowSlice, int], ...]  # with the row of the place that each begins at

    @property
    def turned(self) -> RowSlice | None:
        """The slice that the place sees transposed."""
        first = self.slices[0][0]
        return first if first.transposed else None

    @property
    def runs(self) -> Runs:
        """The rows."""
        return tuple((piece.start, piece.stop) for piece, _ in self.slices)


def with_parts(targets: Sequence[Target], modules: Sequence[OutputModule]) -> list[OutputModule]:
    """Return modules with the weights that they have rows of, in the order of the weights and of their rows."""
    # Step 1: the rows of each weight in each place. Slices that are stored as they are seen are one layer.
    by_key: dict[str, list[_PlaceRows]] = {}
    for module in modules:
        slices: dict[tuple[str, int], list[tuple[RowSlice, int]]] = {}
        for number, (piece, at) in enumerate(module.place.view.addresses()):
            slices.setdefault((piece.key, number if piece.transposed else -1), []).append((piece, at))
        for (key, _), pieces in slices.items():
            by_key.setdefault(key, []).append(_PlaceRows(module, tuple(pieces)))
    # Step 2: each weight, with its rows in these places as its layers.
    parts: dict[int, list[PlacePart]] = {}
    for target in targets:
        changed = by_key.get(target.key, [])
        if len(changed) == 1 and [piece.size for piece, _ in changed[0].slices] == [prod(target.shape)]:
            whole = target
        else:
            changed = [rows for rows in changed if target.values or any(meets(rows.runs, u.piece) for u in target.uses)]
            whole = replace(target, layers=tuple(rows.runs for rows in changed))
        for rows, runs in zip(changed, whole.layers, strict=True):
            lines = tuple(range(first, first + piece.rows) for piece, first in rows.slices)
            parts.setdefault(id(rows.module), []).append(PlacePart(whole, runs, lines, rows.turned))
    numbers = {target.key: number for number, target in enumerate(targets)}
    complete = [module._replace(value=None, parts=tuple(parts[id(module)])) for module in modules]
    return sorted(complete, key=lambda module: (numbers[module.parts[0].target.key], module.parts[0].runs))


def components(modules: Sequence[OutputModule]) -> list[list[OutputModule]]:
    """Return the modules, those with rows of one weight together."""
    by_weight: dict[int, list[OutputModule]] = {}
    for module in modules:
        groups = {id(g): g for part in module.parts if (g := by_weight.get(id(part.target))) is not None}
        joined = [*(other for group in groups.values() for other in group), module]
        by_weight |= {id(part.target): joined for member in joined for part in member.parts}
    return [*{id(group): group for group in by_weight.values()}.values()]


def _key(place: Place) -> tuple[str, ...]:
    return place.component, place.prefix, place.module, place.parameter


def _overlap(place_piece: RowSlice, start: int, other: RowSlice, at: int) -> PatchRun | None:
    """Return the rows that a piece of a patch (from its row `start` on) shares with a piece of a place."""
    if place_piece.transposed or other.transposed:
        same = place_piece._replace(transposed=False) == other._replace(transposed=False)
        return PatchRun(start, at, place_piece.rows) if same and place_piece.transposed == other.transposed else None
    if place_piece.cols != other.cols:
        return None
    low, high = max(place_piece.start, other.start), min(place_piece.stop, other.stop)
    return PatchRun(start + low - place_piece.start, at + low - other.start, high - low) if low < high else None


def _merged(runs: Sequence[PatchRun]) -> tuple[PatchRun, ...]:
    """Return the runs in order of the place, neighbours joined."""
    merged: list[PatchRun] = []
    for run in sorted(runs, key=lambda r: r.target):
        last = merged[-1] if merged else None
        if last and (last.source + last.rows, last.target + last.rows) == (run.source, run.target):
            merged[-1] = PatchRun(last.source, last.target, last.rows + run.rows)
        else:
            merged.append(run)
    return tuple(merged)
