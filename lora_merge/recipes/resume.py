"""Finds out whether an output is there already, complete and by the same recipe.

It compares the metadata of the weights, the sizes and SHA-256 of the inputs, and the bytes of all other files. Headers
must be as they were sealed, and the bytes of an adapter those of the SHA-256 in its header. The weights of checkpoints
have no such hash and are not read here: `lora-merge verify` does that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..disk.destination import failures
from ..disk.files import FileState, sha256
from ..disk.hashes import RememberedHashes, remember, state
from ..disk.remote import remote
from ..disk.uploads import is_taken, sink_of
from ..errors import MergeError, UsageError
from ..files.checkpoint import open_checkpoint
from ..files.side_files import output_name
from ..job import Job
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.inputs import open_inputs
from ..planning.output_files import Contents, differing
from ..planning.recipe import KEY, STRENGTH_ENTRY, blanks, parsed, recipes
from ..proof.header_changes import changed_files
from ..sources.outputs import present
from ..text import from_json, listed

if TYPE_CHECKING:
    from ..adapters_out.job import AdapterJob

DATA_HASH: Final = "sshs_model_hash"
"""The entry of an adapter with the SHA-256 of all bytes behind its header."""

VARIES: Final = frozenset({"name", "source", "version", "format", STRENGTH_ENTRY})
"""The entries that may differ between equal recipes: names of files, where they came from, the version of this program,
and what a recipe says for people, which follows from the rest."""

OF_RUN: Final = frozenset({"name", "source", "version", "format", "residual", "dropped_metadata"})
"""The entries of an adapter's recipe that may differ: the same, and what a run reports of its result."""


class Hashes:
    """SHA-256 of files, each computed once in the life of this object, large ones once for all runs."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, FileState | None], str] = {}
        self._remembered = RememberedHashes()

    def of(self, path: Path) -> str:
        """Return the hex digest; InputError if the file cannot be read."""
        key, before = (path, FileState.at(path)), state(path)
        if key not in self._known and (digest := self._remembered.digest(path)):
            self._known[key] = digest
        if key not in self._known and (far := remote(path)) is not None and far.sha256:
            self._known[key] = far.sha256  # as its source states it
        if key not in self._known:
            self._known[key] = sha256(path)
            if before is not None and before == state(path):
                remember({path: (before, self._known[key])})
        return self._known[key]


def is_done(job: Job, contents: Contents, opened: CheckpointCache, hashes: Hashes) -> bool:
    """Return whether the output holds what this job would write. Hashes the inputs only if all else agrees.

    UsageError if something else is there and may not be replaced.
    """
    names = None if "" in contents.weights else contents.names
    return _is_complete(job, lambda output: _other(replace(job, output=output), contents, opened, hashes), names)


def is_adapter_done(job: AdapterJob, hashes: Hashes) -> bool:
    """Return whether the output holds the adapter that this job would write; see `is_done`."""
    return _is_complete(job.inputs, lambda output: _other_adapter(job.changed(output=output), hashes))


def _is_complete(job: Job, other: Callable[[Path], str], names: Sequence[str] | None = None) -> bool:
    """Return whether an output is there and right. `other`: returns what is wrong with it, "" if nothing is. `names`:
    the files of an output folder."""
    output = job.output if sink_of(job.output) is None else present(job.output)
    if output is None or not os.path.lexists(output):
        return False
    with failures(job.output):
        wrong = other(output)
    if wrong and not job.overwrite and (sink_of(job.output) is None or is_taken(job.output, names)):
        raise UsageError(f"the output exists and {wrong}", str(job.output),
                         "choose another -o, or give `--overwrite`")  # fmt: skip
    return not wrong


def is_ours(output: Path) -> bool:
    """Return whether the file or folder that is there has a recipe of this program."""
    try:
        return KEY in open_checkpoint(output).metadata
    except MergeError:
        return False


def _other_adapter(job: AdapterJob, hashes: Hashes) -> str:
    """Return what is wrong with an adapter that is there; empty if nothing is."""
    from ..adapters_out.output_file import recipe

    try:
        index = open_checkpoint(job.output)
        stored = parsed(index.metadata.get(KEY, ""))
    except MergeError as e:
        return f"is not a complete adapter: {e.what}"
    if stored is None:
        return "is not one of ours"
    for file, header in index.headers.items():
        if header.metadata.get(DATA_HASH) not in (None, sha256(file, header.data_offset)):
            return "is damaged: its bytes have another SHA-256 than its header says"
    inputs = [open_checkpoint(a.path, adapter=True) for a in job.adapters]
    for dropped, digest in ((OF_RUN | {"sha256"}, lambda _: ""), (OF_RUN, hashes.of)):
        expected = from_json(json.dumps(recipe(job, inputs, 0.0, (), digest)))
        if _essence(expected, dropped) != _essence(stored, dropped):
            return "was made by another recipe"
    return ""


def _other(job: Job, contents: Contents, opened: CheckpointCache, hashes: Hashes) -> str:
    """Return what is wrong with an output; empty if nothing is."""
    try:
        index = open_checkpoint(job.output)
    except MergeError as e:
        return f"is not a complete checkpoint: {e.what}"
    folder = index.path.is_dir()
    weights = {f.relative_to(index.path).as_posix() if folder else "": f for f in index.files}
    if KEY not in index.metadata:
        return "has no recipe to compare" if job.no_metadata else "is not one of ours"
    if weights.keys() != contents.weights:
        return "has other files of weights"
    if broken := changed_files(index):
        return f"was changed after it was made: the header of {listed(file.name for file in broken)}"
    stored = {name: parsed(index.headers[f].metadata.get(KEY, "")) for name, f in weights.items()}
    if not _same(job, stored, opened, hashes):
        return "was made by another recipe"
    wrong = differing(contents, job.output, hashes.of)
    return f"lacks, or has another version of, {listed(wrong)}" if wrong else ""


def _same(job: Job, stored: Mapping[str, Any], opened: CheckpointCache, hashes: Hashes) -> bool:
    """Return whether the recipes in the files of an output, by the files' names, are those of the job."""
    inputs = open_inputs(job, opened)
    base = inputs.base
    job = inputs.resolved
    adapters = [file.index for file in inputs.adapters]
    names = [output_name(path, base) if base.path.is_dir() else "" for path in base.files]

    def same(digests: Sequence[str], dropped: frozenset[str]) -> bool:
        expected = zip(names, recipes(job, base, adapters, digests), strict=True)
        return all(_essence(recipe, dropped) == _essence(stored[name], dropped) for name, recipe in expected)

    if not same(blanks(base, adapters), VARIES | {"sha256"}):
        return False
    return same([hashes.of(path) for index in (base, *adapters) for path in index.files], VARIES)


def _essence(value: Any, dropped: frozenset[str]) -> Any:
    """Return the recipe without some of its fields, as JSON would give it back."""
    if isinstance(value, dict):
        return {k: _essence(v, dropped) for k, v in value.items() if k not in dropped}
    return [_essence(v, dropped) for v in value] if isinstance(value, list | tuple) else value
