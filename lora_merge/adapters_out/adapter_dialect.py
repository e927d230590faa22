"""The dialect of an adapter's own file, for sums in its words and for conversions that keep it; and the sources of a
conversion without a base: the weights that the adapter shows, by names and shapes alone. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.suffixes import split_parameter
from ..dtypes import StoredTensor
from ..errors import FitError, UsageError
from ..files.checkpoint import Index
from ..files.folder_layouts import PEFT_PREFIX
from ..matching.orientation import UPRIGHT
from ..models.inferred_base import (
    InferredParameter,
    OtherModel,
    UnknownBaseError,
    candidates,
    complete,
    has_words,
    inferred_base,
)
from ..models.names import Names
from ..models.network import Component
from ..models.weights import whole
from ..options import KEEP
from ..planning.inputs import Inputs
from ..text import shown
from .dialects import CANONICAL, DIALECTS, PRODUCT_ALGORITHMS, Dialect
from .groups import OutputModule, Place, places
from .job import FACTORS, GIVE_BASE, WHOLE, AdapterJob
from .output_file import NORM_ENDINGS, PAIRS
from .sources import NO_SHAPE, NOWHERE, Sources, check_complete, on_base

MODEL_COMPONENT: Final = "model"
"""The component of a language model, and of every model that is no part of a pipeline."""

WHOLE_ENDINGS: Final = {("diff", "weight"): "diff", ("diff", "bias"): "diff_b"}
"""(slot, parameter) → the name of the ending of a whole change."""


@dataclass(frozen=True)
class InputDialect(Dialect):
    """The spelling of the tensors of one file."""

    def copied(self, module: Module, algorithm: str, parameter: str, slot: str) -> str | None:
        """Return the ending that the tensor has."""
        return module.slots[slot].name.removeprefix(module.name)


def input_dialect(file: AdapterFile) -> Dialect:
    """Return the dialect of an adapter; where its modules are spelled differently, the most frequent endings."""
    rules_of(file)  # refuses what is no change of weights
    kind = file.index.config.get("peft_type")
    if isinstance(kind, str) and kind.lower() in (FACTORS, *PRODUCT_ALGORITHMS):
        return DIALECTS["peft"]
    if kind is not None:
        raise FitError(f"a PEFT folder of {shown(kind)} is kept as it is, with its configuration", str(file.path),
                       "name another dialect with --to")  # fmt: skip
    slots: dict[str, Counter[str]] = {}
    for module in file.modules:
        for slot, info in (*module.slots.items(), *module.shared.items()):
            if info.name.startswith(module.name) and (slot != "diff" or WHOLE in module.complete):
                slot = WHOLE_ENDINGS.get((slot, module.parameter), slot)
                slots.setdefault(slot, Counter())[info.name.removeprefix(module.name)] += 1
    common = {slot: count.most_common(1)[0][0] for slot, count in slots.items()}
    spelling = spelling_of(file)
    endings = {**spelling.endings, **common}
    return InputDialect(
        KEEP, "", "", "", CANONICAL, endings, alpha=spelling.alpha, whole=bool(file.strange), bundles=True
    )


def spelling_of(file: AdapterFile) -> Dialect:
    """Return the spelling of plain factors in the words of an adapter: its own endings, or kohya's."""
    pairs = Counter(pair for m in file.modules if "down" in m.slots for pair in PAIRS
                   if m.slots["down"].name.endswith(pair[0]) or _named(m.slots["down"].name, pair[0]))  # fmt: skip
    down, up = pairs.most_common(1)[0][0] if pairs else PAIRS[0]
    alpha = any("alpha" in m.shared for m in file.modules) or (down, up) == PAIRS[0]
    endings = {**DIALECTS["kohya"].endings, "up": up, "down": down}
    return Dialect(KEEP, "", "", "", CANONICAL, endings, alpha=alpha)


def _named(key: str, ending: str) -> bool:
    """Return whether a key has the ending with the name of an adapter inside: .lora_A.default.weight."""
    first, last = ending.rsplit(".", 1)
    parts = key.rsplit(".", 2)
    return len(parts) == 3 and parts[2] == last and parts[0].endswith(first)


def in_memory(modules: Sequence[OutputModule], everywhere: Sequence[Place]) -> tuple[list[OutputModule], list[Place]]:
    """Return places with the names that an adapter of PEFT has for them: those of the model in memory, which may differ
    from the names in its checkpoint (ViT), and keep a head apart from the embeddings that share its weight.

    Models of images have names of their own in each dialect.
    """
    named: dict[str, set[str]] = {}
    for place, shares, *_ in modules:
        for name in (s.patch.module.name for s in shares if s.is_all(place) and place.component == MODEL_COMPONENT):
            named.setdefault(place.module, set()).add(name)
    memory_names = {module: names.pop().removeprefix(PEFT_PREFIX) for module, names in named.items()
           if len(names) == 1 and next(iter(names)).startswith(PEFT_PREFIX)}  # fmt: skip
    if len({*memory_names.values()}) < len(memory_names):
        return [*modules], [*everywhere]
    renamed = {id(p): p._replace(module=memory_names.get(p.module, p.module)) for p in everywhere}
    return [output._replace(place=renamed[id(output.place)]) for output in modules], [*renamed.values()]


