"""Which scales belong to which rows of a weight, and which dtypes tables may have, by formulas of their own."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.encodings.arithmetic import swizzle
from lora_merge.files.encodings.fp4 import Fp4Tensors, fp4
from tests.files.quantised_forms import FORMS
from tests.kit.files import save
from tests.kit.quantised import NAMES, base, parts

NVFP4 = 16  # numbers with one scale
ONE = 0x22  # two codes of 1.0
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def place(row: int, block: int, across: int) -> int:
    """The byte of a scale in cuBLAS's tiles, which follow each other along the columns first."""
    tile = row // 128 * -(-across // 4) + block // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4


@pytest.mark.parametrize(("rows", "cols"), [(300, 96), (128, 64), (257, 16), (31, 80)])
def test_rows_of_nvfp4_read_their_scales_from_their_tile(tmp_path: Path, rows: int, cols: int) -> None:
    """Whole, and in every range of rows that may be decoded alone."""
    across, tiles = cols // NVFP4, -(-rows // 128)
    wanted = torch.arange(rows * across).reshape(rows, across) % 97 + 8  # bytes of fp8, all different from neighbours
    table = torch.full((512 * tiles * -(-across // 4),), 0x7E, dtype=torch.uint8)
    for row in range(rows):
        for block in range(across):
            table[place(row, block, across)] = int(wanted[row, block])
    scales = table.view(torch.float8_e4m3fn)
    codes = torch.full((rows, cols // 2), ONE, dtype=torch.uint8)
    index = open_checkpoint(save({"codes": codes, "scale": scales.reshape(-1, 512)}, tmp_path / "w.safetensors"))
    packing = fp4(Fp4Tensors(*(index.tensors[n] for n in ("codes", "scale")), "", None, fp8_scales=True), swizzled=True)
    assert packing is not None
    exact = wanted.to(torch.uint8).view(torch.float8_e4m3fn).float().repeat_interleave(NVFP4, 1)

    def decoded(first: int, last: int) -> Tensor:
        role, part = next((role, part) for role, part in packing.parts.items() if part.info.name == "scale")
        low, size = part.span(first * cols, (last - first) * cols)
        own = {role: table[low : low + size], "codes": codes[first:last].reshape(-1)}
        return packing.encoding.decode(own, first * cols, (last - first) * cols).view(-1, cols)

    step = max(1, packing.encoding.group // cols)
    for first in range(0, rows, step):
        for last in range(min(rows, first + step), rows + 1, step):
            torch.testing.assert_close(decoded(first, last), exact[first:last], rtol=0, atol=0)
    torch.testing.assert_close(decoded(0, rows), exact, rtol=0, atol=0)
    assert len({*swizzle(rows, across).tolist()}) == rows * across, "no two scales share a byte"


@pytest.mark.few(3)
@pytest.mark.parametrize("book", DTYPES)
@pytest.mark.parametrize("scale", DTYPES)
def test_tables_of_aqlm_have_their_own_dtypes(tmp_path: Path, book: str, scale: str) -> None:
    form = FORMS["AQLM"]

    def make(w: Tensor) -> dict[str, Tensor]:
        found = form.make(w)
        casts = {"codebooks": DTYPES[book], "scales": DTYPES[scale]}
        return {name: t.to(casts.get(name, t.dtype)) for name, t in found.items()}

    folder, tensors = base(replace(form, make=make), tmp_path / "base", NAMES[:1])
    index = open_checkpoint(folder)
    packing = index.packed[f"{NAMES[0]}.weight"]
    exact = form.read(parts(tensors, NAMES[0])).float()
    raw = {role: tensors[part.info.name].reshape(-1) for role, part in packing.parts.items()}
    raw["codes"] = tensors[f"{NAMES[0]}.codes"].reshape(-1).view(torch.uint8)
    count = prod(exact.shape)
    torch.testing.assert_close(packing.encoding.decode(raw, 0, count).view_as(exact), exact, rtol=1e-6, atol=0)
    cols = exact.shape[1]
    sizes = {part.info.name.rpartition(".")[2]: part.span(cols, cols) for part in packing.parts.values()}
    item = DTYPES[scale].itemsize
    assert sizes["scales"] == (item, item), "the scale of the second row"


@pytest.mark.parametrize(("table", "dtype"), [("codebooks", torch.float64), ("scales", torch.int32)])
def test_tables_of_aqlm_in_other_dtypes_are_not_read_as_such(tmp_path: Path, table: str, dtype: torch.dtype) -> None:
    form = FORMS["AQLM"]

    def make(w: Tensor) -> dict[str, Tensor]:
        found = form.make(w)
        return {**found, table: found[table].to(dtype)}

    folder, _ = base(replace(form, make=make), tmp_path / "base", NAMES[:1])
    assert f"{NAMES[0]}.weight" not in open_checkpoint(folder).packed
