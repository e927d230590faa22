"""Names of files without an ending that jobs write and later jobs of the same batch read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..paths import ENDINGS, exists, is_file, with_ending
from .jobs_file import BatchJob


def with_endings(entries: Sequence[BatchJob]) -> tuple[BatchJob, ...]:
    """Return the jobs; where the base of one is the output of another, both names have the ending of a file.

    `make_job` has completed the names of jobs whose base is there.
    """
    waiting: dict[Path, list[BatchJob]] = defaultdict(list)
    ready, found = deque[BatchJob](), {e.number: e for e in entries}
    for e in entries:
        if exists(e.job.base):
            ready.append(e)
        elif e.request is None:
            waiting[e.job.base].append(e)
    while waiting and ready:
        made = ready.popleft().job.output
        for name in (made, made.with_suffix("")) if made.suffix in ENDINGS else (made,):
            for e in waiting.pop(name, ()):
                file = made.suffix in ENDINGS or is_file(made)
                job = replace(e.job, base=made, output=with_ending(e.job.output) if file else e.job.output)
                found[e.number] = replace(e, job=job)
                ready.append(found[e.number])
    return tuple(found.values())
