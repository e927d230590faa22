"""The keywords of the Python functions, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from typing_extensions import NotRequired

from .job import Job
from .options import MethodName, OnOverflow, Rounding, Unmatched

if TYPE_CHECKING:
    import torch

SettingValue: TypeAlias = float | bool | str | Sequence[Sequence[int]]
"""A value that an adapter's file lacks: a number, a flag, a word, or ranges of rows."""


class Reading(TypedDict, total=False):
    """The options of every function that reads adapters."""

    strength_for: Mapping[str, float] | Sequence[tuple[str, float]]
    unmatched: Unmatched
    setting: Mapping[str, SettingValue] | Sequence[tuple[str, SettingValue]]
    map: str | Path | None
    compute_dtype: str | torch.dtype
    title: str | None
    metadata: Mapping[str, str] | Sequence[tuple[str, str]]


class Sums(Reading, total=False):
    """The options of every function that adds changes to a base."""

    on_overflow: OnOverflow
    rounding: Rounding


class VerifyOptions(Sums, total=False):
    """The options of `verify`, for outputs without a recipe."""

    seed: int
    method: MethodName
    density: float | None
    gamma: float | None
    epsilon: float | None
    t: float | None
    elect: Literal["sum", "count"]
    normalise: Literal["count", "weight", "none"]
    agree: int | None
    scale: float


class Writing(Reading, total=False):
    """The options of every function that writes a file."""

    dtype: str | torch.dtype
    device: str | torch.device
    strength: Sequence[float] | None
    cache: str | Path | None
    overwrite: bool
    max_memory: int | str
    max_vram: int | str | None
    verify: bool


class CheckpointOptions(Sums, Writing, total=False):
    """The options of every function that writes a checkpoint."""

    keep_precision: Sequence[str]
    tokenizer: str | Path | None
    no_metadata: bool
    card: bool | None


class MergeOptions(VerifyOptions, CheckpointOptions, total=False):
    """The options of `merge`, `plan` and `merge_state_dict`, with the names of the command line."""


class UnmergeOptions(CheckpointOptions, total=False):
    """The options of `unmerge`, and the name that Python has in addition."""

    strengths: Sequence[float] | None


class PythonOptions(MergeOptions, total=False):
    """The options of `merge`, and the names that Python has in addition."""

    strengths: Sequence[float] | None


class AdapterReading(Writing, total=False):
    """The options of `merge` that functions which write adapters have too."""

    strengths: Sequence[float] | None
    include: Sequence[str]
    exclude: Sequence[str]


class AverageOptions(AdapterReading, total=False):
    """Further options of `average`."""

    alpha: str | float
    format: str


class FormOptions(AdapterReading, total=False):
    """Further options of `combine` and `resize`: what the result is like."""

    conv_rank: str | int | None
    max_rank: int | None
    rank_for: Mapping[str, str | int] | Sequence[tuple[str, str | int]]
    format: str


class CombineOptions(FormOptions, total=False):
    """Further options of `combine`: the numbers of its methods."""

    density: float | Sequence[float] | None
    gamma: float | None
    epsilon: float | None
    t: float | None
    elect: str | None
    normalise: str | None
    agree: int | None
    scale: float | None
    seed: int | None


class ResizeOptions(FormOptions, total=False):
    """Further options of `resize`."""

    algorithm: str
    alpha: str | float


class AdapterTable(TypedDict):
    """An adapter of a jobs file. Texts hold templates such as "{s}"."""

    path: str | PathLike[str]
    strength: NotRequired[float | str | None]
    strength_for: NotRequired[Mapping[str, float | str | Sequence[float]]]


JobAdapters: TypeAlias = Sequence[str | PathLike[str] | AdapterTable]


class Defaults(TypedDict, total=False):
    """The fields that a jobs file has once for all jobs, or that a job has itself."""

    command: Literal["merge", "unmerge", "combine", "resize", "convert", "average", "extract"] | None
    base: str | PathLike[str] | None
    adapters: JobAdapters | None
    dtype: str | None
    compute_dtype: str | None
    device: str | None
    strength_for: Mapping[str, float | str | Sequence[float]] | None
    unmatched: Unmatched | None
    on_overflow: OnOverflow | None
    rounding: Rounding | None
    seed: int | None
    keep_precision: Sequence[str] | None
    method: MethodName | None
    density: float | str | None
    gamma: float | str | None
    epsilon: float | str | None
    t: float | str | None
    elect: Literal["sum", "count"] | None
    normalise: Literal["count", "weight", "none"] | None
    agree: int | None
    scale: float | str | None
    setting: Mapping[str, SettingValue] | None
    map: str | PathLike[str] | None
    cache: str | PathLike[str] | None
    tokenizer: str | PathLike[str] | None
    overwrite: bool | None
    max_memory: int | str | None
    max_vram: int | str | None
    verify: bool | None
    title: str | None
    metadata: Mapping[str, str] | None
    no_metadata: bool | None
    card: bool | None
    rank: int | float | str | None
    conv_rank: int | float | str | None
    max_rank: int | None
    rank_for: Mapping[str, int | float | str] | None
    algorithm: str | None
    alpha: float | str | None
    to: str | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    others: Literal["diff", "skip", "error"] | None
    format: str | None
    factor: int | None
    weights: Sequence[float] | None
    ema: float | str | None
    ema_to: float | str | None
    sigma_rel: float | str | None
    space: Literal["delta", "factors"] | None


class JobTable(Defaults):
    """One job of a jobs file, or with a `matrix` as many as there are combinations."""

    output: str | PathLike[str]
    matrix: NotRequired[Mapping[str, object] | None]


class JobsTable(TypedDict):
    """The content of a jobs file."""

    version: Literal[1]
    defaults: NotRequired[Defaults]
    jobs: Sequence[JobTable]


Jobs: TypeAlias = (
    str | Path | JobsTable | Sequence[Job] | Sequence[JobTable] | Mapping[str, object] | Sequence[Mapping[str, object]]
)
"""What `run_batch` takes: a path, the content of a jobs file, or its jobs. Plain tables are checked when it runs."""
