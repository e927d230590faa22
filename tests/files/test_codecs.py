"""How numbers lie in files: the bytes they take, the shapes that headers tell, and where weights may be cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from lora_merge.dtypes import ITEM_BITS, StoredTensor, bytes_of
from lora_merge.engine import row_blocks
from lora_merge.files.encodings import arithmetic, nearest_codes
from lora_merge.files.encodings.base import CODES, Encoding, Packing, plain
from lora_merge.files.encodings.fp4 import Fp4Tensors, fp4
from lora_merge.files.gguf import blocks, encoding
from lora_merge.files.gguf.blocks import BLOCK_KINDS
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
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", largest)
    stored = StoredTensor("w", "U8", (rows, 4), Path("f"), 0, 4 * rows)
    weight = Weight((rows, 8), stored, Packing(in_units(2, 1, 128 * 8), stored))
    cut = list(row_blocks.blocks(OutputTensor("w", "w", "F32", weight, 0, 32 * rows)))
    assert (cut[0].first, cut[-1].last) == (0, rows)
    assert all(a.last == b.first and b.first % 128 == 0 for a, b in pairwise(cut))
    assert len(cut) == (1 if largest == 2**20 else -(-rows // 128))


@pytest.mark.parametrize("dtype", arithmetic.FP8_DTYPES)
def test_bytes_of_fp8_mean_the_numbers_that_torch_gives_them_with_and_without_nan(dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(arithmetic.FP8_DTYPES[dtype]).float()
    for codes in (every, every[~numbers.isnan()], every[:0]):
        found, expected = arithmetic.from_fp8(codes, dtype), codes.view(arithmetic.FP8_DTYPES[dtype]).float()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("size", [1, 6, 16, 32])
def test_largest_magnitude_of_each_block(size: int) -> None:
    row_blocks = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(arithmetic.largest_of_each(row_blocks), row_blocks.abs().amax(1))


@pytest.mark.parametrize("size", [1, 16, 32])
def test_ends_of_each_block_whatever_their_signs(size: int) -> None:
    numbers = torch.randn(6, size, generator=torch.Generator().manual_seed(0))
    row_blocks = torch.cat([numbers, numbers.abs(), -numbers.abs()])
    for some in (row_blocks, row_blocks.double()):
        low, high = arithmetic.ends_of_each(some, torch.empty_like(some))
        assert torch.equal(low, some.amin(1))
        assert torch.equal(high, some.amax(1))


def beside(points: torch.Tensor) -> torch.Tensor:
    """Numbers, and the next ones on both sides of each."""
    up, down = (torch.nextafter(points, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    return torch.cat([points, up, down])


def test_codes_of_e2m1_are_the_nearest_with_ties_to_even() -> None:
    points = torch.arange(-64, 65) / 8
    levels = torch.cat([beside(points), torch.tensor([-0.0, 1e-30, -1e-30, 1e30, -1e30])])
    expected = levels.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert nearest_codes.e2m1_codes(levels).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_neighbours_of_every_number_are_those_of_torch(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite() & (every != 0)]
    for up, end in ((True, torch.inf), (False, -torch.inf)):
        found = arithmetic.neighbour(every, torch.full((len(every),), up))
        assert torch.equal(found, torch.nextafter(every, torch.full_like(every, end)))


@pytest.mark.parametrize("count", [1, 15, 200])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_ends_below_numbers_are_counted_as_a_search_counts_them(count: int, dtype: torch.dtype) -> None:
    ends = torch.linspace(-1.5, 1.25, count)
    values = torch.cat([beside(ends), torch.tensor([0.0, -0.0, 3e38, -3e38]), torch.linspace(-2, 2, 999)])
    assert torch.equal(nearest_codes.ranks(values.clone(), ends, dtype), torch.bucketize(values, ends).to(dtype))


@pytest.mark.few(8)
@pytest.mark.parametrize("change", [0.0, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_blocks_of_gguf_are_the_same_whether_or_not_each_sub_block_is_looked_at(name: str, change: float) -> None:
    """Also beside blocks of zeros, and of a scale that covers nothing."""
    kind, made = BLOCK_KINDS[name], torch.Generator().manual_seed(0)
    values = torch.randn(64 * 256, generator=made)
    values[:512] = 0
    raw = blocks.encode(name, values, torch.zeros(encoding.ggml(name).nbytes(len(values)), dtype=torch.uint8))
    merged = blocks.decode(name, raw) + change * torch.randn(len(values), generator=made)
    old = raw.view(-1, encoding.ggml(name).unit[1])
    every = blocks._encoded(kind, merged.view(len(old), kind.layout.subs, -1), old, kind.fields(old), None)
    assert torch.equal(blocks.encode(name, merged, raw), every.reshape(-1))


@pytest.mark.parametrize("change", [0.0, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("size", [16, 32])
def test_blocks_of_fp4_are_the_same_whether_or_not_each_is_looked_at(
    size: int, change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.Generator().manual_seed(0)
    at = Path("f")
    packing = fp4(
        Fp4Tensors(
            StoredTensor("q", "U8", (64, 64), at, 0, 4096),
            StoredTensor("s", "U8", (64, 128 // size), at, 0, 64 * 128 // size),
            "",
            None,
            fp8_scales=size == 16,
        )
    )
    assert packing is not None
    encode, parts = (
        packing.encoding.encode,
        {CODES: torch.zeros(4096, dtype=torch.uint8), "scale": torch.zeros(64 * 128 // size, dtype=torch.uint8)},
    )
    values = torch.randn(64 * 128, generator=made)
    values[:256] = 0
    first = encode(values, parts)
    assert first is not None
    merged = packing.encoding.decode(first, 0, len(values)).view(-1) + change * torch.randn(len(values), generator=made)
    found = encode(merged.clone(), first)
    monkeypatch.setattr(nearest_codes, "doubtful", lambda marked, size: torch.arange(len(marked) // size))
    every = encode(merged.clone(), first)
    assert found is not None
    assert every is not None
    assert all(torch.equal(found[role], every[role]) for role in found)
