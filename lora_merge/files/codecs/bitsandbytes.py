"""Weights of bitsandbytes: 4-bit codes by a table (nf4, fp4) with a scale for each block of the flat weight, and int8.

With double quantisation the scales are codes themselves: map[u8] · n + offset, n for every 256 of them. The offset,
the mean of all scales when the file was written, is kept.
https://github.com/bitsandbytes-foundation/bitsandbytes bitsandbytes/functional.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...disk.reader import read_bytes
from .base import (
    CODES,
    DRAW,
    Checkpoint,
    Claim,
    Encoding,
    InvalidPart,
    Packing,
    Part,
    Parts,
    beyond,
    claimed,
    positive,
    read_note,
)
from .scaled import Stored, scaled

if TYPE_CHECKING:
    from torch import Tensor

STATES: Final = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
MAP: Final = "map"
ABSMAX: Final = "absmax"
NESTED: Final = "nested"
NESTED_MAP: Final = "nested_map"
ROLES: Final = {"absmax": ABSMAX, "quant_map": MAP, "nested_absmax": NESTED, "nested_quant_map": NESTED_MAP}
SMALL: Final = 0.8  # share of a block's scale below which it is fitted again


@dataclass(frozen=True, eq=False)
class Bnb4(Encoding):
    """4-bit codes by a table, times a scale for each block of consecutive numbers."""

    size: int = 64  # numbers with one scale
    nested: int = 0  # scales with one scale; 0 without double quantisation
    offset: float = 0.0
    name: ClassVar[str] = "bnb4"
    stochastic: ClassVar[bool] = True
    fixed: ClassVar[frozenset[str]] = frozenset((MAP, NESTED_MAP))
    afresh: ClassVar[bool] = True

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return 1, self.size

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return map[q] · a in fp32."""
        from . import arithmetic

        values = arithmetic.from_halves(parts[CODES], parts[MAP].tolist(), high_first=True)[:count]
        scale = self._scale(parts)
        whole = count // self.size * self.size
        values[:whole].view(-1, self.size).mul_(scale[: whole // self.size, None])
        if whole < count:
            values[whole:].mul_(scale[-1])
        return values

    def encode(self, values: Tensor, parts: Parts, first: int) -> Parts | None:
        """Return codes and scales."""
        import torch

        from . import arithmetic, draws
        from .nearest import nearest

        count = values.numel()
        ragged = -count % self.size
        padded = (torch.nn.functional.pad(values, (0, ragged)) if ragged else values).view(-1, self.size)
        old, largest = self._scale(parts), arithmetic.largest_of_each(padded).float()
        (first, second, *_, before, last), margin = parts[MAP].sort().values.tolist(), beyond(parts)
        cover = min(last + margin * (last - before), margin * (second - first) - first)
        refit = (largest > old.abs() * cover) | (largest < old.abs() * SMALL)
        made, scale = self._fitted(old, largest, refit & (largest > 0), cover, parts)
        divisor = torch.where(scale == 0, inf, scale).to(values.dtype)
        levels = (padded / divisor[:, None]).view(-1)
        if DRAW in parts:
            levels[:count] = draws.to_table(levels[:count], parts[MAP], parts[DRAW]).to(levels.dtype)
        codes = nearest(levels, parts[MAP])[: count + count % 2]
        return {CODES: arithmetic.in_halves(codes, high_first=True), **made}

    def _scale(self, parts: Parts) -> Tensor:
        """Return the scale of each block; InvalidPart if one is negative or not finite, or for a bad map."""
        scale = parts[ABSMAX]
        for table in (parts[role] for role in (MAP, NESTED_MAP) if role in parts):
            low, high = table.min().item(), table.max().item()
            if not -inf < low < high < inf:  # NaN too
                raise InvalidPart("a number of a map is not finite, or all of them are the same")
        if self.nested:
            spread = parts[NESTED].repeat_interleave(self.nested)[: len(scale)]
            scale = parts[NESTED_MAP][scale.int()] * spread + self.offset
        if not bool(scale.isfinite().all()) or (not self.nested and bool((scale < 0).any())):
            raise InvalidPart("a scale is negative or not a finite number")
        return scale

    def _fitted(
        self, old: Tensor, largest: Tensor, refit: Tensor, cover: float, parts: Parts
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return scales as stored and as numbers: the old ones where they cover the numbers, else new ones."""
        import torch
        from torch.nn.functional import pad

        from .nearest import nearest

        wanted = torch.where(refit, largest, old)
        if not self.nested:
            return {ABSMAX: wanted}, wanted
        table, size = parts[NESTED_MAP], self.nested
        shifted = pad(wanted - self.offset, (0, -len(wanted) % size)).view(-1, size)
        top, before = shifted.abs().amax(1), parts[NESTED]
        grown = top > before * table.abs().max()
        outer = torch.where(grown, top, before)
        codes = nearest(shifted / torch.where(outer > 0, outer, inf)[:, None], table)
        stored = pad(parts[ABSMAX], (0, codes.numel() - len(old))).view(codes.shape)
        fresh = pad(refit, (0, codes.numel() - len(old))).view(codes.shape) | grown[:, None]
        codes = torch.where(fresh, codes, stored)
        scale = table[codes.int()] * outer[:, None] + self.offset
        short = fresh & (pad(largest, (0, codes.numel() - len(old))).view(codes.shape) > scale.abs() * cover)
        codes = torch.where(short, (codes.int() + 1).clamp(max=len(table) - 1).to(codes.dtype), codes)
        scale = table[codes.int()] * outer[:, None] + self.offset
        return {ABSMAX: codes.reshape(-1)[: len(old)], NESTED: outer}, scale.reshape(-1)[: len(old)]


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield every weight of bitsandbytes."""
    for state in STATES:
        for name in found.stems(state):
            made = _four_bits(found, name, f"{name}.{state}")
            if made is not None:
                yield made
    for stem in found.stems("SCB"):
        weight, scale, form = found.get(stem, "weight"), found.tensors[f"{stem}.SCB"], found.get(stem, "weight_format")
        if weight is None or weight.dtype != "I8" or scale.shape != weight.shape[:1]:
            continue
        if form is not None and (form.nbytes != 1 or read_bytes(form) != b"\0"):
            continue  # an old order of the numbers, for one kind of device
        of = Stored(weight, scale, "bitsandbytes int8", found.present(stem, "weight_format"))
        if packing := scaled(of, factor=1 / 127, ends=(-127, 127)):
            yield claimed(weight, weight.name, weight.shape, packing)


def _four_bits(found: Checkpoint, name: str, state: str) -> Claim | None:
    """Return the claim of a weight by the JSON that says how it is stored; None where that contradicts the tensors."""
    codes, note = found.tensors.get(name), read_note(found.tensors[state])
    told = note if isinstance(note, dict) else {}
    size, nested, offset = _count(told, "blocksize"), _count(told, "nested_blocksize"), told.get("nested_offset", 0.0)
    shape, doubled = told.get("shape"), "nested_blocksize" in told
    if codes is None or not isinstance(shape, list) or not shape or not all(map(positive, shape)):
        return None
    if not size or (doubled and not nested) or not isinstance(offset, float) or not isfinite(offset):
        return None
    total = prod(shape)
    size = min(size, total + total % 2)  # a larger block, of any size that a file tells, is the whole weight
    blocks = -(-total // size)
    nested = min(nested, blocks)
    wanted = {"absmax": ("U8" if doubled else "F32", blocks), "quant_map": ("F32", 16)}
    wanted |= {"nested_absmax": ("F32", -(-blocks // nested)), "nested_quant_map": ("F32", 256)} if doubled else {}
    tensors = {last: info for last in wanted if (info := found.get(name, last)) is not None}
    same = all((t.dtype, t.shape) == (wanted[last][0], (wanted[last][1],)) for last, t in tensors.items())
    if not same or len(tensors) < len(wanted) or size % 2 or codes.nbytes != -(-total // 2):
        return None
    units = {"absmax": (size, 1 if doubled else 4), "nested_absmax": (size * nested, 4)}
    parts = {ROLES[last]: Part(info, *units.get(last, (0, 0))) for last, info in tensors.items()}
    label = f"bitsandbytes {told.get('quant_type', '4-bit')}"
    encoding = Bnb4.shared((2, 1), size * (nested or 1), size=size, nested=nested, offset=offset, label=label)
    made = claimed(codes, name, tuple(shape), Packing(encoding, codes, parts, frozenset({state})))
    return made._replace(weight=replace(made.weight, dtype="U8"))  # the codes may be stored as another dtype


def _count(told: Mapping[str, Any], key: str) -> int:
    """Return a positive whole number of the JSON; 0 for anything else."""
    number = told.get(key)
    return number if positive(number) else 0
