"""What becomes of each module of an output, from headers alone: its form, and the tensors that will be written.

A plan prints forms and a run fills them. What a dialect cannot hold is refused here, before anything is computed. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..algorithms import ALGORITHMS
from ..algorithms.whole import FULL, SET
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES, Shape, StoredTensor
from ..errors import FitError
from ..merge_methods import COMBINATIONS
from ..options import KEEP
from ..text import Note, size
from .dialects import Dialect
from .groups import OutputModule, Place, PlaceChange, is_plain, is_stored_pair, rank_of_change
from .input_adapters import InputAdapters
from .job import AUTO, FACTORS, GIVE_RANK, IN_FULL, STORED_AS, WHOLE, AdapterJob, algorithm_in
from .metadata import factor_shapes
from .module_tensors import Layer, PlannedModule, StoredModule
from .output_file import Entry
from .peft.config import BIAS_ENDING, TO_LORA, WRAPPED_BIAS, expect_table, is_table, magnitude_shape, rank_of
from .peft.demands import Places, by_module, demands, is_pair, new_biases
from .rank_rules import COUNT, EXACT, SAME, Rule

NOT_LOW_RANK: Final = "the result is no product of two small factors, so no LoRA stores it exactly"
NO_FACTORS_OF_STACKS: Final = "the weights of stacked experts have no factors in these formats"

FOR_KOHYA: Final = f"{GIVE_RANK} `--to kohya`"

MATRIX_ALGORITHMS: Final = (FULL.name, SET.name)
"""Algorithms whose change of any rows is a whole matrix again."""


FormKind: TypeAlias = Literal["value", "vector", "copy", "matrix", "product"]
"""What is stored: a new value, the change of a vector, the input's tensors as they are, or the change of a matrix, also
as the nearest product of another form, such as LoKr's."""


@dataclass(frozen=True)
class Form:
    """What becomes of one module, as far as headers show it."""

    kind: FormKind
    algorithm: str
    """Of a copy that of the input. Else whole matrices, factors, or AUTO: the smaller of both, when ranks are known."""
    rule: Rule
    """By which factors are cut."""
    rank: int | None = 0
    """Of the factors; None: the values decide."""
    highest: int = 0
    """The most that the rank can be, which is what the disk has to hold."""
    whole: bool = True
    """Whether a whole parameter is stored: by AUTO, if factors of the highest rank are not smaller."""
    dense: bool = False
    """Whether the change has no factors, and is decomposed as a whole matrix."""
    renamed: bool = False
    """Whether the stored factors of a plain LoRA are written as they are, with the same scale."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan prints: the algorithm, and the rank if headers show it, else 0."""
        if self.whole and self.rank is not None:
            return {"algorithm": WHOLE, "rank": 0}
        algorithm = FACTORS if self.algorithm == AUTO else self.algorithm
        return {"algorithm": algorithm, "rank": 0 if self.whole else self.rank or 0}


class Conversion(NamedTuple):
    """A conversion whose inputs are open."""

    job: AdapterJob  # with the output's name and the rule of each module
    to: Dialect  # the dialect that is written
    inputs: InputAdapters  # the adapter's changes of the base
    modules: list[OutputModule]  # the output modules with a change
    all_modules: list[Place]  # all modules that the dialect can name
    forms: Mapping[str, Form]  # label of a module → its form


def matrix_form(  # noqa: PLR0913  # facts of one matrix
    algorithm: str, rule: Rule, matrix: tuple[int, int], ranks: Sequence[int | None], *, name: str, fix: str,
    same: Sequence[int | None] | None = None, cut: bool = False,
) -> Form:  # fmt: skip
    """Return the form of the change of a matrix; FitError for factors of a change that has none and that no rule cuts.

    `ranks`: of the terms of the change; None for one that is not a product of factors. `same`: the ranks to which the
    rule `same` refers, if they are others. `cut`: whether small directions are cut even if the rule is `exact`.
    """
    if algorithm == WHOLE:
        return Form("matrix", WHOLE, rule)
    # Step 1: the rank.
    (out, cols), short = matrix, min(matrix)
    most = short if None in ranks else min(short, sum(r or 0 for r in ranks))
    rank: int | None = None
    if rule.name == EXACT:
        rank = most
    elif rule.name == SAME:
        rank = min(most, max((r or most for r in same or ranks), default=most), rule.ceiling or most)
    elif rule.name == COUNT:
        rank = min(most, rule.ceiling or most)
    highest = min(most, rule.ceiling or most) if rank is None else rank
    # Step 2: factors, or a whole matrix.
    exactly = rule.name == EXACT and not cut
    uncut = exactly and None in ranks
    if uncut and algorithm != AUTO:
        raise FitError(NOT_LOW_RANK, name, fix)
    whole = algorithm == AUTO and (uncut or highest * (out + cols) >= out * cols)
    rule = replace(rule, name="energy", value=1.0) if rule.name == EXACT and cut else rule
    dense = algorithm in (FACTORS, AUTO) and None in ranks and not exactly
    return Form("matrix", algorithm, rule, rank, highest, whole, dense)


