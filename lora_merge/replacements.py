"""Parameters that an adapter brings whole: whether they fit the base, and each other. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from .adapter import Module
from .algorithms import flat
from .errors import FitError, MergeError, ShapeMismatch
from .header import TensorInfo
from .job import Adapter
from .matched import Matched
from .views import View

TABLE: Final = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|shared|lm_head)\.weight")
"""What has a row per token."""


def tables(copies: Iterable[tuple[TensorInfo, View | None]], base: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tables of tokens that had other rows when the training began → the adapter's copy of them, with its place.

    PEFT stores what it was trained upon where the vocabulary was resized before: peft/utils/save_and_load.py.
    """
    found = {}
    for info, view in copies:
        if view is None or len(view.pieces) > 1 or not TABLE.fullmatch(view.pieces[0].key):
            continue
        key, old = view.pieces[0].key, base[view.pieces[0].key].shape
        if view.shape == old and len(old) == len(info.shape) == 2 and info.shape != old and info.shape[1] == old[1]:
            found[key] = info
    return found


def alone(
    found: Mapping[str, TensorInfo], replaced: Mapping[str, TensorInfo], base: Mapping[str, TensorInfo], path: Path
) -> list[MergeError]:
    """What is wrong with tables that `tables` found: another table of the base keeps the rows of the old vocabulary."""
    rows = {base[key].shape[0] for key in found}
    others = base.keys() - found.keys() - replaced.keys() if found else set()
    left = [k for k in others if TABLE.fullmatch(k) and base[k].shape[0] in rows]
    if not left:
        return []
    where = f"{path}: holds {', '.join(found)} with {min(t.shape[0] for t in found.values())} rows, but not {left[0]}"
    fix = "resize the base's embeddings to the vocabulary of the training first"
    return [
        ShapeMismatch("the vocabulary was resized before training, and a part of it is not in the file", where, fix)
    ]


def by_rows(module: Module, view: View) -> tuple[Module, View]:
    """A value or difference of all stacked experts `[E, out, in]`, both as the `E·out` rows that are stored."""
    info = module.slots.get("diff")
    if info is None or info.shape != view.shape or view.matrix == flat(view.shape):
        return module, view
    slots = {**module.slots, "diff": replace(info, shape=view.matrix)}
    return replace(module, slots=slots), View(view.pieces, view.matrix)


def sizes(
    replaced: Mapping[str, TensorInfo], base: Mapping[str, TensorInfo], path: Path
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


def clashes(refs: Sequence[Adapter], matched: Sequence[Matched]) -> None:
    """FitError if two adapters replace the same parameter: there is no sum of two replacements."""
    seen: dict[str, int] = {}
    for number, one in enumerate(matched):
        for key in one.replaced:
            if key in seen or any(key in m.uses for m in matched):
                raise FitError("a parameter is replaced as a whole and changed again", f"{key}: by {refs[number].path}",
                               "merge the adapters one after the other")  # fmt: skip
            seen[key] = number
    for number, one in enumerate(matched):
        for key in one.tables:
            if any(key in {**m.tables, **m.uses, **m.replaced} for m in matched if m is not one):
                raise FitError("one adapter was trained on a resized vocabulary that another changes",
                               f"{key}: {one.tables[key].shape[0]} rows in {refs[number].path}",
                               "merge the adapters one after the other, this one first")  # fmt: skip
    sizes = {key: shape for one in matched for key, shape in one.grown.items()}
    for key, shape in sizes.items():
        uses = [u for m in matched for u in m.uses.get(key, ())]
        if any(u.patch.view.shape != shape for u in uses):
            raise FitError("one adapter makes a weight larger that another changes as it is", f"{key} to {list(shape)}",
                           "merge the adapters one after the other, the one that makes it larger first")  # fmt: skip
