"""Tiny transformers models, a PEFT adapter on them, and the files of merge_and_unload against ours.

Files are compared, not modules, so that what transformers renames and fuses in memory is tested too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.recipes.replay import prove
from tests.kit.files import load, load_all

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LLM = SMALL | dict(num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0)
MOE = LLM | dict(num_local_experts=4, num_experts_per_tok=2)

NEMOTRON = MOE | dict(
    n_routed_experts=4,
    moe_intermediate_size=24,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    layers_block_type=["attention", "moe"],
)
LFM2 = MOE | dict(num_experts=4, moe_intermediate_size=24, layer_types=["full_attention"] * 2, num_dense_layers=0)
PICTURES = {k: v for k, v in SMALL.items() if k != "vocab_size"} | dict(image_size=32, patch_size=8)

MODELS: dict[str, tuple[str, str, dict[str, Any], list[str] | str]] = {
    # name: (class, configuration, arguments, layers)
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLM, ["q_proj", "v_proj", "down_proj", "lm_head"]),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLM | dict(head_dim=8), ["k_proj", "gate_proj"]),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLM, ["q_proj", "o_proj", "up_proj"]),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLM | dict(head_dim=8), ["q_proj", "o_proj", "up_proj"]),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLM | dict(head_dim=8, tie_word_embeddings=True), ["q_proj", "down_proj"]),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLM, ["qkv_proj", "gate_up_proj"]),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=100, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False), ["c_attn", "c_proj", "c_fc"]),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL | dict(tie_word_embeddings=False), ["query_key_value", "dense_h_to_4h"]),
    "bert": ("BertModel", "BertConfig", SMALL, ["query", "value", "dense"]),
    "nomic bert": ("NomicBertModel", "NomicBertConfig", SMALL, ["q_proj", "o_proj", "gate_proj", "down_proj"]),
    "gte": ("GteForSequenceClassification", "GteConfig", SMALL, ["v_proj", "o_proj", "up_proj", "down_proj"]),
    "jina 3": ("JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Config", SMALL, ["k_proj", "o_proj", "fc1", "fc2"]),
    "ast": ("ASTForAudioClassification", "ASTConfig", {k: v for k, v in SMALL.items() if k != "vocab_size"} | dict(max_length=40, num_mel_bins=32), ["q_proj", "o_proj", "fc1"]),
    "vit": ("ViTForImageClassification", "ViTConfig", {k: v for k, v in SMALL.items() if k != "vocab_size"} | dict(image_size=32, patch_size=8), ["q_proj", "v_proj", "query", "value"]),
    "t5": ("T5ForConditionalGeneration", "T5Config", dict(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4), ["q", "v", "wi", "wo"]),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON, "all-linear"),
    "swin": ("SwinForImageClassification", "SwinConfig", dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, image_size=32), ["q_proj", "o_proj", "fc1", "fc2"]),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16), ["q_proj", "o_proj", "fc1", "proj"]),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", PICTURES, ["q_proj", "o_proj", "fc1"]),
    "beit": ("BeitForImageClassification", "BeitConfig", PICTURES, ["q_proj", "o_proj", "fc2"]),
    "clip text": ("CLIPTextModel", "CLIPTextConfig", SMALL | dict(eos_token_id=2, bos_token_id=1, pad_token_id=0), ["q_proj", "fc1"]),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", dict(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ), ["q_proj", "fc2"]),
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "patterns": dict(rank_pattern={r"layers\.0\..*": 3}, alpha_pattern={r"layers\.1\..*": 9}),
}


def build(name: str) -> Any:
    kind, config, arguments, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**arguments))


def compare(model: Any, config: Any, folder: Path) -> None:
    """Save the base, train (at random), save the adapter, merge both ways, compare the files."""
    model.save_pretrained(folder / "base", max_shard_size="40KB")
    tuned = peft.get_peft_model(model, config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    tuned.save_pretrained(folder / "adapter")
    lora_merge.merge(folder / "base", folder / "adapter", folder / "ours")
    tuned.merge_and_unload().save_pretrained(folder / "theirs")
    ours, theirs = load_all(folder / "ours"), load_all(folder / "theirs")
    assert set(ours) == set(theirs)
    changed = 0
    before = load_all(folder / "base")
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=2e-6, rtol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
        changed += not torch.equal(before[key], value)
    assert changed


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_files_equal_those_of_merge_and_unload(name: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=MODELS[name][3], init_lora_weights=False)
    compare(build(name), config, tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_options_of_the_configuration(name: str, option: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=MODELS[name][3], init_lora_weights=False, **OPTIONS[option]
    )
    compare(build(name), config, tmp_path)


def test_embeddings_heads_and_biases(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    compare(build("llama"), config, tmp_path / "a")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], bias="all", init_lora_weights=False)
    compare(build("qwen2"), config, tmp_path / "b")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj"], trainable_token_indices=[3, 50, 99], init_lora_weights=False
    )
    compare(build("llama"), config, tmp_path / "c")


@pytest.mark.few(2)
@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("rslora", [False, True])
def test_start_that_a_small_head_cuts_keeps_the_scale_of_the_configured_rank(
    start: str,
    rslora: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    made = transformers.BertConfig(**SMALL, num_labels=3)
    transformers.BertForSequenceClassification(made).save_pretrained(tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=8, target_modules=["query", "classifier"], init_lora_weights=start, use_rslora=rslora, lora_alpha=4
    )
    tuned = peft.get_peft_model(model, config).eval()
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(tmp_path / "adapter")
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(5, 15).view(1, 10)
    torch.testing.assert_close(ours(tokens).logits, tuned(tokens).logits, atol=1e-5, rtol=1e-4)
    assert "rank" not in str(report.coverage["adapter"]["notes"])


EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MOE | dict(head_dim=8)),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", LLM | dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)),
    "gpt oss": ("GptOssForCausalLM", "GptOssConfig", MOE | dict(head_dim=8)),
}  # fmt: skip
MORE_EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flex olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", MOE | dict(num_experts=4)),
    "lfm2": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", LFM2),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON),
    "without a head": ("MixtralModel", "MixtralConfig", MOE | dict(head_dim=8)),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]], ids="+".join)
def test_stacked_experts(name: str, parameters: list[str], tmp_path: Path) -> None:
    kind, config, arguments = EXPERTS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    found = [
        n.rpartition(".")[0].split("layers.0.")[1]
        for n, _ in model.named_parameters()
        if "layers.0." in n and n.endswith("experts.gate_up_proj")
    ]
    lora = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=[f"{found[0]}.{p}" for p in parameters],
        init_lora_weights=False,
    )
    compare(model, lora, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MORE_EXPERTS)
def test_stacked_experts_of_other_names(name: str, tmp_path: Path) -> None:
    kind, config, arguments = MORE_EXPERTS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    stacks = {
        n.split("layers.")[1].split(".", 1)[1] for n, p in model.named_parameters() if p.dim() == 3 and "expert" in n
    }
    assert len(stacks) == 2, stacks
    lora = dict(r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=sorted(stacks), init_lora_weights=False)
    compare(model, peft.LoraConfig(**lora), tmp_path)


STACKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3 moe": EXPERTS["qwen3 moe"],  # [E, out, in]
    "llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", LLM | dict(
        head_dim=8, intermediate_size=24, intermediate_size_mlp=24, num_local_experts=4, interleave_moe_layer_step=1,
    )),  # [E, in, out]
}  # fmt: skip


def _stacked(name: str, folder: Path) -> Any:
    """A model saved as it is in memory, with all experts of a layer in one tensor."""
    kind, config, arguments = STACKED[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    model.save_pretrained(folder, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_all(folder))
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("parameters", [["down_proj"], ["gate_up_proj", "down_proj"]], ids="+".join)
def test_experts_that_are_stored_stacked(name: str, parameters: list[str], tmp_path: Path) -> None:
    model = _stacked(name, tmp_path / "base")
    lora = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=[f"experts.{p}" for p in parameters]
    )
    tuned = peft.get_peft_model(model, lora)
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    tuned.merge_and_unload().save_pretrained(tmp_path / "theirs", save_original_format=False)
    ours, theirs = load_all(tmp_path / "ours"), load_all(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=2e-6, rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_experts_that_were_trained_whole(strength: float, tmp_path: Path) -> None:
    model = _stacked("qwen3 moe", tmp_path / "stacked")
    model.save_pretrained(tmp_path / "apart")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(tmp_path / "adapter")
    after = tuned.merge_and_unload().state_dict()
    for base in ("stacked", "apart"):
        lora_merge.merge(tmp_path / base, [(tmp_path / "adapter", strength)], tmp_path / f"{base} merged")
        ours = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / f"{base} merged").state_dict()
        for key, value in before.items():
            torch.testing.assert_close(ours[key], value + strength * (after[key] - value), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_fan_in_fan_out_says_nothing_about_a_square_embedding(*, dora: bool, tmp_path: Path) -> None:
    arguments = dict(vocab_size=100, n_embd=32, n_layer=1, n_head=4, n_positions=32, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**arguments))
    config = peft.LoraConfig(target_modules=["wpe", "wte", "c_attn"], fan_in_fan_out=True, use_dora=dora)
    compare(model, config, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_bias_that_was_trained_as_a_whole_and_by_lora_too(strength: float, tmp_path: Path) -> None:
    model = build("bert")
    model.save_pretrained(tmp_path / "base")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    lora = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["query"], bias="all", lora_bias=True)
    tuned = peft.get_peft_model(model, lora)
    for parameter in tuned.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(tmp_path / "adapter")
    after = tuned.merge_and_unload().state_dict()
    lora_merge.merge(tmp_path / "base", [(tmp_path / "adapter", strength)], tmp_path / "ours")
    ours = transformers.BertModel.from_pretrained(tmp_path / "ours").state_dict()
    in_memory = lora_merge.merge_state_dict(before, [(tmp_path / "adapter", strength)])
    for key, value in before.items():
        wanted = value + strength * (after[key] - value)
        torch.testing.assert_close(ours[key], wanted, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(in_memory[key], wanted, atol=2e-6, rtol=1e-5)


def test_olora_of_a_weight_that_is_stored_in_out_is_refused(tmp_path: Path) -> None:
    """PEFT takes the QR of what is stored, and adds the factors the other way round."""
    build("gpt2").save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=r".*attn\.c_proj", init_lora_weights="olora")
    peft.get_peft_model(build("gpt2"), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(lora_merge.MergeError, match=r"OLoRA.*cannot be merged"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["non_lora_trainables.bin", "trainable_params.bin"])
def test_modules_trained_beside_the_adapter_are_merged_with_it(file: str, tmp_path: Path) -> None:
    """The folders of LLaVA and LongLoRA: LoRA, and whole parameters by the names that they have in PEFT's model."""
    build("llama").save_pretrained(tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"])).eval()
    whole = {n: p for n, p in tuned.named_parameters() if "norm" in n}
    for name, parameter in tuned.named_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) if parameter.requires_grad or name in whole else 0
    tuned.save_pretrained(tmp_path / "adapter")
    torch.save({name: parameter.data for name, parameter in whole.items()}, tmp_path / "adapter" / file)
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(10).view(1, 10)
    torch.testing.assert_close(ours(tokens).logits, tuned(tokens).logits, atol=1e-5, rtol=1e-4)
    prove(tmp_path / "ours", full=True)


