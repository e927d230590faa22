"""Stores merged values as codes and scales, with one rounding, on the device on which they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..disk.scale_spool import PartBytes
from ..dtypes import Memory
from ..errors import InputError, TooLarge
from ..files.encodings.arithmetic import largest
from ..files.encodings.base import CODES, DRAW, OutOfRange, Packing
from ..planning.plan import OutputTensor
from .tensor_moves import Placement, host, odd, stage
from .tensors import Fetch, as_bytes, computing, on_device_of, parts_of, raw


class Codes(NamedTuple):
    """The codes that the base has for some values, as bytes on the host, and how the new ones are made."""

    base: Tensor
    uniform: Tensor | None  # uniform numbers, for stochastic rounding
    decode: int = 0  # how many of the first values are decoded again from the new codes


class NewParts(NamedTuple):
    """The codes of merged values, as bytes on the host, and the bytes of the other parts that changed."""

    codes: Tensor
    others: tuple[PartBytes, ...]
    decoded: Tensor | None = None
    """The first values, flat, on the host, as a reader of the output decodes them; None if `Codes.decode` is 0."""


class Uncovered(NamedTuple):
    """Values that are not encoded, as the scale of the whole weight does not cover the largest magnitude of them."""

    largest: float


def recode(target: OutputTensor, first: int, values: Tensor, codes: Codes, fetch: Fetch) -> NewParts | Uncovered:
    """Return how merged values from `first` on are stored, computed on their device; nothing is written."""
    old, new = _encoded(target, first, values, codes, fetch)
    if new is None:
        return Uncovered(largest(values))
    changed = []
    for role, stored in new.items():
        if role != CODES and not torch.equal(as_bytes(stored), as_bytes(old[role])):
            part = target.packing.parts[role]
            changed.append(PartBytes(part.info.name, part.span(first, values.numel())[0], raw(stored)))
    decoded = host(_decoded(target.packing, first, codes.decode, old, new)) if codes.decode else None
    return NewParts(host(as_bytes(new[CODES])), tuple(changed), decoded)


def read_back(target: OutputTensor, first: int, values: Tensor, codes: Codes, fetch: Fetch) -> Tensor | None:
    """Return merged values of a quantised weight from `first` on as a reader of the output decodes them, flat; None
    if a part of the whole weight does not cover them. Nothing is written."""
    encoded = recode(target, first, values, codes._replace(decode=values.numel()), fetch)
    return None if isinstance(encoded, Uncovered) else encoded.decoded


def _decoded(packing: Packing, first: int, count: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
    """Return `count` values from `first` on, flat. `old` and `new`: parts of at least so many values."""
    encoding, parts = packing.encoding, {}
    for role, before in old.items():
        values = new.get(role, before)
        if role == CODES:
            parts[role] = as_bytes(values)[: encoding.nbytes(count)]
        elif (part := packing.parts.get(role)) is not None:
            parts[role] = as_bytes(values)[: part.span(first, count)[1]].view(before.dtype)
    with computing(parts[CODES].device):
        return encoding.decode(parts, first, count).reshape(-1)


def _encoded(
    target: OutputTensor, first: int, values: Tensor, codes: Codes, fetch: Fetch
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the stored parts of some values: the base's, and those of the merged values; None if no part covers
    them."""
    packing, count = target.packing, values.numel()
    afresh = target.weight.packing.encoding is not packing.encoding  # the base has no codes of this kind
    dtype = torch.promote_types(values.dtype, torch.float32)
    on_host = values.device.type == "cpu"
    wide = (host(values, dtype) if on_host else stage([values], Placement(values.device, dtype))[0]).reshape(-1)
    if afresh and odd(wide):
        raise InputError("the base contains NaN or infinite values, which the format cannot store",
                         f"{target.source.file}: {target.name}", "write `--dtype bf16`")  # fmt: skip
    before = torch.zeros(packing.encoding.nbytes(count), dtype=torch.uint8) if afresh else codes.base
    old = parts_of(on_device_of(before, wide), packing, first, count, fetch)
    if codes.uniform is not None:
        old[DRAW] = on_device_of(codes.uniform, wide)
    try:
        with computing(wide.device):
            new = packing.encoding.encode(wide, old)
    except OutOfRange as e:
        raise TooLarge(
            f"a number is too large for {packing.encoding.title}", target.name, "write `--dtype bf16`"
        ) from e
    return old, None if new is None else dict(new)


def refitted(target: OutputTensor, magnitude: float, fetch: Fetch) -> OutputTensor:
    """Return the target with parts of the whole weight, held in memory, that cover this magnitude."""
    encoding, _, parts, _ = target.packing
    whole = {role: fetch(part.info) for role, part in parts.items() if not part.group}
    infos = {
        role: replace(
            parts[role].info, source=Memory.of(parts[role].info.file, memoryview(bytearray(raw(values)))), offset=0
        )
        for role, values in encoding.refit(whole, magnitude).items()
    }
    refitted_parts = {role: part._replace(info=infos.get(role, part.info)) for role, part in parts.items()}
    return target._replace(packed=target.packing._replace(parts=refitted_parts))


def new_parts(target: OutputTensor) -> Iterator[PartBytes]:
    """Yield the parts of a refitted target that are held in memory."""
    for part in target.packing.parts.values():
        if isinstance(part.info.source, Memory) and not part.group:
            yield PartBytes(part.info.name, 0, bytes(part.info.source.content()))
