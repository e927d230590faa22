"""Moves tensors between devices, and casts them; no other module does, which a test checks.

For blocks, `stage` brings the inputs of a formula to one placement, and `land` the results back, with one rounding. For
whole windows of a GPU, `upload` and `download` carry bytes, and `cast_all` casts many blocks with one operation. For
samples, `take` and `as_stored` copy and round rows where they are. Finite values that are too large for the new dtype
are seen on the way (`odd`, `extremes`), and counted or refused (`settle`). A `DeviceStream` is one thread's lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms.base import expect
from ..dtypes import COMPUTE_DTYPES, DTYPE_ROWS, DTYPES, FLOATS
from ..errors import TooLarge
from ..files.encodings.arithmetic import unpacked

EIGHT: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, row.library)
    for name, row in DTYPE_ROWS.items()
    if row.bits >= 8 and name != "F8_E8M0"  # older versions of torch lack this dtype
}
FILE_DTYPES: Final = {v: k for k, v in TORCH_DTYPES.items()}

OVERFLOW_LIMITS: Final = {TORCH_DTYPES[name]: DTYPE_ROWS[name].room for name in FLOATS}
"""Dtype → the largest number that still rounds to a finite one."""

INFINITY: Final = {
    torch.float16: (torch.int16, 0x7C00), torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52),
}  # fmt: skip
"""Dtype → integer dtype of its width, and the bits of infinity: bits of NaN are larger, of finite values smaller."""

SUSPECT_BYTES: Final = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7C}
"""8-bit dtype → the smallest bits, without the sign, of a number that may have been too large: 448 itself in e4m3, for
which some versions of torch cut such values to 448 and others write NaN."""

WIDER: Final = ("bf16", "fp32")
"""Values of `--dtype` that an error recommends if another dtype is too small, the narrowest first."""

CAST_VALUES: Final = 2**18  # values that are cast at once; more would leave the caches before they are checked

CACHE_LINE: Final = 64  # bytes

FULL_DEVICES: Final = {"cpu", "cuda"}
COMMON_DTYPES: Final = {torch.float32, torch.float16, torch.bfloat16}
"""Kinds of devices that have all dtypes and operations, and the dtypes that all others have: Metal has no fp64, no fp8
and not all decompositions, XPUs differ. The host casts the other dtypes."""


@cache
def rounds_to_eight_bits(device: torch.device) -> bool:
    """Return whether a CUDA device casts fp32 and bf16 to 8-bit floats as the host does; True for other devices.

    In torch for CUDA 13.2 and later some of these casts gave NaN or other values (pytorch#177769, pytorch#177870).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    every = (upper << 16).view(torch.float32)  # every number of bf16
    try:
        for dtype in EIGHT:
            values = every[every.abs() <= torch.finfo(dtype).max]
            for source in (torch.float32, torch.bfloat16):
                cast = _cast(values, source)
                on_device = torch.empty_like(cast, device=device).copy_(cast)
                codes = _cast(on_device, dtype).view(torch.uint8)
                on_host = torch.empty(codes.shape, dtype=codes.dtype, device="cpu").copy_(codes)
                if not torch.equal(on_host, _cast(cast, dtype).view(torch.uint8)):
                    return False
    except RuntimeError:  # such as no memory: the host casts then
        return False
    return True


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(values, dtype=dtype).copy_(values)


@dataclass(frozen=True)
class Placement:
    """The device and the dtype in which formulas are computed."""

    device: torch.device
    dtype: torch.dtype


HOST: Final = Placement(torch.device("cpu"), torch.float64)


def queues(device: torch.device) -> bool:
    """Return whether a device has streams; fake tensors may be on cuda on a machine without it."""
    return device.type == "cuda" and torch.cuda.is_available()


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return the stream of a device's n-th lane, the same for all merges of a process: cuBLAS keeps a workspace (32 MiB
    on an H100) for every stream that it has used, and torch gives out 32 streams in turn."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceStream:
    """One thread's lane to a device: host memory that is reused for every block, and on CUDA a stream of its own.

    A new tensor for every block costs as much as the cast into it, as the system zeroes its pages. On CUDA, one lane
    uploads while a second one computes and a third one downloads; such transfers need pinned memory.
    """

    def __init__(self, at: Placement, number: int = 0) -> None:
        self.at = at
        self.stream = _stream(at.device, number) if queues(at.device) else None
        self._memory: dict[str, Tensor] = {}
        self._in_use: list[Tensor] = []
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Queue a block's operations on the lane's stream, after those of the caller, and wait for them at its end."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.at.device))  # it may still compute the inputs
        # At its end, the stream's context alone would start the thread's default device: half a GB of memory of GPU 0.
        with torch.cuda.device(self.at.device), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.settle()
                self._in_use.clear()

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor that another lane may have made, and keep it until the end of the turn: if it were freed
        while this lane's operations on it are queued, the other lane could overwrite its memory."""
        if self.stream:
            self._in_use.append(tensor)
        return tensor

    def settle(self) -> None:
        """Wait for all queued operations, so that other lanes may use their results.

        The thread sleeps meanwhile: if it waits for the stream itself, CUDA keeps a core busy.
        """
        if self.stream:
            self._done = self._done or torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record(self.stream)
            self._done.synchronize()

    def host(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised [shape] on the host; it shares memory with earlier results for the same use."""
        count, old = prod(shape), self._memory.get(use)
        if old is None or old.numel() < count or old.dtype != dtype:
            old = self._memory[use] = _pinned(count, dtype) if self.stream else torch.empty(count, dtype=dtype)
        return old[:count].view(*shape)

    def give_back(self, use: str) -> None:
        """Give up the host's memory for this use."""
        self._memory.pop(use, None)


def _pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised [count] in pinned memory, or in other memory, with slower copies, if there is none left."""
    try:
        return torch.empty(count, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=dtype)


def stage(tensors: Sequence[Tensor], at: Placement, lane: DeviceStream | None = None) -> Tensor:
    """Return the tensors stacked [n, …] on the compute device, with one copy for each; they are cast after the transfer
    if the device can, as they are smaller before.

    With a lane, the next call overwrites its memory: the result on a CPU, the buffer for the upload on CUDA.
    """
    shape = (len(tensors), *tensors[0].shape)
    if at.device.type == "cpu":
        out = lane.host("values", shape, at.dtype) if lane else torch.empty(shape, dtype=at.dtype)
    elif lane is None or lane.stream is None or tensors[0].device == at.device:
        widened = [t if holds(at.device, t.dtype) else t.to(at.dtype) for t in tensors]
        moved = [t.to(at.device).to(at.dtype) for t in widened]
        alone = len(moved) == 1 and moved[0] is not tensors[0] and moved[0].is_contiguous()
        return moved[0].unsqueeze(0) if alone else torch.stack(moved)
    else:
        out = lane.host("up", shape, tensors[0].dtype)
    for slot, tensor in zip(out.unbind(), tensors, strict=True):
        moved_tensor = tensor.to(out.device)
        slot.copy_(unpacked(moved_tensor) if lane and lane.stream is None else moved_tensor)
    return out if at.device.type == "cpu" else out.to(at.device, non_blocking=True).to(at.dtype)


def aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins where torch's own memory does: at a cache line of a CPU, whose libraries may round
    by where tensors begin. Other devices have memory of their own."""
    return tensor.device.type != "cpu" or tensor.data_ptr() % CACHE_LINE == 0


def move(tensors: Any, at: Placement) -> Any:
    """Return a copy of a named tuple with its tensors at the placement."""
    staged = {name: stage([v], at).squeeze(0) for name, v in tensors._asdict().items() if isinstance(v, Tensor)}
    return tensors._replace(**staged)


def stage_indices(tensors: Sequence[Tensor], at: Placement) -> Tensor:
    """Return the tensors stacked [n, …] as int64 on the compute device."""
    return torch.stack([t.to(torch.int64).to(at.device) for t in tensors])


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor as int64 on the CPU; DoesNotFit if it holds a number that is not whole."""
    integers = tensor.to("cpu", torch.int64)
    same = not tensor.is_floating_point() or bool((integers == tensor.cpu().double()).all())
    expect(holds=same, otherwise="stored indices are not whole numbers")
    return integers


def as_scalars(values: Sequence[float], at: Placement) -> Tensor:
    """Return the values as [n, 1, 1] at the placement."""
    return torch.tensor(values, dtype=at.dtype, device=at.device).reshape(-1, 1, 1)


def one_number(value: float, at: Placement) -> Tensor:
    """Return a number without axes on the host, which tensors of any device can be multiplied by."""
    return torch.tensor(value, dtype=at.dtype)


def land(merged: Tensor, into: Sequence[Tensor], lane: DeviceStream | None = None) -> bool:
    """Write merged [n, …] into n tensors, with one transfer for all and one cast, on the device if it can.

    The tensors are on the host, or on the device of `merged`: then nothing is transferred.

    Returns False if a number may be too large for the dtype, as `convert` does; the check is made where the cast is.
    """
    dtype, merged, sound = into[0].dtype, merged.detach(), True
    if merged.device.type != "cpu":
        if holds(merged.device, dtype):
            merged = castable(merged, dtype).to(dtype)
            sound = not odd(merged)
        if all(target.device == merged.device for target in into):
            pass
        elif lane is None or lane.stream is None:
            merged = merged.cpu()
        else:
            merged = lane.host("down", merged.shape, merged.dtype).copy_(merged, non_blocking=True)
            lane.settle()
        if merged.dtype == dtype:
            for target, source in zip(into, merged.unbind(), strict=True):
                target.copy_(source)
            return sound
    return all([convert(source, target, sums=True) for target, source in zip(into, merged.unbind(), strict=True)])


def convert(source: Tensor, into: Tensor, *, sums: bool = False) -> bool:
    """Cast a host tensor into another of the same shape, in pieces that stay in the caches.

    Returns False if a number may have been too large for the dtype, or was NaN or infinite before; see `beyond`.
    `sums`: whether to check also if the dtype is wide enough for the source's, as sums may have overflowed.
    """
    sound, looks = True, sums or not fits(source.dtype, into.dtype)
    for old, new in pieces(source, into):
        new.copy_(castable(old, into.dtype))
        sound = sound and not (looks and odd(new))
    return sound


def pieces(source: Tensor, into: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors of one shape in pieces of a few rows."""
    rows = max(1, CAST_VALUES * len(source) // max(source.numel(), 1))
    for first in range(0, len(source), rows):
        yield source[first : first + rows], into[first : first + rows]


def fits(old: torch.dtype, new: torch.dtype) -> bool:
    """Return whether every finite number of one float dtype is, once rounded, a finite one of another."""
    return torch.finfo(old).max <= OVERFLOW_LIMITS[new]


def odd(tensor: Tensor) -> bool:
    """Return whether a number may have been too large for its dtype; never False if one was.

    Looks at bits alone. A sum shows NaN and infinity at a fortieth of what isfinite() costs on a CPU; if it
    overflows by itself, the largest bits decide, at a tenth.
    """
    if not tensor.numel():
        return False
    if tensor.dtype in SUSPECT_BYTES:
        positive, negative = (int(tensor.view(kind).max().item()) for kind in (torch.int8, torch.uint8))
        return max(positive, negative - 128) >= SUSPECT_BYTES[tensor.dtype]
    if isfinite(tensor.sum().item()):
        return False
    kind, infinite = INFINITY[tensor.dtype]
    return int((tensor.view(kind) & torch.iinfo(kind).max).max().item()) >= infinite


def beyond(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask, on the host, of the finite values that are too large for the dtype, and of infinite values if
    the dtype has no infinity."""
    size = tensor.detach().cpu().double().abs()
    over = size > OVERFLOW_LIMITS[dtype]
    return over if dtype == torch.float8_e4m3fn else over & (size < inf)


def cut(source: Tensor, into: Tensor, over: Tensor) -> None:
    """Cast a host tensor into another dtype; values that are too large become the largest value of the dtype."""
    limit = torch.finfo(into.dtype).max
    into.copy_(castable(torch.where(over, source.double().clamp(-limit, limit), source.double()), into.dtype))


def settle(name: str, source: Tensor, into: Tensor, *, saturate: bool) -> int:
    """Cut the values of a host tensor, cast `into` another dtype, that are too large for it; return how many.

    Without `saturate`, TooLarge is raised instead, with the tensor's name. NaN stays NaN. Infinite values stay
    infinite, except in e4m3: it has no infinity, so they are too large.
    """
    total = 0
    for old, new in pieces(source, into):
        over = beyond(old, into.dtype)
        if count := int(over.sum()):
            if not saturate:
                raise _too_large(name, old[over], into.dtype)
            cut(old, new, over)
        total += count
    return total


def _too_large(name: str, values: Tensor, dtype: torch.dtype) -> TooLarge:
    largest = max(values.tolist(), key=abs)
    wider = next((option for option in WIDER if abs(largest) <= OVERFLOW_LIMITS[TORCH_DTYPES[DTYPES[option]]]), "keep")
    return TooLarge(f"a number is too large for {_called(dtype)}: {largest:g}", name,
                    f"write `--dtype {wider}`, or `--on-overflow saturate` to cut such values to the largest"
                    )  # fmt: skip


def sum_too_large(name: str, dtype: torch.dtype) -> TooLarge:
    """Return the error for a merged tensor with a sum that overflowed in the compute dtype, so its value is lost."""
    wider = {torch.float16: "fp32", torch.float64: ""}.get(dtype, "fp64")
    fix = f"write `--compute-dtype {wider}`, or lower the strength" if wider else "lower the strength"
    return TooLarge(f"a merged value is too large for {_called(dtype)}, the compute dtype", name, fix)


def _called(dtype: torch.dtype) -> str:
    """Return the name of a dtype on the command line."""
    return {stored: option for option, stored in (DTYPES | COMPUTE_DTYPES).items()}[FILE_DTYPES[dtype]]


def finite(tensor: Tensor) -> Tensor:
    """Return a mask, on the host, of the finite values of a tensor of any float dtype."""
    return tensor.detach().cpu().double().isfinite()


def host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor detached, contiguous, on the CPU; it shares its data with the input if it can.

    A lazily negated tensor is negated, as its memory holds the opposite values.
    """
    tensor = tensor.detach().cpu().resolve_neg()
    dtype = dtype or tensor.dtype
    return castable(tensor, dtype).to(dtype).contiguous()


def holds(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device has a dtype, with correct casts."""
    wide = dtype.itemsize > 1 or not dtype.is_floating_point
    return dtype in COMMON_DTYPES or (device.type in FULL_DEVICES and (wide or rounds_to_eight_bits(device)))


def castable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in a dtype from which torch's cast rounds correctly, and fast: fp16 to fp8 through fp32 takes
    a fifth of the time."""
    if tensor.dtype == torch.float16 and dtype.itemsize == 1:
        return tensor.float()
    if tensor.dtype.itemsize == 1 < dtype.itemsize:
        return unpacked(tensor)
    if tensor.dtype != torch.float64 or not dtype.is_floating_point or dtype.itemsize > 2:
        return tensor
    # torch casts fp64 to 16 and 8 bits through fp32, which rounds twice: about one number in 2**13 is rounded wrongly.
    # That is cured by rounding to odd in fp32: towards zero, with the last bit set if anything was cut off.
    single = tensor.float()
    bits, back = single.view(torch.int32), single.double()
    bits -= (back.abs() > tensor.abs()).to(torch.int32)
    bits |= (back != tensor).to(torch.int32)
    return single


def upload(host: Tensor, lane: DeviceStream, piece: int) -> Tensor:
    """Return bytes of the host on the lane's device; the transfer is only queued. With a `piece` of 0, it is one, and
    the device reads the memory itself; else the bytes go through pinned memory, so many at once."""
    if not piece or lane.stream is None:
        return host.to(lane.at.device, non_blocking=True)
    on_device = torch.empty_like(host, device=lane.at.device)
    for number, first in enumerate(range(0, len(host), piece)):
        if number > 1:
            lane.settle()  # the last transfer from this half
        part = host[first : first + piece]
        pinned = lane.host(f"piece {number % 2}", part.shape, part.dtype).copy_(part)
        on_device[first : first + piece].copy_(pinned, non_blocking=True)
    return on_device


def download(on_device: Tensor, host: Tensor, lane: DeviceStream, piece: int) -> None:
    """Queue a copy of bytes of the device to the host, or make it through pinned memory; `piece` as in `upload`."""
    if not piece or lane.stream is None:
        host.copy_(on_device, non_blocking=lane.stream is not None)
        return
    for first in range(0, len(host), piece):
        part = host[first : first + piece]
        pinned = lane.host("piece 0", part.shape, part.dtype).copy_(on_device[first : first + piece], non_blocking=True)
        lane.settle()
        part.copy_(pinned)


def cast_all(sources: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Cast tensors into others of the same shapes and of one device, with one operation for each pair of dtypes.

    Values are rounded once, to the nearest; see `rounded` for fp64.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, into, strict=True):
        pair = kinds.setdefault((source.dtype, target.dtype), ([], []))
        pair[0].append(source)
        pair[1].append(target)
    for (old, new), (sources_of_kind, into_of_kind) in kinds.items():
        if len(into_of_kind) > 1 and {old, new} <= INFINITY.keys():
            torch._foreach_copy_(into_of_kind, sources_of_kind)
        else:  # one tensor, or 8-bit values
            for source, target in zip(sources_of_kind, into_of_kind, strict=True):
                target.copy_(source)


class Gather:
    """Copies on a device that are made together."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._into: list[Tensor] = []

    def add(self, source: Tensor, into: Tensor) -> None:
        """Plan a copy, with a cast if the dtypes differ."""
        self._sources.append(source)
        self._into.append(into)

    def stacked(self, parts: list[Tensor]) -> Tensor:
        """Return n tensors of equal shape as one [n, …], which has its values after `run`."""
        out = parts[0].new_empty((len(parts), *parts[0].shape))
        for part, slot in zip(parts, out.unbind(), strict=True):
            self.add(part, slot)
        return out

    def run(self) -> None:
        """Make the copies."""
        cast_all(self._sources, self._into)


def extremes(work: Tensor, lane: DeviceStream, number: int = 0) -> Tensor:
    """Return the smallest and the largest number, NaN if there is a NaN, in memory of the host that holds them once the
    lane is settled; the next call with the same `number` overwrites them."""
    ends = work.new_empty(2)
    torch.aminmax(work, out=(ends[0], ends[1]))
    return brought(ends, lane, f"extremes {number}")


def brought(values: Tensor, lane: DeviceStream, use: str) -> Tensor:
    """Return values in memory of the host that holds them once the lane is settled; the next call for the same use and
    dtype overwrites them."""
    if lane.stream is None or values.device.type == "cpu":
        return values.cpu()
    return lane.host(f"{use} {values.dtype}", values.shape, values.dtype).copy_(values, non_blocking=True)


def fit(ends: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values between two `extremes` are finite, and finite once they are rounded to a dtype."""
    return all(abs(number) <= OVERFLOW_LIMITS[dtype] for number in ends.tolist())


def workspace(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros on the device of other values, in a dtype in which sums of squares keep their digits."""
    return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def strided(values: Tensor, rows: range) -> Tensor:
    """Return rows [n, k, cols] of each block [n, rows, cols]. The range begins at 0, and its end is a multiple of its
    step."""
    return values.narrow(1, 0, rows.stop).view(len(values), len(rows), rows.step, -1).select(2, 0)


def take(taken: Tensor, into: Tensor) -> None:
    """Copy rows [n, k, cols] to the beginning of [n, width]."""
    slot = into.narrow(1, 0, taken.shape[1] * taken.shape[2]).view(taken.shape)
    if taken.device == slot.device:
        torch.mul(taken, 1, out=slot)  # a copy between tensors of one device that fakes of a GPU can make too
    else:
        slot.copy_(taken)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values as an output of another dtype holds them, in their own dtype and place. Those that are too
    large become infinite or NaN."""
    if dtype.itemsize >= values.dtype.itemsize:
        return values
    ready = castable(values, dtype)
    if holds(values.device, dtype):
        return ready.to(dtype).to(values.dtype)
    return ready.cpu().to(dtype).to(values.dtype).to(values.device)
