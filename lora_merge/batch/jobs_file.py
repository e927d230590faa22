"""Turns a jobs file into a list of jobs: reads and checks it, multiplies matrices out, reports all mistakes at once.

No file that a job names is opened here, but for patterns (`glob`), `path:0.8` and outputs that later jobs read.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import ValidationError

from ..addresses import downloads_folder, downloads_in, is_spelled_out, output_address, parse
from ..command import MERGE, Command
from ..errors import MergeError, UsageError
from ..files.yaml_source import Document, Place
from ..job import Adapter, Job, validated
from ..merge_methods import METHODS, PARAMETER_NAMES, SUM
from ..models.parts import as_typed
from ..option_texts import in_jobs_file
from ..options import BLOCK_WEIGHTS, JOB_OPTIONS, TOKENIZERS, number, without_part
from ..paths import ENDINGS, exists, expand, home, is_file, of_index, with_ending
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.downloads import job_at
from ..planning.plan import protected
from ..recipes.commands import COMMANDS
from ..sources.inputs import locate
from ..text import plural, shown
from .input_patterns import Search
from .schema import AdapterEntry, Axis, Glob, JobDefaults, JobEntry, JobsFile, stated_fields
from .schema_errors import DATA, OTHER_NAMES, REQUIRED, failure, flow, nearest, problems
from .short_form import read_jobs
from .templates import NoSuchName, distinct, render, render_output, render_word, split_adapter

FILE_LIMIT: Final = 32 << 20  # bytes; a job written out takes 200
JOB_LIMIT: Final = 10_000  # jobs of a file; more is a slip in a matrix
ADAPTER_LIMIT: Final = 50_000  # adapters of all jobs of a file
LOOKS: Final = 5_000_000  # at values and excluded rows, for all combinations of one matrix; five seconds
MOST_MISTAKES: Final = 1000  # mistakes in one job, after which its other combinations are not tried
LISTED_MISTAKES: Final = 50  # mistakes that are listed one by one
LONGEST_SENTENCE: Final = 300  # characters of a mistake's sentence
OF_PARTS: Final = ("strength_for", "rank_for", "include", "exclude", "keep_precision")
"""Options that take parts of a model."""
TEXTS: Final = ("number", "rank", "alpha", "name", "text")  # kinds of options that may hold {names} of the matrix
PLACEHOLDERS: Final = {"base": ".", "adapters": ["."], "output": "."}  # in place of a required field that is wrong
Entered = TypeVar("Entered", JobDefaults, JobEntry)


@dataclass(frozen=True)
class BatchJob:
    """One job of a batch, and where it was asked for."""

    number: int  # from 1, in the order of the file
    command: Command
    checked: Any  # the job as its command takes it: a `Job`, or an `AdapterJob`
    where: str  # "jobs.yaml:12 (jobs[3])"
    redo: bool = False  # whether it is made again where its output is there, by the same recipe
    template: str = ""  # a name for its output with every name of its matrix, such as {lora.stem}-{strength}
    usual: frozenset[tuple[str, str]] = frozenset()  # (option, part) of the defaults, which may fit other jobs only
    idle: tuple[str, ...] = ()  # those of them that are left out, as typed: they have no effect on this job

    @property
    def job(self) -> Job:
        """The job; of a command that writes an adapter what it shares with merging."""
        job: Job = self.checked if self.command.merges else self.checked.inputs
        return job

    @property
    def base(self) -> Path | None:
        """The base, if one is read."""
        base: Path | None = self.checked.base
        return base

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The base and the adapters."""
        return (*([] if self.base is None else [self.base]), *(a.path for a in self.job.adapters))

    @property
    def sources(self) -> tuple[Path, ...]:
        """All paths that are read: the inputs, the configurations of adapters, the name table."""
        return (*map(of_index, self.inputs), *protected(self.job))

    def changed(self, **options: Any) -> BatchJob:
        """Return the job with other values of options that all commands have."""
        merges = self.command.merges
        return replace(self, checked=replace(self.job, **options) if merges else self.checked.changed(**options))

    def at(self, places: Mapping[Path, Path]) -> BatchJob:
        """Return the job with other paths of its inputs."""
        checked = job_at(self.checked, places) if self.command.merges else self.checked.moved(places)
        return replace(self, checked=checked)

    def without(self, option: str, part: str) -> BatchJob:
        """Return the job without a part of its defaults that has no effect on it."""
        name, changes = option.lstrip("-").replace("-", "_"), dict[str, Any]()
        if name == "strength_for":
            changes["adapters"] = tuple(replace(a, parts=without_part(a.parts, part)) for a in self.job.adapters)
        elif name == "keep_precision":
            changes[name] = without_part(self.job.keep_precision, part)
        checked = self.changed(**changes).checked
        checked = checked if self.command.merges else checked.without(name, part)
        return replace(self, checked=checked, usual=self.usual - {(option, part)},
                       idle=(*self.idle, f"{option} {as_typed(part)}"))  # fmt: skip


