"""Progress on a terminal: the stages of a merge, the jobs of a batch under way, and a heartbeat between the steps."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..disk.remote import received
from ..progress import Guard, Progress, Stage, Step, beating, observed
from ..text import done_of, one_line, plural, rate, size
from .stdio import commanding
from .terminal import columns, has, prepare, reflows

BEAT: Final = 0.2
"""Seconds between two redraws. The display moves, with at most ten redraws a second."""

WINDOW: Final = 5.0
"""Seconds over which the rate is taken: one that only shrinks slowly would hide that the disk has stopped."""

STAGE_SHARES: Final = {"merge": 1.0, "flush": 0.03, "prove": 0.05}
"""Stage → the time that it takes for a byte of the output, relative to merging; measured with outputs of 1 to 7 GB."""

TRANSFERS: Final = ("fetch", "upload")
"""The stages of downloads and uploads."""

SAME: Final = {"look": "make", "load": "merge", "flush": "merge"}
"""Stage → the one whose bytes it counts on."""

MAKING: Final = {"make": 1.0, "flush": 0.02, "prove": 0.5}
"""The same for the layers of an adapter, relative to computing them. Measured: the proof takes 0.3 (convert) to 3 times
(resize) as long."""

READING_SHARES: Final = {"make": 1.0}
"""The weights where files are only looked at."""

PROOF: Final = {"prove": 1.0}
"""The weights where a file is proven and nothing is written."""

LIMITS: Final = {
    "read": "mostly reading",
    "hash": "mostly hashing",
    "fold": "mostly computing",
    "write": "mostly writing",
}
"""Stage of the pipeline → what the merge spends most time on, for people; the start of torch is none, as it ends."""

LOADING: Final = "loading torch, the library that computes"

LEAST_PROGRESS: Final = 0.002
"""Share of the work that must be done before the remaining time is shown; before that it would be a guess."""

MOST_LINES: Final = 8
"""Lines for jobs under way; further ones are counted."""

BAR_COLUMNS: Final = 8
"""Columns of the bar with its ends: so a merge has all its facts on 80 columns."""

SPINNER: Final = ("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\")
"""Pictures of a heartbeat, for terminals with and without these letters."""


class Amount(NamedTuple):
    """Bytes that are done, of how many."""

    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return done_of(self.done, self.total)

    @property
    def share(self) -> float:
        """The share that is done; 0 if the total is not known."""
        return self.done / self.total if self.total else 0.0


@dataclass
class OutputProgress:
    """The state of one output under way."""

    name: str
    since: float  # when its stage began
    took: float = 0.0  # seconds of the stage before
    stage: Stage = "load"
    amounts: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))  # stage → what is done, see `SAME`
    limit: str = ""

    def take(self, step: Step, now: float) -> None:
        """Take a step."""
        if step.stage != self.stage:
            self.stage, self.since, self.took = step.stage, now, now - self.since
        before = self.amount
        self.amounts[SAME.get(step.stage, step.stage)] = Amount(before.done + step.done, step.total or before.total)
        self.limit = step.limit or self.limit

    @property
    def amount(self) -> Amount:
        """What is done in its stage."""
        return self.amounts[SAME.get(self.stage, self.stage)]

    def share(self, weights: dict[str, float], now: float) -> float:
        """Return how much of the work on it is done, from 0 to 1. The disk does not report how much of a flush is done:
        half of it is taken to be, when the time has passed that it usually takes."""
        waited = now - self.since
        usual = max(BEAT, self.took * weights.get("flush", 0.0))
        flushed = float(self.stage == "prove") if self.stage != "flush" else waited / (waited + usual)
        parts = {**{stage: self.amounts[stage].share for stage in ("merge", "make", "prove")}, "flush": flushed}
        weights = READING_SHARES if self.stage == "look" else MAKING if self.amounts["make"].total else weights
        return min(1.0, sum(parts[stage] * weight for stage, weight in weights.items()) / sum(weights.values()))


@dataclass(frozen=True)
class BatchJobs:
    """The jobs of a batch."""

    count: int
    runs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Output of a job that runs → its bytes, and the bytes that a merge writes in the time that the job takes."""

    @cached_property
    def size(self) -> int:
        """The bytes of all outputs."""
        return sum(size for size, _ in self.runs.values())

    @cached_property
    def effort(self) -> int:
        """The bytes that a merge writes in the time that all jobs take."""
        return sum(effort for _, effort in self.runs.values())


