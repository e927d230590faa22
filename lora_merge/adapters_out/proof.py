"""The proof of every written adapter: what was expected of a weight's change, against what the file holds.

Both are computed in numpy, in float64, by the formulas of proof/reference, from the bytes of the inputs and of the
file. Commands differ in what is expected alone: of `combine`, `resize` and `average` the method over the inputs'
changes, of `convert` the input's change; of the others see `extract/extraction_proof.py` and `averaged_tensors.py`. No
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite, isnan, nan, prod, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from ..adapters.modules import SCALE_SLOTS, group
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, Shape, StoredTensor, flat
from ..errors import VerificationFailed, beyond_fp64
from ..files.checkpoint import Index, open_checkpoint
from ..job import Adapter
from ..matching.patch import PatchPart
from ..merge_methods import MEAN, METHODS, SUM
from ..models.weights import Weight, WeightView
from ..planning.combination import Combination
from ..planning.plan import OutputTensor
from ..progress import Counting
from ..proof.combination_methods import of_weight
from ..proof.patch_rows import PatchRows, costs_all, together
from ..proof.recomputation import Recomputation, RowChanges
from ..proof.reference import REFERENCE
from ..proof.reference.floats import Array, decode
from ..proof.reference.numpy_threads import one_core
from ..proof.weights import WeightReader
from .groups import OutputModule, Place, PlacePart, Target, is_plain
from .input_adapters import NOWHERE, InputAdapters, same_base
from .job import AdapterJob
from .module_tensors import StoredModule
from .output_file import Proof
from .parallel import PerThread, side_by_side

BUDGET: Final = 2**27
"""Values that are formed for a proof that is not full: those of ΔW, once for every change of it."""

CHANGE_VALUES: Final = 2**18
"""Values of ΔW that are formed at once: they stay in the caches."""

RESIDUAL_TOLERANCE: Final = 0.01
"""The share by which a residual may differ from the reported one."""

FLOOR: Final = 1e-6
"""A residual below this is rounding in either computation."""

REDO: Final = "run it again; if it fails again, report it with the inputs"


class Squares(NamedTuple):
    """The values of the comparison of a layer, in float64."""

    size: float  # ‖Δ‖²
    off: float  # ‖Δ − Δ̂‖²; NaN for a layer that the file lacks
    unsure: float = 0.0  # ‖…‖² of how far entries may be from those of another computation in float64

    @property
    def residual(self) -> float:
        """‖Δ − Δ̂‖ / ‖Δ‖; ‖Δ̂‖ for a Δ of zeros."""
        return sqrt(self.off) / (sqrt(self.size) or 1.0)


class StatedLoss(NamedTuple):
    """The loss that a run reports of a layer."""

    residual: float  # ‖Δ − Δ̂‖ / ‖Δ‖
    squares: float = 0.0  # ‖Δ − Δ̂‖², if that is more
    at_most: bool = False  # whether less may be lost

    def holds(self, squares: Squares) -> bool:
        """Return whether a comparison gives this loss."""
        size = sqrt(squares.size) or 1.0
        stated, residual = max(self.residual, sqrt(self.squares) / size), squares.residual
        slack = RESIDUAL_TOLERANCE * max(residual, stated) + FLOOR + sqrt(squares.unsure) / size
        return residual - stated <= slack and (self.at_most or stated - residual <= slack)


@dataclass(frozen=True)
class Comparison:
    """One layer of the output, and how what was expected of it is compared with what is stored."""

    name: str
    elements: int  # that are formed; 0 for a comparison of bytes, which is always made
    nbytes: int  # that it takes at most
    stated: StatedLoss
    squares: Callable[[], Squares | None]
    """Called in any thread. Returns None if a formula has no second one."""


def prove(comparisons: Sequence[Comparison], job: AdapterJob, path: Path, begin: Counting, *, layers: int) -> Proof:
    """Return what was proven of `layers` layers of the file at `path`; VerificationFailed if one is not what the run
    reports.

    Without --full it is a sample: as many, evenly over the file, as have at most BUDGET values, but one at least.
    """
    step = 1 if job.full else max(1, -(-sum(c.elements for c in comparisons) // BUDGET))
    formed = [c for c in comparisons if c.elements][::step]
    chosen = [*(c for c in comparisons if not c.elements), *formed]
    count, worst, name, recomputed = begin("prove", sum(c.nbytes for c in chosen)), 0.0, "", 0

    def work(comparison: Comparison) -> Squares | None:
        with np.errstate(over="ignore", invalid="ignore"):  # a change beyond float64 is refused by name
            return comparison.squares()

    bound = job.inputs.max_memory // 2
    with one_core(), side_by_side(chosen, work, lambda comparison: comparison.nbytes, bound) as results:
        for comparison, squares in zip(chosen, results, strict=True):
            count(comparison.nbytes)
            if squares is None:
                continue
            _check(comparison, squares, path)
            worst, name = max((worst, name), (squares.residual, comparison.name))
            recomputed += 1
    return {"ok": True, "layers": layers, "recomputed": recomputed, "worst_residual": worst, "worst_layer": name}


def _check(comparison: Comparison, squares: Squares, path: Path) -> None:
    """Raise VerificationFailed if a layer is not what the run reports."""
    name, stated = comparison.name, comparison.stated
    if not isfinite(squares.size):
        raise beyond_fp64(name)
    if isnan(squares.off):
        raise VerificationFailed("a layer is not in the file", f"{path}: {name}", REDO)
    if not stated.holds(squares):
        most = "at most " if stated.at_most else ""
        where = f"{path}: {name}: residual {squares.residual:.6g}, stated {most}{stated.residual:.6g}"
        raise VerificationFailed("the written layer is not what the report says", where, REDO)


def recomputation(
    base: Index, weights: Mapping[str, Weight], reader: Reader, stored: WeightReader | None = None
) -> Recomputation:
    """Return the second computation of changes of these weights, for one thread. `stored`: as for `Recomputation`."""
    return Recomputation(weights, stored or WeightReader(reader, base))


def confirm(job: AdapterJob, inputs: InputAdapters, reader: Reader) -> None:
    """Raise VerificationFailed where a second reading of the adapters gives a module other places, another formula,
    scale or strength. Nothing without a base: rows are those of the adapters' own modules then."""
    if inputs.matches:
        from ..proof.second_reading.comparison import compare, stored_number

        uses: dict[str, list[PatchPart]] = {}
        for match in inputs.matches:
            for key, parts in match.uses.items():
                uses.setdefault(key, []).extend(parts)
        targets = [
            OutputTensor(key, key, "F64", inputs.weights[key], 0, 0, tuple(parts)) for key, parts in uses.items()
        ]
        compare(job.inputs, inputs.indexes[0], inputs.matches, targets, partial(stored_number, reader))


