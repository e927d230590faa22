"""What is extracted of new tokens, new heads, and heads that one checkpoint shares with its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.errors import FitError
from tests.kit.tensors import rand


def llama(vocabulary: int = 20, *, tied: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": vocabulary}  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=tied))


def train(model: Any) -> None:
    """Change every parameter of a model."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p += rand(*p.shape, seed=number)


@pytest.mark.filterwarnings("ignore")  # of PEFT, about tied weights
@pytest.mark.parametrize("tied", [False, True])
def test_peft_gives_the_outputs_of_the_tuned_language_model(tmp_path: Path, tied: bool) -> None:  # noqa: FBT001
    """Embeddings have factors of their own name; a head that shares their weight gets them too."""
    peft, model = pytest.importorskip("peft"), llama(tied=tied)
    model.save_pretrained(tmp_path / "base")
    train(model)
    model.save_pretrained(tmp_path / "tuned")
    report = lora_merge.extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", rank="exact")
    assert report.format == "peft"
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    loaded = peft.PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "out")
    assert torch.allclose(loaded(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # of PEFT, about tied weights
@pytest.mark.parametrize(("tied", "tied_then", "vocabulary"), [(False, False, 23), (True, True, 23), (True, False, 20),
                                                               (False, True, 17)])  # fmt: skip
def test_peft_loads_other_tokens_and_heads_that_one_model_shares_with_its_embeddings(
    tmp_path: Path, tied: bool, tied_then: bool, vocabulary: int,  # noqa: FBT001
) -> None:  # fmt: skip
    """The oracle is the tuned model; the base gets its number of tokens first, as PEFT asks for it."""
    peft = pytest.importorskip("peft")
    model, tuned = llama(tied=tied), llama(vocabulary, tied=tied_then)
    model.save_pretrained(tmp_path / "base")
    train(tuned)
    tuned.save_pretrained(tmp_path / "tuned")
    report = lora_merge.extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", rank="exact")
    assert report.verified is not None
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert told["task_type"] == "CAUSAL_LM"
    assert ({"lm_head", "model.embed_tokens"} <= {*told["modules_to_save"]}) == (vocabulary != 20)
    lora_merge.merge(tmp_path / "base", [tmp_path / "out"], tmp_path / "merged")
    tokens = torch.arange(vocabulary)[None]
    expected = tuned(tokens).logits
    again = type(model).from_pretrained(tmp_path / "merged")
    assert torch.allclose(again(tokens).logits, expected, rtol=0, atol=1e-4)
    if vocabulary != 20:
        model.resize_token_embeddings(vocabulary)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "out")
    assert torch.allclose(loaded(tokens).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of PEFT, about tied weights
@pytest.mark.parametrize("changed", ["new tokens", "a norm"])
def test_peft_loads_a_folder_in_which_no_layer_has_factors(tmp_path: Path, changed: str) -> None:
    peft, model = pytest.importorskip("peft"), llama(tied=False)
    model.save_pretrained(tmp_path / "base")
    tuned = type(model).from_pretrained(tmp_path / "base")
    if changed == "new tokens":
        tuned.resize_token_embeddings(23, mean_resizing=False)
    else:
        with torch.no_grad():
            tuned.model.norm.weight += rand(*tuned.model.norm.weight.shape)
    tuned.save_pretrained(tmp_path / "tuned")
    lora_merge.extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", rank=4, format="peft")
    lora_merge.merge(tmp_path / "base", [tmp_path / "out"], tmp_path / "merged")
    tokens = torch.arange(tuned.config.vocab_size)[None]
    expected = tuned(tokens).logits
    assert torch.equal(type(model).from_pretrained(tmp_path / "merged")(tokens).logits, expected)
    model.resize_token_embeddings(tuned.config.vocab_size)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "out")
    assert torch.equal(loaded(tokens).logits, expected)


def test_new_head_is_stored_whole_and_layers_behind_the_last_are_refused(tmp_path: Path) -> None:
    base = {
        "net.layers.0.mlp.up_proj.weight": rand(6, 4),
        "out.weight": rand(2, 2),
        "net.embed_tokens.weight": rand(9, 4),
    }
    tuned = {**base, "net.layers.0.mlp.up_proj.weight": rand(6, 4, seed=1), "score.weight": rand(3, 4, seed=2)}
    deeper = {**tuned, "net.layers.1.mlp.up_proj.weight": rand(6, 4)}
    for name, tensors in (("b", base), ("t", tuned), ("d", deeper)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in "btd"]
    report = lora_merge.extract(paths[0], paths[1], tmp_path / "o", format="peft", rank="exact")
    stored = load_file(tmp_path / "o" / "adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.score.weight"], tuned["score.weight"])
    assert any("score" in note for note in report.notes)
    with pytest.raises(FitError, match="only in the tuned checkpoint"):
        lora_merge.extract(paths[0], paths[2], tmp_path / "p", format="peft")
    with pytest.raises(FitError, match='format="peft"'):
        lora_merge.extract(paths[0], paths[1], tmp_path / "p.safetensors")


def test_head_apart_is_never_lost_in_a_file(tmp_path: Path) -> None:
    """Only a folder has a place for it."""
    base, tuned = llama(tied=True), llama()
    base.save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    with pytest.raises(FitError, match="head has a weight of its own"):
        lora_merge.extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "o.safetensors")
