"""Parameters that an adapter stores as whole values, which replace the base's. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ..adapters.modules import Module, Values
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import split_parameter
from ..algorithms import ALGORITHMS
from ..algorithms.whole import SET
from ..disk.files import StoredTensor
from ..dtypes import WHOLE, flat
from ..models.weights import WeightView, whole
from .patch import REPLACED, Match, Patch, PatchPart


def with_values(
    modules: Sequence[Module], strange: Sequence[StoredTensor], rules: PeftRules
) -> tuple[list[Module], list[StoredTensor]]:
    """Return the modules, with the trained value of their parameter as one more tensor where the formula needs it, and
    the strange tensors that are left."""
    valued = {name for name, row in ALGORITHMS.items() if row.value}
    wanted = {f"{m.name}.{m.parameter}" for m in modules if not valued.isdisjoint(m.algorithms)}
    stored = [(info, rules.of(info.name).stored_value(info.name)) for info in strange] if wanted else []
    found = {value.target: info for info, value in stored if value and value.kind == "value" and value.rows is None}
    taken = {target: info for target, info in found.items() if target in wanted}
    names = {info.name for info in taken.values()}
    left = [info for info in strange if info.name not in names]
    return [_with_value(m, taken.get(f"{m.name}.{m.parameter}")) for m in modules], left


def _with_value(module: Module, info: StoredTensor | None) -> Module:
    slots = {ALGORITHMS[name].value: info for name in module.algorithms if info and ALGORITHMS[name].value}
    return replace(module, slots={**module.slots, **slots}) if slots else module


def is_zero(module: Module, own: StoredTensor | None, values: Values) -> bool:
    """Return whether the module adds zeros to a tensor of whole numbers, such as a counter, or to an absent one.

    `own`: the base's tensor; None where it has none."""
    info = module.slots.get("diff")
    if info is None or (own is not None and own.dtype not in WHOLE):
        return False
    return values.zero_outside(info, (0, info.shape[0] if info.shape else 1), (0, 0))


def is_copy(info: StoredTensor, own: StoredTensor, values: Values) -> bool:
    """Return whether a tensor equals the base's tensor."""
    return info.shape == own.shape and not values.differing(info, own)


def as_rows(module: Module, view: WeightView) -> tuple[Module, WeightView]:
    """Return module and view as `E·out` rows, where a value or difference is of all stacked experts `[E, out, in]`."""
    info = module.slots.get("diff")
    if info is None or info.shape != view.shape or view.matrix == flat(view.shape):
        return module, view
    slots = {**module.slots, "diff": replace(info, shape=view.matrix)}
    return replace(module, slots=slots), WeightView(view.row_slices, view.matrix)


def is_fixed(info: StoredTensor, view: WeightView, own: StoredTensor, values: Values, strength: float) -> bool:
    """Return whether a value takes the place of a whole tensor of the base as it is, or not at all: at strength 1, and
    whole numbers that have no halfway, such as a counter, or that are the base's."""
    (piece, *others), fits = view.row_slices, (len(info.shape), *info.shape[1:]) == (len(own.shape), *own.shape[1:])
    if others or piece.transposed or piece.size != prod(own.shape) or not fits:
        return False
    if strength == 1 or info.dtype not in WHOLE:
        return strength == 1
    return not (strength and info.shape) or is_copy(info, own, values)


def replace_in_turn(matched: Sequence[Match], base: Mapping[str, StoredTensor]) -> list[Match]:
    """Return the matches for adapters in turn, each applied to the result of the adapters before it.

    A value is left out if later adapters only replace it. If an adapter also changes the parameter, the value becomes
    a change, W' = W + (V − W), because formulas read the weight before and after it.
    """
    read = [{*one.uses, *_beside(one)} for one in matched]
    made = []
    for number, one in enumerate(matched):
        uses, replaced, unused = dict(one.uses), dict(one.replaced), dict(one.unused)
        for key, info in one.replaced.items():
            others = any(key in keys for n, keys in enumerate(read) if n != number)
            if not others and any(key in later.replaced for later in matched[number + 1 :]):
                unused[replaced.pop(key).name] = REPLACED
            elif others and key in base and info.shape == base[key].shape:
                uses[key] = [_as_change(key, replaced.pop(key), number), *uses.get(key, ())]
        made.append(replace(one, uses=uses, replaced=replaced, unused=unused))
    return made


def values_as_changes(matched: Sequence[Match], base: Mapping[str, StoredTensor], *, alone: bool) -> list[Match]:
    """Return the matches for a method that makes one change of all changes of a weight: a value V is the change V − W.

    `alone`: also where no other adapter changes the parameter, because the method changes a single change too.
    """
    made = []
    for number, one in enumerate(matched):
        uses, replaced = dict(one.uses), dict(one.replaced)
        for key, info in one.replaced.items():
            met = alone or any(key in m.uses or key in m.replaced for n, m in enumerate(matched) if n != number)
            if met and key in base and info.shape == base[key].shape and info.dtype not in WHOLE:
                uses[key] = [_as_change(key, replaced.pop(key), number), *uses.get(key, ())]
        made.append(replace(one, uses=uses, replaced=replaced))
    return made


def _beside(one: Match) -> Iterator[str]:
    """Return the keys of the tensors that an adapter's formulas read besides the weights that they change."""
    views = (view for uses in one.uses.values() for use in uses for view in use.patch.beside.values())
    return (piece.key for view in views for piece in view.row_slices)


def _as_change(key: str, info: StoredTensor, number: int) -> PatchPart:
    """Return the patch that replaces a parameter by a value."""
    view = whole(key, info.shape)
    module = Module.of_value(*split_parameter(key), info)
    return PatchPart(Patch(number, module, SET.name, {"diff": view.matrix}, {}, (), view), view.row_slices[0], 0, 1.0)
