"""What the system says when it has no more memory, threads or descriptors, as one error."""

from __future__ import annotations

import errno
import os
from typing import Final

from .errors import ResourceError

SCARCE: Final = (
    # raised            its text has
    (MemoryError,       ""),
    (RuntimeError,      "bad_alloc"),
    (RuntimeError,      "can't allocate memory"),
    (ImportError,       "failed to map segment from shared object"),  # torch's: they take a GB of addresses
    (OSError,           "failed to map segment from shared object"),
)  # fmt: skip
"""How Python, torch, C++ and the loader of libraries each tell of too little memory."""


FULL: Final = "end what else uses the device, or use --device cpu"
"""What to do about a device without memory."""

DEVICE_SIGNS: Final = (
    "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "BLAS_STATUS_NOT_INITIALIZED", "cusolverDnCreate",
    "OUT_OF_DEVICE_MEMORY", "OUT_OF_RESOURCES",
)  # fmt: skip
"""What errors of devices say of too little of their memory: torch's allocators, drivers, the libraries of CUDA and ROCm
(BLAS and cuSOLVER say so where there is no memory for a handle or its workspace, cuFFT for a plan), Level Zero of XPUs.
Not all of them are torch's OutOfMemoryError."""


def device_full(e: Exception) -> str:
    """What an error says of too little memory on a device; nothing where it is another."""
    text = next(iter(str(e).splitlines()), "")
    return text if isinstance(e, RuntimeError) and any(sign in text for sign in DEVICE_SIGNS) else ""


def scarcity(e: Exception) -> ResourceError | None:
    """What to say where the system gave no memory, thread or descriptor; None for any other failure."""
    text = next(iter(str(e).splitlines()), "")
    if isinstance(e, RuntimeError) and "can't start new thread" in text:
        found = ResourceError("the system allows no more threads", text, "raise the limit (ulimit -u, ulimit -v)")
    elif os.strerror(errno.EMFILE) in str(e):  # also of all the system: "… in system"
        found = ResourceError("too many open files", getattr(e, "where", text), "raise the limit (ulimit -n)")
    elif device_full(e):
        found = ResourceError("the device is out of memory", text, FULL)
    elif any(isinstance(e, kind) and sign in text for kind, sign in SCARCE) or (
        isinstance(e, OSError) and e.errno == errno.ENOMEM
    ):
        found = ResourceError("not enough memory", text or "the system gave no more",
                              "give a smaller --max-memory, or raise the limit (ulimit -v)")  # fmt: skip
    else:
        return None
    found.__cause__ = e
    return found
