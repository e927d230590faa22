"""The boundary of the public functions. A wrong call is answered with what is wrong, a name, the number of arguments or
the type of one, and with what works; a result or a MergeError leaves in Python's words."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar, Union

from .errors import MergeError, UsageError, as_merge_error
from .facts import Facts
from .option_texts import in_python, takes
from .options import AN_ADAPTER, COMMAND_ONLY, GIVE_STATE_DICT, MEANT, OPTIONS, STRENGTHS, SWITCHED, switch, values_of
from .paths import exists, with_found_ending
from .text import described, is_finite, number_of, one_line, python_code, shown

A_PATH: Final = "a path"
A_STATE_DICT: Final = "a state dict"

VALUE_KINDS: Final[Mapping[str, str]] = {
    "str | Path": A_PATH, "Mapping[str, Tensor]": A_STATE_DICT, "Tensor": "a tensor", "str": "a text",
    "Adapters": f"{AN_ADAPTER}, or a list of these", "OneAdapter": AN_ADAPTER,
    "Sequence[OneAdapter]": "a list of paths",
    "Sequence[str | Path]": "a list of folders", "Sequence[float]": "a list of numbers", "int": "a whole number",
    "float": "a number", "bool": "True or False", "str | int": "a whole number or a rule",
    "str | float": "a number or a word",
    "bool | Progress": "True, False, or a function of a lora_merge.Step",
    "Mapping[str, str | int] | Sequence[tuple[str, str | int]]": 'a table such as {"te": 4}',
    "Jobs": "a path, or a list of jobs", "Keep": "one of: host, device, compressed", "dict[str, object]": "a dict",
    "MemoryAdapters": f"{AN_ADAPTER}, a state dict, or a list of these", "Module | LivePipeline": "a model",
    "FormerPlans": "a lora_merge.FormerPlans", "Callable[[JobReport], object]": "a function of a lora_merge.JobReport",
}  # fmt: skip
"""Annotation of a parameter as it is written, without its None → what its value must be, in words. A test in
`tests/whole/test_python.py` names the annotations of public functions that lack a row."""

EXAMPLES: Final[Mapping[str, str]] = {
    "base": '"base.safetensors"', "adapters": '["style.safetensors"]', "adapter": '"style.safetensors"', "rank": "16",
    "merged": '"merged.safetensors"', "tuned": '"tuned.safetensors"', "written": '"merged.safetensors"',
    "output": '"out.safetensors"', "path": '"style.safetensors"', "a": '"base.safetensors"', "b": '"tuned.safetensors"',
    "state_dict": "model.state_dict()", "model": "model", "name": "adapter.modules[0]",
    "run_batch.path": '"jobs.yaml"', "plan_batch.path": '"jobs.yaml"', "save.path": '"out.safetensors"',
    "verify.output": '"merged.safetensors"',
}  # fmt: skip
"""Parameter that a call cannot do without, also with the name of its function → an example of its value."""

TYPES: Final = {"str | int": int, "int": int, "Sequence[float]": list, "Sequence[str | Path]": list, "bool": bool}
"""Annotation of a parameter → the type of a value without a name that was probably meant for it."""

FOR_FILES: Final = ("base", "output")
"""Parameters that functions for tensors in memory lack."""

IN_MEMORY: Final = ("merge", "plan", "merge_state_dict")
"""Functions for which there is another one for state dicts or for models."""

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments of a call: by place, and by name."""


def annotation_of(parameter: inspect.Parameter) -> str:
    """Return the type of a parameter as it is written, without its None."""
    return str(parameter.annotation).removesuffix(" | None")


