"""Folds on a CUDA device against the same folds on the CPU: `python -m pytest -m gpu`.

`DEVICE` in kit/cuda.py is the only word that makes it one: with `cpu` in its place the tests of values run anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.engine import row_blocks
from lora_merge.engine.block_folder import STAGED
from tests.kit.cuda import DEVICE, FEW, Layers, close, expect_windows_apart, lora, oft
from tests.kit.files import load, save
from tests.kit.tensors import rand

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


# ------------------------------------------------ every formula, three lanes


@pytest.mark.parametrize("staged", [STAGED, FEW], ids=["batched", "few at a time"])
@pytest.mark.parametrize(("stored", "compute"), [("F32", "F32"), ("F16", "F64"), ("BF16", "F32")])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_formula_gives_what_it_gives_on_the_cpu(name: str, stored: str, compute: str, staged: int) -> None:
    layers = Layers(name, stored)
    want = layers.folded("cpu", "F64")
    for _ in range(3):
        got = layers.folded(DEVICE, compute, staged)
        assert (got - want).abs().max() <= (1e-6 if compute == "F64" else 2e-4) * want.abs().max()


@pytest.mark.parametrize("name", ["lora", "lokr", "oft_diag", "glora", "full", "peft_ia3_out"])
def test_weights_of_several_blocks_are_what_they_are_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(name, "F16")
    want = layers.folded("cpu", "F64")
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 40)
    assert len(list(row_blocks.blocks(layers.targets[0]))) > 1
    assert (layers.folded(DEVICE, "F32") - want).abs().max() <= 2e-4 * want.abs().max()


# ------------------------------------------------ whole files


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Sixty layers, one in three of several blocks, some with rotations: many windows in flight."""
    base, adapter = dict[str, Tensor](), dict[str, Tensor]()
    for n in range(60):
        out, width = (1536, 1024 + n) if n % 3 == 0 else (320, 320)
        base[f"layer.{n}.weight"] = rand(out, width, seed=n, scale=1.0).half()
        adapter |= oft(n, out) if n % 5 == 0 else lora(n, out, width)
    return save(base, tmp_path / "base.safetensors"), save(adapter, tmp_path / "adapter.safetensors")


@pytest.mark.parametrize("memory", ["16MiB", "1GiB"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_windows_that_follow_each_other_do_not_meet(files: tuple[Path, Path], tmp_path: Path, dtype: str, memory: str) -> None:  # fmt: skip
    """Factors are kept for a window and dropped while the next one is folded; on a GPU kernels may still want them."""
    expect_windows_apart(files, tmp_path, dtype, memory)


def lists() -> Iterator[str]:
    yield f"{DEVICE}:0"
    if DEVICE == "cuda" and torch.cuda.device_count() > 1:
        yield "cuda:0,cuda:1"
        yield ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count()))


def test_several_devices_share_the_work(files: tuple[Path, Path], tmp_path: Path) -> None:
    lora_merge.merge(*files, tmp_path / "want.safetensors", device="cpu", compute_dtype="fp64", dtype="fp32")
    for n, device in enumerate(lists()):
        report = lora_merge.merge(*files, tmp_path / f"{n}.safetensors", device=device, max_memory="16MiB")
        assert report.device == device
        close(load(tmp_path / f"{n}.safetensors"), load(tmp_path / "want.safetensors"))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2", "fp16", "fp32", "keep"])
