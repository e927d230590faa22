"""The names of layers' formats in ComfyUI's files: a JSON in a tensor beside the weight, or in the metadata.

https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/quant_ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...safe_regex import from_json
from .base import Checkpoint, read_note

ENTRY: Final = "_quantization_metadata"
PREFIX: Final = "model.diffusion_model."
"""Prefix of layers that some converters omit in the metadata."""


class Layer(NamedTuple):
    """The JSON of one layer."""

    form: str
    options: Mapping[str, Any]

    @property
    def rotated(self) -> bool:
        """Whether the weight is stored rotated ("convrot")."""
        return bool(self.options.get("convrot"))


def layers(found: Checkpoint) -> Iterator[tuple[str, Layer]]:
    """Yield name and JSON of every layer that a file of the new style marks as quantised."""
    try:
        entry = from_json(found.metadata[ENTRY].encode()) if ENTRY in found.metadata else {}
    except ValueError:
        entry = {}
    told = entry.get("layers") if isinstance(entry, dict) else None
    notes: dict[str, Any] = dict(told) if isinstance(told, dict) else {}
    for stem in found.stems("comfy_quant"):
        # What is no JSON names no layer: `quantised` then refuses it by its mark.
        if (note := read_note(found.tensors[f"{stem}.comfy_quant"])) is not None:
            notes[stem] = note
    for name, layer in notes.items():
        options = layer if isinstance(layer, dict) else {"format": layer}
        inner = options.get("params")
        options = {**options, **(inner if isinstance(inner, dict) else {})}
        if isinstance(form := options.get("format"), str):
            yield (name if f"{name}.weight" in found.tensors else PREFIX + name), Layer(form, options)


def rows_of(found: Checkpoint, stem: str, layer: Layer, stored: tuple[int, int], unit: int) -> int:
    """Return the rows of a weight of which (rows, columns) are stored, the rows filled up to a multiple of `unit`.

    They follow from the bias, or from the shape in the JSON; 0 where that has other columns.
    """
    told, bias = layer.options.get("orig_shape"), found.get(stem, "bias")
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else stored[0]
    if isinstance(told, list) and len(told) == 2 and all(isinstance(n, int) for n in told):
        if told[1] != stored[1]:
            return 0
        rows = told[0]
    return rows if rows > 0 and -(-rows // unit) * unit == stored[0] else stored[0]
