"""Who tells which layers a fused weight holds: config.json, the layer behind it, norms and biases beside it."""

from __future__ import annotations

from typing import Any

import pytest

from lora_merge.models.fused_weights import OUTPUTS, agreed, splits

H, Q, KV = 20, 16, 4
ROWS = Q + 2 * KV
GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": H}
NAME = "m.attn.qkv_proj.weight"


def told(name: str, beside: dict[str, tuple[int, ...]], config: dict[str, Any], rows: int = ROWS) -> dict[str, Any]:
    module = name.rpartition(".")[0]
    inside = module.rpartition(".")[0]
    return splits(name, {f"{module}.weight": (rows, H), **{f"{inside}.{k}": v for k, v in beside.items()}}, config)


@pytest.mark.parametrize("behind", OUTPUTS)
def test_layer_behind_has_a_column_for_each_row_of_q(behind: str) -> None:
    assert told(NAME, {f"{behind}.weight": (H, Q)}, {}) == {behind: (Q, KV, KV)}
    assert not told(NAME, {f"{behind}.bias": (H,)}, {})


@pytest.mark.parametrize(
    ("config", "split"),
    [
        (GQA, (Q, KV, KV)),
        ({"vision_config": {**GQA, "hidden_size": 8}, "text_config": GQA}, (Q, KV, KV)),
        ({"hidden_size": Q, "num_attention_heads": 8, "num_key_value_heads": 2}, ()),  # of a model of another width
        ({**GQA, "num_key_value_heads": 4}, ()),  # more rows than there are
        ({"num_attention_heads": 8, "attention_head_dim": 2}, (Q, KV, KV)),  # k and v share what q leaves
        ({"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 3, "v_head_dim": 3}, (18, 3, 3)),
        ({"num_attention_heads": 5, "num_key_value_heads": 2, "head_dim": 3, "v_head_dim": 1}, ()),
        ({"num_attention_heads": 5, "num_key_value_heads": 2, "head_dim": 3, "v_head_dim": 1.5}, ()),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4, "v_head_dim": 4}, (Q, KV, KV)),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 5, "v_head_dim": -1}, ()),
        ({"num_attention_heads": True, "head_dim": 8}, ()),
        ({"num_attention_heads": [8, 8], "head_dim": 2}, ()),
        ({**GQA, "model_type": "bloom"}, ()),  # head by head
        ({}, ()),
    ],
)
def test_configuration_counts_heads(config: dict[str, Any], split: tuple[int, ...]) -> None:
    assert agreed(told(NAME, {}, config)) == split


def test_parts_of_a_configuration_that_differ_both_count() -> None:
    """Two networks of one width in one file: which one a weight is of, its name does not tell."""
    other = {**GQA, "num_attention_heads": 10, "num_key_value_heads": 1}
    both = told(NAME, {}, {"text_config": GQA, "vision_config": other})
    assert {*both.values()} == {(16, 4, 4), (20, 2, 2)} and agreed(both) == ()


@pytest.mark.parametrize(
    ("beside", "split"),
    [
        ({"q_norm.weight": (Q,), "k_norm.weight": (KV,)}, (Q, KV, KV)),
        ({"norm.query_norm.scale": (Q,), "norm.key_norm.scale": (KV,)}, (Q, KV, KV)),
        ({"q_norm.weight": (2,), "k_norm.weight": (2,)}, ()),  # of one head
        ({"q_bias": (Q,), "v_bias": (KV,)}, (Q, KV, KV)),
        ({"q_bias": (Q,)}, ()),
        ({"o_proj.weight": (H, Q), "q_proj.weight": (Q, H)}, ()),  # it holds k and v
        ({"o_proj.weight": (H, 6)}, ()),  # k and v had more rows than q
        ({"o_proj.weight": (H, Q - 1)}, ()),
        ({"o_proj.weight": (H, ROWS)}, ()),
        ({"o_proj.weight": (H,)}, ()),
    ],
    ids=str,
)
def test_neighbours_decide_the_split_or_leave_it_open(
    beside: dict[str, tuple[int, ...]], split: tuple[int, ...]
) -> None:
    assert agreed(told(NAME, beside, {})) == split


@pytest.mark.parametrize(
    ("name", "beside", "config", "split"),
    [
        ("m.mlp.gate_up_proj.weight", {"down_proj.weight": (H, 12)}, {}, (12, 12)),
        ("m.mlp.gate_up_proj.bias", {"down_proj.weight": (H, 12)}, {}, (12, 12)),
        ("m.mlp.w12.weight", {"w3.weight": (H, 12)}, {}, (12, 12)),
        ("m.mlp.gate_up_proj.weight", {}, {"intermediate_size": 12, "hidden_size": H}, (12, 12)),
        ("m.mlp.gate_up_proj.weight", {}, {"intermediate_size": 12, "hidden_size": 8}, ()),
        ("m.mlp.Wi.weight", {"Wo.weight": (H, ROWS)}, {}, ()),  # one layer
        ("m.mlp.dense_h_to_4h.weight", {"dense_4h_to_h.weight": (H, ROWS)}, {}, ()),
        ("m.mlp.up_proj.weight", {"down_proj.weight": (H, 12)}, {}, ()),
        ("m.img_attn_qkv.weight", {"img_attn_proj.weight": (H, Q), "txt_attn_proj.weight": (H, 8)}, {}, (Q, KV, KV)),
        ("m.attn.qkv_x.weight", {"proj_x.weight": (H, Q), "proj_y.weight": (H, 8)}, {}, (Q, KV, KV)),
        ("m.attn.qkv_proj.lora", {"o_proj.weight": (H, Q)}, {}, ()),
        ("m.attn.in_proj.weight", {"out_proj.weight": (H, Q)}, {}, ()),  # of Mamba: no q
    ],
)
def test_names_show_what_is_fused(
    name: str, beside: dict[str, tuple[int, ...]], config: dict[str, Any], split: tuple[int, ...]
) -> None:
    assert agreed(told(name, beside, config)) == split
