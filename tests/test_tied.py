"""Adapters on tied embeddings do what PEFT's merge_and_unload does, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import FitError, UnmatchedModules

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


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(intermediate_size=64)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(intermediate_size=64, head_dim=8)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
}


def _train(folder: Path, name: str, **options: Any) -> tuple[Any, Any]:
    """(the merged model as PEFT has it, the base's state) of an adapter with changed modules_to_save; saves both."""
    kind, config, arguments = MODELS[name]
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    sizes |= arguments if name == "gpt2" else arguments | dict(num_key_value_heads=2, tie_word_embeddings=True)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(folder / "adapter")
    return None if options.get("lora_bias") else tuned.merge_and_unload().eval(), before


def _notes(report: lora_merge.Report) -> str:
    return " ".join(report.coverage["adapter"]["notes"])


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_an_end_that_was_trained_alone_unties_the_model(tmp_path: Path, name: str, saved: list[str]) -> None:
    """The loaded output computes what PEFT's merged model does, with the config that says so."""
    saved = ["wte" if name == "gpt2" and s == "embed_tokens" else s for s in saved]
    layers = ["c_attn"] if name == "gpt2" else ["q_proj"]
    theirs, _ = _train(tmp_path, name, target_modules=layers, modules_to_save=saved)
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "stored apart" in _notes(report)
    ours, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not ours.config.tie_word_embeddings
    got, want = ours.state_dict(), theirs.state_dict()
    assert not torch.equal(got["lm_head.weight"], ours.get_input_embeddings().weight)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=2e-6, rtol=1e-5)
    tokens = torch.arange(10).view(1, 10)
    torch.testing.assert_close(ours.eval()(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_ends_that_were_trained_apart_at_half_strength(tmp_path: Path) -> None:
    theirs, before = _train(tmp_path, "qwen2", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", 0.5)], tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours[key], before[key] + 0.5 * (value - before[key]), atol=2e-6, rtol=1e-5)
    lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", 0.0)], tmp_path / "none")
    none = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "none")
    assert none.config.tie_word_embeddings and all(torch.equal(before[k], v) for k, v in none.state_dict().items())


@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_ends_that_were_trained_as_one_stay_tied(tmp_path: Path, saved: list[str]) -> None:
    theirs, _ = _train(tmp_path, "qwen2", target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=True)
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "the head is tied to model.embed_tokens.weight and changes with it" in _notes(report)
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.tie_word_embeddings
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, atol=2e-6, rtol=1e-5)


def test_a_lora_of_tied_embeddings_says_that_the_head_changes_too(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["embed_tokens"])
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "the head is tied to model.embed_tokens.weight and changes with it" in _notes(report)


def test_what_cannot_be_untied_or_combined_is_refused(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    adapter = tmp_path / "adapter"
    with pytest.raises(FitError, match="apart"):
        lora_merge.merge(tmp_path / "base", [(adapter, 0.5), (adapter, 0.5)], tmp_path / "ours")
    (tmp_path / "base" / "config.json").unlink()  # nowhere to say that the ends are not tied
    with pytest.raises(UnmatchedModules, match="tie_word_embeddings"):
        lora_merge.merge(tmp_path / "base", adapter, tmp_path / "ours")


def test_biases_that_the_base_lacks_are_noted(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["o_proj"], lora_bias=True)
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "o_proj.bias" in _notes(report) and "the base has no such bias" in _notes(report)


def test_tensors_of_unknown_meaning_are_called_so(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["q_proj"])
    tensors = load(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(tensors | {"model.a.rank": torch.ones(3)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UnmatchedModules, match="meaning of 1 of the adapter's tensors is unknown") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "model.a.rank" in e.value.where and "trained on" not in e.value.fix
