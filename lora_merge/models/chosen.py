"""The parameters that `--include` and `--exclude` choose: components of a model, or `re:REGEX` of names. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UsageError
from ..limits import Pattern, Refused, Steps
from ..options import REGEX, a_list, unlike
from .names import Names
from .strengths import DENOISER, OTHER_WORDS, networks

FLAGS: Final = ("--include", "--exclude")


@dataclass(frozen=True)
class Chosen:
    """A choice of parameters: those that a part of `include` covers, or all, without those that `exclude` covers."""

    include: Sequence[str | Pattern]
    exclude: Sequence[str | Pattern]

    @staticmethod
    def of(include: Sequence[str], exclude: Sequence[str]) -> Chosen:
        """Return the choice of the options of a job; UsageError for an expression that is not run."""
        return Chosen([_part(p, FLAGS[0]) for p in include], [_part(p, FLAGS[1]) for p in exclude])

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def on_base(self, names: Names) -> Chosen:
        """Return the choice with the labels of the base's networks for words: te1 and te2 for `te`."""
        return self._with(lambda word: networks(word, names))

    def by_prefix(self, found: Collection[str]) -> Chosen:
        """Return the choice with the networks that prefixes of names mean for words; `found`: all of these."""
        return self._with(lambda word: _called(word, found))

    def _with(self, networks_of: Callable[[str], Iterable[str]]) -> Chosen:
        parts = ([own for p in some for own in (networks_of(p) if isinstance(p, str) else [p])]
                 for some in (self.include, self.exclude))  # fmt: skip
        return Chosen(*parts)

    def takes(self, component: str, names: Iterable[str], *, usual: bool = True) -> bool:
        """Return whether a parameter is chosen; `names`: its names, in which expressions search.

        `usual`: the answer without `--include`.
        """
        names = [*names]
        if any(_covers(p, component, names) for p in self.exclude):
            return False
        return any(_covers(p, component, names) for p in self.include) if self.include else usual

    def check(self, labels: Collection[str], what: str = "the base") -> None:
        """Raise UsageError for a chosen component that does not exist; `labels`: the existing ones."""
        for flag, parts in zip(FLAGS, (self.include, self.exclude), strict=True):
            for part in parts:
                if isinstance(part, str) and part not in labels:
                    raise UsageError(f"{what} has no component {part[:40]!r}", flag,
                                     f"use one of {', '.join(sorted(labels))}, or re:REGEX")  # fmt: skip


def parts(value: Any, flag: str) -> tuple[str, ...]:
    """Return the parts that an option names, one or many; UsageError for what is not text."""
    found = (value,) if isinstance(value, str) else tuple(a_list(value, flag, "a list of texts"))
    if wrong := next((p for p in found if not isinstance(p, str) or not p), None):
        raise unlike(wrong, flag, "a component, or re:REGEX")
    return found


def _called(word: str, found: Collection[str]) -> list[str]:
    """Return the networks, of those that prefixes mean, that a word names; the word itself if it names none."""
    known = OTHER_WORDS.get(word.lower(), word.lower())
    same = {*DENOISER, "denoiser", "prior"} if known in (*DENOISER, "denoiser", "prior") else {known}
    same |= {one for one in found if one.startswith("te")} if known == "te" else {"te"} if known == "te1" else set()
    return sorted(same.intersection(found)) or [word]


def _part(text: str, flag: str) -> str | Pattern:
    if not text.startswith(REGEX):
        return text
    try:
        return Steps().pattern(text.removeprefix(REGEX))
    except Refused as e:
        raise UsageError(f"the regular expression is {e}", f"{flag} {text[:80]}", "correct the pattern") from e


def _covers(part: str | Pattern, component: str, names: Iterable[str]) -> bool:
    if isinstance(part, str):
        return part == component
    return any(part.matches(name, Steps(), anywhere=True) for name in names)
