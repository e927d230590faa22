"""Plans all jobs from headers before the first byte is written: errors, order, what is done, bytes needed.

Jobs that differ in output and strength alone have one plan between them, so that ten thousand take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..command import Command
from ..disk.destination import check_output, files_under
from ..disk.volumes import CLONES, existing, file_system, ignores_case, same, share_blocks
from ..disk.writer import Room
from ..engine.windows import buffer_bytes, layout_key, unshared_bytes, window_room
from ..errors import MergeError, PartWithoutEffect, ResourceError, UsageError
from ..files.checkpoint import configuration
from ..job import Adapter, Job
from ..option_texts import in_jobs_file
from ..options import OPTIONS
from ..paths import ENDINGS, is_folder, of_index
from ..planning.former_plans import FormerPlans, input_files, is_model
from ..planning.output_files import Contents, contents
from ..recipes.resume import Hashes, is_adapter_done, is_done, is_ours
from ..text import Lines, plural
from .jobs_file import BatchJob

LISTED_CLASHES: Final = 20  # clashes that are listed one by one
JOBS_TOGETHER: Final = 8  # jobs at most in one read of a base; more would save little and lose more when killed


@dataclass(frozen=True)
class PlannedJob:
    """One job of a batch, with what is known of it before anything runs."""

    entry: BatchJob
    level: int = 0  # 0: all inputs are there; n: some input is the output of a job of level n − 1
    needs: int | None = None  # number of the job whose output is its base, where that has to be made first
    size: int = 0  # bytes of its output
    effort: int = 0  # bytes that a merge writes in the time that this job takes
    needs_disk: int = 0  # those of them that take space: the others are blocks of the base
    replaces: int = 0  # bytes of what is there now and will be replaced
    read_key: Any = None  # equal for jobs that can share one read of their base
    strengths: tuple[Mapping[str, Mapping[float, int]], ...] = ()  # of each adapter: part → strength → modules
    memory: int | None = None  # bytes of weights in flight at most; None where it cannot run
    done: bool = False
    error: MergeError | None = None

    @property
    def runs(self) -> bool:
        """Return whether there is something to do."""
        return not self.done and self.error is None


def survey(
    entries: Sequence[BatchJob], *, workers: int = 1, former: FormerPlans | None = None
) -> tuple[PlannedJob, ...]:  # fmt: skip
    """Return every job planned, in the order of the file. What is wrong with one job is its `error`.

    `former`: the plans of calls before, for the same number of workers. UsageError where jobs get in each other's way.
    """
    outputs = _Outputs(entries)
    if former is not None:
        former.checkpoints(path for entry in entries for path in entry.sources)
    surveyor = _Surveyor(outputs, workers, former or FormerPlans())
    for level, some in enumerate(_levels(entries, {e.number: outputs.maker(e.base) for e in entries})):
        for entry in some:
            surveyor.plan(entry, level)
    surveyor.check_defaults()
    planned = tuple(surveyor.planned[e.number] for e in entries)
    _Sources(planned, outputs).check()
    return planned


class _Outputs:
    """All outputs by their real paths. UsageError if two of them are one, or one is in another."""

    def __init__(self, entries: Sequence[BatchJob]) -> None:
        self._by_path: dict[str, BatchJob] = {}
        folded: dict[str, BatchJob] = {}
        self._makers: dict[Path, BatchJob | None] = {}
        clashes = []
        folders: dict[Path, str] = {}  # thousands of outputs have a few folders
        for e in entries:
            real = _real(e.job.output, folders)
            other = self._by_path.setdefault(real, e)
            alike = folded.setdefault(real.casefold(), e) if other is e else e
            if alike is not e and ignores_case(Path(real).parent):
                other = alike
            if other is not e:
                same_row = e.where == other.where
                both = f"{e.where}, two jobs of its matrix" if same_row else f"{e.where} and {other.where}"
                clashes.append(f"{both}: {e.job.output}")
        for path, e in self._by_path.items():
            around = self._around(path)
            if around is not None:
                clashes.append(f"{e.where} writes inside the output of {around.where}: {e.job.output}")
        if clashes:
            template = next((e.template for e in self._by_path.values() if e.template), "")
            fix = "give every job an output of its own"
            fix += f", with the names of its matrix in it: output: out/{template}.safetensors" if template else ""
            what = plural(len(clashes), "output collides", "outputs collide")
            raise UsageError(f"{what} with the output of another job", _listed(clashes), fix)

    def maker(self, path: Path | None) -> BatchJob | None:
        """Return the job whose output an input is, or is inside of; None for another input, and for none."""
        if path is None:
            return None
        if path not in self._makers:
            real = os.path.realpath(path)
            names = (real, *(f"{real}{ending}" for ending in ENDINGS))
            self._makers[path] = next((self._by_path[n] for n in names if n in self._by_path), self._around(real))
        return self._makers[path]

    def _around(self, real: str) -> BatchJob | None:
        while (above := os.path.dirname(real)) != real:  # noqa: PTH120  # ten times as fast as Path, per job
            real = above
            if real in self._by_path:
                return self._by_path[real]
        return None


class _Sources:
    """All that the jobs read: no output of another job replaces it, or gets into a model folder that is read."""

    def __init__(self, planned: Sequence[PlannedJob], outputs: _Outputs) -> None:
        self.outputs = outputs
        self.writers = [s.entry for s in planned if s.runs]
        self.readers: dict[Path, list[BatchJob]] = {}  # path → jobs that read it
        for s in planned:
            table = s.entry.job.map
            for path in (*s.entry.inputs, *([] if table is None else [table])):
                self.readers.setdefault(path, []).append(s.entry)
        for path in [*self.readers]:
            with suppress(MergeError, OSError):  # the failure of the jobs that read it
                for other in (of_index(path), configuration(path)):
                    if other is not None and other != path:
                        self.readers.setdefault(other, []).extend(self.readers[path])

    def check(self) -> None:
        """Raise UsageError if jobs that run write where others read."""
        replacing = [e for e in self.writers if os.path.lexists(e.job.output)]
        clashes = [*(self._replaced(replacing) if replacing else ()), *self._entered()]
        if clashes:
            what = plural(len(clashes), "output collides", "outputs collide")
            raise UsageError(f"{what} with inputs of other jobs", _listed(clashes),
                             "give each of these outputs a name that is free, outside the folders that are read"
                             )  # fmt: skip

    def _replaced(self, replacing: Sequence[BatchJob]) -> Iterator[str]:
        """Yield a line for each output that would replace a file that another job reads, by any of its names."""
        files: dict[object, list[tuple[Path, Path]]] = {}  # name of a file, or of a folder around it → file, its source
        for path in self.readers:
            with suppress(OSError):  # the failure of the jobs that read it
                for file in input_files(path):
                    real = os.path.realpath(file)
                    for name in (_id(file), (real.casefold(),), real, *map(str, Path(real).parents)):
                        files.setdefault(name, []).append((file, path))
        for e in replacing:
            real = os.path.realpath(e.job.output)
            hits = [*files.get(_id(e.job.output), ()), *files.get(real, ())]
            hits += [hit for hit in files.get((real.casefold(),), ()) if same(hit[0], e.job.output)]
            for file, path in hits:
                if (reader := self._reader(path, e)) is not None:
                    yield f"{e.where} would replace {file}, which {reader.where} reads"
                    break

    def _reader(self, path: Path, writer: BatchJob) -> BatchJob | None:
        """Return another job that reads a path, other than a base that the writer makes for it again."""
        others = (e for e in self.readers[path] if e is not writer)
        return next((e for e in others if not self._remade(e, path, writer)), None)

    def _remade(self, reader: BatchJob, path: Path, writer: BatchJob) -> bool:
        """Return whether the writer makes the base of a job: what is there now is of an earlier run."""
        if not reader.command.merges or path not in (reader.job.base, of_index(reader.job.base)):
            return False
        return self.outputs.maker(reader.job.base) is writer and is_ours(writer.job.output)

    def _entered(self) -> Iterator[str]:
        """Yield a line for each output in a model folder that another job reads."""
        models = {os.path.realpath(path): path for path in self.readers if is_folder(path) and is_model(path)}
        folders: dict[Path, str] = {}
        for e in self.writers if models else ():
            for above in Path(_real(e.job.output, folders)).parents:
                path = models.get(str(above))
                if path is not None and (reader := self._reader(path, e)) is not None:
                    yield f"{e.where} would write {e.job.output} into a folder that {reader.where} reads"
                    break


def _real(path: Path, folders: dict[Path, str]) -> str:
    """Return the real path of an output. `folders`: real paths of the folders that were looked at before."""
    if os.path.islink(path):  # noqa: PTH114  # False where the system refuses to look
        return os.path.realpath(path)
    folder = path.parent
    if folder not in folders:
        folders[folder] = os.path.realpath(folder).rstrip(os.sep)
    return f"{folders[folder]}{os.sep}{path.name}"


def _id(path: Path) -> tuple[int, int] | None:
    """Return what is equal for all names of a file; None where nothing is there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _levels(entries: Sequence[BatchJob], makers: Mapping[int, BatchJob | None]) -> Iterator[list[BatchJob]]:
    """Return the jobs in the order in which they can run; UsageError for jobs that wait for each other."""
    waiting: dict[int | None, list[BatchJob]] = {}
    for e in entries:
        maker = makers[e.number]
        waiting.setdefault(None if maker is None else maker.number, []).append(e)
    numbers: set[int] = set()
    some = waiting.get(None, [])
    while some:
        yield some
        numbers |= {e.number for e in some}
        some = sorted((w for e in some for w in waiting.get(e.number, ())), key=lambda e: e.number)
    circle = [e for e in entries if e.number not in numbers]
    if circle:
        itself = all(makers[e.number] is e for e in circle)
        raise UsageError("an output is its own base" if itself else "jobs wait for each other's outputs",
                         _listed([f"{e.where}: {e.job.base} -> {e.job.output}" for e in circle]),
                         "give an output another name than the base it comes from")  # fmt: skip


