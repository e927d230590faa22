"""What folds on a device cost the host: `python -m tests.bench.host BASE ADAPTER`, on any machine, prints JSON.

The device is `meta`, which computes nothing: what is left is what processors do for a device. Counted for each GB of
folded weights: milliseconds of processor time, operations of the device (kernels and copies; views and new memory are
none), and bytes copied from and to it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_merge.disk.reader import Reader
from lora_merge.engine import devices, gpu_adapters, gpu_windows, tensor_moves
from lora_merge.engine.gpu_windows import RegisteredBuffers
from lora_merge.engine.tensor_moves import DeviceStream, Placement
from lora_merge.job import make_job
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from tests.bench import inputs
from tests.bench.device import GB, Folding
from tests.bench.measure import run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

META: Final = Placement(torch.device("meta"), torch.float32)


class Counted(TorchDispatchMode):
    """Counts the operations of the device; one mode serves one thread."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        there = [t for t in tensors if t.is_meta]
        if there and not view and "empty" not in func.__name__:
            here = [t for t in tensors if not t.is_meta and t.dim()]
            self.counts[f"copies of {func.__name__}" if here else func.__name__] += 1
            self.counts["operations"] += 1
            self.counts["bytes over the link"] += sum(t.nbytes for t in there[:1]) if here else 0
        return out


def downwards(counts: Counter[str] | None) -> Any:
    """Return `Tensor.copy_` that brings nothing from `meta`, where torch's own raises."""
    usual = Tensor.copy_

    def copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002  # torch's own
        if into.is_meta or not source.is_meta:
            return usual(into, source, non_blocking=non_blocking)
        if counts is not None:
            counts.update({"operations": 1, "copies to the host": 1, "bytes over the link": into.nbytes})
        return into

    return copy


@contextmanager
def pretended(counts: Counter[str] | None = None) -> Iterator[None]:
    """Let `meta` be a device with streams; with `counts`, count what is done there."""
    nothing: Any = SimpleNamespace(
        synchronize=lambda: None, record=lambda _: None, wait_stream=lambda _: None, query=lambda: True
    )
    turn = DeviceStream.turn

    @contextmanager
    def counted(lane: DeviceStream) -> Iterator[None]:
        with turn(lane), nullcontext() if counts is None else Counted(counts):
            yield

    def places(*_: object) -> tuple[Placement]:
        return (META,)

    usual = torch.tensor

    def brought(values: Any, **more: Any) -> Tensor:
        made = usual(values, **more)
        if made.is_meta and counts is not None:  # torch makes it on the host, and copies it without an operation's name
            counts.update({"operations": 1, "copies of numbers": 1, "bytes over the link": made.nbytes})
        return made

    with (
        patch.object(tensor_moves, "FULL_DEVICES", {"cpu", "meta"}), patch.object(devices, "FULL_DEVICES", {"cpu", "meta"}),
        patch.object(tensor_moves, "queues", lambda device: device.type == "meta"),
        patch.object(tensor_moves, "_stream", lambda *_: nothing),
        patch.object(tensor_moves, "_pinned", lambda count, dtype: torch.empty(count, dtype=dtype)),
        patch.object(tensor_moves, "odd", lambda t, odd=tensor_moves.odd: not t.is_meta and odd(t)),
        patch.object(torch.cuda, "current_stream", lambda _: nothing),
        patch.object(gpu_windows, "fit", lambda *_: True), patch.object(gpu_adapters, "fit", lambda *_: True),
        patch.object(RegisteredBuffers, "has", lambda *_: True), patch.object(torch.cuda, "Event", lambda **_: nothing),
        patch.object(torch.cuda, "stream", nullcontext), patch.object(torch.cuda, "device", nullcontext),
        patch.object(DeviceStream, "turn", counted), patch.object(Tensor, "copy_", downwards(counts)),
        patch.object(torch, "tensor", brought),
        patch("lora_merge.engine.device_memory.lane_count", lambda *_: 3),
        patch("lora_merge.engine.window_merger.places", places),
        patch("lora_merge.engine.window_merger.threads", lambda *_: 3),
    ):  # fmt: skip
        yield


def figures(base: Path, adapter: Path, rounds: int = 6) -> dict[str, float]:
    """Return the figures of one merge: the best of some passes for the time, one more for the counts."""
    plan = plan_job(make_job(base, [(adapter, 0.7)], base.with_name("none"), device="cuda"), CheckpointCache())
    found: dict[str, float] = {}
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        for counts in [None] * rounds + [Counter[str]()]:
            with pretended(counts):
                began = time.process_time()
                work = Folding(plan, reader)
                cut = time.process_time() - began
                spent = work.seconds(time.process_time)
                folded = work.sizes()["base"] / GB
                work.making.close()
            if counts is None:
                found["ms_per_gb"] = min(found.get("ms_per_gb", 1e9), spent * 1e3 / folded)
                found["windows_ms_per_gb"] = min(found.get("windows_ms_per_gb", 1e9), cut * 1e3 / folded)
            else:
                each = {name: count / folded for name, count in counts.most_common()}
                found |= {"folded_gb": folded, "windows": len(work.work), **each}
    return found


def suite(b: Bench) -> None:
    """What a merge on a device costs the host, for two sizes; holes for files, as values do not matter."""
    for size in ("sdxl", "flux"):
        dtype = "BF16" if size == "flux" else "F16"
        base = inputs.hole(b.file(f"{size}-hole.safetensors"), inputs.weights(size, dtype))
        lora = inputs.adapter(b.file(f"{size}-lora.safetensors"), size)
        command = [sys.executable, "-m", "tests.bench.host", str(base), str(lora)]
        found = json.loads(run(command).output.strip().rpartition("\n")[2])
        print(f"\nhost, {size}: {found['ms_per_gb']:.0f} ms of processor time and {found['operations']:.0f} device "
              f"operations for each GB of {found['folded_gb']:.1f}, in {found['windows']:.0f} windows", flush=True)  # fmt: skip
        b.results.append({"suite": "host", "name": size, **found})
        b.drop(base.name, lora.name)


if __name__ == "__main__":
    print(json.dumps(figures(Path(sys.argv[1]), Path(sys.argv[2]))))
