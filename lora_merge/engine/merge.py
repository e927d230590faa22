"""Jobs that share a base, one or many: windows through the ring, then proof, name and report for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ..disk.hashes import RunningHashes
from ..disk.publish import replacing
from ..disk.reader import Reader, changed
from ..disk.system import peak_memory
from ..disk.writer import copy_file
from ..errors import MergeError, TooLarge, as_resource_error
from ..planning.outputs import contents
from ..planning.plan import Plan, coverage
from ..planning.recipe import sha256
from ..process import deliver_pending
from ..proof.verify import verify
from ..report import Report
from ..version import __version__
from .pipeline import Pipeline

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes just written."""


def run(plan: Plan, progress: Progress = lambda _: None) -> Report:
    """Carry out a plan: the output appears under its name complete and verified, or not at all."""
    with closing(run_together([plan], progress)) as outcomes:
        _, outcome = next(outcomes)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run_together(
    plans: Sequence[Plan], progress: Progress = lambda _: None
) -> Generator[tuple[int, Report | Exception], None, None]:
    """Carry out plans of one layout, device and compute dtype while the base is read once.

    Yields the number of each plan with its report, or with what went wrong with it alone, as it gets its name.
    What concerns all of them is raised.
    """
    outputs = [_Output(n, plan) for n, plan in enumerate(plans)]
    with _scarcity_told(), ExitStack() as stack:
        for o in outputs:
            stack.push(o.stack)  # what is not published at the end is removed
            o.attempt(o.open)
        ready = [o for o in outputs if o.failure is None]
        if ready:
            for place, o in enumerate(ready):
                o.place = place
            indexes = [i for o in ready for i in (o.plan.base, *(m.adapter.index for m in o.plan.adapters))]
            reader = stack.enter_context(Reader(indexes))
            inputs = [p for o in ready for p in o.plan.inputs]
            digests = stack.enter_context(RunningHashes(reader, plans[0].base.files, inputs, ahead=len(ready) == 1))
            work = Pipeline([o.plan for o in ready], [o.part for o in ready], digests, progress)
            work.run()
            for n, failure in work.failed.items():
                ready[n].fail(failure)
        for o in outputs:
            report = None
            deliver_pending()
            if o.failure is None:
                report = o.attempt(lambda o=o: o.publish(reader, work))  # type: ignore[misc]
            yield o.number, report or o.failure or AssertionError("neither done nor failed")


@contextmanager
def _scarcity_told() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        scarce = as_resource_error(e)
        if scarce is None:
            raise
        raise scarce from e


@dataclass
class _Output:
    """One plan's output between its first byte and its name."""

    number: int
    plan: Plan
    started: float = field(default_factory=time.monotonic)
    stack: ExitStack = field(default_factory=ExitStack)
    part: Path = Path()
    place: int = 0  # among the plans that are written together
    failure: Exception | None = None

    def attempt(self, act: Callable[[], Report | None]) -> Report | None:
        """What the act returns; a failure of any kind ends this output alone, and is its outcome."""
        try:
            return act()
        except Exception as e:  # noqa: BLE001
            self.fail(e)
            return None

    def fail(self, e: Exception) -> None:
        """Remove what was written; the error speaks of the output, not of its temporary name."""
        self.failure, output = as_resource_error(e) or e, self.plan.job.output
        if isinstance(self.failure, MergeError) and self.part.name:
            self.failure.rename(str(self.part), str(output))
            self.failure.rename(self.part.name, output.name)
        if isinstance(self.failure, OSError) and self.part.name and isinstance(self.failure.filename, str):
            self.failure.filename = self.failure.filename.replace(str(self.part), str(output))
        if isinstance(self.failure, TooLarge):
            self.failure.locate(str(output))
        self.stack.__exit__(type(e), e, e.__traceback__)

    def open(self) -> None:
        """Make the output under its temporary name."""
        plan, job = self.plan, self.plan.job
        self.part = self.stack.enter_context(
            replacing(job.output, plan.inputs, overwrite=job.overwrite, folder=plan.is_folder, contents=plan.contents)
        )
        _prepare(plan, self.part)

    def publish(self, reader: Reader, work: Pipeline) -> Report:
        """Prove the finished output and give it its name.

        Inputs that were touched while they were read must have the bytes that were hashed, and the output is proven to
        the last byte, asked for or not: they may have had others in between.
        """
        plan, job = self.plan, self.plan.job
        touched, digests = reader.check_unchanged(plan.inputs), work.digests.of(plan.inputs)
        for path, digest in zip(plan.inputs, digests, strict=True):
            if path in touched and sha256(path) != digest:
                raise changed(path, "its bytes differ, though its time of change does not")
        written, full = work.headers[self.place], bool(touched)
        proof = verify(plan, self.part, reader, full=full, written=written) if job.verify or full else None
        if touched != reader.check_unchanged(plan.inputs):
            raise changed(next(iter(touched), plan.inputs[0]), "its times of change differ")
        self.stack.close()
        return Report(
            output=str(job.output), base=str(job.base), architecture=plan.architecture, coverage=coverage(plan),
            tensors=sum(len(f.targets) for f in plan.files), changed=plan.changed, written=plan.size,
            seconds=time.monotonic() - self.started, device=work.making.device,
            dtype=job.dtype, compute_dtype=job.compute_dtype, method=job.method, stages=work.seconds,
            peak_memory=peak_memory(), verified=proof, version=__version__,
            saturated=dict(sorted(work.making.saturated[self.place].items())),
            notes=(*plan.base.notes, *work.making.folder.notes),
        )  # fmt: skip


def _prepare(plan: Plan, part: Path) -> None:
    """What an output folder holds beside the weights, and empty files for the weights."""
    if not plan.is_folder:
        return
    for name in plan.contents:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        (part / file.name).touch()
    for name, content in contents(plan).sides.items():
        if isinstance(content, bytes):
            (part / name).write_bytes(content)
        else:
            copy_file(content, part / name)
