"""Parts of a model that strengths are stated for, for the second reading: networks, blocks, layers by their path.

A network before a block or a path leaves the others out: `unet IN04`, `te_layers_0`. A path may have `_` for its dots
and the words of the other layout. Of several meanings the first that covers a tensor of the base counts, as
`--strength-for` is documented; where that may be one that is not read here, the part is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from .blocks import BLOCK_NAMES, LIST
from .rows import PARAMETER_ENDINGS, Networks
from .scales import LONGEST_LOOSE_TEXT, MOST_PATTERNS, is_simple

DENOISER: Final = "denoiser"

WORDS: Final = {
    **dict.fromkeys(("unet", "transformer", "denoiser", "dit", "model", "diffusion_model", "model.diffusion_model",
                     "lora_unet", "lora_transformer"), DENOISER),
    **dict.fromkeys(("te", "clip", "text_model", "lora_te"), "te"),
    **dict.fromkeys(("te1", "text_encoder", "text_encoder_1", "lora_te1"), "te1"),
    **dict.fromkeys(("te2", "text_encoder_2", "lora_te2"), "te2"),
    **dict.fromkeys(("te3", "text_encoder_3", "lora_te3"), "te3"),
    **dict.fromkeys(("vae", "first_stage_model", "autoencoder", "lora_vae"), "vae"),
}  # fmt: skip
"""What a network is called → Network.label, or `te` for every text encoder."""

PATH: Final = re.compile(r"([A-Za-z_][\w.]*?)(?:[._]([0-9]+)(?:-([0-9]+))?)?")
MOST_LEVELS: Final = 6  # of the name of a network before a path


class PartMeaning(NamedTuple):
    """One meaning of a part: a path, or blocks with `path` None, in the networks of a word of WORDS or in all ("")."""

    network: str
    text: str
    path: re.Match[str] | None = None
    translated: bool = False  # whether the path is in the words of the other layout


class StrengthParts:
    """The parts of a base, which the strengths of its adapters are stated for."""

    def __init__(self, networks: Networks) -> None:
        self._networks, self._blocks = networks, networks.blocks
        self._keys = frozenset(n.prefix + name for n in networks.networks for name in n.shapes)
        self._first: dict[str, PartMeaning | None] = {}  # part → the meaning that counts

    def strength(self, base: float, parts: Sequence[tuple[str, float]], key: str, network: str) -> float | None:
        """Return an adapter's strength on one tensor of the base; None if a part is unknown. `network`:
        Network.label."""
        if len(parts) > MOST_PATTERNS:
            return None
        for part, value in parts:
            factor = self._factor(part, value, key, network)
            if factor is None:
                return None
            base *= factor
        return base

    def _factor(self, part: str, value: float, key: str, network: str) -> float | None:
        if part not in WORDS and (part.startswith(LIST) or BLOCK_NAMES.fullmatch(part)):
            return self._blocks.factor(part, value, key, network)
        covers = self._covers(part, key, network)
        return None if covers is None else value if covers else 1.0

    def _covers(self, part: str, key: str, network: str) -> bool | None:
        """Return whether an expression, a network, or layers or blocks cover a tensor; None if it is unknown."""
        if part.startswith("re:"):
            return (
                re.search(part[3:], key) is not None if is_simple(part[3:]) and len(key) <= LONGEST_LOOSE_TEXT else None
            )
        if part in WORDS:
            return self._is_of(WORDS[part], network)
        if part in self._keys:
            return part == key
        if part not in self._first:
            self._first[part] = next((m for m in _meanings(part) if self._covers_any(m)), None)
        meaning = self._first[part]
        return self._is_in(meaning, key, network) if meaning is not None else None

    def _covers_any(self, meaning: PartMeaning) -> bool:
        every = self._networks.networks
        return any(self._is_in(meaning, n.prefix + name, n.label) for n in every for name in n.shapes)

    def _is_in(self, meaning: PartMeaning, key: str, network: str) -> bool | None:
        """Return whether a tensor of the base is in the layers or the blocks that a part means."""
        of_network = self._is_of(meaning.network, network) if meaning.network else True
        if not of_network:
            return of_network
        if meaning.path is None:
            factor = self._blocks.factor(meaning.text, 0.0, key, network)
            return None if factor is None else not factor
        if not meaning.translated:
            return _has_levels(meaning.path, key)
        if not meaning.network and not self._blocks.is_of_denoiser(key):
            return False
        names = self._translated.get(key)
        if names is None:
            return False if meaning.path[2] and self._blocks.is_outside_stacks(key) else None
        return any(_has_levels(meaning.path, name) for name in names)

    def _is_of(self, word: str, network: str) -> bool | None:
        """Return whether a network is one that a word means; None if that is not known."""
        network = network or (DENOISER if self._blocks.is_denoiser else "")
        if not network:
            return None
        return network.startswith("te") if word == "te" else network in ((word, "te") if word == "te1" else (word,))

    @cached_property
    def _translated(self) -> dict[str, tuple[str, ...]]:
        """Key of the base → its names in the other layout."""
        names: dict[str, tuple[str, ...]] = {}
        for network in self._networks.networks:
            for module, others in network.other_names.items():
                for end in (
                    end for ends in PARAMETER_ENDINGS.values() for end in ends if module + end in network.shapes
                ):
                    names[f"{network.prefix}{module}{end}"] = tuple(f"{name}.{end[1:]}" for name in others)
        return names


def _meanings(part: str) -> Iterator[PartMeaning]:
    """Yield the meanings of a part: a path, in the words of the base and in the other ones, then the same and blocks
    behind the name of a network, the longest first."""
    ends = [m.start() for m in re.finditer(r"[ ._]", part)][:MOST_LEVELS]
    for network, text in (
        ("", part),
        *((WORDS.get(part[:end].lower(), ""), part[end + 1 :]) for end in reversed(ends)),
    ):
        if text != part and not network:
            continue
        path = PATH.fullmatch(text)
        if path is not None:
            yield PartMeaning(network, text, path)
            yield PartMeaning(network, text, path, translated=True)
        if network and BLOCK_NAMES.fullmatch(text):
            yield PartMeaning(network, text)


def _has_levels(path: re.Match[str], key: str) -> bool:
    """Return whether a name has the levels of a path, with a level behind them; of layers, with a number in the range
    and a level behind it."""
    levels, flat = key.split("."), path[1].replace(".", "_")
    if flat not in key.replace(".", "_"):
        return False
    for start in range(len(levels)):
        for end in range(start + 1, len(levels)):
            if "_".join(levels[start:end]) != flat:
                continue
            if path[2] is None:
                return True
            after = levels[end:]
            if len(after) > 1 and after[0].isdecimal():
                return int(path[2]) <= int(after[0]) <= int(path[3] or path[2])
    return False
