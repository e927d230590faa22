"""Makes a window's output bytes from its base bytes, in memory: folded blocks, converted values, unchanged bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..change_statistics import Measures, checked
from ..disk.reader import Reader
from ..disk.scale_spool import Spool
from ..disk.writer import amend
from ..dtypes import COMPUTE_DTYPES
from ..planning.plan import Plan, partners
from ..text import Note, listed
from .block_folder import BlockFolder, FoldOptions
from .block_values import base_view
from .change_norms import replaced_measures, replacements
from .devices import choose, device_bytes, one_core, passed_over, places, release, threads
from .gpu_adapters import AdaptersOnDevice
from .gpu_windows import DeviceWindows
from .patch_tensors import PatchTensors
from .quantised_output import NewCodes, refolded
from .requantisation import new_parts, refitted
from .stages import WindowTask
from .tasks import FoldResult, FoldTask, largest_of_each, settled
from .tensor_moves import convert, settle
from .tensors import CACHE_SHARE, CACHED_VALUES, DeviceCache, TensorCache, decoded, packed, raw
from .windows import Fold, Window, WindowChange, pinned_bytes

PINNED_UNITS: Final = 24
"""Parts of the pinned memory: 4 for adapters, and for each of three lanes 2 for windows and 4 for single blocks."""


@dataclass
class PlanResults:
    """The results of the windows of one plan, without the bytes in them."""

    spool: Spool  # the parts next to codes, until the files are complete
    measures: Measures = field(default_factory=Measures)
    cut: Counter[str] = field(default_factory=Counter)  # tensor → how many values were too large for its dtype
    uncovered: dict[str, float] = field(default_factory=dict)
    """Weight → its largest number, if the scale of the whole weight does not cover it."""
    notes: list[Note] = field(default_factory=list)

    def add(self, merged: FoldResult) -> None:
        """Add what comes of tasks."""
        self.spool.put(merged.parts)
        self.measures.take(merged.measures)
        self.measures.know(merged.norms)
        self.cut += merged.cut
        self.uncovered = largest_of_each(self.uncovered, merged.uncovered)


class WindowMerger:
    """Merges the windows of plans of one layout and one placement; ResourceError if the device is missing."""

    def __init__(self, plans: Sequence[Plan], parts: Sequence[Path], reader: Reader) -> None:
        """`parts`: the unfinished output of each plan, a file or a folder."""
        self.plans, self.choice = plans, choose(plans)
        job, dtype = plans[0].job, COMPUTE_DTYPES[plans[0].job.compute_dtype]
        at = places(self.choice.device, dtype)
        self.device = ",".join(str(p.device) for p in at)
        # Adapters' tensors: cached on the host, and on a GPU uploaded once.
        room = min(p.job.max_memory for p in plans) // CACHE_SHARE
        adapter_files = frozenset(f for p in plans for f in p.adapter_files)
        self.cache = TensorCache(reader, adapter_files, room)
        self.pool = ThreadPoolExecutor(threads(at, job.max_vram), thread_name_prefix="fold", initializer=one_core)
        unit = 1 << (pinned_bytes(job) // PINNED_UNITS).bit_length() - 1  # as torch pins memory in powers of two
        uploaded = None
        if at[0].device.type != "cpu":
            uploaded = AdaptersOnDevice(reader, plans, device_bytes(job.max_vram) // 4, 4 * unit)
        cache = DeviceCache(min(CACHED_VALUES, room // (4 * CACHE_SHARE)))
        tensors = PatchTensors(self.cache.fetch, plans[0].weights, cache, adapters_on_device=uploaded)
        # What folds: block by block, and on a GPU whole windows.
        changed = checked(t.name for t in plans[0].targets if t.uses)
        self.blocks = BlockFolder(at, tensors, self.pool, FoldOptions.of(job, at, 2 * unit, changed))
        self.blocks.memory.notes += passed_over(self.choice.device, dtype)
        self.whole = DeviceWindows(self.blocks, self.pool, unit) if uploaded else None
        self.results = [PlanResults(Spool(part.parent)) for part in parts]  # one for each plan
        self.codes = NewCodes(plans, self.blocks, self.pool, self.cache.read)

    def begin(self, task: WindowTask) -> None:
        """Start to fold changed blocks, convert other dtypes and copy the rest; the task is complete after `settle`."""
        base_bytes, base = task.base_bytes.views(task.window)
        out = task.output.out.view(task.window.start, task.window.size)
        # Bytes that are written as they are, unless they are in the output buffer already.
        if not task.last:
            for low, high in _copied_ranges(task.window, task.change):
                out[low:high] = base_bytes[low:high]
        task.under_way.extend(self.codes.scales(task.plan, task.change, base))
        # Values that only change their dtype or form.
        for c in task.change.converts:
            if not c.target.packing.encoding.plain:
                task.under_way.extend(self.codes.begin(task.plan, c, base, out, self.cache.fetch))
                continue
            name, weight = c.target.name, c.target.weight
            stored = packed(base[c.source : c.source + c.source_bytes], weight.packing, weight.stored.dtype, (c.count,))
            values = decoded(stored, weight, c.first, c.count, self.cache.fetch)
            into = packed(out[c.at : c.at + c.nbytes], c.target.packing, c.target.dtype, (c.count,))
            if not convert(values, into):
                task.saturated[name] += settle(name, values, into, saturate=self.blocks.options.saturate)
        input_bytes = None if task.last else base_bytes  # the last task overwrites the base values

        def fold_task(f: Fold) -> FoldTask:
            return self.codes.task(task.plan, _fold_task(f, out, base if f.apart else input_bytes))

        # Blocks: those of plain values in whole windows on a device, the others in groups.
        rest = task.change.folds
        if self.whole is not None:
            started = [*self.whole.begin(task, fold_task)]
            rest = [f for f in started if isinstance(f, Fold)]
            task.under_way.extend(f for f in started if not isinstance(f, Fold))
        task.under_way.extend(self.blocks.begin([fold_task(f) for f in rest]))
        if firsts := [f.block.target for f in rest if f.block.begins]:
            task.under_way.append(self.pool.submit(self.blocks.norms, firsts))

    def settle(self, task: WindowTask) -> None:
        """Wait for the blocks of a task."""
        try:
            merged = settled(task.under_way)
        finally:
            if self.whole is not None and task.last:
                self.whole.forget(task.window)
        self.results[task.plan].add(merged)
        self.results[task.plan].cut += task.saturated

    def complete(self, number: int, part: Path) -> Collection[str]:
        """Write the parts of a plan's output next to the codes, and again the weights that are too large for theirs,
        whose names are returned."""
        plan, results = self.plans[number], self.results[number]
        spool, measures, uncovered = results.spool, results.measures, results.uncovered
        if self.whole is not None:
            measures.take(self.whole.measured(number))
        replaced = replacements(plan.targets, plan.base, plan.adapters)
        measures.take(replaced_measures(replaced, self.cache.read))
        if spool.empty and not uncovered:
            return ()
        # The parts next to codes, of all windows.
        files = [(part / f.name if f.name else part, f.targets) for f in plan.files]
        homes = {t.name: (path, t) for path, targets in files for t in targets}
        starts = {name: (path, target.offset) for name, (path, target) in homes.items()}
        spool.write(starts)
        # Weights that their scale does not cover, folded once more with a larger one.
        results.notes += _unequal(plan, uncovered)
        for name, magnitude in uncovered.items():
            path, old = homes[name]
            target = refitted(old, magnitude, self.cache.fetch)
            measures.forget(name)
            for block, codes, merged in refolded(target, self.blocks):
                amend(path, raw(codes), old.offset + target.packing.encoding.nbytes(block.first * block.cols))
                spool.put(merged.parts)
                measures.take(merged.measures)
            spool.put([*new_parts(target)])
            spool.write(starts)
            self.forget()
        return uncovered.keys()

    def forget(self) -> None:
        """Drop the adapters' tensors of this window, so that memory does not grow with the model."""
        self.cache.forget()
        self.blocks.tensors.cache.clear()

    def close(self) -> None:
        """End the threads, and give back the memory of their streams, which no other stream can use."""
        self.pool.shutdown()
        if self.whole is not None:
            self.whole.close()
        self.forget()
        if (uploaded := self.blocks.tensors.adapters_on_device) is not None:
            uploaded.forget()
        release(self.blocks.lanes.at)
        for results in self.results:
            results.spool.close()


