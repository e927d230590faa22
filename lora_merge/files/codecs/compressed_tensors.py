"""Weights of compressed-tensors, as llm-compressor writes them: `quant_method: compressed-tensors` in config.json.

https://github.com/vllm-project/compressed-tensors src/compressed_tensors/compressors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...disk.files import StoredTensor
from ...safe_regex import Refused, Steps, pattern
from .base import Checkpoint, Claim, Packing, claimed
from .fp4 import Fp4Tensors, fp4
from .packed_ints import PackedInts, packed_ints
from .scaled import Stored, scaled

EMBEDDING: Final = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe)$", re.IGNORECASE)
"""Names of modules that are embeddings and no linear layers; files do not tell the class of a module."""

METHOD: Final = "compressed-tensors"
BESIDE: Final = ("input_scale", "input_global_scale", "input_zero_point", "weight_shape")
BYTES: Final = ("float-quantized", "naive-quantized", "int-quantized", "mxfp8-quantized")
"""Formats with codes of one byte in `l.weight`."""


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield every weight of a folder that a codec reads; none where weights are sparse or rotated too."""
    config = found.config
    sparse = config.get("sparsity_config") or {}
    if config.get("quant_method") != METHOD or config.get("transform_config"):
        return
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") not in ("dense", None):
        return
    steps = Steps()
    for stem in found.stems("weight_scale"):
        args, form = _settings(config, stem, steps)
        made = _codes_in_bytes(found, stem, args) if form in BYTES else _packed(found, stem, args, form)
        if made is not None:
            yield made


def _codes_in_bytes(found: Checkpoint, stem: str, args: Mapping[str, Any]) -> Claim | None:
    weight, zero = found.get(stem, "weight"), found.get(stem, "weight_zero_point")
    if weight is None or found.present(stem, "weight_g_idx") or (zero is None) != bool(args.get("symmetric", True)):
        return None
    scale = found.tensors[f"{stem}.weight_scale"]
    form = "int8" if weight.dtype == "I8" else "mxfp8" if scale.dtype in ("U8", "F8_E8M0") else "fp8"
    beside, block = found.present(stem, *BESIDE), _block(args, weight, scale)
    of = Stored(weight, scale, f"compressed-tensors {form}", beside, zero, block, byte_powers=True)
    packing = scaled(of)
    return claimed(weight, weight.name, weight.shape, packing) if packing else None


def _block(args: Mapping[str, Any], weight: StoredTensor, scale: StoredTensor) -> tuple[int, int] | None:
    """Return rows and columns with one scale; None where there is one for the weight or each row."""
    size, block = args.get("group_size"), args.get("block_structure")
    if isinstance(block, str):  # "128x128", of older releases
        block = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in block.split("x")]
    if args.get("strategy") == "block" and isinstance(block, list) and len(block) == 2:
        return (block[0], block[1]) if all(isinstance(n, int) and n > 0 for n in block) else None
    if scale.dtype == "U8":
        return 1, 32
    return (1, size) if args.get("strategy") == "group" and isinstance(size, int) and size > 0 else None


def _packed(found: Checkpoint, stem: str, args: Mapping[str, Any], form: str) -> Claim | None:
    """Return the claim of a weight with several codes in a byte."""
    codes, scale = found.get(stem, "weight_packed"), found.tensors[f"{stem}.weight_scale"]
    name, beside = f"{stem}.weight", found.present(stem, *BESIDE)
    if codes is None:
        return None
    packing: Packing | None = None
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        of = Fp4Tensors(codes, scale, f"compressed-tensors {form[:5]}", found.get(stem, "weight_global_scale"), beside)
        packing = fp4(of, divided=True)
        return claimed(codes, name, (*codes.shape[:-1], codes.shape[-1] * 2), packing) if packing else None
    if form == "pack-quantized":
        order, zero = found.get(stem, "weight_g_idx"), found.get(stem, "weight_zero_point")
        ints = PackedInts(codes, scale, args, found.get(stem, "weight_shape"), zero, order, beside)
        return packed_ints(ints, name)
    return None


def _settings(config: Mapping[str, Any], stem: str, steps: Steps) -> tuple[Mapping[str, Any], str]:
    """Return how the weights of a module are quantised, and the format; ({}, "") where nothing says it.

    A target is a name, a regular expression or a class, and counts in this order, as in the library (match_targets).
    """
    groups = config.get("config_groups")
    rows = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    found = {target: group for group in rows for target in _targets(group) if isinstance(target, str)}
    named = sorted((t for t in found if _names(t, stem, steps)), key=lambda t: (t.startswith("re:"), t))
    likely = "Embedding" if EMBEDDING.search(stem) else "Linear"
    classes = sorted((t for t in found if t.isidentifier() and t[:1].isupper()), key=lambda t: (t != likely, t))
    for target in (*named, *classes):
        args = found[target].get("weights")
        if isinstance(args, Mapping):
            return args, str(found[target].get("format") or config.get("format") or "")
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
