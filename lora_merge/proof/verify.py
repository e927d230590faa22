"""Proves a written merge: the header is the planned one, untouched bytes are the base's, merged rows are right.

Merged rows are recomputed in float64 by formulas that share no code with the ones that wrote them (recomputation.py,
reference/). By default a fixed sample of a few rows of every tensor is proven; with `full`, every byte.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..change_statistics import Checked, Measure
from ..disk.files import FileState, open_regular
from ..disk.pages import ReadAhead
from ..disk.reader import Reader, read_bytes
from ..disk.remote import remote
from ..disk.system import RANDOM, advise
from ..dtypes import ITEM_BYTES, StoredTensor, spoken
from ..errors import InputError, VerificationFailed
from ..files.checkpoint import read_header
from ..models.blocks import groups
from ..paths import input_name
from ..planning.header_entries import CHECKSUM_DIGITS, checksummed, sums_of
from ..planning.plan import OutputFile, OutputTensor, Plan
from ..planning.recipe import CHECKSUMS
from ..progress import Progress, counted, unwatched
from ..survival import ENOUGH, judgement
from ..text import Message, Note, by_component, listed, plural, quoted
from .account import account
from .grids import DECODED, ROUNDING, plain_grid
from .loadable import check_folder, check_opened
from .proof_report import REPORT_HEADERS, Findings, remedy
from .reference.floats import decode
from .reference.numpy_threads import one_core
from .row_comparison import UNASKED, RowComparison, Written, read_exactly
from .sample import ALL_BELOW, Range, neighbours, ranges, stretch
from .second_reading.comparison import read_again
from .weights import CodedWeight, coded_output

SUSPECT_DISK: Final = "merge again; if it fails again with the same inputs, suspect disk and memory, or report it"
SURELY_ENOUGH: Final = (1 + ENOUGH) / 2  # the share in a few rows from which bf16 is named as the cure
SMALLEST_NORMAL: Final = 2.0**-1022  # the divisor in place of 0
THREADS: Final = 8  # threads that recompute; each holds a dozen arrays of 2 MiB


def verify(  # noqa: PLR0913  # what is proven, how far, and who sees the progress
    plan: Plan,
    part: Path,
    reader: Reader,
    *,
    full: bool = False,
    written: Iterable[bytes] | None = None,
    recorded: Mapping[str, Checked] | None = None,
    measured: Sequence[Measure] = (),
    judged: str = "",
    progress: Progress = unwatched,
) -> dict[str, Any]:
    """Return the proof of the files at `part`; VerificationFailed if they are not what the plan says.

    `judged`: the compute dtype whose rounding is allowed; "": that of the job, whose user asked for it.

    `written`: the headers of the files, where this plan has just written them: they must be equal byte by byte.
    `recorded`: what the merge recorded of some rows; a warning says if the rows do not confirm it.

    `measured`: what the merge measured of the change of each adapter: warnings judge that, and not the sample.
    """
    # What the plan takes from each adapter, by a second reading of it.
    started, compared = time.monotonic(), {"bytes": 0, "of": 0, "converted": 0}
    matching, tensors = read_again(plan, reader).to_dict(), account(plan, reader).to_dict()
    with one_core(), ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="proof") as pool:
        # The headers.
        report = _byte_counter(plan, progress, full=full)
        paths = [part / f.name if f.name else part for f in plan.files]
        checked, notes = [], list[Note]()
        headers = [None] * len(paths) if written is None else written
        for file, path, header in zip(plan.files, paths, headers, strict=True):
            checked.append(check_header(file, path, header))
            notes += check_opened(file, path, header)
        # The values.
        coded = _coded_outputs(paths, checked)
        merged = RowComparison(plan, reader, pool, full=full, outputs=coded, recorded=recorded or {}, judged=judged)
        for path, targets in zip(paths, checked, strict=True):
            _check(targets, path, merged, compared, report)
    # The files next to them, and what all findings together say.
    check_folder(plan, part, new=written is not None)
    _conclude(plan, merged, part, new=written is not None)
    notes += _expect_evidence(plan, merged, part)
    if full:
        _check_sums(paths, checked)
    proof = _proof(plan, merged, compared, measured, full=full)
    proof["warnings"] += dict.fromkeys(notes)
    return proof | {"matching": matching, "account": tensors, "seconds": time.monotonic() - started}


def keep_samples(plans: Iterable[Plan], reader: Reader) -> None:
    """Let the reader keep what default proofs will read of inputs on other machines, when the merge reads it."""
    if any(map(remote, reader.paths)):
        reader.keep(_of_inputs(piece for plan in plans for piece in _sample(plan, reader)))


def _sample(plan: Plan, reader: Reader) -> Iterator[Range]:
    merged = RowComparison(plan, reader, full=False)
    for file in plan.files:
        unmerged = _unmerged(file.targets, Counter(), merged.scales, full=False)
        yield from (*map(stretch, neighbours(unmerged)), *_rows(file.targets, merged))


def _coded_outputs(paths: Sequence[Path], targets: Sequence[Sequence[OutputTensor]]) -> dict[str, CodedWeight]:
    """Return how the merged weights of codes are read from the output; `targets`: the tensors in each of the files."""
    coded = [t for some in targets for t in some if t.packed and not t.copied]
    if not coded:
        return {}  # a table of all places takes 100 bytes a tensor
    places = {t.name: (path, t) for path, some in zip(paths, targets, strict=True) for t in some}
    return {t.name: coded_output(t, places, read_bytes) for t in coded}


def _byte_counter(plan: Plan, progress: Progress, *, full: bool) -> Callable[[int], object]:
    """Return a function that reports compared bytes, of those of all merged and, with `full`, all tensors.

    A sample of the unchanged ones takes next to no time compared with the merged ones, and is not counted.
    """
    total = sum(t.nbytes for t in plan.targets if t.uses or full)
    return counted(progress, "prove", plan.job.output_name, total)


def _check(
    targets: Sequence[OutputTensor], path: Path, merged: RowComparison, compared: dict[str, int],
    report: Callable[[int], object],
) -> None:  # fmt: skip
    """Compare the untouched bytes and merged rows of one file."""
    reader = merged.reader
    fd = remote(path) or os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        groups_of_ranges = list(neighbours(_unmerged(targets, compared, merged.scales, full=merged.full)))
        with ThreadPoolExecutor(1, thread_name_prefix="expect") as ahead:
            if not merged.full:
                ahead.submit(_expect, fd, reader, [*map(stretch, groups_of_ranges), *_rows(targets, merged)])
            for some in groups_of_ranges:
                if len(some) == 1 or not _same(*stretch(some), fd, reader):
                    for target, first, count in some:
                        merged.findings.count(cut=_compare(target, first, count, fd, merged))
                if merged.full:
                    report(sum(count for _, _, count in some))
            for target in targets:
                if target.uses:
                    merged.check(target, fd, report)
                    merged.confirm(target, fd)
    except OSError as e:
        raise _failed("the written file cannot be read back", f"{path}: {e.strerror}") from e
    finally:
        if isinstance(fd, int):
            os.close(fd)


def _rows(targets: Sequence[OutputTensor], merged: RowComparison) -> list[Range]:
    return [(t, *bytes_of_rows) for t in targets if t.uses for bytes_of_rows in merged.expected(t)]


def check_header(file: OutputFile, path: Path, written: bytes | None = None) -> tuple[OutputTensor, ...]:
    """Return the planned tensors with their places in the file; VerificationFailed for other names, dtypes or shapes.

    `written` is the header that was written just now; the file must begin with these bytes. Without it, another
    version or program may have ordered the tensors otherwise; header_changes.py compares the metadata.
    """
    if written is not None and _begins(path, written, file.size):
        return file.targets
    try:
        header = read_header(path)
    except InputError as e:
        raise _failed(f"the written file is damaged: {e.what}", e.where) from e
    if written is not None:
        raise _failed("the header is not the planned one", str(path))
    missing = [t.stored for t in file.targets if t.stored not in header.tensors]
    extra = header.tensors.keys() - {t.stored for t in file.targets}
    if missing or extra:
        raise _failed("the file has other tensors than planned", f"{path}: {quoted([*missing, *sorted(extra)][0])}")
    placed = tuple(t._replace(offset=header.tensors[t.stored].offset) for t in file.targets)
    for t in placed:
        info = header.tensors[t.stored]
        if (info.dtype, info.shape) != t.in_file[1:]:
            raise _failed("a tensor has another dtype or shape than planned",
                          f"{path}: {quoted(t.stored)} {spoken(info.dtype)} {list(info.shape)}")  # fmt: skip
    return placed


def _begins(path: Path, header: bytes, size: int) -> bool:
    """Return whether a file of this size begins with these bytes."""
    try:
        with open_regular(path) as f:
            return FileState.of(f.fileno()).size == size and f.read(len(header)) == header
    except (InputError, OSError):
        return False  # the parser reports what is wrong


def _unmerged(
    targets: Sequence[OutputTensor], compared: dict[str, int], scales: Container[str], *, full: bool
) -> list[Range]:
    """Return the ranges of unchanged tensors to compare, and count their bytes; `scales` belong to merged weights."""
    plain = [t for t in targets if not t.uses and t.nbytes and t.name not in scales]
    total = sum([t.nbytes for t in plain])
    compared["of"] += total
    compared["converted"] += sum(t.nbytes for t in plain if not t.copied)
    pieces = list(ranges(plain, total, full=full or total <= ALL_BELOW))
    compared["bytes"] += sum(count for _, _, count in pieces)
    return pieces


def _expect(fd: Written, reader: Reader, pieces: Sequence[Range]) -> None:
    """Ask the system to fetch all sampled pieces at once, while they are compared one after the other."""
    if isinstance(fd, int):
        advise(fd, 0, 0, RANDOM)  # no read-ahead around each sampled row
    else:
        fd.expect((target.offset + first, count) for target, first, count in pieces)
    reader.expect(_of_inputs(_asked_for(fd, pieces)))


def _asked_for(fd: Written, pieces: Iterable[Range]) -> Iterator[Range]:
    """Yield pieces of the output, after the system was asked to fetch them."""
    ahead = ReadAhead()
    for target, first, count in pieces:
        if isinstance(fd, int):
            ahead.expect(fd, target.offset + first, count)
        yield target, first, count


def _of_inputs(pieces: Iterable[Range]) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield the pieces of the inputs that pieces of the output are compared with."""
    for target, first, count in pieces:
        read, written = target.weight.packing.encoding, target.packing.encoding
        if not target.weight.padded:
            yield target.source, read.nbytes(written.count(first)), read.nbytes(written.count(count))


