"""The strength of an adapter for each tensor: the adapter's own, times the factor of every part with that tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from ..errors import UsageError
from ..job import BLOCKS, Adapter
from ..limits import Refused, Steps
from ..options import BLOCK_LIST, BLOCK_WEIGHTS, REGEX
from ..text import Note, by_pattern, listed, plural
from .blocks import Blocks, blocks, words
from .components import ENCODER_IDS, UNSURE
from .names import Names
from .prefixes import PREFIXES

NEAR: Final = 300  # most tensor names compared with an unknown part, and most characters; a comparison takes 0.3 ms

DENOISER: Final = ("unet", "transformer")
"""Both name the denoiser, whichever it is."""

OTHER_WORDS: Final[Mapping[str, str]] = MappingProxyType({
    **{prefix.strip("._"): hint for prefix, hint in PREFIXES if hint[:2] in ("te", "de", "va")},
    **dict.fromkeys(("denoiser", "dit", "model"), "denoiser"), **dict.fromkeys(("clip", "text_model"), "te"),
    "text_encoder_1": "te1", "autoencoder": "vae",
})  # fmt: skip
"""Name of a network in adapters' names and in other programs → what it means (see PREFIXES)."""

_PATH: Final = re.compile(r"(?P<path>[A-Za-z_][\w.]*?)(?:[._](?P<first>[0-9]{1,6})(?:-(?P<last>[0-9]{1,6}))?)?")
"""Path of a stack, of a layer in it, or of a range of layers: `mid_block`, `down_blocks_1`, `double_blocks.0-9`."""


def on_base(adapter: Adapter, names: Names) -> Adapter:
    """Return an adapter whose parts have the labels of the base's networks: `clip_g` is te2 in Stable Diffusion XL."""
    parts = [(own, factor) for part, factor in adapter.parts for own in labels(part, names)]
    return replace(adapter, parts=tuple(parts))


def labels(part: str, names: Names) -> list[str]:
    """Return the labels of the networks of a base that a part of a model names; the part itself for any other."""
    if part.startswith((REGEX, BLOCK_LIST)):
        return [part]
    found = _called(part.lower(), names)
    if not found or (part != part.lower() and blocks(names).chosen(part)):  # Flux.1 has blocks CLIP and T5
        return [part]
    return found


def _called(word: str, names: Names) -> list[str]:
    """Return the labels of the networks that are called so; [] for none."""
    if word in ("te", *DENOISER) or any(p.label == word for p in names.parts):
        return [word]
    hint = OTHER_WORDS.get(word, word if _ENCODER.fullmatch(word) else "")
    if hint == "te":
        return ["te"]
    if hint:
        return [p.label for p in names.hinted(hint)]
    kind, kinds = ENCODER_IDS.get(word, word), names.known.text_encoders if names.known else {}
    return [p.label for p in names.parts if p.kind == kind or (p.kind in UNSURE and kinds.get(p.label) == kind)]


def networks(part: str, names: Names) -> list[str]:
    """Return the labels of all networks that a part names; the part itself if it names none."""
    found = [p.label for p in names.parts for own in labels(part, names) if _covers_component(own, p.label)]
    return list(dict.fromkeys(found)) or [part]


def _covers_component(part: str, component: str) -> bool:
    """Return whether the label of a part covers a component: `te` all text encoders, `unet` every denoiser."""
    same = part in DENOISER and component in DENOISER
    return part == component or same or (part == "te" and component.startswith("te"))


_ENCODER: Final = re.compile("te[1-9]")


MOST_LEFT_OUT: Final = 6
"""The most patterns of names in one option of a message."""


def leave_out(keys: Iterable[str]) -> str:
    """Return the option with which these weights of the base stay as they are; "" for too many kinds of them."""
    patterns = list(by_pattern(keys))
    expression = "|".join(re.escape(p).replace(r"\{i\}", "[0-9]+") for p in patterns)
    return f"--strength-for 're:^(?:{expression})$=0'" if len(patterns) <= MOST_LEFT_OUT else ""


