"""What an output says of itself: the metadata entries of its header, the hashes and configurations that loaders read
there, and the size of a file before its tensors are made. No torch.

Names of models in the metadata that trainers write into adapters. Facts: sd-scripts 48d368f
(library/sai_model_spec.py, library/train_util.py, networks/), musubi-tuner 30c658c (src/musubi_tuner/networks,
dataset/architectures). The legacy hash is the one by which webui's Additional Networks knows a file; its other one is
the SHA-256 of the data: library/train_util.py, `precalculate_safetensors_hashes`, `addnet_hash_safetensors`,
`addnet_hash_legacy`. What diffusers' loader takes for the configuration of an adapter: diffusers 0.42,
loaders/lora_base.py and utils/peft_utils.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from ..adapters.peft.rules import ADAPTER_METADATA
from ..command import Command
from ..dtypes import ITEM_BYTES, Shape
from ..files.checkpoint import Index
from ..files.safetensors import LEGACY_HASH, layout
from ..models.architectures import Architecture
from ..paths import input_name
from ..planning.header_entries import TITLE
from ..planning.recipe import KEY
from .job import FACTORS, WHOLE, AdapterJob
from .rank_rules import SIZE, Rule

BIASED: Final = "lora_bias"
"""The entry of PEFT's configuration that says whether up factors have biases."""

COMPONENT: Final = re.compile(r"(unet|transformer(?:_2)?|text_encoder(?:_[23])?)\.(.+)\.(lora_[AB]\.weight|lora_B\.bias"
                              r"|lora_magnitude_vector)")  # fmt: skip
"""Keys of diffusers' dialect: component, module, tensor."""


CLIP_LEVEL: Final = "text_model."
"""The level of the layers of CLIP that transformers has until 5.5. diffusers takes it from keys where the encoder lacks
it, but not from this entry; PEFT finds a target without it by the end of its name."""


def adapter_metadata(shapes: Mapping[str, Shape]) -> str:
    """Return the entry for a file in diffusers' dialect, where α is the rank; "" for another file. `shapes`: tensor →
    its shape."""
    parts_of: dict[str, dict[str, int]] = {}
    more: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        if (m := COMPONENT.fullmatch(name)) is None:
            return ""
        more.setdefault(m[1], set()).add(m[3])
        if m[3] == "lora_A.weight":
            parts_of.setdefault(m[1], {})[m[2]] = shape[0]
    parts = ((part, _config(ranks, more[part])) for part, ranks in parts_of.items())
    return json.dumps(dict(_prefixed(parts)), sort_keys=True) if parts_of else ""


def _config(ranks: dict[str, int], kinds: set[str]) -> dict[str, Any]:
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {_pattern(name): rank for name, rank in ranks.items() if rank != usual}
    targets = sorted(name.removeprefix(CLIP_LEVEL) for name in ranks)
    return {"r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others,
            "target_modules": targets, "use_dora": "lora_magnitude_vector" in kinds,
            BIASED: "lora_B.bias" in kinds}  # fmt: skip


def _pattern(name: str) -> str:
    """Return the pattern of a module with or without the level."""
    level = f"(?:{re.escape(CLIP_LEVEL)})?" if name.startswith(CLIP_LEVEL) else ""
    return f"^{level}{re.escape(name.removeprefix(CLIP_LEVEL))}$"


def _prefixed(parts: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    for part, config in parts:
        yield from ((f"{part}.{name}", value) for name, value in config.items())


HASHES: Final = ("sshs_model_hash", "sshs_legacy_hash")

DTYPE_ORDER: Final = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "F64", "I64", "U64"),
)
"""dtypes as safetensors sorts tensors: the last ones first, and by name within a dtype."""


