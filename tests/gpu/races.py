"""torch's race detector between streams, inside the lanes of a merge: `python -m tests.gpu.races`; prints JSON.

The detector was not made for several threads, so one thread at a time may call it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _sanitizer

import lora_merge
from lora_merge.engine.tensor_moves import DeviceStream
from tests.kit.files import save
from tests.kit.tensors import rand


class Watch(_sanitizer.CUDASanitizerDispatchMode):
    """The detector behind a lock; keeps what it reports, and lets the work go on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lock, self.reports = threading.RLock(), list[str]()
        launched = self.event_handler._handle_kernel_launch

        def noted(*given: Any) -> list[Any]:
            self.reports += map(str, launched(*given))
            return []

        self.event_handler._handle_kernel_launch = noted  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.lock:
            return super().__torch_dispatch__(func, types, args, kwargs)


def watching(watch: Watch) -> None:
    """Let the detector see all that lanes do."""
    turn = DeviceStream.turn

    @contextmanager
    def watched(lane: DeviceStream) -> Iterator[None]:
        with turn(lane), watch:
            yield

    DeviceStream.turn = watched  # type: ignore[method-assign, assignment]


def main() -> None:
    """Merge with windows of several sizes, under the detector, or under none, for other tools: `plain`."""
    torch.ones(1, device="cuda")
    watch = None if "plain" in sys.argv else Watch()
    if watch is not None:
        watching(watch)
    folder = Path(tempfile.mkdtemp())
    base, adapter = {}, {}
    for n in range(60):
        base[f"m.{n}.weight"] = rand(1536, 1024 + n % 3, seed=n).half()
        adapter[f"m.{n}.lora_up.weight"] = rand(1536, 8, seed=n)
        adapter[f"m.{n}.lora_down.weight"] = rand(8, 1024 + n % 3, seed=n)
    files = save(base, folder / "b"), save(adapter, folder / "a")
    for memory in ("16MiB", "64MiB", "1GiB"):
        lora_merge.merge(*files, folder / "o", device="cuda", max_memory=memory, overwrite=True)
        if watch is not None:
            found = {"stream_races": len(watch.reports), "first_race": next(iter(watch.reports), "")[:2000]}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
