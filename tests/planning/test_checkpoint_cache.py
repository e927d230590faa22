"""Bases with the same tensors share their names; what differs in what names mean is a base of its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lora_merge.planning.checkpoint_cache import CheckpointCache
from tests.kit.files import save


def test_names_are_shared_by_bases_with_the_same_tensors(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(3, 2)}
    first = save(tensors, tmp_path / "first.safetensors")
    same = save({name: value + 1 for name, value in tensors.items()}, tmp_path / "same.safetensors")
    (tmp_path / "folder").mkdir()
    others = [
        save({"a.weight": torch.zeros(2, 4), "b.weight": torch.zeros(3, 2)}, tmp_path / "wide.safetensors"),
        save({"a.weight": torch.zeros(2, 3), "c.weight": torch.zeros(3, 2)}, tmp_path / "named.safetensors"),
        save(tensors, tmp_path / "folder/model.safetensors").parent,
    ]
    (tmp_path / "folder/config.json").write_text(json.dumps({"num_attention_heads": 2}))
    cache = CheckpointCache()
    assert cache.names(same) is cache.names(first)
    assert all(cache.names(path) is not cache.names(first) for path in others)
