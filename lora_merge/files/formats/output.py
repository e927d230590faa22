"""The formats of `--dtype`: how a matrix that the base holds as plain values is stored in an output.

Single files are written as ComfyUI reads them, with a JSON next to each weight, or as Forge reads nf4; folders as
transformers reads them, with a section in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...dtypes import StoredTensor
from . import bitsandbytes, comfyui, compressed_tensors, transformers_fp8
from .base import NewWeight


class OutputFormat(NamedTuple):
    """One format of an output. `make` returns None for a matrix that the format cannot hold."""

    make: Callable[[StoredTensor], NewWeight | None]
    section: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    """Names of modules that are not quantised → the section of config.json, for folders."""


FILE_FORMATS: Final[Mapping[str, OutputFormat]] = MappingProxyType({
    "fp8_scaled": OutputFormat(comfyui.new_fp8), "mxfp8": OutputFormat(comfyui.new_mxfp8),
    "nvfp4": OutputFormat(comfyui.new_nvfp4), "int8": OutputFormat(comfyui.new_int8),
    "nf4": OutputFormat(bitsandbytes.new_nf4),
})  # fmt: skip
"""Value of `--dtype` → format of a single file, as ComfyUI reads it; `nf4` as Forge reads it.
https://github.com/lllyasviel/stable-diffusion-webui-forge backend/operations_bnb.py."""

FOLDER_FORMATS: Final[Mapping[str, OutputFormat]] = MappingProxyType({
    "fp8_block": OutputFormat(transformers_fp8.new_blocks, transformers_fp8.section),
    "mxfp8": OutputFormat(compressed_tensors.new_mxfp8, compressed_tensors.mxfp8_section),
    "nvfp4": OutputFormat(compressed_tensors.new_nvfp4, compressed_tensors.nvfp4_section),
    "int8": OutputFormat(bitsandbytes.new_int8, partial(bitsandbytes.section, bits=8)),
    "nf4": OutputFormat(bitsandbytes.new_nf4, partial(bitsandbytes.section, bits=4)),
})  # fmt: skip
"""Value of `--dtype` → format of a folder, as transformers reads it."""
