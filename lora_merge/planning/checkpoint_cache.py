"""Checkpoints opened for planning; the jobs of a batch that name one file share its header."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..adapters.modules import AdapterFile, group, looks_like_adapter
from ..adapters.wrapped_model import detached
from ..disk.files import FileState
from ..errors import AdapterAsBase, MergeError, NoAdapter
from ..files.checkpoint import Index, adapter_config, open_checkpoint
from ..files.file_signatures import in_folder, instead
from ..models.names import Names, names
from ..paths import exists, is_folder

MOST_TENSORS: Final = 300_000  # in all kept checkpoints; about 300 MB


class CheckpointCache:
    """Opened checkpoints; one whose file has changed is opened again. For one thread only."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Any, ...], tuple[Index, Any]] = OrderedDict()
        self._size = 0

    def base(
        self, path: Path, table: Path | None, *, plain: bool = False, partners: Sequence[Path] = ()
    ) -> tuple[Index, Names]:
        """Return a base and its names; InputError if it cannot be merged into.

        `table`: the user's name table. `plain`: whether an adapter that is attached inside is taken off. `partners`: as
        of `index`.
        """
        index = self.index(path, adapter=False, partners=partners)

        def read(index: Index) -> tuple[Index, Names]:
            parts = detached(index, adapter_config(path)) if plain else None
            index = index if parts is None else parts[0]
            _check_base(index)
            lookup = self.names(path, table) if parts is None else names(index, table)
            return index.with_notes(*lookup.notes, *index.unread.notes), lookup

        base: tuple[Index, Names] = self.parsed(("base", path, table, plain), index, read)
        return base

    def own_adapter(self, path: Path) -> AdapterFile:
        """Return the adapter that a model holds: attached inside its weights, or in a file of its folder.

        NoAdapter if it holds none.
        """
        entry = self._get(("own", path))
        if entry is None:
            parts = detached(self.index(path, adapter=False), adapter_config(path))
            if parts is None and (not path.is_dir() or "peft_type" not in adapter_config(path)):
                raise self._no_adapter(path)
            if parts is None:
                return self.adapter(path)
            entry = self._keep(("own", path), parts[1], group(parts[1]))
        file: AdapterFile = entry[1]
        return file

    def _no_adapter(self, path: Path) -> NoAdapter:
        """Return the error for a model that is named alone: with adapters that fit it, or what it is instead."""
        from .fitting_files import Fitting  # it matches adapters

        fitting, what, named = Fitting([path], adapter=True), self.names(path).what, ""
        with suppress(MergeError):  # of a folder that cannot be listed
            named = in_folder(path.parent, fitting)
        if not fitting.chosen and what.startswith(("a ", "an ")):
            return NoAdapter(f"no adapter is named, and the file is {what}", str(path), instead(what))
        fix = "; ".join(filter(None, ("name an adapter", named)))
        error = NoAdapter("no adapter is named, and the model contains none", str(path), fix)
        return error.instead(str(path), str(path), "ADAPTER:0.8")

    def index(self, path: Path, *, adapter: bool = True, partners: Sequence[Path] = ()) -> Index:
        """Return the tensors of a checkpoint by name, from its header. `adapter`: as of `open_checkpoint`; `partners`:
        the files that one in place of a missing one must fit."""
        key = ("index", path, adapter and is_folder(path))  # a file is one of them, whatever it is opened as
        entry = self._get(key)
        if entry is None and not exists(path):
            from .fitting_files import missing_input

            raise missing_input(path, adapter=adapter, partners=partners)
        return (entry or self._keep(key, open_checkpoint(path, adapter=adapter), None))[0]

    def names(self, path: Path, table: Path | None = None) -> Names:
        """Return the names of the weights of a model. `table`: the user's name table.

        Bases with the same tensors share them: most checkpoints of SDXL do, and its names take longer than the header.
        """

        def read(index: Index) -> Names:
            lookup = names(index, table)
            others = (entry for (kind, *_), (_, entry) in self._entries.items() if kind == "names")
            return next((other for other in others if lookup.same_as(other)), lookup)

        lookup: Names = self.parsed(("names", path, table), self.index(path, adapter=False), read)
        return lookup

    def adapter(self, path: Path, *partners: Path) -> AdapterFile:
        """Return an adapter as modules; InputError if the file is not an adapter. `partners`: as of `index`."""
        file: AdapterFile = self.parsed(("adapter", path), self.index(path, partners=partners), group)
        return file

    def parsed(self, key: tuple[Any, ...], index: Index, parse: Callable[[Index], Any]) -> Any:
        """Return what a function makes of a kept index, which is kept too. `key`: what it is, and of which path."""
        entry = self._get(key)
        if entry is None or entry[0] is not index:
            entry = self._keep(key, index, parse(index))
        return entry[1]

    def _get(self, key: tuple[Any, ...]) -> tuple[Index, Any] | None:
        if key not in self._entries:
            return None
        if not _unchanged(self._entries[key][0]):
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def _keep(self, key: tuple[Any, ...], index: Index, parsed: Any) -> tuple[Index, Any]:
        self._drop(key)
        self._entries[key] = index, parsed
        self._size += _size(key, index)
        while self._size > MOST_TENSORS and len(self._entries) > 2:
            self._drop(next(iter(self._entries)))
        return index, parsed

    def _drop(self, key: tuple[Any, ...]) -> None:
        if key in self._entries:
            self._size -= _size(key, self._entries.pop(key)[0])


def _size(key: tuple[Any, ...], index: Index) -> int:
    """Return how many tensors an entry adds to what is kept: all but "own" have those of an index."""
    return len(index.tensors) if key[0] in ("index", "own") else 0


def _unchanged(index: Index) -> bool:
    return all(FileState.at(path) == header.state for path, header in index.headers.items())


def _check_base(base: Index) -> None:
    if looks_like_adapter(base):
        fix = "name the base first, adapters after it; adapters alone: `lora-merge combine A B`"
        raise AdapterAsBase("the base is itself an adapter", str(base.path), fix)
    base.unread.check(base.path, "keep", [""])  # "": all tensors
