"""`inspect`: the facts of a file or of a base with an adapter, from headers alone, on request also from numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..adapters.modules import AdapterFile, looks_like_adapter
from ..errors import UsageError
from ..files.checkpoint import Index
from ..files.file_uses import Folder, adapter_folder
from ..files.side_files import base_folder
from ..job import Adapter
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.downloads import Announce, downloaded_paths
from ..planning.plan import Plan
from ..progress import Progress, unwatched
from ..text import Note, listed
from .adapter import adapter_facts
from .adapter_on_base import fit
from .base import base_facts, dtypes
from .file_verdict import verdict
from .hashes import hashes_of, stored_hashes
from .json_schemas import schema

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
    `weights`: also read the numbers, for norms, stable ranks and energies, or for the size of the change or
    of a base's weights.
    `pictures`: the numbers with singular values and histograms, which pages show.
    `opened`: checkpoints that calls before this one have opened.
    """
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

    facts: dict[str, Any] = {
        "schema": SCHEMA, "path": address, "kind": "checkpoint", "files": len(index.files),
        "bytes": sum(f.stat().st_size for f in index.files), "tensors": len(index.tensors),
        "dtypes": dtypes(index.tensors), **({"folder": folder.to_dict()} if folder else {}),
    }  # fmt: skip
    if ref is not None:
        if of_adapter:
            raise UsageError("two adapters, and no base", str(path), "use lora-merge compare A B, or name a base first")
        numbers = partial(_change, pictures=pictures, progress=progress)
        facts |= cache.parsed(("facts", path), index, of_base)
        facts |= {"match": fit(path, ref, cache, numbers if weights else None)}
        return _with_verdict(facts)
    if of_adapter:
        file = cache.adapter(path)
        facts |= adapter_facts(file)
        facts |= {"weights": _numbers(file, pictures=pictures, progress=progress)} if weights else {}
    else:
        facts |= cache.parsed(("facts", path), index, of_base)
        facts |= {"sizes": _sizes(index, pictures=pictures, progress=progress)} if weights else {}
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


def is_adapter(index: Index) -> bool:
    """Return whether a checkpoint is an adapter."""
    return "peft_type" in index.config or looks_like_adapter(index)


def _numbers(file: AdapterFile, *, pictures: bool, progress: Progress) -> dict[str, Any]:
    from .numbers import adapter_numbers  # torch

    numbers: dict[str, Any] = adapter_numbers(file, pictures=pictures, progress=progress)
    return numbers


def _change(plan: Plan, *, pictures: bool, progress: Progress) -> dict[str, Any]:
    from .numbers import merge_numbers  # torch

    numbers: dict[str, Any] = merge_numbers(plan, pictures=pictures, progress=progress)
    return numbers


def _sizes(index: Index, *, pictures: bool, progress: Progress) -> dict[str, Any]:
    from .numbers import base_sizes  # torch

    numbers: dict[str, Any] = base_sizes(index, pictures=pictures, progress=progress)
    return numbers


def _changed(index: Index) -> Iterator[Note]:
    """Yield a note on a header that is not as its merge wrote it."""
    from ..proof.header_changes import changed_files

    if files := changed_files(index):
        names = listed(path.name for path in files)
        yield Note(
            f"the header was edited or written anew after the merge ({names}); lora-merge verify shows what differs"
        )
