"""Lanes: each thread folds on a stream of its own, on one of the placements."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import local
from typing import TypeVar

import torch

from ..errors import device_failure, device_full
from .devices import device_failed, release
from .tasks import OutOfMemory
from .tensor_moves import DeviceStream, Placement
from .tensors import DeviceCache
from .torch_state import exact_products

Result = TypeVar("Result")


class Lanes:
    """The lanes of all threads to some placements. `cache`: device tensors that are dropped if memory is short."""

    def __init__(self, at: tuple[Placement, ...], cache: DeviceCache) -> None:
        self.at, self._cache = at, cache
        self._of_thread, self._numbers = local(), count()

    def lane(self) -> DeviceStream:
        """Return the calling thread's lane; lanes are distributed over the placements in turn."""
        if not hasattr(self._of_thread, "lane"):
            number, which = divmod(next(self._numbers), len(self.at))
            self._of_thread.lane = DeviceStream(self.at[which], number)
        lane: DeviceStream = self._of_thread.lane
        return lane

    def leave(self) -> None:
        """Give up the calling thread's lane, with its memory."""
        self._of_thread.__dict__.clear()

    def turn(self, work: Callable[[DeviceStream], Result], lane: DeviceStream | None = None) -> Result | OutOfMemory:
        """Return the result of work in one turn of a lane, by default the calling thread's. DeviceFailed if the device
        has failed."""
        try:
            lane = lane or self.lane()
            with torch.no_grad(), exact_products(), lane.turn():
                return work(lane)
        except RuntimeError as e:
            short = device_full(e)
            if not short and (text := device_failure(e)):
                raise device_failed(self.at[0].device if lane is None else lane.at.device, text) from e
            if not short:
                raise
        self.relieve()  # outside `except`: frames of an exception in hand keep their tensors
        return OutOfMemory(short)

    def relieve(self) -> None:
        """Give unused memory back."""
        self._cache.clear()
        release(self.at)
