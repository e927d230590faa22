"""What callers pass, by its type: one error for what is none, in place of whatever would stumble over it later."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from .dtypes import TABLE
from .errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch


class MergeOptions(TypedDict, total=False):
    """The options of `merge`, `plan` and `merge_state_dict`, which are those of the command line."""

    strength: Sequence[float] | None
    strength_for: Mapping[str, float] | Sequence[tuple[str, float]]
    dtype: str | torch.dtype
    compute_dtype: str | torch.dtype
    device: str | torch.device
    method: Literal["sum", "compose"]
    unmatched: Literal["error", "skip"]
    on_overflow: Literal["error", "saturate"]
    overwrite: bool
    max_memory: int | str
    max_vram: int | str | None
    verify: bool
    map: str | Path | None
    setting: Mapping[str, Any] | Sequence[tuple[str, Any]]


OF_THE_COMMAND: Final = ("quiet", "verbose", "report", "json", "dry_run", "debug")
"""Options of the command line that say what it prints, or that it writes nothing."""

DEVICE: Final = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?(, *(cpu|cuda|mps|xpu)(:\d+)?)*")
DEVICES: Final = "auto, cpu, cuda, cuda:N, mps or xpu"
"""What a device may be called. Whether it is here, only torch can tell."""

HUGE: Final = 2**63  # no number of bytes, rows or the like is as large


def shown(value: Any, length: int | None = 40) -> str:
    """The beginning of a value in a message; Python does not write out numbers of thousands of digits."""
    return "of too many digits" if isinstance(value, int) and abs(value) >= HUGE else str(value)[:length]


def is_finite(value: Any) -> bool:
    """Whether it is a number, no truth value, that a double can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def number(value: float | str) -> float:
    """A number, or what a text of figures says; ValueError for any other, such as 1_0, which Python alone takes for
    ten."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def factor(value: Any, where: str) -> float:
    """A strength; UsageError for what is none."""
    if not is_finite(value):
        told = f"{value[:40]!r}" if isinstance(value, str) else shown(value)
        raise UsageError(f"strength {told} is not a finite number", where, "use a number such as 0.8")
    return float(value)


def switch(value: Any, flag: str) -> bool:
    """An option that is on or off; UsageError for any other value."""
    if not isinstance(value, bool):
        raise unlike(value, flag, "True or False")
    return value


def unlike(value: Any, where: str, wanted: str) -> UsageError:
    """The error for a value of a wrong type."""
    return UsageError(f"{type(value).__name__} {shown(value)!r} where {wanted} belongs", where, f"give {wanted}")


def a_list(value: Any, where: str, wanted: str) -> list[Any]:
    """The items of a list or the like; UsageError for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise unlike(value, where, wanted)
    return list(value)


def pairs(value: Any, where: str) -> list[tuple[str, Any]]:
    """Names with values, from a table or from pairs."""
    wanted = "a table of names and values, or a list of pairs,"
    found = [
        tuple(p) if isinstance(p, list | tuple) else (p,)
        for p in (value.items() if isinstance(value, Mapping) else a_list(value, where, wanted))
    ]
    wrong = next((p for p in found if len(p) != 2 or not isinstance(p[0], str)), None)
    if wrong is not None:
        raise unlike(wrong, where, "a pair of a name and a value")
    return found


def device_name(value: object) -> str:
    """Return the name of a device as torch writes it: `gpu` is `cuda`."""
    return str(value).lower().replace("gpu", "cuda")


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """UsageError for an option that there is not, or for a switch that is neither on nor off."""
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name in OF_THE_COMMAND:
            fix = "here nothing is printed: `plan` writes nothing, and the report that `merge` returns has to_json()"
            raise UsageError(f"{name!r} is an option of the command line alone", flag, fix)
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UsageError(f"no option is called {name!r}", flag, f"use one of {', '.join(near or known)}")
        if name in ("overwrite", "verify"):
            switch(value, flag)
        if name == "device" and type(value).__name__ not in ("str", "device"):  # torch's, unless it is imported
            raise unlike(value, flag, DEVICES)
        if name == "device" and not DEVICE.fullmatch(device_name(value)):
            raise ResourceError(f"unknown device {shown(value)!r}", flag, f"use {DEVICES}")


SAME_DTYPE: Final = {"half": "fp16", "float": "fp32", "double": "fp64", "bfloat": "bf16"}
"""What other programs call a dtype → its name here."""


def dtype_name(value: object, option: str, allowed: tuple[str, ...]) -> str:
    """Our name of a dtype, also where torch's is given; UsageError for one that the option does not take."""
    known = {row.library: row.option for row in TABLE.values() if row.option} | SAME_DTYPE
    name = str(value).removeprefix("torch.").lower()
    name = known.get(name, name)
    if name not in allowed:
        flag = "--" + option.replace("_", "-")
        near = [a for a in allowed if name and a.startswith(name)]  # fp8
        raise UsageError(f"{value!r} is no {flag} value", flag, f"use one of {', '.join(near or allowed)}")
    return name
