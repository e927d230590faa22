"""AQLM: values of a row as sums of entries of codebooks.

https://github.com/Vahe1994/AQLM inference_lib/src/aqlm/utils.py.
"""

from __future__ import annotations

from math import prod
from typing import Final

from ...dtypes import ITEM_BYTES
from ..encodings.base import SCALE_DTYPES, Packing, WeightPart
from ..encodings.codebook import BOOK, Aqlm
from ..encodings.scaled_codes import SCALE
from .base import Checkpoint, Claims, claimed

BOOKS: Final = 1 << 24
"""Values of all codebooks of a weight; released models have at most half a million."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of AQLM whose entries are values of one row."""
    for stem in checkpoint.stems("codebooks") if checkpoint.config.get("quant_method") == "aqlm" else ():
        codes, scale = checkpoint.get(stem, "codes"), checkpoint.get(stem, "scales")
        book = checkpoint.tensors[f"{stem}.codebooks"]
        if codes is None or scale is None or len(codes.shape) != 3 or len(book.shape) != 4 or not codes.nbytes:
            continue
        (rows, across, books), (_, entries, height, width) = codes.shape, book.shape
        if codes.dtype not in ("I8", "I16") or (book.shape[0], height) != (books, 1) or not width or not entries:
            continue
        if prod(book.shape) > BOOKS or entries > 2 ** (8 * ITEM_BYTES[codes.dtype]) or entries & (entries - 1):
            continue
        if prod(scale.shape) != rows or not {book.dtype, scale.dtype} <= {*SCALE_DTYPES}:
            continue
        cols, size = across * width, books * ITEM_BYTES[codes.dtype]
        encoding = Aqlm.shared((width, size), cols, cols=cols, books=books, entries=entries, width=width,
                               wide=codes.dtype == "I16", float_dtype=book.dtype, scales=scale.dtype,
                               label="AQLM")  # fmt: skip
        parts = {BOOK: WeightPart(book), SCALE: WeightPart(scale, cols, ITEM_BYTES[scale.dtype])}
        yield claimed(codes, Packing(encoding, codes, parts), f"{stem}.weight", (rows, cols))
