"""Work grows with the number of tensors and of shards, not faster: calls are counted, not seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import lora_merge
from lora_merge.engine import window_merger as making  # noqa: F401  # with torch: the import is not what is counted
from tests.bench import many
from tests.bench.measure import Run

MOST = 240  # calls for one more tensor, planned, written and proven: 234 today, 13 of them for the report's blocks
MOST_FOR_MODULE = 515  # calls for one more module on one more tensor, planned: 512 today
MOST_FOR_SHARD = 5000  # calls for one more shard: 3800 today


def calls(act: Callable[[], object]) -> int:
    """How many functions were called meanwhile, by all threads that began meanwhile too."""
    found = [0]

    def count(_: FrameType, event: str, __: object) -> None:
        found[0] += event in ("call", "c_call")

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found[0]


def merged(folder: Path, tensors: int, shards: int) -> int:
    """The calls of a whole merge."""
    base, lora = many.model(folder, tensors, shards)
    out = folder / f"out-{tensors}-{shards}"
    return calls(lambda: lora_merge.merge(base, lora, out, device="cpu"))


def test_cost_of_a_tensor_does_not_grow_with_their_number(tmp_path: Path) -> None:
    merged(tmp_path, 50, 2)  # what is worked out once a process
    small, middle, large = (merged(tmp_path, n, 2) for n in (200, 400, 800))
    assert large - middle < 1.2 * 2 * (middle - small)
    assert (large - small) / 600 < MOST


def planned(folder: Path, tensors: int) -> int:
    """The calls of a plan with an adapter on all experts."""
    base, lora = many.model(folder, tensors, 2, "experts")
    return calls(lambda: lora_merge.plan(base, lora, output=folder / "out"))


@pytest.mark.slow
def test_cost_of_a_module_does_not_grow_with_their_number(tmp_path: Path) -> None:
    planned(tmp_path, 50)
    small, middle, large = (planned(tmp_path, n) for n in (200, 400, 800))
    assert large - middle < 1.2 * 2 * (middle - small)
    assert (large - small) / 600 < MOST_FOR_MODULE


@pytest.mark.slow
def test_cost_of_a_shard_does_not_grow_with_their_number(tmp_path: Path) -> None:
    merged(tmp_path, 50, 2)
    small, middle, large = (merged(tmp_path, 100, n) for n in (6, 12, 24))
    assert large - middle < 1.2 * 2 * (middle - small)
    assert (large - middle) / 12 < MOST_FOR_SHARD


@pytest.mark.release
def test_bench_shows_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.bench.__main__ import Bench

    assert many.exponent(10, 1.0, 20, 4.0) == pytest.approx(2)
    monkeypatch.setattr(many, "CASES", dict.fromkeys(("tensors", "modules"), ((50, 2), (100, 2))))
    monkeypatch.setattr(many, "run", lambda command, known: Run(1.0, len(command) * 1.0, 2**20, ""))
    b = Bench(tmp_path, 1, ("warm",), "sd1", (), keep=False)
    many.suite(b)
    assert [r["growth"] for r in b.results] == [None, None, 0.0, 0.0] * 2
    assert "100       2" in capsys.readouterr().out
    assert not list(tmp_path.glob("many-*"))
