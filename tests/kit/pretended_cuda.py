"""A CUDA that is not there: tensors on `cuda:n` whose values lie on the CPU, and whose work is done as late as it may be.

A stream keeps what it is given until somebody waits for it. Copies from and to pinned memory happen then, all others at
once, as torch has it. Memory under way holds NaN or 0x7f bytes: who reads it too early shows that by wrong values, and
work in no order with another stream's on the same storage is written down as a race.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import RLock, local
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

from lora_merge.engine.devices import _failed, _loaded
from lora_merge.engine.tensor_moves import EIGHT, _stream, rounds_to_eight_bits

aten = torch.ops.aten
FACTORIES = ("empty.memory_format", "empty_strided", "eye", "eye.m", "arange", "arange.start", "arange.start_step",
             "triu_indices")  # fmt: skip
PRODUCTS = {f"aten::{name}" for name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")}
DECOMPOSITIONS = {f"aten::{name}" for name in ("linalg_inv_ex", "linalg_solve_ex", "_linalg_solve_ex", "_linalg_svd",
                                               "linalg_qr", "linalg_lu_factor_ex", "linalg_solve_triangular")}  # fmt: skip
WAITING = {"aten::_local_scalar_dense", "aten::equal", "aten::_linalg_check_errors", "aten::nonzero"}


class Stream:
    """Work in the order in which it was given."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.queue = device, deque[Callable[[], object]]()
        self.given = 0  # pieces of work so far
        self.after: dict[Stream, int] = {}  # other stream → how many pieces of its work come before what is given next

    def synchronize(self) -> None:
        with gpu().lock:
            gpu().counts["waits"] += 1
            while self.queue:
                self.queue.popleft()()

    def wait_stream(self, other: Stream) -> None:
        with gpu().lock:
            done: list[bool] = []
            other.queue.append(lambda: done.append(True))

            def wait() -> None:
                while not done:
                    other.queue.popleft()()

            self.queue.append(wait)
            self.after[other] = other.given


class Event:
    """A point in a stream that a thread sleeps for."""

    def __init__(self, *, blocking: bool = False) -> None:
        assert blocking, "a thread that spins takes the time of readers and writers"

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronize()


class Result:
    """What CUDA's functions return: an enumeration of torch's, which has a number and no truth value of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


class Runtime:
    """CUDA's functions for memory of the host."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, _flags: int) -> Result:
        if gpu().refuses_memory:
            return Result(2)
        assert address not in gpu().registered, "712: it is registered already"
        gpu().registered[address] = size
        gpu().started.add(gpu().current)
        gpu().counts["registered"] += 1
        return Result(0)

    @staticmethod
    def cudaHostUnregister(address: int) -> Result:
        del gpu().registered[address]
        gpu().started.add(gpu().current)
        return Result(0)


class Pending(NamedTuple):
    """The n-th piece of work of a stream, and whether it has still to be done."""

    stream: Stream
    number: int
    left: list[bool]

    def before(self, stream: Stream) -> bool:
        """Whether it is done before what the stream is given next."""
        return not self.left[0] or stream is self.stream or self.number <= stream.after.get(self.stream, 0)


@dataclass
class Storage:
    """Who has yet to write it, and to read it; and its address, far from all others."""

    address: int = field(default_factory=count(2**36, 2**36).__next__)
    writer: Pending | None = None
    readers: list[Pending] = field(default_factory=list)


