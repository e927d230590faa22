"""What a dialect cannot hold of an adapter, from headers alone: a plan and a run refuse it before anything is computed.
No torch.

The tensors that a conversion will write, from headers alone. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final

from ..adapter_options import KEEP
from ..algorithms.whole import FULL, SET
from ..disk.files import StoredTensor
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES, Shape
from ..errors import FitError
from .conversion import Conversion
from .dialects import Dialect
from .groups import Filled, Place, Share, is_plain
from .job import AUTO, FACTORS, GIVE_RANK, WHOLE, AdapterJob, form
from .metadata.sizes import PlannedLayer
from .module_tensors import Kept, Layer
from .output_file import Entry
from .peft.config import BIAS, WRAPPED, expect_table, is_table, magnitude_shape
from .peft.demands import Own, Parameter, demands, is_pair, new_biases, own_places
from .peft.kronecker import TO_LORA, rank_of
from .planned_layers import known_rank
from .rank_rules import EXACT
from .without_base import NOWHERE

FOR_KOHYA: Final = f"{GIVE_RANK} --to kohya"

MATRICES: Final = (FULL.name, SET.name)
"""Algorithms whose change of any rows is a whole matrix again."""


def expect_held(job: AdapterJob, to: Dialect, one: Filled) -> None:
    """Raise FitError if a dialect has no form for a module, as headers show."""
    place, shares = one.place, one.shares
    if one.value is not None:
        ending, (_, strength) = "diff" if place.parameter == "weight" else "diff_b", one.value
        if ending not in to.endings and (not to.whole or strength != 1):
            raise FitError(f"{to.name} has no place for whole tensors", place.name, "convert to kohya, comfy or peft")
    elif place.vector:
        if vector_ending(place, to) is None and (place.bare or not to.whole):
            raise FitError(f"{to.name} has no place for biases and norms", place.name, "convert to kohya or comfy")
    elif job.keeps_forms:
        _expect_kept(job, to, one)
    elif job.algorithm == WHOLE:
        _expect_matrix(place, to)
    elif _is_exact(job, to, place) and any(known_rank(s.patch) is None for s in shares):
        raise FitError("the change is not low-rank, so it has no exact factors", place.name, FOR_KOHYA)


def _expect_kept(job: AdapterJob, to: Dialect, one: Filled) -> None:
    """Raise FitError for a module that keeps its algorithm, where a dialect cannot hold it."""
    place, shares = one.place, one.shares
    if all(is_plain(s.patch) for s in shares):
        if any(s.patch.magnitude for s in shares):
            _expect_magnitudes(one, to, job.tables)
    elif any(s.patch.algorithm in MATRICES for s in shares) and not is_copied(one, to):
        _expect_matrix(place, to)
    elif not can_copy(one, to):
        raise FitError(f"{to.name} cannot hold {shares[0].patch.algorithm} in this place", place.name, TO_LORA)


def _is_exact(job: AdapterJob, to: Dialect, place: Place) -> bool:
    """Return whether a module becomes factors that no rule cuts."""
    exact = job.rules.of_layer(place.label, kernel=place.kernel).name == EXACT
    return exact and form(FACTORS if job.algorithm == KEEP else job.algorithm, to) == FACTORS


def holds_columns(one: Filled, to: Dialect, tables: Collection[str]) -> bool:
    """Return whether the magnitudes of a module are those of its columns, and a dialect has a place for them: PEFT's of
    embeddings are. `tables`: the modules of the adapter that are known to be embeddings."""
    (share, *others) = one.shares
    of_columns = (share.patch.magnitude or ("out",))[0] == "in" and not others and share.is_all(one.place)
    held = to.copies or ("table_up" in to.endings and is_table(one.place, one.shares, tables))
    return of_columns and share.strength == 1 and held


def _expect_magnitudes(one: Filled, to: Dialect, tables: Collection[str]) -> None:
    """Raise FitError for a dialect that has no place for the magnitudes of DoRA of a module."""
    of_rows = all(s.patch.magnitude is not None and s.patch.magnitude[0] == "out" for s in one.shares)
    if not holds_columns(one, to, tables) and not (of_rows and "magnitude" in to.endings):
        raise FitError(f"{to.name} has no place for this magnitude of DoRA", one.place.name,
                       TO_LORA)  # fmt: skip


def _expect_matrix(place: Place, to: Dialect) -> None:
    """Raise FitError for a dialect that has no place for a whole matrix."""
    if "diff" not in to.endings and not to.whole:
        raise FitError(f"{to.name} has no place for whole matrices", place.name,
                       "give --rank, or convert to kohya or comfy")  # fmt: skip


def can_copy(one: Filled, to: Dialect) -> bool:
    """Return whether the tensors of a module can stand in a dialect as they are, but for their scale."""
    (share, *others) = one.shares
    patch = share.patch
    known = all(to.copied(patch.module, patch.algorithm, one.place.parameter, slot) for slot in patch.module.slots)
    return known and not others and share.is_all(one.place) and (not to.products or is_product(share, to))


def is_product(share: Share, to: Dialect) -> bool:
    """Return whether a dialect writes the tensors of a module as they are and keeps α in its configuration."""
    return not to.alpha and share.patch.algorithm in to.products and share.patch.magnitude is None


def is_copied(one: Filled, to: Dialect) -> bool:
    """Return whether the one tensor of a change is that of a place as it is, and the dialect has a key for it."""
    (share, *others) = one.shares
    module, algorithm = share.patch.module, share.patch.algorithm
    known = all(to.copied(module, algorithm, one.place.parameter, slot) for slot in module.slots)
    return known and not others and share.strength == 1 and share.is_all(one.place)


def vector_ending(place: Place, to: Dialect) -> str | None:
    """Return the ending of the change of a bias, a norm or another vector; None where the dialect has none."""
    slot = {"weight": "w_norm" if place.norm else "diff", "bias": "b_norm" if place.norm else "diff_b"}
    wanted = slot[place.parameter]
    plain = {"w_norm": "diff", "b_norm": "diff_b"}.get(wanted, wanted)
    ending = to.endings.get(wanted, to.endings.get(plain))
    in_factors = wanted == "diff_b" and place.view.matrix[1] == 1  # PEFT's lora_B is a layer: its bias is [out]
    return to.endings.get("up_bias") if ending is None and in_factors else ending


def planned_layer(one: Filled, rank: int, conversion: Conversion) -> PlannedLayer:
    """Return the tensors of one module. `rank`: of its factors, or the most that they can have."""
    to, job, place, patches = conversion.to, conversion.job, one.place, [s.patch for s in one.shares]
    kept = job.keeps_forms  # the algorithm is that of the input
    (out, cols), shape = place.view.matrix, place.view.shape
    dtype = written_dtype(job, one.shares) or "F32"
    if place.vector or one.value is not None:
        return _named(one, to, {_ending(one, to): (_of_value(one, conversion, dtype), shape)})
    copied = kept and not all(map(is_plain, patches))
    dense = copied and any(p.algorithm in MATRICES for p in patches) and not is_copied(one, to)
    whole = dense or job.algorithm == WHOLE
    if job.algorithm == AUTO and "diff" in to.endings and not kept:
        whole = rank * (out + cols) >= out * cols
    slots: dict[str, tuple[str, Shape]]
    if whole:
        ending = to.endings.get("diff", f".{place.parameter}")
        return _named(one, to, {ending: (dtype if "diff" in to.endings else _new_dtype(one, conversion, dtype), shape)})
    if copied:
        slots, rank = {slot: (_kind(i, job), i.shape) for p in patches for slot, i in p.module.slots.items()}, 0
    else:
        slots = _pair_of(one, conversion, dtype, rank)
    scaled = not copied or any("scale" in p.numbers or "alpha" in p.module.shared for p in patches)
    slots |= {"alpha": ("F32", ())} if to.alpha and scaled else {}
    magnitude = next((p.magnitude for p in patches if p.magnitude is not None), None)
    if kept and magnitude is not None:
        slots["magnitude"] = dtype, _magnitude(place, magnitude, to, copied=copied)
    own = {slot: to.copied(p.module, p.algorithm, place.parameter, slot) for p in patches for slot in p.module.slots}
    names = {slot: to.endings.get(slot) or own.get(slot) or f".{slot}" for slot in slots}
    if copied and patches[0].algorithm in to.products:
        rank = rank_of({names[slot]: shape_of for slot, (_, shape_of) in slots.items()})
    return _named(one, to, {names[slot]: told for slot, told in slots.items()}, rank)


def _named(one: Filled, to: Dialect, tensors: Mapping[str, tuple[str, Shape]], rank: int = 0) -> PlannedLayer:
    """Return a layer of tensors by their endings."""
    return PlannedLayer([(to.key(one.place.prefix, one.place.module, e), *own) for e, own in tensors.items()], rank)


def _ending(one: Filled, to: Dialect) -> str:
    """Return the ending of the change of a vector, or of a new value."""
    place = one.place
    changed = to.endings.get("diff" if place.parameter == "weight" else "diff_b")
    return (changed if one.value is not None else vector_ending(place, to)) or f".{place.parameter}"


def _pair_of(one: Filled, conversion: Conversion, dtype: str, rank: int) -> dict[str, tuple[str, Shape]]:
    """Return the factors of a layer, or of an embedding; FitError for a dialect that has no place for these."""
    to, (out, *cols) = conversion.to, one.place.view.shape
    if "up_bias" in to.endings and is_table(one.place, one.shares, conversion.job.tables):
        expect_table(one.place, to)
        return {"table_up": (dtype, (*cols, rank)), "table_down": (dtype, (rank, out))}
    return {"down": (dtype, (rank, *cols)), "up": (dtype, (out, rank, *(1 for _ in cols[1:])))}


def _magnitude(place: Place, own: tuple[str, Shape], to: Dialect, *, copied: bool) -> Shape:
    """Return the shape of DoRA's magnitudes. `own`: axis and shape of the input's."""
    axis, shape = own
    if copied or (axis == "in" and to.copies):
        return (*shape, *(1 for _ in place.view.shape[2:]))
    if axis == "in":
        return (prod(shape),)
    out = place.view.matrix[0]
    return (out, *(1 for _ in place.view.shape[1:])) if to.alpha else _of_rows(place)


def _of_rows(place: Place) -> Shape:
    """Return the shape of the magnitudes of a layer's rows in PEFT."""
    return tuple(place.view.matrix[0] if size < 0 else size for size in magnitude_shape(place))