@dataclass(frozen=True)
class _Outline:
    """Plan facts shared by jobs that differ only in strengths and output. No plan, which would keep the base's index in
    memory."""

    size: int
    unshared: int  # bytes of its own where it can share blocks with its base
    folder: bool
    read: tuple[Path, ...]
    contents: Contents
    layout: int
    strengths: tuple[Mapping[str, Mapping[float, int]], ...]  # of each adapter, as `_outline` has put them
    memory: int


class _Surveyor:
    def __init__(self, outputs: _Outputs, workers: int, former: FormerPlans) -> None:
        self.outputs, self.workers = outputs, workers
        self.opened, self.hashes = former.opened, Hashes()
        self.outlines = former.outlines
        self.planned: dict[int, PlannedJob] = {}
        self.grounded: dict[int, Job] = {}
        self.shares: dict[tuple[Path, Path], bool] = {}
        self.idle: dict[tuple[str, str], list[PartWithoutEffect | None]] = {}
        """Part of the defaults → for each of its jobs the error, or None if it has an effect."""

    def plan(self, entry: BatchJob, level: int) -> None:
        """Plan one job, after those whose outputs it reads; without parts of the defaults that only other jobs have."""
        for part in entry.usual:
            self.idle.setdefault(part, []).append(None)
        planned = self._plan(entry, level)
        while isinstance(e := planned.error, PartWithoutEffect) and (part := (e.option, e.part)) in entry.usual:
            self.idle[part][self.idle[part].index(None)] = e
            entry = entry.without(*part)
            planned = self._plan(entry, level)
        self.planned[entry.number] = planned

    def check_defaults(self) -> None:
        """Raise UsageError for a part of the defaults that has no effect on any job."""
        for errors in self.idle.values():
            if errors[0] is not None and None not in errors:
                raise errors[0]

    def _plan(self, entry: BatchJob, level: int) -> PlannedJob:
        planned = self._merge(entry, level) if entry.command.merges else self._adapter(entry, level)
        if not (planned.done and entry.redo):
            return planned
        return replace(planned, entry=entry.changed(overwrite=True), done=False)

    def _merge(self, entry: BatchJob, level: int) -> PlannedJob:
        """Plan a job that merges."""
        job, maker = entry.job, self._running(self.outputs.maker(entry.job.base))
        blank = PlannedJob(entry, level, None if maker is None else maker.number)
        try:
            self.grounded[entry.number] = self._grounded(job)
            outline = self._outline(entry.command, self.grounded[entry.number])
            done = maker is None and is_done(job, outline.contents, self.opened, self.hashes)
            check_output(  # `done` has refused what may not be replaced; another process may finish the job just now
                job.output, outline.read, overwrite=True, folder=outline.folder, contents=outline.contents.names
            )
        except MergeError as e:
            return replace(blank, error=e.reword(in_jobs_file))
        shared = tuple(getattr(job, o.name) for o in OPTIONS.values() if o.same_in_read)
        read_key = (level, job.base, shared, outline.layout)
        needed = outline.unshared if self._shares(job.output.parent, job.base) else outline.size
        return replace(
            blank, size=outline.size, effort=int(outline.size * entry.command.effort), needs_disk=needed,
            replaces=min(_size(job.output), needed), read_key=read_key,
            strengths=tuple(map(_applied, job.adapters, outline.strengths)), memory=outline.memory, done=done,
        )  # fmt: skip

    def _adapter(self, entry: BatchJob, level: int) -> PlannedJob:
        """Plan a job that writes an adapter; it is made by itself."""
        blank = PlannedJob(entry, level, read_key=("by itself", entry.number))
        command, job = entry.command, entry.checked
        try:
            for path in entry.inputs:
                maker = self.outputs.maker(path)
                if maker is not None and maker.number != entry.number:  # the plan says that an input is its own output
                    raise UsageError("an input is the output of another job", f"{path}, made by {maker.where}",
                                     "write it into a jobs file of its own, to be run after this one")  # fmt: skip
            plan = command.plan(entry.changed(overwrite=True).checked, self.opened)
            size, effort = plan.written, int(plan.weights * command.effort)
            done = is_adapter_done(job, self.hashes)
        except MergeError as e:
            return replace(blank, error=e.reword(in_jobs_file))
        replaces = min(_size(job.output), size)
        return replace(
            blank, size=size, effort=effort, needs_disk=size, replaces=replaces, memory=entry.job.max_memory, done=done
        )

    def _shares(self, folder: Path, base: Path) -> bool:
        """Return whether outputs in a folder can share blocks with a base; asks the disk once for thousands of jobs."""
        if (folder, base) not in self.shares:
            self.shares[folder, base] = share_blocks(folder, base)
        return self.shares[folder, base]

    def _running(self, maker: BatchJob | None) -> BatchJob | None:
        return maker if maker is not None and not self.planned[maker.number].done else None

    def _grounded(self, job: Job) -> Job:
        """Return the job on a base that is there: the one from which the output that it reads will be made."""
        maker = self._running(self.outputs.maker(job.base))
        if maker is None:
            return job
        error = self.planned[maker.number].error
        if error is not None:
            raise UsageError("the base is the output of a job that cannot run", f"{job.base}, made by {maker.where}",
                             "correct that job first")  # fmt: skip
        ground = self.grounded[maker.number]
        return replace(job, base=ground.base, dtype=ground.dtype if job.dtype == "keep" else job.dtype)

    def _outline(self, command: Command, job: Job) -> _Outline:
        """Return the outline of a job, planned once for all jobs of a kind.

        Strengths 0 and 1 are kinds of their own: they may copy a tensor as a whole.
        """
        for path in (*(ref.path for ref in job.adapters), *([job.map] if job.map else [])):
            maker = self.outputs.maker(path)
            if maker is not None:
                raise UsageError(f"{'a name table' if path == job.map else 'an adapter'} is the output of another job",
                                 f"{path}, made by {maker.where}",
                                 "of outputs only checkpoints are read in the same batch, as a base")  # fmt: skip
        others = {o.name: o.default for o in OPTIONS.values() if not o.planned}
        kind = command.name, replace(job, **others, output=Path(), adapters=tuple(
            a if _apart(a) else replace(a, strength=0.5) for a in job.adapters
        ))  # fmt: skip
        if kind not in self.outlines:
            self.outlines[kind] = self._planned(command, job)
        outline: _Outline | MergeError = self.outlines[kind]
        if isinstance(outline, MergeError):
            raise outline
        return outline

    def _planned(self, command: Command, job: Job) -> _Outline | MergeError:
        try:
            window_room(job, self.workers)
            plan = command.plan(replace(job, max_memory=job.max_memory // self.workers), self.opened)
            unshared = unshared_bytes(plan) if file_system(plan.base.path) in CLONES else plan.size
        except ResourceError as e:
            share = f", the share of one of {self.workers} workers" if self.workers > 1 else ""
            return ResourceError(e.what, e.where.written + share, e.fix)
        except MergeError as e:
            return e
        return _Outline(
            plan.size,
            unshared,
            plan.is_folder,
            plan.read,
            contents(plan),
            hash(layout_key(plan)),
            tuple(m.strengths for m in plan.adapters),
            buffer_bytes(plan),
        )


def _apart(adapter: Adapter) -> bool:
    """Return whether a plan depends on the adapter's strength."""
    return bool(adapter.parts) or adapter.strength in (0, 1)


def _applied(adapter: Adapter, by_part: Mapping[str, Mapping[float, int]]) -> Mapping[str, Mapping[float, int]]:
    """Return the strengths of an adapter, from those of the outline that serves all strengths."""
    return by_part if _apart(adapter) else {part: {adapter.strength: sum(n.values())} for part, n in by_part.items()}


def disk_rooms(planned: Sequence[PlannedJob], workers: int) -> Iterator[tuple[Sequence[PlannedJob], Room]]:
    """Return the jobs that write to each disk, with the room that they need there together.

    What is replaced takes its space until it is.
    """
    by_disk: dict[int, list[PlannedJob]] = {}
    disks: dict[Path, int] = {}
    for s in (s for s in planned if s.runs):
        folder = s.entry.job.output.parent
        if folder not in disks:
            disks[folder] = existing(folder).stat().st_dev
        by_disk.setdefault(disks[folder], []).append(s)
    for some in by_disk.values():
        replaced = sorted((s.replaces for s in some), reverse=True)[: JOBS_TOGETHER * workers]
        size = sum(s.needs_disk - s.replaces for s in some) + sum(replaced)
        yield some, Room.at(some[0].entry.job.output, size)


def check_space(planned: Sequence[PlannedJob], workers: int) -> None:
    """Raise ResourceError unless every disk can hold all that will be written."""
    for some, room in disk_rooms(planned, workers):
        room.require(some[0].entry.job.output)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path / name for name in files_under(path)] if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files if p.exists())


def _listed(lines: Sequence[str]) -> Lines:
    more = [f"and {len(lines) - LISTED_CLASHES} more"] if len(lines) > LISTED_CLASHES else []
    return Lines.of([*lines[:LISTED_CLASHES], *more])
