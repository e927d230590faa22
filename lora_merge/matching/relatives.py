"""Layers that share a basis which FRoD computes from the base, in order (`save_projection=False`). No torch.

PEFT sorts every layer that it wraps by kind, the end of its name, and by the number of its block. Of two layers with
the same kind and number it uses the later one in the order of the model's code. The number of a layer outside all
blocks is its position in that order. Source: PEFT 0.21.2, tuners/frod/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from ..adapters.file import Module
from ..adapters.peft.config import CONVERT, ORDER_OF, UNKNOWN_ORDER, refuse
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import bare, shared_kind
from ..algorithms.frod import FROD, LAYER
from ..models.module_order import in_order, type_of
from ..models.weights import WeightView
from .context import AdapterContext
from .patch import Patch

MOST_RELATIVES: Final = 256
"""The most layers that share a basis: those of one kind, one in each block. Each of them is computed from all."""


def related(
    rules: PeftRules, modules: Sequence[Module], dtype: Callable[[Module], str], context: AdapterContext
) -> PeftRules:
    """Return the rules with the relatives and settings of every layer whose basis the file lacks.

    `dtype`: dtype of a module's weight. InputError where the basis depends on an unknown order of the layers.
    """
    layers = {bare(m.name): m for m in modules if FROD.name in m.algorithms}
    if rules.kind != "FROD" or rules.fields.flag("save_projection", default=True) or not layers:
        return rules
    if any(
        key in context.adapter.index.tensors
        for m in layers.values()
        for key in rules.shared(FROD.name, m.name).values()
    ):
        return rules
    order = in_order([*layers], type_of(context.config))
    kinds = _kinds([*layers] if order is None else order, ordered=order is not None)
    if kinds is None:
        raise refuse(rules.kind, UNKNOWN_ORDER, ORDER_OF + CONVERT, rules.fields.where)
    if (most := max(map(len, kinds.values()))) > MOST_RELATIVES:
        raise refuse(rules.kind, f"{most} layers share a basis, more than any model has", CONVERT, rules.fields.where)
    fields, widths = rules.fields, {kind: _width(layers[paths[0]]) for kind, paths in kinds.items()}
    common = {
        "ridge": fields.number("regularization_alpha", 1e-3),
        "share": fields.number("sparse_rate", 0.01),
        "seed": fields.integer("projection_prng_key", 0),
    }
    same = {kind: tuple(layers[p].name for p in paths) for kind, paths in kinds.items()}
    before = list(accumulate((widths[kind],) for kind in sorted(kinds)))
    up_to = dict(zip(sorted(kinds), before, strict=True))
    relatives, settings = {}, {}
    for path, module in layers.items():
        kind = shared_kind(path)
        relatives[module.name] = same[kind]
        settings[module.name] = {**common, "layers": len(kinds[kind]), "dtype": dtype(module), "widths": up_to[kind]}
    return replace(rules, relatives=relatives, layer_settings=settings)


def basis_weights(patch: Patch) -> tuple[WeightView, ...]:
    """Return the weights of all layers from which the patch's basis is computed; empty for other formulas."""
    return tuple(view for slot, view in patch.beside.items() if slot.startswith(LAYER))


def _width(module: Module) -> int:
    """Return the number of a layer's inputs."""
    shape = module.shapes.get("diagonal", ())
    return shape[0] if shape else 0


def _kinds(paths: Sequence[str], *, ordered: bool) -> Mapping[str, Sequence[str]] | None:
    """Return kind → its layers by number; None where this depends on an order that the paths do not have."""
    numbered: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    unordered = set()
    for place, path in enumerate(paths):
        kind, number = shared_kind(path), _number(path)
        level = place if number is None else number
        if number is None or level in numbered.get(kind, {}):
            unordered.add(kind)
        numbered.setdefault(kind, {})[level] = path
        counts[kind] = counts.get(kind, 0) + 1
    if not ordered and any(counts[kind] > 1 for kind in unordered):
        return None
    return {kind: [found[n] for n in sorted(found)] for kind, found in numbered.items()}


def _number(path: str) -> int | None:
    """Return the number of a layer's block: behind `layers`, else the first part of its name that is one."""
    parts = path.split(".")
    after = parts[parts.index("layers") + 1 : parts.index("layers") + 2] if "layers" in parts else []
    found = next((part for part in [*after, *parts] if part.isdecimal()), None)
    return None if found is None else int(found)
