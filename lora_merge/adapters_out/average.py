"""`average` of snapshots of one training: their weights, the job, its plan and its run. No torch for a plan.

The weights are equal, stated, or those of an exponential moving average θ̄₀ = θ₀, θ̄ᵢ = βᵢ θ̄ᵢ₋₁ + (1 − βᵢ) θᵢ: then
wᵢ = (1 − βᵢ) ∏_{j>i} βⱼ, w₀ = ∏ βⱼ, and they add up to 1. Post-hoc EMA: Karras et al. 2023, arXiv:2312.02696, equations
2 and 126 (the width σ_rel gives γ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from os import PathLike
from typing import Any, Final

from ..adapter_arguments import adapter_argument
from ..command import Request
from ..errors import UsageError
from ..files.checkpoint import open_checkpoint
from ..job import Adapter, AdapterValue, adapter_list, wrong_adapter
from ..options import KEEP, a_list, finite, pairs, unlike
from ..paths import is_folder
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Progress, unwatched
from ..text import is_finite, number_of, plural, shown
from .job import OF_CHANGES, OF_TENSORS, SPACES, AdapterJob, adapter_job
from .rank_rules import SAME
from .report import AdapterReport

WIDEST_SIGMA: Final = 12**-0.5
BISECTION_STEPS: Final = 200  # of bisection: more than the bits of a float


def average_weights(
    count: int, *, weights: Sequence[float] | None = None, ema: float | None = None, sigma_rel: float | None = None,
    **others: Any,
) -> list[float]:  # fmt: skip
    """Return the weight of each of so many snapshots, the oldest first; UsageError for values that give none. `others`:
    as `shares` takes them."""
    stated = [
        name for name, value in (("weights", weights), ("ema", ema), ("sigma_rel", sigma_rel)) if value is not None
    ]
    if len(stated) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in stated[:2])
        raise UsageError(f"{first} and {second} both give the weights", second, "use one of them")
    if others.get("ema_to") is not None and ema is None:
        raise UsageError("--ema-to is given without --ema", "--ema-to", "give --ema too")
    if weights is not None:
        return _stated(weights, count)
    betas = shares(count, ema=ema, sigma_rel=sigma_rel, **others)
    return [1 / max(count, 1)] * count if betas is None else _moving(betas)


def _stated(weights: Any, count: int) -> list[float]:
    """Return the stated weights; UsageError unless there is a number for each snapshot."""
    values = [weights] if is_finite(weights) else a_list(weights, "--weights", "a list of numbers")
    if not all(map(is_finite, values)):
        raise unlike(weights, "--weights", "a list of numbers")
    if len(values) != count:
        right = typed_weights([*values, *[None] * (count - len(values))])
        fix = f"write `--weights {right}`" if 0 < len(values) < count else "give one number for each"
        raise UsageError(f"{plural(len(values), 'weight')} for {plural(count, 'snapshot')}", "--weights", fix)
    total = sum(values)
    if min(values) >= 0 and total > 1.01:  # the result would be stronger than each snapshot
        right = ",".join(f"{value / total:.6g}" for value in values)
        what = f"the weights of an average add up to 1, these to {total:g}"
        raise UsageError(what, "--weights", f"write `--weights {right}`")
    return [float(number) for number in values]


def typed_weights(weights: Sequence[float | None]) -> str:
    """Return weights as they are typed; snapshots without one share what is left of 1."""
    stated = [w for w in weights if w is not None]
    share = max(1 - sum(stated), 0) / max(len(weights) - len(stated), 1)
    return ",".join(f"{share if w is None else w:g}" for w in weights)


def shares(
    count: int, *, ema: float | None = None, ema_to: float | None = None, sigma_rel: float | None = None,
    musubi_t: bool = False,
) -> list[float] | None:  # fmt: skip
    """Return the share βᵢ that each step of a moving average keeps, one fewer than snapshots; None for no such average.
    UsageError for values that give none.

    `musubi_t`: count the steps of a post-hoc EMA as musubi-tuner does, which gives the oldest snapshot the weight 0.
    """
    if ema is not None:
        ema = finite(ema, "--ema")
        last = ema if ema_to is None else ema_to
        if not all(is_finite(b) and 0 <= b < 1 for b in (ema, last)):
            name, value = ("ema", ema) if ema_to is None or not 0 <= ema < 1 else ("ema_to", last)
            raise UsageError(
                f"{name} is {shown(value)}", f"--{name.replace('_', '-')}", "use a number from 0 to less than 1"
            )
        return [ema + (last - ema) * (i / max(count - 2, 1)) for i in range(count - 1)]
    if sigma_rel is None:
        return None
    power, first = _power(sigma_rel) + 1, 1 if musubi_t else 2  # from t = 2, so that the oldest counts
    return [(1 - 1 / t) ** power for t in range(first, first + count - 1)]


def _moving(betas: Sequence[float]) -> list[float]:
    """Return the weights of a moving average whose i-th step keeps the share βᵢ."""
    return [(1 - b) * prod(betas[i:]) for i, b in enumerate((0.0, *betas))]


def _power(sigma: float) -> float:
    """Return γ ≥ 0 with (γ + 1)^½ (γ + 2)⁻¹ (γ + 3)^-½ = σ, by bisection; the left side falls with γ."""
    if not is_finite(sigma) or not 0 < sigma <= WIDEST_SIGMA:
        raise UsageError(
            "the width is out of range", f"`--sigma-rel {shown(sigma)}`", "use a number above 0, up to 0.288"
        )
    low, high = 0.0, 1.0
    while _width(high) > sigma:
        low, high = high, 2 * high
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _width(middle) > sigma else (low, middle)
    return high


def _width(power: float) -> float:
    return float((power + 1) ** 0.5 / ((power + 2) * (power + 3) ** 0.5))


NO_STRENGTHS: Final = "snapshots have weights, not strengths"

MUSUBI: Final = "musubi_t"
"""The setting that counts the steps of a post-hoc EMA as musubi-tuner does."""

STRENGTHS: Final = ("strength", "strengths")

MOVING: Final = ("ema", "ema_to", "sigma_rel")
"""The options of a moving average, which give the weights."""


def make_job(request: Request, _: CheckpointCache | None = None) -> AdapterJob:
    """Return the job of `average`; UsageError for an option or a value that is wrong."""
    # Step 1: what this command alone has.
    stated, rows = request.stated, request.command.options
    adapters = _snapshots(request.adapters, next((stated[name] for name in STRENGTHS if name in stated), None))
    setting = dict(pairs(stated.pop("setting", ()), "--setting"))
    of_average = {name: stated.pop(name) for name in ("weights", *MOVING, "space", MUSUBI) if name in stated}
    if MUSUBI in setting:
        of_average = {MUSUBI: setting.pop(MUSUBI), **of_average}
    values = {name: of_average.get(name, rows[name].default) for name in ("weights", *MOVING, "space", MUSUBI)}
    if values["space"] not in SPACES:
        raise UsageError(f"there is no space {shown(values['space'])!r}", "--space", f"use one of {', '.join(SPACES)}")
    if not isinstance(values[MUSUBI], bool) or (values[MUSUBI] and values["sigma_rel"] is None):
        where = f"`--setting {MUSUBI}={shown(values[MUSUBI])}`"
        raise UsageError(f"{MUSUBI} counts the steps of a post-hoc EMA", where,
                         f"write `--setting {MUSUBI}=true`, with --sigma-rel")  # fmt: skip
    # Step 2: the weights become strengths.
    moving = {name: values[name] for name in (*MOVING, MUSUBI)}
    weights = average_weights(len(adapters), weights=values["weights"], **moving)
    refs = [
        replace(a, strength=w) if isinstance(a, Adapter) else (a, w) for a, w in zip(adapters, weights, strict=True)
    ]
    stated |= {"setting": setting} if setting else {}
    job = adapter_job(request._replace(adapters=refs, options=stated))
    if values["space"] == OF_CHANGES:
        return job
    # Step 3: tensors are averaged as they are stored, so that most options mean nothing.
    _expect_plain(job, stated, setting)
    of_average.pop("weights", None)  # the strengths of the recipe
    changed = tuple((n, v) for n, v in sorted(of_average.items()) if v != rows[n].default)
    betas = shares(len(adapters), **moving)
    return replace(job, options=(*job.options, *changed), space=OF_TENSORS,
                   shares=None if betas is None else tuple(betas))  # fmt: skip


def plan(job: AdapterJob, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do, from headers."""
    from . import averaged_tensors, combine

    if job.space == OF_TENSORS:
        averaged_tensors.expect_alike([open_checkpoint(a.path, adapter=True) for a in job.adapters])
    return combine.plan(job, cache)


