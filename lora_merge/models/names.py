"""Module name of an adapter → rows of base tensors.

Adapter files name modules in many dialects: dotted or flat, with any of three dozen prefixes, in the words of the
model's authors or of diffusers. The prefix does not determine the words behind it. So every known prefix is removed,
and the rest of the name is looked up in tables with all spellings of the base's own tensors. A name that fits two
places is refused. Nothing here reads weights or imports torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..dtypes import Shape
from ..errors import AmbiguousName
from ..files.checkpoint import Index
from ..files.file_signatures import CHECKPOINT_WITH, PIPELINE_PARTS, component, foreign
from ..text import Note, plural
from .adapter_architecture import architectures, modules_of, named_so
from .architectures import Architecture, load
from .components import ENCODER_IDS, UNSURE, components, stated_class
from .fused_weights import Split, parts_of, splits
from .network import Component
from .prefixes import DENOISERS, PREFIXES, TRAINING_WRAPPERS, innermost, numbers, prefixed, unwrapped, wrapper_notes
from .weights import WeightView, as_matrices, stacked, transposed, whole

OTHER_ROWS: Final = (
    "in several files is taken for the original, whose rows are in another order than in the single file that is "
    "published"
)
"""Note on a base whose order of rows is known from its number of files only."""

AVERAGES: Final = "model_ema."
AVERAGED: Final = Note(
    f"it also holds averages of its weights ({AVERAGES}*), which stay as they are: load its own weights"
)
"""Note on a base that also holds averaged weights."""

WAN_EXPERTS: Final = {
    "transformer.": Note("it is for both transformers; the base is taken to be the first (high noise)"),
    "transformer_2.": Note("it is for the second transformer (low noise), which the base is taken to be"),
}
"""Prefix of the names of one of Wan 2.2's experts → note on which expert a single base, whose file does not state it,
is taken to be."""

TEXT_ENCODER: Final = re.compile(r"te\d?")

CLASS_ENDS: Final = re.compile(r"(?:For[A-Z]\w+|LMHeadModel|Model|2DModel|Transformer\w*)$")
"""End of the name of a model's class: `LlamaForCausalLM` is Llama."""

LONGEST_LEVEL: Final = 100  # letters of what all names of a base may begin with

UNKNOWN_TITLE: Final = "unknown"
"""Title of a base without an architecture file whose configuration names no class."""

NAME_REWRITES: Final = (
    (re.compile(rf"(?:^|(?<=\.))(?:{TRAINING_WRAPPERS}|module|base_layer)\."), ""),
    (re.compile(rf"(?:(?<=_)|^)(?:{TRAINING_WRAPPERS}|module|base_layer)_"), ""),
    (re.compile(rf"[._](?:{TRAINING_WRAPPERS}|module|base_layer)$"), ""),
    (re.compile(r"\.default$"), ""),
    (re.compile(r"\.processor\."), "."),
    (re.compile(r"self_attn\.to_([qkv])$"), r"self_attn.\1_proj"),
    (re.compile(r"self_attn\.to_out$"), "self_attn.out_proj"),
    (re.compile(r"\bto\.([qkv])$"), r"to_\1"),
    (re.compile(r"((?:\.|_)to_out)$"), r"\1.0"),
    (re.compile(r"(?<![a-z])sformer_blocks"), "transformer_blocks"),
)
"""Corrections for names that fit nothing: wrappers left in, attention processors, four letters cut off."""

NO_ID: Final = "transformer"
"""The level in place of an encoder's name in `text_encoders.transformer.…`: ComfyUI maps such names to every encoder
but CLIP (comfy/lora.py, model_lora_keys_clip)."""

MOST_PLACES: Final = 2**14
"""Names whose places are kept."""

MOST_COMPARED_LEVELS: Final = 32
"""The most levels of a name that is compared with others level by level."""

