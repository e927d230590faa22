"""Is an output there already, by the same recipe? By what its metadata says, and the inputs' sizes and SHA-256."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from .checkpoint import open_checkpoint
from .errors import MergeError, UsageError
from .header import FileState
from .job import Job
from .known_hashes import recall, remember, state
from .opened import Opened
from .recipe import KEY, recipe, sha256, slot

VARIES: Final = frozenset({"name", "version"})
"""What may differ between equal recipes: how files are called, and which version of this program merged them."""


class Hashes:
    """SHA-256 of files, each computed once in the life of this object, large ones once for all runs."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, FileState | None], str] = {}
        self._remembered = recall()

    def of(self, path: Path) -> str:
        """The hex digest; InputError if the file cannot be read."""
        key, before = (path, FileState.at(path)), state(path)
        if key not in self._known and before in self._remembered:
            self._known[key] = self._remembered[before]
        if key not in self._known:
            self._known[key] = sha256(path)
            if before is not None and before == state(path):
                remember({before: self._known[key]})
        return self._known[key]


def done(job: Job, opened: Opened, hashes: Hashes) -> bool:
    """Whether the output holds what this job would write. Hashes the inputs only if all else agrees.

    UsageError if something else is there and may not be replaced.
    """
    if not os.path.lexists(job.output):
        return False
    stored = _stored(job.output)
    if stored is not None and _same(job, stored, opened, hashes):
        return True
    if not job.overwrite:
        what = "is not one of ours" if stored is None else "was made by another recipe"
        raise UsageError(f"the output exists and {what}", str(job.output),
                         "choose another output, or give --overwrite")  # fmt: skip
    return False


def _stored(output: Path) -> dict[str, Any] | None:
    """The recipe in an output's metadata; None where there is none, or no complete checkpoint."""
    try:
        value = json.loads(open_checkpoint(output).metadata.get(KEY, "null"))
    except (MergeError, ValueError, RecursionError):
        return None  # whatever it is, it is not what this job writes: the caller refuses or replaces it
    return value if isinstance(value, dict) else None


def _same(job: Job, stored: dict[str, Any], opened: Opened, hashes: Hashes) -> bool:
    base, _ = opened.base(job.base, job.map)
    adapters = [opened.adapter(ref.path).index for ref in job.adapters]
    wanted = recipe(job, base, adapters)
    if _essence(wanted, VARIES | {"sha256"}) != _essence(stored, VARIES | {"sha256"}):
        return False
    text = json.dumps(wanted)
    for number, path in enumerate(f for index in (base, *adapters) for f in index.files):
        text = text.replace(slot(number), hashes.of(path))
    return bool(_essence(json.loads(text), VARIES) == _essence(stored, VARIES))


def _essence(value: Any, dropped: frozenset[str]) -> Any:
    """The recipe without some of its fields, as JSON would give it back."""
    if isinstance(value, dict):
        return {k: _essence(v, dropped) for k, v in value.items() if k not in dropped}
    return [_essence(v, dropped) for v in value] if isinstance(value, list | tuple) else value
