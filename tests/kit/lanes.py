"""Lanes of the engine on a fake device, whose streams are watched for races."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lora_merge
from lora_merge.engine import tensors as factors
from lora_merge.engine.fold import StackedPatch, fold
from lora_merge.engine.row_blocks import BLOCK_ELEMENTS
from lora_merge.engine.tensor_moves import Placement, _stream
from tests.kit.files import save
from tests.kit.tensors import rand

META = Placement(torch.device("meta"), torch.float32)


aten = torch.ops.aten


@dataclass
class Work:
    """One operation: the numbers of the storages that it reads and writes."""

    name: str
    reads: set[int]
    writes: set[int]

    def meets(self, other: Work) -> bool:
        """Whether the order of the two matters."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class Stream:
    """Work that is queued and not known to be done."""

    def __init__(self, device: Device) -> None:
        self.device, self.queued, self.waited = device, list[Work](), False
        device.streams.append(self)

    def synchronize(self) -> None:
        with self.device.lock:
            self.device.sweep()
            self.queued.clear()

    def wait_stream(self, other: Stream) -> None:
        """For the caller's, where nothing is queued here: its work would come first."""
        assert other is self.device.streams[0]
        self.waited = True


class Event:
    """The end of what is queued on a stream."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronize()


@dataclass
class Device:
    """All streams, all storages, and the races found."""

    streams: list[Stream] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    storages: dict[int, tuple[StorageWeakRef, int, Stream, int]] = field(default_factory=dict)
    numbers: int = 0
    live: int = 0  # bytes on the device
    peak: int = 0
    lock: RLock = field(default_factory=RLock)

    def number(self, tensor: Tensor, stream: Stream) -> int:
        """The storage's own; an address is not used again while there is a weak reference to it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.numbers += 1
            size = storage.nbytes() if tensor.is_meta else 0
            self.storages[storage._cdata] = (StorageWeakRef(storage), self.numbers, stream, size)
            self.live += size
            self.peak = max(self.peak, self.live)
        return self.storages[storage._cdata][1]

    def sweep(self) -> None:
        """Memory that was freed meanwhile: its stream may use it again at once, so no other may have work on it."""
        for key, (storage, number, maker, size) in list(self.storages.items()):
            if storage.expired():
                del self.storages[key]
                self.live -= size
                self.run(Work("what comes after its release", set(), {number}), maker, queue=False)

    def run(self, work: Work, stream: Stream | None, *, queue: bool) -> None:
        """Work of a stream, or of the host, which is in no order with what other streams have queued."""
        for other in self.streams:
            if other is not stream:
                self.races += [f"{work.name} meets {w.name}" for w in other.queued if work.meets(w)]
        if queue and stream is not None:
            stream.queued.append(work)


class Watching(TorchDispatchMode):
    """Every operation of a thread: done at once on shapes, but for the device still queued."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        device, infos = self.stream.device, func._schema.arguments
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [a for a, i in zip(args, infos, strict=False) if i.alias_info and i.alias_info.is_write]
        view = any(i.alias_info and not i.alias_info.is_write for i in infos)
        with device.lock:
            device.sweep()
            down = func is aten.copy_.default and args[0].device.type == "cpu" and args[1].is_meta
            out = args[0] if down else func(*args, **kwargs)
            results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            if not view:
                there = any(t.is_meta for t in (*inputs, *results))
                writes = {device.number(t, self.stream) for t in [*results, *tree_leaves(written)]}
                reads = {device.number(t, self.stream) for t in inputs} - writes
                device.run(Work(str(func), reads, writes), self.stream if there else None, queue=True)
                if there and any(not t.is_meta for t in inputs) and not kwargs.get("non_blocking", down):
                    self.stream.synchronize()  # from memory that is not pinned, torch waits
            return out


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A fake device under real lanes."""
    fake = Device()
    caller = Stream(fake)

    @contextmanager
    def turn(stream: Stream) -> Iterator[None]:
        with Watching(stream):
            yield

    for module in ("tensor_moves", "devices"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.FULL_DEVICES", {"cpu", "meta"})
    monkeypatch.setattr("lora_merge.engine.tensor_moves.queues", lambda device: device.type == "meta")
    monkeypatch.setattr("lora_merge.engine.tensor_moves.odd", lambda _: False)  # there are no values
    for module in ("gpu_windows", "gpu_adapters"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.fit", lambda *_: True)
    for name, value in {"Stream": lambda _: Stream(fake), "Event": Event, "stream": turn, "current_stream": lambda _: caller,
                        "device": nullcontext}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    _stream.cache_clear()
    yield fake
    _stream.cache_clear()


def expect_no_races(kind: str, most: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge whose windows end, and give their factors' memory back, at the worst moment: while others use them.
    Also where calls are made again, smaller, as numbers of more than `most` blocks do not fit."""
    shared: list[factors.DeviceCache] = []

    class DeviceCache(factors.DeviceCache):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            shared.append(self)

    def late(base: Tensor, stacks: Sequence[StackedPatch]) -> Tensor:
        time.sleep(0.02)  # other lanes come that far too
        shared[-1].clear()
        if base.numel() > most * BLOCK_ELEMENTS:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return fold(base, stacks)

    monkeypatch.setattr("lora_merge.engine.window_merger.places", lambda *_: (META,))
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: 3)
    monkeypatch.setattr("lora_merge.engine.window_merger.DeviceCache", DeviceCache)
    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": late})
    shapes = (
        {"oft_blocks": (384, 8, 8)} if kind == "oft" else {"lora_up.weight": (3072, 4), "lora_down.weight": (4, 1024)}
    )
    base = {f"layer.{n}.weight": torch.zeros(3072, 1024, dtype=torch.bfloat16) for n in range(3)}
    adapter = {f"layer.{n}.{slot}": rand(*shape) for n in range(3) for slot, shape in shapes.items()}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    report = lora_merge.merge(*files, tmp_path / "o", verify=False, device="cpu", max_vram="160MiB", max_memory="64MiB")
    assert sum("short of memory" in note for note in report.notes) == (most == 1)
    caller, *lanes = device.streams
    assert len(lanes) > 1 and all(lane.waited for lane in lanes) and not caller.queued
    assert device.numbers > 40
    assert not device.races
