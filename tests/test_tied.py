"""Adapters on tied embeddings do what PEFT's merge_and_unload does, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge

from .support import load

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"]], ids="+".join)
def test_a_tied_head_is_merged_into_the_shared_tensor(tmp_path: Path, targets: list[str]) -> None:
    torch.manual_seed(0)
    arguments: dict[str, Any] = dict(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**arguments))
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    tuned.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load(tmp_path / f / "model.safetensors") for f in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=2e-6, rtol=1e-5)
    if "lm_head" in targets:
        assert any("tied" in note for note in report.coverage["adapter"]["notes"])
