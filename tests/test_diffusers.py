"""Tiny diffusers models with a LoRA on every layer: fused by diffusers itself, merged by us, equal in every row.

The same adapter in every dialect, and as sharded folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge

from .support import Tensors, load, save

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 2, 6

CONFIGS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": dict(
        block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2, sample_size=8, layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
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
    "WanTransformer3DModel": dict(
        num_layers=2, attention_head_dim=12, num_attention_heads=2, ffn_dim=32, text_dim=32, image_dim=16, added_kv_proj_dim=24,
        in_channels=4, out_channels=4, freq_dim=16,
    ),
    "HunyuanVideoTransformer3DModel": dict(
        num_layers=1, num_single_layers=1, num_refiner_layers=1, attention_head_dim=10, num_attention_heads=2, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), guidance_embeds=True, in_channels=4, out_channels=4,
    ),
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
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Tensors, Path]:
    """(class, base model, the weights after diffusers' own fuse_lora, folder of the adapter as diffusers saves it)."""
    torch.manual_seed(0)
    name: str = request.param
    kind = getattr(diffusers, name)
    base, trained = kind(**CONFIGS[name]), kind(**CONFIGS[name])
    trained.load_state_dict(base.state_dict())
    layers = [
        n
        for n, m in base.named_modules()
        if isinstance(m, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d) and getattr(m, "groups", 1) == 1
    ]
    trained.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers, init_lora_weights=False))
    folder = tmp_path_factory.mktemp("adapter")
    trained.save_lora_adapter(folder)
    trained.fuse_lora()
    weights = {k.replace(".base_layer", ""): t for k, t in trained.state_dict().items() if ".lora_" not in k}
    return name, base, weights, folder


def kohya(prefix: str) -> Callable[[Tensors], Tensors]:
    """The adapter flat, with down, up and alpha."""

    def write(tensors: Tensors) -> Tensors:
        new: Tensors = {}
        for key, value in tensors.items():
            module, which = key.removesuffix(".weight").rsplit(".", 1)
            flat = prefix + module.replace(".", "_")
            new[f"{flat}.lora_{'down' if which == 'lora_A' else 'up'}.weight"] = value
            new[f"{flat}.alpha"] = torch.tensor(ALPHA)
        return new

    return write


def dotted(prefix: str, *, default: bool = False) -> Callable[[Tensors], Tensors]:
    """The adapter with a dotted prefix; α folded into the up matrix, as files without any metadata need it."""

    def write(tensors: Tensors) -> Tensors:
        factor = ALPHA / RANK
        infix = ".default.weight" if default else ".weight"
        return {
            f"{prefix}{k.removesuffix('.weight')}{infix}": v * factor if ".lora_B" in k else v
            for k, v in tensors.items()
        }

    return write


DIALECTS: dict[str, Callable[[Tensors], Tensors]] = {
    "lora_unet_": kohya("lora_unet_"),
    "lora_transformer_": kohya("lora_transformer_"),
    "lycoris_": kohya("lycoris_"),
    "bare": dotted(""),
    "transformer.": dotted("transformer."),
    "diffusion_model.": dotted("diffusion_model."),
    "base_model.model.": dotted("base_model.model."),
    ".default.": dotted("transformer.", default=True),
    "wrapped": dotted("_orig_mod.module."),
}


def test_every_dialect_gives_the_weights_that_diffusers_fuses(fused: tuple[str, Any, Tensors, Path]) -> None:
    _, base, weights, folder = fused
    tensors = load(folder / "pytorch_lora_weights.safetensors")
    for dialect, write in DIALECTS.items():
        merged = lora_merge.merge_state_dict(base.state_dict(), write(tensors))
        _assert_same(merged, weights, dialect)


def test_the_file_as_diffusers_saves_it_with_its_alpha_in_the_metadata(
    fused: tuple[str, Any, Tensors, Path], tmp_path: Path
) -> None:
    """Onto a sharded folder, and the result loads with from_pretrained."""
    name, base, weights, folder = fused
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    lora_merge.merge(tmp_path / "base", folder / "pytorch_lora_weights.safetensors", tmp_path / "merged")
    loaded = getattr(diffusers, name).from_pretrained(tmp_path / "merged")
    _assert_same(loaded.state_dict(), weights, "folder")
    indexes = list((tmp_path / "base").glob("*.index.json"))
    for index in indexes:
        before, after = (json.loads((tmp_path / f / index.name).read_text()) for f in ("base", "merged"))
        assert before == after


def test_a_prefixed_metadata_entry_holds_for_its_component(
    fused: tuple[str, Any, Tensors, Path], tmp_path: Path
) -> None:
    _, base, weights, folder = fused
    tensors = {f"transformer.{k}": v for k, v in load(folder / "pytorch_lora_weights.safetensors").items()}
    config = {"transformer.r": RANK, "transformer.lora_alpha": ALPHA, "transformer.target_modules": ["to_q"]}
    path = save(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(config)})
    _assert_same(lora_merge.merge_state_dict(base.state_dict(), path), weights, "metadata")


def _assert_same(merged: Tensors, weights: Tensors, what: str) -> None:
    for key, value in weights.items():
        worst = (merged[key] - value).abs().max().item() if value.numel() else 0.0
        assert worst < 2e-5, f"{what}: {key} differs by {worst}"
