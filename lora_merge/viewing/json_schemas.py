"""The JSON Schemas of what the program prints and of the jobs files that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SCHEMA_NAME: Final = "lora-merge/{}/{}"
"""The entry `schema` of every JSON object: what it describes, and the version of its format."""


def schema(kind: str, version: int = 1) -> str:
    """Return the entry `schema` of a JSON object. The version rises when an entry is renamed, removed or gets another
    meaning; new entries leave it as it is."""
    return SCHEMA_NAME.format(kind, version)


def kind_of(values: Mapping[str, Any]) -> str:
    """Return what a JSON object describes: "report" of `lora-merge/report/1`."""
    return str(values["schema"]).split("/")[1]


SCHEMA_FILES: Final = (
    "report", "adapter", "plan", "error", "proof", "adapter-proof", "job-report", "job-plan", "inspect", "files",
    "compare", "parts", "algorithms", "architectures", "doctor",
)  # fmt: skip
"""Names of files in `schemas/`."""

JOBS_SCHEMA: Final = "jobs"
SCHEMA_KINDS: Final = (*SCHEMA_FILES, JOBS_SCHEMA)


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of one of SCHEMA_KINDS; that of jobs files is made from their fields."""
    if kind == JOBS_SCHEMA:
        from ..batch.schema import jobs_schema

        return jobs_schema()
    from ..files.json_files import read_json  # the name of a schema alone needs no reader

    return read_json(Path(__file__).parent / "schemas" / f"{kind}.json")
