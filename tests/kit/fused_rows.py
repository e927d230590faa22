"""Bases whose weights are fused of several."""

from __future__ import annotations

from tests.kit.tensors import rand

H, KV = 16, 4


PHI3 = {
    "model.embed_tokens.weight": rand(20, H), "model.layers.0.self_attn.o_proj.weight": rand(H, H),
    "model.layers.0.self_attn.qkv_proj.weight": rand(H + 2 * KV, H),
    "model.layers.0.mlp.gate_up_proj.weight": rand(64, H),
}  # fmt: skip


FLUX = {
    "img_in.weight": rand(H, 4), "double_blocks.0.img_mod.lin.weight": rand(6 * H, H),
    "double_blocks.0.img_attn.qkv.weight": rand(3 * H, H), "single_blocks.0.linear1.weight": rand(7 * H, H),
}  # fmt: skip


FLUX_DIFFUSERS = {
    "x_embedder.weight": rand(H, 4), "transformer_blocks.0.norm1.linear.weight": rand(6 * H, H),
    "transformer_blocks.0.attn.norm_added_q.weight": rand(H), "single_transformer_blocks.0.proj_mlp.weight": rand(64, H),
    "time_text_embed.text_embedder.linear_1.weight": rand(H, 8),
    **{f"transformer_blocks.0.attn.to_{n}.weight": rand(H, H, seed=i) for i, n in enumerate("qkv")},
    **{f"single_transformer_blocks.0.attn.to_{n}.weight": rand(H, H, seed=i + 5) for i, n in enumerate("qkv")},
}  # fmt: skip
