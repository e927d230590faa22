"""The layers in a fused weight, derived from the base's configuration and the neighbouring tensors; the names of fused
layers in adapters. No torch.

The number of rows is not enough: q, k and v have equal rows in one model; in the next, q has many heads, k and v few.
But the output projection has a column for each row of q, the layer behind an MLP a column for each row of its gate,
and config.json states the number of heads. For models with an architecture file, its table is used instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..dtypes import Shape

Split: TypeAlias = tuple[int, ...]
"""Rows of every layer in a fused weight, in order."""

_QKV: Final = "(?:to_|linear_)?qkv(?:_proj|_lin|_mat)?|[Ww]_?qkv|query_key_value|c_attn|W_pack|att_proj"
_MLP: Final = "(?:gate_up|up_gate)(?:_proj)?|w12|[Ww]i|dense_h_to_4h|ff_proj"
FUSED: Final = re.compile(rf"(?P<before>(?:[A-Za-z0-9]+_)*?)(?:(?P<qkv>{_QKV})|{_MLP})(?P<after>_[a-z])?")
"""Last levels of the names of layers that fuse q, k and v, or the gate and the value of an MLP."""

IN_TURN: Final = frozenset(
    (
        *("bloom", "codegen", "falcon", "fuyu", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "internlm2"),
        "persimmon",
    )
)
"""Types of models that interleave q, k and v by head or by group: the rows of each are not consecutive."""

OUTPUTS: Final = (
    *("o_proj", "out_proj", "dense", "proj", "c_proj", "wo", "Wo", "to_out.0", "to_out", "out", "proj_out", "out_lin"),
    *("attn_out", "linear_proj"),
)
"""Names of the layer behind q, k and v."""

DOWN_LAYERS: Final = ("down_proj", "down", "Wo", "wo", "w2", "w3", "dense_4h_to_h", "ff_out", "fc2")
"""Names of the layer behind gate and value."""

QUERIES: Final = ("q_proj", "q_attn", "to_q", "wq")
"""Names of a separate q: the fused weight next to it holds only k and v."""

HEAD_NORMS: Final = (
    *(("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_layernorm", "k_layernorm"), ("query_norm", "key_norm")),
    *(("ln_q", "ln_k"), ("q_ln", "k_ln"), ("norm.query_norm", "norm.key_norm")),
)
"""Names of the norms of q and k, which are as long as one head or as all heads."""

HEAD_COUNT: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
HEAD_SIZE: Final = ("head_dim", "attention_head_dim", "kv_channels", "head_size")
VALUE: Final = ("v_head_dim",)
MODEL_WIDTH: Final = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
HIDDEN_SIZE: Final = ("intermediate_size", "ffn_hidden_size", "ffn_dim")
"""Entries of configurations: number of heads of q; of k and v; size of a head; of a head of v; width of the model;
width inside an MLP."""


RECURRENT: Final = "in_proj"
"""Mamba 2's layer of gate, inputs, B, C and steps."""

BEFORE: Final = "in_proj_"
GATE: Final = "in_proj_z"
"""What names of the fused layer of linear attention begin with, and the layer of the gate next to it."""

LINEAR_HEADS: Final = (
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
)
"""Entries of configurations: number and size of the heads of q and k, and of v, in linear attention."""

JOINED_LAYERS: Final = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip
"""Names of separate layers that servers join. https://github.com/vllm-project/vllm packed_modules_mapping."""

_GROUP: Final = {name: names[0] for names in JOINED_LAYERS for name in names}


JOINED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
        "to_qkv": ("to_q", "to_k", "to_v"),
        "to_kv": ("to_k", "to_v"),
        "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)
"""Name of a layer that a trainer fuses → the layers whose rows it holds, in this order.

Sources: https://github.com/huggingface/diffusers models/attention.py, models/attention_processor.py (fuse_projections);
https://github.com/vllm-project/vllm packed_modules_mapping;
https://github.com/thinking-machines-lab/tinker-cookbook tinker_cookbook/weights/_merge_qwen3_5.py (in_proj_qkv).
"""

INNER_PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({**JOINED, "in_proj": ("gate_proj", "x_proj")})
"""Name of a layer of a base → names of layers, trained apart, that are its first rows, in this order.

Source: https://github.com/thinking-machines-lab/tinker-cookbook tinker_cookbook/weights/_merge_nemotron.py
(in_proj of Mamba 2).
"""


def whole_of(module: str) -> list[tuple[str, int]]:
    """Return (name of a layer, position in it) for the layers of which a layer's name may mean a part."""
    wholes = []
    for fused, parts in INNER_PARTS.items():
        for number, part in enumerate(parts):
            stem = module.removesuffix(part)
            if stem != module and (not stem or stem[-1] in "._"):
                wholes.append((stem + fused, number))
    return wholes


def parts_of(module: str) -> list[str]:
    """Return the names of the layers that a fused layer's name means, dotted or flat; [] for any other name."""
    for fused, parts in JOINED.items():
        stem = module.removesuffix(fused)
        if stem != module and (not stem or stem[-1] in "._"):
            return [stem + part for part in parts]
    return []


