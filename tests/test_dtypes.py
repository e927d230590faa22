"""The table of dtypes beside torch's own numbers and codes."""

from __future__ import annotations

import subprocess
import sys
from math import floor, inf, log2, nextafter

import numpy as np
import pytest
import torch

from lora_merge.dtypes import COMPUTE_DTYPES, DTYPE_ROWS, DTYPES, FLOATS, WHOLE_DTYPES, Dtype, bytes_of

FLOATING = [row for row in DTYPE_ROWS.values() if row.significand]
NAMED = [row for row in DTYPE_ROWS.values() if hasattr(torch, row.library)]


@pytest.mark.parametrize("row", NAMED, ids=lambda row: row.name)
def test_dtype_has_the_size_that_torch_says(row: Dtype) -> None:
    assert getattr(torch, row.library).itemsize * 8 == row.bits == 8 * bytes_of(row.name, (1,))


@pytest.mark.parametrize("row", FLOATING, ids=lambda row: row.name)
def test_range_and_step_are_those_of_the_numbers_themselves(row: Dtype) -> None:
    """Of 8 bits, all numbers are looked at; of more, torch tells."""
    if not hasattr(torch, row.library):
        pytest.skip("this version of torch lacks it")
    dtype = getattr(torch, row.library)
    if row.bits > 8:
        info = torch.finfo(dtype)
        assert (row.largest, 2.0 ** (1 - row.significand)) == (info.max, info.eps)
        assert 2.0**row.smallest == info.smallest_normal * info.eps
        return
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    positive = numbers[numbers.isfinite() & (numbers > 0)].sort().values
    assert (row.largest, 2.0**row.smallest) == (positive[-1].item(), positive[0].item())
    assert int(((positive >= 1) & (positive < 2)).sum()) == 2 ** (row.significand - 1)


@pytest.mark.parametrize("name", sorted(FLOATS - {"F64"}))
def test_room_is_the_last_number_that_is_nearer_to_the_largest_than_to_the_one_that_would_follow(name: str) -> None:
    row = DTYPE_ROWS[name]
    step = 2.0 ** (floor(log2(row.largest)) + 1 - row.significand)
    even = (row.largest / step) % 2 == 0

    def rounds_down(value: float) -> bool:
        below, above = value - row.largest, row.largest + step - value
        return below < above or (below == above and even)

    assert rounds_down(row.room)
    assert not rounds_down(nextafter(row.room, inf))


def test_room_of_float64_has_no_end() -> None:
    assert DTYPE_ROWS["F64"].room == inf


@pytest.mark.parametrize("row", [r for r in DTYPE_ROWS.values() if r.code], ids=lambda row: row.name)
def test_code_is_numpys_for_the_same_dtype(row: Dtype) -> None:
    assert np.dtype(f"<{row.code}") == np.dtype(row.library)


def test_options_name_floating_point_numbers_and_every_weight_has_one() -> None:
    assert {*DTYPES.values(), *COMPUTE_DTYPES.values()} == FLOATS
    assert not FLOATS & WHOLE_DTYPES


def test_table_needs_no_library() -> None:
    code = "import sys, lora_merge.dtypes; assert not {'torch', 'numpy', 'ml_dtypes'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
