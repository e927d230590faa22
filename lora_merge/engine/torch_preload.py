"""Loads torch's largest library while the plan is made, and lets malloc keep what torch frees.

An import hook that loads torch's `_meta_registrations` on first use would save another quarter of the import (0.4 s),
but parts of torch need that module without importing it: `torch.Generator()` fails in 2.13.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Final

COMPILED: Final = ("hashlib", "mmap", "numpy", "queue", "random", "yaml")
"""Compiled modules that planning and merging import. The system's loader loads one library at a time: a later import of
these would wait until torch's library is loaded."""


TRIM_THRESHOLD: Final = -1
MMAP_THRESHOLD: Final = -3
"""glibc's parameters: free bytes from which on malloc gives memory back, and the size from which on a piece is given
back alone."""

LEAST_PIECE: Final = 2**23
"""Bytes of the smallest such piece: twice those of a block in fp32, of which many are made one after another."""


def keep_freed_memory(max_memory: int = 2**30) -> None:
    """Let malloc keep what is freed, for a process that only merges, but little of it under a low limit of memory.

    With glibc's defaults most tensors of a block are new pages from the system, which zeroes them: a third of the time
    of merges into quantised weights.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):  # glibc alone has it
        mallopt(TRIM_THRESHOLD, min(2**27, max(2 * LEAST_PIECE, max_memory // 8)))
        mallopt(MMAP_THRESHOLD, min(2**25, max(LEAST_PIECE, max_memory // 16)))


def preload(*, wait: bool = False) -> None:
    """Start to load torch's largest library: `import torch` then takes a sixth less (0.3 s). For programs that own the
    process.

    `wait`: return when it is loaded. Other threads run meanwhile, which they cannot while `import torch` loads it.
    """
    if sys.platform == "linux" and "torch" not in sys.modules:
        keep_freed_memory()
        load_library(wait=wait)


def load_library(*, wait: bool = True) -> None:
    """Load torch's largest library while other threads run, such as one that draws progress; `wait` as in `preload`."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    for name in COMPILED:
        import_module(name)
    with suppress(ImportError, ValueError):  # `import torch` will raise the error
        spec = find_spec("torch")
        for folder in (spec and spec.submodule_search_locations) or ():
            library = Path(folder) / "lib" / "libtorch_cpu.so"
            # `dlopen` is called as a function because Python holds its lock while it loads a library itself. The thread
            # is not a daemon: if Python ended during the call, the process would abort.
            loading = ctypes.CDLL(None).dlopen
            thread = Thread(target=loading, args=(os.fsencode(library), os.RTLD_NOW), name="preload")
            thread.start()
            if wait:
                thread.join()
