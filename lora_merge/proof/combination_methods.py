"""The methods that make one change of several, a second time: numpy in float64, no code of engine/combination.py.

Every method is written as Δ = Σ partsᵢ, one part for each adapter. If two computations in float64 may decide
otherwise, because two magnitudes or a sum and zero differ by rounding alone, the slack of an entry says by how much the
result then differs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np

from ..merge_methods import MergeMethod, MethodParameters
from ..planning.plan import OutputTensor
from .patch_rows import PatchRows, costs_all
from .reference.floats import Array

MAGNITUDE_TOLERANCE: Final = 1e-12
"""Magnitudes that differ by less, as a share of the largest one, may be in the other order after other rounding."""

ENTRIES_AT_ONCE: Final = 2**22
"""Values of a change that are computed at once."""

KARCHER_STEPS: Final = 100
"""The most steps of the Karcher mean."""


@dataclass(frozen=True)
class ReferenceRows:
    """A matrix [out, cols] in float64. Its rows are always computed in the same blocks, as sums may round otherwise in
    others."""

    shape: tuple[int, int]
    read: Callable[[Array], Array]
    """Function of the values of some rows that returns them in new memory."""
    step: int
    """Rows of a block."""

    @staticmethod
    def of(whole: Array) -> ReferenceRows:
        """Return a matrix that is in memory."""
        return ReferenceRows((whole.shape[0], whole.shape[1]), lambda rows: whole[rows], max(1, len(whole)))

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Yield all rows in order."""
        for first in range(0, self.shape[0], self.step):
            rows = slice(first, min(first + self.step, self.shape[0]))
            yield rows, self.read(np.arange(rows.start, rows.stop))

    def at(self, rows: Array) -> Array:
        """Return some rows, in new memory."""
        values = np.empty((len(rows), self.shape[1]))
        for number in np.unique(rows // self.step):
            first = int(number) * self.step
            block = self.read(np.arange(first, min(first + self.step, self.shape[0])))
            here = rows // self.step == number
            values[here] = block[rows[here] - first]
        return values

    def flat(self, of: Callable[[Array], Array]) -> Array:
        """Return all values in order, or what a function makes of them."""
        values = np.empty(self.shape[0] * self.shape[1])
        for rows, block in self.blocks():
            values[rows.start * self.shape[1] : rows.stop * self.shape[1]] = of(block).ravel()
        return values

    @cached_property
    def largest(self) -> float:
        """The largest magnitude; 0 if there is no number."""
        return max((float(np.abs(block).max(initial=0.0)) for _, block in self.blocks()), default=0.0)


@dataclass(frozen=True)
class CombinedChange:
    """Rows of Δ as one part for each adapter, and by how much rounding may change each entry."""

    parts: dict[int, Array]
    slack: Array

    @property
    def total(self) -> Array:
        """Δ itself."""
        return np.asarray(np.sum([*self.parts.values()], axis=0))


def of_weight(
    target: OutputTensor, patch_rows: Sequence[PatchRows], rows: Array, change: Callable[[PatchRows, Array], Array]
) -> CombinedChange:
    """Return rows of Δ of a weight by the method of its job. `change`: returns s ΔW of one part on some rows."""
    how, by = target.combination, dict[int, list[PatchRows]]()
    for part in patch_rows:
        by.setdefault(part.patch.adapter, []).append(part)

    (out, cols), whole = target.matrix, any(costs_all(u) for u in target.uses)
    step = max(1, out if whole else ENTRIES_AT_ONCE // max(cols, 1))

    def read(parts: Sequence[PatchRows], some: Array) -> Array:
        return np.asarray(np.sum([change(p, some) for p in parts], axis=0) / parts[0].strength)

    strengths = [parts[0].strength for parts in by.values()]
    seeds = [how.seed(n, [u for u in target.uses if u.patch.adapter == n]) for n in by]
    changes = [ReferenceRows((out, cols), partial(read, parts), step) for parts in by.values()]
    parts, slack = combined(
        how.method, changes, strengths, how.parameters, seeds, rows=rows, vector=len(target.shape) < 2
    )
    return CombinedChange(dict(zip(by, parts, strict=True)), slack)


def combined(  # noqa: PLR0913  # the method, its inputs and its numbers
    method: MergeMethod, changes: Sequence[ReferenceRows], strengths: Sequence[float], n: MethodParameters,
    seeds: Sequence[str], *,
    rows: Array, vector: bool,
) -> tuple[list[Array], Array]:  # fmt: skip
    """Return the parts and the slack of rows of Δ from τᵢ [out, cols] at strength 1.

    `vector`: for biases and norms, which slerp and karcher add.
    """
    if method.weighs:
        return _weighted(method, changes, strengths, n, rows, added=vector)
    # What each adapter's method keeps of its change.
    scaled: list[Array] = []
    slack: Array = np.zeros(())
    for change, strength, seed in zip(changes, strengths, seeds, strict=True):
        if vector:  # della ranks within rows: a vector is one
            line = ReferenceRows.of(change.flat(np.asarray).reshape(1, -1))
            factor, unsure = (f.reshape(change.shape)[rows] for f in _factors(method, line, n, seed, np.arange(1)))
        else:
            factor, unsure = _factors(method, change, n, seed, rows)
        scaled.append(strength * change.at(rows))
        slack = slack + np.where(unsure, np.abs(scaled[-1]) * max(1.0, float(factor.max(initial=1.0))), 0.0)
        scaled[-1] *= factor
    # What the changes of all adapters keep of each other.
    if method.elects or method.agrees:
        slack = 2 * slack + _doubtful(scaled, slack > 0)
    if method.elects:
        _elect(scaled, strengths, n)
    elif method.agrees:
        needed = len(scaled) if n.agree is None else n.agree
        up, down = (sum(s > 0 for s in some) for some in (scaled, [-s for s in scaled]))
        for s in scaled:
            s[np.maximum(up, down) < needed] = 0.0
    for s in scaled:
        s *= n.scale
    return scaled, abs(n.scale) * slack


def _weighted(  # noqa: PLR0913  # the method, its inputs and its numbers
    method: MergeMethod,
    changes: Sequence[ReferenceRows],
    strengths: Sequence[float],
    n: MethodParameters,
    rows: Array,
    *,
    added: bool,
) -> tuple[list[Array], Array]:
    """Return the parts wᵢτᵢ, and their slack."""
    curved = method.directions
    weights = list(strengths) if curved and added else _weights(method.name, changes, strengths, n)
    largest = max(abs(s) * t.largest for s, t in zip(strengths, changes, strict=True)) if curved else 0.0
    parts = [n.scale * w * t.at(rows) for w, t in zip(weights, changes, strict=True)]
    return parts, np.full(parts[0].shape, 1e-9 * largest * abs(n.scale))


def _factors(
    method: MergeMethod, change: ReferenceRows, n: MethodParameters, seed: str, rows: Array
) -> tuple[Array, Array]:
    """Return what each entry of some rows of a change is multiplied by, and where rounding may decide otherwise."""
    (out, width), size = change.shape, np.abs(change.at(rows))
    count, unsure = out * width, np.zeros(size.shape, dtype=bool)
    if not method.keeps:
        return np.ones(size.shape), unsure
    if method.keeps in ("largest", "middle"):
        top = math.floor(n.gamma * count) if method.keeps == "middle" else 0
        inner = _first(change, rows, size, min(count, top + math.floor(n.density * count)), unsure)
        return np.asarray((inner & ~_first(change, rows, size, top, unsure)).astype(np.float64)), unsure
    chance: Array = np.full(size.shape, n.density)
    if method.keeps == "ranked":
        order = np.argsort(size, axis=1, kind="stable")
        steps = n.density - n.epsilon + 2 * n.epsilon * np.arange(width) / max(width - 1, 1)
        np.put_along_axis(chance, order, steps[None, :], axis=1)
        close = np.diff(np.take_along_axis(size, order, axis=1), axis=1) <= MAGNITUDE_TOLERANCE * change.largest
        tied = np.pad(close, ((0, 0), (1, 0))) | np.pad(close, ((0, 0), (0, 1)))
        np.put_along_axis(unsure, order, tied, axis=1)
    drawn = uniform(seed, n.seed, rows[:, None] * width + np.arange(width))
    return np.where(drawn < chance, 1 / chance, 0.0), unsure


def _first(change: ReferenceRows, rows: Array, size: Array, count: int, unsure: Array) -> Array:
    """Return which magnitudes of some rows, `size`, are among the largest `count` of all, of equal ones the earlier;
    mark those that are near the last of them."""
    elements = change.shape[0] * change.shape[1]
    if not 0 < count < elements:
        return np.full(size.shape, count > 0)
    every, at = change.flat(np.abs), elements - count
    every.partition((at - 1, at))
    edges = every[at - 1 : at + 1].copy()
    left = count - int(np.count_nonzero(every[at:] > edges[1]))  # so many equal ones are among them
    del every
    equal = size == edges[1]
    before = np.zeros(change.shape[0] + 1, dtype=np.int64)  # equal ones in all rows before each
    for some, block in change.blocks():
        before[some.start + 1 : some.stop + 1] = np.count_nonzero(np.abs(block) == edges[1], axis=1)
    place = np.cumsum(before)[rows][:, None] + np.cumsum(equal, axis=1)
    unsure |= np.abs(size - edges.mean()) <= MAGNITUDE_TOLERANCE * change.largest
    return np.asarray((size > edges[1]) | (equal & (place <= left)))


def uniform(name: str, seed: int, places: Array) -> Array:
    """Return the draws of a name and a seed at some places: SplitMix64 of the place, of which the upper 24 bits
    are the number."""
    start = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "little") ^ seed
    with np.errstate(over="ignore"):
        z = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64((start - 2**63) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z >> np.uint64(40)).astype(np.float64) / 2**24)


