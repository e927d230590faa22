"""The only module that moves or casts a tensor; and what becomes of finite numbers that the new dtype has no room for.

Everything that meets in one formula is brought to one place by `stage`; results leave it once, by `land`. A test
holds the rest of the project to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf, isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms.base import expect
from ..dtypes import COMPUTE_DTYPES, DTYPES, FLOATS, TABLE
from ..errors import TooLarge

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, row.library)
    for name, row in TABLE.items()
    if row.bits >= 8 and name != "F8_E8M0"  # of exponents, which older versions of torch lack
}
FILE_DTYPES: Final = {v: k for k, v in TORCH_DTYPES.items()}

ROOM: Final = {TORCH_DTYPES[name]: TABLE[name].room for name in FLOATS}
"""Dtype → the largest number that still rounds to a finite one."""

PATTERNS: Final = {
    torch.float16: (torch.int16, 0x7C00), torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52),
}  # fmt: skip
"""Dtype → integers of its width, and the bits of infinity. Those of NaN are larger, those of all numbers smaller."""

BYTES: Final = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7C}
"""8-bit dtype → the bits, without the sign, from which a number may be one that did not fit: 448 itself of e4m3, where
some versions of torch cut and others write NaN."""

WIDER: Final = ("bf16", "fp32")
"""Values of `--dtype` that are recommended where another has no room, the narrowest first."""

PIECE: Final = 2**18  # numbers that are cast at once; more would leave the caches before they are looked at again

WHOLE: Final = {"cpu", "cuda"}
PLAIN: Final = {torch.float32, torch.float16, torch.bfloat16}
"""Devices that hold and compute everything, and what the others hold: Metal has no fp64, no fp8, and not all
decompositions, XPUs differ. What they do not hold, the host casts."""


@dataclass(frozen=True)
class Placement:
    """Where and how exactly the formulas are computed."""

    device: torch.device
    dtype: torch.dtype


def _queues(device: torch.device) -> bool:
    """Return whether work is queued on streams there. Fake tensors know cuda where there is none."""
    return device.type == "cuda" and torch.cuda.is_available()


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return the stream of a device's n-th lane, the same for all merges of a process: cuBLAS keeps a workspace for
    every stream that it has seen, of 32 MiB on an H100, and torch has 32 to hand out in turn."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceStream:
    """One thread's way to a device: memory that is kept from block to block, and on CUDA a stream of its own.

    A new tensor for every block costs as much again as the cast into it: the system zeroes its pages. On CUDA, one
    lane's bytes go up while another computes and a third's come down; transfers need pinned memory for that.
    """

    def __init__(self, at: Placement, number: int = 0) -> None:
        self.at = at
        self.stream = _stream(at.device, number) if _queues(at.device) else None
        self._memory: dict[str, Tensor] = {}
        self._held: list[Tensor] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is done inside is queued on the lane's stream, after what the caller has queued, and done at the end."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.at.device))  # it may be making the tensors given to us
        # Out of its turn, the stream alone would go back to the thread's device, and start that up: half a GB of GPU 0.
        with torch.cuda.device(self.at.device), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.settle()
                self._held.clear()

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor that another lane may have made, kept until the turn is over: were it freed while this
        lane's work on it is queued, its memory would go to what the other one makes next."""
        if self.stream:
            self._held.append(tensor)
        return tensor

    def settle(self) -> None:
        """Wait until what is queued is done, so that other lanes may use it."""
        if self.stream:
            self.stream.synchronize()

    def host(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised [shape] on the host; what an earlier call gave for this use is overwritten."""
        count, old = prod(shape), self._memory.get(use)
        if old is None or old.numel() < count or old.dtype != dtype:
            old = self._memory[use] = _pinned(count, dtype) if self.stream else torch.empty(count, dtype=dtype)
        return old[:count].view(*shape)


def _pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised [count] in pinned memory; where the system gives none of it, in any, which copies wait
    for.
    """
    try:
        return torch.empty(count, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=dtype)


def stage(tensors: Sequence[Tensor], at: Placement, lane: DeviceStream | None = None) -> Tensor:
    """Return [n, …] on the compute device; one copy per tensor, cast after the transfer (fewer bytes to move) where it
    can be.

    With a lane, its memory is used: the result on a CPU, and the way there on CUDA, are overwritten by the next call.
    """
    shape = (len(tensors), *tensors[0].shape)
    if at.device.type == "cpu":
        out = lane.host("values", shape, at.dtype) if lane else torch.empty(shape, dtype=at.dtype)
    elif lane is None or lane.stream is None or tensors[0].device == at.device:
        held = [t if _holds(at.device, t.dtype) else t.to(at.dtype) for t in tensors]
        there = [t.to(at.device).to(at.dtype) for t in held]
        alone = len(there) == 1 and there[0] is not tensors[0] and there[0].is_contiguous()
        return there[0].unsqueeze(0) if alone else torch.stack(there)
    else:
        out = lane.host("up", shape, tensors[0].dtype)
    for slot, tensor in zip(out.unbind(), tensors, strict=True):
        slot.copy_(tensor.to(out.device))
    return out if at.device.type == "cpu" else out.to(at.device, non_blocking=True).to(at.dtype)


def move(tensors: Any, at: Placement) -> Any:
    """Return a dataclass with its tensors at the placement."""
    held = {f.name: getattr(tensors, f.name) for f in fields(tensors)}
    return replace(tensors, **{k: stage([v], at).squeeze(0) for k, v in held.items() if isinstance(v, Tensor)})


def stage_indices(tensors: Sequence[Tensor], at: Placement) -> Tensor:
    """Return [n, …] int64 on the compute device."""
    return torch.stack([t.to(torch.int64).to(at.device) for t in tensors])


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor as int64 on the CPU; DoesNotFit for one of numbers that are not whole."""
    found = tensor.to("cpu", torch.int64)
    same = not tensor.is_floating_point() or bool((found == tensor.cpu().double()).all())
    expect(holds=same, otherwise="stored indices are no whole numbers")
    return found


def numbers(values: Sequence[float], at: Placement) -> Tensor:
    """Return [n, 1, 1] at the placement."""
    return torch.tensor(values, dtype=at.dtype, device=at.device).reshape(-1, 1, 1)


def land(merged: Tensor, into: Sequence[Tensor], lane: DeviceStream | None = None) -> bool:
    """Write merged [n, …] into n host tensors: detached, one transfer for all, cast once, before it where the device
    can. Returns whether every number found its place for certain, as `convert` does; a device looks for itself."""
    dtype, merged, sound = into[0].dtype, merged.detach(), True
    if merged.device.type != "cpu":
        if _holds(merged.device, dtype):
            merged = _ready(merged, dtype).to(dtype)
            sound = not odd(merged)
        if lane is None or lane.stream is None:
            merged = merged.cpu()
        else:
            merged = lane.host("down", merged.shape, merged.dtype).copy_(merged, non_blocking=True)
            lane.stream.synchronize()
        if merged.dtype == dtype:
            for target, source in zip(into, merged.unbind(), strict=True):
                target.copy_(source)
            return sound
    return all([convert(source, target, sums=True) for target, source in zip(into, merged.unbind(), strict=True)])


def convert(source: Tensor, into: Tensor, *, sums: bool = False) -> bool:
    """Cast a host tensor into another of the same shape, a piece at a time: it stays in the caches.

    Returns False where a number may have been too large for the dtype, or was NaN or infinite before: `beyond` tells.
    `sums`: also where the dtype has room for all numbers of the source's, as those may have overflown themselves.
    """
    sound, looks = True, sums or not fits(source.dtype, into.dtype)
    for old, new in pieces(source, into):
        new.copy_(_ready(old, into.dtype))
        sound = sound and not (looks and odd(new))
    return sound


def pieces(source: Tensor, into: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of two tensors of one shape, a few at a time."""
    rows = max(1, PIECE * len(source) // max(source.numel(), 1))
    for first in range(0, len(source), rows):
        yield source[first : first + rows], into[first : first + rows]


def fits(old: torch.dtype, new: torch.dtype) -> bool:
    """Return whether every finite number of one float dtype is, once rounded, a finite one of another."""
    return torch.finfo(old).max <= ROOM[new]


def odd(tensor: Tensor) -> bool:
    """Return whether a number may have been too large for its dtype; never False where one was.

    Looks at bits alone. A sum shows NaN and infinity at a fortieth of what isfinite() costs on a CPU; where it
    overflows by itself, the largest bits decide, at a tenth.
    """
    if not tensor.numel():
        return False
    if tensor.dtype in BYTES:
        positive, negative = (int(tensor.view(kind).max().item()) for kind in (torch.int8, torch.uint8))
        return max(positive, negative - 128) >= BYTES[tensor.dtype]
    if isfinite(tensor.sum().item()):
        return False
    kind, infinite = PATTERNS[tensor.dtype]
    return int((tensor.view(kind) & torch.iinfo(kind).max).max().item()) >= infinite


def beyond(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """bool, on the host: which finite numbers the dtype has no room for; infinite ones too where it has no infinity."""
    size = tensor.detach().cpu().double().abs()
    over = size > ROOM[dtype]
    return over if dtype == torch.float8_e4m3fn else over & (size < inf)


def cut(source: Tensor, into: Tensor, over: Tensor) -> None:
    """Cast a host tensor into another, with the largest number of its dtype where it has no room for one."""
    limit = torch.finfo(into.dtype).max
    into.copy_(_ready(torch.where(over, source.double().clamp(-limit, limit), source.double()), into.dtype))


def settle(name: str, source: Tensor, into: Tensor, *, saturate: bool) -> int:
    """Look at every number of a host tensor that was cast `into` another dtype: those without room there are cut.

    Returns how many. TooLarge, which names the tensor, unless `saturate`. NaN stays NaN, and infinite numbers stay
    infinite but in e4m3, which has none: there they are too large like others.
    """
    total = 0
    for old, new in pieces(source, into):
        over = beyond(old, into.dtype)
        count = int(over.sum())
        if count and not saturate:
            raise _too_large(name, old[over], into.dtype)
        if count:
            cut(old, new, over)
        total += count
    return total


def _too_large(name: str, values: Tensor, dtype: torch.dtype) -> TooLarge:
    largest = max(values.tolist(), key=abs)
    wider = next((option for option in WIDER if abs(largest) <= ROOM[TORCH_DTYPES[DTYPES[option]]]), "keep")
    return TooLarge(f"a number is too large for {_called(dtype)}: {largest:g}", name,
                    f"write --dtype {wider}, or --on-overflow saturate to cut such numbers to the largest")  # fmt: skip


def sum_too_large(name: str, dtype: torch.dtype) -> TooLarge:
    """Return the error for a merged tensor whose sum overflowed in the compute dtype: what it should be is not
    known.
    """
    wider = {torch.float16: "fp32", torch.float64: ""}.get(dtype, "fp64")
    fix = f"write --compute-dtype {wider}, or lower the strength" if wider else "lower the strength"
    return TooLarge(f"a merged value is too large for {_called(dtype)}, the compute dtype", name, fix)


def _called(dtype: torch.dtype) -> str:
    """Return the dtype as options call it."""
    names = {stored: option for option, stored in (DTYPES | COMPUTE_DTYPES).items()}
    return names[FILE_DTYPES[dtype]]


def finite(tensor: Tensor) -> Tensor:
    """bool, on the host: which numbers are neither NaN nor infinite, of any float dtype."""
    return tensor.detach().cpu().double().isfinite()


def host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor detached, contiguous, on the CPU; the same object's data where it is that already.

    Bits of a lazy negation are the opposite of its values, and those are what programs write to files.
    """
    tensor = tensor.detach().cpu().resolve_neg()
    dtype = dtype or tensor.dtype
    return _ready(tensor, dtype).to(dtype).contiguous()


def _holds(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in PLAIN or device.type in WHOLE


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a form that one cast rounds correctly, and that torch casts fast: fp16 to fp8 by way of
    fp32 takes a fifth of the time."""
    if tensor.dtype == torch.float16 and dtype.itemsize == 1:
        return tensor.float()
    if tensor.dtype != torch.float64 or not dtype.is_floating_point or dtype.itemsize > 2:
        return tensor
    # torch casts fp64 to 16 and 8 bits by way of fp32, which rounds twice: about one number in 2**13 ends on the
    # wrong side. Rounded to odd in fp32 (towards zero, and the last bit says that something was cut off), it does not.
    single = tensor.float()
    bits, back = single.view(torch.int32), single.double()
    bits -= (back.abs() > tensor.abs()).to(torch.int32)
    bits |= (back != tensor).to(torch.int32)
    return single
