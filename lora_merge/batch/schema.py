"""The fields of a jobs file, as pydantic models, and the JSON Schema of its full and short forms, from which editors
complete: pydantic states the fields; which of them a job needs, and which options its command takes, is added here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
)

from ..adapter_arguments import right_form
from ..command import MERGE
from ..errors import UsageError
from ..job import LEAST_LIMIT, MOST_ADAPTERS, memory_limit
from ..options import BLOCK_WEIGHTS, DEVICE, DEVICES, JOB_OPTIONS, OPTIONS, Option, OptionKind, number, spelled
from ..recipes.commands import ADAPTERS, BASE, COMMANDS
from ..text import beginning, is_finite
from .short_form import JOB, WHOLE_FILE_FIELDS

LONGEST_PATH: Final = 32_767
"""Characters of a path or a template, as Windows has them; other systems have fewer."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


def _strength(value: Any) -> Any:
    """Return a finite number, or a text with a template in it; "1e-1" is a number too."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("should be a number, or a template such as '{s}'")
    if isinstance(value, str) and "{" in value:
        return value
    try:
        strength = number(value)
    except OverflowError:
        raise ValueError("a number with hundreds of digits") from None
    except ValueError:
        right = right_form(str(value))
        why = f"{value!r} is not a number, nor a template such as {{strength}}"
        raise ValueError(f"{why}; write {right}" if right else why) from None
    if not math.isfinite(strength):
        raise ValueError(f"{value} is not finite")
    return strength


_STRENGTH: Final = {"anyOf": [
    {"type": "number"},
    {"type": "string", "pattern": r"\{|^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"},
]}  # fmt: skip
StrengthField: TypeAlias = Annotated[float | str, BeforeValidator(_strength), WithJsonSchema(_STRENGTH)]


def _parts(value: Any) -> Any:
    """Return the value; ValueError unless each part but a list of block weights has a strength."""
    if not isinstance(value, dict):
        return value
    return {
        part: v if part == BLOCK_WEIGHTS and isinstance(v, str | list) else _strength(v) for part, v in value.items()
    }


PartStrengths: TypeAlias = Annotated[
    dict[str, Any],
    BeforeValidator(_parts),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {BLOCK_WEIGHTS: {"type": ["string", "array", "number"]}},
            "additionalProperties": _STRENGTH,
        }
    ),
]
"""Part of the model → factor; `lbw` → a list of block weights."""


def _scalar(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise ValueError("should be one value, not a list or a table")
    return value


Scalar: TypeAlias = Annotated[
    Any, BeforeValidator(_scalar), WithJsonSchema({"type": ["string", "number", "boolean", "null"]})
]


def _size(value: Any) -> Any:
    if isinstance(value, int | str) and not isinstance(value, bool):
        try:
            if memory_limit(value):
                return value
        except UsageError as e:
            if e.suggestion:
                raise ValueError(f"{e.what}; write {e.suggestion[-1]}") from None
    raise ValueError(f"{repr(beginning(value, 40))[:40]} is not a size; write it like 512MiB or 4GB")


def _device(value: Any) -> Any:
    name = spelled(OPTIONS["device"], value) if isinstance(value, str) else ""
    if not re.fullmatch(DEVICE, name):
        raise ValueError(f"{value!r} is not a device; use {DEVICES}")
    return name


def _version(value: Any) -> Any:
    if type(value) is not int:
        raise ValueError(f"should be 1, not {value!r}; write version: 1")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str) and "{" in value:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{repr(beginning(value, 40))[:40]} is not a finite number")
    return float(value)


NumberField: TypeAlias = Annotated[
    Any, BeforeValidator(_number), WithJsonSchema({"type": ["number", "string"], "pattern": r"\{"})
]
"""A number, or a template that becomes one."""


def _rule(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{repr(beginning(value, 40))[:40]} is neither a number nor a text")
    return value


RuleField: TypeAlias = Annotated[Any, BeforeValidator(_rule), WithJsonSchema({"type": ["number", "string"]})]
Size: TypeAlias = Annotated[Any, BeforeValidator(_size), WithJsonSchema({
    "type": ["string", "integer"], "minimum": LEAST_LIMIT,
    "pattern": r"^\s*(\d+(\.\d+)?\s*[KkMmGg][Ii]?[Bb]?|[1-9]\d{5,}|\d+\s*[Bb])\s*$",
})]  # fmt: skip
Device: TypeAlias = Annotated[Any, BeforeValidator(_device), WithJsonSchema({
    "type": "string", "pattern": f"^({DEVICE})$",
})]  # fmt: skip


class AdapterEntry(_Strict):
    """One adapter: path, strength, and factors by part of the model."""

    path: str = Field(min_length=1, max_length=LONGEST_PATH, description="File or PEFT folder, relative to this file.")
    strength: StrengthField | None = Field(default=None, description="Default 1.")
    strength_for: PartStrengths = Field(default={}, description="Part (unet, te, vae …, re:REGEX) → factor.")


def _entry(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and is_finite(value[1]):
        table = json.dumps(
            {"path": value[0], "strength": value[1]}, ensure_ascii=False
        )  # YAML and Python have it alike
        raise ValueError(f"should be a path, or a table; write {table}")
    if not isinstance(value, str | dict | AdapterEntry):
        raise ValueError("should be a path, or a table such as {path: a.safetensors, strength: 0.5}")
    return {"path": value} if isinstance(value, str) else value


AdapterField: TypeAlias = Annotated[
    AdapterEntry,
    BeforeValidator(_entry),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": LONGEST_PATH},
                AdapterEntry.model_json_schema(),
            ]
        }
    ),
]


_TYPES: Final[Mapping[OptionKind, Any]] = {
    "device": Device, "parts": PartStrengths, "settings": dict[str, Any], "path": str, "switch": bool, "size": Size,
    "text": str, "whole": int, "number": NumberField, "entries": dict[str, str], "rank": RuleField,
    "ranks": dict[str, RuleField], "alpha": RuleField, "texts": list[str], "list": list[float], "name": str,
    "folder": str,
}  # fmt: skip


def _word(option: Option) -> Any:
    """Return the type of an option with a few words, which may be in other letters, or a template that becomes one."""

    def in_our_letters(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, str) and "{" in value:
            return value
        ours = spelled(option, value) if isinstance(value, str) else value
        return check(ours if ours in option.words else value)

    words = {"anyOf": [{"enum": [*option.words]}, {"type": "string", "pattern": r"\{"}]}
    return Annotated[Literal[option.words], WrapValidator(in_our_letters), WithJsonSchema(words)]


def _field(option: Option) -> tuple[Any, Any]:
    """Return an option as a field that may be left out."""
    kind = _word(option) if option.words else _TYPES[option.kind]
    return kind | None, Field(default=None, description=option.help)


if TYPE_CHECKING:

    class Options(_Strict):
        """The options of all commands, under the names of the command line."""

else:
    Options = create_model(
        "Options",
        __base__=_Strict,
        __doc__="The options of all commands, under the names of the command line.",
        **{name: _field(option) for name, option in JOB_OPTIONS.items() if option.in_batch},
    )


def stated_fields(options: Options) -> dict[str, Any]:
    """Return the options of a job, or of the defaults, that were given."""
    names = Options.model_fields
    return {name: value for name in names if (value := getattr(options, name)) is not None}


class JobDefaults(Options):
    """Values for every job that does not state its own; a command that has no such option ignores it."""

    command: Literal[tuple(COMMANDS)] | None = Field(default=None, description="What the jobs do. Default: merge.")  # type: ignore[valid-type]
    base: str | None = Field(default=None, max_length=LONGEST_PATH)
    adapters: list[AdapterField] | None = Field(default=None, max_length=MOST_ADAPTERS)


class Glob(_Strict):
    """All paths that match a pattern, in order of their names."""

    glob: str = Field(
        min_length=1, max_length=LONGEST_PATH, description="Pattern such as loras/*.safetensors, relative to this file."
    )


def _kind(value: Any) -> str:
    return "glob" if isinstance(value, dict | Glob) else "list"


Axis: TypeAlias = Annotated[
    Annotated[list[Scalar], Field(min_length=1), Tag("list")] | Annotated[Glob, Tag("glob")], Discriminator(_kind)
]


_ROW: Final = {
    "type": "object", "minProperties": 1,
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}  # fmt: skip


class Matrix(BaseModel):
    """Names and their values; every combination is a job. `exclude` lists combinations that are none."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)
    __pydantic_extra__: dict[str, Axis]
    exclude: list[Annotated[dict[str, Scalar], WithJsonSchema(_ROW)]] = []


