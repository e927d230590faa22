"""The user's request to `average`, checked and frozen: the job, and in which space its snapshots are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...adapter_options import KEEP
from ...errors import UsageError
from ...files.checkpoint import open_checkpoint
from ...job import Adapter, is_pair
from ...options import pairs, shown
from ...paths import is_folder
from ...progress import Progress, unwatched
from ..job import AdapterJob, make_adapter_job
from ..rank_rules import SAME
from ..report import AdapterReport
from .alike import expect_alike
from .weights import average_weights, shares

CHANGES, TENSORS = "delta", "factors"
SPACES: Final = (CHANGES, TENSORS)
"""The values of `--space`: whether changes are averaged, or the tensors of the files, as a training's own EMA does."""

MUSUBI: Final = "musubi_t"
"""The setting that counts the steps of a post-hoc EMA as musubi-tuner does."""

MOVING: Final = ("ema", "ema_to", "sigma_rel")
OWN: Final[Mapping[str, Any]] = {
    "weights": None, **dict.fromkeys(MOVING), "space": CHANGES, MUSUBI: False,
}  # fmt: skip
"""Option of this command alone → default."""


@dataclass(frozen=True)
class Averaging:
    """One run of `average`. The strengths of the job's adapters are the weights."""

    job: AdapterJob
    space: str
    betas: tuple[float, ...] | None  # of a moving average: the share that each step keeps

    def plan(self) -> AdapterReport:
        """Return what `run` would do, from headers."""
        from ..conversion.formatted import plan

        if self.space == TENSORS:
            expect_alike([open_checkpoint(a.path, adapter=True) for a in self.job.adapters])
        return plan(self.job)

    def run(self, progress: Progress = unwatched) -> AdapterReport:
        """Write the average."""
        if self.space == CHANGES:
            from ..conversion.formatted import run

            return run(self.job, progress)
        from .tensors import run as run_on_tensors

        return run_on_tensors(self.job, self.betas, progress)


def make_average(
    adapters: Sequence[Any], output: str | Path | None, base: str | Path | None, options: Mapping[str, Any]
) -> Averaging:
    """Return the request; UsageError for an option or a value that is wrong."""
    given = {name: value for name, value in options.items() if value is not None}
    setting = dict(pairs(given.pop("setting", ()), "--setting"))
    own = {**OWN, MUSUBI: setting.pop(MUSUBI, False)}
    own |= {name: given.pop(name) for name in OWN if name in given}
    if own["space"] not in SPACES:
        raise UsageError(f"there is no space {shown(own['space'])!r}", "--space", f"use one of {', '.join(SPACES)}")
    if not isinstance(own[MUSUBI], bool) or (own[MUSUBI] and own["sigma_rel"] is None):
        raise UsageError(f"{MUSUBI} counts the steps of a post-hoc EMA", f"--setting {MUSUBI}={shown(own[MUSUBI])}",
                         f"write --setting {MUSUBI}=true, with --sigma-rel")  # fmt: skip
    moving = {name: own[name] for name in (*MOVING, MUSUBI)}
    weights = average_weights(len(adapters), weights=own["weights"], **moving)
    refs = [_weighted(a, w) for a, w in zip(adapters, weights, strict=True)]
    given = {"rank": SAME, **given, **({"setting": setting} if setting else {})}
    job = make_adapter_job("average", refs, output, base, given)
    if own["space"] == CHANGES:
        return Averaging(job, CHANGES, None)
    _expect_plain(job, given, setting)
    stated = {n: v for n, v in own.items() if n != "weights" and v != OWN[n]}  # the strengths are the weights
    recorded = (*job.options, *sorted(stated.items()))
    betas = shares(len(adapters), **moving)
    return Averaging(replace(job, options=recorded), TENSORS, None if betas is None else tuple(betas))


def _weighted(adapter: Any, weight: float) -> Any:
    """Return a snapshot with its weight; UsageError for one with a strength."""
    path, strength, *_ = vars(adapter).values() if isinstance(adapter, Adapter) else (
        adapter if is_pair(adapter) else (adapter, 1.0))  # fmt: skip
    if strength != 1:
        raise UsageError("snapshots have no strengths", str(path), "give weights: one number for each snapshot")
    return replace(adapter, strength=weight) if isinstance(adapter, Adapter) else (path, weight)


def _expect_plain(job: AdapterJob, given: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that means nothing where tensors are averaged."""
    parts = any(a.parts for a in job.adapters)
    ruled = given["rank"] != SAME or any(given.get(n) for n in ("conv_rank", "max_rank", "rank_for"))
    other = given.get("format", KEEP) != KEEP
    computed = job.compute_dtype is not None
    for wrong, name in ((parts, "strength_for"), (ruled, "rank"), (setting, "setting"), (other, "format"),
                        (job.alpha != "rank", "alpha"), (computed, "compute_dtype")):  # fmt: skip
        if wrong:
            raise UsageError("tensors are averaged as they are stored", f"--{name.replace('_', '-')}",
                             f"leave it out, or average changes: --space {CHANGES}")  # fmt: skip
    if folder := next((a.path for a in job.adapters if is_folder(a.path)), None):
        raise UsageError("a folder keeps α in its configuration, which a file does not have", str(folder),
                         f"average changes: --space {CHANGES}")  # fmt: skip
