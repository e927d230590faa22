"""Methods whose change depends on the number of a layer in the model, where their files leave that out. No torch.

Uni-LoRA with `save_indices=False` stores one vector for all layers; only the patterns of its configuration say which
layers take their factors from it. PEFT numbers the layers in the order of the model's code (tuners/unilora/model.py),
so exactly the trained layers are needed. They are searched among the base's names, which must be those of its model
class (`unnamed_layers`).

FRoD with `save_projection=False` computes a basis from the weights of several layers, in order (`layer_relatives`).
PEFT sorts every layer that it wraps by kind, the end of its name, and by the number of its block. Of two layers with
the same kind and number it uses the later one in the order of the model's code. The number of a layer outside all
blocks is its position in that order. Source: PEFT 0.21.2, tuners/frod/model.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

from ..adapters.modules import Module
from ..adapters.peft.config import CONVERT, ORDER_OF, UNKNOWN_ORDER, refuse
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import bare, is_layer, shared_kind
from ..algorithms import ALGORITHMS
from ..algorithms.base import LAYER_SLOT
from ..dtypes import StoredTensor, flat
from ..models.module_order import in_order, tables, type_of
from ..models.weights import WeightView
from .formula import AdapterContext
from .patch import Patch

EXPERT_NUMBER: Final = re.compile(r"experts\.\d+\.")
SAVE_INDICES: Final = "save it again with save_indices=True, or " + CONVERT

MOST_RELATIVES: Final = 256
"""The most layers that share a basis: those of one kind, one in each block. Each of them is computed from all."""


def unnamed_layers(
    rules: PeftRules, modules: list[Module], base: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> tuple[PeftRules, list[Module]]:
    """Return the rules with the offset of each layer's values, and the modules including the unnamed ones.

    InputError if the layers cannot be determined."""
    if rules.method.names_layers(rules.fields) or modules:
        return rules, modules
    weights = _targets(rules, base)
    why = _doubt(rules, [*weights], config)
    order = None if why or type_of(config) not in tables() else in_order([*weights], type_of(config))
    if order is None:
        raise refuse(rules.kind, why or UNKNOWN_ORDER, SAVE_INDICES, rules.fields.where)
    rank = rules.fields.integer("r", 4)
    *starts, total = accumulate((rank * sum(flat(weights[name].shape)) for name in order), initial=0)
    common = {"rank": rank, "shuffle": rules.fields.integer("proj_seed", 42), "total": total}
    settings = {
        name: {**common, "start": at, "dtype": weights[name].dtype} for name, at in zip(order, starts, strict=True)
    }
    named = [Module(name, "weight", {}, {}, rules.method.algorithms) for name in order]
    return replace(rules, layers=tuple(order), ordered=True, layer_settings=settings), named


def _targets(rules: PeftRules, base: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return path → weight of the layers that the configuration selects."""
    paths = {key.removesuffix(".weight"): info for key, info in base.items() if key.endswith(".weight")}
    saved = rules.fields.texts("modules_to_save")
    return {
        path: info
        for path, info in paths.items()
        if len(info.shape) == 2 and 0 not in info.shape and is_layer(rules.fields, path) and _transformed(rules, path)
        and not any(f".{name}." in f".{path}." for name in saved)
    }  # fmt: skip


def _transformed(rules: PeftRules, path: str) -> bool:
    """Return whether `layers_to_transform` lets a layer be trained. The layer's number is the first one behind a name
    of `layers_pattern`, or, without a pattern, behind two names; a layer that is named in full needs none (PEFT,
    tuners_utils.py, `check_target_module_exists`)."""
    chosen, targets = rules.fields.get("layers_to_transform"), rules.fields.get("target_modules")
    if chosen in (None, []) or isinstance(targets, str) or path in rules.fields.texts("target_modules"):
        return True
    parts = path.split(".")
    numbers = [i for i in range(1, len(parts) - 1) if parts[i].isdecimal()]
    behind = [next((i for i in numbers if parts[i - 1] == name), 0) for name in _pattern(rules)]
    at = next(filter(None, behind), 0) if behind else next((i for i in numbers if i > 1), 0)
    return at > 0 and parts[at] in map(str, chosen if isinstance(chosen, list) else [chosen])


def _pattern(rules: PeftRules) -> Sequence[str]:
    names = rules.fields.get("layers_pattern")
    return [names] if names and isinstance(names, str) else rules.fields.texts("layers_pattern")


