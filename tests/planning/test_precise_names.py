"""The layers that keep their numbers when an output is quantised, in the tables of the architectures that are known."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from lora_merge.planning.quantisation import LEAST_SIDE, UNIT, precise

HEADERS = Path(__file__).parents[1] / "headers"
TABLES = sorted(p for p in HEADERS.glob("*/*.json.gz") if "in-memory" not in p.name and p.parent.name != "single-file")

BESIDE_BLOCKS = re.compile(
    r"norm|ada_?ln|mod|emb|scale_shift|relative_attention_bias|distilled_guidance|"  # scales, times, positions
    r"\.gate\.|router|visual|vision|txt_in\.|byt5_in|caption_projection|_projector\.",  # experts; what an image or a text says
    re.IGNORECASE,
)
"""What may keep its numbers inside of numbered parts of a model."""

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

NAMES = {
    "lyric_embs.weight": True, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": True,
    "single_transformer_blocks.3.proj_out.weight": False, "proj_out.weight": True, "transformer.project_out.weight": True,
    "transformer_blocks.0.ff.linear_in.weight": False, "double_blocks.0.txt_mlp.0.weight": False, "txt_in.weight": True,
    "bert.encoder.layer.11.output.dense.weight": False, "bert.encoder.layer.1.attention.output.dense.weight": False,
    "layers.0.attention.out.weight": False, "out.2.weight": True, "model.layers.3.mlp.gate.weight": True,
    "model.layers.3.mlp.gate_proj.weight": False, "final_linear.weight": True, "final_layer.linear.weight": True,
}  # fmt: skip


def test_single_names() -> None:
    assert {name: precise(name) for name in NAMES} == NAMES


def test_blocks_are_quantised_and_what_is_around_them_is_not() -> None:
    """First and last layers, and what brings in times, texts and images, stand outside of numbered blocks."""
    for table in TABLES:
        shapes = json.loads(gzip.decompress(table.read_bytes()))
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
        large = {
            NUMBER.sub("N", name)
            for name, (rows, cols) in matrices.items()
            if rows >= LEAST_SIDE <= cols and not cols % UNIT
        }
        kept = {name for name in large if precise(name.replace("N", "0"))}
        assert not {name for name in large - kept if ".N." not in name}, table.name
        assert not {name for name in kept if re.search(r"\.N\..*\.", name) and not BESIDE_BLOCKS.search(name)}, (
            table.name
        )