def _same(target: OutputTensor, first: int, count: int, fd: Written, reader: Reader) -> bool:
    """Return whether the bytes from a place in a copied tensor on, across its neighbours, are the base's."""
    return read_exactly(fd, count, target.offset + first) == reader.read(target.source, first, count)


def _compare(target: OutputTensor, first: int, count: int, fd: Written, merged: RowComparison) -> int:
    """Compare an unchanged tensor: bytes equal to its source's, or the nearest values of another dtype.

    Returns how many values were too large for the dtype and were cut; VerificationFailed unless `saturate`.
    """
    source = target.source
    stored = read_exactly(fd, count, target.offset + first)
    # A copy has the base's bytes.
    if target.copied:
        want = merged.reader.read(source, first, count)
        if stored != want:
            at = next((i for i, (a, b) in enumerate(zip(stored, want, strict=False)) if a != b), len(stored))
            raise _failed("a tensor that no adapter changes differs from the base", f"{target.name}, byte {first + at}")
        return 0
    # What a reader of the output sees.
    encoding = target.packing.encoding
    low, high = encoding.count(first), min(encoding.count(first + count), prod(target.shape))
    if (output := merged.outputs.get(target.name)) is None:
        got, grid = decode(stored, target.dtype), plain_grid(target.dtype)
    else:
        got, grid = output.span(low, high)
        if grid.turn is not None:
            low, high = output.turned(low, high)
            got, grid = output.span(low, high)
    # What the base holds, and how exactly that is known.
    if (coded := merged.again.stored.coded(source)) is not None:
        exact, written = coded.span(low, high)
        slack = written.lost(exact)
    else:
        scale = ITEM_BYTES[source.dtype]
        exact = decode(merged.reader.read(source, low * scale, (high - low) * scale), source.dtype)
        slack = np.asarray(DECODED * np.abs(exact) if target.packed else 0.0)
    if grid.turn is not None:  # what is rounded is rotated
        exact, got, slack = grid.turn(exact), grid.turn(got), slack.max() + grid.lost(exact)
    # Each number must be within half a step of it.
    with np.errstate(invalid="ignore", over="ignore"):
        over = grid.beyond(exact)
        right = grid.saturated(exact) if merged.saturate else exact
        near = np.abs(got - right) <= 0.5 * grid.step(right) + slack
    same = near | (got == right) | (np.isnan(got) & np.isnan(right))
    if not same.all():
        at = int(np.argmin(same))
        where = f"{target.name}, element {low + at}: {exact[at]:.8g} became {got[at]:.8g}"
        raise _failed(
            f"a tensor was wrongly converted to {encoding.title}", f"{where}; {UNASKED}" if over[at] else where
        )
    return int(np.count_nonzero(over))


