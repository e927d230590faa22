"""The names of the blocks of an architecture, and the spellings of them that parts may have."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

from lora_merge.models.blocks import Blocks, blocks
from lora_merge.models.components import components
from lora_merge.models.names import Names

HEADERS = Path(__file__).parents[1] / "headers"


def shapes_of(name: str) -> Mapping[str, tuple[int, ...]]:
    return {
        key: tuple(shape)
        for key, shape in json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes())).items()
    }


def names_of(name: str) -> Names:
    shapes = shapes_of(name)
    return Names(components(shapes, {}, (), None), shapes)


def blocks_of(name: str) -> Blocks:
    return blocks(names_of(name))


SPELLINGS = (
    # base                     part                         the same as
    ("single-file/sd1",        "mid_block",                 "M00"),
    ("single-file/sd1",        "middle_block",              "M00"),
    ("single-file/sd1",        "down_blocks.1",             "IN04-IN06"),
    ("single-file/sd1",        "down_blocks_1",             "IN04-IN06"),
    ("single-file/sd1",        "input_blocks.4-5",          "IN04-IN05"),
    ("single-file/sd1",        "input_blocks_4",            "IN04"),
    ("single-file/sd1",        "up_blocks.0",               "OUT00-OUT02"),
    ("single-file/sd1",        "unet_input_blocks_4",       "IN04"),
    ("single-file/sd1",        "lora_unet_input_blocks_4",  "IN04"),
    ("single-file/sd1",        "unet IN04",                 "IN04"),
    ("single-file/sd1",        "unet IN04-06",              "IN04-IN06"),
    ("single-file/sd1",        "unet.IN04",                 "IN04"),
    ("single-file/sd1",        "unet_middle_block",         "M00"),
    ("single-file/sd1",        "te BASE",                   "te"),
    ("single-file/sd1",        "te_layers_0",               r"re:text_model.encoder.layers.0\."),
    ("single-file/sd1",        "lora_te_text_model_encoder_layers_0", "layers.0"),
    ("single-file/sd1",        "te_layers.0-1",             "layers.0-1"),
    ("single-file/sdxl",       "te2_layers_3",              r"re:embedders.1.*resblocks.3\."),
    ("diffusers/sd15",         "input_blocks.4",            "IN04"),
    ("diffusers/sd15",         "unet_output_blocks_3-5",    "OUT03-OUT05"),
    ("diffusers/sd15",         "down_blocks_1",             "IN04-IN06"),
    ("diffusers/sd15",         "middle_block",              "M00"),
    ("single-file/flux1-dev-all-in-one", "transformer D03", "D03"),
    ("single-file/flux1-dev-all-in-one", "single_transformer_blocks_3", "S03"),
    ("single-file/flux1-dev-all-in-one", "double_blocks_3", "D03"),
)  # fmt: skip
"""Other programs' names of blocks and layers, which a part may have too."""
