"""Writers on every kind of file system and failure. Run: pytest tests/disk/test_writer.py"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.disk import volumes
from lora_merge.disk import writer as disk
from lora_merge.disk.pages import HUGE_PAGE, PAGE, address, aligned_buffer
from lora_merge.disk.volumes import Mode, file_system, free_bytes
from lora_merge.disk.writer import Writer, amend, copy_file
from lora_merge.errors import MergeError, ResourceError, UsageError
from tests.kit.pairs import examples

ROOT = Path(__file__).parents[2]


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def write(path: Path, pieces: list[memoryview], mode: Mode = "auto", order: Sequence[int] | None = None) -> Writer:
    path.touch()
    with Writer(path, sum(map(len, pieces)), mode) as w:
        ends = list(accumulate(map(len, pieces)))
        for n in range(len(pieces)) if order is None else order:
            w.write(pieces[n], ends[n] - len(pieces[n]))
        w.finish()
    return w


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One folder on the usual disk, one in memory where there is such a file system."""
    shm = Path("/dev/shm")
    found = [tmp_path_factory.mktemp("disk")]
    if shm.is_dir() and os.access(shm, os.W_OK):
        found.append(shm)
    return found


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 4095, 4096, 4097, 8192, 12_345, 70_000]), max_size=6),
    mode=st.sampled_from(["auto", "direct", "buffered"]),
    shift=st.sampled_from(["congruent", "odd", "readonly"]),
    data=st.data(),
)
def test_bytes_in_any_order_are_written_in_place(
    folders: list[Path], sizes: list[int], mode: Mode, shift: str, data: st.DataObject
) -> None:
    content, pieces, at = pattern(sum(sizes)), [], 0
    for size in sizes:
        if shift == "readonly":
            pieces.append(memoryview(content)[at : at + size])
        else:
            lead = at % PAGE if shift == "congruent" else 3
            pieces.append(aligned_buffer(lead + size)[lead:])
            pieces[-1][:] = content[at : at + size]
        at += size
    order = data.draw(st.permutations(range(len(pieces))))
    for folder in folders:
        path = folder / f"lora-merge-test-{os.getpid()}"
        try:
            write(path, pieces, mode, order)
            assert path.read_bytes() == content
        finally:
            path.unlink()


def test_congruent_memory_is_not_copied(tmp_path: Path) -> None:
    """A window at any offset whose memory has the offset's residue goes to the disk as it is."""
    path = tmp_path / "x"
    path.touch()
    buffer = aligned_buffer(PAGE * 5)
    with Writer(path, 100 + PAGE * 3, "direct") as w:
        w.write(buffer[100 : 100 + PAGE * 3], 100)
        w.write(memoryview(pattern(100)), 0)
        assert w._bounce is None
        w.finish()
    assert path.stat().st_size == 100 + PAGE * 3


def test_buffers_begin_at_a_page() -> None:
    assert address(aligned_buffer(10)) % PAGE == 0
    assert len(aligned_buffer(10)) == 10
    assert len(aligned_buffer(0)) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux how it holds the memory")
def test_large_buffers_lie_in_huge_pages_and_not_in_forks() -> None:
    """Otherwise a direct request ends after 254 scattered pages, and a fork during one splits them."""
    buffer = aligned_buffer(HUGE_PAGE * 2 + 5)
    start = address(buffer)
    assert (start % HUGE_PAGE, len(buffer), bytes(buffer)) == (0, HUGE_PAGE * 2 + 5, bytes(HUGE_PAGE * 2 + 5))
    smaps = Path("/proc/self/smaps").read_text()
    held = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:\w+: .*\n)*?VmFlags: (.*)$", smaps, re.MULTILINE)
    (flags,) = (flags.split() for low, high, flags in held if int(low, 16) <= start < int(high, 16))
    assert "dc" in flags  # not copied on fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    data = aligned_buffer(50_001)
    data[:] = pattern(50_001)
    write(tmp_path / "x", [data], mode)
    assert (tmp_path / "x").read_bytes() == bytes(data)


