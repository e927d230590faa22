"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Beside each name of a weight stand `.lora_a` and `.lora_b`; one entry holds alpha for all. In a model whose q and k have
their rows in another order, the rows of `.lora_b` have that order too, and the file does not state how many heads
there are: the base does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from ...disk.files import Memory, StoredTensor
from ...disk.reader import read_bytes
from ...errors import InputError
from ...text import quoted
from ..codecs.base import CODES
from ..codecs.ggml import ggml, permuted
from .names import FAMILIES, ROTATED, Family, renamed
from .types import READ, READ_ONLY

TYPE: Final = "general.type"
ALPHA: Final = "adapter.lora.alpha"
SLOTS: Final = {"lora_a": "lora_down.weight", "lora_b": "lora_up.weight"}
EMBEDDINGS: Final = "token_embd.weight."


def is_adapter(values: Mapping[str, Any]) -> bool:
    """Return whether the entries of a file say that it holds an adapter."""
    return values.get(TYPE) == "adapter"


def adapter_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the tensors of an adapter with names that are read as LoRA; InputError for those of another kind."""
    arch, kind, alpha = (values.get(key, "") for key in ("general.architecture", "adapter.type", ALPHA))
    family = FAMILIES.get(str(arch))
    if family is None or not isinstance(alpha, int | float):
        what = f"a GGUF adapter of the kind {quoted(str(kind))} for {quoted(str(arch))}"
        raise InputError(f"{what} is not read", str(path), f"known is LoRA for {', '.join(FAMILIES)}")
    found = {info.name: info for t in tensors.values() for info in _named(t, family)}
    if alpha:  # llama.cpp leaves the factor out where it is 0
        data = memoryview(bytearray(struct.pack("<f", float(alpha))))
        for stem in {name.removesuffix(f".{SLOTS['lora_a']}") for name in found if name.endswith(SLOTS["lora_a"])}:
            name = f"{stem}.alpha"
            found[name] = StoredTensor(name, "F32", (), Memory.of(path, data), 0, 4)
    return found


def _named(info: StoredTensor, family: Family) -> Iterator[StoredTensor]:
    stem, _, last = info.name.rpartition(".")
    if last not in SLOTS or info.name.startswith(EMBEDDINGS):
        raise InputError("a GGUF adapter holds more than LoRA of linear layers", f"{info.file}: {quoted(info.name)}",
                         "merge the adapter that it was converted from")  # fmt: skip
    name = f"{renamed(stem, family).removesuffix('.weight')}.{SLOTS[last]}"
    if last == "lora_b" and family.permuted and (found := ROTATED.fullmatch(stem)):
        yield _decoded(replace(info, name=name, stored=info.name), rotated=found[1])
    elif info.dtype in READ | READ_ONLY:
        yield _decoded(replace(info, name=name, stored=info.name))
    else:
        yield replace(info, name=name, stored=info.name)


@dataclass(frozen=True, eq=False)
class Decoded(Memory):
    """Numbers of a tensor in fp32, decoded when they are read."""

    origin: StoredTensor
    rotated: str = ""
    """q or k, if its rows have llama.cpp's order."""


def with_heads(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors with the rows of q and k in the order of transformers, by the heads in a configuration."""
    return {name: _in_order(info, config) for name, info in tensors.items()}


def _in_order(info: StoredTensor, config: Mapping[str, Any]) -> StoredTensor:
    if not isinstance(info.source, Decoded) or not info.source.rotated:
        return info
    own = config.get("num_attention_heads")
    heads = own if info.source.rotated == "q" else config.get("num_key_value_heads", own)
    rows = info.shape[0] if info.shape else 0
    if not isinstance(heads, int) or heads < 1 or not rows or rows % (2 * heads):
        what = "the base does not state how many heads it has, and the rows of the adapter depend on it"
        where = f"{info.file}: {info.stored}"
        raise InputError(what, where, "give the base as a folder with config.json, or as GGUF")
    return _decoded(info.source.origin, rotated=info.source.rotated, heads=heads)


def _decoded(origin: StoredTensor, *, rotated: str = "", heads: int = 0) -> StoredTensor:
    """Return a tensor in fp32. Rotated rows are put in order if the heads are known, and else cannot be read."""
    count = prod(origin.shape)

    def content() -> memoryview:
        if rotated and not heads:
            raise InputError("the rows of a GGUF adapter have llama.cpp's order, and the heads of the base are unknown",
                             f"{origin.file}: {origin.stored}", "merge into a base file or folder")  # fmt: skip
        import torch

        size = origin.shape[0] // heads if heads else 0
        encoding = permuted(origin.dtype, size, prod(origin.shape[1:])) if heads else ggml(origin.dtype)
        raw = torch.frombuffer(bytearray(read_bytes(origin)), dtype=torch.uint8)
        values: Any = encoding.decode({CODES: raw}, 0, count).contiguous().numpy()
        return memoryview(bytearray(values.tobytes()))

    source = Decoded(origin.file, content, origin, "" if heads else rotated)
    return replace(origin, dtype="F32", source=source, offset=0, nbytes=4 * count)
