"""Signals that stop the process, sections of code that they must not interrupt, and the process's limit on memory."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Final, TypeAlias

from .errors import ResourceError
from .text import size

Handler: TypeAlias = Callable[[int, FrameType | None], None]

TORCH_ROOM: Final = 768 << 20
"""Bytes of address space that torch and a small merge take next to its libraries: modules, stacks, arenas."""

_workers = 1
"""The number of workers that share the cores of this machine; a worker sets it once, in its process."""


def share_cores(workers: int) -> None:
    """Let this process use its share of the cores, as one of several workers on this machine."""
    global _workers
    _workers = workers


def cores() -> int:
    """Return the number of cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // _workers)


SIGNALS: Final = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))


SOON: Final = 0.01
"""Seconds until a signal is delivered again that arrived at a moment when no exception may be raised."""


def _takes_import_lock(frame: FrameType | None) -> bool:
    """Return whether a frame or a caller of it is about to enter the block in which Python gives the import lock back.

    An exception that is raised there leaves the lock held, and every import of another thread waits without end.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name in ("_get_module_lock", "cb"):
            return True
        frame = frame.f_back
    return False


class _Stops:
    """A signal handler that delivers the first signal once, and keeps back a signal that arrives during a commit."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.committing = False
        self.waiting: int | None = None  # a signal that arrived during a commit
        self.delivered: int | None = None

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if _takes_import_lock(frame):
            Timer(SOON, interrupt_main, [number]).start()
        elif self.committing:
            self.waiting = number
        elif self.delivered is None:
            self.delivered = number
            self.handler(number, frame)


_stops = _Stops(lambda *_: None)


def on_stop(handler: Handler) -> None:
    """Set the handler of SIGINT, SIGTERM and SIGHUP, which raises an exception; it is called for the first signal.

    Later signals are ignored: they would interrupt the cleaning up. SIGHUP stays ignored if it is, as under nohup.
    """
    global _stops  # a process has one handler for each signal
    _stops = _Stops(handler)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != getattr(signal, "SIGHUP", None):
            signal.signal(number, _stops)


def deliver_pending() -> None:
    """End a commit: deliver a signal that arrived during it, and let later signals stop the work again.

    A signal that was delivered before is delivered once more: Python drops exceptions that leave a destructor or a
    callback.
    """
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread
        return
    _stops.committing = False
    if _stops.delivered is not None:
        _stops.handler(_stops.delivered, None)
    elif _stops.waiting is not None:
        _stops(_stops.waiting)


@contextmanager
def signals_first() -> Iterator[None]:
    """Raise a signal's exception in place of the error that a library made from it, as pydantic does."""
    try:
        yield
    except Exception:
        deliver_pending()
        raise


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the block of a caller's program only where the output is complete or can be removed.

    KeyboardInterrupt leaves the block at the next such moment. Nothing changes outside the main thread, nor where the
    program has set its own handler.
    """
    global _stops
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = _stops
    stops = _stops = _Stops(signal.default_int_handler)
    signal.signal(signal.SIGINT, stops)
    try:
        with signals_first():
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _stops = before
    if stops.waiting is not None or stops.delivered is not None:  # during a commit, or raised where Python drops it
        raise KeyboardInterrupt


def begin_commit() -> None:
    """Keep signals back until the next `deliver_pending`, while an output gets its name.

    So either the output has its name and its job has succeeded, or the job was stopped and there is no output. If no
    job follows, signals are kept back until the process ends.
    """
    deliver_pending()
    if threading.current_thread() is threading.main_thread():
        _stops.committing = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep signals back during a short block, such as one that makes a file and records that it did."""
    begin_commit()
    try:
        yield
    finally:
        deliver_pending()


@contextmanager
def kept_back() -> Iterator[None]:
    """Keep signals back during a short block. Unlike `uninterrupted`, a commit under way goes on after it."""
    before = _stops.committing
    if threading.current_thread() is threading.main_thread():
        _stops.committing = True
    try:
        yield
    finally:
        if not before:
            deliver_pending()


def ignore_signals() -> None:
    """Ignore all signals from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def here() -> str:
    """Return the names of host and process, for reports and claims."""
    import socket  # its tables of constants take 7000 calls, and `--help` needs no name

    return f"{socket.gethostname()}:{os.getpid()}"


def command(module: str, function: str) -> list[str]:
    """Return the command that calls a function of a module.

    `python -m` would put the current folder first on the path, and run a `typing.py` that came with a model. The option
    against that exists only since Python 3.11.
    """
    path = [p for p in sys.path if isinstance(p, str)]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!a}; from {module} import {function}; {function}()"]


class LimitCheck:
    """Import hook that raises ResourceError before torch is loaded, if the limit on addresses (ulimit -v) is too low.

    Under such a limit, torch's libraries hang or abort the process while they are loaded, without a word on memory.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Check the limit if the module is torch; return None, so that the next finder loads the module."""
        if name == "torch":
            sys.meta_path.remove(self)
            check_room()
        return None


def check_room() -> None:
    """Raise ResourceError if the process may not have the address space that torch and a small merge take."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    if sys.platform == "win32":
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    spec = PathFinder.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    needed = TORCH_ROOM + sum(p.stat().st_size for folder in folders for p in Path(folder, "lib").glob("*.so*"))
    try:
        mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
    except (OSError, MemoryError) as e:
        what = "not enough memory to load torch"
        where = f"the limit of this process is {size(limit)}; {size(needed)} are needed beyond the memory now in use"
        raise ResourceError(what, where, "raise the limit (ulimit -v unlimited)") from e


def collect_rarely() -> None:
    """Run the garbage collector rarely: plans of 300 000 tensors have millions of objects, and all are in use."""
    gc.set_threshold(100_000, 20, 50)


@contextmanager
def kept_objects() -> Iterator[None]:
    """Collect no garbage meanwhile, and never look at what has been made by the end, such as torch's modules and a
    plan: it stays in use until the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
