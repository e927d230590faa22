"""What a plan prints of a layer is what the run writes, if headers show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lora_merge
from lora_merge.progress import unwatched
from lora_merge.recipes.commands import COMMANDS
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1_sample

CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "a rule for kernels is none for 1x1": ("resize", ("a",), {"rank": 3, "conv_rank": 1}),
    "of a sum": ("combine", ("a", "b"), {"rank": 5, "conv_rank": 2}),
    "exactly": ("combine", ("a", "b"), {}),
    "whole": ("combine", ("a", "b"), {"algorithm": "full"}),
    "the smaller of both": ("combine", ("a", "b"), {"algorithm": "auto", "rank": 4}),
    "of a method that is not linear": ("combine", ("a", "b"), {"method": "ties", "density": 0.5, "rank": 12}),
    "an average at the inputs' rank": ("average", ("a", "b"), {}),
    "renamed": ("convert", ("a",), {"to": "lycoris"}),
    "at the input's rank": ("convert", ("a",), {"to": "kohya", "rank": "same"}),
    "converted, the smaller of both": ("convert", ("a",), {"to": "kohya", "algorithm": "auto"}),
    "a difference": ("extract", ("tuned",), {"rank": 2}),
    "a difference, the smaller of both": ("extract", ("tuned",), {"rank": 12, "algorithm": "auto", "max_rank": 12}),
    "a difference at most so large": ("extract", ("tuned",), {"rank": 40, "conv_rank": 3, "max_rank": 6}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    save(sd1_sample(), folder / "base.safetensors")
    for name, seed in (("a", 100), ("b", 300)):
        save(kohya(sd1_sample(), seed=seed, rank=4), folder / f"{name}.safetensors")
    lora_merge.merge(folder / "base.safetensors", folder / "a.safetensors", folder / "tuned.safetensors", dtype="fp32")
    return folder


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
def test_plan_prints_the_forms_that_the_run_writes(case: str, files: Path, tmp_path: Path) -> None:
    name, inputs, options = CASES[case]
    command, base = COMMANDS[name], files / "base.safetensors"
    job = command.job([files / f"{i}.safetensors" for i in inputs], tmp_path / "out.safetensors", base, options)
    plan, report = command.plan(job, None), command.run(job, unwatched, None)
    forms = [{n: (one["algorithm"], one["rank"]) for n, one in r.layers.items()} for r in (plan, report)]
    assert forms[0] == {**forms[0], **forms[1]}
    assert report.written <= plan.written
