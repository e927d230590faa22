"""What is wrong in a jobs file, in sentences: the mistakes that pydantic finds, and the error that names them all."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import UsageError
from ..files.file_signatures import is_mergekit, of_mergekit
from ..files.yaml_source import FIRST_FILE, Place
from ..job import MOST_ADAPTERS
from ..options import alike
from ..text import Lines
from .schema import LONGEST_PATH, AdapterEntry, Glob, JobDefaults, JobEntry, JobsFile

_SENTENCES: Final = {
    "dict_type": "should be a table of names and values",
    "bool_type": "should be true or false",
    "too_short": "should not be empty; write one entry or more",
    "string_too_short": "should not be empty",
    "string_too_long": f"should have at most {LONGEST_PATH} characters",
    "too_long": f"should have at most {MOST_ADAPTERS} entries",
}

NUMBER: Final = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"

SHAPE: Final = "write version: 1 and jobs: [{base: FILE, adapters: [FILE], output: FILE}]"

REQUIRED: Final = {
    "version": "write version: 1 in the first line",
    "jobs": SHAPE,
    "base": "write base: FILE, here or under defaults",
    "adapters": "write adapters: [FILE], here or under defaults",
    "output": "write output: FILE",
}
"""Required field → how it is written."""

TABLES: Final[Mapping[type[BaseModel], str]] = {
    JobsFile: "should be a table of fields, in YAML or JSON: version: 1, and jobs",
    JobDefaults: "should be a table of fields that all jobs have, such as base: FILE",
    JobEntry: "should be a table of fields: base, adapters, output",
}
"""Table of a jobs file → what it should be where it is something else."""

STRENGTH_WORDS: Final = frozenset({"strength", "strengths", "weight", "weights", "scale", "ratio", "multiplier"})
"""Fields of a job or of the defaults that people mean a strength by."""

OTHER_NAMES: Final[Mapping[type[BaseModel], Mapping[str, str]]] = {
    JobsFile: dict.fromkeys(("merges", "job", "tasks", "runs"), "jobs"),
    JobEntry: {
        **dict.fromkeys(("model", "checkpoint", "ckpt", "base_model"), "base"),
        **dict.fromkeys(("loras", "adapter", "lora"), "adapters"),
        **dict.fromkeys(("out", "save_to", "name"), "output"),
        "precision": "dtype",
    },
    AdapterEntry: {
        **dict.fromkeys(("file", "filename", "model", "lora", "adapter", "name"), "path"),
        **dict.fromkeys(("weight", "scale", "ratio", "multiplier", "strength_model", "parameters"), "strength"),
    },
}
"""Field that people write from habit → what it is called here."""


DATA: Final = "jobs"
"""The name of jobs that a program gives, in place of that of a file."""


def failure(value: Any, name: str, lines: Sequence[str], count: int) -> UsageError:
    """Return the error for the mistakes in a jobs file; of one mistake, how to correct it may follow "; ".

    `lines`: where each is and what it is, as far as they are listed; `count`: all of them.
    """
    fields = value.keys() if isinstance(value, Mapping) else frozenset()
    if is_mergekit(fields):
        return of_mergekit(name)
    what, where = (f"{count} mistakes" if count > 1 else "a mistake"), [*lines]
    fix = f"correct {'them' if count > 1 else 'it'}; `lora-merge schema jobs` lists the fields"
    if not isinstance(value, Mapping):
        fix = FIRST_FILE
    elif "jobs" not in fields and JobEntry.model_fields.keys() & fields:
        fix = f"the fields of a job belong below jobs: {SHAPE}"
    elif count == 1 and (head := lines[0].rpartition("; "))[2].startswith(
        ("write ", "did you mean ", "check ", "download ")
    ):
        where[0], _, fix = head
    return UsageError(f"{what} in the jobs{'' if name == DATA else ' file'}", Lines.of(where), fix)


MOST_SUGGESTED: Final = 200  # mistakes that come with the nearest right name


def problems(error: ValidationError, file: Any) -> Iterator[tuple[Place, str]]:
    """Return where each mistake in a file is, and what it is in one sentence, with the nearest right name.

    A required field that has another name in the file is no second mistake.
    """
    errors = error.errors(include_url=False)
    extra = [e for e in errors if e["type"] == "extra_forbidden"]
    renamed = {(*e["loc"][:-1], _right_name(e["loc"])) for e in extra}
    pathless = {e["loc"][:-1] for e in errors if e["type"] == "missing" and e["loc"][-1] == "path"}
    pairs = {e["loc"][:-1] for e in extra if e["loc"][:-1] in pathless and _pair(e["loc"], e["input"])}
    for n, e in enumerate(errors):
        place: Place = e["loc"]
        if len(place) > 4 and place[2] == "matrix" and place[3] != "exclude":
            place = (*place[:4], *place[5:])  # pydantic names the kind of axis there
        kind = e["type"]
        if place[:-1] in pairs:
            if kind == "extra_forbidden":
                yield place[:-1], _pair(place, e["input"])
        elif kind == "extra_forbidden":
            adapter = _adapter(file, place)
            yield place, _unknown_field(place, e["input"], adapter, suggest=n < MOST_SUGGESTED)
        elif kind == "missing":
            if place not in renamed:
                yield place, f"this field is required{f'; {how}' if (how := REQUIRED.get(str(place[-1]))) else ''}"
        else:
            yield place, _wrong_value(place, e, suggest=n < MOST_SUGGESTED)


def _wrong_value(place: Place, error: Mapping[str, Any], *, suggest: bool) -> str:
    """Return the sentence for a value that a field cannot have."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "literal_error":
        allowed = str(context["expected"])
        options = [o.strip(" '") for o in allowed.replace(" or ", ",").split(",")]
        near = nearest(str(value), options, every=False) if suggest else ""
        field = next((step for step in reversed(place) if isinstance(step, str)), "value")
        return f"there is no {field} {value!r}{near}" if near else f"should be {allowed}, not {value!r}"
    if kind == "model_type":
        return _as_table(place, value)
    if kind == "list_type":
        return f"should be a list{_as_list(str(place[-1]), value, axis=len(place) > 3)}"
    if kind == "string_type":
        return _as_text(place[-1], value)
    return str(context["error"]) if kind == "value_error" else _SENTENCES.get(kind, error["msg"])


