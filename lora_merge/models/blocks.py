"""The blocks of a base, by the names of block weights (IN04, M00, OUT11, D00, S37, L12), and lists of their weights.

The blocks of a U-Net are numbered as in its authors' code, in every layout; sd-webui-lora-block-weight made lists of
these names common. In any other model, a block is one layer of a stack of equal layers. The network and the block of
an adapter's module follow from its name alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from types import MappingProxyType
from typing import Final

from ..change_statistics import Groups
from ..dtypes import Shape
from ..errors import UsageError
from ..options import BLOCK_WEIGHTS, number
from ..text import listed
from .adapter_architecture import architectures, modules_of
from .inferred_base import canonical_names
from .name_table import parameter_forms
from .names import Names, denoiser_of
from .network import Component
from .prefixes import DENOISERS, innermost

PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NONE": "",
        "ALL": "",
        "INS": "BASE IN01 IN02 IN04",
        "IND": "BASE IN05 IN07 IN08",
        "INALL": "BASE IN",
        "MIDD": "BASE IN05 IN07 IN08 M00 OUT03 OUT04 OUT05 OUT06",
        "OUTD": "BASE OUT03 OUT04 OUT05 OUT06",
        "OUTS": "BASE OUT07 OUT08 OUT09 OUT10 OUT11",
        "OUTALL": "BASE OUT",
    }
)
"""Preset → the blocks with factor 1; all others have 0. Source: the default presets of sd-webui-lora-block-weight."""

FLUX_ALL: Final = "FLUXALL"
"""The preset with factor 1 for all 61 blocks of Flux.1."""

LAST_BLOCK: Final = 24
"""Number of the last of the 25 blocks of a U-Net of Stable Diffusion 1 that follow BASE, counted from 0."""

BASE_BLOCK: Final = "BASE"
"""The block of every tensor that no other block holds: text encoders, time embeddings, norms."""

SHORT_LISTS: Final[Mapping[int, Sequence[str]]] = MappingProxyType(
    {
        12: ("BASE", *(f"IN{n:02d}" for n in (1, 2, 4, 5, 7, 8)), "M00", *(f"OUT{n:02d}" for n in range(3, 12))),
        9: ("BASE", *(f"IN{n:02d}" for n in (4, 5, 7, 8)), "M00", *(f"OUT{n:02d}" for n in range(6))),
    }
)
"""Number of a U-Net's input blocks → its short list (17 or 12 blocks): the blocks that a plain LoRA changes.

