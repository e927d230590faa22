"""Tiny pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.diffusers_models import CONFIGS

diffusers = pytest.importorskip("diffusers")


transformers = pytest.importorskip("transformers")


peft = pytest.importorskip("peft")


CLIP = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
            max_position_embeddings=8, projection_dim=8, bos_token_id=0, eos_token_id=1, pad_token_id=1)  # fmt: skip


RANK, ALPHA = 2, 6


def model(kind: str) -> Any:
    return getattr(diffusers, kind.split(" ")[0])(**CONFIGS[kind])


def clip(kind: str = "CLIPTextModel") -> Any:
    return getattr(transformers, kind)(transformers.CLIPTextConfig(**CLIP))


def t5() -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    )


def vae() -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8, latent_channels=4)


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae(), text_encoder=clip(), tokenizer=None, unet=model("UNet2DConditionModel SD1"),
        scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip(), text_encoder_2=clip("CLIPTextModelWithProjection"), tokenizer=None,
        tokenizer_2=None, unet=model("UNet2DConditionModel SDXL"), scheduler=diffusers.DDIMScheduler(),
        add_watermarker=False,
    )  # fmt: skip


def stable_diffusion_3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=model("SD3Transformer2DModel"), vae=vae(), text_encoder=clip("CLIPTextModelWithProjection"),
        text_encoder_2=clip("CLIPTextModelWithProjection"), text_encoder_3=t5(), tokenizer=None, tokenizer_2=None,
        tokenizer_3=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxPipeline(
        transformer=model("FluxTransformer2DModel"), vae=vae(), text_encoder=clip(), text_encoder_2=t5(), tokenizer=None,
        tokenizer_2=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


PIPELINES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "SD": (stable_diffusion, ("unet", "text_encoder")),
    "SDXL": (stable_diffusion_xl, ("unet", "text_encoder", "text_encoder_2")),
    "SD3": (stable_diffusion_3, ("transformer", "text_encoder", "text_encoder_2")),
    "Flux": (flux, ("transformer", "text_encoder")),
}
"""Name → how to make one, the components that diffusers puts adapters on."""


def layers(network: Any) -> list[str]:
    return [
        n for n, m in network.named_modules() if n.endswith(("to_q", "to_v", "to_out.0", "q_proj", "out_proj", "fc1"))
    ]


def saved(make: Callable[[], Any], parts: tuple[str, ...], folder: Path, variant: str) -> tuple[Any, Path]:
    """A pipeline saved as `base`, and a LoRA on some of its components, in one file, as diffusers saves it."""
    torch.manual_seed(0)
    pipe = make()
    pipe.save_pretrained(folder / "base", variant=variant or None, max_shard_size="100KB")
    adapters: dict[str, Any] = {}
    for part in parts:
        network = getattr(pipe, part)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers(network), init_lora_weights=False)
        network.add_adapter(config)
        adapters[f"{part}_lora_layers"] = peft.get_peft_model_state_dict(network)
        adapters[f"{part}_lora_adapter_metadata"] = config.to_dict() | {"target_modules": layers(network)}
    type(pipe).save_lora_weights(folder, **adapters)
    return pipe, folder / "pytorch_lora_weights.safetensors"
