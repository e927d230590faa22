"""The forms: one row a command, and what a filled form becomes: a job of a jobs file, or a command line.

Options are rows of the tables of options; no option, default or help is written a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..adapters_out.commands import COMMANDS
from ..adapters_out.dialects import names as dialects
from ..batch.commands import MERGE, TAKES, UNMERGE
from ..batch.schema import JOB_OPTIONS
from ..batch.short_form import jobs_text
from ..batch.templates import literal
from ..errors import UsageError
from ..job import TOKENIZERS
from ..merge_methods import COMBINATIONS, METHODS
from ..method_parameters import PARAMETER_NAMES
from ..options import BLOCK_WEIGHTS, OPTIONS, Kind, Option, finite, number
from ..paths import typed
from ..safe_regex import from_json
from .library import ADAPTER, BASE, Library

ANY: Final = "any"
MANY: Final = 50
"""Adapters of a form."""

NUMBERS: Final = tuple(name for name in PARAMETER_NAMES if name != "seed")
"""Numbers of methods; the seed is also that of rounding."""

PLACES: Final = ("overwrite", "strength", "strength_for")
"""Options that have a place of their own in every form."""

LINES: Final = ("texts", "settings", "entries", "rules")
"""Kinds of options with a value in each line."""


@dataclass(frozen=True)
class CommandForm:
    """One command: what it asks for."""

    command: str
    title: str
    about: str
    base: str = ""
    """The name of its base; "" if it takes none."""
    base_needed: bool = False
    inputs: str = "Adapters"
    """The name of its other inputs."""
    of: str = ADAPTER
    """The kind of these: adapter, base or any."""
    least: int = 1
    most: int = 1
    main: tuple[str, ...] = ()
    """Options that are shown at once; the others are below "more options"."""
    writes: bool = True

    @property
    def options(self) -> Mapping[str, Option]:
        """Return its options."""
        if not self.writes:
            return {}
        rows = COMMANDS[self.command].options if self.command in COMMANDS else OPTIONS
        return {name: rows[name] for name in TAKES[self.command] if name not in PLACES}

    @property
    def strengths(self) -> bool:
        """Return whether each adapter has a strength."""
        return self.command in (MERGE, UNMERGE) or "strength" in getattr(COMMANDS.get(self.command), "options", ())

    @property
    def parts(self) -> bool:
        """Return whether an adapter may have strengths by part."""
        return "strength_for" in TAKES.get(self.command, ())

    def _ordered(self) -> list[Option]:
        """Return its options, first the ones that are shown at once."""
        first = [self.options[name] for name in self.main if name in self.options]
        return [*first, *(row for row in self.options.values() if row not in first)]

    def to_dict(self) -> dict[str, Any]:
        """Return the form as plain data, for the page."""
        writes_adapters = self.command in COMMANDS
        methods = COMBINATIONS if writes_adapters else METHODS
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "strengths": self.strengths, "parts": self.parts,
            "options": [_option(row, main=row.name in self.main) for row in self._ordered()],
            "methods": {
                name: [*row.takes, *(["scale"] if writes_adapters or row.combines else [])]
                for name, row in methods.items()
            },
        }  # fmt: skip


FORMS: Final[Mapping[str, CommandForm]] = MappingProxyType({
    form.command: form
    for form in (
        CommandForm(
            MERGE, "Merge", "Adapters into a base: a new checkpoint.", "Base", base_needed=True, least=0, most=MANY,
            main=("method", "dtype", *NUMBERS),
        ),
        CommandForm(
            "combine", "Combine", "Several adapters into one adapter.", "Base (if names or formulas need it)",
            most=MANY, main=("method", "rank", *NUMBERS),
        ),
        CommandForm(
            "resize", "Resize", "An adapter at another rank.", "Base (if formulas need it)", inputs="Adapter",
            main=("rank",),
        ),
        CommandForm(
            "convert", "Convert", "An adapter in the format of another program.", "Base (if names need it)",
            inputs="Adapter", main=("to",),
        ),
        CommandForm(
            "extract", "Extract", "The difference of two checkpoints: an adapter.", "Base, before the training",
            base_needed=True, inputs="Tuned checkpoint", of=BASE, main=("rank",),
        ),
        CommandForm(
            "average", "Average", "Snapshots of one training: one adapter.", "Base (if formulas need it)",
            inputs="Snapshots, the oldest first", most=MANY, main=("weights", "ema"),
        ),
        CommandForm(
            UNMERGE, "Unmerge", "Adapters taken out of a merged checkpoint again.", "Merged checkpoint",
            base_needed=True, most=MANY,
        ),
        CommandForm(
            "inspect", "Inspect", "What a file is, with its numbers.", "Base (to see how it fits)", inputs="File",
            of=ANY, writes=False,
        ),
        CommandForm(
            "compare", "Compare", "How two models differ, or how alike two adapters are.",
            "Base (for two adapters)", inputs="Two files", of=ANY, least=2, most=2, writes=False,
        ),
    )
})  # fmt: skip
"""Command → its form."""


def _option(row: Option, *, main: bool) -> dict[str, Any]:
    words = [*row.words] or (list(dialects()) if row.name in ("to", "format") else [])
    return {
        "name": row.name, "kind": row.kind, "help": row.help, "words": words, "fixed": bool(row.words), "main": main,
        "default": _text(row.default), "lines": row.kind in LINES, "required": row.required,
    }  # fmt: skip


def _text(value: Any) -> str:
    """Return a default as a form has it."""
    return "" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)


# A filled form becomes a job.


def entry(values: Mapping[str, Any], library: Library) -> dict[str, Any]:
    """Return a filled form as a job of a jobs file, its paths checked; UsageError for a value that is no value."""
    form = FORMS.get(str(values.get("command")))
    if form is None:
        raise UsageError("there is no such form", str(values.get("command"))[:80], "load the page again")
    base = str(values.get("base") or "")
    adapters = [_adapter(form, n, a, library) for n, a in enumerate(values.get("adapters") or (), 1) if a.get("path")]
    if form.base_needed and not base:
        raise UsageError(f"no {form.base.lower()} is chosen", form.title, "choose one from the list")
    if not form.least <= len(adapters) <= form.most:
        raise UsageError(f"no {form.inputs.lower()} are chosen" if form.most > 1 else
                         f"no {form.inputs.lower()} is chosen", form.title, "choose from the list")  # fmt: skip
    job: dict[str, Any] = {} if form.command == MERGE else {"command": form.command}
    if form.base and base:
        job["base"] = str(library.path(base))
    if adapters:
        job["adapters"] = adapters
    given = values.get("options") or {}
    for name, row in form.options.items():
        text = str(given.get(name) or "").strip()
        if text and text != _text(row.default):
            job[name] = _value(row, text, library)
    if form.writes:
        job["output"] = str(library.target(str(values.get("output") or "")))
    return job


def _adapter(form: CommandForm, place: int, values: Mapping[str, Any], library: Library) -> str | dict[str, Any]:
    """Return an adapter of a job: its path alone, or a table with its strengths."""
    path, table = str(library.path(str(values["path"]))), dict[str, Any]()
    strength = _number(values.get("strength", 1), f"strength of {form.inputs.lower()} {place}")
    if form.strengths and strength != 1:
        table["strength"] = strength
    parts = {
        str(part): str(factor) if part == BLOCK_WEIGHTS else _number(factor, f"strength for {part}")
        for part, factor in (values.get("strength_for") or {}).items()
    }
    if form.parts and parts:
        table["strength_for"] = parts
    return {"path": path, **table} if table else path


def _number(value: Any, where: str) -> float:
    try:
        return finite(number(value), where)
    except (TypeError, ValueError) as e:
        raise UsageError(f"{str(value)[:40]!r} is not a number", where, "write a number such as 0.8") from e


def _value(row: Option, text: str, library: Library) -> Any:
    """Return the value of an option from the text of its field."""
    if row.kind == "path" or (row.kind == "folder" and text not in TOKENIZERS):
        return str(library.path(text))
    read = READERS.get(row.kind)
    return text if read is None else read(row, text)


def _lines(_: Option, text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _pairs(row: Option, text: str) -> dict[str, str]:
    lines = _lines(row, text)
    wrong = next((line for line in lines if "=" not in line), None)
    if wrong is not None:
        raise UsageError(f"{wrong[:80]!r} is not NAME=VALUE", row.flag, f"write {row.metavar} in each line")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _settings(row: Option, text: str) -> dict[str, Any]:
    return {name: _setting(value) for name, value in _pairs(row, text).items()}


def _setting(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return text


def _whole(row: Option, text: str) -> int:
    value = _number(text, row.flag)
    if value != int(value):
        raise UsageError(f"{text[:40]!r} is not a whole number", row.flag, "write a number such as 1")
    return int(value)


READERS: Final[Mapping[Kind, Callable[[Option, str], Any]]] = MappingProxyType({
    "texts": _lines, "entries": _pairs, "rules": _pairs, "settings": _settings, "whole": _whole,
    "switch": lambda _, text: text == "true",
    "number": lambda row, text: _number(text, row.flag),
    "list": lambda row, text: [_number(item, row.flag) for item in text.replace(",", " ").split()],
})  # fmt: skip
"""Kind of an option → its value from the text of a field; others are text."""


# A job as other forms of itself.


def runnable(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job whose braces are braces, as jobs files fill names in."""
    table: dict[str, Any] = literal(job)
    return table