def load(
    source: Path | Sequence[Any] | Mapping[str, Any], *, overwrite: bool = False, card: bool | None = None
) -> tuple[BatchJob, ...]:
    """Return the jobs of a file, of its content as plain data, or of a list of Job objects or of its `jobs`.

    UsageError naming file, line and field of every mistake; InputError where the file cannot be read.
    `overwrite` holds for all jobs, `card` for all merges that do not say whether they get one.
    """
    asked = CallerOptions(overwrite, card)
    if isinstance(source, Path):
        return _Loader(read_jobs(source, FILE_LIMIT), source.name, source.absolute().parent, asked).entries()
    if not isinstance(source, Mapping) and source and all(isinstance(j, Job) for j in source):
        jobs = [
            validated(replace(j, overwrite=j.overwrite or overwrite, card=card if j.card is None else j.card))
            for j in source
        ]
        return tuple(BatchJob(n, COMMANDS[MERGE], job, f"jobs[{n - 1}]") for n, job in enumerate(jobs, 1))
    data = source if isinstance(source, Mapping) else {"version": 1, "jobs": list(source)}
    return _Loader(_plain(data), DATA, expand("."), asked).entries()


def _plain(value: Any) -> Any:
    """Return data as a file holds it, where a program has given paths as such."""
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _usual(entry: JobEntry, defaults: JobDefaults) -> frozenset[tuple[str, str]]:
    """Return (option, part) for the parts of a model that a job has from the defaults."""
    shared = {
        name: value
        for name, value in stated_fields(defaults).items()
        if name in OF_PARTS and name not in stated_fields(entry)
    }
    return frozenset((f"--{name.replace('_', '-')}", part) for name, parts in shared.items() for part in parts)


def _command(entry: JobEntry, defaults: JobDefaults) -> Command:
    return COMMANDS[entry.command or defaults.command or MERGE]


class CallerOptions(NamedTuple):
    """The options that a caller gives with the jobs file."""

    overwrite: bool
    card: bool | None


