"""Mixtures of experts, whose weights transformers stacks in memory, and some of them on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.adapters_out.convert import plan
from lora_merge.errors import FitError, UsageError
from lora_merge.recipes.commands import COMMANDS
from tests.kit.tensors import Tensors

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = dict(
    vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
KINDS = {
    "gpt_oss": dict(intermediate_size=8, num_local_experts=3, num_experts_per_tok=2),
    "qwen3_moe": dict(intermediate_size=8, moe_intermediate_size=8, num_experts=3, num_experts_per_tok=2),
}
MIXTRAL = {"mixtral": dict(intermediate_size=8, num_local_experts=3, num_experts_per_tok=2)}
"""Its experts are called w1, w2 and w3 where PEFT looks for factors to stack."""
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def loaded(base: Path, adapter: Path) -> Tensors:
    """The weights that PEFT gives."""
    found = peft.PeftModel.from_pretrained(model(base), adapter).merge_and_unload().state_dict()
    return {name: value.clone() for name, value in found.items()}


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base, an adapter of its stacked experts, and one of other layers too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SMALL, **(KINDS | MIXTRAL)[request.param])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for name, modules in (("a", ["q_proj"]), ("b", ["q_proj", "v_proj"])):
        own = peft.LoraConfig(r=2, lora_alpha=3, target_modules=modules, target_parameters=STACKS[: 1 + (name == "a")])
        trained = peft.get_peft_model(model(tmp_path / "base"), own)
        for key, value in trained.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.1)
        trained.save_pretrained(tmp_path / name)
    return tmp_path / "base", tmp_path / "a", tmp_path / "b"


def test_sum_of_stacked_experts_is_the_sum_of_what_peft_makes(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, a, b = files
    before, one, two = model(base).state_dict(), loaded(base, a), loaded(base, b)
    out = tmp_path / "sum.safetensors"
    report = lora_merge.combine([(a, 0.5), (b, -1.5)], out, base=base, algorithm="full", dtype="fp32")
    assert report.verified is not None
    lora_merge.merge(base, out, tmp_path / "merged", dtype="fp32")
    merged = model(tmp_path / "merged").state_dict()
    for name, value in before.items():
        wanted = value + 0.5 * (one[name] - value) - 1.5 * (two[name] - value)
        assert torch.allclose(merged[name], wanted, atol=1e-6), name
    assert any("experts" in name and not torch.equal(merged[name], before[name]) for name in before)


def test_peft_gets_no_whole_values_of_an_expert_which_it_would_leave_out(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, a, b = files
    with pytest.raises(FitError) as told:
        lora_merge.combine([a, b], tmp_path / "out", base=base, algorithm="full", format="peft")
    assert "experts" in told.value.where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", ["qwen3_moe", "mixtral"], indirect=True)
def test_peft_stacks_the_factors_of_all_experts(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """They have to have one rank, and also those of experts that do not change have to be there."""
    base, before = files[0], model(files[0]).state_dict()
    tuned = model(base)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tuned.get_parameter(experts).data[1] += 0.05 * torch.randn_like(before[experts][1])
    tuned.get_parameter(experts).data[0, 0] += 0.05
    tuned.get_parameter("model.layers.0.self_attn.q_proj.weight").data[0] += 0.05
    tuned.save_pretrained(tmp_path / "tuned")
    report = lora_merge.extract(base, tmp_path / "tuned", tmp_path / "out", rank=4)
    lora_merge.convert(tmp_path / "out", tmp_path / "k.safetensors", base=base, to="kohya")
    options = {"to": "peft", "overwrite": True}
    planned = plan(COMMANDS["convert"].job([tmp_path / "k.safetensors"], tmp_path / "out", base, options))
    assert 0 <= planned.written - report.written <= 2 * 4096, "with the zeros of experts that do not change"
    lora_merge.merge(base, tmp_path / "out", tmp_path / "merged", dtype="fp32")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wanted = loaded(base, tmp_path / "out")
    assert not [one for one in told if "missing adapter keys" in str(one.message)]
    merged = model(tmp_path / "merged").state_dict()
    assert all(torch.allclose(merged[name], wanted[name], atol=1e-6) for name in wanted)
    assert not torch.equal(merged[experts][0], before[experts][0])
    assert torch.equal(merged[experts][2], before[experts][2])
    with pytest.raises(UsageError, match="stacked experts"):  # only the base tells how many there are
        lora_merge.combine(files[1:], tmp_path / "sum")