def _conclude(plan: Plan, merged: RowComparison, part: Path, *, new: bool) -> None:
    """Raise VerificationFailed if any recomputed row is wrong; it names the likely cause. InputError for a `new` file
    with products that cancel."""
    f = merged.findings
    if not f.wrong:
        return
    name, where = next(iter(f.wrong.items()))
    if f.cancelled:
        what = f"products of an adapter's tensors cancel: {plan.job.compute_dtype} cannot hold what is left of them"
        fix = "compute with `--compute-dtype fp64`"
        raise (InputError if new else VerificationFailed)(what, f"{part}: {name}, {where}", fix)
    shares = [(input_name(ref.path), f.measured(i)) for i, ref in enumerate(plan.job.adapters)]
    odd = [f"{share:.2f} of {adapter}" for adapter, share in shares if share is not None and abs(share - 1) > 0.02]
    hint = f"; the file holds {', '.join(odd)}" if odd else ""
    other = "if it was made at other strengths, give those; else " if odd else ""
    are = plural(f.tensors, "merged tensor is", "merged tensors are")
    wider = ROUNDING[plan.job.compute_dtype] > ROUNDING[merged.judged]
    by = f"by the bound of {merged.judged}, " if wider else ""
    ask = f"--compute-dtype {plan.job.compute_dtype}, which the recipe states, allows more; else " if wider else ""
    raise _failed(
        f"{by}{len(f.wrong)} of {are} not what base and adapters give{hint}", f"{part}: {name}, {where}",
        f"{ask}{other}{SUSPECT_DISK}",
    )  # fmt: skip


