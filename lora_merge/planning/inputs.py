"""The inputs of a job: its base with the names of the weights, and its adapters as modules. Headers alone are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

from ..adapters.modules import AdapterFile
from ..files.checkpoint import Index
from ..files.file_uses import Folder, adapter_folder
from ..job import Job, ResolvedJob
from ..matching.trained_weights import with_trained_weights
from ..models.names import Names
from ..models.part_factors import on_base
from .checkpoint_cache import CheckpointCache
from .containers import OutputContainer, check_name, check_names, container_of, with_names_of


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a job: the base with the names of its weights, and its adapters as modules."""

    job: Job  # as the user asked for it
    base: Index
    names: Names
    adapters: tuple[AdapterFile, ...]
    folders: tuple[Folder | None, ...] = ()
    """For each adapter the files of its folder; None for a file."""

    @classmethod
    def joined(cls, job: Job, base: Index, lookup: Names, adapters: Iterable[AdapterFile]) -> Inputs:
        """Return the inputs, each adapter with the weights that were trained with it; FitError for such without a
        place in the base."""
        both = []
        for file in adapters:
            whole = file.index.path.is_dir() and not {*file.index.files} & {*base.files}
            folder = adapter_folder(file.index) if whole else None
            both.append(with_trained_weights(file, folder, lookup, base.tensors, job.unmatched))
        return cls(job, base, lookup, tuple(file for file, _ in both), tuple(folder for _, folder in both))

    @cached_property
    def container(self) -> OutputContainer:
        """The container of the output; UsageError for one that cannot be written."""
        return container_of(self.job, self.base)

    @cached_property
    def resolved(self) -> ResolvedJob:
        """The job on its base."""
        asked = {f.name: getattr(self.job, f.name) for f in fields(Job)}
        adapters = tuple(on_base(ref, self.names) for ref in self.job.adapters)
        return ResolvedJob(**{**asked, "adapters": adapters, "output": self.container.output})


def open_inputs(job: Job, cache: CheckpointCache, *, merged: bool = True) -> Inputs:
    """Return the inputs of a job, opened or taken from the cache; InputError for a file that cannot be used.

    `merged`: whether the output is a checkpoint like the base, and not an adapter.
    """
    paths = [ref.path for ref in job.adapters]
    base, lookup = cache.base(job.base, job.map, plain=job.base in paths, partners=paths)
    files = (cache.own_adapter(path) if path == job.base else cache.adapter(path, job.base) for path in paths)
    adapters = [with_names_of(base, file) for file in files]
    check_names(job, base, adapters)
    inputs = Inputs.joined(job, base, lookup, adapters)
    if merged:
        check_name(inputs.container)
    return inputs