@dataclass
class Pretended:
    """The devices and what became of them."""

    lock: Any = field(default_factory=RLock)
    mine: local = field(default_factory=local)  # each thread's current device and streams
    defaults: dict[int, Stream] = field(default_factory=dict)
    pinned: dict[int, StorageWeakRef] = field(default_factory=dict)
    registered: dict[int, int] = field(default_factory=dict)  # address → bytes
    sizes: dict[int, int] = field(default_factory=dict)  # address → bytes that are pinned, or were
    most_pinned: int = 0  # bytes at one time
    lacks: frozenset[torch.dtype] = frozenset()  # dtypes that no tensor there can have, as on Metal
    started: set[int] = field(
        default_factory=set
    )  # devices that CUDA has started to register memory, or to give some up
    rounds_wrongly: bool = False  # whether casts to 8-bit floats give other numbers
    refuses_memory: bool = False  # whether no memory can be registered
    counts: Counter[str] = field(default_factory=Counter)
    races: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # products that are not exact, decompositions in fp32
    lost: str = ""  # the error of all work, once the device has failed

    @property
    def current(self) -> int:
        return getattr(self.mine, "device", 0)

    def stream(self, device: Any = None) -> Stream:
        """The calling thread's for this device."""
        number = device if isinstance(device, int) else self.current if device is None else numbered(device)
        streams: dict[int, Stream] = self.mine.__dict__.setdefault("streams", {})
        with self.lock:
            usual = self.defaults.setdefault(number, Stream(torch.device("cuda", number)))
        return streams.get(number, usual)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.mine.device = self.current, device.index
        try:
            yield
        finally:
            self.mine.device = before

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before = self.stream(stream.device)
        assert self.current == stream.device.index, "its way back would start another device up"
        self.mine.streams[stream.device.index] = stream
        try:
            yield
        finally:
            self.mine.streams[stream.device.index] = before

    def is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        if any(low <= at and at + tensor.nbytes <= low + size for low, size in self.registered.items()):
            return True
        storage = self.pinned.get(tensor.untyped_storage().data_ptr())
        return storage is not None and not storage.expired()

    def work(self, act: Callable[[], object]) -> None:
        """Do a piece of work; an index outside of a tensor ends the device, and whatever comes then fails."""
        if not self.lost:
            try:
                act()
            except (IndexError, RuntimeError) as e:
                if "out of" not in str(e):
                    raise
                self.lost = "CUDA error: device-side assert triggered"
        if self.lost:
            raise RuntimeError(self.lost)

    def queue(
        self, name: str, stream: Stream, reads: list[There], writes: list[There], act: Callable[[], object]
    ) -> None:
        """Give a stream work; what other streams have yet to do on the same memory must come before it."""
        stream.given += 1
        pending = Pending(stream, stream.given, [True])
        before = [t.storage.writer for t in [*reads, *writes] if t.storage.writer]
        if not all(p.before(stream) for p in before + [r for t in writes for r in t.storage.readers]):
            self.races.append(f"{name} meets what another stream has yet to do")
        for t in writes:
            t.storage.writer = pending
        for t in reads:
            t.storage.readers = [r for r in t.storage.readers if r.left[0]] + [pending]

        def done() -> None:
            pending.left[0] = False
            self.work(act)

        stream.queue.append(done)


_pretended: list[Pretended] = []


def gpu() -> Pretended:
    """The one of this test."""
    return _pretended[0]


def numbered(device: torch.device) -> int:
    """Its number, or that of the thread's device."""
    return gpu().current if device.index is None else device.index


