"""The headers of all architectures, recorded from the libraries."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lora_merge.algorithms import Shape
from lora_merge.models.names import names
from lora_merge.models.weights import WeightView, whole
from tests.kit.files import index

HEADERS = Path(__file__).parents[1] / "headers"


ALL = sorted(f"{p.parent.name}/{p.name[: -len('.json.gz')]}" for p in HEADERS.glob("*/*.json.gz"))


def header(name: str) -> dict[str, Shape]:
    table = json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes()))
    return {key: tuple(shape) for key, shape in table.items()}


UNET = {"layers_per_block": 2, "addition_embed_type": None}


H3: dict[str, Any] = {"config": {}}


VAE = {"down_block_types": "1234", "up_block_types": "1234"}


KOALA = {"layers_per_block": 1, "addition_embed_type": "text_time"}


SDXL = {"layers_per_block": 2, "addition_embed_type": "text_time"}


CONVERTERS = (
    # native header             diffusers header         converter                        its arguments
    ("native/sd15",             "diffusers/sd15",        "ldm_unet_checkpoint",           {"config": UNET}),
    ("native/sd21",             "diffusers/sd21",        "ldm_unet_checkpoint",           {"config": UNET}),
    ("native/sdxl",             "diffusers/sdxl",        "ldm_unet_checkpoint",           {"config": SDXL}),
    ("",                        "diffusers/koala",       "ldm_unet_checkpoint",           {"config": KOALA}),
    ("native/sdxl-refiner",     "diffusers/sdxl-refiner", "ldm_unet_checkpoint",          {"config": SDXL}),
    ("native/vae-sd",           "diffusers/vae-sd",      "ldm_vae_checkpoint",            {"config": VAE}),
    ("",                        "diffusers/animatediff", "animatediff_checkpoint_to_diffusers", {}),
    ("native/sd3",              "diffusers/sd3",         "sd3_transformer_checkpoint_to_diffusers", {}),
    ("native/sd35-medium",      "diffusers/sd35-medium", "sd3_transformer_checkpoint_to_diffusers", {}),
    ("native/sd35-large",       "diffusers/sd35-large",  "sd3_transformer_checkpoint_to_diffusers", {}),
    ("native/flux-dev",         "diffusers/flux-dev",    "flux_transformer_checkpoint_to_diffusers", {}),
    ("native/flux2",            "diffusers/flux2",       "flux2_transformer_checkpoint_to_diffusers", {}),
    ("",                        "diffusers/flux3",       "flux3_transformer_checkpoint_to_diffusers", {}),
    ("native/chroma",           "diffusers/chroma",      "chroma_transformer_checkpoint_to_diffusers", {}),
    ("native/auraflow",         "diffusers/aura-flow",   "auraflow_transformer_checkpoint_to_diffusers", {}),
    ("native/lumina2",          "diffusers/lumina2",     "lumina2_to_diffusers",          {}),
    ("native/zimage-fused",     "diffusers/zimage",      "z_image_transformer_checkpoint_to_diffusers", {}),
    ("",                        "diffusers/sana",        "sana_transformer_to_diffusers", {}),
    ("native/wan-i2v-14B",      "diffusers/wan-i2v-14B", "wan_transformer_to_diffusers",  {}),
    ("native/wan-t2v-1.3B",     "diffusers/wan-t2v-1.3B", "wan_transformer_to_diffusers", {}),
    ("native/wan-t2v-14B",      "diffusers/wan",         "wan_transformer_to_diffusers",  {}),
    ("",                        "diffusers/sky-reels-v2", "wan_transformer_to_diffusers", {}),
    ("",                        "diffusers/wan-vace",    "wan_transformer_to_diffusers",  {}),
    ("",                        "diffusers/wan-animate2", "wan_animate_2_transformer_to_diffusers", {}),
    ("native/hunyuanvideo",     "diffusers/hunyuan-video", "hunyuan_video_transformer_to_diffusers", {}),
    ("native/ltxv",             "diffusers/ltxvideo",    "ltx_transformer_checkpoint_to_diffusers", {}),
    ("",                        "diffusers/ltx2-video",  "ltx2_transformer_to_diffusers", {}),
    ("native/mochi",            "diffusers/mochi",       "mochi_transformer_checkpoint_to_diffusers", {}),
    ("native/cosmos2-2B",       "diffusers/cosmos2-2B",  "cosmos_transformer_checkpoint_to_diffusers", {}),
    ("",                        "diffusers/krea2",       "krea2_transformer_checkpoint_to_diffusers", {}),
    ("",                        "diffusers/mini-max-h3", "minimax_h3_transformer_checkpoint_to_diffusers", H3),
    ("",                        "diffusers/cascade-c",   "stable_cascade_unet_single_file_to_diffusers", {}),
    ("native/openclip-bigg-text", "transformers/clip-bigg", "open_clip_checkpoint",       {}),
)  # fmt: skip


def native_views(diffusers: Mapping[str, Shape]) -> dict[str, WeightView]:
    """Native key → the rows of a diffusers base that our tables say it is made of."""
    from lora_merge.models.name_table import spelled

    base_names = names(index(diffusers))
    part = base_names.parts[0]
    assert part.architecture is not None
    table = part.architecture.spellings["native"].settled(part.keys)
    covered = {k for k in diffusers if table.spelled(tuple(k.split(".")))}
    views = dict(spelled({key: part.dotted(key) for key in diffusers}, [table]))
    return views | {key: whole(key, shape) for key, shape in diffusers.items() if key not in covered}


def native_of(diffusers: Mapping[str, Shape]) -> dict[str, Shape]:
    """The native header that our tables give for a diffusers one, where there is no independent one."""
    return {key: view.shape for key, view in native_views(diffusers).items()}


def rows(view: WeightView, tags: Mapping[str, Any]) -> Any:
    import torch

    return torch.cat([tags[p.key].flatten()[p.start : p.stop] for p in view.row_slices])


RECORDED = sorted(p.name.removesuffix(".json.gz") for p in (HEADERS.parent / "rows").glob("*.json.gz"))


Rows: TypeAlias = dict[str, tuple[Shape, list[tuple[str, int, int]]]]


def recorded(name: str) -> tuple[dict[str, Shape], Rows]:
    """(native header, diffusers key → its shape, the native rows that it is made of)."""
    table = json.loads(gzip.decompress((HEADERS.parent / "rows" / f"{name}.json.gz").read_bytes()))
    there = {k: (tuple(shape), [(key, a, b) for key, a, b in rows]) for k, (shape, rows) in table["diffusers"].items()}
    return {k: tuple(v) for k, v in table["native"].items()}, there