def heads(sources: Sources) -> Iterator[Place]:
    """Yield the heads that an adapter of PEFT trains apart though the base shares their weights with its embeddings."""
    assert sources.inputs is not None, "it has a base, or one is assumed"
    for target in sources.targets:
        if target.key not in sources.inputs.names.shapes:
            module, _, parameter = target.key.rpartition(".")
            yield Place(
                PEFT_PREFIX, module, parameter, whole(target.key, target.shape), MODEL_COMPONENT, len(target.shape) == 1
            )


def input_places(sources: Sources, to: Dialect) -> Iterator[Place]:
    """Yield the parameters that an adapter changes, under its own names."""
    assert sources.inputs is not None, "it has a base, or one is assumed"
    names, prefix = sources.inputs.names, PEFT_PREFIX if to.folder else ""
    labels = set()
    for target in sources.targets:
        for use in target.uses:
            module, view = use.patch.module, use.patch.view
            if (module.name, module.parameter) not in labels:
                labels.add((module.name, module.parameter))
                norm = any(info.name.endswith(NORM_ENDINGS) for info in module.slots.values())
                part = names.component(target.key)
                yield Place(prefix, module.name.removeprefix(prefix), module.parameter, view, part, norm)
        for _, info, _ in target.values:
            name, parameter = split_parameter(info.name.removeprefix(prefix))
            view = whole(target.key, target.shape)
            yield Place(prefix, name, parameter, view, names.component(target.key), len(target.shape) == 1)


def without_base(job: AdapterJob, files: Sequence[AdapterFile], to: Dialect) -> Sources:
    """Return the sources of a job whose base is assumed; UsageError where its adapters do not show enough of it.

    Where several architectures fit, the names that the output gets must be the same in all of them. A folder of PEFT
    has the names of the model that was wrapped, which an adapter in PEFT's words has already; and all dialects have
    these names of models whose words do not differ between programs, such as language models.
    """
    wrapped = all(module.name.startswith(PEFT_PREFIX) for file in files for module in file.modules)
    if to.folder and wrapped:
        return as_named(job, files)
    changes, by_model, why = _changes(files), dict[str, tuple[Names, set[Place]]](), ""
    try:
        fitting = candidates(changes)
    except UnknownBaseError:
        fitting = ()
    if wrapped and to.any_model and not any(map(has_words, fitting)):
        return as_named(job, files)
    try:
        for architecture in candidates(changes):
            if to.table and to.table not in architecture.spellings:
                why = f"{to.name} has no names for {architecture.title}"
                continue
            try:
                parts = [complete(p, to.of(architecture).layout(p)) for p in inferred_base(changes, architecture)]
            except OtherModel as e:
                why = str(e)
                continue
            names = Names(parts, {key: shape for part in parts for key, shape in part.shapes.items()})
            by_model[architecture.title] = names, {*places(names, to.of(architecture))}
        if not by_model:
            raise UnknownBaseError(why)
        if any(changed != next(iter(by_model.values()))[1] for _, changed in by_model.values()):
            raise UnknownBaseError(f"it may be for {' or '.join(by_model)}")
    except UnknownBaseError as e:
        raise UsageError(f"the base is needed to name the output: {e}", str(files[0].path), GIVE_BASE) from e
    return _on_shapes(job, next(iter(by_model.values()))[0], files)


def as_named(job: AdapterJob, files: Sequence[AdapterFile]) -> Sources:
    """Return the sources of a job on a base whose weights have the adapters' names, and are [out, in] as theirs are."""
    shapes = {f"{c.module.removeprefix(PEFT_PREFIX)}.{c.parameter}": c.shape for c in _changes(files)}
    part = Component("denoiser", "model", "", keys={name: name for name in shapes}, shapes=shapes)
    return _on_shapes(job, Names([part], shapes), files, UPRIGHT)


def _on_shapes(
    job: AdapterJob, names: Names, files: Sequence[AdapterFile], model: Mapping[str, Any] = MappingProxyType({})
) -> Sources:
    tensors = {key: StoredTensor(key, "F32", shape, NOWHERE, 0, 0) for key, shape in names.shapes.items()}
    return on_base(Inputs(job.inputs, Index(NOWHERE, tensors, {}, (), model), names, (*files,)), stored=False)


def _changes(files: Sequence[AdapterFile]) -> list[InferredParameter]:
    changes = dict[InferredParameter, None]()
    for file in files:
        check_complete(file)
        if file.strange:
            raise UsageError("the adapter replaces whole tensors of the base", f"{file.path}: {file.strange[0].name}",
                             GIVE_BASE)  # fmt: skip
        for module in file.modules:
            if (shape := module.parameter_shape) is None:
                raise UsageError(NO_SHAPE, f"{file.path}: {module.where}", GIVE_BASE)
            changes[InferredParameter(module.name, module.parameter, shape)] = None
    return [*changes]
