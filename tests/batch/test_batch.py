"""Batches: what single merges give, once per job, in the face of failures, other processes and the kill signal."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

import lora_merge
from lora_merge.batch import batch_plan, shared_reads
from lora_merge.batch.report import JobReport
from lora_merge.batch.run import make_batch
from lora_merge.disk import locks as claims
from lora_merge.disk import pages
from lora_merge.disk import writer as disk
from lora_merge.disk.locks import claim_path, claimed
from lora_merge.disk.reader import Reader
from lora_merge.disk.writer import Writer
from lora_merge.engine import patch_tensors as folding
from lora_merge.engine import stages as slots
from lora_merge.engine import window_merger as making
from lora_merge.engine.stages import WindowTask
from lora_merge.engine.tensor_moves import DeviceStream, Placement
from lora_merge.errors import MergeError, ResourceError, UsageError
from lora_merge.files import safetensors as header
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.cost import steps
from tests.kit.files import load, save, strays
from tests.kit.models import sd1_sample
from tests.kit.oracles import assert_rounded, expected
from tests.kit.tensors import rand

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PATIENCE = 300  # seconds after which something hangs, on any machine


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a base and two adapters."""
    base = sd1_sample()
    save(base, tmp_path / "base.safetensors")
    save(kohya(base), tmp_path / "ink.safetensors")
    save(kohya(base, te=False, rank=2, seed=7), tmp_path / "oil.safetensors")
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The same with a few tensors, where many processes make many merges."""
    base = {f"blocks.{n}.weight": rand(64, 64, seed=n) for n in range(6)}
    lora = {f"blocks.{n}.lora_{d}.weight": rand(*s) for n in (0, 3) for d, s in (("up", (64, 4)), ("down", (4, 64)))}
    save(base, tmp_path / "base.safetensors")
    save(lora, tmp_path / "ink.safetensors")
    return tmp_path


def job(models: Path, output: str, *adapters: str, **options: Any) -> dict[str, Any]:
    return {
        "base": str(models / "base.safetensors"), "adapters": [str(models / a) for a in adapters or ("ink.safetensors:0.5",)],
        "output": str(models / "out" / output), **options,
    }  # fmt: skip


def grid(models: Path, count: int, **options: Any) -> list[dict[str, Any]]:
    return [job(models, f"{n}.safetensors", f"ink.safetensors:{n / 8}", **options) for n in range(1, count + 1)]


run = lora_merge.run_batch


def fates(reports: list[JobReport]) -> list[str]:
    return [r.status for r in sorted(reports, key=lambda r: r.number)]


def test_jobs_made_together_on_a_pickle_whose_tensors_are_put_in_order_in_memory(models: Path) -> None:
    """Of such tensors the bytes are at hand, and no part of what tells layouts apart."""
    base = load(models / "base.safetensors")
    turned = next(name for name, value in base.items() if value.ndim == 2)
    base[turned] = base[turned].t().contiguous().t()
    torch.save(base, models / "base.ckpt")
    jobs = [
        {**job(models, f"{n}.safetensors", f"ink.safetensors:{n / 8}"), "base": str(models / "base.ckpt")}
        for n in (1, 2)
    ]
    assert fates(run(jobs)) == ["merged"] * 2
    for n in (1, 2):
        exact = expected(base, [(load(models / "ink.safetensors"), n / 8)])
        got = load(models / "out" / f"{n}.safetensors")
        for key in got:
            assert_rounded(got[key], exact[key])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_jobs_made_together_are_byte_for_byte_what_each_is_alone(models: Path, dtype: str) -> None:
    jobs = [
        job(models, "a", "ink.safetensors:0.5", dtype=dtype), job(models, "b", "ink.safetensors", dtype=dtype),
        job(models, "c", "oil.safetensors:-2", dtype=dtype), job(models, "d", "ink.safetensors:0", dtype=dtype),
        job(models, "e", "oil.safetensors", "ink.safetensors:0.3", dtype=dtype),
    ]  # fmt: skip
    assert fates(run(jobs)) == ["merged"] * 5
    for one, entry in zip(jobs, make_batch(jobs).planned, strict=True):
        alone = replace(entry.entry.job, output=models / "alone.safetensors", overwrite=True)
        lora_merge.merge(alone.base, list(alone.adapters), alone.output, dtype=dtype, overwrite=True)
        assert Path(one["output"] + ".safetensors").read_bytes() == alone.output.read_bytes()
    base, ink, oil = (load(models / f"{n}.safetensors") for n in ("base", "ink", "oil"))
    for name, adapters in (("a", [(ink, 0.5)]), ("e", [(oil, 1.0), (ink, 0.3)])):
        exact = expected(base, adapters)
        for key, got in load(models / "out" / f"{name}.safetensors").items():
            assert_rounded(got, exact[key])
    assert not strays(models)


def test_base_is_read_once_within_the_memory_of_one_merge(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, read, taken = models / "base.safetensors", Counter[str](), [0]
    read_into, aligned = Reader.read_into, pages.aligned_buffer

    def counted(self: Reader, buffer: memoryview, file: Path, offset: int) -> None:
        read[file.name] += len(buffer)
        read_into(self, buffer, file, offset)

    def allocated(size: int) -> memoryview:
        taken[0] += size
        return aligned(size)

    monkeypatch.setattr(Reader, "read_into", counted)
    monkeypatch.setattr(slots, "aligned_buffer", allocated)
    bytes_alone = []
    for count in (1, 6):
        shutil.rmtree(models / "out", ignore_errors=True)
        read.clear()
        taken[0] = 0
        assert fates(run(grid(models, count, verify=False))) == ["merged"] * count
        # One merge hashes ahead of its windows and reads that part twice; several have no need to.
        size = base.stat().st_size
        assert read[base.name] == size if count > 1 else size <= read[base.name] <= 2 * size
        bytes_alone.append(taken[0])
    assert bytes_alone[1] <= 4 * base.stat().st_size + 2**16  # four windows, each at most the whole of this base
    assert bytes_alone[0] > 0


def test_factors_are_prepared_once_for_all_jobs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = [0]
    stage = folding.stage

    def counted(tensors: Sequence[torch.Tensor], at: Placement, lane: DeviceStream | None = None) -> torch.Tensor:
        prepared[0] += lane is None  # with a lane it is the base
        return stage(tensors, at, lane)

    monkeypatch.setattr(folding, "stage", counted)
    needed = []
    for count in (1, 6):
        shutil.rmtree(models / "out", ignore_errors=True)
        prepared[0] = 0
        assert fates(run(grid(models, count, verify=False))) == ["merged"] * count
        needed.append(prepared[0])
    assert needed[0] == needed[1] > 0


def test_second_run_redoes_nothing(models: Path) -> None:
    jobs = grid(models, 3)
    assert fates(run(jobs)) == ["merged"] * 3
    before = {p: p.stat().st_mtime_ns for p in (models / "out").iterdir()}
    assert fates(run(jobs)) == ["skipped"] * 3
    (models / "out" / "2.safetensors").unlink()
    assert fates(run(jobs)) == ["skipped", "merged", "skipped"]
    unchanged = [p for p, t in before.items() if p.stat().st_mtime_ns == t]
    assert len(unchanged) == 2
    (models / "ink.safetensors").rename(models / "renamed.safetensors")
    renamed = [{**j, "adapters": [a.replace("ink", "renamed") for a in j["adapters"]]} for j in jobs]
    assert fates(run(renamed)) == ["skipped"] * 3  # the same by size and hash, whatever it is called


def test_part_in_other_words_is_the_same_recipe(models: Path) -> None:
    for word, fate in (
        ("text_encoder", "merged"),
        ("text_encoder", "skipped"),
        ("te", "skipped"),
        ("clip_l", "skipped"),
    ):
        assert fates(run([job(models, "a.safetensors", strength_for={word: 0.5})])) == [fate]
    assert fates(run([job(models, "a.safetensors", strength_for={"unet": 0.5})])) == ["failed"]


@pytest.mark.few(1)
@pytest.mark.parametrize("change", ["strength", "dtype", "content", "foreign", "truncated", "edited"])
def test_output_of_another_recipe_is_refused_or_with_overwrite_redone(models: Path, change: str) -> None:
    jobs, output = grid(models, 2), models / "out" / "1.safetensors"
    run(jobs)
    if change == "strength":
        jobs[0]["adapters"] = [str(models / "ink.safetensors:0.9")]
    elif change == "dtype":
        jobs[0]["dtype"] = "fp32"
    elif change == "content":
        ink = load(models / "ink.safetensors")
        save({k: t + 1 for k, t in ink.items()}, models / "ink.safetensors")  # same size, other bytes
    elif change == "foreign":
        save({"w": torch.ones(3)}, output)
    elif change == "edited":
        output.write_bytes(output.read_bytes().replace(b"diffusion_model.input", b"diffusion_model.inpux", 1))
    else:
        output.write_bytes(output.read_bytes()[:-5])
    other = 1 if change == "content" else 0
    before = output.read_bytes()
    reports = run(jobs)
    assert fates(reports) == ["failed", "failed" if other else "skipped"]
    assert all(isinstance(r.error, UsageError) and "overwrite=True" in r.error.fix for r in reports if not r.ok)
    assert output.read_bytes() == before
    assert fates(run(jobs, overwrite=True)) == ["merged", "merged" if other else "skipped"]
    assert fates(run(jobs)) == ["skipped"] * 2


@pytest.fixture
def sharded(models: Path) -> Path:
    """The same, the base a folder of two shards with files beside them."""
    tensors = list(sd1_sample().items())
    (models / "base").mkdir()
    for n, some in enumerate((tensors[:9], tensors[9:]), 1):
        save(dict(some), models / "base" / f"model-0000{n}-of-00002.safetensors")
    for name in ("config", "tokenizer"):
        (models / "base" / f"{name}.json").write_text('{"dtype": "float16"}')
    return models


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [
    "out/config.json", "out/tokenizer.json", "base/tokenizer.json", "base/config.json",
    "out/model-00001-of-00002.safetensors", "out/model-00002-of-00002.safetensors",
])  # fmt: skip
def test_folder_that_is_not_as_the_job_would_make_it_is_not_done(sharded: Path, change: str) -> None:
    base = sharded / "base"
    jobs = [{**job(sharded, ".", dtype="bf16"), "base": str(base), "output": str(sharded / "out")}]
    assert fates(run(jobs)) == ["merged"]
    assert fates(run(jobs)) == ["skipped"]
    changed = sharded / change
    if changed.suffix == ".json":
        changed.write_text('{"dtype": "float16", "vocab_size": 3}')
    else:  # the unmerged one
        shutil.copy(base / changed.name, changed)
    (report,) = run(jobs)
    assert isinstance(report.error, UsageError) and "the output exists and" in report.error.what
    assert fates(run(jobs, overwrite=True)) == ["merged"]
    assert fates(run(jobs)) == ["skipped"]
    changed = sharded / "out" / changed.name
    changed.unlink()
    assert fates(run(jobs)) == ["failed"]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 2])
def test_folder_with_a_shard_of_another_merge_is_not_done(sharded: Path, number: int) -> None:
    """The recipe in every shard counts, though only the first names all files of the base."""
    jobs = [
        {**job(sharded, name, lora, dtype="bf16"), "base": str(sharded / "base"), "output": str(sharded / name)}
        for name, lora in (("one", "ink.safetensors"), ("two", "ink.safetensors:0.7"))
    ]
    assert fates(run(jobs)) == ["merged"] * 2
    name = f"model-0000{number}-of-00002.safetensors"
    shutil.copy(sharded / "two" / name, sharded / "one" / name)
    assert sorted(fates(run(jobs))) == ["failed", "skipped"]


def test_failures_stay_in_their_job(models: Path) -> None:
    broken = kohya(sd1_sample(), seed=3)
    next(iter(broken.values()))[0] = float("nan")
    save(broken, models / "nan.safetensors")
    save({"lora_unet_no_such_place.lora_up.weight": rand(4, 2), "lora_unet_no_such_place.lora_down.weight": rand(2, 4)},
         models / "alien.safetensors")  # fmt: skip
    jobs = [
        job(models, "a"), job(models, "b", "nan.safetensors"), job(models, "c", "ink.safetensors:0.7"),
        job(models, "d", "alien.safetensors"), job(models, "e", "missing.safetensors"),
    ]  # fmt: skip
    reports = run(jobs)
    assert fates(reports) == ["merged", "failed", "merged", "failed", "failed"]
    codes = {r.number: r.error.exit_code for r in reports if r.error}
    assert codes == {2: 3, 4: 4, 5: 3}
    assert {r.number for r in reports[:2]} == {4, 5}, "what the plan finds is told before anything is written"
    assert sorted(p.name for p in (models / "out").iterdir()) == ["a.safetensors", "c.safetensors"]
    shutil.rmtree(models / "out")
    quick = run(jobs, fail_fast=True)
    assert [r.status for r in quick] == ["failed"]
    assert not (models / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_shards_cost_one_descriptor_each_however_many_jobs(tmp_path: Path) -> None:
    import resource

    shards, soft = 40, resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "base").mkdir()
    for n in range(shards):
        save({f"layers.{n}.weight": rand(8, 8, seed=n)}, tmp_path / "base" / f"model-{n + 1:05}-of-00040.safetensors")
    table = {f"layers.{n}.weight": f"model-{n + 1:05}-of-00040.safetensors" for n in range(shards)}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    lora = {"layers.3.lora_up.weight": rand(8, 2), "layers.3.lora_down.weight": rand(2, 8)}
    save(lora, tmp_path / "ink.safetensors")
    jobs = [{"base": str(tmp_path / "base"), "adapters": [str(tmp_path / "ink.safetensors")], "output": str(tmp_path / o),
             "device": "cpu"} for o in "abcd"]  # fmt: skip
    used = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + shards // 2, soft[1]))
        with pytest.raises(ResourceError, match="ulimit -n"):
            lora_merge.merge(tmp_path / "base", tmp_path / "ink.safetensors", tmp_path / "one", device="cpu")
        lost = run(jobs)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * shards, soft[1]))
        done = run(jobs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft)
    assert [r.error.exit_code for r in lost if r.error is not None and "ulimit -n" in r.error.fix] == [5] * 4
    assert fates(done) == ["merged"] * 4, done[0].error
    assert strays(tmp_path) == []


def test_disk_may_stumble_twice(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "PAUSE", 0)
    write, left = Writer.write, Counter({"1.safetensors": 2, "2.safetensors": 9})

    def stumbling(self: Writer, data: memoryview, at: int) -> None:
        name = next((n for n in left if n in self.path.name), None)
        if name is not None and left[name] > 0:
            left[name] -= 1
            raise disk.failure(OSError(errno.EIO, "Input/output error"), self.path, 0) from OSError(errno.EIO, "EIO")
        write(self, data, at)

    monkeypatch.setattr(Writer, "write", stumbling)
    reports = run(grid(models, 3))
    assert fates(reports) == ["merged", "failed", "merged"]
    assert {r.number: r.tries for r in reports} == {1: 3, 2: 3, 3: 1}
    assert left["2.safetensors"] == 6
    assert sorted(p.name for p in (models / "out").iterdir()) == ["1.safetensors", "3.safetensors"]


def test_bug_in_one_job_is_reported_and_stays_there(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = making.WindowMerger.begin

    def buggy(self: making.WindowMerger, task: WindowTask) -> None:
        if self.plans[task.plan].job.output.name == "2.safetensors":
            raise ZeroDivisionError("planted")
        make(self, task)

    monkeypatch.setattr(making.WindowMerger, "begin", buggy)
    reports = run(grid(models, 3))
    assert fates(reports) == ["merged", "failed", "merged"]
    error = next(r.error for r in reports if r.error)
    assert "ZeroDivisionError: planted" in error.what
    assert "buggy" in error.fix, "the traceback"


@pytest.mark.parametrize(
    ("second", "word"),
    [
        ("one", "output of another job"),
        ("x/../one", "output of another job"),
        ("one.safetensors/inside", "inside the output"),
    ],
)
def test_two_jobs_with_one_output_are_refused(models: Path, second: str, word: str) -> None:
    with pytest.raises(UsageError, match="with the output of another") as caught:
        run([job(models, "one"), job(models, second, "oil.safetensors")])
    assert word in f"{caught.value.what} {caught.value.where}"


@pytest.mark.parametrize("name", ["overwrite", "redo"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_switch_of_a_batch_is_true_or_false(models: Path, name: str, value: object) -> None:
    """Text such as "no" would count as on, and a job with its own answer would hide it."""
    with pytest.raises(UsageError, match=name):
        make_batch([job(models, "one", overwrite=True)], **{name: value})  # type: ignore[arg-type]
    assert not list(models.glob("out/*"))


def test_outputs_that_differ_in_case_are_one_where_the_disk_says_so(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(models, "one"), job(models, "ONE")]
    assert len(make_batch(jobs).planned) == 2
    monkeypatch.setattr(batch_plan, "ignores_case", lambda _: True)
    with pytest.raises(UsageError, match="with the output of another"):
        make_batch(jobs)


def test_outputs_that_are_inputs_are_made_first(models: Path) -> None:
    last = {**job(models, "last", "oil.safetensors:0.5"), "base": str(models / "out" / "first")}
    reports = run([last, job(models, "first", dtype="fp32")])
    assert [(r.number, r.status) for r in reports] == [(2, "merged"), (1, "merged")]
    base, ink, oil = (load(models / f"{n}.safetensors") for n in ("base", "ink", "oil"))
    exact = expected(base, [(ink, 0.5), (oil, 0.5)])
    for key, got in load(models / "out" / "last.safetensors").items():
        assert got.dtype in (torch.float32, torch.int64)
        assert_rounded(got, exact[key])
    assert fates(run([last, job(models, "first", dtype="fp32")])) == ["skipped"] * 2


@pytest.mark.slow
def test_chain_of_a_thousand_jobs_is_planned(models: Path) -> None:
    jobs = [job(models, str(n), base=str(models / "out" / str(n - 1))) for n in range(1, 1050)]
    planned = make_batch([job(models, "0", dtype="fp32"), *jobs]).planned
    assert [s.level for s in planned] == list(range(1050))  # more than Python calls within calls
    assert len({s.size for s in planned}) == 1 and all(s.error is None for s in planned)


def test_job_whose_base_was_not_made_fails_too(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = {**job(models, "last", "oil.safetensors"), "base": str(models / "out" / "first")}
    broken = kohya(sd1_sample(), seed=3)
    next(iter(broken.values()))[0] = float("inf")
    save(broken, models / "inf.safetensors")
    assert fates(run([last, job(models, "first", "inf.safetensors")])) == ["failed", "failed"]
    assert fates(run([last, job(models, "first", "missing.safetensors")])) == ["failed", "failed"]
    assert not strays(models)


def test_circles_and_outputs_as_adapters_are_refused(models: Path) -> None:
    a = {**job(models, "a"), "base": str(models / "out" / "b")}
    b = {**job(models, "b"), "base": str(models / "out" / "a")}
    with pytest.raises(UsageError, match="wait for each other"):
        run([a, b, job(models, "c")])
    with pytest.raises(UsageError, match="its own base"):
        run([{**job(models, "x"), "output": str(models / "base.safetensors"), "overwrite": True}])
    reports = run([job(models, "a"), job(models, "c", "out/a")])
    assert fates(reports) == ["merged", "failed"]
    assert any(r.error and "adapter is the output" in r.error.what for r in reports)


@pytest.mark.parametrize("name", ["ink.safetensors", "hard.safetensors"])
def test_adapter_is_never_replaced(models: Path, name: str) -> None:
    os.link(models / "oil.safetensors", models / "hard.safetensors")
    jobs = [
        job(models, f"../{name}", "oil.safetensors", "ink.safetensors", overwrite=True),
        job(models, "a", "oil.safetensors"),
    ]
    before = (models / name).read_bytes()
    reports = run(jobs)
    assert fates(reports) == ["failed", "merged"]
    assert isinstance(reports[0].error, UsageError)
    why = (
        "would replace the base, an adapter"
        if name == "hard.safetensors"
        else "an adapter is the output of another job"
    )
    assert why in reports[0].error.what
    assert (models / name).read_bytes() == before


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        ({"adapters": ["oil.safetensors"]}, "oil.safetensors"),
        ({"adapters": ["hard.safetensors"]}, "oil.safetensors"),
        ({"adapters": ["link.safetensors"]}, "oil.safetensors"),
        ({"adapters": ["oil.safetensors"]}, "link.safetensors"),
        ({"base": "other.safetensors"}, "other.safetensors"),
        ({"base": "missing.safetensors", "adapters": ["oil.safetensors"]}, "oil.safetensors"),
        ({"command": "resize", "rank": 2, "adapters": ["oil.safetensors"]}, "oil.safetensors"),
        ({"command": "extract", "rank": 2, "base": "other.safetensors", "adapters": ["base.safetensors"]},
         "other.safetensors"),
        ({"base": "model"}, "model/unet/diffusion_pytorch_model.safetensors"),
        ({"base": "model"}, "blob.safetensors"),
        ({"base": "model"}, "model/unet/new.safetensors"),
        ({"command": "extract", "rank": 2, "base": "base.safetensors", "adapters": ["model"]}, "model/new.safetensors"),
        ({"adapters": ["peft"]}, "peft/adapter_model.safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
@pytest.mark.parametrize("order", [1, -1])
def test_no_job_replaces_what_another_job_reads(
    models: Path, reads: dict[str, Any], writes: str, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever name, whether the reader can run or not, and in either order; nothing runs then."""
    shutil.copy(models / "base.safetensors", models / "other.safetensors")
    os.link(models / "oil.safetensors", models / "hard.safetensors")
    (models / "link.safetensors").symlink_to("oil.safetensors")
    for folder, config in (("model/unet", "config.json"), ("peft", "adapter_config.json")):
        (models / folder).mkdir(parents=True)
        (models / folder / config).write_text("{}")
    (models / "model" / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    save({"a.weight": rand(4, 4)}, models / "blob.safetensors")
    (models / "model/unet/diffusion_pytorch_model.safetensors").symlink_to("../../blob.safetensors")
    save({"a.lora_A.weight": rand(2, 4)}, models / "peft/adapter_model.safetensors")
    monkeypatch.chdir(models)
    reader = {"base": "base.safetensors", "adapters": ["ink.safetensors"], "output": "x.safetensors", **reads}
    writer = {"base": "base.safetensors", "adapters": ["ink.safetensors"], "output": writes}
    before = {file: file.read_bytes() for file in models.rglob("*") if file.is_file()}
    with pytest.raises(UsageError, match="with inputs of other jobs") as caught:
        run([reader, writer][::order], overwrite=True)
    where = [f"jobs[{n}]" for n in range(2)][::order]
    assert all(name in str(caught.value.where) for name in where)
    assert {file: file.read_bytes() for file in models.rglob("*") if file.is_file()} == before


def test_base_is_replaced_for_the_jobs_that_read_it_where_it_is_of_an_earlier_run(models: Path) -> None:
    jobs = [job(models, "first"), {**job(models, "last", "oil.safetensors"), "base": str(models / "out" / "first")}]
    assert fates(run(jobs)) == ["merged"] * 2
    changed = [{**jobs[0], "adapters": [str(models / "ink.safetensors:0.25")]}, jobs[1]]
    assert fates(run(changed, overwrite=True)) == ["merged"] * 2
    shutil.copy(models / "base.safetensors", models / "out" / "first.safetensors")
    with pytest.raises(UsageError, match="with inputs of other jobs"):
        run(changed, overwrite=True)


def test_disk_must_hold_all_jobs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = make_batch(grid(models, 1)).size
    monkeypatch.setattr(disk, "free_bytes", lambda _: int(2.5 * size))
    assert fates(run(grid(models, 2))) == ["merged"] * 2
    shutil.rmtree(models / "out")
    with pytest.raises(ResourceError, match="no space"):
        run(grid(models, 3))
    assert not (models / "out").exists()
    [[some, room]] = batch_plan.disk_rooms(make_batch(grid(models, 3)).planned, 1)
    assert (len(some), room.needed, room.enough) == (3, 3 * size, False)


@pytest.mark.slow
def test_planning_a_job_takes_few_steps(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand are planned in 5 s. A first batch loads modules and tables; names are relative, as each level of a
    folder takes steps."""
    opened = Counter[str]()
    parse = header.parse_file
    monkeypatch.chdir(models)

    def counted(path: Path) -> header.Header:
        opened[path.name] += 1
        return parse(path)

    monkeypatch.setattr("lora_merge.files.checkpoint.parse_file", counted)

    def plan(count: int) -> None:
        opened.clear()
        planned = make_batch({"version": 1, "jobs": [{
            "base": "base.safetensors", "adapters": [{"path": "{a}.safetensors", "strength": "{s}"}],
            "dtype": dtype, "matrix": {"a": ["ink", "oil"], "s": [n / 1000 for n in range(count // 4)]},
            "output": f"out/{dtype}/{{a}}-{{s}}",
        } for dtype in ("keep", "bf16")]})  # fmt: skip
        assert len(planned.planned) == count
        assert all(s.runs for s in planned.planned)
        assert opened == {"base.safetensors": 1, "ink.safetensors": 1, "oil.safetensors": 1}

    plan(4)
    few, many = (steps(lambda count=count: plan(count)) for count in (100, 400))
    assert (many - few) / 300 < 2000  # 1830


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[float]:
    """Gets an item whenever somebody has looked in vain for a claim to be free."""
    queue: SimpleQueue[float] = SimpleQueue()
    monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=lambda s, sleep=time.sleep: (queue.put(s), sleep(s))))
    return queue


def begun(jobs: Any, **options: Any) -> tuple[threading.Thread, SimpleQueue[JobReport]]:
    """A batch in a thread of its own, and its reports as they come."""
    reports: SimpleQueue[JobReport] = SimpleQueue()
    thread = threading.Thread(target=lambda: run(jobs, on_report=reports.put, **options))
    thread.start()
    return thread, reports


def test_output_that_another_process_makes_is_waited_for(models: Path, looks: SimpleQueue[float]) -> None:
    with claimed(models / "out" / "1.safetensors") as ours:
        assert ours
        thread, reports = begun(grid(models, 2))
        first = reports.get(timeout=PATIENCE)
        for _ in range(2):
            looks.get(timeout=PATIENCE)
        assert reports.empty()
    thread.join(PATIENCE)
    assert first.number == 2
    assert fates([first, reports.get_nowait()]) == ["merged"] * 2
    assert not strays(models)


def test_process_that_is_interrupted_takes_no_folder_from_those_that_wait(
    models: Path, looks: SimpleQueue[float]
) -> None:
    """It removes the folder that it made, with what waits for its claim."""
    output = models / "out" / "deep" / "1.safetensors"
    with claimed(output) as ours:
        assert ours
        assert output.parent.is_dir()
        thread, reports = begun([job(models, "deep/1.safetensors")])
        looks.get(timeout=PATIENCE)
    thread.join(PATIENCE)
    report = reports.get_nowait()
    assert report.status == "merged", report.error
    assert not strays(models)


def test_claim_timeout_leaves_no_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = models / "out" / "deep" / "1.safetensors"
    with claimed(output):
        monkeypatch.setattr(claims.time, "sleep", lambda _: shutil.rmtree(models / "out") or sys.exit(1))
        with pytest.raises(SystemExit), claimed(output, wait=True):
            pass
    assert not (models / "out").exists()


def test_folder_that_is_removed_again_and_again_is_reported(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.time, "sleep", lambda _: None)
    monkeypatch.setattr(claims, "_acquire", lambda path: path.with_name("none").read_bytes())
    with pytest.raises(MergeError, match="No such file"), claimed(models / "out" / "1.safetensors"):
        pass
    assert not (models / "out").exists()


def test_folder_that_cannot_be_read_is_the_failure_of_its_job(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models / "out" / "closed").mkdir(parents=True)
    iterdir = Path.iterdir

    def refused(self: Path) -> Iterator[Path]:
        if self.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refused)
    reports = run([job(models, "closed/1.safetensors"), job(models, "2.safetensors")])
    assert fates(reports) == ["failed", "merged"]
    error = next(r.error for r in reports if r.status == "failed")
    assert error is not None
    assert "Permission denied" in error.what


def test_output_that_the_system_refuses_to_look_at_is_the_failure_of_its_job(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def refused(self: Path, **options: Any) -> os.stat_result:
        if "closed" in self.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refused)
    outputs = ["o" * 300, "closed/a", "closed/A", "fine"]
    entry = "  - {base: base.safetensors, adapters: [ink.safetensors], output: out/%s.safetensors}\n"
    (models / "jobs.yaml").write_text("version: 1\njobs:\n" + "".join(entry % name for name in outputs))
    reports = run(models / "jobs.yaml")
    assert fates(reports) == ["failed"] * 3 + ["merged"]
    whats = [r.error.what for r in reports if r.error is not None]
    assert ["too long" in w or "Permission denied" in w for w in whats] == [True] * 3, whats


def test_paths_may_be_given_as_such(models: Path) -> None:
    one = {
        "base": models / "base.safetensors",
        "adapters": [models / "ink.safetensors", {"path": models / "oil.safetensors"}],
    }
    more = one | {"output": models / "{n}", "matrix": {"n": [Path("a"), Path("b")]}}
    done = lora_merge.run_batch([more])
    assert [Path(r.output).name for r in done if r.ok] == ["a.safetensors", "b.safetensors"]


@pytest.mark.slow
def test_names_of_files_are_completed(models: Path) -> None:
    one = {"base": str(models / "base"), "adapters": [str(models / "ink:0.5")], "output": str(models / "v1.5")}
    two = {"command": "resize", "adapters": [str(models / "ink")], "rank": 2, "output": str(models / "small")}
    reports = run([one, two])
    assert [Path(r.output).name for r in reports] == ["v1.5.safetensors", "small.safetensors"]
    assert fates(reports) == ["merged", "made"] and fates(run([one, two])) == ["skipped"] * 2
    reports = run([{**two, "output": str(models / "x")}, job(models, "y", "x")])
    assert "an adapter is the output of another job" in str(next(r.error for r in reports if r.error))


def test_call_returns_when_all_jobs_have_ended(models: Path) -> None:
    """A job that fails does not raise; a mistake of the file as a whole does, and writes nothing."""
    told: list[JobReport] = []
    jobs = [*grid(models, 2), job(models, "x", "missing.safetensors")]
    reports = run(jobs, on_report=told.append)
    assert told == reports
    assert fates(reports) == ["merged", "merged", "failed"]
    assert "file not found" in str(next(r.error for r in reports if r.status == "failed"))
    assert len(list((models / "out").iterdir())) == 2
    with pytest.raises(UsageError):
        run([{"base": 1}], on_report=told.append)
    assert len(told) == 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_the_program_and_leaves_nothing_unfinished(small: Path, workers: int) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where the shell ignores it
    )
    code += f"import lora_merge\nlora_merge.run_batch({grid(small, 60)!r}, workers={workers})"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (small / "out" / "3.safetensors").exists():
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE) in (1, -signal.SIGINT)
    made = list((small / "out").iterdir())
    assert 0 < len(made) < 60
    assert not strays(small)
    assert set(fates(run([job for job in grid(small, 60) if Path(job["output"]) in made]))) == {"skipped"}


@pytest.mark.few(1)
@pytest.mark.parametrize("exception", [KeyboardInterrupt, ValueError])
def test_exception_at_a_report_ends_the_call_and_leaves_nothing_unfinished(
    models: Path, monkeypatch: pytest.MonkeyPatch, exception: type[BaseException]
) -> None:
    """Whether Ctrl-C arrives there, or the caller's function fails: also the claims of jobs under way are gone."""
    monkeypatch.setattr("lora_merge.batch.run.JOBS_TOGETHER", 2)

    def refuse(report: JobReport) -> None:
        assert report.status == "merged"
        assert any(p.suffix == ".claim" for p in (models / "out").iterdir()), "the other job is under way"
        raise exception

    with pytest.raises(exception):
        run(grid(models, 9), on_report=refuse)
    assert [p.name for p in (models / "out").iterdir()] == ["1.safetensors"]
    assert fates(run(grid(models, 3))) == ["skipped", "merged", "merged"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["merge", "run_batch"])
def test_ctrl_c_after_any_system_call_leaves_whole_outputs_and_nothing_else(
    small: Path, call: str, request: pytest.FixtureRequest
) -> None:
    """Also between making a file and noting that it is there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    output = small / "out" / "deep" / "1.safetensors"

    def act() -> None:
        shutil.rmtree(small / "out", ignore_errors=True)
        if call == "run_batch":
            run([job(small, "deep/1.safetensors")])
        else:
            lora_merge.merge(small / "base.safetensors", [(small / "ink.safetensors", 0.5)], output)

    act()
    whole, fates = output.read_bytes(), Counter[bool]()
    for step in range(1, interrupted(act, 0)):
        with pytest.raises(KeyboardInterrupt):
            interrupted(act, step)
        left = [p for p in small.rglob("out/**/*") if p != output.parent]
        assert left in ([], [output]), step
        assert not left or output.read_bytes() == whole
        fates[bool(left)] += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fates[True] >= 2 and fates[False] > 10, fates


CALLS: Final = frozenset({"open", "close", "mkdir", "link", "rename", "replace", "unlink", "flock"})


def interrupted(act: Callable[[], None], step: int) -> int:
    """Run it and interrupt it when one of `CALLS` returns, if a step is given; returns the number of steps + 1."""
    steps, making = itertools.count(1), False

    def count(_frame: Any, event: str, called: Any) -> None:
        nonlocal making
        if event == "c_return" and getattr(called, "__module__", "") in ("posix", "nt", "fcntl"):
            making = making or called.__name__ == "mkdir"  # what was read before cannot be left behind
            if making and called.__name__ in CALLS and next(steps) == step:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return next(steps)


def test_remains_of_dead_processes_are_removed(models: Path) -> None:
    jobs = grid(models, 2)
    run(jobs)
    claim_path(models / "out" / "1.safetensors").write_text("host:1\n")
    part = models / "out" / ".1.safetensors.0123456789ab.lora-merge.part"
    part.write_bytes(b"half")
    assert fates(run(jobs)) == ["skipped"] * 2
    assert not strays(models)


def test_claim_that_another_user_left_is_taken_over(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read, not written; while that user holds it, it counts."""
    jobs, really = grid(models, 1), os.open
    claim = claim_path(Path(jobs[0]["output"]))
    claim.parent.mkdir()
    claim.write_text("host:1\n")

    def refused(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if Path(path) == claim and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr("lora_merge.batch.run.sweep", lambda _: None)
    with claimed(Path(jobs[0]["output"])) as ours, claimed(Path(jobs[0]["output"])) as again:
        assert (ours, again) == (True, False)
    claim.write_text("host:1\n")
    assert fates(run(jobs)) == ["merged"]
    assert not strays(models)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_claim_is_never_written_through_a_link(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to the folder could have any file emptied that the batch may write to."""
    jobs, other = grid(models, 1), models / "other"
    other.write_text("of somebody else")
    claim = claim_path(Path(jobs[0]["output"]))
    claim.parent.mkdir()
    claim.symlink_to(other)
    monkeypatch.setattr("lora_merge.batch.run.sweep", lambda _: None)
    (report,) = run(jobs)
    assert (report.status, other.read_text()) == ("failed", "of somebody else")
    monkeypatch.undo()
    assert fates(run(jobs)) == ["merged"]
    assert not strays(models) and other.read_text() == "of somebody else"


def _run_in_child(jobs: list[dict[str, Any]], lines: str, together: int, last: int = 0) -> None:
    """Reports go to a file, the number of Python's calls to another; killed at the `last` of those, if given."""
    steps = _killed_at(last)
    batch_plan.JOBS_TOGETHER = together
    for name in ("lora_merge.batch.run", "lora_merge.batch.batch_plan"):
        sys.modules[name].TOGETHER = together  # type: ignore[attr-defined]
    with Path(lines).open("a", encoding="utf-8") as f:
        lora_merge.run_batch(jobs, on_report=lambda report: print(report.to_json(), file=f, flush=True))
    Path(f"{lines}.steps").write_text(str(next(steps)))


def _killed_at(last: int) -> Iterator[int]:
    """Steps instead of seconds, which would be another machine's: counts the calls in all threads from here on."""
    steps = itertools.count(1)

    def count(_frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
    return steps


@pytest.mark.slow
def test_two_processes_share_the_work(small: Path, children: Any) -> None:
    jobs = grid(small, 12)
    running = [children.Process(target=_run_in_child, args=(jobs, str(small / f"{n}.jsonl"), 2)) for n in range(2)]
    for child in running:
        child.start()
    for child in running:
        child.join()
    reports = [[json.loads(t) for t in (small / f"{n}.jsonl").read_text().splitlines()] for n in range(2)]
    statuses = Counter(r["status"] for some in reports for r in some)
    assert statuses == {"merged": 12, "skipped": 12}
    assert not strays(small)


def test_job_that_another_process_finishes_during_the_survey_is_skipped(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = jobs = grid(small, 1)
    check = batch_plan.check_output

    def meanwhile(output: Path, *args: Any, **options: Any) -> None:
        lora_merge.merge(one["base"], [(small / "ink.safetensors", 1 / 8)], output)
        check(output, *args, **options)

    monkeypatch.setattr(batch_plan, "check_output", meanwhile)
    assert fates(run(jobs)) == ["skipped"]


@pytest.mark.slow
def test_run_killed_at_random_moments_is_finished_by_the_next(small: Path, children: Any) -> None:
    jobs, out = grid(small, 6, device="cpu"), small / "out"

    def child(last: int = 0) -> None:
        process = children.Process(target=_run_in_child, args=(jobs, str(small / "lines"), 2, last))
        process.start()
        process.join()

    child()
    wanted, steps = {p.name: p.read_bytes() for p in out.iterdir()}, int((small / "lines.steps").read_text())
    assert len(wanted) == 6
    moments, chance = Counter[int](), random.Random(6)
    for moment in range(12):
        shutil.rmtree(out, ignore_errors=True)
        child(int(steps * ((moment + chance.random()) / 12) ** 0.5))  # most of them late, as the outputs come
        there = made(out)
        moments[len(there)] += 1
        reports = run(jobs)
        assert {r.status for r in reports} <= {"merged", "skipped"}
        assert {Path(r.output).name for r in reports if r.status == "skipped"} == set(there), "redoes nothing"
        assert {p.name: p.read_bytes() for p in out.iterdir()} == wanted, "finishes the rest, leaves no stray file"
        assert all((out / n).stat().st_mtime_ns == s.st_mtime_ns for n, s in there.items())
    assert len(moments) > 2, "the moments were spread over the run"


@pytest.mark.slow
def test_jobs_of_a_killed_process_are_taken_over(small: Path, children: Any) -> None:
    jobs, out, chance, steps, killed = grid(small, 6), small / "out", random.Random(8), 0, 0
    wanted = {f"{n}.safetensors" for n in range(1, 7)}
    for moment in range(7):  # the first time nobody is killed
        shutil.rmtree(out, ignore_errors=True)
        last = int(steps * (moment - chance.random()) / 6)
        pair = [
            children.Process(target=_run_in_child, args=(jobs, str(small / f"{moment}-{n}"), 2, (last, 0)[n]))
            for n in range(2)
        ]
        for process in pair:
            process.start()
        for process in pair:
            process.join()
        assert pair[1].exitcode == 0
        killed += pair[0].exitcode == -signal.SIGKILL
        steps = steps or int((small / f"{moment}-0.steps").read_text())
        reports = [json.loads(t) for t in (small / f"{moment}-1").read_text().splitlines()]
        assert sorted(r["number"] for r in reports) == [1, 2, 3, 4, 5, 6]
        assert {r["status"] for r in reports} <= {"merged", "skipped"}
        # The part of a job that was killed may be left beside an output that is not made again: the next run removes it.
        run(jobs)
        assert {p.name for p in out.iterdir()} == wanted
    assert killed


@pytest.mark.slow
@pytest.mark.parametrize("who", ["parent", "group"])
def test_batch_with_workers_is_killed_and_finished_by_the_next(small: Path, who: str) -> None:
    lines = "\n".join(json.dumps(j) for j in grid(small, 12))
    (small / "jobs.yaml").write_text("version: 1\njobs:\n" + "".join(f"- {line}\n" for line in lines.splitlines()))
    command = [sys.executable, "-m", "lora_merge", "batch", str(small / "jobs.yaml"), "--workers", "2"]
    chance = random.Random(9)
    for _ in range(5):
        shutil.rmtree(small / "out", ignore_errors=True)
        first = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        time.sleep(chance.uniform(0.5, 4))
        there = made(small / "out")
        if who == "parent":
            first.kill()
        else:
            os.killpg(first.pid, signal.SIGTERM)
        first.communicate(timeout=PATIENCE)  # its workers hold the pipes until they have ended as well
        if who == "group":
            assert first.returncode in (0, 143)
            assert not strays(small)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(p.name for p in (small / "out").iterdir()) == sorted(f"{n}.safetensors" for n in range(1, 13))
        assert all((small / "out" / n).stat().st_mtime_ns == s.st_mtime_ns for n, s in there.items())


def made(out: Path) -> dict[str, os.stat_result]:
    """The outputs that are there."""
    return {p.name: p.stat() for p in out.glob("[!.]*")}


def test_batch_command(models: Path) -> None:
    (models / "jobs.yaml").write_text("""\
version: 1
defaults: {base: base.safetensors}
jobs:
  - {adapters: ["{a}:{s}"], matrix: {a: [ink.safetensors, oil.safetensors], s: [0.5, 1.0]}, output: "out/{a.stem}-{s}"}
  - {adapters: [inkk.safetensors], output: out/x}
""")
    command = ["batch", str(models / "jobs.yaml")]
    dry = command_line.run(*command, "--dry-run")
    assert "would write" in dry.out
    assert re.search(r"4 to run \((.*) to write\)(?s:.*)disk     .*/out: \1 needed, .* free", dry.out)
    assert "cannot run" in dry.out
    assert not (models / "out").exists()
    done = command_line.run(*command, "--report", str(models / "report.jsonl"))
    assert done.code == 7
    assert "did you mean ink.safetensors" in done.out
    assert "jobs.yaml:5" in done.out
    assert done.out.count("] merged  ") == 4
    lines = [json.loads(t) for t in (models / "report.jsonl").read_text().splitlines()]
    assert Counter(one["status"] for one in lines) == {"merged": 4, "failed": 1}
    assert all(one["report"]["written"] > 0 for one in lines if one["status"] == "merged")
    again = command_line.run(*command, "--json")
    assert Counter(json.loads(t)["status"] for t in again.out.splitlines()[:5]) == {"skipped": 4, "failed": 1}
    told = command_line.run(*command, "--dry-run", "--json")
    assert Counter(json.loads(t)["status"] for t in told.out.splitlines()[:5]) == {"done": 4, "failed": 1}
    quiet = command_line.run(*command, "--dry-run", "-q", "--report", str(models / "dry.jsonl"))
    assert (models / "dry.jsonl").read_text().splitlines() == told.out.splitlines()[:5]
    assert quiet.out.startswith("[5/5] cannot run") and "[4/5]" not in quiet.out
    over = command_line.run(*command, "--dry-run", "--report", str(models / "base.safetensors"))
    assert "over an input" in over.err
    told = (json.loads(command_line.run(*line).out) for line in (["batch", "--schema"], ["schema", "jobs"]))
    assert next(told) == next(told)
    assert command_line.run("batch").code == 2
    assert command_line.run(*command, "--executor", "slurm").code == 2
    assert command_line.run(*command, "--workers", "0").code == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_files_in_configs_work(models: Path, path: Path) -> None:
    shutil.copy(path, models)
    for folder, names in {
        "models": {"base": "base"}, "loras": {"style": "ink", "detail": "oil"},
        "customers": dict.fromkeys(("acme", "globex", "initech", "umbrella"), "ink"),
    }.items():  # fmt: skip
        (models / folder).mkdir()
        for name, source in names.items():
            shutil.copy(models / f"{source}.safetensors", models / folder / f"{name}.safetensors")
    reports = run(models / path.name)
    expected_jobs = {"one-merge": 1, "strength-grid": 5, "many-customers": 4, "folder-of-adapters": 2}
    assert fates(reports) == ["merged"] * expected_jobs[path.stem]
    for report in reports:
        assert report.report is not None
        assert report.report.verified is not None
        assert load(Path(report.output))
    if path.stem == "many-customers":
        merged, base = load(models / "out" / "umbrella.safetensors"), load(models / "base.safetensors")
        ink, oil = load(models / "ink.safetensors"), load(models / "oil.safetensors")
        te = [k for k in base if k.startswith("cond_stage") and "q_proj" in k]
        assert te
        for key in te:
            assert_rounded(merged[key], expected(base, [(ink, 1.0)])[key])
        assert oil


def test_four_configs_are_shipped() -> None:
    assert len(list(CONFIGS.glob("*.yaml"))) == 4


@pytest.mark.few(2)
@pytest.mark.parametrize("broken", [{1}, {3}, {1, 3}, {1, 2, 3}])
def test_quiet_plan_names_every_job_that_cannot_run_and_no_other(models: Path, broken: set[int]) -> None:
    """Its number, its output, and what, where and fix of its own error; a plan that speaks has all jobs besides."""
    jobs = [
        {"adapters": [f"gone-{n}.safetensors" if n in broken else "ink.safetensors"], "output": f"out/made-{n}"}
        for n in (1, 2, 3)
    ]
    text = json.dumps({"version": 1, "defaults": {"base": "base.safetensors"}, "jobs": jobs})
    (models / "jobs.yaml").write_text(text)
    command = ["batch", str(models / "jobs.yaml"), "--dry-run"]
    quiet, loud = (command_line.run(*command, *how) for how in (["-q"], []))
    assert quiet.code == loud.code == 7
    for text, shown in ((quiet.out, broken), (loud.out, {1, 2, 3})):
        told = dict(zip(*[iter(re.split(r"^\[(\d)/3\] ", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
        assert {*map(int, told)} == shown
        for number, lines in told.items():
            fails = int(number) in broken
            assert lines.startswith("cannot run  " if fails else "would write ")
            assert f"made-{number}" in lines.splitlines()[0]
            for part in ("    error: file not found", f"    \\s*where: .*gone-{number}.safetensors", "    \\s*fix: "):
                assert bool(re.search(part, lines)) == fails, (part, lines)
            assert not any(f"gone-{other}" in lines for other in {1, 2, 3} - {int(number)})
