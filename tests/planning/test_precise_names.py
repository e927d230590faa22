"""The layers that keep their numbers when an output is quantised, in the tables of the architectures that are known."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from lora_merge.planning.quantising import EVEN, NARROW, precise

HEADERS = Path(__file__).parents[1] / "headers"
TABLES = sorted(p for p in HEADERS.glob("*/*.json.gz") if "in-memory" not in p.name and p.parent.name != "single-file")

BESIDE_BLOCKS = re.compile(
    r"norm|ada_?ln|mod|emb|scale_shift|relative_attention_bias|distilled_guidance|"  # scales, times, positions
    r"\.gate\.|router|visual|vision|txt_in\.|byt5_in|caption_projection|_projector\.",  # experts; what an image or a text says
    re.IGNORECASE,
)
"""What may keep its numbers inside of numbered parts of a model."""

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


@pytest.mark.parametrize("table", TABLES, ids=lambda p: f"{p.parent.name}/{p.name[:-8]}")
def test_blocks_are_quantised_and_what_is_around_them_is_not(table: Path) -> None:
    """First and last layers, and what brings in times, texts and images, stand outside of numbered blocks."""
    shapes = {name: shape for name, shape in json.loads(gzip.decompress(table.read_bytes())).items() if len(shape) == 2}
    shapes = {name: shape for name, shape in shapes.items() if not re.search(r"experts\.[1-9]", name)}
    large = [
        n for n, (rows, cols) in shapes.items() if n.endswith(".weight") and rows >= NARROW <= cols and not cols % EVEN
    ]
    kept = [name for name in large if precise(name)]
    assert not [name for name in large if not re.search(r"\.\d+\.", name) and name not in kept]
    assert not [name for name in kept if re.search(r"\.\d+\..*\.", name) and not BESIDE_BLOCKS.search(name)]
