"""Values of few bits in torch: decoded by tables, encoded with one rounding. Imported when weights are decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from math import isfinite
from typing import TYPE_CHECKING, Final, ParamSpec

import torch

from ...dtypes import DTYPE_ROWS
from .base import InvalidPart, OutOfRange

if TYPE_CHECKING:
    from torch import Tensor

FLOAT_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8_DTYPES: Final = {name: getattr(torch, DTYPE_ROWS[name].library) for name in ("F8_E4M3", "F8_E5M2")}
Arguments = ParamSpec("Arguments")

CACHED_TABLES: Final[list[Callable[[], None]]] = []
"""Functions that forget the tables, for tests of devices."""

SAFE_SCALE: Final = 2.0**100
"""The scale below which no power of two that it is multiplied by overflows."""

LARGEST_BYTE: Final = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""Dtype → byte of the largest number, without its sign."""

MAGNITUDE: Final = 0x7FFFFFFF
"""The bits of fp32 without the sign."""

BYTE: Final = torch.uint8

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each 4-bit code."""


def cached_table(make: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """Keep the last tensors that a function makes. They are made on the CPU and copied to torch's default device, which
    is the one on which encodings compute."""

    @lru_cache(maxsize=64)
    def cached(device: torch.device, *arguments: Arguments.args, **named: Arguments.kwargs) -> Tensor:
        with torch.device("cpu"):
            tensor = make(*arguments, **named)
        return tensor if device.type == "cpu" else torch.empty_like(tensor, device=device).copy_(tensor)

    @wraps(make)
    def table(*arguments: Arguments.args, **named: Arguments.kwargs) -> Tensor:
        return cached(torch.get_default_device(), *arguments, **named)  # type: ignore[arg-type]

    CACHED_TABLES.append(cached.cache_clear)
    return table


@cached_table
def byte_values(dtype: str) -> Tensor:
    """Return the number of each byte of a dtype, in fp32."""
    return torch.arange(256, dtype=torch.uint8).view(getattr(torch, DTYPE_ROWS[dtype].library)).float()


def from_fp8(codes: Tensor, dtype: str, scale: float = 1.0, last: int | None = None) -> Tensor:
    """Return the values of bytes times a scale, in fp32. `last`: the largest byte without its sign, where it is known.

    A table takes a fifth of the time of torch's cast. On a CPU, fp16 takes half of that again: it has the same fields,
    only wider, but in e4m3 other bits for NaN.
    """
    raw = codes.reshape(-1).view(torch.int8)
    if raw.device.type == "cpu" and dtype == "F8_E5M2":
        return _times(raw.to(torch.int16).mul_(256).view(torch.float16).float(), scale)
    if raw.device.type == "cpu" and raw.numel() and (last_byte(raw) if last is None else last) < 0x7F:
        signed = raw.to(torch.int16).mul_(128).bitwise_and_(~0x4000)  # the sign is in bits 14 and 15
        wide = signed.view(torch.float16).float()  # the exponents' biases are 15 and 7
        return _times(wide, 256.0 * scale) if scale < SAFE_SCALE else wide.mul_(256.0).mul_(scale)
    return _times(byte_values(dtype).index_select(0, raw.view(torch.uint8).int()), scale)


def unpacked(values: Tensor) -> Tensor:
    """Return plain fp8 values on a CPU in fp32, in a twelfth of the time of torch's cast; others as they are, as those
    with NaN, whose bits torch's cast keeps."""
    name = next((name for name, dtype in FP8_DTYPES.items() if values.dtype == dtype), "")
    if not name or values.device.type != "cpu" or (last := last_byte(values.reshape(-1))) > LARGEST_BYTE[name]:
        return values
    return from_fp8(values, name, last=last).view(values.shape)


def _times(values: Tensor, scale: float) -> Tensor:
    return values if scale == 1 else values.mul_(scale)


def last_byte(raw: Tensor) -> int:
    """Return the largest byte of fp8 values, without the sign."""
    if not raw.numel():
        return 0
    return max(int(raw.view(torch.int8).max()), int(raw.view(torch.uint8).max()) - 128)


def to_fp8(values: Tensor, dtype: str) -> Tensor | None:
    """Return the nearest fp8 values as bytes, ties to even; None if one rounds to one beyond the range, or is
    NaN."""
    codes = single(values).to(FP8_DTYPES[dtype]).view(torch.uint8)
    # The bytes are looked at first, at a quarter of the cost: versions of torch differ in what they write beyond.
    if last_byte(codes) < LARGEST_BYTE[dtype]:
        return codes
    ends = float(values.amin()), float(values.amax())  # abs() takes half as long again
    return codes if max(-ends[0], ends[1]) <= DTYPE_ROWS[dtype].room else None