ATTACHED: dict[str, Any] = {
    "old": dict(target_modules=["q_proj", "k_proj"]),
    "lora": dict(target_modules=["q_proj", "v_proj"], use_rslora=True),
    "trained head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "dora": dict(target_modules=["q_proj", "embed_tokens"], use_dora=True),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[1, 3]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("kind", [*ATTACHED, "ia3"])
def test_checkpoint_with_its_adapter_attached_becomes_a_plain_model(
    kind: str, tmp_path: Path, *, prefixed: bool
) -> None:
    """With the names and the numbers that PEFT's own merge gives."""
    config = peft.LoraConfig(r=2, lora_alpha=6, **ATTACHED[kind]) if kind in ATTACHED else peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])  # fmt: skip
    tuned = peft.get_peft_model(build("llama"), config)
    for parameter in tuned.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) if parameter.requires_grad else 0
    state = (tuned if prefixed else tuned.base_model.model).state_dict()
    if kind == "old":  # PEFT 0.5
        state = {name.replace(".base_layer", ""): value for name, value in state.items()}
    base = tmp_path / "base"
    tuned.base_model.model.config.save_pretrained(base)
    tuned.peft_config["default"].save_pretrained(base)
    save_file({name: value.contiguous().clone() for name, value in state.items()}, base / "model.safetensors")
    right = tuned.merge_and_unload().state_dict()
    lora_merge.merge(base, [], tmp_path / "ours")
    ours = load(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)
    assert not (tmp_path / "ours" / "adapter_config.json").exists()
    assert lora_merge.verify(tmp_path / "ours")["proven"]


