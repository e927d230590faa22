"""The files of an output next to the weights: written with the weights, compared when a batch is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ..disk.files import content_of_file, sha256
from ..dtypes import DTYPES
from ..files.side_files import configured, index_files
from ..sources.outputs import present
from .model_card import card
from .plan import CARD, Plan
from .recipe import parsed

MODEL_ENTRIES: Final = ("model_type", "_class_name")
"""Entries of a config.json that name the model."""


@dataclass(frozen=True)
class Card:
    """The content of a model card, which people edit: no proof and no resumed batch compares it."""

    content: bytes


Side: TypeAlias = bytes | Path | Card
"""The content of a side file, or the file of the base to copy."""


@dataclass(frozen=True)
class Contents:
    """All files of an output by name, relative to its folder; the name of a single output file is ""."""

    weights: frozenset[str]
    sides: Mapping[str, Side]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.weights, *self.sides)


def contents(plan: Plan) -> Contents:
    """Return all files of the output of a plan."""
    tensors = {path: file.targets for path, file in zip(plan.base.files, plan.files, strict=True)}
    sides: dict[str, Side] = dict(index_files(plan.base, tensors))
    for name, file in plan.sides.items():
        sides[name] = file
        if file.name == "config.json":
            sides[name] = _configured(plan, name, DTYPES.get(plan.job.dtype))
    if plan.is_folder and (text := _card(plan)) is not None:
        sides[CARD] = Card(text)
    return Contents(frozenset(f.name for f in plan.files), sides)


def _card(plan: Plan) -> bytes | None:
    """Return the card of an output folder; None if the base's card is copied, or if there is none.

    If the output replaces a folder, the user may have edited the card there: its text is kept. It stays as it is if it
    cannot be read, or if the job asks for no card.
    """
    path = present(plan.job.output / CARD) or plan.job.output / CARD
    edited = path.is_file() and not plan.job.no_metadata
    text = card(plan, path if edited else plan.base.path / CARD) if plan.has_card else None
    return content_of_file(path) if text is None and edited else text


def _configured(plan: Plan, name: str, dtype: str | None) -> bytes:
    """Return the config.json of this name for the output."""
    folder = str(Path(name).parent)
    content, resized = content_of_file(plan.base.path / name), plan.resized(folder)
    section = plan.quantising.sections.get(folder)
    return configured(content, dtype, resized, unpacked=plan.unpacked, section=section)


def differing(planned: Contents, output: Path, digest: Callable[[Path], str] = sha256) -> list[str]:
    """Return the names of side files that an output lacks or holds with other bytes."""
    return [name for name, side in planned.sides.items() if not _equals(output / name, side, digest)]


def misleading(plan: Plan, output: Path) -> list[str]:
    """Return the names of side files with which the output loads as another model, or not at all.

    Such are: an index or a config.json that is missing, and a config.json of another model or with the base's sizes.
    """
    names = []
    for name, side in contents(plan).sides.items():
        if isinstance(side, bytes) and not (output / name).is_file():
            names.append(name)
        elif Path(name).name == "config.json":
            content = content_of_file(plan.base.path / name)
            resized = _configured(plan, name, None)
            texts = (raw.decode(errors="replace") for raw in (content, resized, content_of_file(output / name)))
            before, after, now = (parsed(text) or {} for text in texts)
            undone = (k for k in after if after[k] != before.get(k) == now.get(k))
            left = (k in now for k in before.keys() - after.keys())
            names += [name] * any((*undone, *left, *(k for k in MODEL_ENTRIES if after.get(k) != now.get(k))))
    return names


def _equals(file: Path, side: Side, digest: Callable[[Path], str]) -> bool:
    """Return whether a file has the planned content; any content is right for a card."""
    if not file.is_file():
        return False
    if isinstance(side, Card):
        return True
    if isinstance(side, bytes):
        return digest(file) == hashlib.sha256(side).hexdigest()
    return file.stat().st_size == side.stat().st_size and digest(file) == digest(side)
