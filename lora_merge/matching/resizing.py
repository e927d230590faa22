"""Parameters that an adapter makes larger or replaces.

A larger weight holds the base in its first rows and columns and zeros elsewhere. The size is in the file
(`reshape_weight`; ComfyUI comfy/weight_adapter/base.py), or the file is a control LoRA for Flux.1, by Black Forest
Labs (ComfyUI comfy/lora_convert.py) or diffusers (examples/flux-control), whose first layer has twice the channels.
Any other adapter that does not fit is refused, because a wider one is mostly for another model. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from ..adapters.modules import AdapterFile, Module, Values
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import split_parameter
from ..algorithms import ALGORITHMS, COUNT
from ..algorithms.lora_bias import LORA_BIAS
from ..algorithms.whole import SET
from ..disk.files import StoredTensor
from ..dtypes import WHOLE, Shape, flat
from ..errors import FitError, InputError, MergeError, ShapeMismatch
from ..job import Adapter
from ..models.weights import WeightView, whole
from ..text import Note
from .patch import REPLACED, Match, Patch, PatchPart

ADDED: Final = frozenset({LORA_BIAS.name})
"""Algorithms that PEFT adds to a parameter which the same adapter replaces: `lora_bias` with `bias="all"`."""


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


def sizes(
    replaced: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor], path: Path
) -> tuple[list[MergeError], list[Note]]:
    """Return the errors and the notes on replaced parameters. A value, with its bias, may have more or fewer rows, as
    embeddings and heads do."""
    unfit: list[MergeError] = []
    notes = []
    for key, info in replaced.items():
        old, weight = base[key].shape, replaced.get(key.removesuffix("bias") + "weight")
        if info.shape == old:
            continue
        if len(old) == 1 and (weight is None or weight.shape[0] != info.shape[0]):
            where = f"{path}: {info.name} is {list(info.shape)}, the base has {list(old)}"
            fix = "merge into the checkpoint that the adapter was trained on"
            unfit.append(ShapeMismatch("adapter tensors do not fit the base", where, fix))
        else:
            notes.append(Note(f"{key}: {old[0]} rows become {info.shape[0]}"))
    return unfit, notes


def _check_same_values(adapters: Sequence[Adapter], matched: Sequence[Match], values: Values) -> None:
    """Raise FitError if two adapters store different values of a tensor of the base."""
    for number, one in enumerate(matched):
        for key, info in one.bases.items():
            for other, adapter in zip(matched, adapters, strict=True):
                copy = other.copies.get(key, info)
                if other is not one and (copy.shape != info.shape or values.differing(copy, info)):
                    raise FitError("two adapters were trained on different values of a tensor",
                                   f"{key}: {adapters[number].path}: {info.name}, {adapter.path}: {copy.name}",
                                   "merge one of them, or remove that tensor from the one whose values shall not count"
                                   )  # fmt: skip


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


def check_addable(adapters: Sequence[Adapter], matched: Sequence[Match], values: Values) -> None:
    """Raise FitError if adapters cannot be added: they replace one parameter, or were trained on different values."""
    _check_same_values(adapters, matched, values)
    seen: dict[str, int] = {}
    for number, one in enumerate(matched):
        for key in one.replaced:
            own = {use.patch.algorithm for use in one.uses.get(key, ())}
            if key in seen or own - ADDED or any(key in m.uses for m in matched if m is not one):
                raise FitError("a parameter is replaced as a whole and changed again",
                               f"{key}: by {adapters[number].path}",
                               "merge the adapters one after the other")  # fmt: skip
            seen[key] = number
    sizes = {key: shape for one in matched for key, shape in one.grown.items()}
    for key, shape in sizes.items():
        uses = [u for m in matched for u in m.uses.get(key, ())]
        if any(u.patch.view.shape != shape for u in uses):
            raise FitError("one adapter makes a weight larger that another changes as it is", f"{key} to {list(shape)}",
                           "merge the adapters one after the other, the one that makes it larger last")  # fmt: skip


NO_BIAS: Final = "the adapter trains a bias that the model's layers do not have, so the model would ignore it"
GIVE_BIAS: Final = (
    "train without it (lora_bias), or give the base biases of zeros first, where its config.json can tell "
    "(attention_bias, mlp_bias); else it can only be applied when the model runs"
)

NEW_BIAS: Final = "{names}: the base has no such bias; a model whose layers have none ignores it"

CONTROL: Final = ("img_in.lora_A.weight", "single_blocks.0.norm.key_norm.scale")
"""Tensors that only control LoRAs of Black Forest Labs have together."""

MOST_AXES: Final = 8  # of a weight

FIRST: Final = re.compile(r"(?:.*[._])?(?:img_in|x_embedder)")
"""Flux.1's first layer, by the names of both layouts."""


def grown(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> WeightView:
    """Return the weight at the adapter's size; `view` itself where the size stays.

    `model` is the base's architecture. FitError if the weight would shrink, or is only a part of a tensor of the base.
    """
    shape = _wanted(module, view, adapter, values, model)
    if shape == view.shape:
        return view
    piece, where = (
        view.row_slices[0],
        f"{adapter.path}: {module.where} to {list(shape)}, the base has {list(view.shape)}",
    )
    if len(shape) != len(view.shape):
        raise FitError(
            "the adapter gives a weight another number of axes", where, "merge into the model it was trained on"
        )
    if any(a < b for a, b in zip(shape, view.shape, strict=True)):
        raise FitError("the adapter makes a weight smaller", where, "merge into the model it was trained on")
    if len(view.row_slices) > 1 or piece.transposed or piece.size != prod(view.shape):
        raise FitError("the adapter makes a part of a fused tensor larger", where, "merge into an unfused checkpoint")
    return whole(piece.key, shape)


def bias_beside(weight: WeightView, base: Mapping[str, StoredTensor]) -> str:
    """Return the name of the bias that a layer lacks, if the layer is one whole tensor, else ""."""
    piece = weight.row_slices[0]
    whole_tensor = weight.shape[:1] == (piece.rows,) and piece.size == prod(base[piece.key].shape)
    named = len(weight.row_slices) == 1 and piece.key.endswith(".weight")
    return piece.key.removesuffix("weight") + "bias" if named and whole_tensor else ""


def _wanted(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> Shape:
    if "reshape" in module.shared:
        info = module.shared["reshape"]
        sizes = [COUNT.number(n) for n in values.numbers(info)] if prod(info.shape) <= MOST_AXES else [None]
        if None in sizes:
            raise InputError("reshape_weight is not a list of sizes", f"{info.file}: {info.name}", "export it again")
        return tuple(size for size in sizes if size is not None)
    first = module.parameter == "weight" and FIRST.fullmatch(module.name)
    if not first or not {"up", "down"} <= set(module.slots):
        return view.shape
    wide = module.slots["up"].shape[0], module.slots["down"].shape[-1]
    doubled = model == "Flux.1" and len(view.shape) == 2 and wide == (view.shape[0], 2 * view.shape[1])
    return wide if doubled or all(key in adapter.index.tensors for key in CONTROL) else view.shape