def test_several_attached_adapters_are_refused(tmp_path: Path) -> None:
    tuned = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    state = {name: value.contiguous().clone() for name, value in tuned.base_model.model.state_dict().items()}
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(lora_merge.MergeError, match="several adapters") as caught:
        lora_merge.merge(tmp_path / "base.safetensors", [], tmp_path / "ours.safetensors")
    assert "'default', 'second'" in caught.value.where


VISION_TYPES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
)
GPT = dict(vocab_size=100, n_embd=32, n_layer=1, n_head=4, n_positions=32)


def _captioner(encoder: str, decoder: str) -> Any:
    """A model that reads a picture, as TrOCR and vit-gpt2-image-captioning are."""
    sizes = {
        "GPT2": GPT,
        "TrOCR": dict(vocab_size=100, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48),
    }
    parts = [
        getattr(transformers, f"{encoder}Config")(**VISION_TYPES),
        getattr(transformers, f"{decoder}Config")(**sizes[decoder]),
    ]
    made = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    return transformers.VisionEncoderDecoderModel(made)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [dict(target_modules=["EMB"]), dict(target_modules=["q_proj"], modules_to_save=["EMB"])],
    ids=["lora", "whole"],
)
@pytest.mark.parametrize("decoder", ["GPT2", "TrOCR"])
def test_change_of_one_end_of_a_decoder_behind_an_encoder_is_refused(
    decoder: str, case: dict[str, list[str]], tmp_path: Path
) -> None:
    """Its embeddings and head are one by its own configuration, and were trained apart."""
    table = {"GPT2": "wte", "TrOCR": "embed_tokens"}[decoder]
    model = _captioner("ViT", decoder)
    model.save_pretrained(tmp_path / "base")
    named = {k: [table if name == "EMB" else name for name in v] for k, v in case.items()}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **named)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(lora_merge.MergeError, match="one end of embeddings that the base ties"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", unmatched="skip")


MIXED: dict[str, tuple[Any, Any]] = {
    # a configuration tells the way round of its last layer alone, and that of a square one no shape tells
    "vit, then gpt2": (lambda: _captioner("ViT", "GPT2"), "all-linear"),
    "the same, some": (lambda: _captioner("DeiT", "GPT2"), ["q_proj", "query", "c_proj"]),
    "vit, then trocr": (lambda: _captioner("ViT", "TrOCR"), "all-linear"),
    "gpt, then a head": (
        lambda: transformers.OpenAIGPTForSequenceClassification(transformers.OpenAIGPTConfig(**GPT)),
        ["c_proj", "score"],
    ),
    "decisions": (
        lambda: transformers.DecisionTransformerModel(
            transformers.DecisionTransformerConfig(hidden_size=32, n_layer=1, n_head=4, n_positions=32)
        ),
        "all-linear",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXED)
def test_square_weights_of_models_with_both_ways_round(name: str, tmp_path: Path) -> None:
    make, layers = MIXED[name]
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, lora_alpha=6, target_modules=layers, init_lora_weights=False)
    compare(make(), lora, tmp_path)


SQUARE = LLM | dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (model, what the configuration says); patterns are matched with the parameter's whole name
    "patterns": ("mixtral", dict(target_parameters=STACKS, alpha_pattern={"experts.gate_up_proj": 32}, rank_pattern={"experts.down_proj": 3})),
    "anchored": ("gpt oss", dict(target_parameters=STACKS[:1], alpha_pattern={"^model.layers.0.mlp.experts.gate_up_proj": 32})),
    "pattern of the module": ("mixtral", dict(target_parameters=STACKS, alpha_pattern={"experts": 32})),
    "pattern of the layer": ("llama", dict(target_modules=["o_proj"], target_parameters=["q_proj.weight"], alpha_pattern={"q_proj": 32})),
    "router": ("gpt oss", dict(target_parameters=["mlp.router.weight"], alpha_pattern={"router.weight": 32})),
    "bare names": ("qwen3 moe", dict(target_parameters=["gate_up_proj", "down_proj"], alpha_pattern={"gate_up_proj": 32})),
    "one bare name": ("qwen3 moe", dict(target_parameters=["down_proj"], use_rslora=True)),
    "one per layer": ("qwen3 moe", dict(target_parameters=["1.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"])),
    "all-linear": ("mixtral", dict(target_modules="all-linear")),
    "names of version 4": ("qwen3 moe", dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])),
    "square": ("square", dict(target_parameters=STACKS)),
    "square, stacked": ("llama 4", dict(target_parameters=["experts.gate_up_proj"])),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMED)