Source: hako-mikan/sd-webui-lora-block-weight, BLOCKID17 and BLOCKIDXLL.
"""

_UNET: Final = (
    (re.compile(r"input_blocks\.(\d+)\."), "IN"),
    (re.compile(r"(?:middle_block|mid_block)\."), "M"),
    (re.compile(r"output_blocks\.(\d+)\."), "OUT"),
)
_DOWN: Final = re.compile(r"(down|up)_blocks\.(\d+)\.(?:(\w+?)\.(\d+)\.)?")
_LAST: Final = ("out.", "conv_norm_out.", "conv_out.")  # the end of a U-Net counts as its last block

_ENDS: Final = re.compile(r"(?:final_layer|norm_out|proj_out)\.")
_LAYER_WORDS: Final = frozenset({"blocks", "block", "layers", "layer", "h", "resblocks"})
_COMMON: Final = _LAYER_WORDS | {
    "model", "models", "transformer", "text", "language", "joint", "stream", "module", "net",
}  # fmt: skip
"""Words that occur in the names of many stacks, so that they do not distinguish stacks."""

SD_BLOCKS: Final = 26
"""The number of blocks of Stable Diffusion 1, BASE included."""

ENCODER_BLOCKS: Final = ("CLIP", "T5")
FLUX_TITLE: Final = "Flux.1"
"""The architecture whose lists also weight both text encoders (CLIP, T5) and both ends (IN, OUT)."""

_LAYERS: Final = ("resnets", "attentions", "motion_modules")

_NUMBER: Final = re.compile(r"(?:^|(?<=\.))([0-9]{1,4})(?=\.[^.]*\.)")
"""A level that is a number, with two more levels behind it."""

_TWO_LAYERS: Final = ("down_blocks.0.resnets.1.norm1.weight",)
"""A level of a U-Net has two layers or more, of which an adapter may change one alone."""
_LEVEL: Final = re.compile(r"_(?=[0-9]+(?:_|$))|(?<=[0-9])_|(?<=mid_block)_|(?<=middle_block)_")
"""Underscores of a flat name that separate levels, as far as the name alone shows it."""
_UNET_NAMES: Final = re.compile(r"(?:(?:input|output|down|up)_blocks|mid(?:dle)?_block)\.")


def _smooth(x: float) -> float:
    """Return the cubic that rises from 0 to 1 with level ends."""
    return x * x * (3 - 2 * x)


def _folded(x: float) -> float:
    """Return a number folded into [0, 1], as a strip of paper is."""
    return 1 - abs(1 - x % 2)


def _true_cubic(x: float) -> float:
    """Return the cubic of TRUE_CUBIC_HERMITE, which has 0 for its first block."""
    return (154 * x**3 - 231 * x**2 + 100 * x + 1) / 24 if x else 0.0


def _fake_cubic(x: float) -> float:
    """Return the cubic of FAKE_CUBIC_HERMITE."""
    return (152 * x**3 - 228 * x**2 + 100 * x) / 24


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _ends(count: int) -> Callable[[int], float]:
    """Return the curve that is 1 for so many blocks at each end, else 0."""
    return lambda n: float(n < count or n > LAST_BLOCK - count)


def _rings(first: int, last: int, edge: float = 0.0) -> Callable[[int], float]:
    """Return the curve that is 1 for blocks [first, last] and those opposite, `edge` for the blocks next to them."""

    def ring(n: int) -> float:
        near = min(n, LAST_BLOCK - n)
        return 1.0 if first <= near <= last else edge if near in (first - 1, last + 1) else 0.0

    return ring


def _along(curve: Callable[[float], float]) -> Callable[[int], float]:
    return lambda n: curve(n / LAST_BLOCK)


def _times(k: int) -> Callable[[float], float]:
    return lambda x: _folded(k * _smooth(x))


def _parts(k: int) -> Callable[[float], float]:
    return lambda x: _smooth(_folded(k * x))


def _down(curve: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: 1 - curve(x)


_WAVES: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType({
    **{f"SMOOTHSTEP*{k}": _times(k) for k in (2, 3, 4)}, **{f"SMOOTHSTEP/{k}": _parts(k) for k in (2, 3, 4)},
})  # fmt: skip

CURVES: Final[Mapping[str, Callable[[int], float]]] = MappingProxyType({
    "GRAD_V": lambda n: abs(12 - n) / 12,
    "GRAD_A": lambda n: 1 - abs(12 - n) / 12,
    "FLAT_25": lambda _: 0.25,
    "FLAT_75": lambda _: 0.75,
    **{f"WRAP{2 * count:02d}": _ends(count) for count in (4, 6, 7, 8)},
    "MID12_50": lambda n: 0.5 * (5 <= n <= 18),
    "OUT07": lambda n: float(n >= 18),
    "OUT12": lambda n: float(n >= 13),
    "OUT12_5": lambda n: 0.5 * (n == 12) + (n >= 13),
    "RING08_SOFT": _rings(6, 8, 0.5),
    "RING08_5": _rings(6, 9),
    "RING10_5": _rings(5, 9),
    "RING10_3": _rings(6, 10),
    "SMOOTHSTEP": _along(_smooth),
    "REVERSE-SMOOTHSTEP": _along(_down(_smooth)),
    **{name: _along(wave) for name, wave in _WAVES.items()},
    **{f"R_{name}": _along(_down(wave)) for name, wave in _WAVES.items()},
    "COSINE": _along(_cosine),
    "REVERSE_COSINE": _along(_down(_cosine)),
    "TRUE_CUBIC_HERMITE": _along(_true_cubic),
    "TRUE_REVERSE_CUBIC_HERMITE": _along(_down(_true_cubic)),
    "FAKE_CUBIC_HERMITE": _along(_fake_cubic),
    "FAKE_REVERSE_CUBIC_HERMITE": _along(_down(_fake_cubic)),
})  # fmt: skip
"""Preset for the 26 blocks of Stable Diffusion 1 → factor of the n-th block behind BASE, whose factor is 0.

