"""The keywords of the Python functions, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from .options import MethodName, OnOverflow, Rounding, Unmatched

if TYPE_CHECKING:
    import torch


class Reading(TypedDict, total=False):
    """The options of every function that reads adapters."""

    strength_for: Mapping[str, float] | Sequence[tuple[str, float]]
    unmatched: Unmatched
    setting: Mapping[str, Any] | Sequence[tuple[str, Any]]
    map: str | Path | None
    title: str | None
    metadata: Mapping[str, str] | Sequence[tuple[str, str]]


class VerifyOptions(Reading, total=False):
    """The options of `verify`, for outputs without a recipe."""

    on_overflow: OnOverflow
    rounding: Rounding
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
    compute_dtype: str | torch.dtype
    device: str | torch.device
    strength: Sequence[float] | None
    overwrite: bool
    max_memory: int | str
    max_vram: int | str | None
    verify: bool


class MergeOptions(VerifyOptions, Writing, total=False):
    """The options of `merge`, `plan` and `merge_state_dict`, with the names of the command line."""

    keep_precision: Sequence[str]
    no_metadata: bool
    card: bool | None


class PythonOptions(MergeOptions, total=False):
    """These options, and the names that Python has in addition."""

    strengths: Sequence[float] | None


class AdapterReading(Writing, total=False):
    """The options of `merge` that functions which write adapters have too."""

    strengths: Sequence[float] | None
    include: Sequence[str]
    exclude: Sequence[str]


class AdapterOptions(AdapterReading, total=False):
    """Further options of `combine`: what the result is like."""

    density: float | Sequence[float] | None
    gamma: float | None
    epsilon: float | None
    t: float | None
    elect: str | None
    normalise: str | None
    agree: int | None
    scale: float | None
    seed: int | None
    conv_rank: str | int | None
    max_rank: int | None
    rank_for: Mapping[str, str | int] | Sequence[tuple[str, str | int]]
    format: str


class ResizeOptions(AdapterOptions, total=False):
    """Further options of `resize`."""

    algorithm: str
    alpha: str | float
