"""Computes slots that no file holds by the row's own steps, as PEFT does on loading, and checks them in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..algorithms import ALGORITHMS, Loaded
from ..errors import VerificationFailed
from ..matching.patch import Patch
from ..text import quoted
from .reference.floats import Array, held
from .reference.rebuilding import CHECKS, Remade

REPORT = "report it with the configuration of the adapter and of the base"


def rebuilt_slots(patch: Patch, read: Callable[[str], Array]) -> Mapping[str, Array]:
    """Return the slots that the patch's file lacks; VerificationFailed where one does not pass the row's check.

    `read`: gives a slot of the base or the file in the fitted shape, or for "" the weight [out, cols]; in float32, or
    in float64 if the base stores it so.
    """
    row, settings = ALGORITHMS[patch.algorithm], dict(patch.settings)
    if not row.is_rebuilt(patch.shapes):
        return {}
    more = patch.shapes, patch.view.shape, settings
    found = {slot: np.asarray(v) for slot, v in row.rebuilt(Loaded.of_arrays(read, held, *more)).items()}
    if not CHECKS[patch.algorithm](Remade(found, read, *more)):
        where = f"{quoted(patch.module.where)} ({patch.algorithm}): {', '.join(sorted(found))}"
        raise VerificationFailed(
            "tensors computed from the base do not satisfy the definition of the adapter's method", where, REPORT
        )
    return found
