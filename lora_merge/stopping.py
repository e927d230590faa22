"""Signals that ask a process to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


def on_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let SIGINT, SIGTERM and SIGHUP come to the handler; SIGHUP stays ignored where it is, as nohup has it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        signal.signal(signal.SIGHUP, handler)
