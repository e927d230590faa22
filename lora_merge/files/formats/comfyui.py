"""ComfyUI's quantised files: fp8, int8, mxfp8, nvfp4, rotated rows of 4 bits, asym_w4a8_int8 and awq_w4a16.

Old style: `l.weight` and `l.scale_weight`, under a prefix with a tensor `scaled_fp8`. New style: `l.weight` and
`l.weight_scale`, and for each layer a JSON that names its format, in a tensor `l.comfy_quant` or in the metadata. int8
may be stored rotated, W · H ("convrot"); the 4-bit rows of `convrot_w4a4` always are. Outputs are of the new style.
https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/utils.py (convert_old_quants), comfy/quant_ops.py;
comfy-kitchen tensor/w4a8_int8.py, tensor/awq_w4a16.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...dtypes import ITEM_BYTES, Shape, StoredTensor
from ...text import from_json
from ..encodings.base import ROTATION_SIZES, SCALE_DTYPES, Packing, WeightPart
from ..encodings.codebook import BOOK, ROW_SCALE, Columns, GroupedCodebook
from ..encodings.expert_stack import one_of, stacked
from ..encodings.fp4 import NVFP4_COLUMNS, WHOLE_SCALE, Fp4Tensors, fp4
from ..encodings.packed_ints import PackedInts
from ..encodings.scaled_codes import E8M0, MX_COLUMNS, SCALE, ZERO, ScaledTensors, scaled, tiled_shape
from .base import (
    Checkpoint,
    Claims,
    NewWeight,
    WeightClaim,
    claimed,
    codes_of,
    new_note,
    new_tensor,
    new_weight,
    positive,
    read_note,
)

LAYERS_ENTRY: Final = "_quantization_metadata"
"""Entry of the metadata with the JSON of all layers."""

PREFIX: Final = "model.diffusion_model."
"""Prefix of layers that some converters omit in the metadata."""

DTYPE_OF_FORMAT: Final = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8_tensorwise": "I8",
    "mxfp8": "F8_E4M3",
}
"""Name of a format with codes of one byte in the JSON of a layer → dtype of the codes."""

LABELS: Final = {"int8_tensorwise": "int8", "mxfp8": "mxfp8"}
FP8_SCALED: Final = "fp8_scaled"
FOUR_BITS: Final = "convrot_w4a4"
MXFP8_ROWS: Final = 32  # of which ComfyUI stores a multiple
NVFP4_ROWS: Final = 16  # of which ComfyUI stores a multiple

ROTATED: Final = 256
"""Columns that are rotated together, where the JSON does not say it."""

MARKS: Final = ("comfy_quant", "input_scale")
"""Last names of tensors of a layer that are no parts of its weight."""


class LayerNote(NamedTuple):
    """The JSON of one layer."""

    form: str
    options: Mapping[str, Any]

    @property
    def rotated(self) -> bool:
        """Whether the weight is stored rotated ("convrot")."""
        return bool(self.options.get("convrot"))

    @property
    def rotation(self) -> int:
        """How many columns are rotated together; 0 for what the format does not allow."""
        size = self.options.get("convrot_groupsize", ROTATED)
        return size if isinstance(size, int) and size in ROTATION_SIZES else 0


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield every weight of ComfyUI's files that is read."""
    yield from _old_style(checkpoint)
    for stem, layer in _layers(checkpoint):
        if layer.form in READERS:
            yield READERS[layer.form](checkpoint, stem, layer)


def _layers(checkpoint: Checkpoint) -> Iterator[tuple[str, LayerNote]]:
    """Yield name and JSON of every layer that a file of the new style marks as quantised."""
    # The entry of the metadata names layers; a tensor next to a weight counts more.
    try:
        entry = from_json(checkpoint.metadata[LAYERS_ENTRY].encode()) if LAYERS_ENTRY in checkpoint.metadata else {}
    except ValueError:
        entry = {}
    listed = entry.get("layers") if isinstance(entry, dict) else None
    notes: dict[str, Any] = dict(listed) if isinstance(listed, dict) else {}
    for stem in checkpoint.stems("comfy_quant"):
        # What is no JSON names no layer: `quantised` then refuses it by its mark.
        if (note := read_note(checkpoint.tensors[f"{stem}.comfy_quant"])) is not None:
            notes[stem] = note
    # A note is the name of a format, or a table with it.
    for name, note in notes.items():
        options = note if isinstance(note, dict) else {"format": note}
        inner = options.get("params")
        options = {**options, **(inner if isinstance(inner, dict) else {})}
        if isinstance(form := options.get("format"), str):
            yield (name if f"{name}.weight" in checkpoint.tensors else PREFIX + name), LayerNote(form, options)