def wrong_call(function: Callable[..., Any], call: CallArguments) -> UsageError | None:
    """Return the error for arguments that do not fit the function's parameters and their types; None if they do."""
    args, kwargs = call
    signature, place = inspect.signature(function), f"lora_merge.{function.__qualname__.removesuffix('.__init__')}"
    parameters = {p.name: p for p in signature.parameters.values() if p.name != "self"}
    placed = args[len(signature.parameters) - len(parameters) :]  # without `self`
    options = _options(parameters.pop("options", None))
    wrong = _unknown_name(parameters, options, kwargs) or _wrong_number(
        function.__name__, parameters, options, (placed, kwargs)
    )
    if wrong is not None:
        return UsageError(wrong[0], place, wrong[1])
    hints, names = _hints(function), [*parameters]
    if swapped := _swapped(function.__name__, [hints.get(name) for name in names[:2]], placed):
        return UsageError("the arguments are in another order", place, swapped)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        optional = name in parameters and value is None and parameters[name].default is not inspect.Parameter.empty
        if name in hints and name in parameters and not optional and not _fits(value, hints[name]):
            kind = VALUE_KINDS[annotation_of(parameters[name])]
            fix = _other_places(function.__name__, parameters, placed) if name == names[0] else ""
            fix = fix or _right_type(function.__name__, parameters[name], value, hints[name])
            if name == "output" and "adapters" in names and (words := _with_list(names, placed)):
                fix = fix or f"write {function.__name__}({words})"
            if not fix and any(value is other for other in placed):
                meant = _meant_for(value, names[: len(placed)], parameters, options)
                fix = f"write {meant}={python_code(value)}" if meant else ""
            where = f"{place}: {one_line(described(value))}"
            return UsageError(f"{name} must be {kind}", where, fix or f"give {kind}")
    return None


def _other_places(function: str, parameters: Mapping[str, inspect.Parameter], placed: Sequence[Any]) -> str:
    """Return the call that is meant by two paths for a list of adapters, or by one list for several arguments; "" for
    another call."""
    (first, parameter), *others = parameters.items()
    paths = all(isinstance(value, str | os.PathLike) for value in placed)
    if first == "adapters" and len(placed) == 2 and paths and exists(with_found_ending(str(placed[1]))):
        return f'write {function}({python_code([*placed])}, "out.safetensors")'
    several = [*placed[0]] if len(placed) == 1 and isinstance(placed[0], list | tuple) else []
    if len(several) < 2 or not others or VALUE_KINDS[annotation_of(parameter)] != A_PATH:
        return ""
    second, required = others[0][0], others[0][1].default is inspect.Parameter.empty
    values = [several[0], several[1:]] if second == "adapters" else several if required else []
    return f"write {function}({', '.join(map(python_code, values))})" if values else ""


def _swapped(function: str, hints: Sequence[Any], placed: Sequence[Any]) -> str:
    """Return the call whose first two arguments change places, if only then they are of the right types; "" for another
    call."""
    if len(placed) < 2 or len(hints) < 2 or None in hints or _as_argument(placed[0]) in ("model", "state_dict"):
        return ""
    in_order, swapped = (all(map(_fits, values, hints)) for values in (placed[:2], placed[1::-1]))
    if in_order or not swapped:
        return ""
    words = [_as_argument(value) for value in (*placed[1::-1], *placed[2:])]
    return f"write {function}({', '.join(words)})"


def _as_argument(value: Any) -> str:
    """Return an argument as code; a model or a state dict by its usual name."""
    return "model" if _is_model(value) else "state_dict" if isinstance(value, Mapping) else python_code(value)


def _meant_for(
    value: Any, placed: Sequence[str], parameters: Mapping[str, inspect.Parameter], options: Sequence[str]
) -> str:
    """Return the option or parameter that a value without a name was probably meant for; "" if none is likely."""
    ordered = (*parameters, *(name for name in OPTIONS if name in options), *options)
    return next((n for n in ordered if n not in placed and _may_be(value, n, parameters.get(n))), "")


