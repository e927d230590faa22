"""Modules whose values change, with torch: those of a conversion are copied, cut, fused or brought to another form;
those of `combine`, `resize` and `average` have rows of the combined changes of one weight or several.

The scale of a module whose tensors are copied goes into α, or where no α can hold it into a factor. LyCORIS reads LoKr
of two whole factors at scale 1 whatever its α, but asks for one (lycoris/modules/lokr.py); PEFT reads them at α / r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, log2, prod
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, dora
from ..disk.draft import Draft, Heap
from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, StoredTensor
from ..engine.devices import places
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import HOST, TORCH_DTYPES, Placement
from ..engine.tensors import gathered
from ..engine.torch_state import undisturbed
from ..errors import FitError, beyond_fp64
from ..matching.patch import Patch
from ..merge_methods import ADDED_VECTORS, COMBINATIONS
from ..models.weights import RowSlice
from ..options import KEEP
from ..planning.combination import Combination
from ..progress import Counting
from ..text import Note
from .change import (
    SINGLE,
    Evaluator,
    cache_of,
    change_of,
    in_place,
    largest_rank,
    squares_between,
    squares_of_part,
    sum_of,
    whole_change,
)
from .delta import (
    Delta,
    Slots,
    Storage,
    combine,
    entry,
    expect_finite,
    holds,
    is_turned,
    rounded_change,
    rounded_value,
    spectra,
    stored_magnitude,
    stored_module,
)
from .dialects import Dialect
from .factored_modules import FactoredModules, copy_of, delta_of_parts, nbytes_of, norms_of_parts
from .factors import Cut, FactoredDelta, stacked
from .form import Conversion, Form, holds_columns, is_product, vector_ending, written_dtype
from .groups import OutputModule, Place, PlaceChange, PlacePart, Target, is_plain
from .input_adapters import InputAdapters
from .job import WHOLE, AdapterJob
from .module_tensors import Layer, StoredModule, layer_norms, with_change
from .output_modules import WrittenModules, bundled, module_groups, stored_modules
from .parallel import PerThread
from .peft.completion import as_table, completed, with_biases
from .peft.config import TO_LORA, is_table, magnitude_shape, rank_of
from .rank_rules import LayerSpectrum, Rule
from .values import squares_of_rows

IN_A_FACTOR: Final = Note(
    "the scale of some modules is in one of their factors: their algorithm has no other place for it"
)
ALPHA_TOLERANCE: Final = 1e-9
"""The share of a change by which two ways to compute it in fp64 may differ."""


@dataclass(frozen=True)
class Scales:
    """The scales of modules as a dialect stores them."""

    evaluator: Evaluator
    to: Dialect

    def alpha(self, share: PlaceChange) -> Mapping[str, Tensor] | None:
        """Return the α that gives a copy the scale of the original, {} where it needs none; None where no α can."""
        patch = share.patch
        alpha, unchanged = self.unchanged(patch)
        if "scale" not in patch.scalars:
            return unchanged if share.strength == 1 else None
        scale = patch.scalars["scale"] * share.strength
        if _scale(patch, alpha) == scale:
            return unchanged
        alpha_of_scale = _alpha_of(patch, scale)
        return None if alpha_of_scale is None or not self.strength_in(share) else self._named(alpha_of_scale)

    def unchanged(self, patch: Patch) -> tuple[float | None, dict[str, Tensor]]:
        """Return the α of a module, and the tensor that keeps it. Where none is stored, a dialect with α gets the one
        that means the same: LyCORIS loads nothing without one."""
        info = patch.module.shared.get("alpha")
        if info is not None:
            alpha = float(self.evaluator.cache.fetch(info).float())
            rows, limit = patch.view.shape[0], patch.scalars.get("limit", inf)
            if self.to.name != KEEP and isfinite(limit) and limit != alpha * rows:
                alpha = limit / rows  # other names, with which α times the number of outputs is the limit
            return alpha, self._named(alpha)
        if self.to.name == KEEP or not self.to.alpha or "scale" not in patch.scalars:
            return None, {}
        alpha = _alpha_of(patch, _scale(patch, None)) or 1.0
        return alpha, self._named(alpha)

    def strength_in(self, share: PlaceChange) -> bool:
        """Return whether the formula at a scale that holds the strength gives the change times the strength."""
        patch, strength = share.patch, share.strength
        if strength == 1:
            return True
        scaled = replace(patch, scalars={**patch.scalars, "scale": patch.scalars["scale"] * strength})
        scaled_change, change = whole_change(scaled, self.evaluator), whole_change(patch, self.evaluator)
        return squares_between(scaled_change, change, strength) <= ALPHA_TOLERANCE**2 * strength**2 * squares_of_rows(
            change
        )

    def _named(self, alpha: float) -> dict[str, Tensor]:
        return {self.to.endings.get("alpha", ".alpha"): torch.tensor(alpha, dtype=torch.float32)}


def _scale(patch: Patch, alpha: float | None) -> float:
    """Return the scale of a module that has this α."""
    return float(ALGORITHMS[patch.algorithm].scalars_from(alpha, patch.shapes, patch.view.shape)["scale"])


def _alpha_of(patch: Patch, scale: float) -> float | None:
    """Return the α of a scale; None where no α gives it."""
    once, two = _scale(patch, 1.0), _scale(patch, 2.0)
    power = log2(two / once) if two != once else 0.0
    if not power or (scale / once <= 0 and power != 1):
        return None
    return scale / once if power == 1 else (scale / once) ** (1 / power)


@dataclass(frozen=True)
class ScaledFactor:
    """The slot whose tensor holds the scale, and what it is multiplied by; ‖Δ‖² and ‖Δ − Δ̂‖² of the stored tensors."""

    slot: str
    factor: float
    squares: float
    lost: float

    def times(self, value: Tensor) -> Tensor:
        """Return the tensor as it is written."""
        return (value.double() * self.factor).to(value.dtype)


def in_a_factor(
    share: PlaceChange, alpha: float | None, evaluator: Evaluator, dtype: torch.dtype | None
) -> ScaledFactor | None:
    """Return which factor can hold the scale of a share with its strength; None where the change is linear in none.

    `alpha`: that of the output. `dtype`: of the output; None: as stored.
    """
    patch = share.patch
    scale, read = patch.scalars.get("scale", 1.0) * share.strength, 1.0
    if "scale" in patch.scalars:
        read = _scale(patch, alpha)
        patch = replace(patch, scalars={**patch.scalars, "scale": read})
    strength, whole = share.strength, whole_change(share.patch, evaluator)
    squares = strength**2 * squares_of_rows(whole)
    for slot, info in patch.module.slots.items() if read and squares else ():
        moved = ScaledFactor(slot, scale / read, squares, 0.0)

        def exactly(
            other: StoredTensor, value: Tensor, moved: ScaledFactor = moved, info: StoredTensor = info
        ) -> Tensor:
            return value.double() * moved.factor if other is info else value

        def stored(
            other: StoredTensor, value: Tensor, moved: ScaledFactor = moved, info: StoredTensor = info
        ) -> Tensor:
            real = value.is_floating_point()
            rounded = value if dtype is None or not real else value.to(dtype)
            return (moved.times(rounded) if other is info else rounded).to(value.dtype)

        def off(alter: Callable[[StoredTensor, Tensor], Tensor], patch: Patch = patch) -> float:
            return squares_between(whole_change(patch, evaluator.altered(alter)), whole, strength)

        if info.dtype in FLOATS and off(exactly) <= ALPHA_TOLERANCE**2 * squares:
            return replace(moved, lost=off(stored))
    return None


def placed_rows(change: RowMatrix, share: PlaceChange, place: Place) -> RowMatrix:
    """Return the rows of a share in a matrix of the place's rows; the others are zero."""
    if share.is_all(place):
        return change
    order = torch.full((place.view.matrix[0],), -1)
    for source, target, count in share.runs:
        order[target : target + count] = torch.arange(source, source + count)
    return rows_in_order(change, order)


