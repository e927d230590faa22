"""Modules of a conversion that keep their stored factors and their α under other names. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import Final, NamedTuple

import numpy as np

from ..disk.draft import Draft
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import TABLE
from ..errors import InputError, beyond_fp64
from ..progress import Counting
from .conversion import Conversion, WrittenModules, weight_of
from .decomposition.factors import Grams, squares_of
from .dialects import Dialect
from .factored_sums import expect_finite
from .groups import Filled
from .job import FACTORS
from .module_tensors import Layer, StoredModule, waiting
from .output_file import Entry
from .parallel import side_by_side
from .rounding import Array, data_of, is_below, is_held_by_fp32, stored, stored_bits, widened

AT_ONCE: Final = 2**28
"""Bytes of modules that are worked at at once."""

NO_CHANGE: Final = "the adapter changes nothing"


class Copy(NamedTuple):
    """The tensors of one module by their ending, and the facts of its layer."""

    entries: dict[str, Entry]
    layer: Layer


def copy_of(module: Filled, to: Dialect, reader: Reader) -> Copy:
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
    return Copy(entries, Layer({}, FACTORS, rank, rank, rank * scale, squares, 0.0))


def all_copied(conversion: Conversion) -> bool:
    """Return whether all modules are such copies, in a file."""
    to = conversion.to
    return not to.folder and "up_bias" not in to.endings and all(form.renamed for form in conversion.forms)


def copied(conversion: Conversion, reader: Reader, draft: Draft, begin: Counting) -> WrittenModules:
    """Return the modules of a conversion of which all are copies; their bytes are in the draft."""
    job, to, modules = conversion.job, conversion.to, conversion.modules
    count, copies, zeros = begin("make", sum(map(weight_of, modules))), list[StoredModule](), list[str]()

    def work(module: Filled) -> Copy:
        return copy_of(module, to, reader)

    for module, (entries, layer) in zip(modules, side_by_side(modules, work, _nbytes, AT_ONCE), strict=True):
        if layer.squares:
            copies.append(StoredModule(module.place, waiting(entries, draft), layer))
        else:
            zeros.append(module.place.name)
        count(weight_of(module))
    if not copies:
        raise InputError(NO_CHANGE, str(job.adapters[0].path), "check its strength")
    return WrittenModules(copies, copies, zeros, [])


def _nbytes(module: Filled) -> int:
    """Return the bytes of both factors, as stored and in fp32."""
    slots = module.shares[0].patch.module.slots
    return 3 * (slots["up"].nbytes + slots["down"].nbytes)


def _squares(raw: Sequence[Array], infos: Sequence[StoredTensor], rank: int, scale: float) -> float:
    """Return ‖ΔW‖² of stored factors, in fp32 where that holds it. InputError where a number is not finite."""
    shapes, kinds = ((-1, rank), (rank, -1)), [info.dtype for info in infos]
    bits = [stored_bits(r, kind).reshape(shape) for r, kind, shape in zip(raw, kinds, shapes, strict=True)]
    with np.errstate(all="ignore"):
        grams = Grams.of(*(widened(b, kind, np.float32) for b, kind in zip(bits, kinds, strict=True)))
        below = all(is_below(g, TABLE[kind].largest) for g, kind in zip(grams, kinds, strict=True))
        if below and is_held_by_fp32(squares := grams.squares(), grams.apart()):
            return squares * scale**2
        for b, info in zip(bits, infos, strict=True):
            expect_finite(b, info)
        left, right = (widened(b, kind, np.float64) for b, kind in zip(bits, kinds, strict=True))
        return squares_of(left * scale, right)
