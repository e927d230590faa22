"""The user's request to `combine` or `resize`, checked and frozen. No file is read for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import sep
from pathlib import Path
from typing import Any, Final

from ..algorithms.lokr import LOKR
from ..algorithms.lora import LORA
from ..algorithms.whole import FULL
from ..dtypes import FORMATS
from ..errors import FitError, UsageError
from ..files.checkpoint import CONFIGS, MLX_FILE
from ..job import Adapter, Job, make_job
from ..merge_methods import COMBINATIONS, SAME_COMBINATION, SUM
from ..method_parameters import Numbers, numbers_of
from ..models.part_factors import parts
from ..options import OPTIONS, dtype_name, pairs, shown
from ..paths import absolute, expand, input_path, is_file, is_folder, names_folder, output_file
from ..text import plural
from .dialects import DIALECTS, OF_INPUT, Dialect, dialect, names
from .rank_rules import EXACT, NO_NOISE, NOISE, RankRules

FACTORS, WHOLE, AUTO = LORA.name, FULL.name, "auto"
STORED_AS: Final = (FACTORS, WHOLE, AUTO)
"""The values of `--algorithm`: how a layer is stored."""

IN_FULL: Final = "store whole matrices: --algorithm full"
GIVE_RANK: Final = f"give --rank, such as 32 or energy:0.99, or {IN_FULL}"
GIVE_BASE: Final = "give the base model of the training: --base MODEL"


def form(algorithm: str, to: Dialect) -> str:
    """Return the form of layers for the one that was asked for: `auto` means factors where whole matrices have no
    key."""
    return FACTORS if algorithm == AUTO and "diff" not in to.endings else algorithm


@dataclass(frozen=True)
class AdapterJob:
    """One run that writes an adapter. `inputs` holds the adapters, the output and the options that merging shares."""

    command: str
    inputs: Job
    base: Path | None
    rules: RankRules
    method: str = SUM
    numbers: Numbers = field(default_factory=Numbers)
    algorithm: str = FACTORS
    alpha: str | float = "rank"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    compute_dtype: str | None = None
    """In which formulas are computed; None: fp64, and fp32 where that loses nothing that the output could hold."""
    format: str = "keep"
    """The dialect in which the result is written; "keep": that of the first adapter."""
    options: tuple[tuple[str, Any], ...] = ()
    """The command's own options as given, for the recipe."""
    full: bool = False
    """Whether the proof computes every layer again, and not a sample where there are many."""

    @property
    def output(self) -> Path:
        """The file to write."""
        return self.inputs.output

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters with their strengths."""
        return self.inputs.adapters


FILES: Final = ("combine", "resize", "average")
"""Commands whose output is a file."""

FILE: Final = ".safetensors"
"""The ending of an output that is a file."""

CHOICE: Final = ("include", "exclude", "compute_dtype")
"""Options of all commands, each with a meaning of its own for adapters."""

OWN: Final[Mapping[str, Any]] = {
    "method": SUM, "rank": EXACT, "conv_rank": None, "max_rank": None, "rank_for": (), "density": None, "gamma": None,
    "epsilon": None, "t": None, "elect": "sum", "normalise": "count", "agree": None, "scale": 1.0, "seed": 0,
    "algorithm": FACTORS, "alpha": "rank", "format": "keep", "include": (), "exclude": (), "compute_dtype": None,
}  # fmt: skip
"""Option of these commands → default."""

OTHER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {"resize": {"alpha": "keep"}, "extract": {"rank": 32}}
"""Command → its defaults that differ from these."""


def make_adapter_job(
    command: str, adapters: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any]
) -> AdapterJob:
    """Return the job of `combine` or `resize`; UsageError for an option or a value that is wrong."""
    given = {name: value for name, value in options.items() if name in OWN and value is not None}
    common = {name: value for name, value in options.items() if name not in OWN}
    if str(common.get("dtype")) in FORMATS or common.get("keep_precision"):
        raise UsageError("adapters are not quantised", f"--dtype {shown(common.get('dtype'))}", "write --dtype bf16")
    given |= {name: parts(given[name], f"--{name}") for name in CHOICE[:2] if name in given}
    if "compute_dtype" in given:
        given["compute_dtype"] = _computed(given["compute_dtype"])
    others = OTHER_DEFAULTS.get(command, {})
    own = {**OWN, **others, **given}
    method = SAME_COMBINATION.get(own["method"], own["method"])
    if method not in COMBINATIONS:
        raise UsageError(
            f"the method {shown(own['method'])!r} does not exist", "--method", f"use one of {', '.join(COMBINATIONS)}"
        )
    rank_for = pairs(own["rank_for"], "--rank-for")
    rules = RankRules.of(own["rank"], own["conv_rank"], own["max_rank"], rank_for)
    if rules.has(NOISE) and command != "extract":
        raise UsageError(NO_NOISE, "--rank noise", "give a number or energy:x")
    nothing = f"{sep}no base", f"{sep}no output"  # absolute, as the current folder may be gone
    job = make_job(nothing[0] if base is None else base, adapters, nothing[1], **common)
    to = dialect(own["format"]) if isinstance(own["format"], str) else None
    if to is None:
        raise UsageError(f"the format {shown(own['format'])!r} does not exist", "--format",
                         f"use one of {', '.join(names())}")  # fmt: skip
    if to is OF_INPUT and command in FILES and stays_folder(job.adapters[0].path, output):
        to = DIALECTS["peft"]
        given |= {"format": to.name}
    path = _output(job, command, str(own["rank"]), output, file=command in FILES and not to.folder)
    job = replace(job, method=method, output=path)
    if command in ("resize", "convert") and len(job.adapters) != 1:
        raise UsageError(f"{command} takes one adapter", plural(len(job.adapters), "adapter"),
                         "save their sum first: combine, or (a + b).save(…)")  # fmt: skip
    numbers = numbers_of(method, own, [a.strength for a in job.adapters])
    known = (*STORED_AS, LOKR.name) if command == "extract" else STORED_AS
    if own["algorithm"] not in known:
        raise UsageError(f"layers cannot be stored as {shown(own['algorithm'])!r}", "--algorithm",
                         f"use one of {', '.join(known)}")  # fmt: skip
    if (
        not COMBINATIONS[method].linear
        and own["algorithm"] == FACTORS
        and EXACT in (rules.linear.name, rules.kernels.name)
    ):
        raise FitError(f"the result of {method} is not low-rank, so it has no exact factors", f"--method {method}",
                       GIVE_RANK)  # fmt: skip
    recorded = tuple(sorted((name, value) for name, value in given.items() if name in others or value != OWN[name]))
    found = None if base is None else input_path(base)
    return AdapterJob(
        command, job, found, rules, method, numbers, own["algorithm"], _alpha(own["alpha"]),
        own["include"], own["exclude"], own["compute_dtype"], to.name, recorded,
    )  # fmt: skip


def _output(job: Job, command: str, rule: str, given: str | Path | None, *, file: bool) -> Path:
    """Return the path of the output, which may be a `file`; `given`: None, or what the user names."""
    if given is None or (file and names_folder(given)):
        ending = "" if command in FILES and not file else FILE
        return _named(job, command, rule, absolute(Path()) if given is None else expand(given), ending)
    return output_file(given) if file else expand(given)


def _named(job: Job, command: str, rule: str, folder: Path, ending: str) -> Path:
    """Return the path of the default name in a folder."""
    stems = [a.path.name if is_folder(a.path) else a.path.stem for a in job.adapters]
    name = f"{stems[0]}-r{rule.replace(':', '-')}" if command == "resize" else "+".join(stems)
    if any(folder / f"{name}{ending}" == a.path for a in job.adapters):  # of one adapter
        name += f"-{command}"
    return folder / f"{name}{ending}"


def stays_folder(adapter: Path, output: str | Path | None) -> bool:
    """Return whether the output is a folder of PEFT because the adapter is one, and its name is not that of a file."""
    named = output is not None and not str(output).endswith(FILE)
    return named and is_file(adapter / CONFIGS[0]) and not is_file(adapter / MLX_FILE)


def _computed(value: Any) -> str:
    """Return the dtype that formulas compute in; UsageError for one in which changes lose digits."""
    found = dtype_name(value, OPTIONS["compute_dtype"])
    if found not in ("fp32", "fp64"):
        raise UsageError(f"an adapter is not computed in {found}", "--compute-dtype", "use fp32 or fp64")
    return found


LEAST_ALPHA: Final = 1e-30
"""fp32 holds it, its inverse, and factors that are scaled by either."""


def _alpha(value: Any) -> str | float:
    if value in ("rank", "keep"):
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not LEAST_ALPHA <= number <= 1 / LEAST_ALPHA:
        raise UsageError(f"alpha cannot be {shown(value)!r}", "--alpha",
                         f"use rank, keep or a number from {LEAST_ALPHA:g} to {1 / LEAST_ALPHA:g}")  # fmt: skip
    return number


def strings(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return (part, rule) for texts `PART=RULE`; UsageError for another text."""
    found = [tuple(text.rpartition("=")[::2]) for text in values]
    if wrong := next((t for t, p in zip(values, found, strict=True) if not all(p)), None):
        raise UsageError(f"{wrong[:40]!r} does not name a part and its rule", "--rank-for", "write it as PART=RULE")
    return [(part, rule) for part, rule in found]
