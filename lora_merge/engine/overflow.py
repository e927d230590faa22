"""Finite numbers that an output dtype has no room for: refused, or cut to its largest number and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

import torch
from torch import Tensor

from ..dtypes import COMPUTE_DTYPES, DTYPES
from ..errors import TooLarge
from .placement import FILE_DTYPES, ROOM, TORCH_DTYPES, beyond, cut, pieces

WIDER: Final = ("bf16", "fp32")
"""Values of `--dtype` that are recommended where another has no room, the narrowest first."""


def settle(name: str, source: Tensor, into: Tensor, *, saturate: bool) -> int:
    """Look at every number of a host tensor that was cast `into` another dtype: those without room there are cut.

    Returns how many. TooLarge, which names the tensor, unless `saturate`. NaN stays NaN, and infinite numbers stay
    infinite but in e4m3, which has none: there they are too large like others.
    """
    total = 0
    for old, new in pieces(source, into):
        over = beyond(old, into.dtype)
        count = int(over.sum())
        if count and not saturate:
            raise _too_large(name, old[over], into.dtype)
        if count:
            cut(old, new, over)
        total += count
    return total


def _too_large(name: str, values: Tensor, dtype: torch.dtype) -> TooLarge:
    largest = max(values.tolist(), key=abs)
    wider = next((option for option in WIDER if abs(largest) <= ROOM[TORCH_DTYPES[DTYPES[option]]]), "keep")
    return TooLarge(f"a number is too large for {_called(dtype)}: {largest:g}", name,
                    f"write --dtype {wider}, or --on-overflow saturate to cut such numbers to the largest")  # fmt: skip


def settled(under_way: Sequence[Future[Counter[str]]]) -> Counter[str]:
    """Tensor → numbers cut, of all of them. Waits for all, also if one fails: the memory must be at rest before anyone
    uses it again."""
    wait(under_way)
    found: Counter[str] = Counter()
    for done in under_way:
        found += done.result()
    return found


def sum_too_large(name: str, dtype: torch.dtype) -> TooLarge:
    """The error for a merged tensor whose sum overflowed in the compute dtype: what it should be is not known."""
    wider = {torch.float16: "fp32", torch.float64: ""}.get(dtype, "fp64")
    fix = f"write --compute-dtype {wider}, or lower the strength" if wider else "lower the strength"
    return TooLarge(f"a merged value is too large for {_called(dtype)}, the compute dtype", name, fix)


def _called(dtype: torch.dtype) -> str:
    """The dtype as options call it."""
    names = {stored: option for option, stored in (DTYPES | COMPUTE_DTYPES).items()}
    return names[FILE_DTYPES[dtype]]
