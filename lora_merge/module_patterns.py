"""The tables of a PEFT configuration whose keys are regular expressions for the ends of module paths (`alpha_pattern`,
`rank_pattern`): which key comes first, without asking each of them about each module.

PEFT takes the first key for which `(.*\\.)?(key)$` matches the module's path (0.21.2, utils/other.py,
get_pattern_key). Most keys are plain names, and a table may have one for each of a model's thousands of modules. A
plain key of n characters means the last n characters of a path, from the start or from behind a dot on, if they are
equal but for what stands where the key has its dots, which mean any character unless a backslash stands before them.
So there is one look-up for each place where the dots of some keys are, and of these a model's names have few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .patterns import STEPS_A_NAME, Steps

PLAIN: Final = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\[.-])+\$?")
END: Final = r"(.*\.)?(%s)$"
EXACT: Final = "\0"  # stands for a dot of a key that means a dot
Dots: TypeAlias = tuple[int, ...]


class Ends:
    """The keys of one table."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        self._plain: dict[int, dict[Dots, dict[str, list[int]]]] = {}  # length → where dots are → key → positions
        self._others: list[int] = []
        self._found: dict[str, str | None] = {}
        for at, key in enumerate(self.keys):
            if PLAIN.fullmatch(key) is None:
                self._others.append(at)
            else:
                wild = key.removeprefix("^").removesuffix("$").replace("\\-", "-").replace("\\.", EXACT)
                dotted = self._plain.setdefault(len(wild), {}).setdefault(_dots(wild), {})
                dotted.setdefault(wild.replace(EXACT, "."), []).append(at)

    def first(self, path: str, steps: Steps) -> str | None:
        """Return the first key that means the module; None where none does. Refused where that takes too many steps."""
        if path not in self._found:
            steps.left += STEPS_A_NAME
            best = min(self._of_plain(path, steps), default=len(self.keys))
            best = next((at for at in self._others if at < best and _matches(self.keys[at], path, steps)), best)
            self._found[path] = self.keys[best] if best < len(self.keys) else None
        return self._found[path]

    def _of_plain(self, path: str, steps: Steps) -> Iterator[int]:
        """Yield the positions of plain keys that mean the path, the first among them."""
        if "\n" in path:  # which no dot means, and before which `$` may match
            yield from (at for at, key in enumerate(self.keys) if PLAIN.fullmatch(key) and _matches(key, path, steps))
            return
        for start in (0, *(at + 1 for at in _dots(path))):
            end = path[start:]
            for dots, names in self._plain.get(len(end), {}).items():
                steps.take(1 + len(dots))
                for at in names.get(_dotted(end, dots), ()):
                    if start == 0 or not self.keys[at].startswith("^"):
                        yield at
                        break


def _dots(name: str) -> Dots:
    return tuple(at for at, char in enumerate(name) if char == ".")


def _dotted(text: str, dots: Dots) -> str:
    """Return the text with dots at these places."""
    for at in dots:
        if text[at] != ".":
            text = f"{text[:at]}.{text[at + 1 :]}"
    return text


def _matches(key: str, path: str, steps: Steps) -> bool:
    return steps.pattern(key, END).matches(path, steps)


@dataclass
class Matching:
    """What is kept of one configuration's patterns: its tables, and how many steps they may still take."""

    steps: Steps = field(default_factory=Steps)
    tables: dict[str, Ends] = field(default_factory=dict)
    ends: dict[tuple[str, str], tuple[frozenset[str], list[int]]] = field(default_factory=dict)
    """Lists of ends of names, with how long these are."""
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Lists of row numbers that were checked, by the identity of the configuration's."""
    parameters: tuple[Mapping[str, list[tuple[int, str]]], list[str]] | None = None
    """`target_parameters`, as target_parameters.py looks them up."""
