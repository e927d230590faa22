"""Every option of a merge, in one table, and what callers may pass for one: one error for what is none of it.

The command line, jobs files, recipes and surveys of batches take names, defaults and meanings from the table. What
is written out for type checkers (`MergeOptions`, `Job`, the fields of a jobs file) is compared with it by a test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, get_args

from .dtypes import COMPUTE_DTYPES, DTYPES, TABLE
from .errors import ResourceError, UsageError
from .methods import METHODS, SUM

if TYPE_CHECKING:
    import torch


REGEX: Final = "re:"
"""A part of `--strength-for` that begins so is a regular expression over keys of the base."""

BLOCK_WEIGHTS: Final = "lbw"
"""The part whose value is one weight for every block, or the name of a preset; see models/blocks.py."""

BLOCK_LIST: Final = f"{BLOCK_WEIGHTS}:"
"""How a part begins that holds these weights as its own text."""

Unmatched: TypeAlias = Literal["error", "skip"]
OnOverflow: TypeAlias = Literal["error", "saturate"]


class MergeOptions(TypedDict, total=False):
    """The options of `merge`, `plan` and `merge_state_dict`, which are those of the command line."""

    dtype: str | torch.dtype
    compute_dtype: str | torch.dtype
    device: str | torch.device
    strength: Sequence[float] | None
    strength_for: Mapping[str, float] | Sequence[tuple[str, float]]
    unmatched: Unmatched
    on_overflow: OnOverflow
    method: Literal["sum", "compose"]
    setting: Mapping[str, Any] | Sequence[tuple[str, Any]]
    map: str | Path | None
    overwrite: bool
    max_memory: int | str
    max_vram: int | str | None
    verify: bool


DEVICE: Final = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?(, *(cpu|cuda|mps|xpu)(:\d+)?)*")
DEVICES: Final = "auto, cpu, cuda, cuda:N, mps or xpu"
"""What a device may be called. Whether it is here, only torch can tell."""

Kind: TypeAlias = Literal["dtype", "device", "numbers", "parts", "word", "settings", "path", "switch", "size"]
"""What an option's value is."""

Record: TypeAlias = Literal["always", "given", "adapters", "never"]
"""Whether an option changes a byte of an output, so that the recipe has to tell it: always, where it is not the
default, or beside each adapter."""


@dataclass(frozen=True)
class Option:
    """One option of a merge."""

    name: str  # in Python, in jobs files and in recipes
    kind: Kind
    default: Any
    help: str
    recorded: Record
    words: tuple[str, ...] = ()  # what it may be, if that is one of a few words; the first is the default
    together: bool = False  # whether jobs for one read of their base have to agree on it
    in_batch: bool = True  # whether it is a field of a jobs file
    in_verify: bool = False  # whether `verify` takes it, for outputs without a recipe
    short: str = ""  # on the command line
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """Its long form on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def planned(self) -> bool:
        """Whether a plan depends on it: all that changes a byte does, and the bounds on memory."""
        return self.recorded != "never" or self.kind == "size"


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}."


_DTYPES: Final = ("keep", *DTYPES)
_COMPUTE: Final = tuple(COMPUTE_DTYPES)

OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({
    row.name: row
    for row in (
        Option("dtype", "dtype", "keep", _either(_DTYPES), "always", _DTYPES),
        Option("compute_dtype", "dtype", "fp32", _either(_COMPUTE), "always", _COMPUTE, together=True),
        Option("device", "device", "auto", f"{DEVICES}; or cuda:0,cuda:1.", "never", together=True),
        Option("strength", "numbers", None, "One per adapter, in order.", "adapters", in_batch=False, short="-s",
               metavar="FLOAT"),
        Option("strength_for", "parts", (), "unet, te, te1 …, blocks (IN04-IN08), lbw=LIST, re:REGEX; multiplies.",
               "adapters", in_verify=True, metavar="PART=FLOAT"),
        Option("unmatched", "word", "error", "error, or skip what has no place in the base.", "always",
               get_args(Unmatched), in_verify=True),
        Option("on_overflow", "word", "error",
               "error, or saturate: cut numbers too large for the output's dtype to its largest.", "given",
               get_args(OnOverflow), together=True, in_verify=True),
        Option("method", "word", SUM, "How adapters meet: sum, or compose (one after the other, as PEFT merges).",
               "given", tuple(METHODS), in_verify=True),
        Option("setting", "settings", (), "What a file does not tell, e.g. lora_alpha=16 (litgpt, torchtune).", "given",
               in_verify=True, metavar="NAME=VALUE"),
        Option("map", "path", None, "Name table (YAML) for a model that is not known.", "given", in_verify=True),
        Option("overwrite", "switch", default=False, help="Replace the output if it exists.", recorded="never"),
        Option("max_memory", "size", "1GiB", "Bound on weights in flight, e.g. 512MiB.", "never", together=True),
        Option("max_vram", "size", None, "Bound on a device's memory in use, e.g. 4GiB.", "never", together=True),
        Option("verify", "switch", default=True, help="Prove the written file.", recorded="never"),
    )
})  # fmt: skip
"""Name → option. A recipe holds those that it records in this order."""

OF_THE_COMMAND: Final = ("quiet", "verbose", "report", "json", "dry_run", "debug")
"""Options of the command line that say what it prints, or that it writes nothing."""

HUGE: Final = 2**63  # no number of bytes, rows or the like is as large


def shown(value: Any, length: int | None = 40) -> str:
    """Return the beginning of a value in a message; Python does not write out numbers of thousands of digits."""
    return "of too many digits" if isinstance(value, int) and abs(value) >= HUGE else str(value)[:length]


def is_finite(value: Any) -> bool:
    """Return whether it is a number, no truth value, that a double can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def number(value: float | str) -> float:
    """Return a number, or what a text of figures says; ValueError for any other, such as 1_0, which Python alone takes
    for ten."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def factor(value: Any, where: str) -> float:
    """Return a strength; UsageError for what is none."""
    if not is_finite(value):
        told = f"{value[:40]!r}" if isinstance(value, str) else shown(value)
        raise UsageError(f"strength {told} is not a finite number", where, "use a number such as 0.8")
    return float(value)


def switch(value: Any, flag: str) -> bool:
    """Return an option that is on or off; UsageError for any other value."""
    if not isinstance(value, bool):
        raise unlike(value, flag, "True or False")
    return value


def unlike(value: Any, where: str, wanted: str) -> UsageError:
    """Return the error for a value of a wrong type."""
    return UsageError(f"{type(value).__name__} {shown(value)!r} where {wanted} belongs", where, f"give {wanted}")


def a_list(value: Any, where: str, wanted: str) -> list[Any]:
    """Return the items of a list or the like; UsageError for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise unlike(value, where, wanted)
    return list(value)


