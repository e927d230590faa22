"""The notation of the name tables, and lookups of names in a table.

A row states that a path in one spelling and a path in the canonical spelling name the same weights:

    double_blocks.{i}.img_mlp.0: transformer_blocks.{i}.ff.net.0.proj
    double_blocks.{i}.img_attn.qkv: transformer_blocks.{i}.attn.[to_q, to_k, to_v]

Paths are prefixes: the rest of a name (`.weight`, `.bias`, a deeper path) stays, the longest row is used, and a
name without a row stays as it is. On the canonical side

    [a, b, c]   rows of a, then b, then c, in equal parts
    [a:H, b]    a has as many rows as the input width; parts without a size share the rest equally
    a< a>       the first and the second half of a's rows;  ~a is [a>, a<], halves swapped
    [a, b]/128  128 rows of a, 128 of b, the next 128 of a … (heads, each with its own q, k and v)
    ^a          a, transposed

and on both sides

    {i}         any number, the same everywhere; a number on the canonical side only means a stack:
                `experts.gate: experts.{e}.w1` is one `[E, out, in]` tensor of all of them in order
    {last}      the highest number that the base has there
    {3*i+j+1}   arithmetic over the numbers listed under `ranges`
    (a|b)       one row for each alternative, the n-th on one side with the n-th on the other
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Final, TypeAlias

NamePath: TypeAlias = tuple[str, ...]
Bound: TypeAlias = Mapping[str, str]

LAST_NUMBER: Final = "{last}"
MOST_LINE_ROWS: Final = 10_000  # of one line; models have up to 100 blocks
LONGEST_ROW: Final = 1000  # characters of both sides; the longest shipped line has 231
LONGEST_SUM: Final = 60  # characters of arithmetic in braces
MOST_SEGMENTS: Final = 8  # segments of a path in which `{last}` looks for numbers

VARIABLE: Final = re.compile(r"\{([a-z])\}")
"""A number in a name."""

_BRACES: Final = re.compile(r"\{(?!last\})([^}]*)\}")
_CHOICE: Final = re.compile(r"\(([^()]*)\)")
_LIST: Final = re.compile(r"([~^]?)([^\[\]]*)\[([^\[\]]+)\]([^\[\]/]*)(?:/[1-9][0-9]*)?")
_BLOCK: Final = re.compile(r"\][^/]*/([0-9]{1,9})$")
_PART: Final = re.compile(r"([~^]?)([^\s:<>~^\[\]]+?)([<>]?)(:H)?")


class BadRow(ValueError):
    """A row that cannot be read; the message says why."""


@dataclass(frozen=True)
class RowPart:
    """One part of a row's canonical side."""

    path: NamePath
    half: int | None = None  # 0 or 1: that half of the rows
    sized: bool = False  # as many rows as the input is wide
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Row:
    """One row without arithmetic and alternatives. Rows are compared by identity: millions of lookups hash them."""

    name: NamePath
    parts: tuple[RowPart, ...]
    stack: str | None = None  # the variable that numbers the matrices of a stack
    block: int = 0  # rows of each part in turn; 0: the rows of each part are consecutive

    @property
    def renames(self) -> bool:
        """Whether the row only renames whole weights, for any numbers."""
        (part, *others) = self.parts
        whole = not others and part.half is None and not (part.sized or part.transposed or self.stack or self.block)
        return whole and _even(self.name) and _even(part.path)

    def renamed(self, path: NamePath) -> NamePath:
        """Return the canonical path of a path that starts with this row's name."""
        bound = {s[1]: have for s, have in zip(self.name, path, strict=False) if s[0] == "{"}
        return fill(self.parts[0].path, bound) + path[len(self.name) :]


Lookup: TypeAlias = Mapping[NamePath, Sequence[tuple[NamePath, Row, int]]]
"""Path with `#` for numbers → (path as written, row, index of the part) of its rows."""


@dataclass(frozen=True)
class Hit:
    """A row that covers a name: its numbers, the rest of the name behind the row's path, the index of the part."""

    row: Row
    bound: dict[str, str]
    tail: NamePath
    part: int = 0


