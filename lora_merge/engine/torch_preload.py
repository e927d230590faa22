"""Loads torch's largest library while the plan is made.

Tried and left: an import hook that has torch read `_meta_registrations` when it is first used saves another quarter of
the import (0.4 s), but parts of torch rely on it unsaid: `torch.Generator()` fails without it in 2.13.
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
"""Modules with compiled parts that planning and merging import. The system's loader takes one library at a time, so
each of these would wait until torch's is there if it were imported later."""


def preload() -> None:
    """Begin to load torch's largest library, and do not wait: `import torch` then takes a sixth less (0.3 s)."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    for name in COMPILED:
        import_module(name)
    with suppress(ImportError, ValueError):  # the import itself will tell
        found = find_spec("torch")
        for folder in (found and found.submodule_search_locations) or ():
            library = Path(folder) / "lib" / "libtorch_cpu.so"
            # Python keeps its lock while it loads a library, but not while it calls a function of one. No daemon: to
            # end in the middle of it would abort the process.
            Thread(target=ctypes.CDLL(None).dlopen, args=(os.fsencode(library), os.RTLD_NOW), name="preload").start()
