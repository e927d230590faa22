"""The request of one command that writes an adapter, checked and frozen. No tensor is read for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from numbers import Real
from os import sep
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..algorithms.lokr import LOKR
from ..algorithms.lora import LORA
from ..algorithms.whole import FULL
from ..command import Command, Request, Rows
from ..dtypes import QUANTISED_DTYPES
from ..errors import FitError, UsageError
from ..files.checkpoint import MLX_FILE
from ..files.folder_layouts import ADAPTER_CONFIG
from ..job import Adapter, Job, make_job
from ..merge_methods import COMBINATIONS, PARAMETER_NAMES, SAME_COMBINATION, SUM, MethodParameters, method_parameters
from ..models.part_factors import parts
from ..options import (
    ADAPTER_OPTIONS,
    KEEP,
    MEANT,
    OF_MERGE,
    OPTIONS,
    QUANTISED,
    checked_value,
    dtype_name,
    pairs,
    without_part,
)
from ..paths import absolute, is_file, is_folder, names_folder, output_file, output_path
from ..text import plural, shown
from .dialects import DIALECTS, OF_INPUT, Dialect, stated_dialect
from .rank_rules import COUNT, EXACT, NO_NOISE, NOISE, RankRules

if TYPE_CHECKING:
    from ..planning.checkpoint_cache import CheckpointCache
    from ..planning.downloads import Announce
    from ..progress import Progress
    from ..sources.inputs import Download

FACTORS, WHOLE, AUTO = LORA.name, FULL.name, "auto"
STORED_AS: Final = (FACTORS, WHOLE, AUTO)
"""The values of `--algorithm`: how a layer is stored."""

IN_FULL: Final = "store whole matrices: `--algorithm full`"
GIVE_RANK: Final = f"write `--rank 32` or `--rank energy:0.99`, or {IN_FULL}"
GIVE_BASE: Final = "give the base model of the training: `--base MODEL`"


def algorithm_in(algorithm: str, to: Dialect) -> str:
    """Return how a dialect stores matrices: `auto` means factors if it has no key for whole matrices."""
    return FACTORS if algorithm == AUTO and "diff" not in to.endings else algorithm


AUTO_FORMAT: Final = "auto"
"""The format of `extract` that the architecture of the base decides."""

OTHERS: Final = ADAPTER_OPTIONS["others"].words
CHANGES, SKIP, ERROR = OTHERS
"""The values of `--others`: what becomes of biases, norms and other vectors that changed."""

SPACES: Final = ADAPTER_OPTIONS["space"].words
OF_CHANGES, OF_TENSORS = SPACES
"""The values of `--space`: whether changes are averaged, or the tensors of the files, as a training's own EMA does."""

RANK_OPTIONS: Final = ("rank", "conv_rank", "max_rank", "rank_for")
"""The options that state a rule for ranks."""


