"""Regular expressions of untrusted files (PEFT configurations, recipes, jobs files), matched in a bounded number of
steps.

Python's engine tries all ways to divide a text among the loops, options and alternatives of a pattern, one after the
other: `(?:a|a)` forty-five times takes 2^45 tries. This module follows all ways at once. A set of positions in the text
(a whole number, bit p for position p) goes through the pattern, and each node of the pattern turns the positions where
it may begin into the positions where it may end:

* a character or a class of characters is an `and` and a shift;
* alternatives are an `or` of their results; nodes of a sequence are applied one after the other;
* a loop is applied to the new positions until there are none. Each round adds a position, so the loop ends after n + 1
  rounds for a text of n characters: further repetitions can only match the empty text.

So a pattern of m nodes with d nested loops takes at most m · (n + 1)^d steps, and usually some dozens. `Steps` counts
them over all names that the patterns of one file are matched with, and refuses patterns that would take seconds. The
result is whether there is a match, not which text a group matched: backreferences and possessive loops need that.
Python's parser makes the tree. Python's engine runs a pattern itself if few ways are possible (`_ways`).
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any, Final, TypeAlias

PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

LONGEST_PATTERN: Final = 100_000  # characters of a pattern; lists of all modules of a model have 50 000
LONGEST_NAME: Final = 2000  # characters of a name that is searched; real ones have up to 150
MOST_STEPS: Final = 1_000_000  # for all patterns of one file; one step takes two to four microseconds
STEPS_A_NAME: Final = 100  # further steps for each name that is looked up: large models have 200 000 names
STEPS_TO_PARSE: Final = 50  # and four for each character: 0.1 ms for a short pattern
SHORT_NAME: Final = 100  # characters of a name that Python's engine may search
MOST_WAYS: Final = 20_000  # ways to match such a name that Python's engine may try: 0.1 ms
LEAVES: Final = frozenset({"NOT_LITERAL", "ANY", "IN"})
LOOPS: Final = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})

Node: TypeAlias = tuple[str, Any]
"""Name of an operation of Python's engine, and its arguments."""


class Refused(ValueError):
    """The error for a pattern that is not run; the message says why."""


class Steps:
    """The number of steps that the patterns of one file may still take, and the patterns parsed so far."""

    def __init__(self, left: int = MOST_STEPS) -> None:
        self.left = left
        self._parsed: dict[tuple[str, str], Pattern] = {}

    def __reduce__(self) -> tuple[type[Steps], tuple[int]]:
        return Steps, (self.left,)  # constants in the trees of Python's parser cannot be pickled

    def take(self, count: int = 1) -> None:
        """Use up steps; Refused if none are left."""
        self.left -= count
        if self.left < 0:
            raise Refused("too complex to run safely")

    def allow(self, names: int = 1) -> None:
        """Allow the further steps that looking up some names may take."""
        self.left += STEPS_A_NAME * names

    def pattern(self, text: str, form: str = "%s") -> Pattern:
        """Return the pattern for `form % text`, parsed once; Refused as by `pattern`, or if no steps are left."""
        if (form, text) not in self._parsed:
            self.take(STEPS_TO_PARSE + 4 * len(text))
            self._parsed[form, text] = pattern(form % text)
        return self._parsed[form, text]