def run(job: AdapterJob, progress: Progress = unwatched, _: CheckpointCache | None = None) -> AdapterReport:
    """Write the average."""
    if job.space == OF_CHANGES:
        from . import combine

        return combine.run(job, progress)
    from . import averaged_tensors

    return averaged_tensors.run(job, progress)


def _snapshots(adapters: Any, strengths: Any) -> list[Any]:
    """Return the snapshots as a list, without strengths; UsageError with the weights in their place for others.

    `strengths`: a number for all, or a list with one for each; None if none are stated.
    """
    if isinstance(adapters, str | PathLike | Adapter):
        raise unlike(adapters, "adapters", "a list of snapshots")
    snapshots, stated = [], list[Any]()
    for item in adapter_list(adapters):
        text = adapter_argument(item) if isinstance(item, str) else None
        path, strength = item if isinstance(item, tuple) else (text.path, text.strength) if text else (item, None)
        if isinstance(item, Adapter):
            strength = item.strength
        elif not isinstance(path, str | PathLike | AdapterValue):
            raise wrong_adapter(item)
        stated.append(number_of(strength) if isinstance(strength, str) else strength)
        snapshots.append(path)
    if is_finite(strengths) or isinstance(strengths, list | tuple):
        stated = [strengths] * len(snapshots) if is_finite(strengths) else [*strengths]
    if strengths is not None or any(w not in (None, 1) for w in stated):
        right = typed_weights([w if is_finite(w) and (w != 1 or strengths is not None) else None for w in stated])
        raise UsageError(NO_STRENGTHS, "the list of snapshots, which are paths alone", f"write `--weights {right}`")
    return snapshots


def _expect_plain(job: AdapterJob, stated: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that means nothing where tensors are averaged."""
    parts = any(a.parts for a in job.adapters)
    ruled = stated.get("rank", SAME) != SAME
    other = stated.get("format", KEEP) != KEEP
    computed = job.compute_dtype is not None
    for wrong, name in ((parts, "strength_for"), (ruled, "rank"), (setting, "setting"), (other, "format"),
                        (job.alpha != "rank", "alpha"), (computed, "compute_dtype")):  # fmt: skip
        if wrong:
            raise UsageError("tensors are averaged as they are stored", f"--{name.replace('_', '-')}",
                             f"leave it out, or average changes: `--space {OF_CHANGES}`")  # fmt: skip
    if folder := next((a.path for a in job.adapters if is_folder(a.path)), None):
        raise UsageError("a folder keeps α in its configuration, which a file does not have", str(folder),
                         f"average changes: `--space {OF_CHANGES}`")  # fmt: skip
