"""Names of models in the metadata that trainers write into adapters. Facts: sd-scripts 48d368f
(library/sai_model_spec.py, library/train_util.py, networks/), musubi-tuner 30c658c (src/musubi_tuner/networks,
dataset/architectures)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

PLAIN: Final = "networks.lora"
"""The network module of a plain LoRA where the model has none of its own."""

LYCORIS: Final = "lycoris.kohya"

SPEC: Final = "1.0.0"
"""The version of ModelSpec that is written."""

_STABILITY: Final = "https://github.com/Stability-AI/generative-models"


class Trained(NamedTuple):
    """The entries of adapters for one model; "" where its trainers have none."""

    module: str = PLAIN
    version: str = ""  # ss_base_model_version
    architecture: str = ""  # modelspec.architecture, without the kind of adapter
    implementation: str = ""
    v2: str = ""  # ss_v2, of the models of Stable Diffusion


TRAINED: Final = MappingProxyType({
    # architecture file: network module, ss_base_model_version, modelspec.architecture, modelspec.implementation
    "sd1": Trained(PLAIN, "sd_v1", "stable-diffusion-v1", "diffusers", "False"),
    "sd2": Trained(PLAIN, "sd_v2", v2="True"),
    "sdxl": Trained(PLAIN, "sdxl_base_v1-0", "stable-diffusion-xl-v1-base", _STABILITY, "False"),
    "sd3": Trained("networks.lora_sd3", "", "stable-diffusion-3", _STABILITY),
    "flux": Trained("networks.lora_flux", "flux1", "flux-1", "https://github.com/black-forest-labs/flux"),
    "chroma": Trained("networks.lora_flux", "chroma", "chroma", "https://huggingface.co/lodestones/Chroma"),
    "lumina2": Trained("networks.lora_lumina", "lumina2", "lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0"),
    "hunyuan_image": Trained("networks.lora_hunyuan_image", "hunyuan_image_2.1", "hunyuan-image-2.1",
                             "https://github.com/Tencent-Hunyuan/HunyuanImage-2.1"),
    "anima": Trained("networks.lora_anima", "anima"),
    "hunyuan_video": Trained(PLAIN, "hunyuan_video"),
    "wan": Trained("networks.lora_wan", "wan_2.1"),
    "qwen_image": Trained("networks.lora_qwen_image", "qwen_image"),
    "zimage": Trained("networks.lora_zimage", "z_image"),
    "flux2": Trained("networks.lora_flux_2", "flux_2"),
    "hunyuan_video15": Trained("networks.lora_hv_1_5", "hunyuan_video_1_5"),
})  # fmt: skip
"""Stem of an architecture's file → its entries."""
