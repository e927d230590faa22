"""Refuses an adapter whose change is exactly 0: a factor of each module is zero, as before the first training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..adapters.modules import Module
from ..adapters.tensor_values import FileValues, is_all_zeros
from ..change_statistics import Measures
from ..disk.reader import Reader
from ..dtypes import FLOATS
from ..errors import NoChange
from ..matching.fit_errors import WITHOUT
from ..matching.patch import Match

ROUNDING_OF_WEIGHT: Final = 1e-12
"""‖ΔW‖² / ‖W‖² of a change that is rounding alone, as that of DoRA with a magnitude of the base's own norms."""


def check_effect(matched: Sequence[Match], measures: Measures, reader: Reader) -> None:
    """Raise NoChange for an adapter whose measured change is 0 and whose tensors show why; that costs reads only if
    the change is 0."""
    for number, match in enumerate(matched):
        modules = [part.patch.module for part in match.parts]
        if not modules or match.replaced or match.bases or not _measured_as_zero(number, measures):
            continue
        zeros = [*_zeros(modules, FileValues(reader))]
        if len(zeros) == len(modules):
            raise NoChange(
                "the adapter changes nothing: a factor of each module is all zeros, as before training",
                f"{match.adapter.path}: {zeros[0]}",
                f"name a save of a later training step; {WITHOUT}",
            )


def _measured_as_zero(number: int, measures: Measures) -> bool:
    known = [(n, m) for n, m in measures.tensors.items() if number in m.adapters]
    exact = [m.with_exact(measures.norms.get(n, {}), 0).adapters[number].change for n, m in known]
    return bool(known) and sum(exact) <= ROUNDING_OF_WEIGHT * sum(m.weight for _, m in known)


def _zeros(modules: Sequence[Module], values: FileValues) -> Iterator[str]:
    """Yield a tensor of zeros of each module, up to the first module without one."""
    for module in modules:
        infos = (info for info in module.slots.values() if info.dtype in FLOATS)
        zero = next((info for info in infos if is_all_zeros(info, values)), None)
        if zero is None:
            return
        yield zero.name
