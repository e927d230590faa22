"""What the page cache holds, as the system says it, by the newer call and by the older one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_merge.disk import pages
from lora_merge.disk.pages import PAGE, Unknown, aligned_buffer, holds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what its page cache holds")

PAGES = 2048  # each half larger than the largest piece that a cache holds as one


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file whose pages were written out, so that they can leave the cache; its first half did."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE))
    f = os.open(path, os.O_RDONLY)
    os.fsync(f)
    os.posix_fadvise(f, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(f, 0, PAGES // 2 * PAGE, os.POSIX_FADV_DONTNEED)
    yield f
    os.close(f)


def needs_the_newer_call(fd: int) -> None:
    if pages._pages(fd, PAGES // 2 * PAGE, PAGE) != 1 or pages._pages(fd, 0, PAGE):
        pytest.skip("this system counts no pages, or keeps its own cache")


def test_range_is_held_only_when_whole(fd: int) -> None:
    needs_the_newer_call(fd)
    middle = PAGES // 2
    assert holds(fd, middle * PAGE, aligned_buffer(middle * PAGE))
    assert not holds(fd, 0, aligned_buffer(PAGE))
    assert not holds(fd, (middle - 1) * PAGE, aligned_buffer(2 * PAGE))
    assert not holds(fd, 0, aligned_buffer(PAGES * PAGE))


def test_asking_reads_nothing(fd: int) -> None:
    needs_the_newer_call(fd)
    for _ in range(100):
        assert not holds(fd, 0, aligned_buffer(PAGES // 2 * PAGE))
    assert pages._pages(fd, 0, PAGES * PAGE) == PAGES // 2


def test_range_still_on_its_way_is_not_held(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocking(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(pages, "_pages", lambda _fd, _offset, size: size // PAGE)
    monkeypatch.setattr(os, "preadv", blocking)
    assert not holds(fd, 0, aligned_buffer(PAGES * PAGE))


def test_older_system_is_asked_by_reading(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_CACHESTAT", 4095)  # no kernel has a call of this number
    monkeypatch.setattr(pages, "_counted", True)
    assert holds(fd, PAGES // 2 * PAGE, aligned_buffer(PAGES // 2 * PAGE))
    assert not pages._counted  # not asked a second time


def test_system_that_says_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_counted", False)
    monkeypatch.setattr(pages, "NO_WAIT", 0)
    with pytest.raises(Unknown):
        holds(fd, 0, aligned_buffer(PAGE))
