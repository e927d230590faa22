"""Differences of the tensors of two models of any layouts: names of the second are looked up in the first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf, isfinite, prod, sqrt
from typing import Any, Final

import torch
from torch import Tensor

from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, StoredTensor
from ..engine.devices import one_core, place
from ..engine.tensor_moves import stage
from ..engine.tensors import TensorCache, view_bytes, weight_values
from ..errors import AmbiguousName
from ..files.checkpoint import Index
from ..models.names import Names
from ..models.weights import Weight, WeightView
from ..proof.weights import within_rounding
from .hashes import READ_BYTES
from .pictures import HISTOGRAM_ROWS, SPECTRUM_VALUES, histogram, matrix_pictures

WINDOWS: Final = 8  # parts of a quantised tensor whose rounding is judged
WINDOW_VALUES: Final = 1 << 12  # values of such a part
ROUNDED_SHARE: Final = 0.98
"""The least share of values within half a step of their quantised values: scales that are searched for the least error
cut off the largest values of some groups. Of a merge that is quantised anew more values are further away."""

COMPARED_VALUES: Final = 1 << 17  # values that are compared at once, which a core's cache holds
AT_ONCE: Final = 4  # tensors, also on fewer cores: some wait for the disk; quantised and renamed ones are read whole
NARROW_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
FAST_PLACE: Final = place("cpu", "F32")
EXACT_PLACE: Final = place("cpu", "F64")


@dataclass
class DifferenceSums:
    """Sums over values of two tensors, or of several."""

    of: int = 0  # values
    changed: int = 0
    a: float = 0.0  # sum of squares of A
    b_less_a: float = 0.0
    largest: float = 0.0
    beyond_rounding: bool = False  # whether two values are known to be more than one step of the coarser dtype apart

    @property
    def equal(self) -> bool:
        """Whether no number differs."""
        return not self.changed

    @property
    def rounded(self) -> bool:
        """Whether values differ, but by no more than the rounding to a coarser format explains."""
        return self.changed > 0 and not self.beyond_rounding

    def add(self, other: DifferenceSums) -> None:
        """Add the sums of other values."""
        self.of, self.changed, self.a = self.of + other.of, self.changed + other.changed, self.a + other.a
        self.b_less_a, self.largest = self.b_less_a + other.b_less_a, max(self.largest, other.largest)
        self.beyond_rounding |= other.beyond_rounding

    def to_dict(self) -> dict[str, Any]:
        """Return counts, ‖B−A‖, ‖A‖, their ratio, and the largest difference of two values."""
        return {
            "of": self.of, "changed": self.changed, "difference": sqrt(self.b_less_a), "norm": sqrt(self.a),
            "relative": sqrt(self.b_less_a / self.a) if self.a else None, "largest": self.largest,
        }  # fmt: skip


@dataclass(frozen=True)
class TensorPair:
    """One tensor of B next to its counterpart in A."""

    name: str  # in B
    keys: tuple[str, ...] = ()  # in A; none where A has no counterpart
    why: str = ""  # why the two cannot be compared
    sums: DifferenceSums = field(default_factory=DifferenceSums)


def differences(a: Index, b: Index, lookup: Names) -> Iterator[TensorPair]:
    """Yield every tensor of B with its difference from A; `lookup` are the names of A."""
    infos = [*b.parameters.values()]
    pairs = [counterpart(a, info, lookup) for info in infos]
    with Reader([a, b]) as reader:
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="compare", initializer=one_core)
        try:
            yield from pool.map(_Pair(a, b, lookup, reader).compared, infos, pairs)
        finally:
            pool.shutdown(cancel_futures=True)


def counterpart(a: Index, info: StoredTensor, names: Names) -> tuple[TensorPair, WeightView | None]:
    """Return a tensor of B without its difference from A, and the rows of A if they have its name in other words."""
    if (same := a.tensors.get(info.name)) is not None:
        why = "" if same.shape == info.shape else f"{list(same.shape)} and {list(info.shape)}"
        return TensorPair(info.name, (same.name,), why), None
    module, _, parameter = info.name.rpartition(".")
    try:
        view = names.find(module, parameter)
    except AmbiguousName:
        view = None
    if view is None or any(piece.key not in a.tensors for piece in view.row_slices):
        return TensorPair(info.name), None
    why = "" if prod(info.shape) == prod(view.shape) else f"{list(view.shape)} and {list(info.shape)}"
    return TensorPair(info.name, tuple(piece.key for piece in view.row_slices), why), view


def comparable(a: Index, b: Index, lookup: Names) -> bool:
    """Return whether values of any tensor can be compared; else two layouts differ, which their headers show."""
    pairs = (counterpart(a, info, lookup)[0] for info in b.parameters.values())
    return any(pair.keys and not pair.why for pair in pairs)


def difference_pictures(
    a: Index, b: Index, lookup: Names, chosen: frozenset[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield some tensors of B, each with `spectrum` and `histogram` of its difference from A. Of tensors of more than
    SPECTRUM_VALUES values only some rows are read, and quantised ones of that size have none."""
    with Reader([a, b]) as reader, torch.no_grad():
        pair = _Pair(a, b, lookup, reader)
        for info in (b.tensors[name] for name in chosen):
            yield info.name, pair.pictures(info)


