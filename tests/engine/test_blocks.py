"""However a weight is cut into blocks and spread over tensors, every formula gives what it gives as a whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_merge.adapters.modules import Module
from lora_merge.algorithms import ALGORITHMS
from lora_merge.dtypes import StoredTensor
from lora_merge.engine import row_blocks
from lora_merge.engine.block_folder import BlockFolder
from lora_merge.engine.patch_tensors import PatchTensors
from lora_merge.engine.tasks import FoldTask
from lora_merge.engine.tensor_moves import FILE_DTYPES, Placement
from lora_merge.matching.formula import Patch
from lora_merge.matching.patch import PatchPart
from lora_merge.models.weights import RowSlice, Weight, WeightView
from lora_merge.planning.plan import OutputTensor
from lora_merge.proof.examples import EXAMPLES, formula_input, tensors, weight
from lora_merge.proof.reference import REFERENCE

STRENGTH = 0.7
CASES = {
    **EXAMPLES,
    "diag_oft, no limit": replace(EXAMPLES["diag_oft"], scalars={"limit": inf}),
    "diag_oft, blocks only": replace(EXAMPLES["diag_oft"], slots={"blocks": (3, 4, 4)}, scalars={"limit": inf}),
}
CUT = ("diag_oft, no limit", "diag_oft, blocks only", "oft_diag", "lokr")
"""Cases in which several rows are formed together, but not all."""


def held(name: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), Path("memory"), 0, tensor.nbytes)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", list(CASES))
def test_cutting_and_spreading_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for largest in (1, 40, 100, 2**20):
        monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", largest)
        for parts in (1, 2, 3):
            check_blocks(case, parts, largest)


def check_blocks(case: str, parts: int, largest: int) -> None:
    """A weight in so many tensors, merged in blocks of so many elements, is what the reference makes of it at once."""
    example, name = CASES[case], case.split(",")[0]
    whole = weight(example)
    want = whole + STRENGTH * REFERENCE[name].formula(formula_input(name, example, whole))
    if ALGORITHMS[name].layout == "experts":  # rows of width `in`, as an architecture with experts has them
        whole, want = (w.reshape(-1, example.shape[2]) for w in (whole, want))
    rows, cols = whole.shape
    edges = [0, *(rows * i // parts + 1 for i in range(1, parts)), rows]  # one off, so within a row group too
    stored = {f"base {i}": torch.from_numpy(whole[a:b]) for i, (a, b) in enumerate(pairwise(edges))}
    slots = {slot: torch.from_numpy(t) for slot, t in tensors(name, example).items()}
    module = Module("m", "weight", {s: held(s, t) for s, t in slots.items()}, {}, (name,))
    pieces = tuple(RowSlice(key, 0, len(t), cols) for key, t in stored.items())
    shapes = {slot: tuple(t.shape) for slot, t in slots.items()}
    view = WeightView(pieces, example.shape)
    patch = Patch(0, module, name, shapes, example.scalars, tuple(sorted(example.settings.items())), view)
    base = {key: Weight(tuple(t.shape), held(key, t)) for key, t in stored.items()}
    everything = stored | slots
    folder = BlockFolder(
        (Placement(torch.device("cpu"), torch.float64),), PatchTensors(lambda info: everything[info.name], base)
    )
    found, count = [], 0
    for piece, start in zip(pieces, edges, strict=False):
        uses = (PatchPart(patch, piece, start, STRENGTH),)
        target = OutputTensor(piece.key, piece.key, "F64", base[piece.key], 0, stored[piece.key].nbytes, uses)
        for block in row_blocks.blocks(target):
            into = torch.empty(block.last - block.first, cols, dtype=torch.float64)
            folder.fold([FoldTask(block, stored[piece.key][block.first : block.last], into)])
            found.append(into)
            count += 1
    np.testing.assert_allclose(torch.cat(found).numpy(), want, rtol=1e-9, atol=1e-9)
    if parts == largest == 1 and patch.row_group < rows:
        assert count == rows // patch.row_group
    assert parts > 1 or case not in CUT or patch.row_group < rows
