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
    tensors: Tensors = {}
    for number, name in enumerate(names):
        tensors[f"{kohya(name)}.lora_down.weight"] = rand(2, 16, seed=seed + number)
        tensors[f"{kohya(name)}.lora_up.weight"] = rand(16, 2, seed=seed + number + 50, scale=size)
        tensors[f"{kohya(name)}.alpha"] = torch.tensor(2.0)
    save(tensors, path)
    parts = {n: [tensors[f"{kohya(n)}.lora_{end}.weight"].double() for end in ("up", "down")] for n in names}
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
    rows = []
    for part, of in zip(parts, changes, strict=True):
        touched = not of.keys().isdisjoint(keys)
        rows.append({"change": np.linalg.norm(part), **survival_of(part, after - before - change)} if touched else None)
    return {
        "of": before.size, "elements": before.size, "changed": np.mean(after != rounded(before)), "saturated": 0, "weight": np.linalg.norm(before),
        "change": np.linalg.norm(change), "ratio": np.linalg.norm(change) / np.linalg.norm(before),
        "largest": np.abs(change).max(), **survival_of(change, after - before - change), "adapters": rows,
    }  # fmt: skip


def survival_of(change: Any, error: Any) -> dict[str, float]:
    """What of a change is in an output with these errors, by definition."""
    change, error = (np.asarray(some, np.float64).ravel() for some in (change, error))
    applied, size, error = (change + error) @ change, change @ change, error[change != 0]
    return {
        "share": survived(applied, error @ error),
        "retained": applied / size,
        "noise": (error @ error / size) ** 0.5,
    }


def assert_same(measures: Any, want: Any) -> None:
    assert {k: v for k, v in measures.items() if k not in ("adapters", "block")} == pytest.approx(
        {k: v for k, v in want.items() if k != "adapters"}, rel=1e-4
    )
    for a, b in zip(measures["adapters"], want["adapters"], strict=True):
        assert a == (b if b is None else pytest.approx(b, rel=1e-4))