class HashedTensor(Protocol):
    """One tensor of a file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def pieces(self) -> Iterable[memoryview]:
        """Yield its bytes in order."""


def has_hashes(command: Command, inputs: Sequence[Index]) -> bool:
    """Return whether the metadata of an output may have these hashes."""
    return command.inputs != "adapter" or any(name in index.metadata for index in inputs for name in HASHES)


def legacy_hash(tensors: Sequence[HashedTensor], metadata: Mapping[str, str]) -> str:
    """Return eight digits of the SHA-256 of 64 KiB behind the first MiB of the file.

    The file is the one that safetensors would write with the `ss_` entries alone.
    """
    ordered = sorted(tensors, key=lambda t: (-DTYPE_ORDER.index(t.dtype), t.name))
    of_trainer = {name: value for name, value in metadata.items() if name.startswith("ss_")}
    digest, at, (first, count) = hashlib.sha256(), 0, LEGACY_HASH
    header = _header(ordered, of_trainer)
    for pieces in ([memoryview(header)], *(tensor.pieces() for tensor in ordered)):
        for piece in pieces:
            low, high = max(first - at, 0), min(first + count - at, len(piece))
            if low < high:
                digest.update(piece[low:high])
            at += len(piece)
            if at >= first + count:
                return digest.hexdigest()[:8]
    return digest.hexdigest()[:8]


def _header(tensors: Sequence[HashedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header as safetensors writes it: padded with spaces to 8 bytes."""
    aligned = layout([(t.name, t.dtype, t.shape) for t in tensors], metadata, 0)
    text = aligned[8:].rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


METADATA_BYTES: Final = 4096
"""Bytes that the metadata of a file usually takes in its header."""

HeaderEntry = tuple[str, str, Shape]
"""Name, dtype and shape, as in the header."""


def factor_shapes(shape: Shape, rank: int) -> dict[str, Shape]:
    """Return the shapes of both factors of a weight by their slots: of a linear layer, or of a convolution."""
    return {"down": (rank, *shape[1:]), "up": (shape[0], rank, *(1 for _ in shape[2:]))}


def _entries(tensors: Sequence[HeaderEntry]) -> dict[str, str]:
    """Return what diffusers' loader reads of the tensors, which may be longer than their part of the header."""
    text = adapter_metadata({name: shape for name, _, shape in tensors})
    return {ADAPTER_METADATA: text} if text else {}


def planned_size(modules: Iterable[tuple[int, Sequence[HeaderEntry]]], rule: Rule, inputs: Sequence[Index] = ()) -> int:
    """Return the bytes of a file, at most, where values decide its ranks: `--rank size:` bounds all factors together,
    of which each module has one direction at least. `modules`: rank of each, 0 for a whole matrix, and its tensors.
    `inputs`: those whose metadata it keeps where they agree."""
    tensors, factors, least, others = list[HeaderEntry](), 0, 0, 0
    for rank, rows in modules:
        tensors += rows
        size = sum(prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in rows if shape)
        others += sum(ITEM_BYTES[dtype] for _, dtype, shape in rows if not shape)
        if rank:
            factors, least = factors + size, least + size // rank
        else:
            others += size
    if rule.name == SIZE:
        factors = min(factors, max(least, int(rule.value)))
    first, *more = [index.metadata for index in inputs] or [{}]
    same = {name: value for name, value in first.items() if all(other.get(name) == value for other in more)}
    return len(layout(tensors, {**same, **_entries(tensors)}, 0)) + METADATA_BYTES + factors + others


def header_room(tensors: Iterable[HeaderEntry], inputs: Sequence[Index]) -> int:
    """Return the bytes that the header of a file probably takes at most. `inputs`: those whose metadata it keeps."""
    entries: Mapping[str, str] = {name: value for index in inputs for name, value in index.metadata.items()}
    tensors = [*tensors]
    return len(layout(tensors, {**entries, **_entries(tensors)}, 0)) + METADATA_BYTES * (1 + len(inputs))


PLAIN_MODULE: Final = "networks.lora"
"""The network module of a plain LoRA where the model has no other."""

LYCORIS_MODULE: Final = "lycoris.kohya"

SPEC: Final = "1.0.0"
"""The version of ModelSpec that is written."""

_STABILITY: Final = "https://github.com/Stability-AI/generative-models"


class TrainerEntries(NamedTuple):
    """The entries of adapters for one model; "" where its trainers have none."""

    module: str = PLAIN_MODULE
    version: str = ""  # ss_base_model_version
    architecture: str = ""  # modelspec.architecture, without the kind of adapter
    implementation: str = ""
    v2: str = ""  # ss_v2, of the models of Stable Diffusion


