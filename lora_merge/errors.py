"""The errors that users see: each says what is wrong, where, and how to fix it, and has an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from .text import Lines, Message, escaped, html_table

if TYPE_CHECKING:
    from typing_extensions import Self

WINDOWS: Final = os.name == "nt"

LONGEST_MESSAGE_LINE: Final = 2000
"""Characters of a line of a message; names and values from untrusted files may be as long as the file."""


class MergeError(Exception):
    """Base class of all errors; the command line prints the error and exits with `exit_code`.

    Attributes:
        what: What is wrong, in one sentence.
        where: The file, the tensor or the option.
        fix: What to do.
        exit_code: Of the command line; the subclasses in `lora_merge.errors` have different ones.

    Examples:
        >>> try:
        ...     lora_merge.merge("base.safetensors", "style.safetensors")
        ... except lora_merge.MergeError as error:
        ...     print(error.what, error.fix, error.exit_code)
    """

    exit_code = 1

    suggestion: tuple[str, ...] = ()
    """A word of the request and the words in its place; the command line then prints the user's own line with these."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        self._put(what, where, fix)

    def _put(self, *texts: str) -> None:
        self.what, self.where, self.fix = map(_cut, texts)
        self.args = (self.what, self.where, self.fix)  # positional, so that it pickles across processes

    def rename(self, old: str, new: str) -> None:
        """Replace a path in the message, such as a temporary one, by the path that the user knows.

        Parameters:
            old: The path in the message.
            new: The path in its place.
        """
        self.reword(lambda text: text.replace(old, new))

    def reword(self, words: Callable[[str], str]) -> MergeError:
        """Put the message into other words, such as those of a jobs file.

        Parameters:
            words: The words in place of each text of the message.

        Returns:
            The error itself.
        """
        self._put(*(type(t)(words(t.written)) for t in (self.what, self.where, self.fix)))
        return self

    def instead(self, word: str, *right: str) -> Self:
        """Return the error itself with a suggestion.

        Parameters:
            word: A word of the request, such as a misspelt path or value.
            right: The words in its place; `word` itself stays as the user wrote it.

        Returns:
            The error itself.
        """
        self.suggestion = (word, *right)
        return self

    def _repr_html_(self) -> str:
        rows = [("what", self.what), ("where", self.where), ("fix", self.fix)]
        return html_table(type(self).__name__, rows)

    def __str__(self) -> str:
        where = escaped(self.where).replace("\n", "\n         ")
        return f"{escaped(self.what)}\n  where: {where}\n  fix:   {escaped(self.fix)}"


def _cut(text: str) -> Message | Lines:
    if isinstance(text, Lines):
        return Lines("\n".join(map(_cut_line, text.split("\n"))))
    return Message(_cut_line(getattr(text, "written", text)))


def _cut_line(line: str) -> str:
    return line if len(line) <= LONGEST_MESSAGE_LINE else f"{line[:LONGEST_MESSAGE_LINE]}…"


def cause(e: Exception) -> str:
    """Return in the words of the system why a file could not be written; else what is wrong."""
    of_system = e if isinstance(e, OSError) else e.__cause__
    return (isinstance(of_system, OSError) and of_system.strerror) or getattr(e, "what", "") or str(e)


class UsageError(MergeError):
    """The request itself is wrong: contradicting options, an output that is an input."""

    exit_code = 2


class PartWithoutEffect(UsageError):
    """A part of the model that an option names, and that the base lacks or no adapter changes."""

    option = ""
    part = ""

    def of(self, option: str, part: str) -> PartWithoutEffect:
        """Return the error itself with the option and the part, which a batch compares with its defaults."""
        self.option, self.part = option, part
        return self


class OutputExists(UsageError):
    """The output is there, and may not be replaced."""


class InputError(MergeError):
    """An input is missing, damaged, malicious or of a kind that cannot be merged."""

    exit_code = 3


class NoAdapter(UsageError):
    """A model is named without an adapter."""


class AdapterAsBase(InputError):
    """An adapter is given where a model belongs."""


class RemoteError(InputError):
    """Another machine refuses an input, or has changed it. It concerns the run, and no single module."""


class TooLarge(InputError):
    """A finite number is too large for the dtype of the output or of the computation."""

    def locate(self, output: str) -> None:
        """Put the path of the output before the name of the tensor."""
        self._put(self.what, f"{output}: {self.where}", self.fix)