def rows_in_order(change: RowMatrix, order: Tensor) -> RowMatrix:
    """Return a matrix of rows with these numbers; zeros for -1."""

    def read(rows: slice) -> Tensor:
        lines = order[rows]
        values = torch.zeros(len(lines), change.shape[1], dtype=torch.float64)
        in_change = lines >= 0
        values[in_change] = change.of_rows(lines[in_change]).dense().double()
        return values

    return RowMatrix((len(order), change.shape[1]), read)


def placed(rows: Tensor, share: PlaceChange, out: int) -> Tensor:
    """Return the rows of a share in a matrix of the place's rows; the others are zero."""
    values = rows.new_zeros(out, rows.shape[1])
    for source, target, count in share.runs:
        values[target : target + count] = rows[source : source + count]
    return values


_ROWS: Final[Mapping[dora.Axis, tuple[int, int]]] = MappingProxyType({"out": (-1, 1), "in": (1, -1)})
"""Axis of a magnitude → its shape next to a weight."""


@dataclass(frozen=True)
class Converter:
    """Makes the tensors of one conversion."""

    job: AdapterJob
    to: Dialect
    forms: Mapping[str, Form]  # by the label of the module
    evaluator: Evaluator
    reader: Reader
    noise: float = 0.0
    """Singular values below this share of the largest one are noise of the inputs."""

    @cached_property
    def at(self) -> Placement:
        """The placement at which matrices are decomposed."""
        return places(self.job.inputs.device, "F32")[0]

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        return ()

    def forget(self) -> None:
        """Drop what was read and computed for the last modules."""
        self.evaluator.forget()

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return about how many bytes the changes of modules take."""
        return sum(map(_nbytes, group))

    def where(self, module: OutputModule) -> str:
        """Return the place of a module for errors."""
        return module.place.name

    def modules(self, group: Sequence[OutputModule], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return modules whose bytes are in memory. `ranks`: label → the rank that the rule `size` gave."""
        modules = [self.module(output, ranks.get(output.place.label)) for output in group]
        self.forget()
        return [
            with_change(
                as_table(stored, self.to, table=is_table(output.place, output.shares)),
                measured=self.job.command.combines,
            )
            for output, stored in zip(group, modules, strict=True)
        ]

    def spectra(self, group: Sequence[OutputModule]) -> list[LayerSpectrum]:
        """Return the singular values of the modules that are matrices, for the rule `size`."""
        matrices = [output for output in group if not output.place.vector and output.value is None]
        values = [spectrum for output in matrices for spectrum in self.spectrum(output)]
        self.forget()
        return values

    def spectrum(self, output: OutputModule) -> list[LayerSpectrum]:
        """Return the singular values of a module; [] for a Δ of zeros."""
        itemsize = self._dtype(output.shares).itemsize
        return [*spectra([(output.place.label, self.delta(output))], itemsize, self.noise)]

    def module(self, output: OutputModule, rank: int | None) -> StoredModule:
        """Return one module, at the rank that the rule `size` gave."""
        form = self.forms[output.place.label]
        if form.renamed:
            return copy_of(output, self.to, self.reader)
        module = self.tensors_of(output, form, rank)
        if not isfinite(module.layer.squares):
            raise beyond_fp64(output.shares[0].patch.module.name if output.shares else output.place.name)
        expect_finite((e for e in module.tensors.values() if ITEM_BYTES[e.dtype] > 1), self.where(output))
        return module

    def tensors_of(self, output: OutputModule, form: Form, rank: int | None = None) -> StoredModule:
        """Return the tensors of one module whose values or names change, at a rank that is decided already."""
        if form.kind == "value":
            return self._value(output)
        if form.kind == "vector":
            return self._vector(output)
        if form.kind == "copy":
            return self._copy(output)
        return self._factored(output, form, rank)

    def _copy(self, output: OutputModule) -> StoredModule:
        """Return the module with its tensors as they are; FitError if the dialect cannot store its scale."""
        place, shares = output.place, output.shares
        (share, *others) = shares
        patch, row = share.patch, ALGORITHMS[share.patch.algorithm]
        endings = {slot: self.to.copied(patch.module, patch.algorithm, place.parameter, slot)
                   for slot in patch.module.slots}  # fmt: skip
        # Step 1: where its scale goes: into α, or else into a factor.
        product = is_product(share, self.to)
        scales = Scales(self.evaluator, self.to)
        alpha: Mapping[str, Tensor] | None = {} if product and scales.strength_in(share) else scales.alpha(share)
        moved = None
        if alpha is None and not others and share.is_all(place) and self.to.copies and not product:
            number, entries = scales.unchanged(patch)
            moved = in_a_factor(share, number, self.evaluator, self._dtype(()))
            alpha = entries if moved else None
        if alpha is None and share.strength != 1:
            raise FitError(f"the tensors of {patch.algorithm} cannot store a strength", place.name,
                           "store whole matrices: `--algorithm full`, or give `--algorithm lora --rank 32`"
                           )  # fmt: skip
        if alpha is None:
            raise FitError(f"{self.to.name} cannot hold {patch.algorithm} in this place", place.name, TO_LORA)
        # Step 2: its tensors.
        tensors = {str(endings[slot]): self._stored(info) for slot, info in patch.module.slots.items()}
        if moved:
            tensors[str(endings[moved.slot])] = moved.times(tensors[str(endings[moved.slot])])
        if patch.magnitude is not None:
            tensors[self.to.endings["magnitude"]] = self._stored(patch.module.shared["magnitude"]).reshape(
                stored_magnitude(patch)
            )
        tensors |= alpha
        # Step 3: the facts of its layer.
        rank, number = row.rank(patch.shapes) if row.rank is not None else 0, None
        if product:
            rank = rank_of({ending: tuple(t.shape) for ending, t in tensors.items()})
            number = patch.scalars.get("scale", 1.0) * share.strength * rank
        squares, lost = (moved.squares, moved.lost) if moved else self._rounding(patch)
        notes = (IN_A_FACTOR,) if moved else ()
        layer = Layer(patch.algorithm, rank, rank, number, squares, lost, notes)
        return stored_module(place, tensors, layer, copied=True)

    def _rounding(self, patch: Patch) -> tuple[float, float]:
        """Return ‖Δ‖² and ‖Δ − Δ̂‖² of a module whose tensors get another dtype; zeros where nothing is rounded."""
        dtype, cache = self._dtype(()), self.evaluator.cache
        used = [*patch.module.slots.values(), *([patch.module.shared["magnitude"]] if patch.magnitude else ())]
        if dtype is None or all(holds(dtype, cache.fetch(info)) for info in used):
            return 0.0, 0.0
        stored = whole_change(patch, self.evaluator)
        names = {id(info) for info in used}

        def alter(info: StoredTensor, value: Tensor) -> Tensor:
            return value.to(dtype).to(value.dtype) if id(info) in names and value.is_floating_point() else value

        rounded = whole_change(patch, self.evaluator.altered(alter))
        return squares_of_rows(stored), squares_between(stored, rounded)

    def _stored(self, info: StoredTensor) -> Tensor:
        value = self.evaluator.cache.fetch(info).clone()
        dtype = self._dtype(())
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    def _dtype(self, shares: Sequence[PlaceChange]) -> Any:
        dtype = written_dtype(self.job, shares)
        return None if dtype is None else TORCH_DTYPES[dtype]

    def _factored(self, output: OutputModule, form: Form, rank: int | None) -> StoredModule:
        """Return up and down: kept, cut, fused, or found by a rank rule."""
        place, with_magnitudes = output.place, output.shares
        magnitude = None
        if self.job.keeps_forms and any(s.patch.magnitude for s in with_magnitudes):
            magnitude = self._magnitudes(place, with_magnitudes)
            plain = (s._replace(patch=replace(s.patch, magnitude=None)) for s in with_magnitudes)
            output = output._replace(shares=tuple(plain))
        shares, delta = output.shares, self.delta(output)
        storage = Storage(form.algorithm, self._dtype(shares), self.noise, self.at)
        slots, layer = storage.layer(place, delta, self.cut(output, delta, form.rule, rank))
        if layer.algorithm == WHOLE and "diff" not in self.to.endings:
            return self._new_value(place, shares, delta.rows)
        tensors = {self.to.endings[slot]: value for slot, value in slots.items()}
        if layer.rank and self.to.alpha:
            tensors[self.to.endings.get("alpha", ".alpha")] = torch.tensor(layer.alpha, dtype=torch.float32)
        if magnitude is not None:
            tensors[self.to.endings["magnitude"]] = magnitude
            layer = self._with_magnitude(place, with_magnitudes, slots, layer, magnitude)
        return stored_module(place, tensors, layer)

    def _with_magnitude(
        self, place: Place, shares: Sequence[PlaceChange], slots: Slots, layer: Layer, magnitude: Tensor
    ) -> Layer:
        """Return a layer of DoRA with the loss of its whole change: rounding of a magnitude moves whole rows of the
        weight. Without a base that is not known."""
        stored = [self.evaluator.cache.fetch(s.patch.module.shared["magnitude"]) for s in shares]
        rounded = not all(holds(magnitude.dtype, value) for value in stored)
        if self.job.base is None or not (rounded or layer.lost):
            return layer
        terms = [(s.strength, placed_rows(whole_change(s.patch, self.evaluator), s, place)) for s in shares]
        delta, (axis, _) = sum_of(place.view.matrix, terms), shares[0].patch.magnitude or ("out", ())
        up, down = (slots[slot].double() for slot in ("up", "down"))
        product = up.reshape(-1, layer.rank) @ down.reshape(layer.rank, -1) * ((layer.alpha or layer.rank) / layer.rank)
        weight = self.value(place).reshape(place.view.matrix).double()
        change = dora.rescale(weight[None], product[None], magnitude.double().reshape(1, *_ROWS[axis]), axis)[0]
        return replace(layer, squares=squares_of_rows(delta), lost=squares_between(delta, RowMatrix.of(change)))

    def cut(self, output: OutputModule, delta: Delta, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α."""
        if not self.to.alpha:
            return Cut(rule, rank)  # α is the rank
        if not isinstance(self.job.alpha, str):
            return Cut(rule, rank, float(self.job.alpha))
        scales = {s.patch.scalars.get("scale", 1.0) * s.strength for s in output.shares}
        scale = scales.pop() if len(scales) == 1 and all(is_plain(s.patch) for s in output.shares) else 0.0
        if self.job.alpha != KEEP or not scale or delta.left is None:
            return Cut(rule, rank)
        return Cut(rule, rank, delta.left.shape[1] * scale)

    def delta(self, output: OutputModule) -> Delta:
        """Return Δ of a module."""
        place, shares = output.place, output.shares
        changes = [change_of(s.patch, self.evaluator) for s in shares]
        out, cols = place.view.matrix
        before = largest_rank(changes)
        if any(c.left is None for c in changes):
            terms = [(s.strength, placed_rows(c.rows, s, place)) for s, c in zip(shares, changes, strict=True)]
            return Delta(None, None, sum_of((out, cols), terms), before)
        factors: list[tuple[Tensor, Tensor]] = []
        for s, c in zip(shares, changes, strict=True):
            up, down = c.factors
            left, right = s.strength * placed(up, s, out), down.reshape(down.shape[0], cols)
            if not s.is_all(place) and (used := left.any(0)).any():
                left, right = left[:, used], right[used]  # the columns of the other parts of a fused module
            factors.append((left, right))
        return Delta.of_factors(FactoredDelta(*stacked(factors), before))

    def _magnitudes(self, place: Place, shares: Sequence[PlaceChange]) -> Tensor:
        """Return DoRA's magnitudes of the rows of a place."""
        out = place.view.matrix[0]
        if holds_columns(OutputModule(place, tuple(shares)), self.to):
            patch = shares[0].patch
            shape = stored_magnitude(patch) if self.to.copies else (-1,)
            return self._stored(patch.module.shared["magnitude"]).reshape(shape)
        total, covered = torch.zeros(out, 1, dtype=torch.float64), 0
        for s in shares:
            axis, shape = s.patch.magnitude or ("in", ())
            if axis != "out" or "magnitude" not in self.to.endings:
                raise FitError(f"{self.to.name} cannot store this magnitude of DoRA", place.name,
                               TO_LORA)  # fmt: skip
            value = self.evaluator.cache.fetch(s.patch.module.shared["magnitude"]).double().reshape(shape)
            total += placed(value, s, out)
            covered += sum(run.rows for run in s.runs)
        if covered != out or any(s.strength != 1 for s in shares):
            raise FitError("DoRA for a part of the rows, or with a strength, has no exact form here", place.name,
                           TO_LORA)  # fmt: skip
        magnitudes = total.to(self._dtype(shares))
        return magnitudes.reshape(
            magnitude_shape(place) if not self.to.alpha else (-1, *(1 for _ in place.view.shape[1:]))
        )

    def _vector(self, output: OutputModule) -> StoredModule:
        """Return the change of a bias or a norm."""
        place, ending, change = output.place, vector_ending(output.place, self.to), self.rows(output)
        if ending is None and self.to.whole and not place.bare:
            return self._new_value(place, output.shares, change)
        assert ending is not None, "else it has no form"
        return rounded_change(place, ending, change, self._dtype(output.shares))

    def renewed(self, output: OutputModule) -> StoredModule:
        """Return the new value of a vector, for a dialect that cannot hold its change."""
        return self._new_value(output.place, output.shares, self.rows(output))

    def rows(self, output: OutputModule) -> RowMatrix:
        """Return Δ of a module by rows."""
        place = output.place
        changes = [(s.strength, placed_rows(whole_change(s.patch, self.evaluator), s, place)) for s in output.shares]
        return sum_of(place.view.matrix, changes)

    def _new_value(self, place: Place, shares: Sequence[PlaceChange], change: RowMatrix) -> StoredModule:
        """Return the new value of a parameter, in a dtype that holds those of the base and of the change."""
        dtype = self._dtype(shares)
        if self.job.inputs.dtype == KEEP:
            stored = self.evaluator.inputs.weights[place.key].stored.dtype
            base_dtype = TORCH_DTYPES.get(stored, dtype)
            dtype = (
                torch.promote_types(dtype, base_dtype)
                if base_dtype.is_floating_point and base_dtype.itemsize > 1
                else dtype
            )
        new = sum_of(change.shape, [(1.0, self._value_rows(place)), (1.0, change)])
        return rounded_value(place, new, change, dtype)

    def _value_rows(self, place: Place) -> RowMatrix:
        """Return a parameter of the base by rows."""
        (piece, *others), at = place.view.row_slices, self.evaluator.at
        if others or piece.transposed:
            return RowMatrix.of(self.value(place).reshape(place.view.matrix))
        stored = self.evaluator.stored_values(piece.key).reshape(-1, piece.cols)[piece.start : piece.stop]
        return in_place(stored.reshape(place.view.matrix), 0, place.view.matrix[0], at)

    def value(self, place: Place) -> Tensor:
        """Return a parameter of the base."""
        return gathered(place.view, self._rows, self.evaluator.at).reshape(place.view.shape)

    def _rows(self, piece: RowSlice) -> Tensor:
        return self.evaluator.values(piece.key).reshape(-1, piece.cols)

    def _value(self, output: OutputModule) -> StoredModule:
        """Return the change of a parameter that the adapter replaces, X − W, or X where the dialect stores values."""
        place = output.place
        assert output.value is not None, "the caller looked"
        info, strength = output.value
        value = self.evaluator.cache.fetch(info)
        stored = place.view.shape[::-1] if is_turned(place) else place.view.shape
        if self.to.whole and strength == 1:
            tensors = {f".{place.parameter}": value.reshape(stored)}
            return stored_module(place, tensors, Layer(WHOLE, 0, 0, None, 0.0, 0.0))
        ending = self.to.endings["diff" if place.parameter == "weight" else "diff_b"]  # form_of_module has looked
        shape, at = place.view.matrix, self.evaluator.at
        base = self.evaluator.stored_values(place.key)
        pair = (t.reshape(stored).mT if is_turned(place) else t.reshape(shape) for t in (value, base))
        new, before = (in_place(t, 0, shape[0], at) for t in pair)
        return rounded_change(place, ending, sum_of(shape, [(strength, new), (-strength, before)]), torch.float32)


def converter(conversion: Conversion, reader: Reader) -> Converter:
    """Return the maker of a conversion's modules, for one thread."""
    job, to, inputs = conversion.job, conversion.to, conversion.inputs
    at = SINGLE if job.compute_dtype == "fp32" else HOST
    evaluator = Evaluator(inputs, cache_of(job, reader, inputs), at, wide=at is SINGLE)
    return Converter(job, to, conversion.forms, evaluator, reader)


@undisturbed()
def computed(
    conversion: Conversion, make: Callable[[], Converter], reader: Reader, put: Heap | Draft, begin: Counting
) -> WrittenModules:  # fmt: skip
    """Return the tensors of every module, which wait or are in the draft, with what the dialect asks for in addition;
    InputError where none changes anything. `make`: returns what makes the modules, for one thread."""
    job, to, inputs, modules, all_modules, _ = conversion
    here = make()
    here.at  # noqa: B018  # refuses a device that is not there
    changed, _, zeros, _, notes = stored_modules(module_groups(conversion), make, put, begin)

    def renewed(place: Place) -> StoredModule:
        return here.renewed(next(module for module in modules if module.place == place))

    changed = with_biases(changed, all_modules, to, renewed if inputs.base else None, put)
    whole = completed(changed, all_modules, to, here.value if inputs.base else None, put)
    cache = cache_of(job, reader, inputs)
    embeddings = (
        [] if job.command.combines else [entry(i.name, cache.fetch(i)) for i in bundled(inputs.adapters[0], to)]
    )
    return WrittenModules(changed, whole, zeros, embeddings, notes)


def _nbytes(module: OutputModule) -> int:
    """Return about how many bytes the change of a module takes: factors several times, or matrices."""
    out, cols = module.place.view.matrix
    plain = module.shares and all(is_plain(s.patch) for s in module.shares)
    ranks = sum(s.patch.shapes["down"][0] for s in module.shares) if plain else out * cols
    read = sum(prod(shape) for s in module.shares for shape in s.patch.shapes.values())
    return 8 * min(6 * ranks * (out + cols), (len(module.shares) + 4) * out * cols) + 8 * read


class WeightChanges:
    """The combined changes of the weights of one job."""

    def __init__(self, job: AdapterJob, inputs: InputAdapters, reader: Reader) -> None:
        self.job, self.inputs, self.reader = job, inputs, reader
        self._single = job.compute_dtype == "fp32"
        self._evaluators = PerThread(self.evaluator)
        self.combination = Combination(COMBINATIONS[job.method], job.parameters, inputs.adapters)
        self.notes: dict[Note, None] = {}

    def evaluator(self) -> Evaluator:
        """Return what computes the change of a weight by each adapter, for one thread."""
        cache = cache_of(self.job, self.reader, self.inputs)
        return Evaluator(self.inputs, cache, SINGLE if self._single else HOST)

    def of(self, target: Target) -> Delta | None:
        """Return Δ of a weight; None without a change. Factors that are decomposed are in fp64, however they were
        computed."""
        delta = self._combined(target)
        if delta is None or delta.whole is not None or not self._single:
            return delta
        left, right = delta.factors
        return replace(delta, left=left.double(), right=right.double())

    def _combined(self, target: Target) -> Delta | None:
        evaluator = self._evaluators.get()
        changes = [c for c in evaluator.changes(target) if c.strength]
        evaluator.forget()
        uses = [[u for u in target.uses if u.patch.adapter == c.adapter] for c in changes]
        seeds = [self.combination.seed(c.adapter, its) for c, its in zip(changes, uses, strict=True)]
        if target.vector and COMBINATIONS[self.job.method].directions:
            self.notes[Note(f"{self.job.method}: {ADDED_VECTORS}")] = None
        if not changes:
            return None
        return replace(combine(self.job, target, changes, seeds), norms=layer_norms(target, changes, squares_of_part))


@dataclass(frozen=True)
class Combiner(Converter):
    """Makes modules from the combined changes of the weights that they have rows of: from factors in numpy, if these
    are stored, else from matrices."""

    changes: WeightChanges = field(kw_only=True)
    factored: FactoredModules = field(kw_only=True)
    weights: dict[int, Delta | None] = field(default_factory=dict, kw_only=True)
    """Identity of a weight → its Δ, of the weights of the last modules."""
    deltas: dict[str, Delta] = field(default_factory=dict, kw_only=True)
    """Label → Δ of the last modules."""

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        return [*self.changes.notes]

    def forget(self) -> None:
        """Drop what was computed for the last modules."""
        super().forget()
        self.factored.forget()
        self.weights.clear()
        self.deltas.clear()

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return about how many bytes the changes of modules take: factors several times, or matrices."""
        return nbytes_of(self.job, group)

    def where(self, module: OutputModule) -> str:
        """Return the place of a module for errors."""
        return f"{self.job.output}: {module.place.label}"

    def module(self, output: OutputModule, rank: int | None) -> StoredModule:
        """Return one module."""
        return self.factored.module(output, rank) or super().module(output, rank)

    def spectrum(self, output: OutputModule) -> list[LayerSpectrum]:
        """Return the singular values of a module; [] for a Δ of zeros."""
        known = self.factored.spectrum(output)
        return super().spectrum(output) if known is None else known

    def tensors_of(self, output: OutputModule, form: Form, rank: int | None = None) -> StoredModule:
        """Return the tensors of one module, with the facts of its change."""
        tensors, delta = super().tensors_of(output, form, rank), self.delta(output)
        facts = replace(tensors.layer, effect=tensors.layer.effect or delta.effect, before=delta.before,
                        norms=norms_of_parts((part, self.weights[id(part.target)]) for part in output.parts),
                        weight=self.factored.weight_of(output) if tensors.layer.squares else None)  # fmt: skip
        return tensors._replace(layer=facts)

    def cut(self, output: OutputModule, delta: Delta, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α or α / rank."""
        return self.factored.cut(output, rule, rank)

    def rows(self, output: OutputModule) -> RowMatrix:
        """Return Δ of a module by rows."""
        return self.delta(output).rows

    def delta(self, output: OutputModule) -> Delta:
        """Return Δ of a module: the rows of the changes of its weights."""
        label = output.place.label
        if label not in self.deltas:
            self.deltas[label] = self._joined(output)
        return self.deltas[label]

    def _joined(self, output: OutputModule) -> Delta:
        changed = [(part, delta) for part in output.parts if (delta := self._of_weight(part.target)) is not None]
        if all(delta.whole is None for _, delta in changed):
            return Delta.of_factors(delta_of_parts(output, [(part, delta.factored) for part, delta in changed]))
        out, cols = output.place.view.matrix
        parts = [(part, _in_place(part, delta)) for part, delta in changed]
        if len(parts) == 1 and parts[0][0].rows == (range(out),):
            return parts[0][1]
        before = min(delta.before for _, delta in parts) and max(delta.before for _, delta in parts)
        terms = [(1.0, rows_in_order(delta.rows, _order(part, out))) for part, delta in parts]
        return Delta(None, None, sum_of((out, cols), terms).cached(), before)

    def _of_weight(self, target: Target) -> Delta | None:
        if id(target) not in self.weights:
            self.weights[id(target)] = self.changes.of(target)
        return self.weights[id(target)]


def _in_place(part: PlacePart, delta: Delta) -> Delta:
    """Return Δ of rows of a weight, as the place has them."""
    delta = delta.of(part)
    if part.turned is None:
        return delta
    turned, columns = RowMatrix.of(delta.dense().mT.contiguous()), part.turned.columns
    rows = turned if columns is None else turned.of_rows(torch.tensor(columns))
    return Delta(None, None, rows, delta.before)


def _order(part: PlacePart, out: int) -> Tensor:
    """Return for each of `out` rows the row of a part that it is; -1 for others."""
    order, lines = torch.full((out,), -1), torch.tensor(part.order)
    order[lines] = torch.arange(len(lines))
    return order


def combiner(conversion: Conversion, reader: Reader, factored: Callable[[], FactoredModules]) -> Callable[[], Combiner]:
    """Return a function that returns the maker of the modules of combined changes, for one thread."""
    changes = WeightChanges(conversion.job, conversion.inputs, reader)

    def make() -> Combiner:
        here = factored()
        return Combiner(conversion.job, conversion.to, conversion.forms, changes.evaluator(), reader, here.noise,
                        changes=changes, factored=here)  # fmt: skip

    return make
