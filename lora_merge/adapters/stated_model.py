"""The model that an adapter's metadata name. Anybody may have written them, so they count where its names and shapes
show no model, and say why an adapter may not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from ..dtypes import Shape
from ..files.checkpoint import Index
from ..models.adapter_architecture import architectures, modules_of
from ..models.architectures import Architecture, shipped
from ..models.names import named_as, of_the_denoiser
from .trigger_words import entry

STATED: Final = ("modelspec.architecture", "ss_base_model_version", "ot_config:model_type")
"""Metadata entries in which trainers name the model, the most exact first."""

OTHER_TITLES: Final = {
    "sdxl": "Stable Diffusion XL", "ponydiffusion": "Stable Diffusion XL", "illustrious": "Stable Diffusion XL",
    **dict.fromkeys(("sdv1", "sd1", "stablediffusionv1"), "Stable Diffusion 1"),
    **dict.fromkeys(("sdv2", "sd2", "stablediffusionv2"), "Stable Diffusion 2"),
    **dict.fromkeys(("sdv3", "sd3", "stablediffusionv3"), "Stable Diffusion 3"),
    "flux": "Flux.1", "hunyuanvideo": "HunyuanVideo", "ltxv": "LTX-Video", "lumina": "Lumina-Image 2",
}  # fmt: skip
"""What trainers call a model, in small letters and digits alone → its title, where that is another name."""

LONGEST: Final = 200  # characters of an entry in which a name is looked for


def made_for(index: Index, modules: Mapping[str, Shape]) -> tuple[Sequence[Architecture], str]:
    """Return the models that an adapter may be for, and what shows it where its names and shapes do not: an entry of
    its metadata, or its names alone. `modules`: module → the shape of its weight, () where it is not known."""
    fitting, (stated, entry_name) = architectures(modules_of(of_the_denoiser(modules))), stated_model(index)
    if stated and (not fitting or (len(fitting) > 1 and any(a.title == stated for a in fitting))):
        return [a for a in shipped() if a.title == stated], entry_name
    by_names = [] if fitting else named_as(modules)
    return (by_names, "its names") if len(by_names) == 1 else (fitting, "")


def stated_model(index: Index) -> tuple[str, str]:
    """Return the title of the model that metadata name, and the entry; ("", "") where they name none that is known."""
    for name in STATED:
        if title := _titled(_text(index, name)):
            return title, name
    return "", ""


def _text(index: Index, name: str) -> str:
    """Return an entry as text, also one inside an entry that is JSON: `ot_config:model_type`."""
    outer, colon, inner = name.partition(":")
    if not colon:
        return index.metadata.get(name, "")
    table = entry(index, outer)
    return str(table.get(inner, "")) if isinstance(table, Mapping) else ""


def _titled(text: str) -> str:
    """Return the title of the known model whose name is in a text as words of its own; the longest name counts."""
    if not text:
        return ""
    names = {**{re.sub("[^a-z0-9]", "", a.title.lower()): a.title for a in shipped()}, **OTHER_TITLES}
    hits = [name for name in names if _word(name).search(text[:LONGEST].lower())]
    return names[max(hits, key=len)] if hits else ""


@cache
def _word(name: str) -> re.Pattern[str]:
    """Return the pattern of a name between other words, with anything but letters and digits inside it."""
    return re.compile(f"(?<![a-z]){'[^a-z0-9]*'.join(name)}(?![a-z])")
