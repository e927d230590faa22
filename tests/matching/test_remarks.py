"""What the user is told of single modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge

from ..support import rand, save


@pytest.mark.parametrize("alphas", [("alpha", "lora_alpha"), ("alpha", "lora_alpha", "lora.alpha")], ids="+".join)
def test_a_remark_names_every_module_once(alphas: tuple[str, ...], tmp_path: Path) -> None:
    """However many tensors of a module it is about."""
    tensors = {"m.lora_up.weight": rand(8, 2), "m.lora_down.weight": rand(2, 8)}
    tensors |= {f"m.{name}": torch.tensor(2.0) for name in alphas}
    paths = save({"m.weight": rand(8, 8)}, tmp_path / "b.safetensors"), save(tensors, tmp_path / "a.safetensors")
    (adapter,) = lora_merge.plan(*paths, tmp_path / "o.safetensors").adapters
    (note,) = [note for note in adapter.notes if "stored twice" in note]
    assert note.startswith("m: its alpha is stored twice")
