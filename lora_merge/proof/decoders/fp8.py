"""fp8 numbers times scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..grids import Floats, Grid
from ..reference.floats import Array, decode
from .numbers import scales


def scaled_fp8(raw: Mapping[str, Any], encoding: Any, _: int, __: int) -> tuple[Array, Grid]:
    """Return fp8 numbers with one scale for the whole weight."""
    (scale,) = scales(raw["scale"], "F32")
    return decode(raw["codes"], encoding.dtype), Grid(Floats(encoding.dtype), float(scale))
