"""Progress on a terminal: stages, time left, heartbeat, jobs of a batch; by a clock of the test's own."""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from lora_merge import progress
from lora_merge.cli import progress_display
from lora_merge.cli.progress_display import BEAT, MOST_LINES, PROOF, BatchJobs, Display, interval
from lora_merge.cli.terminal import CUTTING_TERMINALS, REFLOWING
from lora_merge.errors import UsageError
from lora_merge.progress import GRACE, STEP_SECONDS, Progress, Stage, Step, StepBuffer, watched
from lora_merge.viewing.compare import compare
from lora_merge.viewing.inspect import inspect
from tests.cli.terminal import fcntl, played_here, screen, terminal, termios
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1_sample

GIB = 1 << 30


class Terminal(io.StringIO):
    encoding = "utf-8"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(**more: object) -> tuple[Display, Clock]:
    clock = Clock()
    return Display(Terminal(), clock=clock, columns=lambda: 80, **more), clock  # type: ignore[arg-type]


def line(display: Display, width: int = 80) -> str:
    (found,) = display.lines(width)
    return found


def test_download_has_its_size_rate_and_time_left_and_counts_for_no_merge() -> None:
    display, clock = shown()
    display.take(Step("fetch", "hf://me/sd@main", total=8 << 30))
    clock.now += 10
    display.take(Step("fetch", "hf://me/sd@main", 2 << 30, 8 << 30))
    assert (
        "fetch" in line(display) and "25%" in line(display) and "0:30 left" in line(display) and "of 8" in line(display)
    )
    display.take(Step("merge", "out.safetensors", total=100))
    clock.now += 1
    display.take(Step("merge", "out.safetensors", 50, 100))
    assert "merge" in line(display) and display.bytes == 50


def test_merge_of_a_base_elsewhere_shows_what_has_come() -> None:
    arrived = [1 << 20]
    display, clock = shown(received=lambda: arrived[0])
    display.take(Step("merge", "out.safetensors", total=GIB))
    arrived[0] += 3 << 20
    clock.now += 1
    display.take(Step("merge", "out.safetensors", 1 << 20, GIB))
    assert "3.00 MiB received" in line(display, 120)
    display.take(Step("make", "out.safetensors", 1, 2))
    assert "3.00 MiB received" in line(display, 120)
    arrived[0] = 1 << 20
    assert "received" not in line(display, 120)


