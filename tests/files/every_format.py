"""Every way to store a weight that is read, by its row of a table: an example of each, as its format sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_merge.algorithms import Shape
from lora_merge.disk.reader import read_bytes
from lora_merge.dtypes import Memory, StoredTensor
from lora_merge.engine.tensor_moves import TORCH_DTYPES
from lora_merge.engine.tensors import as_bytes, parts_of
from lora_merge.files.encodings.base import CODES, DRAW, Encoding, Packing
from lora_merge.files.formats import FORMATS
from lora_merge.files.formats.base import Checkpoint
from lora_merge.files.formats.output import FILE_FORMATS, FOLDER_FORMATS
from lora_merge.files.gguf.blocks import BLOCK_KINDS
from lora_merge.files.gguf.encoding import ggml
from lora_merge.files.gguf.types import DECODED_ONLY_TYPES, GGML_TYPES
from lora_merge.proof.decoders import decoder
from lora_merge.proof.grids import Grid
from lora_merge.proof.weights import CodedWeight
from tests.files import quantised_forms
from tests.files.other_forms import FORMS as BY_LIBRARIES
from tests.files.quantised_forms import FORMS, Form, note, rows
from tests.files.sdnq_layers import ROWS as SDNQ
from tests.files.sdnq_layers import stored as stored_by_sdnq
from tests.files.torchao_forms import STORED
from tests.kit.gguf_files import Array, encoded
from tests.kit.tensors import Tensors, rand

LAYER = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{LAYER}.weight"
BY_SDNQ = stored_by_sdnq()


class Weight(NamedTuple):
    """One stored weight: how it is packed, and the bytes of its parts."""

    shape: Shape
    packing: Packing
    raw: Mapping[str, bytes]

    @property
    def encoding(self) -> Encoding:
        return self.packing.encoding

    @property
    def total(self) -> int:
        return prod(self.shape)

    def parts(self) -> dict[str, Tensor]:
        """The parts as the engine gives them to the encoding."""
        roles = {part.info.name: role for role, part in self.packing.parts.items()}

        def fetch(info: StoredTensor) -> Tensor:
            raw = self.raw[roles[info.name]][info.offset : info.offset + info.nbytes]
            return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(TORCH_DTYPES[info.dtype])

        codes = torch.frombuffer(bytearray(self.raw[CODES]), dtype=torch.uint8)
        return parts_of(codes, self.packing, 0, self.total, fetch)

    def decoded(self) -> Tensor:
        return self.encoding.decode(self.parts(), 0, self.total).reshape(-1)

    def encoded(self, values: Tensor, uniform: Tensor | None = None) -> Weight:
        """The weight with other numbers; parts of the whole weight are made again where they do not cover them.
        `uniform`: draws for stochastic rounding."""
        parts = self.parts() | ({} if uniform is None else {DRAW: uniform})
        new = self.encoding.encode(values.clone(), parts)
        if new is None:
            parts |= self.encoding.refit(parts, float(values.abs().max()))
            new = self.encoding.encode(values.clone(), parts)
        assert new is not None, "the parts were made for these numbers"
        made = {role: as_bytes(t).numpy().tobytes() for role, t in {**parts, **new}.items() if role != DRAW}
        assert {role: len(raw) for role, raw in made.items()} == {role: len(raw) for role, raw in self.raw.items()}
        return self._replace(raw=made)

    def proven(self) -> tuple[Array, Grid]:
        """The numbers, and their grid, by the decoders of the proof."""
        levels, grid = decoder(self.encoding)(self.raw, self.encoding, 0, self.total)
        return grid.value(levels), grid

    def rows_alone(self, rows: Array) -> tuple[Array, Grid]:
        """The same of some rows, as the proof reads them from a file."""
        roles = {part.info.name: role for role, part in self.packing.parts.items()}

        def read(info: StoredTensor, first: int, count: int) -> bytes:
            return self.raw[roles.get(info.name, CODES)][first : first + count]

        codes = self.packing.codes or StoredTensor("codes", "U8", (), Path("memory"), 0, len(self.raw[CODES]))
        return CodedWeight(self.packing._replace(codes=codes), self.total, read).rows(rows, self.shape[-1])


def in_memory(tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors as a container lists them."""
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.float8_e8m0fnu: "F8_E8M0"}
    found = {}
    for name, tensor in tensors.items():
        data = as_bytes(tensor).numpy().tobytes()
        source = Memory.of(Path("memory"), memoryview(data))
        found[name] = StoredTensor(name, names[tensor.dtype], tuple(tensor.shape), source, 0, len(data))
    return found


