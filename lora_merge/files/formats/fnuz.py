"""fp8 without scales whose only NaN is the negative zero: e4m3fnuz and e5m2fnuz. They are read, never written.

The number of a byte is half the number that it has in the dtypes of the same name without `uz`.
Noune et al. 2022, arXiv:2206.02915.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..encodings.base import Packing
from ..encodings.table import Fnuz
from .base import Checkpoint, WeightClaim, claimed

DTYPES: Final = {"F8_E4M3FNUZ": "fp8_e4m3fnuz", "F8_E5M2FNUZ": "fp8_e5m2fnuz"}


def claim(checkpoint: Checkpoint) -> Iterator[WeightClaim]:
    """Yield the tensors of these dtypes without a scale beside them."""
    for name, info in checkpoint.tensors.items():
        stem = name.rpartition(".")[0]
        if (
            info.dtype in DTYPES
            and info.nbytes
            and not checkpoint.present(stem, "weight_scale", "scale_weight", "scale")
        ):
            yield claimed(
                info, name, info.shape, Packing(Fnuz.shared((1, 1), dtype=info.dtype, label=DTYPES[info.dtype]), info)
            )
