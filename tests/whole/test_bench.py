"""The bench's GPU suite, as far as it goes without a GPU: its arithmetic, and its folds on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import lora_merge
from tests.bench import __main__ as bench
from tests.bench import device, gpu, inputs
from tests.bench.floor import floor
from tests.kit.files import load


def plain(folder: Path, **more: object) -> bench.Bench:
    return bench.Bench(folder, 0, ("warm",), "sd1", (), keep=True, **more)  # type: ignore[arg-type]


def test_time_on_several_streams_counts_once() -> None:
    spans = [("Memcpy HtoD (Pinned -> Device)", 0, 10), ("Memcpy HtoD (Pageable -> Device)", 5, 20),
             ("ampere_sgemm", 8, 9), ("vectorized_elementwise_kernel", 8, 12), ("Memcpy DtoD (Device -> Device)", 20, 21),
             ("Memset (Device)", 30, 31), ("Memcpy DtoH (Device -> Pinned)", 40, 44)]  # fmt: skip
    assert device.tally(spans) == {"kernel_s": 6e-6, "up_s": 2e-5, "down_s": 4e-6, "kernels": 4}
    assert device.union([]) == 0


def test_kernels_move_the_numbers_twice_for_the_fold_and_once_for_each_cast() -> None:
    assert device.kernel_bytes(10, 2, 4, 2) == 200
    assert device.kernel_bytes(10, 4, 4, 4) == 80
    assert device.kernel_bytes(10, 0, 4, 2) == 140


def test_shares_are_of_what_the_device_can_do() -> None:
    sizes = {"numbers": 500, "blocks": 2, "moved": 10_000, "base": 1000, "up": 2000, "down": 1000}
    rate = {"memory": 1e4, "up": 1e3, "down": 1e3}
    found = device.shares(sizes, 4.0, {"kernel_s": 2.0, "up_s": 4.0, "down_s": 1.0, "kernels": 7}, rate)
    assert found["kernel_s_per_gb"] == pytest.approx(2e6)
    shares = [found[f"{k}_share"] for k in ("memory", "up", "down", "link")]
    assert shares == pytest.approx([0.5, 0.5, 1.0, 0.5])
    assert "7 kernels" in gpu.told(found)
    assert "kernel_s_per_gb" not in device.shares(sizes, 4.0, {}, rate)


def test_measured_folds_are_those_of_a_merge(tmp_path: Path) -> None:
    base, lora = inputs.tiny(tmp_path)
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, [(lora, 0.7)], out, device="cpu")
    plan = lora_merge.plan(base, [(lora, 0.7)], tmp_path / "none", device="cpu")
    with device.Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        work = device.Folding(plan, reader)
        assert work.seconds() > 0
        work.making.close()
    (window,) = work.work
    folded = bytes(work.slots[0].out.view(window.start, window.size))
    assert out.read_bytes().endswith(folded)
    assert any((load(base)[k] != v).any() for k, v in load(out).items())
    factors = sum(t.nbytes for t in load(lora).values())
    moved = {"base": 2**15, "up": 2**15 + factors, "down": 2**15, "moved": 2**14 * 20}
    assert work.sizes() == {"numbers": 2**14, "blocks": 4, **moved}
    rate = device.rates(torch.device("cpu"), size=2**16, rounds=1)
    assert set(rate) == {"memory", "up", "down"} and min(rate.values()) > 0
    found = device.folding("cpu", base, lora, rounds=1, rate=rate)
    assert found["gb_per_s"] > 0 and found["link_share"] > 0
    assert not found["notes"]


def test_floor_is_a_copy(tmp_path: Path) -> None:
    base, _ = inputs.tiny(tmp_path)
    floor(base, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == base.read_bytes()


def test_bench_without_cuda_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "names", tuple)
    monkeypatch.setattr(sys, "argv", ["bench", "gpu", "--data", str(tmp_path)])
    bench.main()
    said = capsys.readouterr().out
    assert said.count("no CUDA device here") == 1 and "gpu none" in said
    ran: list[str] = []
    monkeypatch.setattr(bench, "SUITES", {n: lambda _, n=n: ran.append(n) for n in ("main", "gpu")})
    monkeypatch.setattr(sys, "argv", ["bench", "--data", str(tmp_path)])
    bench.main()
    assert ran == ["main"]
    monkeypatch.setattr(gpu, "names", lambda: ("NVIDIA A", "NVIDIA B"))
    bench.main()
    assert ran == ["main", "main", "gpu"]
    assert json.loads((tmp_path / "results.json").read_text())["machine"]["gpu"] == "NVIDIA A, NVIDIA B"


def test_suite_runs_ours_on_the_device_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = inputs.tiny(tmp_path)
    b = plain(tmp_path, device="cuda:0,cuda:1")
    assert "cuda:0,cuda:1" in b.ours(base, lora)
    monkeypatch.setattr(gpu, "names", lambda: ("NVIDIA A", "NVIDIA B"))
    monkeypatch.setattr(inputs, "base", lambda *_: base)
    monkeypatch.setattr(inputs, "adapter", lambda *_: lora)
    asked: list[tuple[str, ...]] = []
    figures = {"rates": {"memory": 2e12, "up": 5e10, "down": 5e10}, "folds": {"seconds": 1.0}}
    compared: list[dict[str, list[str]]] = []
    monkeypatch.setattr(gpu, "run", lambda c, **_: asked.append(tuple(c)) or gpu_run(json.dumps(figures)))
    monkeypatch.setattr(bench.Bench, "compare", lambda _, suite, commands, files, cache: compared.append(commands))
    gpu.suite(b)
    assert asked == [(sys.executable, "-m", "tests.bench.device", "cuda:0,cuda:1", str(base), str(lora), "0")]
    (commands,) = compared
    assert [c[c.index("--device") + 1] for c in commands.values() if "--device" in c] == [
        "cpu",
        "cuda:0,cuda:1",
        "auto",
    ]
    assert [r["name"] for r in b.results] == ["sd1, rates", "sd1, folds"]


def gpu_run(text: str) -> object:
    from tests.bench.measure import Run

    return Run(1.0, 1.0, 1, "a warning\n" + text)
