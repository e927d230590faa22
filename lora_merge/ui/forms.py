"""The forms: one row a command, and what a filled form becomes: a job of a jobs file, or a command line.

Options are rows of the tables of options; no option, default or help is written a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..adapter_arguments import factors_by_part
from ..adapters_out.dialects import names as dialects
from ..batch.short_form import jobs_text
from ..batch.templates import literal
from ..command import MERGE
from ..errors import UsageError
from ..merge_methods import COMBINATIONS, METHODS, PARAMETER_NAMES
from ..option_texts import on_command_line, value_of
from ..options import BLOCK_WEIGHTS, EVERY_VALUE, OPTIONS, READING, TOKENIZERS, Option, finite, number
from ..paths import typed
from ..recipes.commands import COMMANDS
from .library import ADAPTER, BASE, Library

ANY: Final = "any"
MANY: Final = 50
"""Adapters of a form."""

NUMBERS: Final = tuple(name for name in PARAMETER_NAMES if name != "seed")
"""Numbers of methods; the seed is also that of rounding."""

PLACES: Final = ("overwrite", "strength", "strength_for")
"""Options that have a place of their own in every form."""

LINES: Final = ("texts", "settings", "entries", "ranks")
"""Kinds of options with a value in each line."""

PATHS: Final = ("path", "folder")
"""Kinds of options with a path."""

READS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "verify": tuple(name for name, option in OPTIONS.items() if option.in_verify),
    "replay": ("device", "overwrite"),
})  # fmt: skip
"""Command that is no job of a jobs file → the options of a merge that it takes."""


@dataclass(frozen=True)
class CommandForm:
    """One command: what it asks for."""

    command: str
    title: str
    about: str
    base: str = ""
    """The name of its base; "" if it takes none."""
    base_needed: bool = False
    product: str = ""
    """The name of the finished file that it is about; "" if it takes none."""
    inputs: str = "Adapters"
    """The name of its other inputs."""
    of: str = ADAPTER
    """The kind of these: adapter, base or any."""
    least: int = 1
    most: int = 1
    places: int = 1
    """How many of them the empty form has a place for."""
    help: str = ""
    """What to know about these."""
    main: tuple[str, ...] = ()
    """Options that are shown at once; the others are below "more options"."""
    reading: tuple[str, ...] = ()
    """How much it reads: rows of `READING`."""
    always: tuple[str, ...] = ()
    """The ones of them that hold without being asked for."""
    base_first: bool = False
    """Whether its base comes first on the command line, though it may have none."""
    named_adapters: bool = False
    """Whether its adapters are values of an option there."""
    writes: bool = True
    by_recipe: bool = False
    """Whether the recipe of the finished file can name its inputs."""

    @property
    def options(self) -> Mapping[str, Option]:
        """Return its options."""
        reading = {name: READING[name] for name in self.reading}
        return reading | {name: row for name, row in self.rows.items() if name not in PLACES}

    @property
    def rows(self) -> Mapping[str, Option]:
        """Return the options of the tables that it takes."""
        if (row := COMMANDS.get(self.command)) is not None:
            return {name: row.options[name] for name in row.fields}
        return {name: OPTIONS[name] for name in READS.get(self.command, ())}

    @property
    def strengths(self) -> bool:
        """Return whether each adapter has a strength."""
        return "strength" in COMMANDS[self.command].options if self.command in COMMANDS else self.parts

    @property
    def parts(self) -> bool:
        """Return whether an adapter may have strengths by part."""
        return "strength_for" in self.rows

    def _ordered(self) -> list[Option]:
        """Return its options, first the ones that are shown at once."""
        first = [self.options[name] for name in self.main if name in self.options]
        return [*first, *(row for row in self.options.values() if row not in first)]

    def to_dict(self) -> dict[str, Any]:
        """Return the form as plain data, for the page."""
        writes_adapters = self.command in COMMANDS and not COMMANDS[self.command].merges
        methods = COMBINATIONS if writes_adapters else METHODS
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "strengths": self.strengths, "parts": self.parts,
            "options": [
                _option(row, main=row.name in self.main) for row in self._ordered() if row.name not in self.always
            ],
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
            "inspect", "Inspect", "What files are, with their numbers.", "Base (to see how adapters fit it)",
            inputs="Files", of=ANY, most=MANY, reading=("weights", "hashes"), always=("weights",), base_first=True,
            writes=False,
        ),
        CommandForm(
            "compare", "Compare", "How two models differ, or how alike two adapters are.",
            "Base (for two adapters)", inputs="Files", of=ANY, least=2, most=2, places=2, writes=False,
        ),
        CommandForm(
            "verify", "Verify", "Whether a finished file is the merge that it should be.",
            "Base (for a file without a recipe)", product="Finished file", least=0, most=MANY, places=0,
            help="Only for a file without a recipe. With one, the inputs are found in the folders of this page.",
            main=(EVERY_VALUE,), reading=(EVERY_VALUE,), named_adapters=True, writes=False,
            by_recipe=True,
        ),
        CommandForm(
            "unmerge", "Unmerge", "Adapters taken out of a merged checkpoint again.", "Merged checkpoint",
            base_needed=True, least=0, most=MANY, places=0, by_recipe=True,
            help="Without adapters here: all that its recipe names. With some: those, at its strengths.",
        ),
        CommandForm(
            "replay", "Replay", "A finished file written again by its recipe.", product="Finished file",
            least=0, most=0, places=0, by_recipe=True,
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
    job: dict[str, Any] = {} if form.command == MERGE else {"command": form.command}
    job |= {**_inputs(form, values, library), **dict.fromkeys(form.always, True)}
    options = values.get("options") or {}
    for name, row in form.options.items():
        text = str(options.get(name) or "").strip()
        if text and text != _text(row.default):
            job[name] = _value(row, text, library)
    if form.writes:
        job["output"] = str(library.target(str(values.get("output") or "")))
    if by_recipe(job):
        job["search"] = [*map(str, library.places())]
    return job


def _inputs(form: CommandForm, values: Mapping[str, Any], library: Library) -> dict[str, Any]:
    """Return the files of a filled form; UsageError for one that is missing."""
    inputs: dict[str, Any] = {}
    for name, title, needed in (("product", form.product, bool(form.product)), ("base", form.base, form.base_needed)):
        path = str(values.get(name) or "") if title else ""
        if needed and not path:
            raise UsageError(f"no {title.lower()} is chosen", form.title, "choose one from the list")
        if path:
            inputs[name] = str(library.path(path))
    adapters = [_adapter(form, n, a, library) for n, a in enumerate(values.get("adapters") or (), 1) if a.get("path")]
    if not form.least <= len(adapters) <= form.most:
        raise UsageError(f"no {form.inputs.lower()} are chosen" if form.most > 1 else
                         f"no {form.inputs.lower()} is chosen", form.title, "choose from the list")  # fmt: skip
    return inputs | ({"adapters": adapters} if adapters else {})


def by_recipe(job: Mapping[str, Any]) -> bool:
    """Return whether the inputs of a job are those of the recipe of a finished file."""
    return FORMS[job.get("command", MERGE)].by_recipe and not (job.get("adapters") or {"product", "base"} <= {*job})


def in_jobs_file(job: Mapping[str, Any]) -> bool:
    """Return whether a jobs file may have a job. The others are calls of the Python API."""
    return job.get("command", MERGE) in COMMANDS and not by_recipe(job)


def adapter_tables(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the adapters of a job, each as a table with its `path`."""
    return [{"path": a} if isinstance(a, str) else a for a in job.get("adapters", ())]


