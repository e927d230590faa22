"""Modules of a conversion that keep their stored factors and their α under other names. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Final

import numpy as np

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS
from ..errors import beyond_fp64
from .decomposition.factors import Grams, squares_of
from .dialects import Dialect
from .factored_sums import expect_finite
from .groups import Filled
from .job import FACTORS
from .module_tensors import Layer, StoredModule, with_change
from .output_file import Entry
from .rank_rules import LayerSpectrum
from .rounding import Array, data_of, is_below, is_held_by_fp32, stored, stored_bits, widened


def copy_of(module: Filled, to: Dialect, reader: Reader) -> StoredModule:
    """Return the stored factors of a module; InputError where a number is not finite, or too large for fp64."""
    (share,), place = module.shares, module.place
    patch = share.patch
    rank, scale = patch.shapes["down"][0], patch.numbers["scale"]
    up, down = patch.module.slots["up"], patch.module.slots["down"]
    raw = stored(reader, up), stored(reader, down)
    squares = _squares(raw, (up, down), rank, scale)
    if not isfinite(squares):
        raise beyond_fp64(patch.module.name)
    ones, alpha = (1,) * (len(place.view.shape) - 2), np.array([rank * scale], np.float32)
    rows = {
        to.endings["up"]: (up.dtype, (prod(up.shape) // rank, rank, *ones), raw[0].data),
        to.endings["down"]: (down.dtype, (rank, *place.view.shape[1:]), raw[1].data),
        to.endings.get("alpha", ".alpha"): ("F32", (), data_of(alpha)),
    }
    entries = {name: Entry(name, *row) for name, row in rows.items()}
    return StoredModule(place, entries, Layer({}, FACTORS, rank, rank, rank * scale, squares, 0.0))


class Copies:
    """Makes the modules of a conversion of which all are copies."""

    notes: Final = ()

    def __init__(self, to: Dialect, reader: Reader) -> None:
        self._to, self._reader = to, reader

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return the bytes of both factors, as stored and in fp32."""
        slots = [module.shares[0].patch.module.slots for module in group]
        return 3 * sum(s["up"].nbytes + s["down"].nbytes for s in slots)

    def spectra(self, _: Sequence[Filled]) -> list[LayerSpectrum]:
        """No rule looks at copies."""
        return []

    def modules(self, group: Sequence[Filled], _: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return copies, whose bytes are in memory."""
        return [with_change(copy_of(module, self._to, self._reader), measured=False) for module in group]


def _squares(raw: Sequence[Array], infos: Sequence[StoredTensor], rank: int, scale: float) -> float:
    """Return ‖ΔW‖² of stored factors, in fp32 where that holds it. InputError where a number is not finite."""
    shapes, kinds = ((-1, rank), (rank, -1)), [info.dtype for info in infos]
    bits = [stored_bits(r, kind).reshape(shape) for r, kind, shape in zip(raw, kinds, shapes, strict=True)]
    with np.errstate(all="ignore"):
        grams = Grams.of(*(widened(b, kind, np.float32) for b, kind in zip(bits, kinds, strict=True)))
        below = all(is_below(g, DTYPE_ROWS[kind].largest) for g, kind in zip(grams, kinds, strict=True))
        if below and is_held_by_fp32(squares := grams.squares(), grams.apart()):
            return squares * scale**2
        for b, info in zip(bits, infos, strict=True):
            expect_finite(b, info)
        left, right = (widened(b, kind, np.float64) for b, kind in zip(bits, kinds, strict=True))
        return squares_of(left * scale, right)