ChangeRows: TypeAlias = Callable[[slice], Array]
"""Function of a range of rows that returns Δ there."""


def known(target: Target) -> bool:
    """Return whether all formulas of a weight's change have a second one."""
    return all(use.patch.algorithm in REFERENCE for use in target.uses)


def shaped(target: Target, again: Recomputation) -> OutputTensor:
    """Return the weight of a target with its uses, as a merge would write it."""
    key = target.uses[0].piece.key if target.uses else target.key
    return OutputTensor(key, key, "F64", again.weights[key], 0, 0, target.uses)


def added(target: Target, again: Recomputation, rows: Array, cols: int) -> Array:
    """Return Σ s ΔW for rows of a weight, seen as a matrix `cols` wide. Its uses may see other columns, such as those
    of stacked experts: then the rows are consecutive, and have whole rows of theirs."""
    tensor = shaped(target, again)
    total, cache = np.zeros((len(rows), cols)), RowChanges(again, tensor, tensor.name)
    for part in together(target.uses):
        lines = rows
        if part.cols != cols and len(rows):
            lines = np.arange(rows[0] * cols // part.cols, (rows[-1] + 1) * cols // part.cols)
        if (placed := cache.change(part, lines)) is not None:
            total.reshape(-1, part.cols)[placed[0]] += placed[1]
        cache.changes.clear()
    for _, info, strength in target.values:
        value = again.stored(info, (prod(again.weights[target.key].shape) // cols, cols), rows)
        total += strength * (value - again.values(target.key, rows, cols))
    return total


def rows_at_once(target: Target, matrix: tuple[int, int]) -> int:
    """Return of how many rows the change is formed at once: all where one costs as much, or does not come alone.

    A few are the rule: whole matrices would be new memory from the system each time, which takes longer than the
    arithmetic."""
    rows, cols = matrix
    alone = all(use.piece.cols == cols and not costs_all(use) for use in target.uses)
    return max(1, CHANGE_VALUES // max(cols, 1)) if alone else max(rows, 1)


def squares_of(expected: ChangeRows, stored: ChangeRows | None, rows: int, step: int) -> Squares:
    """Return ‖Δ‖² and ‖Δ − Δ̂‖², `step` rows at a time."""
    size = off = 0.0
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        delta = expected(part)  # in new memory
        size += float(np.vdot(delta, delta))
        if stored is not None:
            delta -= stored(part)
            off += float(np.vdot(delta, delta))
    return Squares(size, off if stored is not None else nan)


def untouched(
    targets: Iterable[Target], again: PerThread[Recomputation], lost: Mapping[str, float]
) -> list[Comparison]:
    """Return the comparisons of weights that the output changes and of which no change is expected. `lost`: weight of
    the base → ‖Δ̂‖² that rounding may give it, as a part of a fused module."""

    def squares(target: Target) -> Squares | None:
        if not known(target):
            return None
        (rows, cols), every = target.matrix, np.arange(target.matrix[0])

        def stored(part: slice) -> Array:
            return added(target, again.get(), every[part], cols)

        return squares_of(
            lambda part: np.zeros((len(every[part]), cols)), stored, rows, rows_at_once(target, (rows, cols))
        )

    comparisons = []
    for target in targets:
        stated = StatedLoss(0.0, lost.get(target.key, 0.0), at_most=True)
        elements = prod(target.shape)
        comparisons.append(Comparison(target.key, elements, 8 * 4 * elements, stated, partial(squares, target)))
    return comparisons


ADDING: Final = (SUM, MEAN)
"""Methods whose result has rows that follow from the same rows of the changes."""


@dataclass(frozen=True)
class CombinationClaims:
    """The claims of a run about its output."""

    job: AdapterJob
    inputs: InputAdapters
    modules: Sequence[OutputModule]
    layers: Mapping[str, Mapping[str, Any]]  # layer → its facts for the report
    nbytes: int  # of all tensors


@dataclass(frozen=True)
class Expectation:
    """What a job's method makes of the changes of a weight, in the second computation."""

    job: AdapterJob
    inputs: InputAdapters

    @cached_property
    def combination(self) -> Combination | None:
        """The method that combines changes; None for one that adds them."""
        job = self.job
        return None if job.method in ADDING else Combination(METHODS[job.method], job.parameters, self.inputs.adapters)

    def has(self, whole: Target) -> bool:
        """Return whether there is a second computation for a weight, within the memory.

        Methods that choose entries choose others where changes are computed in fp32.
        """
        if whole.values or self.combination is None:
            return not whole.values
        fits = self.nbytes(whole) <= self.job.inputs.max_memory // 2
        return fits and not _is_column(whole) and self.job.compute_dtype != "fp32"

    def nbytes(self, whole: Target) -> int:
        """Return about how many bytes a comparison takes at most: a method needs all changes of a weight at once."""
        return 8 * (4 if self.combination is None else 4 + 2 * len(whole.uses)) * prod(whole.shape)

    def squares(self, part: PlacePart, again: Recomputation, stored: ChangeRows | None) -> Squares | None:
        """Return the comparison of rows of a weight with what is stored; None where a formula has no second one."""
        if self.combination is None:
            return _of_sum(self.job, part, again, stored)
        return _of_method(self.combination, part, again, stored)


def prove_combination(claims: CombinationClaims, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Return what was proven of the file at `path`; VerificationFailed where it is not what the run says. Of layers
    without a second computation only the tensors' bytes are counted."""
    # Step 1: the tensors of the file, counted.
    job, inputs, index = claims.job, claims.inputs, open_checkpoint(path)
    nbytes = sum(info.nbytes for info in index.tensors.values())
    if nbytes != claims.nbytes:
        raise VerificationFailed("the file does not hold the tensors that were made", f"{path}: {nbytes} bytes", REDO)
    confirm(job, inputs, reader)
    # Step 2: the layers that have a second computation, with the weights that they are of.
    expected = Expectation(job, inputs)
    parts = [(module.place, part) for module in claims.modules for part in module.parts
             if module.place.label in claims.layers and expected.has(part.target)]  # fmt: skip
    # Step 3: each is compared with the module of the file.
    modules = {(m.name, m.parameter): m for m in group(index).modules}
    again = PerThread(lambda: recomputation(inputs.indexes[0], inputs.weights, reader))
    with Reader([index]) as file:

        def compared(place: Place, part: PlacePart) -> Squares | None:
            stored = _change_of(modules.get((place.module, place.parameter)), file, place.view)
            return expected.squares(part, again.get(), stored)

        comparisons = [
            Comparison(place.label, (2 + len(part.uses)) * prod(part.shape), expected.nbytes(part.target),
                       StatedLoss(float(claims.layers[place.label]["residual"])), partial(compared, place, part))
            for place, part in parts
        ]  # fmt: skip
        return prove(comparisons, job, path, begin, layers=len(claims.layers))


def _is_column(target: Target) -> bool:
    """Return whether a bias has several axes: methods take it for a vector, which the second ones do not know."""
    return target.vector and len(target.shape) > 1


def _order(part: PlacePart) -> Array:
    """Return the rows of the weight that are those of a part, in its order."""
    return np.concatenate([np.arange(*run) for run in part.runs or ((0, flat(part.shape)[0]),)])


def _of_method(how: Combination, part: PlacePart, again: Recomputation, stored: ChangeRows | None) -> Squares | None:
    """Return the comparison of a layer whose changes a method combines; None where a formula has no second one."""
    whole = part.target
    if not known(whole):
        return None
    tensor = shaped(whole, again)._replace(combination=how)
    taking, cache = together([u for u in whole.uses if u.strength]), RowChanges(again, tensor, tensor.name)
    if not taking:
        return None
    result = of_weight(tensor, taking, np.arange(tensor.matrix[0]), cache.whole)
    order = _order(part)
    delta, slack = (values.reshape(flat(whole.shape))[order] for values in (result.total, result.slack))
    size = float(np.vdot(delta, delta))
    delta -= 0.0 if stored is None else stored(slice(0, len(order)))
    return Squares(size, nan if stored is None else float(np.vdot(delta, delta)), float(np.vdot(slack, slack)))


def _of_sum(job: AdapterJob, part: PlacePart, again: Recomputation, stored: ChangeRows | None) -> Squares | None:
    """Return the comparison of a layer whose changes are added; None where a formula has no second one."""
    if not known(layer := replace(part.target, uses=part.uses)):
        return None
    strengths = {u.patch.adapter: u.strength for u in part.target.uses}  # of those that change any row of the weight
    scale = job.parameters.scale / (sum(strengths.values()) if job.method == MEAN else 1.0)
    order, (rows, cols) = _order(part), flat(part.shape)

    def expected(some: slice) -> Array:
        delta = added(layer, again, order[some], cols)
        delta *= scale
        return delta

    return squares_of(expected, stored, rows, rows_at_once(layer, (rows, cols)))


def _change_of(module: Any, reader: Reader, view: WeightView) -> ChangeRows | None:
    """Return the Δ that the file's tensors mean; None for a module that it lacks."""
    if module is None:
        return None
    shape = flat(view.shape)

    def read(info: StoredTensor) -> Array:
        return decode(bytes(reader.read(info, 0, info.nbytes)), info.dtype).reshape(info.shape or (1,))

    if "diff" in module.slots:
        info, (_, cols) = module.slots["diff"], shape
        width = cols * ITEM_BYTES[info.dtype]

        def stored(rows: slice) -> Array:
            raw = reader.read(info, rows.start * width, (rows.stop - rows.start) * width)
            return decode(raw, info.dtype).reshape(-1, cols)

    else:
        up, down = read(module.slots["up"]), read(module.slots["down"])
        rank = down.shape[0]
        elements = {slot: float(read(info)[0]) for slot, info in module.shared.items() if slot in SCALE_SLOTS}
        scale = elements.get("scale_override", elements.get("alpha", float(rank)) / rank)
        left, right = scale * up.reshape(shape[0], rank), down.reshape(rank, shape[1])

        def stored(rows: slice) -> Array:
            return np.asarray(left[rows] @ right)

    if not view.row_slices[0].transposed:
        return stored
    turned = stored(slice(0, shape[0])).T
    return lambda rows: turned[rows]


FORMED: Final = 8
"""Multiplications that take as long as to form one number of a whole matrix."""

PROBES: Final = 8
"""Random vectors x of a comparison of factors. ‖E x‖² has the mean ‖E‖², so an error that all of them miss is one of
probability 0; the estimate is larger than half of ‖E‖ in all but one of 10⁴ cases."""

BYTES_AT_ONCE: Final = 2**18
"""Bytes of two tensors that are compared at once."""


class ConversionClaims(NamedTuple):
    """The claims of a run about its output."""

    job: AdapterJob
    inputs: InputAdapters
    modules: Sequence[StoredModule]  # that change something, and what is lost in each


def prove_conversion(claim: ConversionClaims, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Return what was proven of the output at `path`; VerificationFailed if a weight's change is not the one that the
    inputs' changes become."""
    job, inputs, modules = claim
    assert inputs.opened is not None, "a conversion has a base"
    of_output = replace(job, inputs=replace(job.inputs, adapters=(Adapter(path),)))
    again = same_base(inputs.opened, of_output)
    base, lost = inputs.opened.base, _lost(modules)
    worst = max((m.layer.residual for m in modules), default=0.0)

    def computed(of: InputAdapters, source: Reader) -> Recomputation:
        return recomputation(base, of.weights, source, _Drawn(source, base))

    with Reader(again.indexes) as file:
        confirm(job, inputs, reader)
        confirm(of_output, again, file)
        before, after = (PerThread(partial(computed, *side)) for side in ((inputs, reader), (again, file)))
        sides = BothSides(reader, file, {t.key: t for t in again.targets}, before, after)
        expected, comparisons = Expectation(job, inputs), list[Comparison]()
        for target in inputs.targets:
            stated = StatedLoss(worst, lost.get(target.key, 0.0), at_most=True)
            if not job.command.combines:
                elements, nbytes = _cost(target, sides.outputs.get(target.key))
                squares = partial(_converted, target, stated, sides)
                comparisons.append(Comparison(target.key, elements, nbytes, stated, squares))
            elif expected.has(target):
                elements, nbytes = (2 + len(target.uses)) * prod(target.shape), expected.nbytes(target)
                squares = partial(_combined, target, expected, sides)
                comparisons.append(Comparison(target.key, elements, nbytes, stated, squares))
        changed = {target.key for target in inputs.targets}
        comparisons += untouched((t for t in again.targets if t.key not in changed), after, lost)
        return prove(comparisons, of_output, path, begin, layers=len(inputs.targets))


class BothSides(NamedTuple):
    """The inputs and the output of a conversion, with what computes their changes."""

    reader: Reader
    file: Reader
    outputs: Mapping[str, Target]  # weight → its change by the output
    before: PerThread[Recomputation]
    after: PerThread[Recomputation]


def _converted(target: Target, stated: StatedLoss, both: BothSides) -> Squares | None:
    """Return the comparison of a weight's change by one input with that by the output."""
    output = both.outputs.get(target.key)
    pairs = same_factors(target, output)
    if pairs and all(_alike(both.reader, old, both.file, new) for old, new in pairs):
        return Squares(0.0, 0.0)
    if not all(known(side) for side in (target, output) if side):
        return None
    sides = (target, both.before.get()), (output, both.after.get())
    if not all(map(_is_factored, (target, output))):
        return _formed(target, sides)
    estimate = _projected(target, sides, _random(target))
    return estimate if stated.holds(estimate) else _projected(target, sides, _basis(target, sides))


def _combined(target: Target, expected: Expectation, both: BothSides) -> Squares | None:
    """Return the comparison of a weight's combined change with that by the output."""
    output, (rows, cols) = both.outputs.get(target.key), flat(target.shape)
    if output is not None and not known(output):
        return None

    def stored(some: slice) -> Array:
        lines = np.arange(rows)[some]
        return np.zeros((len(lines), cols)) if output is None else added(output, both.after.get(), lines, cols)

    return expected.squares(PlacePart(target, (), (range(target.matrix[0]),)), both.before.get(), stored)


class _Drawn(WeightReader):
    """Reads tensors in float64. Those of a base that was not given are drawn at random.

    An equation between two formulas that holds for random weights holds for all weights.
    """

    def __call__(self, info: StoredTensor, shape: Shape, entries: Array | None = None) -> Array:
        """Return the tensor in `shape`, or these entries of its first axis."""
        if info.file != NOWHERE:
            return super().__call__(info, shape, entries)
        values = np.random.default_rng(crc32(info.name.encode())).standard_normal(shape)
        return values if entries is None else values[entries]


def _lost(modules: Sequence[StoredModule]) -> dict[str, float]:
    """Return weight of the base → ‖Δ − Δ̂‖² of all modules that have rows of it."""
    squares: dict[str, float] = {}
    for module in modules:
        for key in {*module.place.keys}:
            squares[key] = squares.get(key, 0.0) + module.layer.lost
    return squares


TensorPairs = list[tuple[StoredTensor, StoredTensor]]
"""Tensors of an input and of an output that must be alike."""


def same_factors(target: Target, output: Target | None) -> TensorPairs:
    """Return the factors of a weight's change in the input and in the output, if these mean the same change where their
    bytes are alike: one pair of factors each with one scale, in one dtype. [] otherwise."""
    if output is None or target.values or output.values or len(target.uses) != 1 or len(output.uses) != 1:
        return []
    (use,), (again,) = target.uses, output.uses
    old, new = use.patch, again.patch
    facts = [
        (u.patch.algorithm, u.patch.scalars, u.patch.magnitude, u.piece, u.start, u.strength) for u in (use, again)
    ]
    if not is_plain(old) or not is_plain(new) or facts[0] != facts[1] or old.view != new.view:
        return []
    pairs = [(old.module.slots[slot], new.module.slots[slot]) for slot in ("up", "down")]
    return pairs if all(info.dtype == other.dtype for info, other in pairs) else []


def _alike(reader: Reader, info: StoredTensor, other_reader: Reader, other: StoredTensor) -> bool:
    """Return whether two tensors have the same bytes."""
    if info.nbytes != other.nbytes:
        return False
    spans = [(first, min(BYTES_AT_ONCE, info.nbytes - first)) for first in range(0, info.nbytes, BYTES_AT_ONCE)]
    return all(bytes(reader.read(info, *span)) == bytes(other_reader.read(other, *span)) for span in spans)


def _is_factored(target: Target | None) -> bool:
    """Return whether a weight's change has products with vectors without being formed."""
    return target is None or (not target.values and all(
        is_plain(u.patch) and u.patch.magnitude is None and not u.piece.transposed
        and u.piece.cols == target.matrix[1] and REFERENCE[u.patch.algorithm].linear for u in target.uses))  # fmt: skip


def _cost(target: Target, output: Target | None) -> tuple[int, int]:
    """Return how many values the comparison of one weight forms, and about how many bytes it takes."""
    (out, cols), sides = target.matrix, [side for side in (target, output) if side is not None]
    if pairs := same_factors(target, output):
        return 0, 2 * sum(min(new.nbytes, BYTES_AT_ONCE) for _, new in pairs)
    elements = sum(len(side.uses) + len(side.values) for side in sides) * out * cols
    nbytes = 8 * 4 * out * cols
    if known(target) and all(map(_is_factored, sides)):
        ranks = sum(use.patch.shapes["down"][0] for side in sides for use in side.uses)
        elements = min(elements, PROBES * ranks * (out + cols) // FORMED)
        nbytes = min(nbytes, 8 * 2 * ranks * (out + cols))
    return elements, nbytes


Sides = tuple[tuple[Target, Recomputation], tuple[Target | None, Recomputation]]
"""A weight's change by the input and by the output, with what computes each."""


def _random(target: Target) -> Array:
    """Return random vectors [cols, n] that give an estimate of the norms."""
    return np.random.default_rng(0).standard_normal((target.matrix[1], PROBES)) / sqrt(PROBES)


def _basis(target: Target, sides: Sides) -> Array:
    """Return orthonormal vectors [cols, n] of which the rows of both changes are sums: they give the norms exactly."""
    vectors = [cache.spanning(part) for side, again in sides for part, cache in _parts(side, again)]
    return np.linalg.qr(np.concatenate([np.zeros((0, target.matrix[1])), *vectors]).T)[0]


def _projected(target: Target, sides: Sides, vectors: Array) -> Squares:
    """Return the comparison of the products of both changes with vectors."""
    before, after = (_products(side, again, target.matrix[0], vectors) for side, again in sides)
    return Squares(float(np.vdot(before, before)), float(np.vdot(before - after, before - after)))


def _parts(target: Target | None, again: Recomputation) -> Iterator[tuple[PatchRows, RowChanges]]:
    """Yield the changes that are added to a weight."""
    if target is not None:
        tensor = shaped(target, again)
        yield from ((part, RowChanges(again, tensor, tensor.name)) for part in together(target.uses))


def _products(target: Target | None, again: Recomputation, out: int, vectors: Array) -> Array:
    """Return Σ s ΔW x for all rows of a weight."""
    products, rows = np.zeros((out, vectors.shape[1])), np.arange(out)
    for part, cache in _parts(target, again):
        products += cache.projected(part, rows, vectors)
    return products


def _formed(target: Target, sides: Sides) -> Squares:
    """Return the comparison of all values of both changes."""
    rows, cols = target.matrix
    (first, before), (output, after) = sides
    step = max(rows_at_once(side, (rows, cols)) for side in (first, output) if side)
    every = np.arange(rows)

    def stored(some: slice) -> Array:
        return np.zeros(()) if output is None else added(output, after, every[some], cols)

    return squares_of(lambda some: added(first, before, every[some], cols), stored, rows, step)
