"""What a conversion or an extraction makes of one parameter: its tensors, and the facts of its layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.by_rows.rows import Rows
from ..dialects import Dialect
from ..job import WHOLE
from ..outcome.layer import Layer
from ..places import Place
from ..truncation.effect import squares_of_rows
from ..truncation.storing import rounded


@dataclass(frozen=True)
class Made:
    """The stored tensors of one module by their ending, and the facts of its layer."""

    place: Place
    tensors: Mapping[str, Tensor]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input: nothing is known of the size of its change


def vector_ending(place: Place, to: Dialect) -> str | None:
    """Return the ending of the change of a bias, a norm or another vector; None where the dialect has none."""
    slot = {"weight": "w_norm" if place.norm else "diff", "bias": "b_norm" if place.norm else "diff_b"}
    wanted = slot[place.parameter]
    plain = {"w_norm": "diff", "b_norm": "diff_b"}.get(wanted, wanted)
    ending = to.endings.get(wanted, to.endings.get(plain))
    in_factors = wanted == "diff_b" and place.view.matrix[1] == 1  # PEFT's lora_B is a layer: its bias is [out]
    return to.endings.get("up_bias") if ending is None and in_factors else ending


def whole_made(place: Place, ending: str, change: Rows, dtype: torch.dtype) -> Made:
    """Return a parameter's whole change, rounded once."""
    made = rounded(change, dtype)
    tensors = {ending: made.numbers.reshape(place.view.shape)}
    return Made(place, tensors, Layer(tensors, WHOLE, 0, 0, None, made.totals.squares, made.lost))


def value_made(place: Place, value: Rows, change: Rows, dtype: torch.dtype) -> Made:
    """Return a parameter's new value, rounded once, where the dialect stores no changes of it."""
    made = rounded(value, dtype)
    tensors = {f".{place.parameter}": as_value(place, made.numbers)}
    return Made(place, tensors, Layer(tensors, WHOLE, 0, 0, None, squares_of_rows(change), made.lost))


def as_value(place: Place, numbers: Tensor) -> Tensor:
    """Return a parameter as the model has it, which may be [in, out], such as Conv1D of GPT-2."""
    value = numbers.reshape(place.view.shape)
    return (value.mT if is_turned(place) else value).contiguous()


def is_turned(place: Place) -> bool:
    """Return whether the base stores a matrix [in, out]."""
    return place.view.row_slices[0].transposed and len(place.view.shape) == 2
