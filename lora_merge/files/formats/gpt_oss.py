"""The experts of gpt-oss in mxfp4. https://github.com/huggingface/transformers integrations/mxfp4.py."""

from __future__ import annotations

from ..encodings.base import Packing, WeightPart
from ..encodings.fp4 import Fp4
from ..encodings.scaled_codes import E8M0, MX_COLUMNS, SCALE
from .base import Checkpoint, Claims, claimed


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the experts of gpt-oss: mxfp4 of [experts, out, in], which the model knows as [experts, in, out]."""
    if checkpoint.config.get("quant_method") != "mxfp4":
        return
    for name, codes in checkpoint.tensors.items():
        stem = name.removesuffix("_blocks")
        scale = checkpoint.tensors.get(f"{stem}_scales")
        if stem == name or scale is None or len(codes.shape) != 4 or 2 * codes.shape[3] != MX_COLUMNS:
            continue
        experts, rows, across, _ = codes.shape
        if (codes.dtype, scale.dtype, scale.shape) != ("U8", "U8", (experts, rows, across)) or not codes.nbytes:
            continue
        cols = across * MX_COLUMNS
        encoding = Fp4.shared(
            (2, 1), rows * cols, kind=E8M0, size=MX_COLUMNS, cols=cols, turned=rows, label="gpt-oss mxfp4"
        )
        packing = Packing(encoding, codes, {SCALE: WeightPart(scale, MX_COLUMNS, 1)})
        yield claimed(codes, packing, stem, (experts, cols, rows))
