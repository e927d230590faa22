"""Which rows the proof reads a second time, and that it finds a plan that is wrong in one of their numbers or places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from row_files import write

from lora_merge.algorithms import ALGORITHMS
from lora_merge.disk.reader import Reader
from lora_merge.errors import VerificationFailed
from lora_merge.job import Job
from lora_merge.matching.patch import PatchPart
from lora_merge.planning.cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from lora_merge.planning.plan import OutputTensor, Plan
from lora_merge.proof.second_reading import Reading, read_again

ALONE = (
    "lora_fused", "lora_experts", "lora_experts_transposed", "peft_glora_bias", "tinylora",
)  # fmt: skip
"""Rows whose places and numbers are the plan's alone, as the report says of them by name."""

KNOWN = [name for name in ALGORITHMS if name not in ALONE]


def read(plan: Plan) -> Reading:
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        return read_again(plan, reader)


def planned(job: Job) -> Plan:
    return plan_job(job, CheckpointCache())


def changed(plan: Plan, change: Callable[[OutputTensor, PatchPart], PatchPart]) -> Plan:
    """The plan with other parts of patches."""
    files = [
        replace(f, targets=tuple(t._replace(uses=tuple(change(t, u) for u in t.uses)) for t in f.targets))
        for f in plan.files
    ]
    return replace(plan, files=tuple(files))


def exchanged(plan: Plan) -> Plan:
    """Both layers' changes in the other's place."""
    uses = {t.name: t.uses for f in plan.files for t in f.targets}

    def other(name: str) -> str:
        return name.replace("layers.0", "layers.2").replace("layers.1", "layers.0").replace("layers.2", "layers.1")

    def there(t: OutputTensor) -> tuple[PatchPart, ...]:
        return tuple(u._replace(piece=u.piece._replace(key=t.name)) for u in uses[other(t.name)])

    files = [replace(f, targets=tuple(t._replace(uses=there(t)) for t in f.targets)) for f in plan.files]
    return replace(plan, files=tuple(files))


@pytest.mark.parametrize("row", ALGORITHMS)
def test_rows_are_proven_a_second_way_or_told(row: str, tmp_path: Path) -> None:
    found = read(planned(write(row, tmp_path)))
    assert len(found.alone) == (2 if row in ALONE else 0)
    assert found.proven == found.modules - len(found.alone)


@pytest.mark.parametrize("row", KNOWN)
def test_other_places_are_found(row: str, tmp_path: Path) -> None:
    plan = planned(write(row, tmp_path))
    if any(t.uses for f in plan.files for t in f.targets):
        with pytest.raises(VerificationFailed, match="disagree on where"):
            read(exchanged(plan))


@pytest.mark.parametrize("row", KNOWN)
def test_other_numbers_and_tensors_are_found(row: str, tmp_path: Path) -> None:
    """The scale or the limit, every setting that a configuration tells, the strength, two tensors for each other."""
    plan, tried = planned(write(row, tmp_path)), 0
    (part, *_) = [u for f in plan.files for t in f.targets for u in t.uses] or [None]
    if part is None:
        return
    wrong: list[Callable[[Any], Any]] = [lambda p: replace(p, algorithm="lora_fused")]
    wrong += [
        lambda p, n=n: replace(p, numbers={**p.numbers, n: 0.123})
        for n in ("scale", "limit")
        if n in part.patch.numbers
    ]
    told = {n for n in ("seed", "terms", "limit", "family", "top", "method", "depth") if n in dict(part.patch.settings)}
    wrong += [lambda p, n=n: replace(p, settings=tuple({**dict(p.settings), n: 99}.items())) for n in told]
    slots = [*part.patch.module.slots]
    if len(slots) > 1:
        a, b = slots[:2]
        wrong.append(
            lambda p: replace(
                p, module=replace(p.module, slots={**p.module.slots, a: p.module.slots[b], b: p.module.slots[a]})
            )
        )
    for change in wrong:
        with pytest.raises(VerificationFailed, match="disagree on"):
            read(changed(plan, lambda _, u, change=change: u._replace(patch=change(u.patch))))
        tried += 1
    with pytest.raises(VerificationFailed, match="how strongly"):
        read(changed(plan, lambda _, u: u._replace(strength=0.5)))
    assert tried > 0
