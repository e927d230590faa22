"""Changed biases of layers in a folder of PEFT and in a file of diffusers, in the form that `demands.py` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..conversion.made import Made
from ..dialects import Dialect
from ..job import FACTORS
from ..outcome.layer import Kept, Layer
from ..places import Place
from .demands import new_biases, own_places, parameter_of
from .folder import BIAS, WRAPPED


def with_biases(
    made: Sequence[Kept], there: Iterable[Place], to: Dialect, renewed: Callable[[Place], Made] | None,
    keep: Callable[[Made], Kept],
) -> list[Kept]:  # fmt: skip
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them.

    `there`: all parameters in the words of the dialect. `renewed`: returns a parameter's new value; None where the base
    is not known. UsageError if the base has to be.
    """
    places = new_biases([parameter_of(m) for m in made], own_places(there), to, known=renewed is not None)
    new = {id(place): keep(renewed(place)) for place in places if renewed}
    factored = {m.place.module for m in made if m.layer.rank}
    found = [new.get(id(m.place), m) for m in made]
    return [_in_its_layer(m, factored) for m in found] if to.folder else found


def _in_its_layer(made: Kept, factored: set[str]) -> Kept:
    """Return a new bias under the name that it has in memory: PEFT wraps layers with factors."""
    if BIAS not in made.tensors or made.place.module not in factored:
        return made
    entry = replace(made.tensors[BIAS], name=WRAPPED)
    return replace(made, tensors={WRAPPED: entry})


def factors_of_zeros(place: Place, to: Dialect, dtype: torch.dtype) -> Made:
    """Return factors of zeros of a layer whose bias alone changes."""
    out, *cols = place.view.shape
    tensors: dict[str, Tensor] = {
        to.endings["up"]: torch.zeros(out, 1, *(1 for _ in cols[1:]), dtype=dtype),
        to.endings["down"]: torch.zeros(1, *cols, dtype=dtype),
    }
    return Made(place, tensors, Layer(tensors, FACTORS, 1, 0, 1.0, 0.0, 0.0))
