"""How an output gets its name, where the disk fails at the last moment, and with whose permissions."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from lora_merge.disk import destination, publish, writer
from lora_merge.disk import publish as temporary
from lora_merge.disk.locks import claimed
from lora_merge.errors import MergeError

PART = "lora-merge.part"


def put(target: Path, text: str, *, folder: bool) -> None:
    """Published by way of `replacing`."""
    with publish.replacing(target, overwrite=True, folder=folder, contents=["weights"]) as part:
        (part / "weights" if folder else part).write_text(text)


def held(target: Path, *, folder: bool) -> str | None:
    path = target / "weights" if folder else target
    return path.read_text() if path.exists() else None


def failing(call: Callable[..., object], number: int, suffix: str = "") -> Callable[..., object]:
    """The call, which fails the first time (from 0) that it is called so often with a path that ends so."""
    count = iter(range(10**6))

    def called(path: object, *args: object, **more: object) -> object:
        if str(path).endswith(suffix) and next(count) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return call(path, *args, **more)

    return called


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("old", ["an older one", None])
@pytest.mark.parametrize("number", [0, 1])
def test_disk_that_fails_around_the_naming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, number: int, *, folder: bool
) -> None:
    """The folder is sent to the disk before and after; all is as it was."""
    target = tmp_path / "new" / "out"
    if old is not None:
        put(target, old, folder=folder)
    monkeypatch.setattr(publish, "sync_folder", failing(publish.sync_folder, number, "new"))
    with pytest.raises(MergeError, match="Input/output error"):
        put(target, "a newer one", folder=folder)
    assert held(target, folder=folder) == old
    assert target.parent.exists() is (old is not None)
    assert not [p for p in tmp_path.rglob("*") if "lora-merge" in p.name]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("call", ["open", "fsync", "close"])
def test_failed_last_flush_where_names_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, *, links: bool, folder: bool
) -> None:
    """The last flush of the folder fails at any of its calls. Without links, a replaced file is gone before it."""
    target = tmp_path / "out"
    put(target, "an older one", folder=folder)
    monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    if not links:
        monkeypatch.setattr(publish.os, "link", failing(os.link, 0))
    failed_at_last(monkeypatch, call)
    with pytest.raises(MergeError, match="Input/output error"):
        put(target, "a newer one", folder=folder)
    monkeypatch.undo()
    assert held(target, folder=folder) == ("an older one" if links or folder else "a newer one")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    put(target, "a newer one", folder=folder)
    assert held(target, folder=folder) == "a newer one"


def failed_at_last(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The second flush of the output's folder fails in this system call."""
    sync, count = publish.sync_folder, iter(range(10))

    def called(path: Path) -> None:
        if next(count) != 1:
            sync(path)
            return
        with monkeypatch.context() as patch:
            real = getattr(os, call)
            patch.setattr(os, call, lambda *args: (call == "close" and real(*args), fail())[1])
            sync(path)

    monkeypatch.setattr(publish, "sync_folder", called)


