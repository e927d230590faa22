"""A planner that loses a module in silence, whatever its kind: the account of the adapter's tensors finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_merge.algorithms import ALGORITHMS
from lora_merge.disk.reader import Reader
from lora_merge.errors import VerificationFailed
from lora_merge.job import Job
from lora_merge.matching.match import ModuleMatcher
from lora_merge.planning import changes, checkpoint_cache, make_plan
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.proof.account import Account, account
from tests.algorithms.row_files import MODULES, write

Break = Callable[[pytest.MonkeyPatch], None]
LOST = MODULES[0]


def accounted(job: Job, row: str = "") -> Account:
    """What became of the adapter's tensors; all must be of this row."""
    plan = make_plan.plan_job(job, CheckpointCache())
    kinds = {u.patch.algorithm for f in plan.files for t in f.targets for u in t.uses}
    assert not row or kinds == {row} or (row == "set" and not kinds)
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        return account(plan, reader)


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: change(original, *a, **k))

    return apply


def _ungrouped(group: Any, index: Any) -> Any:
    found = group(index)
    return replace(found, modules=tuple(m for m in found.modules if LOST not in m.name))


def _unmatched(match: Any, self: Any, module: Any) -> None:
    if LOST not in module.name:
        match(self, module)


def _counted_only(add: Any, self: Any, patch: Any, *more: Any) -> None:
    if LOST in patch.module.name:
        self.draft.count(patch.module.name, {"model"})
    else:
        add(self, patch, *more)


def _unused(match: Any, *arguments: Any) -> Any:
    result = match(*arguments)
    uses = {k: [u for u in uses if LOST not in u.patch.module.name] for k, uses in result.uses.items()}
    replaced = {k: info for k, info in result.replaced.items() if LOST not in info.name}
    return replace(result, uses=uses, replaced=replaced)


def _unwritten(outputs: Any, *arguments: Any) -> Any:
    for path, target in outputs(*arguments):
        yield path, target._replace(uses=tuple(u for u in target.uses if LOST not in u.patch.module.name))


WAYS: dict[str, Break] = {
    "it is never grouped": _around(checkpoint_cache, "group", _ungrouped),
    "it is never matched": _around(ModuleMatcher, "match", _unmatched),
    "it is counted and not applied": _around(ModuleMatcher, "_add", _counted_only),
    "its uses are dropped": _around(changes, "match_adapter", _unused),
    "its tensors are planned without it": _around(make_plan, "outputs", _unwritten),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_lost_module_of_every_kind_is_detected(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write(row, tmp_path)
    whole = accounted(job, row)
    assert whole.used == whole.tensors > 1
    assert not whole.unused
    for way, break_it in WAYS.items():
        with monkeypatch.context() as patch:
            break_it(patch)
            with pytest.raises(VerificationFailed, match="the plan loses"):
                accounted(job)
                pytest.fail(way)
