"""Writes the outputs of plans that share a base: stages read, hash, merge and write different windows at the same time.

The base is read once. Each window becomes one task for each plan. A task merges the window's base bytes into its own
buffer and writes them; the last task does that in place. With one plan, every task is the last.

Importing torch takes a second or more. Windows that the merge does not change are written meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from ..change_statistics import Measures
from ..disk.hashes import RunningHashes
from ..disk.pages import PAGE
from ..disk.remote import has_remote
from ..disk.uploads import upload_of
from ..disk.volumes import CLONES, SPARSE_SYSTEMS, file_system
from ..disk.writer import Writer, amend
from ..planning.header_entries import Checksums, checksummed, final_headers
from ..planning.plan import Plan
from ..process import deliver_pending
from ..progress import STEP_SECONDS, Progress, Step
from ..text import Note
from .stages import Pool, WindowBuffers, WindowTask, drive
from .tasks import FoldResult
from .windows import Window, sharable, slots, window_bytes, windows

if TYPE_CHECKING:
    from .window_merger import WindowMerger

WRITTEN_BYTES: Final = 8 << 20  # bytes of a call that writes: a slow disk takes half a second for them
MOST_WAITING: Final = 256  # windows that may wait while others go first: 8 GB of the file


@dataclass(frozen=True)
class WrittenOutput:
    """One plan's output under its temporary name, complete and not yet verified, with the facts for its report."""

    plan: Plan
    part: Path
    digests: tuple[str, ...]  # of `plan.inputs`
    sums: tuple[Mapping[str, str], ...]  # for every file the entry with the sums of its codes
    device: str
    stages: Mapping[str, float]  # seconds busy
    saturated: Mapping[str, int]  # tensor → values that were cut
    notes: tuple[Note, ...]
    choice: str  # why `auto` took the device
    measures: Measures  # of the merged tensors


