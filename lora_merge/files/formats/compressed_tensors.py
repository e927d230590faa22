"""Weights of compressed-tensors, as llm-compressor writes them: `quant_method: compressed-tensors` in config.json.

Packed codes: a row begins a word, and is a stream of bits; older releases began a word for every code that would
otherwise span two. Zero points are packed in the same way along the rows. With `weight_g_idx`, column j belongs to the
group of that number. https://github.com/vllm-project/compressed-tensors src/compressed_tensors/compressors,
src/compressed_tensors/quantization/quant_scheme.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from math import lcm, prod
from typing import Any, Final

from ...disk.reader import read_bytes
from ...dtypes import ITEM_BYTES, StoredTensor
from ...safe_regex import Refused, Steps, pattern
from ..encodings.base import SCALE_DTYPES, Packing, WeightPart
from ..encodings.fp4 import NVFP4_COLUMNS, Fp4Tensors, fp4
from ..encodings.packed_ints import ORDER, WORD, PackedInts
from ..encodings.scaled_codes import MX_COLUMNS, SCALE, ZERO, ScaledTensors, scaled
from .base import Checkpoint, Claims, NewWeight, WeightClaim, claimed, codes_of, new_tensor, new_weight, positive

EMBEDDING_LAYERS: Final = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe)$", re.IGNORECASE)
"""Names of modules that are embeddings and no linear layers; files do not hold the class of a module."""

METHOD: Final = "compressed-tensors"
MARKS: Final = ("input_scale", "input_global_scale", "input_zero_point", "weight_shape")

BYTE_FORMATS: Final = ("float-quantized", "naive-quantized", "int-quantized", "mxfp8-quantized")
"""Formats with codes of one byte in `l.weight`."""

FP4_FORMATS: Final = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")

BITS: Final = (2, 3, 4, 5, 6, 7, 8)


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield every weight of a folder that is read; none if weights are sparse or rotated too."""
    config = checkpoint.config
    sparse = config.get("sparsity_config") or {}
    if config.get("quant_method") != METHOD or config.get("transform_config"):
        return
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") not in ("dense", None):
        return
    steps = Steps()
    for stem in checkpoint.stems("weight_scale"):
        args, form = _settings(config, stem, steps)
        if form in BYTE_FORMATS:
            yield _codes_in_bytes(checkpoint, stem, args)
        elif form in FP4_FORMATS:
            yield _fp4(checkpoint, stem, form)
        elif form == "pack-quantized":
            yield _packed_ints(checkpoint, stem, args)


def _codes_in_bytes(checkpoint: Checkpoint, stem: str, args: Mapping[str, Any]) -> WeightClaim | None:
    weight, zero = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_zero_point")
    if weight is None or checkpoint.present(stem, "weight_g_idx"):
        return None
    if (zero is None) != bool(args.get("symmetric", True)):
        return None
    scale = checkpoint.tensors[f"{stem}.weight_scale"]
    form = "int8" if weight.dtype == "I8" else "mxfp8" if scale.dtype in ("U8", "F8_E8M0") else "fp8"
    marks, block = checkpoint.present(stem, *MARKS), _block(args, scale)
    of = ScaledTensors(weight, scale, f"compressed-tensors {form}", marks, zero, block, byte_powers=True)
    return claimed(weight, scaled(of))


def _block(args: Mapping[str, Any], scale: StoredTensor) -> tuple[int, int] | None:
    """Return rows and columns with one scale; None if there is one for the weight or each row."""
    size, block = args.get("group_size"), args.get("block_structure")
    if isinstance(block, str):  # "128x128", of older releases
        block = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in block.split("x")]
    if args.get("strategy") == "block" and isinstance(block, list) and len(block) == 2:
        return (block[0], block[1]) if all(map(positive, block)) else None
    if scale.dtype == "U8":
        return 1, MX_COLUMNS
    return (1, size) if args.get("strategy") == "group" and positive(size) else None


def _fp4(checkpoint: Checkpoint, stem: str, form: str) -> WeightClaim | None:
    """Return the claim of a weight of 4-bit floating-point codes."""
    codes, scale = checkpoint.get(stem, "weight_packed"), checkpoint.tensors[f"{stem}.weight_scale"]
    whole, marks = checkpoint.get(stem, "weight_global_scale"), checkpoint.present(stem, *MARKS)
    if codes is None:
        return None
    of = Fp4Tensors(codes, scale, f"compressed-tensors {form[:5]}", whole, marks)
    return claimed(codes, fp4(of, divided=True), f"{stem}.weight", of.shape)


def _settings(config: Mapping[str, Any], stem: str, steps: Steps) -> tuple[Mapping[str, Any], str]:
    """Return how the weights of a module are quantised, and the format; ({}, "") if nothing says it.

    A target is a name, a regular expression or a class, and counts in this order, as in the library (match_targets).
    """
    groups = config.get("config_groups")
    rows = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    by_target = {target: group for group in rows for target in _targets(group) if isinstance(target, str)}
    named = sorted((t for t in by_target if _names(t, stem, steps)), key=lambda t: (t.startswith("re:"), t))
    likely = "Embedding" if EMBEDDING_LAYERS.search(stem) else "Linear"
    classes = sorted((t for t in by_target if t.isidentifier() and t[:1].isupper()), key=lambda t: (t != likely, t))
    for target in (*named, *classes):
        args = by_target[target].get("weights")
        if isinstance(args, Mapping):
            return args, str(by_target[target].get("format") or config.get("format") or "")
    return {}, ""


