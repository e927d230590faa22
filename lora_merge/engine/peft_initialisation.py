"""Computes tensors that an adapter's file lacks, as PEFT makes them of the base when it loads the adapter.

Each algorithm has its own function for that (`Algorithm.rebuild`). This module calls it with the base's numbers in
PEFT's precision, on the CPU, whatever the device of the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, Loaded
from ..dtypes import StoredTensor
from ..matching.layer_order import basis_weights
from ..matching.patch import Patch
from ..models.weights import Weight, WeightView
from .tensor_moves import TORCH_DTYPES, Placement, host, stage
from .tensors import gathered, weight_values

Kin: TypeAlias = MutableMapping[tuple[WeightView, ...], Mapping[str, Tensor]]
"""The weights of all layers of a kind → the tensors computed from them."""

AS_LOADED: Final = Placement(torch.device("cpu"), torch.float32)
WIDE: Final = Placement(torch.device("cpu"), torch.float64)


def from_base(
    patch: Patch, base: Mapping[str, Weight], fetch: Callable[[StoredTensor], Tensor], shared: Kin
) -> Mapping[str, Tensor]:
    """Return the slots that the patch's file lacks as unstacked CPU tensors, computed from the unmerged base, as PEFT
    does for several adapters too. Tensors that several layers share are computed once and put into `shared`."""

    def read(slot: str) -> Tensor:
        view = patch.view if not slot else patch.beside.get(slot)
        if view is None:
            return stage([fetch(patch.module.slots[slot]).reshape(patch.shapes[slot])], AS_LOADED)[0]
        wide = any(base[piece.key].stored.dtype == "F64" for piece in view.row_slices)
        at = WIDE if wide else AS_LOADED
        return gathered(view, lambda piece: weight_values(base[piece.key], fetch).reshape(-1, piece.cols), at)

    layers = basis_weights(patch)
    if layers and layers in shared:
        return shared[layers]
    loaded = Loaded(read, cast, patch.shapes, patch.view.shape, dict(patch.settings))
    tensors = ALGORITHMS[patch.algorithm].rebuilt(loaded)
    if layers:
        shared[layers] = tensors
    return tensors


def cast(values: Tensor, dtype: str) -> Tensor:
    """Return the numbers as this dtype of files holds them, in fp64 for F64 and else in fp32."""
    return host(host(values, TORCH_DTYPES[dtype]), torch.float64 if dtype == "F64" else torch.float32)
