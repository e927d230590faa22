"""Odd files are looked at, or refused with one error: empty tensors, huge numbers, factors that the file lacks."""

from __future__ import annotations

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import MergeError
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.tensors import rand

PAIR = {"a.lora_down.weight": rand(2, 4), "a.lora_up.weight": rand(4, 2)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save({"a.weight": rand(4, 4), "b.bias": torch.zeros(4)}, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def test_model_with_empty_tensors_has_sizes(tmp_path: Path) -> None:
    save({"a.weight": rand(4, 4), "b.weight": torch.zeros(0, 4), "c": torch.zeros(0)}, tmp_path / "m.safetensors")
    found = lora_merge.inspect(tmp_path / "m.safetensors", weights=True)
    assert "norm" in str(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0,)])
@pytest.mark.parametrize(
    "factors",
    [
        {"oft_blocks": (2, 2, 2), "alpha": ()},
        {"lora_up.weight": (4, 1), "lora_down.weight": (1, 4)},
        {"diff": (4, 4)},
        {"lokr_w1": (2, 2), "lokr_w2": (2, 2)},
        {"weight": (4,), "on_input": ()},
    ],
    ids=str,
)
def test_change_of_a_weight_without_numbers_is_looked_at(
    factors: dict[str, tuple[int, ...]], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Some formulas fit it by its number of axes or rows."""
    base = save({"a.weight": torch.zeros(shape), "b.weight": rand(4, 4)}, tmp_path / "base.safetensors")
    found = {f"a.{end}": torch.ones(of) for end, of in factors.items()}
    adapter = save(
        {**found, "b.lora_up.weight": rand(4, 1), "b.lora_down.weight": rand(1, 4)}, tmp_path / "a.safetensors"
    )
    for look in (
        lambda: lora_merge.inspect(base, adapter, weights=True),
        lambda: lora_merge.inspect(adapter, weights=True),
        lambda: lora_merge.compare(adapter, adapter),
        lambda: lora_merge.compare(adapter, adapter, base=base),
    ):
        with suppress(MergeError):
            look()
    page = tmp_path / "page.html"
    assert run("inspect", base, adapter, "--weights", "--html", page).code in (0, 4)


def test_change_too_large_for_fp32_is_reported(base: Path, tmp_path: Path) -> None:
    save(
        {name: torch.full(t.shape, 1e300, dtype=torch.float64) for name, t in PAIR.items()}, tmp_path / "a.safetensors"
    )
    try:
        told = str(lora_merge.inspect(base, tmp_path / "a.safetensors", weights=True))
    except MergeError as refused:
        told = str(refused)
    assert "too large" in told


def test_factors_that_the_file_lacks_are_reported_with_their_weight(base: Path, tmp_path: Path) -> None:
    save({"a.vera_lambda_b": torch.ones(4), "a.vera_lambda_d": torch.ones(2)}, tmp_path / "a.safetensors")
    save(PAIR, tmp_path / "b.safetensors")
    with pytest.raises(MergeError, match="seed"):
        lora_merge.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", base=base)


@pytest.mark.parametrize("rows", [0, 4])
def test_adapters_without_numbers_are_written(rows: int, tmp_path: Path) -> None:
    empty = {"b.lora_down.weight": torch.zeros(2, 4 - rows), "b.lora_up.weight": torch.zeros(rows, 2)}
    save({**PAIR, **empty}, tmp_path / "a.safetensors")
    lora_merge.resize(tmp_path / "a.safetensors", tmp_path / "o.safetensors", rank=1)
    assert lora_merge.verify(tmp_path / "o.safetensors")["ok"]


@pytest.mark.parametrize("rows", [0, 4])
def test_whole_changes_without_numbers_are_written_or_refused(rows: int, tmp_path: Path) -> None:
    save({**PAIR, "b.diff": torch.zeros(rows, 0)}, tmp_path / "a.safetensors")
    lora_merge.resize(tmp_path / "a.safetensors", tmp_path / "o.safetensors", rank=1)
    assert lora_merge.verify(tmp_path / "o.safetensors")["ok"]


@pytest.mark.parametrize("slot", ["w1_a", "w1_b", "w2_a", "w2_b"])
def test_factors_without_axes_are_named_or_refused(slot: str, tmp_path: Path) -> None:
    names = ("w1_a", "w1_b", "w2_a", "w2_b")
    factors = {f"a.hada_{name}": rand(4, 2) if name.endswith("a") else rand(2, 4) for name in names}
    save({**factors, f"a.hada_{slot}": torch.tensor(0.5)}, tmp_path / "a.safetensors")
    save(PAIR, tmp_path / "b.safetensors")
    found = lora_merge.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert "base" in str(found)


@pytest.mark.parametrize("size", [1e200, 1.7e308, -1.7e308, 5e-324, float("inf"), float("nan")])
def test_numbers_of_any_size_are_measured_and_reported_as_strict_json(size: float, tmp_path: Path) -> None:
    save({"a.weight": torch.full((3, 3), size, dtype=torch.float64)}, tmp_path / "m.safetensors")
    found = json.loads(
        lora_merge.inspect(tmp_path / "m.safetensors", weights=True).to_json(), parse_constant=pytest.fail
    )
    told = found["sizes"]["all"]
    assert told["broken"] == (0 if isfinite(size) else 9)
    assert told["largest"] == (abs(size) if isfinite(size) else 0.0)


@pytest.mark.parametrize("tensors", [
    {"oft_blocks": (4, 4, 4)},
    {"lora_up.weight": (16, 4), "lora_down.weight": (4, 16), "dora_scale": (16, 1)},
], ids=["oft", "dora"])  # fmt: skip
def test_numbers_that_any_algorithm_has_beside_its_tensors_hide_no_adapter(
    tensors: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """LyCORIS writes an alpha for each module, also beside one tensor alone; half of the tensors are such numbers."""
    named = {f"lycoris_blocks_{n}_q.{end}": rand(*shape) for n in range(2) for end, shape in tensors.items()}
    alphas = {f"lycoris_blocks_{n}_q.alpha": torch.tensor(1.0) for n in range(2)}
    facts = lora_merge.inspect(save(named | alphas, tmp_path / "a.safetensors"))
    assert (facts["kind"], facts["modules"]) == ("adapter", 2)