Source: the presets for models of sd-webui-supermerger, written as the curves that they follow."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one base."""

    order: tuple[str, ...]
    """All blocks, in the order of the numbers in a full list."""
    few: tuple[str, ...]
    """The blocks of the short list; () if the model has no short list."""
    of: Callable[[str], str]
    """Key of the base → its block; "" for a tensor without a block, such as one of a VAE."""
    user_presets: Mapping[str, str] = field(default_factory=dict)
    """The user's presets: name → list of numbers, or the name of another preset."""
    loose: Callable[[str], bool] = lambda _: False
    """Whether a tensor of a U-Net is in no block, so that it counts as BASE or as the last; other programs differ."""

    def unnamed(self, value: str) -> frozenset[str]:
        """Return the blocks that a list does not name, whose weight is 0: those that only the full list has."""
        short = bool(self.few) and self.user_presets.get(value, value).count(",") + 1 == len(self.few)
        return frozenset(self.order) - {*self.few} if short else frozenset()

    def chosen(self, text: str) -> frozenset[str]:
        """Return the blocks named by `IN04`, `IN04-IN08`, `IN04-08`, `IN`, or several joined by +; empty if one is
        unknown."""
        blocks: set[str] = set()
        for item in text.upper().split("+"):
            first, _, last = item.partition("-")
            last = f"{first.rstrip('0123456789')}{last}" if last.isdigit() else last
            start, end = self._position(first), self._position(last or first)
            between = [] if start is None or end is None else self.order[start : end + 1]
            stack = [name for name in self.order if name.rstrip("0123456789") == item]
            if not between and not stack:
                return frozenset()
            blocks.update(between or stack)
        return frozenset(blocks)

    def _position(self, name: str) -> int | None:
        """Return the index of a block in the order, None if unknown. `IN4` and `IN004` are IN04, `MID` is M00."""
        stack = name.rstrip("0123456789")
        plain = f"{stack}{int(name[len(stack) :]):02d}" if 0 < len(name) - len(stack) < 5 else name
        known = [n for n in ("M00" if name == "MID" else name, plain) if n in self.order]
        return self.order.index(known[0]) if known else None

    def weights(self, value: str, where: str) -> Mapping[str, float]:
        """Return block → factor for a list of numbers, a preset or `ALL0.5`; UsageError for anything else."""
        value = self.user_presets.get(value, value)
        if value in (*PRESETS, FLUX_ALL, *CURVES):
            return self._preset(value, where)
        constant = re.fullmatch(r"ALL([0-9.]+)", value)
        try:
            numbers = [number(n) for n in (constant[1] if constant else value).split(",")]
            if not all(map(isfinite, numbers)):
                raise ValueError("not finite")
        except ValueError as e:
            known = (*self.user_presets, *PRESETS, FLUX_ALL, *CURVES)
            near = get_close_matches(value[:60].upper(), known, 2, 0.75)
            fix = f"give a list of numbers or one of {', '.join(known)}"
            error = UsageError(f"{value[:60]!r} is neither a list of block weights nor a preset", where,
                               f"did you mean {' or '.join(near)}?" if near else fix)  # fmt: skip
            raise error.instead(f"{BLOCK_WEIGHTS}={value}", *(f"{BLOCK_WEIGHTS}={name}" for name in near[:1])) from e
        if constant:
            return dict.fromkeys(self.order, numbers[0])
        for names in (self.order, self.few):
            if len(names) == len(numbers):
                return {**dict.fromkeys(self.order, 0.0), **dict(zip(names, numbers, strict=True))}
        expected = f"{len(self.order)}: {' '.join(self.order)}"
        expected += f"; or {len(self.few)}: {' '.join(self.few)}" if self.few else ""
        raise UsageError(f"{len(numbers)} block weights do not fit this base", where, f"give {expected}")

    def _preset(self, name: str, where: str) -> Mapping[str, float]:
        of_flux = self.order[:2] == ("CLIP", "T5")
        if name == "ALL" or (name == FLUX_ALL and of_flux):
            return dict.fromkeys(self.order, 1.0)
        fix = f"this base has {listed(self.order, 8)}; give a list of {len(self.order)} numbers"
        if name == FLUX_ALL or (name in CURVES and not (len(self.order) == SD_BLOCKS and "M00" in self.order)):
            model = FLUX_TITLE if name == FLUX_ALL else f"the {SD_BLOCKS} blocks of Stable Diffusion 1"
            raise UsageError(f"the preset {name} is for {model}", where, fix)
        if name in CURVES:
            return {block: CURVES[name](n - 1) if n else 0.0 for n, block in enumerate(self.order)}
        if PRESETS[name] and "M00" not in self.order:
            raise UsageError(f"the preset {name} is for U-Nets", where, fix)
        full = {block for item in PRESETS[name].split() for block in self.chosen(item)}
        return {block: float(block in full) for block in self.order}


