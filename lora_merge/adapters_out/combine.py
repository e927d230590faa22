"""Plans and runs `combine`, `resize` and `average` of changes: on each weight of the base the changes of all adapters
become one. `--format` says which modules have its rows. No torch, unless a layer needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..command import Request
from ..errors import FitError
from ..models.part_factors import or_leave_out
from ..options import KEEP
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Progress, unwatched
from .dialects import Dialect, dialect
from .form import Conversion
from .input_adapters import InputAdapters, chosen_of, open_adapters, without_base
from .job import AdapterJob, adapter_job
from .output_names import spelling_of
from .pipeline import AdapterRun, grouped, output_dtype, plan_modules, write_modules
from .report import AdapterReport

TRAINED_APART: Final = (
    "the head was trained apart from the embeddings that share its weight in this base, which a sum has no name for"
)


def make_job(request: Request, _: CheckpointCache | None = None) -> AdapterJob:
    """Return the job of `combine` or `resize`; UsageError or FitError for an option or a value that is wrong."""
    return adapter_job(request)


def plan(job: AdapterJob, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks if headers show them."""
    job = replace(job, inputs=replace(job.inputs, overwrite=True))
    return plan_modules(_conversion(job, open_adapters(job, cache)))


def run(job: AdapterJob, progress: Progress = unwatched, _: CheckpointCache | None = None) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    with AdapterRun(job, progress) as this:
        return write_modules(_conversion(job, open_adapters(job, this.hash_adapters())), this)


def _conversion(job: AdapterJob, inputs: InputAdapters) -> Conversion:
    """Return the modules that the changes become: in the dialect that `--format` names, or that the first adapter has
    if it has one module for several weights of the base; else in the words of the first adapter."""
    job = replace(job, dtype=output_dtype(job, inputs.adapters))
    name = inputs.fused if job.format == KEEP else job.format
    if name == KEEP:
        return grouped(job, inputs, spelling_of(inputs.adapters[0]))
    to = _dialect(name, job, inputs)
    if job.base is None:
        inputs = chosen_of(job, without_base(job, inputs.adapters, to))
    return grouped(replace(job, format=to.name), inputs, to)


def _dialect(name: str, job: AdapterJob, inputs: InputAdapters) -> Dialect:
    """Return the dialect of the output; FitError for one that cannot hold the sum."""
    to = dialect(name)
    if to is None:
        raise FitError("the first adapter has one module for several weights of this base, in words of no dialect",
                       str(job.adapters[0].path), "name the output's dialect, such as `--format kohya`")  # fmt: skip
    known = inputs.names.shapes if inputs.names else {}
    head = next((t.key for t in inputs.targets if known and t.key not in known), "")
    if to.folder and head:
        raise FitError(
            TRAINED_APART, head, or_leave_out("give a base that stores both (tie_word_embeddings: false)", [head])
        )
    return to
