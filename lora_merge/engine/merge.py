"""Runs plans that share a base: writes their outputs, then verifies, names and reports each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..addresses import with_addresses
from ..change_statistics import Measure
from ..disk.files import sha256
from ..disk.hashes import RunningHashes
from ..disk.publish import named, put_file, replacing
from ..disk.reader import Reader, changed
from ..disk.system import peak_memory
from ..disk.uploads import sink_of, upload_notes
from ..disk.writer import copy_file
from ..dtypes import COMPUTE_DTYPES, ITEM_BYTES
from ..errors import MergeError, TooLarge, as_resource_error, cause, resource_errors
from ..models.blocks import groups
from ..planning.header_entries import final_headers
from ..planning.model_card import card, card_path, has_section
from ..planning.output_files import Card, contents
from ..planning.plan import Plan, coverage, files
from ..process import deliver_pending
from ..progress import Progress, Step, unwatched
from ..proof.verify import keep_samples, verify
from ..report import Report
from ..sources.outputs import present
from ..survival import judgement
from ..text import Note
from ..version import __version__
from .change_effect import check_effect
from .pipeline import Pipeline, WrittenOutput

Result = TypeVar("Result")


def run(plan: Plan, progress: Progress = unwatched) -> Report:
    """Run a plan: the output appears under its name when it is complete and verified, or not at all."""
    with closing(run_together([plan], progress)) as outcomes:
        _, outcome = next(outcomes)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run_together(
    plans: Sequence[Plan], progress: Progress = unwatched
) -> Generator[tuple[int, Report | Exception], None, None]:
    """Run plans of one layout, device and compute dtype while the base is read once.

    Yields the number of each plan with its report, once its output has its name, or with an error of this plan alone.
    Errors that affect all plans are raised.
    """
    with resource_errors(), ExitStack() as stack:
        stacks = [stack.enter_context(ExitStack()) for _ in plans]  # remove outputs without a name at the end
        for plan in plans:
            progress(Step("load", plan.job.output_name, total=plan.size))
        # Outputs under temporary names; an output that cannot be opened drops out.
        outputs = [_open(plan, cleanup, progress) for plan, cleanup in zip(plans, stacks, strict=True)]
        ready = [o for o in outputs if isinstance(o, _Output)]
        indexes = [i for o in ready for i in (o.plan.base, *(m.adapter.index for m in o.plan.adapters))]
        reader = stack.enter_context(Reader(indexes))
        # All of them written at once.
        began = time.monotonic()
        written = iter(_write(ready, reader, stack, progress))
        share = (time.monotonic() - began) / max(1, len(ready))
        # Each of them proven, renamed and reported, while the caller waits for it.
        for number, o in enumerate(outputs):
            outcome: Report | Exception
            if isinstance(o, _Output):
                result = next(written)
                deliver_pending()
                if isinstance(result, Exception):
                    outcome = o.failed(result)
                else:
                    outcome = o.attempt(partial(_end, o, result, reader, share, progress))
            else:
                deliver_pending()
                outcome = o
            yield number, outcome


def _write(
    outputs: Sequence[_Output], reader: Reader, stack: ExitStack, progress: Progress
) -> Sequence[WrittenOutput | Exception]:
    if not outputs:
        return ()
    plans, first = [o.plan for o in outputs], outputs[0].plan
    inputs = [p for plan in plans for p in plan.inputs]
    keep_samples([plan for plan in plans if plan.job.verify], reader)
    digests = stack.enter_context(RunningHashes(reader, first.base.files, inputs, ahead=len(plans) == 1))
    return Pipeline(plans, [o.part for o in outputs], digests, progress).run()


@dataclass(frozen=True)
class _Output:
    """One plan's output from its creation under a temporary name until it gets its own name."""

    plan: Plan
    part: Path  # with the temporary name
    stack: ExitStack  # renames the output when it is closed, and removes it after an error
    opening: float  # seconds until it was there

    def attempt(self, act: Callable[[], Result]) -> Result | Exception:
        """Return the result of `act`, or its error of any kind, which ends this output alone."""
        try:
            return act()
        except Exception as e:  # noqa: BLE001
            return self.failed(e)

    def failed(self, e: Exception) -> Exception:
        """Remove the unfinished output, and return the error with the output's own name for the temporary one."""
        failure, words = as_resource_error(e) or e, named(self.part, self.plan.job.output)
        if isinstance(failure, MergeError):
            failure.reword(words)
        if isinstance(failure, OSError) and isinstance(failure.filename, str):
            failure.filename = words(failure.filename)
        if isinstance(failure, TooLarge):
            failure.locate(self.plan.job.output_name)
        self.stack.__exit__(type(e), e, e.__traceback__)
        return failure


def _open(plan: Plan, stack: ExitStack, progress: Progress) -> _Output | Exception:
    """Return the output under its temporary name, or the error that prevents it."""
    started, job = time.monotonic(), plan.job
    try:
        part = stack.enter_context(replacing(job.output, plan.inputs, overwrite=job.overwrite, folder=plan.is_folder,
                                             contents=plan.contents, progress=progress))  # fmt: skip
    except Exception as e:  # noqa: BLE001
        return as_resource_error(e) or e
    output = _Output(plan, part, stack, 0.0)

    def prepared() -> _Output:
        _prepare(plan, part)
        return replace(output, opening=time.monotonic() - started)

    return output.attempt(prepared)