def test_parameters_that_peft_finds_by_name(name: str, tmp_path: Path) -> None:
    model, given = NAMED[name]
    kinds = EXPERTS | {
        "llama 4": (*STACKED["llama 4"][:2], STACKED["llama 4"][2] | dict(intermediate_size=16)),
        "llama": MODELS["llama"][:3],
        "square": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SQUARE),
    }
    kind, config, arguments = kinds[model]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    lora = peft.LoraConfig(**dict(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False) | given)
    compare(made, lora, tmp_path)


WIDTHS = SMALL | dict(pad_token_id=1)
WITH_HEAD: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # family: (model with a head, configuration, arguments, layer)
    "Bert": ("BertForMaskedLM", "BertConfig", WIDTHS, "query"),
    "XLMRoberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", WIDTHS, "query"),
    "DebertaV2": ("DebertaV2ForMaskedLM", "DebertaV2Config", WIDTHS, "query_proj"),
    "Electra": ("ElectraForPreTraining", "ElectraConfig", WIDTHS, "query"),
    "MPNet": ("MPNetForMaskedLM", "MPNetConfig", WIDTHS, "q"),
    "DistilBert": ("DistilBertForMaskedLM", "DistilBertConfig", dict(vocab_size=100, dim=32, hidden_dim=64, n_layers=2, n_heads=4), "q_lin"),
    "Esm": ("EsmForMaskedLM", "EsmConfig", WIDTHS | dict(mask_token_id=3), "query"),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, "query_key_value"),
    "Mamba": ("MambaForCausalLM", "MambaConfig", SMALL | dict(state_size=4), "x_proj"),
}  # fmt: skip

