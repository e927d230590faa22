"""fp8 without scales whose only NaN is the negative zero: e4m3fnuz and e5m2fnuz. They are read, never written.

A byte stands for half the number that it has in the dtypes of the same name without `uz`.
Noune et al. 2022, arXiv:2206.02915.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from .base import CODES, Checkpoint, Claim, Encoding, InvalidPart, Packing, Parts, claimed

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: Final = {"F8_E4M3FNUZ": "fp8_e4m3fnuz", "F8_E5M2FNUZ": "fp8_e5m2fnuz"}


@dataclass(frozen=True, eq=False)
class Fnuz(Encoding):
    """Numbers of one of these dtypes."""

    dtype: str = ""
    name: ClassVar[str] = "fnuz"
    decode_only: ClassVar[str] = "only some devices of AMD have these numbers"

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return the numbers in fp32."""
        from . import arithmetic

        values = arithmetic.byte_values(self.dtype).index_select(0, parts[CODES].view(arithmetic.BYTE).int())
        if bool(values.isnan().any()):
            raise InvalidPart("a code stands for no finite number")
        return values


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the tensors of these dtypes that no scale stands beside."""
    for name, info in found.tensors.items():
        stem = name.rpartition(".")[0]
        if info.dtype in DTYPES and info.nbytes and not found.present(stem, "weight_scale", "scale_weight", "scale"):
            yield claimed(
                info, name, info.shape, Packing(Fnuz.shared((1, 1), dtype=info.dtype, label=DTYPES[info.dtype]), info)
            )
