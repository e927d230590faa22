"""Small mistakes in a module's text, one at a time: what `tests.mutate` makes of mutator.py's changes, and more.

Besides other operators, numbers and branches: dropped statements, exchanged arguments, constants that are returned.
Left out is what can be seen in no output: messages of errors, annotations, and what `UNSEEN` calls.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.mutator import edits

UNSEEN: Final = {
    "advise": "how soon the disk fetches what is read later",
    "expect": "how soon the disk fetches what is read later",
    "_expect": "how soon the disk fetches what is read later",
    "monotonic": "seconds that are told",
    "quoted": "the wording of a message",
    "_failed": "the wording of a message",
    "Final": "a type",
}
"""Function → why nothing inside its calls can be seen in an output."""


@dataclass(frozen=True)
class Mistake:
    """One change of a file: the characters from `start` to `stop` become `text`."""

    path: str
    line: int
    what: str
    start: int
    stop: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]

    def difference(self, source: str) -> str:
        lines = difflib.unified_diff(source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0)
        return "\n".join(f"    {line}" for line in list(lines)[3:])


def mistakes(path: str, source: str) -> Iterator[Mistake]:
    """Every mistake of these kinds in a module; each gives a module that can be parsed and differs."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def at(line: int, column: int) -> int:
        """Columns of the syntax tree count bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    tree = ast.parse(source)
    right = ast.dump(tree)
    for node in _seen(tree):
        for what, changed in [*_swapped(node), *_more(node)]:
            start, stop = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            text = ast.unparse(changed)
            if isinstance(node, ast.If):  # only its condition, or it would be written anew as a whole
                start, stop = (at(node.test.lineno, node.test.col_offset),
                               at(node.test.end_lineno or 0, node.test.end_col_offset or 0))  # fmt: skip
                text = ast.unparse(changed.test)
            text = f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else text
            mistake = Mistake(path, node.lineno, what, start, stop, text)
            if ast.dump(ast.parse(mistake.applied(source))) != right:
                yield mistake


def _seen(node: ast.AST) -> Iterator[Any]:
    """The statements and expressions whose value can be seen in an output."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "args" if _is_function(node) else ""):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, (ast.stmt, ast.expr, ast.comprehension, ast.keyword, ast.ExceptHandler)):
                continue
            if isinstance(child, (ast.stmt, ast.expr)) and not isinstance(child, ast.JoinedStr):
                yield child
            hidden = isinstance(child, (ast.Raise, ast.JoinedStr, ast.Assert)) or _called(child) in UNSEEN
            if not hidden:
                yield from _seen(child)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.Lambda))


def _called(node: ast.AST) -> str:
    call = node.value if isinstance(node, ast.Expr) else node
    function = call.func if isinstance(call, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _swapped(node: Any) -> Iterator[tuple[str, Any]]:
    """Other operators, numbers and branches."""
    for what, edit in edits(node):
        before = dict(node.__dict__)
        edit()
        yield what, copy.deepcopy(node)
        node.__dict__.clear()
        node.__dict__.update(before)


def _more(node: Any) -> Iterator[tuple[str, Any]]:
    """Dropped statements, exchanged arguments, constants that are returned."""
    dropped = isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node) not in UNSEEN)  # fmt: skip
    if dropped:
        yield "dropped", ast.Pass()
    if (
        isinstance(node, ast.Call)
        and len(node.args) >= 2
        and not any(isinstance(a, ast.Starred) for a in node.args[:2])
    ):
        exchanged = copy.deepcopy(node)
        exchanged.args[:2] = exchanged.args[1::-1]
        yield "arguments exchanged", exchanged
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returns None", ast.Return(ast.Constant(None))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", ast.Constant(not node.value)
