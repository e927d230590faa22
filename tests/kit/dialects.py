"""Bases of every architecture, and the modules that an adapter in a dialect has for them."""

from __future__ import annotations

from functools import cache

from lora_merge.adapters_out.dialects import DIALECTS, Dialect
from lora_merge.adapters_out.groups import Place, places
from lora_merge.models.names import Names, names
from lora_merge.models.weights import WeightView
from tests.kit.architectures import header
from tests.kit.files import index
from tests.kit.layouts import few_blocks


@cache
def base(model: str) -> Names:
    return names(index(few_blocks(header(model))))


def named(to: Dialect, place: Place) -> str:
    """The module as the file names it."""
    return to.key(place.prefix, place.module, "")


EVERY = ("native/flux-dev", "native/hunyuanvideo", "native/zimage-fused", "diffusers/sd3", "diffusers/wan-i2v-14B")
"""Models that are written in every dialect; the others in one, which changes from model to model."""


def matrices(found: Names, to: str) -> dict[str, WeightView]:
    """Module, as a dialect names it → its rows."""
    dialect = DIALECTS[to].of(found.known)
    return {named(dialect, p): p.view for p in places(found, dialect) if len(p.view.shape) > 1}
