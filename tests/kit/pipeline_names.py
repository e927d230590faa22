"""Names of tensors in the pipelines of diffusers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from lora_merge.algorithms import Shape
from lora_merge.files.checkpoint import Index
from lora_merge.models.names import Names, names
from tests.kit.files import index

HEADERS = Path(__file__).parents[1] / "headers"


STORED = sorted(
    f"{p.parent.name}/{p.name[: -len('.json.gz')]}" for p in HEADERS.glob("*/*.json.gz") if "in-memory" not in p.name
)


@cache
def header(name: str) -> Mapping[str, Shape]:
    table = json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes()))
    shapes = {key: tuple(shape) for key, shape in table.items()}
    openclip = {"native/openclip-bigg-text": "", "single-file/sdxl": "conditioner.embedders.1.model.",
                "single-file/sd2": "cond_stage_model.model."}  # fmt: skip
    if name in openclip:
        complete_openclip(shapes, openclip[name])
    return shapes


def complete_openclip(shapes: dict[str, Shape], prefix: str) -> None:
    """The table lacks what SDXL never runs: the last block and the head. Released files have them."""
    block = f"{prefix}transformer.resblocks."
    for key in [k for k in shapes if k.startswith(f"{block}30.")]:
        shapes[key.replace(f"{block}30.", f"{block}31.")] = shapes[key]
    shapes |= {f"{prefix}ln_final.{p}": (1280,) for p in ("weight", "bias")}
    shapes[f"{prefix}text_projection"] = (1280, 1280)


def pipeline(**parts: Mapping[str, Shape]) -> Index:
    whole = index({f"{part}.{key}": shape for part, shapes in parts.items() for key, shape in shapes.items()})
    return replace(whole, components={part: index(shapes) for part, shapes in parts.items()})


@cache
def base(name: str) -> Names:
    return names(index(header(name)))


def modules(shapes: Mapping[str, Shape]) -> dict[tuple[str, str], Shape]:
    """(module, parameter) → shape, as adapters speak of them."""
    named = {}
    for key, shape in shapes.items():
        module, _, leaf = key.rpartition(".")
        named[(module, leaf) if leaf in ("weight", "bias", "scale") else (key, "weight")] = shape
    return named
