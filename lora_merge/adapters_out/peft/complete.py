"""Demands of PEFT on all modules together: bias factors for every layer or for none, whole modules with all parameters,
and embeddings under names of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...engine.placement import TORCH_DTYPES
from ..conversion.made import Made, as_value
from ..dialects import Dialect
from ..job import WHOLE
from ..outcome.layer import Kept, Layer
from ..places import Place
from .biases import factors_of_zeros
from .demands import demands, own_places, parameter_of
from .experts import together
from .magnitudes import magnitudes
from .tables import expect_table


def completed(
    made: Sequence[Kept], there: Iterable[Place], to: Dialect, value: Callable[[Place], Tensor] | None,
    keep: Callable[[Made], Kept],
) -> list[Kept]:  # fmt: skip
    """Return the modules with what PEFT asks for in addition; FitError where it has no place for them.

    `there`: all parameters in the words of the dialect. `value`: gives that of a parameter that did not change; None
    where the base is not known. `keep`: lets the bytes of an added one wait.
    """
    bias = to.endings.get("up_bias")
    if bias is None:
        return list(made)
    asked = demands([parameter_of(m) for m in made], own_places(there), to, known=value is not None)
    dtypes = {m.place.module: TORCH_DTYPES[m.tensors[bias].dtype] for m in made if bias in m.tensors}
    added = [keep(factors_of_zeros(place, to, dtypes[place.module])) for place in asked.factors]
    usual = next(iter(dtypes.values()), torch.float32)
    added += [keep(_plain(p, bias, torch.zeros(p.view.matrix[0], dtype=usual))) for p in asked.biases]
    if value is not None:
        added += [keep(one) for one in magnitudes(made, asked.magnitudes, to, value)]
        added += [keep(_plain(p, f".{p.parameter}", as_value(p, value(p)))) for p in asked.values]
    return together([*made, *added], asked, to, keep)


def _plain(place: Place, ending: str, tensor: Tensor) -> Made:
    tensors = {ending: tensor}
    return Made(place, tensors, Layer(tensors, WHOLE, 0, 0, None, 0.0, 0.0))


def as_table(made: Made, to: Dialect, *, table: bool) -> Made:
    """Return the factors of an embedding as PEFT stores them: both transposed, under other endings. FitError for a
    dialect without such endings, whose loader puts factors on layers alone. `table`: whether they are those of one."""
    down, up = to.endings.get("down", ""), to.endings.get("up", "")
    if "up_bias" not in to.endings or up not in made.tensors or not table:
        return made
    expect_table(made.place, to)
    others = {ending: value for ending, value in made.tensors.items() if ending not in (down, up)}
    turned: Mapping[str, Tensor] = {
        to.endings["table_down"]: made.tensors[up].mT.contiguous(),
        to.endings["table_up"]: made.tensors[down].mT.contiguous(),
        **others,
    }
    return Made(made.place, turned, made.layer)
