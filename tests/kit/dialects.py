"""Bases of every architecture, and the modules that an adapter in a dialect has for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TypeVar
from zlib import crc32

from lora_merge.adapters_out.dialects import DIALECTS, Dialect
from lora_merge.adapters_out.groups import Place, places
from lora_merge.models.names import Names, names
from lora_merge.models.weights import WeightView
from tests.kit.architectures import header
from tests.kit.files import index
from tests.kit.layouts import few_blocks

Row = TypeVar("Row")


@cache
def base(model: str) -> Names:
    return names(index(few_blocks(header(model))))


def in_drawn_order(name: str, rows: Iterable[Row]) -> list[Row]:
    """The rows of a table in an order that is another for each name: a new row moves no other from where it is."""
    return sorted(rows, key=lambda row: crc32(f"{name} {row}".encode()))


def drawn(name: str, rows: Iterable[Row]) -> Row:
    """The row that a name is tested with: a new one takes a share of the names, all others keep theirs."""
    return in_drawn_order(name, rows)[0]


def named(to: Dialect, place: Place) -> str:
    """The module as the file names it."""
    return to.key(place.prefix, place.module, "")


EVERY = ("native/flux-dev", "native/hunyuanvideo", "native/zimage-fused", "diffusers/sd3", "diffusers/wan-i2v-14B")
"""Models that are written in every dialect; the others in one, which is drawn by the model's name."""


def matrices(names: Names, to: str) -> dict[str, WeightView]:
    """Module, as a dialect names it → its rows."""
    dialect = DIALECTS[to].of(names.known)
    return {named(dialect, p): p.view for p in places(names, dialect) if len(p.view.shape) > 1}
