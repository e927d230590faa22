"""How an output gets its name, where the disk fails at the last moment, and with whose permissions."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_merge import publish
from lora_merge.errors import MergeError


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
def test_a_disk_that_fails_around_the_naming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, number: int, *, folder: bool
) -> None:
    """The folder is sent to the disk before and after; all is as it was, but for a file that was replaced already."""
    target = tmp_path / "new" / "out"
    if old is not None:
        put(target, old, folder=folder)
    monkeypatch.setattr(publish, "sync_folder", failing(publish.sync_folder, number, "new"))
    with pytest.raises(MergeError, match="Input/output error"):
        put(target, "a newer one", folder=folder)
    replaced = old is not None and not folder and number == 1
    assert held(target, folder=folder) == ("a newer one" if replaced else old)
    assert target.parent.exists() is (old is not None)
    assert not [p for p in tmp_path.rglob("*") if publish.PART.fullmatch(p.name)]


def test_a_temporary_name_that_cannot_be_removed_undoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", failing(Path.unlink, 0))
    with publish.replacing(tmp_path / "out") as part:
        part.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"


def test_a_temporary_file_that_cannot_be_locked_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.os, "open", failing(os.open, 1, ".part"))
    with pytest.raises(MergeError, match="Input/output error"):
        put(tmp_path / "out", "never there", folder=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="no such permissions")
@pytest.mark.parametrize("folder", [True, False])
def test_what_was_private_stays_private(tmp_path: Path, *, folder: bool) -> None:
    target = tmp_path / "out"
    put(target, "old", folder=folder)
    paths = [target / "weights", target] if folder else [target]
    for path in paths:
        path.chmod(0o700 if path.is_dir() else 0o600)
    put(target, "new", folder=folder)
    assert held(target, folder=folder) == "new"
    assert [stat.S_IMODE(p.stat().st_mode) for p in paths] == ([0o600, 0o700] if folder else [0o600])
