"""The tensors that a conversion will write, from headers alone: those of each form, and what PEFT asks for in addition.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..adapter_options import KEEP
from ..disk.files import StoredTensor
from ..dtypes import FLOATS, ITEM_BYTES, Shape
from .dialects import Dialect
from .form import Form, vector_ending, written_dtype
from .groups import Filled, Place
from .job import AdapterJob
from .metadata.sizes import PlannedLayer, factor_shapes
from .module_tensors import Layer, StoredModule
from .output_file import Entry
from .output_modules import Conversion
from .peft.config import BIAS_ENDING, WRAPPED_BIAS, expect_table, is_table, magnitude_shape
from .peft.demands import Parameter, Places, by_module, demands, is_pair, new_biases
from .peft.kronecker import rank_of
from .sources import NOWHERE


def planned_modules(conversion: Conversion) -> list[tuple[Place, PlannedLayer]]:
    """Return the tensors of every module; then what PEFT needs in addition."""
    pairs = zip(conversion.modules, conversion.forms, strict=True)
    return _with_demands([_planned_module(module, form, conversion) for module, form in pairs], conversion)


def _planned_module(module: Filled, form: Form, conversion: Conversion) -> PlannedLayer:
    """Return the tensors of one module: factors at their highest rank, if the numbers decide it."""
    to, job, place, patches = conversion.to, conversion.job, module.place, [s.patch for s in module.shares]
    shape, dtype = place.view.shape, written_dtype(job, module.shares) or "F32"
    if form.kind in ("value", "vector"):
        return _named(module.place, to, {_ending(module, to): (_of_value(module, conversion, dtype), shape)})
    if form.whole:
        ending = to.endings.get("diff", f".{place.parameter}")
        kind = dtype if "diff" in to.endings else _new_dtype(module, conversion, dtype)
        return _named(module.place, to, {ending: (kind, shape)})
    copied, rank = form.kind == "copy", form.highest
    slots: dict[str, tuple[str, Shape]]
    if copied:
        slots, rank = {slot: (_kind(i, job), i.shape) for p in patches for slot, i in p.module.slots.items()}, 0
    else:
        slots = _pair_of(module, conversion, dtype, rank)
    scaled = not copied or any("scale" in p.numbers or "alpha" in p.module.shared for p in patches)
    slots |= {"alpha": ("F32", ())} if to.alpha and scaled else {}
    magnitude = next((p.magnitude for p in patches if p.magnitude is not None), None)
    if job.keeps_forms and magnitude is not None:
        slots["magnitude"] = dtype, _magnitude(place, magnitude, to, copied=copied)
    endings = {
        slot: to.copied(p.module, p.algorithm, place.parameter, slot) for p in patches for slot in p.module.slots
    }
    names = {slot: to.endings.get(slot) or endings.get(slot) or f".{slot}" for slot in slots}
    if copied and patches[0].algorithm in to.products:
        rank = rank_of({names[slot]: stored for slot, (_, stored) in slots.items()})
    return _named(module.place, to, {names[slot]: tensor for slot, tensor in slots.items()}, rank)


def planned_difference(place: Place, form: Form, to: Dialect, dtype: str) -> PlannedLayer:
    """Return the tensors of the difference of a parameter between two checkpoints, at its highest rank."""
    shape, rank = place.view.shape, 0 if form.whole else form.highest
    slots = {"diff": shape} if form.whole else factor_shapes(shape, rank)
    tensors = {to.endings.get(slot, slot): (dtype, stored) for slot, stored in slots.items()}
    tensors |= {".alpha": ("F32", ())} if to.alpha and not form.whole else {}
    return _named(place, to, tensors, rank)


def facts_of(form: Form, layer: PlannedLayer, to: Dialect) -> dict[str, Any]:
    """Return what a plan prints of a module; stacked experts get the one rank that PEFT requires."""
    facts = form.facts
    shown = facts["rank"] or facts["algorithm"] in to.products
    return {**facts, "rank": layer.rank or facts["rank"]} if shown else facts


def _named(place: Place, to: Dialect, tensors: Mapping[str, tuple[str, Shape]], rank: int = 0) -> PlannedLayer:
    """Return a layer of tensors by their endings."""
    return PlannedLayer([(to.key(place.prefix, place.module, e), *tensor) for e, tensor in tensors.items()], rank)


def _ending(module: Filled, to: Dialect) -> str:
    """Return the ending of the change of a vector, or of a new value."""
    place = module.place
    changed = to.endings.get("diff" if place.parameter == "weight" else "diff_b")
    return (changed if module.value is not None else vector_ending(place, to)) or f".{place.parameter}"


def _pair_of(module: Filled, conversion: Conversion, dtype: str, rank: int) -> dict[str, tuple[str, Shape]]:
    """Return the factors of a layer, or of an embedding; FitError for a dialect that cannot store these."""
    to, (out, *cols) = conversion.to, module.place.view.shape
    if "up_bias" in to.endings and is_table(module.place, module.shares):
        expect_table(module.place, to)
        return {"table_up": (dtype, (*cols, rank)), "table_down": (dtype, (rank, out))}
    return {slot: (dtype, shape) for slot, shape in factor_shapes(module.place.view.shape, rank).items()}


def _magnitude(place: Place, magnitude: tuple[str, Shape], to: Dialect, *, copied: bool) -> Shape:
    """Return the shape of DoRA's magnitudes. `magnitude`: axis and shape of the input's."""
    axis, shape = magnitude
    if copied or (axis == "in" and to.copies):
        return (*shape, *(1 for _ in place.view.shape[2:]))
    if axis == "in":
        return (prod(shape),)
    out = place.view.matrix[0]
    return (out, *(1 for _ in place.view.shape[1:])) if to.alpha else _of_rows(place)


def _of_rows(place: Place) -> Shape:
    """Return the shape of the magnitudes of a layer's rows in PEFT."""
    return tuple(place.view.matrix[0] if size < 0 else size for size in magnitude_shape(place))


