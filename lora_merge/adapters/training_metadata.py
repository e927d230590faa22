"""What trainers write into an adapter's metadata for people: the model that it is for, and its trigger words.

Anybody may have written them, so nothing in them is trusted: a stated model counts only if names and shapes show none,
or says why an adapter may not fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from ..dtypes import Shape
from ..files.checkpoint import Index
from ..models.adapter_architecture import architectures, modules_of
from ..models.architectures import Architecture, shipped
from ..models.names import named_as, of_the_denoiser
from ..text import from_json, is_finite

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

LONGEST_ENTRY: Final = 200  # characters of an entry in which a name is looked for

TRIGGERS: Final = ("modelspec.trigger_phrase", "ss_trigger_words", "trigger_word", "trigger_words", "trigger_phrase")
"""Metadata entries that may hold trigger words."""

NO_VALUES: Final = ("", "None", "null", "{}", "[]")
"""Texts that say that there is no value."""


def made_for(index: Index, modules: Mapping[str, Shape]) -> tuple[Sequence[Architecture], str]:
    """Return the models that an adapter may be for, and what shows it where its names and shapes do not: an entry of
    its metadata, or its names alone. `modules`: module → the shape of its weight, () if it is not known."""
    fitting, (stated, entry_name) = architectures(modules_of(of_the_denoiser(modules))), stated_model(index)
    if stated and (not fitting or (len(fitting) > 1 and any(a.title == stated for a in fitting))):
        return [a for a in shipped() if a.title == stated], entry_name
    by_names = [] if fitting else named_as(modules)
    return (by_names, "its names") if len(by_names) == 1 else (fitting, "")


def stated_model(index: Index) -> tuple[str, str]:
    """Return the title of the model that metadata name, and the entry; ("", "") if they name none that is known."""
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
    hits = [name for name in names if _word(name).search(text[:LONGEST_ENTRY].lower())]
    return names[max(hits, key=len)] if hits else ""


@cache
def _word(name: str) -> re.Pattern[str]:
    """Return the pattern of a name between other words, with anything but letters and digits inside it."""
    return re.compile(f"(?<![a-z]){'[^a-z0-9]*'.join(name)}(?![a-z])")


def trigger_words(index: Index) -> Iterator[str]:
    """Yield the trigger words that the metadata states: of the specification, ai-toolkit and others."""
    texts_before = set(NO_VALUES)
    texts = [index.metadata.get(key, "") for key in TRIGGERS]
    if "training_info" in index.metadata:  # ai-toolkit notes its trigger word as the only tag
        texts += tag_counts(index)
    for text in texts:
        if text not in texts_before:
            texts_before.add(text)
            yield text


def tag_counts(index: Index) -> Counter[str]:
    """Return how often the captions have each tag, over all folders of the data set."""
    counts: Counter[str] = Counter()
    tables = entry(index, "ss_tag_frequency")
    for table in tables.values() if isinstance(tables, Mapping) else ():
        for tag, count in table.items() if isinstance(table, Mapping) else ():
            if is_finite(count) and 0 <= count < 2**53:
                counts[str(tag).strip()] += int(count)
    return counts


def entry(index: Index, key: str) -> Any:
    """Return the value of an entry that holds JSON; None without such an entry, or for text that is not JSON."""
    try:
        return from_json(index.metadata.get(key, "null"))
    except ValueError:
        return None
