"""What leaves a public function, in Python's words: its result, or a MergeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from .call_errors import annotation_of, wrong_call
from .errors import MergeError, UsageError, as_merge_error
from .facts import Facts
from .option_texts import in_python
from .options import switch

P = ParamSpec("P")
R = TypeVar("R")


class CallersFailure(Exception):
    """A function that the caller gave has failed: its cause leaves a public function as it is."""


SENTENCES: Final = ("notes", "warning", "warnings", "fix", "skipped", "ignored")
"""Fields of reports and facts that hold sentences for the user."""

OF_FILES: Final = ("metadata", "tensors", "modules", "layers")
"""Fields whose names and texts are those of files."""


def worded(value: Any, name: str = "") -> Any:
    """Return a result with its errors and sentences in Python's words. `name`: the field that holds it."""
    if isinstance(value, MergeError):
        value.reword(in_python)
    elif isinstance(value, str) and name in SENTENCES:
        value = in_python(value)
    elif isinstance(value, Facts):
        value = value.changed(worded)
    elif isinstance(value, Mapping) and name not in OF_FILES:
        value = {key: worded(item, name if name in SENTENCES else key) for key, item in value.items()}
    elif type(value) in (list, tuple):
        value = type(value)(worded(item, name) for item in value)
    elif is_dataclass(value) and hasattr(value, "to_json"):
        value = replace(value, **{f.name: worded(getattr(value, f.name), f.name) for f in fields(value)})  # type: ignore[type-var]
    return value


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make every failure of a function a MergeError: a UsageError if an argument is of another type than annotated.

    What a function of the caller raises, such as `on_report`, is the caller's own and stays as it is.
    """
    switches = [p.name for p in inspect.signature(function).parameters.values() if annotation_of(p) == "bool"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for name in kwargs.keys() & switches:
                if kwargs[name] is not None:
                    switch(kwargs[name], name)
            result: R = worded(function(*args, **kwargs))
            return result
        except UsageError as e:
            wrong, corrected = wrong_call(function, (args, kwargs)), e.reword(in_python).fix.startswith("write ")
            raise (wrong if wrong and (wrong.fix.startswith("write ") or not corrected) else e) from e.__cause__
        except MergeError as e:
            e.reword(in_python)
            raise
        except CallersFailure as e:
            assert e.__cause__ is not None, "the caller's exception is its cause"
            raise e.__cause__ from None
        except Exception as e:
            raise wrong_call(function, (args, kwargs)) or as_merge_error(
                e, f"lora_merge.{function.__qualname__}"
            ) from e

    return call