def _form_of_combined(job: AdapterJob, module: OutputModule, rule: Rule) -> Form:
    """Return the form of a matrix of combined changes; errors as for `matrix_form`."""
    weights, name, cut = [part.target for part in module.parts], module.place.name, job.command.cuts
    (first, *others) = module.parts  # the factors of one change in several weights have equal rows
    ranks = [rank_of_change(s.patch) for s in module.shares if s.strength] if others else first.ranks
    # All rows of a weight's change are computed in one way.
    linear = COMBINATIONS[job.method].linear and not any(strength for t in weights for _, _, strength in t.values)
    factored = linear and not any(None in target.ranks for target in weights)
    form = matrix_form(job.algorithm, rule, module.place.view.matrix, ranks if factored else [None], name=name,
                       fix=GIVE_RANK, same=ranks, cut=cut)  # fmt: skip
    if any(t.stacked for t in weights) and not form.whole and (cut or rule.name != EXACT):
        raise FitError(NO_FACTORS_OF_STACKS, name, IN_FULL)
    return form


def form_of_module(job: AdapterJob, to: Dialect, module: OutputModule) -> Form:
    """Return the form of a module of a conversion; FitError if the dialect has none for it."""
    place, patches = module.place, [s.patch for s in module.shares]
    rule = job.rules.of_layer(place.label, kernel=place.kernel)
    # Step 1: what is no change of a matrix.
    if module.value is not None or place.vector:
        return _form_of_vector(to, module, rule)
    # Step 2: a module that keeps its algorithm.
    algorithm = FACTORS if job.algorithm == KEEP else job.algorithm
    if job.keeps_forms and not all(map(is_plain, patches)):
        if is_copied(module, to) or not any(p.algorithm in MATRIX_ALGORITHMS for p in patches):
            if not can_copy(module, to):
                raise FitError(f"{to.name} cannot hold {patches[0].algorithm} in this place", place.name, TO_LORA)
            row = ALGORITHMS[patches[0].algorithm]
            rank = row.rank(patches[0].shapes) if row.rank else 0
            return Form("copy", row.name, rule, rank, rank, whole=False)
        algorithm = WHOLE
    elif job.keeps_forms and any(p.magnitude for p in patches):
        _expect_magnitudes(module, to)
        patches = [replace(p, magnitude=None) for p in patches]  # it stays next to the factors
    # Step 3: a change of a matrix.
    if algorithm == WHOLE and "diff" not in to.endings and not to.whole:
        raise FitError(f"{to.name} cannot store whole matrices", place.name,
                       "write `--rank 32`, or choose the format kohya or comfy")  # fmt: skip
    if job.command.combines:
        return _form_of_combined(job, module, rule)
    ranks, name = [rank_of_change(p) for p in patches], place.name
    form = matrix_form(algorithm, rule, place.view.matrix, ranks, name=name, fix=FOR_KOHYA)
    return replace(form, renamed=_is_renamed(job, to, module))


def form_of_difference(job: AdapterJob, to: Dialect, place: Place, *, fresh: bool) -> Form:
    """Return the form of a parameter's difference between two checkpoints, if there is one. `fresh`: whether its new
    value is stored."""
    rule = job.rules.of_layer(place.label, kernel=place.kernel)
    if fresh or place.vector:
        return Form("value" if fresh else "vector", WHOLE, rule)
    if rule.name == EXACT:  # every direction that values have
        rule = replace(rule, name="energy", value=1.0)
    algorithm = algorithm_in(job.algorithm, to)
    form = matrix_form(algorithm, rule, place.view.matrix, [None], name=place.label, fix=GIVE_RANK)
    return form if algorithm in STORED_AS else replace(form, kind="product")


