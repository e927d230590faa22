"""The parts of a model that options name, one notion for all of them: `--strength-for`, `--rank-for`, `--include`,
`--exclude` and `--keep-precision`.

A part is a network (`te`, `unet`), a block or several (`IN04`, `IN04-IN08`), a list of block weights, the path of a
stack or of layers in it (`double_blocks.0-9`), `re:REGEX` that is searched in names, or a name, also with * and ?. A
network before a block or a path leaves the others out: `unet IN04`, `te_layers_0`. The names are keys of the base;
without a base they are the adapter's, and blocks are not known. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import Final

from ..errors import PartWithoutEffect, UsageError
from ..job import BLOCK_NAMES
from ..options import BLOCK_LIST, BLOCK_WEIGHTS, REGEX
from ..safe_regex import Refused, Steps
from ..text import listed
from .blocks import BASE_BLOCK, ENCODER_BLOCKS, Blocks, blocks, words
from .components import ENCODER_IDS, UNSURE
from .inferred_base import OF_KIND
from .names import Names
from .prefixes import DENOISERS, PREFIXES

MOST_COMPARED: Final = (
    300  # most tensor names compared with an unknown part, and most characters; a comparison takes 0.3 ms
)

DENOISER_PARTS: Final = ("unet", "transformer")
"""Both name the denoiser, whichever it is."""

OTHER_WORDS: Final[Mapping[str, str]] = MappingProxyType({
    **{prefix.strip("._"): hint for prefix, hint in PREFIXES if hint[:2] in ("te", "de", "va")},
    **dict.fromkeys(("denoiser", "dit", "model"), "denoiser"), **dict.fromkeys(("clip", "text_model"), "te"),
    "text_encoder_1": "te1", "autoencoder": "vae",
})  # fmt: skip
"""Name of a network in adapters' names and in other programs → what it means (see PREFIXES)."""

ABSENT: Final = "the base has no such part or block"
NOT_CHANGED: Final = "a part without effect: no adapter changes weights there"
"""What is wrong with a part, by what it was looked for in."""

_PATH: Final = re.compile(r"(?P<path>[A-Za-z_][\w.]*?)(?:[._](?P<first>[0-9]{1,6})(?:-(?P<last>[0-9]{1,6}))?)?")
"""Path of a stack, of a layer in it, or of a range of layers: `mid_block`, `down_blocks_1`, `double_blocks.0-9`."""

_ENCODER: Final = re.compile("te[1-9]")

_AUTHORS: Final = re.compile(r"(?P<stack>input|output)_blocks[._](?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?|middle_block")
"""Blocks of a U-Net as its authors name them, which a base in diffusers' layout has under other names."""

_LEVEL: Final = re.compile("[ ._]")
MOST_LEVELS: Final = 6  # of the beginning of a part that may be the name of a network: `lora_prior_unet`


@dataclass(frozen=True)
class _Reading:
    """One meaning of a part: layers by their path, or blocks, of some networks or of any."""

    networks: Sequence[str] | None
    is_in: Callable[[str], bool]

    def covers(self, key: str, network: str) -> bool:
        return self.is_in(key) and (self.networks is None or _any_covers(self.networks, network))


