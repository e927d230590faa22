"""Scaled weights of ComfyUI's files: fp8 and int8 with one scale for a weight or a row, mxfp8, and 4-bit rows.

Old style: `l.weight` and `l.scale_weight`, under a prefix with a tensor `scaled_fp8`. New style: `l.weight` and
`l.weight_scale`, and for each layer a JSON (comfy.py). int8 may be stored rotated, W · H ("convrot"); the 4-bit rows
of `convrot_w4a4` always are.
https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/utils.py (convert_old_quants), comfy/quant_ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ...disk.files import StoredTensor
from .base import ROTATIONS, Checkpoint, Claim, Packing, Part, claimed
from .comfy import Layer, layers, rows_of
from .packed_ints import Packed
from .scaled import E8M0, SCALE, Stored, scaled
from .stacked import one_of, stacked

FORMATS: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8", "mxfp8": "F8_E4M3"}
"""Name of a format in the JSON of a layer → dtype of the codes."""

LABELS: Final = {"int8_tensorwise": "int8", "mxfp8": "mxfp8"}
FP8_SCALED: Final = "fp8_scaled"
FOUR_BITS: Final = "convrot_w4a4"
ROWS: Final = 32  # of which ComfyUI stores a multiple in mxfp8
ROTATED: Final = 256
"""Columns that are rotated together, where the JSON does not say it."""


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield every weight that is stored in one of these ways."""
    yield from _old_style(found)
    for stem, layer in layers(found):
        weight, side = found.get(stem, "weight"), found.get(stem, "weight_scale")
        if weight is not None and side is not None and layer.form == FOUR_BITS:
            yield from _rotated_rows(found, stem, layer, (weight, side))
        if weight is None or side is None or weight.dtype != FORMATS.get(layer.form):
            continue
        mx = layer.form == "mxfp8"
        beside = found.present(stem, "comfy_quant", "input_scale")
        of = Stored(weight, side, LABELS.get(layer.form, FP8_SCALED), beside, None, (1, 32) if mx else None, mx)
        settings = _settings(layer)
        if settings is None or (of.kind == E8M0) != mx:
            continue
        if packing := scaled(of, **settings) or (_bank(of) if mx else None):
            rows, *cols = weight.shape
            if mx and len(cols) == 1:
                rows = rows_of(found, stem, layer, (rows, cols[0]), ROWS)
            if rows:
                yield claimed(weight, weight.name, (rows, *cols), packing)


def _old_style(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights beside scales of the old style, under the prefix of a mark."""
    marks = [name.removesuffix("scaled_fp8") for name in found.tensors if name.rpartition(".")[2] == "scaled_fp8"]
    for stem in found.stems("scale_weight") if marks else ():
        mark = next((m for m in marks if stem.startswith(m)), None)
        weight, scale = found.get(stem, "weight"), found.tensors[f"{stem}.scale_weight"]
        if mark is None or weight is None or weight.dtype == "I8":
            continue
        beside = found.present(stem, "scale_input") | {f"{mark}scaled_fp8"}
        if packing := scaled(Stored(weight, scale, FP8_SCALED, beside)):
            yield claimed(weight, weight.name, weight.shape, packing)


def _bank(of: Stored) -> Packing | None:
    """Return how a bank of experts in mxfp8 is stored whose rows do not fill their tiles."""
    if len(of.codes.shape) != 3 or of.scale.shape[:1] != of.codes.shape[:1] or not of.codes.nbytes:
        return None
    own = of._replace(codes=one_of(of.codes), scale=one_of(of.scale))
    return stacked(of.codes, scaled(own, swizzled=True), {SCALE: of.scale})


def _settings(layer: Layer) -> dict[str, Any] | None:
    """Return what the JSON of a layer says of its scales; None for what this codec does not read."""
    if layer.rotated:
        size = rotation_of(layer) if layer.form == "int8_tensorwise" else 0
        return {"rotation": size} if size else None
    return {"swizzled": True} if layer.form == "mxfp8" else {}


def rotation_of(layer: Layer) -> int:
    """Return how many columns are rotated together; 0 for what the format does not allow."""
    size = layer.options.get("convrot_groupsize", ROTATED)
    return size if isinstance(size, int) and size in ROTATIONS else 0


def _rotated_rows(
    found: Checkpoint, stem: str, layer: Layer, tensors: tuple[StoredTensor, StoredTensor]
) -> Iterator[Claim]:
    """Yield the claim of a rotated weight of 4-bit codes with a scale for each row."""
    (codes, scale), size = tensors, rotation_of(layer)
    rows, cols = (codes.shape[0], codes.shape[1] * 2) if len(codes.shape) == 2 else (0, 0)
    if codes.dtype not in ("I8", "U8") or scale.dtype != "F32" or scale.shape not in ((rows,), (rows, 1)):
        return
    if not rows or not cols or not size or cols % size:
        return
    encoding = Packed.shared(
        (cols, cols // 2), cols, bits=4, cols=cols, size=cols, signed=True, rotation=size,
        label=FOUR_BITS,
    )  # fmt: skip
    packing = Packing(encoding, codes, {SCALE: Part(scale, cols, 4)}, found.present(stem, "comfy_quant", "input_scale"))
    yield claimed(codes, codes.name, (rows, cols), packing)
