"""fp8 without scales whose only NaN is the negative zero: e4m3fnuz and e5m2fnuz. They are read, never written.

The number of a byte is half the number that it has in the dtypes of the same name without `uz`.
Noune et al. 2022, arXiv:2206.02915.
"""

from __future__ import annotations

from typing import Final

from ..encodings.base import Packing
from ..encodings.table import Fnuz
from .base import Checkpoint, Claims, claimed

FNUZ_DTYPES: Final = {"F8_E4M3FNUZ": "fp8_e4m3fnuz", "F8_E5M2FNUZ": "fp8_e5m2fnuz"}


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the tensors of these dtypes without a scale next to them."""
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FNUZ_DTYPES or not info.nbytes:
            continue
        if not checkpoint.present(name.rpartition(".")[0], "weight_scale", "scale_weight", "scale"):
            encoding = Fnuz.shared((1, 1), dtype=info.dtype, label=FNUZ_DTYPES[info.dtype])
            yield claimed(info, Packing(encoding, info))
