"""Headers, folders, pickles and readers. Run: pytest tests/test_checkpoint.py"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from lora_merge.checkpoint import (
    ITEM_BITS,
    open_checkpoint,
    read_bytes,
)
from lora_merge.header import parse

quick = settings(deadline=None, derandomize=True, database=None)


def blob(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def library_accepts(content: bytes) -> bool:
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


def we_accept(content: bytes) -> bool:
    (length,) = struct.unpack("<Q", content[:8])
    try:
        parse(content[8 : 8 + length], Path("x"), len(content))
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- differential


json_numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**53, 2**63, 2**64 - 1, 2**64, -1, 1.0, 0.5, True, None]),
)
odd = st.one_of(json_numbers, st.text(max_size=3), st.lists(json_numbers, max_size=3), st.just({}))
names = st.text(st.characters(codec="utf-8"), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Any, int]:
    """A right header with a few of its values replaced, and how many bytes of data follow."""
    table: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(ITEM_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = ITEM_BITS[dtype]
        for n in shape:
            size *= n
        begin, end = end, end + size // 8
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    if draw(st.booleans()):
        table["__metadata__"] = draw(
            st.one_of(st.dictionaries(names, names, max_size=2), odd, st.dictionaries(names, odd))
        )
    entries = [e for n, e in table.items() if n != "__metadata__"]
    for _ in range(draw(st.integers(0, 2))):
        if not entries:
            break
        entry = draw(st.sampled_from(entries))
        match draw(st.integers(0, 4)):
            case 0:
                entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(odd)
            case 1:
                entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
            case 2 if isinstance(entry.get("shape"), list) and entry["shape"]:
                entry["shape"][0] = draw(json_numbers)
            case 3 if isinstance(entry.get("data_offsets"), list):
                entry["data_offsets"] = [draw(json_numbers), *entry["data_offsets"][1:]]
            case 4:
                entry["dtype"] = draw(st.sampled_from(["F32", "f32", "F128", "U8", "", "F4"]))
    return table, max(0, end + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))


@settings(quick, max_examples=600)
@given(headers())
def test_we_accept_what_the_library_accepts(case: tuple[Any, int]) -> None:
    table, size = case
    content = blob(table, bytes(size))
    assert we_accept(content) == library_accepts(content)


@settings(quick, max_examples=300)
@given(headers(), st.data())
def test_also_when_the_text_itself_is_damaged(case: tuple[Any, int], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(case[0], ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.sampled_from(list(b'"{}[]:,.-0128eE \\\tnuld\x00\x80\xff')))
    content = blob(bytes(raw), bytes(case[1]))
    if we_accept(content) != library_accepts(content):
        # the one difference that damage can make: a name that has become the name of another
        assert not we_accept(content)
        with pytest.raises(ValueError, match="appears twice"):
            parse(bytes(raw), Path("x"), len(content))


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY},"__metadata__":{{"k":"1","k":"2"}}}}',
        '{"a":["U8",[1],[0,1]]}',
        '{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_the_deliberate_differences_are_these(text: str) -> None:
    content = blob(text.encode(), b"\0")
    assert library_accepts(content)
    assert not we_accept(content)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', 1),
        ('{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":NaN}}', 1),
        ('{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":1e999}}', 1),
        ('{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"\\ud83d\\ude00":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}}', 3),
        ('{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3),
        ('{"a":{"dtype":"F32","shape":[9223372036854775808,4,0],"data_offsets":[0,0]}}', 0),
        ('{"a":{"dtype":"F32","shape":[0,9223372036854775808,4],"data_offsets":[0,0]}}', 0),
        ('{"a":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,0]}}', 0),
        ('{"__metadata__":null}', 0),
        ('{"__metadata__":{},"__metadata__":{}}', 0),
        ("{}", 0),
        (" {} ", 0),
        ("\ufeff{}", 0),
        ("{}\0", 0),
        ("", 0),
        ("[]", 0),
        ("[" * 200_000, 0),
        ('{"a":' * 200_000, 0),
    ],
)
def test_corner_cases_agree_with_the_library(text: str, size: int) -> None:
    content = blob(text.encode(), bytes(size))
    assert we_accept(content) == library_accepts(content)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(5, dtype=torch.bfloat16),
        "e": torch.zeros(0, 2),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"k": "v"})
    index = open_checkpoint(tmp_path / "x.safetensors")
    assert index.metadata == {"k": "v"}
    assert {n: (t.shape, t.nbytes) for n, t in index.tensors.items()} == {
        n: (tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors.items()
    }
    assert read_bytes(index.tensors["b"]) == tensors["b"].numpy().tobytes()
    offsets = [t.offset for t in index.tensors.values()]
    assert offsets == sorted(offsets)
