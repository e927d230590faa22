"""Measures tensors that an adapter stores whole: V takes the place of the base's W, and V − W is the change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm, prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...dtypes import FLOATS
from ...files.checkpoint import Index
from ...matching.patch import Match
from ...measure import Measure, Measured, Share
from ...models.weights import Weight, unstored
from ...planning.plan import OutputTensor
from ..placement import HOST, TORCH_DTYPES, stage
from ..tensors import Fetch, decoded, stored_numbers
from .placement import as_stored

LEAST: Final = 2**16
"""A tensor of so many numbers is read whole; of a larger one at least so many are read."""

EVERY: Final = 1024
"""About one number in so many of a large tensor is read, from the base and from the adapter."""

RUN: Final = 2**12
"""Numbers that are read at once from a large tensor."""

PART: Final = 2**20
"""Numbers that are read at once where all are wanted."""


class Replaced(NamedTuple):
    """An output tensor that is an adapter's own, and what the base has in its place."""

    target: OutputTensor
    own: Weight  # of the base; all padding where it has nothing
    adapter: int


def replaced(targets: Iterable[OutputTensor], base: Index, matched: Sequence[Match]) -> Iterator[Replaced]:
    """Yield the targets that are tensors of adapters, and that no formula changes besides. Whole numbers are positions
    and counts, whose sizes say nothing."""
    owners: dict[str, int] = {}
    for number, one in enumerate(matched):
        owners |= dict.fromkeys((*one.replaced, *one.bases), number)
    if not owners:
        return
    started = {key: info for one in matched for key, info in one.separated.items()}
    for target in targets:
        adapter, new = owners.get(target.name), target.weight.stored
        if adapter is None or target.uses or new.dtype not in FLOATS:
            continue
        info = base.tensors.get(target.name) or started.get(target.name)
        own = unstored(target.name, target.shape, new)
        if info is not None:
            own = Weight(info.shape, info, base.packed.get(info.name))
        if own.packed is not None or own.stored.dtype in FLOATS:
            yield Replaced(target, own, adapter)


def replaced_measures(every: Iterable[Replaced], read: Fetch) -> Iterator[Measured]:
    """Yield the measure of each tensor, of all its numbers or of runs of them that lie evenly in it."""
    for one in every:
        yield Measured(one.target.name, measure(one, read))


def measure(one: Replaced, read: Fetch, every: int = EVERY) -> Measure:
    """Return the measure of a tensor. `every`: of a large one, one number in about so many is read; 1: all of them.

    Tensors may have other numbers of rows: rows that the base lacks are zeros there, as in weights that an adapter
    makes larger. What codes hold of the change is not known.
    """
    found = Measure()
    for first, some in runs(one, every):
        found += _sums(one, values(one.own, first, some, read), values(one.target.weight, first, some, read))
    return found.scaled(prod(one.target.shape))


def runs(one: Replaced, every: int = EVERY) -> Iterator[tuple[int, int]]:
    """Yield (first number, count) of the runs of a tensor that are read, as for `measure`."""
    count, weight, group = prod(one.target.shape), one.own, 1
    if weight.packed is not None:  # whole rows are decoded together
        group = lcm(weight.packing.encoding.group, max(prod(weight.shape[1:]), 1))
    size = -(-(PART if every == 1 else RUN) // group) * group
    whole, wanted = -(-count // size), -(-max(LEAST, count // every) // size)
    for number in range(0, whole, 1 if every == 1 else max(whole // wanted, 1)):
        yield number * size, min(size, count - number * size)


def values(weight: Weight, first: int, count: int, read: Fetch) -> Tensor:
    """Return numbers of a weight from `first` on, in fp64; zeros behind those that are stored."""
    found = torch.zeros(count, dtype=HOST.dtype)
    if (held := min(count, prod(weight.shape if weight.packed else weight.stored.shape) - first)) > 0:
        own = decoded(stored_numbers(weight, first, held, read), weight, first, held, read)
        found[:held] = stage([own.reshape(-1)], HOST)[0]
    return found


def _sums(one: Replaced, before: Tensor, after: Tensor) -> Measure:
    """Return the sums over some numbers; those that are not finite are left out."""
    change = applied = after - before
    if known := one.target.packed is None:
        dtype = TORCH_DTYPES[one.target.dtype]
        applied = as_stored(after, dtype) - as_stored(before, dtype)
    sound = change.isfinite() & applied.isfinite()
    change, applied, weight = change[sound], applied[sound], before[sound]
    size = float(change @ change)
    whole = Share(size, size, float(applied @ change) if known else None)
    return Measure(
        of=before.numel(), elements=before.numel(), changed=int(applied.count_nonzero()),
        weight=float(weight @ weight), noise=float((applied - change).square().sum()) if known else 0.0,
        largest=float(change.abs().max()) if change.numel() else 0.0, all=whole, adapters={one.adapter: whole},
    )  # fmt: skip
