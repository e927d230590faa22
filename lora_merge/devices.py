"""Which devices are here, what they can, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from .errors import ResourceError
from .placement import TORCH_DTYPES, Placement

KINDS: Final = ("cpu", "cuda", "mps", "xpu")


def places(devices: str, dtype: str) -> tuple[Placement, ...]:
    """The placements for `--device`, one or a list with commas, of one kind; ResourceError if one is not here."""
    found = tuple(place(d.strip(), dtype) for d in devices.split(","))
    if len(found) > 1 and (len(set(found)) < len(found) or len({p.device.type for p in found}) > 1):
        raise ResourceError(f"{devices!r} is no list of devices to share the work", "--device", "write cuda:0,cuda:1")
    return found


def place(device: str, dtype: str) -> Placement:
    """The placement for `--device` and a dtype by its name in files; ResourceError if there is no such device."""
    found = _fastest() if device == "auto" else device
    try:
        where = torch.device(found)
    except RuntimeError as e:
        raise ResourceError(f"unknown device {found!r}", "--device", "use auto, cpu, cuda, cuda:N, mps or xpu") from e
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
               "xpu": torch.xpu.is_available()}  # fmt: skip
    count = (
        torch.cuda.device_count() if where.type == "cuda" else torch.xpu.device_count() if where.type == "xpu" else 1
    )
    if not present.get(where.type, False) or (where.index or 0) >= count:
        names = ", ".join(k for k, v in present.items() if v)
        raise ResourceError(f"no device {found!r} here", "--device", f"use one of: auto, {names}")
    if where.type == "mps" and dtype == "F64":
        raise ResourceError("mps computes no fp64", "--compute-dtype", "use fp32, or --device cpu")
    return Placement(where, TORCH_DTYPES[dtype])


def precise(at: Placement) -> Placement:
    """The same place in fp64, or in fp32 where it computes no fp64.

    Inverses and decompositions in fp32 would round up to 1 % of an fp16 output's elements differently.
    """
    return Placement(at.device, torch.float32 if at.device.type in ("mps", "xpu") else torch.float64)


def release(at: Sequence[Placement]) -> None:
    """Give memory that nobody uses any more back to the devices."""
    for kind in {p.device.type for p in at} & set(KINDS[1:]):
        torch.get_device_module(kind).empty_cache()


def present() -> list[str]:
    """Every device here, as --device takes it."""
    found = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()) if torch.cuda.is_available())]
    found += [f"xpu:{n}" for n in range(torch.xpu.device_count()) if torch.xpu.is_available()]
    return found + ["mps"] * torch.backends.mps.is_available()


def _fastest() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def nth_device(device: str, number: int) -> str:
    """The device for the n-th of several workers: GPUs go round, whatever names one device stays."""
    if device not in ("auto", "cuda") or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{number % torch.cuda.device_count()}"