class JobEntry(JobDefaults):
    """One merge or other command, or with a matrix as many as there are combinations."""

    output: str = Field(
        min_length=1,
        max_length=LONGEST_PATH,
        description="File or folder to write, relative to this file, or an address.",
    )
    matrix: Matrix | None = None


class JobsFile(_Strict):
    """A batch of merges and other commands."""

    version: Annotated[Literal[1], BeforeValidator(_version), PlainSerializer(int)] = 1
    defaults: JobDefaults = JobDefaults()
    jobs: list[JobEntry] = Field(min_length=1)


JsonSchema: TypeAlias = dict[str, Any]

WITH_BASE: Final = frozenset(name for name, row in COMMANDS.items() if BASE in row.needs)
"""Commands that cannot do without a base."""

WITH_ADAPTERS: Final = frozenset(name for name, row in COMMANDS.items() if ADAPTERS in row.needs)
"""Commands that cannot do without adapters; a merge may take the one that is attached inside its base."""


def jobs_schema() -> JsonSchema:
    """Return the schema. What the values decide, such as which names a template has, is left to the program."""
    full = JobsFile.model_json_schema()
    fields = {name: full[name] for name in ("type", "properties", "required", "additionalProperties")}
    commands = {name: _command(name) for name in COMMANDS}
    needs = (_needs("base", WITH_BASE, MERGE), _needs("adapters", WITH_ADAPTERS, MERGE))
    job = {"allOf": [_ref("JobEntry"), _ref("Own"), _unnamed(_ref(MERGE)), *needs]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:lora-merge:jobs:1",
        "title": "Jobs of lora-merge batch", "description": "A full file, a list of jobs, or one job.",
        "$defs": {
            **full["$defs"], **commands, "Job": job, "Full": {**fields, "allOf": [*_with_defaults()]},
            "Own": {"allOf": [{"if": _is(name), "then": _ref(name)} for name in COMMANDS]},
        },
        "if": {"type": "array"}, "then": {"minItems": 1, "items": _ref("Job")},
        "else": {
            "if": {"type": "object", "anyOf": [{"required": [*pair]} for pair in combinations(sorted(JOB), 2)],
                   "not": {"anyOf": [{"required": [name]} for name in sorted(WHOLE_FILE_FIELDS)]}},
            "then": _ref("Job"), "else": _ref("Full"),
        },
    }  # fmt: skip


