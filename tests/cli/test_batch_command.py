"""What a batch says: effective strengths in its plan, equal lines once, times that add up, and `--redo`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import lora_merge
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.command_line import Answer
from tests.kit.files import save
from tests.kit.models import sd1_sample

Run = Callable[..., Answer]

JOBS = """
version: 1
defaults: {base: base.safetensors}
jobs:
- {adapters: [lora.safetensors], output: a.safetensors}
- {adapters: [{path: lora.safetensors, strength: 0.5}], strength_for: {te: 0}, output: b.safetensors}
- {adapters: [{path: lora.safetensors, strength: 0.25}, ink.safetensors], output: c.safetensors}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    save(sd1_sample(), folder / "base.safetensors")
    save(kohya(sd1_sample()), folder / "lora.safetensors")
    save(kohya(sd1_sample(), seed=3), folder / "ink.safetensors")
    (folder / "jobs.yaml").write_text(JOBS)
    (folder / "bad.safetensors").write_bytes(b"<!DOCTYPE html><html>")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, made: Path) -> Run:
    monkeypatch.chdir(made)

    return partial(command_line.run, "batch")


def test_plan_shows_the_strengths_that_are_applied(run: Run) -> None:
    code, out, _ = run("jobs.yaml", "--dry-run")
    assert code == 0
    first, second, third, count, *_ = out.splitlines()
    assert first.endswith("base.safetensors + lora.safetensors (1× te (1), 1× unet (4))")
    assert second.endswith("base.safetensors + lora.safetensors (0.5× unet (4), te 0: 1 left out)")
    lora, ink = (f"{name}.safetensors ({s}× te (1), {s}× unet (4))" for name, s in (("lora", 0.25), ("ink", 1)))
    assert third.endswith(f"base.safetensors + {lora} + {ink}")
    assert count.startswith("3 jobs: ")
    told = [json.loads(line) for line in run("jobs.yaml", "--dry-run", "--json")[1].splitlines()]
    assert told[1]["adapters"][0]["strengths"] == {"unet": {"0.5": 4}, "te": {"0": 1}}
    assert told[2]["adapters"][0]["strengths"] == {"unet": {"0.25": 4}, "te": {"0.25": 1}}


def test_equal_outputs_are_reported_once_and_redone(run: Run, made: Path) -> None:
    before = time.monotonic()
    assert run("jobs.yaml", "--report", "report.jsonl")[0] == 0
    took = time.monotonic() - before
    reports = [json.loads(line) for line in (made / "report.jsonl").read_text().splitlines()]
    assert sum(one["seconds"] for one in reports) <= took, "each job has its own time, not that since the beginning"
    assert [one["seconds"] for one in reports] == [pytest.approx(one["report"]["seconds"], abs=1e-3) for one in reports]
    code, out, _ = run("jobs.yaml")
    assert code == 0
    assert "3 skipped: done already, by recipes and headers" in out
    assert out.count("skipped") == 2, "that line, and the head of the table"
    content, stamp = (made / "b.safetensors").read_bytes(), (made / "b.safetensors").stat().st_mtime_ns
    assert "3 to run" in run("jobs.yaml", "--redo")[1]
    assert (made / "b.safetensors").stat().st_mtime_ns > stamp
    assert (made / "b.safetensors").read_bytes() == content
    assert [one.status for one in lora_merge.run_batch(made / "jobs.yaml", redo=True)] == ["merged"] * 3


def test_redo_does_not_replace_what_another_recipe_made(run: Run, made: Path) -> None:
    (made / "other.yaml").write_text(JOBS.replace("0.25", "0.75").replace("c.saf", "d.saf"))
    assert run("other.yaml")[0] == 0
    (made / "other.yaml").write_text(JOBS.replace("0.25", "0.125").replace("c.saf", "d.saf"))
    content = (made / "d.safetensors").read_bytes()
    code, out, _ = run("other.yaml", "--redo")
    assert code == 7
    assert "--overwrite" in out
    assert (made / "d.safetensors").read_bytes() == content


def test_reason_of_several_jobs_is_reported_once(run: Run, made: Path) -> None:
    jobs = "".join(f"- {{adapters: [bad.safetensors], output: bad{n}.safetensors}}\n" for n in range(3))
    (made / "bad.yaml").write_text(f"version: 1\ndefaults: {{base: base.safetensors}}\njobs:\n{jobs}")
    code, out, _ = run("bad.yaml")
    assert code == 7
    assert out.count("fix:") == 1
    assert out.count("for the same reason as [1]") == 2
    assert "and 2 more: " in out


def test_job_in_the_singular(run: Run, made: Path) -> None:
    (made / "one.yaml").write_text("".join(JOBS.splitlines(keepends=True)[:5]))
    assert run("one.yaml", "--dry-run")[1].splitlines()[1].startswith("1 job: ")


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_change_below_the_precision_of_the_output_is_warned_of(run: Run, quiet: list[str]) -> None:
    """As in a single merge, also where only warnings and errors are said."""
    save({key: t * 1e-6 if "lora_up" in key else t for key, t in kohya(sd1_sample()).items()}, Path("tiny.safetensors"))
    Path("tiny.yaml").write_text(
        "version: 1\njobs: [{base: base.safetensors, adapters: [tiny.safetensors], output: tiny-out.safetensors}]"
    )
    code, out, err = run("tiny.yaml", "--redo", *quiet)
    assert code == 0
    assert "warning: 100 % of the change of tiny.safetensors is lost in the rounding" in (err if quiet else out)
    assert quiet or re.search(
        r"\nsurvives in 1 output, the least in tiny-out.safetensors: nothing of the change \(lost in rounding\)\n", out
    )
