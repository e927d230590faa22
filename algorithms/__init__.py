"""The table of merge algorithms: one row each, every one on this screen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

if __name__ == "algorithms":
    raise ImportError("import lora_merge.algorithms, not algorithms")

from .base import Algorithm, DoesNotFit, Shape, Shapes, flat
from .full import FULL, SET
from .glora import GLORA, GLORA_OLD
from .loha import LOHA
from .lora import LORA

ALGORITHMS: Final[Mapping[str, Algorithm]] = MappingProxyType(
    {a.name: a for a in (LORA, LOHA, GLORA, GLORA_OLD, FULL, SET)}
)
"""The plan takes the first row whose slots and shapes fit."""

__all__ = ["ALGORITHMS", "Algorithm", "DoesNotFit", "Shape", "Shapes", "flat"]
