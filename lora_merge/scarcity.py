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


def scarcity(e: Exception) -> ResourceError | None:
    """What to say where the system gave no memory, thread or descriptor; None for any other failure."""
    text = next(iter(str(e).splitlines()), "")
    if isinstance(e, RuntimeError) and "can't start new thread" in text:
        found = ResourceError("the system allows no more threads", text, "raise the limit (ulimit -u, ulimit -v)")
    elif os.strerror(errno.EMFILE) in str(e):  # also of all the system: "… in system"
        found = ResourceError("too many open files", getattr(e, "where", text), "raise the limit (ulimit -n)")
    elif any(isinstance(e, kind) and sign in text for kind, sign in SCARCE) or (
        isinstance(e, OSError) and e.errno == errno.ENOMEM
    ):
        found = ResourceError("not enough memory", text or "the system gave no more",
                              "give a smaller --max-memory, or raise the limit (ulimit -v)")  # fmt: skip
    else:
        return None
    found.__cause__ = e
    return found
