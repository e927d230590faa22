"""Which rows of which base tensors does an adapter module mean?

Adapter files name modules in many dialects: dotted or flat, with any of three dozen prefixes, in the words of
the model's authors or of diffusers. The prefix does not tell which words follow, so every prefix is taken off
that can be, and what is left is looked up in tables that hold all spellings of the base's own tensors at
once. A name that fits two places is refused. Nothing here reads weights or imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..algorithms import Shape
from ..errors import AmbiguousName
from ..files.checkpoint import Index
from .architectures import load
from .components import ENCODER_IDS, UNSURE, components
from .fused import Split, splits
from .guess import architectures, described, seen
from .prefixes import DENOISERS, PREFIXES, TRAINING, numbers, prefixed
from .spellings import Component
from .weights import WeightView, transposed, whole
from .wrappers import unwrapped, wrapper_notes

OTHER_ROWS: Final = (
    "in several files is taken for the original, whose rows are in another order than in the single file that is "
    "published"
)
"""What the user should know of a base whose files alone tell the order of its rows."""

AVERAGES: Final = "model_ema."
AVERAGED: Final = f"it also holds averages of its weights ({AVERAGES}*), which stay as they are: load its own weights"
"""What the user should know of a base that training saved twice."""

EXPERTS: Final = {
    "transformer.": "it is for both transformers; the base is taken to be the first (high noise)",
    "transformer_2.": "it is for the second transformer (low noise), which the base is taken to be",
}
"""What names of Wan 2.2's experts in a pipeline begin with → what a base by itself, whose file says nothing of the
kind, is taken for."""

UNKNOWN: Final = "unknown"
"""What a base is called that no table knows and whose configuration names no class."""

REWRITES: Final = (
    (re.compile(rf"(?:^|(?<=\.))(?:{TRAINING}|module|base_layer)\."), ""),
    (re.compile(rf"(?:(?<=_)|^)(?:{TRAINING}|module|base_layer)_"), ""),
    (re.compile(r"[._]base_layer$"), ""),
    (re.compile(r"\.default$"), ""),
    (re.compile(r"\.processor\."), "."),
    (re.compile(r"self_attn\.to_([qkv])$"), r"self_attn.\1_proj"),
    (re.compile(r"self_attn\.to_out$"), "self_attn.out_proj"),
    (re.compile(r"\bto\.([qkv])$"), r"to_\1"),
    (re.compile(r"((?:\.|_)to_out)$"), r"\1.0"),
    (re.compile(r"(?<![a-z])sformer_blocks"), "transformer_blocks"),
)
"""Slips and old habits: wrappers left in, attention processors, four letters cut off. Tried if nothing fits."""

NO_ID: Final = "transformer"
"""What stands in the place of an encoder's name in `text_encoders.transformer.…`: ComfyUI maps that to every encoder
but CLIP (comfy/lora.py, model_lora_keys_clip)."""

NOT_MEANT: Final = {
    "te1": ("clip_g",),
    "te2": ("clip_l", "clip_h"),
    "te3": ("clip_l", "clip_h", "clip_g"),
}
"""What kind of encoder a name cannot mean, where no denoiser says what it means."""


class Names:
    """The names of one base; built once, then asked for every module."""

    def __init__(
        self, parts: Sequence[Component], shapes: Mapping[str, Shape], stored: Mapping[str, str] = MappingProxyType({}),
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.parts = parts
        self._shapes = shapes
        self._config = config
        self._stored = stored  # its names without levels that training left → the keys, where these have some
        self._inner = {key: name for name, key in stored.items()}
        self._prefixes = [
            (prefix, f"@{part.prefix}")
            for part in parts
            for start in dict.fromkeys((part.prefix, part.inner))
            if start
            for prefix in (start, start.replace(".", "_"))
        ]
        self._numbers = numbers((*dict(PREFIXES), *dict(self._prefixes)))
        self._by_pattern: dict[tuple[str, str], list[tuple[int, list[Component]]]] = {}
        self.second = False  # whether the base lies in the folder of a pipeline's second expert
        main = parts[0] if parts else None
        self.known = known = main.architecture if main else None
        self.architecture = known.title if known else (main and main.title) or UNKNOWN
        self.layout = main.layout if main else "as stored"
        in_shards = [p.architecture.title for p in parts if p.architecture and p.sharded and p.other_in_shards]
        self.notes = tuple(f"{title} {OTHER_ROWS}" for title in in_shards)
        if any(key.startswith(AVERAGES) for key in shapes):
            self.notes = (*self.notes, AVERAGED)

    def find(self, module: str, parameter: str = "weight") -> WeightView | None:
        """Return where the weight lies that an adapter calls `module`; None if nowhere, AmbiguousName if in two
        places.
        """
        for name in _written(module):
            views: list[WeightView] = []
            for start, parts in self._readers(name, parameter):
                for view in _look(parts, name[start:], parameter):
                    if view is None or (views and view not in views):
                        raise self._ambiguous(module, parameter, [*views, view])
                    views.append(view)
            if views:
                return self._as_stored(views[0])
        return None

    def _readers(self, name: str, parameter: str) -> Sequence[tuple[int, Sequence[Component]]]:
        """For every reading of a name, where it starts in it, and the components that know names of this pattern.

        Found once for all names that differ in their numbers: 200 000 modules are of some thirty patterns.
        """
        pattern = self._numbers.sub("#", name), parameter
        if pattern not in self._by_pattern:
            readings = [(body, [p for p in self._hinted(hint) if p.knows(body, parameter)])
                        for hint, body in self._readings(name)]  # fmt: skip
            self._by_pattern[pattern] = [(len(name) - len(body), parts) for body, parts in readings if parts]
        return self._by_pattern[pattern]

    def _as_stored(self, view: WeightView | None) -> WeightView | None:
        """Return the place by the keys of the base."""
        if view is None or not self._stored:
            return view
        return WeightView(tuple(p._replace(key=self._stored[p.key]) for p in view.pieces), view.shape)

    def lone_expert(self, modules: Sequence[str]) -> str:
        """Return the prefix of the adapter's names for the base, if that is one of two experts that they speak of;
        else "".
        """
        first, second = EXPERTS
        denoisers = [p for p in self.parts if p.role == "denoiser"]
        alone = len(denoisers) == 1 and denoisers[0].label != "transformer_2"
        if not alone or not any(m.startswith(second) for m in modules):
            return ""
        return first if not self.second and any(m.startswith(first) for m in modules) else second

    def value(self, view: WeightView) -> WeightView:
        """Return the place as a stored value of the parameter has it, in contrast to a factor or difference of the
        weight.

        They differ for GPT-2's Conv1D alone: a LoRA sees `[out, in]`, the parameter itself is `[in, out]`.
        """
        piece = view.pieces[0]
        part = self._part(piece.key)
        own = part.dotted(self.without_wrappers(piece.key).removeprefix(part.prefix)) if part else None
        return transposed(view) if piece.transposed and self._as_stored(own) == view else view

    def recognised(self, key: str) -> bool:
        """Return whether a table knows the network that a base tensor is of."""
        part = self._part(key)
        return part is not None and part.architecture is not None

    def fused(self, view: WeightView) -> dict[str, Split]:
        """Who tells it → rows of every layer that is fused in a weight, in order; empty where nothing tells.

        Of a model that a table knows, the table alone does.
        """
        pieces = [p._replace(key=self.without_wrappers(p.key)) for p in view.pieces]
        found = [part.cut(p) if (part := self._part(p.key)) else () for p in pieces]
        if not all(found):
            return {}
        if sum(map(len, found)) > 1:
            return {f"the table of {self.architecture}": tuple(chain.from_iterable(found))}
        name, shapes = pieces[0].key, self._shapes
        part = self._part(name)
        kind = part.architecture.file.stem if part and part.architecture else ""
        whole_one = whole(name, shapes[name]).pieces == (*pieces,)
        return splits(name, shapes, self._config, kind) if whole_one else {}

    def component(self, key: str) -> str:
        """Return what part of the model a base tensor belongs to: unet, transformer, te, te1, te2, te3, vae, model."""
        part = self._part(key)
        return part.label if part else "model"

    def _part(self, key: str) -> Component | None:
        """Return the network that a base tensor belongs to; None for what is in none that matters."""
        name = self.without_wrappers(key)
        return next((part for part in self.parts if part.keys.get(name.removeprefix(part.prefix)) == name), None)

    def without_wrappers(self, key: str) -> str:
        """Return what a base tensor is called without levels that training left."""
        return self._inner.get(key, key)

    def wanted(self, module: str) -> str:
        """Return what part of a model an adapter's module name speaks of."""
        main = self.parts[0].label if self.parts and self.parts[0].role == "denoiser" else "denoiser"
        for hint, _ in self._readings(module):
            if hint in DENOISERS and hint != "transformer_2":
                return main
            if hint != "any":
                return next((p.label for p in self._hinted(hint)), hint)
        return main

    def weights(self, part: Component | None = None) -> dict[str, Shape]:
        """Return the module → shape of the weight, of one network; of the main one without."""
        part = part or (self.parts[0] if self.parts else None)
        found = {body: self._shapes[key] for body, key in part.keys.items()} if part else {}
        return {body.removesuffix(".weight"): shape for body, shape in found.items() if len(shape) > 1}

    def _readings(self, name: str) -> Iterator[tuple[str, str]]:
        """(what it speaks of, the rest) for the name as it is and with prefixes taken off, outermost first."""
        for hint, body in prefixed(name):
            yield hint, body
            for prefix, own in self._prefixes:
                if body.startswith(prefix):
                    yield own, body[len(prefix) :]

    def _hinted(self, hint: str) -> list[Component]:
        if hint[0] == "@":
            return [p for p in self.parts if p.prefix == hint[1:]]
        if hint == "any":
            return list(self.parts)
        if hint == "vae":
            return [p for p in self.parts if p.label == "vae"]
        if hint in DENOISERS:
            named = [p for p in self.parts if p.label == hint]
            return named or [p for p in self.parts if p.role == "denoiser" and hint != "transformer_2"]
        return self._encoders(hint)

    def _encoders(self, hint: str) -> list[Component]:
        encoders = [p for p in self.parts if p.kind]
        if not encoders and len(self.parts) == 1 and self.parts[0].label == "model" and self.parts[0].architecture:
            return list(self.parts)  # a language model by itself is one, for Z-Image, Lumina, HunyuanVideo …
        known = self.known
        if hint[0] == "=":  # a folder calls none of its encoders so
            return self._by_id(ENCODER_IDS.get(hint[1:], hint[1:]), encoders)
        if known and known.text_encoders:
            kind = known.text_encoders.get(hint)
            called = {label for label, theirs in known.text_encoders.items() if theirs == kind} | {hint}
            return [p for p in encoders if p.kind == kind or (p.kind in UNSURE and p.label in called)]
        if len(encoders) == 1:
            return [p for p in encoders if p.kind not in NOT_MEANT.get(hint, ())]
        return [p for p in encoders if p.label == hint]

    def _by_id(self, kind: str, encoders: Sequence[Component]) -> list[Component]:
        """Return the encoders that ComfyUI calls so; of those that only their place tells apart, the one in that
        place.
        """
        if kind == NO_ID:
            return [p for p in encoders if not p.kind.startswith("clip")]
        unsure = [p for p in encoders if p.kind in UNSURE]
        theirs = self.known.text_encoders if self.known else {}
        placed = [p for p in unsure if theirs.get(p.label) == kind]
        meant = [p for p in encoders if p.kind == kind]
        return meant or placed or (unsure if len(unsure) == 1 else [])

    def _ambiguous(self, module: str, parameter: str, views: Sequence[WeightView | None]) -> AmbiguousName:
        keys = sorted({p.key for v in views if v for p in v.pieces})
        experts = {p.label for p in self.parts if p.role == "denoiser"}
        there = sorted({self.component(key) for key in keys})
        fix = "rename it in the adapter so that it names one of them"
        if len(there) > 1 and experts.issuperset(there):
            fix = f"give the folder of the one that it was trained for as the base: {' or '.join(there)}"
        return AmbiguousName(f"{module} ({parameter}) fits two places", ", ".join(keys) or self.architecture, fix)


