"""Modules that lack a tensor which the other modules of their file have. No torch.

The remaining tensors often fit another row of ALGORITHMS: a LoRA without its `up` fits a whole difference, an AdaLoRA
without its `lora_E` a plain LoRA, a DoRA without its magnitude a LoRA. A trainer treats all modules alike, so the
other modules show which tensor is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from ..adapters.modules import Module
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import SHARED_SLOTS, SUFFIXES, split
from ..algorithms import ALGORITHMS
from ..errors import InputError
from ..grouping import by_key

Kinds: TypeAlias = Mapping[tuple[frozenset[str], tuple[str, ...]], int]
"""(slots, algorithms) → number of modules that have them."""

BY_LAYER: Final = frozenset({"mid", "t1", "t2", "bm", "reshape"})
"""Slots that a trainer gives to some layers only, such as convolutions with a kernel."""

NEXT_TO_ALPHA: Final = "scale_override"
"""The slot that some layers have in addition to α; without α it is the scale of every layer."""

UNGATHERED: Final = (
    "DeepSpeed's ZeRO-3 and FSDP leave tensors without elements if a save was not gathered; gather it "
    "(stage3_gather_16bit_weights_on_model_save), or take the weights from the checkpoint (zero_to_fp32.py)"
)
"""The advice for tensors of shape [0]."""

AGREEING: Final = 2  # so many other modules must have the tensor that one module lacks


class Gap(NamedTuple):
    """A tensor that a module lacks."""

    slot: str
    key: str  # the end of its name in the other modules of the file: lora_up.weight


def gaps(modules: Sequence[Module], rules: PeftRules) -> dict[str, Gap]:
    """Return the incomplete modules, each with the tensor that it lacks."""
    # The kinds of modules, by their slots and the formulas that these may belong to.
    weights = [(m, _compared_slots(m)) for m in modules if m.parameter == "weight"]
    biases = {m.name for m in modules if m.parameter == "bias"}
    kinds = Counter((has, m.algorithms) for m, has in weights)
    lacking = _lacking(kinds)
    paired = any({"up", "down"} <= m.slots.keys() for m, _ in weights)
    # What each module lacks: by the configuration, or in comparison with a kind that has one slot more.
    lacking_slots: dict[str, str] = {}
    for m, has in weights:
        if {"up", "down"} <= has:
            missing = rules.of(m.name).pair_slots - has - ({"bias"} if m.name in biases else set())
        else:
            missing = frozenset({"up"} if paired and m.slots.keys() == {"down"} else ())
        missing = missing or (_slot_of_others(m, lacking.get(has, ())) if kinds[has, m.algorithms] == 1 else missing)
        if missing:
            lacking_slots[m.where] = min(missing)
    ends = {slot: _end_of_key(slot, modules) for slot in {*lacking_slots.values()}}
    return {where: Gap(slot, ends[slot]) for where, slot in lacking_slots.items()}


def _end_of_key(slot: str, modules: Iterable[Module]) -> str:
    """Return the end of the keys of this slot, after what they share with their module's name; the slot's name if no
    key shows it."""
    for m in modules:
        info = m.slots.get(slot) or m.shared.get(slot)
        if info is not None and _is_key_of(info.name, m):
            return _end(info.name, m)
    return slot


def _is_key_of(key: str, m: Module) -> bool:
    """Return whether a tensor is the module's own; others are shared with it."""
    parts = split(key)
    return key.startswith(f"{m.name}.") or (parts is not None and parts[0] == m.name)


def _end(key: str, m: Module) -> str:
    """Return a key without the levels that it shares with its module's name."""
    levels = key.split(".")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(levels[:-1], m.name.split("."), strict=False))
    return ".".join(levels[len([*shared]) :])


def _compared_slots(m: Module) -> frozenset[str]:
    """Return the slots of a module, without the slots that only some layers get."""
    optional = {*BY_LAYER, NEXT_TO_ALPHA} if "alpha" in m.shared else BY_LAYER
    return frozenset({*m.slots, *m.shared}) - optional


def _lacking(kinds: Kinds) -> Mapping[frozenset[str], Sequence[tuple[str, tuple[str, ...]]]]:
    """Return slots → (one slot more, algorithms) of the frequent kinds of modules that have it."""
    frequent = (kind for kind, count in kinds.items() if count >= AGREEING)
    return by_key((slots - {slot}, (slot, algorithms)) for slots, algorithms in frequent for slot in slots)


def _slot_of_others(m: Module, others: Iterable[tuple[str, tuple[str, ...]]]) -> frozenset[str]:
    """Return the one slot that this module lacks and the others of its algorithms have; empty if there is none."""
    for slot, algorithms in others:
        if any(slot in SHARED_SLOTS or slot in ALGORITHMS[name].slots for name in set(algorithms) & set(m.algorithms)):
            return frozenset({slot})
    return frozenset()


def incomplete(what: str, path: Path) -> InputError:
    """Return the error for a module that lacks a tensor."""
    return InputError("the adapter is incomplete", f"{path}: {what}", "export or download it again")


def lacks(module: Module) -> str:
    """Return the sentence on the slots that the module lacks for the closest row of ALGORITHMS."""
    known = [ALGORITHMS[a] for a in module.algorithms]
    missing = sorted(([s for s, must in row.slots.items() if must and s not in module.slots] for row in known), key=len)
    ends = [_end_of_key(slot, [module]) for slot in sorted(module.slots)]
    have = ", ".join(ends) or "alpha"
    fewest = next((slots for slots in missing if slots), None)
    if fewest is None:
        return f"{module.where} mixes tensors of different algorithms ({have})"
    key = next((module.slots[slot].name for slot in sorted(module.slots)), "")
    return f"{module.where} has {have} but no {', '.join(_in_spelling(slot, key, module) for slot in fewest)}"


def _in_spelling(slot: str, key: str, module: Module) -> str:
    """Return the end of a key of this slot in the spelling of a key of the file: lora_A.weight for lora_B.weight.

    The rows of one spelling are next to each other in SUFFIXES.
    """
    known = split(key)
    here = SUFFIXES.index(known[1]) if known else 0
    parts = SUFFIXES[here].ending.split(".")

    def distance(index: int) -> tuple[int, int]:
        other = SUFFIXES[index].ending.split(".")
        return sum(first != second for first, second in zip_longest(parts, other)), abs(index - here)

    rows = sorted((index for index, row in enumerate(SUFFIXES) if row.slot == slot), key=distance)
    if not rows:
        return slot
    # An adapter's name, and what a rewritten key has around the ending, stay as in the key.
    nearest = SUFFIXES[rows[0]]
    for old, new in zip(parts, nearest.ending.split("."), strict=False):
        key = key if old == new else f".{new}".join(key.rsplit(f".{old}", 1))
    return _end(key, module) if known and split(key) == (known[0], nearest) else nearest.ending.removeprefix(".")
