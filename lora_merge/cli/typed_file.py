"""A file of a command line with its strength, and what it is: its header is read once."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..adapter_arguments import right_form
from ..addresses import split
from ..errors import UsageError
from ..options import BLOCK_WEIGHTS
from ..paths import exists, split_strength
from .corrected_line import opened, path_of
from .foreign_names import Role

if TYPE_CHECKING:
    from ..files.checkpoint import Index


@dataclass(eq=False)
class TypedFile:
    """A file of a line with its strength."""

    path: str
    strength: str = ""
    parts: str = ""
    """What follows the strength: ",te=0"."""
    stated: bool = False
    """Whether its word has a strength or parts."""
    role: str = ""
    """BASE, TUNED or ADAPTERS by its option; "" if its place shows what it is."""
    typed: str = ""
    """The option and the word as the user has them."""
    of_parts: dict[str, str] = field(default_factory=dict)
    """Part → its strength by an option of another program."""

    @classmethod
    def of(cls, word: str, option: str = "", role: str = "") -> TypedFile:
        """Return the file of a word such as "lora:0.8,te=0"; a model has not the role of an adapter."""
        address, file = None, cls(word, typed=f"{option} {word}")
        with suppress(UsageError):  # the command itself reports an address that it cannot use
            address = split(word)
        if not exists(word) and not (address and not address[1]):
            text, comma, parts = word.partition(",")
            file.path, strength = split_strength(text)
            file.strength, file.parts = "" if strength is None else f"{strength:g}", comma + parts
        file.stated = word != file.path
        file.role = "" if role == Role.ADAPTERS and file.kind == "model" else role
        return file

    @property
    def word(self) -> str:
        """The word of our command line."""
        return f"{self.path}{self.strength and ':'}{self.strength}{self.parts}"

    @cached_property
    def index(self) -> Index | None:
        """Its tensors; None if it cannot be read."""
        return opened(self.path)

    @cached_property
    def kind(self) -> Literal["adapter", "model", ""]:
        """What it is; "" if there is no such file."""
        from ..adapters.modules import looks_like_adapter

        if not names_file(self.path):
            return ""
        return "adapter" if self.index is None or looks_like_adapter(self.index) else "model"

    @property
    def of_adapter(self) -> bool:
        """Whether it is an adapter, or missing and named as one."""
        return self.kind == "adapter" or self.role == Role.ADAPTERS

    @property
    def states_alpha(self) -> bool:
        """Whether an adapter states its alpha, as tensors, in its metadata or in its configuration."""
        index = self.index
        return index is not None and any("alpha" in name for name in (*index.stored, *index.metadata, *index.config))

    @cached_property
    def has_text_encoder(self) -> bool:
        """Whether an adapter changes a text encoder."""
        from ..models.prefixes import innermost

        return self.index is not None and any(innermost(n)[0].startswith(("te", "=")) for n in self.index.stored)

    def take_strength(self, value: str) -> None:
        """Take a strength in place of its own."""
        self.strength = value

    def fit_encoders(self, *, in_base: bool) -> None:
        """Leave out the strength of text encoders that it does not change, as of a tag; make it 0 if the base has none.
        `in_base`: whether the base has text encoders."""
        if not (self.has_text_encoder and in_base):
            self.parts = re.sub(",te=[0-9.]+", ",te=0" if self.has_text_encoder else "", self.parts)

    def apply_parts(self, common: Collection[str]) -> None:
        """Write the strengths of parts as factors behind the adapter. `common`: the parts that have an option."""
        parts = {**self.of_parts}
        if not parts:
            return
        if self.strength not in ("", "1") and {*parts} != {BLOCK_WEIGHTS}:  # it is that of the other parts
            encoders = ("te1", "te2") if {"te1", "te2"} & {*parts} else ("te",)
            every = dict.fromkeys(("unet", *encoders, *parts))
            parts = {part: parts.get(part, self.strength) for part in every if part not in common}
            self.strength = "1"
        self.strength = self.strength or "1"
        others = re.sub(rf",(?:{'|'.join(parts)})=[^,=]*(?=,|$)", "", self.parts)
        self.parts = "".join(f",{part}={value}" for part, value in parts.items()) + others


def names_file(word: str) -> bool:
    """Return whether a word names a file that is there, with or without a strength."""
    return exists(word) or bool(path_of(word))


def looks_like_path(word: str) -> bool:
    """Return whether a word names a file, or is written as a path or an address is."""
    return names_file(word) or re.search(r"[/\\]|\.[A-Za-z]{2}", word) is not None


def numbers_in(word: str) -> list[str]:
    """Return the numbers of "0.7", "0.7,0.3", "0.7:0.3" or "[0.7, 0.3]" in our form; [] for other words."""
    numbers = [right_form(number) for number in re.split(r"[,:;\s]+", word.strip("[](),;"))]
    return numbers if all(numbers) else []
