"""A second decoder for every encoding, in numpy: bytes → levels, and the grid that gives their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..grids import Grid, joined
from ..reference.floats import Array
from . import codes, ggml, ggml_grids
from .codes import Decoder, product, turned


def decoder(encoding: Any) -> Decoder:
    """Return the decoder of an encoding."""
    return DECODERS[type(encoding).__name__]


def _low_rank(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return the codes of another encoding, with a product of two factors as a shift."""
    levels, grid = decoder(encoding.inner)(raw, encoding.inner, first, count)
    shift, size = product(raw, encoding)
    spread = grid.scale if np.ndim(grid.scale) else np.full(count, float(grid.scale))
    return levels, replace(grid, scale=spread, shift=grid.shift + shift, terms=np.abs(grid.shift) + size,
                           turn=turned(encoding.rotation))  # fmt: skip


def _expert_stack(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return matrices that are stored one by one."""
    matrices, inner = count // encoding.group, decoder(encoding.inner)
    decoded = []
    for n in range(matrices):
        parts = {}
        for role, data in raw.items():
            size = len(data) // matrices
            parts[role] = data[n * size : (n + 1) * size]
        decoded.append(inner(parts, encoding.inner, 0, encoding.group))
    return np.concatenate([levels for levels, _ in decoded]), joined([grid for _, grid in decoded])


DECODERS: Final[Mapping[str, Decoder]] = MappingProxyType({
    "Affine": codes.affine, "Aqlm": codes.aqlm, "Columns": codes.columns, "ExpertStack": _expert_stack,
    "Fnuz": codes.fnuz, "Fp4": codes.fp4, "Ggml": ggml.blocks, "GgmlGrid": ggml_grids.points,
    "GroupedCodebook": codes.grouped_codebook, "LowRank": _low_rank, "LowRankSums": codes.low_rank_sums,
    "PackedInts": codes.packed_ints, "ScaledCodes": codes.scaled_codes, "SharedByteInts": codes.shared_byte_ints,
    "TableCodes": codes.table_codes, "TransposedInts": codes.transposed_ints,
})  # fmt: skip
"""Class of an encoding → function (bytes by role, encoding, first number, count) → (levels, grid), flat."""
