"""The JSON Schema of jobs files: of their full form and of their short ones, for editors and for checks.

pydantic states the fields; which fields a job needs, and which options its command takes, is said here.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import Any, Final, TypeAlias

from ..command import MERGE
from ..recipes.commands import ADAPTERS, BASE, COMMANDS
from .schema import CommandOptions, JobsFile
from .short_form import JOB, WHOLE_FILE_FIELDS

Rule: TypeAlias = dict[str, Any]

WITH_BASE: Final = frozenset(name for name, row in COMMANDS.items() if BASE in row.needs)
"""Commands that cannot do without a base."""

WITH_ADAPTERS: Final = frozenset(name for name, row in COMMANDS.items() if ADAPTERS in row.needs)
"""Commands that cannot do without adapters; a merge may take the one that is attached inside its base."""


def jobs_schema() -> Rule:
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


def _ref(name: str) -> Rule:
    return {"$ref": f"#/$defs/{name}"}


def _has_field(name: str) -> Rule:
    """Return that a field is given: null is the same as no field."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _unnamed(rule: Rule) -> Rule:
    """Return what holds where no command is given."""
    return {"if": _has_field("command"), "else": rule}


def _is(*commands: str) -> Rule:
    return {"required": ["command"], "properties": {"command": {"enum": [*commands]}}}


def _command(name: str) -> Rule:
    """Return that a job has no options but those of its command, and not more adapters than that takes."""
    others = CommandOptions.model_fields.keys() - {*COMMANDS[name].fields}
    rule: Rule = {} if COMMANDS[name].several else {"adapters": {"maxItems": 1}}
    return {"properties": {option: {"type": "null"} for option in sorted(others)} | rule}


def _needs(field: str, commands: Collection[str], unnamed: str) -> Rule:
    """Return that a job has a field if its command needs it. `unnamed`: the command of jobs that
    name none."""
    needs = [_is(*sorted(commands)), *([{"not": _has_field("command")}] if unnamed in commands else [])]
    return {"if": {"anyOf": needs}, "then": _has_field(field)}


def _with_defaults() -> list[Rule]:
    """Return what the jobs of a full file need that its defaults do not give."""

    def defaults(rule: Rule) -> Rule:
        return {"required": ["defaults"], "properties": {"defaults": rule}}

    def jobs(*rules: Rule) -> Rule:
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