class Parts:
    """The parts that one option names, looked up in one model."""

    def __init__(
        self, option: str, texts: Iterable[str], names: Names | None = None, networks: Collection[str] = (),
        steps: Steps | None = None,
    ) -> None:  # fmt: skip
        """Look up the parts; UsageError for an expression that is not run, and for a block that the base lacks.

        Parameters:
            option: The option, for messages.
            texts: The parts as the user writes them.
            names: The names of the base; None without a base.
            networks: Without a base, the networks that the prefixes of the adapter's names mean.
            steps: How long all regular expressions of the job may search.
        """
        self.option, self.texts = option, tuple(dict.fromkeys(texts))
        self._names, self._steps = names, steps or Steps()
        self._known = {part.label for part in names.parts} if names else {*networks}
        for text in self.texts:
            self._expression(text)
        self._networks = {text: matches for text in self.texts if (matches := self._named(text))}
        named = [text for text in self.texts if names and text not in self._networks and _is_block(text)]
        self.blocks: Blocks | None = blocks(names) if names and named else None
        weights = {text: self._weighted(text, self.blocks) for text in named if self.blocks}
        self._weights = {text: matches for text, matches in weights.items() if matches}
        self._readings = {text: self._meaning(text) for text in self.texts if text not in {**self._networks, **weights}}

    def factor(self, text: str, key: str, network: str) -> float | None:
        """Return the weight of a tensor in a part, 1 but in lists of block weights; None if it is not in the part."""
        if text in self._weights:
            return self._weights[text].get(self.blocks.of(key) if self.blocks else "")
        return 1.0 if self._covers(text, key, network) else None

    def cover(self, keys: Iterable[str], network: str) -> bool:
        """Return whether a tensor, which may have several names, is in one of the parts."""
        keys = [*keys]
        self._steps.allow(len(keys))
        return any(self.factor(text, key, network) is not None for text in self.texts for key in keys)

    def names_network(self, text: str) -> bool:
        """Return whether a part is a network of the model."""
        return text in self._networks

    def absent(self, networks: Mapping[str, str]) -> list[str]:
        """Return the parts that cover none of these tensors. `networks`: key → its network."""
        return [text for text in self.texts if not self._covers_any(text, networks)]

    def check(self, networks: Mapping[str, str], what: str) -> None:
        """Raise UsageError if a part covers none of these tensors; `what` says what these are."""
        for text in self.absent(networks):
            raise self.refusal(text, what, networks)

    def refusal(
        self, text: str, what: str, networks: Mapping[str, str] = MappingProxyType({})
    ) -> PartWithoutEffect:  # fmt: skip
        """Return the error for a part without effect. `networks`: the tensors that it might cover → their networks."""
        order = blocks(self._names).order if self._names else ()
        known = {*networks.values()} or self._known
        every = {name.lower(): name for name in (*sorted(known), *order)}
        alike = get_close_matches(text[:MOST_COMPARED].lower(), every, 2, 0.75) if text.lower() not in every else ()
        near = [every[name] for name in alike]
        keys = self._names.shapes if self._names and text.lower() not in every else ()
        if not near and re.fullmatch(r"\w{2,}", text) and any(text in key for key in keys):
            near = [f"*{text}*"]
        fix = f"did you mean {' or '.join(near)}? " if near else ""
        if text.startswith(REGEX) and networks:
            similar = get_close_matches(text.removeprefix(REGEX)[:MOST_COMPARED], [*networks][:MOST_COMPARED], 2, 0.0)
            fix = f"names of tensors are such as {', '.join(similar)}; "
        if order:
            fix += f"this base has {listed(sorted(known), 6)}, and the blocks {listed(order, 12)}"
            fix += "; `lora-merge parts BASE` lists all"
        else:
            fix += f"its parts are {listed(sorted(known), 6)}, or re:REGEX of its names; blocks are known with --base"
        error = PartWithoutEffect(what, f"`{self.option} {as_typed(text)}`", fix).of(self.option, text)
        return error.instead(text, near[0]) if near else error

    def _covers_any(self, text: str, networks: Mapping[str, str]) -> bool:
        self._steps.allow(len(networks))
        return any(self.factor(text, key, network) is not None for key, network in networks.items())

    def _covers(self, text: str, key: str, network: str) -> bool:
        """Return whether a part that names no blocks covers a tensor.

        `te` covers every text encoder; `transformer` and `unet` both name the denoiser. The name of a network that the
        base has is no path: text encoders have keys such as `cond_stage_model.transformer.text_model`.
        """
        if text in self._networks:
            return _any_covers(self._networks[text], network)
        if text == key:
            return True
        if text.startswith(REGEX) or _is_glob(text):
            return self._matches(text, key)
        return any(reading.covers(key, network) for reading in self._readings.get(text, ()))

    def _meaning(self, text: str) -> Sequence[_Reading]:
        """Return what a path, or a network with a path or a block, means: of a base, the first reading that covers one
        of its tensors; without a base, all of them."""
        if text.startswith((REGEX, BLOCK_LIST)) or _is_glob(text):
            return ()
        readings = self._possible(text)
        if self._names is None:
            return [*readings]
        component, keys = self._names.component, self._names.shapes
        covering = (r for r in readings if any(r.is_in(key) and r.covers(key, component(key)) for key in keys))
        return [*islice(covering, 1)]

    def _possible(self, text: str) -> Iterator[_Reading]:
        """Yield the readings of a part: as a path, in the words of the base and in those of diffusers, as a block in
        its authors' words, and the same of the rest behind the name of a network."""
        levels = [m.start() for m in _LEVEL.finditer(text)][:MOST_LEVELS]
        within = [(self._network(text[:at]), text[at + 1 :]) for at in reversed(levels)]
        for networks, rest in [(None, text), *((networks, rest) for networks, rest in within if networks)]:
            if path := _PATH.fullmatch(rest):
                yield _Reading(networks, _layers(path, "[._]" if self._names is None else r"\."))
            if self._names is None:
                continue
            if path:
                main = [part.label for part in self._names.parts[:1]]
                yield _Reading(networks or main, partial(self._is_spelled, _layers(path, r"\.")))
            if networks is not None and BLOCK_NAMES.fullmatch(rest):
                yield _Reading(networks, partial(self._is_in_block, self._base_blocks.chosen(rest)))
            elif blocks_of_path := self._in_authors_words(rest):
                yield _Reading(networks, partial(self._is_in_path, blocks_of_path))

    def _in_authors_words(self, text: str) -> frozenset[str]:
        """Return the blocks of a U-Net that a text names in its authors' words."""
        authors = _AUTHORS.fullmatch(text)
        if authors is None or "M00" not in self._base_blocks.order:
            return frozenset()
        stack = {"input": "IN", "output": "OUT"}.get(authors["stack"], "")
        first, last = authors["first"], authors["last"]
        return self._base_blocks.chosen(f"{stack}{first}-{last or first}" if stack else "M00")

    def _is_spelled(self, inside: Callable[[str], bool], key: str) -> bool:
        return inside(self._words.get(key, ""))

    def _is_in_block(self, chosen: Collection[str], key: str) -> bool:
        return self._base_blocks.of(key) in chosen

    def _is_in_path(self, chosen: Collection[str], key: str) -> bool:
        """Return the same without the output of the model, which counts as a block only if a list has no other."""
        return self._is_in_block(chosen, key) and not self._base_blocks.loose(key)

    @cached_property
    def _words(self) -> Mapping[str, str]:
        """Key → its name in diffusers' words."""
        return words(self._names) if self._names else {}

    @cached_property
    def _base_blocks(self) -> Blocks:
        assert self._names is not None, "blocks are those of a base"
        return self.blocks or blocks(self._names)

    def _network(self, word: str) -> list[str]:
        """Return the networks of the model that a word names, also networks that it lacks; [] for another word."""
        return self._named(word) or ([word] if hint_of(word) else [])

    def _named(self, text: str) -> list[str]:
        """Return the networks of the model that a part names; [] if it names none."""
        if text.startswith((REGEX, BLOCK_LIST)) or _is_glob(text):
            return []
        if self._names is None:
            return by_prefix(text, self._known)
        names = labels(text, self._names)
        return names if any(_covers_component(name, label) for name in names for label in self._known) else []

    def _weighted(self, text: str, base: Blocks) -> Mapping[str, float]:
        """Return block → factor for a part that names blocks, {} for the name of a network that the base lacks;
        UsageError if the base lacks such a block."""
        where = f"`{self.option} {as_typed(text)}`"
        if text.startswith(BLOCK_LIST):
            return base.weights(text.removeprefix(BLOCK_LIST), where)
        if chosen := base.chosen(text):
            return dict.fromkeys(chosen, 1.0)
        if hint_of(text):
            return {}
        raise self.refusal(text, ABSENT)

    def _expression(self, text: str) -> None:
        """Raise UsageError for an expression that is not run."""
        try:
            if text.startswith(REGEX):
                self._steps.pattern(text.removeprefix(REGEX))
        except Refused as e:
            where = f"`{self.option} {as_typed(text)}`"
            raise UsageError(f"the regular expression is {e}", where, "correct the pattern") from e

    def _matches(self, text: str, key: str) -> bool:
        """Return whether a regular expression is found in a name, or a glob is all of it."""
        anywhere = text.startswith(REGEX)
        plain = re.escape(text).replace(r"\*", ".*").replace(r"\?", ".") + r"\Z"
        try:
            pattern = self._steps.pattern(text.removeprefix(REGEX) if anywhere else plain)
            return pattern.matches(key, self._steps, anywhere=anywhere)
        except Refused as e:
            where = f"{self.option} {as_typed(text)}, at {key[:80]!r}"
            raise UsageError(f"a regular expression that is {e}", where, "use a plain part, or a simpler one") from e


