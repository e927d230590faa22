"""Two runs that publish into one place, paused anywhere: a run that succeeds has its output there, unless a later one has."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lora_merge.disk import destination, publish
from lora_merge.disk import publish as temporary
from lora_merge.errors import MergeError, UsageError

FILES = {publish.__file__, destination.__file__, temporary.__file__}
REST = 10**9


class Turns:
    """Two threads of which one runs, for as many lines of the product as the schedule says, then the other."""

    def __init__(self, schedule: list[tuple[int, int]]) -> None:
        self.schedule, self.changed, self.ended = iter(schedule), threading.Condition(), [False, False]
        self.lines = [0, 0]
        self.who, self.left = next(self.schedule)

    def wait(self, me: int) -> None:
        while self.who != me and not self.ended[1 - me]:
            assert self.changed.wait(60), "both wait"

    def line(self, me: int) -> None:
        """Called before each line: pause if this thread has had its lines."""
        with self.changed:
            self.wait(me)
            self.lines[me] += 1
            self.left -= 1
            if self.left < 0 and not self.ended[1 - me]:
                self.who, self.left = next(self.schedule, (1 - me, REST))
                self.changed.notify_all()
                self.wait(me)

    monotonic = staticmethod(time.monotonic)

    def sleep(self, _: float) -> None:
        """In place of `time.sleep`: whoever waits for a lock lets the other run."""
        with self.changed:
            me = int(threading.current_thread().name)
            if not self.ended[1 - me]:
                self.who, self.left = 1 - me, REST
                self.changed.notify_all()
                self.wait(me)

    def trace(self, me: int) -> Any:
        def inside(frame: FrameType, event: str, arg: object) -> Any:
            if event == "line":
                self.line(me)
            return inside

        return lambda frame, *_: inside if frame.f_code.co_filename in FILES else None

    def run(self, acts: list[Callable[[], None]]) -> list[Exception | None]:
        """The error of each act, None where it succeeded."""
        errors: list[Exception | None] = [None, None]

        def work(me: int) -> None:
            sys.settrace(self.trace(me))
            try:
                acts[me]()
            except Exception as e:  # noqa: BLE001
                errors[me] = e
            finally:
                sys.settrace(None)
                with self.changed:
                    self.ended[me] = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(me,), name=str(me)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def put(target: Path, text: str, *, overwrite: bool, folder: bool) -> None:
    with publish.replacing(target, overwrite=overwrite, folder=folder, contents=["weights"]) as part:
        (part / "weights" if folder else part).write_text(text)


def schedules(lines: int) -> Iterator[list[tuple[int, int]]]:
    """One runs for a while, the other for a while, then the first to its end: at moments all over both."""
    pauses = (range(3, lines, lines // 4), range(lines // 2, lines + lines // 10, lines // 8))
    for n, (i, j) in enumerate(itertools.product(*pauses)):
        yield [(n % 2, i), (1 - n % 2, j), (n % 2, REST)]


SCENES = [
    *(("swap", folder, overwrite, old, failing) for folder in (True, False) for failing in (True, False)
      for overwrite, old in ((True, "old"), (True, None), (False, None))),
    *((names, folder, True, "old", False) for names in ("link", "rename") for folder in (True, False)),
    ("link", True, True, "old", True), ("link", False, True, "old", True), ("rename", False, False, None, False),
]  # fmt: skip
"""What the file system can do with names: swap two, link, or only rename; what is published, and whether the first
flush of the folder after a rename fails, so that this run takes its rename back."""


@pytest.mark.few(2)
@pytest.mark.skipif(not temporary.CAN_LOCK, reason="runs take turns by a lock")
@pytest.mark.parametrize(("names", "folder", "overwrite", "old", "failing"), SCENES)
def test_run_that_succeeds_has_its_output_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, *, folder: bool, overwrite: bool, old: str | None,
    failing: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(publish.os, "fsync", lambda _: None)
    if names != "swap":
        monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    if names == "rename":
        monkeypatch.setattr(publish.os, "link", lambda *_, **__: fail(errno.EOPNOTSUPP))
    named: list[str] = []  # in the order of the renames
    make, sync, state = publish._publish, publish.sync_folder, {"fails": False}

    def synced(path: Path) -> None:
        if state.pop("fails", False):
            fail(errno.EIO)
        sync(path)

    def published(part: Path, target: Path, **more: Any) -> Path | None:
        text = held(part, folder=folder)
        state["fails"] = failing and not state.setdefault("failed", False)
        state["failed"] = True
        kept = make(part, target, **more)
        named.append(str(text))
        return kept

    put(tmp_path / "first", "", overwrite=False, folder=folder)
    monkeypatch.setattr(publish, "sync_folder", synced)
    monkeypatch.setattr(publish, "_publish", published)
    for n, schedule in enumerate(schedules(190)):
        target = tmp_path / str(n) / "out"
        if old is not None:
            target.parent.mkdir()
            if folder:
                target.mkdir()
            (target / "weights" if folder else target).write_text(old)
        named.clear()
        state.clear()
        turns = Turns(schedule)
        monkeypatch.setattr(publish, "time", turns)
        errors = turns.run([partial(put, target, who, overwrite=overwrite, folder=folder) for who in "AB"])
        assert all(e is None or isinstance(e, MergeError) for e in errors), (schedule, errors)
        assert sorted(named) == ["AB"[me] for me in (0, 1) if errors[me] is None], (schedule, errors)
        assert len(named) >= (2 if overwrite else 1) - failing, (schedule, errors)
        found = held(target, folder=folder)
        assert found == (named[-1] if named else old), (schedule, errors, named)
        assert [p.name for p in tmp_path.glob(f"{n}/*")] == (["out"] if found else []), schedule


def held(path: Path, *, folder: bool) -> str | None:
    file = path / "weights" if folder else path
    return file.read_text() if file.exists() else None


@pytest.mark.skipif(not temporary.CAN_LOCK, reason="runs take turns by a lock")
def test_turn_that_never_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process must not hang all others."""
    monkeypatch.setattr(publish, "TURN_SECONDS", 0.0)
    with publish._turn(tmp_path), pytest.raises(UsageError, match="does not finish"):
        put(tmp_path / "out", "", overwrite=False, folder=False)
    assert list(tmp_path.iterdir()) == []
    put(tmp_path / "out", "later", overwrite=False, folder=False)


def test_folder_that_another_run_removes_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails removes the folders that it made."""
    make, tries = publish.create, itertools.count()

    def made(target: Path, *, folder: bool) -> tuple[Path, int]:
        if next(tries) < 2:
            target.parent.rmdir()
        return make(target, folder=folder)

    monkeypatch.setattr(publish, "create", made)
    put(tmp_path / "new" / "out", "there", overwrite=False, folder=False)
    assert (tmp_path / "new" / "out").read_text() == "there"
