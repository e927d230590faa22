"""Weights that are quantised on the way out, whose first code depends on all of their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine import block_folder
from tests.kit.files import save
from tests.kit.tensors import rand

LAYERS, SHAPE = 3, (256, 64)
BLOCKS = LAYERS * SHAPE[0] // 128  # whole tiles of rows, which are encoded together


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A base of several blocks a weight, and an adapter that changes all of them."""
    for module in ("row_blocks", "quantised_output"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.BLOCK_ELEMENTS", 128 * SHAPE[1])
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]
    base = {f"{name}.weight": rand(*SHAPE, seed=i, scale=0.02).bfloat16() for i, name in enumerate(names)}
    lora = {}
    for i, name in enumerate(names):
        lora |= {
            f"{name}.lora_A.weight": rand(4, SHAPE[1], seed=i),
            f"{name}.lora_B.weight": rand(SHAPE[0], 4, scale=0.01),
        }
    return save(base, tmp_path / "base.safetensors"), save(lora, tmp_path / "lora.safetensors")


@pytest.mark.few(2)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ["fp8_scaled", "nvfp4"])
def test_block_is_folded_once_if_memory_holds_it_and_its_bytes_do_not_depend_on_that(
    dtype: str, rounding: str, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal folds
        folds += 1
        return usual(*args)

    usual = block_folder.new_weights
    monkeypatch.setattr(block_folder, "new_weights", counted)
    monkeypatch.setattr("lora_merge.engine.lanes.MemoryPolicy.most", lambda *_: 1)
    made, rooms = {}, {"all": 2**30, "some": 3 * 4 * 128 * SHAPE[1], "none": 0}
    for room, nbytes in rooms.items():
        monkeypatch.setattr("lora_merge.engine.quantised_output.BLOCK_SHARE", 2**30 // nbytes if nbytes else 2**31)
        out, folds = tmp_path / room / "out.safetensors", 0
        out.parent.mkdir()
        report = lora_merge.merge(*inputs, out, dtype=dtype, rounding=rounding, verify=False)
        made[room] = folds, out.read_bytes(), report.numbers
    assert [count for count, _, _ in made.values()] == [BLOCKS, 2 * BLOCKS - 3, 2 * BLOCKS]
    assert len({content for _, content, _ in made.values()}) == 1
    assert made["all"][2] == made["some"][2] == made["none"][2]
