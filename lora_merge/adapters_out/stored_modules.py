"""Makes the modules of an output, several at a time, and stores them: modules that share a weight are one task. No
torch, unless what makes them takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from ..disk.draft import Draft, Heap
from ..errors import InputError
from ..progress import Counting
from ..text import Note
from .conversion import Conversion, WrittenModules, weight_of
from .groups import Filled, components
from .job import FACTORS, AdapterJob
from .module_tensors import StoredModule, waiting
from .parallel import PerThread, side_by_side
from .rank_rules import LayerSpectrum, shared_out


class Maker(Protocol):
    """Makes modules in one thread."""

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        ...

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return about how many bytes the changes of modules take."""
        ...

    def spectra(self, group: Sequence[Filled]) -> list[LayerSpectrum]:
        """Return the singular values of the modules that are matrices, for the rule `size`."""
        ...

    def modules(self, group: Sequence[Filled], ranks: Mapping[str, int]) -> list[StoredModule]:
        """Return modules whose bytes are in memory. `ranks`: label → the rank that the rule `size` gave."""
        ...


def stored_modules(
    conversion: Conversion, make: Callable[[], Maker], put: Heap | Draft, begin: Counting
) -> WrittenModules:  # fmt: skip
    """Return the modules of a conversion, whose bytes wait or are in the draft; InputError where none changes anything.
    `make`: returns what makes them, for one thread."""
    job, modules, makers = conversion.job, conversion.modules, PerThread(make)
    here, together = makers.get(), job.rules.together
    groups = components(modules) if job.combines else [[module] for module in modules]
    bound = job.inputs.max_memory // 2  # the rest: torch, and what waits
    count = begin("make", sum(map(weight_of, modules)) * (1 + together))

    def spectra() -> Generator[LayerSpectrum, None, None]:
        with side_by_side(groups, lambda group: makers.get().spectra(group), here.nbytes, bound) as every:
            for group, some in zip(groups, every, strict=True):
                yield from some
                count(sum(map(weight_of, group)))

    with closing(spectra()) as every:
        ranks = shared_out(job.rules.linear, every) if together else {}
    changed, zeros = list[StoredModule](), list[str]()
    with side_by_side(groups, lambda group: makers.get().modules(group, ranks), here.nbytes, bound) as results:
        for group, stored in zip(groups, results, strict=True):
            for filled, module in zip(group, stored, strict=True):
                if _is_zero(job, module):
                    zeros.append(module.place.name)
                else:
                    changed.append(waiting(module, put))
                count(weight_of(filled))
    if not changed:
        raise _changes_nothing(job)
    return WrittenModules(changed, changed, zeros, [], here.notes)


def _is_zero(job: AdapterJob, module: StoredModule) -> bool:
    """Return whether a module changes nothing. The changes of copies and of whole matrices of one adapter are not
    measured."""
    if job.combines and not module.layer.squares:
        return True
    factored = module.layer.algorithm == FACTORS and not module.copied
    return factored and not (module.layer.rank and module.layer.squares)


def _changes_nothing(job: AdapterJob) -> InputError:
    if job.combines:
        return InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
    return InputError("the adapter changes nothing", str(job.adapters[0].path), "check its strength")