def _form_of_vector(to: Dialect, module: OutputModule, rule: Rule) -> Form:
    """Return the form of a new value or of the change of a vector; FitError if the dialect has none for it."""
    place = module.place
    if module.value is not None:
        ending, (_, strength) = "diff" if place.parameter == "weight" else "diff_b", module.value
        if ending not in to.endings and (not to.whole or strength != 1):
            raise FitError(f"{to.name} cannot store whole tensors", place.name, "convert to kohya, comfy or peft")
        return Form("value", WHOLE, rule)
    if vector_ending(place, to) is None and (place.bare or not to.whole):
        raise FitError(f"{to.name} cannot store biases and norms", place.name, "convert to kohya or comfy")
    return Form("vector", WHOLE, rule)


def _is_renamed(job: AdapterJob, to: Dialect, module: OutputModule) -> bool:
    """Return whether no number of a module and not its α change."""
    if not job.keeps_forms or job.alpha != KEEP or not to.alpha or len(module.shares) != 1:
        return False
    (share,) = module.shares
    patch = share.patch
    plain = is_stored_pair(patch) and patch.magnitude is None and patch.scalars.get("scale")
    if not plain or share.strength != 1 or not share.is_all(module.place):
        return False
    dtypes = {patch.module.slots[slot].dtype for slot in ("up", "down")}
    return dtypes == {written_dtype(job, (share,))} and 0 < patch.shapes["down"][0] <= min(module.place.view.matrix)


def holds_columns(module: OutputModule, to: Dialect) -> bool:
    """Return whether the magnitudes of a module are those of its columns, and a dialect has a place for them: PEFT's of
    embeddings are."""
    (share, *others) = module.shares
    of_columns = (share.patch.magnitude or ("out",))[0] == "in" and not others and share.is_all(module.place)
    has_place = to.copies or ("table_up" in to.endings and is_table(module.place, module.shares))
    return of_columns and share.strength == 1 and has_place


def _expect_magnitudes(module: OutputModule, to: Dialect) -> None:
    """Raise FitError for a dialect that cannot store the magnitudes of DoRA of a module."""
    of_rows = all(s.patch.magnitude is not None and s.patch.magnitude[0] == "out" for s in module.shares)
    if not holds_columns(module, to) and not (of_rows and "magnitude" in to.endings):
        raise FitError(f"{to.name} cannot store this magnitude of DoRA", module.place.name,
                       TO_LORA)  # fmt: skip


def can_copy(module: OutputModule, to: Dialect) -> bool:
    """Return whether the tensors of a module can be written in a dialect as they are, but for their scale."""
    (share, *others) = module.shares
    patch = share.patch
    known = all(to.copied(patch.module, patch.algorithm, module.place.parameter, slot) for slot in patch.module.slots)
    return known and not others and share.is_all(module.place) and (not to.products or is_product(share, to))


def is_product(share: PlaceChange, to: Dialect) -> bool:
    """Return whether a dialect writes the tensors of a module as they are and keeps α in its configuration."""
    return not to.alpha and share.patch.algorithm in to.products and share.patch.magnitude is None


def is_copied(output: OutputModule, to: Dialect) -> bool:
    """Return whether the one tensor of a change is that of a place as it is, and the dialect has a key for it."""
    (share, *others) = output.shares
    module, algorithm = share.patch.module, share.patch.algorithm
    known = all(to.copied(module, algorithm, output.place.parameter, slot) for slot in module.slots)
    return known and not others and share.strength == 1 and share.is_all(output.place)


def vector_ending(place: Place, to: Dialect) -> str | None:
    """Return the ending of the change of a bias, a norm or another vector; None where the dialect has none."""
    slot = {"weight": "w_norm" if place.norm else "diff", "bias": "b_norm" if place.norm else "diff_b"}
    slot_name = slot[place.parameter]
    plain = {"w_norm": "diff", "b_norm": "diff_b"}.get(slot_name, slot_name)
    ending = to.endings.get(slot_name, to.endings.get(plain))
    in_factors = slot_name == "diff_b" and place.view.matrix[1] == 1  # PEFT's lora_B is a layer: its bias is [out]
    return to.endings.get("up_bias") if ending is None and in_factors else ending


