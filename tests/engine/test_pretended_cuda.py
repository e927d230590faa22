"""Whole merges through streams and pinned memory of a GPU that is not there (pretended_cuda.py), values and all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.algorithms.base import Checks
from lora_merge.engine import devices
from lora_merge.engine.tensor_moves import odd
from lora_merge.errors import DeviceFailed, ResourceError, TooLarge
from lora_merge.process import here
from tests.kit.files import load, save
from tests.kit.pretended_cuda import Pretended, Stream, pretended_cuda
from tests.kit.tensors import Tensors, rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Two devices."""
    taken = lambda plans: devices.DeviceChoice(plans[0].job.device)  # noqa: E731  # small merges are faster on the CPU
    monkeypatch.setattr("lora_merge.engine.window_merger.choose", taken)
    with pretended_cuda(monkeypatch) as found:
        yield found


def model() -> Tensors:
    return {f"m.{n}.weight": rand(96, 64, seed=n).half() for n in range(24)} | {"other.weight": rand(8, 8)}


def adapter() -> Tensors:
    """LoRA, DoRA, LoHa, OFT in turn."""
    found: Tensors = {}
    for n in range(24):
        up, down = rand(96, 4, seed=n), rand(4, 64, seed=n + 50)
        lora = {"lora_up.weight": up, "lora_down.weight": down}
        skew = rand(12, 8, 8, seed=n)
        mine = [
            lora, lora | {"dora_scale": rand(96, 1, seed=n).abs() + 1},
            {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up + 1, "hada_w2_b": down - 1},
            {"oft_blocks": skew - skew.mT},
        ][n % 4]  # fmt: skip
        found |= {f"m.{n}.{k}": t for k, t in mine.items()}
    return found


