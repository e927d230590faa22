"""A second decoder for every codec, in numpy: bytes → levels, and the grid that gives their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ..grids import Grid
from ..reference.floats import Array
from .fp8 import scaled_fp8
from .numbers import BadPart

DECODERS: Final[Mapping[str, Callable[[Mapping[str, Any], Any, int, int], tuple[Array, Grid]]]] = MappingProxyType({
    "fp8_scaled": scaled_fp8,
})  # fmt: skip
"""Codec → function (bytes by role, encoding, first number, count) → (levels, grid), flat."""

__all__ = ["DECODERS", "BadPart"]