def blocks(names: Names) -> Blocks:
    """Return the blocks of a base."""
    # The blocks of the main network: those of a U-Net in its authors' names, else those of its stacks.
    main, *others = names.parts or [Component("denoiser", "model", "")]
    has_down = any(body.startswith(("input_blocks.", "down_blocks.")) for body in main.keys)
    owner = {key: body for body, key in main.keys.items()} if has_down else _words(main)
    if has_down and any(_UNET[1][0].match(body) for body in main.keys):
        block_of, order, ends = _unet(main)
        few = tuple(SHORT_LISTS.get(sum(name.startswith("IN") for name in order), ()))
    else:
        block_of, order = _stacks(main, [*owner.values()])
        few, ends = (), lambda _: False
    # All other networks are one block each; for Flux they, and the layers outside its stacks, have names.
    encoders = {part.label: BASE_BLOCK for part in others if part.kind}
    if names.architecture == FLUX_TITLE:
        encoders = {part.label: "CLIP" if part.kind.startswith("clip") else "T5" for part in others if part.kind}
        order = (*ENCODER_BLOCKS, "IN", *order[1:], "OUT")

    def of(key: str) -> str:
        body = owner.get(names.without_wrappers(key))
        if body is None:
            return encoders.get(names.component(key), "")
        block = block_of(body)
        if names.architecture == FLUX_TITLE and block == BASE_BLOCK:
            return "OUT" if _ENDS.match(body) else "IN"
        return block

    def loose(key: str) -> bool:
        body = owner.get(names.without_wrappers(key))
        return body is not None and ends(body)

    return Blocks(order, few, of, names.presets, loose)


def _unet(part: Component) -> tuple[Callable[[str], str], tuple[str, ...], Callable[[str], bool]]:
    """Return (function name → block, all blocks, function name → whether it is in none) of a U-Net in its authors'
    layout or in that of diffusers.

    In diffusers' layout, a level of the down path has n layers and then a downsampler, which is a block of its own. A
    level of the up path has n + 1 layers; its upsampler belongs to the last of these.
    """
    down = [int(m[4]) for body in part.keys if (m := _DOWN.match(body)) and m[1] == "down" and m[3] in _LAYERS]
    step = max(down, default=1) + 2  # blocks of a level: its layers and the downsampler

    def inner(body: str) -> str:
        for pattern, stack in _UNET:
            if match := pattern.match(body):
                return f"{stack}{int(match[1]) if match.groups() else 0:02d}"
        if body.startswith("conv_in."):
            return "IN00"
        if body.startswith(_LAST):
            return "OUT"
        match = _DOWN.match(body)
        if match is None or match[3] is None:
            return BASE_BLOCK
        level, layer = int(match[2]), int(match[4])
        if match[1] == "down":
            return f"IN{step * level + (layer + 1 if match[3] in _LAYERS else step):02d}"
        return f"OUT{step * level + (layer if match[3] in _LAYERS else step - 1):02d}"

    names = {inner(body) for body in part.keys} - {"OUT", BASE_BLOCK}
    order = (BASE_BLOCK, *sorted(b for b in names if b[0] == "I"), "M00", *sorted(b for b in names if b[0] == "O"))
    last = order[-1]
    return (
        lambda body: last if (block := inner(body)) == "OUT" else block,
        order,
        lambda body: inner(body) in ("OUT", BASE_BLOCK),
    )


