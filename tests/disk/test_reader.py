"""Small tensors are read a page at a time, and hold what the file holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_merge.disk import pages, reader
from lora_merge.disk.pages import PAGE, ReadAhead
from lora_merge.errors import InputError
from lora_merge.files.checkpoint import open_checkpoint


def test_small_tensors_beside_each_other_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{i:04}": torch.randn(1 + i % 37, dtype=torch.float64).to(torch.bfloat16) for i in range(3000)}
    save_file({**tensors, "large": torch.randn(700)}, tmp_path / "x")
    reads: list[int] = []
    read = reader.read_at

    def counted(fd: int, buffer: memoryview, offset: int) -> int:
        reads.append(offset)
        return read(fd, buffer, offset)

    monkeypatch.setattr(reader, "read_at", counted)
    index = open_checkpoint(tmp_path / "x")
    with reader.Reader([index]) as files:
        for name, info in index.tensors.items():
            whole = bytes(files.read(info))
            if name != "large":
                assert torch.equal(torch.frombuffer(bytearray(whole), dtype=torch.bfloat16), tensors[name])
            assert bytes(files.read(info, 2, info.nbytes - 2)) == whole[2:]
    assert len(reads) < 4 * (tmp_path / "x").stat().st_size / PAGE + 10


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