def _expect_evidence(plan: Plan, merged: RowComparison, part: Path) -> Iterator[Note]:
    """Raise VerificationFailed if the allowed error is larger than the change itself, so that a file without the
    change would pass; yield a note instead if the user asked for just that: sums in 16 bits in this very merge, or a
    method whose choice hangs on rounding."""
    weak = {name: bound for name, bound in merged.findings.bounds.items() if not bound.proves}
    if not weak:
        return
    name, most = max(weak.items(), key=lambda item: item[1].allowed / (item[1].change or SMALLEST_NORMAL))
    where = f"{part}: {name}, errors of {most.allowed:.3g} are allowed, the largest change is {most.change:.3g}"
    are = plural(len(weak), "merged tensor is", "merged tensors are")
    chosen = any(t.combines for t in plan.targets if t.name in weak)
    coarse = ROUNDING[merged.judged] > ROUNDING["fp32"]
    fix = "leave out adapters whose changes cancel each other"
    if coarse or not (chosen or merged.judged == "fp64"):
        fix = f"merge again with `--compute-dtype {'fp32' if coarse else 'fp64'}`"
    if not (merged.asked and (coarse or chosen)):
        raise VerificationFailed(f"{are} not verifiable: the rounding bound is larger than the change", where, fix)
    yield Note(f"{are} not verifiable: the rounding bound is larger than the change ({where}); {Message(fix)}")


