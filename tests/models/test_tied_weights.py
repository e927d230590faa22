"""Adapters on tied embeddings: the merged folder computes what the tuned model does, and the report says how."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import FitError, ShapeMismatch, UnmatchedModules, VerificationFailed
from lora_merge.recipes.replay import prove
from tests.kit.files import load

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(intermediate_size=64)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(intermediate_size=64, head_dim=8)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
}


def _model(name: str, **options: Any) -> Any:
    kind, config, arguments = MODELS[name]
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    sizes |= (
        arguments if name == "gpt2" else arguments | dict(num_key_value_heads=2, tie_word_embeddings=True) | options
    )
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()


def _tune(model: Any, config: Any, seed: int = 1) -> Any:
    """The model with an adapter of random values."""
    torch.manual_seed(seed)
    tuned = peft.get_peft_model(model, config).eval()
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    return tuned


def _train(folder: Path, name: str, **options: Any) -> tuple[Any, Any]:
    """(the merged model as PEFT has it, the base's state) of an adapter with changed modules_to_save; saves both."""
    model = _model(name)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tuned = _tune(model, _lora(**options))
    tuned.save_pretrained(folder / "adapter")
    return None if options.get("lora_bias") else tuned.merge_and_unload().eval(), before


def _notes(report: lora_merge.Report) -> str:
    return " ".join(report.coverage["adapter"]["notes"])


def _lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=6, **options)


TOKENS = torch.arange(10).view(1, 10)

AS_ONE: dict[str, Callable[[str, str], Any]] = {
    "ensured, embeddings": lambda q, e: _lora(target_modules=[q, e], ensure_weight_tying=True),
    "ensured, head": lambda q, e: _lora(target_modules=[q, "lm_head"], ensure_weight_tying=True),
    "ensured, both": lambda q, e: _lora(target_modules=[e, "lm_head"], ensure_weight_tying=True),
    "ensured, ranks at one scale": lambda q, e: _lora(
        target_modules=[e, "lm_head"], ensure_weight_tying=True, rank_pattern={e: 4}, alpha_pattern={e: 12}
    ),
    "tokens": lambda q, e: peft.TrainableTokensConfig(token_indices=[1, 4], target_modules=[e]),
    "tokens in another order": lambda q, e: peft.TrainableTokensConfig(token_indices=[4, 0, 1], target_modules=[e]),
    "lora and tokens": lambda q, e: _lora(target_modules=[q], trainable_token_indices={e: [5, 3]}),
    "lora and tokens of both": lambda q, e: _lora(
        target_modules=[q], trainable_token_indices={e: [5, 3], "lm_head": [5, 3]}
    ),
}
APART: dict[str, Callable[[str, str], Any]] = {
    "embeddings": lambda q, e: _lora(target_modules=[e]),
    "head": lambda q, e: _lora(target_modules=[q, "lm_head"]),
    "both": lambda q, e: _lora(target_modules=[e, "lm_head"]),
    "ensured dora": lambda q, e: _lora(target_modules=[q, e], ensure_weight_tying=True, use_dora=True),
    "ensured, other alpha": lambda q, e: _lora(
        target_modules=[q, e], ensure_weight_tying=True, alpha_pattern={"lm_head": 2}
    ),
    "ensured, other rank": lambda q, e: _lora(
        target_modules=[e, "lm_head"], ensure_weight_tying=True, rank_pattern={"lm_head": 3}, use_rslora=True
    ),
    "dora": lambda q, e: _lora(target_modules=[e, "lm_head"], use_dora=True),
    "whole head": lambda q, e: _lora(target_modules=[e], modules_to_save=["lm_head"]),
    "whole embeddings": lambda q, e: _lora(target_modules=["lm_head"], modules_to_save=[e]),
    "loha": lambda q, e: peft.LoHaConfig(r=2, target_modules=["lm_head"]),
    "tokens of the head": lambda q, e: peft.TrainableTokensConfig(token_indices=[4, 1], target_modules=["lm_head"]),
    "other tokens": lambda q, e: _lora(target_modules=[q], trainable_token_indices={e: [5, 3], "lm_head": [7, 3]}),
    "tokens and head": lambda q, e: _lora(target_modules=["lm_head"], trainable_token_indices={e: [5, 3]}),
}