@dataclass(frozen=True)
class Pattern:
    """One regular expression in Python's syntax, made by `pattern`."""

    text: str
    tree: Sequence[Node]
    flags: int
    known: dict[Any, bool] = field(default_factory=dict, compare=False)  # (leaf, flags, character) → whether it matches

    @cached_property
    def ways(self) -> int:
        """The number of ways of matching a short name that Python's engine may have to try."""
        return _ways(self.tree)

    @cached_property
    def _quick(self) -> re.Pattern[str]:
        return re.compile(self.text)

    def matches(self, name: str, steps: Steps, *, anywhere: bool = False) -> bool:
        """Return whether the pattern matches at the start of a name, as `re.match`, or anywhere, as `re.search`."""
        tries = self.ways * (SHORT_NAME if anywhere else 1)
        if len(name) <= SHORT_NAME and tries <= MOST_WAYS:
            steps.take(1 + tries // 1000)
            return (self._quick.search if anywhere else self._quick.match)(name) is not None
        if len(name) > LONGEST_NAME:
            raise Refused(f"not run on a name of {len(name)} characters")
        start = (2 << len(name)) - 1 if anywhere else 1
        return _Walk(name, steps, self.known).through(self.tree, start, self.flags) != 0


def pattern(text: str) -> Pattern:
    """Return the parsed pattern; Refused if the text is not a regular expression, or too long or nested too deeply."""
    if len(text) > LONGEST_PATTERN:
        raise Refused(f"longer than {LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that a later Python may read differently
            parsed = PARSER.parse(text)
            return Pattern(text, _nodes(parsed), parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as e:
        raise Refused(f"not valid: {e}") from e


def _nodes(parsed: Any) -> list[Node]:
    """Return Python's tree with operations by name, the widths of lookbehinds, and consecutive letters as one text."""
    nodes: list[Node] = []
    for op, value in parsed:
        if str(op) != "LITERAL":
            nodes.append((str(op), _inside(str(op), value)))
        elif nodes and nodes[-1][0] == "TEXT":
            nodes[-1] = ("TEXT", nodes[-1][1] + chr(value))
        else:
            nodes.append(("TEXT", chr(value)))
    return nodes


def _inside(op: str, value: Any) -> Any:
    if op in LOOPS:
        return (int(value[0]), int(value[1]), _nodes(value[2]))
    if op in ("ASSERT", "ASSERT_NOT"):
        return (value[1].getwidth()[0] if value[0] < 0 else 0, _nodes(value[1]))
    if op == "BRANCH":
        return (None, [_nodes(branch) for branch in value[1]])
    if op == "GROUPREF_EXISTS":
        return (value[0], _nodes(value[1]), _nodes(value[2] or ()))
    if op == "ATOMIC_GROUP":
        return _nodes(value)
    return (*value[:3], _nodes(value[3])) if op == "SUBPATTERN" else value


def _ways(nodes: Sequence[Node]) -> int:
    """Return the product of all choices on a short name; more than MOST_WAYS if the body of a loop has choices
    itself."""
    return reduce(lambda product, node: min(product * _choices(*node), MOST_WAYS + 1), nodes, 1)


def _choices(op: str, value: Any) -> int:
    if op in LOOPS:
        least, most, body = value
        if _is_leaf(body):
            return min(int(most) - int(least), SHORT_NAME) + 1
        return 1 + _ways(body) if most <= 1 else MOST_WAYS + 1
    if op == "BRANCH":
        return sum(map(_ways, value[1]))
    if op == "GROUPREF_EXISTS":
        return _ways(value[1]) + _ways(value[2])
    inner = value[-1] if op in ("SUBPATTERN", "ASSERT", "ASSERT_NOT") else value if op == "ATOMIC_GROUP" else ()
    return _ways(inner)


def _is_leaf(body: Sequence[Node]) -> bool:
    """Return whether the body of a loop matches exactly one character."""
    return len(body) == 1 and (body[0][0] in LEAVES or (body[0][0] == "TEXT" and len(body[0][1]) == 1))


class _Walk:
    """The match of one name with one pattern."""

    def __init__(self, text: str, steps: Steps, known: dict[Any, bool]) -> None:
        self.text, self.steps, self.known = text, steps, known
        self.chars: dict[str, int] = {}
        for at, char in enumerate(text):
            self.chars[char] = self.chars.get(char, 0) | 1 << at
        self.places: dict[Any, int] = {}
        steps.take(len(text) // 8)

    def through(self, nodes: Sequence[Node], places: int, flags: int) -> int:
        """Return the places where a sequence of nodes may end if it begins at one of the given places."""
        for op, value in nodes:
            if not places:
                return 0
            self.steps.take()
            if op in LEAVES:
                places = (places & self._where(op, value, flags)) << 1
            elif op in WALKERS:
                places = WALKERS[op](self, value, places, flags)
            else:
                raise Refused(f"not run, as it has {op.lower().replace('_', ' ')} and loops")
        return places

    def _where(self, op: str, value: Any, flags: int) -> int:
        """Return the positions whose character a leaf of the pattern matches."""
        key = (op, str(value) if op != "IN" or len(value) <= 8 else id(value), flags)  # [ab] in many loops is one
        if key not in self.places:
            self.places[key] = self._of(lambda char: self._is(key, char, op, value))
        return self.places[key]

    def _is(self, key: Any, char: str, op: str, value: Any) -> bool:
        """Return whether a leaf of the pattern matches this character."""
        if (key, char) not in self.known:
            self.known[key, char] = any(_means(op, value, v, key[2]) for v in _variants(char, key[2]))
        return self.known[key, char]

    def _of(self, matches: Callable[[str], bool]) -> int:
        """Return the positions of all characters for which `matches` is true."""
        self.steps.take(1 + len(self.chars) // 4)
        return sum(mask for char, mask in self.chars.items() if matches(char))

    def word(self, value: str, places: int, flags: int) -> int:
        """Return the places behind this text, for the places at which it begins."""
        for char in value:
            where = self._where("TEXT", char, flags) if flags & re.IGNORECASE else self.chars.get(char, 0)
            places = (places & where) << 1
            if not places:
                break
        return places

    def loop(self, value: Any, places: int, flags: int) -> int:
        """Return the places after the least number of repetitions that the pattern asks for, up to the most."""
        least, most, body = value
        if least == 0 and most > len(self.text) and _is_leaf(body):
            where = self._where(body[0][0], body[0][1], flags)
            return ((((places & where) + where) ^ where) & (where | where << 1)) | places  # the carry runs over matches
        for _ in range(min(least, len(self.text) + 1)):
            places = self.through(body, places, flags)
        new = places
        for _ in range(min(most - least, len(self.text) + 1)):
            new = self.through(body, new, flags) & ~places
            if not new:
                break
            places |= new
        return places

    def either(self, value: Any, places: int, flags: int) -> int:
        """Return the places where any of the alternatives may end."""
        reached = 0
        for branch in value[1]:
            self.steps.take()
            reached |= self.through(branch, places, flags)
        return reached

    def group(self, value: Any, places: int, flags: int) -> int:
        """Return the places where a group may end; a group may have its own flags."""
        return self.through(value[3], places, (flags | value[1]) & ~value[2])

    def look(self, value: Any, places: int, flags: int, *, positive: bool = True) -> int:
        """Return the places at which a lookahead, or a lookbehind, matches."""
        back, body = value
        places_left = 0
        for at in range(places.bit_length()):
            if places >> at & 1:
                matches = at >= back and self.through(body, 1 << at - back, flags) != 0
                places_left |= (matches == positive) << at
        return places_left

    def at(self, value: Any, places: int, flags: int) -> int:
        """Return the places that are a start, an end, or the edge of a word."""
        key = (str(value), flags)
        if key not in self.places:
            self.places[key] = self._edges(str(value), flags)
        return places & self.places[key]

    def _edges(self, kind: str, flags: int) -> int:
        size, lines = len(self.text), self._of(lambda c: c == "\n")
        many = bool(flags & re.MULTILINE)
        words = self._of(lambda c: _in_class("WORD", c, flags))
        last = 1 << size
        table = {
            "AT_BEGINNING": 1 | (lines << 1 if many else 0),
            "AT_BEGINNING_STRING": 1,
            "AT_END": last | (lines if many else lines & last >> 1),
            "AT_END_STRING": last,
            "AT_BOUNDARY": words ^ words << 1,
            "AT_NON_BOUNDARY": ~(words ^ words << 1) & (2 * last - 1) if size or sys.version_info >= (3, 14) else 0,
        }
        return table[kind]


WALKERS: Final[Mapping[str, Callable[[_Walk, Any, int, int], int]]] = {
    "TEXT": _Walk.word,
    "MAX_REPEAT": _Walk.loop, "MIN_REPEAT": _Walk.loop, "BRANCH": _Walk.either, "SUBPATTERN": _Walk.group,
    "ASSERT": _Walk.look, "ASSERT_NOT": partial(_Walk.look, positive=False), "AT": _Walk.at,
    "FAILURE": lambda *_: 0,  # `(?!)` never matches
}  # fmt: skip


def _variants(char: str, flags: int) -> tuple[str, ...]:
    """Return the character, and its other case if the flags ignore case."""
    if not flags & re.IGNORECASE:
        return (char,)
    return tuple({char, *(c for c in (char.lower(), char.upper()) if len(c) == 1)})


def _means(op: str, value: Any, char: str, flags: int) -> bool:
    """Return whether a leaf matches this character."""
    if op == "TEXT":
        return bool(char == value)
    if op == "NOT_LITERAL":
        return all(ord(c) != value for c in _variants(char, flags))
    if op == "ANY":
        return char != "\n" or bool(flags & re.DOTALL)
    negated = str(value[0][0]) == "NEGATE"
    chars = _variants(char, flags) if negated else (char,)
    return any(_in_set(item, c, flags) for item in value[negated:] for c in chars) != negated


def _in_set(item: Any, char: str, flags: int) -> bool:
    op, value = str(item[0]), item[1]
    if op == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    if op == "CATEGORY":
        kind = str(value).removeprefix("CATEGORY_")
        return _in_class(kind.removeprefix("NOT_"), char, flags) != kind.startswith("NOT_")
    return bool(ord(char) == value)


def _in_class(kind: str, char: str, flags: int) -> bool:
    """Return whether a character is a digit, white space, or part of a word."""
    if flags & re.ASCII and not char.isascii():
        return False
    if kind == "DIGIT":
        return char.isdecimal()
    if kind == "SPACE":
        return char in " \t\n\r\f\v" if flags & re.ASCII else char.isspace()
    return char.isalnum() or char == "_"