def test_mount_points_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of mounts has spaces, tabs, line ends and backslashes in octal, and other bytes as they are."""
    point = tmp_path / "a b\tc\nd\\e\x85\udcff"
    beside = point.with_name(f"{point.name}2")
    try:
        point.mkdir()
        beside.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    told = str(point).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")
    table = f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {told} rw shared:1 - exfat /dev/b rw\n"
    (tmp_path / "mountinfo").write_text(table, encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(volumes, "MOUNTS", tmp_path / "mountinfo")
    assert [file_system(p) for p in (tmp_path, point, point / "file", beside)] == ["ext4", "exfat", "exfat", "ext4"]


def test_file_system_that_refuses_direct_writes_late_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = os.pwrite

    def refuse(fd: int, data: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    data = aligned_buffer(50_001)
    data[:] = pattern(50_001)
    assert not write(tmp_path / "x", [data], "direct").direct
    assert (tmp_path / "x").read_bytes() == bytes(data)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, ResourceError),
        (errno.EDQUOT, ResourceError),
        (errno.EFBIG, ResourceError),
        (errno.EIO, MergeError),
        (errno.EROFS, UsageError),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_failures_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[MergeError], call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk, "RESERVES", {file_system(tmp_path)})
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(MergeError) as caught:
        write(tmp_path / "x", [memoryview(b"x" * 10_000)])
    assert type(caught.value) is kind
    assert str(tmp_path) in caught.value.where


def test_limit_on_file_size_is_a_typed_error(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from lora_merge.disk.writer import Writer
        from lora_merge.errors import ResourceError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        path = Path(sys.argv[1]); path.touch()
        try:
            with Writer(path, 2 << 20) as w:
                w.write(memoryview(bytes(2 << 20)), 0)
        except ResourceError as e:
            print(e.exit_code)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x")],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stdout.strip() == "5"


def test_dirty_data_does_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the cache, everything older than BEHIND has been waited for."""
    monkeypatch.setattr(disk, "BEHIND", 1 << 20)
    path = tmp_path / "x"
    path.touch()
    block = aligned_buffer(1 << 18)
    with Writer(path, 4 << 20, "buffered") as w:
        for n in range(16):
            w.write(block, n << 18)
            assert sum(size for _, size in w._dirty) < 1 << 20
        w.finish()


def test_write_that_fails_on_its_way_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of it once, to whoever waits for the range; the fsync at the end succeeds."""

    def lost(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(disk, "BEHIND", 1 << 20)
    monkeypatch.setattr(disk, "_sync_range", lost)
    path = tmp_path / "x"
    path.touch()
    with Writer(path, 2 << 20, "buffered") as w, pytest.raises(ResourceError, match="no space left"):
        w.write(aligned_buffer(2 << 20), 0)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_space_that_cannot_be_reserved_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As of files without extents on ext4: the C library tries to write each block, which direct writes refuse."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk, "RESERVES", {file_system(tmp_path)})
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert write(tmp_path / "x", [memoryview(pattern(10_000))])


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("size", [100, 8192, 10_000])
def test_amended_bytes_reach_the_file(tmp_path: Path, mode: Mode, size: int) -> None:
    path = tmp_path / "x"
    path.touch()
    with Writer(path, size, mode) as w:
        w.write(memoryview(pattern(size)), 0)
        w.finish()
    amend(path, b"hash")
    assert path.read_bytes() == b"hash" + pattern(size)[4:]


def test_free_bytes_of_a_path_that_is_yet_to_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b" / "c") > 0
    with pytest.raises(ResourceError, match="no space left"):
        disk.require_space(tmp_path / "a", 1 << 62)


def test_copies_are_equal_and_never_over_something(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pattern(3_000_000))
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == pattern(3_000_000)
    with pytest.raises(MergeError):
        copy_file(tmp_path / "a", tmp_path / "b")


def test_names_in_other_letters_are_one_file_where_the_folder_lists_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by FUSE on exFAT, where each spelling of a name has an inode of its own."""
    one, two = tmp_path / "base.safetensors", tmp_path / "BASE.SAFETENSORS"
    one.touch()
    assert not volumes.same(one, two), "one of them is not there"
    two.touch()
    if len([*tmp_path.iterdir()]) < 2:
        pytest.skip("this file system ignores case")
    assert not volumes.same(one, two)
    assert not volumes.ignores_case(tmp_path / "to" / "come")
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: (path for path in iterdir(folder) if path != two))
    assert volumes.same(one, two)
    assert volumes.same(two, one)
    assert volumes.ignores_case(tmp_path / "to" / "come")
    assert not volumes.same(one, tmp_path)