class Example(NamedTuple):
    """A layer as its writer stores it, by the last names of its tensors, and what the side files say."""

    layer: Tensors
    config: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}

    def checkpoint(self) -> Checkpoint:
        named = {last if last == "scaled_fp8" else f"{LAYER}.{last}": value for last, value in self.layer.items()}
        return Checkpoint(in_memory(named), self.metadata, self.config)

    def weight(self) -> Weight:
        (claim,) = (claim for claims_of in FORMATS for claim in claims_of(self.checkpoint()) if claim is not None)
        return weight(claim.weight.shape, claim.packing)


def weight(shape: Shape, packing: Packing) -> Weight:
    assert packing.codes is not None
    raw = {role: bytes(read_bytes(part.info)) for role, part in packing.parts.items()}
    return Weight(shape, packing, {CODES: bytes(read_bytes(packing.codes)), **raw})


def of_form(form: Form) -> Callable[[Shape], Example]:
    def example(shape: Shape) -> Example:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantised_forms, "SHAPE", shape)
            return Example(form.make(rand(*shape, scale=0.02)) | note(form), form.config)

    return example


def of_library(name: str) -> Callable[[Shape], Example]:
    method, _, kind = name.partition(" ")
    layer = {last: value for last, value in BY_LIBRARIES[name].items() if last != "want"}
    return lambda _: Example(layer, {"quant_method": method, "weights_dtype": kind, "group_size": 32})


