"""While a command reads weights, something on the terminal moves: in every command, and in the bar of Python."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lora_merge
from lora_merge import progress
from lora_merge.cli import main as program
from lora_merge.cli import progress_display
from lora_merge.disk import reader
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1_sample

COMMANDS = (
    "base ink -o o", "base ink oil --method ties -o o", "base ink -o o --html o.html", "combine ink oil -o o",
    "resize ink --rank 2 -o o", "resize ink --rank 2 -o o --html o.html", "convert ink --to diffusers --base base -o o",
    "average ink oil -o o", "extract base out -o o", "inspect base ink --weights", "inspect ink --weights --html o.html",
    "compare base out", "compare ink oil", "verify out --full", "replay out -o o", "unmerge out -o o", "batch jobs.json",
)  # fmt: skip


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(sd1_sample(), Path("base.safetensors"))
    for seed, name in enumerate(("ink", "oil")):
        save(kohya(sd1_sample(), seed=seed), Path(f"{name}.safetensors"))
    lora_merge.merge("base", "ink", "out")
    Path("jobs.json").write_text(json.dumps([{"base": "base", "adapters": ["ink"], "output": "o.safetensors"}]))
    return tmp_path


@pytest.mark.few(3)
@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_reads_weights_while_nothing_moves(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--html" in words:
        pytest.importorskip("plotly")
    hearts, still = 0, list[str]()
    real, fill = progress.beating, reader._fill

    @contextmanager
    def beating(*arguments: object) -> Iterator[None]:
        nonlocal hearts
        hearts += 1
        with real(*arguments):  # type: ignore[arg-type]
            yield
        hearts -= 1

    def counted(buffer: memoryview, file: Path, *more: object) -> None:
        still.extend([file.name] * (not hearts))
        fill(buffer, file, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(progress_display, "beating", beating)
    monkeypatch.setattr(reader, "_fill", counted)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "argv", ["lora-merge", *words.split()])
    with pytest.raises(SystemExit) as e:
        program.main()
    assert e.value.code in (0, None), sys.stderr.getvalue()
    assert not still


def test_bar_of_python_shows_the_time_during_one_long_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECOND_HAND", 0.001)
    clock = iter(range(10**6))
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    times = set[str]()
    with progress.watched(progress=True) as watcher:
        watcher(progress.Step("merge", "o.safetensors", 1, 100))
        for _ in range(1000):  # the step goes on
            times.update(re.findall(r"\[(\d+:\d+)<", capsys.readouterr().err))
            if len(times) > 2:
                break
            time.sleep(0.01)
    assert len(times) > 2