NOT_MEANT: Final = {"te1": ("clip_g",), "te2": ("clip_l", "clip_h"), "te3": ("clip_l", "clip_h", "clip_g")}
"""Name of an encoder → kinds that it cannot mean in a base without a known denoiser."""


class Names:
    """The names of one base; built once, used for every module."""

    def __init__(  # noqa: PLR0913  # what a base says of itself
        self, parts: Sequence[Component], shapes: Mapping[str, Shape], stored: Mapping[str, str] = MappingProxyType({}),
        config: Mapping[str, Any] = MappingProxyType({}), *, second: bool = False,
        presets: Mapping[str, str] = MappingProxyType({}), renames: Sequence[tuple[re.Pattern[str], str]] = (),
    ) -> None:  # fmt: skip
        self.parts = parts
        self.second = second  # whether the base is in the folder of a pipeline's second expert
        self.presets = presets  # the user's lists of block weights
        self._renames = renames  # the user's names: pattern → template
        self.shapes = shapes
        self._config = config
        self._stored = stored  # name without wrappers → key; empty if no key has any
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
        self._places: dict[tuple[str, str], WeightView | None] = {}  # for adapters whose names are the same
        main = parts[0] if parts else None
        self.known = known = main.architecture if main else None
        self.architecture = known.title if known else (main and main.title) or UNKNOWN_TITLE
        self.layout = main.layout if main else "as stored"
        in_shards = [p.architecture.title for p in parts if p.architecture and p.sharded and p.other_in_shards]
        self.notes = tuple(Note(f"{title} {OTHER_ROWS}") for title in in_shards)
        if any(key.startswith(AVERAGES) for key in shapes):
            self.notes = (*self.notes, AVERAGED)
        self.notes = (*self.notes, *(wrapper_notes(stored) if stored else ()))

    @cached_property
    def outer_level(self) -> str:
        """What all names of an unknown main network begin with, where they are those of a known model without it; else
        ""."""
        keys = [*self.parts[0].keys.values()] if self.parts else []
        level = "" if self.known or len(keys) < 2 else commonprefix(keys)  # noqa: RUF071  # of names
        for dot in (at for at, letter in enumerate(level[:LONGEST_LEVEL]) if letter == "."):
            inner = {key[dot + 1 :]: self.shapes[key] for key in keys}
            if components(inner, {}, (), None)[0].architecture is not None:
                stored = self._stored.get(keys[0], keys[0])
                return stored[: len(stored) - len(keys[0]) + dot + 1]
        return ""

    @cached_property
    def what(self) -> str:
        """What the file is: the title of its model, or "a VAE (AutoencoderKL)", "an upscaler (ESRGAN)", "a checkpoint
        with a text encoder and 2 tensors of unknown names"."""
        title, part = self.architecture, PIPELINE_PARTS.get(self.parts[0].role, "") if self.parts else ""
        if other := foreign(self.shapes):
            return other
        if title != UNKNOWN_TITLE and not part:
            return title
        known = Counter(PIPELINE_PARTS[p.role] for p in self.parts if p.role in PIPELINE_PARTS)
        if known and not part:
            strange = [key for p in self.parts if p.role not in PIPELINE_PARTS for key in p.keys.values()]
            networks = (f"a {name}" if count == 1 else plural(count, name) for name, count in known.items())
            some = plural(len(strange), "tensor of an unknown name", "tensors of unknown names")
            return f"{CHECKPOINT_WITH}{', '.join(networks)} and {some} (such as {strange[0]})"
        of_title = title if part in title else f"{part} ({title})"
        what = of_title if title != UNKNOWN_TITLE else part or component(self.shapes)
        return f"{'an' if what.startswith(tuple('aeiou')) else 'a'} {what}" if what else UNKNOWN_TITLE

    @property
    def title(self) -> str:
        """What the model is: its architecture; of a kind of model also the class that its configuration states."""
        stated = CLASS_ENDS.sub("", stated_class(self._config))
        return f"{stated} ({self.architecture})" if stated and self.architecture[:1].islower() else self.architecture

    def same_as(self, other: Names) -> bool:
        """Return whether every name means the same in another base."""
        facts, others = (
            (n.parts, n.shapes, [*n.shapes], n._stored, n._config, n.second, n.presets, n._renames)
            for n in (self, other)
        )
        return facts == others

    def find(self, module: str, parameter: str = "weight") -> WeightView | None:
        """Return the rows that an adapter calls `module`; None if no rows fit, AmbiguousName if two places do.

        A fused layer that the base does not have is the rows of its layers, in order.
        """
        if self._renames:
            module = next((m.expand(new) for pattern, new in self._renames if (m := pattern.fullmatch(module))), module)
        if (view := self._place(module, parameter)) is not None:
            return view
        views = [view for name in parts_of(module) if (view := self._find(name, parameter)) is not None]
        complete = views and len(views) == len(parts_of(module))
        return stacked(views) if complete and not any(p.transposed for v in views for p in v.row_slices) else None

    def only(self, module: str, parameter: str = "weight") -> WeightView | None:
        """Return the rows of a name that has one place; None if it has none or several."""
        try:
            return self.find(module, parameter)
        except AmbiguousName:
            return None

    def _place(self, module: str, parameter: str) -> WeightView | None:
        """Return what `_find` does, from what it has returned before if possible."""
        places, name = self._places, (module, parameter)
        if name not in places:
            if len(places) >= MOST_PLACES:
                self._places = places = {}  # another thread may read the old ones
            places[name] = self._find(module, parameter)
        return places[name]

    def _find(self, module: str, parameter: str) -> WeightView | None:
        for name in written(module):
            views: list[WeightView] = []
            for start, parts in self._readers(name, parameter):
                for view in _look(parts, name[start:], parameter):
                    if view is None or (views and view not in views):
                        raise self._ambiguous(module, parameter, [*views, view])
                    views.append(view)
            if views:
                if twins := self._twins_of(views[0], module):
                    raise self._ambiguous(module, parameter, [*views, *twins])
                return self.as_stored(views[0])
        return None

    def without(self, labels: Collection[str]) -> Names:
        """Return the names of the same base without some of its networks."""
        left = [part for part in self.parts if part.label not in labels]
        return Names(left, self.shapes, self._stored, self._config, second=self.second, presets=self.presets,
                     renames=self._renames)  # fmt: skip

    def _twins_of(self, view: WeightView, module: str) -> list[WeightView]:
        """Return the twins of a weight, if a name has the prefix of a network and the base does not show which of its
        layers are that network's: one model may hold two, such as `self_attn` and `nar_self_attn` of YuE2."""
        if not self.has_twins:
            return []
        keys = {key for piece in view.row_slices for key in self._twins.get(piece.key, ())}
        return [whole(key, self.shapes[key]) for key in sorted(keys)] if innermost(module)[0] != "any" else []

    @cached_property
    def has_twins(self) -> bool:
        """Whether the prefix of a network may mean either of two like layers in the only network of the base."""
        return len(self.parts) == 1 and self.parts[0].label == "model" and bool(self._twins)

    @cached_property
    def _twins(self) -> Mapping[str, Sequence[str]]:
        """Key → the keys of equal shape that differ from it by a word at the front of one level, in both directions."""
        twins: dict[str, list[str]] = {}
        known = {level for key in self.shapes for level in key.split(".")}
        shorter = {level: rest for level in known if "_" in level and (rest := level.partition("_")[2]) in known}
        for key, shape in self.shapes.items() if shorter else ():
            levels = key.split(".")
            for n, level in enumerate(levels if len(levels) <= MOST_COMPARED_LEVELS else ()):
                if level not in shorter:
                    continue
                plain = ".".join((*levels[:n], shorter[level], *levels[n + 1 :]))
                if self.shapes.get(plain) == shape:
                    twins.setdefault(plain, []).append(key)
                    twins.setdefault(key, []).append(plain)
        return twins

    def knows(self, module: str) -> bool:
        """Return whether the base has a module of this name, perhaps with other numbers in it."""
        names = (name for layer in (module, *parts_of(module)) for name in written(layer))
        return any(self._readers(name, "weight") for name in names)

    def _readers(self, name: str, parameter: str) -> Sequence[tuple[int, Sequence[Component]]]:
        """Return (start, components that know such names) for every reading of a name, which is its rest from `start`.

        This is worked out once for all names that differ only in numbers: 200 000 modules have some thirty patterns.
        """
        pattern = self._numbers.sub("#", name), parameter
        if pattern not in self._by_pattern:
            readings = [(body, self._knowing(hint, body, parameter)) for hint, body in self._readings(name)]
            self._by_pattern[pattern] = [(len(name) - len(body), parts) for body, parts in readings if parts]
        return self._by_pattern[pattern]

    def _knowing(self, hint: str, body: str, parameter: str) -> list[Component]:
        """Return the networks that a prefix means and that know a name. A part of the denoiser in a single file, which
        is a network of its own in the base, is meant by names that the denoiser lacks."""
        networks = [p for p in self.hinted(hint) if p.knows(body, parameter)]
        return [p for p in networks if not p.connects] or networks if hint in DENOISERS else networks

    def as_stored(self, view: WeightView) -> WeightView:
        """Return the view with the keys of the base, whose names may be wrapped (`_orig_mod.`)."""
        if not self._stored:
            return view
        return WeightView(tuple(p._replace(key=self._stored[p.key]) for p in view.row_slices), view.shape)

    def lone_expert(self, modules: Sequence[str]) -> str:
        """Return the prefix of the base's names in an adapter for two experts, if the base is one of them; else ""."""
        first, second = WAN_EXPERTS
        denoisers = [p for p in self.parts if p.role == "denoiser"]
        alone = len(denoisers) == 1 and denoisers[0].label != "transformer_2"
        if not alone or not any(m.startswith(second) for m in modules):
            return ""
        return first if not self.second and any(m.startswith(first) for m in modules) else second

    def value(self, view: WeightView) -> WeightView:
        """Return the view in the layout of the stored parameter, in which an adapter stores a value of it.

        It differs from the layout of factors for GPT-2's Conv1D, where a LoRA sees `[out, in]` and stored is
        `[in, out]`, and for such stacks of experts.
        """
        piece = view.row_slices[0]
        shape = self.shapes.get(self.without_wrappers(piece.key), ())
        if len(shape) == len(view.shape) == 3 and all(p.transposed and p.key == piece.key for p in view.row_slices):
            every = sum(p.size for p in view.row_slices) == prod(shape)
            return as_matrices(whole(piece.key, shape)) if every else view
        part = self._part(piece.key)
        name = part.dotted(self.without_wrappers(piece.key).removeprefix(part.prefix)) if part else None
        return transposed(view) if piece.transposed and name and self.as_stored(name) == view else view

    def recognised(self, key: str) -> bool:
        """Return whether the network of a base tensor has an architecture file."""
        part = self._part(key)
        return part is not None and part.architecture is not None

    def fused(self, view: WeightView) -> dict[str, Split]:
        """Return source of the evidence → rows of every layer that is fused in a weight; empty without evidence.

        For a model with an architecture file, its table is the only source.
        """
        pieces = view.row_slices
        if self._stored:
            pieces = tuple(p._replace(key=self.without_wrappers(p.key)) for p in pieces)
        sizes: tuple[int, ...] = ()
        for piece in pieces:
            part = self._homes.get(piece.key)
            rows = part.cut(piece) if part else ()
            if not rows:
                return {}
            sizes += rows
        if len(sizes) > 1:
            return {f"the table of {self.architecture}": sizes}
        name, shapes, known = pieces[0].key, self.shapes, self._homes[pieces[0].key].architecture
        split = splits(name, shapes, self._config, known.file.stem if known else "")
        return split if split and whole(name, shapes[name]).row_slices == pieces else {}

    def component(self, key: str) -> str:
        """Return the component of a base tensor: unet, transformer, te, te1, te2, te3, vae, model."""
        part = self._part(key)
        return part.label if part else "model"

    def _part(self, key: str) -> Component | None:
        """Return the network of a base tensor; None for tensors of ignored networks."""
        return self._homes.get(self.without_wrappers(key))

    @cached_property
    def _homes(self) -> Mapping[str, Component]:
        """Name of a tensor without wrappers → its network."""
        return {name: part for part in self.parts for name in part.keys.values()}

    def without_wrappers(self, key: str) -> str:
        """Return the name of a base tensor without the levels that training adds."""
        return self._inner.get(key, key)

    def network_of(self, module: str) -> str:
        """Return the component that an adapter's module name is for."""
        main = self.parts[0].label if self.parts and self.parts[0].role == "denoiser" else "denoiser"
        for hint, _ in self._readings(module):
            if hint in DENOISERS and hint != "transformer_2":
                return main
            if hint != "any":
                return next((p.label for p in self.hinted(hint)), hint)
        return main

    def weights(self, part: Component | None = None) -> dict[str, Shape]:
        """Return module → shape of its weight, for one network; the main network by default."""
        part = part or (self.parts[0] if self.parts else None)
        shapes = {body: self.shapes[key] for body, key in part.keys.items()} if part else {}
        return {body.removesuffix(".weight"): shape for body, shape in shapes.items() if len(shape) > 1}

    def _readings(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield (component meant by the prefix, rest) for the name itself and with prefixes removed."""
        for hint, body in prefixed(name):
            yield hint, body
            for prefix, network_hint in self._prefixes:
                if body.startswith(prefix):
                    yield network_hint, body[len(prefix) :]

    def hinted(self, hint: str) -> list[Component]:
        """Return the networks that a prefix means; `hint`: its second column in PREFIXES."""
        if hint[0] == "@":
            return [p for p in self.parts if p.prefix == hint[1:]]
        if hint == "any":
            return list(self.parts)
        if hint == "vae":
            return [p for p in self.parts if p.label == "vae"]
        if hint in DENOISERS:
            named = [p for p in self.parts if p.label == hint]
            return named or [p for p in self.parts if (p.role == "denoiser" or p.connects) and hint != "transformer_2"]
        return self._encoders(hint)

    def _encoders(self, hint: str) -> list[Component]:
        encoders = [p for p in self.parts if p.kind]
        if not encoders and len(self.parts) == 1 and self.parts[0].label == "model" and self.parts[0].architecture:
            return list(
                self.parts
            )  # a language model as the base: it is the encoder of Z-Image, Lumina, HunyuanVideo …
        known = self.known
        if hint[0] == "=":  # an encoder by ComfyUI's name
            return self._by_id(ENCODER_IDS.get(hint[1:], hint[1:]), encoders)
        if known and known.text_encoders:
            kind = known.text_encoders.get(hint)
            labels = {label for label, of in known.text_encoders.items() if of == kind} | {hint}
            return [p for p in encoders if p.kind == kind or (p.kind in UNSURE and p.label in labels)]
        if len(encoders) == 1:
            return [p for p in encoders if p.kind not in NOT_MEANT.get(hint, ())]
        return [p for p in encoders if p.label == hint]

    def _by_id(self, kind: str, encoders: Sequence[Component]) -> list[Component]:
        """Return the encoders of a kind; among encoders of unknown kind, the one in the position of that kind."""
        if kind == NO_ID:
            return [p for p in encoders if not p.kind.startswith("clip")]
        unsure = [p for p in encoders if p.kind in UNSURE]
        kinds = self.known.text_encoders if self.known else {}
        by_position = [p for p in unsure if kinds.get(p.label) == kind]
        by_kind = [p for p in encoders if p.kind == kind]
        return by_kind or by_position or (unsure if len(unsure) == 1 else [])

    def _ambiguous(self, module: str, parameter: str, views: Sequence[WeightView | None]) -> AmbiguousName:
        keys = sorted({p.key for v in views if v for p in v.row_slices})
        experts = {p.label for p in self.parts if p.role == "denoiser"}
        networks = sorted({self.component(key) for key in keys})
        fix = "rename it in the adapter so that it names one of them"
        if len(networks) > 1 and experts.issuperset(networks):
            fix = f"give the folder of the expert that it was trained for as the base: {' or '.join(networks)}"
        return AmbiguousName(f"{module} ({parameter}) fits two places", ", ".join(keys) or self.architecture, fix)


def names(index: Index, extra: Path | None = None) -> Names:
    """Return the name tables of a base. `extra`: the user's architecture file; InputError if it cannot be used."""
    stored = unwrapped(index.tensors)
    tensors = {name: index.tensors[key] for name, key in stored.items()} if stored else index.tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    model = load(extra) if extra else None
    parts = [
        replace(part, sharded=_in_several_files([tensors[key].file for key in part.keys.values()]))
        for part in components(shapes, index.config, index.components, model if model and model.title else None)
    ]
    second = "transformer_2" in index.path.parts[-2:]
    presets, renames = (model.lbw, model.renames) if model else ({}, ())
    return Names(parts, shapes, stored, index.config, second=second, presets=presets, renames=renames)


def _in_several_files(files: Sequence[Path]) -> bool:
    return any(file is not files[0] and file != files[0] for file in files)


def reads_with(model: Architecture, encoders: Collection[str]) -> bool:
    """Return whether a model has text encoders of these names."""
    return len({kind for label, kind in model.text_encoders.items() if label in encoders}) == len(encoders)


def encoders_of(modules: Iterable[str]) -> frozenset[str]:
    """Return the names of the text encoders that an adapter changes: te, te1 …"""
    return frozenset(hint for module in modules if TEXT_ENCODER.fullmatch(hint := innermost(module)[0]))


def named_as(modules: Mapping[str, Shape]) -> list[Architecture]:
    """Return the models that an adapter may be for by its names alone, those of a denoiser and of its text encoders."""
    bodies, encoders = of_the_denoiser(modules), encoders_of(modules)
    return [a for a in named_so(modules_of(bodies)) if reads_with(a, encoders)] if encoders and bodies else []


def denoiser_of(modules: Mapping[str, Shape]) -> str:
    """Return what a merge calls the denoiser that an adapter is for, such as "unet"; "denoiser" if it is unknown.

    `modules`: module → the shape of its weight.
    """
    labels = {a.component for a in architectures(modules_of(of_the_denoiser(modules))) or named_as(modules)}
    return labels.pop() if len(labels) == 1 else "denoiser"


def of_the_denoiser(modules: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the modules that are not for an encoder or a VAE, without their prefixes."""
    inside = {module: innermost(module) for module in modules}
    return {body: modules[m] for m, (hint, body) in inside.items() if hint in ("any", *DENOISERS)}


def _look(parts: Sequence[Component], body: str, parameter: str) -> list[WeightView | None]:
    """Return all places of a name in these components."""
    places = [part.find(body, parameter) for part in parts]
    return [view for view, known in places if known]


def written(module: str) -> Iterator[str]:
    """Yield the name itself, then with NAME_REWRITES applied."""
    names = [module]
    yield module
    for pattern, replacement in NAME_REWRITES:
        for name in [pattern.sub(replacement, n) for n in names if pattern.search(n)]:
            names.append(name)
            yield name
