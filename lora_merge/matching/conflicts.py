"""Two names for one weight: tied embeddings are meant, an equal copy is left out, all else is refused. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..adapters.file import Values
from ..errors import InputError
from ..models.prefixes import prefixed
from .patch import Patch

TIED: Final = re.compile(
    r"(?:^|[._])(?:embed_(?:tokens|in|out)|tokens_embed|(?:word|token|tok)_embeddings?|lm_head|shared$|wte|decoder$)(?:[._]|$)"
    r"|(?:^|\.)embeddings?$"
)
"""Names of tables of tokens and of heads that may share their weight: two of them are two modules, both meant.

No other embeddings: `x_embedder` and `pos_embed.proj` are layers of which a second name means the same one, and so
is `shared_experts`.
"""

TWICE: Final = "the adapter holds it a second time under another name, equal byte for byte; it is applied once"


def _tied(one: str, two: str) -> bool:
    """Whether two names are those of two modules, both meant, that share a table; not of one behind two prefixes."""
    found = TIED.search(one) or TIED.search(two)
    return found is not None and _innermost(one) != _innermost(two)


def _innermost(name: str) -> str:
    return list(prefixed(name))[-1][1].replace(".", "_")


class DuplicateCheck:
    """Which rows of the base one adapter changes so far, and by which patch."""

    def __init__(self, path: Path, values: Values) -> None:
        self._path, self._values = path, values
        self._taken: dict[str, list[tuple[int, int, Patch]]] = {}  # base key → first and last row + 1, by what

    def repeats(self, patch: Patch) -> bool:
        """Remember a patch; whether one of another name does the very same to the same rows already.

        InputError if one of another name does something else to some of them.
        """
        name = patch.module.name
        for piece in patch.view.pieces:
            others = self._taken.setdefault(piece.key, [])
            for start, stop, other in others:
                by = other.module.name
                if by == name or piece.stop <= start or stop <= piece.start or _tied(by, name):
                    continue
                if self._equal(patch, other):
                    return True
                raise InputError(
                    "two modules of the adapter change the same weight",
                    f"{self._path}: {by} and {name} both mean {piece.key}",
                    "remove one of the two; applying both would double the effect",
                )
            others.append((piece.start, piece.stop, patch))
        return False

    def _equal(self, one: Patch, two: Patch) -> bool:
        """Whether they are the same formula with the same numbers and tensors on the same rows."""
        ours, theirs = ({**p.module.slots, **p.module.shared} for p in (one, two))
        alike = all(
            getattr(one, field) == getattr(two, field)
            for field in ("algorithm", "shapes", "numbers", "settings", "view", "magnitude")
        )
        return alike and ours.keys() == theirs.keys() and all(self._values.same(ours[s], theirs[s]) for s in ours)
