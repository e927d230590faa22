"""What a device can do, and how much of it the folds reach: `python -m tests.bench.device DEVICE BASE ADAPTER ROUNDS`.

Without arguments: the names of the CUDA devices here. Prints JSON. A process of its own, as torch's import would count
in the peak memory of whatever its parent runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lora_merge.disk.reader import Reader
from lora_merge.dtypes import COMPUTE_DTYPES, ITEM_BYTES
from lora_merge.engine.stages import WindowBuffers, WindowTask
from lora_merge.engine.window_merger import WindowMerger
from lora_merge.engine.windows import Fold, slots, window_bytes, windows
from lora_merge.job import make_job
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from lora_merge.planning.plan import Plan

GB: Final = 1e9
COPIED: Final = 2**30  # bytes of a copy whose rate is taken
COPIES: Final = 8  # one after the other, so that waiting for the end does not count

Interval = tuple[float, float]


def names() -> list[str]:
    """Every CUDA device here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(n) for n in range(count)]


def wait_for(device: torch.device) -> None:
    """Until all that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates(device: torch.device, size: int = COPIED, rounds: int = 5) -> dict[str, float]:
    """Bytes per second: within the device (read and written), to it and from it (pinned memory, one way at a time)."""
    there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def rate(into: Tensor, source: Tensor, moved: int) -> float:
        def copies() -> None:
            for _ in range(COPIES):
                into.copy_(source, non_blocking=True)

        return moved * COPIES / min(_timed(copies, device) for _ in range(rounds + 1))

    return {"memory": rate(other, there, 2 * size), "up": rate(there, here, size), "down": rate(here, there, size)}


def _timed(act: Callable[[], None], device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    act()
    wait_for(device)
    return time.perf_counter() - started


class Folding:
    """All windows of a plan through the tool's own folds, from memory to memory: what a merge does without its disk."""

    def __init__(self, plan: Plan, reader: Reader) -> None:
        self.plan, self.reader = plan, reader
        self.making = WindowMerger([plan], [plan.job.output], reader)
        self.work = [w for w in windows([plan], window_bytes(plan)) if w.changes[0].folds]
        self.slots = [WindowBuffers() for _ in range(slots(plan.job))]

    @property
    def folds(self) -> list[Fold]:
        """Every block."""
        return [f for w in self.work for f in w.changes[0].folds]

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """How long one pass takes; what is read for it does not count."""
        total = 0.0
        for first in range(0, len(self.work), len(self.slots)):
            some = self.work[first : first + len(self.slots)]
            turns = [WindowTask(w, 0, s, s, first=True, last=True) for w, s in zip(some, self.slots, strict=False)]
            for task in turns:
                self._read(task)
            started = clock()
            for task in turns:
                self.making.begin(task)
            for task in turns:
                self.making.settle(task)
            self.making.forget()
            total += clock() - started
        return total

    def _read(self, task: WindowTask) -> None:
        out, base = task.base_bytes.views(task.window)
        for view, reads in ((out, task.window.direct), (base, task.window.apart)):
            for r in reads:
                self.reader.read_into(view[r.at : r.at + r.nbytes], r.source, r.offset)

    def sizes(self) -> dict[str, int]:
        """Numbers folded; bytes up, down, and moved by kernels at least; blocks."""
        compute = ITEM_BYTES[COMPUTE_DTYPES[self.plan.job.compute_dtype]]
        factors = sum(t.nbytes for m in self.plan.adapters for t in m.adapter.index.tensors.values())
        moved = 0
        for f in self.folds:
            source = f.block.target.source
            moved += kernel_bytes(f.block.elements, ITEM_BYTES[source.dtype] if source else 0, compute,
                                  ITEM_BYTES[f.block.target.dtype])  # fmt: skip
        return {"numbers": sum(f.block.elements for f in self.folds), "blocks": len(self.folds), "moved": moved,
                "base": sum(f.source_bytes for f in self.folds), "down": sum(f.nbytes for f in self.folds),
                "up": sum(f.source_bytes for f in self.folds) + factors}  # fmt: skip


def kernel_bytes(numbers: int, stored: int, compute: int, written: int) -> int:
    """Bytes that kernels read and write at least: the fold in place, and a cast on either side where widths differ."""
    casts = sum(width + compute for width in (stored, written) if width not in (0, compute))
    return numbers * (2 * compute + casts)


def union(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts; streams overlap."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def tally(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds in kernels and in transfers, and how many kernels, of what a device did: name, begin and end in µs."""
    kinds: dict[str, list[Interval]] = {"kernel": [], "up": [], "down": []}
    for name, low, high in spans:
        lowered = name.lower()
        copy = lowered.startswith("memcpy")
        kind = "up" if copy and "htod" in lowered else "down" if copy and "dtoh" in lowered else "kernel"
        kinds[kind].append((low, high))
    return {f"{kind}_s": union(some) / 1e6 for kind, some in kinds.items()} | {"kernels": len(kinds["kernel"])}


def spans(act: Callable[[], object]) -> Iterator[tuple[str, float, float]]:
    """What the CUDA device did meanwhile; copies and fills within the device are kernels' work too."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        act()
    for event in recorded.events() or ():
        if event.device_type.name == "CUDA":
            yield event.name, event.time_range.start, event.time_range.end


def shares(sizes: dict[str, int], seconds: float, spent: dict[str, float], rate: dict[str, float]) -> dict[str, Any]:
    """The figures; those of kernels and transfers are missing where the device told nothing."""
    found: dict[str, Any] = {**sizes, "seconds": seconds, "gb_per_s": sizes["base"] / GB / seconds,
                             "link_share": max(sizes["up"] / rate["up"], sizes["down"] / rate["down"]) / seconds}  # fmt: skip
    if spent.get("kernels") and spent["kernel_s"]:
        found |= spent | {
            "kernel_s_per_gb": spent["kernel_s"] / (sizes["base"] / GB),
            "memory_share": sizes["moved"] / spent["kernel_s"] / rate["memory"],
            **{f"{way}_share": sizes[way] / spent[f"{way}_s"] / rate[way] for way in ("up", "down") if spent[f"{way}_s"]},
        }  # fmt: skip
    return found


def folding(device: str, base: Path, adapter: Path, *, rounds: int, rate: dict[str, float]) -> dict[str, Any]:
    """The folds of one merge, after a warm-up: median seconds of a pass, then one that is recorded."""
    job = make_job(base, [(adapter, 0.7)], base.with_name("none"), device=device)
    plan = plan_job(job, CheckpointCache())  # without a look at the disk, as nothing is written
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        work = Folding(plan, reader)
        try:
            seconds = median([work.seconds() for _ in range(rounds + 1)][-max(1, rounds) :])
            host = work.seconds(time.process_time)
            spent = tally(spans(work.seconds)) if torch.device(device.split(",")[0]).type == "cuda" else {}
            found = shares(work.sizes(), seconds, spent, rate)
            return found | {"host_s_per_gb": host / (found["base"] / GB), "notes": work.making.blocks.memory.notes}
        finally:
            work.making.close()


def main() -> None:
    """Measure, or list."""
    if len(sys.argv) == 1:
        print(json.dumps(names()))
        return
    device, base, adapter, rounds = sys.argv[1:]
    rate = rates(torch.device(device.split(",")[0]))
    found = folding(device, Path(base), Path(adapter), rounds=int(rounds), rate=rate)
    print(json.dumps({"rates": rate, "folds": found}))


if __name__ == "__main__":
    main()
