"""A conversion whose inputs are open, and what was written of its modules. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..adapter_options import KEEP
from ..adapters.modules import BUNDLE, AdapterFile
from ..disk.files import StoredTensor
from ..paths import is_folder
from ..text import Note
from .dialects import Dialect
from .form import Form
from .groups import Filled, Place
from .job import FILE, AdapterJob
from .module_tensors import StoredModule
from .output_file import Entry
from .sources import Sources


class Conversion(NamedTuple):
    """A conversion whose inputs are open."""

    job: AdapterJob  # with the output's name and the rule of each module
    to: Dialect  # the dialect that is written
    sources: Sources  # the adapter's changes of the base
    modules: list[Filled]  # the output modules with a change
    all_modules: list[Place]  # all modules that the dialect can name
    forms: list[Form]  # of the modules

    @property
    def forms_by_label(self) -> dict[str, Form]:
        """Label of a module → its form."""
        return {module.place.label: form for module, form in zip(self.modules, self.forms, strict=True)}


class WrittenModules(NamedTuple):
    """The modules of a conversion, whose bytes are in the draft of the output or wait."""

    changed: Sequence[StoredModule]
    whole: Sequence[StoredModule]  # with what the dialect asks for in addition
    zeros: Sequence[Place]  # of modules that change nothing
    embeddings: list[Entry]  # next to the adapter, in its file
    notes: Sequence[Note] = ()


def named(job: AdapterJob, to: Dialect) -> AdapterJob:
    """Return the job of a conversion with the name of its output, which the dialect decides if the user names none."""
    if not job.unnamed:
        return job
    path = job.adapters[0].path
    stem = path.name if is_folder(path) else path.stem
    name = f"{stem}-convert" if to.name == KEEP else f"{stem}.{to.name}"
    return job.at(job.output.parent / (name + ("" if to.folder else FILE)))


def bundled(file: AdapterFile, to: Dialect) -> list[StoredTensor]:
    """Return the embeddings that OneTrainer stores beside an adapter, where the dialect has a place for them."""
    return [file.index.tensors[key] for key in file.ignored if to.bundles and key.startswith(BUNDLE)]


def weight_of(module: Filled) -> int:
    """Return the bytes of the weight that a module changes, in fp64."""
    return 8 * prod(module.place.view.shape)
