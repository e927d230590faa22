"""The dialects that adapters are written in: prefix of each network, words, endings, and the place of α. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from ..adapters.modules import Module
from ..adapters.peft.methods import PEFT_METHODS
from ..adapters.suffixes import LORA_ROWS, SUFFIXES
from ..errors import UsageError
from ..models.architectures import Architecture
from ..models.components import ENCODER_IDS, LOOSE, UNSURE
from ..models.network import Component
from ..options import KEEP
from ..text import shown

NATIVE, COMFYUI, CANONICAL = "native", "comfyui", ""

DIFFUSERS_WORDS: Final = frozenset({"sd1", "sd2", "qwen_image", "zimage", "ming_image"})
"""Architectures that kohya's and musubi's trainers load in diffusers' words; all others in those of their authors."""

PRIOR: Final = {"prior": "prior_unet"}
"""Name of a denoiser in diffusers → in OneTrainer, where they differ."""

OLDER_IN_AI_TOOLKIT: Final = ("sd1", "sd2", "sdxl", "sdxl_refiner", "sd3", "flux", "auraflow", "pixart", "lumina2")
"""Architectures whose adapters ai-toolkit writes as diffusers does; those of later ones begin with diffusion_model."""

_OF_PEFT: Final = frozenset(ending for method in PEFT_METHODS.values() for ending in method.suffixes)
PRODUCT_ALGORITHMS: Final = (*PEFT_METHODS["LOHA"].algorithms, *PEFT_METHODS["LOKR"].algorithms)
"""Algorithms of LyCORIS for which PEFT has methods with the same tensors."""

_OF_TRAINERS: Final = {*LORA_ROWS, *PRODUCT_ALGORITHMS}
_CONFIGURED: Final = {row for method in PEFT_METHODS.values() for row in method.algorithms} - _OF_TRAINERS
"""Algorithms that a file without its configuration does not show."""

COPIED_ENDINGS: Final[Mapping[tuple[str, str, str], str]] = MappingProxyType(
    {
        (name, row.parameter, row.slot): row.ending
        for row in reversed(SUFFIXES)
        if row.ending not in _OF_PEFT
        for name in row.algorithms
        if name not in _CONFIGURED
    }
)
"""(algorithm, parameter, slot) → the ending in files of LyCORIS and kohya's scripts."""


@dataclass(frozen=True)
class Dialect:
    """The spelling of adapters in one program."""

    name: str
    denoiser: str
    """Prefix of a denoiser's modules; `{label}` is the component's name in diffusers, `{label_}` OneTrainer's."""
    encoder: str
    """Prefix of a text encoder's modules: `{n}` is its number, `{_n}` the number from 2 on, `{id}` ComfyUI's name."""
    vae: str
    words: str
    """The layout whose names modules have: NATIVE or CANONICAL."""
    endings: Mapping[str, str]
    """Slot → ending. A slot without an ending cannot be written; `w_norm` and `b_norm` are those of norms."""
    flat: bool = False
    """Whether dots of a module's path are underscores."""
    alpha: bool = True
    """Whether α is stored; otherwise it is folded into the up factor, and α equals the rank."""
    copies: bool = True
    """Whether tensors of LyCORIS' algorithms are written as they are."""
    products: tuple[str, ...] = ()
    """Algorithms that it writes as they are where it copies no others: α is in its configuration then."""
    largest: bool = False
    """Whether an encoder with several numbers in adapters has the largest one (kohya: T5 of Flux is te3)."""
    one_rank: bool = False
    """Whether all factors of a folder get the largest rank of them, filled with zeros: the user gave one number."""
    folder: bool = False
    from_top: bool = False
    """Whether its program names layers from the top of the model in memory: PEFT, and LyCORIS' wrapper."""
    whole: bool = False
    """Whether new values of whole tensors are stored under the parameter's name."""
    bundles: bool = False
    """Whether embeddings that OneTrainer stores with the adapter have a place: `bundle_emb.`."""
    table: str = ""
    """The only table whose names it has, such as XLabs' for the attention of Flux."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Architecture → the dialect that the program writes for it instead."""
    canonical: frozenset[str] = DIFFUSERS_WORDS
    """Architectures whose modules have diffusers' words in spite of `words`."""
    aliases: tuple[str, ...] = field(default=())

    level: str | None = None
    """The level above the layers for `from_top`, such as `transformer.` of GPT-2 with a head; None: the base's."""

    @property
    def any_model(self) -> bool:
        """Whether it has names for the layers of any model, and not of some layers or one file alone."""
        return bool(self.endings) and not self.table and not self.others

    def of(self, architecture: Architecture | None) -> Dialect:
        """Return the dialect that the program writes for a model."""
        name = self.others.get(architecture.file.stem, "") if architecture else ""
        return DIALECTS[name] if name else self

    def copied(self, module: Module, algorithm: str, parameter: str, slot: str) -> str | None:
        """Return the ending of a tensor that is copied; None where the dialect has none."""
        return COPIED_ENDINGS.get((algorithm, parameter, slot)) if self.copies or algorithm in self.products else None

    def layout(self, part: Component) -> str:
        """Return the layout whose words the modules of a network have."""
        if self.table:
            return self.table
        if part.kind or part.role != "denoiser" or self.words == CANONICAL:
            return CANONICAL
        if part.architecture is None or part.architecture.file.stem in self.canonical:
            return CANONICAL
        return COMFYUI if not self.flat and COMFYUI in part.architecture.tables else self.words

    def prefix(self, part: Component, encoders: Mapping[str, str]) -> str:
        """Return the prefix of a network. `encoders`: name of an encoder in adapters → kind, of this architecture."""
        if part.role == "vae":
            return self.vae
        if not part.kind and part.label != "te":
            label = part.label if part.label in ("unet", "transformer_2", "prior") else "transformer"
            return self.denoiser.format(label=label, label_=PRIOR.get(label, label))
        encoder = encoders.get(part.label, part.kind) if part.kind in UNSURE else part.kind
        names = [name for name, kind in encoders.items() if kind == encoder] or [part.label]
        numbers = sorted(int(name[2:]) for name in names if name[:2] == "te" and name[2:].isdigit()) or [1]
        number = numbers[-1 if self.largest else 0]
        alone = len({*encoders.values()}) < 2
        ids = {kind: name for name, kind in reversed([*ENCODER_IDS.items()])}
        return self.encoder.format(n="" if alone else number, _n=f"_{number}" if number > 1 else "",
                                   id=ids.get(encoder, encoder or "llm"))  # fmt: skip

    def level_of(self, part: Component) -> str:
        """Return the level above the layers of a network for a program that names them from the top of the model in
        memory, whose keys a base of transformers has."""
        if not self.from_top or part.kind or part.label != "model" or part.prefix not in LOOSE:
            return ""
        wrapped = {*part.prefix.split(".")} <= {"module", "_orig_mod", ""}
        return self.level if self.level is not None else "" if wrapped else part.prefix

    def key(self, prefix: str, module: str, ending: str) -> str:
        """Return the key of one tensor of a module."""
        return prefix + (module.replace(".", "_") if self.flat else module) + ending


