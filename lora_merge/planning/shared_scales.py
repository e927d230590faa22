"""Weights that servers join, such as q, k and v: in some formats they need one scale of the whole weight.

vLLM and SGLang keep one number for all of them, the largest, so different ones make wrong numbers there.
https://github.com/vllm-project/vllm vllm/model_executor/layers/quantization/compressed_tensors/schemes, modelopt.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .plan import OutputTensor

TOGETHER: Final = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip
"""Names of the layers that servers join."""

_GROUP: Final = {name: names[0] for names in TOGETHER for name in names}


def partners(targets: Iterable[OutputTensor]) -> dict[str, tuple[OutputTensor, ...]]:
    """Return name of a weight → the weights that servers join, itself included, where they need one scale."""
    found: dict[tuple[str, str], list[OutputTensor]] = {}
    for target in targets:
        module, _, leaf = target.name.removesuffix(".weight").rpartition(".")
        if leaf in _GROUP and target.packing.encoding.joined:
            found.setdefault((module, _GROUP[leaf]), []).append(target)
    return {target.name: tuple(group) for group in found.values() for target in group if len(group) > 1}
