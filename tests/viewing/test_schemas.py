"""What the program prints as JSON is what its schemas say."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator

import lora_merge
from lora_merge.adapters_out.report import AdapterReport
from lora_merge.cli.main import app
from lora_merge.cli.reports import dry
from lora_merge.report import Report
from lora_merge.viewing.compare import compare
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.json_schemas import SCHEMA_KINDS, schema_of
from tests.kit.command_line import run
from tests.viewing.conftest import Scene


def check(found: Any, kind: str) -> None:
    """Fail unless a schema allows the object and describes every entry of it."""
    schema = schema_of(kind)
    Draft202012Validator.check_schema(schema)
    errors = [e.message for e in Draft202012Validator(schema).iter_errors(json.loads(json.dumps(found)))]
    assert not errors
    assert found.keys() <= schema["properties"].keys()


def test_reports_and_plans(scene: Scene, tmp_path: Path) -> None:
    plan = lora_merge.plan(scene.base, [(scene.ink, 0.5)], tmp_path / "o.safetensors")
    check(dry(plan), "plan")
    for verify in (True, False):
        report = lora_merge.merge(scene.base, [(scene.ink, 0.5)], tmp_path / f"{verify}.safetensors", verify=verify)
        check(json.loads(report.to_json()), "report")
    assert schema_of("report")["properties"].keys() == {f.name for f in fields(Report)}


def test_reports_of_commands_that_write_adapters(scene: Scene, tmp_path: Path) -> None:
    """Each entry of a layer and of the proof is described too, and the totals are those of the layers."""
    tuned, out = tmp_path / "tuned.safetensors", tmp_path / "o.safetensors"
    lora_merge.merge(scene.base, [scene.oil], tuned, verify=False)
    described = schema_of("adapter")["properties"]
    of_layer = described["layers"]["additionalProperties"]["properties"]
    for command in (
        ("combine", scene.ink, scene.oil), ("combine", scene.ink, scene.oil, "--dry-run"),
        ("combine", scene.ink, scene.oil, "--method", "ties", "--density", "0.5", "--rank", "2"),
        ("resize", scene.ink, "--rank", "1"), ("combine", scene.ink, scene.oil, "--format", "diffusers", "--base", scene.base),
        ("average", scene.ink, scene.ink, "--space", "factors"), ("average", scene.ink, scene.ink, "--no-verify"),
        ("convert", scene.ink, "--to", "diffusers", "--base", scene.base),
        ("convert", scene.ink, "--to", "diffusers", "--base", scene.base, "--dry-run"),
        ("extract", scene.base, tuned, "--rank", "2"), ("extract", scene.base, tuned, "--dry-run"),
    ):  # fmt: skip
        code, printed, _ = run(*command, "-o", out, "--overwrite", "--json", "--json-tensors")
        assert code == 0, printed
        found = json.loads(printed)
        check(found, "adapter")
        layers = found["layers"].values()
        assert {key for row in layers for key in row} <= of_layer.keys()
        assert (found["verified"] or {}).keys() <= described["verified"]["properties"].keys()
        if not found["planned"]:
            proven = ["prove"] * bool((found["verified"] or {}).get("recomputed"))
            assert [*found["stages"]] == ["load", "make", "flush", *proven]
            assert sum(found["stages"].values()) == pytest.approx(found["seconds"])
            lost, wanted = (sum((row["norm"] * row.get(by, 1.0)) ** 2 for row in layers) for by in ("residual", ""))
            assert found["residual"] == pytest.approx((lost / wanted) ** 0.5, rel=1e-6, abs=1e-9)
            numbers = found["numbers"]
            for rows in (numbers["components"].values(), numbers["blocks"].values()):
                assert sum(row["layers"] for row in rows) == numbers["all"]["layers"] == len(layers)
                assert sum(row["norm"] ** 2 for row in rows) == pytest.approx(wanted)
                assert sum((row["norm"] * row["residual"]) ** 2 for row in rows) == pytest.approx(lost, abs=1e-9)
            assert numbers["blocks"]
    assert described.keys() == {f.name for f in fields(AdapterReport)}


def test_facts_and_comparisons(scene: Scene) -> None:
    for facts in (
        inspect(scene.base, hashes=True), inspect(scene.ink, weights=True, pictures=True), inspect(scene.base, scene.oil, weights=True),
        inspect(scene.base, scene.ink), inspect(scene.base, weights=True),
    ):  # fmt: skip
        check(facts, "inspect")
    check(compare(scene.ink, scene.oil), "compare")
    check(compare(scene.base, scene.base), "compare")


def of_its_kind(found: dict[str, Any]) -> str:
    """Fail unless the object names the schema that describes it, also what is nested in it; returns the name."""
    kind = str(found["schema"]).split("/")[1]
    check(found, kind)
    for one in (
        [*found.get("files", []), *([found["report"]] if found.get("report") else [])]
        if kind in ("files", "job-report")
        else []
    ):
        of_its_kind(one)
    return kind


@pytest.mark.slow
def test_json_that_is_printed_has_a_schema(scene: Scene, tmp_path: Path) -> None:
    """Every command with --json is here."""
    merged, both = tmp_path / "merged.safetensors", tmp_path / "both.safetensors"
    jobs = tmp_path / "jobs.json"
    entry = {"base": str(scene.base), "adapters": [str(scene.ink)]}
    jobs.write_text(json.dumps([
        {**entry, "output": "job.safetensors"}, {**entry, "base": "nothing.safetensors", "output": "never.safetensors"},
        {"command": "combine", "adapters": [str(scene.ink), str(scene.oil)], "output": "pair.safetensors"},
    ]))  # fmt: skip
    searched = ("--search", scene.folder)
    printed: dict[tuple[object, ...], set[str]] = {
        ("merge", scene.base, scene.ink, "-o", merged): {"report"},
        ("merge", scene.base, scene.ink, "-o", tmp_path / "x.safetensors", "--dry-run"): {"plan"},
        ("replay", merged, "-o", tmp_path / "again.safetensors", *searched): {"report"},
        ("unmerge", merged, "-o", tmp_path / "before.safetensors", *searched): {"report"},
        ("combine", scene.ink, scene.oil, "-o", both): {"adapter"},
        ("resize", scene.ink, "--rank", "1", "-o", tmp_path / "r.safetensors"): {"adapter"},
        ("average", scene.ink, scene.ink, "-o", tmp_path / "a.safetensors"): {"adapter"},
        ("convert", scene.ink, "--to", "diffusers", "-o", tmp_path / "c.safetensors", "--base", scene.base): {
            "adapter"
        },
        ("extract", scene.base, merged, "--rank", "2", "-o", tmp_path / "e.safetensors"): {"adapter"},
        ("verify", merged, *searched): {"proof"},
        ("verify", both, *searched): {"adapter-proof"},
        ("batch", jobs): {"job-report", "error"},
        ("batch", jobs, "--dry-run"): {"job-plan", "error"},
        ("inspect", scene.base): {"inspect"},
        ("inspect", scene.ink, scene.oil): {"files"},
        ("inspect", scene.base, scene.ink, scene.oil, "--weights"): {"files"},
        ("inspect", scene.base, "--blocks"): {"parts"},
        ("parts", scene.base): {"parts"},
        ("compare", scene.ink, scene.oil): {"compare"},
        ("algorithms",): {"algorithms"},
        ("architectures",): {"architectures"},
        ("doctor", tmp_path): {"doctor"},
    }
    for command, kinds in printed.items():
        code, out, _ = run(*command, "--json")
        if command[0] == "batch":  # it fails, which `run` does not print
            done = run(*command, "--json")
            code, out = done.code, done.out
        lines = [*map(json.loads, out.splitlines())]
        assert {of_its_kind(found) for found in lines} == kinds, command
        if "error" in kinds:
            assert [one["status"] for one in lines[:-1]].count("failed") == 1
            assert code == lines[-1]["exit_code"] == 7
            assert {one["number"] for one in lines[:-1]} == {1, 2, 3}
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {str(command[0]) for command in printed} == {
        name for name, one in known.items() if any("--json" in option.opts for option in one.params)
    }
    assert {kind for kinds in printed.values() for kind in kinds} == {*SCHEMA_KINDS} - {"jobs"}
    told = " ".join(run("schema", "--help")[1].split())
    assert all(kind in told for kind in SCHEMA_KINDS)


def test_failures_are_objects_on_stdout(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "nothing.safetensors", "--json")
    assert done.code == 3
    check(json.loads(done.out), "error")


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_command_prints_each_schema(kind: str) -> None:
    code, out, _ = run("schema", kind)
    assert code == 0
    found = json.loads(out)
    assert found == schema_of(kind)
    assert found["$schema"]
    assert found["$id"]