def labels(part: str, names: Names) -> list[str]:
    """Return the labels of the networks of a base that a part of a model names; the part itself for any other."""
    if part.startswith((REGEX, BLOCK_LIST)):
        return [part]
    names_of_part = _called(part.lower(), names)
    if not names_of_part or (part != part.lower() and blocks(names).chosen(part)):  # Flux.1 has blocks CLIP and T5
        return [part]
    return names_of_part


def _called(word: str, names: Names) -> list[str]:
    """Return the labels of the networks that are called so; [] for none."""
    if word in ("te", *DENOISER_PARTS) or any(p.label == word for p in names.parts):
        return [word]
    hint = OTHER_WORDS.get(word, word if _ENCODER.fullmatch(word) else "")
    if hint == "te":
        return ["te"]
    if hint:
        return [p.label for p in names.hinted(hint)]
    kind, kinds = ENCODER_IDS.get(word, word), names.known.text_encoders if names.known else {}
    return [p.label for p in names.parts if p.kind == kind or (p.kind in UNSURE and kinds.get(p.label) == kind)]


def _covers_component(part: str, component: str) -> bool:
    """Return whether the label of a part covers a component: `te` all text encoders, `unet` every denoiser."""
    same = part in DENOISER_PARTS and component in DENOISER_PARTS
    return part == component or same or (part == "te" and component.startswith("te"))


