"""The proof of a conversion: the output is read as an adapter of the same base, and its changes are compared with the
input's in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..disk.reader import Reader
from ..engine.tensor_moves import HOST
from ..errors import VerificationFailed
from ..progress import Counting
from .assumed_base_values import cache_of
from .change import Change, Evaluator, squares_between, sum_of
from .combined_change import beyond_fp64
from .copy_factors import claimed, same_factors
from .decomposition.storage_rounding import alike, squares_of
from .groups import Target
from .job import AdapterJob
from .parallel import PerThread, side_by_side
from .proof import evenly
from .rounding import squares_of_rows
from .sources import Sources
from .without_base import same_base

BUDGET: Final = 2**30
"""Multiplications of a comparison that is not full."""

FORMED: Final = 8
"""Multiplications that take as long as to form one number of a whole matrix."""

PROBES: Final = 8
"""Random vectors x of a comparison of factors. ‖E x‖² has the mean ‖E‖², so an error that all of them miss is one of
probability 0; the estimate is larger than half of ‖E‖ in all but one of 10⁴ cases."""

SLACK: Final = 1e-6
"""By how much the change of the output may differ from the input's, beyond the loss that was reported."""

REPORT: Final = "report it with the two inputs"


class Claim(NamedTuple):
    """The statements of a run about the file that it has written."""

    job: AdapterJob
    part: Path
    residual: float  # the largest of a layer
    lost: Mapping[str, float]
    """Weight of the base → ‖Δ − Δ̂‖² of all modules of the output that have rows of it."""


def prove(claim: Claim, sources: Sources, before: PerThread[Evaluator], begin: Counting) -> dict[str, Any]:
    """Compare the changes of an output with those of the input; VerificationFailed where one differs by more than it
    should. `before`: computes those of the input, of a base that is drawn where none was given."""
    job = claimed(claim.job, claim.part)
    assert sources.inputs is not None, "a conversion has a base"
    again = same_base(sources.inputs, job)
    theirs = {t.key: t for t in again.targets}
    chosen = evenly(sources.targets, sum(map(_cost, sources.targets)), BUDGET, full=job.full)
    worst, name = 0.0, ""
    done = begin("prove", sum(map(_cost, chosen)))
    with Reader(again.indexes) as reader:
        after = PerThread(lambda: Evaluator(again, cache_of(job, reader, again, drawn=True), HOST))

        def work(target: Target) -> Apart:
            before_values, other = before.get(), after.get()
            written = theirs.get(target.key)
            pairs = same_factors(target, written)
            if pairs and all(_alike(other.cache.fetch(new), before_values.cache.fetch(old)) for old, new in pairs):
                off = Apart(0.0, 0.0, (0.0, 0.0))
            else:
                stored, bound = (
                    other.changes(written) if written else [],
                    (claim.residual, claim.lost.get(target.key, 0)),
                )
                off = difference(target, before_values.changes(target), stored, bound)
            before_values.forget()
            other.forget()
            return off

        bound = job.inputs.max_memory // 2
        for target, off in zip(chosen, side_by_side(chosen, work, _nbytes, bound), strict=True):
            if not isfinite(off.norm):
                raise beyond_fp64(target.key)
            worst, name = max((worst, name), (off.share, target.key))
            if not off.fits:
                where = f"{target.key}: off by {off.share:.3g} of ‖ΔW‖"
                raise VerificationFailed("the output changes a weight otherwise than the input", where, REPORT)
            done(_cost(target))
    return {"ok": True, "layers": len(sources.targets), "recomputed": len(chosen), "worst_residual": worst,
            "worst_layer": name}  # fmt: skip


def _alike(first: Tensor, other: Tensor) -> bool:
    return first.dtype == other.dtype and alike(first.reshape(-1), other.reshape(-1))


def _nbytes(target: Target) -> int:
    """Return about how many bytes a comparison takes: factors several times, or matrices."""
    out, cols = target.matrix
    return 8 * min(_cost(target), (len(target.uses) + 4) * out * cols)


def _cost(target: Target) -> int:
    """Return about how many multiplications the comparison of one weight takes."""
    out, cols = target.matrix
    ranks = [use.patch.shapes["down"][0] for use in target.uses if "down" in use.patch.shapes]
    factored = ranks and len(ranks) == len(target.uses)
    return 2 * PROBES * sum(ranks) * (out + cols) if factored else FORMED * out * cols


class Apart(NamedTuple):
    """How far the output's change is from the input's."""

    size: float  # ‖Δ − Δ̂‖
    norm: float  # ‖Δ‖
    bound: tuple[float, float]
    """By how much it may be off: a share of ‖Δ‖, or ‖Δ − Δ̂‖² of the modules that have rows of it, as the parts of a
    fused module are not all as large."""

    @property
    def share(self) -> float:
        """‖Δ − Δ̂‖ / ‖Δ‖; ‖Δ̂‖ where Δ is zero."""
        return self.size / (self.norm or 1.0)

    @property
    def fits(self) -> bool:
        """Whether it is off by no more than it may be."""
        share, squares = self.bound
        return self.size <= 1.01 * max(share * self.norm, sqrt(squares)) + SLACK * (self.norm or 1.0)


def difference(
    target: Target, input_changes: Sequence[Change], output_changes: Sequence[Change], bound: tuple[float, float]
) -> Apart:
    """Return how far the change of one weight is from that of the input; an estimate where it is within the bound."""
    if any(c.left is None for c in (*input_changes, *output_changes)):
        first, other = (
            sum_of(target.matrix, [(c.strength, c.rows()) for c in changes])
            for changes in (input_changes, output_changes)
        )
        return Apart(sqrt(squares_between(first, other)), sqrt(squares_of_rows(first)), bound)
    (left, right), (up, down) = _factors(target, input_changes), _factors(target, output_changes)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(target.matrix[1], PROBES, generator=generator, dtype=torch.float64) / PROBES**0.5
    products = left @ (right @ vectors)
    estimate = Apart(float((products - up @ (down @ vectors)).norm()), float(products.norm()), bound)
    if estimate.fits:
        return estimate
    off: float = squares_of(torch.cat((left, -up), 1), torch.cat((right, down)))
    return Apart(sqrt(off), sqrt(squares_of(left, right)), bound)


def _factors(target: Target, changes: Sequence[Change]) -> tuple[Tensor, Tensor]:
    out, cols = target.matrix
    lefts = [torch.zeros(out, 0, dtype=torch.float64), *(c.strength * c.left for c in changes if c.left is not None)]
    rights = [torch.zeros(0, cols, dtype=torch.float64), *(c.right for c in changes if c.right is not None)]
    return torch.cat(lefts, 1), torch.cat(rights)
