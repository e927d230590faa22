"""A file whose data are written before its header."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_merge.disk import draft as module
from lora_merge.disk.draft import Draft, Heap, HeapBytes
from lora_merge.disk.publish import replacing
from lora_merge.errors import ResourceError
from tests.kit.pairs import examples


def made(target: Path, *, room: int = 0, hashed: bool = False, most: int = 0) -> Draft:
    return Draft(target, partial(replacing, target, (), overwrite=True), room=room, hashed=hashed, most=most)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 70), max_size=12),
    limits=st.fixed_dictionaries({"IN_MEMORY": st.integers(0, 200), "WRITE_BATCH": st.integers(1, 90), "QUEUED": st.just(1),
                                  "COPY_BYTES": st.integers(1, 50)}),
    options=st.fixed_dictionaries({"room": st.integers(0, 60), "hashed": st.booleans()}),
    header=st.integers(1, 60),
)  # fmt: skip
def test_all_bytes_are_behind_the_header_whatever_room_was_left(
    tmp_path: Path, sizes: list[int], limits: dict[str, int], options: dict[str, Any], header: int
) -> None:
    parts = [os.urandom(size) for size in sizes]
    whole, target = b"".join(parts), tmp_path / "out"
    target.unlink(missing_ok=True)
    with patch.multiple(module, **limits), made(target, **options) as draft:
        put = [draft.put(memoryview(part)) for part in parts]
        assert [b"".join(one.pieces()) for one in put] == parts
        assert draft.sha256() == hashlib.sha256(whole).hexdigest()
        size = draft.complete(lambda least: b"h" * max(least, header))
        assert not target.exists()
        draft.publish()
    found = target.read_bytes()
    assert found == b"h" * (size - len(whole)) + whole
    assert size == len(found) <= max(options["room"], header) + len(whole)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("room", [0, 60, 1000])
def test_heap_has_all_bytes_however_puts_and_reads_alternate(tmp_path: Path, room: int) -> None:
    with patch.object(module, "COPY_BYTES", 16), closing(Heap(tmp_path, room)) as heap:
        stored: list[tuple[HeapBytes, bytes]] = []
        for size in (40, 0, 33, 1, 70, 16):
            part = os.urandom(size)
            stored.append((heap.put(memoryview(part)), part))
            for one, whole in reversed(stored):
                assert b"".join(islice(one.pieces(), 10)) == whole
    assert not [*tmp_path.iterdir()]


def test_draft_that_is_not_published_is_removed(tmp_path: Path) -> None:
    with patch.multiple(module, IN_MEMORY=10, WRITE_BATCH=1), made(tmp_path / "out") as draft:
        draft.put(memoryview(b"x" * 20))
        assert len([*tmp_path.iterdir()]) == 1
    assert not [*tmp_path.iterdir()]


def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with (
        patch.multiple(module, IN_MEMORY=10, WRITE_BATCH=1, write_at=full),
        pytest.raises(ResourceError, match="no space left"),
        made(tmp_path / "out") as draft,
    ):
        for _ in range(60):
            draft.put(memoryview(b"x" * 20))
    assert not [*tmp_path.iterdir()]


def test_full_disk_shows_how_much_the_file_needs_at_most(tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with (
        patch.multiple(module, IN_MEMORY=10, WRITE_BATCH=1, write_at=full),
        pytest.raises(ResourceError, match=r"up to 5\.00 KiB needed"),
        made(tmp_path / "o", most=5120) as draft,
    ):
        for _ in range(60):
            draft.put(memoryview(b"x" * 20))
