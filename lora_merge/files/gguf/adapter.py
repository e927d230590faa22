"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Each name of a weight has `.lora_a` and `.lora_b` behind it; one entry holds alpha for all. The names, and the order of
the rows of `.lora_b`, are those of the GGUF model of the same architecture, so on such a base every architecture is
read. Names of transformers are known for the architectures of names.py alone. In a model whose q and k have their rows
in another order, the number of heads is needed, which the file does not state: the base does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...disk.reader import read_bytes
from ...dtypes import Memory, StoredTensor
from ...errors import InputError
from ...text import quoted
from ..encodings.base import CODES
from .encoding import ggml
from .names import ARCHITECTURE, FAMILIES, ROTATED_WEIGHTS, Family, renamed
from .types import DECODED_TYPES

TYPE: Final = "general.type"
KIND: Final = "adapter.type"
ALPHA_KEY: Final = "adapter.lora.alpha"
INVOKED: Final = "adapter.alora.invocation_tokens"
UNCONVERTED: Final = "merge the adapter that it was converted from"

TOKEN_EMBEDDINGS: Final = "token_embd.weight"
EXPERT_AXES: Final = 3  # axes of factors of stacked experts


class Slot(NamedTuple):
    """How one factor is read: its ending, and the order of its axes."""

    ending: str
    axes: tuple[int, ...] = ()


MATRIX_SLOTS: Final = {"lora_a": Slot(".lora_down.weight"), "lora_b": Slot(".lora_up.weight")}

EXPERT_SLOTS: Final = {"lora_a": Slot(".lora_A.weight"), "lora_b": Slot(".lora_B.weight", (1, 2, 0))}
"""The factors of all experts of a layer, [E, r, in] and [E, out, r]; PEFT has [E·r, in] and [out, r·E] for these."""

OF_TABLE: Final = {"lora_a": Slot(".lora_embedding_A", (1, 0)), "lora_b": Slot(".lora_embedding_B")}
"""The factors of the table of tokens, [vocabulary, r] and [dim, r]; src/models of llama.cpp, build_inp_embd."""


def is_adapter(values: Mapping[str, Any]) -> bool:
    """Return whether the entries of a file say that it holds an adapter."""
    return values.get(TYPE) == "adapter"


def family_of(values: Mapping[str, Any]) -> Family | None:
    """Return what is known of the architecture that the entries of a file state; None for any other."""
    return FAMILIES.get(str(values.get(ARCHITECTURE, "")))


def adapter_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any], family: Family | None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, StoredTensor]:  # fmt: skip
    """Return the tensors of an adapter, with names that are read as LoRA; InputError for those of another kind.

    Parameters:
        path: The adapter, for messages.
        tensors: Its tensors as stored.
        values: The entries of its header.
        family: Decides the names and the order of the rows; None for those of llama.cpp.
        config: The configuration of the base, with its heads; without it, rows in another order cannot be read.
    """
    kind, alpha = values.get(KIND, "lora"), values.get(ALPHA_KEY, 0)
    if kind != "lora" or not isinstance(alpha, int | float):
        what = f"{KIND} is {quoted(str(kind))}" if kind != "lora" else f"{ALPHA_KEY} is {quoted(str(alpha))}, no number"
        raise InputError("a GGUF adapter of a kind that is not read", f"{path}: {what}", UNCONVERTED)
    if INVOKED in values:
        raise InputError("an aLoRA adapter cannot be merged: it acts only after certain tokens", f"{path}: {INVOKED}",
                         "serve the adapter together with the model")  # fmt: skip
    factors = [_named(info, family, config) for info in tensors.values()]
    named = {info.name: info for info in factors}
    if alpha:  # llama.cpp leaves the factor out if it is 0, or if no entry states it
        data = memoryview(bytearray(struct.pack("<d", float(alpha))))
        endings = tuple(slots["lora_a"].ending for slots in (MATRIX_SLOTS, EXPERT_SLOTS, OF_TABLE))
        for name in [info.name for info in factors]:
            stem = next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), "")
            if stem:
                named[f"{stem}.alpha"] = StoredTensor(f"{stem}.alpha", "F64", (), Memory.of(path, data), 0, 8)
    return named


