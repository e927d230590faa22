"""Names of an adapter's modules → rows of the base's tensors, for the second reading.

Of a name only the prefix is taken off. The rest is looked up among the base's own names and the other names that
`layouts.py` gives these. The answer counts only if there is exactly one place. No file is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from .blocks import BlockNames
from .layouts import Shape, filled, heights, tables

PEFT_PREFIX: Final = "base_model.model."

NETWORK_PREFIXES: Final = (
    # names begin with          network
    ("lora_unet_",              "denoiser"),
    ("lora_transformer_",       "denoiser"),
    ("lora_te_",                "te"),
    ("lora_te1_",               "te1"),
    ("lora_te2_",               "te2"),
    ("lora_te3_",               "te3"),
    ("lycoris_",                ""),
    ("diffusion_model.",        "denoiser"),
    ("model.diffusion_model.",  "denoiser"),
    ("transformer.",            "transformer"),
    ("transformer_2.",          "transformer_2"),
    ("unet.",                   "denoiser"),
    ("text_encoder.",           "te1"),
    ("text_encoder_2.",         "te2"),
    ("text_encoder_3.",         "te3"),
)  # fmt: skip
"""The network that the prefix of a module's name means; "" is any. If it ends with "_", its dots are "_" too."""

DENOISER_NETWORK: Final = ("denoiser", ("denoiser", "transformer"))

CONTAINERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    # keys of the base begin with               what the network is, and what NETWORK_PREFIXES may call it
    "model.diffusion_model.":                   DENOISER_NETWORK,
    "cond_stage_model.transformer.":            ("te", ("te", "te1")),
    "cond_stage_model.model.":                  ("te", ("te", "te1")),
    "conditioner.embedders.0.transformer.":     ("te1", ("te1",)),
    "conditioner.embedders.1.model.":           ("te2", ("te2",)),
    "text_encoders.clip_l.transformer.":        ("te1", ("te1",)),
    "text_encoders.clip_g.transformer.":        ("te2", ("te2",)),
    "text_encoders.":                           ("", ()),
    "conditioner.":                             ("", ()),
    "cond_stage_model.":                        ("", ()),
    "first_stage_model.":                       ("vae", ()),
    "vae.":                                     ("vae", ()),
    "model_ema.":                               ("", ()),
    "":                                         ("", ("denoiser", "transformer")),
}  # fmt: skip
"""The networks of a single file, by the first prefix that fits; the last row is a file that holds one network."""

FOLDERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "unet.": DENOISER_NETWORK, "transformer.": DENOISER_NETWORK, "transformer_2.": ("", ("denoiser", "transformer_2")),
    "text_encoder.": ("te1", ("te1",)), "text_encoder_2.": ("te2", ("te2",)), "text_encoder_3.": ("te3", ("te3",)),
    "vae.": ("vae", ()),
}  # fmt: skip
"""The same for the sub-folders of a pipeline, with which its keys begin."""

OF_SDXL: Final = "add_embedding.linear_1.weight"
"""A tensor of SDXL's UNet in the layout of diffusers."""

FIRST_LEVELS: Final = frozenset({"model", "language_model", "text_model", "thinker", "llm"})
"""First levels that a name has or lacks if a language model is trained alone or as a part of another model:
transformers' classes for text and for images, sounds and text (`model.language_model.layers`, `thinker.model.layers`)
and vLLM's mappings of their names."""

PARAMETER_ENDINGS: Final = {"weight": (".weight", ".scale", "_weight"), "bias": (".bias", "_bias")}
"""Parameter of a module → what its key ends with."""


HEAD_ORDERS: Final = (
    "token_refiner.blocks.0.attn.qkv_proj.weight", re.compile(r"(?:token_refiner\.)?blocks\.\d+\.attn\.qkv_proj"), 128
)  # fmt: skip
"""A name that shows MiniMax-H3, its modules whose rows have two orders, and the rows of a head: q, k and v of one head
after those of another in the original shards, all of q, then k, then v in single files
(diffusers loaders/single_file_utils.py, `qkv_layout`)."""

