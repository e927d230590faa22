"""The modules of an output: how they are made, stored and named.

Modules are made several at a time; modules that share a weight are one task. No torch, unless what makes them takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..adapters.modules import BUNDLE, AdapterFile
from ..disk.draft import Draft, Heap
from ..dtypes import StoredTensor
from ..errors import FitError, InputError
from ..options import KEEP
from ..paths import is_folder
from ..progress import Counting
from ..text import Note
from .dialects import DIALECTS, Dialect
from .form import Conversion
from .groups import OutputModule, Place, components
from .job import FILE, GIVE_BASE, AdapterJob
from .module_tensors import StoredModule, waiting
from .output_file import Entry, unique
from .parallel import PerThread, side_by_side
from .rank_rules import LayerSpectrum, ranks_by_size

if TYPE_CHECKING:
    from ..engine.tensor_moves import Placement


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
    return job.changed(output=job.output.parent / (name + ("" if to.folder else FILE)))


def bundled(file: AdapterFile, to: Dialect) -> list[StoredTensor]:
    """Return the embeddings that OneTrainer stores next to an adapter, if the dialect has a place for them."""
    return [file.index.tensors[key] for key in file.ignored if to.bundles and key.startswith(BUNDLE)]


def weight_of(module: OutputModule) -> int:
    """Return the bytes of the weight that a module changes, in fp64."""
    return 8 * prod(module.place.view.shape)


def weights_of(job: AdapterJob, modules: Iterable[OutputModule]) -> int:
    """Return the bytes of the weights that modules change, twice if a rule looks at all of them first: the work of a
    command, in plans and while it runs."""
    return sum(map(weight_of, modules)) * (1 + job.rules.of_all_layers)


class Maker(Protocol):
    """Makes modules in one thread."""

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        ...

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return about how many bytes the changes of modules take."""
        ...

    def spectra(self, group: Sequence[OutputModule]) -> list[LayerSpectrum]:
        """Return the singular values of the modules that are matrices, for the rule `size`."""
        ...

    def modules(self, group: Sequence[OutputModule], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return what each module becomes, with its bytes in memory; () if nothing changes. `ranks`: label → the rank
        that the rule `size` gave."""
        ...


class ModuleGroups(NamedTuple):
    """The modules of an output, in groups that are made together."""

    job: AdapterJob
    groups: Sequence[Sequence[OutputModule]]
    nothing: InputError  # the error if no module changes
    at: Placement | None = None  # where most of the work is done; None: on the host


def module_groups(conversion: Conversion) -> ModuleGroups:
    """Return the modules of a conversion; modules that share a weight are made together."""
    job, modules = conversion.job, conversion.modules
    groups = components(modules) if job.command.combines else [[module] for module in modules]
    return ModuleGroups(job, groups, _changes_nothing(job))


def stored_modules(
    modules: ModuleGroups, make: Callable[[], Maker], put: Heap | Draft, begin: Counting
) -> WrittenModules:  # fmt: skip
    """Return the modules of an output, whose bytes wait or are in the draft; InputError where none changes anything.
    `make`: returns what makes them, for one thread."""
    (job, groups, nothing, at), makers = modules, PerThread(make)
    here, of_all_layers = makers.get(), job.rules.of_all_layers
    bound = job.inputs.max_memory // 2  # the rest: torch, and what waits
    count = begin("make", weights_of(job, chain.from_iterable(groups)))

    # Step 1: the ranks, for a rule that looks at the singular values of all modules before one is stored.
    def spectra() -> Generator[LayerSpectrum, None, None]:
        with side_by_side(groups, lambda group: makers.get().spectra(group), here.nbytes, bound, at) as every:
            for group, some in zip(groups, every, strict=True):
                yield from some
                count(sum(map(weight_of, group)))

    with closing(spectra()) as every:
        ranks = ranks_by_size(job.rules.linear, every) if of_all_layers else {}
    # Step 2: the tensors of each module.
    changed, zeros = list[StoredModule](), list[Place]()
    with side_by_side(groups, lambda group: makers.get().modules(group, ranks), here.nbytes, bound, at) as results:
        for group, stored in zip(groups, results, strict=True):
            for output, some in zip(group, stored, strict=True):
                changed += [waiting(module, put) for module in some]
                zeros += [] if some else [output.place]
                count(weight_of(output))
    if not changed:
        raise nothing
    return WrittenModules(changed, changed, zeros, [], here.notes)


def _changes_nothing(job: AdapterJob) -> InputError:
    if job.command.combines:
        return InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
    return InputError("the adapter changes nothing", str(job.adapters[0].path), "check its strength")


def prefix_name(to: Dialect, place: Place) -> str:
    """Return the name of a module in the report: as in the output, without PEFT's own prefix."""
    name = to.key(place.prefix, place.module, "")
    name = name.removeprefix(DIALECTS["peft"].denoiser) if to.folder else name
    return name if place.parameter == "weight" else f"{name}.{place.parameter}"


def entries_of(to: Dialect, modules: Sequence[StoredModule]) -> list[Entry]:
    """Return the tensors of all modules under their keys; FitError where two have one."""
    entries = [
        m.tensors[ending]._replace(name=to.key(m.place.prefix, m.place.module, ending))
        for m in modules for ending in sorted(m.tensors)
    ]  # fmt: skip
    if twice := next(unique(entries), None):
        raise FitError("two layers of the output would have one name", twice,
                       GIVE_BASE if to.name == KEEP else "convert to another dialect")  # fmt: skip
    return entries
