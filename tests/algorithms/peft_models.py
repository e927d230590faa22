"""Small models that PEFT wraps."""

from __future__ import annotations

from typing import Any

import transformers

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 11,
    "num_attention_heads": 2,
    "vocab_size": 30,
}


MODELS: dict[str, tuple[type[Any], Any, list[str]]] = {
    "llama": (
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL), ["q_proj", "v_proj", "down_proj", "o_proj"],
    ),
    "opt": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=30,
                               word_embed_proj_dim=16),
        ["q_proj", "k_proj", "fc1", "v_proj"],
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel, transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30),
        ["c_attn", "c_proj"],
    ),
    "bert": (
        transformers.BertForSequenceClassification, transformers.BertConfig(**{**SMALL, "num_hidden_layers": 2}),
        ["query", "value", "dense"],
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=30,
                              decoder_start_token_id=0),
        ["q", "k", "wo"],
    ),
}  # fmt: skip