_KOHYA: Final = {
    "up": ".lora_up.weight", "down": ".lora_down.weight", "magnitude": ".dora_scale", "diff": ".diff",
    "diff_b": ".diff_b", "w_norm": ".w_norm", "b_norm": ".b_norm",
}  # fmt: skip
_COMFY: Final = {
    "up": ".lora_B.weight", "down": ".lora_A.weight", "magnitude": ".dora_scale", "diff": ".diff", "diff_b": ".diff_b",
}  # fmt: skip
_DIFFUSERS: Final = {
    "up": ".lora_B.weight", "down": ".lora_A.weight", "magnitude": ".lora_magnitude_vector", "up_bias": ".lora_B.bias",
}  # fmt: skip
_PEFT: Final = {**_DIFFUSERS, "table_up": ".lora_embedding_B", "table_down": ".lora_embedding_A"}

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Dialect("kohya", "lora_unet_", "lora_te{n}_", "lora_vae_", NATIVE, _KOHYA, flat=True,
                    bundles=True, largest=True,
                    aliases=("musubi", "onetrainer-kohya", "webui", "a1111", "automatic1111", "forge", "sd-scripts")),
            Dialect("lycoris", "lycoris_", "lycoris_", "lycoris_", CANONICAL, _KOHYA, flat=True,
                    from_top=True),
            Dialect("onetrainer", "lora_{label_}_", "lora_te{n}_", "lora_vae_", CANONICAL, _KOHYA, flat=True,
                    bundles=True),
            Dialect("comfy", "diffusion_model.", "text_encoders.{id}.transformer.", "vae.", NATIVE, _COMFY,
                    canonical=frozenset(), aliases=("native", "onetrainer-comfy", "comfyui")),
            Dialect("diffusers", "{label}.", "text_encoder{_n}.", "vae.", CANONICAL, _DIFFUSERS, alpha=False,
                    copies=False),
            Dialect("ai-toolkit", "diffusion_model.", "text_encoders.{id}.transformer.", "vae.", NATIVE, _COMFY,
                    others=dict.fromkeys(OLDER_IN_AI_TOOLKIT, "diffusers")),
            Dialect("xlabs", "", "", "", "xlabs", {"up": ".up.weight", "down": ".down.weight"}, alpha=False,
                    copies=False, table="xlabs"),
            Dialect("peft", "base_model.model.", "base_model.model.", "base_model.model.", CANONICAL, _PEFT,
                    alpha=False, copies=False, products=PRODUCT_ALGORITHMS, folder=True, from_top=True, whole=True),
        )
    }
)  # fmt: skip
"""Name of a dialect → how it is written (adapter-formats: containers, suffixes)."""


OF_INPUT: Final = Dialect(KEEP, "", "", "", CANONICAL, {})
"""Stands for the dialect of the input, which is known when the input is opened."""


def names() -> Iterator[str]:
    """Yield every name that `--to` takes."""
    yield KEEP
    for row in DIALECTS.values():
        yield from (row.name, *row.aliases)


def dialect(name: str) -> Dialect | None:
    """Return the dialect with a name or an alias, in any case: PEFT, ComfyUI, ai_toolkit."""
    plain = name.lower().replace("_", "-")
    if plain == KEEP:
        return OF_INPUT
    return next((row for row in DIALECTS.values() if plain in (row.name, *row.aliases)), None)


def stated_dialect(name: object, option: str) -> Dialect:
    """Return the dialect that an option names; UsageError for a name that no dialect has."""
    row = dialect(name) if isinstance(name, str) else None
    if row is not None:
        return row
    near = get_close_matches(str(name).lower(), names(), 1, 0.6)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join((KEEP, *DIALECTS))}"
    raise UsageError(f"the format {shown(name)!r} does not exist", option, fix).instead(str(name), *near)
