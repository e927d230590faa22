"""Parameters that an adapter brings whole: whether they fit the base, and each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..adapters.file import Module, Values
from ..adapters.peft.rules import Rules
from ..algorithms import ALGORITHMS, flat
from ..algorithms.lora_bias import LORA_BIAS
from ..disk.files import StoredTensor
from ..errors import FitError, MergeError, ShapeMismatch
from ..job import Adapter
from ..models.weights import WeightView
from .patch import Matched

ADDED: Final = frozenset({LORA_BIAS.name})
"""Rows that PEFT adds to a parameter that the same adapter trained as a whole: `lora_bias` beside `bias="all"`."""


def with_values(modules: Sequence[Module], strange: Sequence[StoredTensor], rules: Rules) -> list[Module]:
    """The modules, with the trained value of their parameter as one more tensor where their formula works on that."""
    asking = {f"{m.name}.{m.parameter}" for m in modules if any(ALGORITHMS[name].value for name in m.algorithms)}
    told = [(info, rules.of(info.name).plain(info.name)) for info in strange] if asking else []
    found = {meant.target: info for info, meant in told if meant and meant.kind == "value" and meant.rows is None}
    return (
        [_with_value(m, found.get(f"{m.name}.{m.parameter}")) for m in modules] if asking & found.keys() else [*modules]
    )


def _with_value(module: Module, info: StoredTensor | None) -> Module:
    slots = {ALGORITHMS[name].value: info for name in module.algorithms if info and ALGORITHMS[name].value}
    return replace(module, slots={**module.slots, **slots}) if slots else module


def by_rows(module: Module, view: WeightView) -> tuple[Module, WeightView]:
    """A value or difference of all stacked experts `[E, out, in]`, both as the `E·out` rows that are stored."""
    info = module.slots.get("diff")
    if info is None or info.shape != view.shape or view.matrix == flat(view.shape):
        return module, view
    slots = {**module.slots, "diff": replace(info, shape=view.matrix)}
    return replace(module, slots=slots), WeightView(view.pieces, view.matrix)


def sizes(
    replaced: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor], path: Path
) -> tuple[list[MergeError], list[str]]:
    """What does not fit, and notes: a value may have more rows or fewer, as a table of tokens or a head does, and
    its bias with it."""
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
            notes.append(f"{key}: {old[0]} rows become {info.shape[0]}")
    return unfit, notes


def _one_base(refs: Sequence[Adapter], matched: Sequence[Matched], values: Values) -> None:
    """FitError if what two adapters store of the base is not the same."""
    for number, one in enumerate(matched):
        for key, info in one.bases.items():
            for other, ref in zip(matched, refs, strict=True):
                theirs = other.copies.get(key, info)
                if other is not one and (theirs.shape != info.shape or values.differing(theirs, info)):
                    raise FitError("two adapters were trained on different values of a tensor",
                                   f"{key}: {refs[number].path}: {info.name}, {ref.path}: {theirs.name}",
                                   "merge one of them, or remove that tensor from the one whose values shall not count"
                                   )  # fmt: skip


def clashes(refs: Sequence[Adapter], matched: Sequence[Matched], values: Values) -> None:
    """FitError if two adapters replace the same parameter, or stand on different values of one: there is no sum."""
    _one_base(refs, matched, values)
    seen: dict[str, int] = {}
    for number, one in enumerate(matched):
        for key in one.replaced:
            own = {use.patch.algorithm for use in one.uses.get(key, ())}
            if key in seen or own - ADDED or any(key in m.uses for m in matched if m is not one):
                raise FitError("a parameter is replaced as a whole and changed again", f"{key}: by {refs[number].path}",
                               "merge the adapters one after the other")  # fmt: skip
            seen[key] = number
    sizes = {key: shape for one in matched for key, shape in one.grown.items()}
    for key, shape in sizes.items():
        uses = [u for m in matched for u in m.uses.get(key, ())]
        if any(u.patch.view.shape != shape for u in uses):
            raise FitError("one adapter makes a weight larger that another changes as it is", f"{key} to {list(shape)}",
                           "merge the adapters one after the other, the one that makes it larger last")  # fmt: skip