QUICK = ("Bert", "XLMRoberta", "DistilBert", "GPTNeoX")


@pytest.mark.few(3)
@pytest.mark.parametrize("trained_with_head", [False, True])
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in WITH_HEAD])
def test_models_with_and_without_a_head_know_each_other(family: str, trained_with_head: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """The one calls `bert.encoder…` what the other calls `encoder…`; the base was saved by one, the adapter by the other."""
    kind, config, arguments, layer = WITH_HEAD[family]
    inner, outer = getattr(transformers, f"{family}Model"), getattr(transformers, kind)
    saved, trained = (inner, outer) if trained_with_head else (outer, inner)
    torch.manual_seed(0)
    saved(getattr(transformers, config)(**arguments)).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, lora_alpha=6, target_modules=[layer], init_lora_weights=False)
    tuned = peft.get_peft_model(trained.from_pretrained(tmp_path / "base"), lora).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    tokens = torch.arange(5, 15).view(1, 10)
    theirs = tuned.base_model.model
    wanted = (getattr(theirs, theirs.base_model_prefix) if trained_with_head else theirs)(tokens).last_hidden_state
    ours = inner.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(ours(tokens).last_hidden_state, wanted, atol=1e-5, rtol=1e-4)


def test_first_level_of_another_kind_of_model_is_none(tmp_path: Path) -> None:
    """BERT's names on a RoBERTa without a head, which has the same layers in the same widths."""
    torch.manual_seed(0)
    transformers.RobertaModel(transformers.RobertaConfig(**WIDTHS)).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS))
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(lora_merge.MergeError, match="no module of the adapter is in the base"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("slot", "said"),
    [
        ("lora_magnitude_vector.weight", "turns DoRA off"),
        ("lora_magnitude_vector", "turns DoRA off"),
        ("alpha", "another scale"),
    ],
)
def test_configuration_counts_where_a_tensor_differs(slot: str, said: str, tmp_path: Path) -> None:
    """PEFT never loads a magnitude without `use_dora`, nor an alpha from a file."""
    build("llama").save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(build("llama"), lora).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{slot}"
    save_file(load(path) | {name: torch.full((1,) if slot == "alpha" else (32,), 7.0)}, path, {"format": "pt"})
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    report = lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(10).view(1, 10)
    torch.testing.assert_close(ours(tokens).logits, tuned(tokens).logits, atol=1e-5, rtol=1e-4)
    assert said in str(report.coverage["adapter"]["notes"])


TASKS = [("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaConfig", LLM, "SEQ_CLS", "score"),
         ("BertForMaskedLM", "BertForTokenClassification", "BertConfig", WIDTHS, "TOKEN_CLS", "classifier")]  # fmt: skip


@pytest.mark.parametrize("case", TASKS, ids=lambda case: case[-1])
def test_head_of_a_task_is_called_so(case: tuple[Any, ...], tmp_path: Path) -> None:
    saved, trained, config, arguments, task, head = case
    made = getattr(transformers, config)(**arguments)
    getattr(transformers, saved)(made).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, task_type=task, target_modules=["q_proj", "query"])
    peft.get_peft_model(getattr(transformers, trained)(made), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert e.value.fix.startswith(f"{head} is a head of models for a task")


def test_ends_of_a_shared_tensor_that_a_base_does_not_store_are_refused_with_the_reason(tmp_path: Path) -> None:
    build("t5").save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q", "embed_tokens"])
    peft.get_peft_model(build("t5"), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert "share one tensor" in e.value.what