def _unknown_name(
    parameters: Mapping[str, inspect.Parameter], options: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return what is wrong and how to correct it, where no parameter and no option has a name; else None."""
    known = (*parameters, *options)
    for name in kwargs:
        if name in COMMAND_ONLY:
            fix = "leave it out: the API prints nothing, `plan` writes nothing, and the report of `merge` has to_json()"
            return f"only the command line has the option {name!r}", fix
        if name in FOR_FILES and {"state_dict", "model"} & parameters.keys():
            return f"there is no parameter {name!r}", "for files use merge()"
        if name not in known:
            near = get_close_matches(name, parameters, 1) or [MEANT.get(name, "")] * (MEANT.get(name) in known)
            near = near or get_close_matches(name, known, 1)
            meant = [MEANT[other] for other in kwargs if other not in known and MEANT.get(other) in known]
            near = [", ".join(meant)] if len(meant) > 1 else near
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            return f"there is no parameter {name!r}", fix
    return None


def _wrong_number(
    function: str, parameters: Mapping[str, inspect.Parameter], options: Sequence[str], call: CallArguments
) -> tuple[str, str] | None:
    """Return what is wrong and how to correct it, where arguments are too many or missing; else None."""
    args, kwargs = call
    placed = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # Step 1: more arguments than have a place.
    if len(args) > len(placed):
        extra = args[len(placed)]
        meant = _meant_for(extra, placed, parameters, options)
        if not meant and "adapters" in placed and (words := _with_list(placed, args)):
            return "the adapters must be a list", f"write {function}({words})"
        fix = f"write {meant}={python_code(extra)}" if meant else "leave it out, or name it"
        return f"{python_code(extra)[:60]} needs a name, as only {', '.join(placed)} can be without one", fix
    if twice := next((name for name in placed[: len(args)] if name in kwargs), None):
        return f"{twice} is given twice", f"leave {twice}={python_code(kwargs[twice])[:60]} out"
    # Step 2: one that is missing.
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in (*placed[: len(args)], *kwargs):
            example = EXAMPLES.get(f"{function}.{name}") or EXAMPLES[name]
            value = next((python_code(value) for value in args if _may_be(value, name, parameter)), example)
            fix = _other_places(function, parameters, args) or f"write {name}={value}"
            if annotation_of(parameter) == "str | int":
                numbers = [_number_meant(value, "str | int", str | int) for value in args]
                others = [_as_argument(value) for value, code in zip(args, numbers, strict=True) if not code]
                named = [f"{name}={code}" for code in numbers if code]
                fix = f"write {function}({', '.join([*others, *named])})" if len(named) == 1 else fix
            return f"{name} is missing", fix
    return None


def _with_list(placed: Sequence[str], args: Sequence[Any]) -> str:
    """Return the arguments of a call whose adapters, or an adapter and its strength, follow one another, in a list; ""
    for other arguments."""
    if not args:
        return ""
    strength = number_of(args[-1]) if isinstance(args[-1], str) else args[-1] if is_finite(args[-1]) else None
    first, end = placed.index("adapters"), len(args) - ("output" in placed and strength is None)
    adapters, output = [*args[first:end]], args[end:]
    of_one = len(adapters) == 2 and not output and strength is not None
    if of_one:
        adapters[1] = strength
    if not all(isinstance(value, str | os.PathLike) for value in (*adapters[: 1 if of_one else None], *output)):
        return ""
    before = [
        python_code(v) if isinstance(v, str | os.PathLike) else n for n, v in zip(placed, args[:first], strict=False)
    ]
    return ", ".join([*before, *map(python_code, (tuple(adapters) if of_one else adapters, *output))])


def _options(parameter: inspect.Parameter | None) -> tuple[str, ...]:
    """Return the names of the options that a function has in addition to its parameters."""
    if parameter is None:
        return ()
    from . import typed_options  # imported here: only mistakes need it

    table = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
    return tuple(getattr(typed_options, table).__annotations__)


def _may_be(value: object, name: str, parameter: inspect.Parameter | None) -> bool:
    """Return whether a value without a name was probably meant for an option or a parameter."""
    if isinstance(value, str | os.PathLike):
        return takes(name, str(value))
    if name == STRENGTHS:
        return type(value) is list and all(map(is_finite, value))
    return parameter is not None and type(value) is TYPES.get(annotation_of(parameter))


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of a function's parameters; none if they are imported for type checkers alone."""
    try:
        return typing.get_type_hints(function)
    except NameError:
        return {}


def _right_type(function: str, parameter: inspect.Parameter, value: Any, hint: Any) -> str:
    """Return how to correct an argument of a wrong type; "" where nothing shows what was meant."""
    name, annotation = parameter.name, annotation_of(parameter)
    is_tensors, is_model = isinstance(value, Mapping), _is_model(value)
    number = _number_meant(value, annotation, hint)
    fix = ""
    if is_model and annotation == "MemoryAdapters":
        fix = GIVE_STATE_DICT
    elif is_tensors and function in IN_MEMORY:
        fix = "for a state dict use merge_state_dict()"
    elif is_model and function in IN_MEMORY:
        fix = "for a model in memory use merge_into(), or give its state_dict() to merge_state_dict()"
    elif (is_tensors or is_model) and ("Path" in annotation or "Adapter" in annotation):
        tensors = "model.state_dict()" if is_model else "tensors"
        fix = f'save it first: safetensors.torch.save_file({tensors}, "model.safetensors")'
    elif VALUE_KINDS[annotation] == A_STATE_DICT and isinstance(value, str | os.PathLike):
        fix = "for a file use merge()"
    elif number:
        fix = f"write {name}={number}"
    elif isinstance(value, list | tuple) and value and _fits(value[0], hint):
        fix = f"write {name}={python_code(value[0])}{', and one call for each' if len(value) > 1 else ''}"
    elif annotation == "Sequence[float]" and is_tensors and value and all(map(is_finite, value.values())):
        fix = f"write {name}={python_code([*value.values()])}"
    elif annotation.startswith("Sequence") and isinstance(value, str | os.PathLike):
        path = Path(value if isinstance(value, str | Path) else "")
        folder = path.parent.glob("*") if "*" in path.name else ()
        files = sorted(str(file) for file in folder if fnmatch(file.name, path.name))
        fix = f"write {name}={python_code(files or (values_of(value) if isinstance(value, str) else [value]))}"
    return fix


def _number_meant(value: Any, annotation: str, hint: Any) -> str:
    """Return the number, or the rule for ranks, that a value of another type was meant for; "" for none."""
    number = SWITCHED.get(shown(value).lower()) if annotation == "bool" else number_of(value)
    if is_finite(value) and value == int(value):
        number = int(value)
    elif is_finite(value) and annotation == "str | int" and 0 < value < 1:
        return f'"energy:{float(value):g}"'
    return str(number) if number is not None and _fits(number, hint) else ""


def _is_model(value: object) -> bool:
    return hasattr(value, "state_dict")


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of a type, but for what is in it."""
    kind = typing.get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if kind is Literal:
        return isinstance(value, str | bool | int) and value in typing.get_args(hint)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real)
    if kind is Sequence:
        other = isinstance(value, str | bytes | Mapping) or _is_model(value) or hasattr(value, "__array__")
        return isinstance(value, Iterable) and not other
    kind = Mapping if typing.is_typeddict(kind) else kind
    try:
        return value is None if kind is type(None) else isinstance(value, kind)
    except TypeError:  # Any, type variables, protocols
        return True


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


def _in_call(error: MergeError, keywords: Mapping[str, Any]) -> MergeError:
    """Put an error into Python's words; what it suggests for the value of a keyword is its fix."""
    error.reword(in_python)
    wrong, *right = error.suggestion or ("",)
    if len(right) == 1 and (names := [n for n, value in keywords.items() if isinstance(value, str) and value == wrong]):
        fix = f"write {names[0]}={python_code(right[0])}"
        error.reword(lambda text: fix if text == error.fix.written else text)
    return error


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
            wrong, corrected = wrong_call(function, (args, kwargs)), _in_call(e, kwargs).fix.startswith("write ")
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
