"""Factors of one rank in a folder of PEFT: of single experts, which PEFT stacks when it loads it, or of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...engine.placement import TORCH_DTYPES
from ..conversion.made import Made
from ..dialects import Dialect
from ..outcome.layer import Kept, Layer
from ..written import Entry
from .demands import Demands, is_pair, parameter_of


def together(made: Sequence[Kept], asked: Demands, to: Dialect, keep: Callable[[Made], Kept]) -> list[Kept]:
    """Return the modules, those of a lower rank with zeros up to the largest of all, and with zeros where an expert of
    the same stack has factors. `keep`: lets the bytes of an added one wait."""
    if not asked.rank:
        return list(made)
    some = next(m for m in made if m.layer.rank == asked.rank and is_pair(parameter_of(m), to))
    fill = (m.place.module in asked.low and is_pair(parameter_of(m), to) for m in made)
    found = [keep(_filled(m, to, asked.rank)) if low else m for m, low in zip(made, fill, strict=True)]
    dtype = TORCH_DTYPES[some.tensors[to.endings["up"]].dtype]
    for place in asked.zeros:
        out, cols = place.view.matrix
        zeros = {to.endings["up"]: torch.zeros(out, asked.rank, dtype=dtype),
                 to.endings["down"]: torch.zeros(asked.rank, cols, dtype=dtype)}  # fmt: skip
        layer = replace(_layer(zeros, some.layer, asked.rank), squares=0.0, lost=0.0)
        found.append(keep(Made(place, zeros, layer)))
    return found


def _filled(one: Kept, to: Dialect, rank: int) -> Made:
    """Return the factors with zeros up to a rank."""
    up, down = (_tensor(one.tensors[to.endings[slot]]) for slot in ("up", "down"))
    more = rank - one.layer.rank
    tensors = {ending: _tensor(e) for ending, e in one.tensors.items()} | {
        to.endings["up"]: torch.cat((up, up.new_zeros(len(up), more, *up.shape[2:])), 1),
        to.endings["down"]: torch.cat((down, down.new_zeros(more, *down.shape[1:]))),
    }
    return Made(one.place, tensors, _layer(tensors, one.layer, rank))


def _layer(tensors: dict[str, Tensor], like: Layer, rank: int) -> Layer:
    return replace(like, tensors=tensors, rank=rank, alpha=float(rank))


def _tensor(entry: Entry) -> Tensor:
    raw = bytearray(b"".join(entry.pieces()))
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[entry.dtype]).reshape(entry.shape)
