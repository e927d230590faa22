"""Short forms of jobs files: one job alone, a list of jobs, and a table of jobs (CSV). Each becomes the full form."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from ..errors import UsageError
from ..files.yaml_source import Document, parse, read_text

JOB: Final = frozenset(("base", "adapters", "output"))
"""Fields of a job of which a file that is one job has at least two."""

WHOLE_FILE_FIELDS: Final = frozenset(("version", "jobs", "defaults"))
LIST_COLUMNS: Final = frozenset(("adapters",))
"""Columns of a table that hold several values, with spaces between them."""

FIRST_FILE: Final = """\
# yaml-language-server: $schema=jobs.schema.json
# A first jobs file. Run it with:  lora-merge batch {name}
# Paths are relative to this file. So that an editor completes the fields:  lora-merge schema jobs > jobs.schema.json
version: 1
jobs:
  - base: base.safetensors
    adapters: ["{{lora}}:{{strength}}"]
    matrix:
      lora: {{glob: "loras/*.safetensors"}}
      strength: [0.5, 1]
    output: "out/{{lora.stem}}-{{strength}}.safetensors"
"""
"""The file that `lora-merge batch --init` writes."""


def jobs_text(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return a jobs file with these jobs, as people read it."""
    return yaml.safe_dump({"version": 1, "jobs": [*jobs]}, sort_keys=False, allow_unicode=True, width=1000)


def read_jobs(path: Path, limit: int) -> Document:
    """Return a jobs file in its full form; UsageError if it is not valid YAML or CSV, InputError if it is absurd."""
    text = read_text(path, limit)
    return of_table(text, path.name) if path.suffix.lower() == ".csv" else in_full(parse(text, path.name))


def in_full(document: Document) -> Document:
    """Return a document with `version` and `jobs` around a list of jobs, or around one job."""
    value, root = document.value, document.root
    if isinstance(value, dict) and len(JOB & value.keys()) > 1 and not WHOLE_FILE_FIELDS & value.keys():
        value, root = [value], SequenceNode("tag:yaml.org,2002:seq", [root], root.start_mark)
    elif not (isinstance(value, list) and value and all(isinstance(job, dict) for job in value)):
        return document
    return Document({"version": 1, "jobs": value}, _around(root), document.mistakes)


def _around(jobs: Node) -> MappingNode:
    def word(text: str) -> ScalarNode:
        return ScalarNode("tag:yaml.org,2002:str", text, jobs.start_mark)

    return MappingNode("tag:yaml.org,2002:map", [(word("version"), word("1")), (word("jobs"), jobs)], jobs.start_mark)


def of_table(text: str, name: str) -> Document:
    """Return a table as a document: its first row names the fields, every other row is a job; empty cells are left out.

    Several adapters are in one cell, with spaces between them.
    """
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        head = [cell.strip() for cell in next(rows, [])]
        if not JOB & set(head) or len(set(head)) < len(head):
            raise UsageError("a table of jobs begins with the names of its columns", f"{name}:1",
                             "write base,adapters,output in its first line")  # fmt: skip
        lines = [(row, rows.line_num) for row in rows if any(row)]
    except csv.Error as e:
        raise UsageError(f"not a valid table: {e}", f"{name}:{rows.line_num}", "write it as CSV, with commas") from e
    if long := next((line for row, line in lines if len(row) > len(head)), None):
        raise UsageError("a row has more cells than the table has columns", f"{name}:{long}", "put the cell in quotes")
    nodes = [
        MappingNode("tag:yaml.org,2002:map", list(_cells(head, row, _mark(name, line))), _mark(name, line))
        for row, line in lines
    ]
    jobs = [dict(_values(head, row)) for row, _ in lines]
    return Document({"version": 1, "jobs": jobs}, _around(SequenceNode("tag:yaml.org,2002:seq", nodes, _mark(name, 1))))


def _values(head: list[str], row: list[str]) -> Iterator[tuple[str, Any]]:
    for field, cell in zip(head, map(str.strip, row), strict=False):
        if cell:
            yield (
                field,
                cell.split() if field in LIST_COLUMNS else {"true": True, "false": False}.get(cell.lower(), cell),
            )


def _cells(head: list[str], row: list[str], mark: Any) -> Iterator[tuple[Node, Node]]:
    for field, value in _values(head, row):
        texts = [
            ScalarNode("tag:yaml.org,2002:str", str(v), mark) for v in (value if field in LIST_COLUMNS else [value])
        ]
        inner = SequenceNode("tag:yaml.org,2002:seq", texts, mark) if field in LIST_COLUMNS else texts[0]
        yield ScalarNode("tag:yaml.org,2002:str", field, mark), inner


def _mark(name: str, line: int) -> Any:
    return yaml.Mark(name, 0, line - 1, 0, None, 0)