def _as_text(field: int | str, value: Any) -> str:
    """Return the sentence for a value that should be one text."""
    if isinstance(value, list | tuple | dict):
        texts = [*value.values()] if isinstance(value, dict) else [*value]
        is_text = len(texts) == 1 and isinstance(texts[0], str) and isinstance(field, str)
        right = f"; write {flow({field: texts[0]})[1:-1]}" if is_text else ""
        return f"should be one text, not a {'table' if isinstance(value, dict) else 'list'}{right}"
    return f"should be text; quote it: {json.dumps(str(value))}" if value is not None else "should be text"


def _as_table(place: Place, value: Any) -> str:
    """Return the sentence for a value that should be a table of the file's, the defaults' or a job's fields."""
    model = _model((*place, ""))
    sentence = TABLES.get(model, _SENTENCES["dict_type"])
    name, _, rest = value.strip().partition(" ") if isinstance(value, str) else ("", "", "")
    return f"{sentence}; write {name}: {rest.strip()}" if rest and name in model.model_fields else sentence


def _adapter(file: Any, place: Place) -> str:
    """Return the first adapter of the job of a field, or of the first job, as it is written without its strength."""
    table = {"defaults": {}, "jobs": [], **(file if isinstance(file, dict) else {})}
    jobs = table["jobs"] if isinstance(table["jobs"], list) else []
    nearest = jobs[place[1] : place[1] + 1] if len(place) > 1 and isinstance(place[1], int) else jobs[:1]
    for entry in (*nearest, table["defaults"]):
        adapters = entry.get("adapters") if isinstance(entry, dict) else None
        if isinstance(adapters, list) and adapters and isinstance(adapters[0], str):
            return re.sub(r":[^:/\\]*$", "", adapters[0].partition(",")[0])  # also ":half", ":{strength}"
    return "style.safetensors"


def _unknown_field(place: Place, value: Any, adapter: str, *, suggest: bool) -> str:
    """Return the sentence for a field that no model has, with the right name or place. `adapter`: one of the job's."""
    model, word = _model(place), str(place[-1])
    sentence = f"no field is called {word!r}"
    if model in (JobEntry, JobDefaults) and word in STRENGTH_WORDS:
        strength = str(value) if re.fullmatch(NUMBER, str(value)) else "0.8"
        return f"{sentence}; write it after the adapter: {adapter}:{strength}"
    if right := _right_name(place):
        return f"{sentence}; did you mean {right}?"
    if model is JobsFile and word in JobEntry.model_fields:
        return f"{word} is a field of a job; write it in each job below jobs"
    return sentence + (nearest(word, model.model_fields) if suggest else "")


def _right_name(place: Place) -> str:
    """Return what a field that people write from habit is called here; "" for another."""
    return OTHER_NAMES.get(_model(place), {}).get(str(place[-1]), "")


def _model(place: Place) -> type[BaseModel]:
    """Return the model that an unknown field at `place` was meant for."""
    if len(place) <= 3:
        return (JobsFile, JobDefaults, JobEntry)[len(place) - 1]
    return Glob if place[2] == "matrix" else AdapterEntry


def _pair(place: Place, value: Any) -> str:
    """Return what is wrong in an adapter that is a name and its value: `style.safetensors: 0.8`, or `{lora}`; "" for
    another table."""
    name = str(place[-1])
    if len(place) != 5 or place[2] != "adapters":
        return ""
    if value is None:
        return f'a name in braces needs quotes; write "{{{name}}}"'
    is_field = _right_name(place) or (
        re.fullmatch(r"\w+", name) and nearest(name, AdapterEntry.model_fields, every=False)
    )
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not is_field
    return f"a strength follows the path without a space; write {name}:{value:g}" if is_number else ""


def _as_list(name: str, value: Any, *, axis: bool) -> str:
    """Return the end of a sentence: how a value that should be a list is written."""
    if isinstance(value, Mapping) and name == "adapters" and all(isinstance(v, int | float) for v in value.values()):
        return f"; write adapters: {flow([f'{path}:{strength:g}' for path, strength in value.items()])}"
    if isinstance(value, Mapping) and name == "jobs":
        return "; write a dash before the first field of each job, and indent its other fields by two spaces more"
    if not isinstance(value, str):
        return ': [a, b]; of files: {glob: "loras/*.safetensors"}'
    return f"; write {name}: {flow({'glob': value} if axis and '*' in value else [value])}"


def flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False, allow_unicode=True).strip()


def nearest(word: str, known: Iterable[str], *, every: bool = True) -> str:
    """Return "; did you mean X?", or what there is; empty where nothing helps."""
    names = [k for k in known if k != word]
    matches = difflib.get_close_matches(word, alike(word, names), n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]}?"
    return f"; there are {', '.join(names)}" if every and names else ""