def test_each_stage_is_named_and_time_left_counts_what_follows() -> None:
    display, clock = shown()
    assert "reading headers" in line(display)
    display(Step("load", "out.safetensors", total=GIB))
    clock.now += 2
    assert "load" in line(display) and "0:02 so far" in line(display)
    display(Step("merge", "out.safetensors", 1, GIB))
    for _ in range(10):
        clock.now += 1
        display(Step("merge", "out.safetensors", GIB // 20, GIB, "read"))
    text = line(display, 160)
    assert "512 MiB of 1.00 GiB" in text
    assert "51.2 MiB/s" in text
    assert "0:12 left" in text, "ten seconds for the other half, and some for flush and proof"
    assert "mostly reading" in text
    assert all(fact in line(display) for fact in ("512 MiB of 1.00 GiB", "51.2 MiB/s", "0:12 left", "mostly reading"))
    display(Step("merge", "out.safetensors", 0, GIB, "start"))
    assert "mostly" not in line(display, 160)
    display(Step("merge", "out.safetensors", GIB // 2, GIB, "read"))
    clock.now += 1
    assert "0:00" not in line(display) and "100%" not in line(display), "flush and proof are to come"
    display(Step("flush", "out.safetensors"))
    assert "flush" in line(display)
    before = line(display)
    clock.now += 3
    assert "0:03 so far" in line(display) != before, "it moves while nothing is reported"
    display(Step("prove", "out.safetensors"))
    display(Step("prove", "out.safetensors", 30, 60))
    assert "prove" in line(display) and "50% of the proof" in line(display)
    display(Step("prove", "out.safetensors", 30, 60))
    assert "100%" in line(display) and "0:00 left" in line(display)


@pytest.mark.parametrize("jobs", [None, BatchJobs(2, {"/o": (GIB, GIB)})])
@pytest.mark.parametrize("stage", [None, "load", "merge", "make", "flush", "prove"])
def test_no_line_stands_still_for_a_second_while_nothing_is_reported(
    jobs: BatchJobs | None, stage: Stage | None
) -> None:
    display, clock = shown(jobs=jobs)
    if stage is not None:
        display(Step(stage, "/o", 5, GIB))
    seen = []
    for _ in range(20):
        clock.now += 0.5
        display.draw()
        seen.append(display.drawn)
    assert all(a != b for a, b in pairwise(seen))


def test_bar_moves_while_the_disk_takes_the_last_bytes() -> None:
    display, clock = shown()
    display(Step("merge", "o", 0, GIB))
    clock.now += 60
    display(Step("merge", "o", GIB, GIB))
    display(Step("flush", "o"))
    shares = []
    for _ in range(8):
        clock.now += 0.5
        shares.append(display._share())
    assert all(a < b for a, b in pairwise(shares))
    display(Step("prove", "o", 0, GIB))
    assert shares[-1] < display._share() < 1


@pytest.mark.parametrize("jobs", [None, BatchJobs(2, {"/o": (GIB, GIB)})])
def test_time_is_counted_before_the_first_byte(jobs: BatchJobs | None) -> None:
    display, clock = shown(jobs=jobs)
    clock.now += 65
    assert "1:05 so far" in display.lines(80)[-1]


def test_rate_of_a_disk_that_stands_still_falls() -> None:
    display, clock = shown()
    rates = []
    for wrote in (GIB // 10,) * 4 + (0,) * 8:
        clock.now += 1
        display(Step("merge", "o", wrote, GIB))
        rates.append(line(display, 160))
    assert "MiB/s" in rates[3]
    assert "0 B/s" in rates[-1], "not the mean since the beginning"


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    display, clock = shown(jobs=BatchJobs(20, {"/another.safetensors": (GIB, GIB)}))
    for n in range(MOST_LINES + 3):
        display(Step("load", f"/a/folder/{'long name ' * 20}{n}.safetensors", total=GIB))
        display(Step("merge", f"/a/folder/{'long name ' * 20}{n}.safetensors", GIB // 3, GIB, "write"))
    clock.now += 7
    display.end("/another.safetensors")
    found = display.lines(width)
    assert all(len(text) < width for text in found)
    assert len(found) == MOST_LINES + 2
    assert "and 3 more" in found[-2]
    assert "1/20 jobs" in found[-1] and "GiB" in found[-1]


def test_redraws_are_at_most_ten_a_second_whatever_is_reported() -> None:
    display, clock = shown()
    for _ in range(1000):
        clock.now += 0.001
        display(Step("merge", "o", 1, 1000))
        display.draw()
    assert display.beats <= 11
    clock.now += BEAT
    display.draw()
    assert display.beats <= 12


def in_terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Let the variables be those of a terminal that has these and no other ones."""
    for name in (*REFLOWING, *CUTTING_TERMINALS, "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "breaks"),
    [
        ({}, False),
        ({"VTE_VERSION": "7600"}, True),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/tmux,1,0"}, True),
        ({"XTERM_VERSION": "XTerm(390)", "VTE_VERSION": "7600"}, False),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/tmux,1,0", "XTERM_VERSION": "XTerm(390)"}, False),
        ({"TERM": "screen", "STY": "1.pts", "KITTY_WINDOW_ID": "1"}, False),
    ],
)
def test_narrower_terminal_keeps_what_is_above_the_lines(
    variables: dict[str, str], breaks: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminals that break long lines get them all taken back; with others the line above stays."""
    in_terminal(monkeypatch, **variables)
    clock, columns, out = Clock(), [100], Terminal()
    out.write("kept\n")
    display = Display(out, BatchJobs(2), clock=clock, columns=lambda: columns[0])
    display(Step("merge", "a.safetensors", 1, GIB))
    display.draw()
    before = out.getvalue()
    out.seek(0)
    out.truncate()
    columns[0] = 60
    display.erase()
    old = screen(before, 60 if breaks else 100)
    rows = [row if breaks else row[:60] for row in old]
    assert screen("\n".join(rows) + out.getvalue(), 60) == ["kept", ""]


def test_lines_are_taken_back_where_the_terminal_was_made_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    in_terminal(monkeypatch, VTE_VERSION="7600")
    clock, columns = Clock(), [160]
    out = Terminal()
    display = Display(out, BatchJobs(4), clock=clock, columns=lambda: columns[0])
    display(Step("merge", "a.safetensors", 1, GIB))
    display.draw()
    out.seek(0)
    out.truncate()
    columns[0] = 80
    clock.now += 1
    display.draw()
    assert out.getvalue().startswith("\r\x1b[3A\x1b[J"), "two lines of 159 have become four rows"
    columns[0] = 200
    clock.now += 1
    out.seek(0)
    out.truncate()
    display.draw()
    assert out.getvalue().startswith("\r\x1b[1A\x1b[J")


def test_messages_go_above_the_lines() -> None:
    display, _ = shown()
    display(Step("load", "o"))
    display.draw()
    with display.paused():
        display.stream.write("[1/2] merged\n")
    assert display.stream.getvalue().endswith("\r\x1b[J[1/2] merged\n")


def test_bar_of_a_batch_moves_while_an_adapter_is_made() -> None:
    """Its share of the work, its bytes and the time that is left; and a merge of the same bytes counts for less."""
    display, clock = shown(jobs=BatchJobs(2, {"/slow": (GIB // 100, 3 * GIB), "/merged": (GIB, GIB)}))
    display(Step("make", "/slow", 0, 500))
    seen = []
    for _ in range(4):
        clock.now += 1
        display(Step("make", "/slow", 100, 500))
        seen.append(display.lines(160)[-1])
    assert len({re.search(r"\d+%", one)[0] for one in seen}) == len(seen)  # type: ignore[index]
    assert "8.19 MiB of 1.01 GiB" in seen[-1]
    assert "39%" in seen[-1], "0.6 and the proof are to come: 0.8 / 1.52 of three quarters"
    assert "400 of 500 B of weights" in display.lines(160)[0]
    display.end("/slow")
    assert "75%" in display.lines(160)[-1]


def test_names_command_no_terminal() -> None:
    display, _ = shown(jobs=BatchJobs(1))
    display(Step("load", "/a/\x1b[31mred\n.safetensors"))
    assert all("\x1b" not in text and "\n" not in text for text in display.lines(80))


def test_terminals_without_these_letters() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    display = Display(Ascii(), clock=Clock(), columns=lambda: 80)
    display(Step("merge", "o", 5, 10))
    "".join(display.lines(80)).encode("ascii")


def test_proof_alone_has_the_whole_bar() -> None:
    display, _ = shown(weights=PROOF)
    display(Step("prove", "o", 0, 0))
    display(Step("prove", "o", 25, 100))
    assert "25% of the proof" in line(display)


def test_progress_is_not_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display.watching(quiet=False) as display:
        assert display is None
    assert capsys.readouterr() == ("", "")


def test_steps_for_another_process_are_added_up() -> None:
    clock, told = Clock(), list[Step]()
    steps = StepBuffer(told.append, clock)
    steps(Step("load", "o"))
    for _ in range(100):
        clock.now += STEP_SECONDS / 20
        steps(Step("merge", "o", 3, 300))
    steps.flush()
    assert sum(s.done for s in told) == 300
    assert len(told) <= 8
    assert told[0].stage == "load"


def test_steps_of_several_threads_are_passed_on_one_at_a_time() -> None:
    """Each step has an output of its own, so that threads add to what another one passes on."""
    inside, told, before = 0, list[Step](), sys.getswitchinterval()

    def observer(step: Step) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        told.append(step)
        inside -= 1

    steps = StepBuffer(observer, clock := Clock())

    def report(thread: int) -> None:
        for n in range(1000):
            clock.now += STEP_SECONDS / 2
            steps(Step("merge", f"{thread} {n}", 1, 1))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(report, range(4)))
    finally:
        sys.setswitchinterval(before)
    steps.flush()
    assert len(told) == len(set(told)) == 4000


def passed_to(show: Progress, steps: int = 50) -> float:
    """The seconds that so many steps take whose observer is this function."""
    start = time.monotonic()
    with watched(show) as watcher:
        for _ in range(steps):
            watcher(Step("merge", "o", 1, steps))
    return time.monotonic() - start


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages of the program's log."""
    messages: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        time.sleep(1.5 * GRACE)  # a log that is slow: a run waits until it has the message
        messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("lora_merge").addHandler(handler)
    yield messages
    logging.getLogger("lora_merge").removeHandler(handler)


def test_observer_that_fails_is_named_once_and_called_no_more(logged: list[str]) -> None:
    calls: list[Step] = []

    def observer(step: Step) -> None:
        calls.append(step)
        raise ValueError("broken")

    passed_to(observer)
    assert len(calls) == 1
    (message,) = logged
    assert "the run goes on: ValueError: broken" in message and __file__ in message


@pytest.mark.few(1)
@pytest.mark.parametrize("seconds", [0.1, 60], ids=["slow", "stuck"])
def test_observer_that_is_slow_does_not_slow_the_run(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(progress, "OBSERVER_SECONDS", 0.5)
    told, end = list[Step](), threading.Event()

    def observer(step: Step) -> None:
        told.append(step)
        end.wait(seconds)

    assert passed_to(observer) < 2
    end.set()
    assert sum(step.done for step in told) == (50 if seconds < 1 else 1), "what waits is added up"


def test_quick_observer_gets_each_step_before_the_work_goes_on() -> None:
    told, context = list[Step](), ContextVar[str]("context")
    context.set("the caller's")
    with watched(lambda step: told.append(step._replace(output=context.get()))) as watcher:
        for n in range(1, 10):
            watcher(Step("merge", "o", n, 45))
            assert [(step.output, step.done) for step in told[-1:]] == [("the caller's", n)]


def test_interrupt_that_an_observer_raises_ends_the_run() -> None:
    def observer(_: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(observer) as watcher:
        watcher(Step("load", "o"))
        pytest.fail("the run has gone on")


def test_lines_that_cannot_be_drawn_fail_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    save(sd1_sample(), tmp_path / "base.safetensors")
    save(kohya(sd1_sample()), tmp_path / "style.safetensors")
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("take", "lines", "_up")):
        with monkeypatch.context() as broken:
            broken.setattr(Display, name, lambda *_: 1 / 0)
            words = ["base.safetensors", "style.safetensors", "-o", f"{number}.safetensors"]
            assert played_here(words, monkeypatch).code == 0
        assert Path(words[-1]).exists()
    assert ["ZeroDivisionError" in message for message in logged] == [True] * 3


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3725, "1:02:05")])
def test_intervals(seconds: float, text: str) -> None:
    assert interval(seconds) == text


@pytest.mark.parametrize("columns", [60, 160])
def test_merge_on_a_terminal_shows_its_stages_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(progress_display, "BEAT", 0.001)
    save(sd1_sample(), tmp_path / "base.safetensors")
    save(kohya(sd1_sample()), tmp_path / "style.safetensors")
    monkeypatch.chdir(tmp_path)
    found = played_here(["base.safetensors", "style.safetensors", "-o", "o.safetensors"], monkeypatch, columns=columns)
    assert found.code == 0
    assert found.redraws > 2
    assert " load " in found.text
    assert not any("load " in row or "%|" in row for row in found.screen), "the lines are gone at the end"
    assert any("✓ merged" in row for row in found.screen)


def test_each_redraw_is_as_wide_as_the_terminal_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever COLUMNS says, and whatever stdout is: a terminal that was made narrower breaks lines that are too long."""
    in_terminal(monkeypatch, VTE_VERSION="7600")
    with terminal(120) as (end, arrived), os.fdopen(os.dup(end), "w", encoding="utf-8") as stream:
        clock = Clock()
        display = Display(stream, BatchJobs(4), clock=clock)
        widths = (120, 60, 200)
        for columns in widths:
            fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            clock.now += 1
            display(Step("merge", "a.safetensors", GIB // 10, GIB))
            display.draw()
            assert [len(one) for one in display.drawn] == [columns - 1] * 2
        display.erase()
    sent = b"".join(part for _, part in arrived).decode()
    ups = [int(n) for n in re.findall("\x1b\\[([0-9]+)A", sent)]
    assert ups == [3, 1, 1], "two lines of 119 are four rows of 60; two of 59 are two of 200"


def test_bar_stays_where_other_parts_find_no_room() -> None:
    display, _ = shown(jobs=BatchJobs(1))
    display(Step("merge", "a-name-of-some-length.safetensors", GIB // 3, GIB, "write"))
    for width in (40, 50, 60, 80):
        for one in display.lines(width):
            assert len(re.findall(r"\|.*\|", one)[0]) > 5 and not one.endswith("Gi"), one


def test_test_of_a_machine_is_shown_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> None:
        raise UsageError("no disk", str(tmp_path), "name another folder")

    monkeypatch.setattr("lora_merge.cli.doctor.examine", broken)
    done = played_here(["doctor", str(tmp_path)], monkeypatch)
    assert done.code == 2
    assert "0:00 so far, measuring the devices and the disk" in done.text
    assert "measuring" not in "".join(done.screen)


def test_looking_at_files_has_a_share_bytes_and_a_rate(tmp_path: Path) -> None:
    """Whoever reads the numbers of files says how many bytes there are, and gets to the end of them."""
    base, ink = (
        save(sd1_sample(), tmp_path / "base.safetensors"),
        save(kohya(sd1_sample()), tmp_path / "ink.safetensors"),
    )
    for look in (
        partial(compare, base, base), partial(inspect, base, weights=True), partial(inspect, ink, weights=True),
        partial(inspect, base, ink, weights=True),
    ):  # fmt: skip
        display, clock = shown()
        steps: list[Step] = []
        look(progress=steps.append)
        first, *rest = steps
        assert first.total > 0
        for step in (first, *rest[: len(rest) // 2]):
            display(step)
            clock.now += 1
            last = line(display, 100)
        assert "%" in last
        assert "of weights" in last
        assert "/s, 0:" in last
        assert sum(step.done for step in steps) >= 0.9 * first.total  # positions are not measured