class UnreliableNames:
    """Calls that give names, of which the n-th (from 0) loses its reply, or does nothing and reports success."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, number: int, *, swaps: bool) -> None:
        self._kind, self._number, self.calls = kind, number, 0
        for name in ("rename", "replace", "link"):
            patch.setattr(os, name, self._unreliable(getattr(os, name)))
        swap = self._unreliable(publish.swap_names)
        patch.setattr(publish, "swap_names", self._numbered(swap) if swaps else lambda *_: errno.EINVAL)

    def _unreliable(self, call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **more: object) -> object:
            number, self.calls = self.calls, self.calls + 1
            if number != self._number:
                return call(*args, **more)
            if self._kind == "lie":
                return 0
            call(*args, **more)
            raise OSError(getattr(errno, self._kind), "the reply is lost")

        return called

    def _numbered(self, call: Callable[..., object]) -> Callable[..., object]:
        """The call with the number of its error as its result."""

        def called(*args: object) -> object:
            try:
                return call(*args)
            except OSError as e:
                return e.errno

        return called


@pytest.mark.few(7)
@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("old", ["an older one", None])
@pytest.mark.parametrize("kind", ["lie", "EIO", "ENOENT", "EEXIST", "ETIMEDOUT"])
def test_result_of_a_call_that_gives_a_name_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, old: str | None, *, folder: bool, swaps: bool
) -> None:
    """Success means that the new output has the name, failure that the old one has it. Nothing else stays."""
    target = tmp_path / "out"
    for number in range(5):
        if old is not None:
            put(target, old, folder=folder)
        with monkeypatch.context() as patch:
            names = UnreliableNames(patch, kind, number, swaps=swaps)
            try:
                publish_once(target, "a newer one", overwrite=old is not None, folder=folder)
                expected: str | None = "a newer one"
            except MergeError:
                expected = old
        if number >= names.calls:
            break
        assert held(target, folder=folder) == expected, number
        assert [p.name for p in tmp_path.iterdir()] == ["out"] * target.exists(), number
        if kind != "lie":
            assert expected == "a newer one", "only the reply was lost"
        temporary.remove(target)
    else:
        raise AssertionError("the last fault hit no call")


def publish_once(target: Path, text: str, *, overwrite: bool, folder: bool) -> None:
    with publish.replacing(target, overwrite=overwrite, folder=folder, contents=["weights"]) as part:
        (part / "weights" if folder else part).write_text(text)


@pytest.mark.parametrize("lies", [True, False])
@pytest.mark.parametrize("numbers", [range(2, 10**6), [0] * 100])
def test_file_systems_whose_inodes_follow_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int], *, lies: bool
) -> None:
    """Some FUSE drivers number files by their paths, others not at all: an output with another inode is no failure, an
    old one is."""
    target, look, count = tmp_path / "out", publish._look, iter(numbers)

    class Numbered:
        """The same facts with a new inode for each look at a changed name."""

        def __init__(self, real: os.stat_result, inode: int) -> None:
            self.st_dev, self.st_size, self.st_mtime_ns = real.st_dev, real.st_size, real.st_mtime_ns
            self.st_ino = inode

    inodes: dict[tuple[Path, int], int] = {}

    def numbered(path: Path) -> object:
        real = look(path)
        return None if real is None else Numbered(real, inodes.setdefault((path, real.st_ino), next(count)))

    put(target, "an older one", folder=False)
    os.utime(target, ns=(10**18, 10**18))
    with monkeypatch.context() as patch:
        patch.setattr(publish, "LOCK", ".lock")  # the open file has a number of its own there
        patch.setattr(publish, "_look", numbered)
        if lies:
            patch.setattr(publish, "swap_names", lambda *_: 0)
            patch.setattr(os, "replace", lambda *_: None)
            with pytest.raises(MergeError, match="another file has it"):
                put(target, "a newer one", folder=False)
        else:
            put(target, "a newer one", folder=False)
    assert held(target, folder=False) == ("an older one" if lies else "a newer one")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("finished", [True, False])
def test_folder_of_a_killed_run_gets_its_name_back(tmp_path: Path, *, finished: bool) -> None:
    """Killed between the two renames that replace it; it is removed if the new one has the name."""
    target = tmp_path / "out"
    put(target, "an older one", folder=True)
    part = tmp_path / f".out.0123456789ab.{PART}"
    target.rename(part.with_name(part.name + temporary.OLD))
    (target if finished else part).mkdir()
    ((target if finished else part) / "weights").write_text("a newer one")
    temporary.remove_stale(tmp_path)
    assert held(target, folder=True) == ("a newer one" if finished else "an older one")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be locked there")
@pytest.mark.parametrize("named", [True, False])
def test_old_folder_of_a_running_process_stays(tmp_path: Path, *, named: bool) -> None:
    target = tmp_path / "out"
    part, lock = temporary.create(target, folder=True)
    old = part.with_name(part.name + temporary.OLD)
    old.mkdir()
    if named:
        part.rename(target)
    temporary.remove_stale(tmp_path)
    assert old.exists()
    os.close(lock)
    temporary.remove_stale(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_old_folder_whose_name_was_cut_stays(tmp_path: Path) -> None:
    """Its name is not known whole: another folder may have the beginning of it."""
    part = temporary.sibling(tmp_path / ("é" * 120))
    old = part.with_name(part.name + temporary.OLD)
    old.mkdir()
    temporary.remove_stale(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [old.name]


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("lock", ["", ".lock"])
def test_temporary_file_whose_first_close_fails_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    monkeypatch.setattr(publish, "LOCK", lock)
    close, count = os.close, iter(range(10))

    def closed(fd: int) -> None:
        close(fd)
        if next(count) == 0:
            fail()

    monkeypatch.setattr(publish.os, "close", closed)
    with pytest.raises(MergeError, match="Input/output error"):
        put(tmp_path / "out", "never there", folder=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="a folder with an open file cannot be moved there")
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_folder_that_is_moved_away_is_emptied(tmp_path: Path, *, stopped: bool, folder: bool) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "other").write_text("kept")
    with (
        pytest.raises((MergeError, KeyboardInterrupt)),
        publish.replacing(tmp_path / "here" / "out", folder=folder) as part,
    ):
        (part / "weights" if folder else part).write_text("half")
        (tmp_path / "here").rename(tmp_path / "there")
        if stopped:
            raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["other"]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("claim", [True, False])
def test_names_of_new_folders_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, claim: bool, folder: bool
) -> None:
    """Up to the first that was there, before the output has its name; also where a claim has made them."""
    synced: list[Path] = []
    target = tmp_path / "a" / "b" / "c" / "out"
    sync = publish.sync_folder
    monkeypatch.setattr(publish, "sync_folder", lambda path: (synced.append(path), sync(path)))
    with claimed(target) if claim else nullcontext():
        put(target, "new", folder=folder)
    before = synced[: synced.index(target.parent)]
    assert [p for p in before if PART not in p.name] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    put(target, "newer", folder=folder)
    assert tmp_path not in synced


def test_temporary_name_that_cannot_be_removed_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", failing(Path.unlink, 0))
    with publish.replacing(tmp_path / "out") as part:
        part.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"


def test_temporary_file_that_cannot_be_locked_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.os, "open", failing(os.open, 1, ".part"))
    with pytest.raises(MergeError, match="Input/output error"):
        put(tmp_path / "out", "never there", folder=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="no such permissions")
@pytest.mark.parametrize("folder", [True, False])
def test_private_files_stay_private(tmp_path: Path, *, folder: bool) -> None:
    target = tmp_path / "out"
    put(target, "old", folder=folder)
    paths = [target / "weights", target] if folder else [target]
    for path in paths:
        path.chmod(0o700 if path.is_dir() else 0o600)
    put(target, "new", folder=folder)
    assert held(target, folder=folder) == "new"
    assert [stat.S_IMODE(p.stat().st_mode) for p in paths] == ([0o600, 0o700] if folder else [0o600])


@pytest.mark.skipif(os.name == "nt", reason="no such permissions")
def test_private_card_or_report_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    publish.put_file(path, b"old", mode=0o600)
    publish.put_file(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing tells which files are open")
@pytest.mark.parametrize("folder", [True, False])
def test_no_file_stays_open(tmp_path: Path, *, folder: bool) -> None:
    """After stale temporary files were swept, an output was named, refused or failed: a batch does it thousands of times."""

    def opened() -> list[str]:
        return sorted(str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())

    target = tmp_path / "out"
    put(target, "one", folder=folder)
    before = opened()
    for n in range(5):
        stale = tmp_path / f".out.{n:012x}.{PART}"
        stale.mkdir() if folder else stale.touch()
    temporary.remove_stale(tmp_path)
    put(target, "another", folder=folder)
    with pytest.raises(RuntimeError), publish.replacing(target, overwrite=True, folder=folder, contents=["weights"]):
        raise RuntimeError
    with pytest.raises(MergeError), publish.replacing(target, folder=folder):
        raise AssertionError("the output exists")
    assert opened() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_open_output_of_windows_is_refused_and_leaves_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "o.safetensors"
    out.write_text("old")
    unlink = Path.unlink

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Access denied", str(path))

    def remove(path: Path, *, missing_ok: bool = False) -> None:
        if path.exists() and path.samefile(out):  # under any name: another program has it open
            refuse(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(publish, "CAN_OPEN_FOLDERS", False)
    monkeypatch.setattr(publish, "swap_names", lambda *_: None)
    monkeypatch.setattr(writer, "WINDOWS", True)
    monkeypatch.setattr(Path, "unlink", remove)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(MergeError) as caught, publish.replacing(out, overwrite=True) as part:
        part.write_text("new")
    assert "close the program" in str(caught.value.fix)
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_read_only_output_of_windows_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"
    out.write_text("old")
    out.chmod(0o444)
    monkeypatch.setattr(destination, "WINDOWS", True)
    with pytest.raises(MergeError, match="read-only") as caught, publish.replacing(out, overwrite=True):
        pytest.fail("the work began")
    assert "attrib -r" in str(caught.value.fix)
