"""The tensors of one module as they wait to be written: their bytes are in memory up to a bound, then in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...disk.spool import Heap
from ..layers import Layer
from ..places import Place
from ..run import waiting
from ..written import Entry
from .made import Made


@dataclass(frozen=True)
class Kept:
    """The stored tensors of one module by their ending, and the facts of its layer, which holds no tensors."""

    place: Place
    tensors: Mapping[str, Entry]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input


def kept(made: Made, heap: Heap) -> Kept:
    """Return a module whose bytes wait."""
    return Kept(made.place, waiting(made.tensors, heap), replace(made.layer, tensors={}), made.copied)
