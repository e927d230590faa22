"""Failures of the system as the errors that users see, with what helps on the system at hand."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lora_merge import errors
from lora_merge.disk import writer

FAILURES = {
    "memory": (MemoryError(), "paging file"),
    "threads": (RuntimeError("can't start new thread"), "close other programs"),
    "files": (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "close other programs"),
}


@pytest.mark.parametrize(("failure", "there"), FAILURES.values(), ids=FAILURES)
def test_limit_is_raised_where_there_is_one(failure: Exception, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixes = []
    for windows in (False, True):
        monkeypatch.setattr(errors, "WINDOWS", windows)
        error = errors.as_resource_error(failure)
        assert error is not None
        fixes.append(str(error.fix))
    assert "ulimit" in fixes[0] and "ulimit" not in fixes[1] and there in fixes[1]


def test_file_too_large_for_a_disk_of_windows_is_for_ntfs(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "ulimit" in writer.failure(error, Path("o"), 5 << 30).fix
    monkeypatch.setattr(writer, "WINDOWS", True)
    assert "NTFS" in writer.failure(error, Path("o"), 5 << 30).fix
