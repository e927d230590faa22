"""New quantised weights: the tensors in which an output stores a matrix that the base holds as plain numbers.

Single files are made as ComfyUI reads them, with a JSON beside each weight, or as Forge reads nf4; folders as
transformers reads them, with a section in config.json. The bytes of new tensors are zeros, or constants;
a merge writes the codes and scales over them.
https://github.com/comfyanonymous/ComfyUI comfy/ops.py, https://github.com/huggingface/transformers
integrations/finegrained_fp8.py, https://github.com/bitsandbytes-foundation/bitsandbytes bitsandbytes/functional.py,
https://github.com/vllm-project/compressed-tensors src/compressed_tensors/quantization/quant_scheme.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...disk.files import Memory, StoredTensor
from ...dtypes import ITEM_BYTES, TABLE, Shape
from .base import Packing, Part
from .bitsandbytes import ABSMAX, MAP, Bnb4
from .compressed_tensors import METHOD
from .fp4 import Fp4Tensors, fp4
from .scaled import TILE, Stored, scaled

ALIGNED: Final = 8
"""The codes of a weight, and the tensors beside them, take a multiple of so many bytes, so that what follows them in
the file begins at a multiple of its own numbers' size."""

NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""bitsandbytes' table: quantiles of a normal distribution. Dettmers et al. 2023, arXiv:2305.14314, appendix E."""

BLOCK: Final = 128  # rows and columns with one scale, of block fp8
FLAT: Final = 64  # numbers with one scale, of nf4


class Made(NamedTuple):
    """A weight in its new form, and the new tensors beside its codes."""

    packing: Packing
    beside: tuple[StoredTensor, ...]


class Form(NamedTuple):
    """One format of an output. `make` returns None for a matrix that the format cannot hold."""

    make: Callable[[StoredTensor], Made | None]
    section: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    """Names of modules that are not quantised → the section of config.json, for folders."""


@lru_cache(maxsize=4096)
def _constant(file: Path, content: bytes) -> Memory:
    """Return a source for constant bytes; one object for equal ones, so that jobs can share the windows of a base."""
    return Memory.of(file, memoryview(bytearray(content)))


