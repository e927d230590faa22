"""How numbers lie in files: the bytes they take, the shapes that headers tell, and where weights may be cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lora_merge.disk.files import StoredTensor
from lora_merge.dtypes import ITEM_BITS, bytes_of
from lora_merge.engine import blocks
from lora_merge.files.codecs import arithmetic
from lora_merge.files.codecs.base import Encoding, Packing
from lora_merge.files.codecs.plain import plain
from lora_merge.models.weights import Weight
from lora_merge.planning.plan import OutputTensor


def in_units(numbers: int, size: int, group: int = 1) -> Encoding:
    """An encoding that packs numbers into bytes."""
    return Encoding((numbers, size), group)


@pytest.mark.parametrize("dtype", sorted(ITEM_BITS))
def test_plain_numbers_take_what_their_dtype_takes(dtype: str) -> None:
    encoding = plain(dtype).encoding
    assert [encoding.nbytes(n) for n in (0, 24, 240)] == [bytes_of(dtype, (n,)) for n in (0, 24, 240)]
    assert plain(dtype) is plain(dtype), "blocks are folded together where this is one object"


@pytest.mark.parametrize(
    ("numbers", "size", "row"), [(2, 1, 128), (256, 144, 144), (32, 34, 272), (1, 1, 256), (4, 3, 192)]
)
def test_packed_rows_are_stored_as_their_bytes(numbers: int, size: int, row: int) -> None:
    """4-bit codes, two blocks of GGUF, one byte a number, and 6 bits."""
    encoding = in_units(numbers, size)
    assert encoding.nbytes(4 * 256) == 4 * row
    assert encoding.count(encoding.nbytes(1024)) == 1024
    assert encoding.count(encoding.nbytes(1024) - 1) == 1024 - numbers


@pytest.mark.parametrize("rows", [1, 100, 128, 1000])
@pytest.mark.parametrize("largest", [1, 640, 2**20])
def test_rows_that_are_encoded_together_are_not_cut(rows: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", largest)
    stored = StoredTensor("w", "U8", (rows, 4), Path("f"), 0, 4 * rows)
    weight = Weight((rows, 8), stored, Packing(in_units(2, 1, 128 * 8), stored))
    cut = list(blocks.blocks(OutputTensor("w", "w", "F32", weight, 0, 32 * rows)))
    assert (cut[0].first, cut[-1].last) == (0, rows)
    assert all(a.last == b.first and b.first % 128 == 0 for a, b in pairwise(cut))
    assert len(cut) == (1 if largest == 2**20 else -(-rows // 128))


@pytest.mark.parametrize("dtype", arithmetic.FP8)
def test_bytes_of_fp8_mean_the_numbers_that_torch_gives_them_with_and_without_nan(dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(arithmetic.FP8[dtype]).float()
    for codes in (every, every[~numbers.isnan()], every[:0]):
        found, expected = arithmetic.from_fp8(codes, dtype), codes.view(arithmetic.FP8[dtype]).float()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("size", [1, 6, 16, 32])
def test_the_largest_magnitude_of_each_block(size: int) -> None:
    blocks = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(arithmetic.largest_of_each(blocks), blocks.abs().amax(1))
