"""The table of merge algorithms: one row each, every one on this screen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

if __name__ == "algorithms":
    raise ImportError("import lora_merge.algorithms, not algorithms")

from .base import Algorithm, DoesNotFit, Shape, Shapes, flat
from .boft import BOFT
from .full import FULL, FULL_RANK, SET
from .glora import GLORA, GLORA_OLD
from .ia3 import IA3
from .loha import LOHA
from .lokr import LOKR
from .lora import LORA
from .lora_fused import LORA_FUSED
from .lora_transposed import LORA_TRANSPOSED
from .oft import DIAG_OFT, OFT_DIAG
from .onetrainer import ONETRAINER_OFT, ONETRAINER_OFT_CONV
from .sparse import LORA_SPARSE
from .tlora import TLORA

ROWS: Final = (
    LORA, LORA_SPARSE, LORA_FUSED, LORA_TRANSPOSED, LOHA, LOKR, GLORA, GLORA_OLD, TLORA,
    FULL, FULL_RANK, SET, IA3, DIAG_OFT, OFT_DIAG, BOFT, ONETRAINER_OFT, ONETRAINER_OFT_CONV,
)  # fmt: skip

ALGORITHMS: Final[Mapping[str, Algorithm]] = MappingProxyType({a.name: a for a in ROWS})
"""The plan takes the first row whose slots and shapes fit."""

__all__ = ["ALGORITHMS", "Algorithm", "DoesNotFit", "Shape", "Shapes", "flat"]