def written_dtype(job: AdapterJob, shares: Sequence[PlaceChange]) -> str | None:
    """Return the dtype of the output as files name it: as asked, else that of the first factor; None for as stored."""
    if job.dtype is not None:
        return job.dtype
    if job.inputs.dtype != KEEP:
        return DTYPES[job.inputs.dtype]
    kinds = [info.dtype for s in shares for info in s.patch.module.slots.values() if info.dtype in FLOATS]
    if not shares:
        return None
    wide = [k for k in kinds if ITEM_BYTES[k] > 1]
    return wide[0] if len({*wide}) == 1 else "F32"


NUMBER_BYTES: Final = 4
"""Bytes of each number of ΔW while it is searched, in fp32."""

FACTOR_BYTES: Final = 40
"""Bytes of each number of its factors: in fp64 as they are found, scaled, stored, and compared."""


def svd_bytes(matrix: tuple[int, int], rule: Rule) -> int:
    """Return about how many bytes the decomposition of a ΔW without factors holds at most; a rank that values decide
    may be the highest."""
    out, cols = matrix
    rank = min(out, cols, rule.ceiling or min(out, cols))
    return NUMBER_BYTES * out * cols + FACTOR_BYTES * (out + cols) * rank


def memory_note(layers: Iterable[tuple[str, tuple[int, int], Form]], limit: int) -> list[Note]:
    """Return the note about a layer whose decomposition as a whole matrix may hold more than a limit of bytes, if there
    is one. `layers`: name, (out, cols) and form of each."""
    dense = ((svd_bytes(matrix, form.rule), name, form.rule) for name, matrix, form in layers if form.dense)
    nbytes, name, rule = max(dense, key=itemgetter(0), default=(0, "", Rule(EXACT)))
    if nbytes <= limit:
        return []
    fix = "" if rule.ceiling is not None else "; --max-rank makes that less"
    return [Note(f"{name} is decomposed as a whole matrix, which takes up to {size(nbytes)} of memory at "
                 f"once, more than --max-memory{fix}")]  # fmt: skip


def planned_modules(conversion: Conversion) -> list[PlannedModule]:
    """Return the tensors of every module; then what PEFT needs in addition."""
    return _with_demands([_planned_module(module, conversion) for module in conversion.modules], conversion)


def _planned_module(module: OutputModule, conversion: Conversion) -> PlannedModule:
    """Return the tensors of one module: factors at their highest rank, if the values decide it."""
    form, to, job, place = conversion.forms[module.place.label], conversion.to, conversion.job, module.place
    patches = [s.patch for s in module.shares]
    shape, dtype = place.view.shape, written_dtype(job, module.shares) or "F32"
    if form.kind in ("value", "vector"):
        return PlannedModule(module.place, {_ending(module, to): (_of_value(module, conversion, dtype), shape)})
    if form.whole:
        ending = to.endings.get("diff", f".{place.parameter}")
        kind = dtype if "diff" in to.endings else _new_dtype(module, conversion, dtype)
        return PlannedModule(module.place, {ending: (kind, shape)})
    copied, rank = form.kind == "copy", form.highest
    slots: dict[str, tuple[str, Shape]]
    if copied:
        slots, rank = {slot: (_kind(i, job), i.shape) for p in patches for slot, i in p.module.slots.items()}, 0
    else:
        slots = _pair_of(module, conversion, dtype, rank)
    scaled = not copied or any("scale" in p.scalars or "alpha" in p.module.shared for p in patches)
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
    return PlannedModule(module.place, {names[slot]: tensor for slot, tensor in slots.items()}, rank)


def planned_difference(place: Place, form: Form, to: Dialect, dtype: str) -> PlannedModule:
    """Return the tensors of the difference of a parameter between two checkpoints, at its highest rank."""
    shape, rank = place.view.shape, 0 if form.whole else form.highest
    slots = {"diff": shape} if form.whole else factor_shapes(shape, rank)
    tensors = {to.endings.get(slot, slot): (dtype, stored) for slot, stored in slots.items()}
    tensors |= {".alpha": ("F32", ())} if to.alpha and not form.whole else {}
    return PlannedModule(place, tensors, rank)


def facts_of(form: Form, layer: PlannedModule, to: Dialect) -> dict[str, Any]:
    """Return what a plan prints of a module; stacked experts get the one rank that PEFT requires."""
    facts = form.facts
    shown = facts["rank"] or facts["algorithm"] in to.products
    return {**facts, "rank": layer.rank or facts["rank"]} if shown else facts


