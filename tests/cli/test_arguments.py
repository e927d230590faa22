"""Whatever is passed where something else belongs: one UsageError that says what, where and how to do it right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import UsageError
from tests.kit.command_line import run

OPTIONS: list[dict[str, Any]] = [
    {"dtype": 7}, {"dtype": None}, {"dtype": ["bf16"]}, {"compute_dtype": 32}, {"compute_dtype": torch.int8},
    {"strength": ["1"]}, {"strength_for": {"te": "1"}},
    {"device": 5}, {"device": None}, {"device": ["cuda:0", "cuda:1"]},
    {"unmatched": True}, {"unmatched": None}, {"unmatched": ["skip"]},
    {"overwrite": "no"}, {"overwrite": None}, {"verify": 1}, {"verify": "full"},
    {"max_memory": "lots"}, {"max_memory": None}, {"max_memory": True}, {"max_memory": {}}, {"max_vram": "-1"}, {"max_vram": b"1GB"},
    {"map": 3}, {"map": ["names.yaml"]},
    {"strength_for": 3}, {"strength_for": "te=0.5"}, {"strength_for": ["te"]}, {"strength_for": [("te", "x")]},
    {"strength_for": [("te", None)]}, {"strength_for": [(1, 0.5)]}, {"strength_for": {"te": True}}, {"strength_for": None},
    {"setting": 3}, {"setting": "alpha"}, {"setting": [("alpha",)]}, {"setting": {"alpha": object()}}, {"setting": {3: 4}},
    {"strength": 0.5}, {"strength": []}, {"strength": [0.5, 1]}, {"strength": ["x"]}, {"strength": "1"}, {"dtpe": "bf16"}, {"workers": 2},
    {"unmatched": np.array([1, 2])}, {"setting": torch.zeros(2)}, {"strength": torch.zeros(2)}, {"dtype": np.array([1, 2])},
]  # fmt: skip

ADAPTERS: list[Any] = [
    None, 3, 0.5, b"a.safetensors", [], [None], [3], [b"a"], [("a.safetensors", "x")], [("a.safetensors", None)],
    [("a.safetensors", True)], [("a.safetensors", 1, 2)], [(3, 0.5)], [["a.safetensors", 0.5]], object(),
    lora_merge.Adapter("a.safetensors", "x"), lora_merge.Adapter(3), lora_merge.Adapter("a.safetensors", None),  # type: ignore[arg-type]
    lora_merge.Adapter("a.safetensors", 1.0, "te"), lora_merge.Adapter("a.safetensors", 1.0, (("te", "x"),)),  # type: ignore[arg-type]
    np.array([1, 2]), torch.zeros(2),
]  # fmt: skip

PATHS: list[Any] = [3, 0, 1.5, True, False, b"base.safetensors", ["base.safetensors"], {}, object(), "a\0b", "a\ud800b"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    save_file({"a.weight": torch.ones(4, 4)}, folder / "base.safetensors")
    save_file({"a.lora_up.weight": torch.ones(4, 1), "a.lora_down.weight": torch.ones(1, 4)}, folder / "a.safetensors")
    return folder


def refused(act: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as e:
        act()
    assert e.value.exit_code == 2
    assert all((e.value.what, e.value.where, e.value.fix))
    assert "\n" not in e.value.what


@pytest.mark.few(12)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(files: Path, options: Mapping[str, Any]) -> None:
    base, adapter, out = files / "base.safetensors", files / "a.safetensors", files / "out.safetensors"
    for call in (lora_merge.plan, lora_merge.merge):
        refused(lambda call=call: call(base, adapter, out, **options))  # type: ignore[misc]
    refused(lambda: lora_merge.merge_state_dict({"a.weight": torch.ones(4, 4)}, adapter, **options))
    assert not out.exists()


@pytest.mark.parametrize("name", ["quiet", "verbose", "report", "html", "plot", "json", "dry_run", "debug"])
def test_options_of_the_command_line(files: Path, name: str) -> None:
    with pytest.raises(UsageError, match="only the command line") as e:
        lora_merge.merge(files / "base.safetensors", files / "a.safetensors", files / "out.safetensors", **{name: True})
    assert ("`plan`" if name == "dry_run" else "to_json") in e.value.fix.written


def test_unknown_option_lists_all_options(files: Path) -> None:
    with pytest.raises(UsageError) as e:
        lora_merge.plan(files / "base.safetensors", files / "a.safetensors", xxxxxxxx=1)
    assert {"strength", "strength_for", "setting", "dtype"} <= {*e.value.fix.replace(",", "").split()}


@pytest.mark.parametrize("name", ["base", "output"])
def test_merge_in_memory_has_no_files(files: Path, name: str) -> None:
    refused(
        lambda: lora_merge.merge_state_dict({"a.weight": torch.ones(4, 4)}, [files / "a.safetensors"], **{name: "x"})
    )


def test_strengths_are_one_per_adapter(files: Path) -> None:
    base, adapter, out = files / "base.safetensors", files / "a.safetensors", files / "new.safetensors"
    plan = lora_merge.plan(base, [adapter, adapter], out, strength=[0.5, -2])
    assert [a.strength for a in plan.job.adapters] == [0.5, -2.0]
    tensors = lora_merge.merge_state_dict({"a.weight": torch.ones(4, 4)}, adapter, strength=(0.5,))
    assert torch.equal(tensors["a.weight"], torch.full((4, 4), 1.5))
    for own in ((adapter, 1.0), lora_merge.Adapter(adapter)):
        with pytest.raises(UsageError, match="twice"):
            lora_merge.plan(base, [own, adapter], out, strength=[0.5, 1])


def test_parts_are_those_that_a_base_may_have(files: Path) -> None:
    """What one message offers, another does not refuse."""
    base, adapter, out = files / "base.safetensors", files / "a.safetensors", files / "new.safetensors"
    with pytest.raises(UsageError, match="this base has model"):
        lora_merge.plan(base, adapter, out, strength_for={"te": 0.5})
    plan = lora_merge.plan(base, adapter, out, strength_for={"model": 0.5})
    assert [u.strength for f in plan.files for t in f.targets for u in t.uses] == [0.5]


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_adapters(files: Path, adapters: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    refused(lambda: lora_merge.merge("base.safetensors", adapters, "out.safetensors"))  # type: ignore[arg-type]
    refused(lambda: lora_merge.merge_state_dict({"a.weight": torch.ones(4, 4)}, adapters))


@pytest.mark.parametrize("path", PATHS)
def test_paths(files: Path, path: Any) -> None:
    base, adapter = files / "base.safetensors", files / "a.safetensors"
    refused(lambda: lora_merge.merge(path, adapter, files / "out.safetensors"))
    refused(lambda: lora_merge.merge(base, adapter, path))
    refused(lambda: lora_merge.load_adapter(path))


@pytest.mark.parametrize("jobs", [None, 3, True, object()])
def test_jobs(jobs: Any) -> None:
    refused(lambda: lora_merge.run_batch(jobs))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "wrong", [{"base": None}, {"adapters": (5,)}, {"output": b"x"}, {"dtype": "x"}, {"max_memory": -1}, {"device": 0}]
)
def test_job_objects_without_make_job(files: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    right = {"base": str(files / "base.safetensors"), "adapters": [str(files / "a.safetensors")]}
    right |= {"output": str(tmp_path / "new.safetensors"), "max_memory": "64MiB", "dtype": torch.bfloat16}
    refused(lambda: lora_merge.run_batch([lora_merge.Job(**{**right, **wrong})]))
    (report,) = lora_merge.run_batch([lora_merge.Job(**right)])  # type: ignore[arg-type]
    assert report.status == "merged"


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "2"},
        {"workers": 0.5},
        {"workers": True},
        {"fail_fast": "x"},
        {"overwrite": 1},
        {"executor": 3},
        {"executor": None},
        {"executor": ["local"]},
        {"executor": np.array(["local", "ray"])},
    ],
)
def test_options_of_a_batch(options: Mapping[str, Any]) -> None:
    refused(lambda: lora_merge.run_batch([], **options))


@pytest.mark.parametrize("held", [None, 3, "base.safetensors", [("a.weight", torch.ones(4, 4))], {3: torch.ones(4, 4)}])
def test_state_dicts(files: Path, held: Any) -> None:
    refused(lambda: lora_merge.merge_state_dict(held, files / "a.safetensors"))


def test_arguments_of_a_loaded_adapter(files: Path) -> None:
    adapter = lora_merge.load_adapter(files / "a.safetensors")
    refused(lambda: adapter.algorithm(3))  # type: ignore[arg-type]
    for one in (adapter, 2 * adapter):
        refused(lambda one=one: one.delta("a", [[1.0]]))


def test_arguments_in_other_spellings(files: Path) -> None:
    """Types of torch, tables for pairs, numbers of any kind."""
    base, adapter = files / "base.safetensors", files / "a.safetensors"
    plan = lora_merge.plan(
        base, [(adapter, torch.tensor(2.0).numpy().item()), (adapter, 1)], files / "new.safetensors",
        dtype=torch.bfloat16, device=torch.device("cpu"), strength_for={"re:a": 2},
    )  # fmt: skip
    assert (plan.job.dtype, plan.job.device) == ("bf16", "cpu")
    assert [u.strength for f in plan.files for t in f.targets for u in t.uses] == [4.0, 2.0]


@pytest.mark.parametrize("workers", ["x", "1.5", "", "-1", "0", "9" * 5000, "١"])
def test_number_of_workers_that_is_none_is_a_usage_error(workers: str, tmp_path: Path) -> None:
    done = run("batch", tmp_path / "jobs.yaml", "--workers", workers)
    assert done.code == UsageError.exit_code
    assert "--workers" in done.err
