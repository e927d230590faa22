"""Modules that change some rows of a weight: parts of a split module (`path/0`, `path/1`, …), trained tokens. No torch.

Trainers that split a fused layer (sd-scripts' `split_qkv`, its OFT for Flux, forks of musubi-tuner) train one adapter
for the rows of each layer in it: q, k and v, and for single blocks of Flux also the MLP. The base decides which layers
are fused, and in which order, because a pruned or partly trained adapter lacks some of the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from ..adapters.modules import Module
from ..adapters.suffixes import split_row_part
from ..dtypes import StoredTensor
from ..errors import InputError, ShapeMismatch
from ..models.fused_weights import Split, agreed
from ..models.weights import RowSlice, WeightView, rows_of
from ..row_ranges import RowNumbers

PARTLY: Final = "a part of a split module matches no rows of the weight"
ALL_PARTS: Final = (
    "put the base's config.json next to it, merge into the model that the adapter was trained on in a layout that is "
    "known, or give an adapter that has all of the parts"
)
UNKNOWN_ROWS: Final = (
    "the base does not show which rows the part is for, and the parts that the adapter has do not fill the weight"
)
TURNED: Final = "the weight is stored [in, out] and cannot be cut into rows"


class NoPlace(ValueError):
    """A part has no place in its weight."""


@dataclass(frozen=True)
class RowParts:
    """The parts of one split module that an adapter has."""

    heights: Mapping[int, int]
    """Number of a part, in order → the rows that it changes; 0 where its tensors do not show them."""

    @cached_property
    def starts(self) -> Sequence[int]:
        """The first row of every part, and the end of the last, if the parts follow each other; empty if not."""
        rows = self.heights.values()
        together = [*self.heights] == [*range(len(rows))] and 0 not in rows
        return [0, *accumulate(rows)] if together else []


NO_PARTS: Final = RowParts({})


def heights(modules: Iterable[Module]) -> Mapping[str, RowParts]:
    """Return split module → its parts."""
    parts_of: dict[str, dict[int, int]] = defaultdict(dict)
    for module in modules:
        whole, number = split_row_part(module.name)
        if number is not None and module.parameter == "weight":
            parts_of[whole][number] = module.height
    return {name: RowParts(dict(sorted(parts.items()))) for name, parts in parts_of.items()}


def place(view: WeightView, number: int, parts: RowParts, splits: Mapping[str, Split]) -> WeightView:
    """Return the rows of part `number` in the weight `view`; NoPlace if it has none, or if its rows do not fit.

    `splits`: source in the base → rows of every fused layer, in order. Without a source, the parts follow each
    other and must fill the weight.
    """
    if any(piece.transposed for piece in view.row_slices):
        raise NoPlace(TURNED)
    rows, height = view.shape[0], parts.heights.get(number, 0)
    if parts.heights.keys() == {0} and height == rows:  # kohya's OFT also numbers layers that it does not split
        return view
    fused = agreed(splits)
    if splits and not fused:
        raise NoPlace("; ".join(f"by {source} {_layers(split)}" for source, split in splits.items()))
    if not fused:
        starts = parts.starts
        if number not in parts.heights or rows != next(reversed(starts), None):
            raise NoPlace(UNKNOWN_ROWS)
        return rows_of(view, starts[number], starts[number + 1])
    starts = [0, *accumulate(fused)]
    if number >= len(fused) or height not in (0, fused[number]):  # the formula checks an unknown height
        has = f"part {number} has {height} rows" if height else f"there is no layer for part {number}"
        raise NoPlace(f"{has}; by {next(iter(splits))} {_layers(fused)}")
    return rows_of(view, starts[number], starts[number + 1])


def _layers(split: Split) -> str:
    """Return a text such as `the weight holds 3 layers, of 8, 4 and 4 rows`."""
    *most, last = map(str, split)
    return f"the weight holds {len(split)} layers, of {', '.join(most)} and {last} rows"


MOST_RUNS: Final = 10_000  # of rows that one adapter replaces; each takes some 0.3 ms, and the list is in a small file
SAVE_WHOLE: Final = "save the embeddings whole (modules_to_save), or merge the adapter in PEFT"


def chosen_rows(info: StoredTensor, table: WeightView, rows: RowNumbers, runs: int) -> WeightView:
    """Return the rows of an embedding that a tensor replaces, one piece for each run of them.

    `runs`: those of all such tensors so far. ShapeMismatch if the base has fewer rows; InputError for too many runs.
    """
    where, whole_table = f"{info.file}: {info.name}", table.row_slices[0]
    if runs > MOST_RUNS:
        raise InputError(f"the adapter replaces more than {MOST_RUNS} separate runs of rows", where, SAVE_WHOLE)
    if rows.last >= table.shape[0] or len(table.row_slices) > 1 or whole_table.transposed:
        raise ShapeMismatch(
            "the adapter trains tokens that the base does not have",
            f"{where}: row {rows.last} of {table.shape[0]}",
            "resize the base's embeddings to the vocabulary of the training first",
        )
    key, start, cols = whole_table.key, whole_table.start, whole_table.cols
    pieces = tuple(RowSlice(key, start + first, start + first + count, cols) for first, count in rows.runs)
    return WeightView(pieces, (len(rows), cols))
