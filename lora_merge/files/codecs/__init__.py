"""Codecs: how the numbers of a weight are stored, one file for each way. Headers only, torch inside functions."""

from __future__ import annotations

from typing import Final

from .fp8_scaled import FP8_SCALED

CODECS: Final = (FP8_SCALED,)
"""All but the plain one, which every tensor is that none of them claims. A new way to store weights is a row."""
