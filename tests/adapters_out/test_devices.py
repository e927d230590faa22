"""Adapters made with a GPU that is not there (pretended_cuda.py): nothing meets on two devices, and within memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out import matrix_svd
from lora_merge.adapters_out.extract import extract_modules
from lora_merge.adapters_out.matrix_svd import of_dense, of_stack
from lora_merge.adapters_out.rank_rules import COUNT, Rule, parse
from lora_merge.engine.row_matrix import RowMatrix
from lora_merge.engine.tensor_moves import Placement
from lora_merge.errors import ResourceError
from tests.kit.pretended_cuda import Pretended, pretended_cuda
from tests.kit.spectra import SPECTRA, example
from tests.kit.tensors import rand


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretended_cuda(monkeypatch, 1) as found:
        yield found


GPU = Placement(torch.device("cuda", 0), torch.float32)


@pytest.mark.few(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("spectrum", [*SPECTRA])
def test_device_finds_what_the_processor_finds(spectrum: str, cuda: Pretended) -> None:
    delta = example(spectrum).float()
    for rule in (Rule(COUNT, 7), parse("sum:0.5")):
        here, there = of_dense(RowMatrix.of(delta), rule), of_dense(RowMatrix.of(delta), rule, at=GPU)
        rank = min(len(here.values), len(there.values), 7)
        assert np.allclose(here.values[:rank], there.values[:rank], rtol=1e-4, atol=1e-5 * float(here.values[0]))
        assert [part.shape for part in there.pair(rank)] == [(len(delta), rank), (rank, delta.shape[1])]  # on the host
    assert cuda.counts["waits"] and not cuda.races and not cuda.faults


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_weights_of_one_shape_go_there_together(cuda: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_svd, "exactly", lambda *_: pytest.fail("the exact way"))
    changes, rule = [example("slow", seed).float() for seed in range(3)], Rule(COUNT, 7)
    for found, change in zip(of_stack([RowMatrix.of(m) for m in changes], [rule] * 3, 0.0, GPU), changes, strict=True):
        alone = of_dense(RowMatrix.of(change), rule)
        assert np.allclose(found.values, alone.values, rtol=1e-3)
    assert not cuda.races and not cuda.faults


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """A base and the same tuned, in fp16."""
    keys = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
    base = {key: rand(140, 130, seed=n).half() for n, key in enumerate(keys)}
    tuned = {key: value + 0.3 * rand(140, 130, seed=50 + n).half() for n, (key, value) in enumerate(base.items())}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_extract_and_resize_take_the_device_that_is_named(
    checkpoints: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    reports = [lora_merge.extract(*checkpoints, tmp_path / f"{device}.safetensors", rank=4, device=device)
               for device in ("cpu", "cuda")]  # fmt: skip
    waits = cuda.counts["waits"]
    assert waits and reports[0].residual == pytest.approx(reports[1].residual, rel=2e-3)
    lora_merge.resize(tmp_path / "cpu.safetensors", tmp_path / "r.safetensors", rank=2, device="cuda")
    with pytest.raises(ResourceError, match="cuda:7"):
        lora_merge.extract(*checkpoints, tmp_path / "x.safetensors", rank=4, device="cuda:7")
    assert not cuda.races and not cuda.faults


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_weights_of_one_shape_are_decomposed_together_within_the_memory_of_the_device(
    tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them stand weights of other shapes; the file is in the order of the base, and one weight is equal."""
    shapes = [(140, 130), (130, 140), (140,)] * 4
    base = {f"model.layers.{n}.self_attn.q_proj.weight": rand(*shape, seed=n).half() for n, shape in enumerate(shapes)}
    tuned = {k: v + (0 if ".3." in k else 0.3) * rand(*v.shape, seed=90 + n).half()
             for n, (k, v) in enumerate(base.items())}  # fmt: skip
    base_file, tuned_file = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    save_file(base, base_file)
    save_file(tuned, tuned_file)
    sizes: list[int] = []
    whole = extract_modules.of_stack
    monkeypatch.setattr(
        extract_modules, "of_stack", lambda found, *rest: sizes.append(len(found)) or whole(found, *rest)
    )
    room = 2 * 140 * 130 * extract_modules.BYTES_ON_DEVICE
    for name, device, vram in (("cpu", "cpu", None), ("all", "cuda", None), ("two", "cuda", room)):
        lora_merge.extract(base_file, tuned_file, tmp_path / name, rank=4, device=device, max_vram=vram, format="kohya")
        monkeypatch.setattr("lora_merge.adapters_out.extract.run.threads", lambda _: 1)
    assert sorted(sizes) == [1, 2, 2, 2, 3, 4]
    cpu, *others = (load_file(tmp_path / name) for name in ("cpu", "all", "two"))
    for other in others:
        assert [*other] == [*cpu] and all(torch.allclose(other[k].float(), cpu[k].float(), atol=2e-2) for k in cpu)
    assert not cuda.races and not cuda.faults


def test_number_of_threads_changes_no_byte(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 3):
        monkeypatch.setattr("lora_merge.adapters_out.parallel.threads", lambda _, count=count: count)
        lora_merge.extract(*checkpoints, tmp_path / f"{count}.safetensors", rank=4, device="cpu")
    one, three = ((tmp_path / f"{count}.safetensors").read_bytes() for count in (1, 3))
    assert one == three


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no such measure of memory")
def test_extract_stays_within_its_memory(tmp_path: Path) -> None:
    """In a process of its own: 96 MB are read, whose differences would take as much again; an output of 48 MB too."""
    for name, seed in (("base", 0), ("tuned", 1)):
        value = rand(1024, 1024, seed=seed).half()
        weights = {f"model.layers.{n}.self_attn.q_proj.weight": value + n for n in range(24)}
        save_file(weights, tmp_path / f"{name}.safetensors")
    code = """if True:
        import resource, sys
        import lora_merge, torch
        import lora_merge.adapters_out.extract.run
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
        torch.linalg.eigh(torch.randn(64, 64) @ torch.randn(64, 64))
        if sys.platform == "linux":
            open("/proc/self/clear_refs", "w").write("5")  # the peak of the imports is forgotten
        before = peak()
        for options in ({"algorithm": "full"}, {"rank": 1, "overwrite": True}):
            lora_merge.extract(*sys.argv[1:], max_memory="32MiB", verify=False, device="cpu", **options)
        print(peak() - before)
    """
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("base", "tuned", "out")]
    told = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 48 * 1024
    assert len(load_file(tmp_path / "out.safetensors")) == 72
