"""Every failure a user can meet, with what, where, how to fix it, and the exit code."""

from __future__ import annotations

import errno
import os
from typing import Any, Final

from .lines import Lines, shown

LONGEST: Final = 2000
"""Characters of a line of a message; names and values of strangers may be as long as their file."""


class MergeError(Exception):
    """Base class; the command line prints it and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, what: str, where: str, fix: str) -> None:
        what, where, fix = _cut(what), _cut(where), _cut(fix)
        super().__init__(what, where, fix)  # positional, so that it pickles across processes
        self.what, self.where, self.fix = what, where, fix

    def rename(self, old: str, new: str) -> None:
        """Call a path by the name that the user knows it by, wherever it is named."""
        texts = (self.what, self.where, self.fix)
        self.what, self.where, self.fix = (type(text)(text.replace(old, new)) for text in texts)
        self.args = (self.what, self.where, self.fix)

    def __str__(self) -> str:
        where = shown(self.where).replace("\n", "\n         ")
        return f"{shown(self.what)}\n  where: {where}\n  fix:   {shown(self.fix)}"


def _cut(text: str) -> str:
    lines = text.split("\n") if isinstance(text, Lines) else [text]
    return type(text)("\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]}…" for line in lines))


class UsageError(MergeError):
    """The request itself makes no sense: contradicting options, an output that is an input."""

    exit_code = 2


class InputError(MergeError):
    """An input is missing, damaged, malicious or of a kind that cannot be merged."""

    exit_code = 3


class TooLarge(InputError):
    """A finite number has no room in the dtype that it is to be written or computed in."""

    def locate(self, output: str) -> None:
        """Say which output the tensor belongs to."""
        self.where = f"{output}: {self.where}"
        self.args = (self.what, self.where, self.fix)


class FitError(MergeError):
    """Adapter and base do not belong together: names, shapes, architecture."""

    exit_code = 4


class UnmatchedModules(FitError):
    """Some adapter modules have no place in the base."""


class ShapeMismatch(FitError):
    """An adapter tensor does not fit its partners or the base tensor it names."""


class AmbiguousName(FitError):
    """A name fits two tensors; guessing is not an option."""


class ResourceError(MergeError):
    """Not enough disk or memory, or no such device."""

    exit_code = 5


class VerificationFailed(MergeError):
    """What was written is not what was asked for; the file did not get its name."""

    exit_code = 6


class BatchFailed(MergeError):
    """Some jobs of a batch failed."""

    exit_code = 7


def error_dict(e: BaseException) -> dict[str, Any]:
    """Kind, what, where, fix and exit code of a failure, as reports have them; also of one that is none of ours."""
    told = {name: getattr(e, name, "") for name in ("what", "where", "fix")}
    told["what"] = told["what"] or str(e)
    return {"kind": type(e).__name__.lstrip("_"), **told, "exit_code": getattr(e, "exit_code", 1)}


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
    """Return what an error says of too little memory on a device; nothing where it is another."""
    text = next(iter(str(e).splitlines()), "")
    return text if isinstance(e, RuntimeError) and any(sign in text for sign in DEVICE_SIGNS) else ""


def as_resource_error(e: Exception) -> ResourceError | None:
    """Return what to say where the system gave no memory, thread or descriptor; None for any other failure."""
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