def _check_sums(paths: Sequence[Path], targets: Sequence[Sequence[OutputTensor]]) -> None:
    """Raise VerificationFailed unless changed codes and scales have the sums that the headers say, where they do.

    `targets`: the tensors in each of the files, at their places there.
    """
    for path, tensors in zip(paths, checksummed(targets), strict=True):
        text = read_header(path).metadata.get(CHECKSUMS, "")
        if not text or not tensors:
            continue  # earlier versions and other programs write no sums
        said = [text[at : at + CHECKSUM_DIGITS] for at in range(0, len(text), CHECKSUM_DIGITS)]
        if len(said) != len(tensors):
            raise _failed("the file has sums of other tensors", f"{path}: {CHECKSUMS}")
        for target, digits, checksum in zip(tensors, said, sums_of(path, tensors), strict=True):
            if digits != f"{checksum:0{CHECKSUM_DIGITS}x}":
                raise _failed("codes or scales were changed after they were written", f"{path}: {target.name}")


def _failed(what: str, where: str, fix: str = SUSPECT_DISK) -> VerificationFailed:
    return VerificationFailed(what, where, fix)


def _proof(
    plan: Plan, merged: RowComparison, compared: dict[str, int], measured: Sequence[Measure], *, full: bool
) -> dict[str, Any]:
    f, measures = merged.findings, [measure.all for measure in _measures(plan, merged, measured)]
    shares = [
        {
            "adapter": input_name(ref.path),
            "strength": ref.strength,
            "strengths": by_component(plan.adapters[i].strengths),
            "retained": measures[i].retained,
        }
        for i, ref in enumerate(plan.job.adapters)
    ]
    return {
        "full": full, "method": plan.job.method,
        "tensors": f.tensors, "changed": sum(1 for t in plan.targets if t.uses),
        "rows": f.rows, "elements": f.elements, "worst_ulp": f.worst, "worst_tensor": f.worst_tensor,
        "bound": {"compute_dtype": merged.judged, "share": ROUNDING[merged.judged]},
        "untouched": compared, "retained": shares, "saturated": f.cut,
        "warnings": list(_warnings(plan, merged, measured)),
        "survival": [judgement(str(row["adapter"]), s.survives) for row, s in zip(shares, measures, strict=True)],
        "numbers": {} if merged.recorded else _numbers(plan, f),  # a merge has more of them
    }  # fmt: skip


def _numbers(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Return the size of the change and what of it is in the output: in all, by component, by block, by tensor."""
    return findings.measures.to_dict(len(plan.job.adapters), groups(plan.names))


def _warnings(plan: Plan, merged: RowComparison, measured: Sequence[Measure]) -> Iterator[Note]:
    """Yield warnings: values that are NaN or infinite, and changes too small for the dtype."""
    f = merged.findings
    if merged.unconfirmed:
        yield Note(f"the report's values of {listed(merged.unconfirmed)} are not those of the file; {REPORT_HEADERS}")
    if f.broken:
        yield Note(f"{f.broken} of {f.elements} values looked at are NaN or infinite, as in the base")
    if f.cut:  # the user asked for it, and it explains why less of an adapter is in the output
        return
    for number, (ref, measure) in enumerate(zip(plan.job.adapters, _measures(plan, merged, measured), strict=True)):
        if measure.all.fails:
            bf16 = number in f.in_bf16 and (f.in_bf16[number].survives or 0.0) >= SURELY_ENOUGH
            yield measure.all.lost(input_name(ref.path), *remedy(plan, bf16=bf16))


def _measures(plan: Plan, merged: RowComparison, measured: Sequence[Measure]) -> Iterator[Measure]:
    """Yield the measure of each adapter's change: of the rows that were recomputed, or of more values if the merge has
    measured it."""
    for number, sample in enumerate(merged.findings.measures.of_adapters(len(plan.job.adapters))):
        more = number < len(measured) and measured[number].all.survives is not None
        yield measured[number] if more and sample.all.survives is not None else sample
