"""The user's request to `extract`, checked and frozen. No file is read for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import UsageError
from ...options import shown
from ...paths import is_folder, names_folder, output_file
from ..dialects import DIALECTS, Dialect, dialect
from ..job import OTHER_DEFAULTS, AdapterJob, make_adapter_job
from ..rank_rules import COUNT, SAME

FORMAT, CHANGES, SKIP, ERROR = "auto", "diff", "skip", "error"
OTHERS: Final = (CHANGES, SKIP, ERROR)
"""The values of `--others`: what becomes of biases, norms and other vectors that changed."""

OWN: Final[Mapping[str, Any]] = {"others": CHANGES, "format": FORMAT, "factor": -1}
"""Option of this command alone → default."""


@dataclass(frozen=True)
class Extraction:
    """One run of `extract`. `job.adapters` is the tuned checkpoint, `job.base` the base."""

    job: AdapterJob
    to: Dialect | None  # None: chosen by the architecture
    others: str
    factor: int  # of Kronecker products

    @property
    def base(self) -> Path:
        """The checkpoint before the training."""
        assert self.job.base is not None, "the command requires it"
        return self.job.base

    @property
    def tuned(self) -> Path:
        """The checkpoint after it."""
        return self.job.adapters[0].path

    def at(self, output: Path) -> Extraction:
        """Return the extraction to another output."""
        return replace(self, job=replace(self.job, inputs=replace(self.job.inputs, output=output)))

    def written_as(self, to: Dialect, output: str | Path) -> Extraction:
        """Return the extraction in a dialect, with the output that the user names for it: in a folder, a file has the
        default name."""
        made = replace(self, to=replace(to, one_rank=to.folder and self.job.rules.all_are(COUNT)))
        if to.folder:
            return made
        inside = names_folder(output)
        return made.at(self.job.output / _named(self.base, self.tuned, to) if inside else output_file(output))


def make_extraction(
    base: str | Path, tuned: str | Path, output: str | Path | None, options: Mapping[str, Any]
) -> Extraction:
    """Return the job of `extract`; UsageError for an option or a value that is wrong."""
    given = {name: value for name, value in options.items() if value is not None}
    own = {**OWN, **{name: given.pop(name) for name in OWN if name in given}}
    to = None if own["format"] == FORMAT else dialect(str(own["format"]))
    if own["format"] != FORMAT and (to is None or not to.whole_models):
        known = ", ".join(row.name for row in DIALECTS.values() if row.whole_models)
        raise UsageError(f"{shown(own['format'])!r} is no format of a difference", "--format", f"use one of {known}")
    if own["others"] not in OTHERS:
        raise UsageError(f"biases and norms cannot be treated as {shown(own['others'])!r}", "--others",
                         f"use one of {', '.join(OTHERS)}")  # fmt: skip
    if not isinstance(own["factor"], int) or not (own["factor"] == -1 or own["factor"] > 0):
        raise UsageError(f"{shown(own['factor'])!r} cannot be the factor", "--factor", "use -1, or 1 and more")
    job = make_adapter_job("extract", [tuned], output, base, {**OTHER_DEFAULTS["extract"], **given})
    if job.rules.has(SAME):
        raise UsageError("a checkpoint has no rank to keep", "--rank same", "give a number or energy:x")
    recorded = (*job.options, *((n, v) for n, v in sorted(own.items()) if v != OWN[n]))
    made = Extraction(replace(job, options=recorded), to, own["others"], own["factor"])
    if output is None:
        return made.at(job.output.parent / _named(made.base, made.tuned, to))
    return made if to is None else made.written_as(to, output)


def _named(base: Path, tuned: Path, to: Dialect | None) -> str:
    stems = [p.name if is_folder(p) else p.stem for p in (tuned, base)]
    name = "-minus-".join(stems)
    return name if to and to.folder else f"{name}.safetensors"