TRAINED_MODELS: Final = MappingProxyType({
    # architecture file: network module, ss_base_model_version, modelspec.architecture, modelspec.implementation
    "sd1": TrainerEntries(PLAIN_MODULE, "sd_v1", "stable-diffusion-v1", "diffusers", "False"),
    "sd2": TrainerEntries(PLAIN_MODULE, "sd_v2", v2="True"),
    "sdxl": TrainerEntries(PLAIN_MODULE, "sdxl_base_v1-0", "stable-diffusion-xl-v1-base", _STABILITY, "False"),
    "sd3": TrainerEntries("networks.lora_sd3", "", "stable-diffusion-3", _STABILITY),
    "flux": TrainerEntries("networks.lora_flux", "flux1", "flux-1", "https://github.com/black-forest-labs/flux"),
    "chroma": TrainerEntries("networks.lora_flux", "chroma", "chroma", "https://huggingface.co/lodestones/Chroma"),
    "lumina2": TrainerEntries("networks.lora_lumina", "lumina2", "lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0"),
    "hunyuan_image": TrainerEntries("networks.lora_hunyuan_image", "hunyuan_image_2.1", "hunyuan-image-2.1",
                             "https://github.com/Tencent-Hunyuan/HunyuanImage-2.1"),
    "anima": TrainerEntries("networks.lora_anima", "anima"),
    "hunyuan_video": TrainerEntries(PLAIN_MODULE, "hunyuan_video"),
    "wan": TrainerEntries("networks.lora_wan", "wan_2.1"),
    "qwen_image": TrainerEntries("networks.lora_qwen_image", "qwen_image"),
    "zimage": TrainerEntries("networks.lora_zimage", "z_image"),
    "flux2": TrainerEntries("networks.lora_flux_2", "flux_2"),
    "hunyuan_video15": TrainerEntries("networks.lora_hv_1_5", "hunyuan_video_1_5"),
})  # fmt: skip
"""Stem of an architecture's file → its entries."""


ANEW: Final = (*HASHES, "modelspec.hash_sha256", KEY, "ss_network_dim", "ss_network_alpha", ADAPTER_METADATA)
"""Entries that are never those of an input."""

DOWN_ENDINGS: Final = (".lora_down.weight", ".lora_A.weight", ".lora.down.weight", ".lora_linear_layer.down.weight")
OF_WEBUI: Final = (".lora_down.weight", ".alpha", ".diff", ".diff_b", ".lokr_w1")
"""Endings of dialects whose readers know the hashes of webui."""


NETWORK_ARGUMENTS: Final = "ss_network_args"
LONGEST_ARGUMENTS: Final = 1 << 20  # letters of an input's arguments


