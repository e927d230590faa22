"""What a process is asked and allowed: signals that stop it, when it is too late to, and its limit on memory."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

from .errors import ResourceError
from .text import size

Handler: TypeAlias = Callable[[int, FrameType | None], None]

TORCH_ROOM: Final = 768 << 20
"""Bytes of addresses that torch and a small merge take beside torch's libraries: modules, stacks of threads, arenas."""

NUMBERS: Final = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))


class _Stops:
    """What became of the signals that arrived so far."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.committing = False
        self.waiting: int | None = None  # one that came too late, or too early
        self.heard: int | None = None

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if self.committing:
            self.waiting = number
        elif self.heard is None:
            self.heard = number
            self.handler(number, frame)


_stops = _Stops(lambda *_: None)


def on_stop(handler: Handler) -> None:
    """Let the first of SIGINT, SIGTERM and SIGHUP come to the handler, which raises what unwinds everything.

    Those after it are ignored: they would interrupt the cleaning up. SIGHUP stays ignored where it is, as nohup has it.
    """
    global _stops  # signals belong to the process
    _stops = _Stops(handler)
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN or number != getattr(signal, "SIGHUP", None):
            signal.signal(number, _stops)


def deliver_pending() -> None:
    """Hear a signal that came too late for the last job, or while something was made whole, and let them stop the work
    again. What one has raised is raised once more: Python drops what leaves a destructor or a callback of its own."""
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        return
    _stops.committing = False
    if _stops.heard is not None:
        _stops.handler(_stops.heard, None)
    elif _stops.waiting is not None:
        _stops(_stops.waiting)


@contextmanager
def heeding() -> Iterator[None]:
    """What a library made of a signal in the block (pydantic: an error of its own) is the signal all the same."""
    try:
        yield
    except Exception:
        deliver_pending()
        raise


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the block of a caller's program as a signal ends the command: never half-way through making or
    naming an output. KeyboardInterrupt leaves the block at the next moment when everything can be undone.

    Changes nothing outside the main thread, nor where the program has set a handler of its own.
    """
    global _stops
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = _stops
    mine = _stops = _Stops(signal.default_int_handler)
    signal.signal(signal.SIGINT, mine)
    try:
        with heeding():
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _stops = before
    if mine.waiting is not None or mine.heard is not None:  # it came too late, or was raised where Python drops it
        raise KeyboardInterrupt


def begin_commit() -> None:
    """From here on, up to the next `deliver_pending`, signals do not end the work: an output gets its name.

    Either it has it and its job has succeeded, or the job was stopped and it has none. Where no job follows, nothing
    is heard any more until the process ends.
    """
    deliver_pending()
    if threading.current_thread() is threading.main_thread():
        _stops.committing = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Return A short block that makes something and notes that it did: a signal is heard before it or after it."""
    begin_commit()
    try:
        yield
    finally:
        deliver_pending()


def deaf() -> None:
    """No signal stops this process any more."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def here() -> str:
    """Host and process, for reports and claims."""
    return f"{socket.gethostname()}:{os.getpid()}"


def command(module: str, function: str) -> list[str]:
    """Return the command that calls a function of a module.

    `python -m` would put the current folder first on the path: a `typing.py` that came with a model would run. The
    options against that are as new as Python 3.11.
    """
    path = [p for p in sys.path if isinstance(p, str)]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!a}; from {module} import {function}; {function}()"]


class LimitCheck:
    """Import hook: raises ResourceError before torch is loaded where the limit on addresses (ulimit -v) is too low.

    Without room its libraries hang or abort the process while they are loaded, and say nothing of memory.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find nothing; torch's own finder comes after this one."""
        if name == "torch":
            sys.meta_path.remove(self)
            check_room()
        return None


def check_room() -> None:
    """Raise ResourceError where the process may not have the addresses that torch and a small merge take."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    if sys.platform == "win32" or (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) == resource.RLIM_INFINITY:
        return
    found = PathFinder.find_spec("torch")
    folders = (found and found.submodule_search_locations) or ()
    needed = TORCH_ROOM + sum(p.stat().st_size for folder in folders for p in Path(folder, "lib").glob("*.so*"))
    try:
        mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
    except (OSError, MemoryError) as e:
        what = "not enough memory to load torch"
        where = f"the limit of this process is {size(limit)}; {size(needed)} more are needed than are in use"
        raise ResourceError(what, where, "raise the limit (ulimit -v)") from e


def collect_rarely() -> None:
    """Plans of 300 000 tensors have millions of objects, all of them in use: to look through them is time lost."""
    gc.set_threshold(10_000, 20, 50)
