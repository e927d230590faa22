"""A match depends on its arguments alone, and is frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.adapters.modules import group
from lora_merge.adapters.peft.rules import rules
from lora_merge.adapters.tensor_values import FileValues
from lora_merge.errors import MergeError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.job import make_job
from lora_merge.matching.formula import FILTERS, AdapterContext, Site, choose
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
    stated = AdapterContext(0, file, rules({}, "", index.metadata), FileValues(), user_settings={"lora_alpha": 4.0})
    view = whole("w", (8, 8))
    first, second = choose(a, view, context), choose(b, view, context)
    assert len(first.remarks) == len(second.remarks) == 1 and first.remarks != second.remarks
    with_setting = choose(b, view, stated)
    assert with_setting.settings == {"lora_alpha"} and not with_setting.remarks
    assert with_setting.patch.scalars["scale"] == 2.0
    assert (choose(b, view, context), choose(a, view, context)) == (second, first)


Case = tuple[str, dict[str, Tensor], dict[str, Any], tuple[int, ...], set[tuple[str, str]]]
"""Filter, tensors, PEFT configuration, weight, and formulas that are refused, each with its filter."""

OF_FILE = {"slots", "configuration", "tensors"}
"""The filters that leave some of the rows, before shapes and numbers are looked at."""

REFUSED: list[Case] = [
    ("slots", {"a.hada_w1_a": rand(8, 2)}, {}, (8, 8), {("loha", "slots")}),
    ("configuration", {"a.lora_A.weight": rand(2, 8), "a.lora_B.weight": rand(8, 2)},
     {"peft_type": "LORA", "init_lora_weights": "olora"}, (9, 8), {("lora", "configuration"), ("olora", "shapes")}),
    ("tensors", {"a.vblora_logits_A": rand(2, 2, 4), "a.vblora_logits_B": rand(2, 2, 4)}, {"peft_type": "VBLORA"},
     (8, 8), {("vblora", "tensors")}),
    ("experts", {"a.lora_A.weight": rand(2, 8), "a.lora_B.weight": rand(8, 2)}, {}, (9, 8),
     {("lora", "shapes"), ("lora_experts", "experts")}),
    ("shapes", {"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(3, 8)}, {}, (8, 8), {("lora", "shapes")}),
    ("magnitude", {"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 8), "a.magnitude": rand(5)}, {},
     (8, 8), {("lora", "magnitude")}),
    ("settings", {"a.lora.A": rand(8, 2), "a.lora.B": rand(2, 8)}, {}, (8, 8), {("lora_transposed", "settings")}),
    ("groups", {"a.weight": rand(8), "a.on_input": torch.ones(1)}, {}, (4, 4, 1, 1), {("ia3", "groups")}),
    ("configured scale", {"a.hra_u": rand(8, 2)}, {"peft_type": "HRA", "r": 4}, (8, 8), {("hra", "configured scale")}),
    ("scale", {"a.lora_A": rand(2, 8), "a.lora_B": rand(8, 2), "a.lora_E": rand(2, 1)}, {}, (8, 8),
     {("adalora", "scale")}),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_formula_names_its_filter_and_a_reason(case: Case, tmp_path: Path) -> None:
    name, tensors, config, shape, expected = case
    file = group(open_checkpoint(save(tensors, tmp_path / "a.safetensors")))
    context = AdapterContext(0, file, rules(config, "adapter_config.json"), FileValues())
    (module,) = file.modules
    site = Site(module, whole("w", shape), {}, context)
    rows = site.rows()
    refused = [(c.formula, *r) for c in site.candidates(rows) if (r := c.refusal()) is not None]
    left = {(formula, filter_) for formula, filter_ in expected if filter_ not in OF_FILE}
    assert {(formula, filter_) for formula, filter_, _ in refused} >= left and all(reason for *_, reason in refused)
    assert not {formula for formula, _ in expected - left} & {*rows.names}
    assert name in {filter_ for _, filter_ in expected}
    with pytest.raises(MergeError):
        choose(module, whole("w", shape), context)


def test_every_filter_is_tried() -> None:
    assert {name for name, *_ in REFUSED} == {*OF_FILE, *(name for name, _ in FILTERS)}


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