def _ending(module: OutputModule, to: Dialect) -> str:
    """Return the ending of the change of a vector, or of a new value."""
    place = module.place
    changed = to.endings.get("diff" if place.parameter == "weight" else "diff_b")
    return (changed if module.value is not None else vector_ending(place, to)) or f".{place.parameter}"


def _pair_of(module: OutputModule, conversion: Conversion, dtype: str, rank: int) -> dict[str, tuple[str, Shape]]:
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


def _of_value(module: OutputModule, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the change of a vector, or of a new value."""
    to = conversion.to
    if module.value is None:
        return _new_dtype(module, conversion, dtype) if _ending(module, to) == f".{module.place.parameter}" else dtype
    info, strength = module.value
    return info.dtype if to.whole and strength == 1 else "F32"


def _new_dtype(module: OutputModule, conversion: Conversion, dtype: str) -> str:
    """Return the dtype of the new value of a parameter, which holds those of the base and of the change."""
    weight = conversion.inputs.weights.get(module.place.key)
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


def _with_demands(modules: list[PlannedModule], conversion: Conversion) -> list[PlannedModule]:
    """Return the modules with what a folder of PEFT or a file of diffusers needs in addition; FitError where it has no
    place for them, UsageError where the base has to be known."""
    to, known_by_module = conversion.to, by_module(conversion.all_modules)
    if "up_bias" not in to.endings:
        return modules
    known = conversion.inputs.base is not None
    modules = _with_biases(modules, conversion, known_by_module, known=known)
    asked = demands(modules, known_by_module, to, known=known)
    kind = next((dtype for module in modules for dtype, shape in module.tensors.values() if shape), "F32")
    low = (module.place.module in asked.low and is_pair(module, to) for module in modules)
    whole = [_pair(m.place, asked.rank, to, kind) if lower else m for m, lower in zip(modules, low, strict=True)]
    whole += [_pair(p, 1, to, kind) for p in asked.factors]
    added: list[tuple[Place, str, str, Shape]]
    added = [(p, to.endings.get("up_bias", ""), kind, p.view.matrix[:1]) for p in asked.biases]
    added += [(p, to.endings.get("magnitude", ""), "F32", _of_rows(p)) for p in asked.magnitudes]
    wide = "F32" if conversion.job.compute_dtype == "fp32" else "F64"
    added += [(p, f".{p.parameter}", wide, p.view.shape) for p in asked.values]
    whole += [PlannedModule(p, {ending: (dtype, shape)}) for p, ending, dtype, shape in added]
    return [*whole, *(_pair(p, asked.rank, to, kind) for p in asked.zeros)]


def _with_biases(
    modules: Sequence[PlannedModule], conversion: Conversion, known_by_module: Places, *, known: bool
) -> list[PlannedModule]:
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them."""
    new = {id(place) for place in new_biases(modules, known_by_module, conversion.to, known=known)}
    factored, whole = {m.place.module for m in modules if m.rank}, list[PlannedModule]()
    for output, module in zip(conversion.modules, modules, strict=True):
        place, tensors = module.place, module.tensors
        if id(place) in new or (BIAS_ENDING in tensors and conversion.to.folder):
            ((dtype, shape),) = tensors.values()
            dtype = _new_dtype(output, conversion, dtype) if id(place) in new else dtype
            tensors = {WRAPPED_BIAS if place.module in factored else BIAS_ENDING: (dtype, shape)}
        whole.append(module._replace(tensors=tensors))
    return whole


def without_data(module: PlannedModule, algorithm: str, to: Dialect) -> StoredModule:
    """Return the planned module without data, enough for `adapter_config.json`."""
    entries = {end: Entry(end, dtype, shape, memoryview(b"")) for end, (dtype, shape) in module.tensors.items()}
    rank = rank_of({e: entry.shape for e, entry in entries.items()}) if algorithm in to.products else module.rank
    return StoredModule(module.place, entries, Layer(algorithm, rank, rank, float(rank), 0.0, 0.0))


def _pair(place: Place, rank: int, to: Dialect, kind: str) -> PlannedModule:
    """Return the factors of a layer."""
    shapes = factor_shapes(place.view.shape, rank)
    return PlannedModule(place, {to.endings[slot]: (kind, shape) for slot, shape in shapes.items()}, rank)


def _kind(info: StoredTensor, job: AdapterJob) -> str:
    """Return the dtype of a tensor that is copied."""
    dtype = written_dtype(job, ())
    return dtype if dtype is not None and info.dtype in FLOATS else info.dtype
