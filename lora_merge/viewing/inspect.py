"""`inspect`: the facts of a file or of a base with an adapter, from headers alone, on request also from values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.modules import is_adapter
from ..errors import UsageError
from ..files.checkpoint import Index
from ..files.file_uses import Folder, adapter_folder
from ..files.side_files import base_folder
from ..job import Adapter
from ..paths import typed
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.downloads import Announce, downloaded_paths
from ..progress import Progress, unwatched
from ..text import Note, listed
from .adapter import adapter_facts
from .base import base_facts, dtypes
from .file_verdict import verdict
from .hashes import hashes_of, stored_hashes
from .json_schemas import schema

if TYPE_CHECKING:
    from ..planning.plan import Plan

SCHEMA = schema("inspect", 2)


def inspect(  # noqa: PLR0913  # two for pages and progress
    path: Path,
    adapter: Path | Adapter | None = None,
    *,
    weights: bool = False,
    hashes: bool | None = False,
    pictures: bool = False,
    progress: Progress = unwatched,
    opened: CheckpointCache | None = None,
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Return a table of facts about a checkpoint or an adapter; with an adapter, how it fits the base `path`.

    Only headers are read, and for the hashes of an adapter up to 256 MiB, or with `hashes` of any single file, its
    bytes; None hashes nothing.
    `weights`: also read the values, for norms, stable ranks and energies, or for the size of the change or
    of a base's weights.
    `pictures`: the numbers with singular values and histograms, which pages show.
    `opened`: checkpoints that calls before this one have opened.
    """
    # Step 1: the files, downloaded if more than headers is read.
    address, ref = str(path), Adapter(adapter) if isinstance(adapter, Path) else adapter
    if weights or hashes:
        refs = [] if ref is None else [ref.path]
        places = downloaded_paths([path], refs, progress=progress, announce=announce)
        path, ref = places[path], ref and replace(ref, path=places[ref.path])
    cache = opened or CheckpointCache()
    index = cache.index(path, adapter=False)
    of_adapter: bool = cache.parsed(("kind", path), index, is_adapter)
    folder = _folder(index, of_adapter=of_adapter)

    def of_base(index: Index) -> dict[str, Any]:
        return base_facts(index, cache.names(path))

    # Step 2: what is known of every file.
    facts: dict[str, Any] = {
        "schema": SCHEMA, "path": address, "kind": "checkpoint", "files": len(index.files),
        "bytes": sum(f.stat().st_size for f in index.files), "tensors": len(index.tensors),
        "dtypes": dtypes(index.tensors), **({"folder": folder.to_dict()} if folder else {}),
    }  # fmt: skip
    # Step 3: an adapter on a base.
    if ref is not None:
        if of_adapter:
            compared = typed([str(path), str(ref.path)])
            raise UsageError("two adapters are given without a base", str(path),
                             f"use `lora-merge compare {compared}`, or name a base first")  # fmt: skip
        from .adapter_fit import adapter_fit  # plans

        numbers: Callable[[Plan], dict[str, Any]] | None = None
        if weights:
            from .measurements import merge_numbers  # torch

            numbers = partial(merge_numbers, pictures=pictures, progress=progress)
        facts |= cache.parsed(("facts", path), index, of_base)
        facts |= {"match": adapter_fit(path, ref, cache, numbers)}
        return _with_verdict(facts)
    # Step 4: an adapter, or a model.
    if of_adapter:
        file = cache.adapter(path)
        facts |= adapter_facts(file)
        if weights:
            from .measurements import adapter_numbers  # torch

            facts["weights"] = adapter_numbers(file, pictures=pictures, progress=progress)
    else:
        facts |= cache.parsed(("facts", path), index, of_base)
        if weights:
            from .measurements import base_sizes  # torch

            facts["sizes"] = base_sizes(index, pictures=pictures, progress=progress)
    # Step 5: hashes and notes.
    hashed = hashes if hashes is None else hashes or of_adapter
    digests = hashes_of(index, always=bool(hashes)) if hashed else {}
    facts |= {"hashes": {**digests, **{f"stored {k}": v for k, v in stored_hashes(index).items()}}}
    left = folder.warning() if folder else ()
    notes = [*index.notes, *left, *facts.get("notes", ()), *_changed(index)]
    return _with_verdict(facts | {"metadata": dict(index.metadata), "notes": notes})


def _with_verdict(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"verdict": verdict(facts)}


def _folder(index: Index, *, of_adapter: bool) -> Folder | None:
    """Return the files of the folder that is looked at; None for a file."""
    if not index.path.is_dir():
        return None
    return adapter_folder(index) if of_adapter else base_folder(index)


def _changed(index: Index) -> Iterator[Note]:
    """Yield a note on a header that is not as its merge wrote it."""
    from ..proof.header_changes import changed_files

    if files := changed_files(index):
        names = listed(path.name for path in files)
        yield Note(
            f"the header was edited or written anew after the merge ({names}); lora-merge verify shows what differs"
        )
