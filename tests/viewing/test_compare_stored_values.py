"""Two adapters that store values in place of the base's own, biases and norms: compared, or named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.viewing.compare import compare_rows
from tests.kit.files import save
from tests.kit.tensors import Tensors, rand

NORM = "model.layers.0.input_layernorm"
Q = "model.layers.0.self_attn.q_proj"
EMBEDDINGS = "model.embed_tokens.weight"


def adapter(folder: Path, tensors: Tensors, **configuration: Any) -> Path:
    folder.mkdir()
    save({f"base_model.model.{k}": v for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **configuration}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def lora(seed: int) -> Tensors:
    return {f"{Q}.lora_A.weight": rand(2, 64, seed=seed), f"{Q}.lora_B.weight": rand(64, 2, seed=seed + 1)}


def norms(folder: Path, values: Tensor) -> Path:
    return adapter(folder, {f"{NORM}.ln_tuning_layers.weight": values}, peft_type="LN_TUNING")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tensors = {EMBEDDINGS: rand(40, 64), f"{NORM}.weight": torch.ones(64), f"{Q}.weight": rand(64, 64)}
    return save(tensors, tmp_path / "base.safetensors")


def test_values_that_both_store_are_compared_as_they_are_without_a_base(tmp_path: Path) -> None:
    a, b = 1 + rand(64), 1 + rand(64, seed=1)
    files = norms(tmp_path / "a", a), norms(tmp_path / "b", b)
    found = lora_merge.compare(*files)
    (row,) = found["whole"]["tensors"].values()
    assert found["whole"]["total"] == row
    assert row["difference"] == pytest.approx(float((b - a).double().norm()))
    assert row["relative"] == pytest.approx(float((b - a).double().norm() / a.double().norm()))
    assert (found["whole"]["equal"], found["not_compared"], found["only_a"], found["only_b"]) == (0, {}, [], [])
    assert f"1 tensor stored whole in both: 0 equal, 1 different; {100 * row['relative']:.3g} % of the weights" in str(
        found
    )
    same = lora_merge.compare(files[0], files[0])
    assert same["whole"]["equal"] == 1
    assert str(same).rstrip().endswith("1 tensor stored whole in both: 1 equal, 0 different")


def test_changes_are_compared_with_a_base(base: Path, tmp_path: Path) -> None:
    """V − W of both, also where one of them has another formula for the same tensor."""
    a, b = 1 + rand(64), 1 + rand(64, seed=1)
    files = norms(tmp_path / "a", a), norms(tmp_path / "b", b)
    found = lora_merge.compare(*files, base=base)
    one, other = (a - 1).double(), (b - 1).double()
    total = {"a": float(one.norm()), "b": float(other.norm()), "cosine": float(one @ other / one.norm() / other.norm())}
    assert {k: found["total"][k] for k in total} == pytest.approx(total, rel=1e-5)
    assert [*found["modules"]] == [f"{NORM}.weight"]
    assert "whole" not in found
    difference = save({f"{NORM}.diff": b - 1}, tmp_path / "d.safetensors")
    for pair in ((files[0], difference), (difference, files[0])):
        assert lora_merge.compare(*pair, base=base)["total"]["cosine"] == pytest.approx(total["cosine"], rel=1e-4)


def test_values_that_are_not_compared_are_named_with_the_reason(base: Path, tmp_path: Path) -> None:
    """Values of other shapes, rows of tokens, copies of the base's own, modules without a place."""
    one, other = (
        adapter(tmp_path / name, {**lora(n), EMBEDDINGS: rand(rows, 64, seed=n), f"{Q}.base_layer.bias": rand(64)},
                modules_to_save=["embed_tokens"])
        for n, (name, rows) in enumerate({"a": 44, "b": 48}.items())
    )  # fmt: skip
    embeddings, bias = (f"base_model.model.{k}" for k in (EMBEDDINGS, f"{Q}.base_layer.bias"))
    found = lora_merge.compare(one, other)
    assert found["not_compared"] == {
        embeddings: "other shapes: [44, 64] in A, [48, 64] in B", bias: "a copy of the base's own tensor"
    }  # fmt: skip
    assert f"not compared  {embeddings}: other shapes: [44, 64] in A, [48, 64] in B" in str(found)
    assert lora_merge.compare(one, other, base=base)["not_compared"][EMBEDDINGS].startswith("other shapes")
    tokens = adapter(tmp_path / "t", {"model.embed_tokens.trainable_tokens_delta": rand(2, 64)},
                     peft_type="TRAINABLE_TOKENS", token_indices=[1, 5], target_modules=["embed_tokens"])  # fmt: skip
    assert [*lora_merge.compare(tokens, tokens)["not_compared"].values()] == [
        "rows of trained tokens: name a base with --base"
    ]
    assert lora_merge.compare(tokens, tokens, base=base)["total"]["cosine"] == pytest.approx(1, abs=1e-5)
    strange = save(lora(3) | {"model.layers.9.self_attn.q_proj.lora_A.weight": rand(2, 64),
                              "model.layers.9.self_attn.q_proj.lora_B.weight": rand(64, 2)}, tmp_path / "s.safetensors")  # fmt: skip
    found = lora_merge.compare(strange, strange, base=base)
    assert (found["common"], [*found["not_compared"]]) == (1, ["model.layers.9.self_attn.q_proj"])


