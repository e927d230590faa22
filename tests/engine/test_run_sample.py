"""What is seen of windows on a device: runs of numbers, from which the sums of each weight follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine import change_sample
from lora_merge.engine.change_sample import Sampling
from tests.kit.files import load, save
from tests.kit.pretended_cuda import Pretended
from tests.kit.tensors import rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")

SIZES = {"a": (384, 320), "b": (300, 331), "small": (40, 80), "c": (512, 256), "wide": (8, 40000)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Weights of many and of few numbers, some of another dtype, one after another; runs lie across their ends."""
    folder = tmp_path_factory.mktemp("strided")
    kinds = (torch.bfloat16, torch.float32)
    base = {f"{n}.weight": rand(*s, seed=k).to(kinds[n == "c"]) for k, (n, s) in enumerate(SIZES.items())}
    adapter = {}
    for k, (name, (out, cols)) in enumerate(SIZES.items()):
        adapter[f"{name}.lora_up.weight"] = rand(out, 4, seed=k, scale=0.05)
        adapter[f"{name}.lora_down.weight"] = rand(4, cols, seed=k + 9, scale=0.05)
    return save(base, folder / "b"), save(adapter, folder / "a")


def on_cpu(files: tuple[Path, Path], out: Path, patched: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """The numbers of each tensor that a merge on the CPU sees where all rows are looked at."""
    with patched.context() as own:
        own.setattr(Sampling.__init__, "__defaults__", (1, 1, False, frozenset()))
        report = lora_merge.merge(files[0], [(files[1], 0.7)], out, device="cpu", overwrite=True, **options)
    found: dict[str, Any] = report.numbers["tensors"]
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "keep"), ("cpu", "fp16"), ("cuda", "keep"), ("cuda", "fp16")])
def test_sums_of_all_runs_are_exact(
    *, device: str, dtype: str, files: tuple[Path, Path], tmp_path: Path, cuda: Pretended,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where each run is looked at, all numbers are, but for runs that lie across the end of a weight."""
    monkeypatch.setattr(change_sample, "PERIOD", change_sample.RUN)
    monkeypatch.setattr(change_sample, "LEAST_BLOCK", 2 * change_sample.RUN)
    monkeypatch.setattr(change_sample, "RUN_VALUES", 2**17)  # added up while windows are merged, and at their end
    got: dict[str, Any] = {}
    if device == "cpu":  # in memory, where no proof wants rows
        options: Any = {"device": "cpu", "dtype": dtype, "numbers": got}
        lora_merge.merge_state_dict(load(files[0]), [(files[1], 0.7)], **options)
    else:
        got |= lora_merge.merge(files[0], [(files[1], 0.7)], tmp_path / "got", device="cuda", dtype=dtype).numbers
    assert bool(cuda.counts["up"]) is (device == "cuda")
    for name, want in on_cpu(files, tmp_path / "want", monkeypatch, dtype=dtype).items():
        one, near = got["tensors"][name], 0.15 if name == "small.weight" else 0.01
        assert one["of"] == one["elements"] + missing(want, one) == want["of"]
        for key in ("weight", "change", "retained", "noise", "largest", "changed"):
            assert one[key] == pytest.approx(want[key], rel=near, abs=1e-5), (name, key)
        assert one["adapters"][0]["change"] == pytest.approx(want["adapters"][0]["change"], rel=near)


def missing(want: dict[str, Any], got: dict[str, Any]) -> int:
    """How many numbers were not looked at: those of at most two runs, at the ends of the weight."""
    left: int = want["elements"] - got["elements"]
    assert 0 <= left <= 2 * change_sample.RUN
    return left


def test_sample_of_runs_is_near_the_sums_of_all(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few operations see the large weights, whatever their number; rows of small ones are looked at."""
    report = lora_merge.merge(files[0], [(files[1], 0.7)], tmp_path / "got", device="cuda")
    want, got = on_cpu(files, tmp_path / "want", monkeypatch), report.numbers["tensors"]
    assert {*got} == {*want}
    for name, one in got.items():
        assert one["of"] == want[name]["of"]
        least = change_sample.RUN * (one["of"] // change_sample.PERIOD - 1)
        assert max(least, 1) <= one["elements"] <= max(2 * one["of"] // 64, 2**13)
        assert one["change"] == pytest.approx(want[name]["change"], rel=0.5), name
    assert report.verified is not None
    assert not report.verified["warnings"]


def test_runs_whose_squares_are_too_large_are_left_out(tmp_path: Path, cuda: Pretended) -> None:
    weight = rand(512, 256)
    weight[: 2 * change_sample.PERIOD // 256] = 1e30
    lora = {"c.lora_up.weight": rand(512, 4, seed=1), "c.lora_down.weight": rand(4, 256, seed=2)}
    paths = save({"c.weight": weight}, tmp_path / "b"), save(lora, tmp_path / "a")
    one = lora_merge.merge(*paths, tmp_path / "got", device="cuda").numbers["tensors"]["c.weight"]
    assert one["elements"] == (512 * 256 // change_sample.PERIOD - 2) * change_sample.RUN
    rest = weight[2 * change_sample.PERIOD // 256 :]
    assert one["weight"] == pytest.approx(float(rest.square().mean() * weight.numel()) ** 0.5, rel=0.15)
    assert cuda.counts["up"]


def test_each_strength_has_its_own_numbers(files: tuple[Path, Path], tmp_path: Path, cuda: Pretended) -> None:
    """Of several outputs of one base, whose windows are merged in turn on the same lanes."""
    jobs = [
        {"base": str(files[0]), "adapters": [{"path": str(files[1]), "strength": s}], "output": f"{s}.safetensors"}
        for s in (0.5, 1.0)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs, "defaults": {"device": "cuda"}}))
    done = lora_merge.run_batch(tmp_path / "jobs.json")
    half, whole = (job.report.numbers["tensors"] for job in done if job.report is not None)
    for name, one in whole.items():
        assert one["change"] == pytest.approx(2 * half[name]["change"], rel=1e-3), name
        assert one["elements"] == half[name]["elements"]


def test_window_costs_few_operations_whatever_it_holds(tmp_path: Path, cuda: Pretended) -> None:
    """The numbers of a window of many weights cost a device as much as those of one weight."""
    counts = []
    for layers in (1, 24):
        base = {f"m.{n}.weight": rand(512, 256, seed=n) for n in range(layers)}
        lora = {f"m.{n}.lora_{end}.weight": rand(*size) for n in range(layers) for end, size in (("up", (512, 4)), ("down", (4, 256)))}  # fmt: skip
        paths = save(base, tmp_path / f"b{layers}"), save(lora, tmp_path / f"a{layers}")
        cuda.counts.clear()
        lora_merge.merge(*paths, tmp_path / f"o{layers}", device="cuda", verify=False)
        counts.append({name: count for name, count in cuda.counts.items() if name.startswith("aten::")})
    one, many = (sum(found.values()) for found in counts)
    assert many <= one + 10, counts
    assert one <= 40, counts
