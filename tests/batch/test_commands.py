"""Jobs of other commands than merging: the same file as by the command itself, skipped, redone, refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.adapters_out.report import AdapterReport
from lora_merge.batch.jobs_file import load as load_jobs
from lora_merge.batch.run import make_batch
from lora_merge.errors import UsageError
from lora_merge.options import ADAPTER_OPTIONS, OPTIONS
from lora_merge.planning import make_plan
from lora_merge.recipes.commands import COMMANDS
from lora_merge.typed_options import Defaults
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.models import sd1_sample


@pytest.fixture
def files(tmp_path: Path) -> Path:
    save(sd1_sample(), tmp_path / "base.safetensors")
    for name, seed in (("a", 100), ("b", 300)):
        save(kohya(sd1_sample(), seed=seed), tmp_path / f"{name}.safetensors")
    return tmp_path


def batch(folder: Path, *jobs: dict[str, Any], **more: Any) -> Path:
    """A jobs file of adapters a and b; what a job does not say, `more` says for all."""
    named: list[Any] = [str(folder / "a.safetensors"), str(folder / "b.safetensors")]
    entries = [{"adapters": named, **job, "output": str(folder / job["output"])} for job in jobs]
    path = folder / "jobs.json"
    path.write_text(json.dumps({"version": 1, "defaults": more, "jobs": entries}))
    return path


def test_tables_fit_together() -> None:
    assert {name for row in COMMANDS.values() for name in row.fields} <= {*OPTIONS, *ADAPTER_OPTIONS}
    assert Defaults.__annotations__["command"].__forward_arg__ == f"Literal{[*COMMANDS]} | None"


@pytest.mark.slow
def test_each_command_makes_what_it_makes_alone_once(files: Path) -> None:
    a, b, base = (files / f"{name}.safetensors" for name in ("a", "b", "base"))
    lora_merge.merge(base, a, files / "t.safetensors")
    jobs = batch(
        files,
        {"command": "combine", "method": "ties", "algorithm": "full", "density": "{d}", "output": "c{d}.safetensors",
         "matrix": {"d": [0.25, 0.5]}},
        {"command": "resize", "adapters": [str(a)], "rank": "{r}", "output": "r.safetensors", "matrix": {"r": [2]}},
        {"command": "convert", "adapters": [str(a)], "base": str(base), "to": "{to}", "output": "{to}.safetensors",
         "matrix": {"to": ["comfy"]}},
        {"command": "average", "ema": 0.75, "output": "mean.safetensors"},
        {"command": "extract", "base": str(base), "adapters": [str(files / "t.safetensors")], "rank": 2,
         "output": "e.safetensors"},
        {"base": str(base), "output": "m.safetensors"},
        density=0.5,
    )  # fmt: skip
    efforts = {str(s.entry.job.output): s.effort for s in make_batch(jobs).planned}
    steps: list[lora_merge.Step] = []
    reports = lora_merge.run_batch(jobs, progress=steps.append)
    assert [r.status for r in reports] == ["made"] * 6 + ["merged"], reports
    totals = {step.output: step.total for step in steps if step.stage == "make"}
    for one, command in zip(reports, ["combine"] * 2 + ["resize", "convert", "average", "extract"], strict=False):
        assert isinstance(one.report, AdapterReport)
        assert totals[one.output] == one.report.weights > 0, "the plan knows what there is to do"
        assert efforts[one.output] == int(one.report.weights * COMMANDS[command].effort)
    alone = {
        "c0.25": lora_merge.combine([a, b], files / "x1.safetensors", method="ties", algorithm="full", density=0.25),
        "c0.5": lora_merge.combine([a, b], files / "x2.safetensors", method="ties", algorithm="full", density=0.5),
        "r": lora_merge.resize(a, files / "x3.safetensors", rank=2),
        "comfy": lora_merge.convert(a, files / "x4.safetensors", base=base, to="comfy"),
        "e": lora_merge.extract(base, files / "t.safetensors", files / "x6.safetensors", rank=2),
        "mean": lora_merge.average([a, b], files / "x5.safetensors", ema=0.75),
    }
    for name, report in alone.items():
        one, other = load(files / f"{name}.safetensors"), load(Path(report.output))
        assert one.keys() == other.keys() and all(value.equal(other[key]) for key, value in one.items())
    assert json.loads(reports[0].to_json())["report"]["layers"]
    assert {r.status for r in lora_merge.run_batch(jobs)} == {"skipped"}
    changed = batch(files, {"command": "average", "ema": 0.5, "output": "mean.safetensors"})
    (refused,) = lora_merge.run_batch(changed)
    assert refused.error is not None and "was made by another recipe" in refused.error.what
    (again,) = lora_merge.run_batch(changed, overwrite=True)
    assert again.status == "made"
    assert [r.status for r in lora_merge.run_batch(changed, redo=True)] == ["made"]


WRONG = {
    "an option of another command": ({"command": "resize", "adapters": ["a"], "rank": 2, "density": 0.5}, "resize has no such option"),
    "an option that merging lacks": ({"base": "base", "rank": 2}, "merge has no such option"),
    "no such command": ({"command": "shrink"}, "did you mean|should be"),
    "a value out of range": ({"command": "combine", "method": "ties", "density": 2, "rank": 4}, "density 2.0 is out of range"),
    "two where one is taken": ({"command": "resize", "rank": 2}, "resize takes one adapter"),
    "no rule for the rank": ({"command": "resize", "adapters": ["a"]}, "needs a rule"),
    "no such dialect": ({"command": "convert", "adapters": ["a"], "to": "sdnext"}, "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_reported_with_their_place(what: str, files: Path) -> None:
    job, told = WRONG[what]
    with pytest.raises(UsageError, match=told) as failure:
        load_jobs(batch(files, {**job, "output": "o.safetensors"}))
    assert "jobs.json:1 (jobs[0]" in failure.value.where


PARTS: list[tuple[str, str, Any, Any]] = [
    *((command, name, ["unet", "te"], ["unet"]) for command in ("combine", "convert") for name in ("include", "exclude")),
    *((command, "strength_for", {"unet": 0.5, "te": 0.2}, {"unet": 0.5}) for command in ("merge", "unmerge", "combine")),
    ("resize", "rank_for", {"unet": 2, "te": 3}, {"unet": 2}), ("merge", "keep_precision", ["unet", "te"], ["unet"]),
]  # fmt: skip
"""Command, option, parts of the model, those without the second."""


@pytest.mark.parametrize(("command", "name", "parts", "left"), PARTS)
def test_job_without_a_part_of_the_defaults_is_the_job_of_a_file_without_it(
    command: str, name: str, parts: Any, left: Any, files: Path
) -> None:
    job: dict[str, Any] = {"command": command, "adapters": [str(files / "a.safetensors")], "output": "o.safetensors"}
    job |= {"rank": 4} if command == "resize" else {"base": str(files / "base.safetensors")}
    (whole,), (other,) = (load_jobs(batch(files, job, **{name: some})) for some in (parts, left))
    short = whole.without(f"--{name.replace('_', '-')}", "te")
    assert short.checked == other.checked != whole.checked and short.usual == other.usual
    assert pickle.loads(pickle.dumps(short)) == short


def test_input_that_another_job_makes_is_refused(files: Path) -> None:
    first = {"command": "combine", "output": "c.safetensors"}
    second = {"command": "resize", "adapters": [str(files / "c.safetensors")], "rank": 2, "output": "r.safetensors"}
    reports = lora_merge.run_batch(batch(files, first, second))
    told = {Path(r.output).name: r for r in reports}
    assert told["c.safetensors"].status == "made"
    assert "is the output of another job" in str(told["r.safetensors"].error)


def test_adapter_with_one_other_bit_is_not_skipped(files: Path) -> None:
    jobs, output = batch(files, {"command": "combine", "output": "c.safetensors"}), files / "c.safetensors"
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["made"]
    content = bytearray(output.read_bytes())
    content[-1] ^= 1
    output.write_bytes(content)
    (report,) = lora_merge.run_batch(jobs)
    assert report.error is not None and "is damaged" in report.error.what
    assert output.read_bytes() == content
    assert [r.status for r in lora_merge.run_batch(jobs, overwrite=True)] == ["made"]
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["skipped"]


def test_jobs_go_to_workers_as_plain_data_and_a_dry_run_writes_nothing(files: Path) -> None:
    jobs = batch(files, {"command": "combine", "output": "c.safetensors"})
    (entry,) = load_jobs(jobs)
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert run("batch", jobs, "--dry-run")[::2] == (0, "")
    assert not (files / "c.safetensors").exists()


def test_merge_is_taken_back_in_a_batch_as_by_the_command_itself(files: Path) -> None:
    a, base = files / "a.safetensors", files / "base.safetensors"
    refs = [f"{a}:0.5"]
    jobs = batch(files, {"base": str(base), "adapters": refs, "output": "merged.safetensors"},
                 {"command": "unmerge", "base": str(files / "merged.safetensors"), "adapters": refs,
                  "output": "back.safetensors"})  # fmt: skip
    merged, back = lora_merge.run_batch(jobs)
    assert (merged.status, back.status) == ("merged", "merged"), back
    assert back.report is not None and any("one rounding step" in note for note in back.report.notes)
    lora_merge.unmerge(files / "merged.safetensors", [(a, 0.5)], files / "alone.safetensors")
    one, other, original = (load(files / f"{name}.safetensors") for name in ("back", "alone", "base"))
    assert all(value.equal(other[key]) for key, value in one.items())
    assert all((value.float() - original[key].float()).abs().max() < 2e-2 for key, value in one.items())
    assert {r.status for r in lora_merge.run_batch(jobs)} == {"skipped"}


def test_unmerge_in_a_batch_computes_as_the_recipe_says(files: Path) -> None:
    a, merged = files / "a.safetensors", files / "merged.safetensors"
    lora_merge.merge(files / "base.safetensors", (a, 0.5), merged, compute_dtype="fp64")
    job = {"command": "unmerge", "base": str(merged), "adapters": [f"{a}:0.5"], "output": "back.safetensors"}
    (entry,), (plan,) = load_jobs(batch(files, job)), lora_merge.plan_batch(batch(files, job))
    assert (entry.job.compute_dtype, [ref.strength for ref in entry.job.adapters]) == ("fp64", [-0.5])
    assert (plan.status, plan.command) == ("to run", "unmerge")


@pytest.mark.parametrize("more", [{"method": "ties"}, {"density": 0.5}, {"rank": 2}])
def test_unmerge_has_no_options_of_other_commands(files: Path, more: dict[str, object]) -> None:
    job = {"command": "unmerge", "base": str(files / "base.safetensors"), "output": "x.safetensors", **more}
    with pytest.raises(UsageError, match="unmerge has no such option"):
        lora_merge.run_batch(batch(files, job))


def test_changes_that_depend_on_the_base_are_not_taken_back_in_a_batch(files: Path) -> None:
    held = load(files / "a.safetensors")
    name = next(n.removesuffix(".alpha") for n in held if n.endswith(".alpha"))
    rows = len(held[f"{name}.lora_up.weight"])
    save({**held, f"{name}.dora_scale": torch.ones(rows, 1)}, files / "dora.safetensors")
    job = {"command": "unmerge", "base": str(files / "base.safetensors"), "adapters": [str(files / "dora.safetensors")],
           "output": "x.safetensors"}  # fmt: skip
    (report,) = lora_merge.run_batch(batch(files, job))
    assert report.error is not None and "cannot be undone" in str(report.error)
    assert not (files / "x.safetensors").exists()


def test_difference_has_a_name_with_the_ending_that_its_kind_of_model_wants(files: Path) -> None:
    lora_merge.merge(files / "base.safetensors", files / "a.safetensors", files / "t.safetensors")
    more = {"command": "extract", "base": str(files / "base.safetensors"), "adapters": [str(files / "t.safetensors")]}
    jobs = batch(files, {**more, "rank": 2, "output": "e"})
    for status in ("made", "skipped"):
        (told,) = lora_merge.run_batch(jobs)
        assert (told.status, Path(told.output).name) == (status, "e.safetensors")
    (files / "base.safetensors").write_bytes(b"")
    (told,) = lora_merge.run_batch(batch(files, {**more, "output": "other"}))
    assert told.status == "failed" and told.error is not None and told.error.what == "the file is empty"


def test_plan_of_a_batch_is_what_a_dry_run_prints(files: Path) -> None:
    base, a = str(files / "base.safetensors"), str(files / "a.safetensors")
    jobs = [{"base": base, "adapters": [f"{a}:0.5"], "output": "m.safetensors"},
            {"command": "resize", "adapters": [a], "rank": 2, "output": "r.safetensors"},
            {"base": f"{base}.none", "adapters": [a], "output": "n.safetensors"}]  # fmt: skip
    plans = lora_merge.plan_batch(batch(files, *jobs))
    assert [plan.status for plan in plans] == ["to run", "to run", "failed"]
    assert [plan.memory is None for plan in plans] == [False, False, True]
    answer = run("batch", files / "jobs.json", "--dry-run", "--json")
    printed = [json.loads(line) for line in answer.out.splitlines()[:3]]
    now = ({**json.loads(plan.to_json()), "disk": None} for plan in plans)
    assert [{**line, "disk": None} for line in printed] == [*now]
    assert not [*files.glob("[mrn].safetensors")]


def test_former_plans_serve_other_strengths_until_a_file_changes(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    plan_job = make_plan.plan_job

    def counted(*arguments: Any) -> Any:
        planned.append(arguments)
        return plan_job(*arguments)

    monkeypatch.setattr(make_plan, "plan_job", counted)
    former = lora_merge.FormerPlans()

    def plan(strength: float, part: float = 1) -> lora_merge.JobPlan:
        parts = {"strength_for": {"te": part}} if part != 1 else {}
        adapter = {"path": str(files / "a.safetensors"), "strength": strength, **parts}
        job = {"base": str(files / "base.safetensors"), "adapters": [adapter], "output": str(files / "m.safetensors")}
        (again,), (anew,) = lora_merge.plan_batch([job], former=former), lora_merge.plan_batch([job])
        assert {**again.to_dict(), "disk": None} == {**anew.to_dict(), "disk": None}
        return again

    for strength, part, calls in ((0.5, 1, 2), (0.6, 1, 1), (-2, 1, 1), (0.5, 0.5, 2), (0.7, 1, 1)):  # one of them anew
        planned.clear()
        assert plan(strength, part).status == "to run"
        assert len(planned) == calls
    (files / "a.safetensors").write_bytes(b"another file")
    assert plan(0.6).error is not None
    (files / "a.safetensors").unlink()
    assert "not found" in str(plan(0.6).error)