def _doubt(rules: PeftRules, paths: list[str], config: Mapping[str, Any]) -> str:
    """Return why these may not be the layers that were trained; "" if they are.

    Every class of a model type has all of its one stack of layers. Only the trained class is sure to have the layers
    outside, such as a head, or a second stack.
    """
    if not paths or rules.fields.get("target_modules") == "all-linear":
        return "neither its file nor the base's names show which layers it was trained on"
    if any(EXPERT_NUMBER.search(path) for path in paths):
        return "transformers 4 has a layer for each expert, transformers 5 one parameter, and no file says which it was"
    if not all(name.isidentifier() for name in _pattern(rules)):
        return "its layers_pattern is no list of names"
    mapping = rules.fields.get("auto_mapping")
    classes = config.get("architectures") or [config.get("_class_name")]
    trained = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if trained and isinstance(classes, list) and trained in classes:
        return ""
    stacks = {_before_number(path) for path in paths}
    if len(stacks) > 1 or "" in stacks:
        return "it may have been trained on a class that lacks some of the base's layers, or has others"
    return ""


def _before_number(path: str) -> str:
    """Return the start of a path before the first number; "" if it has none."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) or "." if numbers else ""


def layer_relatives(
    rules: PeftRules, modules: Sequence[Module], dtype: Callable[[Module], str], context: AdapterContext
) -> PeftRules:
    """Return the rules with the relatives and settings of every layer whose basis the file lacks.

    `dtype`: dtype of a module's weight. InputError if the basis depends on an unknown order of the layers.
    """
    if rules.fields.flag("save_projection", default=True):
        return rules
    # The layers whose basis is computed; none if the file stores one.
    formulas = {m.name: formula for m in modules if (formula := _formula_of_relatives(m))}
    layers = {bare(m.name): m for m in modules if m.name in formulas}
    keys = (key for m in layers.values() for key in rules.shared(formulas[m.name], m.name).values())
    if not layers or any(key in context.adapter.index.tensors for key in keys):
        return rules
    # The layers of each kind, in order.
    order = in_order([*layers], type_of(context.config))
    kinds = _kinds([*layers] if order is None else order, ordered=order is not None)
    if kinds is None:
        raise refuse(rules.kind, UNKNOWN_ORDER, ORDER_OF + CONVERT, rules.fields.where)
    if (most := max(map(len, kinds.values()))) > MOST_RELATIVES:
        raise refuse(rules.kind, f"{most} layers share a basis, more than any model has", CONVERT, rules.fields.where)
    # The settings of the basis: those of the configuration, and the widths of all kinds up to the layer's own.
    fields, widths = rules.fields, {kind: _width(layers[paths[0]]) for kind, paths in kinds.items()}
    ridge, share = fields.number("regularization_alpha", 1e-3), fields.number("sparse_rate", 0.01)
    common = {"ridge": ridge, "share": share, "seed": fields.integer("projection_prng_key", 0)}
    same = {kind: tuple(layers[p].name for p in paths) for kind, paths in kinds.items()}
    before = list(accumulate((widths[kind],) for kind in sorted(kinds)))
    up_to = dict(zip(sorted(kinds), before, strict=True))
    relatives, settings = {}, {}
    for path, module in layers.items():
        kind = shared_kind(path)
        relatives[module.name] = same[kind]
        settings[module.name] = {**common, "layers": len(kinds[kind]), "dtype": dtype(module), "widths": up_to[kind]}
    return replace(rules, relatives=relatives, layer_settings=settings)


def _formula_of_relatives(module: Module) -> str:
    """Return the formula of a module whose basis is computed from all layers of its kind; "" for all other modules."""
    rebuilds = ((name, ALGORITHMS[name].rebuild) for name in module.algorithms)
    return next((name for name, rebuild in rebuilds if rebuild and rebuild.of_relatives), "")


def basis_weights(patch: Patch) -> tuple[WeightView, ...]:
    """Return the weights of all layers from which the patch's basis is computed; empty for other formulas."""
    return tuple(view for slot, view in patch.base_slots.items() if slot.startswith(LAYER_SLOT))


def _width(module: Module) -> int:
    """Return the number of a layer's inputs."""
    shape = module.shapes.get("diagonal", ())
    return shape[0] if shape else 0


def _kinds(paths: Sequence[str], *, ordered: bool) -> Mapping[str, Sequence[str]] | None:
    """Return kind → its layers by number; None if this depends on an order that the paths do not have."""
    numbered: dict[str, dict[int, str]] = {}
    counts, unordered = Counter[str](), set[str]()
    for place, path in enumerate(paths):
        kind, number = shared_kind(path), _number(path)
        level = place if number is None else number
        if number is None or level in numbered.get(kind, {}):
            unordered.add(kind)
        numbered.setdefault(kind, {})[level] = path
        counts[kind] += 1
    if not ordered and any(counts[kind] > 1 for kind in unordered):
        return None
    return {kind: [by_number[n] for n in sorted(by_number)] for kind, by_number in numbered.items()}


def _number(path: str) -> int | None:
    """Return the number of a layer's block: behind `layers`, else the first part of its name that is one."""
    parts = path.split(".")
    after = parts[parts.index("layers") + 1 : parts.index("layers") + 2] if "layers" in parts else []
    number = next((part for part in [*after, *parts] if part.isdecimal()), None)
    return None if number is None else int(number)