FEW: dict[str, Any] = dict(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)
DISTIL = dict(vocab_size=100, dim=32, hidden_dim=64, n_layers=1, n_heads=4)
OTHERS: dict[str, tuple[str, str, dict[str, Any], tuple[str, str, str]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", FEW, ("query", "word_embeddings", "cls.predictions.decoder")),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", FEW, ("query", "word_embeddings", "lm_head.decoder")),
    "roberta decoder": ("RobertaForCausalLM", "RobertaConfig", FEW, ("query", "word_embeddings", "lm_head.decoder")),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", FEW | {"embedding_size": 16}, ("query", "word_embeddings", "decoder")),
    "esm": ("EsmForMaskedLM", "EsmConfig", FEW | {"mask_token_id": 3, "pad_token_id": 1}, ("query", "word_embeddings", "decoder")),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, ("q_lin", "word_embeddings", "vocab_projector")),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", FEW, ("query", "word_embeddings", "generator_lm_head")),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", FEW | {"pad_token_id": 0}, ("Wqkv", "tok_embeddings", "decoder")),
    "opt": ("OPTForCausalLM", "OPTConfig", FEW | {"ffn_dim": 64, "word_embed_proj_dim": 32}, ("q_proj", "embed_tokens", "lm_head")),
    "bloom": ("BloomForCausalLM", "BloomConfig", FEW, ("query_key_value", "word_embeddings", "lm_head")),
    "falcon": ("FalconForCausalLM", "FalconConfig", FEW, ("query_key_value", "word_embeddings", "lm_head")),
    "mamba": ("MambaForCausalLM", "MambaConfig", FEW | {"state_size": 4}, ("x_proj", "embeddings", "lm_head")),
}  # fmt: skip
"""Model → class, configuration, sizes, names of (a layer, the embeddings, the head)."""

ENDS: dict[str, Callable[[str, str, str], Any]] = {
    "embeddings": lambda q, e, h: _lora(target_modules=[e]),
    "embeddings and biases": lambda q, e, h: _lora(target_modules=[q, e], bias="all"),
    "both": lambda q, e, h: _lora(target_modules=[e, h], ensure_weight_tying=True),
    "whole embeddings": lambda q, e, h: _lora(target_modules=[q], modules_to_save=[e]),
    "whole head": lambda q, e, h: _lora(target_modules=[q], modules_to_save=[h]),
    "tokens and head": lambda q, e, h: _lora(target_modules=[h], trainable_token_indices={e: [5, 3]}),
    "tokens": lambda q, e, h: _lora(target_modules=[q], trainable_token_indices={e: [5, 3]}),
    "biases": lambda q, e, h: _lora(target_modules=[q], bias="all"),
}
TOGETHER = ("tokens", "biases")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in ("bert", "modernbert") for c in ENDS] + [(n, "embeddings") for n in OTHERS if "bert" not in n]
    + [("roberta", "whole head"), ("roberta decoder", "embeddings"), ("albert", "whole head"), ("distilbert", "both"),
       ("opt", "whole head"), ("bloom", "tokens and head"), ("electra", "biases")],
)  # fmt: skip
def test_heads_of_other_names_are_parted_where_one_end_changes(tmp_path: Path, name: str, case: str) -> None:
    """A bias that shares its value with the head's own goes with it."""
    kind, config, sizes, layers = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    model.save_pretrained(tmp_path / "base")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    tuned = _tune(model, ENDS[case](*layers))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(ours.eval()(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)
    assert ours.config.tie_word_embeddings is (case in TOGETHER)
    assert ("stored apart" in _notes(report)) is (case not in TOGETHER)


@pytest.mark.parametrize("changed", ["", "lm_head", "decoder.embed_tokens"])
def test_tokens_that_peft_saves_under_all_names_of_one_table(tmp_path: Path, changed: str) -> None:
    """PEFT saves them for both stacks of T5 and for its head; another value for one of them is not dropped."""
    sizes = dict(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, peft.TrainableTokensConfig(token_indices=[9, 5, 2]))
    tuned.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = load(file)
    assert len(stored) == 4
    if changed:
        stored[f"base_model.model.{changed}.trainable_tokens_delta"] += 1
        save_file(stored, file)
        with pytest.raises(lora_merge.MergeError, match="two adapter tensors are for the same part of a layer"):
            lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
        return
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    words = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    torch.testing.assert_close(ours(**words).logits, tuned(**words).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "esm"])
def test_bias_that_peft_leaves_out_in_its_forward_pass_is_named(tmp_path: Path, name: str) -> None:
    """PEFT 0.21.2 computes a head of trained tokens without the bias of its layer. ESM adds its bias outside."""
    kind, config, sizes, layers = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    bias = model.cls.predictions.bias if name == "bert" else model.lm_head.bias
    bias.data += torch.randn_like(bias)
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, ENDS["tokens"](*layers))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = type(model).from_pretrained(tmp_path / "ours").eval()(TOKENS).logits
    left_out = bias if name == "bert" else 0
    torch.testing.assert_close(ours, tuned(TOKENS).logits + left_out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours, tuned.merge_and_unload()(TOKENS).logits, atol=2e-5, rtol=1e-4)
    assert ("leaves out the bias" in _notes(report)) is (name == "bert")


