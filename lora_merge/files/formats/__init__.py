"""The formats of quantised weights, one module a program: `FORMATS` is the ordered table of those that are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..encodings.base import Packing, Tensors
from . import (
    aqlm,
    bitsandbytes,
    comfyui,
    compressed_tensors,
    fnuz,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    musubi,
    quanto,
    sdnq,
    torchao,
    transformers_fp8,
)
from .base import Checkpoint, Claims, WeightClaim
from .quantization_config import section

FORMATS: Final[tuple[Callable[[Checkpoint], Claims], ...]] = (
    comfyui.claim, transformers_fp8.claim, modelopt.claim, gpt_oss.claim, compressed_tensors.claim, bitsandbytes.claim,
    gptq.claim, aqlm.claim, mlx.claim, torchao.claim, quanto.claim, hqq.claim, sdnq.claim, musubi.claim, fnuz.claim,
)  # fmt: skip
"""Functions that yield the weights that a format reads; the first claim of a weight counts. All other tensors are plain
values."""


def recognised(
    tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[Tensors, dict[str, Packing]]:
    """Return the tensors as the model knows them, and name → packing of the weights that a format reads.

    Such a weight has the model's name and shape, which may differ from those of the stored codes.
    """
    checkpoint = Checkpoint(tensors, metadata, section(config))
    # The first claim of each tensor of codes, and of each name, counts.
    claims: dict[str, WeightClaim] = {}  # name of the codes → claim
    names: set[str] = set()
    for read in FORMATS:
        for claim in filter(None, read(checkpoint)):
            codes, name = claim.packing.codes, claim.weight.name
            if codes is not None and name not in names and (name == codes.name or name not in tensors):
                claims.setdefault(codes.name, claim)
                names.add(name)
    if not claims:
        return tensors, {}
    # The weights take the places of their codes.
    stored = ((key, claims.get(key)) for key in tensors)
    weights = {c.weight.name if c else key: c.weight if c else tensors[key] for key, c in stored}
    return weights, {c.weight.name: c.packing for c in claims.values()}


def packing_names(packed: Mapping[str, Packing]) -> frozenset[str]:
    """Return the names of all tensors next to quantised weights: scales, marks, tables."""
    return frozenset(name for packing in packed.values() for name in packing.names)