def parse(name: str, canonical: str, ranges: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of one line of a table; BadRow if the line cannot be read."""
    if len(name) + len(canonical) > LONGEST_ROW:
        raise BadRow(f"too long, more than {LONGEST_ROW} characters")
    for left, right in _alternatives(name, canonical):
        for numbers in _numbers(left + right, ranges):
            yield _row(_calculate(left, numbers), _calculate(right, numbers))


def _alternatives(name: str, canonical: str) -> Iterator[tuple[str, str]]:
    choices = [m.split("|") for m in _CHOICE.findall(name) + _CHOICE.findall(canonical)]
    if len({len(c) for c in choices}) > 1:
        raise BadRow("the alternatives in ( | ) differ in number")
    for i in range(len(choices[0]) if choices else 1):

        def pick(m: re.Match[str], i: int = i) -> str:
            return m[1].split("|")[i]

        yield _CHOICE.sub(pick, name), _CHOICE.sub(pick, canonical)


def _numbers(text: str, ranges: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield all values of the variables in arithmetic; one empty mapping without arithmetic."""
    sums = [b for b in _BRACES.findall(text) if not re.fullmatch("[a-z]", b)]
    names = sorted(set(re.findall("[a-z]", " ".join(sums))))
    if missing := [n for n in names if n not in ranges]:
        raise BadRow(f"no range is given for {', '.join(missing)}")
    if prod(ranges[n] for n in names) > MOST_LINE_ROWS:
        raise BadRow(f"the ranges of {', '.join(names)} make more than {MOST_LINE_ROWS} rows")
    for values in product(*(range(ranges[n]) for n in names)):
        yield dict(zip(names, values, strict=True))


def _calculate(text: str, numbers: Mapping[str, int]) -> str:
    def value(m: re.Match[str]) -> str:
        return m[0] if m[1].isalpha() and m[1] not in numbers else str(_evaluate(m[1], numbers))

    return _BRACES.sub(value, text) if numbers else text


def _evaluate(text: str, numbers: Mapping[str, int]) -> int:
    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(n)):
                return n
            case ast.Name(id=name) if name in numbers:
                return numbers[name]
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return of(a) + of(b)
            case ast.BinOp(left=a, op=ast.Sub(), right=b):
                return of(a) - of(b)
            case ast.BinOp(left=a, op=ast.Mult(), right=b):
                return of(a) * of(b)
        raise BadRow(f"{{{text}}} is not arithmetic with + - *")

    if len(text) > LONGEST_SUM:
        raise BadRow(f"{{{text[:20]}…}} is too long")
    try:
        return of(ast.parse(text, mode="eval").body)
    except SyntaxError as e:
        raise BadRow(f"{{{text}}} is not arithmetic with + - *") from e


def _row(name: str, canonical: str) -> Row:
    if not re.fullmatch(r"[\w.{}-]+", name):
        raise BadRow(f"{name!r} is not a path")
    parts = tuple(_parts(canonical))
    if not all(name.split(".")) or not all(all(p.path) for p in parts):
        raise BadRow("a path with nothing between two dots")
    left = set(VARIABLE.findall(name))
    right = {v for p in parts for v in VARIABLE.findall(".".join(p.path))}
    if left - right or len(right - left) > 1:
        raise BadRow("the numbers in braces differ between the two sides")
    if any(p.transposed for p in parts) and len(parts) > 1:
        raise BadRow("only a whole weight can be transposed")
    block = int(m[1]) if (m := _BLOCK.search(canonical)) else 0
    if block and (right - left or any(p.half is not None or p.sized or p.transposed for p in parts)):
        raise BadRow("only whole parts can take turns")
    return Row(tuple(name.split(".")), parts, next(iter(right - left), None), block)


def _parts(canonical: str) -> Iterator[RowPart]:
    sign, before, inner, after = "", "", canonical.strip(), ""
    if m := _LIST.fullmatch(inner):
        sign, before, inner, after = m.groups()
    for item in inner.split(","):
        m = _PART.fullmatch(item.strip())
        if m is None or (sign and m[1]):
            raise BadRow(f"{item.strip()!r} is not a path")
        path = tuple(f"{before}{m[2]}{after}".split("."))
        mark, sized = sign or m[1], m[4] is not None
        if mark == "~":
            yield from (RowPart(path, 1), RowPart(path, 0))
        else:
            yield RowPart(path, "<>".index(m[3]) if m[3] else None, sized, mark == "^")