def cut_to_fp8(values: Tensor, dtype: str) -> Tensor:
    """Return the nearest fp8 values as bytes; values beyond the range become the largest."""
    floats, limit = single(values), DTYPE_ROWS[dtype].largest
    if values.device.type == "cpu":
        codes = floats.to(FP8_DTYPES[dtype]).view(torch.uint8)
        if last_byte(codes) <= LARGEST_BYTE[dtype]:
            return codes
    return floats.clamp(-limit, limit).to(FP8_DTYPES[dtype]).view(torch.uint8)


def largest(values: Tensor) -> float:
    """Return the largest magnitude of the finite values; 0 if there are none."""
    if not values.numel():
        return 0.0
    low, high = float(values.amin()), float(values.amax())  # aminmax takes half as long again as both
    if isfinite(low) and isfinite(high):
        return max(-low, high)
    return largest(values[values.isfinite()])


def largest_of_each(blocks: Tensor) -> Tensor:
    """Return the largest magnitude in each row of [..., k].

    Bits of values that are not negative grow with them; the largest integer is found in a third of the time.
    """
    size = torch.abs(blocks)
    return size.view(torch.int32).amax(-1).view(torch.float32) if size.dtype == torch.float32 else size.amax(-1)


def ends_of_each(blocks: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number in each row of [..., k]. `room`: memory of the same shape and dtype,
    which is overwritten.

    The bits of negative values are flipped but for the sign, so that whole numbers are in the order of the values.
    """
    if blocks.dtype != torch.float32:
        return blocks.amin(-1), blocks.amax(-1)
    bits, keys = blocks.view(torch.int32), room.view(torch.int32)
    torch.bitwise_right_shift(bits, 31, out=keys)
    keys.bitwise_and_(MAGNITUDE).bitwise_xor_(bits)
    low, high = (k ^ (k >> 31 & MAGNITUDE) for k in (keys.amin(-1), keys.amax(-1)))
    return low.view(torch.float32), high.view(torch.float32)


def single(values: Tensor) -> Tensor:
    """Return values in fp32; those of fp64 rounded to odd, so that a later rounding to fewer bits is right."""
    if values.dtype != torch.float64:
        return values.float()
    near = values.float()
    back = near.double()
    bits = near.view(torch.int32) - (back.abs() > values.abs()).to(torch.int32)
    return (bits | (back != values).to(torch.int32)).view(torch.float32)


def from_bytes(codes: Tensor, dtype: str, scale: float = 1.0) -> Tensor:
    """Return the values of codes of one byte times a scale, in fp32; InvalidPart for codes that are not numbers."""
    if dtype == "I8":
        return _times(codes.view(torch.int8).float(), scale)
    last = last_byte(codes)
    if last > LARGEST_BYTE[dtype]:
        raise InvalidPart("a code means no finite value")
    return from_fp8(codes, dtype, scale, last)


def to_bytes(levels: Tensor, dtype: str, ends: tuple[int, int]) -> Tensor | None:
    """Return the nearest codes as bytes; None if a number is more than half a step beyond the range, or NaN."""
    if dtype != "I8":
        return to_fp8(levels, dtype)
    low, high = levels.aminmax() if levels.numel() else (0, 0)
    return cut_to_bytes(levels, dtype, ends) if ends[0] - 0.5 <= low and high <= ends[1] + 0.5 else None


def cut_to_bytes(levels: Tensor, dtype: str, ends: tuple[int, int]) -> Tensor:
    """Return the nearest codes as bytes; values beyond the range become the outermost codes."""
    if dtype != "I8":
        return cut_to_fp8(levels, dtype)
    return levels.round().clamp_(*ends).to(torch.int8).view(torch.uint8)


def covering(largest: Tensor, steps: float, room: float, dtype: str) -> Tensor:
    """Return scales, in fp32, that `dtype` holds and at which `steps` codes reach as far as the largest values.

    They are the nearest ones, or the next above if even `room` codes would not reach: bf16 moves a scale by up to a
    512th, and the smallest values of fp16 are far apart. Raises OutOfRange if no scale is large enough.
    """
    kind = FLOAT_DTYPES[dtype]
    near = (largest / steps).to(kind)
    beyond = (near.view(torch.int32 if kind.itemsize == 4 else torch.int16) + 1).view(kind)
    scales = torch.where(near.float() < largest / room, beyond, near).float()
    if not bool(scales.isfinite().all()):
        raise OutOfRange
    return scales


def with_zero(low: Tensor, high: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the smallest scales, and the codes of zero, with which whole numbers of these ends reach from the lowest
    to the highest values, on both sides of zero or at it."""
    lowest, highest = ends
    step = (high - low) / (highest - lowest)
    below = (lowest - low / torch.where(step > 0, step, torch.inf)).floor()
    points = torch.stack([below, below + 1]).clamp_(lowest, highest)

    def over(part: Tensor, steps: Tensor) -> Tensor:
        return torch.where(part > 0, part / steps, 0.0)  # no step is left for what is more than nothing: infinite

    scales = torch.maximum(over(high, highest - points), over(-low, points - lowest))
    best = scales.argmin(0, keepdim=True)
    return scales.gather(0, best)[0], points.gather(0, best)[0]


def neighbour(values: Tensor, up: Tensor) -> Tensor:
    """Return the next number of the dtype above, where `up`, or below. The neighbours of one zero include the other.

    torch before 2.6 has no `nextafter` for fp16 on CUDA.
    """
    bits = values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)
    sign, magnitude = 8 * values.dtype.itemsize - 1, torch.iinfo(bits.dtype).max
    keys = bits ^ (bits >> sign & magnitude)  # in the order of the values
    keys = torch.where(up, keys + 1, keys - 1)
    return (keys ^ (keys >> sign & magnitude)).view(values.dtype)