def _old_style(shape: Shape) -> Example:
    layer = rows(torch.float8_e4m3fn, 448, "scale_weight")(rand(1, shape[0] * shape[1], scale=0.02))
    layer = {"weight": layer["weight"].view(shape), "scale_weight": layer["scale_weight"].reshape(())}
    return Example({**layer, "scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn)})


def _torchao(shape: Shape) -> Example:
    layer = rows(torch.int8, 127, "_weight_scale", codes="_weight_qdata")(rand(*shape, scale=0.02))
    entry = f'{{"_type": "Int8Tensor", "_data": {{"block_size": [1, {shape[1]}]}}}}'
    return Example(layer, {}, {"tensor_names": "[]", WEIGHT: entry})


def _stored_by_torchao(name: str, _: Shape) -> Example:
    layer, told = STORED[name]
    tensors = {last: value for last, value in layer.items() if last != "want"}
    return Example(tensors, {}, {"tensor_names": "[]", WEIGHT: told})


def _experts(shape: Shape) -> Example:
    """gpt-oss: [experts, out, in], of which the model knows the transposes."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, shape[0], shape[1] // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(110, 125, blocks.shape[:3], generator=random, dtype=torch.uint8)
    return Example({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, {"quant_method": "mxfp4"})


def _bank(name: str, shape: Shape) -> Example:
    """A bank of two experts in ComfyUI's tiles, of other magnitudes."""
    made = [of_form(FORMS[name])(shape).layer for _ in range(2)]
    layer = {last: torch.stack([one[last] for one in made]) for last in made[0] if last != "comfy_quant"}
    if "weight_scale_2" in layer:
        layer["weight_scale_2"] = layer["weight_scale_2"] * torch.tensor([1.0, 3.0])
    return Example({**layer, "comfy_quant": made[0]["comfy_quant"]})


def _stored_by_sdnq(name: str, _: Shape) -> Example:
    layer = {last: value for last, value in BY_SDNQ[name].items() if last != "want"}
    return Example(layer, {"quant_method": "sdnq", **SDNQ[name][1]})


def _halved(example: Callable[[Shape], Example], dtype: torch.dtype) -> Callable[[Shape], Example]:
    """The same with scales of 16 bits, larger by half a step than they must be."""

    def made(shape: Shape) -> Example:
        found = example(shape)
        wide = {last: t.to(dtype) if t.dtype == torch.float32 else t for last, t in found.layer.items()}
        return found._replace(layer=wide)

    return made


EXAMPLES: dict[str, Callable[[Shape], Example]] = {
    **{name: of_form(form) for name, form in FORMS.items()},
    **{f"stored by {name}": of_library(name) for name in sorted(BY_LIBRARIES)},
    **{
        f"{name}, {str(dtype)[6:]} scales": _halved(of_form(FORMS[name]), dtype)
        for dtype in (torch.float16, torch.bfloat16)
        for name in (
            "compressed-tensors fp8", "compressed-tensors int8", "compressed-tensors int8 with zero points",
            "compressed-tensors int4", "compressed-tensors int4 with zero points", "SDNQ uint4",
        )
    },
    "ComfyUI old style": _old_style,
    "e4m3fnuz": lambda shape: Example({"weight": rand(*shape).to(torch.float8_e4m3fnuz)}),
    "e5m2fnuz": lambda shape: Example({"weight": rand(*shape).to(torch.float8_e5m2fnuz)}),
    "torchao Int8Tensor": _torchao,
    **{f"torchao {name}": partial(_stored_by_torchao, name) for name in STORED},
    "gpt-oss": _experts,
    **{f"{name}, a bank": partial(_bank, name) for name in ("ComfyUI mxfp8", "ComfyUI nvfp4")},
    **{f"SDNQ, {name}": partial(_stored_by_sdnq, name) for name in SDNQ},
}  # fmt: skip
"""Row → its example in a shape; layers that a library stored have their own."""

IN_EIGHTS = {name for name, form in FORMS.items() if form.decode_only}
"""Rows of which a row of codes, or a column, must fill whole words."""


@cache
def stored(name: str) -> tuple[Weight, ...]:
    """The example of a row in shapes that its format allows, none of them a usual one."""
    shapes = ((32, 64), (96, 128)) if name in IN_EIGHTS else ((7, 192), (129, 64))
    return tuple(EXAMPLES[name](shape).weight() for shape in shapes)


def _blocks(kind: str, *, zeros: bool = False) -> Weight:
    """Blocks of a type of GGUF."""
    values = np.random.default_rng(0).normal(0, 0.02, (6, 256))
    raw = (
        np.zeros(6 * 256 // GGML_TYPES[kind].unit[0] * GGML_TYPES[kind].unit[1], np.uint8)
        if zeros
        else encoded(values, kind)
    )
    data = np.ascontiguousarray(raw).tobytes()
    codes = StoredTensor(WEIGHT, kind, (6, 256), Memory.of(Path("memory"), memoryview(data)), 0, len(data))
    return Weight((6, 256), Packing(ggml(kind, new_scales=zeros), codes), {CODES: data})


def _made(make: Callable[[StoredTensor], Any]) -> Weight:
    """A weight of an output in a new format, before it has numbers."""
    (plain,) = in_memory({WEIGHT: torch.zeros(128, 256)}).values()
    packing = make(plain).packing
    blank = replace(packing.codes, source=Memory.of(Path("memory"), memoryview(bytes(packing.codes.nbytes))), offset=0)
    return weight((128, 256), packing._replace(codes=blank))


NEW: dict[str, Callable[[], Weight]] = {
    **{f"GGUF {kind}": partial(_blocks, kind) for kind in sorted(BLOCK_KINDS.keys() | DECODED_ONLY_TYPES)},
    **{f"new GGUF {kind}": partial(_blocks, kind, zeros=True) for kind in BLOCK_KINDS},
    **{f"new {name}, a file": partial(_made, form.make) for name, form in FILE_FORMATS.items()},
    **{f"new {name}, a folder": partial(_made, form.make) for name, form in FOLDER_FORMATS.items()},
}
"""Types of GGUF, and formats of outputs."""


ROWS = [*EXAMPLES, *NEW]


def weights(name: str) -> tuple[Weight, ...]:
    """Stored weights of a row."""
    return stored(name) if name in EXAMPLES else (NEW[name](),)
