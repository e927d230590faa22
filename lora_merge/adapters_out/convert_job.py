"""The request of one run of `convert`, what is open, and what was made. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..adapter_options import KEEP
from ..adapters.modules import BUNDLE, AdapterFile
from ..disk.files import StoredTensor
from ..paths import is_folder
from .dialects import Dialect
from .groups import Filled, Place
from .job import AdapterJob
from .module_tensors import Kept
from .output_file import Entry
from .rank_rules import COUNT, RankRules
from .sources import Sources


@dataclass(frozen=True)
class Conversion:
    """The request of one run of `convert`."""

    job: AdapterJob
    to: Dialect
    rules: RankRules | None  # None: exactly
    unnamed: bool = False  # whether the output gets its name from the dialect
    tables: frozenset[str] = frozenset()  # modules of the adapter that are embeddings, which their endings do not say

    def written_as(self, to: Dialect) -> Conversion:
        """Return the conversion to the dialect that is written."""
        job = self.job
        if self.unnamed:
            stem = job.adapters[0].path.name if is_folder(job.adapters[0].path) else job.adapters[0].path.stem
            name = (f"{stem}-convert" if to.name == KEEP else f"{stem}.{to.name}") + (
                "" if to.folder else ".safetensors"
            )
            job = replace(job, inputs=replace(job.inputs, output=job.output.parent / name))
        one_rank = to.folder and self.rules is not None and self.rules.all_are(COUNT)
        return replace(self, job=job, to=replace(to, one_rank=one_rank))


class Opened(NamedTuple):
    """A conversion whose inputs are open."""

    task: Conversion  # with the dialect that is written
    sources: Sources  # the adapter's changes of the base
    there: list[Filled]  # the modules that they become
    everywhere: list[Place]  # all modules that the dialect has


class Writing(NamedTuple):
    """The modules of a conversion, whose bytes are in the draft of the output or wait."""

    made: Sequence[Kept]
    whole: Sequence[Kept]  # with what the dialect asks for in addition
    zeros: Sequence[str]  # the names of those that change nothing
    beside: list[Entry]  # embeddings beside the adapter
    prove: Callable[[Path], Mapping[str, Any]]


def bundled(file: AdapterFile, to: Dialect) -> list[StoredTensor]:
    """Return the embeddings that OneTrainer stores beside an adapter, where the dialect has a place for them."""
    return [file.index.tensors[key] for key in file.ignored if to.bundles and key.startswith(BUNDLE)]


def weight_of(one: Filled) -> int:
    """Return the bytes of the weight that a module changes, in fp64."""
    return 8 * prod(one.place.view.shape)