class _Loader:
    """Turns one source into jobs, and gathers its mistakes."""

    def __init__(self, source: Document | dict[str, Any], name: str, folder: Path, asked: CallerOptions) -> None:
        self.document = source if isinstance(source, Document) else None
        self.value = source.value if isinstance(source, Document) else source
        self.name, self.folder, self.asked = name, folder, asked
        self.mistakes: dict[tuple[Place, str], None] = {}  # in order, each once
        self.search = Search(folder)
        self.opened = CheckpointCache()
        self._jobs: list[tuple[Place, JobEntry, Mapping[str, list[str]], bool]] = []  # and whether too many
        self._located: dict[tuple[str, Path | None], Path | MergeError] = {}
        self._wrong: dict[Place, set[Any]] = defaultdict(set)  # table → its fields with mistakes

    def entries(self) -> tuple[BatchJob, ...]:
        """Return every job, or raise one error with every mistake."""
        entries: list[BatchJob] = []
        defaults, jobs = self._validated()
        axes = {n: self._axes(("jobs", n), entry) for n, entry in jobs}
        counts = {n: prod(len(values) for values in of.values()) for n, of in axes.items()}
        total = sum(counts.values())
        if many := total > JOB_LIMIT:
            most = max(counts, key=counts.__getitem__)
            what = f"{shown(counts[most])} combinations, {shown(total)} jobs in all; at most {JOB_LIMIT} a file"
            self._note(("jobs", most, "matrix"), what)
        lists = {n: len(entry.adapters or defaults.adapters or ()) for n, entry in jobs}
        if not many and sum(counts[n] * lists[n] for n in lists) > ADAPTER_LIMIT:
            self._note(("jobs",), f"more than {ADAPTER_LIMIT} adapters in all jobs; write several files")
            jobs = []
        self._jobs = [(("jobs", n), entry, axes[n], many) for n, entry in jobs]
        for n, entry in jobs:
            place: Place = ("jobs", n)
            for values in self._combinations(place, entry, axes[n], first=many):
                before = len(self.mistakes)
                checked = self._job(place, entry, defaults, values)
                if checked is not None and len(self.mistakes) == before:
                    command = _command(entry, defaults)
                    entries.append(BatchJob(len(entries) + 1, command, checked, self._where(place),
                                            template=distinct(values), usual=_usual(entry, defaults)))  # fmt: skip
                if len(self.mistakes) > MOST_MISTAKES:
                    break
        if self.mistakes or (self.document is not None and self.document.mistakes):
            raise self._failure()
        return tuple(entries)

    def _validated(self) -> tuple[JobDefaults, list[tuple[int, JobEntry]]]:
        """Return what is right in the file, with the number of each job; note the rest."""
        self._move_to_defaults()
        try:
            file = JobsFile.model_validate(self.value)
        except ValidationError as e:
            self.mistakes.update(dict.fromkeys(problems(e, self.value)))
        else:
            return file.defaults, list(enumerate(file.jobs))
        top = self.value if isinstance(self.value, dict) else {}
        jobs = top.get("jobs") if isinstance(top.get("jobs"), list) else []
        for place, _ in self.mistakes:
            for length in (1, 2):
                self._wrong[place[:length]].update(place[length : length + 1])
        sound = ((n, self._sound(JobEntry, raw, ("jobs", n))) for n, raw in enumerate(jobs or []))
        defaults = self._sound(JobDefaults, top.get("defaults", {}), ("defaults",))
        return defaults or JobDefaults(), [(n, entry) for n, entry in sound if entry is not None]

    def _move_to_defaults(self) -> None:
        """Read fields of the defaults at the top of the file as defaults, and note that as one mistake."""
        stray = (
            {name: v for name, v in self.value.items() if name in JobDefaults.model_fields} if self._has_jobs else {}
        )
        if stray:
            defaults = {**stray, **(self.value.get("defaults") or {})}
            what = f"move {' and '.join(stray)} under defaults; write defaults: {flow(defaults)}"
            self._note((next(iter(stray)),), what)
            self.value = {name: v for name, v in self.value.items() if name not in stray} | {"defaults": defaults}

    @property
    def _has_jobs(self) -> bool:
        table = isinstance(self.value, dict) and isinstance(self.value.get("defaults") or {}, dict)
        return table and "jobs" in self.value

    def _sound(self, kind: type[Entered], raw: Any, place: Place) -> Entered | None:
        """Return a table without the fields that are wrong, so that its other mistakes are reported as well."""
        bad = self._wrong[place] | {OTHER_NAMES[JobEntry].get(name) for name in self._wrong[place]}
        if not isinstance(raw, dict) or "matrix" in bad:
            return None
        stand_ins = {k: v for k, v in PLACEHOLDERS.items() if k in bad and k in kind.model_fields}
        sound = {k: v for k, v in raw.items() if k not in bad} | stand_ins
        return kind.model_validate(sound)

    def _note(self, place: Place, what: str) -> None:
        self.mistakes[place, what] = None

    @contextmanager
    def _noting(self, place: Place) -> Iterator[None]:
        """Note what is wrong inside as a mistake at `place`, and go on, for the job's other mistakes."""
        try:
            yield
        except NoSuchName as e:
            self._note(place, str(e))
        except MergeError as e:
            self._note(place, in_jobs_file(f"{e.what.written} ({e.where.written}); {e.fix.written}"))

    def _axes(self, place: Place, entry: JobEntry) -> dict[str, list[str]]:
        """Return every name of the matrix with its values, as they are written in the file."""
        if entry.matrix is None:
            return {}
        axes: dict[str, Axis] = entry.matrix.__pydantic_extra__ or {}
        return {name: self._values((*place, "matrix", name), axis) for name, axis in axes.items()}

    def _values(self, place: Place, axis: Axis) -> list[str]:
        if isinstance(axis, Glob):
            with self._noting((*place, "glob")):
                return self.search.paths(axis.glob)
            return []
        return [self._as_written((*place, n), value) for n, value in enumerate(axis)]

    def _as_written(self, place: Place, value: Any) -> str:
        text = None if self.document is None else self.document.text(place)
        return str(value) if text is None else text

    def _combinations(
        self, place: Place, entry: JobEntry, axes: Mapping[str, list[str]], *, first: bool
    ) -> Iterator[dict[str, str]]:
        """Return all combinations that are not excluded; only the first, excluded or not, where there are too many."""
        excluded = self._excluded((*place, "matrix", "exclude"), entry, axes)
        work = prod(map(len, axes.values())) * (len(axes) + len(excluded))
        if first or work > LOOKS:
            if not first:
                self._note((*place, "matrix"), "too many names, or exclude names too many different sets of them")
            yield from ({name: values[0] for name, values in axes.items()} for _ in range(all(axes.values())))
            return
        any_left = False
        for combination in itertools.product(*axes.values()):
            named = dict(zip(axes, combination, strict=True))
            if not any(tuple(named[name] for name in names) in rows for names, rows in excluded.items()):
                any_left = True
                yield named
        if not any_left and all(axes.values()):
            self._note((*place, "matrix", "exclude"), "it leaves no job at all")

    def _excluded(
        self, place: Place, entry: JobEntry, axes: Mapping[str, list[str]]
    ) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
        """Return the names that rows of `exclude` speak of → the values of these that they exclude."""
        rows: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        known = {name: set(values) for name, values in axes.items()}
        for n, row in enumerate(entry.matrix.exclude if entry.matrix is not None else ()):
            written = {name: self._as_written((*place, n, name), value) for name, value in row.items()}
            for name, value in written.items():
                if value not in known.get(name, ()):
                    why = f"{value} is not a value of {name}" if name in axes else f"the matrix has no {name}"
                    self._note((*place, n, name), why)
            names = tuple(sorted(written))
            if row and known.keys() >= written.keys():
                rows[names].add(tuple(written[name] for name in names))
            elif not row:
                self._note((*place, n), "an empty row would exclude every job")
        return rows

    def _job(self, place: Place, entry: JobEntry, defaults: JobDefaults, values: Mapping[str, str]) -> Any:
        """Return one combination as a job. After a mistake, which is noted, the result is None or must not be used."""
        base = entry.base or defaults.base
        adapters = (defaults.adapters if entry.adapters is None else entry.adapters) or []
        command, inputs = _command(entry, defaults), {"base": base, "adapters": adapters}
        if missing := next((name for name in command.needs if not inputs[name]), None):
            self._note((*place, missing), f"this field is required; {REQUIRED[missing]}")
            return None
        options = self._options(place, command, entry, defaults, values)
        parts = self._parts((*place, "strength_for"), options.pop("strength_for", {}), values)
        table, whose = options.pop("map", None), options.pop("tokenizer", None)
        with self._noting((*place, "map")):
            options["map"] = None if table is None else self._path(table)
        if whose is not None:
            with self._noting((*place, "tokenizer")):
                options["tokenizer"] = whose if whose in TOKENIZERS else self._path(whose)
        cache = options.get("cache")
        with self._noting((*place, "cache")):
            options["cache"] = None if cache is None else self._path(cache)
        options["overwrite"] = options.get("overwrite", False) or self.asked.overwrite
        if "card" in command.options and self.asked.card is not None:
            options.setdefault("card", self.asked.card)
        path, output = None if base is None else self.folder, str(self.folder)
        with downloads_in(options["cache"]):
            refs = [self._adapter((*place, "adapters", n), a, values) for n, a in enumerate(adapters)]
            with self._noting((*place, "base")):
                path = None if base is None else self._input(render(base, values))
        with self._noting((*place, "output")):
            text = render_output(entry.output, values)
            # a path does not show that a folder is meant
            path_of_output = f"{self._path(text)}{'/' * text.endswith('/')}"
            output = path_of_output if output_address(text) is None else text
        with self._noting(place):
            if not command.several and len(refs) != 1:
                raise UsageError(
                    f"{command.name} takes one adapter", plural(len(refs), "adapter"), "write a job for each"
                )
            return command.job(tuple(refs), output, path, {**options, "strength_for": parts}, self.opened)
        return None

    def _options(
        self, place: Place, command: Command, entry: JobEntry, defaults: JobDefaults, values: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the options of a job, those of its command; note others that the job itself has."""
        of_job, shared = (self._worded(place, stated_fields(options), values) for options in (entry, defaults))
        takes = command.fields
        for name in of_job.keys() - {*takes}:
            self._note((*place, name), f"{command.name} has no such option{nearest(name, takes)}")
        of_method = METHODS[of_job.get("method") or shared.get("method") or SUM].takes
        idle = {*PARAMETER_NAMES} - {*of_method, "seed"} - of_job.keys()  # defaults for jobs of another method
        chosen = {name: value for name, value in (shared | of_job).items() if name in takes and name not in idle}
        for name, kind in ((n, JOB_OPTIONS[n].kind) for n, value in [*chosen.items()] if isinstance(value, str)):
            with self._noting((*place, name)):
                chosen[name] = render(chosen[name], values) if kind in TEXTS else chosen[name]
            if kind == "number":
                chosen[name] = self._number((*place, name), chosen[name], values)
        return chosen

    def _worded(self, place: Place, options: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
        """Return options with the templates filled in that are one of a few words."""
        words = {}
        for name, value in options.items():
            with self._noting((*place, name)):
                words[name] = render_word(value, JOB_OPTIONS[name], values)
        return words

    def _adapter(self, place: Place, entry: AdapterEntry, values: Mapping[str, str]) -> Adapter | Path:
        """Return path, strength and parts, a path alone without both; `path:0.8` is read as on the command line."""
        path, tail = self.folder, None
        with self._noting((*place, "path")):
            written = render(entry.path, values)
            path = self._input(written)
            text, tail = (written, None) if exists(path) else split_adapter(written)
            if tail is not None:
                path = self._input(text)
                if entry.strength is not None:
                    raise NoSuchName(f"a strength is given twice: {written!r} and {entry.strength}")
        if entry.strength is None and tail is None and not entry.strength_for:
            return path
        strength = entry.strength if entry.strength is not None else 1.0 if tail is None else tail
        return Adapter(
            path, self._number((*place, "strength"), strength, values),
            self._parts((*place, "strength_for"), entry.strength_for, values),
        )  # fmt: skip

    def _parts(
        self, place: Place, by_part: Mapping[str, Any], values: Mapping[str, str]
    ) -> tuple[tuple[str, Any], ...]:
        return tuple(
            (part, factor if part == BLOCK_WEIGHTS else self._number((*place, part), factor, values))
            for part, factor in by_part.items()
        )

    def _number(self, place: Place, value: float | str, values: Mapping[str, str]) -> float:
        with self._noting(place):
            text = render(value, values) if isinstance(value, str) else value
            try:
                return number(text)
            except ValueError:
                raise NoSuchName(f"{value!r} becomes {text!r}, which is not a number") from None
        return 1.0

    def _input(self, text: str) -> Path:
        """Return the path of an input; of an address the path of what it leads to. A file or folder here comes before a
        bare `owner/name`, and so does the output of a job."""
        address, path = parse(text), self._path(text)
        if address is None or (not is_spelled_out(text) and self._is_path(path, text)):
            return path
        key = text, downloads_folder()
        if key not in self._located:
            try:
                self._located[key] = locate(text) or path
            except MergeError as e:  # once, for all combinations of a matrix
                self._located[key] = e
        place = self._located[key]
        if isinstance(place, MergeError):
            raise place
        return place

    def _is_path(self, path: Path, text: str) -> bool:
        """Return whether a bare `owner/name` is a path: it is there, or its folder is, or a job writes it."""
        return exists(path) or exists(self._path(text.partition("/")[0])) or path in self._outputs

    @cached_property
    def _outputs(self) -> set[Path]:
        """The paths that jobs write, also without the endings that they may get."""
        paths: set[Path] = set()
        for place, entry, axes, first in self._jobs:
            for values in self._combinations(place, entry, axes, first=first):
                with suppress(NoSuchName, MergeError):  # of the job itself
                    path = self._path(render_output(entry.output, values))
                    paths |= {path, path.with_suffix("") if path.suffix in ENDINGS else path}
        return paths

    def _path(self, text: str) -> Path:
        return self.folder / home(text)

    def _where(self, place: Place) -> str:
        """Return where a field is: "jobs.yaml:12 (jobs[3].output)"."""
        line = f":{self.document.line(place)}" if self.document is not None else ""
        field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
        return f"{self.name}{line}" + (f" ({field})" if field else "")

    def _failure(self) -> UsageError:
        early = self.document.mistakes if self.document is not None else ()
        alike: dict[tuple[Place, str], list[Place]] = defaultdict(list)  # one mistake in several jobs is listed once
        for place, what in self.mistakes:
            alike[place[:1] + place[2:], what].append(place)
        count = len(early) + len(alike)
        mistakes = [(line, f"{self.name}:{line}: {what}") for line, what in early]
        for (_, what), (place, *more) in alike.items():
            others = f" and {plural(len(more), 'more job')}" if more else ""
            line = self.document.line(place) if self.document is not None else 0
            mistakes.append((line, f"{self._where(place)}{others}: {what}"))
        lines = [text for _, text in sorted(mistakes, key=lambda mistake: mistake[0])]  # stable
        lines = [line if len(line) <= LONGEST_SENTENCE else f"{line[:LONGEST_SENTENCE]}…" for line in lines]
        lines[LISTED_MISTAKES:] = [f"and {count - LISTED_MISTAKES} more"] if count > LISTED_MISTAKES else []
        return failure(self.value, self.name, lines, count)


def with_endings(entries: Sequence[BatchJob]) -> tuple[BatchJob, ...]:
    """Return the jobs; where the base of one is the output of another, both names have the ending of a file.

    `make_job` has completed the names of jobs whose base is there.
    """
    waiting: dict[Path, list[BatchJob]] = defaultdict(list)
    ready, by_number = deque[BatchJob](), {e.number: e for e in entries}
    for e in entries:
        if e.command.merges and not exists(e.job.base):
            waiting[e.job.base].append(e)
        else:
            ready.append(e)
    while waiting and ready:
        output = ready.popleft().job.output
        for name in (output, output.with_suffix("")) if output.suffix in ENDINGS else (output,):
            for e in waiting.pop(name, ()):
                file = output.suffix in ENDINGS or is_file(output)
                completed = with_ending(e.job.output) if file else e.job.output
                by_number[e.number] = e.changed(base=output, output=completed)
                ready.append(by_number[e.number])
    return tuple(by_number.values())
