"""Brings the inputs of a job to this machine, after it was planned from their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from ..addresses import upload_address
from ..disk.volumes import free_bytes
from ..files.checkpoint import TRAINED_FILES, open_checkpoint
from ..files.folder_layouts import entries
from ..job import Job
from ..paths import of_index
from ..progress import Progress, counted, unwatched
from ..sources.inputs import Download, download_of, fetch, preview_of, require_space
from ..text import size

Announce: TypeAlias = Callable[[str], object]
"""Shows what is downloaded, before the first byte."""


def downloads(bases: Iterable[Path], adapters: Iterable[Path], *, keep: bool = False) -> dict[Path, Download]:
    """Return what has to be downloaded for inputs of other machines: input → its files. Headers are read for that.

    `keep`: see `download_of`; other processes cannot read a preview.
    """
    needed: dict[Path, Download] = {}
    roles = {**dict.fromkeys(adapters, True), **dict.fromkeys(bases, False)}
    for path, adapter in ((p, role) for p, role in roles.items() if preview_of(p) is not None):
        index = open_checkpoint(path, adapter=adapter)
        folder = of_index(path)
        trained = [p for p in entries(folder) if TRAINED_FILES.fullmatch(p.name)] if folder.is_dir() else []
        download = download_of(path, (*index.files, *index.index_files, *index.unnamed, *trained), keep=keep)
        if download is not None:
            needed[path] = download
    return needed


def downloads_of(jobs: Iterable[Job]) -> dict[Path, Download]:
    """Return what has to be downloaded for jobs, each input once."""
    every = list(jobs)
    return downloads([job.base for job in every], [ref.path for job in every for ref in job.adapters])


def fetch_all(
    needed: Mapping[Path, Download], room: tuple[Path, int] | None, progress: Progress, announce: Announce | None = None
) -> dict[Path, Path]:
    """Download inputs; return input → its path on this machine. ResourceError if the disks have no room for them.

    `room`: the output, and the bytes that it takes on its disk; None if nothing is written.
    """
    require_space(needed.values(), room)
    texts = [download.text() for download in needed.values() if download.size]
    if texts and room is not None and room[1] and upload_address(room[0]) is None:
        texts.append(f"the output takes {size(room[1])} in {room[0].parent} ({size(free_bytes(room[0]))} free)")
    if announce is not None:
        for text in texts:
            announce(text)
    places = {}
    for path, download in needed.items():
        if download.streamed:
            continue
        advance = counted(progress, "fetch", str(download.preview.contents.address), download.size)
        places[path] = fetch(path, download, advance)
    return places


def downloaded_paths(
    bases: Iterable[Path], adapters: Iterable[Path] = (), *, progress: Progress = unwatched,
    announce: Announce | None = None,
) -> dict[Path, Path]:  # fmt: skip
    """Return input → its path on this machine, for commands that write nothing: what it lacks is downloaded."""
    paths = {path: path for path in (*bases, *adapters)}
    return paths | fetch_all(downloads(bases, adapters), None, progress, announce)


def downloaded_job(job: Job, progress: Progress, announce: Announce | None = None) -> Job:
    """Return a job whose inputs are on this machine, see `downloaded_paths`."""
    adapters = [ref.path for ref in job.adapters]
    return job_at(job, downloaded_paths([job.base], adapters, progress=progress, announce=announce))


def job_at(job: Job, places: Mapping[Path, Path]) -> Job:
    """Return a job with other paths of its inputs."""
    adapters = tuple(replace(ref, path=places.get(ref.path, ref.path)) for ref in job.adapters)
    return replace(job, base=places.get(job.base, job.base), adapters=adapters)
