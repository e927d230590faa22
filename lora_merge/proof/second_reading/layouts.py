"""Two names of one layer, for the second reading: small tables of the layouts that most adapters are made for.

The plan's own name tables (architectures/*.yaml) are not used here. `#` is a number, which is the same on both
sides. The left name is that of the model's authors, the right one that of diffusers or transformers; a table serves
bases of either layout and adapters of the other. Sources: the conversion scripts of diffusers (scripts/convert_*.py,
loaders/single_file_utils.py) and the models' own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

Shape = tuple[int, ...]

_NUMBER: Final = re.compile(r"(?:(?<=\.)|^)(?:\d+|#)(?=\.|$)")

EQUAL: Final = "equal"  # parts of as many rows each
FIRST_SQUARE: Final = "first square"  # the first part has as many rows as the layer has inputs, the others the rest
ALL_BUT_LAST_SQUARE: Final = "all but the last square"  # each but the last has as many rows as the layer has inputs

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


@dataclass(frozen=True)
class Line:
    """One weight of the left layout and the weights of the right one whose rows, one below the other, it holds."""

    left: str
    right: tuple[str, ...]
    split: str = EQUAL


def heights(split: str, count: int, shape: Shape) -> tuple[int, ...]:
    """Return the number of rows of each part of a weight; () if the split does not divide its rows evenly."""
    rows, inputs = shape[0], shape[1] if len(shape) > 1 else 0
    squares = {EQUAL: 0, FIRST_SQUARE: 1, ALL_BUT_LAST_SQUARE: count - 1}[split]
    if squares and not inputs:
        return ()
    each, odd = divmod(rows - squares * inputs, count - squares)
    return () if odd or each <= 0 else (*[inputs] * squares, *[each] * (count - squares))


def _line(row: str) -> Line:
    """Return a line of a table."""
    left, right = row.split(" = ")
    split = EQUAL
    for mark, name in ((" |1", FIRST_SQUARE), (" |-1", ALL_BUT_LAST_SQUARE)):
        if right.endswith(mark):
            right, split = right.removesuffix(mark), name
    parts = right.split(" + ")
    parent, grandparent = parts[0].rpartition(".")[0], parts[0].rsplit(".", 2)[0]
    full = (grandparent + p[1:] if p.startswith("..") else parent + p if p[0] == "." else p for p in parts)
    return Line(left, tuple(full), split)


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


def _block(resnet: str, resnet_right: str, attention: str, attention_right: str) -> Iterator[Line]:
    for part, part_right in RESNET.items():
        yield Line(f"{resnet}.{part}", (f"{resnet_right}.{part_right}",))
    for part in ATTENTION if attention else ():
        yield Line(f"{attention}.{part}", (f"{attention_right}.{part}",))


@dataclass(frozen=True)
class LayoutRow:
    """A table, and the keys by which a network shows which of the two layouts it has."""

    lines: tuple[Line, ...]
    shows_left: tuple[str, ...]
    shows_right: tuple[str, ...]
    hides: tuple[str, ...] = ()  # keys of networks that are numbered otherwise


def _layouts() -> Iterator[LayoutRow]:
    """Yield the tables of layouts.txt, and with that of the UNet the lines that its numbering gives."""
    text = Path(__file__).with_name("layouts.txt").read_text(encoding="utf-8")
    for table in text.strip().split("\n\n")[1:]:
        name, left, right, hides, *rows = table.splitlines()
        lines = (*(_unet() if name == "unet" else ()), *map(_line, rows))
        yield LayoutRow(
            lines, tuple(left.split()), tuple(right.split()), tuple(key for key in hides.split() if key != "-")
        )


LAYOUTS: Final = tuple(_layouts())


class NameRows:
    """Lines of the tables that a module's name is looked up in."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[list[str], Line]]] = {}  # name, all numbers `#` → its own numbers, line

    def add(self, name: str, line: Line) -> None:
        """Add a line under one of its names."""
        self._lines.setdefault(_NUMBER.sub("#", name), []).append((_NUMBER.findall(name), line))

    def of(self, name: str) -> Iterator[tuple[Line, list[str]]]:
        """Yield the lines that a name fits, each with the numbers of its `#`."""
        numbers = _NUMBER.findall(name)
        for template, line in self._lines.get(_NUMBER.sub("#", name), ()):
            if all(want in ("#", number) for want, number in zip(template, numbers, strict=True)):
                yield line, [number for want, number in zip(template, numbers, strict=True) if want == "#"]


def tables(keys: Mapping[str, object]) -> tuple[NameRows, NameRows]:
    """Return the lines for a network with these keys: under their left names if the network has the left layout, else
    under the first of their right names."""
    left, right = NameRows(), NameRows()
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
