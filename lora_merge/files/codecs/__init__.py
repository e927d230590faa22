"""Codecs: the ways in which files store the numbers of a weight, one module each. torch is imported in functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from . import (
    bitsandbytes,
    codebooks,
    compressed_tensors,
    fnuz,
    folders,
    fp4,
    fp8_scaled,
    gptq,
    halves,
    mlx,
    sdnq,
    torchao,
    trainers,
)
from .base import Checkpoint, Claim

CODECS: Final[tuple[Callable[[Checkpoint], Iterable[Claim]], ...]] = (
    fp8_scaled.claim, fp4.comfy, codebooks.comfy, folders.blocks, folders.fbgemm, folders.modelopt, fp4.modelopt,
    fp4.gpt_oss, compressed_tensors.claim, bitsandbytes.claim, gptq.claim, codebooks.aqlm, mlx.claim,
    torchao.claim, halves.quanto, halves.hqq, sdnq.claim, trainers.claim, fnuz.claim,
)  # fmt: skip
"""Functions that yield the weights that a codec reads. All tensors that none of them claims are plain numbers."""
