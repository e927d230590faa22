"""What leaves a public function: its result, or a MergeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .adapter_arguments import in_python
from .call_errors import annotation_of, wrong_call
from .errors import MergeError, UsageError, as_merge_error
from .options import switch

P = ParamSpec("P")
R = TypeVar("R")


class CallersFailure(Exception):
    """A function that the caller gave has failed: its cause leaves a public function as it is."""


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
            return function(*args, **kwargs)
        except UsageError as e:
            wrong = wrong_call(function, (args, kwargs)) if e.is_of_type else None
            raise (wrong.of_type() if wrong else e.reword(in_python)) from e.__cause__
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
