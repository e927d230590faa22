"""Parameters that an adapter stores as whole values, which replace the base's: whole tensors or rows of trained tokens.

A value, with its bias, may have more or fewer rows than the base's, as embeddings and heads do. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from ..adapters.modules import Module
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import split_parameter
from ..adapters.tensor_values import FileValues, is_all_zeros
from ..algorithms import ALGORITHMS
from ..algorithms.whole import SET
from ..dtypes import WHOLE_DTYPES, StoredTensor, flat
from ..errors import InputError, MergeError, ShapeMismatch
from ..models.weights import RowSlice, WeightView, whole
from ..row_ranges import RowNumbers
from ..text import Note
from .patch import REPLACED_AGAIN, Match, Patch, PatchPart

MOST_RUNS: Final = 10_000  # of rows that one adapter replaces; each takes some 0.3 ms, and the list is in a small file

SAVE_WHOLE: Final = "save the embeddings whole (modules_to_save), or merge the adapter in PEFT"


def with_values(
    modules: Sequence[Module], strange: Sequence[StoredTensor], rules: PeftRules
) -> tuple[list[Module], list[StoredTensor]]:
    """Return the modules, with the trained value of their parameter as one more tensor if the formula needs it, and
    the strange tensors that are left."""
    # The parameters whose value a formula needs.
    formulas = {name for name, row in ALGORITHMS.items() if row.value}
    parameters = {f"{m.name}.{m.parameter}" for m in modules if not formulas.isdisjoint(m.algorithms)}
    # The tensors that hold these values.
    meanings = [(info, rules.of(info.name).stored_value(info.name)) for info in strange] if parameters else []
    values = {v.target: info for info, v in meanings if v and v.kind == "value" and v.rows is None}
    values = {target: info for target, info in values.items() if target in parameters}
    names = {info.name for info in values.values()}
    left = [info for info in strange if info.name not in names]
    return [_with_value(m, values.get(f"{m.name}.{m.parameter}")) for m in modules], left


def _with_value(module: Module, info: StoredTensor | None) -> Module:
    slots = {ALGORITHMS[name].value: info for name in module.algorithms if info and ALGORITHMS[name].value}
    return replace(module, slots={**module.slots, **slots}) if slots else module


def is_zero(module: Module, base: StoredTensor | None, values: FileValues) -> bool:
    """Return whether the module adds zeros to a tensor of whole numbers, such as a counter, or to an absent one.

    `base`: the base's tensor; None if it has none."""
    info = module.slots.get("diff")
    if info is None or (base is not None and base.dtype not in WHOLE_DTYPES):
        return False
    return is_all_zeros(info, values)


def is_copy(info: StoredTensor, base: StoredTensor, values: FileValues) -> bool:
    """Return whether a tensor equals the base's tensor."""
    return info.shape == base.shape and not values.differing(info, base)


def as_rows(module: Module, view: WeightView) -> tuple[Module, WeightView]:
    """Return module and view as `E·out` rows, where a value or difference is of all stacked experts `[E, out, in]`."""
    info = module.slots.get("diff")
    if info is None or info.shape != view.shape or view.matrix == flat(view.shape):
        return module, view
    slots = {**module.slots, "diff": replace(info, shape=view.matrix)}
    return replace(module, slots=slots), WeightView(view.row_slices, view.matrix)


def is_fixed(info: StoredTensor, view: WeightView, base: StoredTensor, values: FileValues, strength: float) -> bool:
    """Return whether a value takes the place of a whole tensor of the base as it is, or not at all: at strength 1, and
    whole numbers that have no halfway, such as a counter, or that are the base's."""
    (piece, *others), fits = view.row_slices, (len(info.shape), *info.shape[1:]) == (len(base.shape), *base.shape[1:])
    if others or piece.transposed or piece.size != prod(base.shape) or not fits:
        return False
    if strength == 1 or info.dtype not in WHOLE_DTYPES:
        return strength == 1
    return not (strength and info.shape) or is_copy(info, base, values)


def replace_in_turn(matches: Sequence[Match], base: Mapping[str, StoredTensor]) -> list[Match]:
    """Return the matches for adapters in turn, each applied to the result of the adapters before it.

    A value is left out if later adapters only replace it. If an adapter also changes the parameter, the value becomes
    a change, W' = W + (V − W), because formulas read the weight before and after it.
    """
    read = [  # what formulas read: the weights that they change, and others
        {*match.uses, *(p.key for part in match.parts for v in part.patch.base_slots.values() for p in v.row_slices)}
        for match in matches
    ]
    in_turn = []
    for number, match in enumerate(matches):
        uses, replaced, unused = dict(match.uses), dict(match.replaced), dict(match.unused)
        for key, info in match.replaced.items():
            others = any(key in keys for n, keys in enumerate(read) if n != number)
            if not others and any(key in later.replaced for later in matches[number + 1 :]):
                unused[replaced.pop(key).name] = REPLACED_AGAIN
            elif others and key in base and info.shape == base[key].shape:
                uses[key] = [_as_change(key, replaced.pop(key), number), *uses.get(key, ())]
        in_turn.append(replace(match, uses=uses, replaced=replaced, unused=unused))
    return in_turn


def values_as_changes(matches: Sequence[Match], base: Mapping[str, StoredTensor], *, alone: bool) -> list[Match]:
    """Return the matches for a method that makes one change of all changes of a weight: a value V is the change V − W.

    `alone`: also if no other adapter changes the parameter, because the method changes a single change too.
    """
    as_changes = []
    for number, match in enumerate(matches):
        uses, replaced = dict(match.uses), dict(match.replaced)
        for key, info in match.replaced.items():
            shared = alone or any(key in m.uses or key in m.replaced for n, m in enumerate(matches) if n != number)
            if shared and key in base and info.shape == base[key].shape and info.dtype not in WHOLE_DTYPES:
                uses[key] = [_as_change(key, replaced.pop(key), number), *uses.get(key, ())]
        as_changes.append(replace(match, uses=uses, replaced=replaced))
    return as_changes


def _as_change(key: str, info: StoredTensor, number: int) -> PatchPart:
    """Return the patch that replaces a parameter by a value."""
    view = whole(key, info.shape)
    module = Module.of_value(*split_parameter(key), info)
    return PatchPart(Patch(number, module, SET.name, {"diff": view.matrix}, {}, (), view), view.row_slices[0], 0, 1.0)


def resized_values(
    replaced: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor], path: Path
) -> tuple[list[MergeError], list[Note]]:
    """Return the errors and the notes on replaced parameters. A value, with its bias, may have more or fewer rows, as
    embeddings and heads do."""
    unfit: list[MergeError] = []
    notes = []
    for key, info in replaced.items():
        old, weight = base[key].shape, replaced.get(key.removesuffix("bias") + "weight")
        if info.shape == old:
            continue
        if len(old) == 1 and (weight is None or weight.shape[0] != info.shape[0]):
            where = f"{path}: {info.name} is {list(info.shape)}, the base has {list(old)}"
            fix = "merge into the checkpoint that the adapter was trained on"
            unfit.append(ShapeMismatch("adapter tensors do not fit the base", where, fix))
        else:
            notes.append(Note(f"{key}: {old[0]} rows become {info.shape[0]}"))
    return unfit, notes


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