@lru_cache(maxsize=1)
def _zeros(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


class _Blank:
    """Zeros for all tensors that are not made yet; the system gives memory only to those that are written to."""

    size = 0

    def content(self, nbytes: int) -> memoryview:
        """Return so many zeros."""
        self.size = max(self.size, nbytes)
        return _zeros(self.size)[:nbytes]


_BLANK: Final = _Blank()


@lru_cache(maxsize=4096)
def _blank(file: Path, nbytes: int) -> Memory:
    return Memory(file, partial(_BLANK.content, nbytes))


def _codes(weight: StoredTensor, dtype: str, shape: Shape) -> StoredTensor:
    """Return the tensor of codes, by the name of the weight."""
    return replace(weight, dtype=dtype, shape=shape, nbytes=prod(shape) * ITEM_BYTES[dtype])


def _beside(weight: StoredTensor, last: str, dtype: str, shape: Shape, content: bytes | None = None) -> StoredTensor:
    """Return a tensor whose name has `last` in place of `weight`; of zeros where its bytes are made by the merge."""
    name, stored = (f"{old.removesuffix('weight')}{last}" if old else "" for old in (weight.name, weight.stored))
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    source = _blank(weight.file, nbytes) if content is None else _constant(weight.file, content)
    return StoredTensor(name, dtype, shape, source, 0, nbytes, stored)


def _note(weight: StoredTensor, last: str, told: Mapping[str, Any], others: Sequence[StoredTensor]) -> StoredTensor:
    """Return a JSON in a tensor, with spaces at its end so that it and the other tensors fill whole words."""
    text = json.dumps(told).encode()
    text += b" " * (-(len(text) + sum(t.nbytes for t in others)) % ALIGNED)
    return _beside(weight, last, "U8", (len(text),), text)


def _comfy(weight: StoredTensor, packing: Packing | None, told: Mapping[str, Any]) -> Made | None:
    """Return a weight with ComfyUI's JSON; None without a packing."""
    if packing is None:
        return None
    parts = [part.info for part in packing.parts.values()]
    note = _note(weight, "comfy_quant", told, parts)
    return Made(packing._replace(beside=frozenset({note.name})), (*parts, note))


def _fp8(weight: StoredTensor) -> Made | None:
    of = Stored(_codes(weight, "F8_E4M3", weight.shape), _beside(weight, "weight_scale", "F32", ()), "fp8_scaled")
    return _comfy(weight, scaled(of, fresh=True), {"format": "float8_e4m3fn"})


def _int8(weight: StoredTensor) -> Made | None:
    scale = _beside(weight, "weight_scale", "F32", (weight.shape[0], 1))
    of = Stored(_codes(weight, "I8", weight.shape), scale, "int8")
    return _comfy(weight, scaled(of, fresh=True, ends=(-127, 127)), {"format": "int8_tensorwise", "per_row": True})


def _tiles(weight: StoredTensor, size: int) -> Shape:
    """Return the shape of scales in cuBLAS's tiles, one for `size` columns."""
    rows, cols = weight.shape
    return -(-rows // TILE) * TILE, -(-cols // size // 4) * 4


def _mxfp8(weight: StoredTensor) -> Made | None:
    if weight.shape[0] % 32 or weight.shape[1] % 32:
        return None
    scale = _beside(weight, "weight_scale", "U8", _tiles(weight, 32))
    of = Stored(_codes(weight, "F8_E4M3", weight.shape), scale, "mxfp8", block=(1, 32), byte_powers=True)
    return _comfy(weight, scaled(of, fresh=True, swizzled=True), {"format": "mxfp8"})


def _nvfp4(weight: StoredTensor) -> Made | None:
    rows, cols = weight.shape
    if rows % 16 or cols % 16:
        return None
    scale = _beside(weight, "weight_scale", "F8_E4M3", _tiles(weight, 16))
    whole = _beside(weight, "weight_scale_2", "F32", ())
    of = Fp4Tensors(_codes(weight, "U8", (rows, cols // 2)), scale, "nvfp4", whole)
    return _comfy(weight, fp4(of, high_first=True, swizzled=True, fresh=True), {"format": "nvfp4"})


def _blocks(weight: StoredTensor) -> Made | None:
    rows, cols = weight.shape
    if rows % BLOCK or cols % BLOCK:  # transformers' dequantiser and vLLM's kernels take whole blocks alone
        return None
    scale = _beside(weight, "weight_scale_inv", "F32", (rows // BLOCK, cols // BLOCK))
    of = Stored(_codes(weight, "F8_E4M3", weight.shape), scale, "block fp8", block=(BLOCK, BLOCK))
    packing = scaled(of, fresh=True)
    return Made(packing, (scale,)) if packing else None


def _bnb_int8(weight: StoredTensor) -> Made | None:
    scale, form = _beside(weight, "SCB", "F32", weight.shape[:1]), _beside(weight, "weight_format", "U8", (), b"\0")
    of = Stored(_codes(weight, "I8", weight.shape), scale, "bitsandbytes int8", frozenset({form.name}))
    packing = scaled(of, fresh=True, factor=1 / 127, ends=(-127, 127))
    return Made(packing, (scale, form)) if packing else None


def _nf4(weight: StoredTensor) -> Made | None:
    total = prod(weight.shape)
    absmax = _beside(weight, "weight.absmax", "F32", (-(-total // FLAT),))
    table = _beside(weight, "weight.quant_map", "F32", (len(NF4),), struct.pack("<16f", *NF4))
    told = {
        "quant_type": "nf4", "blocksize": FLAT, "shape": list(weight.shape),
        "dtype": TABLE[weight.dtype].library if weight.dtype in ("F32", "F16", "BF16") else "bfloat16",
    }  # fmt: skip
    state = _note(weight, "weight.quant_state.bitsandbytes__nf4", told, (absmax, table))
    parts = {ABSMAX: Part(absmax, FLAT, 4), MAP: Part(table)}
    codes = _codes(weight, "U8", (total // 2, 1))
    encoding = Bnb4.shared((2, 1), FLAT, size=FLAT, label="bitsandbytes nf4", fresh=True)
    return Made(Packing(encoding, codes, parts, frozenset({state.name})), (absmax, table, state))


def _packed_fp4(weight: StoredTensor) -> Made | None:
    rows, cols = weight.shape
    if cols % 16:
        return None
    scale = _beside(weight, "weight_scale", "F8_E4M3", (rows, cols // 16))
    whole = _beside(weight, "weight_global_scale", "F32", (1,))
    of = Fp4Tensors(_beside(weight, "weight_packed", "U8", (rows, cols // 2)), scale, "nvfp4", whole)
    packing = fp4(of, divided=True, fresh=True)
    return Made(packing, (scale, whole)) if packing else None


def _row_powers(weight: StoredTensor) -> Made | None:
    rows, cols = weight.shape
    if cols % 32:
        return None
    scale = _beside(weight, "weight_scale", "U8", (rows, cols // 32))
    of = Stored(_codes(weight, "F8_E4M3", weight.shape), scale, "mxfp8", block=(1, 32), byte_powers=True)
    packing = scaled(of, fresh=True)
    return Made(packing, (scale,)) if packing else None


def _compressed_section(kept: Sequence[str], *, form: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    args = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": METHOD, "format": form, "quantization_status": "compressed", "ignore": list(kept),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "format": form}},
    }  # fmt: skip


def _block_section(kept: Sequence[str]) -> Mapping[str, Any]:
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
    }  # fmt: skip


def _bnb_section(kept: Sequence[str], *, bits: int) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8,
        "llm_int8_skip_modules": list(kept),
    }  # fmt: skip
    if bits == 4:
        found |= {
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        }  # fmt: skip
    return found


FILES: Final[Mapping[str, Form]] = MappingProxyType({
    "fp8_scaled": Form(_fp8), "mxfp8": Form(_mxfp8), "nvfp4": Form(_nvfp4), "int8": Form(_int8), "nf4": Form(_nf4),
})  # fmt: skip
"""Value of `--dtype` → format of a single file, as ComfyUI reads it; `nf4` as Forge reads it.
https://github.com/lllyasviel/stable-diffusion-webui-forge backend/operations_bnb.py."""

FOLDERS: Final[Mapping[str, Form]] = MappingProxyType({
    "fp8_block": Form(_blocks, _block_section),
    "mxfp8": Form(_row_powers, partial(_compressed_section, form="mxfp8-quantized", weights={
        "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    })),
    "nvfp4": Form(_packed_fp4, partial(_compressed_section, form="nvfp4-pack-quantized", weights={
        "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    })),
    "int8": Form(_bnb_int8, partial(_bnb_section, bits=8)),
    "nf4": Form(_nf4, partial(_bnb_section, bits=4)),
})  # fmt: skip
"""Value of `--dtype` → format of a folder, as transformers reads it."""