_CONTAINER: Final = re.compile("|".join(map(re.escape, CONTAINERS)))  # the first that fits


class BaseRows(NamedTuple):
    """Rows [start, stop) of a stored tensor that is `cols` wide when seen as a matrix."""

    key: str
    start: int
    stop: int
    cols: int


class WeightPlace(NamedTuple):
    """The place of a module's weight: rows of the base that, one below the other, form a weight of this shape."""

    rows: tuple[BaseRows, ...]
    shape: Shape
    network: str = ""  # Network.label


class ModulePart(NamedTuple):
    """Part number `part` of the `parts` that the rows of a module consist of."""

    module: str
    part: int
    parts: int
    split: str


@dataclass(frozen=True)
class Network:
    """One of the networks of a base."""

    prefix: str
    label: str  # denoiser, te, te1, te2, te3, vae; "" if that is not known
    called: tuple[str, ...]  # networks of NETWORK_PREFIXES that may mean this one
    shapes: Mapping[str, Shape]  # names without the prefix

    def direct(self, module: str, parameter: str) -> WeightPlace | None:
        """Return the place of a parameter that the base has under its own name."""
        ends = PARAMETER_ENDINGS.get(parameter, (f".{parameter}",))
        name = next((module + end for end in ends if module + end in self.shapes), None)
        if name is None:
            return None
        shape = self.shapes[name]
        rows, cols = (shape[0], prod(shape[1:])) if shape else (1, 1)
        return WeightPlace((BaseRows(self.prefix + name, 0, rows, cols),), shape, self.label)

    def find(self, module: str, parameter: str, *, flat: bool) -> list[WeightPlace]:
        """Return all places that a name may mean; a flat name has "_" for its dots."""
        if flat:
            names = self._flat.get(module, ())
            return [place for name in names for place in self.find(name, parameter, flat=False)]
        direct_place = self.direct(module, parameter)
        return [direct_place] if direct_place else [p for p in self._others(module, parameter) if p is not None]

    @cached_property
    def by_layer(self) -> Mapping[str, tuple[str, ...]]:
        """Module without its first levels of FIRST_LEVELS → all modules of this name."""
        modules: dict[str, tuple[str, ...]] = {}
        for module in dict.fromkeys(self._modules()):
            if "." in (rest := _without_levels(module)):
                modules[rest] = (*modules.get(rest, ()), module)
        return modules

    @cached_property
    def others(self) -> Mapping[str, list[ModulePart | tuple[str, ...]]]:
        """Name in the other layout → its meanings: modules of the base, one below the other, or a part of one."""
        meanings: dict[str, list[ModulePart | tuple[str, ...]]] = {}
        by_left, by_right = tables(self.shapes)
        for module in self._modules():
            for line, numbers in by_left.of(module):
                for i, name in enumerate(line.right):
                    cut = ModulePart(module, i, len(line.right), line.split)
                    meanings.setdefault(filled(name, numbers), []).append(cut)
            for line, numbers in by_right.of(module):
                parts = tuple(filled(name, numbers) for name in line.right)
                meanings.setdefault(filled(line.left, numbers), []).append(parts)
        return meanings

    @cached_property
    def other_names(self) -> Mapping[str, tuple[str, ...]]:
        """Module of the base → its names in the other layout."""
        names: dict[str, tuple[str, ...]] = {}
        for name, meanings in self.others.items():
            for meaning in meanings:
                for module in (meaning.module,) if isinstance(meaning, ModulePart) else meaning:
                    names[module] = (*names.get(module, ()), name)
        return names

    def parts(self, key: str) -> tuple[int, ...]:
        """Return the number of rows of each part of a stored weight; () if no layout gives it parts."""
        module = key[len(self.prefix) :].removesuffix(".weight")
        cut = self._cuts.get(module)
        return heights(cut.split, cut.parts, self.shapes[f"{module}.weight"]) if cut else ()

    @cached_property
    def _cuts(self) -> Mapping[str, ModulePart]:
        """Module that has several parts → one of them."""
        meanings = (meaning for meanings_of in self.others.values() for meaning in meanings_of)
        return {m.module: m for m in meanings if isinstance(m, ModulePart) and m.parts > 1}

    def _others(self, module: str, parameter: str) -> Iterator[WeightPlace | None]:
        for meaning in self.others.get(module, ()):
            if isinstance(meaning, ModulePart):
                yield self._cut(meaning, parameter)
            else:
                yield _stacked([self.direct(name, parameter) for name in meaning])

    def _cut(self, cut: ModulePart, parameter: str) -> WeightPlace | None:
        whole = self.direct(cut.module, parameter)
        if whole is None or cut.parts == 1:
            return whole
        name = whole.rows[0].key[len(self.prefix) :]  # a bias is split where its weight is
        weight = self.shapes.get(f"{name[:-4]}weight" if name.endswith("bias") else name, whole.shape)
        sizes = heights(cut.split, cut.parts, weight)
        return rows_of(whole, sum(sizes[: cut.part]), sum(sizes[: cut.part + 1])) if sizes else None

    def _modules(self) -> Iterator[str]:
        """Yield every module that has a weight."""
        for name in self.shapes:
            yield from (name.removesuffix(end) for end in PARAMETER_ENDINGS["weight"] if name.endswith(end))

    @cached_property
    def _flat(self) -> Mapping[str, tuple[str, ...]]:
        """Name with "_" for its dots → the names that it may mean."""
        names: dict[str, tuple[str, ...]] = {}
        for name in dict.fromkeys([*self._modules(), *self.others]):
            flat = name.replace(".", "_")
            names[flat] = (*names.get(flat, ()), name)
        return names


