"""Names of an adapter's modules → rows of the base's tensors, a second time and in a simpler way.

A name is taken apart by its prefix alone, and looked up among the base's own names and the other names that
`layouts.py` gives those. One place is the answer; none, or two, is "I do not know". No file is read here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from .layouts import Shape, filled, heights, tables

PEFT: Final = "base_model.model."

PREFIXES: Final = (
    # names begin with          speak of            and are flat
    ("lora_unet_",              "denoiser",         True),
    ("lora_transformer_",       "denoiser",         True),
    ("lora_te_",                "te",               True),
    ("lora_te1_",               "te1",              True),
    ("lora_te2_",               "te2",              True),
    ("lora_te3_",               "te3",              True),
    ("lycoris_",                "",                 True),
    ("diffusion_model.",        "denoiser",         False),
    ("model.diffusion_model.",  "denoiser",         False),
    ("transformer.",            "transformer",      False),
    ("transformer_2.",          "transformer_2",    False),
    ("unet.",                   "denoiser",         False),
    ("text_encoder.",           "te1",              False),
    ("text_encoder_2.",         "te2",              False),
    ("text_encoder_3.",         "te3",              False),
)  # fmt: skip
"""What a name speaks of; "" is any network."""

CONTAINERS: Final = (
    # keys of the base begin with                what they are           how names speak of it
    ("model.diffusion_model.",                   "denoiser",             ("denoiser", "transformer")),
    ("cond_stage_model.transformer.",            "te",                   ("te", "te1")),
    ("cond_stage_model.model.",                  "te",                   ("te", "te1")),
    ("conditioner.embedders.0.transformer.",     "te1",                  ("te1",)),
    ("conditioner.embedders.1.model.",           "te2",                  ("te2",)),
    ("text_encoders.clip_l.transformer.",        "te1",                  ("te1",)),
    ("text_encoders.clip_g.transformer.",        "te2",                  ("te2",)),
    ("text_encoders.",                           "",                     ()),
    ("conditioner.",                             "",                     ()),
    ("cond_stage_model.",                        "",                     ()),
    ("first_stage_model.",                       "vae",                  ()),
    ("vae.",                                     "vae",                  ()),
    ("model_ema.",                               "",                     ()),
)  # fmt: skip
"""Of single files. What is not among these is one network, whose names begin at once."""

FOLDERS: Final = {
    "unet": ("denoiser", ("denoiser", "transformer")), "transformer": ("denoiser", ("denoiser", "transformer")),
    "transformer_2": ("", ("denoiser", "transformer_2")), "text_encoder": ("te1", ("te1",)),
    "text_encoder_2": ("te2", ("te2",)), "text_encoder_3": ("te3", ("te3",)), "vae": ("vae", ()),
}  # fmt: skip
"""The same of a pipeline's sub-folders."""

_STARTS: Final = tuple(prefix for prefix, _, _ in CONTAINERS)


class Rows(NamedTuple):
    """Rows [start, stop) of a stored tensor that is `cols` wide when seen as a matrix."""

    key: str
    start: int
    stop: int
    cols: int


class Place(NamedTuple):
    """Where a module's weight lies: these rows, one below the other, together of this shape."""

    rows: tuple[Rows, ...]
    shape: Shape
    network: str = ""  # what its network is, "" where that is not known


class Cut(NamedTuple):
    """One of the parts that a module's rows are made of."""

    module: str
    part: int
    parts: int
    split: str


@dataclass
class Network:
    """One of the networks of a base."""

    prefix: str
    label: str  # denoiser, te, te1, te2, te3, vae; "" where that is not known
    called: frozenset[str]  # what prefixes of names may mean it
    shapes: dict[str, Shape] = field(default_factory=dict)  # names without the prefix

    def direct(self, module: str, parameter: str) -> Place | None:
        """Return the parameter under its own name."""
        name = f"{module}.{parameter}"
        if name not in self.shapes and parameter == "weight":
            name = next((n for n in (f"{module}.scale", f"{module}_weight") if n in self.shapes), name)
        if name not in self.shapes and parameter == "bias" and f"{module}_bias" in self.shapes:
            name = f"{module}_bias"
        return self._whole(name) if name in self.shapes else None

    def find(self, module: str, parameter: str, *, flat: bool) -> list[Place]:
        """Return all places that a name may mean."""
        if flat:
            names = self._flat.get(module, ())
            return [place for name in names for place in self.find(name, parameter, flat=False)]
        own = self.direct(module, parameter)
        return [own] if own else [p for p in self._others(module, parameter) if p is not None]

    @cached_property
    def others(self) -> Mapping[str, list[Cut | tuple[str, ...]]]:
        """Another name → what it means: modules one below the other, or a part of one."""
        found: dict[str, list[Cut | tuple[str, ...]]] = {}
        by_left, by_right = tables(self.shapes)
        for module in self._modules():
            for line, numbers in by_left.of(module):
                for i, name in enumerate(line.right):
                    cut = Cut(module, i, len(line.right), line.split)
                    found.setdefault(filled(name, numbers), []).append(cut)
            for line, numbers in by_right.of(module):
                parts = tuple(filled(name, numbers) for name in line.right)
                found.setdefault(filled(line.left, numbers), []).append(parts)
        return found

    def parts(self, key: str) -> tuple[int, ...]:
        """Return the rows of the parts that a stored weight is known to be made of; () where it is not known to have
        any.
        """
        module = key[len(self.prefix) :].removesuffix(".weight")
        cut = self._cuts.get(module)
        return heights(cut.split, cut.parts, self.shapes[f"{module}.weight"]) if cut else ()

    @cached_property
    def _cuts(self) -> Mapping[str, Cut]:
        """Module → one of its parts, of those that have several."""
        meanings = (meaning for found in self.others.values() for meaning in found)
        return {m.module: m for m in meanings if isinstance(m, Cut) and m.parts > 1}

    def _others(self, module: str, parameter: str) -> Iterator[Place | None]:
        for meaning in self.others.get(module, ()):
            if isinstance(meaning, Cut):
                yield self._cut(meaning, parameter)
            else:
                yield _stacked([self.direct(name, parameter) for name in meaning])

    def _cut(self, cut: Cut, parameter: str) -> Place | None:
        whole = self.direct(cut.module, parameter)
        if whole is None or cut.parts == 1:
            return whole
        weight = self.shapes.get(_weight(whole.rows[0].key[len(self.prefix) :]), whole.shape)
        sizes = heights(cut.split, cut.parts, weight)
        return rows_of(whole, sum(sizes[: cut.part]), sum(sizes[: cut.part + 1])) if sizes else None

    def _whole(self, name: str) -> Place:
        shape = self.shapes[name]
        rows, cols = (shape[0], prod(shape[1:])) if shape else (1, 1)
        return Place((Rows(self.prefix + name, 0, rows, cols),), shape, self.label)

    def _modules(self) -> Iterator[str]:
        """Yield every module that has a weight."""
        for name in self.shapes:
            if name.endswith((".weight", "_weight")):
                yield name[: -len(".weight")]
            elif name.endswith(".scale"):
                yield name[: -len(".scale")]

    @cached_property
    def _flat(self) -> Mapping[str, tuple[str, ...]]:
        """Names without dots → those that they may be."""
        found: dict[str, tuple[str, ...]] = {}
        for name in dict.fromkeys([*self._modules(), *self.others]):
            flat = name.replace(".", "_")
            found[flat] = (*found.get(flat, ()), name)
        return found


