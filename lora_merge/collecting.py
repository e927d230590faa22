"""Garbage collection in the processes of our own."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Plans of 300 000 tensors have millions of objects, all of them in use: to look through them is time lost."""
    gc.set_threshold(10_000, 20, 50)