def _of_value(one: Filled, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the change of a vector, or of a new value."""
    to = conversion.to
    if one.value is None:
        return _new_dtype(one, conversion, dtype) if _ending(one, to) == f".{one.place.parameter}" else dtype
    info, strength = one.value
    return info.dtype if to.whole and strength == 1 else "F32"


def _new_dtype(one: Filled, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the new value of a parameter, which holds those of the base and of the change."""
    weight = conversion.sources.weights.get(one.place.view.row_slices[0].key)
    own = weight.stored.dtype if weight is not None else ""
    if conversion.job.inputs.dtype != KEEP or own not in FLOATS or ITEM_BYTES[own] < 2 or own == dtype:
        return dtype
    return "F32" if ITEM_BYTES[own] == ITEM_BYTES[dtype] else max(own, dtype, key=lambda kind: ITEM_BYTES[kind])


def with_demands(layers: Sequence[PlannedLayer], conversion: Conversion) -> list[tuple[Place, PlannedLayer]]:
    """Return the modules with what a folder of PEFT or a file of diffusers needs in addition; FitError where it has no
    place for them, UsageError where the base has to be known."""
    to, there, own = conversion.to, conversion.modules, own_places(conversion.all_modules)
    if "up_bias" not in to.endings:
        return [(one.place, layer) for one, layer in zip(there, layers, strict=True)]
    known = conversion.sources.inputs is not None and conversion.sources.inputs.base.path != NOWHERE
    layers = _with_biases(layers, conversion, own, known=known)
    made = [_parameter(layer, f.place, to) for layer, f in zip(layers, there, strict=True)]
    asked, whole = demands(made, own, to, known=known), list[tuple[Place, PlannedLayer]]()
    kind = next((dtype for layer in layers for _, dtype, shape in layer.tensors if shape), "F32")
    for layer, one in zip(layers, made, strict=True):
        low = one.place.module in asked.low and is_pair(one, to)
        whole.append((one.place, _pair(one.place, asked.rank, to, kind) if low else layer))
    whole += [(p, _pair(p, 1, to, kind)) for p in asked.factors]
    added: list[tuple[Place, str, str, Shape]]
    added = [(p, to.endings.get("up_bias", ""), kind, p.view.matrix[:1]) for p in asked.biases]
    added += [(p, to.endings.get("magnitude", ""), "F32", _of_rows(p)) for p in asked.magnitudes]
    wide = "F32" if conversion.job.compute_dtype == "fp32" else "F64"
    added += [(p, f".{p.parameter}", wide, p.view.shape) for p in asked.values]
    whole += [(p, PlannedLayer([(to.key(p.prefix, p.module, end), dtype, shape)])) for p, end, dtype, shape in added]
    return [*whole, *((p, _pair(p, asked.rank, to, kind)) for p in asked.zeros)]


def _with_biases(
    layers: Sequence[PlannedLayer], conversion: Conversion, own: Own, *, known: bool
) -> list[PlannedLayer]:
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them."""
    to, there = conversion.to, conversion.modules
    made = [_parameter(layer, one.place, to) for layer, one in zip(layers, there, strict=True)]
    new = {id(place) for place in new_biases(made, own, to, known=known)}
    factored, whole = {m.place.module for m in made if m.rank}, list[PlannedLayer]()
    for layer, one, stored in zip(layers, there, made, strict=True):
        if id(one.place) in new or (BIAS in stored.endings and to.folder):
            ending = WRAPPED if one.place.module in factored else BIAS
            ((_, dtype, shape),) = layer.tensors
            dtype = _new_dtype(one, conversion, dtype) if id(one.place) in new else dtype
            layer = _named(one, to, {ending: (dtype, shape)})
        whole.append(layer)
    return whole


def kept(place: Place, layer: PlannedLayer, algorithm: str, to: Dialect) -> Kept:
    """Return a module as it would be, without its bytes, for the configuration of PEFT."""
    stem = to.key(place.prefix, place.module, "")
    entries = {n.removeprefix(stem): Entry(n, dtype, shape, memoryview(b"")) for n, dtype, shape in layer.tensors}
    rank = rank_of({e: one.shape for e, one in entries.items()}) if algorithm in to.products else layer.rank
    return Kept(place, entries, Layer({}, algorithm, rank, rank, float(rank), 0.0, 0.0))


def _parameter(layer: PlannedLayer, place: Place, to: Dialect) -> Parameter:
    stem = to.key(place.prefix, place.module, "")
    return Parameter(place, layer.rank, frozenset(name.removeprefix(stem) for name, _, _ in layer.tensors))


def _pair(place: Place, rank: int, to: Dialect, kind: str) -> PlannedLayer:
    """Return the factors of a layer."""
    out, *cols = place.view.shape
    shapes = {"down": (rank, *cols), "up": (out, rank, *(1 for _ in cols[1:]))}
    own = [(to.key(place.prefix, place.module, to.endings[slot]), kind, shape) for slot, shape in shapes.items()]
    return PlannedLayer(own, rank)


def _kind(info: StoredTensor, job: AdapterJob) -> str:
    """Return the dtype of a tensor that is copied."""
    made = written_dtype(job, ())
    return made if made is not None and info.dtype in FLOATS else info.dtype


def written_dtype(job: AdapterJob, shares: Sequence[Share]) -> str | None:
    """Return the dtype of the output as files name it: as asked, else that of the first factor; None for as stored."""
    if job.inputs.dtype != KEEP:
        return DTYPES[job.inputs.dtype]
    kinds = [info.dtype for s in shares for info in s.patch.module.slots.values() if info.dtype in FLOATS]
    if not shares:
        return None
    wide = [k for k in kinds if ITEM_BYTES[k] > 1]
    return wide[0] if len({*wide}) == 1 else "F32"