def _elect(scaled: Sequence[Array], strengths: Sequence[float], n: MethodParameters) -> None:
    """Set the entries that lack the elected sign to 0, and divide the others."""
    up = sum(scaled if n.elect == "sum" else map(np.sign, scaled), np.zeros(())) >= 0
    divisor = np.zeros(up.shape)
    for s, strength in zip(scaled, strengths, strict=True):
        s[(s > 0) & ~up | (s < 0) & up] = 0.0
        divisor += (s != 0) * (1.0 if n.normalise == "count" else abs(strength))
    if n.normalise != "none":
        divisor[divisor == 0] = 1.0
        for s in scaled:
            s /= divisor


def _doubtful(scaled: Sequence[Array], unsure: Array) -> Array:
    """Return Σ|sᵢtᵢ| where the elected sign, or whether an entry is zero, hangs on rounding or on an unsure entry."""
    size = sum(map(np.abs, scaled), np.zeros(()))
    near = np.abs(sum(scaled, np.zeros(()))) <= MAGNITUDE_TOLERANCE * size
    tiny = np.zeros(size.shape, dtype=bool)
    for s in scaled:
        tiny |= (s != 0) & (np.abs(s) <= MAGNITUDE_TOLERANCE * np.abs(s).max(initial=0.0))
    return np.where(near | tiny | unsure, size, 0.0)