def together(weights: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return name of a weight → the weights that servers join, itself included; only those that are joined."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in weights:
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in _GROUP and name.endswith(".weight"):
            groups.setdefault((module, _GROUP[leaf]), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group if len(group) > 1}


def splits(name: str, shapes: Mapping[str, Shape], config: Mapping[str, Any], kind: str = "") -> dict[str, Split]:
    """Return source of the evidence → rows of every layer in the tensor `name`; empty without evidence.

    No layer has more rows than the first: k and v have as many heads as q, or fewer.

    `shapes`: of all tensors of the base, by name; `config`: its configuration, with those of its parts; `kind`: the
    type of the model, if it is known from elsewhere than its configuration.
    """
    stem, _, parameter = name.rpartition(".")
    module, dot, leaf = stem.rpartition(".")
    match = _fused(leaf)
    if (match is None and leaf != RECURRENT) or parameter not in ("weight", "bias"):
        return {}
    weight = shapes.get(f"{stem}.weight", ())
    if len(weight) < 2:
        return {}
    # Recurrent layers (Mamba, gated delta nets): by the sizes of their other parameters.
    if match is None or match["before"] == BEFORE:
        near = {key: shapes.get(f"{module}{dot}{key}.weight", ()) for key in (GATE, *OUTPUTS)}
        if match is None and f"{module}{dot}A_log" not in shapes:
            return {}
        every = _of_recurrence(weight[0], near, config) if match else _of_mamba(weight[0], near)
        return {source: split for source, split in every if sum(split) == weight[0] and min(split) > 0}
    if match["qkv"] and not IN_TURN.isdisjoint((kind, str(config.get("model_type")))):
        return {}
    # Attention and MLP: by the sizes of the neighbours, and by the configuration.
    before, after = module + dot + match["before"], match["after"] or ""

    def size(what: str, axis: int) -> int:
        """Return a size of a neighbour's weight; 0 without such a neighbour."""
        named = (f"{before}{what}{after}{end}" for end in (".weight", ".scale", ""))
        shape = next((shapes[key] for key in named if key in shapes), ())
        return shape[axis] if len(shape) > axis else 0

    evidence = _of_attention if match["qkv"] else _of_mlp
    every = evidence(weight[0], weight[1], size, _configurations(config))
    return {
        source: split for source, split in every if sum(split) == weight[0] and 0 < min(split) <= max(split) == split[0]
    }


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few names
def _fused(leaf: str) -> re.Match[str] | None:
    return FUSED.fullmatch(leaf)


def agreed(evidence: Mapping[str, Split]) -> Split:
    """Return the rows on which all sources agree; () if they differ or there is none."""
    return next(iter(evidence.values())) if len({*evidence.values()}) == 1 else ()


def _of_attention(
    rows: int, columns: int, size: Callable[[str, int], int], configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Split]]:
    """Yield (source of the evidence, rows of q, k and v)."""
    if any(size(name, 0) for name in QUERIES):
        return
    for where, config in configs.items():
        heads, groups, width = _number(config, HEAD_COUNT), _number(config, KV_HEADS), _number(config, MODEL_WIDTH)
        head = _number(config, HEAD_SIZE) or (width // heads if heads else 0)
        k = groups * head or (rows - heads * head) // 2
        if heads and head and width in (0, columns):
            yield where, (heads * head, k, groups * _number(config, VALUE) or k)
    for name in OUTPUTS:
        if q := size(name, 1):
            yield name, (q, (rows - q) // 2, (rows - q) // 2)
    for q_norm, k_norm in HEAD_NORMS:
        q, k = size(q_norm, 0), size(k_norm, 0)
        if q + 2 * k == rows:
            yield f"{q_norm} and {k_norm}", (q, k, k)
    if (q := size("q_bias", 0)) and (v := size("v_bias", 0)):
        yield "q_bias and v_bias", (q, rows - q - v, v)


def _of_mlp(
    rows: int, columns: int, size: Callable[[str, int], int], configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Split]]:
    """Yield (source of the evidence, rows of gate and value, which are equal)."""
    for where, config in configs.items():
        if _number(config, MODEL_WIDTH) in (0, columns):
            yield where, (_number(config, HIDDEN_SIZE),) * 2
    for name in DOWN_LAYERS:
        yield name, (size(name, 1),) * 2


def _of_recurrence(rows: int, near: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[tuple[str, Split]]:
    """Yield (source of the evidence, rows of q, k and v) of a linear attention, whose v may be the longest."""
    for where, entries in _configurations(config).items():
        k, v = (_number(entries, (count,)) * _number(entries, (size,)) for count, size in LINEAR_HEADS)
        if k and v:
            yield where, (k, k, v)
    if near[GATE]:
        v = near[GATE][0]
        yield GATE, ((rows - v) // 2, (rows - v) // 2, v)


def _of_mamba(rows: int, near: Mapping[str, Shape]) -> Iterator[tuple[str, Split]]:
    """Yield (source of the evidence, rows of gate, inputs and the rest) of Mamba 2's first layer."""
    for name in OUTPUTS:
        if len(shape := near[name]) > 1:
            yield name, (shape[1], shape[1], rows - 2 * shape[1])


def _configurations(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a configuration and those of the parts in it, by what messages call them."""
    parts = {f"{part} of config.json": c for part, c in config.items() if isinstance(c, Mapping)}
    return {"config.json": config, **parts}


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of these entries that is a positive integer in a configuration; 0 if none is."""
    values = (config.get(name) for name in names)
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), 0)