def rows_of(place: WeightPlace, start: int, stop: int) -> WeightPlace:
    """Return rows [start, stop) of a place that is in one tensor."""
    (r,) = place.rows
    return WeightPlace(
        (BaseRows(r.key, r.start + start, r.start + stop, r.cols),), (stop - start, *place.shape[1:]), place.network
    )


def _without_levels(name: str) -> str:
    """Return a name without its first levels of FIRST_LEVELS."""
    first, _, rest = name.partition(".")
    return _without_levels(rest) if first in FIRST_LEVELS and rest else name


def reordered(place: WeightPlace, *, by_heads: bool) -> WeightPlace | None:
    """Return the place of rows of q, k and v in a tensor that has them in the other order, stacked or `by_heads`; None
    for parts of such a tensor."""
    (r,), size = place.rows, HEAD_ORDERS[2]
    heads, odd = divmod(r.stop, 3 * size)
    if r.start or odd or r.stop != place.shape[0]:
        return None
    places = ((p, h) for p in range(3) for h in range(heads)) if by_heads else (
        (p, h) for h in range(heads) for p in range(3))  # fmt: skip
    starts = [((h * 3 + p) if by_heads else (p * heads + h)) * size for p, h in places]
    return place._replace(rows=tuple(BaseRows(r.key, start, start + size, r.cols) for start in starts))


def _stacked(parts: list[WeightPlace | None]) -> WeightPlace | None:
    """Return the weights one below the other; None if one is missing or their widths differ."""
    places = [p for p in parts if p is not None]
    if len(places) != len(parts) or len({p.shape[1:] for p in places}) != 1:
        return None
    rows = tuple(r for p in places for r in p.rows)
    return WeightPlace(rows, (sum(p.shape[0] for p in places), *places[0].shape[1:]), places[0].network)


def _container(key: str) -> str:
    match = _CONTAINER.match(key)
    assert match is not None, "the last container is that of all other names"
    return match[0]


