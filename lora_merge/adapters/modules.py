"""Groups an adapter's tensors into modules: which tensors belong together, and which algorithms they may belong to.

Every tensor ends up in a module, in `ignored` with a reason, or in `strange`. A strange tensor has no known suffix, so
matching tries it as a new value of a parameter and reports it if it is not. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Final

from ..algorithms import ALGORITHMS
from ..algorithms.whole import SET
from ..dtypes import FLOATS, WHOLE_DTYPES, Shape, StoredTensor, spoken
from ..errors import InputError
from ..files.checkpoint import Index
from ..files.file_signatures import instead
from ..files.gguf.adapter import with_plain_values
from ..grouping import by_key
from ..models.names import UNKNOWN_TITLE, names
from ..paths import typed
from ..text import Note, plural
from .suffixes import SHARED_SLOTS, split, split_row_part

BUNDLE: Final = "bundle_emb."
IGNORED: Final = {
    BUNDLE: "bundled textual-inversion embedding, not a change of weights",
    "emb_params": "textual-inversion embedding, not a change of weights",
    "_aux.": "bookkeeping of the training tool",
}
"""Key prefix → why tensors under it are not merged."""

_IGNORED: Final = tuple(IGNORED)

WRAPPED_LINEAR: Final = ".linear"  # of Module.wrapped

READABLE: Final = FLOATS | WHOLE_DTYPES
"""Dtypes of adapter tensors: floats, and whole numbers for indices and switches. No trainer writes other dtypes."""

SCALE_SLOTS: Final = ("alpha", "scale_override")
"""Shared slots that scale the product of the factors."""

RANK_SLOTS: Final = ("down", "w1_b", "w2_b", "a2", "q")
"""Slots whose stored axis 0 is the rank, the first that a module has."""


MODEL_PREFIX: Final = "a model: "

NO_ADAPTER: Final = "name a LoRA or another adapter in its place"

OF_MODELS: Final = (
    "name a LoRA or another adapter; to merge one into this model: `lora-merge {0} ADAPTER`; to write the "
    "difference of two models as an adapter: `lora-merge extract BASE TUNED`"
)
"""The advice on a model in the place of an adapter."""


@dataclass(frozen=True)
class Module:
    """The tensors that change one parameter of one module."""

    name: str
    parameter: str
    slots: Mapping[str, StoredTensor]
    shared: Mapping[str, StoredTensor]
    algorithms: tuple[str, ...]  # rows of the table that every tensor's suffix allows
    repeated: tuple[tuple[str, StoredTensor], ...] = ()  # further tensors for slots of `shared`; must be equal

    @classmethod
    def of_value(cls, name: str, parameter: str, info: StoredTensor) -> Module:
        """Return the module that replaces a parameter by a tensor of the adapter."""
        return cls(name, parameter, {"diff": info}, {}, (SET.name,))

    @property
    def where(self) -> str:
        """The name for messages."""
        return self.name if self.parameter == "weight" else f"{self.name}.{self.parameter}"

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of all slots, its own and the shared ones."""
        return (*self.slots.values(), *self.shared.values())

    @property
    def wrapped(self) -> bool:
        """Whether LLMs-from-scratch wrapped this layer and calls it `linear`; pkg/llms_from_scratch/appendix_e.py."""
        return self.name.endswith(WRAPPED_LINEAR) and {ALGORITHMS[name].layout for name in self.algorithms} == {
            "in_out"
        }

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Stored shape per slot."""
        return {slot: info.shape for slot, info in self.slots.items()}

    @property
    def height(self) -> int:
        """The number of rows of the weight that the module changes; 0 if its tensors do not show it."""
        up, blocks = self.shapes.get("up", ()), self.shapes.get("blocks", ())
        return up[0] if up else prod(blocks[:2]) if len(blocks) > 1 else 0

    @property
    def complete(self) -> tuple[str, ...]:
        """Algorithms whose required slots the module has, and that know all of the module's slots."""
        return _complete(self.algorithms, frozenset(self.slots))

    @property
    def parameter_shape(self) -> Shape | None:
        """The shape of the parameter that it changes, as its formula shows it; None if it does not."""
        shown = (ALGORITHMS[name].shown_shape(self.shapes) for name in self.complete)
        return next((shape for shape in shown if shape is not None), None)