def _ref(name: str) -> JsonSchema:
    return {"$ref": f"#/$defs/{name}"}


def _has_field(name: str) -> JsonSchema:
    """Return that a field is given: null is the same as no field."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _unnamed(rule: JsonSchema) -> JsonSchema:
    """Return what holds where no command is given."""
    return {"if": _has_field("command"), "else": rule}


def _is(*commands: str) -> JsonSchema:
    return {"required": ["command"], "properties": {"command": {"enum": [*commands]}}}


def _command(name: str) -> JsonSchema:
    """Return that a job has no options but those of its command, and not more adapters than that takes."""
    others = Options.model_fields.keys() - {*COMMANDS[name].fields}
    rule: JsonSchema = {} if COMMANDS[name].several else {"adapters": {"maxItems": 1}}
    return {"properties": {option: {"type": "null"} for option in sorted(others)} | rule}


def _needs(field: str, commands: Collection[str], unnamed: str) -> JsonSchema:
    """Return that a job has a field if its command needs it. `unnamed`: the command of jobs that
    name none."""
    needs = [_is(*sorted(commands)), *([{"not": _has_field("command")}] if unnamed in commands else [])]
    return {"if": {"anyOf": needs}, "then": _has_field(field)}


def _with_defaults() -> list[JsonSchema]:
    """Return what the jobs of a full file need that its defaults do not give."""

    def defaults(rule: JsonSchema) -> JsonSchema:
        return {"required": ["defaults"], "properties": {"defaults": rule}}

    def jobs(*rules: JsonSchema) -> JsonSchema:
        return {"properties": {"jobs": {"items": {"allOf": [*rules]}}}}

    conditions = [jobs(_ref("Own"))]
    for name in COMMANDS:
        unnamed = defaults(_is(name)) if name != MERGE else {"not": defaults(_is(*sorted({*COMMANDS} - {MERGE})))}
        fields = {"base": WITH_BASE, "adapters": WITH_ADAPTERS}
        needs = [
            {"if": defaults(_has_field(f)), "else": jobs(_needs(f, commands, name))} for f, commands in fields.items()
        ]
        conditions.append({"if": unnamed, "then": {"allOf": [jobs(_unnamed(_ref(name))), *needs]}})
    return conditions
