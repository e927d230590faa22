"""The dialect of an adapter's own file, for sums in its words and for conversions that keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..adapter_options import KEEP
from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.suffixes import split_parameter
from ..errors import FitError
from ..files.folder_layouts import PEFT_PREFIX
from ..models.weights import whole
from ..options import shown
from .dialects import CANONICAL, DIALECTS, PRODUCT_ALGORITHMS, Dialect
from .groups import Filled, Place
from .job import WHOLE
from .output_file import NORM_ENDINGS, PAIRS
from .sources import Sources

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
    if kind == "LORA" or (isinstance(kind, str) and kind.lower() in PRODUCT_ALGORITHMS):
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


def in_memory(modules: Sequence[Filled], everywhere: Sequence[Place]) -> tuple[list[Filled], list[Place]]:
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
    return [filled._replace(place=renamed[id(filled.place)]) for filled in modules], [*renamed.values()]


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
