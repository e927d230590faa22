"""Several tensors for one shared slot of a module (alpha, magnitude, shape): they must be equal. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from ..algorithms import dora
from ..disk.files import StoredTensor
from ..errors import InputError
from .file import Module, Values

KEEP_ONE: Final = "remove the one that the adapter was not trained with, or export it again"


def repeated(module: Module, path: Path, values: Values) -> Iterator[str]:
    """Yield the slots that have several equal tensors; InputError for tensors that are not equal."""
    for slot, other in module.repeated:
        if not _same(slot, module.shared[slot], other, values):
            where = f"{path}: {module.shared[slot].name} and {other.name}"
            raise InputError(f"two tensors give the {slot} of one module, and are not equal", where, KEEP_ONE)
        yield slot


def _same(slot: str, one: StoredTensor, other: StoredTensor, values: Values) -> bool:
    """Return whether two tensors of one slot are equal: single numbers by value, others byte for byte.

    Magnitudes are equal if they also lie along the same axis, [out] and [out, 1] for example.
    """
    if prod(one.shape) == prod(other.shape) == 1:
        return values.numbers(one) == values.numbers(other)
    if slot != "magnitude":
        return values.same(one, other)
    flat = [replace(info, shape=(prod(info.shape),)) for info in (one, other)]
    return _is_of_inputs(one) == _is_of_inputs(other) and values.same(*flat)


def _is_of_inputs(info: StoredTensor) -> bool:
    """Return whether a magnitude lies along the input axis; see algorithms/dora.py."""
    return info.name.endswith(dora.SHAPED) and len(info.shape) > 1 and info.shape[0] != prod(info.shape)