@dataclass(frozen=True)
class _Pair:
    """Two open models."""

    a: Index
    b: Index
    names: Names  # of A
    reader: Reader

    @torch.no_grad()
    def compared(self, info: StoredTensor, match: tuple[TensorPair, WeightView | None]) -> TensorPair:
        """Return a tensor of B, with what `counterpart` returned for it, with its difference from A."""
        pair, view = match
        if pair.why or not pair.keys:
            return pair
        if view is None:
            return replace(pair, sums=self._sums(self.a.tensors[info.name], info))
        return replace(pair, sums=_of_values(self._rows(view), self._whole(self.b, info).reshape(-1)))

    def pictures(self, info: StoredTensor) -> dict[str, Any]:
        """Return the pictures of the difference of a tensor of B from its counterpart in A."""
        same = self.a.tensors.get(info.name)
        if prod(info.shape) <= SPECTRUM_VALUES:
            whole = self._whole(self.b, info).float()
            if same is not None:
                return matrix_pictures(whole - self._whole(self.a, same).float())
            view = self.names.find(*info.name.rpartition(".")[::2])
            return {} if view is None else matrix_pictures(whole - self._rows(view).float().reshape(whole.shape))
        plain = same is not None and same.name not in self.a.packed and info.name not in self.b.packed
        if same is None or not plain or not {same.dtype, info.dtype} <= FLOATS:
            return {}
        length = prod(info.shape[1:])
        rows = [
            self._row(info, n, length) - self._row(same, n, length)
            for n in range(0, info.shape[0], -(-info.shape[0] // HISTOGRAM_ROWS))
        ]
        return histogram(torch.stack(rows)) if bool(torch.isfinite(torch.stack(rows)).all()) else {}

    def _row(self, info: StoredTensor, number: int, length: int) -> Tensor:
        wide = ITEM_BYTES[info.dtype]
        raw = self.reader.read(info, number * length * wide, length * wide)
        return view_bytes(memoryview(raw), info.dtype, (length,)).float()

    def _rows(self, view: WeightView) -> Tensor:
        """Return the values of a view of A, flat."""
        parts = []
        for piece, _ in view.addresses():
            rows = self._whole(self.a, self.a.tensors[piece.key]).reshape(-1, piece.cols)[piece.start : piece.stop]
            parts.append((rows[:, piece.across].t() if piece.transposed else rows).reshape(-1))
        return torch.cat(parts)

    def _whole(self, index: Index, info: StoredTensor) -> Tensor:
        return weight_values(
            Weight(info.shape, info, index.packed.get(info.name)), TensorCache(self.reader, frozenset()).fetch
        )

    def _sums(self, same: StoredTensor, info: StoredTensor) -> DifferenceSums:
        """Return the sums of two tensors of one shape; plain ones are read in pieces."""
        packed = same.name in self.a.packed or info.name in self.b.packed
        if packed or not {same.dtype, info.dtype} <= FLOATS:
            first, other = self._whole(self.a, same).reshape(-1), self._whole(self.b, info).reshape(-1)
            sums = _of_values(first, other, rounding=not packed)
            if packed:
                sums.beyond_rounding = not self._quantised_alike(same, info, first, other)
            sized = packed or {same.dtype, info.dtype} & FLOATS  # the sizes of positions and counts mean nothing
            return sums if sized else DifferenceSums(sums.of, sums.changed)
        return plain_sums(same, info, self.reader)

    def _quantised_alike(self, a: StoredTensor, b: StoredTensor, first: Tensor, other: Tensor) -> bool:
        """Return whether the values of two tensors differ by no more than the rounding to their formats, in windows of
        consecutive values."""
        within = of = 0
        count = first.numel()
        for low in range(0, count, max(-(-count // WINDOWS), 1)):
            high = min(low + WINDOW_VALUES, count)
            sides = [(index, info, _wide(values[low:high]).numpy())
                     for index, info, values in ((self.a, a, first), (self.b, b, other))]  # fmt: skip
            within, of = within + within_rounding(self.reader, sides, low, high), of + high - low
        return within >= ROUNDED_SHARE * of


def plain_sums(a: StoredTensor, b: StoredTensor, reader: Reader) -> DifferenceSums:
    """Return the sums of two tensors of one shape, which are read in pieces: plain values, at least 8 bits wide."""
    both = a, b
    wide = [ITEM_BYTES[t.dtype] for t in both]
    step, count, total = READ_BYTES // max(wide), prod(a.shape), DifferenceSums()
    for first in range(0, count, step):
        some = min(step, count - first)
        raw = [reader.read(t, first * w, some * w) for t, w in zip(both, wide, strict=True)]
        pair = [view_bytes(memoryview(r), t.dtype, (some,)) for r, t in zip(raw, both, strict=True)]
        if a.dtype == b.dtype and raw[0] == raw[1]:
            total.add(DifferenceSums(some, 0, _norm_squared(pair[0])))
        else:
            total.add(_of_values(*pair, rounding=not total.beyond_rounding))
    return total if {a.dtype, b.dtype} & FLOATS else DifferenceSums(total.of, total.changed)


def _of_values(a: Tensor, b: Tensor, *, rounding: bool = True) -> DifferenceSums:
    """Return the sums for two flat tensors; two NaN are equal. `rounding`: also whether any two values are more than
    one step of the coarser dtype apart."""
    total = DifferenceSums()
    for first, other in zip(torch.split(a, COMPARED_VALUES), torch.split(b, COMPARED_VALUES), strict=True):
        fast = _in_float32(first, other, rounding=rounding and not total.beyond_rounding)
        total.add(fast or _in_float64(first, other, rounding=rounding))
    return total


def _in_float32(a: Tensor, b: Tensor, *, rounding: bool) -> DifferenceSums | None:
    """Return the sums for a few values of 32 bits or fewer; None if some are not finite, or for wider ones."""
    if not {a.dtype, b.dtype} <= NARROW_DTYPES:
        return None
    first, other = stage([a], FAST_PLACE)[0], stage([b], FAST_PLACE)[0]
    apart = torch.sub(other, first)
    of_a, squares, changed = _sum_of_squares(first), _sum_of_squares(apart), int(apart.count_nonzero())
    if not (isfinite(of_a) and isfinite(squares)):
        return None
    low, high = apart.aminmax()
    beyond = rounding and changed > 0 and _beyond(apart, first, a.dtype, b.dtype)
    return DifferenceSums(a.numel(), changed, of_a, squares, max(-float(low), float(high)), beyond)


def _beyond(apart: Tensor, values: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether differences from some values are more than one step of the coarser dtype; both are overwritten."""
    if not all(dtype.is_floating_point for dtype in dtypes):
        return True
    facts = max(map(torch.finfo, dtypes), key=lambda f: f.eps)
    steps = values.abs_().mul_(facts.eps).clamp_min_(facts.smallest_normal * facts.eps)
    return bool((apart.abs_() > steps).any())


def _in_float64(a: Tensor, b: Tensor, *, rounding: bool) -> DifferenceSums:
    first, other = _wide(a), _wide(b)
    apart = other - first
    different = (first != other) & ~(first.isnan() & other.isnan())
    finite = apart[different & apart.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    sums = DifferenceSums(first.numel(), int(different.sum()), _squared(first), _squared(finite), largest)
    sums.beyond_rounding = (
        rounding and sums.changed > 0 and _beyond(apart[different], first[different], a.dtype, b.dtype)
    )
    return sums


def _wide(values: Tensor) -> Tensor:
    """Return the values in float64: float32 would not show the last bit of an integer."""
    return stage([values], EXACT_PLACE)[0]


def _norm_squared(values: Tensor) -> float:
    """Return Σ a² of the finite values of a flat tensor."""
    total = 0.0
    for piece in torch.split(values, COMPARED_VALUES):
        narrow = stage([piece], FAST_PLACE)[0] if piece.dtype in NARROW_DTYPES else None
        squares = inf if narrow is None else _sum_of_squares(narrow)
        total += squares if isfinite(squares) else _squared(_wide(piece))
    return total


def _sum_of_squares(values: Tensor) -> float:
    """Return Σ x² of flat float32 values, added up in float64."""
    wide = stage([values], EXACT_PLACE)[0]
    return float(wide @ wide)


def _squared(values: Tensor) -> float:
    return float(values[values.isfinite()].square().sum())
