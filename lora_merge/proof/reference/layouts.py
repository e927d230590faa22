"""Two names of one layer, for the second reading: small tables of the layouts that most adapters are made for.

The plan's own name tables (architectures/*.yaml) are not used here. `#` stands for a number, which is the same on both
sides. The left name is that of the model's authors, the right one that of diffusers or transformers; a table serves
bases of either layout and adapters of the other. Sources: the conversion scripts of diffusers (scripts/convert_*.py,
loaders/single_file_utils.py) and the models' own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

Shape = tuple[int, ...]

_NUMBER: Final = re.compile(r"(?:(?<=\.)|^)(?:\d+|#)(?=\.|$)")

EQUAL: Final = "equal"  # parts of as many rows each
FIRST_SQUARE: Final = "first square"  # the first part has as many rows as the layer has inputs, the others the rest
ALL_BUT_LAST_SQUARE: Final = "all but the last square"  # each but the last has as many rows as the layer has inputs


@dataclass(frozen=True)
class Line:
    """One weight of the left layout and the weights of the right one whose rows, one below the other, it holds."""

    left: str
    right: tuple[str, ...]
    split: str = EQUAL


def heights(split: str, count: int, shape: Shape) -> tuple[int, ...]:
    """Return the number of rows of each part of a weight; () where the split does not divide its rows evenly."""
    rows, inputs = shape[0], shape[1] if len(shape) > 1 else 0
    squares = {EQUAL: 0, FIRST_SQUARE: 1, ALL_BUT_LAST_SQUARE: count - 1}[split]
    if squares and not inputs:
        return ()
    each, odd = divmod(rows - squares * inputs, count - squares)
    return () if odd or each <= 0 else (*[inputs] * squares, *[each] * (count - squares))


def _lines(text: str) -> tuple[Line, ...]:
    """Return the lines of a table: `.name` replaces the last part of the first name on the right, `..name` the last
    two; `|1` and `|-1` at the end stand for FIRST_SQUARE and ALL_BUT_LAST_SQUARE."""
    found = []
    for row in text.strip().splitlines():
        left, right = row.split(" = ")
        split = EQUAL
        for mark, name in ((" |1", FIRST_SQUARE), (" |-1", ALL_BUT_LAST_SQUARE)):
            if right.endswith(mark):
                right, split = right.removesuffix(mark), name
        parts = right.split(" + ")
        parent, grandparent = parts[0].rpartition(".")[0], parts[0].rsplit(".", 2)[0]
        full = (grandparent + p[1:] if p.startswith("..") else parent + p if p[0] == "." else p for p in parts)
        found.append(Line(left, tuple(full), split))
    return tuple(found)


FLUX: Final = _lines("""
double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q + .to_k + .to_v
double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj + .add_k_proj + .add_v_proj
double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.net.0.proj
double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.net.2
double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.net.0.proj
double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.net.2
single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_q + .to_k + .to_v + ..proj_mlp |-1
single_blocks.#.linear2 = single_transformer_blocks.#.proj_out
single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
img_in = x_embedder
txt_in = context_embedder
time_in.in_layer = time_text_embed.timestep_embedder.linear_1
time_in.out_layer = time_text_embed.timestep_embedder.linear_2
guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
vector_in.in_layer = time_text_embed.text_embedder.linear_1
vector_in.out_layer = time_text_embed.text_embedder.linear_2
final_layer.linear = proj_out
""")

SD3: Final = _lines("""
joint_blocks.#.x_block.attn.qkv = transformer_blocks.#.attn.to_q + .to_k + .to_v
joint_blocks.#.x_block.attn2.qkv = transformer_blocks.#.attn2.to_q + .to_k + .to_v
joint_blocks.#.context_block.attn.qkv = transformer_blocks.#.attn.add_q_proj + .add_k_proj + .add_v_proj
joint_blocks.#.x_block.attn.proj = transformer_blocks.#.attn.to_out.0
joint_blocks.#.x_block.attn2.proj = transformer_blocks.#.attn2.to_out.0
joint_blocks.#.context_block.attn.proj = transformer_blocks.#.attn.to_add_out
joint_blocks.#.x_block.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
joint_blocks.#.x_block.mlp.fc2 = transformer_blocks.#.ff.net.2
joint_blocks.#.context_block.mlp.fc1 = transformer_blocks.#.ff_context.net.0.proj
joint_blocks.#.context_block.mlp.fc2 = transformer_blocks.#.ff_context.net.2
joint_blocks.#.x_block.adaLN_modulation.1 = transformer_blocks.#.norm1.linear
x_embedder.proj = pos_embed.proj
t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
final_layer.linear = proj_out
""")

WAN: Final = _lines("""
blocks.#.self_attn.q = blocks.#.attn1.to_q
blocks.#.self_attn.k = blocks.#.attn1.to_k
blocks.#.self_attn.v = blocks.#.attn1.to_v
blocks.#.self_attn.o = blocks.#.attn1.to_out.0
blocks.#.cross_attn.q = blocks.#.attn2.to_q
blocks.#.cross_attn.k = blocks.#.attn2.to_k
blocks.#.cross_attn.v = blocks.#.attn2.to_v
blocks.#.cross_attn.o = blocks.#.attn2.to_out.0
blocks.#.cross_attn.k_img = blocks.#.attn2.add_k_proj
blocks.#.cross_attn.v_img = blocks.#.attn2.add_v_proj
blocks.#.ffn.0 = blocks.#.ffn.net.0.proj
blocks.#.ffn.2 = blocks.#.ffn.net.2
text_embedding.0 = condition_embedder.text_embedder.linear_1
text_embedding.2 = condition_embedder.text_embedder.linear_2
time_embedding.0 = condition_embedder.time_embedder.linear_1
time_embedding.2 = condition_embedder.time_embedder.linear_2
time_projection.1 = condition_embedder.time_proj
img_emb.proj.1 = condition_embedder.image_embedder.ff.net.0.proj
img_emb.proj.3 = condition_embedder.image_embedder.ff.net.2
head.head = proj_out
""")

OPENCLIP: Final = _lines("""
transformer.resblocks.#.attn.in_proj = text_model.encoder.layers.#.self_attn.q_proj + .k_proj + .v_proj
transformer.resblocks.#.attn.out_proj = text_model.encoder.layers.#.self_attn.out_proj
transformer.resblocks.#.ln_1 = text_model.encoder.layers.#.layer_norm1
transformer.resblocks.#.ln_2 = text_model.encoder.layers.#.layer_norm2
transformer.resblocks.#.mlp.c_fc = text_model.encoder.layers.#.mlp.fc1
transformer.resblocks.#.mlp.c_proj = text_model.encoder.layers.#.mlp.fc2
""")

CLIP: Final = tuple(
    Line(f"encoder.layers.#.{part}", (f"text_model.encoder.layers.#.{part}",))
    for part in (*(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
)

PHI3: Final = _lines("""
model.layers.#.self_attn.qkv_proj = model.layers.#.self_attn.q_proj + .k_proj + .v_proj |1
model.layers.#.mlp.gate_up_proj = model.layers.#.mlp.gate_proj + .up_proj
""")

RESNET: Final = MappingProxyType({
    "in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2", "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
})  # fmt: skip
"""The parts of a residual block in the UNet of Stable Diffusion."""

ATTENTION: Final = (
    "proj_in", "proj_out", "norm",
    *(f"transformer_blocks.#.{a}.{p}" for a in ("attn1", "attn2") for p in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"transformer_blocks.#.{p}" for p in ("ff.net.0.proj", "ff.net.2", "norm1", "norm2", "norm3")),
)  # fmt: skip
"""The parts of an attention block in that UNet, which both layouts call alike."""


def _unet() -> Iterator[Line]:
    """Yield the lines for the UNet of Stable Diffusion 1, 2 and XL.

    After the first convolution every level has three input blocks, two residual ones and a downsampler, and three
    output blocks, all residual, the last with an upsampler.
    """
    pairs: list[tuple[str, str]] = []
    for level in range(4):
        for n in range(2):
            pairs.append((f"input_blocks.{3 * level + n + 1}", f"down_blocks.{level}.@.{n}"))
        for n in range(3):
            pairs.append((f"output_blocks.{3 * level + n}", f"up_blocks.{level}.@.{n}"))
        yield Line(f"input_blocks.{3 * level + 3}.0.op", (f"down_blocks.{level}.downsamplers.0.conv",))
        for n in (1, 2):
            yield Line(f"output_blocks.{3 * level + 2}.{n}.conv", (f"up_blocks.{level}.upsamplers.0.conv",))
    for left, right in pairs:
        yield from _block(f"{left}.0", right.replace("@", "resnets"), f"{left}.1", right.replace("@", "attentions"))
    yield from _block("middle_block.0", "mid_block.resnets.0", "middle_block.1", "mid_block.attentions.0")
    yield from _block("middle_block.2", "mid_block.resnets.1", "", "")
    yield from _lines("""