def _weight(name: str) -> str:
    """Return the weight beside a bias."""
    return f"{name.removesuffix('bias')}weight" if name.endswith("bias") else name


def rows_of(place: Place, start: int, stop: int) -> Place:
    """Return the rows of a place that is one tensor's."""
    (r,) = place.rows
    return Place(
        (Rows(r.key, r.start + start, r.start + stop, r.cols),), (stop - start, *place.shape[1:]), place.network
    )


def _stacked(parts: list[Place | None]) -> Place | None:
    """Return the weights one below the other; None if one is missing or their widths differ."""
    there = [p for p in parts if p is not None]
    if len(there) != len(parts) or len({p.shape[1:] for p in there}) != 1:
        return None
    rows = tuple(r for p in there for r in p.rows)
    return Place(rows, (sum(p.shape[0] for p in there), *there[0].shape[1:]), there[0].network)


class Places:
    """All networks of a base."""

    def __init__(self, shapes: Mapping[str, Shape], folders: Collection[str] = ()) -> None:
        found: dict[str, Network] = {}
        for key, shape in shapes.items():
            prefix = f"{key.partition('.')[0]}." if folders else _container(key)
            network = found.get(prefix)
            if network is None:
                network = found[prefix] = _network(prefix, folders)
            network.shapes[key[len(prefix) :]] = shape
        self.networks = tuple(found.values())
        self._found: dict[tuple[str, str], Place | None] = {}
        encoders = [n for n in self.networks if n.label.startswith("te")]
        if folders and len(encoders) == 1:
            encoders[0].label = ""  # whether it is called te or te1 depends on the denoiser

    def find(self, stem: str, parameter: str) -> Place | None:
        """Return the one place that a module's name means; None if there is none or more than one."""
        if (stem, parameter) not in self._found:
            self._found[stem, parameter] = self._find(stem, parameter)
        return self._found[stem, parameter]

    def _find(self, stem: str, parameter: str) -> Place | None:
        found: list[Place] = []
        for hint, name, flat in _readings(stem):
            for network in self.networks:
                if not hint or hint in network.called:
                    found += [p for p in network.find(name, parameter, flat=flat) if p not in found]
        return found[0] if len(found) == 1 else None

    def has(self, called: str) -> bool:
        """Return whether it has a network that names speak of so."""
        return any(called in network.called for network in self.networks)

    def parts(self, place: Place) -> tuple[int, ...]:
        """Return the rows of the parts that a place is known to be made of, if it is the whole of one tensor; else
        ().
        """
        key = place.rows[0].key
        network = next(n for n in self.networks if key.startswith(n.prefix) and key[len(n.prefix) :] in n.shapes)
        sizes = network.parts(key)
        return sizes if sum(sizes) == place.shape[0] else ()


def _container(key: str) -> str:
    if not key.startswith(_STARTS):
        return ""
    return next(prefix for prefix in _STARTS if key.startswith(prefix))


def _network(prefix: str, folders: Collection[str]) -> Network:
    if folders:
        label, called = FOLDERS.get(prefix[:-1], ("", ()))
        return Network(prefix, label, frozenset(called))
    for start, label, called in CONTAINERS:
        if prefix == start:
            return Network(prefix, label, frozenset(called))
    return Network("", "", frozenset(("denoiser", "transformer")))


def _readings(stem: str) -> Iterator[tuple[str, str, bool]]:
    """(what it speaks of, the rest, whether that has no dots) for every way to take a name's prefix off."""
    name = stem.removeprefix(PEFT)
    yield "", name, False
    for prefix, hint, flat in PREFIXES:
        if name.startswith(prefix):
            yield hint, name[len(prefix) :].removeprefix("" if flat else PEFT), flat