TEXT: dict[str, Any] = dict(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
HEADS8 = TEXT | {"head_dim": 8}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SIGHT: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
)
QWEN: dict[str, Any] = dict(
    depth=1, hidden_size=32, out_hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4
)
QWEN3 = QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SPEECH: dict[str, Any] = dict(
    vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
    max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip

SIGHTED: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "Qwen2VL": ("Qwen2VLConfig", "", TEXT | TURNS, dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4)),
    "Qwen2_5_VL": ("Qwen2_5_VLConfig", "", TEXT | TURNS, QWEN | {"fullatt_block_indexes": [0], "window_size": 16}),
    "Qwen3VL": ("Qwen3VLConfig", "", HEADS8 | TURNS, QWEN3),
    "Qwen3VLMoe": ("Qwen3VLMoeConfig", "", HEADS8 | TURNS | MIXED, QWEN3),
    "Gemma3": ("Gemma3Config", "Gemma3TextConfig", HEADS8, ("SiglipVisionConfig", SIGHT)),
    "Llava": ("LlavaConfig", "LlamaConfig", TEXT, ("CLIPVisionConfig", SIGHT)),
    "LlavaNext": ("LlavaNextConfig", "MistralConfig", TEXT, ("CLIPVisionConfig", SIGHT)),
    "LlavaOnevision": ("LlavaOnevisionConfig", "Qwen2Config", TEXT, ("SiglipVisionConfig", SIGHT)),
    "Mistral3": ("Mistral3Config", "MistralConfig", TEXT, ("PixtralVisionConfig", SIGHT)),
    "InternVL": ("InternVLConfig", "Qwen2Config", TEXT, SIGHT | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "PaliGemma": ("PaliGemmaConfig", "GemmaConfig", HEADS8, ("SiglipVisionConfig", SIGHT)),
    "AyaVision": ("AyaVisionConfig", "CohereConfig", TEXT, ("SiglipVisionConfig", SIGHT)),
    "Idefics3": ("Idefics3Config", "LlamaConfig", TEXT, SIGHT),
    "SmolVLM": ("SmolVLMConfig", "LlamaConfig", TEXT, SIGHT),
}  # fmt: skip
"""Model → its configuration, that of its language model, the sizes of this and of its vision model."""
QUICK = ("Qwen2VL", "Gemma3", "Idefics3")


def _made(given: Any) -> Any:
    return getattr(transformers, given[0])(**given[1]) if isinstance(given, tuple) else given