input_blocks.0.0 = conv_in
out.0 = conv_norm_out
out.2 = conv_out
time_embed.0 = time_embedding.linear_1
time_embed.2 = time_embedding.linear_2
label_emb.0.0 = add_embedding.linear_1
label_emb.0.2 = add_embedding.linear_2
""")


def _block(resnet: str, resnet_right: str, attention: str, attention_right: str) -> Iterator[Line]:
    for part, part_right in RESNET.items():
        yield Line(f"{resnet}.{part}", (f"{resnet_right}.{part_right}",))
    for part in ATTENTION if attention else ():
        yield Line(f"{attention}.{part}", (f"{attention_right}.{part}",))


@dataclass(frozen=True)
class Layout:
    """A table, and the keys by which a network shows which of the two layouts it has."""

    lines: tuple[Line, ...]
    shows_left: tuple[str, ...]
    shows_right: tuple[str, ...]
    hides: tuple[str, ...] = ()  # keys of networks that are numbered otherwise


QUERY: Final = "encoder.layers.0.self_attn.q_proj.weight"
CONTEXT: Final = ("transformer_blocks.0.attn.add_q_proj.weight", "transformer_blocks.0.norm1_context.linear.weight")
BLOCK: Final = "model.layers.0"

LAYOUTS: Final = (
    Layout(
        FLUX,
        ("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight", "double_blocks.0.img_mod.lin.weight"),
        ("single_transformer_blocks.0.proj_mlp.weight", *CONTEXT),
    ),
    Layout(
        SD3,
        ("joint_blocks.0.x_block.attn.qkv.weight", "joint_blocks.0.context_block.attn.qkv.weight"),
        ("pos_embed.proj.weight", *CONTEXT),
    ),
    Layout(
        WAN,
        ("blocks.0.self_attn.q.weight", "blocks.0.cross_attn.q.weight", "blocks.0.ffn.0.weight"),
        ("blocks.0.attn1.to_q.weight", "blocks.0.attn2.to_q.weight", "blocks.0.ffn.net.0.proj.weight"),
    ),
    Layout(
        tuple(_unet()),
        ("input_blocks.0.0.weight",),
        ("conv_in.weight", "down_blocks.0.resnets.1.conv1.weight"),
        ("input_blocks.2.0.op.weight",),
    ),
    Layout(OPENCLIP, ("transformer.resblocks.0.attn.in_proj_weight",), (f"text_model.{QUERY}",)),
    Layout(CLIP, (QUERY, "encoder.layers.0.layer_norm1.weight"), (f"text_model.{QUERY}",)),
    Layout(
        PHI3,
        (f"{BLOCK}.self_attn.qkv_proj.weight", f"{BLOCK}.mlp.gate_up_proj.weight"),
        (f"{BLOCK}.self_attn.q_proj.weight", f"{BLOCK}.mlp.gate_proj.weight", f"{BLOCK}.input_layernorm.weight"),
    ),
)


class Lines:
    """Lines of the tables that a module's name is looked up in."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[list[str], Line]]] = {}  # name, all numbers `#` → its own numbers, line

    def add(self, name: str, line: Line) -> None:
        """Add a line under one of its names."""
        self._found.setdefault(_NUMBER.sub("#", name), []).append((_NUMBER.findall(name), line))

    def of(self, name: str) -> Iterator[tuple[Line, list[str]]]:
        """Yield the lines that a name fits, each with the numbers that stand for its `#`."""
        numbers = _NUMBER.findall(name)
        for wanted, line in self._found.get(_NUMBER.sub("#", name), ()):
            if all(want in ("#", number) for want, number in zip(wanted, numbers, strict=True)):
                yield line, [number for want, number in zip(wanted, numbers, strict=True) if want == "#"]


def tables(keys: Mapping[str, object]) -> tuple[Lines, Lines]:
    """Return the lines for a network with these keys: under their left names if the network has the left layout, else
    under the first of their right names."""
    left, right = Lines(), Lines()
    for layout in LAYOUTS:
        on_left = all(key in keys for key in layout.shows_left)
        if any(key in keys for key in layout.hides):
            continue
        if not on_left and not all(key in keys for key in layout.shows_right):
            continue
        for line in layout.lines:
            (left.add(line.left, line) if on_left else right.add(line.right[0], line))
    return left, right


def filled(template: str, numbers: Sequence[str]) -> str:
    """Return the name that a template gives with these numbers."""
    for number in numbers:
        template = template.replace("#", number, 1)
    return template
