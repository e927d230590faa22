"""The names of layers' formats in ComfyUI's files: a JSON in a tensor beside the weight, or in the metadata.

https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/quant_ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...disk.reader import read_bytes
from ...limits import from_json
from .base import Checkpoint

ENTRY: Final = "_quantization_metadata"
PREFIX: Final = "model.diffusion_model."
"""Prefix of layers that some converters omit in the metadata."""

NOTE_LIMIT: Final = 4096  # bytes of the JSON of one layer; writers need about fifty


class Layer(NamedTuple):
    """The JSON of one layer."""

    form: str
    options: Mapping[str, Any]


def layers(found: Checkpoint) -> Iterator[tuple[str, Layer]]:
    """Yield name and JSON of every layer that a file of the new style marks as quantised."""
    try:
        entry = from_json(found.metadata[ENTRY].encode()) if ENTRY in found.metadata else {}
    except ValueError:
        entry = {}
    told = entry.get("layers") if isinstance(entry, dict) else None
    notes: dict[str, Any] = dict(told) if isinstance(told, dict) else {}
    for stem in found.stems("comfy_quant"):
        info = found.tensors[f"{stem}.comfy_quant"]
        if info.dtype == "U8" and info.nbytes <= NOTE_LIMIT:
            try:
                notes[stem] = from_json(read_bytes(info))
            except ValueError:
                continue  # not a layer of any codec: `quantised` then refuses it by its mark
    for name, layer in notes.items():
        options = layer if isinstance(layer, dict) else {"format": layer}
        inner = options.get("params")
        options = {**options, **(inner if isinstance(inner, dict) else {})}
        if isinstance(form := options.get("format"), str):
            yield (name if f"{name}.weight" in found.tensors else PREFIX + name), Layer(form, options)