class Pipeline:
    """One run of plans, of one layout and one placement, into the folders or files `parts`."""

    def __init__(
        self, plans: Sequence[Plan], parts: Sequence[Path], digests: RunningHashes, progress: Progress,
    ) -> None:  # fmt: skip
        self.plans, self.parts, self.digests, self.progress = plans, parts, digests, progress
        self.reader, self.opened = digests.reader, ExitStack()
        self.pool = Pool(WindowBuffers() for _ in range(min(slots(p.job) for p in plans)))
        self.writers: dict[tuple[int, int], Writer] = {}
        self.clock = Lock()
        self.current_device = _current_device()
        self.seconds = {"read": 0.0, "hash": 0.0, "start": 0.0, "fold": 0.0, "write": 0.0}
        """Stage → seconds busy; stages work side by side. `start`: the wait for torch. `wait`: the total time minus
        that of the busiest stage."""
        self.shares = file_system(parts[0]) in CLONES and not any(map(has_remote, self.reader.paths))
        """Whether the output may share blocks with the base; False once the system has refused."""
        self.readers: list[Future[FoldResult]] = []  # blocks under way that read the base bytes of the current window
        self.uploads = [upload_of(part) for part in parts]
        self.steady = [
            upload is not None and not any(checksummed([f.targets for f in plan.files]))
            for upload, plan in zip(self.uploads, plans, strict=True)
        ]
        """For each plan whether it is uploaded and its files, but for their headers, are final when they are written:
        no scales and sums of codes follow."""
        self.headed: set[tuple[int, int]] = set()
        """Plan and file of those whose headers are final."""
        self.sums = [Checksums(plan) for plan in plans]
        self.entries: dict[int, Sequence[Mapping[str, str]]] = {}  # number of a plan → what its sums are
        self.failed: dict[int, Exception] = {}
        """Number of a plan → its error; the other plans go on."""

    def run(self) -> Sequence[WrittenOutput | Exception]:
        """Write all windows, flushed to the disk, then the headers with the inputs' hashes.

        Returns, for each plan, its output or an error of this plan alone; errors that affect all plans are raised.
        """
        began = time.perf_counter()
        first = [self._timed(s, s.__name__) for s in (self.read, self.hash, self.start, self.fold)]
        stages = [*first, self._timed(self.settle, "fold"), self._timed(self.write, "write")]
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="start") as starter:
                self._merger = starter.submit(self._make)
                drive(self._tasks(), stages, self._give_back)
            self._merger.result()  # raises for a missing device, also if no window needed the merger
            for number in self._alive():
                self._alone(number, self._finish)
            busiest = max(self.seconds[stage] for stage in ("read", "hash", "fold", "write"))
            self.seconds["wait"] = max(0.0, time.perf_counter() - began - busiest)
            return [self.failed.get(number) or self._written(number) for number in range(len(self.plans))]
        finally:
            self.opened.close()

    def _written(self, number: int) -> WrittenOutput:
        plan, merger = self.plans[number], self.merger
        results = merger.results[number]
        return WrittenOutput(
            plan, self.parts[number], tuple(self.digests.of(plan.inputs)), tuple(self.entries[number]), merger.device,
            self.seconds, dict(sorted(results.cut.items())),
            (*merger.blocks.memory.notes, *results.notes), merger.choice.why,
            results.measures.in_order(t.name for t in plan.targets),
        )  # fmt: skip

    def _tasks(self) -> Iterator[WindowTask]:
        limit = min(window_bytes(p) for p in self.plans)
        for window in self._ordered(windows(self.plans, limit)):
            deliver_pending()
            alive = self._alive()
            if not alive:
                return
            base_bytes, shared = self.pool.take(), self.shares and sharable(window)
            for number in alive:
                last = number == alive[-1]
                buffers = base_bytes if last else self.pool.take()
                yield WindowTask(window, number, base_bytes, buffers, number == alive[0], last, shared)

    def _ordered(self, every: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows; until torch is imported, those of a file that do not need it come before the others.

        The order is kept if the base is hashed or the output uploaded, as the bytes must come in order, or if there are
        several outputs, whose stages are busy enough.
        """
        in_order = self.digests.hashing or len(self.plans) > 1 or file_system(self.parts[0]) not in SPARSE_SYSTEMS
        in_order = in_order or any(self.uploads)
        waiting: deque[Window] = deque()
        for window in every:
            while waiting and (self._merger.done() or len(waiting) == MOST_WAITING or waiting[0].file != window.file):
                yield waiting.popleft()
            if window.untouched or in_order or self._merger.done():
                yield window
            else:
                waiting.append(window)
        yield from waiting

    def _give_back(self, task: WindowTask) -> None:
        self.pool.give(task.output)  # the last task's own buffers are those of the base bytes

    def _alive(self) -> list[int]:
        return [n for n in range(len(self.plans)) if n not in self.failed]

    @property
    def merger(self) -> WindowMerger:
        """The merger of windows; waits until torch is imported."""
        return self._merger.result()

    def _make(self) -> WindowMerger:
        import torch

        from .window_merger import WindowMerger

        if self.current_device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(self.current_device)
        merger = WindowMerger(self.plans, self.parts, self.reader)
        self.opened.callback(merger.close)
        return merger

    def read(self, task: WindowTask) -> None:
        """Read the base bytes, once for all tasks of a window."""
        if task.first and (self.digests.hashing or not task.shared):
            out, base = task.base_bytes.views(task.window)
            for view, reads in ((out, task.window.direct), (base, task.window.apart)):
                for r in reads:
                    self.reader.read_into(view[r.at : r.at + r.nbytes], r.source, r.offset)

    def hash(self, task: WindowTask) -> None:
        """Hash the bytes just read, in the order of their file; not while the hasher reads ahead by itself."""
        if task.first and (self._merger.done() or not self.digests.ahead):
            out, base = task.base_bytes.views(task.window)
            reads = [(r, out) for r in task.window.direct] + [(r, base) for r in task.window.apart]
            for r, view in sorted(reads, key=lambda pair: pair[0].offset):
                self.digests.feed(r.source, r.offset, view[r.at : r.at + r.nbytes])

    def start(self, task: WindowTask) -> None:
        """Wait for torch if the task needs it."""
        if not task.ready:
            self._merger.result()

    def fold(self, task: WindowTask) -> None:
        """Start to fold changed blocks, convert other dtypes and copy the rest."""
        if task.last:
            wait(self.readers)  # the last task overwrites the base values that earlier tasks read
            self.readers.clear()
        if task.plan not in self.failed and not task.ready:
            self._alone(task.plan, lambda _: self.merger.begin(task))
        if not task.last:
            self.readers += task.under_way

    def settle(self, task: WindowTask) -> None:
        """Wait until the task's blocks are merged."""
        if task.ready:
            return
        self._paced(task, as_completed(task.under_way), len(task.under_way))
        self._alone(task.plan, lambda _: self.merger.settle(task))
        if task.last:
            self.merger.forget()

    def write(self, task: WindowTask) -> None:
        """Write the finished window."""
        if task.plan not in self.failed:
            self._alone(task.plan, lambda n: self._put(self._writer(n, task.window.file), task))
        self._written_now(task.plan, task.window.size - sum(task.reported))

    def _paced(self, task: WindowTask, steps: Iterable[object], count: int) -> None:
        """Make so many steps; meanwhile report a part of the window's bytes for each, the last one when it is written.

        So progress moves inside a window too, where formulas or the disk are slow.
        """
        part, waiting, before = (task.window.size - sum(task.reported)) // (count + 1), 0, time.perf_counter()
        for _ in steps:
            waiting += part
            if (now := time.perf_counter()) - before >= STEP_SECONDS:
                task.reported.append(waiting)
                self._written_now(task.plan, waiting)
                waiting, before = 0, now

    def _put(self, writer: Writer, task: WindowTask) -> None:
        at, out = task.window.start + self._shift(task), task.output.out
        if not task.shared:
            view, pieces = out.view(task.window.start, task.window.size), range(0, task.window.size, WRITTEN_BYTES)

            def put(first: int) -> None:
                writer.write(view[first : first + WRITTEN_BYTES], at + first)
                self.sums[task.plan].feed(task.window.file, at + first, view[first : first + WRITTEN_BYTES])

            self._paced(task, map(put, pieces), len(pieces))
            self._upload(task.plan, task.window.file, (at + task.window.size) // PAGE * PAGE)
            return
        for r in task.window.direct:
            assert isinstance(r.source, Path), "only files have blocks to share"
            low, high = writer.share(self.reader.descriptor(r.source), r.offset, at + r.at, r.nbytes)
            if not high and r.nbytes >= 2 * PAGE:
                self.shares = False
            for start, stop in ((0, low), (high, r.nbytes)):
                if start < stop:
                    rest = out.view(at + r.at + start, stop - start)
                    self.reader.read_into(rest, r.source, r.offset + start)
                    writer.write(rest, at + r.at + start)

    def _written_now(self, number: int, size: int) -> None:
        """Report bytes that were just merged or written, and the stage that has been busy for longest."""
        with self.clock:
            limit = max(self.seconds, key=self.seconds.__getitem__)
        self.progress(Step("merge", self.plans[number].job.output_name, size, self.plans[number].size, limit))

    def _finish(self, number: int) -> None:
        plan = self.plans[number]
        self.progress(Step("flush", plan.job.output_name))
        self._leave(number, len(plan.files) - 1)
        again = self.merger.complete(number, self.parts[number])
        self.entries[number] = self.sums[number].entries(self.parts[number], again)
        for n, header in enumerate(final_headers(plan, self.digests.of(plan.inputs), self.entries[number])):
            if (number, n) not in self.headed:
                self._head(number, n, header)
            self._upload(number, n, plan.files[n].size)

    def _leave(self, number: int, file: int) -> None:
        """Finish a plan's file, so that each plan has at most one shard open."""
        writer = self._writer(number, file)
        writer.finish()
        writer.close()
        if self._is_early(number, file):
            if (number, file) not in self.headed:
                self._head(number, file, self._header(number, file))
            self._upload(number, file, self.plans[number].files[file].size)

    def _head(self, number: int, file: int, header: bytes) -> None:
        """Complete a plan's file with its final header."""
        amend(self.writers[number, file].path, header)
        self.headed.add((number, file))

    def _is_early(self, number: int, file: int) -> bool:
        """Return whether the header of a file that is uploaded is final when the file is written.

        The first file's has the digests of all files of the base, every other one's that of its own.
        """
        return self.steady[number] and (file > 0 or not self.digests.hashing)

    def _header(self, number: int, file: int) -> bytes:
        """Return the final header of such a file."""
        plan = self.plans[number]
        others = {*plan.base.files} - {plan.base.files[file]} if file else set[Path]()
        digests = ["" if path in others else self.digests.hexdigest(path) for path in plan.inputs]
        return next(final_headers(plan, digests, [{} for _ in plan.files], first=file))

    def _upload(self, number: int, file: int, end: int) -> None:
        """Let a file be uploaded up to a byte if its header is final."""
        upload, planned = self.uploads[number], self.plans[number].files[file]
        if upload is not None and (number, file) in self.headed:
            upload.ready(planned.name, planned.size, end)

    def _writer(self, number: int, file: int) -> Writer:
        """Return the writer of a plan's output file; the first call closes the file before and writes the header."""
        if (number, file) not in self.writers:
            if file:
                self._leave(number, file - 1)
            planned, part = self.plans[number].files[file], self.parts[number]
            writer = Writer(part / planned.name if planned.name else part, planned.size)
            self.writers[number, file] = writer
            self.opened.callback(writer.close)
            header = planned.header
            if self._is_early(number, file) and not self.digests.hashing:
                header = self._header(number, file)
                self.headed.add((number, file))
            writer.write(memoryview(header), 0)
            self._written_now(number, len(header))
        return self.writers[number, file]

    def _shift(self, task: WindowTask) -> int:
        """Return how many bytes longer a plan's header is than the first plan's: its tensors come so much later."""
        first, header = (self.plans[n].files[task.window.file].header for n in (0, task.plan))
        return len(header) - len(first)

    def _alone(self, number: int, act: Callable[[int], None]) -> None:
        """Call `act` for one plan; an error of any kind is kept as the plan's own."""
        try:
            act(number)
        except Exception as e:  # noqa: BLE001
            self.failed.setdefault(number, e)

    def _timed(self, stage: Callable[[WindowTask], None], kind: str) -> Callable[[WindowTask], None]:
        def timed(task: WindowTask) -> None:
            started = time.perf_counter()
            stage(task)
            took = time.perf_counter() - started
            with self.clock:  # two stages may count as one kind
                self.seconds[kind] += took

        timed.__name__ = stage.__name__
        return timed


def _current_device() -> int | None:
    """Return the number of the calling thread's current CUDA device; None if the program has not used CUDA."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else None
