"""JSON Schema as the `jsonschema` package reads it."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from lora_merge.viewing.json_schemas import JOBS_SCHEMA, schema_of


@cache
def validator() -> Draft202012Validator:
    """The schema, which is one itself."""
    schema = schema_of(JOBS_SCHEMA)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def fits(value: Any) -> bool:
    """Whether the schema allows the content of a jobs file."""
    return bool(validator().is_valid(value))
