"""What a proof looks at by default: rows of every part that is changed, bytes from all over the rest. Run: pytest
tests/proof/test_sample.py"""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lora_merge
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import VerificationFailed
from lora_merge.matching.patch import PatchPart
from lora_merge.models.weights import RowSlice, Weight
from lora_merge.planning.plan import OutputTensor
from lora_merge.proof.sample import LEAST_ELEMENTS, SAMPLED_RANGES, SAMPLED_ROWS, ranges, runs, sample
from lora_merge.recipes.replay import prove
from tests.kit.files import load, metadata, save
from tests.kit.tensors import rand

NO_PATCH: Any = None  # only places are looked at
NOTHING: Any = None


def target(name: str, rows: int, cols: int, parts: list[tuple[int, int]]) -> OutputTensor:
    """A tensor of which these rows are changed."""
    uses = tuple(PatchPart(NO_PATCH, RowSlice(name, low, high, cols), 0, 1.0) for low, high in parts)
    return OutputTensor(name, name, "F16", Weight((rows, cols), NOTHING), 0, rows * cols * 2, uses)


@given(
    name=st.text("abc.", min_size=1, max_size=6), cols=st.sampled_from([1, 7, 300, 5000]),
    heights=st.lists(st.integers(0, 3000), min_size=1, max_size=8), data=st.data(),
)  # fmt: skip
def test_every_changed_part_has_a_row_in_the_sample(
    name: str, cols: int, heights: list[int], data: st.DataObject
) -> None:
    """However small it is beside the others: q, k and v of grouped heads, single tokens, single experts."""
    rows = sum(heights) + data.draw(st.integers(1, 3000))
    places = list(pairwise(accumulate([0, *heights])))
    parts = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    one = target(name, rows, cols, parts)
    chosen = sample(one)
    assert np.array_equal(chosen, sample(one)), "always the same ones"
    assert np.array_equal(chosen, np.unique(chosen)) and chosen[0] >= 0 and chosen[-1] < rows
    assert len(chosen) >= min(rows, max(SAMPLED_ROWS, -(-LEAST_ELEMENTS // cols)))
    for low, high in parts:
        assert low == high or ((chosen >= low) & (chosen < high)).any(), (low, high)
    assert [r for first, count in runs(chosen) for r in range(first, first + count)] == chosen.tolist()


@given(
    sizes=st.lists(st.integers(1, 2**24), min_size=1, max_size=12), full=st.booleans(),
)  # fmt: skip
def test_sampled_bytes_are_spread_over_all_tensors_and_all_bytes_are_all(sizes: list[int], full: bool) -> None:  # noqa: FBT001
    info = StoredTensor("a", "U8", (), Path(), 0, 0)
    some = [OutputTensor(str(n), str(n), "U8", Weight((size,), info), 0, size) for n, size in enumerate(sizes)]
    found = list(ranges(some, sum(sizes), full=full))
    assert all(0 <= first < first + count <= t.nbytes for t, first, count in found)
    if full:
        for t in some:
            mine = sorted((first, first + count) for of, first, count in found if of is t)
            assert [low for low, _ in mine] == [0, *(high for _, high in mine[:-1])] and mine[-1][1] == t.nbytes
    elif sum(sizes) > 2**23:
        before = dict(zip((t.name for t in some), accumulate([0, *sizes]), strict=False))
        starts = sorted(before[t.name] + first for t, first, _ in found)
        assert max(b - a for a, b in pairwise([0, *starts, sum(sizes)])) <= 3 * sum(sizes) // SAMPLED_RANGES + 2**17


@pytest.mark.parametrize("part", range(3))
def test_part_that_lacks_its_change_is_detected_by_the_sample(part: int, tmp_path: Path) -> None:
    """A weight of a fused layer that adapters change in three parts, one of which was left as it was."""
    width, key = 256, "double_blocks.0.img_attn.qkv.weight"
    base = {key: rand(3 * width, width), "double_blocks.0.img_mod.lin.weight": rand(6 * width, width),
            "single_blocks.0.linear1.weight": rand(7 * width, width)}  # fmt: skip
    adapter = {}
    for letter in "qkv":
        side = f"transformer.transformer_blocks.0.attn.to_{letter}"
        adapter[f"{side}.lora_A.weight"] = rand(2, width, seed=ord(letter))
        adapter[f"{side}.lora_B.weight"] = rand(width, 2, seed=ord(letter), scale=1.0)
    paths = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    out = tmp_path / "o.safetensors"
    lora_merge.merge(*paths, out)
    tensors, rows = load(out), slice(part * width, (part + 1) * width)
    assert not torch.equal(tensors[key][rows], base[key][rows])
    tensors[key][rows] = base[key][rows]
    save(tensors, out, metadata(out))
    with pytest.raises(VerificationFailed, match="1 of 1 merged tensor is"):
        prove(out)
