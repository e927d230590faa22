"""What a dialect cannot hold of an adapter, from headers alone: a plan and a run refuse it before anything is computed.
No torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ...adapter_options import KEEP
from ...algorithms.whole import FULL, SET
from ...errors import FitError
from ..dialects import Dialect
from ..job import FACTORS, GIVE_RANK, WHOLE, form
from ..joining.targets import is_plain
from ..outcome.planned import known_rank
from ..peft.products import TO_LORA
from ..peft.tables import is_table
from ..places import Filled, Place, Share
from ..rank_rules import EXACT
from .task import Conversion

FOR_KOHYA: Final = f"{GIVE_RANK} --to kohya"

MATRICES: Final = (FULL.name, SET.name)
"""Algorithms whose change of any rows is a whole matrix again."""


def expect_held(task: Conversion, one: Filled) -> None:
    """Raise FitError where the dialect of a task has no form for a module that headers tell."""
    place, shares, to, job = one.place, one.shares, task.to, task.job
    if one.value is not None:
        ending, (_, strength) = "diff" if place.parameter == "weight" else "diff_b", one.value
        if ending not in to.endings and (not to.whole or strength != 1):
            raise FitError(f"{to.name} has no place for whole tensors", place.name, "convert to kohya, comfy or peft")
    elif place.vector:
        if vector_ending(place, to) is None and (place.bare or not to.whole):
            raise FitError(f"{to.name} has no place for biases and norms", place.name, "convert to kohya or comfy")
    elif job.algorithm == KEEP and task.rules is None:
        _expect_kept(task, one)
    elif job.algorithm == WHOLE:
        _expect_matrix(place, to)
    elif _is_exact(task, place) and any(known_rank(s.patch) is None for s in shares):
        raise FitError("the change is not low-rank, so it has no exact factors", place.name, FOR_KOHYA)


def _expect_kept(task: Conversion, one: Filled) -> None:
    """Raise FitError for a module that keeps its algorithm, where a dialect cannot hold it."""
    place, shares, to = one.place, one.shares, task.to
    if all(is_plain(s.patch) for s in shares):
        if any(s.patch.magnitude for s in shares):
            _expect_magnitudes(one, to, task.tables)
    elif any(s.patch.algorithm in MATRICES for s in shares) and not is_copied(one, to):
        _expect_matrix(place, to)
    elif not can_copy(one, to):
        raise FitError(f"{to.name} cannot hold {shares[0].patch.algorithm} in this place", place.name, TO_LORA)


def _is_exact(task: Conversion, place: Place) -> bool:
    """Return whether a module becomes factors that no rule cuts."""
    algorithm, rules = task.job.algorithm, task.rules
    if rules is None:
        return algorithm != KEEP and form(algorithm, task.to) == FACTORS
    exact = rules.of_layer(place.label, kernel=place.kernel).name == EXACT
    return exact and form(FACTORS if algorithm == KEEP else algorithm, task.to) == FACTORS


def holds_columns(one: Filled, to: Dialect, tables: Collection[str]) -> bool:
    """Return whether the magnitudes of a module are those of its columns, and a dialect has a place for them: PEFT's of
    embeddings are. `tables`: the modules of the adapter that are known to be embeddings."""
    (share, *others) = one.shares
    of_columns = (share.patch.magnitude or ("out",))[0] == "in" and not others and share.is_all(one.place)
    held = to.copies or ("table_up" in to.endings and is_table(one.place, one.shares, tables))
    return of_columns and share.strength == 1 and held


def _expect_magnitudes(one: Filled, to: Dialect, tables: Collection[str]) -> None:
    """Raise FitError for a dialect that has no place for the magnitudes of DoRA of a module."""
    of_rows = all(s.patch.magnitude is not None and s.patch.magnitude[0] == "out" for s in one.shares)
    if not holds_columns(one, to, tables) and not (of_rows and "magnitude" in to.endings):
        raise FitError(f"{to.name} has no place for this magnitude of DoRA", one.place.name,
                       TO_LORA)  # fmt: skip


def _expect_matrix(place: Place, to: Dialect) -> None:
    """Raise FitError for a dialect that has no place for a whole matrix."""
    if "diff" not in to.endings and not to.whole:
        raise FitError(f"{to.name} has no place for whole matrices", place.name,
                       "give --rank, or convert to kohya or comfy")  # fmt: skip


def can_copy(one: Filled, to: Dialect) -> bool:
    """Return whether the tensors of a module can stand in a dialect as they are, but for their scale."""
    (share, *others) = one.shares
    patch = share.patch
    known = all(to.copied(patch.module, patch.algorithm, one.place.parameter, slot) for slot in patch.module.slots)
    return known and not others and share.is_all(one.place) and (not to.products or is_product(share, to))


def is_product(share: Share, to: Dialect) -> bool:
    """Return whether a dialect writes the tensors of a module as they are and keeps α in its configuration."""
    return not to.alpha and share.patch.algorithm in to.products and share.patch.magnitude is None


def is_copied(one: Filled, to: Dialect) -> bool:
    """Return whether the one tensor of a change is that of a place as it is, and the dialect has a key for it."""
    (share, *others) = one.shares
    module, algorithm = share.patch.module, share.patch.algorithm
    known = all(to.copied(module, algorithm, one.place.parameter, slot) for slot in module.slots)
    return known and not others and share.strength == 1 and share.is_all(one.place)


def vector_ending(place: Place, to: Dialect) -> str | None:
    """Return the ending of the change of a bias, a norm or another vector; None where the dialect has none."""
    slot = {"weight": "w_norm" if place.norm else "diff", "bias": "b_norm" if place.norm else "diff_b"}
    wanted = slot[place.parameter]
    plain = {"w_norm": "diff", "b_norm": "diff_b"}.get(wanted, wanted)
    ending = to.endings.get(wanted, to.endings.get(plain))
    in_factors = wanted == "diff_b" and place.view.matrix[1] == 1  # PEFT's lora_B is a layer: its bias is [out]
    return to.endings.get("up_bias") if ending is None and in_factors else ending
