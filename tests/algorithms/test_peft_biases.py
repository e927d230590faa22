"""What PEFT's newer tuners save beside their own tensors: biases (`bias`) and whole modules (`modules_to_save`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.recipes.replay import prove
from tests.kit.peft_oracle import assert_close, save, train

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "glora": (peft.GloraConfig, {"r": 4}),
    "psoft": (peft.PsoftConfig, {"r": 4}),
    "adamss": (peft.AdamssConfig, {"r": 6, "num_subspaces": 3, "subspace_rank": 2}),
    "frod": (peft.FrodConfig, {"progressbar": False}),
    "tinylora": (peft.TinyLoraConfig, {"r": 3, "u": 4, "weight_tying": 1.0}),
}
TAUGHT = [
    (name, bias)
    for name, (config, _) in METHODS.items()
    for bias in ("none", "all", f"{name}_only")
    if bias == "none" or ("bias" in config.__dataclass_fields__)
]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "bias"), TAUGHT)
def test_biases_and_whole_modules_are_merged_with_the_rest(name: str, bias: str, tmp_path: Path) -> None:
    make, options = METHODS[name]
    also = {} if bias == "none" else {"bias": bias}
    base, tuned = train(make(target_modules=["wide", "tall"], modules_to_save=["square", "norm"], **also, **options))
    save(tuned, tmp_path / "adapter")
    save_file({key: value.contiguous() for key, value in base.state_dict().items()}, tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "adapter", out, device="cpu")
    assert prove(out, full=True)
    done, before, changed = load_file(out), base.state_dict(), set()
    for key, value in copy.deepcopy(tuned).merge_and_unload().state_dict().items():
        assert_close(done[key], value, key)
        changed |= set() if torch.equal(value, before[key]) else {key}
    assert {"wide.weight", "tall.weight", "square.weight", "square.bias", "norm.weight", "norm.bias"} <= changed
    assert bias == "none" or "wide.bias" in changed
    assert ("conv.bias" in changed) == (bias == "all")


AB, C, DE = ("lora", "vector", "constant", "none"), ("lora", "vector", "none"), ("vector", "constant", "none")
LETTERS = [
    (ab, c, DE[(i + j) % 3], bias)  # every pair of two choices once or twice; all three together are 36
    for i, ab in enumerate(AB)
    for j, c in enumerate(C)
    for bias in (("all", "glora_only") if i == j else (("all", "glora_only")[(i + j) % 2],))
]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ab", "c", "de", "bias"), LETTERS)
def test_glora_works_on_the_bias_that_was_trained_with_it(ab: str, c: str, de: str, bias: str, tmp_path: Path) -> None:
    """At half the strength, half of all that changed, in the bias and in the weight."""
    options = {"config_A_B": ab, "config_C": c, "config_D_E": de, "bias": bias}
    base, tuned = train(peft.GloraConfig(target_modules=["wide", "square", "tall"], r=4, **options))
    save(tuned, tmp_path / "adapter")
    save_file({key: value.contiguous() for key, value in base.state_dict().items()}, tmp_path / "base.safetensors")
    wanted, before = copy.deepcopy(tuned).merge_and_unload().state_dict(), base.state_dict()
    for strength in (1.0, 0.5):
        out = tmp_path / f"{strength}.safetensors"
        lora_merge.merge(tmp_path / "base.safetensors", (tmp_path / "adapter", strength), out, device="cpu")
        assert prove(out, full=True)
        done = load_file(out)
        for key, value in wanted.items():
            assert_close(done[key], before[key] + strength * (value - before[key]), key)
    assert not torch.equal(wanted["wide.bias"], before["wide.bias"])
    assert torch.equal(wanted["conv.bias"], before["conv.bias"]) == (bias == "glora_only")
