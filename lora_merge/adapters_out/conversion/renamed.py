"""A conversion that gives the stored factors other names and changes no number of them. No torch: its import alone
takes longer than all of this.

It is proven as every other conversion: the output is read as an adapter of the same base. Where its factors have the
bytes of the input's, it means the same change.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isfinite, prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...adapter_options import KEEP
from ...disk.draft import Draft
from ...disk.files import StoredTensor
from ...disk.reader import Reader
from ...job import Adapter
from ...progress import Counting
from ...proof.reference.one_core import one_core
from ..dialects import Dialect
from ..job import FACTORS, AdapterJob
from ..joining.targets import Target, is_plain
from ..outcome.layer import Kept, Layer
from ..places import Filled, Place
from ..sources import Sources
from ..truncation.effect import LARGE, SMALL
from ..written import Entry
from .assumed import same_base
from .planned import written_dtype

OF_HALF: Final = np.int32(-0x70002000)
"""The bits of fp32 that an exponent of five bits, ten bits of a significand and a sign take."""

INFINITE: Final = 2.0**16
"""What infinity of fp16 becomes; NaN becomes more."""

AT_ONCE: Final = 8
"""Modules that are in memory at once, for each core."""

CANCELS: Final = 1e-2
"""The share of the squares of all columns from which on the square of their sum has digits enough in fp32."""

Matrix = npt.NDArray[np.float32]


class Factors(NamedTuple):
    """The stored factors of one module."""

    place: Place
    up: StoredTensor
    down: StoredTensor
    rank: int
    scale: float  # α / rank


class Read(NamedTuple):
    """Their bytes, and ‖ΔW‖²; None where numpy in fp32 does not tell it."""

    up: bytearray
    down: bytearray
    squares: float | None


def all_factors(there: Sequence[Filled], to: Dialect, job: AdapterJob) -> list[Factors]:
    """Return the factors of all modules; [] unless all of them are written as they are."""
    plain = job.algorithm == job.alpha == KEEP and to.alpha and not to.folder
    found = [_factors(one, to, job) for one in there] if plain else []
    return [one for one in found if one is not None] if None not in found else []


def _factors(one: Filled, to: Dialect, job: AdapterJob) -> Factors | None:
    """Return the factors of a module; None where a number of them or α has to change."""
    place = one.place
    if one.value is not None or place.vector or len(one.shares) != 1 or "up_bias" in to.endings:
        return None
    (share,) = one.shares
    patch, scale = share.patch, share.patch.numbers.get("scale", 0.0)
    if patch.algorithm != FACTORS or not is_plain(patch) or patch.magnitude is not None or not scale:
        return None
    if share.strength != 1 or not share.is_all(place):
        return None
    up, down, rank = patch.module.slots["up"], patch.module.slots["down"], patch.shapes["down"][0]
    dtype = written_dtype(job, one.shares)
    known = {up.dtype, down.dtype} == {dtype} and dtype in WIDEN
    return Factors(place, up, down, rank, scale) if known and 0 < rank <= min(place.view.matrix) else None


def renamed(
    factors: Sequence[Factors], to: Dialect, reader: Reader, draft: Draft, begin: Counting
) -> list[Kept]:  # fmt: skip
    """Return the modules, whose bytes are in the draft; [] where a number is not finite, or too large or small for
    fp32."""
    told, found = begin("make", sum(8 * prod(one.place.view.shape) for one in factors)), []

    def work(one: Factors) -> Read:
        up, down = (reader.read(info) for info in (one.up, one.down))
        return Read(up, down, _squares(one, up, down))

    for one, read in zip(factors, _side_by_side(factors, work), strict=True):
        if read.squares is None:
            return []
        ones, alpha = (1,) * (len(one.place.view.shape) - 2), np.float32(one.rank * one.scale)
        rows = {
            to.endings["up"]: (one.up.dtype, (prod(one.up.shape) // one.rank, one.rank, *ones), memoryview(read.up)),
            to.endings["down"]: (one.down.dtype, (one.rank, *one.place.view.shape[1:]), memoryview(read.down)),
            to.endings.get("alpha", ".alpha"): ("F32", (), memoryview(alpha.tobytes())),
        }
        entries = {
            name: Entry(name, dtype, shape, draft.put(data)) for name, (dtype, shape, data) in sorted(rows.items())
        }
        layer = Layer({}, FACTORS, one.rank, one.rank, one.rank * one.scale, read.squares, 0.0)
        found.append(Kept(one.place, entries, layer))
        told(8 * prod(one.place.view.shape))
    return found


def proven(
    sources: Sources, job: AdapterJob, reader: Reader, begin: Counting
) -> dict[str, Any] | None:  # fmt: skip
    """Return what is proven of the output, which is the job's only adapter: on every weight its factors have the bytes
    of the input's. None where they have not."""
    assert sources.inputs is not None, "a conversion has a base"
    again = same_base(sources.inputs, job)
    theirs = {t.key: t for t in again.targets}
    pairs = [same_factors(target, theirs.get(target.key)) for target in sources.targets]
    told = begin("prove", sum(new.nbytes for own in pairs for _, new in own))
    with Reader(again.indexes) as written:

        def work(own: Pairs) -> bool:
            return bool(own) and all(
                old.dtype == new.dtype and old.nbytes == new.nbytes and reader.read(old) == written.read(new)
                for old, new in own
            )

        for own, same in zip(pairs, _side_by_side(pairs, work), strict=True):
            if not same:
                return None
            told(sum(new.nbytes for _, new in own))
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
    patch, made = use.patch, again.patch
    facts = [
        (u.patch.algorithm, u.patch.numbers, u.patch.magnitude, u.piece, u.start, u.strength) for u in (use, again)
    ]
    if not is_plain(patch) or not is_plain(made) or facts[0] != facts[1] or patch.view != made.view:
        return []
    return [(patch.module.slots[slot], made.module.slots[slot]) for slot in ("up", "down")]


