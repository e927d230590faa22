"""`combine`, `resize` and `average` with `--format`: the result in the words of the first adapter, written again in
another dialect. Factors stay as they are where the dialect can hold them, so nothing is lost the second time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

from ...adapter_options import KEEP
from ...errors import MergeError
from ...files.checkpoint import open_checkpoint
from ...files.layouts import PEFT
from ...matching.remarks import NO_ALPHA
from ...planning.recipe import KEY
from ...progress import Progress, unwatched
from ...text import Note
from ..convert import make_conversion
from ..convert import run as run_conversion
from ..dialects import DIALECTS, dialect
from ..job import AdapterJob, form
from ..report import AdapterReport
from ..run import plan as plan_in_own
from ..run import run as run_in_own

DIFFUSERS_DOWN: Final = DIALECTS["diffusers"].endings["down"]
COMFY: Final = (DIALECTS["comfy"].denoiser, "text_encoders.")
OF_PEFT: Final = Note("PEFT's names in a file: PEFT loads a folder, which --format peft writes")
WHOLE_CHANGES: Final = Note(
    "it has whole changes (.diff, .diff_b), which diffusers leaves out in silence; --format diffusers stores those of "
    "biases as diffusers reads them"
)


def _unread(keys: Iterable[str]) -> Iterator[Note]:
    """Yield notes on what the loader whose names a file has does not take."""
    keys = [*keys]
    factors = [key for key in keys if key.endswith(DIFFUSERS_DOWN)]
    if any(key.startswith(PEFT) for key in keys):
        yield OF_PEFT
    elif factors and not factors[0].startswith(COMFY) and any(key.endswith((".diff", ".diff_b")) for key in keys):
        yield WHOLE_CHANGES


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers."""
    return replace(plan_in_own(job), format=job.format)


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    if job.format == KEEP:
        done = run_in_own(job, progress)
        return replace(done, notes=(*done.notes, *_unread(open_checkpoint(job.output).tensors)))
    there = next(f for f in (job.output.parent, *job.output.parent.parents) if f.exists())
    with tempfile.TemporaryDirectory(dir=there, prefix=".lora-merge-") as folder:
        whole = Path(folder) / "whole.safetensors"
        to = dialect(job.format)
        algorithm = form(job.algorithm, to) if to else job.algorithm
        alpha = job.alpha if to is None or to.alpha else "rank"  # another one would be folded in by a second rounding
        own = replace(job, format=KEEP, algorithm=algorithm, alpha=alpha, inputs=replace(job.inputs, output=whole))
        first = run_in_own(own, progress)
        given = {
            name: getattr(job.inputs, name)
            for name in ("overwrite", "max_memory", "max_vram", "device", "map", "verify")
        }
        again = make_conversion(whole, job.output, job.base, {"to": job.format, **given})
        told: dict[str, Any] = json.loads(open_checkpoint(whole).metadata[KEY])
        try:
            second = run_conversion(again, progress, recipe=told)
        except MergeError as e:
            e.rename(str(whole), str(job.adapters[0].path))  # the other file is gone
            raise
    residual = sqrt(first.residual**2 + second.residual**2)
    return replace(
        first, output=second.output, format=second.format, dtype=second.dtype, residual=residual,
        energy=1 - residual**2, written=second.written, seconds=first.seconds + second.seconds,
        notes=tuple(dict.fromkeys((*first.notes, *(n for n in second.notes if NO_ALPHA not in n)))),
        stages={stage: seconds + second.stages.get(stage, 0.0) for stage, seconds in first.stages.items()},
    )  # fmt: skip
