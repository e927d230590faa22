"""Two names for one weight: tied embeddings are meant, two spellings of one module are refused. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from .errors import InputError
from .patching import Patch
from .views import Piece

EMBEDDINGS: Final = (
    *("model.embed_tokens", "model.language_model.embed_tokens", "model.decoder.embed_tokens", "transformer.wte"),
    *("shared", "model.shared", "gpt_neox.embed_in", "transformer.word_embeddings", "embed_tokens"),
)
"""Where transformers' models keep the input embeddings that a tied head uses."""

TIED: Final = re.compile(r"(?:^|[._])(?:\w*embed\w*|lm_head|shared|wte|decoder$)(?:[._]|$)")
"""Names of embeddings and of heads that may share their weight: two of them are two modules, both meant."""


class Doubles:
    """Which rows of the base one adapter changes so far, and by which module."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken: dict[str, list[tuple[Piece, str]]] = {}  # base key → rows, module

    def check(self, patch: Patch) -> None:
        """Remember a patch; InputError if a module of another name changes some of its rows already."""
        name = patch.module.name
        for piece in patch.view.pieces:
            others = self._taken.setdefault(piece.key, [])
            for other, by in others:
                overlap = other.start < piece.stop and piece.start < other.stop
                if overlap and by != name and not (TIED.search(by) or TIED.search(name)):
                    raise InputError(
                        "two modules of the adapter change the same weight",
                        f"{self._path}: {by} and {name} both mean {piece.key}",
                        "remove one of the two; applying both would double the effect",
                    )
            others.append((piece, name))
