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


LOADING = {
    1455: ("not enough memory", "paging file"),
    126: ("a library of the system is missing or too old", "vc_redist.x64.exe"),
    127: ("a library of the system is missing or too old", "vc_redist.x64.exe"),
    1114: ("a library of the system is missing or too old", "vc_redist.x64.exe"),
}


@pytest.mark.parametrize("number", LOADING)
def test_library_that_windows_does_not_load_is_one_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    failure = OSError(errno.EINVAL, 'Error loading "c10.dll" or one of its dependencies.')
    monkeypatch.setattr(failure, "winerror", number, raising=False)
    error = errors.as_resource_error(failure)
    assert error is not None and error.what == LOADING[number][0] and LOADING[number][1] in error.fix


@pytest.mark.parametrize(
    ("reason", "there"),
    [
        ("The specified module could not be found.", "vc_redist.x64.exe"),
        ("The paging file is too small for this operation to complete.", "paging file"),
    ],
)
def test_module_that_windows_does_not_load_is_one_error(
    reason: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "WINDOWS", True)
    error = errors.as_resource_error(ImportError(f"DLL load failed while importing _C: {reason}"))
    assert error is not None and there in error.fix


@pytest.mark.parametrize("number", [206, 234])
def test_path_that_windows_finds_too_long_is_one_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOENT, "The filename or extension is too long")
    monkeypatch.setattr(error, "winerror", number, raising=False)
    failure = writer.failure(error, Path("o"), 0)
    assert failure.what == "the path is longer than Windows allows" and failure.exit_code == 2


def test_file_too_large_for_a_disk_of_windows_is_for_ntfs(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    monkeypatch.setattr(writer, "WINDOWS", False)
    assert "ulimit" in writer.failure(error, Path("o"), 5 << 30).fix
    monkeypatch.setattr(writer, "WINDOWS", True)
    assert "NTFS" in writer.failure(error, Path("o"), 5 << 30).fix
