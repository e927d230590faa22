"""Merging by a method of `combine` is merging what `combine` writes, and the proof finds what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lora_merge
from lora_merge.engine import blocks, combining
from lora_merge.errors import VerificationFailed
from lora_merge.method_numbers import Numbers
from lora_merge.methods import COMBINATIONS, SUM
from lora_merge.proof import combined
from lora_merge.proof.replay import prove

from ..support import in_process, kohya, load, rand, save, sd1

NUMBERS: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.3},
    "consensus": {},
    "mean": {},
    "karcher": {},
    "model_stock": {},
}
"""Method → its numbers, where they are not those below."""

METHODS = sorted(set(COMBINATIONS) - {SUM})


def numbers(method: str) -> dict[str, Any]:
    """Numbers for a method that make it do something."""
    if method in NUMBERS:
        return NUMBERS[method]
    found: dict[str, Any] = {"density": 0.4}
    found |= {"gamma": 0.1} if "breadcrumbs" in method else {}
    return found | ({"epsilon": 0.2, "seed": 3} if "della" in method else {"seed": 3} if "dare" in method else {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny checkpoint in fp32, and two LoRAs for it."""
    folder, base = (
        tmp_path_factory.mktemp("combined"),
        {k: v.float() for k, v in sd1().items() if v.is_floating_point()},
    )
    some = [save(kohya(base, seed=n), folder / f"{n}.safetensors") for n in (100, 300)]
    return save(base, folder / "base.safetensors"), some[0], some[1]


@pytest.mark.parametrize("method", METHODS)
def test_it_gives_what_merging_the_combined_adapter_gives(
    method: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, *adapters = files
    given: list[Any] = [(adapters[0], 0.8), (adapters[1], -0.5)] if method != "mean" else [*adapters]
    options: Any = {**numbers(method), "method": method}
    lora_merge.merge(base, given, tmp_path / "one.safetensors", **options)
    lora_merge.combine(given, tmp_path / "c.safetensors", base=base, algorithm="full", dtype="fp32", **options)
    lora_merge.merge(base, tmp_path / "c.safetensors", tmp_path / "two.safetensors")
    one, two, before = (load(p) for p in (tmp_path / "one.safetensors", tmp_path / "two.safetensors", base))
    assert any(not torch.equal(one[key], before[key]) for key in before)
    for key, value in one.items():
        np.testing.assert_allclose(value, two[key], rtol=3e-7, atol=3e-8, err_msg=key)
    assert prove(tmp_path / "one.safetensors", full=True, search=[base.parent])["tensors"] == 32


@pytest.mark.parametrize("method", ["ties", "della_ties"])
def test_bytes_depend_on_no_window_and_replay_makes_them_again(
    method: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, *adapters = files
    words = [f"--{name}={value}" for name, value in numbers(method).items()]
    assert in_process(base, *adapters, "-o", tmp_path / "a.safetensors", "--method", method, *words) == (0, "")
    options: Any = {**numbers(method), "method": method, "max_memory": "8MiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ELEMENTS", 40)
        lora_merge.merge(base, adapters, tmp_path / "b.safetensors", **options)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    lora_merge.replay(tmp_path / "a.safetensors", tmp_path / "c.safetensors", search=[base.parent])
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    held = load(tmp_path / "a.safetensors")
    options.pop("max_memory")
    for key, value in lora_merge.merge_state_dict(load(base), adapters, **options).items():
        assert torch.equal(held[key], value)


MUTANTS = {
    "one entry too many is kept": lambda make: lambda change, count: make(change, count + 1),
    "one entry too few is kept": lambda make: lambda change, count: make(change, count - 1),
    "the smallest are kept": lambda make: lambda change, count: ~make(change, change.numel() - count),
    "each row has a threshold of its own": lambda make: lambda change, count: torch.stack(
        [make(row, count * row.numel() // change.numel()) for row in change]
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", MUTANTS)
def test_the_full_proof_finds_a_wrong_threshold(wrong: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, *adapters = files
    options: Any = {"method": "ties", "density": 0.4, "verify": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combining, "largest", MUTANTS[wrong](combining.largest))
        lora_merge.merge(base, adapters, tmp_path / "o.safetensors", **options)
    with pytest.raises(VerificationFailed, match="of 32 merged tensors are not what"):
        prove(tmp_path / "o.safetensors", full=True, search=[base.parent])


def changes(count: int) -> list[torch.Tensor]:
    return [rand(12, 20, seed=n).double() for n in range(count)]


@pytest.mark.parametrize("method", METHODS)
def test_both_implementations_agree(method: str) -> None:
    given = changes(2 if method == "slerp" else 3)
    strengths, seeds = [1.0, 0.5, -0.7][: len(given)], ["a", "b", "c"]
    for more in ({}, {"elect": "count", "normalise": "weight"}, {"normalise": "none", "scale": 0.5}):
        n = Numbers(**{**numbers(method), **more})
        one = combining.combined(method, given, strengths, n, seeds)
        parts, slack = combined.combined(
            COMBINATIONS[method], [g.numpy() for g in given], strengths, n, seeds, vector=False
        )
        assert (slack <= 1e-6).all()
        np.testing.assert_allclose(one.numpy(), np.sum(parts, axis=0), atol=1e-11)
