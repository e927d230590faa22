"""A conversion that gives the stored factors other names and changes no number of them. No torch: its import alone
takes longer than all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

import numpy as np

from ..disk.draft import Draft
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import TABLE
from ..progress import Counting
from .conversion import Conversion
from .dialects import Dialect
from .groups import Filled, Place
from .job import FACTORS
from .module_tensors import Layer, StoredModule, waiting
from .output_file import Entry
from .parallel import side_by_side
from .rounding import WIDEN, Bytes, is_below, product, stored

AT_ONCE: Final = 2**28
"""Bytes of modules that are worked at at once."""


class ModuleFactors(NamedTuple):
    """The stored factors of one module."""

    place: Place
    up: StoredTensor
    down: StoredTensor
    rank: int
    scale: float  # α / rank


class Read(NamedTuple):
    """Their bytes, and ‖ΔW‖²; None where fp32 does not hold it."""

    up: Bytes
    down: Bytes
    squares: float | None


def all_factors(conversion: Conversion) -> list[ModuleFactors]:
    """Return the factors of all modules; [] unless all are written as they are, in a file and a dtype of numpy's."""
    modules, forms, to = conversion.modules, conversion.forms, conversion.to
    if to.folder or "up_bias" in to.endings or not all(form.renamed for form in forms):
        return []
    factors = [_factors(module) for module in modules]
    return factors if all(pair.up.dtype in WIDEN for pair in factors) else []


def _factors(module: Filled) -> ModuleFactors:
    """Return the factors of a module."""
    (share,) = module.shares
    patch = share.patch
    up, down = patch.module.slots["up"], patch.module.slots["down"]
    return ModuleFactors(module.place, up, down, patch.shapes["down"][0], patch.numbers["scale"])


def renamed(
    factors: Sequence[ModuleFactors], to: Dialect, reader: Reader, draft: Draft, begin: Counting
) -> list[StoredModule]:  # fmt: skip
    """Return the modules, whose bytes are in the draft; [] where a number is not finite, or too large or small for
    fp32."""
    count, copies = begin("make", sum(8 * prod(pair.place.view.shape) for pair in factors)), []

    def work(pair: ModuleFactors) -> Read:
        up, down = stored(reader, pair.up), stored(reader, pair.down)
        return Read(up, down, _squares(pair, up, down))

    for pair, read in zip(factors, side_by_side(factors, work, _nbytes, AT_ONCE), strict=True):
        if read.squares is None:
            return []
        ones, alpha = (1,) * (len(pair.place.view.shape) - 2), np.float32(pair.rank * pair.scale)
        rows = {
            to.endings["up"]: (pair.up.dtype, (prod(pair.up.shape) // pair.rank, pair.rank, *ones), read.up.data),
            to.endings["down"]: (pair.down.dtype, (pair.rank, *pair.place.view.shape[1:]), read.down.data),
            to.endings.get("alpha", ".alpha"): ("F32", (), memoryview(alpha.tobytes())),
        }
        entries = waiting({name: Entry(name, *row) for name, row in rows.items()}, draft)
        layer = Layer({}, FACTORS, pair.rank, pair.rank, pair.rank * pair.scale, read.squares, 0.0)
        copies.append(StoredModule(pair.place, entries, layer))
        count(8 * prod(pair.place.view.shape))
    return copies


def _nbytes(pair: ModuleFactors) -> int:
    return 3 * (pair.up.nbytes + pair.down.nbytes)  # as stored, and in fp32


def _squares(pair: ModuleFactors, up: Bytes, down: Bytes) -> float | None:
    """Return ‖ΔW‖² of factors; None where fp32 does not hold it, or where a number may not be finite."""
    left = WIDEN[pair.up.dtype](up).reshape(-1, pair.rank)
    right = WIDEN[pair.down.dtype](down).reshape(pair.rank, -1)
    with np.errstate(all="ignore"):
        columns, rows = left.T @ left, right @ right.T
        if not is_below(columns, TABLE[pair.up.dtype].largest) or not is_below(rows, TABLE[pair.down.dtype].largest):
            return None
        squares = product(columns, rows)
    return None if squares is None else squares * pair.scale**2
