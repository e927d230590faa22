"""The section on quantisation of a config.json, or of the side files of ModelOpt, AutoGPTQ and AutoAWQ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...disk.files import open_regular
from ...text import Note
from ..encodings.base import Packing, Tensors
from .gptq import awq_section, gptq_section
from .modelopt import side_section

SECTIONS: Final = ("quantization_config", "compression_config", "quantization")
"""Names of that section: of transformers, of older compressed-tensors, of mlx."""

RECIPE: Final = "recipe.yaml"
"""llm-compressor's file of what was done to a model."""

MODIFIERS: Final = {"SmoothQuantModifier": "SmoothQuant", "AWQModifier": "AWQ"}
"""Steps of a recipe that move scales between a layer and the one before it. Rotations also leave `transform_config`."""

RECIPE_LIMIT: Final = 1 << 20  # bytes of a recipe that are looked at

ACTIVATION_SCALES: Final = ("input_scale", "scale_input", "input_global_scale", "activation_scale", "output_scale")
"""Last names of scales that were measured on what goes through a layer."""

CACHE: Final = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "output_scale")
"""Last names of scales of the cache of keys and values, and of what attention computes: one number each."""

SIDE_FILES: Final[Mapping[str, Callable[[Mapping[str, Any], Iterable[str]], Mapping[str, Any]]]] = MappingProxyType({
    "hf_quant_config.json": side_section, "quantize_config.json": gptq_section, "quant_config.json": awq_section,
})  # fmt: skip
"""Files of ModelOpt, AutoGPTQ and AutoAWQ → the section in their place, by their settings and the names of the tensors.
Newer releases write one into config.json."""

QUANTISATION_FILES: Final = frozenset({*SIDE_FILES, "quantization_config.json", "quanto_qmap.json"})
"""Files that only say how the weights are quantised."""


def of_cache(tensors: Tensors, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the scales of caches, which folders have whose config.json has a section on quantisation."""
    for name, info in tensors.items() if section(config) else ():
        if name.rpartition(".")[2] in CACHE and prod(info.shape) == 1:
            yield name


def activation_notes(changed: Iterable[str], packed: Mapping[str, Packing]) -> Iterator[Note]:
    """Yield a note for the user if weights that change have scales of activations next to them, which do not change."""
    if any(name.endswith(ACTIVATION_SCALES) for key in changed if key in packed for name in packed[key].names):
        yield Note("activation scales stay as they are; they were measured without the adapters")


def section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of a config.json on quantisation; {} without one."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in SECTIONS:
            if isinstance(entries := part.get(key), Mapping):
                return entries
    return {}


def with_side_file(
    config: Mapping[str, Any], name: str, settings: Mapping[str, Any], tensors: Iterable[str]
) -> Mapping[str, Any]:
    """Return the configuration of a folder with the section by a file of `SIDE_FILES`, unless it has one.

    `name`, `settings`: of that file.
    """
    entries = {} if section(config) else SIDE_FILES[name](settings, tensors)
    return {**config, SECTIONS[0]: entries} if entries else config


def smoothed(config: Mapping[str, Any], folder: Path) -> Iterator[Note]:
    """Yield a note for the user if scales were moved between layers: the file holds another model of the same function.

    The file does not hold the scales, so an adapter that was trained on the original model cannot be changed in the
    same way. https://arxiv.org/abs/2306.00978, https://arxiv.org/abs/2211.10438.
    """
    how = section(config)
    methods = ["AWQ"] if how.get("quant_method") == "awq" or "AWQ" in str(how.get("quant_algo")) else []
    text = ""
    if (folder / RECIPE).is_file():
        with open_regular(folder / RECIPE) as file:
            text = file.read(RECIPE_LIMIT).decode(errors="replace")
    methods += [name for word, name in MODIFIERS.items() if word in text and name not in methods]
    if methods:
        yield Note(
            f"the base was changed by {' and '.join(methods)} before it was quantised: scales moved between its layers,"
            " so an adapter that was trained on the original model does not fit it exactly; merge that one into the"
            " unquantised model"
        )
