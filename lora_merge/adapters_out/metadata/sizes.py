"""The size of a file before its tensors are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from ...adapters.peft.rules import ADAPTER_METADATA
from ...dtypes import ITEM_BYTES, Shape
from ...files.checkpoint import Index
from ...files.safetensors import layout
from ..rank_rules import SIZE, Rule
from .loaders import adapter_metadata

METADATA_BYTES: Final = 4096
"""Bytes that the metadata of a file usually takes in its header."""

Tensor = tuple[str, str, Shape]
"""Name, dtype and shape, as in the header."""


def factor_shapes(shape: Shape, rank: int) -> dict[str, Shape]:
    """Return the shapes of both factors of a weight by their slots: of a linear layer, or of a convolution."""
    return {"down": (rank, *shape[1:]), "up": (shape[0], rank, *(1 for _ in shape[2:]))}


@dataclass(frozen=True)
class PlannedLayer:
    """One layer of a plan: its tensors (name, dtype, shape), and its rank, 0 for a whole matrix."""

    tensors: Sequence[Tensor]
    rank: int = 0


def tensors_of(layers: Iterable[PlannedLayer]) -> list[Tensor]:
    """Return the tensors of all layers."""
    return [tensor for layer in layers for tensor in layer.tensors]


class _Named(NamedTuple):
    name: str
    dtype: str
    shape: Shape


def _entries(tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return what diffusers' loader reads of the tensors, which may be longer than their part of the header."""
    text = adapter_metadata(_Named(*tensor) for tensor in tensors)
    return {ADAPTER_METADATA: text} if text else {}


def planned_size(layers: Iterable[PlannedLayer], rule: Rule, inputs: Sequence[Index] = ()) -> int:
    """Return the bytes of a file, at most, where numbers decide its ranks: `--rank size:` bounds all factors together,
    of which each layer has one direction at least. `inputs`: those whose metadata it keeps where they agree."""
    tensors, factors, least, others = list[Tensor](), 0, 0, 0
    for layer in layers:
        tensors += layer.tensors
        size = sum(prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in layer.tensors if shape)
        others += sum(ITEM_BYTES[dtype] for _, dtype, shape in layer.tensors if not shape)
        if layer.rank:
            factors, least = factors + size, least + size // layer.rank
        else:
            others += size
    if rule.name == SIZE:
        factors = min(factors, max(least, int(rule.value)))
    first, *more = [index.metadata for index in inputs] or [{}]
    same = {name: value for name, value in first.items() if all(other.get(name) == value for other in more)}
    return len(layout(tensors, {**same, **_entries(tensors)}, 0)) + METADATA_BYTES + factors + others


def header_room(tensors: Iterable[Tensor], inputs: Sequence[Index]) -> int:
    """Return the bytes that the header of a file probably takes at most. `inputs`: those whose metadata it keeps."""
    entries: Mapping[str, str] = {name: value for index in inputs for name, value in index.metadata.items()}
    tensors = [*tensors]
    return len(layout(tensors, {**entries, **_entries(tensors)}, 0)) + METADATA_BYTES * (1 + len(inputs))