def jobs_file(job: Mapping[str, Any]) -> str:
    """Return a jobs file with this job."""
    return jobs_text([runnable(job)])


def command_line(job: Mapping[str, Any]) -> str:
    """Return the command that does the same, quoted for the shell of this system."""
    return typed(["lora-merge", *_words(job)])


def _words(job: Mapping[str, Any]) -> Iterator[str]:
    command = job.get("command", MERGE)
    form = FORMS[command]
    adapters: list[dict[str, Any]] = [{"path": a} if isinstance(a, str) else a for a in job.get("adapters", ())]
    # The inputs: a base that the command needs comes first, another one is an option.
    first = form.base_needed or command == "inspect"
    yield command
    if first and "base" in job:
        yield job["base"]
    yield from (a["path"] for a in adapters)
    if not first and "base" in job:
        yield from ("--base", job["base"])
    if "output" in job:
        yield from ("--output", job["output"])
    if command == "inspect":
        yield "--weights"
    # The strengths, in the order of the adapters.
    if any("strength" in a for a in adapters):
        yield from (f"--strength={a.get('strength', 1.0)!r}" for a in adapters)
    for place, adapter in enumerate(adapters, 1):
        for part, factor in adapter.get("strength_for", {}).items():
            yield f"--strength-for={place}:{part}={factor}"
    # The options.
    for name, value in job.items():
        if name in JOB_OPTIONS:
            yield from _flags(JOB_OPTIONS[name], value)


WRITERS: Final[Mapping[Kind, Callable[[Any], Sequence[str]]]] = MappingProxyType({
    "texts": lambda value: value,
    "list": lambda value: [",".join(map(repr, value))],
    "settings": lambda value: [f"{name}={_json(v)}" for name, v in value.items()],
    **dict.fromkeys(("entries", "rules"), lambda value: [f"{name}={v}" for name, v in value.items()]),
})  # fmt: skip
"""Kind of an option → the words for its value; one word for all others."""


def _flags(row: Option, value: Any) -> Iterator[str]:
    if row.kind == "switch":
        yield row.flag if value else f"--no-{row.name}"
        return
    for text in WRITERS.get(row.kind, lambda v: [str(v)])(value):
        yield f"{row.flag}={text}"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