def words(names: Names) -> dict[str, str]:
    """Return key → name in diffusers' words, of the tensors of a base."""
    return {key: word for part in names.parts for key, word in _words(part).items()}


def _words(part: Component) -> dict[str, str]:
    """Return key → name of every tensor, in diffusers' words if the model has them: a list of numbers then means the
    same blocks in every layout."""
    words = {key: body for body, key in part.keys.items()}
    if part.architecture is not None and part.layout != part.architecture.canonical:
        words |= {p.key: name for name, view in part.views("").items() for p in view.row_slices}
    return words


def _stacks(
    part: Component, names: Sequence[str], is_stack: Callable[[str], bool] = lambda _: False
) -> tuple[Callable[[str], str], tuple[str, ...]]:
    """Return (function name → block, all blocks) of a model of stacked layers with these names of tensors.

    A stack is two or more modules that differ in a number only, or what `is_stack` names. Stacks are in the
    order of their paths, single blocks last, whatever the order of the file is: diffusers' names sort Flux.1's single
    blocks before its double blocks.
    """
    layers: dict[str, set[int]] = {}
    for body in names:
        path, number = _layer(body)
        if path is not None:
            layers.setdefault(path, set()).add(number)
    paths = (path for path, numbers in layers.items() if len(numbers) > 1 or is_stack(path))
    stacks = {path: layers[path] for path in sorted(paths, key=lambda p: (_is_single(p), p))}
    letters: dict[str, str] = {}
    taken: dict[str, str] = {}  # letters → the same ones, with the last one repeated until nothing else has them
    single = any(map(_is_single, stacks))
    for path in stacks:
        letter = _letters(path, single=single, alone=len(stacks) == 1)
        letter = letter or ("B" if part.role == "denoiser" and part.label != "model" else "L")
        first, letter = letter, taken.get(letter, letter)
        while letter in taken:
            letter += letter[-1]
        taken[first] = taken[letter] = letters[path] = letter

    def inner(body: str) -> str:
        path, number = _layer(body)
        return f"{letters[path]}{number:02d}" if path in letters else BASE_BLOCK

    return inner, (
        BASE_BLOCK,
        *(f"{letters[path]}{n:02d}" for path, numbers in stacks.items() for n in sorted(numbers)),
    )


def _layer(body: str) -> tuple[str | None, int]:
    """Return (path of the stack, number) of the outermost layer that holds a tensor; (None, 0) without a layer.

    A number right above the parameter counts the steps of a small Sequential, not layers.
    """
    match = _NUMBER.search(body)
    return (None, 0) if match is None else (body[: max(match.start() - 1, 0)], int(match[1]))


def _letters(path: str, *, single: bool, alone: bool) -> str:
    """Return the initials of the words that distinguish this stack from the others; "" if no word does.

    Next to a stack of single blocks, a stack without such words holds double blocks: D. `alone`: it is the only stack.
    """
    for level in () if alone else reversed(path.split(".")):
        words = [word for word in level.split("_") if word and word not in _COMMON and (single or word != "double")]
        if words:
            return "".join(word[0] for word in words if word[0].isalpha()).upper()
    return "D" if single else ""


def _is_stack(path: str | None) -> bool:
    """Return whether the last word of a path is one for the layers of a stack, even if only one of them is present."""
    return path is not None and re.split("[._]", path)[-1] in _LAYER_WORDS


def _is_single(path: str) -> bool:
    return path.rpartition(".")[2].startswith("single")


