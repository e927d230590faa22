"""Factors of single experts in a folder of PEFT, which stacks them when it loads it: all of one kind have one rank.

Source: peft/utils/transformers_weight_conversion.py. There `r` counts for the experts of all layers, and twice for gate
and up, whatever `rank_pattern` says; an expert without factors leaves the whole stack without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from ...engine.placement import TORCH_DTYPES
from ..conversion.made import Made
from ..dialects import Dialect
from ..outcome.layer import Kept, Layer
from ..places import Place
from ..written import Entry
from .folder import EXPERT

NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Layers of an expert. The first two are one parameter in memory, which PEFT finds only where the third has factors
too."""


def together(
    made: Sequence[Kept], there: Iterable[Place], to: Dialect, keep: Callable[[Made], Kept]
) -> list[Kept]:  # fmt: skip
    """Return the modules, those of experts with zeros up to the largest rank of all, and with zeros where an expert of
    the same stack has factors.

    `there`: all parameters in the words of the dialect. `keep`: lets the bytes of an added one wait.
    """
    own = {m.place.module: m for m in made if to.folder and _factors(m, to) and EXPERT.search(m.place.module)}
    if not own:
        return list(made)
    rank = max(m.layer.rank for m in own.values())
    leaves = {_leaf(m.place) for m in own.values()}
    stacked = {leaf for names in NAMES for leaf in (names if leaves & {*names[:2]} else leaves & {*names})}
    low = {name for name, m in own.items() if m.layer.rank < rank}
    found = [keep(_filled(m, to, rank)) if m.place.module in low and _factors(m, to) else m for m in made]
    some = next(iter(own.values()))
    dtype = TORCH_DTYPES[some.tensors[to.endings["up"]].dtype]
    for place in there:
        of_stack = place.parameter == "weight" and EXPERT.search(place.module) and _leaf(place) in stacked
        if of_stack and place.module not in own:
            out, cols = place.view.matrix
            zeros = {to.endings["up"]: torch.zeros(out, rank, dtype=dtype),
                     to.endings["down"]: torch.zeros(rank, cols, dtype=dtype)}  # fmt: skip
            layer = replace(_layer(zeros, some.layer, rank), squares=0.0, lost=0.0)
            found.append(keep(Made(place, zeros, layer)))
    return found


def _factors(one: Kept, to: Dialect) -> bool:
    """Return whether a module is stored as the factors of LoRA."""
    return one.place.parameter == "weight" and {to.endings["up"], to.endings["down"]} <= one.tensors.keys()


def _filled(one: Kept, to: Dialect, rank: int) -> Made:
    """Return the factors with zeros up to a rank."""
    up, down = (_tensor(one.tensors[to.endings[slot]]) for slot in ("up", "down"))
    more = rank - one.layer.rank
    tensors = {ending: _tensor(e) for ending, e in one.tensors.items()} | {
        to.endings["up"]: torch.cat((up, up.new_zeros(len(up), more)), 1),
        to.endings["down"]: torch.cat((down, down.new_zeros(more, down.shape[1]))),
    }
    return Made(one.place, tensors, _layer(tensors, one.layer, rank))


def _layer(tensors: dict[str, Tensor], like: Layer, rank: int) -> Layer:
    return replace(like, tensors=tensors, rank=rank, alpha=float(rank))


def _tensor(entry: Entry) -> Tensor:
    raw = bytearray(b"".join(entry.pieces()))
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[entry.dtype]).reshape(entry.shape)


def _leaf(place: Place) -> str:
    return place.module.rpartition(".")[2]
