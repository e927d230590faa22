"""What machines with GPUs, or with broken ones, say of themselves; told here by stand-ins for torch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.engine import devices
from lora_merge.engine.devices import nth_device, place, places, unusable
from lora_merge.engine.windows import DEVICE_SLOTS, SLOTS, slots
from lora_merge.errors import device_full
from lora_merge.job import make_job
from tests.kit.files import save
from tests.kit.tensors import rand


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that work; the second is the current one."""
    monkeypatch.setattr(devices, "_count", lambda kind: {"cpu": 1, "cuda": 2}.get(kind, 0))
    monkeypatch.setattr(devices, "unusable", lambda _: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_gpus")
def test_device_has_its_number_from_the_start() -> None:
    """Without one, torch takes the current device of each thread, and folds run on several."""
    assert str(place("cuda", "F32").device) == str(place("auto", "F32").device) == "cuda:1"
    assert [str(p.device) for p in places("cuda, cuda:0", "F32")] == ["cuda:1", "cuda:0"]
    with pytest.raises(lora_merge.MergeError, match="devices that cannot share"):
        places("cuda,cuda:1", "F32")
    assert str(place("cpu", "F32").device) == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_workers_share_gpus_out_unless_they_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [nth_device("auto", n) for n in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert nth_device("cuda:1", 0) == "cuda:1"
    monkeypatch.setattr(devices, "unusable", lambda where: "no kernel image" if where.index == 1 else "")
    assert [nth_device("auto", n) for n in range(3)] == ["cuda:0", "auto", "cuda:0"]
    assert nth_device("cuda", 1) == "cuda:1"  # as asked for; the merge says what is wrong


@pytest.mark.parametrize(
    "error",
    [torch.cuda.DeferredCudaCallError("CUDA call failed lazily"), AssertionError("libcudart functions unavailable")],
    ids=["deferred", "build"],
)
def test_failure_to_start_cuda_is_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "ones", ones)
    assert unusable(torch.device("cuda:0")) == str(error)


def test_driver_that_is_too_old_is_reported_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of it once, and counts no device."""
    said = ["CUDA initialization: The NVIDIA driver on your system is too old (Triggered internally at a.cpp:1.)\nmore"]

    def is_available() -> bool:
        while said:
            warnings.warn(said.pop(), stacklevel=2)
        return False

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    devices._refusal.cache_clear()
    try:
        base = save({"a.weight": rand(8, 8)}, tmp_path / "b")
        adapter = save({"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 8)}, tmp_path / "a")
        report = lora_merge.merge(base, adapter, tmp_path / "o")
        why = "CUDA initialization: The NVIDIA driver on your system is too old"
        assert report.notes == (f"cuda is not used: {why}",)
        with pytest.raises(lora_merge.MergeError, match=f"(?s)no device 'cuda' here.*{why}"):
            lora_merge.merge(base, adapter, tmp_path / "p", device="cuda")
    finally:
        devices._refusal.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ],
)
def test_every_library_says_in_its_own_way_that_memory_is_short(text: str) -> None:
    assert device_full(RuntimeError(text))
    assert not device_full(ValueError(text))


@pytest.mark.parametrize("sign", ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", ""])
def test_windows_are_cut_for_a_gpu_where_anything_shows_one(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == sign)
    job = make_job("base", [("adapter", 1.0)], "out")
    assert (slots(job) == DEVICE_SLOTS) is bool(sign)
    assert slots(replace(job, device="cpu")) == SLOTS