class OutputMetadata:
    """The facts from which the metadata of an output follows, known when its tensors are made.

    `layers`: label → facts of the report. `architecture`: that of the base, if it is known.
    """

    def __init__(
        self, job: AdapterJob, inputs: Sequence[Index], layers: Mapping[str, Mapping[str, Any]],
        tensors: Sequence[HashedTensor], architecture: Architecture | None,
    ) -> None:  # fmt: skip
        self.job, self.layers, self.tensors = job, layers, tensors
        self.kind = job.command.inputs  # the entries of one adapter stay, those of a checkpoint are no adapter's
        self.inputs = [] if self.kind == "checkpoints" else [*inputs]
        self.known = TRAINED_MODELS.get(architecture.file.stem if architecture else "", TrainerEntries())
        self.kernels = {
            t.name.removesuffix(end)
            for t in tensors
            for end in DOWN_ENDINGS
            if t.name.endswith(end) and prod(t.shape[2:]) > 1
        }

    def entries(
        self, recipe: Callable[[Sequence[str]], Mapping[str, Any]], digest: Callable[[], str]
    ) -> dict[str, str]:
        """Return all entries. `recipe` makes the recipe, given the names of the entries that were dropped; `digest`
        returns the SHA-256 of the tensors in their order."""
        names = {i for index in self.inputs for i in index.metadata}
        entries = self._still_true()
        dropped = sorted(names - entries.keys() - {*ANEW, "modelspec.date"})
        read = any(t.name.endswith(OF_WEBUI) for t in self.tensors)
        named = read and self.kind in ("adapters", "checkpoints")
        trained = named or any(name.startswith("ss_") for name in names) or not self.inputs
        if trained:
            entries |= dict(self._network(entries))
        entries |= dict(self._spec(entries))
        entries[KEY] = json.dumps(recipe(dropped), ensure_ascii=False, separators=(",", ":"))
        if (loader := adapter_metadata({t.name: t.shape for t in self.tensors})) != "":
            entries[ADAPTER_METADATA] = loader
        if bool(names & {*HASHES}) if self.kind == "adapter" else trained and read:
            entries |= {HASHES[0]: digest(), HASHES[1]: legacy_hash(self.tensors, entries)}
        return {"format": "pt"} | entries

    def _still_true(self) -> dict[str, str]:
        """Return the inputs' entries that stay true."""
        if not self.inputs:
            return {}
        *others, last = self.inputs
        same = {k: v for k, v in last.metadata.items()
                if self.kind == "snapshots" or all(i.metadata.get(k) == v for i in others)}  # fmt: skip
        gone = ANEW if self.kind == "adapter" else (*ANEW, "modelspec.date")
        return {name: value for name, value in same.items() if name not in gone}

    def _network(self, entries: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the entries of sd-scripts: the module, rank and α of the linear layers, and the arguments."""
        factored = {name: layer for name, layer in self.layers.items() if layer["rank"]}
        linear = {name: layer for name, layer in factored.items() if name not in self.kernels} or factored
        yield "ss_network_dim", _common_value(str(layer["rank"]) for layer in linear.values())
        yield "ss_network_alpha", _common_value(f"{x['alpha']:g}" for x in linear.values() if x["alpha"] is not None)
        algorithms = {str(layer["algorithm"]) for layer in self.layers.values()}
        plain = algorithms == {FACTORS} and not any(
            t.name.endswith((".lora_mid.weight", ".dora_scale")) for t in self.tensors
        )
        before = entries.get("ss_network_module", "")
        module = before if before.startswith("networks.lora") else self.known.module
        yield "ss_network_module", module if plain else before if before.startswith("lycoris") else LYCORIS_MODULE
        arguments = _arguments(entries.get(NETWORK_ARGUMENTS, ""))
        if plain:
            arguments = {name: value for name, value in arguments.items() if name not in ("algo", "preset", "factor")}
        elif algorithms - {FACTORS}:
            others = sorted(algorithms - {FACTORS, WHOLE}) or [WHOLE]
            arguments["algo"] = others[0] if len(others) == 1 else arguments.get("algo", others[0])
        kernels = {name: layer for name, layer in factored.items() if name in self.kernels}
        arguments = {name: value for name, value in arguments.items() if name not in ("conv_dim", "conv_alpha")}
        if kernels:
            arguments["conv_dim"] = _common_value(str(layer["rank"]) for layer in kernels.values())
            arguments["conv_alpha"] = _common_value(
                f"{x['alpha']:g}" for x in kernels.values() if x["alpha"] is not None
            )
        if arguments or NETWORK_ARGUMENTS in entries:
            yield NETWORK_ARGUMENTS, json.dumps(arguments)
        if not self.inputs:
            yield from (
                (n, v) for n, v in (("ss_base_model_version", self.known.version), ("ss_v2", self.known.v2)) if v
            )

    def _spec(self, entries: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the entries of ModelSpec that are written anew."""
        has_spec = any(name.startswith("modelspec.") for name in entries)
        if self.kind == "adapter":
            if TITLE in entries:
                yield TITLE, self.job.inputs.title or self.job.output.stem
            return
        if self.known.architecture and "modelspec.architecture" not in entries:
            yield "modelspec.architecture", f"{self.known.architecture}/lora"
            yield "modelspec.implementation", self.known.implementation
            has_spec = True
        if has_spec:
            yield "modelspec.sai_model_spec", entries.get("modelspec.sai_model_spec", SPEC)
            yield TITLE, self.job.inputs.title or self.job.output.stem
        if self.job.command.several:
            yield "modelspec.merged_from", ", ".join(input_name(a.path) for a in self.job.adapters)


def _common_value(values: Iterator[str]) -> str:
    """Return the value that all have; "Dynamic" where they differ, as sd-scripts writes after resizing."""
    distinct = {*values}
    return distinct.pop() if len(distinct) == 1 else "Dynamic"


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a network module; {} for a text that is no JSON object."""
    if not text or len(text) > LONGEST_ARGUMENTS:
        return {}
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