def test_values_in_one_adapter_alone_are_named(base: Path, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "a", lora(1)), norms(tmp_path / "b", torch.ones(64))
    found = lora_merge.compare(one, other)
    assert found["only_b"] == [f"base_model.model.{NORM}.ln_tuning_layers.weight"]
    assert lora_merge.compare(one, other, base=base)["only_b"] == [f"{NORM}.weight"]


def test_changes_of_vectors_are_compared_and_measured_without_a_base(tmp_path: Path) -> None:
    """Biases and norms. A vector has one direction, which says nothing of the ranks."""
    both = lora(1) | {f"{Q}.diff_b": rand(64), f"{NORM}.diff": rand(64, seed=2)}
    one = save(both, tmp_path / "a.safetensors")
    other = save(both | {f"{Q}.diff_b": -both[f"{Q}.diff_b"]}, tmp_path / "b.safetensors")
    found = lora_merge.compare(one, other)
    cosines = {name: row["cosine"] for name, row in found["modules"].items()}
    assert cosines == pytest.approx({Q: 1, f"{Q}.bias": -1, NORM: 1}, abs=1e-5)
    assert found["not_compared"] == {}
    weights = lora_merge.inspect(one, weights=True)["weights"]
    assert weights["measured"] == 3
    assert weights["modules"][f"{Q}.bias"]["norm"] == pytest.approx(float(both[f"{Q}.diff_b"].norm()), rel=1e-5)
    assert weights["stable_rank"]["min"] > 1
    assert [*map(str, compare_rows(found))]


def test_text_encoders_of_two_dialects_are_paired_by_names_alone(tmp_path: Path) -> None:
    """kohya calls the only text encoder `te`, diffusers `text_encoder`."""
    layers = [f"text_model.encoder.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkv"]
    kohya, diffusers = {}, {}
    for n, layer in enumerate(layers):
        up, down = rand(24, 2, seed=n), rand(2, 24, seed=n + 9)
        flat = f"lora_te_{layer.replace('.', '_')}"
        kohya |= {f"{flat}.lora_up.weight": up, f"{flat}.lora_down.weight": down}
        name = f"text_encoder.{layer}"
        diffusers |= {f"{name}.lora_B.weight": up.clone(), f"{name}.lora_A.weight": down.clone()}
    found = lora_merge.compare(save(kohya, tmp_path / "a.safetensors"), save(diffusers, tmp_path / "b.safetensors"))
    assert (found["common"], found["only_a"], found["only_b"]) == (6, [], [])
    assert found["total"]["cosine"] == pytest.approx(1, abs=1e-5)
