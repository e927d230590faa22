"""Modules that lack a tensor which the rest of their file says they must have. No torch.

What is left of such a module often fits another row of the table: a LoRA without its `up` is a whole difference, an
AdaLoRA without its `lora_E` a plain LoRA, a DoRA without its magnitude the same without DoRA. A trainer treats all
modules alike, so the others tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..adapters.file import Module
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import SHARED
from ..algorithms import ALGORITHMS
from ..errors import InputError

BY_LAYER: Final = frozenset({"mid", "t1", "t2", "bm", "reshape", "scale_override"})
"""Slots that a trainer gives to some layers only, such as convolutions with a kernel."""

UNGATHERED: Final = (
    "DeepSpeed's ZeRO-3 and FSDP leave tensors without elements where a save was not gathered; gather it "
    "(stage3_gather_16bit_weights_on_model_save), or take the weights from the checkpoint (zero_to_fp32.py)"
)
"""What to do about tensors of shape [0]."""

MOST: Final = 2  # modules that have the tensor, at the least, where one has not


def gaps(modules: Sequence[Module], rules: PeftRules) -> dict[str, str]:
    """Return the module that lacks a slot → the slot."""
    weights = [m for m in modules if m.parameter == "weight"]
    biases = {m.name for m in modules if m.parameter == "bias"}
    kinds = Counter((_has(m), m.algorithms) for m in weights)
    paired = any({"up", "down"} <= m.slots.keys() for m in weights)
    found: dict[str, str] = {}
    for m in weights:
        has = _has(m)
        if {"up", "down"} <= has:
            missing = rules.of(m.name).beside_pairs - has - ({"bias"} if m.name in biases else set())
        else:
            missing = frozenset({"up"} if paired and m.slots.keys() == {"down"} else ())
        missing = missing or (_alone(m, kinds) if kinds[has, m.algorithms] == 1 else missing)
        if missing:
            found[m.where] = min(missing)
    return found


def _has(m: Module) -> frozenset[str]:
    return frozenset({*m.slots, *m.shared}) - BY_LAYER


def _alone(m: Module, kinds: Mapping[tuple[frozenset[str], tuple[str, ...]], int]) -> frozenset[str]:
    """Return the one slot that sets this module apart from all others of its algorithms."""
    for (slots, algorithms), count in kinds.items():
        missing = slots - _has(m)
        if count < MOST or len(missing) != 1 or not _has(m) < slots:
            continue
        (slot,) = missing
        common = set(algorithms) & set(m.algorithms)
        if any(slot in SHARED or slot in ALGORITHMS[name].slots for name in common):
            return missing
    return frozenset()


def incomplete(what: str, path: Path) -> InputError:
    """Return the error for a module that lacks a tensor."""
    return InputError("the adapter is incomplete", f"{path}: {what}", "export or download it again")


def lacks(module: Module) -> str:
    """Return which partner is missing for the closest row of the table."""
    known = [ALGORITHMS[a] for a in module.algorithms]
    without = sorted(([s for s, must in row.slots.items() if must and s not in module.slots] for row in known), key=len)
    have = ", ".join(sorted(module.slots)) or "alpha"
    first = next((g for g in without if g), None)
    if first is None:
        return f"{module.where} mixes tensors of different algorithms ({have})"
    return f"{module.where} has {have} but no {', '.join(first)}"