@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_every_dtype_in_and_out_is_what_it_is_on_the_cpu(
    tmp_path: Path, stored: torch.dtype, dtype: str, compute: str
) -> None:
    """Numbers up to a thousand, which e4m3 has no room for: cut, and as many of them."""
    base = {f"layer.{n}.weight": rand(96, 80, seed=n, scale=200.0).clamp(-448, 448).to(stored) for n in range(12)}
    adapter = {k: (t * 20).to(stored) for n in range(12) for k, t in lora(n, 96, 80).items()}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    results, counts = [], []
    for n, device in enumerate(("cpu", DEVICE)):
        out, options = tmp_path / f"{n}", {"compute_dtype": compute, "dtype": dtype, "on_overflow": "saturate"}
        report = lora_merge.merge(*files, out, device=device, **options)  # type: ignore[arg-type]
        results.append(load(out))
        counts.append(report.saturated)
    assert counts[0].keys() == counts[1].keys()
    assert all(abs(count - counts[1][key]) <= 96 * 80 // 500 for key, count in counts[0].items())
    for key, want in results[0].items():
        got = results[1][key]
        assert got.dtype == want.dtype
        a, b = got.double(), want.double()
        assert a.isfinite().all()
        if got.dtype.itemsize >= 4:
            assert (a - b).abs().max() <= 2e-6 * b.abs().max()
        else:  # sums in another order fall on the other side of a rounding here and there
            assert (a != b).sum() <= a.numel() // 500
            assert ((a - b).abs() <= b.abs() / 3 + 0.01).all()


# ------------------------------------------------ memory and streams


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """This process gets so many bytes more of the device; what other processes hold does not matter."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < 2 * size:
        pytest.skip("the device is in use")
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_halves_the_batches(tmp_path: Path) -> None:
    """A window's 16 layers in fp64 take 350 MiB with their casts; one takes 30, and a lane's workspace up to 32."""
    base = {f"layer.{n}.weight": rand(1024, 1024, seed=n).half() for n in range(40)}
    adapter = {k: t for n in range(40) for k, t in lora(n, 1024, 1024).items()}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    lora_merge.merge(*files, tmp_path / "want", device="cpu", compute_dtype="fp64", dtype="fp32")
    with room_for(256 * 2**20):
        report = lora_merge.merge(*files, tmp_path / "tight", device=DEVICE, compute_dtype="fp64")
    assert [n for n in report.notes if "short of memory" in n]
    close(load(tmp_path / "tight"), load(tmp_path / "want"))
    assert not lora_merge.merge(*files, tmp_path / "wide", device=DEVICE, compute_dtype="fp64").notes


def test_weight_that_never_fits_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of 128 MiB in fp32."""
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 2**26)
    base, adapter = {"a.weight": rand(4096, 8192).half()}, {"a.lora_up.weight": rand(4096, 8)}
    files = save(base, tmp_path / "b"), save(adapter | {"a.lora_down.weight": rand(8, 8192)}, tmp_path / "a")
    with room_for(2**25), pytest.raises(lora_merge.MergeError, match="out of memory"):
        lora_merge.merge(*files, tmp_path / "out", device=DEVICE)
    assert not (tmp_path / "out").exists()
    assert lora_merge.merge(*files, tmp_path / "out", device=DEVICE).changed == 1


def test_inputs_that_a_busy_stream_has_yet_to_make_are_waited_for() -> None:
    """Base and factors are the last of a long queue on the caller's stream when they are handed over."""
    base = {f"m.{n}.weight": rand(512, 512, seed=n) for n in range(8)}
    factors = {f"m.{n}.{k}": t for n in range(8) for k, t in
               {"lora_up.weight": rand(512, 8, seed=n), "lora_down.weight": rand(8, 512, seed=n)}.items()}  # fmt: skip
    want = lora_merge.merge_state_dict(base, factors, device="cpu", compute_dtype="fp64")
    here = {k: t.cuda() for k, t in {**base, **factors}.items()}
    busy = torch.ones(4096, 4096, device=DEVICE)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = {k: torch.full_like(t, 7.0) for k, t in here.items()}
            torch.cuda.synchronize()
            for _ in range(40):
                busy = (busy @ busy).clamp_(-1, 1)
            for key, tensor in late.items():
                tensor.copy_(here[key])
            merged = lora_merge.merge_state_dict(
                {k: late[k] for k in base}, {k: late[k] for k in factors}, device=DEVICE
            )
        for key, exact in want.items():
            assert (merged[key] - exact).abs().max() <= 1e-5 * exact.abs().max()