def _rows_of(checkpoint: Checkpoint, stem: str, layer: LayerNote, stored: Shape, unit: int) -> int:
    """Return the rows of a weight of which (rows, columns) are stored, the rows filled up to a multiple of `unit`.

    They follow from the bias, or from the shape in the JSON; 0 if that has other columns.
    """
    shape, bias = layer.options.get("orig_shape"), checkpoint.get(stem, "bias")
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else stored[0]
    if isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) for n in shape):
        if shape[1] != stored[1]:
            return 0
        rows = shape[0]
    return rows if rows > 0 and -(-rows // unit) * unit == stored[0] else stored[0]


def _old_style(checkpoint: Checkpoint) -> Claims:
    """Yield the weights next to scales of the old style, under the prefix of a mark."""
    names = checkpoint.tensors
    marks = [name.removesuffix("scaled_fp8") for name in names if name.rpartition(".")[2] == "scaled_fp8"]
    for stem in checkpoint.stems("scale_weight") if marks else ():
        mark = next((m for m in marks if stem.startswith(m)), None)
        weight, scale = checkpoint.get(stem, "weight"), names[f"{stem}.scale_weight"]
        if mark is None or weight is None or weight.dtype == "I8":
            continue
        others = checkpoint.present(stem, "scale_input") | {f"{mark}scaled_fp8"}
        yield claimed(weight, scaled(ScaledTensors(weight, scale, FP8_SCALED, others)))


def _one_byte(checkpoint: Checkpoint, stem: str, layer: LayerNote) -> WeightClaim | None:
    """Return the claim of a weight of fp8, int8 or mxfp8."""
    weight, scale = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_scale")
    if weight is None or scale is None or weight.dtype != DTYPE_OF_FORMAT[layer.form]:
        return None
    mx = layer.form == "mxfp8"
    settings: dict[str, Any] = {"swizzled": True} if mx else {}
    if layer.rotated:  # int8 alone
        settings = {"rotation": layer.rotation if layer.form == "int8_tensorwise" else 0}
        if not settings["rotation"]:
            return None
    label, marks = LABELS.get(layer.form, FP8_SCALED), checkpoint.present(stem, *MARKS)
    of = (ScaledTensors.mx if mx else ScaledTensors)(weight, scale, label, marks)
    if (of.kind == E8M0) != mx:
        return None
    packing = scaled(of, **settings) or (_mxfp8_bank(of) if mx else None)
    shape = weight.shape
    if mx and len(shape) == 2:
        shape = _rows_of(checkpoint, stem, layer, shape, MXFP8_ROWS), shape[1]
    return claimed(weight, packing, shape=shape) if shape and shape[0] else None


def _mxfp8_bank(of: ScaledTensors) -> Packing | None:
    """Return how a bank of experts in mxfp8 is stored whose rows do not fill their tiles."""
    if len(of.codes.shape) != 3 or of.scale.shape[:1] != of.codes.shape[:1] or not of.codes.nbytes:
        return None
    expert = of._replace(codes=one_of(of.codes), scale=one_of(of.scale))
    return stacked(of.codes, scaled(expert, swizzled=True), {SCALE: of.scale})


def _rotated_rows(checkpoint: Checkpoint, stem: str, layer: LayerNote) -> WeightClaim | None:
    """Return the claim of a rotated weight of 4-bit codes with a scale for each row."""
    codes, scale, size = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_scale"), layer.rotation
    if codes is None or scale is None or codes.dtype not in ("I8", "U8") or len(codes.shape) != 2:
        return None
    rows, cols = codes.shape[0], codes.shape[1] * 2
    if scale.dtype != "F32" or scale.shape not in ((rows,), (rows, 1)):
        return None
    if not rows or not cols or not size or cols % size:
        return None
    encoding = PackedInts.shared(
        (cols, cols // 2), cols, bits=4, cols=cols, size=cols, signed=True, rotation=size, label=FOUR_BITS
    )
    packing = Packing(encoding, codes, {SCALE: WeightPart(scale, cols, 4)}, checkpoint.present(stem, *MARKS))
    return claimed(codes, packing, shape=(rows, cols))


def _nvfp4(checkpoint: Checkpoint, stem: str, layer: LayerNote) -> WeightClaim | None:
    """Return the claim of a weight of nvfp4: swizzled scales, even columns in the high half."""
    codes, scale = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_scale")
    whole, pre = checkpoint.get(stem, "weight_scale_2"), checkpoint.get(stem, "pre_quant_scale")
    if layer.rotated or codes is None or scale is None or whole is None:
        return None
    of = Fp4Tensors(codes, scale, "nvfp4", whole, checkpoint.present(stem, *MARKS), pre=pre)
    packing, shape = fp4(of, high_first=True, swizzled=True) or _nvfp4_bank(of), of.shape
    if len(shape) == 2:
        shape = _rows_of(checkpoint, stem, layer, shape, NVFP4_ROWS), shape[1]
    return claimed(codes, packing, shape=shape) if shape and shape[0] else None


def _nvfp4_bank(of: Fp4Tensors) -> Packing | None:
    """Return how a bank of experts is stored with a scale of the whole weight for each."""
    if len(of.codes.shape) != 3 or of.whole is None or of.pre is not None:
        return None
    parts = {SCALE: of.scale, WHOLE_SCALE: of.whole}
    if not of.codes.nbytes or any(info.shape[:1] != of.codes.shape[:1] for info in parts.values()):
        return None
    expert = of._replace(codes=one_of(of.codes), scale=one_of(of.scale), whole=one_of(of.whole))
    return stacked(of.codes, fp4(expert, high_first=True, swizzled=True), parts)


def _grouped(checkpoint: Checkpoint, stem: str, layer: LayerNote) -> WeightClaim | None:
    """Return the claim of a weight of asym_w4a8_int8: `weight_s_rel` for groups, `weight_s_channel` for rows."""
    codes, group, row = (checkpoint.get(stem, last) for last in ("weight", "weight_s_rel", "weight_s_channel"))
    book, size, rotation = checkpoint.get(stem, "weight_codebook"), layer.options.get("group_size", 16), layer.rotation
    if codes is None or group is None or row is None or checkpoint.present(stem, "weight_correction"):
        return None
    if codes.dtype not in ("I8", "U8") or len(codes.shape) != 2 or len(group.shape) != 2 or not codes.nbytes:
        return None
    rows, across = group.shape
    cols = across * size if positive(size) else 0
    bits = codes.shape[1] * 8 // cols if cols else 0
    if bits not in (4, 6) or codes.shape != (rows, cols * bits // 8) or cols % 16 or not rotation or cols % rotation:
        return None
    if group.dtype not in ("F8_E4M3", "U8", "F32") or (row.dtype, prod(row.shape)) != ("F32", rows):
        return None
    if book is not None and ((book.dtype, book.shape) != ("F32", (16,)) or bits == 6):
        return None
    kind = "F32" if group.dtype == "F32" else "F8_E4M3"
    encoding = GroupedCodebook.shared(
        (cols, codes.shape[1]), cols, cols=cols, size=size, bits=bits, rotation=rotation, kind=kind, label=layer.form
    )
    parts = {SCALE: WeightPart(group, size, ITEM_BYTES[group.dtype]), ROW_SCALE: WeightPart(row, cols, 4)}
    parts |= {BOOK: WeightPart(book)} if book is not None else {}
    packing = Packing(encoding, codes, parts, checkpoint.present(stem, *MARKS))
    return claimed(codes, packing, shape=(rows, cols))


def _columns(checkpoint: Checkpoint, stem: str, layer: LayerNote) -> WeightClaim | None:
    """Return the claim of a weight of awq_w4a16, whose scales and zero points are [groups, rows]."""
    codes, scale, zero = (checkpoint.get(stem, last) for last in ("weight", "weight_scale", "weight_zeros"))
    size = layer.options.get("group_size", 64)
    if codes is None or scale is None or zero is None or codes.dtype not in ("I8", "U8") or len(codes.shape) != 2:
        return None
    rows, cols = codes.shape[0], codes.shape[1] * 2
    if not rows or not positive(size) or cols % size or scale.dtype not in SCALE_DTYPES:
        return None
    if scale.shape != (cols // size, rows) or (zero.dtype, zero.shape) != (scale.dtype, scale.shape) or not cols:
        return None
    encoding = Columns.shared((2, 1), cols, shape=(rows, cols), scales=scale.dtype, label=layer.form)
    packing = Packing(
        encoding, codes, {SCALE: WeightPart(scale), ZERO: WeightPart(zero)}, checkpoint.present(stem, *MARKS)
    )
    return claimed(codes, packing, shape=(rows, cols))


READERS: Final[Mapping[str, Callable[[Checkpoint, str, LayerNote], WeightClaim | None]]] = MappingProxyType({
    **dict.fromkeys(DTYPE_OF_FORMAT, _one_byte), FOUR_BITS: _rotated_rows, "nvfp4": _nvfp4,
    "asym_w4a8_int8": _grouped, "awq_w4a16": _columns,
})  # fmt: skip
"""Name of a format in the JSON of a layer → its reader: (checkpoint, layer, its JSON) → the claim of its weight."""


def _with_note(weight: StoredTensor, packing: Packing | None, options: Mapping[str, Any]) -> NewWeight | None:
    """Return a weight with ComfyUI's JSON; None without a packing."""
    if packing is None:
        return None
    parts = [part.info for part in packing.parts.values()]
    return new_weight(packing, new_note(weight, "comfy_quant", options, parts))


def new_fp8(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as fp8 with one scale."""
    codes, scale = codes_of(weight, "F8_E4M3", weight.shape), new_tensor(weight, "weight_scale", "F32", ())
    packing = scaled(ScaledTensors(codes, scale, FP8_SCALED), new_scales=True)
    return _with_note(weight, packing, {"format": "float8_e4m3fn"})


def new_int8(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as int8 with a scale for each row."""
    scale = new_tensor(weight, "weight_scale", "F32", (weight.shape[0], 1))
    packing = scaled(
        ScaledTensors(codes_of(weight, "I8", weight.shape), scale, "int8"), new_scales=True, ends=(-127, 127)
    )
    return _with_note(weight, packing, {"format": "int8_tensorwise", "per_row": True})


def new_mxfp8(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as fp8 with a power of two for 32 columns."""
    rows, cols = weight.shape
    if rows % MXFP8_ROWS or cols % MX_COLUMNS:
        return None
    scale = new_tensor(weight, "weight_scale", "U8", tiled_shape(rows, cols // MX_COLUMNS))
    of = ScaledTensors.mx(codes_of(weight, "F8_E4M3", weight.shape), scale, "mxfp8")
    return _with_note(weight, scaled(of, new_scales=True, swizzled=True), {"format": "mxfp8"})


def new_nvfp4(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as 4-bit codes with fp8 scales for 16 columns, and one scale."""
    rows, cols = weight.shape
    if rows % NVFP4_ROWS or cols % NVFP4_COLUMNS:
        return None
    scale = new_tensor(weight, "weight_scale", "F8_E4M3", tiled_shape(rows, cols // NVFP4_COLUMNS))
    whole = new_tensor(weight, "weight_scale_2", "F32", ())
    of = Fp4Tensors(codes_of(weight, "U8", (rows, cols // 2)), scale, "nvfp4", whole)
    return _with_note(weight, fp4(of, high_first=True, swizzled=True, new_scales=True), {"format": "nvfp4"})
