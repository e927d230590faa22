"""One network of a base, with all names that adapters may use for its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from ..dtypes import Shape
from ..grouping import by_key
from .architectures import IN_SHARDS, Architecture
from .architectures.notation import RowTable, fill
from .experts import Stack, is_stack, layer_of, sources, stack_of, weight_of
from .fused_weights import agreed, splits, whole_of
from .name_table import NameTable, Place, canonical, flattened, spelled
from .weights import RowSlice, WeightView, as_matrices, rows_of, whole

NO_TABLE: Final = RowTable(())

MEMORY_SPELLINGS: Final = {"dinov2.": "spellings", "dinov2_with_registers.": "spellings"}
"""Prefix of a model → the table of the names that transformers 5 gives its layers in memory, where it is not that of
the architecture's own layout."""


@dataclass(frozen=True)
class Component:
    """One network of a checkpoint: a denoiser, a text encoder, a VAE."""

    role: str  # denoiser, te, vae, other
    label: str  # the name for users: unet, transformer, te1 …
    prefix: str  # of its keys in the base
    architecture: Architecture | None = None
    layout: str = "as stored"
    kind: str = ""  # of a text encoder: clip_l, clip_g, t5 …
    number: int = 0  # of a text encoder, if the base numbers its encoders
    title: str = ""  # its class by the base's configuration
    inner: str = ""  # first level of names in a model with a head, absent in the model without the head
    sharded: bool = False  # whether several files hold the network
    keys: Mapping[str, str] = field(default_factory=dict)  # body → key in the base
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of the whole base, by key
    config: Mapping[str, Any] = field(default_factory=dict)  # of the whole base

    def knows(self, module: str, parameter: str) -> bool:
        """Return whether this name is known with some numbers, perhaps with others than its own."""
        names = [module]
        if parameter == "weight":
            names += sources(experts) if (experts := layer_of(module)) else [name for name, _ in whole_of(module)]
        return any(self._is_known(name, parameter) for name in names)

    def _is_known(self, module: str, parameter: str) -> bool:
        dotted, flat = f"{module}.{parameter}".strip("."), _flat(module, parameter)
        return self._table.knows(flat) or (flattened(dotted) != flat and self._table.knows(dotted))

    def find(self, module: str, parameter: str) -> tuple[WeightView | None, bool]:
        """Return (view or None, whether the name is known); dotted names first, then flat ones, then layers that the
        base stores stacked, one by one, or as a part of another."""
        (view, known), stack = self._named(module, parameter), None
        if view is not None and not self.shapes[view.row_slices[0].key][2:]:  # no stack: each expert is stored alone
            return view, known
        if experts := layer_of(module) if parameter == "weight" else None:
            alone = known and view is not None and len(self.shapes[view.row_slices[0].key]) < 3
            stack = None if alone else self._stack(experts)
            if not known or (stack and stack.in_out):
                kind = self.architecture.file.stem if self.architecture else ""
                other = weight_of(experts, self._weight, stack, kind)
                return (view, known) if other is None else (other, True)
        elif not known and parameter == "weight" and (part := self._part(module)) is not None:
            return part, True
        return view and (as_matrices(view) if is_stack(f"{module}.{parameter}") else view), known

    def _named(self, module: str, parameter: str) -> Place:
        """Return the place of a parameter by the names of the tables."""
        place = self._table.dotted(f"{module}.{parameter}".strip("."))
        return place if place[1] else self._table.flat(_flat(module, parameter))

    def _weight(self, module: str) -> WeightView | None:
        """Return the weight of a layer, or a parameter of this name, as stacks of experts are."""
        owner, _, leaf = module.rpartition(".")
        return self._named(module, "weight")[0] or (self._named(owner, leaf)[0] if owner else None)

    def _stack(self, experts: re.Match[str]) -> Stack | None:
        """Return the stacked experts of a layer, which thousands of names ask for."""
        if experts["owner"] not in self._stacks:
            self._stacks[experts["owner"]] = stack_of(experts, self._weight)
        return self._stacks[experts["owner"]]

    @cached_property
    def _stacks(self) -> dict[str, Stack | None]:
        """Path of the experts of a layer → their stack."""
        return {}

    def _part(self, module: str) -> WeightView | None:
        """Return the rows of a layer that the base stores as a part of another, if its shapes or its configuration
        show them."""
        for name, number in whole_of(module):
            view = self._weight(name)
            if view is None or len(view.row_slices) > 1 or view != whole(view.row_slices[0].key, view.shape):
                continue
            kind = self.architecture.file.stem if self.architecture else ""
            split = agreed(splits(view.row_slices[0].key, self.shapes, self.config, kind))
            if split:
                return rows_of(view, sum(split[:number]), sum(split[: number + 1]))
        return None

    def dotted(self, name: str) -> WeightView | None:
        """Return the view of a parameter by its path in any spelling; None if no place or several fit."""
        return self._table.dotted(name)[0]

    @property
    def connects(self) -> bool:
        """Whether this network of a pipeline is a part of the denoiser in a single file."""
        return self.architecture is not None and self.architecture.component == "connectors"

    @property
    def other_in_shards(self) -> bool:
        """Whether the names mean other rows if the network is stored in several files."""
        return self.architecture is not None and self.layout + IN_SHARDS in self.architecture.tables

    def cut(self, piece: RowSlice) -> tuple[int, ...]:
        """Return the rows of every layer in a range of rows of a tensor; () if the layers do not fill the range."""
        layers = self._table.layers(piece.key.removeprefix(self.prefix))
        if len(layers) == 1:  # nearly all: a tensor of one layer
            (p,) = layers
            return (p.rows,) if (p.start, p.stop) == (piece.start, piece.stop) else ()
        inside = [p for p in layers if piece.start <= p.start and p.stop <= piece.stop]
        bounds = [piece.start, *(p.stop for p in inside)]
        return tuple(p.rows for p in inside) if bounds == [*(p.start for p in inside), piece.stop] else ()

    def views(self, layout: str) -> dict[str, WeightView]:
        """Return name → rows of every parameter, in the words of one layout; without a table of it, in canonical words.

        A part of the network that the layout's table does not name keeps its canonical name.
        """
        if layout == self.layout or self.architecture is None:
            return {body: whole(key, self.shapes[key]) for body, key in self.keys.items()}
        native, spellings = self._tables
        views, _ = canonical(self.keys, self.keys, self.shapes, native)
        known = {name: view for name, view in views.items() if view is not None}
        if layout not in spellings:
            return known
        joined = _one_name_each(
            {name: view for name, view in spelled({**views}, [spellings[layout]]) if view is not None}
        )
        taken: dict[str, list[RowSlice]] = {}
        chosen: set[str] = set()
        # Some tables name fused rows and their parts: the smaller weights come first. What is left keeps its own name.
        for name, view in (*sorted(joined.items(), key=lambda item: _size(item[1])), *known.items()):
            if not all(_inside(p, taken.get(p.key, ())) for p in view.row_slices):
                chosen.add(name)
                for piece in view.row_slices:
                    taken.setdefault(piece.key, []).append(piece)
        return {name: view for name, view in (known | joined).items() if name in chosen}

    def in_memory(self, name: str) -> str:
        """Return the name that a parameter has in the model of transformers 5, which gives other names to the layers of
        some models (ViT, Swin, SegFormer) than their checkpoints have; a canonical name else."""
        table = self._in_memory
        path = tuple(name.split("."))
        hit = next(iter(table.spelled(path)), None) if table else None
        return name if hit is None else ".".join(fill(hit.row.name, hit.bound) + hit.tail)

    @cached_property
    def _in_memory(self) -> RowTable | None:
        architecture = self.architecture
        if architecture is None or architecture.component != "model" or self.role != "denoiser":
            return None
        table = architecture.spellings.get(MEMORY_SPELLINGS.get(self.prefix, architecture.canonical), NO_TABLE)
        return table if table.renames else None

    def named_in(self, table: str, name: str) -> bool:
        """Return whether a table has this name."""
        rows = self.architecture.spellings.get(table, NO_TABLE) if self.architecture else NO_TABLE
        return rows.canonical(tuple(name.split("."))) is not None

    @cached_property
    def _table(self) -> NameTable:
        """The names; made on first use, because `inspect` and encoders without an adapter need none."""
        native, spellings = self._tables
        return NameTable(self.keys, self.shapes, native, [*spellings.values()], self.inner)

    @property
    def _tables(self) -> tuple[RowTable, dict[str, RowTable]]:
        """The table of the layout that the base is stored in, and those of all layouts."""
        spellings = self.architecture.spellings if self.architecture else {}
        spellings = {name: table.settled(self.keys) for name, table in spellings.items()}
        shards = {name: spellings.pop(name) for name in [*spellings] if name.endswith(IN_SHARDS)}
        stored = shards.get(self.layout + IN_SHARDS) if self.sharded else None
        return stored or spellings.get(self.layout, NO_TABLE), spellings


def _size(view: WeightView) -> int:
    return sum(piece.size for piece in view.row_slices)


def _inside(piece: RowSlice, others: Iterable[RowSlice]) -> bool:
    """Return whether other pieces, which do not overlap, hold all rows of a piece."""
    shared = (min(piece.stop, other.stop) - max(piece.start, other.start) for other in {*others})
    return sum(rows for rows in shared if rows > 0) >= piece.stop - piece.start


def _one_name_each(names: Mapping[str, WeightView]) -> dict[str, WeightView]:
    """Return the names with one of each weight: the first whose module is not the place of other weights.

    The table of U-Nets names an up-sampler `1.conv` and `2.conv`; if `1` is an attention, only the second is true.
    """
    groups = by_key((view.row_slices, name) for name, view in names.items())
    prefixes = {".".join(other[0].split(".")[:n]) for other in groups.values() if len(other) == 1 for n in range(1, 9)}
    chosen = {next((n for n in some if n.rsplit(".", 2)[0] not in prefixes), some[0]) for some in groups.values()}
    return {name: view for name, view in names.items() if name in chosen}


def _flat(module: str, parameter: str) -> str:
    return f"{module.replace('.', '_')}.{parameter}"