@pytest.mark.few(3)
@pytest.mark.parametrize("end", ["embed_tokens", "lm_head", "whole head"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SIGHTED])
def test_vision_language_model_is_parted_where_its_class_loads_that(tmp_path: Path, name: str, end: str) -> None:
    """Old layouts call the head `language_model.lm_head`; some classes ask `text_config` whether to tie."""
    kind, language, sizes, vision = SIGHTED[name]
    text = _made((language, sizes)) if language else sizes
    config = getattr(transformers, kind)(text_config=text, vision_config=_made(vision), tie_word_embeddings=True)
    config.image_token_id = 90
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, ENDS["whole head"]("q_proj", "", "lm_head") if " " in end else _lora(target_modules=[end]))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and "stored apart" in _notes(report)
    torch.testing.assert_close(ours.eval()(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("ends", [["embed_tokens"], ["proj_out"], ["embed_tokens", "proj_out"]], ids="+".join)
def test_whisper_is_parted_too(tmp_path: Path, ends: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SPEECH)).eval()
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, _lora(target_modules=ends))
    tuned.save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = type(model).from_pretrained(tmp_path / "ours").eval()
    given = {"input_features": torch.ones(1, 8, 40), "decoder_input_ids": TOKENS}
    torch.testing.assert_close(ours(**given).logits, tuned(**given).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("end", ["shared", "lm_head"])
def test_change_of_one_end_is_refused_where_a_model_cannot_be_untied(tmp_path: Path, end: str) -> None:
    """T5 scales what its head sees if this is tied."""
    sizes: dict[str, Any] = dict(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "base")
    _tune(model, _lora(target_modules=["q", end])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(FitError, match="one end of embeddings that the base ties") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert end in e.value.where and "shared.weight" in e.value.where and 'unmatched="skip"' in e.value.fix
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", unmatched="skip")
    assert "both ends change" in _notes(report)


@pytest.mark.parametrize("layers", ["decoder.layers", "encoder.language_model.layers"])
def test_layers_that_encoder_and_decoder_share_are_not_changed_for_one_of_them(tmp_path: Path, layers: str) -> None:
    """DiffusionGemma runs the prompt through the layers that it denoises with."""
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    kind = {"architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(kind))
    save_file(
        {"model.decoder.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}, tmp_path / "base" / "model.safetensors"
    )
    module = f"base_model.model.model.{layers}.0.self_attn.q_proj"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 4), f"{module}.lora_B.weight": torch.ones(4, 2)}
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    with pytest.raises(FitError, match="share their layers"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")


UNNAMED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    # embeddings of a name that no other model has, and heads of classes that are called otherwise
    "ctrl": ("CTRLLMHeadModel", "CTRLConfig", dict(n_embd=16, n_head=2, n_layer=1, dff=16), "Wq", "transformer.w"),
    "marian": ("MarianMTModel", "MarianConfig", dict(d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=0), "q_proj", "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNNAMED)
def test_change_of_one_end_is_refused_where_a_model_has_other_names(tmp_path: Path, name: str) -> None:
    kind, config, sizes, layer, end = UNNAMED[name]
    made = getattr(transformers, config)(vocab_size=50, tie_word_embeddings=True, **sizes)
    model = getattr(transformers, kind)(made)
    model.save_pretrained(tmp_path / "base")
    _tune(model, _lora(target_modules=[layer, end])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(FitError, match="one end of embeddings that the base ties"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", unmatched="skip")
    assert "both ends change" in _notes(report)


SOME = ("ensured, embeddings", "ensured, head", "tokens", "embeddings", "both")
EACH = [("qwen2", c) for c in (*AS_ONE, *APART)] + [(m, c) for m in ("gemma3", "gpt2") for c in SOME]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "case"), EACH)
def test_merged_folder_computes_what_the_tuned_model_does(tmp_path: Path, name: str, case: str) -> None:
    """merge_and_unload does not, where it adds to the shared tensor what belongs to one end, or the same twice."""
    layers = ("c_attn", "wte") if name == "gpt2" else ("q_proj", "embed_tokens")
    model = _model(name)
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, (AS_ONE | APART)[case](*layers))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(ours.eval()(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)
    apart = case in APART or (
        name == "gpt2" and case == "ensured, embeddings"
    )  # PEFT does not know `wte`, and ties not
    assert ours.config.tie_word_embeddings is not apart
    assert ("stored apart" if apart else "is tied to") in _notes(report)
    assert report.coverage["adapter"]["matched"] == report.coverage["adapter"]["total"]


STORED = ("lora and tokens", "lora and tokens of both", "tokens", "other tokens", "embeddings", "ensured, both")


@pytest.mark.few(2)
@pytest.mark.parametrize("case", STORED)
@pytest.mark.parametrize("away", [0.0, 0.1], ids=["copy", "other"])
def test_stored_head_of_a_tied_base_gets_what_peft_gives_it(tmp_path: Path, case: str, away: float) -> None:
    """Some files hold the head beside the embeddings; PEFT goes by the configuration, transformers by the values."""
    base = tmp_path / "base"
    _model("qwen2").save_pretrained(base)
    tensors = load(base / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table + away * torch.randn_like(table)}, base / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    tuned = _tune(transformers.Qwen2ForCausalLM.from_pretrained(base), (AS_ONE | APART)[case]("q_proj", "embed_tokens"))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(base, tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(ours(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)
    assert ours.config.tie_word_embeddings is (case in AS_ONE)
    assert ("now differ" in _notes(report)) is (case not in AS_ONE)
    assert ("tokens are those of both" in _notes(report)) is case.startswith("lora and")


@pytest.mark.few(3)
@pytest.mark.parametrize("cloned", [False, True])
@pytest.mark.parametrize("case", ["lora and tokens", "embeddings", "head", "ensured, both"])
def test_tied_entries_in_memory_stay_one_or_are_warned_of(tmp_path: Path, case: str, cloned: bool) -> None:  # noqa: FBT001
    """A state dict holds the tensor under both names: what goes back into the tied model is that of one of them."""
    before = {k: v.clone() if cloned else v for k, v in _model("qwen2").state_dict().items()}
    tuned = _tune(_model("qwen2"), (AS_ONE | APART)[case]("q_proj", "embed_tokens"))
    tuned.save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = lora_merge.merge_state_dict(before, tmp_path)
    warned = [w for w in caught if "were tied and now differ" in str(w.message)]
    assert [w.filename for w in warned] == ([__file__] if case in APART else [])
    ours = _model("qwen2", tie_word_embeddings=case in AS_ONE)
    ours.load_state_dict(merged)
    torch.testing.assert_close(ours(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)


def test_entries_of_one_storage_are_warned_of_whatever_they_are_called() -> None:
    weight = torch.ones(4, 4)
    lora = {"a.lora_up.weight": torch.ones(4, 1), "a.lora_down.weight": torch.ones(1, 4), "a.alpha": torch.tensor(1.0)}
    with pytest.warns(UserWarning, match="a.weight and b.weight were tied"):
        lora_merge.merge_state_dict({"a.weight": weight, "b.weight": weight, "c.weight": weight.T}, lora)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lora_merge.merge_state_dict({"a.weight": weight, "b.weight": weight.clone()}, lora)


COPIED: dict[str, Callable[[str, str], Any]] = {
    **{case: (AS_ONE | APART)[case] for case in ("embeddings", "both", "ensured, both", "dora", "tokens")},
    "saved": lambda q, e: _lora(target_modules=[q], modules_to_save=[e]),
    "lora and tokens": lambda q, e: _lora(target_modules=[q], trainable_token_indices=[5, 102]),
}
TOLD = {
    "values": [(c, t) for c in ("embeddings", "both", "dora") for t in (True, False)] + [("ensured, both", True)],
    "rows": [(c, t) for c in ("both", "saved", "lora and tokens") for t in (True, False)]
    + [(c, True) for c in ("embeddings", "dora", "tokens")],
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("what", "case", "tie"), [(w, *one) for w, cases in TOLD.items() for one in cases])
def test_tensor_that_peft_stores_of_its_base_is_what_counts(tmp_path: Path, what: str, case: str, *, tie: bool) -> None:
    """Rows got other values before training, or there are more of them: PEFT loads its own over the base's."""
    _model("qwen2", tie_word_embeddings=tie).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
    if what == "rows":
        model.resize_token_embeddings(104)
    model.get_input_embeddings().weight.data[5:8] += 1.0
    if not tie and (what == "rows" or case == "both"):  # else PEFT stores nothing of the head
        model.lm_head.weight.data[95:] += 1.0
    tuned = _tune(model, COPIED[case]("q_proj", "embed_tokens"))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(len(ours.lm_head.weight)).view(1, -1)
    torch.testing.assert_close(ours(tokens).logits, tuned(tokens).logits, atol=2e-5, rtol=1e-4)
    assert ours.config.vocab_size == (104 if what == "rows" else 100)
    stated = "3 of 100 rows are not those of model.embed_tokens.weight" if what == "values" else "100 rows become 104"
    assert stated in _notes(report)
    prove(tmp_path / "ours", full=True)
    was, config = (tmp_path / folder / "config.json" for folder in ("base", "ours"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_cache": False}))
    (warning,) = prove(tmp_path / "ours")["warnings"]
    assert "config.json" in warning
    if ours.config.vocab_size == 104 or ours.config.tie_word_embeddings != tie:
        shutil.copy(was, config)
        with pytest.raises(VerificationFailed, match=r"loaded as another model|ties what has weights of its own"):
            prove(tmp_path / "ours")


START: dict[str, Callable[[], dict[str, Any]]] = {
    "pissa": lambda: dict(init_lora_weights="pissa"),
    "olora": lambda: dict(init_lora_weights="olora"),
    "kasa": lambda: dict(kasa_config=peft.KasaConfig()),
}
ON_HEAD: dict[str, dict[str, Any]] = {
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "whole embeddings": dict(target_modules=["lm_head"], modules_to_save=["embed_tokens"]),
    "both": dict(target_modules=["embed_tokens", "lm_head"]),
    "both, ensured": dict(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "tokens": dict(target_modules=["lm_head"], trainable_token_indices=[5]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "case", "tie"),
    [("pissa", c, t) for c in ON_HEAD for t in ("apart", "tied")]
    + [
        ("pissa", "head", "stored"),
        ("olora", "tokens", "stored"),
        ("olora", "head", "tied"),
        ("kasa", "head", "stored"),
    ],
)
def test_start_is_taken_out_of_a_head_once_and_out_of_both_tied_ends(
    tmp_path: Path, method: str, case: str, tie: str
) -> None:
    """PEFT takes it out of the shared tensor in place, and stores what is left if embeddings are saved."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    _model("qwen2", tie_word_embeddings=tie != "apart").save_pretrained(base)
    if tie == "stored":
        tensors = load(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    tuned = _tune(transformers.Qwen2ForCausalLM.from_pretrained(base), _lora(**ON_HEAD[case], **START[method]()))
    tuned.save_pretrained(adapter)
    if case == "tokens" and tie != "apart":  # without what is left of the ends
        with pytest.raises(FitError, match="subtracted from tied embeddings") as e:
            lora_merge.merge(base, adapter, tmp_path / "ours")
        assert "lm_head" in e.value.where and "save_embedding_layers=True" in e.value.fix
        return
    lora_merge.merge(base, adapter, tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(ours(TOKENS).logits, tuned(TOKENS).logits, atol=5e-5, rtol=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", START)
def test_start_is_taken_out_by_the_strength(tmp_path: Path, method: str) -> None:
    """W + s (F(W) − W), whether the file holds what is left of W or not."""
    _model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
    _tune(model, _lora(**ON_HEAD["head"], **START[method]())).save_pretrained(tmp_path / "adapter")
    states = {}
    for strength in (0.0, 0.5, 1.0):
        lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", strength)], tmp_path / f"{strength}")
        states[strength] = load(tmp_path / f"{strength}" / "model.safetensors")
    for key, value in states[0.5].items():
        torch.testing.assert_close(value, (states[0.0][key] + states[1.0][key]) / 2, atol=2e-5, rtol=1e-4)
    assert not torch.equal(states[0.0]["lm_head.weight"], states[0.5]["lm_head.weight"])
    _model("qwen2").save_pretrained(tmp_path / "tied")
    with pytest.raises(FitError, match="subtracted from tied embeddings"):
        lora_merge.merge(tmp_path / "tied", [(tmp_path / "adapter", 0.5)], tmp_path / "ours")


def test_more_rows_of_one_end_alone_are_refused(tmp_path: Path) -> None:
    """PEFT stores no head that it did not wrap, if the embeddings are trained."""
    _model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(104)
    _tune(model, APART["embeddings"]("q_proj", "embed_tokens")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(FitError, match="resized") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "lacks the new rows of lm_head.weight" in e.value.where


def test_copy_is_one_in_every_dtype_and_at_no_strength(tmp_path: Path) -> None:
    model = _model("qwen2").bfloat16()
    model.save_pretrained(tmp_path / "base")
    before = load(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    tuned = _tune(model.float(), APART["embeddings"]("q_proj", "embed_tokens"))
    table = tuned.get_input_embeddings().base_layer.weight
    for dtype, away, rows in ((torch.float32, 0.0, 0), (torch.float16, 0.0, 0), (torch.float32, 1.0, 2)):
        table.data[[3, 7]] += away
        tuned.save_pretrained(tmp_path / "adapter")
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({k: v.to(dtype) for k, v in load(path).items()}, path, {"format": "pt"})
        report = lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", 0.0)], tmp_path / "none", overwrite=True)
        assert torch.equal(load(tmp_path / "none" / "model.safetensors")["model.embed_tokens.weight"], before)
        report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", overwrite=True)
        assert (f"{rows} of 100 rows" if rows else "a copy of the base's own tensor") in _notes(report)


def test_adapters_of_different_bases_are_refused_those_of_one_are_not(tmp_path: Path) -> None:
    """Both were trained on the same new values: once those, and both changes."""
    before = _model("qwen2", tie_word_embeddings=False)
    before.save_pretrained(tmp_path / "base")
    wanted = before.get_input_embeddings().weight.detach().clone()
    wanted[5] += 1.0
    for seed, away in ((1, 1.0), (2, 1.0), (3, 2.0)):
        model = _model("qwen2", tie_word_embeddings=False)
        model.get_input_embeddings().weight.data[5] += away
        tuned = _tune(model, _lora(target_modules=["embed_tokens"]), seed)
        tuned.save_pretrained(tmp_path / str(seed))
        wanted += tuned.get_input_embeddings().get_delta_weight("default").detach() if seed < 3 else 0.0
    lora_merge.merge(tmp_path / "base", [tmp_path / "1", tmp_path / "2"], tmp_path / "ours")
    ours = load(tmp_path / "ours" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=1e-5)
    tensors = [load(path) for path in (tmp_path / "base" / "model.safetensors",)]
    held = lora_merge.merge_state_dict(tensors[0], [tmp_path / "1", tmp_path / "2"])
    assert torch.equal(held["model.embed_tokens.weight"], ours)
    with pytest.raises(FitError, match="different values"):
        lora_merge.merge(tmp_path / "base", [tmp_path / "1", tmp_path / "3"], tmp_path / "two")


def test_adapters_of_one_end_each_add_up_at_their_strengths(tmp_path: Path) -> None:
    """W + Σ s ΔW at either end."""
    model, before = _model("qwen2"), _model("qwen2").state_dict()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    ends = {"model.embed_tokens": "embeddings", "lm_head": "head"}
    wanted = {end: before["lm_head.weight"].clone() for end in ends}
    for number, (case, strength) in enumerate({"embeddings": 0.5, "head": -2.0, "both": 1.5}.items()):
        tuned = _tune(_model("qwen2"), APART[case]("q_proj", "embed_tokens"), number)
        tuned.save_pretrained(tmp_path / case)
        for end in ends:
            layer = tuned.base_model.model.get_submodule(end)
            if case in ("both", ends[end]):
                wanted[end] += strength * layer.get_delta_weight("default").detach()
    adapters = [(tmp_path / "embeddings", 0.5), (tmp_path / "head", -2.0), (tmp_path / "both", 1.5)]
    lora_merge.merge(tmp_path / "base", adapters, tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for end in ends:
        torch.testing.assert_close(ours[f"{end}.weight"], wanted[end], atol=2e-6, rtol=1e-5)
    lora_merge.merge(tmp_path / "base", [(tmp_path / "head", 0.0)], tmp_path / "none")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "none").tie_word_embeddings


def test_factors_that_differ_are_of_one_end_each_whatever_the_configuration_says(tmp_path: Path) -> None:
    """`ensure_weight_tying` may have meant whole modules or tokens alone."""
    model = _model("qwen2")
    model.save_pretrained(tmp_path / "base")
    tuned = _tune(model, APART["both"]("q_proj", "embed_tokens"))
    tuned.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ensure_weight_tying": True}))
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(ours(TOKENS).logits, tuned(TOKENS).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("config", ["adapter", "base"])
def test_model_that_cannot_be_untied_changes_both_ends_and_says_so(tmp_path: Path, config: str) -> None:
    """Without the configuration of the base there is nowhere to say it, without the adapter's nobody to ask."""
    _train(tmp_path, "qwen2", target_modules=["lm_head"])
    adapter = tmp_path / "adapter"
    if config == "adapter":
        save_file(load(adapter / "adapter_model.safetensors"), tmp_path / "plain.safetensors")
        adapter = tmp_path / "plain.safetensors"
    else:
        (tmp_path / "base" / "config.json").unlink()
    report = lora_merge.merge(tmp_path / "base", adapter, tmp_path / "ours")
    assert "is tied to" in str(report.coverage) and "the result differs" in str(report.coverage)
    assert not any("lm_head" in key for path in (tmp_path / "ours").glob("*.safetensors") for key in load(path))


@pytest.mark.few(2)
@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_end_that_was_trained_alone_unties_the_model(tmp_path: Path, name: str, saved: list[str]) -> None:
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
    torch.testing.assert_close(ours.eval()(TOKENS).logits, theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


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


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_table_that_peft_saves_under_all_names_of_encoder_and_decoder(
    tmp_path: Path, kind: str, strength: float
) -> None:
    """`shared`, `encoder.embed_tokens`, `decoder.embed_tokens` and `lm_head` are one parameter."""
    sizes: dict[str, Any] = dict(vocab_size=24, d_model=16, decoder_start_token_id=2)
    layers: dict[str, Any] = dict(
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    torch.manual_seed(0)
    model: Any = (
        transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **layers, encoder_ffn_dim=8))
        if kind == "bart"
        else transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_layers=1, num_heads=2, d_kv=8))
    )
    model.eval().save_pretrained(tmp_path / "base")
    before = model.get_input_embeddings().weight.detach().clone()
    options = dict(target_modules=["q_proj", "q"], modules_to_save=["lm_head"], ensure_weight_tying=True)
    tuned = _tune(model, _lora(**options))
    tuned.save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", strength)], tmp_path / "ours")
    ours = type(model).from_pretrained(tmp_path / "ours").eval()
    changed = tuned.base_model.model.lm_head.modules_to_save["default"].weight
    wanted = torch.lerp(before, changed, strength)
    assert not torch.allclose(wanted, before)
    torch.testing.assert_close(ours.get_input_embeddings().weight, wanted, atol=2e-6, rtol=1e-5)
    if strength == 1:
        theirs = peft.PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        got, want = (m.eval()(TOKENS, decoder_input_ids=TOKENS).logits for m in (ours, theirs))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_heads_that_cannot_be_untied_or_combined_are_refused(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    adapter, as_one = tmp_path / "adapter", tmp_path / "one"
    _tune(_model("qwen2"), AS_ONE["ensured, head"]("q_proj", "embed_tokens")).save_pretrained(as_one)
    with pytest.raises(FitError, match="apart") as e:
        lora_merge.merge(tmp_path / "base", [(adapter, 0.5), as_one], tmp_path / "ours")
    assert f"merge {as_one} first" in e.value.fix
    (tmp_path / "base" / "config.json").unlink()  # nowhere to say that the ends are not tied
    with pytest.raises(UnmatchedModules, match="tie_word_embeddings"):
        lora_merge.merge(tmp_path / "base", adapter, tmp_path / "ours")


RESIZED: dict[str, dict[str, Any]] = {
    "both": dict(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "embeddings": dict(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True),
    "layers": dict(target_modules=["q_proj"]),
    "whole": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[100, 101, 107]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("tie", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("case", RESIZED)
def test_vocabulary_resized_before_training(tmp_path: Path, case: str, tie: bool) -> None:  # noqa: FBT001
    """PEFT stores the tables that it was trained upon; what it changes of them is added to these."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tie)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base").eval()  # PEFT compares with the configuration it came with
    model.resize_token_embeddings(108)
    tuned = _tune(model, _lora(**RESIZED[case]))
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert report.verified
    ours, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and ours.config.vocab_size == 108
    tokens = torch.tensor([[1, 99, 100, 101, 107, 5]])
    torch.testing.assert_close(ours.eval()(tokens).logits, tuned(tokens).logits, atol=2e-5, rtol=1e-4)
    if case == "both" and not tie:
        state = {k: v for k, v in transformers.LlamaForCausalLM(config).state_dict().items()}
        base = load(tmp_path / "base" / "model.safetensors")
        merged = lora_merge.merge_state_dict(state | base, tmp_path / "adapter")
        torch.testing.assert_close(merged["lm_head.weight"], ours.state_dict()["lm_head.weight"], atol=1e-6, rtol=1e-5)
        none = lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", 0.0)], tmp_path / "none")
        assert none.verified and load(tmp_path / "none" / "model.safetensors")["lm_head.weight"].shape == (100, 32)


def test_biases_that_the_base_lacks_are_noted_or_refused(tmp_path: Path) -> None:
    """A model that is built from its configuration ignores them; PEFT's forward pass adds them, its merge refuses."""
    _train(tmp_path, "qwen2", target_modules=["o_proj"], lora_bias=True)
    with pytest.raises(ShapeMismatch, match="a bias that the model's layers do not have") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "o_proj.bias" in e.value.where and "attention_bias" in e.value.fix and e.value.exit_code == 4
    (tmp_path / "base" / "config.json").unlink()
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "o_proj.bias" in _notes(report) and "the base has no such bias" in _notes(report)


def test_tensors_of_unknown_meaning_are_called_so(tmp_path: Path) -> None:
    _train(tmp_path, "qwen2", target_modules=["q_proj"])
    tensors = load(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(tensors | {"model.a.rank": torch.ones(3)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UnmatchedModules, match="meaning of 1 of the adapter's tensors is unknown") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "model.a.rank" in e.value.where and "trained on" not in e.value.fix


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_embeddings_that_mlx_lm_trained_change_both_ends(tmp_path: Path, kind: str) -> None:
    """mlx_lm/tuner/lora.py and dora.py: LoRAEmbedding.fuse and DoRAEmbedding.fuse; tied heads are `as_linear`."""
    model = _model("qwen2")
    model.save_pretrained(tmp_path / "base")
    down, up, sizes = torch.randn(100, 3), torch.randn(3, 32), torch.rand(100)
    wanted = model.model.embed_tokens.weight.detach() + 20 * down @ up
    factors = {"model.embed_tokens.lora_a": down, "model.embed_tokens.lora_b": up}
    if kind == "dora":
        wanted *= (sizes / wanted.norm(dim=1))[:, None]
        factors["model.embed_tokens.m"] = sizes
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapters.safetensors")
    told = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {"rank": 3, "dropout": 0.0, "scale": 20.0}}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = type(model).from_pretrained(tmp_path / "ours")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    torch.testing.assert_close(ours.lm_head.weight.detach(), wanted, rtol=1e-5, atol=1e-4)