@dataclass
class Display:
    """Lines at the bottom of a terminal. It is called with every step, from any thread, and never raises."""

    stream: Any
    jobs: BatchJobs | None = None  # None: a single run
    weights: dict[str, float] = field(default_factory=lambda: dict(STAGE_SHARES))
    clock: Callable[[], float] = time.monotonic
    doing: str = "reading headers"  # until the first step
    received: Callable[[], int] = received  # bytes that are read from other machines
    columns: Callable[[], int] | None = None  # how wide the terminal is; None: that of the stream, at each redraw

    def __post_init__(self) -> None:
        """Begin to take the time."""
        self.width = self.columns or partial(columns, self.stream)
        self.lock = threading.RLock()
        self.guard = Guard()
        self.observer: Progress = self.take
        self.outputs: dict[str, OutputProgress] = {}  # under way
        self.ended = 0  # jobs
        self.done = 0  # of the effort: that of outputs that are complete, or will not be
        self.drawn: tuple[str, ...] = ()
        self.last = -BEAT  # when it was drawn
        self.beats = 0
        self.began = self.clock()
        self.received_before = self.received()
        self.working: float | None = None  # when the first byte was written
        self.samples: deque[tuple[float, int]] = deque()  # when, bytes written until then
        self.bytes = 0

    def __call__(self, step: Step) -> None:
        """Take a step, by way of the observer that has these lines."""
        self.observer(step)

    def take(self, step: Step) -> None:
        """Count a step."""
        with self.lock:
            now = self.clock()
            output = self.outputs.setdefault(step.output, OutputProgress(step.output, now))
            output.take(step, now)
            if step.stage in ("load", "fetch"):
                self.received_before = self.received()  # headers: what comes later is weights
            if step.done and self.working is None and step.stage not in TRANSFERS:
                self.working = now
            self.bytes += self._bytes(step, output)

    def _bytes(self, step: Step, output: OutputProgress) -> int:
        """Return the bytes that a step counts for; in a batch those of the output, whatever it is made of."""
        if step.stage == "make" and self.jobs is not None:
            return self._planned(output.name)[0] * step.done // max(output.amount.total, 1)
        return step.done if step.stage in ("merge", "make", "look") else 0

    def end(self, output: str) -> None:
        """Count a job of a batch that has ended."""
        self.guard(self._end, output)

    def _end(self, output: str) -> None:
        with self.lock:
            self.outputs.pop(output, None)
            self.ended, self.done = self.ended + 1, self.done + self._planned(output)[1]

    def _planned(self, output: str) -> tuple[int, int]:
        """Return the bytes of a job's output, and its effort; both are 0 where it did not have to run."""
        return self.jobs.runs.get(output, (0, 0)) if self.jobs else (0, 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the lines away while the block prints; they come back below it."""
        with self.lock:
            self.erase()
            yield

    def lines(self, width: int) -> list[str]:
        """Return the lines for a terminal of so many columns."""
        with self.lock:
            now, under_way = self.clock(), list(self.outputs.values())
            self._sample(now)
            if self.jobs is None:
                return [self._merge(under_way[-1] if under_way else OutputProgress("", self.began), now, width)]
            shown = [self._job(output, now, width) for output in under_way[:MOST_LINES]]
            more = [f"  and {len(under_way) - MOST_LINES} more"] if len(under_way) > MOST_LINES else []
            return [*shown, *more, self._batch(self.jobs, now, width)]

    def _sample(self, now: float) -> None:
        self.samples.append((now, self.bytes))
        while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW:
            self.samples.popleft()

    def _rate(self) -> str:
        (then, before), (now, after) = self.samples[0], self.samples[-1]
        return rate(int((after - before) / (now - then))) if now > then else ""

    def _share(self) -> float:
        """Return how much of all work is done."""
        if self.jobs is None:
            return max((o.share(self.weights, self.clock()) for o in self.outputs.values()), default=0.0)
        now = self.clock()
        under_way = sum(self._planned(name)[1] * o.share(self.weights, now) for name, o in self.outputs.items())
        return min(1.0, (self.done + under_way) / (self.jobs.effort or 1))

    def _left(self, share: float, now: float) -> str:
        """Return the time that is left, flush and proof included, as far as it can be known."""
        if self.working is None or share < LEAST_PROGRESS or now - self.working < 1:
            return ""
        return f"{interval((now - self.working) * (1 - share) / share)} left"

    def _merge(self, output: OutputProgress, now: float, width: int) -> str:
        share, facts = self._share(), [f"{interval(now - output.since)} so far"]
        if output.stage in TRANSFERS:
            return self._transfer(output, now, width)
        if self.working is None:
            facts.append(self.doing if not output.name else f"opening the inputs, {LOADING}")
            return self._line(f"{output.stage:<5}", facts, None, width)
        if output.stage == "merge":
            facts = [str(output.amount), self._rate(), self._received()]
            limit = LIMITS.get(output.limit, "")
            return self._line("merge", [*facts, self._left(share, now), limit], share, width)
        if output.stage in ("make", "look"):
            facts = [f"{output.amount} of weights", self._rate(), self._received()]
        elif output.stage == "flush":
            facts.append("waiting for the disk")
        elif output.amounts["prove"].total:
            facts = [f"{min(1.0, output.amounts['prove'].share):.0%} of the proof"]
        return self._line(f"{output.stage:<5}", [*facts, self._left(share, now)], share, width)

    def _received(self) -> str:
        """Return how much has come from other machines; "" for a run on files of this one."""
        count = self.received() - self.received_before
        return f"{size(count)} received" if count else ""

    def _transfer(self, output: OutputProgress, now: float, width: int) -> str:
        """Return the line of a download or an upload."""
        share = output.amount.share if output.amount.total else 1.0
        spent = now - output.since
        left = f"{interval(spent * (1 - share) / share)} left" if share >= LEAST_PROGRESS and spent >= 1 else ""
        moved = spent > 0 and output.amount.done > 0
        speed = rate(int(output.amount.done / spent)) if moved else f"{interval(spent)} so far"
        return self._line(output.stage, [str(output.amount), speed, left], share, width)

    def _job(self, output: OutputProgress, now: float, width: int) -> str:
        if output.stage == "merge" and output.amount.done >= output.amount.total:
            facts = ["merged, the others first"]
        elif output.stage == "make":
            facts = [f"{output.amount} of weights"]
        elif output.stage in ("merge", *TRANSFERS):
            facts = [str(output.amount)]
        else:
            facts = [f"{interval(now - output.since)} so far"]
        name = one_line(Path(output.name).name)
        room = max(10, width // 3)
        name = name if len(name) <= room else f"…{name[1 - room :]}"
        return self._line(
            f"{output.stage:<5} {name:<{room}}", facts, output.share(self.weights, now), width, beats=False
        )

    def _batch(self, jobs: BatchJobs, now: float, width: int) -> str:
        share = self._share()
        limits = [LIMITS[o.limit] for o in self.outputs.values() if o.limit in LIMITS and o.stage == "merge"]
        limit = max(limits, key=limits.count, default="")
        of = done_of(self.bytes, jobs.size)
        facts = [of, self._rate(), self._left(share, now), limit]
        if self.working is None:
            facts = [f"{interval(now - self.began)} so far", LOADING]
        return self._line(f"{self.ended}/{plural(jobs.count, 'job')}", facts, share, width)

    def _line(self, head: str, facts: list[str], share: float | None, width: int, *, beats: bool = True) -> str:
        """Return one line: heartbeat, stage, bar, facts; on a narrow terminal the last facts are left out."""
        from tqdm import tqdm

        letters = SPINNER[0 if has(self.stream, SPINNER[0]) else 1]
        beat = letters[self.beats % len(letters)] if beats else " "
        prefix = f"{beat} {head} {share:4.0%} " if share is not None else f"{beat} {head} "
        shown_facts = [fact for fact in facts if fact]
        while len(shown_facts) > (share is None) and len(prefix) + len(", ".join(shown_facts)) + BAR_COLUMNS > width:
            shown_facts.pop()
        text = ", ".join(shown_facts)
        if share is None:
            return f"{prefix}{text}"[: width - 1]
        whole = tqdm.format_meter(
            share, 1, 1, ncols=width - 1, prefix=prefix, ascii=not has(self.stream, "█▏"),
            bar_format="{desc}|{bar}| " + text.replace("{", "{{").replace("}", "}}"),
        )  # fmt: skip
        return str(whole)[: width - 1]

    def draw(self) -> None:
        """Draw the lines, unless they were drawn just now."""
        self.guard(self._draw)

    def _draw(self) -> None:
        with self.lock:
            now = self.clock()
            if now - self.last < BEAT / 2:
                return
            width = self.width()
            text, self.last, self.beats = self._up(width), now, self.beats + 1
            self.drawn = tuple(self.lines(width))
            self._put(text + "\n".join(self.drawn))

    def erase(self) -> None:
        """Remove the lines."""
        self.guard(self._erase)

    def _erase(self) -> None:
        with self.lock:
            self._put(self._up(self.width()))
            self.drawn = ()

    def _up(self, width: int) -> str:
        """Return what takes a terminal to where the lines begin, and clears it; one made narrower may have broken them.

        Where that is not known it is taken as not: a rest of an old line may stay, and nothing else is cleared.
        """
        if not self.drawn:
            return ""
        rows = sum(max(1, -(-len(line) // max(1, width))) for line in self.drawn) if reflows() else len(self.drawn)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def _put(self, text: str) -> None:
        if text:
            commanding(self.stream)(text)
            self.stream.flush()


def interval(seconds: float) -> str:
    """Return "0:07", "12:30" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def paused(display: Display | None) -> Iterator[None]:
    """Take the lines of a display away, if there is one, while the block prints."""
    if display is not None:
        prepare(sys.stdout)
    with display.paused() if display is not None else nullcontext():
        yield


@contextmanager
def watching(
    *, quiet: bool, jobs: BatchJobs | None = None, weights: dict[str, float] | None = None, doing: str = ""
) -> Iterator[Display | None]:
    """Give the block a `Display` that is redrawn until the block ends; None with `quiet`, or without a terminal."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    display = Display(sys.stderr, jobs, weights or dict(STAGE_SHARES))
    display.doing = doing or display.doing
    display.draw()
    try:
        with beating(display.draw, BEAT), observed(display.take, display.guard) as display.observer:
            yield display
    finally:
        display.erase()
