"""fp8 of transformers, as config.json says: a scale for each block or for the weight (`fp8`), FBGEMM (`fbgemm_fp8`).

https://github.com/huggingface/transformers integrations/finegrained_fp8.py, integrations/fbgemm_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...dtypes import StoredTensor
from ..encodings.scaled_codes import ScaledTensors, scaled
from .base import Checkpoint, Claims, NewWeight, claimed, codes_of, new_tensor, new_weight, positive

SCALE_ENDINGS: Final = {
    "_scale_inv": "", "_scales_inv": "", ".weight_scale": ".weight", ".qscale_weight": ".weight",
}  # fmt: skip
"""Ending of the name of a scale → that of its weight. All are multipliers, whatever a name says."""

POWER_SCALE_ENDINGS: Final = {".scale": ".weight"}
"""The same for scales whose dtype is F8_E8M0."""

ACTIVATION_SCALES: Final = ("input_scale", "activation_scale", "qscale_act")
BLOCK_SIDE: Final = 128  # rows and columns with one scale, of block fp8


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the fp8 weights of folders whose `quant_method` is `fp8` or `fbgemm_fp8`."""
    if checkpoint.config.get("quant_method") == "fp8":
        yield from _blocks(checkpoint)
    if checkpoint.config.get("quant_method") == "fbgemm_fp8":
        yield from _fbgemm(checkpoint)


def _blocks(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of fp8 with a scale for each block, or for the weight."""
    size, powers = checkpoint.config.get("weight_block_size"), checkpoint.config.get("scale_fmt") == "ue8m0"
    if size is not None and not (isinstance(size, list) and len(size) == 2 and all(map(positive, size))):
        return
    for name, scale in checkpoint.tensors.items():
        endings = {**SCALE_ENDINGS, **(POWER_SCALE_ENDINGS if scale.dtype == "F8_E8M0" else {})}
        ending = next((e for e in endings if name.endswith(e)), None)
        weight = checkpoint.tensors.get(name.removesuffix(ending) + endings[ending]) if ending else None
        if weight is None or weight.dtype != "F8_E4M3":
            continue
        marks = checkpoint.present(name.rpartition(".")[0], *ACTIVATION_SCALES)
        label, block = ("block fp8", (size[0], size[1])) if size else ("scaled fp8", None)
        of = ScaledTensors(weight, scale, label, marks, block=block, byte_powers=powers)
        yield claimed(weight, scaled(of, powers=powers))


def _fbgemm(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of FBGEMM: a scale for each row, or for each column of stacked experts."""
    for name, scale in checkpoint.tensors.items():
        weight = checkpoint.tensors.get(name.removesuffix("_scale")) if name.endswith("_scale") else None
        if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
            continue
        rows, cols = weight.shape[-2:]
        stacked = len(weight.shape) == 3 and scale.shape[-2:] == (1, cols)
        marks = checkpoint.present(name.rpartition(".")[0], "input_scale_ub", "input_scale")
        of = ScaledTensors(weight, scale, "FBGEMM fp8", marks, block=(rows, 1) if stacked else None)
        yield claimed(weight, scaled(of))


def new_blocks(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as fp8 with a scale for each block of 128 by 128; None for one of other blocks."""
    rows, cols = weight.shape
    if rows % BLOCK_SIDE or cols % BLOCK_SIDE:  # transformers' dequantiser and vLLM's kernels take whole blocks alone
        return None
    scale = new_tensor(weight, "weight_scale_inv", "F32", (rows // BLOCK_SIDE, cols // BLOCK_SIDE))
    of = ScaledTensors(codes_of(weight, "F8_E4M3", weight.shape), scale, "block fp8", block=(BLOCK_SIDE, BLOCK_SIDE))
    return new_weight(scaled(of, new_scales=True))


def section(unquantised: Sequence[str]) -> Mapping[str, Any]:
    """Return the section of config.json on block fp8; `unquantised`: names of modules."""
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK_SIDE, BLOCK_SIDE],
        "modules_to_not_convert": list(unquantised),
    }  # fmt: skip