class FitError(MergeError):
    """Adapter and base do not belong together: names, shapes, architecture."""

    exit_code = 4


class UnmatchedModules(FitError):
    """Some adapter modules match no weight of the base."""


class NoChange(FitError):
    """An adapter changes nothing, though its strength is not 0."""


class ShapeMismatch(FitError):
    """The shape of an adapter tensor fits neither its module's other tensors nor the base tensor that it names."""


def misfit(where: str, why: Exception) -> ShapeMismatch:
    """Return the error for tensors whose values do not fit, though their shapes do: indices outside the weight …"""
    fix = "use the checkpoint that the adapter was trained on"
    return ShapeMismatch("adapter tensors do not fit the base", f"{where}: {why}", fix)


def beyond_fp64(name: str, how: str = "large") -> TooLarge:
    """Return the error for a layer whose change is too large, or too small, for the squares of its values in fp64."""
    return TooLarge(f"the change of a layer is too {how} to be computed", name, "leave this layer out")


def beyond_dtype(where: str) -> TooLarge:
    """Return the error for a number of a written adapter that its dtype does not hold."""
    return TooLarge(
        "a number is too large for the dtype of the output", where, "write `--dtype fp32` or `--dtype bf16`"
    )


def not_finite(where: str) -> InputError:
    """Return the error for a tensor of an adapter with a number that is not finite."""
    return InputError("the adapter contains NaN or infinite values", where,
                      "the training diverged; use an earlier checkpoint of the adapter")  # fmt: skip


class AmbiguousName(FitError):
    """A name matches two tensors, and nothing shows which one is right."""


class ResourceError(MergeError):
    """Not enough disk or memory, or no such device."""

    exit_code = 5


FAILED: Final = "use `--device cpu`; or start again, after a look at the driver's messages (nvidia-smi, dmesg)"
"""The advice after a device failed."""


class DeviceFailed(ResourceError):
    """A device stopped working; this process cannot use it again."""

    def __init__(self, device: str, text: str, fix: str = "") -> None:
        super().__init__("the device failed", f"{device}: {text}", fix or FAILED)

    def __reduce__(self) -> tuple[Any, ...]:
        device, _, text = self.where.partition(": ")
        return DeviceFailed, (device, text, self.fix)


class VerificationFailed(MergeError):
    """The written output is wrong; it was removed before it got its name."""

    exit_code = 6


class BatchFailed(MergeError):
    """Some jobs of a batch failed."""

    exit_code = 7


def failure(e: BaseException) -> dict[str, Any]:
    """Return what is printed of a failure with --json; `lora-merge schema error` describes it."""
    error = error_dict(e)
    return {"error": error, "exit_code": error["exit_code"], "schema": "lora-merge/error/1"}


def error_dict(e: BaseException) -> dict[str, Any]:
    """Return kind, what, where, fix and exit code of an error for reports; the error may also be another exception."""
    texts = {name: getattr(e, name, "") for name in ("what", "where", "fix")}
    texts["what"] = texts["what"] or str(e)
    return {"kind": type(e).__name__.lstrip("_"), **texts, "exit_code": getattr(e, "exit_code", 1)}


SCARCE: Final = (
    # raised            its text has
    (MemoryError,       ""),
    (RuntimeError,      "bad_alloc"),
    (RuntimeError,      "can't allocate memory"),
    (ImportError,       "failed to map segment from shared object"),  # torch's libraries take a GB of addresses
    (OSError,           "failed to map segment from shared object"),
    (ImportError,       "paging file is too small"),
    (RuntimeError,      "not enough memory"),  # torch on Windows
)  # fmt: skip
"""Kind and text of the errors by which Python, torch, C++ and the loader of libraries report too little memory."""

PAGING_FILE_TOO_SMALL: Final = 1455
NO_LIBRARY: Final = (126, 127, 1114)
"""Errors of Windows where a library is loaded, as `OSError.winerror` has them: too little memory; a library, or a
function in one, that is not there, or does not start.
Source: learn.microsoft.com/windows/win32/debug/system-error-codes."""


CLOSE: Final = "close other programs"
"""The advice on Windows, which has no limit to raise."""


REDISTRIBUTABLE: Final = (
    "install the Microsoft Visual C++ Redistributable: https://aka.ms/vs/17/release/vc_redist.x64.exe"
)
"""The advice on Windows where torch's libraries cannot be loaded: they need those of Visual C++."""

