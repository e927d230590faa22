"""What is said of an adapter that does not fit its base: every problem of one kind in one error. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..adapters.file import weight_shapes
from ..errors import FitError, MergeError, ShapeMismatch, UnmatchedModules
from ..files.lookalikes import foreign
from ..job import Unmatched
from ..models.names import Names
from ..text import listed
from .diagnosis import NO_NAMES, OWN_BASE, doubt, explain
from .patch import Match

UNKNOWN: Final = "unknown tensor"
IDLE: Final = "a change of 0 to a tensor of whole numbers"
OR_LEAVE_OUT: Final = "; or leave out what does not fit with --strength-for re:NAME=0"
LOOK: Final = f"{NO_NAMES}; look at what wrote them"


def refuse(result: Match, names: Names, failures: Sequence[MergeError], unmatched: Unmatched) -> None:
    """Raise what is wrong, the worst first: modules that do not fit, none that has a place, some that have none."""
    if result.modules and not (failures or result.unmatched):
        return
    path, shapes = result.adapter.path, weight_shapes(result.adapter.modules)
    if failures:
        worst = failures[0]
        same = [e.where.removeprefix(f"{path}: ") for e in failures if type(e) is type(worst)]
        why = explain(names, [], shapes) if isinstance(worst, ShapeMismatch) else ""
        others = OR_LEAVE_OUT if isinstance(worst, ShapeMismatch) and result.modules > len(failures) else ""
        raise type(worst)(worst.what, f"{path}: {listed(same)}", (why or worst.fix) + others)
    if result.modules == 0 and (what := foreign(result.adapter.index.tensors)):
        raise UnmatchedModules(f"this file is {what[0]}", f"{path}: {listed(result.unmatched)}", what[1])
    reason = explain(names, list(result.unmatched), shapes)
    if result.modules == 0:
        raise UnmatchedModules(
            f"no module of the adapter is in the base (0 of {result.total})",
            f"{path}: {listed(result.unmatched)}; the base is {names.architecture}",
            reason,
        )
    if unmatched == "error" and set(result.unmatched.values()) == {UNKNOWN}:
        raise UnmatchedModules(
            f"the meaning of {len(result.unmatched)} of the adapter's tensors is unknown",
            f"{path}: {listed(result.unmatched)}: neither a parameter of the base nor a tensor of any known method",
            f"{reason.replace(f'{NO_NAMES}; {OWN_BASE}', LOOK)}; or leave them out with --unmatched skip",
        )
    if result.unmatched and unmatched == "error":
        raise UnmatchedModules(
            f"{len(result.unmatched)} of {result.total} adapter modules have no place in the base",
            f"{path}: {listed(result.unmatched)}; the base is {names.architecture}",
            f"{reason}; or leave them out with --unmatched skip",
        )


def doubtful(result: Match, names: Names, unmatched: Unmatched) -> str:
    """Raise, or say if the rest is merged anyway, that the adapter looks made for another variant of the model."""
    if result.grown:  # it makes the variant that it was made for
        return ""
    why = doubt(names, lambda: weight_shapes(result.adapter.modules))
    if why and unmatched == "error":
        what = "the adapter looks made for another variant of the model"
        fix = "use the base it was trained on, or merge all the same with --unmatched skip"
        raise FitError(what, f"{result.adapter.path}: {why}", fix)
    return why
