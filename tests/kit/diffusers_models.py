"""Tiny models of diffusers."""

from __future__ import annotations

from typing import Any

import pytest

diffusers = pytest.importorskip("diffusers")


SDXL: dict[str, Any] = dict(
    block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2, sample_size=8, layers_per_block=2,
    use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=(1, 2),
)  # fmt: skip


WAN: dict[str, Any] = dict(
    num_layers=2, attention_head_dim=12, num_attention_heads=2, ffn_dim=32, text_dim=32, in_channels=4, out_channels=4, freq_dim=16,
)  # fmt: skip


HUNYUAN: dict[str, Any] = dict(
    num_layers=1, num_refiner_layers=1, attention_head_dim=10, num_attention_heads=2, text_embed_dim=16, in_channels=4, out_channels=4,
)  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    # class, and which of its models where there are several
    "UNet2DConditionModel SD1": dict(
        block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2, sample_size=8, layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "UNet2DConditionModel SD2": dict(
        block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=(2, 4), sample_size=8, layers_per_block=1,
        use_linear_projection=True, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "UNet2DConditionModel SDXL": SDXL,
    "UNet2DConditionModel SDXL refiner": SDXL | dict(transformer_layers_per_block=4, layers_per_block=1),
    "SD3Transformer2DModel": dict(
        num_layers=2, attention_head_dim=4, num_attention_heads=4, caption_projection_dim=16, joint_attention_dim=8,
        pooled_projection_dim=8, qk_norm="rms_norm", dual_attention_layers=(0,), sample_size=8, pos_embed_max_size=8,
    ),
    "FluxTransformer2DModel": dict(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=8,
        pooled_projection_dim=8, axes_dims_rope=(2, 2, 4), guidance_embeds=True, in_channels=4,
    ),
    "Flux2Transformer2DModel": dict(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, in_channels=4,
        axes_dims_rope=[4, 4, 4, 4],
    ),
    "ChromaTransformer2DModel": dict(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1, axes_dims_rope=(4, 4, 8), in_channels=4,
    ),
    "AuraFlowTransformer2DModel": dict(
        num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
        caption_projection_dim=32, pos_embed_max_size=64, sample_size=8,
    ),
    "Lumina2Transformer2DModel": dict(
        hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, axes_dim_rope=[4, 2, 2],
        cap_feat_dim=32, multiple_of=8, sample_size=8,
    ),
    "ZImageTransformer2DModel": dict(dim=16, n_layers=1, n_refiner_layers=1, n_heads=1, n_kv_heads=1, axes_dims=[8, 4, 4], cap_feat_dim=16),
    "QwenImageTransformer2DModel": dict(
        num_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4), in_channels=4,
    ),
    "WanTransformer3DModel T2V": WAN,
    "WanTransformer3DModel I2V": WAN | dict(image_dim=16, added_kv_proj_dim=24),
    "WanVACETransformer3DModel": WAN | dict(vace_layers=[0, 1], vace_in_channels=4),
    "SkyReelsV2Transformer3DModel": WAN,
    "HunyuanVideoTransformer3DModel": HUNYUAN | dict(num_single_layers=1, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), guidance_embeds=True),
    "HunyuanVideoFramepackTransformer3DModel": HUNYUAN | dict(num_single_layers=1, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4)),
    "HunyuanVideo15Transformer3DModel": HUNYUAN | dict(text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(2, 4, 4), patch_size=2),
    "HunyuanImageTransformer2DModel": HUNYUAN | dict(num_single_layers=1, text_embed_2_dim=12, rope_axes_dim=(4, 6), guidance_embeds=True),
    "LTXVideoTransformer3DModel": dict(
        num_layers=1, attention_head_dim=8, num_attention_heads=4, cross_attention_dim=32, caption_channels=32, in_channels=4, out_channels=4,
    ),
    "MochiTransformer3DModel": dict(
        num_layers=2, attention_head_dim=8, num_attention_heads=2, pooled_projection_dim=16, text_embed_dim=32, time_embed_dim=4,
        in_channels=4,
    ),
    "CogVideoXTransformer3DModel": dict(num_layers=1, attention_head_dim=16, num_attention_heads=4, text_embed_dim=32, in_channels=4),
    "CosmosTransformer3DModel": dict(
        num_layers=2, attention_head_dim=16, num_attention_heads=2, mlp_ratio=2.0, text_embed_dim=32, adaln_lora_dim=4, in_channels=4,
        out_channels=4,
    ),
    "HiDreamImageTransformer2DModel": dict(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4, caption_channels=[32, 16],
        num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2), text_emb_dim=16, in_channels=4, out_channels=4,
        max_resolution=(8, 8), patch_size=2, llama_layers=[0, 1],
    ),
    "PixArtTransformer2DModel": dict(
        num_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8, cross_attention_dim=16, caption_channels=12,
        sample_size=8, use_additional_conditions=True,
    ),
    "SanaTransformer2DModel": dict(
        num_layers=1, attention_head_dim=4, num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4,
        cross_attention_dim=8, caption_channels=12, in_channels=4, out_channels=4, sample_size=8,
    ),
    "HunyuanDiT2DModel": dict(
        num_layers=4, attention_head_dim=8, num_attention_heads=2, in_channels=4, patch_size=2, hidden_size=16, cross_attention_dim=12,
        cross_attention_dim_t5=10, pooled_projection_dim=12, text_len=4, text_len_t5=6, sample_size=8,
    ),
    "StableAudioDiTModel": dict(
        num_layers=1, attention_head_dim=8, num_attention_heads=4, num_key_value_attention_heads=2, in_channels=6, out_channels=6,
        cross_attention_dim=16, time_proj_dim=8, global_states_input_dim=12, cross_attention_input_dim=16, sample_size=8,
    ),
    "StableCascadeUNet": dict(
        in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16, block_out_channels=(16, 16),
        num_attention_heads=(2, 2), down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1), clip_text_in_channels=12,
        clip_text_pooled_in_channels=12, clip_image_in_channels=10,
    ),
    "AceStepTransformer1DModel": dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, in_channels=6,
        audio_acoustic_hidden_dim=4,
    ),
    "LTX2VideoTransformer3DModel": dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=1,
        caption_channels=12,
    ),
    "CogView4Transformer2DModel": dict(
        num_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=4, text_embed_dim=12, time_embed_dim=8,
        condition_dim=4, rope_axes_dim=(4, 4), sample_size=8, pos_embed_max_size=8,
    ),
    "Kandinsky5Transformer3DModel": dict(
        in_text_dim=12, in_text_dim2=10, time_dim=8, model_dim=16, ff_dim=24, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 2, 2),
    ),
    "Krea2Transformer2DModel": dict(
        in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        timestep_embed_dim=8, text_hidden_dim=12, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=20, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2),
    ),
    "Flux3Transformer2DModel": dict(
        in_channels=4, cond_in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, timestep_channels=8, axes_dims_rope=(2, 2, 2, 2),
    ),
    "ErnieImageTransformer2DModel": dict(
        hidden_size=16, num_attention_heads=2, num_layers=1, ffn_hidden_size=24, in_channels=4, out_channels=4, text_in_dim=12,
        rope_axes_dim=(4, 2, 2),
    ),
    "QwenImage21Transformer2DModel": dict(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, context_in_dim=12, axes_dims_rope=(4, 2, 2),
    ),
}  # fmt: skip