def groups(lookup: Names) -> Groups:
    """Return the groups of the tensors of a base: ("components", part of the model), and ("blocks", part and block) for
    a tensor that is in a block."""
    blocks_of_base = blocks(lookup)
    block_of, numbers = blocks_of_base.of, {block: n for n, block in enumerate(blocks_of_base.order)}
    parts = {part.label: n for n, part in enumerate(lookup.parts)}

    def of_key(key: str) -> Iterator[tuple[str, str]]:
        component, block = lookup.component(key), block_of(key)
        yield "components", component
        if block:
            yield "blocks", f"{component} {block}"

    def place(group: str) -> tuple[int, int]:
        component, _, block = group.partition(" ")
        return parts.get(component, len(parts)), numbers.get(block, len(numbers))

    return Groups(of_key, place)


def network_of(name: str, denoiser: str = "denoiser") -> str:
    """Return the network that the prefixes of a module's name mean; "model" if they mean none.

    `denoiser`: what the denoiser is called, whose prefixes are the same for many models.
    """
    return _network(innermost(name)[0], denoiser)


def _network(hint: str, denoiser: str) -> str:
    return {"any": "model", "denoiser": denoiser}.get(hint, hint.removeprefix("="))


def adapter_groups(modules: Mapping[str, Shape]) -> Groups:
    """Return the groups of an adapter's modules, which have the names of those of their base: `unet IN04`, `te BASE`.

    `modules`: name → the shape of its weight, () if unknown. The blocks are those of the architecture that the names
    fit; without one, of a model that has the stacks which the adapter changes.
    """
    # The modules of the denoiser, by their names without prefixes.
    inside = {name: innermost(name) for name in modules}
    of_denoiser = {name: body for name, (hint, body) in inside.items() if hint in ("any", *DENOISERS)}
    bodies = {body: modules[name] for name, body in of_denoiser.items()}
    written = {body: f"{_LEVEL.sub('.', body)}.weight" for body in bodies}
    # Their blocks: of a U-Net by the names alone, else by the architecture that the names fit.
    fitting, architecture, label = architectures(modules_of(bodies)), None, denoiser_of(modules)
    forms_of_fitting = [parameter_forms().get(a.file.stem, ()) for a in fitting]
    has_middle = all(not forms or any(map(_UNET[1][0].match, forms)) for forms in forms_of_fitting)
    if has_middle and any(map(_UNET_NAMES.match, written.values())):  # the names say all
        keys = dict.fromkeys((*written.values(), *_TWO_LAYERS), "")
        block_of, order, _ = _unet(Component("denoiser", label, "", keys=keys))
    else:
        architecture, known = canonical_names(bodies)
        written |= known
        forms = parameter_forms().get(architecture.file.stem, ()) if architecture else ()
        stacked = (name for name in (form.replace("#", "0") for form in forms) if _is_stack(_layer(name)[0]))
        named = architecture or any(hint in DENOISERS for hint, _ in inside.values())
        part = Component("denoiser", label if named else "model", "")
        block_of, order = _stacks(part, [*written.values(), *stacked], _is_stack)
    # Flux lists its text encoders and the layers outside its stacks as blocks too.
    encoders = architecture.text_encoders if architecture else {}
    of_flux = architecture is not None and architecture.title == FLUX_TITLE
    if of_flux:
        order = (*ENCODER_BLOCKS, "IN", *order[1:], "OUT")
    network_names = {hint: _network(hint, label) for hint in {hint for hint, _ in inside.values()}}
    networks = [*dict.fromkeys((label, *sorted(network_names.values())))]

    def of_module(name: str) -> Iterator[tuple[str, str]]:
        hint, body = inside[name]
        network = network_names[hint]
        yield "components", network
        if hint == "vae":
            return
        block = block_of(written[body]) if body in written else BASE_BLOCK
        if of_flux and block == BASE_BLOCK:
            kind = encoders.get(network, network)
            encoder = "CLIP" if kind.startswith("clip") else "T5"
            block = encoder if body not in written else "OUT" if _ENDS.match(written[body]) else "IN"
        yield "blocks", f"{network} {block}"

    def place(group: str) -> tuple[int, int]:
        network, _, block = group.partition(" ")
        return networks.index(network), order.index(block) if block in order else len(order)

    return Groups(of_module, place)


def in_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts the names of blocks, and numbers inside them by their size."""
    parts = re.split("([0-9]+)", name)
    return tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in parts)