def by_prefix(word: str, hints: Collection[str], encoders: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return which networks, of those that prefixes of names mean, a word names. `hints`: see PREFIXES; `encoders`: of
    the model, name of an encoder in adapters → its kind."""
    known = hint_of(word)
    of_denoiser = {*DENOISER_PARTS, "denoiser", "prior"}
    same = of_denoiser if known in of_denoiser else {known}
    if known == "te":
        same = {hint for hint in hints if hint.startswith(("te", "="))}
    elif known == "te1":
        same = {*same, "te"}
    if kind := _kind(known, encoders):
        same |= {hint for hint in hints if _kind(hint, encoders) == kind}
    return sorted(same.intersection(hints))


def _kind(hint: str, encoders: Mapping[str, str]) -> str:
    """Return the kind of a text encoder; "" if it is not known."""
    return ENCODER_IDS.get(hint[1:], hint[1:]) if hint[:1] == "=" else encoders.get(hint, "")


def hint_of(word: str) -> str:
    """Return the network that a word means in any model, as PREFIXES has it, with "=" before the kind of a text
    encoder; "" for what is no such word. All of a network that is one block has its name too: `te BASE`."""
    network, _, block = word.partition(" ")
    word = OTHER_WORDS.get(network.lower(), network.lower())
    if block.upper() not in ("", BASE_BLOCK, *ENCODER_BLOCKS):
        return ""
    if (kind := ENCODER_IDS.get(word, word)) in OF_KIND:
        return f"={kind}"
    return word if word in ("te", "vae", *DENOISER_PARTS, *DENOISERS) or _ENCODER.fullmatch(word) else ""


def as_typed(text: str) -> str:
    """Return a part as the user writes it."""
    return text.replace(BLOCK_LIST, f"{BLOCK_WEIGHTS}=", 1)[:80]


def _is_block(text: str) -> bool:
    return text.startswith(BLOCK_LIST) or BLOCK_NAMES.fullmatch(text) is not None


def _is_glob(text: str) -> bool:
    return not text.startswith((REGEX, BLOCK_LIST)) and ("*" in text or "?" in text)


def _any_covers(parts: Iterable[str], component: str) -> bool:
    return any(_covers_component(part, component) for part in parts)


def _layers(path: re.Match[str], dot: str) -> Callable[[str], bool]:
    """Return whether a tensor of a name is in a stack, or in one of its layers; in the path, `_` may be a dot.

    `dot`: what separates the levels of names.
    """
    levels, end = re.sub(r"[._]", "[._]", path["path"]), r"\." if dot == r"\." else rf"(?:{dot}|$)"
    if path["first"] is None:
        stack = re.compile(rf"(?:^|{dot}){levels}{end}")
        return lambda name: stack.search(name) is not None
    layer = re.compile(rf"(?:^|{dot}){levels}{dot}([0-9]{{1,9}}){end}")
    first, last = int(path["first"]), int(path["last"] or path["first"])
    return lambda name: (match := layer.search(name)) is not None and first <= int(match[1]) <= last
