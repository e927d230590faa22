"""Adapters whose norms are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_merge.survival import survived
from tests.kit.files import save
from tests.kit.models import UNET
from tests.kit.tensors import Tensors, rand

NAMES = [f"{UNET}input_blocks.{n}.1.transformer_blocks.0.attn1.{part}" for n in (1, 2) for part in ("to_q", "to_k")]


STRENGTHS = (0.8, -0.5)


def kohya(name: str) -> str:
    return "lora_unet_" + name.removeprefix(UNET).replace(".", "_")


def lora(path: Path, names: Sequence[str], size: float, seed: int) -> dict[str, Tensor]:
    """Save an adapter; return name → ΔW in float64."""
    found: Tensors = {}
    for number, name in enumerate(names):
        found[f"{kohya(name)}.lora_down.weight"] = rand(2, 16, seed=seed + number)
        found[f"{kohya(name)}.lora_up.weight"] = rand(16, 2, seed=seed + number + 50, scale=size)
        found[f"{kohya(name)}.alpha"] = torch.tensor(2.0)
    save(found, path)
    parts = {n: [found[f"{kohya(n)}.lora_{end}.weight"].double() for end in ("up", "down")] for n in names}
    return {f"{n}.weight": up @ down for n, (up, down) in parts.items()}


def numbers_of(
    base: Tensors, out: Tensors, changes: Sequence[dict[str, Tensor]], keys: Sequence[str]
) -> dict[str, Any]:
    """The numbers of some tensors, by their definitions."""

    def all_of(tensors: dict[str, Tensor]) -> np.ndarray[Any, Any]:
        return np.concatenate([tensors.get(k, torch.zeros(base[k].shape)).double().numpy().ravel() for k in keys])

    def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return torch.from_numpy(values).to(out[keys[0]].dtype).double().numpy()

    before, after, parts = all_of(base), all_of(out), [all_of(c) for c in changes]
    change = sum(parts)
    applied = after - rounded(before)
    rows = []
    for part, of in zip(parts, changes, strict=True):
        own = after - rounded(before + change - part)
        touched = not of.keys().isdisjoint(keys)
        share = {"change": np.linalg.norm(part), "retained": survived(own @ part / (part @ part))} if touched else None
        rows.append(share)
    return {
        "of": before.size, "elements": before.size, "changed": np.mean(applied != 0), "saturated": 0, "weight": np.linalg.norm(before),
        "change": np.linalg.norm(change), "ratio": np.linalg.norm(change) / np.linalg.norm(before),
        "largest": np.abs(change).max(), "retained": survived(applied @ change / (change @ change)),
        "noise": np.linalg.norm(applied - change) / np.linalg.norm(change), "adapters": rows,
    }  # fmt: skip


def assert_same(found: Any, want: Any) -> None:
    assert {k: v for k, v in found.items() if k not in ("adapters", "block")} == pytest.approx(
        {k: v for k, v in want.items() if k != "adapters"}, rel=1e-4
    )
    for a, b in zip(found["adapters"], want["adapters"], strict=True):
        assert a == (b if b is None else pytest.approx(b, rel=1e-4))
