"""The proof of an extracted adapter: it is read as an adapter of the base, and its changes are compared with
tuned − base in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...disk.reader import Reader
from ...engine.devices import place
from ...engine.tensors import TensorCache
from ...errors import VerificationFailed
from ...job import Adapter
from ...models.weights import WeightView
from ...progress import Counting
from ..changes import Evaluator
from ..conversion.kept import Kept
from ..sources import Target, open_sources
from .making import Side
from .pairs import Pairs
from .task import Extraction

BUDGET: Final = 2**27
"""Numbers of ΔW that are formed for a proof; layers are taken evenly over the file."""

TOLERANCE: Final = 0.01
"""The share by which a residual may differ from the reported one."""

FLOOR: Final = 1e-6
"""A residual below this is rounding in either computation."""

REPORT: Final = "report it with the two checkpoints"


class Claim(NamedTuple):
    """The file that a run has written, and the layers that it says are in it."""

    part: Path
    made: Sequence[Kept]


def prove(task: Extraction, pairs: Pairs, sides: Sequence[Side], claim: Claim, begin: Counting) -> dict[str, Any]:
    """Return what was proven of the file; VerificationFailed where it is not what the run says."""
    (base, tuned), (part, made) = sides, claim
    given = replace(task.job, inputs=replace(task.job.inputs, adapters=(Adapter(part),), base=task.base, method="sum"))
    again = open_sources(given)
    targets = {t.key: t for t in again.targets}
    own = {id(p.place): p for p in pairs.pairs}
    chosen = made[:: max(1, -(-sum(prod(m.place.view.matrix) for m in made) // BUDGET))]
    worst, name, told = 0.0, "", begin("prove", sum(own[id(m.place)].nbytes for m in chosen))
    with Reader(again.indexes) as reader:
        cache = TensorCache(reader, frozenset(f for a in again.adapters for f in a.index.files))
        after = Evaluator(again, cache, place("cpu", "F64"))
        for one in chosen:
            pair = own[id(one.place)]
            wanted = tuned.rows(pair.tuned).double() - base.rows(pair.place.view).double()
            held = _held(pair.place.view, targets, after)
            off = float((wanted - held).norm()) / float(wanted.norm())
            stated = sqrt(one.layer.lost / one.layer.squares)
            if not abs(off - stated) <= TOLERANCE * max(off, stated) + FLOOR:
                where = f"{pair.name}: residual {off:.6g}, stated {stated:.6g}"
                raise VerificationFailed("the written layer is not what the report says", where, REPORT)
            worst, name = max((worst, name), (off, pair.name))
            told(pair.nbytes)
            after.forget()
    return {"ok": True, "layers": len(made), "recomputed": len(chosen), "worst_residual": worst,
            "worst_layer": name}  # fmt: skip


def _held(view: WeightView, targets: Mapping[str, Target], after: Evaluator) -> Tensor:
    """Return what the file adds to the rows of a view."""
    found = []
    for piece in view.row_slices:
        target = targets.get(piece.key)
        whole = torch.zeros(1, dtype=torch.float64)
        if target is not None:
            whole = sum((c.strength * c.dense() for c in after.changes(target)), torch.zeros((), dtype=torch.float64))
        rows = whole.reshape(-1, piece.cols)[piece.start : piece.stop] if target is not None else whole.expand(
            piece.stop - piece.start, piece.cols)  # fmt: skip
        found.append(rows.mT if piece.transposed else rows)
    return torch.cat(found)
