"""The types of tensors in GGUF files: number, name, and how many bytes a block of elements takes.

https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

from ...dtypes import Shape

ENCODED_TYPES: Final = frozenset((
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "TQ1_0", "TQ2_0",
))  # fmt: skip
"""Quantised types that are decoded, and encoded again."""

DECODED_ONLY_TYPES: Final = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))
"""Quantised types that are decoded, never encoded."""


DECODED_TYPES: Final = ENCODED_TYPES | DECODED_ONLY_TYPES


class GgmlType(NamedTuple):
    """One type. Blocks run along the last axis."""

    number: int
    unit: tuple[int, int]  # (elements, bytes) of a block

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this shape."""
        return prod(shape) // self.unit[0] * self.unit[1]


GGML_TYPES: Final = MappingProxyType({
    name: GgmlType(number, (elements, size))
    for name, number, elements, size in (
        ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("BF16", 30, 1, 2), ("F64", 28, 1, 8),
        ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4), ("I64", 27, 1, 8),
        ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34), ("Q8_1", 9, 32, 40), ("Q8_K", 15, 256, 292), ("Q1_0", 41, 128, 18),
        ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210), ("IQ4_NL", 20, 32, 18), ("IQ4_XS", 23, 256, 136),
        ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74), ("IQ2_S", 22, 256, 82),
        ("IQ3_XXS", 18, 256, 98), ("IQ3_S", 21, 256, 110), ("IQ1_S", 19, 256, 50), ("IQ1_M", 29, 256, 56),
        ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36),
    )
})  # fmt: skip
"""Name → type."""

BY_NUMBER: Final = MappingProxyType({kind.number: name for name, kind in GGML_TYPES.items()})
"""Number in files → name."""


QUANTISED_TYPES: Final = frozenset(name for name, kind in GGML_TYPES.items() if kind.unit[0] > 1)
"""All quantised types. llama.cpp multiplies the product with some of them by a tensor `scale` next to the weight, which
no format reads (BitNet, NVFP4). https://github.com/ggml-org/llama.cpp src/llama-model.cpp."""

COPIED_TYPES: Final = QUANTISED_TYPES - DECODED_TYPES
"""Quantised types that are copied only."""
