"""The names of the blocks of an architecture."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

from lora_merge.models.blocks import Blocks, blocks
from lora_merge.models.components import components
from lora_merge.models.names import Names

HEADERS = Path(__file__).parents[1] / "headers"


def shapes_of(name: str) -> Mapping[str, tuple[int, ...]]:
    return {
        key: tuple(shape)
        for key, shape in json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes())).items()
    }


def names_of(name: str) -> Names:
    shapes = shapes_of(name)
    return Names(components(shapes, {}, (), None), shapes)


def blocks_of(name: str) -> Blocks:
    return blocks(names_of(name))
