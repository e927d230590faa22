"""The files of a folder that fit those of a command, which an error names in place of one that is missing.

Only headers are read, as a merge matches them, for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from ..adapters.modules import AdapterFile, group, is_adapter
from ..adapters.tensor_values import FileValues
from ..disk.files import unreadable
from ..disk.reader import Reader
from ..errors import InputError, MergeError
from ..files.checkpoint import Index, open_checkpoint
from ..files.file_signatures import Choice, candidates, foreign, missing
from ..job import Adapter
from ..matching.match import KnownBase, adapter_context, match_adapter
from ..models.names import Names, names
from ..models.part_factors import Strengths
from ..paths import exists, is_folder
from ..safe_regex import Steps
from .recipe import KEY

LOOK_SECONDS: Final = 1.5
MOST_FILES: Final = 200  # whose headers are read
MOST_NAMED: Final = 5
SAMPLE: Final = 4  # modules of an adapter that are matched before all of them


class _Input(NamedTuple):
    """An opened file: a model with the names of its weights, or an adapter as modules."""

    header: Index
    names: Names | None = None
    adapter: AdapterFile | None = None


class Fitting(Choice):
    """Which files of a folder are a model, or an adapter, that fits other files."""

    def __init__(self, partners: Sequence[Path] = (), *, adapter: bool) -> None:
        """`partners`: the models and adapters that must fit; missing ones do not count."""
        self._paths, self._adapter, self._until = partners, adapter, monotonic() + LOOK_SECONDS
        self._looked = 0
        self.kind = f"{'adapter' if adapter else 'model'}{' that fits' if any(map(exists, partners)) else ''}"
        self.complete, self.chosen = True, list[Path]()
        self.folders_first = any(map(is_folder, partners))

    def of(self, files: Iterable[Path], *, alike: bool) -> list[Path]:
        """Return the files that fit, outputs of merges last; those whose names are alike also if there is no time."""
        self.chosen = []
        for file in files:
            if len(self.chosen) == MOST_NAMED:
                break
            late = monotonic() > self._until or self._looked >= MOST_FILES
            self.complete &= not late
            self._looked += 1
            if (late and alike) or (not late and self._fits(file)):
                self.chosen.append(file)
        return self.chosen if alike else sorted(self.chosen, key=_is_output)

    @cached_property
    def _partners(self) -> list[_Input]:
        opened = []
        for path in filter(exists, self._paths):
            try:
                opened.append(_opened(path, adapter=not self._adapter))
            except MergeError:  # the command itself reports it
                continue
        return opened

    def _fits(self, file: Path) -> bool:
        try:
            opened = _opened(file, adapter=self._adapter)
        except MergeError:
            return False
        is_new = all(other.header.path != file for other in self._partners)
        return (opened.adapter is not None) is self._adapter and is_new and all(_fit(opened, p) for p in self._partners)


def fitting(folder: Path, partners: Sequence[Path] = (), *, adapter: bool) -> list[Path]:
    """Return the first files of a folder that are an adapter, or a model, and fit the partners."""
    try:
        return candidates(folder, Fitting(partners, adapter=adapter))
    except MergeError:  # a folder that cannot be listed
        return []


def fit(path: Path, other: Path) -> bool:
    """Return whether a model and an adapter fit, or two models are alike; False for what cannot be opened."""
    try:
        return _fit(_opened(path, adapter=True), _opened(other, adapter=True))
    except MergeError:
        return False


def missing_input(path: Path, *, adapter: bool, partners: Sequence[Path] = ()) -> InputError:
    """Return the error for a base or an adapter that is not there, with the names of files that fit the partners."""
    try:
        return missing(path, Fitting(partners, adapter=adapter))
    except OSError as e:  # a name that is too long, a folder that may not be searched …
        return unreadable(path, e)


def _is_output(path: Path) -> bool:
    """Return whether a file is the output of a merge, which is seldom meant to be merged again."""
    return KEY in open_checkpoint(path).metadata


def _opened(path: Path, *, adapter: bool) -> _Input:
    """Return a file as what it is; MergeError for one that is neither a model nor an adapter. `adapter`: as of
    `open_checkpoint`."""
    index = open_checkpoint(path, adapter=adapter)
    if is_adapter(index):
        return _Input(index, adapter=group(index))
    if what := foreign(index.tensors):
        raise InputError(f"this file is {what}", str(path), "name a model")
    return _Input(index, names(index))


def _fit(first: _Input, other: _Input) -> bool:
    """Return whether an adapter matches a model with all its modules, or whether two models are alike."""
    model, file = (first, other.adapter) if first.names else (other, first.adapter)
    if first.names and other.names:
        return _are_alike(first, other)
    if file is None or model.names is None:  # two adapters
        return True
    few = replace(file, modules=file.modules[:: len(file.modules) // SAMPLE + 1], strange=())
    try:
        return all(_matches(adapter, model.header, model.names) for adapter in (few, file))
    except MergeError:
        return False


def _matches(file: AdapterFile, base: Index, lookup: Names) -> bool:
    with Reader([file.index]) as reader:
        context = adapter_context(0, file, FileValues(reader), base, lookup, {})
        strengths = Strengths(Adapter(file.index.path), lookup, Steps())
        match = match_adapter(context, KnownBase.of(base, lookup), strengths, "skip")
    return bool(match.modules) and not match.unmatched


def _are_alike(model: _Input, other: _Input) -> bool:
    """Return whether two models have one architecture and the same shapes, so that their difference is a change."""
    first, second = model.header.tensors, other.header.tensors
    both = first.keys() & second.keys()
    return (
        model.names is not None
        and other.names is not None
        and model.names.architecture == other.names.architecture
        and len(both) * 2 > min(len(first), len(second))
        and all(first[name].shape == second[name].shape for name in both)
    )