def _of_value(module: Filled, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the change of a vector, or of a new value."""
    to = conversion.to
    if module.value is None:
        return _new_dtype(module, conversion, dtype) if _ending(module, to) == f".{module.place.parameter}" else dtype
    info, strength = module.value
    return info.dtype if to.whole and strength == 1 else "F32"


def _new_dtype(module: Filled, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the new value of a parameter, which holds those of the base and of the change."""
    weight = conversion.sources.weights.get(module.place.view.row_slices[0].key)
    base_dtype = weight.stored.dtype if weight is not None else ""
    if (
        conversion.job.inputs.dtype != KEEP
        or base_dtype not in FLOATS
        or ITEM_BYTES[base_dtype] < 2
        or base_dtype == dtype
    ):
        return dtype
    return (
        "F32"
        if ITEM_BYTES[base_dtype] == ITEM_BYTES[dtype]
        else max(base_dtype, dtype, key=lambda kind: ITEM_BYTES[kind])
    )


def _with_demands(layers: Sequence[PlannedLayer], conversion: Conversion) -> list[tuple[Place, PlannedLayer]]:
    """Return the modules with what a folder of PEFT or a file of diffusers needs in addition; FitError where it has no
    place for them, UsageError where the base has to be known."""
    to, modules, known_by_module = conversion.to, conversion.modules, by_module(conversion.all_modules)
    if "up_bias" not in to.endings:
        return [(parameter.place, layer) for parameter, layer in zip(modules, layers, strict=True)]
    known = conversion.sources.inputs is not None and conversion.sources.inputs.base.path != NOWHERE
    layers = _with_biases(layers, conversion, known_by_module, known=known)
    parameters = [_parameter(layer, f.place, to) for layer, f in zip(layers, modules, strict=True)]
    asked, whole = demands(parameters, known_by_module, to, known=known), list[tuple[Place, PlannedLayer]]()
    kind = next((dtype for layer in layers for _, dtype, shape in layer.tensors if shape), "F32")
    for layer, parameter in zip(layers, parameters, strict=True):
        low = parameter.place.module in asked.low and is_pair(parameter, to)
        whole.append((parameter.place, _pair(parameter.place, asked.rank, to, kind) if low else layer))
    whole += [(p, _pair(p, 1, to, kind)) for p in asked.factors]
    added: list[tuple[Place, str, str, Shape]]
    added = [(p, to.endings.get("up_bias", ""), kind, p.view.matrix[:1]) for p in asked.biases]
    added += [(p, to.endings.get("magnitude", ""), "F32", _of_rows(p)) for p in asked.magnitudes]
    wide = "F32" if conversion.job.compute_dtype == "fp32" else "F64"
    added += [(p, f".{p.parameter}", wide, p.view.shape) for p in asked.values]
    whole += [(p, PlannedLayer([(to.key(p.prefix, p.module, end), dtype, shape)])) for p, end, dtype, shape in added]
    return [*whole, *((p, _pair(p, asked.rank, to, kind)) for p in asked.zeros)]


def _with_biases(
    layers: Sequence[PlannedLayer], conversion: Conversion, known_by_module: Places, *, known: bool
) -> list[PlannedLayer]:
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them."""
    to, modules = conversion.to, conversion.modules
    parameters = [_parameter(layer, module.place, to) for layer, module in zip(layers, modules, strict=True)]
    new = {id(place) for place in new_biases(parameters, known_by_module, to, known=known)}
    factored, whole = {m.place.module for m in parameters if m.rank}, list[PlannedLayer]()
    for layer, module, stored in zip(layers, modules, parameters, strict=True):
        if id(module.place) in new or (BIAS_ENDING in stored.endings and to.folder):
            ending = WRAPPED_BIAS if module.place.module in factored else BIAS_ENDING
            ((_, dtype, shape),) = layer.tensors
            dtype = _new_dtype(module, conversion, dtype) if id(module.place) in new else dtype
            layer = _named(module.place, to, {ending: (dtype, shape)})
        whole.append(layer)
    return whole


def without_data(place: Place, layer: PlannedLayer, algorithm: str, to: Dialect) -> StoredModule:
    """Return a module as it would be, without its bytes, for the configuration of PEFT."""
    stem = to.key(place.prefix, place.module, "")
    entries = {n.removeprefix(stem): Entry(n, dtype, shape, memoryview(b"")) for n, dtype, shape in layer.tensors}
    rank = rank_of({e: entry.shape for e, entry in entries.items()}) if algorithm in to.products else layer.rank
    return StoredModule(place, entries, Layer({}, algorithm, rank, rank, float(rank), 0.0, 0.0))


def _parameter(layer: PlannedLayer, place: Place, to: Dialect) -> Parameter:
    stem = to.key(place.prefix, place.module, "")
    return Parameter(place, layer.rank, frozenset(name.removeprefix(stem) for name, _, _ in layer.tensors))


def _pair(place: Place, rank: int, to: Dialect, kind: str) -> PlannedLayer:
    """Return the factors of a layer."""
    shapes = factor_shapes(place.view.shape, rank)
    tensors = [(to.key(place.prefix, place.module, to.endings[slot]), kind, shape) for slot, shape in shapes.items()]
    return PlannedLayer(tensors, rank)


def _kind(info: StoredTensor, job: AdapterJob) -> str:
    """Return the dtype of a tensor that is copied."""
    dtype = written_dtype(job, ())
    return dtype if dtype is not None and info.dtype in FLOATS else info.dtype
