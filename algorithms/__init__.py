"""The table of merge algorithms, one row for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

if __name__ == "algorithms":
    raise ImportError("import lora_merge.algorithms, not algorithms")

from .adalora import ADALORA
from .adamss import ADAMSS
from .base import Algorithm, DoesNotFit, LoadedModule, Shape, Shapes, flat
from .bdlora import BDLORA
from .boft import BOFT
from .bora import BORA
from .bounds import COUNT, SEED, Bounds, below
from .c3a import C3A
from .deft import DEFT
from .delora import DELORA
from .fourierft import FOURIERFT
from .frod import FROD
from .glora import GLORA, GLORA_OLD
from .gralora import GRALORA
from .hira import HIRA, HIRA_EMBEDDING
from .hra import HRA
from .ia3 import IA3
from .loha import LOHA
from .lokr import LOKR
from .lora import LORA
from .lora_bias import LORA_BIAS
from .lora_blocks import LORA_BLOCKS
from .lora_embedding import LORA_EMBEDDING
from .lora_experts import LORA_EXPERTS, LORA_EXPERTS_TRANSPOSED
from .lora_fused import LORA_FUSED
from .lora_sparse import LORA_SPARSE, LORA_SPARSE_TUCKER
from .lora_stacked import STACKED
from .lora_switch import LORA_SWITCH
from .lora_transposed import LORA_TRANSPOSED
from .lora_xs import LORA_XS
from .miss import MISS, MISS_BAT, MISS_MINI
from .oft import DIAG_OFT, OFT_DIAG
from .onetrainer_oft import ONETRAINER_OFT, ONETRAINER_OFT_CONV
from .osf import OSF
from .peanut import PEANUT
from .peft_boft import PEFT_BOFT
from .peft_glora import PEFT_GLORA, PEFT_GLORA_BIAS
from .peft_ia3 import PEFT_IA3_IN, PEFT_IA3_OUT
from .peft_oft import PEFT_OFT, PEFT_OFT1, PEFT_OFT2, PEFT_OFT_EMBEDDING
from .pissa import KASA, OLORA, PISSA
from .psoft import PSOFT
from .randlora import RANDLORA
from .road import ROAD
from .shira import SHIRA
from .supertuning import SUPERTUNING
from .tinylora import TINYLORA
from .tlora import TLORA
from .unilora import UNILORA
from .vblora import VBLORA, VBLORA_TOP
from .vera import PVERA, VERA
from .waveft import WAVEFT
from .whole import FULL, FULL_RANK, SET

ROWS: Final = (
    LORA, LORA_SPARSE, LORA_SPARSE_TUCKER, LORA_FUSED, LORA_BLOCKS, LORA_XS, BORA, LORA_TRANSPOSED, LORA_BIAS,
    LORA_EMBEDDING, LORA_EXPERTS, LORA_EXPERTS_TRANSPOSED, *STACKED, LORA_SWITCH, BDLORA, PISSA, OLORA, KASA, LOHA,
    LOKR,
    GLORA, GLORA_OLD, TLORA, FULL, FULL_RANK, SET, IA3, DIAG_OFT, OFT_DIAG, BOFT, ONETRAINER_OFT, ONETRAINER_OFT_CONV,
    ADALORA, PEFT_IA3_OUT, PEFT_IA3_IN, PEFT_OFT, PEFT_OFT_EMBEDDING, PEFT_OFT2, PEFT_OFT1,
    PEFT_BOFT, VERA, PVERA, RANDLORA, FOURIERFT, HRA, MISS, MISS_BAT, MISS_MINI, SHIRA, C3A, ROAD,
    DELORA, GRALORA, HIRA, HIRA_EMBEDDING, VBLORA, VBLORA_TOP, DEFT, SUPERTUNING, OSF,
    WAVEFT, PEANUT, UNILORA, PEFT_GLORA, PEFT_GLORA_BIAS, PSOFT, ADAMSS, TINYLORA, FROD,
)  # fmt: skip

ALGORITHMS: Final[Mapping[str, Algorithm]] = MappingProxyType({a.name: a for a in ROWS})
"""Name → row. A plan uses the first row whose slots and shapes fit the stored tensors."""

__all__ = [
    "ALGORITHMS",
    "COUNT",
    "SEED",
    "Algorithm",
    "Bounds",
    "DoesNotFit",
    "LoadedModule",
    "Shape",
    "Shapes",
    "below",
    "flat",
]