@dataclass(frozen=True)
class AdapterJob:
    """One run of a command that writes an adapter. A command that lacks an option leaves its field at the default.

    `inputs`: the adapters, the output and the options that merging shares. The adapter of `extract` is the tuned
    checkpoint; the strengths of `average` are its weights.
    """

    command: Command
    inputs: Job
    base: Path | None
    rules: RankRules
    ranked: bool = True
    """Whether a rule for ranks is stated. Without one, `convert` keeps the factors that it can keep."""
    method: str = SUM
    parameters: MethodParameters = field(default_factory=MethodParameters)
    """Of `method`. `scale` multiplies what any method makes of the changes, here also a sum, unlike `Job.scale`."""
    algorithm: str = FACTORS
    alpha: str | float = "rank"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    compute_dtype: str | None = None
    """In which formulas are computed; None: fp64, and fp32 where that loses nothing that the output could hold."""
    format: str = KEEP
    """The dialect of the output; KEEP: that of the first adapter, AUTO_FORMAT: that of the base's architecture."""
    options: tuple[tuple[str, Any], ...] = ()
    """The options that the recipe records, with their values."""
    full: bool = False
    """Whether the proof computes every layer again, and not a sample of many."""
    unnamed: bool = False
    """Whether the output of `convert` gets its name from the dialect, which the opened adapter decides."""
    dtype: str | None = None
    """The dtype of the whole output as files name it, if all inputs decide it; None: each module's, or as asked."""
    others: str = CHANGES
    """Of `extract`: what becomes of changed vectors."""
    factor: int = -1
    """Of `extract`: the smaller factor of Kronecker products; -1: near the root."""
    space: str = OF_CHANGES
    """Of `average`: what is averaged."""
    shares: tuple[float, ...] | None = None
    """Of `average`: the share that each step of a moving average keeps; None: no such average."""

    @property
    def output(self) -> Path:
        """The file or folder to write."""
        return self.inputs.output

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters with their strengths."""
        return self.inputs.adapters

    @property
    def paths(self) -> tuple[Path, ...]:
        """The adapters, and the base if it is read."""
        return (*(a.path for a in self.adapters), *([] if self.base is None else [self.base]))

    @property
    def keeps_forms(self) -> bool:
        """Whether modules keep their algorithm and their rank, as `convert` does unless options say otherwise."""
        return self.algorithm == KEEP and not self.ranked

    def changed(self, **options: Any) -> AdapterJob:
        """Return the job with other values of options that it shares with merging."""
        return replace(self, inputs=replace(self.inputs, **options))

    def moved(self, places: Mapping[Path, Path]) -> AdapterJob:
        """Return the job with other paths of its inputs."""
        from ..planning.downloads import job_at  # imported here: `--help` has no use for it

        return replace(self, inputs=job_at(self.inputs, places), base=self.base and places.get(self.base, self.base))

    def without(self, option: str, part: str) -> AdapterJob:
        """Return the job without a part of the model that an option of its own names."""
        job = self
        if option in ("include", "exclude"):
            job = replace(job, **{option: without_part(getattr(job, option), part)})
        elif option == "rank_for":
            job = replace(job, rules=replace(job.rules, parts=without_part(job.rules.parts, part)))
        options = ((name, without_part(value, part) if name == option else value) for name, value in job.options)
        return replace(job, options=tuple((name, value) for name, value in options if value or name != option))


def needed_downloads(job: AdapterJob) -> dict[Path, Download]:
    """Return what has to be downloaded for a job: input → its files."""
    from ..planning.downloads import downloads  # imported here: `--help` has no use for it

    paths = [ref.path for ref in job.adapters]
    if job.command.inputs == "checkpoints":
        return downloads([*paths, *([] if job.base is None else [job.base])], [])
    return downloads([] if job.base is None else [job.base], paths)


def downloaded(
    job: AdapterJob, cache: CheckpointCache | None, progress: Progress, announce: Announce | None = None
) -> AdapterJob:
    """Return the job on inputs of this machine: what it lacks is downloaded, if the job can run by the headers.

    `cache`: the checkpoints that are open.
    """
    needed = needed_downloads(job)
    if not needed:
        return job
    from ..planning.downloads import fetch_all

    size = job.command.plan(job, cache).written
    return job.moved(fetch_all(needed, (job.output, size), progress, announce))


FILE: Final = ".safetensors"
"""The ending of an output that is a file."""


def adapter_job(request: Request) -> AdapterJob:
    """Return the job of `combine` or `resize`, and of other commands what they share with these; UsageError or FitError
    for an option or a value that is wrong."""
    command, output, base = request.command, request.output, request.base
    rows = command.options
    # Step 1: the options of the command, and those of `merge`.
    stated, of_merge = _options(request)
    # Step 2: values are parsed.
    values = {**{name: row.default for name, row in rows.items()}, **stated}
    chosen = _word(values.get("method", SUM))
    method = SAME_COMBINATION.get(chosen, chosen)
    if method not in COMBINATIONS:
        near = get_close_matches(chosen, COMBINATIONS, 1, 0.7)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMBINATIONS)}"
        error = UsageError(f"the method {shown(chosen)!r} does not exist", "--method", fix)
        raise error.instead(str(values["method"]), *near)
    rule = EXACT if values["rank"] is None else values["rank"]
    rules = RankRules.of(rule, values.get("conv_rank"), values.get("max_rank"),
                         pairs(values.get("rank_for", ()), "--rank-for"))  # fmt: skip
    if rules.has(NOISE) and command.inputs != "checkpoints":
        raise UsageError(NO_NOISE, "`--rank noise`", "give a number or energy:x")
    # Step 3: the inputs and the output.
    if not request.adapters:
        raise UsageError(f"{command.name} needs an adapter", "adapters", 'write adapters=["style.safetensors"]')
    nothing = f"{sep}no base", f"{sep}no output"  # absolute, as the current folder may be gone
    job = make_job(nothing[0] if base is None else base, request.adapters, nothing[1], **of_merge)
    to = stated_dialect(stated.get("format", KEEP), "--format")
    if to is OF_INPUT and command.combines and stays_folder(job.adapters[0].path, output):
        to = DIALECTS["peft"]
        stated |= {"format": to.name}
    path = _output(job, command, str(rule), output, file=command.combines and not to.folder)
    job = replace(job, method=method, output=path)
    # Step 4: what fits together.
    if not command.several and len(job.adapters) != 1:
        raise UsageError(f"{command.name} takes one adapter", plural(len(job.adapters), "adapter"),
                         "save their sum first: combine, or (a + b).save(…)")  # fmt: skip
    parameters = method_parameters(method, values, [a.strength for a in job.adapters])
    algorithm = algorithm_of(command, values.get("algorithm", FACTORS))
    if not COMBINATIONS[method].linear and algorithm == FACTORS and EXACT in (rules.linear.name, rules.kernels.name):
        what = f"the result of {method} is no product of two small factors, so no LoRA stores it exactly"
        raise FitError(what, f"`--method {method}`", GIVE_RANK)
    return AdapterJob(
        command, job, base=None if base is None else job.base, rules=rules, ranked=values["rank"] is not None,
        method=method, parameters=parameters, algorithm=algorithm, alpha=_alpha(values["alpha"]),
        include=values["include"], exclude=values["exclude"], compute_dtype=values["compute_dtype"], format=to.name,
        options=recorded(rows, stated),
    )  # fmt: skip


def algorithm_of(command: Command, value: Any) -> str:
    """Return how layers are stored; UsageError for a way that the command lacks."""
    known = [*STORED_AS, *([LOKR.name] if command.inputs == "checkpoints" else [])]
    if "algorithm" in command.options:
        known = [*dict.fromkeys((command.options["algorithm"].default, *known))]
    algorithm = _word(value)
    if algorithm not in known:
        raise UsageError(f"layers cannot be stored as {shown(algorithm)!r}", "--algorithm",
                         f"use one of {', '.join(known)}")  # fmt: skip
    return str(algorithm)


def _word(value: Any) -> Any:
    """Return a word of an option as it is spelled here: dare_ties for DARE-TIES."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _options(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stated options of a command with their values, and the options that it shares with `merge`."""
    rows, of_merge = request.command.options, request.stated
    stated = {name: of_merge.pop(name) for name in rows if name in of_merge and name not in OF_MERGE}
    of_others = {"method", *PARAMETER_NAMES, *ADAPTER_OPTIONS} - MEANT.keys()
    if stray := next((name for name in of_merge if name in of_others), None):
        known = ", ".join(name for name, row in rows.items() if row.group)
        raise UsageError(f"{request.command.name} has no such option", f"--{stray.replace('_', '-')}",
                         f"leave it out, or use one of {known}")  # fmt: skip
    for name, value in {**of_merge, **stated}.items():
        if name in rows and isinstance(value, str) and rows[name].kind in ("number", "whole"):
            checked_value(rows[name], value)  # raises
    if missing := next((name for name, row in rows.items() if row.required and name not in stated), None):
        raise UsageError(f"{request.command.name} needs a rule for the {missing}", missing,
                         f"write `--{missing} 16`")  # fmt: skip
    dtype = of_merge.get("dtype")
    if str(dtype).lower() in {*QUANTISED, *QUANTISED_DTYPES} or of_merge.get("keep_precision"):
        raise UsageError("adapters are not quantised", f"`--dtype {shown(dtype)}`", "write `--dtype bf16`")
    stated |= {name: parts(stated[name], f"--{name}") for name in ("include", "exclude") if name in stated}
    if "compute_dtype" in stated:
        stated["compute_dtype"] = _computed(stated["compute_dtype"])
    return stated, of_merge


