"""One job: windows through the ring, proof, name, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from . import __version__
from .checkpoint import Reader
from .disk import copy_file
from .formats import replacing
from .job import COMPUTE_DTYPES, DTYPES
from .placement import place
from .planning import Plan, coverage
from .report import Report, peak_memory
from .sidefiles import configured
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
        part = stack.enter_context(replacing(job.output, plan.inputs, overwrite=job.overwrite, folder=plan.is_folder,
                                             contents=plan.contents))  # fmt: skip
        _prepare(plan, part)
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


def _prepare(plan: Plan, part: Path) -> None:
    """What an output folder holds beside the weights, and empty files for the weights."""
    if not plan.is_folder:
        return
    for name in plan.contents:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        (part / file.name).touch()
    for name, content in plan.indexes:
        (part / name).write_bytes(content)
    for name in plan.sides:
        if Path(name).name == "config.json":
            content = (plan.base.path / name).read_bytes()
            (part / name).write_bytes(configured(content, DTYPES.get(plan.job.dtype)))
        else:
            copy_file(plan.base.path / name, part / name)
