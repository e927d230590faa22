"""The classes of all nodes: those of the pack and of other packs, and the types of their outputs."""

from types import SimpleNamespace
from typing import Any

NODE_CLASS_MAPPINGS: dict[str, Any] = {
    name: SimpleNamespace(RETURN_TYPES=kinds)
    for name, kinds in {
        "CheckpointLoaderSimple": ("MODEL", "CLIP", "VAE"),
        "Power Lora Loader (rgthree)": ("MODEL", "CLIP"),
        "ModelSamplingFlux": ("MODEL",),
        "LoraLoaderModelOnly": ("MODEL",),
        "ModelMergeSimple": ("MODEL",),
        "ComfySwitchNode": ("COMFY_MATCHTYPE_V3",),
        "Reroute": ("*",),
        "Latent": ("LATENT",),
    }.items()
}
