"""One job: windows through the ring, proof, name, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from . import __version__
from .checkpoint import Reader
from .disk import require_space
from .formats import replacing
from .job import COMPUTE_DTYPES
from .placement import place
from .planning import Plan, coverage
from .report import Report, peak_memory
from .verify import verify
from .writing import Writing

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes just written."""


def run(plan: Plan, progress: Progress = lambda _: None) -> Report:
    """Carry out a plan: the output appears under its name complete and verified, or not at all."""
    started = time.monotonic()
    job = plan.job
    at = place(job.device, COMPUTE_DTYPES[job.compute_dtype])
    with ExitStack() as stack:
        part = stack.enter_context(replacing(job.output, plan.inputs, overwrite=job.overwrite, folder=plan.is_folder))
        require_space(part, plan.size)
        reader = stack.enter_context(Reader([plan.base, *(m.adapter.index for m in plan.adapters)]))
        work = Writing(plan, reader, at, part, progress)
        work.run()
        reader.check_unchanged()
        proof = verify(plan, part, reader) if job.verify else None
    return Report(
        output=str(job.output), base=str(job.base), architecture=plan.architecture, coverage=coverage(plan),
        tensors=sum(len(f.targets) for f in plan.files), changed=plan.changed, written=plan.size,
        seconds=time.monotonic() - started, device=str(at.device), dtype=job.dtype, compute_dtype=job.compute_dtype,
        stages=work.seconds, peak_memory=peak_memory(), verified=proof, version=__version__,
    )  # fmt: skip
