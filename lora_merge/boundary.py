"""What leaves a public function: its result, or a MergeError."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar, Union

from .adapter_arguments import in_python
from .errors import MergeError, UsageError, as_merge_error
from .text import shown

A_PATH: Final = "a path"

A_STATE_DICT: Final = "a state dict"

VALUE_KINDS: Final = {"str | Path": A_PATH, "Mapping[str, Tensor]": A_STATE_DICT, "Tensor": "a tensor", "str": "a text"}
"""Annotation of a parameter → what its value must be, in words."""

P = ParamSpec("P")
R = TypeVar("R")


class CallersFailure(Exception):
    """A function that the caller gave has failed: its cause leaves a public function as it is."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make every failure of a function a MergeError: a UsageError if an argument is of another type than annotated.

    What a function of the caller raises, such as `on_report`, is the caller's own and stays as it is.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UsageError as e:
            wrong = _wrong_call(function, args, kwargs) if e.is_of_type else None
            raise (wrong or e.reword(in_python)) from e.__cause__
        except MergeError as e:
            e.reword(in_python)
            raise
        except CallersFailure as e:
            assert e.__cause__ is not None, "the caller's exception is its cause"
            raise e.__cause__ from None
        except Exception as e:
            raise _wrong_call(function, args, kwargs) or as_merge_error(e, f"lora_merge.{function.__qualname__}") from e

    return call


def _wrong_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsageError | None:
    """Return the error for arguments that do not fit the function's parameters and their types; None if they do."""
    name = f"lora_merge.{function.__qualname__}"
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as e:
        return UsageError(
            "a call does not fit the function's parameters", f"{name}: {e}", "see help(…) for its parameters"
        )
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # types that are imported for type checkers alone
        return None
    for parameter, value in bound.arguments.items():
        if parameter in hints and parameter != "options" and not _fits(value, hints[parameter]):
            return _wrong_type(function, parameter, value)
    return None


def _wrong_type(function: Callable[..., Any], parameter: str, value: object) -> UsageError:
    """Return the error for an argument of a wrong type, in the words of its parameter."""
    annotation = str(inspect.signature(function).parameters[parameter].annotation)
    kind = VALUE_KINDS.get(annotation, f"of the type {annotation}")
    if kind == A_PATH and isinstance(value, Mapping):
        fix = "for a state dict use merge_state_dict()"
    elif hasattr(value, "state_dict"):
        fix = "for a model in memory use merge_into(), or give its state_dict() to merge_state_dict()"
    elif kind == A_STATE_DICT and isinstance(value, str | os.PathLike):
        fix = "for a file use merge()"
    else:
        fix = f"give {kind}"
    where = f"lora_merge.{function.__qualname__}: {type(value).__name__} {shown(value)}"
    return UsageError(f"{parameter} must be {kind}", where, fix)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of a type, but for what is in it."""
    kind = typing.get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if kind is Literal:
        return isinstance(value, str | bool | int) and value in typing.get_args(hint)
    if kind is float:
        return isinstance(value, int | float)
    try:
        return value is None if kind is type(None) else isinstance(value, kind)
    except TypeError:  # Any, type variables, protocols
        return True
