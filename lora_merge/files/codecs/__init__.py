"""Codecs: the ways in which files store the numbers of a weight, one module each. torch is imported in functions."""

from __future__ import annotations

from typing import Final

from .fp8_scaled import FP8_SCALED

CODECS: Final = (FP8_SCALED,)
"""All codecs except `PLAIN`, which applies to every tensor that no other codec claims."""