def pairs(value: Any, where: str) -> list[tuple[str, Any]]:
    """Return the names with values, from a table or from pairs."""
    wanted = "a table of names and values, or a list of pairs,"
    found = [
        tuple(p) if isinstance(p, list | tuple) else (p,)
        for p in (value.items() if isinstance(value, Mapping) else a_list(value, where, wanted))
    ]
    wrong = next((p for p in found if len(p) != 2 or not isinstance(p[0], str)), None)
    if wrong is not None:
        raise unlike(wrong, where, "a pair of a name and a value")
    return found


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the defaults of all others; UsageError for a name or a value that cannot be.

    Looks at names, words, dtypes, switches and devices, which need no look at anything else.
    """
    for name in options:
        _known(name)
    return {o.name: _value(o, options[o.name]) if o.name in options else o.default for o in OPTIONS.values()}


def _known(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    if name in OF_THE_COMMAND:
        fix = "here nothing is printed: `plan` writes nothing, and the report that `merge` returns has to_json()"
        raise UsageError(f"{name!r} is an option of the command line alone", flag, fix)
    if name not in OPTIONS:
        near = get_close_matches(name, OPTIONS, 1)
        raise UsageError(f"no option is called {name!r}", flag, f"use one of {', '.join(near or OPTIONS)}")


def _value(option: Option, value: Any) -> Any:
    if option.kind == "switch":
        return switch(value, option.flag)
    if option.kind == "dtype":
        return dtype_name(value, option)
    if option.kind == "device":
        if type(value).__name__ not in ("str", "device"):  # torch's, unless it is imported
            raise unlike(value, option.flag, DEVICES)
        name = str(value).lower().replace("gpu", "cuda")
        if not DEVICE.fullmatch(name):
            raise ResourceError(f"unknown device {shown(value)!r}", option.flag, f"use {DEVICES}")
        return name
    if option.kind == "word" and (not isinstance(value, str) or value not in option.words):
        fix = f"use one of {', '.join(option.words)}"
        raise UsageError(f"{shown(value)!r} is no {option.flag} value", option.flag, fix)
    return value


SAME_DTYPE: Final = {"half": "fp16", "float": "fp32", "double": "fp64", "bfloat": "bf16"}
"""What other programs call a dtype → its name here."""


def dtype_name(value: object, option: Option) -> str:
    """Our name of a dtype, also where torch's is given; UsageError for one that the option does not take."""
    known = {row.library: row.option for row in TABLE.values() if row.option} | SAME_DTYPE
    name = str(value).removeprefix("torch.").lower()
    name = known.get(name, name)
    if name not in option.words:
        near = [word for word in option.words if name and word.startswith(name)]  # fp8
        fix = f"use one of {', '.join(near or option.words)}"
        raise UsageError(f"{value!r} is no {option.flag} value", option.flag, fix)
    return name
