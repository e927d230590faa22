"""Scales and codes in numpy, as the decoders share them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.floats import Array, decode


class BadPart(ValueError):
    """A scale that stands for no number."""


def scales(raw: Any, dtype: str) -> Array:
    """Return the scales as float64; BadPart unless all are positive."""
    found = decode(raw, dtype)
    if not (np.isfinite(found) & (found > 0)).all():
        raise BadPart("a scale is no positive number")
    return found
