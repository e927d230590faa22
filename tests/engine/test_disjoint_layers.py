"""Several adapters that change different layers of equal shapes and ranks: what one call folds together stays apart.

Run: pytest tests/engine/test_disjoint_layers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lora_merge
from lora_merge.engine.change_sample import Sampling
from lora_merge.errors import FitError
from lora_merge.merge_methods import COMBINATIONS, METHODS
from tests.kit.files import load, save
from tests.kit.pretended_cuda import Pretended
from tests.kit.tensors import Tensors, rand

LAYERS = {"x": (0, 3, 4, 6, 7), "y": (1, 3, 5, 6, 7), "z": (2, 4, 5, 6)}
"""Adapter → layers; 6 by all, 7 by x and y whole."""

SIZES, ROWS, COLS = {"x": 0.1, "y": 1.0, "z": 3.0}, 48, 40
NUMBERS = {"density": 0.5, "epsilon": 0.1, "gamma": 0.1, "t": 0.3, "agree": 2, "seed": 3}
OF: dict[str, dict[str, Any]] = {m: {n: NUMBERS[n] for n in row.takes if n in NUMBERS} for m, row in METHODS.items()}
"""Method → its numbers."""


def chosen(method: str) -> str:
    return "xy" if method == "slerp" else "xyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disjoint")
    save({f"blocks.{n}.q.weight": rand(ROWS, COLS, seed=n) for n in range(9)}, folder / "base.safetensors")
    for number, (adapter, layers) in enumerate(LAYERS.items()):
        tensors: Tensors = {}
        for n in layers:
            seed, name = 100 * number + n, f"blocks.{n}.q"
            if n == 7:
                tensors[f"{name}.diff"] = rand(ROWS, COLS, seed=seed, scale=SIZES[adapter])
            else:
                tensors[f"{name}.lora_up.weight"] = rand(ROWS, 3, seed=seed, scale=SIZES[adapter])
                tensors[f"{name}.lora_down.weight"] = rand(3, COLS, seed=seed, scale=1.0)
        save(tensors, folder / f"{adapter}.safetensors")
    return folder


def norm(folder: Path, adapter: str, layer: int) -> float:
    """‖ΔW‖ in numpy."""
    tensors, name = load(folder / f"{adapter}.safetensors"), f"blocks.{layer}.q"
    if f"{name}.diff" in tensors:
        return float(np.linalg.norm(tensors[f"{name}.diff"].numpy()))
    up, down = (tensors[f"{name}.lora_{part}.weight"].double().numpy() for part in ("up", "down"))
    return float(np.linalg.norm(up @ down))


def merged(folder: Path, out: Path, method: str, adapters: str, **options: Any) -> tuple[Tensors, Any]:
    files = [folder / f"{a}.safetensors" for a in adapters]
    report = lora_merge.merge(
        folder / "base.safetensors", files, out, method=method, verify=False, **OF[method], **options
    )
    return load(out), report


def assert_numbers(folder: Path, report: Any, adapters: str, rel: float = 1e-4) -> None:
    """The report has ‖ΔW‖ of each adapter and each layer, and no share of others."""
    tensors = report.numbers["tensors"]
    for n in range(8):
        wanted = [norm(folder, a, n) if n in LAYERS[a] else None for a in adapters]
        if any(wanted):
            shares = tensors[f"blocks.{n}.q.weight"]["adapters"]
            assert [s and s["change"] for s in shares] == [w and pytest.approx(w, rel=rel) for w in wanted], n
    for place, adapter in enumerate(adapters):
        wanted_all = np.sqrt(sum(norm(folder, adapter, n) ** 2 for n in LAYERS[adapter]))
        assert report.numbers["all"]["adapters"][place]["change"] == pytest.approx(wanted_all, rel=rel)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
def test_weights_follow_their_adapters_by_every_method(method: str, folder: Path, tmp_path: Path) -> None:
    """Whatever the order of the adapters and the memory; the report is right, and the proof of all numbers agrees."""
    adapters, out = chosen(method), tmp_path / "out.safetensors"
    got, report = merged(folder, out, method, adapters)
    assert_numbers(folder, report, adapters)
    lora_merge.verify(out, full=True, search=[folder])
    less, report = merged(folder, tmp_path / "less.safetensors", method, adapters, max_memory="64MiB")
    assert all(torch.equal(less[key], value) for key, value in got.items())
    assert_numbers(folder, report, adapters)
    if method != "slerp":  # whose number says which adapter is the first
        turned, _ = merged(folder, tmp_path / "turned.safetensors", method, adapters[::-1])
        for key, value in got.items():
            torch.testing.assert_close(turned[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", COMBINATIONS)
def test_combine_and_merge_are_one_for_layers_of_different_adapters(method: str, folder: Path, tmp_path: Path) -> None:
    adapters, base = chosen(method), load(folder / "base.safetensors")
    got, _ = merged(folder, tmp_path / "out.safetensors", method, adapters)
    change = tmp_path / "change.safetensors"
    files = [folder / f"{a}.safetensors" for a in adapters]
    lora_merge.combine(files, change, base=folder / "base.safetensors", method=method, algorithm="full",
                       dtype="fp32", **OF[method])  # fmt: skip
    for key, value in load(change).items():
        weight = key.replace(".diff", ".weight")
        torch.testing.assert_close(base[weight] + value, got[weight], rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["sum", "compose", "ties", "dare", "della_ties", "consensus"])
def test_device_keeps_layers_of_different_adapters_apart(
    method: str, folder: Path, tmp_path: Path, cuda: Pretended
) -> None:
    want, _ = merged(folder, tmp_path / "want", method, "xyz", device="cpu")
    got, report = merged(folder, tmp_path / "got", method, "xyz", device="cuda")
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6, msg=key)
    assert_numbers(folder, report, "xyz")
    assert not cuda.races


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Sampling.__init__, "__defaults__", (16, 1, False, frozenset()))
    yield


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("method", ["sum", "ties", "della"])
def test_norms_from_factors_are_exact_also_where_changes_become_one(method: str, folder: Path, tmp_path: Path) -> None:
    """Of each adapter; one number in 16 is looked at."""
    _, report = merged(folder, tmp_path / "out", method, "xyz")
    for n in range(6):  # of 6 the rows give the norm at less cost
        shares = report.numbers["tensors"][f"blocks.{n}.q.weight"]["adapters"]
        for share, a in zip(shares, "xyz", strict=True):
            assert share is None or share["change"] == pytest.approx(norm(folder, a, n), rel=1e-4)


def test_weight_that_indices_do_not_fit_is_named_among_others_of_its_kind(tmp_path: Path) -> None:
    """The first of the weights that one call folds is sound."""
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj" for n in range(3)]
    base = {f"{n.removeprefix('base_model.model.')}.weight": rand(8, 6, seed=k) for k, n in enumerate(names)}
    save(base, tmp_path / "base.safetensors")
    tensors: Tensors = {}
    for k, name in enumerate(names):
        tensors[f"{name}.shira_weight"] = rand(5, seed=k)
        tensors[f"{name}.shira_indices"] = torch.tensor([[0, 1, 2, 3, 9 if k == 1 else 4], [0, 1, 2, 3, 4]]).int()
    folder = tmp_path / "adapter"
    folder.mkdir()
    save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "SHIRA", "r": 1, "target_modules": ["q_proj"]}')
    with pytest.raises(FitError, match=r"layers\.1\.self_attn"):
        lora_merge.merge(tmp_path / "base.safetensors", [folder], tmp_path / "out", verify=False)