class Strengths:
    """One adapter's strength on one base, tensor by tensor."""

    def __init__(self, adapter: Adapter, names: Names, steps: Steps) -> None:
        """Prepare the parts of one adapter. `steps`: how long all regular expressions of the job may search."""
        self.path, self.strength = adapter.path, adapter.strength
        self._parts, self._steps, self._names = adapter.parts, steps, names
        self._whole = {part for part, _ in self._parts if any(_covers_component(part, p.label) for p in names.parts)}
        known = {"te", *DENOISER, *(p.label for p in names.parts)}
        named = [part for part, _ in self._parts if part not in known and _is_block(part)]
        self._blocks: Blocks | None = blocks(names) if named else None
        self._weights = {part: self._weighted(part, self._blocks) for part in named if self._blocks}
        self._words: Mapping[str, str] | None = None  # key → its name in diffusers' words
        self._set_to_0: dict[str, None] = {}  # keys whose strength was asked for and is 0
        self._used: set[str] = set()  # parts that a strength which was asked for has depended on

    def factor(self, key: str, component: str) -> float:
        """Return the strength for one tensor of the base. `key`: its name in the base; `component`: its network."""
        found = self.strength
        self._steps.allow()
        block = self._blocks.of(key) if self._blocks else ""
        for part, value in self._parts:
            if part in self._weights:
                if block not in self._weights[part]:
                    continue
                found *= value * self._weights[part][block]
            elif self._covers(part, key, component):
                found *= value
            else:
                continue
            self._used.add(part)
        if not found:
            self._set_to_0[key] = None
        return found

    def notes(self, keys: Iterable[str]) -> Iterator[Note]:
        """Yield notes on lists of block weights where other programs treat some changed tensors differently.

        `keys`: the tensors that the adapter changes, without those whose strength is 0.
        """
        base, keys = self._blocks, [*dict.fromkeys((*keys, *self._set_to_0))]
        for part in (p for p, _ in self._parts if base and p.startswith(BLOCK_LIST)):
            assert base is not None, "there are block weights"
            value = part.removeprefix(BLOCK_LIST)
            if loose := [key for key in keys if base.loose(key)]:
                yield Note(
                    f"lbw={value[:40]}: {plural(len(loose), 'weight')} in no block, such as {loose[0]}: embeddings of "
                    f"time and labels count as {base.order[0]}, the output as {base.order[-1]}; webui leaves them at 1"
                )
            unnamed = base.unnamed(value)
            if silent := [key for key in keys if base.of(key) in unnamed and not base.loose(key)]:
                yield Note(f"lbw={value[:40]}: the list names no {listed(sorted({base.of(k) for k in silent}), 4)}: "
                       f"{plural(len(silent), 'weight')} of the adapter get 0")  # fmt: skip

    def repeated(self) -> Iterator[Note]:
        """Yield notes on parts that are named more than once."""
        for part, count in Counter(part for part, _ in self._parts).items():
            if count > 1:
                yield Note(f"{_as_typed(part)} is named {count} times: its factors are multiplied")

    def check(self, components: Mapping[str, str]) -> None:
        """Raise UsageError for a part that covers no tensor of the base. `components`: key → component."""
        for part, _ in self._parts:
            if part in self._weights or self._covers_any(part, components):
                continue
            if self._words is None and _PATH.fullmatch(part):
                self._words = words(self._names)
                if self._covers_any(part, components):
                    continue
            raise self._unknown(part, [*components], set(components.values()))

    def _covers_any(self, part: str, components: Mapping[str, str]) -> bool:
        self._steps.allow(len(components))
        return any(self._covers(part, key, of) for key, of in components.items())

    def _unknown(self, part: str, keys: Sequence[str], known: Collection[str]) -> UsageError:
        """Return the error for a part that the base does not have."""
        order = blocks(self._names).order
        every = {name.lower(): name for name in (*sorted(known), *order)}
        near = [every[name] for name in get_close_matches(part[:NEAR].lower(), every, 2, 0.75)]
        fix = f"did you mean {' or '.join(near)}? " if near else ""
        if part.startswith(REGEX):
            similar = get_close_matches(part.removeprefix(REGEX)[:NEAR], keys[:NEAR], 2, 0.0)
            fix = f"names of tensors are such as {', '.join(similar)}; "
        fix += f"this base has {listed(sorted(known), 6)}, and the blocks {listed(order, 12)}"
        where = f"--strength-for {part[:80]}"
        return UsageError("the base has no such part or block", where, f"{fix}; lora-merge parts BASE lists all")

    def _weighted(self, part: str, base: Blocks) -> Mapping[str, float]:
        """Return block → factor for a part that names blocks; UsageError if the base lacks such a block."""
        where = f"--strength-for {part[:80].replace(BLOCK_LIST, 'lbw=', 1)}"
        if part.startswith(BLOCK_LIST):
            return base.weights(part.removeprefix(BLOCK_LIST), where)
        if chosen := base.chosen(part):
            return dict.fromkeys(chosen, 1.0)
        raise self._unknown(part, [], {p.label for p in self._names.parts})

    def _covers(self, part: str, key: str, component: str) -> bool:
        """Return whether a part that names no blocks covers a tensor of the base.

        `te` covers every text encoder; `transformer` and `unet` both name the denoiser. The name of a network that the
        base has is no path: text encoders have keys such as `cond_stage_model.transformer.text_model`.
        """
        if part.startswith(REGEX):
            return self._matches(part.removeprefix(REGEX), key)
        if part in self._whole:
            return _covers_component(part, component)
        if path := _PATH.fullmatch(part):
            return _lies_in(path, key) or (self._words is not None and _lies_in(path, self._words.get(key, "")))
        return False

    def _matches(self, expression: str, key: str) -> bool:
        try:
            return self._steps.pattern(expression).matches(key, self._steps, anywhere=True)
        except Refused as e:
            where = f"--strength-for re:{expression[:80]}, at {key[:80]!r}"
            raise UsageError(f"a regular expression that is {e}", where, "use a plain part, or a simpler one") from e


def idle_parts(every: Sequence[Strengths]) -> Iterator[tuple[int, Note]]:
    """Yield the number of an adapter and a note for each part by which no strength of any adapter has changed."""
    named = {part: n for n, one in reversed([*enumerate(every)]) for part, _ in one._parts}
    for part, n in named.items():
        if not any(part in one._used for one in every):
            yield n, Note(f"{_as_typed(part)} has no effect: no adapter changes weights there")


def _as_typed(part: str) -> str:
    return part.replace(BLOCK_LIST, f"{BLOCK_WEIGHTS}=", 1)[:80]


def _is_block(part: str) -> bool:
    return part.startswith(BLOCK_LIST) or BLOCKS.fullmatch(part) is not None


def _lies_in(path: re.Match[str], name: str) -> bool:
    """Return whether a tensor of this name lies in a stack, or in one of its layers."""
    if path["first"] is None:
        return re.search(rf"(?:^|\.){re.escape(path['path'])}\.", name) is not None
    found = re.search(rf"(?:^|\.){re.escape(path['path'])}\.([0-9]{{1,9}})\.", name)
    return found is not None and int(path["first"]) <= int(found[1]) <= int(path["last"] or path["first"])