def _end(output: _Output, written: WrittenOutput, reader: Reader, share: float, progress: Progress) -> Report:
    """Verify the finished output, give it its name, and return the report.

    `share`: its share, in seconds, of the time in which it and others were written.
    """
    ending = time.monotonic()
    progress(Step("prove", output.plan.job.output_name))
    proof = _prove(written, reader, progress)
    far = sink_of(written.plan.job.output) is not None
    notes = _write_card(written.plan) if far else ()  # it is uploaded with the output
    output.stack.close()
    notes = (*notes, *upload_notes(written.plan.job.output)) if far else _write_card(written.plan)
    return _report(written, proof, output.opening + share + time.monotonic() - ending, notes)


def _write_card(plan: Plan) -> tuple[Note, ...]:
    """Write the model card next to an output file, if the job asks for one; return notes on what prevented it."""
    if plan.is_folder or not plan.has_card:
        return ()
    path = card_path(plan)
    old = present(path)
    if old is not None and not has_section(old):
        return (Note(f"the card that is there stays as it is: {with_addresses(str(path))}"),)
    content = None if path in plan.read or path.is_symlink() else card(plan, old or path)
    if content is None:
        return (Note(f"no model card was written: another kind of file is at {path}"),)
    try:
        put_file(path, content)
    except MergeError as e:
        return (Note(f"no model card was written: {cause(e)} ({path})"),)
    return ()


def _prove(written: WrittenOutput, reader: Reader, progress: Progress) -> Mapping[str, Any] | None:
    """Return the result of `verify`, or None if the job does not ask for it.

    An input that was touched while it was read must have the bytes that were hashed, and the output is then verified to
    the last byte, whatever the job says: the input may have had other bytes in between.
    """
    plan = written.plan
    check_effect(plan.adapters, written.measures, reader)
    # Inputs that were touched while they were read.
    touched = reader.check_unchanged(plan.inputs)
    for path, digest in zip(plan.inputs, written.digests, strict=True):
        if path in touched and sha256(path) != digest:
            raise changed(path, "its bytes differ, though its time of change does not")
    # The proof of the output.
    proof = None
    if plan.job.verify or touched:
        headers = final_headers(plan, written.digests, written.sums)
        proof = verify(plan, written.part, reader, full=bool(touched), written=headers, progress=progress,
                       recorded=written.measures.samples, measured=_measured(written))  # fmt: skip
    if touched != reader.check_unchanged(plan.inputs):
        raise changed(next(iter(touched), plan.inputs[0]), "its times of change differ")
    words = named(written.part, plan.job.output)
    return proof and {**proof, "warnings": [Note(words(text)) for text in proof["warnings"]]}


def _measured(written: WrittenOutput) -> Sequence[Measure]:
    """Return what the merge measured of each adapter's change; nothing if the output holds what was computed, digit
    by digit: what the computation itself has lost is not seen then."""
    plan, computed = written.plan, ITEM_BYTES[COMPUTE_DTYPES[written.plan.job.compute_dtype]]
    changed = [t.packing.encoding for t in plan.targets if t.uses]
    blind = all(encoding.plain and ITEM_BYTES[encoding.title] >= computed for encoding in changed)
    return [] if blind else written.measures.of_adapters(len(plan.job.adapters))


def _report(written: WrittenOutput, proof: Mapping[str, Any] | None, seconds: float, notes: Sequence[Note]) -> Report:
    plan, job = written.plan, written.plan.job
    proven = {n for n, row in enumerate(proof["retained"]) if row["retained"] is not None} if proof else set()
    lost = tuple(written.measures.lost(job, proven))
    measures = written.measures.of_adapters(len(job.adapters))
    survival = [judgement(ref.path.name, m.all.survives) for ref, m in zip(job.adapters, measures, strict=True)]
    numbers = written.measures.to_dict(len(job.adapters), groups(plan.names), written.saturated)
    if proof:  # whose numbers are a sample of these
        numbers = numbers or proof["numbers"]
        survival = [row if n in proven else survival[n] for n, row in enumerate(proof["survival"])]
        proof = {name: facts for name, facts in proof.items() if name not in ("numbers", "survival")}
    return Report(
        output=job.output_name, base=str(job.base), architecture=plan.architecture, coverage=coverage(plan),
        tensors=sum(len(f.targets) for f in plan.files), changed=plan.changed, written=plan.size,
        seconds=seconds, device=written.device, device_choice=written.choice,
        dtype=job.dtype, compute_dtype=job.compute_dtype, method=job.method, stages=written.stages,
        peak_memory=peak_memory(), verified=proof, version=__version__,
        codes=plan.codes, files=files(plan), saturated=written.saturated, numbers=numbers,
        notes=(*plan.base.notes, *written.notes, *notes, *lost), survival=survival,
    )  # fmt: skip


def _prepare(plan: Plan, part: Path) -> None:
    """Write the files of an output folder that hold no weights, and empty files for the weights."""
    if not plan.is_folder:
        return
    for name in plan.contents:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        (part / file.name).touch()
    for name, content in contents(plan).sides.items():
        if isinstance(content, bytes | Card):
            (part / name).write_bytes(content.content if isinstance(content, Card) else content)
        else:
            copy_file(content, part / name)
