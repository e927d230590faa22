"""What PEFT makes of the base when it loads an adapter, for slots that the adapter's file lacks (`Algorithm.rebuild`).

The steps are the rows' own. Here they get the base's numbers in the library's precision, on the CPU, whatever device
the merge runs on; the formulas take what comes out for given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, Loaded
from ..disk.files import StoredTensor
from ..matching.patch import Patch
from ..matching.relatives import kin
from ..models.weights import Weight, WeightView
from .placement import TORCH_DTYPES, Placement, host, stage
from .tensors import gathered, weight_values

Kin: TypeAlias = MutableMapping[tuple[WeightView, ...], Mapping[str, Tensor]]
"""The weights of all layers of a kind → what is rebuilt from them."""

AS_LOADED: Final = Placement(torch.device("cpu"), torch.float32)
WIDE: Final = Placement(torch.device("cpu"), torch.float64)


def from_base(
    patch: Patch, base: Mapping[str, Weight], fetch: Callable[[StoredTensor], Tensor], kept: Kin
) -> Mapping[str, Tensor]:
    """Return the slots that the patch's file lacks, CPU tensors without n, from the base before any adapter: so PEFT
    does
    where several act in turn too. What several layers share is made once and goes into `kept`, which is of one plan."""

    def read(slot: str) -> Tensor:
        view = patch.view if not slot else patch.beside.get(slot)
        if view is None:
            return stage([fetch(patch.module.slots[slot]).reshape(patch.shapes[slot])], AS_LOADED)[0]
        wide = any(base[piece.key].stored.dtype == "F64" for piece in view.pieces)
        at = WIDE if wide else AS_LOADED
        return gathered(view, lambda piece: weight_values(base[piece.key], fetch).reshape(-1, piece.cols), at)

    of = kin(patch)
    if of and of in kept:
        return kept[of]
    loaded = Loaded(read, cast, patch.shapes, patch.view.shape, dict(patch.settings))
    found = ALGORITHMS[patch.algorithm].rebuilt(loaded)
    if of:
        kept[of] = found
    return found


def cast(values: Tensor, dtype: str) -> Tensor:
    """Return the numbers as this dtype of files holds them, in fp64 for F64 and else in fp32."""
    return host(host(values, TORCH_DTYPES[dtype]), torch.float64 if dtype == "F64" else torch.float32)
