"""The dialect of an adapter's own file, for a conversion that changes its dtype, its α or its ranks alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ...adapter_options import KEEP
from ...adapters.file import AdapterFile, Module
from ...adapters.peft.rules import rules
from ...adapters.suffixes import split_parameter
from ...errors import FitError
from ...files.layouts import PEFT
from ...models.weights import whole
from ...options import shown
from ..dialects import CANONICAL, DIALECTS, Dialect
from ..job import WHOLE
from ..places import Place
from ..sources import Sources
from ..written import NORMS, Spelling

PARAMETERS: Final = {("diff", "weight"): "diff", ("diff", "bias"): "diff_b"}
"""(slot, parameter) → the name of the ending of a whole change."""


@dataclass(frozen=True)
class Own(Dialect):
    """The spelling of the tensors of one file."""

    def copied(self, module: Module, algorithm: str, parameter: str, slot: str) -> str | None:
        """Return the ending that the tensor has."""
        return module.slots[slot].name.removeprefix(module.name)


def own_dialect(file: AdapterFile) -> Dialect:
    """Return the dialect of an adapter; where its modules are spelled differently, the most frequent endings."""
    rules(file.index.config, str(file.path), file.index.metadata)  # refuses what is no change of weights
    kind = file.index.config.get("peft_type")
    if kind == "LORA":
        return DIALECTS["peft"]
    if kind is not None:
        raise FitError(f"a folder of PEFT's {shown(kind)} is kept as it is, with its configuration", str(file.path),
                       "name another dialect with --to")  # fmt: skip
    seen: dict[str, Counter[str]] = {}
    for module in file.modules:
        for slot, info in (*module.slots.items(), *module.shared.items()):
            if info.name.startswith(module.name) and (slot != "diff" or WHOLE in module.complete):
                slot = PARAMETERS.get((slot, module.parameter), slot)
                seen.setdefault(slot, Counter())[info.name.removeprefix(module.name)] += 1
    common = {slot: count.most_common(1)[0][0] for slot, count in seen.items()}
    spelling = Spelling.of(file)
    endings = {**DIALECTS["kohya"].endings, "up": spelling.up, "down": spelling.down, **common}
    return Own(KEEP, "", "", "", CANONICAL, endings, alpha=spelling.alpha, whole=bool(file.strange), bundles=True)


def own_places(sources: Sources, to: Dialect) -> Iterator[Place]:
    """Yield the parameters that an adapter changes, under its own names."""
    assert sources.inputs is not None, "it has a base, or one is assumed"
    names, prefix = sources.inputs.names, PEFT if to.folder else ""
    seen = set()
    for target in sources.targets:
        for use in target.uses:
            module, view = use.patch.module, use.patch.view
            if (module.name, module.parameter) not in seen:
                seen.add((module.name, module.parameter))
                norm = any(info.name.endswith(NORMS) for info in module.slots.values())
                part = names.component(target.key)
                yield Place(prefix, module.name.removeprefix(prefix), module.parameter, view, part, norm)
        for _, info, _ in target.values:
            name, parameter = split_parameter(info.name.removeprefix(prefix))
            view = whole(target.key, target.shape)
            yield Place(prefix, name, parameter, view, names.component(target.key), len(target.shape) == 1)