class RowTable:
    """Rows with lookups from both sides. A lookup costs one dict access per path segment."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._names: dict[NamePath, list[tuple[NamePath, Row, int]]] = {}
        self._parts: dict[NamePath, list[tuple[NamePath, Row, int]]] = {}
        for row in rows:
            self._names.setdefault(_template(row.name), []).append((row.name, row, 0))
            for i, part in enumerate(row.parts):
                self._parts.setdefault(_template(part.path), []).append((part.path, row, i))
        self.empty = not rows
        self._rows = rows
        self._longest = max((len(path) for path in (*self._names, *self._parts)), default=0)

    def settled(self, names: Iterable[str]) -> RowTable:
        """Return the table with `{last}` replaced by the highest number in these names."""
        return RowTable([*self.closed._rows, *self.last_rows(names)]) if self.closed is not self else self

    @cached_property
    def closed(self) -> RowTable:
        """The table without the rows for the last block alone."""
        rows = [row for row in self._rows if LAST_NUMBER not in row.name]
        return RowTable(rows) if len(rows) < len(self._rows) else self

    def last_rows(self, names: Iterable[str]) -> list[Row]:
        """Return the rows for the last block alone, with the highest number in these names as its number."""
        open_rows = [row for row in self._rows if LAST_NUMBER in row.name]
        highest = _highest(names) if open_rows else {}
        rows = []
        for row in open_rows:
            stems = [p[: p.index(LAST_NUMBER)] for p in (row.name, *(part.path for part in row.parts))]
            if numbers := [highest[stem] for stem in stems if stem in highest]:
                rows.append(_at(row, str(max(numbers))))
        return rows

    def canonical(self, path: NamePath) -> Hit | None:
        """Return the row that covers a name of this spelling."""
        return next(iter(self._lookup(self._names, path)), None)

    def spelled(self, path: NamePath) -> list[Hit]:
        """Return the rows of which a canonical name is a part."""
        return self._lookup(self._parts, path)

    @property
    def renames(self) -> bool:
        """Whether all rows only rename whole weights."""
        return all(row.renames for row in self._rows)

    def names_of(self, form: NamePath) -> Iterator[tuple[Row, NamePath]]:
        """Yield (row, canonical form) for the rows that may cover names of this form."""
        for row, tail, _ in self._covering(self._names, form):
            yield from ((row, _template(part.path) + tail) for part in row.parts)

    def spellings_of(self, form: NamePath) -> Iterator[tuple[Row, NamePath]]:
        """Yield (row, form of the row's name) for the rows that may have canonical names of this form as parts."""
        for row, tail, _ in self._covering(self._parts, form):
            yield row, _template(row.name) + tail

    def _covering(self, table: Lookup, form: NamePath) -> list[tuple[Row, NamePath, int]]:
        """Return (row, rest of the form, index of the part) of all rows that may cover names of this form.

        If no row requires certain numbers or equal ones, these are the rows that cover every such name.
        """
        hits = [(template, row, form[n:], part) for n in range(1, min(len(form), self._longest) + 1)
                 for template, row, part in table.get(form[:n], ())]  # fmt: skip
        if all(_even(template) for template, *_ in hits):
            example = tuple([str(n) if s == "#" else s for n, s in enumerate(form)])
            return [(hit.row, form[len(form) - len(hit.tail) :], hit.part) for hit in self._lookup(table, example)]
        return [(row, tail, part) for _, row, tail, part in hits]

    def _lookup(self, table: Lookup, path: NamePath) -> list[Hit]:
        blank = tuple(["#" if is_number(s) else s for s in path[: self._longest]])
        for n in range(len(blank), 0, -1):
            rows = table.get(blank[:n])
            if rows is None:
                continue
            hits = [
                Hit(row, bound, path[n:], part)
                for template, row, part in rows
                if (bound := _bind(template, path)) is not None
            ]
            if hits:
                least = min(len(hit.bound) for hit in hits)
                return [hit for hit in hits if len(hit.bound) == least]  # `.47.` before `.{i}.`
        return []


def fill(path: NamePath, bound: Bound) -> NamePath:
    """Return the path with numbers in place of variables."""
    return tuple([bound[s[1]] if s[0] == "{" else s for s in path])


def _highest(names: Iterable[str]) -> dict[NamePath, int]:
    """Return path → the highest number behind it."""
    highest: dict[NamePath, int] = {}
    for name in names:
        path = tuple(name.split("."))
        for at, segment in enumerate(path[:MOST_SEGMENTS]):
            if is_number(segment):
                highest[path[:at]] = max(highest.get(path[:at], 0), int(segment))
    return highest


def _at(row: Row, number: str) -> Row:
    def put(path: NamePath) -> NamePath:
        return tuple(number if s == LAST_NUMBER else s for s in path)

    return replace(row, name=put(row.name), parts=tuple(replace(p, path=put(p.path)) for p in row.parts))


@lru_cache(maxsize=4096)
def is_number(segment: str) -> bool:
    """Return whether a path segment is a number of at most nine ASCII digits; hostile files may hold any key."""
    return segment.isascii() and segment.isdigit() and len(segment) < 10


@lru_cache(maxsize=65_536)  # the tables of all architectures have some ten thousand paths
def _template(path: NamePath) -> NamePath:
    return tuple(["#" if s[0] == "{" or is_number(s) else s for s in path])


def _even(template: NamePath) -> bool:
    """Return whether a path fits any numbers: it has no fixed number and no variable twice."""
    variables = [s for s in template if s[0] == "{"]
    return len(set(variables)) == len(variables) and not any(map(is_number, template))


def _bind(template: NamePath, path: NamePath) -> dict[str, str] | None:
    bound: dict[str, str] = {}
    for want, have in zip(template, path, strict=False):
        if want == have:
            continue
        if want[0] != "{" or have == "#" or bound.setdefault(want[1], have) != have:  # "#" only looks like a number
            return None
    return bound