class There(Tensor):
    """A tensor on the device: its shape is known, its values are when the work is done."""

    @staticmethod
    def __new__(cls, shaped: Tensor, device: int, storage: Storage) -> There:
        if shaped.dtype in gpu().lacks:
            raise TypeError(f"the device has no {shaped.dtype}")
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, shaped.shape, strides=shaped.stride(), dtype=shaped.dtype, device=f"cuda:{device}"
        )

    def __init__(self, shaped: Tensor, device: int, storage: Storage) -> None:
        self.shaped, self.number, self.storage, self.values = shaped, device, storage, None

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: Tensor, *, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        """Torch's own asks a real device for a guard where both are on the device."""
        with gpu().lock:
            return copied(self, source, non_blocking=non_blocking)

    def data_ptr(self) -> int:
        return self.storage.address + self.shaped.storage_offset() * self.element_size()

    def tolist(self) -> Any:
        gpu().stream(self.number).synchronize()
        return self.values.tolist()  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.tolist())

    def __int__(self) -> int:
        return int(self.tolist())

    def __invert__(self) -> Tensor:
        """Torch's own asks a real device for a guard."""
        return aten.bitwise_not.default(self)  # type: ignore[no-any-return]

    def nonzero(self) -> Tensor:  # type: ignore[override]
        """Torch's own asks a real device for a guard; it waits, as the shape depends on the values."""
        with gpu().lock:
            return operated(aten.nonzero.default, (self,), {}).to(self.device)  # type: ignore[no-any-return]

    def contiguous(self) -> Tensor:  # type: ignore[override]
        """Torch's own asks for a guard where it copies."""
        return self if self.is_contiguous() else aten.clone.default(self, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Tensor:
        """By views and aten.index; torch's own way asks a real device for a guard, which a build for CPUs lacks."""
        out, index = planned(self, key)
        return out if index is None else aten.index.Tensor(out, index)

    def __setitem__(self, key: Any, value: Any) -> None:
        out, index = planned(self, key)
        value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype)
        if index is None:
            aten.copy_.default(out, value.expand(out.shape))
        else:
            aten.index_put_.default(out, index, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with gpu().lock:
            if func is aten.copy_.default:
                return copied(args[0], args[1], non_blocking=len(args) > 2 and args[2])
            if func is aten._to_copy.default and torch.device(kwargs.get("device") or args[0].device).type == "cpu":
                out = torch.empty(args[0].shape, dtype=args[0].dtype)
                return copied(out, args[0], non_blocking=False).to(kwargs.get("dtype") or out.dtype)
            return operated(func, args, kwargs)


def planned(x: Tensor, key: Any) -> tuple[Tensor, list[Any] | None]:
    """A view of a tensor for what a key says of single numbers and ranges, and the key's tensors, for aten.index."""
    key = key if isinstance(key, tuple) else (key,)
    used = sum(k is not None and k is not Ellipsis for k in key)
    out, dim, index = x, 0, dict[int, Any]()
    for k in key:
        if k is None:
            out, dim = aten.unsqueeze.default(out, dim), dim + 1
        elif k is Ellipsis:
            dim += x.dim() - used
        elif isinstance(k, int):
            out = aten.select.int(out, dim, k)
        elif isinstance(k, slice):
            if k != slice(None):
                out = aten.slice.Tensor(out, dim, k.start, k.stop, k.step or 1)
            dim += 1
        else:
            index[dim], dim = k, dim + 1
    return out, [index.get(d) for d in range(max(index) + 1)] if index else None


def values(tree: Any) -> Any:
    """The same with values for tensors, and the CPU for the device."""
    return tree_map(lambda t: t.values if isinstance(t, There) else t, tree)


def operated(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, queued on the thread's stream."""
    name, tensors = func._schema.name, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, There)]
    here = [t for t in tensors if not isinstance(t, There) and t.dim()]
    where = {t.number for t in there} or {numbered(kwargs["device"])}
    if here or len(where) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
    number = where.pop()
    stream = gpu().stream(number)
    on = {k: v for k, v in kwargs.items() if k not in {"device", "pin_memory", "layout"}}
    if any(t.dtype == torch.float32 and t.numel() > 1 for t in there):
        inexact = name in PRODUCTS and torch.get_float32_matmul_precision() != "highest"
        gpu().faults += [name] if inexact or name in DECOMPOSITIONS else []
    if name in WAITING:
        stream.synchronize()
        return func(*values(args), **values(on))
    made_on = {"device": "meta"} if "device" in kwargs else {}
    shaped = func(*shapes(args), **shapes(on), **made_on)
    view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
    writes = {i.name for i in func._schema.arguments if i.alias_info and i.alias_info.is_write}
    named = {i.name: a for a, i in zip(args, func._schema.arguments, strict=False)} | kwargs
    written = tree_leaves([a for name, a in named.items() if name in writes])
    known = {id(t.shaped): t for t in there}

    def wrapped(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return known[id(t)] if id(t) in known else There(t, number, there[0].storage if view else Storage())

    out = tree_map(wrapped, shaped)
    results = [t for t in tree_leaves(out) if isinstance(t, There)]

    def act() -> None:
        done = func(*values(args), **values(on))
        if gpu().rounds_wrongly and name in {"aten::copy_", "aten::_to_copy"} and done.dtype in EIGHT and not view:
            done.view(torch.uint8).bitwise_xor_(1)
        for t, value in zip(results, [v for v in tree_leaves(done) if isinstance(v, Tensor)], strict=True):
            t.values = value

    if view and there[0].values is not None:
        act()
    elif view:
        stream.queue.append(act)
    else:
        gpu().counts[name] += 1
        gpu().queue(name, stream, there, [*results, *written], act)
    return out


def shapes(tree: Any) -> Any:
    """The same with shapes for tensors."""
    return tree_map(lambda t: t.shaped if isinstance(t, There) else t, tree)


def copied(into: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
    """A copy on the device, up, down, or from one to the other."""
    up, down = isinstance(into, There), isinstance(source, There)
    if isinstance(into, There) and isinstance(source, There):
        if into.number == source.number:
            operated(aten.copy_.default, (into, source), {})
            return into
        gpu().stream(into.number).wait_stream(gpu().stream(source.number))
    number = into.number if isinstance(into, There) else source.number  # type: ignore[attr-defined]
    stream, host = gpu().stream(number), source if up else into
    waits = not (non_blocking and gpu().is_pinned(host)) or (up and down)
    gpu().counts[f"{'up' if up else 'down'}{' and waited for' if waits else ''}"] += 1

    def act() -> None:
        values(into).copy_(values(source))

    gpu().queue("a copy", stream, [source] if down else [], [into] if up else [], act)  # type: ignore[list-item]
    if waits:
        stream.synchronize()
    elif not up:
        into.view(torch.uint8).fill_(0x7F)
    return into


def factory(func: Any) -> Callable[..., Tensor]:
    """What makes tensors on the device."""

    def make(*args: Any, **kwargs: Any) -> Any:
        with gpu().lock:
            out = operated(func, args, kwargs)
            if func.name().startswith("aten::empty"):  # not even their memory is clean
                work = gpu().stream(out.number).queue.pop()
                work()
                if out.dtype in {torch.float64, torch.float32, torch.float16, torch.bfloat16}:
                    out.values.fill_(float("nan"))
            return out

    return make


@contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> Iterator[Pretended]:
    """As many CUDA devices, for all threads, inside. What the process remembers of devices is forgotten on both sides."""
    forget()
    gpus = Pretended()
    _pretended[:] = [gpus]
    empty, tensor = torch.empty, torch.tensor
    torch._C._ensureCUDADeviceGuardSet()

    def pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        if pin_memory:
            storage = out.untyped_storage()
            gpus.pinned[storage.data_ptr()] = StorageWeakRef(storage)
            gpus.sizes[storage.data_ptr()] = storage.nbytes()
            pinned = sum(size for at, size in gpus.sizes.items() if not gpus.pinned[at].expired())
            gpus.most_pinned = max(gpus.most_pinned, pinned)
        return out

    def moved(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        usual = (m.device for m in reversed(_get_current_function_mode_stack()) if isinstance(m, DeviceContext))
        return tensor(*args, device="cpu", **kwargs).to(device or next(usual, "cpu"))

    instead = {
        "Stream": Stream, "Event": Event, "cudart": lambda: Runtime, "stream": gpus.using, "device": gpus.on, "current_stream": gpus.stream,
        "current_device": lambda: gpus.current, "is_available": lambda: True, "device_count": lambda: devices,
        "_lazy_init": lambda: None, "empty_cache": lambda: gpus.started.add(gpus.current),
    }  # fmt: skip
    for name, value in instead.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with torch.device("cpu"):
        torch.empty(0)  # the first time torch remembers its functions that make tensors: not those of the stand-in
    monkeypatch.setattr(torch, "empty", pinning)
    monkeypatch.setattr(torch, "tensor", moved)
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in FACTORIES:
            packet, _, overload = name.partition(".")
            library.impl(name, factory(getattr(getattr(aten, packet), overload or "default")), "CUDA")
        yield gpus
    finally:
        library._destroy()
        forget()


def forget() -> None:
    """The process remembers no stream, no device that has decompositions, and none that failed."""
    _stream.cache_clear()
    rounds_to_eight_bits.cache_clear()
    _loaded.clear()
    _failed.clear()