@cached_table
def _powers() -> Tensor:
    """Return the number of each byte of e8m0: 2 ** (b - 127), and NaN for 255."""
    values = torch.ldexp(torch.ones(256), torch.arange(-127, 129)).float()
    values[255] = float("nan")
    return values


def powers(raw: Tensor) -> Tensor:
    """Return the values of e8m0 bytes, in fp32."""
    return _powers().index_select(0, raw.reshape(-1).view(torch.uint8).int())


def power_above(values: Tensor) -> Tensor:
    """Return the smallest powers of two that are not below the values, in fp32; 0 for 0."""
    mantissa, exponent = torch.frexp(values.float())
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(values > 0, torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-127, 127)), 0.0)


def exponents(values: Tensor) -> Tensor:
    """Return powers of two as e8m0 bytes."""
    return (torch.frexp(values.float()).exponent - 1 + 127).clamp(0, 254).to(torch.uint8)


@cached_table
def swizzle(rows: int, cols: int) -> Tensor:
    """Return the place of each scale [rows, cols], flat, in cuBLAS's tiles of 128 rows and 4 columns.

    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    tile = (r // 128) * (-(-cols // 4)) + c // 4
    return (tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4).reshape(-1)


@cached_table
def _hadamard(size: int) -> Tensor:
    """Return the regular Hadamard matrix of this size, a power of 4, divided by its root: its own inverse."""
    four = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix.div_(size**0.5)


def rotated(values: Tensor, size: int) -> Tensor:
    """Return W · H for every group of `size` columns, flat. A second rotation undoes the first."""
    return torch.mm(values.view(-1, size), _hadamard(size).to(values.dtype)).view(-1)


@cached_table
def e2m1() -> Tensor:
    """Return the number of each 4-bit code, in fp32."""
    return torch.tensor(E2M1)


@cached_table
def _pairs(table: tuple[float, ...], high_first: bool) -> Tensor:  # noqa: FBT001
    """Return the two values of each byte of two codes, in fp32, as one of 64 bits: it is copied at once."""
    codes, values = torch.arange(256), torch.tensor(table)
    low, high = values[codes & 15], values[codes >> 4]
    return torch.stack([high, low] if high_first else [low, high], 1).view(torch.int64).view(-1)


def from_halves(raw: Tensor, table: Sequence[float], *, high_first: bool) -> Tensor:
    """Return the values of bytes that hold two codes each, flat, by a table of 16 values."""
    return _pairs(tuple(table), high_first).index_select(0, raw.reshape(-1).int()).view(torch.float32)


def in_halves(codes: Tensor, *, high_first: bool) -> Tensor:
    """Return 4-bit codes, given as bytes, two in a byte."""
    pairs = codes.contiguous().view(-1).view(torch.int16)  # the second code is in the upper byte
    return (pairs << 4 | pairs >> 8 if high_first else pairs >> 4 | pairs).to(BYTE)
