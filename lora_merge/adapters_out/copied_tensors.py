"""What a conversion or an extraction makes of one parameter: its tensors, and the facts of its layer. Their bytes go to
the draft of the output, or wait until their turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..disk.draft import Draft, Heap
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import FILE_DTYPES, TORCH_DTYPES
from ..matching.patch import Patch
from .decomposition.storage_rounding import rounded
from .groups import Place
from .job import WHOLE
from .module_tensors import Layer, StoredModule, waiting, without_bytes
from .output_file import Entry
from .rounding import squares_of_rows


@dataclass(frozen=True)
class ModuleTensors:
    """The stored tensors of one module by their ending, and the facts of its layer."""

    place: Place
    tensors: Mapping[str, Tensor]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input: nothing is known of the size of its change


def rounded_change(place: Place, ending: str, change: RowMatrix, dtype: torch.dtype) -> ModuleTensors:
    """Return a parameter's whole change, rounded once."""
    stored = rounded(change, dtype)
    tensors = {ending: stored.numbers.reshape(place.view.shape)}
    return ModuleTensors(place, tensors, Layer(tensors, WHOLE, 0, 0, None, stored.totals.squares, stored.lost))


def rounded_value(place: Place, value: RowMatrix, change: RowMatrix, dtype: torch.dtype) -> ModuleTensors:
    """Return a parameter's new value, rounded once, where the dialect stores no changes of it."""
    stored = rounded(value, dtype)
    tensors = {f".{place.parameter}": as_value(place, stored.numbers)}
    return ModuleTensors(place, tensors, Layer(tensors, WHOLE, 0, 0, None, squares_of_rows(change), stored.lost))


def as_value(place: Place, numbers: Tensor) -> Tensor:
    """Return a parameter as the model has it, which may be [in, out], such as Conv1D of GPT-2."""
    value = numbers.reshape(place.view.shape)
    return (value.mT if is_turned(place) else value).contiguous()


def is_turned(place: Place) -> bool:
    """Return whether the base stores a matrix [in, out]."""
    return place.view.row_slices[0].transposed and len(place.view.shape) == 2


def holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Return whether a dtype holds all numbers of a tensor."""
    return not value.is_floating_point() or value.dtype == dtype or torch.equal(value.to(dtype).to(value.dtype), value)


def stored_magnitude(patch: Patch) -> tuple[int, ...]:
    """Return the stored shape of a magnitude, which shows its axis."""
    assert patch.magnitude is not None, "the caller looked"
    _, shape = patch.magnitude
    ones = (1,) * (len(patch.view.shape) - 2)
    return (*shape, *ones)


def stored_module(module: ModuleTensors, put: Heap | Draft) -> StoredModule:
    """Return a module whose bytes wait, or are in the draft of the output."""
    entries = {ending: entry(ending, tensor) for ending, tensor in module.tensors.items()}
    return StoredModule(module.place, waiting(entries, put), without_bytes(module.layer), module.copied)


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]


def tensor_of_entry(entry: Entry) -> Tensor:
    """Return a tensor that is written, which is in memory."""
    assert isinstance(entry.data, memoryview), "it was just made"
    return torch.frombuffer(entry.data, dtype=TORCH_DTYPES[entry.dtype]).reshape(entry.shape)
