"""The parameters that `--include` and `--exclude` choose, by parts of a model. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..options import REGEX, a_list, unlike
from ..paths import typed
from ..text import expression
from .names import Names
from .parts import Parts

EXCLUDE: Final = "--exclude"
FLAGS: Final = ("--include", EXCLUDE)


@dataclass(frozen=True)
class Chosen:
    """A choice of parameters: those in a part of `include`, or all, without those in a part of `exclude`."""

    include: Parts
    exclude: Parts

    @staticmethod
    def of(
        include: Sequence[str], exclude: Sequence[str], names: Names | None, networks: Collection[str] = ()
    ) -> Chosen:
        """Return the choice of the options of a job; see `Parts` for `names` and `networks`, and for errors."""
        return Chosen(*(Parts(f, t, names, networks) for f, t in zip(FLAGS, (include, exclude), strict=True)))

    def takes(self, network: str, names: Iterable[str], *, usual: bool = True) -> bool:
        """Return whether a parameter is chosen; `names`: its names. `usual`: the answer without `--include`."""
        names = [*names]
        if self.exclude.cover(names, network):
            return False
        return self.include.cover(names, network) if self.include.texts else usual

    def check(self, networks: Mapping[str, str], what: str) -> None:
        """Raise UsageError for a part that covers nothing; `networks`: names of parameters → their networks."""
        self.include.check(networks, what)
        self.exclude.check(networks, what)


def or_leave_out(fix: str, keys: Iterable[str], *, alike: bool = False) -> str:
    """Return a fix, and as another one the option that leaves parameters of these keys out; not for too many kinds of
    keys.

    `alike`: and all whose keys differ from these in numbers alone.
    """
    names = expression(keys, alike=alike)
    return fix + (f", or leave that out: {EXCLUDE} {typed([f'{REGEX}^{names}$'])}" if names else "")


def parts(value: Any, flag: str) -> tuple[str, ...]:
    """Return the parts that an option names, one or many; UsageError for what is not text."""
    found = (value,) if isinstance(value, str) else tuple(a_list(value, flag, "a list of texts"))
    if wrong := next((p for p in found if not isinstance(p, str) or not p), None):
        raise unlike(wrong, flag, "a component, a block, or re:REGEX")
    return found
