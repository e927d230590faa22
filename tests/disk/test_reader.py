"""Small tensors are read a page at a time, and hold what the file holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_merge import merge
from lora_merge.disk import pages, reader, remote
from lora_merge.disk.pages import PAGE, ReadAhead
from lora_merge.disk.remote import RemoteFile
from lora_merge.errors import InputError, ResourceError
from lora_merge.files.checkpoint import open_checkpoint
from tests.kit.files import save


def test_small_tensor_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path / "x")
    index = open_checkpoint(tmp_path / "x")
    with reader.Reader([index]) as files:
        with (tmp_path / "x").open("r+b") as f:
            f.truncate(index.tensors["b"].offset + 4)
        with pytest.raises(InputError):
            files.read(index.tensors["b"])


def test_every_byte_is_asked_for_and_no_page_twice_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[range] = []
    monkeypatch.setattr(pages, "advise", lambda fd, at, size, advice: asked.append(range(at, at + size)))
    ahead, pieces = (
        ReadAhead(),
        [(at, 40) for at in range(0, 5 * PAGE, 40)] + [(0, 0), (9 * PAGE - 8, 16), (9 * PAGE, 8)],
    )
    for at, size in pieces:
        ahead.expect(3, at, size)
    assert len(asked) <= 7
    touched = {at // PAGE for piece in asked for at in (piece.start, piece.stop - 1)}
    assert touched == {at // PAGE for at, size in pieces for at in (at, at + size - 1) if size}


def test_range_read_ahead_that_failed_is_read_again() -> None:
    content, failures = bytes(range(64)), [ResourceError("the network cannot be reached", "x", "run again")]

    def read(offset: int, count: int) -> bytes:
        if failures:
            raise failures.pop()
        return content[offset : offset + count]

    file, buffer = RemoteFile(len(content), read), bytearray(8)
    file.expect([(16, 8), (32, 8)])
    with pytest.raises(ResourceError):
        file.read_into(memoryview(buffer), 16)
    assert file.read_into(memoryview(buffer), 16) == 8 and bytes(buffer) == content[16:24]


def test_reads_that_were_begun_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped, and read when they are needed."""
    monkeypatch.setattr(remote, "EXPECTED", 32)
    content, reads = bytes(range(64)), list[int]()

    def read(offset: int, count: int) -> bytes:
        reads.append(offset)
        return content[offset : offset + count]

    files = [RemoteFile(len(content), read) for _ in range(4)]
    for number, file in enumerate(files):
        file.expect([(number, 16)])
    assert [len(file._expected) for file in files] == [0, 0, 1, 1]
    for number, file in enumerate(files):
        buffer = bytearray(16)
        file.read_into(memoryview(buffer), number)
        assert bytes(buffer) == content[number : number + 16]


def test_ranges_are_kept_when_larger_reads_bring_them() -> None:
    content, reads = bytes(range(256)) * 8192, list[tuple[int, int]]()

    def read(offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return content[offset : offset + count]

    file, half = RemoteFile(len(content), read), len(content) // 2
    pieces = [(300, 40), (320, 60), (half - 8, 16), (half + 500, 8)]
    file.keep(pieces)
    for start in (half, 0):
        file.read_into(memoryview(bytearray(half)), start)
    for offset, size in pieces:
        buffer = bytearray(size)
        file.read_into(memoryview(buffer), offset)
        assert bytes(buffer) == content[offset : offset + size]
    assert reads == [(half, half), (0, half)]


def test_proof_reads_what_the_merge_read_of_another_machine(tmp_path: Path) -> None:
    """All unchanged bytes are compared; only the rows that the merge recorded of a changed weight are read again."""
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(12)]
    base = {f"{name}.weight": torch.randn(512, 512).half() for name in names}
    factors = {f"{name}.lora_{side}.weight": torch.randn(shape) for name in names[:1]
               for side, shape in (("A", (4, 512)), ("B", (512, 4)))}  # fmt: skip
    path = save(base, tmp_path / "local.safetensors")
    adapter = save(factors, tmp_path / "adapter.safetensors")
    content, counts = path.read_bytes(), []
    for verify in (False, True):
        reads, source = list[int](), tmp_path / f"base{verify}.safetensors"

        def read(offset: int, count: int, reads: list[int] = reads) -> bytes:
            reads.append(count)
            return content[offset : offset + count]

        remote.place(source, RemoteFile(len(content), read))
        report = merge(source, [(adapter, 1.0)], tmp_path / f"{verify}.safetensors", verify=verify)
        assert bool(report.verified) is verify
        counts.append(sum(reads))
    assert len(content) <= counts[0] <= counts[1] < counts[0] + len(content) // 12
