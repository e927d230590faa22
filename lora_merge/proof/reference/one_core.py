"""Matrix products of numpy on the thread that asks for them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Final

NUMPY: Final = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
"""The module of numpy that is linked with its library of matrix products; its name before numpy 2."""

OPENBLAS: Final = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_",
                   "openblas_{}_num_threads")  # fmt: skip
"""Names of a function of OpenBLAS in numpy's own packages and in others."""

_lock: Final = Lock()
_held: Final[list[int]] = []
"""The number of threads before the first of those who are in `one_core`, then one entry for each of the others."""


@contextmanager
def one_core() -> Iterator[None]:
    """Let numpy's matrix products run on the thread that asks, until the end of the block.

    OpenBLAS has one group of threads for the whole process. Where several threads ask at once, they wait for it in a
    loop: that took two fifths of the processor's time when adapters were combined on two cores.
    """
    functions = _openblas()
    if functions is None:
        yield
        return
    read, write = functions
    with _lock:
        _held.append(read())
        write(1)
    try:
        yield
    finally:
        with _lock:
            first = _held[0]
            _held.pop()
            if not _held:
                write(first)


@cache
def _openblas() -> tuple[Any, Any] | None:
    """Return OpenBLAS's functions that read and write its number of threads; None where numpy has another library."""
    module = next((sys.modules[name] for name in NUMPY if name in sys.modules), None)
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    library = ctypes.CDLL(file)  # symbols of the libraries that it is linked with are found, but on Windows
    for name in OPENBLAS:
        found = getattr(library, name.format("get"), None), getattr(library, name.format("set"), None)
        if None not in found:
            return found
    return None
