"""torch's race detector between streams, inside the lanes of a merge: `python -m tests.gpu.races`; prints JSON.

The detector was not made for several threads, so one thread at a time may call it.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _sanitizer

import lora_merge
from lora_merge.engine.placement import DeviceStream

from ..support import rand, save


class Watch(_sanitizer.CUDASanitizerDispatchMode):
    """The detector behind a lock; keeps what it reports."""

    lock = threading.RLock()
    reports: list[str] = []  # noqa: RUF012  # of all threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.lock:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except _sanitizer.CUDASanitizerErrors as e:
                self.reports.append(str(e))
                return func(*args, **(kwargs or {}))


def main() -> None:
    """Merge with windows of several sizes, under the detector."""
    torch.ones(1, device="cuda")
    watch, turn = Watch(), DeviceStream.turn  # type: ignore[no-untyped-call]

    @contextmanager
    def watched(lane: DeviceStream) -> Iterator[None]:
        with turn(lane), watch:
            yield

    DeviceStream.turn = watched  # type: ignore[method-assign, assignment]
    folder = Path(tempfile.mkdtemp())
    base, adapter = {}, {}
    for n in range(60):
        base[f"m.{n}.weight"] = rand(1536, 1024 + n % 3, seed=n).half()
        adapter[f"m.{n}.lora_up.weight"] = rand(1536, 8, seed=n)
        adapter[f"m.{n}.lora_down.weight"] = rand(8, 1024 + n % 3, seed=n)
    files = save(base, folder / "b"), save(adapter, folder / "a")
    for memory in ("16MiB", "64MiB", "1GiB"):
        lora_merge.merge(*files, folder / "o", device="cuda", max_memory=memory, overwrite=True)
    print(json.dumps({"stream_races": len(Watch.reports), "first_race": next(iter(Watch.reports), "")[:2000]}))


if __name__ == "__main__":
    main()