def _side_by_side(tasks: Sequence[Any], work: Any) -> Iterator[Any]:
    """Yield the results in the order of the tasks, some of which are worked at at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with one_core(), ThreadPoolExecutor(cores) as pool:
        waiting = deque(pool.submit(work, task) for task in tasks[: AT_ONCE * cores])
        for task in tasks[AT_ONCE * cores :]:
            yield waiting.popleft().result()
            waiting.append(pool.submit(work, task))
        yield from (one.result() for one in waiting)


def _squares(one: Factors, up: bytearray, down: bytearray) -> float | None:
    """Return ‖ΔW‖² of factors in fp32 with sums in fp64; None where a number is not finite, or fp32 does not do."""
    left = WIDEN[one.up.dtype](up).reshape(-1, one.rank)
    right = WIDEN[one.down.dtype](down).reshape(one.rank, -1)
    with np.errstate(all="ignore"):
        columns, rows = left.T @ left, right @ right.T
        every = one.scale**2 * float(np.vdot(columns.diagonal().astype(np.float64), rows.diagonal()))
        found = one.scale**2 * float(np.einsum("ij,ij->", columns, rows, dtype=np.float64))
    for numbers, products, info in ((left, columns, one.up), (right, rows, one.down)):
        largest = np.abs(numbers).max() if info.dtype == "F16" and products.diagonal().max() >= INFINITE**2 else 0.0
        if largest >= INFINITE:
            return None
    return found if isfinite(every) and SMALL < found < LARGE and found > CANCELS * every else None


def _of_half(raw: bytearray) -> Matrix:
    """Return numbers of fp16 in fp32, in a seventh of numpy's time: the bits are moved, and the exponent is corrected
    by a product, which is exact for subnormals too. Infinity and NaN become numbers from 65536 on."""
    bits = np.frombuffer(raw, np.int16).astype(np.int32)
    bits <<= 13
    bits &= OF_HALF  # without the copies of the sign
    numbers: Matrix = bits.view(np.float32)
    numbers *= np.float32(2.0**112)
    return numbers


def _of_bfloat(raw: bytearray) -> Matrix:
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _of_single(raw: bytearray) -> Matrix:
    return np.frombuffer(raw, np.float32)


WIDEN: Final = {"F16": _of_half, "BF16": _of_bfloat, "F32": _of_single}
"""dtype → function that returns stored numbers in fp32."""
