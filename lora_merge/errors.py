"""Every failure a user can meet, with what, where, how to fix it, and the exit code."""

from __future__ import annotations

from typing import Any

from .lines import shown


class MergeError(Exception):
    """Base class; the command line prints it and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, what: str, where: str, fix: str) -> None:
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
