"""Claims where the system behaves otherwise than Linux on a disk of its own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lora_merge.disk import locks
from lora_merge.disk.locks import claim_path, claimed, sweep


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_disk_without_locks_claims_nothing_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(locks, "lock_descriptor", refuse)
    output = tmp_path / "o.safetensors"
    with claimed(output, wait=True) as ours, claimed(output, wait=True) as again:
        assert (ours, again) == (True, True)
    assert not [*tmp_path.iterdir()]


def test_claim_goes_where_open_files_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    opened: set[str] = set()
    open_file, unlink, close = os.open, Path.unlink, os.close

    def opening(path: str | Path, *rest: int) -> int:
        opened.add(str(path))
        return open_file(path, *rest)

    def closing(fd: int) -> None:
        opened.clear()
        close(fd)

    def unlinking(self: Path, **options: bool) -> None:
        if str(self) in opened:
            raise PermissionError(errno.EACCES, "The file is used by another process", str(self))
        unlink(self, **options)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "close", closing)
    monkeypatch.setattr(Path, "unlink", unlinking)
    output = tmp_path / "o.safetensors"
    with claimed(output) as ours:
        assert ours
        assert claim_path(output).exists()
    assert not [*tmp_path.iterdir()]
    claim_path(output).write_text("of a dead process")
    sweep(tmp_path)
    assert not [*tmp_path.iterdir()]
