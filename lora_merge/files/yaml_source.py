"""Reads YAML as plain values, with the line of each value.

PyYAML's safe loader makes the nodes. Its constructor accepts a field that is given twice and expands any number of
nested aliases, so this module makes the values itself and limits the size that aliases expand to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from ..disk.files import open_regular
from ..errors import InputError, UsageError

UNFOLDED: Final = 500_000  # values after aliases are expanded; a file of 20 000 jobs has fewer
DEPTH: Final = 40  # of nesting; the format needs 6

Place: TypeAlias = tuple[str | int, ...]
"""Path of a value: the names and indices from the top of the document."""

YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OLD_NUMBER: Final = re.compile(r"[-+]?(0[0-9bx]|.*[_:])")
"""Numbers that stay text, as in YAML 1.2: PyYAML follows YAML 1.1 and reads 010 as 8, 1_0 as 10 and 1:30 as 90."""
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_TABLES: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

FIRST_FILE: Final = "a first one: `lora-merge batch --init OTHER.yaml`"
"""The fix for a jobs file without jobs."""

_INDENT: Final = re.compile(r"\s*(?:- +)*")
"""What is before the first field of a line, the dashes of lists included."""

_GLUED: Final = re.compile(r"\s*(?:- +)*([A-Za-z_]{2,}):([^\s/].*)")
"""A field whose value follows the colon without a space."""


@dataclass(frozen=True)
class Document:
    """The value of a YAML file, and the nodes that it was made from."""

    value: Any
    root: Node
    mistakes: tuple[tuple[int, str], ...] = ()
    """Line and message of each mistake in valid YAML: a field that is given twice, an unknown tag."""
    _fields: dict[int, dict[Any, tuple[Node, Node]]] = field(default_factory=dict, repr=False)
    """Table → its fields and the fields that `<<` merges into it, each with its name; filled by `_fields_of`."""

    def line(self, place: Place) -> int:
        """Return the line of a field or an item, or of its nearest parent that exists."""
        node = start = self.root
        for step in place:
            inner = self._child(node, step)
            if inner is None:
                break
            start, node = inner
        return _line(start)

    def text(self, place: Place) -> str | None:
        """Return a scalar as it was written, such as 1.0; None if there is no scalar at `place`."""
        node: Node | None = self.root
        for step in place:
            inner = None if node is None else self._child(node, step)
            node = inner and inner[1]
        return str(node.value) if isinstance(node, ScalarNode) else None

    def _child(self, node: Node, step: str | int) -> tuple[Node, Node] | None:
        """Return the name and the value of a field, looked up through `<<` as well, or the n-th item twice."""
        if isinstance(node, SequenceNode):
            fits = isinstance(step, int) and step < len(node.value)
            return (node.value[step], node.value[step]) if fits else None
        return self._fields_of(node).get(step) if isinstance(node, MappingNode) else None

    def _fields_of(self, node: MappingNode) -> dict[Any, tuple[Node, Node]]:
        """Return the fields of a table, each with its name; of a name that is given twice, the first."""
        if id(node) not in self._fields:
            fields: dict[Any, tuple[Node, Node]] = {}
            for table in reversed([t for t in _merged(node) if isinstance(t, MappingNode)]):
                fields |= self._fields_of(table)
            fields |= {key.value: (key, inner) for key, inner in reversed(node.value) if isinstance(key, ScalarNode)}
            self._fields[id(node)] = fields
        return self._fields[id(node)]


def _advice(text: str, mark: Any, problem: str) -> str:
    """Return what to do about a line that is not YAML."""
    lines = ["", *text.splitlines(), ""]
    before, line = ("", "") if mark is None else lines[min(mark.line, len(lines) - 2) :][:2]
    if "\t" in _INDENT.match(line)[0]:  # type: ignore[index]  # it matches every line
        return "indent with spaces, not with tabs"
    if "escape" in problem and (path := re.search(r'"([^"]*)"', line)):
        return f"write '{path[1]}', in single quotes: a backslash in double quotes begins an escape"
    for glued in filter(None, map(_GLUED.match, (before, line))):
        return f"write {glued[1]}: {glued[2]}, with a space after the colon"
    columns = [len(_INDENT.match(t)[0]) for t in (before, line)]  # type: ignore[index]
    if columns[0] != columns[1] and ":" in before and ":" in line and not line.lstrip().startswith("-"):
        return f"indent this line by {columns[0]} spaces, as the field above it"
    return "check indentation, colons and quotes there"


def parse(text: str, name: str) -> Document:
    """Return the document; UsageError with the line for invalid YAML, InputError if it would exhaust memory."""
    try:
        check_depth(text, name)
        root = yaml.compose(text, YAML_LOADER)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(e, "problem", None) or str(e).splitlines()[0]
        raise UsageError(f"not valid YAML: {problem}", f"{name}{line}", _advice(text, mark, problem)) from e
    if root is None:
        raise UsageError("the jobs file is empty", name, FIRST_FILE)
    values = _Values(name)
    return Document(values.of(root), root, tuple(values.mistakes))


def check_depth(text: str, name: str) -> None:
    """Raise InputError if the text is nested too deeply; yaml.YAMLError for invalid YAML.

    The depth is counted from events: PyYAML composes nodes recursively in C, and deep nesting crashes the process.
    """
    depth = 0
    try:
        for event in yaml.parse(text, YAML_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise _bomb(f"{name}:{_line(event)}")
    except yaml.MarkedYAMLError as e:
        if "nesting" in str(e.problem) and e.problem_mark is not None:  # libyaml has a limit too, and scans ahead
            raise _bomb(f"{name}:{e.problem_mark.line + 1}") from e
        raise


def read_text(path: Path, limit: int) -> str:
    """Return the text of a regular file of at most `limit` bytes; InputError for any other file."""
    with open_regular(path) as f:
        raw = f.read(limit + 1)
    if len(raw) > limit:
        raise InputError("a YAML file of absurd length", str(path), f"at most {limit >> 20} MiB are read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"the file is not UTF-8 text: {e.reason} at byte {e.start}", str(path),
                         "save it in UTF-8, or give the YAML file") from e  # fmt: skip


class _Values:
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[int, tuple[Any, int]] = {}  # node → its value, number of values with aliases expanded
        self.open: set[int] = set()
        self.scalars = yaml.SafeLoader("")
        self.mistakes: list[tuple[int, str]] = []

    def of(self, root: Node) -> Any:
        return self._make(root, 0)[0]

    def _make(self, node: Node, depth: int) -> tuple[Any, int]:
        if id(node) in self.values:
            return self.values[id(node)]
        if id(node) in self.open or depth > DEPTH:
            raise _bomb(f"{self.name}:{_line(node)}")
        self.open.add(id(node))
        value = self._scalar(node) if isinstance(node, ScalarNode) else self._table(node, depth + 1)
        self.open.remove(id(node))
        self.values[id(node)] = value
        return value

    def _scalar(self, node: ScalarNode) -> tuple[Any, int]:
        if node.tag in _NUMBERS and _OLD_NUMBER.match(node.value):  # for 1:1:1:… PyYAML takes time by the square
            return node.value, 1
        try:
            return self.scalars.construct_object(node), 1
        except (yaml.YAMLError, ValueError) as e:  # ValueError: 2024-13-01 looks like a date
            self._note(node, getattr(e, "problem", None) or str(e))
            return node.value, 1

    def _table(self, node: Node, depth: int) -> tuple[Any, int]:
        if node.tag not in _TABLES:
            self._note(node, f"the tag {node.tag} is unknown")
        count = 1
        if isinstance(node, SequenceNode):
            items = []
            for inner in node.value:
                value, count = self._inner(node, inner, depth, count)
                items.append(value)
            return items, count
        merged: list[dict[str, Any]] = []
        fields: dict[str, Any] = {}
        for key, inner in node.value:
            value, count = self._inner(node, inner, depth, count)
            if _is_merge(key):
                tables = value if isinstance(value, list) else [value]
                merged += [table for table in tables if isinstance(table, dict)]
                for _ in (table for table in tables if not isinstance(table, dict)):
                    self._note(key, "<< takes a table, or a list of them")
            elif not isinstance(key, ScalarNode):
                self._note(key, "a field's name is a plain word")
            elif key.value in fields:
                self._note(key, f"the field {key.value!r} is given twice")
            else:
                fields[key.value] = value
        whole: dict[str, Any] = {}
        for table in reversed(merged):  # the first one wins
            whole |= table
        return whole | fields, count

    def _inner(self, node: Node, inner: Node, depth: int, count: int) -> tuple[Any, int]:
        """Return a value inside a node, and the node's count with it; InputError before more is made than the limit."""
        value, size = self._make(inner, depth)
        if count + size > UNFOLDED:
            raise _bomb(f"{self.name}:{_line(node)}")
        return value, count + size

    def _note(self, node: Node, why: str) -> None:
        self.mistakes.append((_line(node), why))


def _line(of: Any) -> int:
    return int(of.start_mark.line) + 1


def _bomb(where: str) -> InputError:
    return InputError(
        "the YAML is nested too deeply, or its aliases expand to an absurd size",
        where,
        "use fewer aliases; for many jobs use a matrix",
    )


def _is_merge(key: Node) -> bool:
    return isinstance(key, ScalarNode) and key.tag == "tag:yaml.org,2002:merge"


def _merged(node: MappingNode) -> Iterator[Node]:
    for key, inner in node.value:
        if _is_merge(key):
            yield from inner.value if isinstance(inner, SequenceNode) else [inner]