def recorded(rows: Rows, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a command that its recipe records: the ones that are always recorded, and of the
    stated `values` all that are not the default, by name; numbers of numpy as Python's, which JSON has."""
    always = {name: row.default for name, row in rows.items() if row.recorded == "always" and name not in OF_MERGE}
    every = {**always, **{n: v.item() if isinstance(v, Real) and hasattr(v, "item") else v for n, v in values.items()}}
    return tuple((n, v) for n, v in sorted(every.items()) if n in always or v != rows[n].default)


def one_rank(job: AdapterJob, to: Dialect) -> Dialect:
    """Return a dialect, of which a folder states one rank for all modules where the rules are numbers."""
    return replace(to, one_rank=to.folder and job.rules.all_are(COUNT))


def _output(job: Job, command: Command, rule: str, named: str | Path | None, *, file: bool) -> Path:
    """Return the path of the output, which may be a `file`; `named`: None, or what the user names."""
    if str(named).lower().endswith(".gguf"):
        raise UsageError("no adapter is written as GGUF", str(named), "convert_lora_to_gguf.py of llama.cpp does that")
    if named is None or (file and names_folder(named)):
        ending = "" if command.combines and not file else FILE
        return _named(job, command, rule, absolute(Path()) if named is None else output_path(named), ending)
    return output_file(named) if file else output_path(named)


def _named(job: Job, command: Command, rule: str, folder: Path, ending: str) -> Path:
    """Return the path of the default name in a folder."""
    stems = [a.path.name if is_folder(a.path) else a.path.stem for a in job.adapters]
    name = f"{stems[0]}-r{rule.replace(':', '-')}" if command.cuts else "+".join(stems)
    if any(folder / f"{name}{ending}" == a.path for a in job.adapters):  # of one adapter
        name += f"-{command.name}"
    return folder / f"{name}{ending}"


def stays_folder(adapter: Path, output: str | Path | None) -> bool:
    """Return whether the output is a folder of PEFT because the adapter is one, and its name is not that of a file."""
    named = output is not None and not str(output).endswith(FILE)
    return named and is_file(adapter / ADAPTER_CONFIG) and not is_file(adapter / MLX_FILE)


def _computed(value: Any) -> str:
    """Return the dtype that formulas compute in; UsageError for one in which changes lose digits."""
    dtype = dtype_name(value, OPTIONS["compute_dtype"])
    if dtype not in ("fp32", "fp64"):
        raise UsageError(f"an adapter is not computed in {dtype}", "--compute-dtype", "use fp32 or fp64")
    return dtype


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