def names(index: Index, extra: Path | None = None) -> Names:
    """Return the name tables of a base; `extra` is a user's architecture file. Raises InputError if that is not
    usable.
    """
    stored = unwrapped(index.tensors)
    tensors = {name: index.tensors[key] for name, key in stored.items()} if stored else index.tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    parts = components(shapes, index.config, index.components, load(extra) if extra else None)
    for part in parts:
        files = [tensors[key].file for key in part.keys.values()]
        part.sharded = any(file is not files[0] and file != files[0] for file in files)
    found = Names(parts, shapes, stored, index.config)
    if stored:
        found.notes = (*found.notes, *wrapper_notes(stored))
    found.second = "transformer_2" in index.path.parts[-2:]
    return found


def guess(modules: Mapping[str, Shape]) -> str:
    """Return what an adapter was made for, from its modules' names and the shapes of the weights they change.

    "unknown" if nothing tells, "A or B" if too little does.
    """
    found = seen(of_the_denoiser(modules))
    return described(architectures(found), found)


def of_the_denoiser(modules: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the modules that do not speak of an encoder, without their prefixes."""
    innermost = {module: list(prefixed(module))[-1] for module in modules}
    return {body: modules[m] for m, (hint, body) in innermost.items() if hint in ("any", *DENOISERS)}


def _look(parts: Iterable[Component], body: str, parameter: str) -> list[WeightView | None]:
    """Return all places of a name in these components; those in a denoiser come before all others."""
    found = [(part.role, *part.find(body, parameter)) for part in parts]
    of_denoisers = [view for role, view, known in found if known and role == "denoiser"]
    return of_denoisers or [view for _, view, known in found if known]


def _written(module: str) -> Iterator[str]:
    """Yield the name as it is, then with slips corrected."""
    names = [module]
    yield module
    for pattern, replacement in REWRITES:
        for name in [pattern.sub(replacement, n) for n in names if pattern.search(n)]:
            names.append(name)
            yield name
