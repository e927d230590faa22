"""Tensors that an adapter stores whole have numbers in the report: V − W beside W, held against numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.engine import change_norms
from lora_merge.viewing.inspect import inspect
from tests.kit.files import load, save
from tests.kit.measured import survival_of
from tests.kit.tensors import rand

NORM = "model.layers.0.input_layernorm.weight"
EMBEDDINGS = "model.embed_tokens.weight"


def ln_tuning(folder: Path, new: Tensor) -> Path:
    """Norms as PEFT's LN tuning saves them."""
    folder.mkdir()
    key = f"base_model.model.{NORM.removesuffix('.weight')}.ln_tuning_layers.weight"
    save({key: new}, folder / "adapter_model.safetensors")
    configuration = {"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]}
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    return folder


def saved_whole(folder: Path, new: Tensor) -> Path:
    """Embeddings as PEFT saves them with `modules_to_save`, beside a LoRA."""
    folder.mkdir()
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    save({"base_model.model.model.embed_tokens.weight": new, f"{q}.lora_A.weight": rand(2, 64),
          f"{q}.lora_B.weight": rand(64, 2)}, folder / "adapter_model.safetensors")  # fmt: skip
    configuration = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"],
                     "modules_to_save": ["embed_tokens"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    return folder


def base(folder: Path, rows: int = 40, dtype: torch.dtype = torch.bfloat16) -> Path:
    tensors = {
        EMBEDDINGS: rand(rows, 64).to(dtype),
        NORM: torch.ones(64).to(dtype),
        "model.layers.0.self_attn.q_proj.weight": rand(64, 64).to(dtype),
    }
    return save(tensors, folder / "base.safetensors")


def exact(old: Tensor, new: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The numbers by their definitions; rows that the base lacks are zeros there."""
    before = torch.zeros(new.shape, dtype=torch.float64)
    before[: len(old)] = old[: len(new)].double()
    change = new.double() - before
    stored = new.to(dtype)
    return {
        "of": new.numel(), "elements": new.numel(), "weight": float(before.norm()), "change": float(change.norm()),
        "ratio": float(change.norm() / before.norm()), "largest": float(change.abs().max()),
        "changed": float((stored != before.to(dtype)).double().mean()), "saturated": 0,
        **survival_of(change, stored.double() - new.double()),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["keep", "fp16", "fp32"])
def test_norms_that_an_adapter_replaces_are_measured(dtype: str, tmp_path: Path) -> None:
    """In the report, by tensor, block and part, and as `inspect --weights` tells them before the merge."""
    new = 1 + rand(64)
    source, adapter, out = base(tmp_path), ln_tuning(tmp_path / "ln", new), tmp_path / "out.safetensors"
    numbers = lora_merge.merge(source, adapter, out, dtype=dtype).numbers
    want = exact(load(source)[NORM], new, load(out)[NORM].dtype)
    own = {entry: want[entry] for entry in ("change", "share", "retained", "noise")}
    found = {**numbers["tensors"][NORM]}
    assert [*numbers["blocks"]] == [found.pop("block")]
    assert found["adapters"] == [pytest.approx(own, rel=1e-5)]
    assert {k: v for k, v in found.items() if k != "adapters"} == pytest.approx(want, rel=1e-5, abs=1e-9)
    assert numbers["all"] == found
    assert numbers["blocks"] and set(map(str, numbers["blocks"].values())) == {str(found)}
    if dtype == "keep":
        assert inspect(source, adapter, weights=True)["match"]["numbers"]["tensors"] == numbers["tensors"]


@pytest.mark.parametrize("rows", [40, 44, 36])
def test_embeddings_with_other_numbers_of_rows_are_measured_beside_a_lora(rows: int, tmp_path: Path) -> None:
    new = rand(rows, 64, seed=5)
    source, adapter = base(tmp_path, dtype=torch.float32), saved_whole(tmp_path / "a", new)
    numbers = lora_merge.merge(source, adapter, tmp_path / "out.safetensors").numbers
    found = numbers["tensors"][EMBEDDINGS]
    assert found.pop("adapters")[0]["change"] == found["change"]
    assert found.pop("block") in numbers["blocks"]
    assert found == pytest.approx(exact(load(source)[EMBEDDINGS], new, torch.float32), rel=1e-5, abs=1e-6)
    assert len(numbers["tensors"]) == 2
    squares = [one["change"] ** 2 for one in numbers["tensors"].values()]
    assert numbers["all"]["change"] ** 2 == pytest.approx(sum(squares), rel=1e-5)


def test_large_tensor_is_sampled_by_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand for all numbers, also where the rest of the tensor is short."""
    for name, value in (("WHOLE_BELOW", 512), ("READ_RUN", 64), ("SAMPLE_STRIDE", 8)):
        monkeypatch.setattr(change_norms, name, value)
    monkeypatch.setattr(change_norms.measure, "__defaults__", (8,))
    source = base(tmp_path, rows=1001)
    new = load(source)[EMBEDDINGS].float() + 0.5
    adapter = saved_whole(tmp_path / "a", new)
    found = lora_merge.merge(source, adapter, tmp_path / "o.safetensors", dtype="fp32").numbers["tensors"][EMBEDDINGS]
    assert found["of"] == 1001 * 64
    assert 1001 * 64 / 16 < found["elements"] < 1001 * 64 / 4
    assert found["change"] == pytest.approx(0.5 * (1001 * 64) ** 0.5, rel=1e-4)
    assert found["weight"] == pytest.approx(float(load(source)[EMBEDDINGS].float().norm()), rel=0.1)
    assert (found["changed"], found["retained"]) == (1.0, pytest.approx(1, abs=1e-5))


def test_replaced_weight_of_codes_is_measured(tmp_path: Path) -> None:
    """The base's codes are decoded; what new codes hold of the change is not known."""
    key = "model.layers.0.mlp.up_proj.weight"
    plain, quantised = tmp_path / "plain.safetensors", tmp_path / "fp8.safetensors"
    save({key: rand(32, 64), NORM: torch.ones(64)}, plain)
    lora_merge.merge(plain, ln_tuning(tmp_path / "ln", torch.ones(64)), quantised, dtype="fp8_scaled")
    folder = tmp_path / "a"
    folder.mkdir()
    new = rand(32, 64, seed=3)
    save({f"base_model.model.{key}": new}, folder / "adapter_model.safetensors")
    configuration = {"peft_type": "LORA", "r": 1, "target_modules": ["none"], "modules_to_save": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    found = lora_merge.merge(quantised, folder, tmp_path / "out.safetensors", dtype="bf16").numbers["tensors"][key]
    codes = load(quantised)
    old = codes[key].float() * codes[f"{key}_scale"].float()
    want = exact(old, new, torch.bfloat16)
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5, abs=1e-9)
    found = lora_merge.merge(quantised, folder, tmp_path / "keep.safetensors").numbers["tensors"][key]
    assert found["change"] == pytest.approx(want["change"], rel=1e-5)
    assert found["retained"] is None


def test_replacement_that_the_dtype_cannot_hold_is_reported(tmp_path: Path) -> None:
    """No row of it is computed again by the proof, which copies it: the merge itself warns."""
    adapter = ln_tuning(tmp_path / "ln", 1 + 1e-4 * rand(64))
    report = lora_merge.merge(base(tmp_path), adapter, tmp_path / "out.safetensors", dtype="bf16")
    assert report.verified is not None
    assert any("of the change of ln is lost" in note for note in report.notes)
    assert report.numbers["below"] == 1


def test_replaced_tensor_of_a_model_in_memory_is_measured(tmp_path: Path) -> None:
    new = 1 + rand(64)
    source, adapter = base(tmp_path), ln_tuning(tmp_path / "ln", new)
    numbers: dict[str, Any] = {}
    lora_merge.merge_state_dict(load(source), adapter, numbers=numbers)
    assert numbers == lora_merge.merge(source, adapter, tmp_path / "out.safetensors").numbers


def test_merge_without_such_tensors_reads_nothing_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(change_norms, "measure", fail)
    q = "model.layers.0.self_attn.q_proj"
    adapter = save({f"{q}.lora_A.weight": rand(2, 64), f"{q}.lora_B.weight": rand(64, 2)}, tmp_path / "a.safetensors")
    assert lora_merge.merge(base(tmp_path), adapter, tmp_path / "out.safetensors").numbers["tensors"]


def test_replaced_tensor_counts_in_its_part_and_strength(tmp_path: Path) -> None:
    """As any other module does: in the report, and in what is said before the work."""
    source, adapter = base(tmp_path), saved_whole(tmp_path / "a", rand(40, 64, seed=5))
    (found,) = lora_merge.merge(source, adapter, tmp_path / "out.safetensors").coverage.values()
    assert (found["matched"], found["components"], found["strengths"]) == (2, {"model": 2}, {"model": {"1": 2}})
