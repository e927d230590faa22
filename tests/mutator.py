"""Small mistakes in code, one at a time: another operator, number or branch. Made from its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod, ast.Pow: ast.Mult, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Operator → the one that is put in its place."""


@dataclass(frozen=True)
class Change:
    """One mistake: where it is, and the function with it."""

    function: str
    line: int
    what: str
    code: ast.FunctionDef


def changes(source: str) -> Iterator[Change]:
    """Every mistake of these kinds inside the functions of a module, one at a time."""
    tree = ast.parse(source)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        inside = [n for statement in function.body for n in ast.walk(statement)]
        signed = {
            n.operand for n in inside if isinstance(n, ast.UnaryOp)
        }  # a −2 is a −1 to reshape, and on square axes
        for node in (n for n in inside if n not in signed):
            for what, edit in edits(node):
                before = dict(node.__dict__)
                edit()
                yield Change(function.name, getattr(node, "lineno", function.lineno), what, copy.deepcopy(function))
                node.__dict__.clear()
                node.__dict__.update(before)


def edits(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what it is, how to make it) of the mistakes that one node can hold."""
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and (other := OTHER.get(type(node.op))):
        yield f"{type(node.op).__name__} → {other.__name__}", lambda: setattr(node, "op", other())
    if isinstance(node, ast.Compare) and (other := OTHER.get(type(node.ops[0]))):
        yield f"{type(node.ops[0]).__name__} → {other.__name__}", lambda: setattr(node, "ops", [other()])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "− → +", lambda: setattr(node, "op", ast.UAdd())
    if isinstance(node, ast.IfExp):
        turned = ast.UnaryOp(ast.Not(), node.test)
        yield (
            "the other branch",
            lambda: setattr(node, "test", ast.fix_missing_locations(ast.copy_location(turned, node))),
        )
    if isinstance(node, ast.If):
        test = ast.UnaryOp(ast.Not(), node.test)
        yield (
            "the other branch",
            lambda: setattr(node, "test", ast.fix_missing_locations(ast.copy_location(test, node))),
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = node.value
        yield f"{value} → {value + 1}", lambda: setattr(node, "value", value + 1)
