"""Names and stored values of language models in GGUF files, as llama.cpp's converter writes them.

Facts from https://github.com/ggml-org/llama.cpp: gguf-py/gguf/tensor_mapping.py, convert_hf_to_gguf.py (values).
Only architectures of this table are read: of others it is not known what the converter does to the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

ALL: Final = MappingProxyType({
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
})  # fmt: skip

LAYER_NAMES: Final = MappingProxyType({
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
})  # fmt: skip
"""Name in llama.cpp, in `blk.N` → name in transformers, in `model.layers.N`."""

PHI: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)")

LLAMA_CPP_NAMES: Final = re.compile(r"(?:(?:enc|dec|v|a|mm)\.)?blk\.\d+\.|token_embd\.|mm\.\d+\.")
"""Names of llama.cpp, in any architecture."""

ROTATED_WEIGHTS: Final = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
NORM: Final = re.compile(r".*norm\.weight")


@dataclass(frozen=True)
class Family:
    """One architecture: its type in transformers, its own names, and what its converter does to the values."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    """Whether the rows of each head of q and k alternate between the halves of the head."""
    norms: float = 0.0
    """The number that is added to the weights of norms."""


ARCHITECTURE: Final = "general.architecture"

FAMILIES: Final = MappingProxyType({
    "llama": Family("llama", permuted=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", GEMMA, norms=1.0),
    "gemma3": Family("gemma3_text", GEMMA, norms=1.0),
    "phi3": Family("phi3", PHI),
})  # fmt: skip
"""Value of that entry → what is known of it."""


def renamed(name: str, family: Family) -> str:
    """Return the name of a tensor in transformers; the same name if there is none."""
    if match := _BLOCK.fullmatch(name):
        number, part, last = match.groups()
        known = family.names.get(part) or LAYER_NAMES.get(part)
        return f"model.layers.{number}.{known}.{last}" if known else name
    stem, _, last = name.rpartition(".")
    return f"{ALL[stem]}.{last}" if stem in ALL and last in ("weight", "bias", "scale") else name


def configured(arch: str, values: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return what a config.json of transformers would say, as far as the header states it."""
    entries = {
        "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
        "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
    }  # fmt: skip
    sizes = {key: values.get(f"{arch}.{entry}") for key, entry in entries.items()}
    numbers = {key: value for key, value in sizes.items() if isinstance(value, int) and value > 0}
    heads = numbers.get("num_attention_heads")
    if heads is not None:
        numbers.setdefault("num_key_value_heads", heads)
    return {"model_type": FAMILIES[arch].model_type, "tie_word_embeddings": tied, **numbers}