def _targets(group: Mapping[str, Any]) -> list[Any]:
    targets = group.get("targets")
    return targets if isinstance(targets, list) else []


def _names(target: Any, stem: str, steps: Steps) -> bool:
    """Return whether a target of a group names a module: by its name, or by a regular expression."""
    if not isinstance(target, str) or not target.startswith("re:"):
        return bool(target == stem)
    try:
        return pattern(target[3:]).matches(stem, steps)
    except Refused:
        return False


def _packed_ints(checkpoint: Checkpoint, stem: str, args: Mapping[str, Any]) -> WeightClaim | None:
    """Return the claim of a weight of packed whole numbers; None if dtypes and shapes do not go together."""
    codes, zero, order = (checkpoint.get(stem, f"weight_{last}") for last in ("packed", "zero_point", "g_idx"))
    scale, shape = checkpoint.tensors[f"{stem}.weight_scale"], _shape(checkpoint.get(stem, "weight_shape"))
    bits, size = args.get("num_bits"), args.get("group_size")
    if codes is None or bits not in BITS or codes.dtype != "I32" or len(shape) != 2 or not prod(shape):
        return None
    if (zero is None) != bool(args.get("symmetric", True)) or scale.dtype not in SCALE_DTYPES:
        return None
    # Dense rows are streams of bits; in others no code spans two words.
    rows, cols = shape
    size = size if positive(size) else cols
    across = cols // size
    dense = codes.shape == (rows, _words(cols, bits, dense=True))
    words = _words(cols, bits, dense=dense)
    unclear = dense and words > 1 and WORD % bits and words == _words(cols, bits, dense=False)
    # Dtypes and shapes of all tensors.
    if cols % size or codes.shape != (rows, words) or unclear or scale.shape != (rows, across):
        return None
    if zero is not None and (zero.dtype, zero.shape) != ("I32", (_words(rows, bits, dense=dense), across)):
        return None
    if order is not None and (order.dtype != "I32" or order.shape != (cols,)):
        return None
    # So many rows are decoded together as share whole words of zero points.
    each, size_of_each = (WORD, bits * 4) if dense and WORD % bits else (WORD // bits, 4)
    parts = {SCALE: WeightPart(scale, cols, across * ITEM_BYTES[scale.dtype])}
    parts |= {ZERO: WeightPart(zero, each * cols, across * size_of_each)} if zero is not None else {}
    parts |= {ORDER: WeightPart(order)} if order is not None else {}
    encoding = PackedInts.shared(
        (cols, words * 4), lcm(cols, each * cols if zero is not None else 1), bits=bits, cols=cols, size=size,
        zeros=zero is not None, dense=dense, scales=scale.dtype, label=f"compressed-tensors int{bits}",
    )  # fmt: skip
    packing = Packing(encoding, codes, parts, checkpoint.present(stem, *MARKS))
    return claimed(codes, packing, f"{stem}.weight", (rows, cols))


def _words(elements: int, bits: int, *, dense: bool) -> int:
    """Return how many words hold so many codes."""
    return -(-elements * bits // WORD) if dense else -(-elements // (WORD // bits))


def _shape(info: StoredTensor | None) -> tuple[int, ...]:
    """Return the shape of a weight, as the tensor `weight_shape` holds it; () without it."""
    if info is None or info.dtype not in ("I64", "I32") or info.shape != (2,):
        return ()
    return struct.unpack("<2q" if info.dtype == "I64" else "<2i", read_bytes(info))


def new_nvfp4(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as 4-bit codes with fp8 scales for 16 columns, and one divisor."""
    rows, cols = weight.shape
    if cols % NVFP4_COLUMNS:
        return None
    scale = new_tensor(weight, "weight_scale", "F8_E4M3", (rows, cols // NVFP4_COLUMNS))
    whole = new_tensor(weight, "weight_global_scale", "F32", (1,))
    of = Fp4Tensors(new_tensor(weight, "weight_packed", "U8", (rows, cols // 2)), scale, "nvfp4", whole)
    return new_weight(fp4(of, divided=True, new_scales=True))


def new_mxfp8(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as fp8 with a power of two for 32 columns."""
    rows, cols = weight.shape
    if cols % MX_COLUMNS:
        return None
    scale = new_tensor(weight, "weight_scale", "U8", (rows, cols // MX_COLUMNS))
    of = ScaledTensors.mx(codes_of(weight, "F8_E4M3", weight.shape), scale, "mxfp8")
    return new_weight(scaled(of, new_scales=True))


def nvfp4_section(unquantised: Sequence[str]) -> Mapping[str, Any]:
    """Return the section of config.json on nvfp4; `unquantised`: names of modules."""
    return _section(unquantised, "nvfp4-pack-quantized", {
        "num_bits": 4, "strategy": "tensor_group", "group_size": NVFP4_COLUMNS, "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    })  # fmt: skip


def mxfp8_section(unquantised: Sequence[str]) -> Mapping[str, Any]:
    """Return the section of config.json on mxfp8; `unquantised`: names of modules."""
    return _section(unquantised, "mxfp8-quantized", {
        "num_bits": 8, "strategy": "group", "group_size": MX_COLUMNS, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    })  # fmt: skip


def _section(unquantised: Sequence[str], form: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    args = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": METHOD, "format": form, "quantization_status": "compressed", "ignore": list(unquantised),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "format": form}},
    }  # fmt: skip