class Networks:
    """All networks of a base."""

    def __init__(self, shapes: Mapping[str, Shape], folders: Collection[str] = ()) -> None:
        by_prefix: dict[str, dict[str, Shape]] = {}
        for key, shape in shapes.items():
            prefix = f"{key.partition('.')[0]}." if folders else _container(key)
            by_prefix.setdefault(prefix, {})[key[len(prefix) :]] = shape
        table = FOLDERS if folders else CONTAINERS
        named = {prefix: table.get(prefix, ("", ())) for prefix in by_prefix}
        encoders = [prefix for prefix, (label, _) in named.items() if label.startswith("te")]
        if folders and len(encoders) == 1:
            _, called = named[encoders[0]]
            of_sd = "unet." in by_prefix and OF_SDXL not in by_prefix["unet."]  # Stable Diffusion 1 or 2
            # In others, whether it is called te or te1 depends on the denoiser.
            named[encoders[0]] = ("te", (*called, "te")) if of_sd else ("", called)
        self.networks = tuple(Network(prefix, *named[prefix], shapes_of) for prefix, shapes_of in by_prefix.items())
        self._places: dict[tuple[str, str], WeightPlace | None] = {}
        main = next((n for n in self.networks if "denoiser" in n.called), None)
        self.blocks = BlockNames(*((main.prefix, main.shapes) if main is not None else ("", ())))

    def find(self, stem: str, parameter: str) -> WeightPlace | None:
        """Return the one place that a module's name means; None if there is none or more than one."""
        if (stem, parameter) not in self._places:
            self._places[stem, parameter] = self._find(stem, parameter)
        return self._places[stem, parameter]

    def _find(self, stem: str, parameter: str) -> WeightPlace | None:
        places: list[WeightPlace] = []
        for meant, name, flat in _readings(stem):
            for network in self.networks:
                if not meant or meant in network.called:
                    places += [p for p in network.find(name, parameter, flat=flat) if p not in places]
        if places:
            return places[0] if len(places) == 1 else None
        return self._on_another_level(stem, parameter)

    def _on_another_level(self, stem: str, parameter: str) -> WeightPlace | None:
        """Return the one place of a name with more or fewer of FIRST_LEVELS before it."""
        rest = _without_levels(stem.removeprefix(PEFT_PREFIX))
        named = [(n, module) for n in self.networks if not n.label for module in n.by_layer.get(rest, ())]
        return named[0][0].direct(named[0][1], parameter) if len(named) == 1 else None

    def of_heads(self, place: WeightPlace) -> Network | None:
        """Return the network of a place whose rows have one of two orders; None for any other place."""
        key = place.rows[0].key
        of = next((n for n in self.networks if HEAD_ORDERS[0] in n.shapes and key.startswith(n.prefix)), None)
        return of if of is not None and HEAD_ORDERS[1].fullmatch(key[len(of.prefix) :].rpartition(".")[0]) else None

    def has(self, called: str) -> bool:
        """Return whether the base has a network that NETWORK_PREFIXES may call so."""
        return any(called in network.called for network in self.networks)

    def parts(self, place: WeightPlace) -> tuple[int, ...]:
        """Return the number of rows of each part of a place that is one whole tensor; () if none is known."""
        key = place.rows[0].key
        network = next(n for n in self.networks if key.startswith(n.prefix) and key[len(n.prefix) :] in n.shapes)
        sizes = network.parts(key)
        return sizes if sum(sizes) == place.shape[0] else ()


def _readings(stem: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (network, rest of the name, whether "_" replaces its dots) for every prefix that the name may have."""
    name = stem.removeprefix(PEFT_PREFIX)
    yield "", name, False
    for prefix, network in NETWORK_PREFIXES:
        if name.startswith(prefix):
            flat = prefix.endswith("_")
            yield network, name[len(prefix) :].removeprefix("" if flat else PEFT_PREFIX), flat