@lru_cache(maxsize=1024)  # an adapter has thousands of modules of a few kinds
def _complete(algorithms: tuple[str, ...], slots: frozenset[str]) -> tuple[str, ...]:
    rows = [ALGORITHMS[name] for name in algorithms]
    return tuple(
        row.name for row in rows if slots <= row.slots.keys() and row.required <= {*slots, *row.shared, *row.base_slots}
    )


@dataclass(frozen=True)
class AdapterFile:
    """All tensors of one adapter, grouped into modules. No weights have been read, only single values such as α."""

    path: Path
    index: Index
    modules: tuple[Module, ...]
    strange: tuple[StoredTensor, ...]
    ignored: Mapping[str, str]
    notes: tuple[Note, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of its modules, in ascending order."""
        return tuple(sorted({rank for m in self.modules if (rank := rank_of(m))}))


@dataclass
class _Group:
    slots: dict[str, StoredTensor] = field(default_factory=dict)
    shared: dict[str, list[StoredTensor]] = field(default_factory=dict)
    algorithms: tuple[str, ...] | None = None

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors of the group."""
        yield from self.slots.values()
        yield from chain.from_iterable(self.shared.values())

    def narrow(self, algorithms: tuple[str, ...]) -> None:
        """Keep the algorithms that the suffix of one more tensor allows."""
        if self.algorithms is None:
            self.algorithms = algorithms
        elif self.algorithms != algorithms:
            self.algorithms = _common(self.algorithms, algorithms)


@lru_cache(maxsize=1024)
def _common(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the second list that are in the first, too; one answer serves the modules of one kind."""
    return tuple(name for name in second if name in first)


def group(index: Index) -> AdapterFile:
    """Return the adapter's tensors, grouped into modules; InputError if the file is not an adapter."""
    scaled = next((f"{name} is {p.encoding.title}" for name, p in index.packed.items() if p.names), "")
    if how := index.unread.how if index.unread.parts else scaled:
        raise model_in_its_place(index) or InputError(
            "an adapter of codes and scales", f"{index.path}: {how}", "export the adapter in fp32 or bf16"
        )
    index = index if index.gguf is None else replace(index, tensors=with_plain_values(index.tensors), packed={})
    # Each tensor goes to the group of its module and parameter, by the ending of its key.
    groups: dict[tuple[str, str], _Group] = {}
    strange: list[StoredTensor] = []
    ignored: dict[str, str] = {}
    bare: dict[str, StoredTensor] = {}
    for key, info in index.tensors.items():
        if key.startswith(_IGNORED):
            ignored[key] = next(why for prefix, why in IGNORED.items() if key.startswith(prefix))
            continue
        if info.dtype not in READABLE or (info.dtype == "BOOL" and info.shape):  # a single truth value is a switch
            raise model_in_its_place(index) or InputError(
                f"an adapter tensor of {spoken(info.dtype)} values", f"{info.file}: {key}",
                "export the adapter in fp32 or bf16",
            )  # fmt: skip
        name_and_row = split(key)
        if name_and_row is None:
            strange.append(info)
            continue
        name, row = name_and_row
        if row.ending == ".weight":  # belongs to (IA)³ if the module has an `on_input` too
            bare[name] = info
            continue
        members = groups.get((name, row.parameter)) or groups.setdefault((name, row.parameter), _Group())
        if row.slot in SHARED_SLOTS:
            members.shared.setdefault(row.slot, []).append(info)
            continue
        if row.slot in members.slots:
            raise two_in_one_slot(index.path, members.slots[row.slot], info)
        members.slots[row.slot] = info
        members.narrow(row.algorithms)
    # Groups that only look like an adapter's: parameters of a model whose names end like a suffix.
    strange += _scalings(groups, bare)
    plain = {key for key, g in groups.items() if not _is_adapter(g)}
    strange += [info for key in plain for info in groups[key].tensors]
    if _has_no_changes(groups, plain) and "peft_type" not in index.config:  # PEFT may save whole parameters only
        _check_pairs(index, strange)
    # The modules, and the tensors that no module takes.
    modules = tuple(_module(key, groups) for key in groups if key not in plain and groups[key].slots)
    strange += _without_module(groups, modules, {info.name for info in strange})
    wrapped = {m.name for m in modules if m.wrapped}
    inside = {info.name for info in strange if info.name.rpartition(".")[0] in wrapped}
    ignored |= dict.fromkeys(inside, "the base's own tensor inside a wrapped layer")
    strange = [info for info in strange if info.name not in inside]
    return AdapterFile(index.path, index, modules, tuple(strange), ignored, index.notes)


def _check_pairs(index: Index, strange: Iterable[StoredTensor]) -> None:
    """Raise InputError for a file without known endings, unless it may hold pairs of factors of unknown spellings."""
    what = _kind(index)
    if what or not any(True for _ in two_of_a_kind(strange)):
        raise _no_adapter(index, what)


def model_in_its_place(index: Index) -> InputError | None:
    """Return the error for a model in the place of an adapter; None for what may be an adapter."""
    what = "" if looks_like_adapter(index) else _kind(index)
    return _no_adapter(index, what) if what else None


def _kind(index: Index) -> str:
    """Return what a file without adapter tensors is; "" if its keys do not show it."""
    known = names(index)
    if known.what == UNKNOWN_TITLE:
        return ""
    return f"{MODEL_PREFIX}{known.what}" if known.what == known.architecture else known.what


def _no_adapter(index: Index, what: str) -> InputError:
    what = what or (
        f"{MODEL_PREFIX}{index.gguf.architecture}, as GGUF" if index.gguf and index.gguf.architecture else ""
    )
    of_model = OF_MODELS.format(typed([str(index.path)])) if what.startswith(MODEL_PREFIX) else ""
    return InputError(
        "this file contains no adapter tensors" + (f", it is {what}" if what else ""),
        f"{index.path}: {plural(len(index.tensors), 'tensor')}, the first is {next(iter(index.tensors), 'none')!r}",
        of_model or (instead(what) if what else NO_ADAPTER),
    )


def two_of_a_kind(strange: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Yield pairs of matrices without a known ending that may be the factors of one layer, the left one of their
    product first: alone below a path, with a length in common that is at most a quarter of the others."""
    matrices = (info for info in strange if len(info.shape) == 2)
    below = by_key((info.name.removesuffix(".weight").rpartition(".")[0], info) for info in matrices)
    for some in (some for some in below.values() if len(some) == 2):
        for left, right in (some, some[::-1]):
            if left.shape[1] == right.shape[0] and 4 * left.shape[1] <= min(left.shape[0], right.shape[1]):
                yield left, right


def _without_module(
    groups: Mapping[tuple[str, str], _Group], modules: Sequence[Module], strange: Container[str]
) -> list[StoredTensor]:
    """Return the tensors in shared slots that no module takes, such as an alpha without factors."""
    shared = [info for g in groups.values() if not g.slots for info in g.tensors if info.name not in strange]
    owned = {info.name for m in modules if shared for info in (*m.tensors, *(copy for _, copy in m.repeated))}
    return [info for info in shared if info.name not in owned]


def _scalings(groups: Mapping[tuple[str, str], _Group], bare: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """Add every bare `.weight` of (IA)³ to its module, and return the tensors that are not of (IA)³."""
    others = []
    for name, info in bare.items():
        owner = groups.get((name, "weight"))
        if owner is not None and "on_input" in owner.slots:
            owner.slots["diff"] = info
        else:
            others.append(info)
    return others


def _has_no_changes(groups: Mapping[tuple[str, str], _Group], plain: Collection[tuple[str, str]]) -> bool:
    """Return whether no key is one that only adapters have. Control LoRAs hold norm scales, but so do Flux models."""
    tensors = (info for key, g in groups.items() if key not in plain for info in g.tensors)
    return all(info.name.endswith("_norm.scale") for info in tensors)


def _is_adapter(g: _Group) -> bool:
    """Return whether this is an adapter's group, not a model's parameter whose name ends like a suffix."""
    return bool(g.slots) or "alpha" in g.shared or "magnitude" in g.shared


def _module(key: tuple[str, str], groups: Mapping[tuple[str, str], _Group]) -> Module:
    """Return the group as a module. Parts of a split module share its alpha, a bias shares the alpha of its factors.

    Of several tensors for one shared slot the first by name is used, whatever their order in the file.
    """
    # All tensors of each shared slot.
    whole, number = split_row_part(key[0])
    g, parent = groups[key], groups.get((whole, "weight"))
    shared: dict[str, list[StoredTensor]] = {slot: [*infos] for slot, infos in g.shared.items()}
    is_bias = key[1] == "bias" and {ALGORITHMS[name].part_of_lora for name in g.algorithms or ()} == {True}
    if parent and (number is not None or is_bias):
        for slot, infos in parent.shared.items():
            if slot in SCALE_SLOTS or not is_bias:
                shared.setdefault(slot, []).extend(infos)
    # The first by name, and the others, which must be equal.
    for infos in shared.values():
        if len(infos) > 1:
            infos.sort(key=lambda info: info.name)
    first = {slot: infos[0] for slot, infos in shared.items()}
    repeated = tuple((slot, info) for slot, infos in shared.items() for info in infos[1:])
    return Module(*key, g.slots, first, g.algorithms or (), repeated)


def is_adapter(index: Index) -> bool:
    """Return whether a checkpoint is an adapter, by its configuration or its tensors."""
    return "peft_type" in index.config or looks_like_adapter(index)


def looks_like_adapter(index: Index) -> bool:
    """Return whether most tensors have an adapter's suffix, so that the file is not a base model.

    A model that was saved with an adapter attached is a base: it also holds the weights of the adapter's layers.
    """
    rows = [name_and_row for key in index.tensors if (name_and_row := split(key)) is not None]
    # Tensors with an ending that only adapters have, and the shared tensors of their modules.
    marked = {module for module, row in rows if row.slot not in SHARED_SLOTS and row.ending != ".weight"}
    count = sum(row.ending != ".weight" and module in marked for module, row in rows)
    count += sum(row.slot == "on_input" for _, row in rows)  # each has a `.weight` too
    if count * 2 <= len(index.tensors):
        return False
    # The weights of all these layers, and others.
    layers = {f"{module}.base_layer.weight" for module in marked}
    of_adapter = sum(row.ending != ".weight" for _, row in rows)
    return not (layers <= index.tensors.keys() and len(index.tensors) > of_adapter + len(layers))


def two_in_one_slot(path: Path, first: StoredTensor, second: StoredTensor) -> InputError:
    """Return the error for two tensors in one slot."""
    return InputError(
        "two adapter tensors are for the same part of a layer", f"{path}: {first.name} and {second.name}",
        "remove one of the two; applying both would double the effect",
    )  # fmt: skip


def weight_shapes(modules: Iterable[Module]) -> dict[str, Shape]:
    """Return for every module the [out, in] of the weight that it changes; () if its tensors do not show it."""
    weights_last = sorted(modules, key=lambda m: m.parameter == "weight")  # a bias of the same name has no width
    return {m.name: weight_shape(m.shapes) for m in weights_last}


def weight_shape(slots: Mapping[str, Shape]) -> Shape:
    """Return [out, in] of the weight that tensors of these shapes change; () if they do not show it.

    By the names of the slots alone, unlike `Module.parameter_shape`: no formula is complete in a module that has lost a
    tensor, such as {up, down, values} of lora_sparse without its indices, but its factors show which model it is for.
    """
    up, down = slots.get("up", ()), slots.get("down", ())
    return (up[0], down[1]) if up and len(down) > 1 else slots.get("diff", ())[:2]


def rank_of(module: Module) -> int:
    """Return the rank of a module from its stored shapes; 0 if the algorithm has none."""
    complete = module.complete
    slot = next((s for s in RANK_SLOTS if s in module.slots), None)
    if slot is None or not (shape := module.slots[slot].shape):
        return 0
    up = module.shapes.get("up", ())
    kernel = up[1:] == (shape[0], *(1 for _ in shape[2:]))  # a convolution's; of experts at rank 1 only
    stack = len(shape) == len(up) == 3 and not kernel and any(ALGORITHMS[name].layout == "experts" for name in complete)
    return shape[1 if stack else -1 if any(ALGORITHMS[name].layout == "in_out" for name in complete) else 0]
