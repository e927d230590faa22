"""The metadata of an output: the inputs' entries that stay true of it, its ranks, hashes, and the recipe. No torch.

Names of models in the metadata that trainers write into adapters. Facts: sd-scripts 48d368f
(library/sai_model_spec.py, library/train_util.py, networks/), musubi-tuner 30c658c (src/musubi_tuner/networks,
dataset/architectures).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...adapters.peft.rules import ADAPTER_METADATA
from ...files.checkpoint import Index
from ...paths import input_name
from ...planning.header_entries import TITLE
from ...planning.recipe import KEY
from ..job import FACTORS, WHOLE, AdapterJob
from .hashes import HASHES, ONE, HashedTensor, legacy_hash
from .loaders import adapter_metadata

PLAIN_MODULE: Final = "networks.lora"
"""The network module of a plain LoRA where the model has no other."""

LYCORIS_MODULE: Final = "lycoris.kohya"

SPEC: Final = "1.0.0"
"""The version of ModelSpec that is written."""

_STABILITY: Final = "https://github.com/Stability-AI/generative-models"


class Trained(NamedTuple):
    """The entries of adapters for one model; "" where its trainers have none."""

    module: str = PLAIN_MODULE
    version: str = ""  # ss_base_model_version
    architecture: str = ""  # modelspec.architecture, without the kind of adapter
    implementation: str = ""
    v2: str = ""  # ss_v2, of the models of Stable Diffusion


TRAINED_MODELS: Final = MappingProxyType({
    # architecture file: network module, ss_base_model_version, modelspec.architecture, modelspec.implementation
    "sd1": Trained(PLAIN_MODULE, "sd_v1", "stable-diffusion-v1", "diffusers", "False"),
    "sd2": Trained(PLAIN_MODULE, "sd_v2", v2="True"),
    "sdxl": Trained(PLAIN_MODULE, "sdxl_base_v1-0", "stable-diffusion-xl-v1-base", _STABILITY, "False"),
    "sd3": Trained("networks.lora_sd3", "", "stable-diffusion-3", _STABILITY),
    "flux": Trained("networks.lora_flux", "flux1", "flux-1", "https://github.com/black-forest-labs/flux"),
    "chroma": Trained("networks.lora_flux", "chroma", "chroma", "https://huggingface.co/lodestones/Chroma"),
    "lumina2": Trained("networks.lora_lumina", "lumina2", "lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0"),
    "hunyuan_image": Trained("networks.lora_hunyuan_image", "hunyuan_image_2.1", "hunyuan-image-2.1",
                             "https://github.com/Tencent-Hunyuan/HunyuanImage-2.1"),
    "anima": Trained("networks.lora_anima", "anima"),
    "hunyuan_video": Trained(PLAIN_MODULE, "hunyuan_video"),
    "wan": Trained("networks.lora_wan", "wan_2.1"),
    "qwen_image": Trained("networks.lora_qwen_image", "qwen_image"),
    "zimage": Trained("networks.lora_zimage", "z_image"),
    "flux2": Trained("networks.lora_flux_2", "flux_2"),
    "hunyuan_video15": Trained("networks.lora_hv_1_5", "hunyuan_video_1_5"),
})  # fmt: skip
"""Stem of an architecture's file → its entries."""


ANEW: Final = (*HASHES, "modelspec.hash_sha256", KEY, "ss_network_dim", "ss_network_alpha", ADAPTER_METADATA)
"""Entries that are never those of an input."""

DOWN_ENDINGS: Final = (".lora_down.weight", ".lora_A.weight", ".lora.down.weight", ".lora_linear_layer.down.weight")
OF_WEBUI: Final = (".lora_down.weight", ".alpha", ".diff", ".diff_b", ".lokr_w1")
"""Endings of dialects whose readers know the hashes of webui."""


NETWORK_ARGUMENTS: Final = "ss_network_args"
LONGEST_ARGUMENTS: Final = 1 << 20  # letters of an input's arguments


class Known:
    """The facts from which the metadata of an output follows, known when its tensors are made.

    `layers`: label → facts of the report. `model`: the stem of the architecture's file, "" where it is unknown.
    """

    def __init__(
        self, job: AdapterJob, inputs: Sequence[Index], layers: Mapping[str, Mapping[str, Any]],
        tensors: Sequence[HashedTensor], model: str,
    ) -> None:  # fmt: skip
        self.job, self.layers, self.tensors = job, layers, tensors
        self.inputs = (
            [] if job.command == "extract" else [*inputs]
        )  # a checkpoint's entries are not those of an adapter
        self.known = TRAINED_MODELS.get(model, Trained())
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
        several = self.job.command not in ONE and self.job.command != "average"
        trained = (several and read) or any(name.startswith("ss_") for name in names) or not self.inputs
        if trained:
            entries |= dict(self._network(entries))
        entries |= dict(self._spec(entries))
        entries[KEY] = json.dumps(recipe(dropped), ensure_ascii=False, separators=(",", ":"))
        if (loader := adapter_metadata(self.tensors)) != "":
            entries[ADAPTER_METADATA] = loader
        if bool(names & {*HASHES}) if self.job.command in ONE else trained and read:
            entries |= {HASHES[0]: digest(), HASHES[1]: legacy_hash(self.tensors, entries)}
        return {"format": "pt"} | entries

    def _still_true(self) -> dict[str, str]:
        """Return the inputs' entries that stay true."""
        if not self.inputs:
            return {}
        *others, last = self.inputs
        same = {k: v for k, v in last.metadata.items()
                if self.job.command == "average" or all(i.metadata.get(k) == v for i in others)}  # fmt: skip
        gone = ANEW if self.job.command in ONE else (*ANEW, "modelspec.date")
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
        if self.job.command in ONE:
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
        if self.job.command in ("combine", "average"):
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