def _weights(
    method: str, changes: Sequence[ReferenceRows], strengths: Sequence[float], n: MethodParameters
) -> list[float]:
    """Return wᵢ with Δ = Σ wᵢτᵢ, from the cosines of all pairs."""
    count = len(changes)
    if method == "mean":
        return [s / sum(strengths) for s in strengths]
    products = np.zeros((count, count))
    for blocks in zip(*(t.blocks() for t in changes), strict=True):
        flat = [s * block.ravel() for s, (_, block) in zip(strengths, blocks, strict=True)]
        products += [[np.dot(a, b) for b in flat] for a in flat]
    norms = [math.sqrt(square) for square in products.diagonal()]
    sizes = np.outer(norms, norms)
    cosines = np.divide(products, sizes, out=np.zeros_like(sizes), where=sizes > 0).clip(-1, 1)
    if method == "karcher":
        along = _karcher(cosines, norms)
        return [s * a / size if size else 0.0 for s, a, size in zip(strengths, along, norms, strict=True)]
    if count == 1:
        return list(strengths)
    if method == "model_stock":
        signs = np.sign(strengths)
        pairs = (cosines * np.outer(signs, signs))[np.triu_indices(count, 1)]
        below = 1 + (count - 1) * pairs.mean()
        stock = min(max(count * pairs.mean() / below, 0.0), 1.0) if below > 0 else 0.0
        return [stock * sum(strengths) / count / count] * count
    first, other = 1 - (n.t or 0.0), n.t or 0.0
    cosine = float(cosines[0, 1])
    if abs(cosine) <= 0.9995 and all(norms):
        angle = math.acos(cosine)
        first, other = (math.sin(x * angle) / math.sin(angle) for x in (first, other))
    return [first * strengths[0], other * strengths[1]]


def _karcher(cosines: Array, norms: Sequence[float]) -> list[float]:
    """Return the Karcher mean of unit vectors with these cosines, times the mean of the norms, as multiples of them."""
    nonzero = np.array([float(size > 0) for size in norms])
    if not nonzero.any():
        return [0.0] * len(norms)
    at = nonzero.copy()
    length = math.sqrt(max(float(at @ cosines @ at), 0.0))
    at = at / length if length >= 1e-6 else np.eye(len(norms))[int(np.argmax(nonzero))]
    for _ in range(KARCHER_STEPS):
        cosine = (cosines @ at).clip(-1, 1)
        angles = np.arccos(cosine)
        sines = np.sin(angles)
        turn = np.divide(angles, sines, out=np.zeros_like(angles), where=(angles > 1e-12) & (sines > 1e-12)) * nonzero
        step = (turn - at * float(turn @ cosine)) / nonzero.sum()
        size = math.sqrt(max(float(step @ cosines @ step), 0.0))
        if size < 1e-10:
            break
        at = math.cos(size) * at + math.sin(size) * step / size
    return list(at * float(np.mean(norms)))