def with_plain_values(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of an adapter under other names than llama.cpp's, quantised ones in fp32."""
    return {name: _decoded(info) if info.dtype in DECODED_TYPES else info for name, info in tensors.items()}


def _named(info: StoredTensor, family: Family | None, config: Mapping[str, Any] | None) -> StoredTensor:
    """Return a factor by the name and in the form that are read as LoRA."""
    weight, _, last = info.name.rpartition(".")
    if last not in MATRIX_SLOTS or (weight == TOKEN_EMBEDDINGS and len(info.shape) != len(OF_TABLE["lora_a"].axes)):
        raise InputError("a GGUF adapter holds more than LoRA", f"{info.file}: {quoted(info.name)}", UNCONVERTED)
    slots = OF_TABLE if weight == TOKEN_EMBEDDINGS else EXPERT_SLOTS if len(info.shape) == EXPERT_AXES else MATRIX_SLOTS
    name = renamed(weight, family) if family else weight
    named = replace(info, name=f"{name.removesuffix('.weight')}{slots[last].ending}", stored=info.name)
    if last == "lora_b" and family and family.permuted and (rotated := ROTATED_WEIGHTS.fullmatch(weight)):
        return _in_order(named, rotated[1], config)
    if slots is not MATRIX_SLOTS or info.dtype in DECODED_TYPES:
        return _decoded(named, axes=slots[last].axes)
    return named


def _in_order(info: StoredTensor, rotated: str, config: Mapping[str, Any] | None) -> StoredTensor:
    """Return `lora_b` of q or k with the rows in the order of transformers, by the heads in a configuration."""
    if config is None:
        return _unreadable(info)
    attention = config.get("num_attention_heads")
    heads = attention if rotated == "q" else config.get("num_key_value_heads", attention)
    rows = info.shape[0] if info.shape else 0
    if not isinstance(heads, int) or heads < 1 or not rows or rows % (2 * heads):
        what = "the base does not state how many heads it has, and the rows of the adapter depend on it"
        where = f"{info.file}: {info.stored}"
        raise InputError(what, where, "give the base as a folder with config.json, or as GGUF")
    return _decoded(info, heads=heads)


def _unreadable(info: StoredTensor) -> StoredTensor:
    def content() -> memoryview:
        raise InputError("the rows of a GGUF adapter have llama.cpp's order, and the heads of the base are unknown",
                         f"{info.file}: {info.stored}", "merge into a base file or folder")  # fmt: skip

    return replace(info, dtype="F32", source=Memory(info.file, content), offset=0, nbytes=4 * prod(info.shape))


def _decoded(info: StoredTensor, *, heads: int = 0, axes: tuple[int, ...] = ()) -> StoredTensor:
    """Return a factor as a matrix in fp32: its rows in order for these heads, its axes in this order."""
    count, shape = prod(info.shape), tuple(info.shape[axis] for axis in axes) or info.shape
    if len(shape) == EXPERT_AXES:
        shape = (shape[0], prod(shape[1:])) if axes else (prod(shape[:-1]), shape[-1])

    def content() -> memoryview:
        import torch

        size, cols = (info.shape[0] // heads, prod(info.shape[1:])) if heads else (0, 0)
        encoding = ggml(info.dtype, head=size, cols=cols)
        raw = torch.frombuffer(bytearray(read_bytes(info)), dtype=torch.uint8)
        values: Any = encoding.decode({CODES: raw}, 0, count)
        if axes:
            values = values.reshape(info.shape).permute(axes)
        return memoryview(bytearray(values.contiguous().numpy().tobytes()))

    return replace(info, dtype="F32", shape=shape, source=Memory(info.file, content), offset=0, nbytes=4 * count)