def close(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(
        got[k].shape == t.shape and bool(((got[k].double() - t.double()).abs() <= 2e-3 * t.double().abs() + 1e-3).all())
        for k, t in want.items()
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return save(model(), tmp_path / "b"), save(adapter(), tmp_path / "a")


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["auto", "cuda:1", "cuda:0,cuda:1"])
@pytest.mark.parametrize("options", [{}, {"dtype": "fp32", "compute_dtype": "fp64"}], ids=["kept", "fp64"])
def test_merges_are_what_they_are_on_the_cpu(
    device: str, options: dict[str, str], files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    lora_merge.merge(*files, tmp_path / "want", device="cpu", **options)  # type: ignore[arg-type]
    assert not cuda.counts
    report = lora_merge.merge(*files, tmp_path / "got", device=device, **options)  # type: ignore[arg-type]
    assert report.device == ("cuda:0" if device == "auto" else device)
    assert not report.notes
    assert close(load(tmp_path / "got"), load(tmp_path / "want"))
    assert not cuda.races
    assert cuda.counts["aten::baddbmm_"] <= 3, "six layers of LoRA in one call, or a window's"
    assert cuda.counts["down"] <= 8, "one for a kind, and none that is waited for"
    assert not cuda.counts["down and waited for"]


def test_reads_before_the_copy_ends_are_detected(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is worth something: where nobody waits for a stream, results are no numbers, and the proof says so.
    The device's own look at them would wait for it."""
    monkeypatch.setattr("lora_merge.engine.tensor_moves.odd", lambda _: False)
    monkeypatch.setattr("lora_merge.engine.devices.unusable", lambda _: "")
    monkeypatch.setattr("lora_merge.engine.devices._load_decompositions", lambda _: None)
    monkeypatch.setattr(Stream, "synchronize", lambda _: None)
    plain = {k: t for k, t in adapter().items() if not int(k.split(".")[1]) % 4}
    lora = save(plain, tmp_path / "lora")
    with pytest.raises(lora_merge.MergeError, match="not what base and adapters give"):
        lora_merge.merge(files[0], lora, tmp_path / "got", device="cuda:0")
    assert cuda.counts


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["keep", "fp8_e4m3fn", "fp8_e5m2"])
def test_numbers_too_large_are_detected_on_the_device_and_counted(
    dtype: str, tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one more look at them on the host."""
    looked: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "lora_merge.engine.tensor_moves.odd", lambda t: looked.append((t.device.type, t.numel())) or odd(t)
    )
    limit = {"keep": 65520.0, "fp8_e4m3fn": 464.1, "fp8_e5m2": 61440.0}[dtype]
    up, down = torch.zeros(96, 1), torch.zeros(1, 64)
    up[7], down[0, :3] = 2 * limit, torch.tensor([1.0, -1.0, 0.1])
    weights = {k: v for k, v in model().items() if k[2] == "0" or k == "other.weight"}
    base = save({k: v.half() for k, v in weights.items()}, tmp_path / "b")
    lora = save({"m.0.lora_up.weight": up, "m.0.lora_down.weight": down}, tmp_path / "a")
    out = tmp_path / "o"
    with pytest.raises(TooLarge) as caught:
        lora_merge.merge(base, lora, out, device="cuda:0", dtype=dtype)
    assert caught.value.where == f"{out}: m.0.weight"
    looked.clear()
    report = lora_merge.merge(base, lora, out, device="cuda:0", dtype=dtype, on_overflow="saturate")
    assert report.saturated == {"m.0.weight": 2}
    assert [device for device, numbers in looked if numbers == 96 * 64] == ["cuda"]
    assert not cuda.races


def test_results_stay_on_the_device_of_their_tensors(cuda: Pretended) -> None:
    want = lora_merge.merge_state_dict(model(), adapter(), device="cpu")
    held = {name: tensor.to("cuda:0") for name, tensor in model().items()}
    cuda.counts.clear()
    got = lora_merge.merge_state_dict(held, adapter(), device="keep")
    assert {str(tensor.device) for tensor in got.values()} == {"cuda:0"}
    assert cuda.counts["down"] <= 4 and not cuda.races  # what was measured, of each call
    assert close({name: tensor.cpu() for name, tensor in got.items()}, want)


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every matrix product fails, and so does giving back memory, as after an assert on the device."""

    real = torch.Tensor.baddbmm_

    def product(*given: Any, **options: Any) -> Tensor:
        if given and given[0].device.type == "cpu":
            return real(*given, **options)
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.Tensor, "baddbmm_", product)
    monkeypatch.setattr(torch.cuda, "empty_cache", product)


def test_device_that_fails_ends_the_merge_with_5_and_is_not_used_again(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        failing(broken)
        with pytest.raises(DeviceFailed, match=r"(?s)the device failed.*cuda:0: CUDA error: device-side assert") as e:
            lora_merge.merge(*files, tmp_path / "out", device="cuda")
    assert e.value.exit_code == 5
    assert pickle.loads(pickle.dumps(e.value)).args == e.value.args
    assert not [*tmp_path.glob("*out*")]
    with pytest.raises(lora_merge.MergeError, match="it failed before in this process"):
        lora_merge.merge(*files, tmp_path / "out", device="cuda:0")
    report = lora_merge.merge(*files, tmp_path / "out")
    assert report.device == "cpu"
    assert any("cuda is not used: it failed before" in note for note in report.notes)
    assert lora_merge.merge(*files, tmp_path / "other", device="cuda:1").device == "cuda:1"


def test_device_that_is_full_when_decompositions_are_loaded_gets_smaller_batches(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["CUDA out of memory. Tried to allocate 2.00 MiB"])

    def load_once(_: torch.device) -> None:
        for text in texts:
            raise torch.cuda.OutOfMemoryError(text)

    monkeypatch.setattr("lora_merge.engine.devices._load_decompositions", load_once)
    hra = save({f"base_model.model.m.{n}.hra_u": rand(64, 4, seed=n) for n in range(24)}, tmp_path / "hra")
    report = lora_merge.merge(files[0], [hra], tmp_path / "got", device="cuda:0", verify=False)
    lora_merge.merge(files[0], [hra], tmp_path / "want", device="cpu", verify=False)
    assert close(load(tmp_path / "got"), load(tmp_path / "want"))
    assert any("was short of memory" in note for note in report.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access", "CUDA out of memory. Tried to allocate"])
@pytest.mark.parametrize("name", ["cpu", "empty", "view", "copy_"])
def test_device_that_fails_under_tensors_in_memory_is_reported(
    name: str, text: str, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the folds too: when tensors of the caller are read, and when results are made."""
    held = {key: tensor.to("cuda:0") for key, tensor in model().items()}
    place = torch if name == "empty" else Tensor
    real, failed = getattr(place, name), list[str]()

    def broken(*given: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device", "")) or any(isinstance(t, Tensor) and t.is_cuda for t in given):
            failed.append(name)
            raise RuntimeError(text)
        return real(*given, **options)

    monkeypatch.setattr(place, name, broken)
    for device in ("cpu", "keep", "cuda:0"):
        with suppress(ResourceError):
            lora_merge.merge_state_dict(held, adapter(), device=device)
    assert failed


@pytest.mark.slow
def test_jobs_are_made_by_another_process_after_a_device_failed(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = files
    failing(monkeypatch)
    jobs = [{"base": str(b), "adapters": [str(adapter)], "output": f"{n}.safetensors"} for n, b in enumerate([base, save(model(), tmp_path / "c")])]  # fmt: skip
    (tmp_path / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": jobs}))
    reports = lora_merge.run_batch(tmp_path / "jobs.yaml")
    assert [(r.number, r.status) for r in reports] == [(1, "merged"), (2, "merged")]
    assert here() not in {r.worker for r in reports}


def test_device_that_failed_is_not_used_again(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `auto`, later merges are made on the CPU; by its name, the device has failed."""
    failing(monkeypatch)
    with pytest.raises(DeviceFailed):
        lora_merge.merge(*files, tmp_path / "first", device="cuda:0")
    assert lora_merge.merge(*files, tmp_path / "second").verified
    with pytest.raises(DeviceFailed, match="failed before in this process"):
        lora_merge.merge(*files, tmp_path / "third", device="cuda:0")


@pytest.mark.slow
def test_callers_current_device_is_used(files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: setattr(cuda.mine, "device", n))
    torch.cuda.set_device(1)
    for device in ("cuda", "auto"):
        assert lora_merge.merge(*files, tmp_path / "out", device=device, overwrite=True).device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cuda.mine.device = 0
    assert lora_merge.merge(*files, tmp_path / "out", overwrite=True).device == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert lora_merge.merge(*files, tmp_path / "out", overwrite=True).device == "cuda:0"


def test_index_outside_of_a_weight_ends_the_device_where_no_check_stops_it(
    tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the row stops it; without the check the stand-in does what CUDA does."""
    base = save({"m.weight": rand(12, 10)}, tmp_path / "b")
    adapter = {"m.shira_weight": rand(3), "m.shira_indices": torch.tensor([[0, 1, 12], [0, 1, 2]])}
    files = base, save({f"base_model.model.{k}": t for k, t in adapter.items()}, tmp_path / "a")
    with pytest.raises(lora_merge.MergeError) as checked:
        lora_merge.merge(*files, tmp_path / "o", device="cuda:0")
    assert not isinstance(checked.value, DeviceFailed) and not cuda.lost
    monkeypatch.setattr(Checks, "check_integers", lambda *_: None)
    with pytest.raises(DeviceFailed, match="device-side assert"):
        lora_merge.merge(*files, tmp_path / "o", device="cuda:0")


def test_wait_orders_the_calls_before_it_and_no_later_ones(cuda: Pretended) -> None:
    one, other = Stream(torch.device("cuda", 0)), Stream(torch.device("cuda", 0))
    with torch.cuda.device(torch.device("cuda", 0)):
        with torch.cuda.stream(one):  # type: ignore[arg-type]
            held = torch.ones(3).to("cuda:0") + 1
        other.wait_stream(one)
        with torch.cuda.stream(other):  # type: ignore[arg-type]
            held.add_(1)
        assert not cuda.races
        with torch.cuda.stream(one):  # type: ignore[arg-type]
            held.mul_(2)
        assert len(cuda.races) == 1
        with torch.cuda.stream(other):  # type: ignore[arg-type]
            held.add_(1)
        assert len(cuda.races) == 2, "it has waited for an earlier state"