def _adapter(form: CommandForm, place: int, values: Mapping[str, Any], library: Library) -> str | dict[str, Any]:
    """Return an adapter of a job: its path alone, or a table with its strengths."""
    path, table = str(library.path(str(values["path"]))), dict[str, Any]()
    strength = _number(values.get("strength", 1), f"strength of adapter {place}")
    if form.strengths and strength != 1:
        table["strength"] = strength
    parts = {
        str(part): str(factor) if part == BLOCK_WEIGHTS else _number(factor, f"strength for {part} of adapter {place}")
        for part, factor in _factors(values).items()
    }
    if form.parts and parts:
        table["strength_for"] = parts
    return {"path": path, **table} if table else path


def _factors(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Return part → factor of an adapter: from its sliders, and from the text of one field."""
    return {**(adapter.get("strength_for") or {}), **dict(factors_by_part(str(adapter.get("parts") or "")))}


def _number(value: Any, where: str) -> float:
    try:
        return finite(number(value), where)
    except (TypeError, ValueError) as e:
        raise UsageError(f"{str(value)[:40]!r} is not a number", where, "write a number such as 0.8") from e


def _value(row: Option, text: str, library: Library) -> Any:
    """Return the value of an option from the text of its field."""
    if row.kind in PATHS and not (row.name == "tokenizer" and text in TOKENIZERS):
        return str(library.path(text))
    words = [line.strip() for line in text.splitlines() if line.strip()] if row.kind in LINES else [text]
    return value_of(row, words)


# The field that an error is about.

NAMED: Final = re.compile(r"--([a-z-]+)|(?:^|\s)([a-z_]+):")
"""An option in the `where` of an error: --seed, base.safetensors: dtype: nvfp4"""

STRENGTH: Final = re.compile(r"strength(?: of| for|_for)\b.*?(?:adapter ([0-9]+))?")
"""A strength in the `where` of an error, and perhaps the number of its adapter."""


def place_of(where: str, values: Mapping[str, Any], library: Library) -> str:
    """Return the field of a filled form that an error is about: an option, `output`, `base`, `product` or `adapters.0`;
    "" if its `where` names none."""
    form, adapters = FORMS.get(str(values.get("command"))), [*(values.get("adapters") or ())]
    if form is None:
        return ""
    named = [where, *(name.replace("-", "_") for names in NAMED.findall(where) for name in names if name)]
    if option := next((name for name in named if name in form.options), ""):
        return option
    # Strengths are parts of their adapter.
    if strength := STRENGTH.fullmatch(where):
        words = {*re.split(r"[\s,:{}]+", where)}
        parts = (n for n, adapter in enumerate(adapters) if words.intersection(_factors(adapter)))
        return f"adapters.{int(strength[1]) - 1 if strength[1] else next(parts, 0)}"
    # The output, which may be where an input is; else the longest path.
    if (name := str(values.get("output") or "")) and (where == name or str(library.output / name) in where):
        return "output"
    paths = {"product": values.get("product"), "base": values.get("base")}
    paths |= {f"adapters.{n}": adapter.get("path") for n, adapter in enumerate(adapters)}
    paths |= {n: (values.get("options") or {}).get(n) for n, row in form.options.items() if row.kind in PATHS}
    lengths = {place: len(str(path)) for place, path in paths.items() if path and str(path) in where}
    return max(lengths, default="", key=lambda place: lengths[place])


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
    adapters = adapter_tables(job)
    # The inputs: a base that the command needs comes first, another one is an option.
    first, verified = form.base_needed or form.base_first, form.named_adapters
    yield command
    yield from (job[name] for name in ("product", *(["base"] if first else [])) if name in job)
    yield from (a["path"] for a in adapters if not verified)
    if not first and "base" in job:
        yield from ("--base", job["base"])
    if "output" in job:
        yield from ("--output", job["output"])
    yield from (f"--search={folder}" for folder in job.get("search", ()))
    # The strengths, in the order of the adapters.
    if verified:
        yield from (f"--adapter={a['path']}" + (f":{a['strength']!r}" if "strength" in a else "") for a in adapters)
    elif any("strength" in a for a in adapters):
        yield from (f"--strength={a.get('strength', 1.0)!r}" for a in adapters)
    for place, adapter in enumerate(adapters, 1):
        for part, factor in adapter.get("strength_for", {}).items():
            yield f"--strength-for={place}:{part}={factor}"
    # The options.
    for name, row in form.options.items():
        if name in job:
            yield from on_command_line(row, job[name])
