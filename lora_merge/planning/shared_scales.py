"""Weights that servers join, such as q, k and v: in some formats they need one scale of the whole weight.

vLLM and SGLang keep one number for all of them, the largest, so different ones make wrong numbers there.
https://github.com/vllm-project/vllm vllm/model_executor/layers/quantization/compressed_tensors/schemes, modelopt.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..models.fused import together
from .plan import OutputTensor


def partners(targets: Iterable[OutputTensor]) -> dict[str, tuple[OutputTensor, ...]]:
    """Return name of a weight → the weights that servers join, itself included, where they need one scale."""
    own = {target.name: target for target in targets if target.packing.encoding.joined}
    return {name: tuple(own[other] for other in group) for name, group in together(own).items()}
