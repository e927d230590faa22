"""What calls that plan or look at files keep for the calls after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..errors import MergeError
from ..facts import Fact, line
from ..files.folder_layouts import ADAPTER_CONFIG
from ..text import Shown
from .checkpoint_cache import CheckpointCache

MOST_OUTLINES: Final = 10_000  # outlines that later calls may use; as many as a file has jobs


class FormerPlans(Shown):
    """What earlier calls of `plan_batch` and `inspect` know: opened files, and outlines of merges.

    What they know of files that have changed is forgotten. It is for one thread at a time.

    Examples:
        >>> former, job = lora_merge.FormerPlans(), {"base": "base.safetensors", "output": "merged.safetensors"}
        >>> for strength in (0.5, 0.6, 0.7):  # the second and the third take milliseconds
        ...     adapters = [{"path": "style.safetensors", "strength": strength}]
        ...     (plan,) = lora_merge.plan_batch([{**job, "adapters": adapters}], former=former)
    """

    def __init__(self) -> None:
        self.opened = CheckpointCache()
        self.outlines: dict[Any, Any] = {}
        """Kind of merge → its outline, or the error that stops it; see `batch.batch_plan`."""
        self._states: dict[Path, Any] = {}

    def _facts(self) -> Iterator[Fact]:
        yield line("merges", len(self.outlines))

    def checkpoints(self, paths: Iterable[Path]) -> CheckpointCache:
        """Return the checkpoints that are open. If a file has changed, all that is known is forgotten first.

        Parameters:
            paths: The files and folders that will be read.

        Returns:
            The cache that opens them, or has them open.
        """
        states = {path: _states(path) for path in {*paths}}
        changed = any(self._states.get(path, state) != state for path, state in states.items())
        if changed or len(self.outlines) > MOST_OUTLINES:
            self.opened = CheckpointCache()
            self.outlines.clear()
            self._states.clear()
        self._states |= states
        return self.opened


def _states(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """Return size and time of the files at a path."""
    states = []
    with suppress(MergeError, OSError):  # the failure of the jobs that read it
        for file in input_files(path):
            status = file.stat()
            states.append((file, status.st_size, status.st_mtime_ns))
    return tuple(states)


def input_files(path: Path) -> list[Path]:
    """Return the files at a path that may be read, if they are there: of a model also those of its components."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for level in ("*", "*/*")[: 1 + is_model(path)] for file in path.glob(level) if file.is_file()]


def is_model(folder: Path) -> bool:
    """Return whether a folder is read as a whole; of an adapter a few files are."""
    return not (folder / ADAPTER_CONFIG).exists()