def _unequal(plan: Plan, grown: Collection[str]) -> Iterator[Note]:
    """Yield a note for the user if a weight needs a larger scale than before, and servers read others with it."""
    joined = partners(plan.targets) if grown else {}
    for name in sorted(joined.keys() & grown)[:1]:
        others = listed([t.name for t in joined[name] if t.name != name])
        yield Note(
            f"{name} needs a larger scale of the whole weight than before; vLLM and SGLang read one scale for it"
            f" and {others}: their values would be wrong, write --dtype bf16 for them"
        )


def _copied_ranges(window: Window, change: WindowChange) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the window that are read into the output buffer and not folded."""
    folds = iter(sorted((f.at, f.at + f.nbytes) for f in change.folds if not f.apart))
    low, high = next(folds, (window.size, window.size))
    for r in window.direct:
        at, end = r.at, r.at + r.nbytes
        while low < end:
            if at < low:
                yield at, low
            at = high
            low, high = next(folds, (window.size, window.size))
        if at < end:
            yield at, end


def _fold_task(f: Fold, out: memoryview, base: memoryview | None) -> FoldTask:
    """Return the task of a block, whose base values and result share the buffers.

    Without `base`, the base values are in `out`, where the result overwrites them.
    """
    block, shape = f.block, (f.block.last - f.block.first, f.block.cols)
    into = packed(out[f.at : f.at + f.nbytes], block.target.packing, block.target.dtype, shape)
    if base is None:
        return FoldTask(block, into, into)
    return FoldTask(block, base_view(f, base), into)
