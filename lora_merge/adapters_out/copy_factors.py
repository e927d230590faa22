"""A conversion that gives the stored factors other names and changes no number of them. No torch: its import alone
takes longer than all of this.

It is proven as every other conversion: the output is read as an adapter of the same base. Where its factors have the
bytes of the input's, it means the same change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from ..disk.draft import Draft
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import TABLE
from ..job import Adapter
from ..progress import Counting
from .conversion import Conversion
from .dialects import Dialect
from .groups import Filled, Place, Target, is_plain
from .job import FACTORS, AdapterJob
from .module_tensors import Layer, StoredModule, waiting
from .output_file import Entry
from .parallel import side_by_side
from .rounding import WIDEN, Bytes, is_below, product, stored
from .sources import Sources
from .without_base import same_base

AT_ONCE: Final = 2**28
"""Bytes of modules that are worked at at once."""


class Factors(NamedTuple):
    """The stored factors of one module."""

    place: Place
    up: StoredTensor
    down: StoredTensor
    rank: int
    scale: float  # α / rank


class Read(NamedTuple):
    """Their bytes, and ‖ΔW‖²; None where numpy in fp32 does not tell it."""

    up: Bytes
    down: Bytes
    squares: float | None


def all_factors(conversion: Conversion) -> list[Factors]:
    """Return the factors of all modules; [] unless all are written as they are, in a file and a dtype of numpy's."""
    modules, forms, to = conversion.modules, conversion.forms, conversion.to
    if to.folder or "up_bias" in to.endings or not all(form.renamed for form in forms):
        return []
    factors = [_factors(module) for module in modules]
    return factors if all(pair.up.dtype in WIDEN for pair in factors) else []


def _factors(module: Filled) -> Factors:
    """Return the factors of a module."""
    (share,) = module.shares
    patch = share.patch
    up, down = patch.module.slots["up"], patch.module.slots["down"]
    return Factors(module.place, up, down, patch.shapes["down"][0], patch.numbers["scale"])


def renamed(
    factors: Sequence[Factors], to: Dialect, reader: Reader, draft: Draft, begin: Counting
) -> list[StoredModule]:  # fmt: skip
    """Return the modules, whose bytes are in the draft; [] where a number is not finite, or too large or small for
    fp32."""
    count, copies = begin("make", sum(8 * prod(pair.place.view.shape) for pair in factors)), []

    def work(pair: Factors) -> Read:
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


def proven(
    sources: Sources, job: AdapterJob, reader: Reader, begin: Counting
) -> dict[str, Any] | None:  # fmt: skip
    """Return what is proven of the output, which is the job's only adapter: on every weight its factors have the bytes
    of the input's. None where they have not."""
    assert sources.inputs is not None, "a conversion has a base"
    again = same_base(sources.inputs, job)
    theirs = {t.key: t for t in again.targets}
    pairs = [same_factors(target, theirs.get(target.key)) for target in sources.targets]
    count = begin("prove", sum(new.nbytes for module in pairs for _, new in module))
    with Reader(again.indexes) as written:

        def work(module: Pairs) -> bool:
            return bool(module) and all(
                old.dtype == new.dtype and np.array_equal(stored(reader, old), stored(written, new))
                for old, new in module
            )

        for module, same in zip(pairs, side_by_side(pairs, work, _both, AT_ONCE), strict=True):
            if not same:
                return None
            count(sum(new.nbytes for _, new in module))
    return {"ok": True, "layers": len(pairs), "recomputed": len(pairs), "worst_residual": 0.0, "worst_layer": ""}


def claimed(job: AdapterJob, part: Any) -> AdapterJob:
    """Return the job with the output in place of its adapters."""
    return replace(job, inputs=replace(job.inputs, adapters=(Adapter(part),)))


Pairs = list[tuple[StoredTensor, StoredTensor]]
"""Tensors of an input and of an output that must be alike."""


def same_factors(target: Target, written: Target | None) -> Pairs:
    """Return the factors of a weight's change in the input and in the output, if these mean the same change where their
    bytes are alike: one pair of factors each with one scale. [] otherwise."""
    if written is None or target.values or written.values or len(target.uses) != 1 or len(written.uses) != 1:
        return []
    (use,), (again,) = target.uses, written.uses
    old, new = use.patch, again.patch
    facts = [
        (u.patch.algorithm, u.patch.numbers, u.patch.magnitude, u.piece, u.start, u.strength) for u in (use, again)
    ]
    if not is_plain(old) or not is_plain(new) or facts[0] != facts[1] or old.view != new.view:
        return []
    return [(old.module.slots[slot], new.module.slots[slot]) for slot in ("up", "down")]


def _nbytes(pair: Factors) -> int:
    return 3 * (pair.up.nbytes + pair.down.nbytes)  # as stored, and in fp32


def _both(pairs: Pairs) -> int:
    return 2 * sum(new.nbytes for _, new in pairs)


def _squares(pair: Factors, up: Bytes, down: Bytes) -> float | None:
    """Return ‖ΔW‖² of factors; None where fp32 does not tell it, or where a number may not be finite."""
    left = WIDEN[pair.up.dtype](up).reshape(-1, pair.rank)
    right = WIDEN[pair.down.dtype](down).reshape(pair.rank, -1)
    with np.errstate(all="ignore"):
        columns, rows = left.T @ left, right @ right.T
        if not is_below(columns, TABLE[pair.up.dtype].largest) or not is_below(rows, TABLE[pair.down.dtype].largest):
            return None
        squares = product(columns, rows)
    return None if squares is None else squares * pair.scale**2