DEVICE_FULL: Final = "end other programs that use the device, or use `--device cpu`"
"""The advice for a device that is out of memory."""


FAILURE_SIGNS: Final = (
    "CUDA error", "CUDA driver error", "HIP error", "device-side assert", "DEVICE_LOST", "device is lost",
    "Command buffer",
)  # fmt: skip
"""Texts of errors after which a device cannot be used: of torch on CUDA and ROCm, of Level Zero, and of Metal."""

DEVICE_SIGNS: Final = (
    "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "BLAS_STATUS_NOT_INITIALIZED", "cusolverDnCreate",
    "OUT_OF_DEVICE_MEMORY", "OUT_OF_RESOURCES",
)  # fmt: skip
"""Texts of errors that report too little memory of a device: of torch's allocators, of drivers, of the libraries of
CUDA and ROCm (BLAS and cuSOLVER without memory for a handle or its workspace, cuFFT for a plan), and of Level Zero on
XPUs. Not all of them are torch's OutOfMemoryError."""


def device_full(e: Exception) -> str:
    """Return the text of an error that reports too little memory on a device; "" for any other error."""
    text = next(iter(str(e).splitlines()), "")
    return text if isinstance(e, RuntimeError) and any(sign in text for sign in DEVICE_SIGNS) else ""


def device_failure(e: Exception) -> str:
    """Return the text of an error after which a device cannot be used; "" for any other error."""
    text = next(iter(str(e).splitlines()), "")
    failed = isinstance(e, RuntimeError) and any(sign in text for sign in FAILURE_SIGNS)
    return text if failed and not device_full(e) else ""


def as_resource_error(e: Exception) -> ResourceError | None:
    """Return the error for a failure to get memory, a thread, a file descriptor or a library, or of a device; None for
    any other failure."""
    text = next(iter(str(e).splitlines()), "")
    of_windows = getattr(e, "winerror", None)
    if isinstance(e, RuntimeError) and "can't start new thread" in text:
        fix = CLOSE if WINDOWS else "raise the limits: ulimit -u unlimited; ulimit -v unlimited"
        error = ResourceError("the system allows no more threads", text, fix)
    elif os.strerror(errno.EMFILE) in str(e):  # also the limit of the whole system: "… in system"
        fix = CLOSE if WINDOWS else "raise the limit (ulimit -n 4096)"
        error = ResourceError("too many open files", getattr(e, "where", text), fix)
    elif device_full(e):
        error = ResourceError("the device is out of memory", text, DEVICE_FULL)
    elif device_failure(e):
        error = DeviceFailed("a device", text)
    elif any(isinstance(e, kind) and sign in text for kind, sign in SCARCE) or (
        isinstance(e, OSError) and (e.errno == errno.ENOMEM or of_windows == PAGING_FILE_TOO_SMALL)
    ):
        fix = (
            "give a smaller --max-memory, close other programs, or enlarge the paging file"
            if WINDOWS
            else "give a smaller --max-memory, or raise the limit (ulimit -v unlimited)"
        )
        error = ResourceError("not enough memory", text or "the system gave no more", fix)
    elif of_windows in NO_LIBRARY or (isinstance(e, ImportError) and "DLL load failed" in text):
        error = ResourceError("a library of the system is missing or too old", text, REDISTRIBUTABLE)
    else:
        return None
    error.__cause__ = e
    return error


@contextmanager
def resource_errors() -> Iterator[None]:
    """Raise ResourceError in place of errors that report too little memory, too few threads or descriptors, or a device
    that failed."""
    try:
        yield
    except Exception as e:
        error = as_resource_error(e)
        if error is None:
            raise
        raise error from e


def as_merge_error(e: BaseException, where: str) -> MergeError:
    """Return the error that users see for a failure of any kind; with the traceback if it is a mistake of this program.

    `where`: what was asked for, if the failure has no place of its own.
    """
    error = e if isinstance(e, MergeError) else as_resource_error(e) if isinstance(e, Exception) else None
    if error is None and isinstance(e, OSError):
        what = f"the system reports: {e.strerror or e}"
        error = MergeError(what, str(e.filename or where), "see what the system reports, and run again")
        error.__cause__ = e
    if error is None:
        from traceback import format_exception

        lines = Lines.of(["please report this:", *"".join(format_exception(e)).rstrip().splitlines()])
        error = MergeError(f"unexpected failure: {type(e).__name__}: {e}", where, lines)
        error.__cause__ = e
    return error
