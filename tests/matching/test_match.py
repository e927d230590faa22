"""A match depends on its arguments alone, and is frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.adapters.modules import FileValues, group
from lora_merge.adapters.peft.rules import rules
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.job import make_job
from lora_merge.matching.formula import AdapterContext, choose
from lora_merge.models.weights import whole
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from tests.kit.files import save
from tests.kit.tensors import rand


def test_choice_depends_on_its_arguments_alone(tmp_path: Path) -> None:
    """Asked again, after other modules, and with another context between: the same patch with the same remarks."""
    tensors = {"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 8), "a.alpha": torch.tensor(0.0),
               "b.lora_up.weight": rand(8, 2), "b.lora_down.weight": rand(2, 8)}  # fmt: skip
    index = open_checkpoint(save(tensors, tmp_path / "a.safetensors"))
    file = group(index)
    a, b = sorted(file.modules, key=lambda m: m.name)
    context = AdapterContext(0, file, rules({}, "", index.metadata), FileValues())
    stated = AdapterContext(0, file, rules({}, "", index.metadata), FileValues(), given={"lora_alpha": 4.0})
    view = whole("w", (8, 8))
    first, second = choose(a, view, context), choose(b, view, context)
    assert len(first.remarks) == len(second.remarks) == 1 and first.remarks != second.remarks
    with_setting = choose(b, view, stated)
    assert with_setting.settings == {"lora_alpha"} and not with_setting.remarks
    assert with_setting.patch.numbers["scale"] == 2.0
    assert (choose(b, view, context), choose(a, view, context)) == (second, first)


def test_match_is_frozen(tmp_path: Path) -> None:
    save({"a.weight": rand(8, 8)}, tmp_path / "b.safetensors")
    save({"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 8)}, tmp_path / "a.safetensors")
    job = make_job(tmp_path / "b.safetensors", [tmp_path / "a.safetensors"], tmp_path / "o.safetensors")
    (match,) = plan_job(job, CheckpointCache()).adapters
    for field in fields(match):
        with pytest.raises(FrozenInstanceError):
            setattr(match, field.name, None)


def test_layers_called_linear_are_not_wrapped_ones() -> None:
    """Only LLMs-from-scratch calls a layer that it wrapped so; the heads and norms of diffusers' models are modules."""
    base = {"norm.linear.weight": rand(8, 6), "norm.linear.bias": rand(8), "norm.bias": rand(8, seed=3)}
    lora = {"norm.linear.lora_A.weight": rand(2, 6), "norm.linear.lora_B.weight": rand(8, 2)}
    value = {"norm.linear.bias": rand(8, seed=7)}
    made = lora_merge.merge_state_dict(base, lora | value)
    assert torch.equal(made["norm.linear.bias"], value["norm.linear.bias"])
    assert not torch.equal(made["norm.linear.weight"], base["norm.linear.weight"])
    difference = {"norm.linear.diff_b": rand(8)} | {f"other.{key}": value for key, value in lora.items()}
    other = {"norm.bias": base["norm.bias"], "other.norm.linear.weight": base["norm.linear.weight"]}
    with pytest.raises(lora_merge.MergeError, match=r"norm\.linear\.bias"):
        lora_merge.merge_state_dict(other, difference)
