r"""Finds the key of a module in tables of a PEFT configuration whose keys are regular expressions for the ends of
module paths (`alpha_pattern`, `rank_pattern`), without matching every key with every module.

PEFT takes the first key for which `(.*\.)?(key)$` matches the module's path (0.21.2, utils/other.py,
get_pattern_key). Most keys are plain names, and a table may have one for each of a model's thousands of modules. A
plain key of n characters matches a path if it equals the last n characters, which begin at the start of the path or
behind a dot. A dot in the key matches any character, unless a backslash precedes it. So the plain keys of one
length with dots at the same positions take one look-up, and the names of a model have few such sets of positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from ...safe_regex import Steps

PLAIN_PATTERN: Final = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\[.-])+\$?")
END_OF_NAME: Final = r"(.*\.)?(%s)$"
ESCAPED_DOT: Final = "\0"  # an escaped dot of a key, which matches only a dot
Dots: TypeAlias = tuple[int, ...]


class Ends:
    """The keys of one table, indexed for look-ups of module paths."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        self._plain: dict[int, dict[Dots, dict[str, list[int]]]] = {}  # length → where dots are → key → positions
        self._others: list[int] = []
        self._first: dict[str, str | None] = {}
        for at, key in enumerate(self.keys):
            if PLAIN_PATTERN.fullmatch(key) is None:
                self._others.append(at)
            else:
                wild = key.removeprefix("^").removesuffix("$").replace("\\-", "-").replace("\\.", ESCAPED_DOT)
                dotted = self._plain.setdefault(len(wild), {}).setdefault(_dots(wild), {})
                dotted.setdefault(wild.replace(ESCAPED_DOT, "."), []).append(at)

    def first(self, path: str, steps: Steps) -> str | None:
        """Return the first key that matches the path of a module, or None; Refused if that takes too many steps."""
        if path not in self._first:
            steps.allow()
            best = min(self._of_plain(path, steps), default=len(self.keys))
            best = next((at for at in self._others if at < best and _matches(self.keys[at], path, steps)), best)
            self._first[path] = self.keys[best] if best < len(self.keys) else None
        return self._first[path]

    def every(self, path: str, steps: Steps) -> list[str]:
        """Return all keys that match the path of a module, in their order; Refused if that takes too many steps."""
        steps.allow()
        positions = {*self._of_plain(path, steps), *(at for at in self._others if _matches(self.keys[at], path, steps))}
        return [self.keys[at] for at in sorted(positions)]

    def _of_plain(self, path: str, steps: Steps) -> Iterator[int]:
        """Yield the positions of plain keys that match the path, the first one among them."""
        if "\n" in path:  # a dot does not match a line feed, and `$` may match before one
            yield from (
                at for at, key in enumerate(self.keys) if PLAIN_PATTERN.fullmatch(key) and _matches(key, path, steps)
            )
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
    """Return the text with dots at these positions."""
    for at in dots:
        if text[at] != ".":
            text = f"{text[:at]}.{text[at + 1 :]}"
    return text


def _matches(key: str, path: str, steps: Steps) -> bool:
    return steps.pattern(key, END_OF_NAME).matches(path, steps)
