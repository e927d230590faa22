"""Registers the buffers of windows with CUDA, which then reads and writes them itself, without a copy on the host."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Any, Final

import torch

from ...disk.pages import address
from ..buffers import Buffer

PORTABLE: Final = 1
"""cudaHostRegisterPortable: the memory is pinned for all devices."""


class RegisteredBuffers:
    """Buffers that are registered; their memory is kept until it is unregistered, by `close` at the latest."""

    def __init__(self, *, wanted: bool) -> None:
        self._memory: dict[int, tuple[memoryview, torch.device]] = {}
        """Buffer → its memory, and the device that was current when it was registered."""
        self._wanted, self._lock = wanted, Lock()

    def has(self, buffer: Buffer, device: torch.device) -> bool:
        """Return whether the device can use a buffer itself; registers it, and again after it has grown.

        False where that fails, as it does under a limit on locked memory; no other buffer is tried then.
        """
        memory = buffer.memory
        with self._lock:
            held = self._memory.get(id(buffer))
            if held is not None and held[0] is memory:
                return True
            if held is not None:  # nothing is under way in it: the buffer was free since
                self._drop(id(buffer))
            if not self._wanted or not len(memory):
                return False
            error = _cudart().cudaHostRegister(address(memory), len(memory), PORTABLE)
            if int(error):  # an enumeration, which is true for every value
                self._wanted = False
                _clear_error(device)
                return False
            self._memory[id(buffer)] = memory, device
            return True

    def close(self) -> None:
        """Unregister all buffers; nothing may be under way in them."""
        with self._lock:
            for key in [*self._memory]:
                self._drop(key)

    def _drop(self, key: int) -> None:
        """Unregister a buffer. Any device can do that, but one that this process has not used would be started for it,
        as device 0 is where a thread has chosen none: half a GB of its memory."""
        memory, device = self._memory.pop(key)
        with suppress(RuntimeError), torch.cuda.device(device):  # of a failed device: the first error is reported
            _cudart().cudaHostUnregister(address(memory))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error(device: torch.device) -> None:
    """Let the next kernel be the one that reports the error of the failed call, as CUDA keeps it until then."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)
