"""Typed access to a PEFT configuration, and the kinds of LoRA that cannot be merged, with the reasons. No torch.

The JSON is untrusted: a field of the wrong type is an InputError that names the field, never a TypeError, and the
regular expressions in it run for a bounded number of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, TypeVar

from ...algorithms import COUNT, Bounds
from ...errors import InputError
from ...row_ranges import RowNumbers
from ...safe_regex import Refused, Steps
from ...text import beginning
from .module_patterns import Ends

T = TypeVar("T")

CONVERT: Final = "merge with PEFT's own merge_and_unload(), or save the adapter converted to plain LoRA and merge that"
NEEDS_INPUT: Final = "what it adds depends on the input, so no fixed weight does the same"
TRAIN_AGAIN: Final = "keep it as a separate adapter at inference; it has no merged form"
CHANGED_BASE: Final = (
    "the weights it was trained on are not those of the base, and the file does not contain the difference"
)
RETAKE: Final = "take adapter_config.json from the training again"
RESAVE: Final = (
    "save it again with save_pretrained(…, path_initial_model_for_weight_conversion=…), which makes it a plain LoRA"
)

UNKNOWN_ORDER: Final = (
    "its layers share vectors in the order in which the model's code lists them, which no file states"
)
ORDER_OF: Final = "put the base's config.json next to it, if that is missing; else "

REFUSED_LORA: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "alora_invocation_tokens": ("aLoRA", "it acts only after certain tokens", TRAIN_AGAIN),
        "arrow_config": ("Arrow", NEEDS_INPUT, TRAIN_AGAIN),
        "use_qalora": ("QALoRA", "it belongs into a quantizer's zero points", TRAIN_AGAIN),
        "layer_replication": (
            "layer replication",
            "it was trained on a model with some layers repeated",
            "write the repeated layers into a base of their own and merge into that",
        ),
    }
)
"""Field of a LoRA configuration that selects another method → (method, why it is refused, what to do instead)."""

REFUSED_INIT: Final[Mapping[str, str]] = MappingProxyType(
    {"corda": "CorDA", "loftq": "LoftQ", "lora_ga": "LoRA-GA", "pissa_niter": "PiSSA with a randomised start"}
)
"""Start of `init_lora_weights` → method that changes the base in a way that files cannot reproduce."""

PLAIN_INIT: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Values of `init_lora_weights` that leave the base as it is."""

REPEATED_INIT: Final = frozenset({"pissa", "olora"})
"""Values of `init_lora_weights` that change the base in a way that can be computed from the base."""

KNOWN_SWITCHES: Final = frozenset(
    (
        *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
        *("velora_config", "monteclora_config", "eva_config", "corda_config", "lora_ga_config"),
        *("loftq_config", "runtime_config", "megatron_config"),
    )
)
"""Fields `use_…` and `…_config` of a LoRA configuration whose effect on the weights is known."""


WHOLE_NAME: Final = r"(?:%s)\Z"
VERSION_NUMBER: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True)
class PeftConfig:
    """A PEFT configuration, read field by field; `null` counts as absent, as in PEFT."""

    values: Mapping[str, Any]
    where: str
    inside: str = ""
    """Prefix of the file's names before the path that the configuration uses, such as `transformer.`."""
    steps: Steps = field(default_factory=Steps, compare=False, repr=False)
    """The number of steps that its regular expressions may still take."""
    _indexes: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """Index of a list or a table, which is made on first use: many modules ask for one."""

    def get(self, name: str) -> Any:
        """Return the value as it is; None if absent."""
        return self.values.get(name)

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        return self._number(name, self.get(name), default)

    def integer(self, name: str, default: int, allowed: Bounds = COUNT) -> int:
        """Return a whole number within these bounds, exact also if a double would round it."""
        value = default if self.get(name) is None else allowed.number(self.get(name))
        if value is None or isinstance(self.get(name), str):
            raise self.wrong_type(name, f"a whole number from {allowed}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong_type(name, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(name, "a string")
        return default if value is None else value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong_type(name, "a list of strings")
        return tuple(value)

    def index(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the index of this key; `make` is called once."""
        if key not in self._indexes:
            self._indexes[key] = make()
        index: T = self._indexes[key]
        return index

    def is_end(self, name: str, text: str, before: str = "") -> bool:
        """Return whether a text ends with `before` and one of the strings of a list, which may be long."""
        ends, lengths = self.index(("ends", name, before), lambda: self._ends(name, before))
        return any(text[len(text) - n :] in ends for n in takewhile(len(text).__ge__, lengths))

    def _ends(self, name: str, before: str) -> tuple[frozenset[str], list[int]]:
        """Return `before` with each string of a list behind it, and their lengths."""
        ends = frozenset(before + end for end in self.texts(name))
        return ends, sorted(set(map(len, ends)))

    def indices(self, name: str, value: object) -> RowNumbers:
        """Return a list of row numbers, each once. All modules may use one list, which is checked once."""
        return self.index(("rows", id(value)), lambda: self._rows(name, value))

    def _rows(self, name: str, value: object) -> RowNumbers:
        rows: list[Any] = value if isinstance(value, list) else [None]
        whole = all(isinstance(v, int) and COUNT.number(v) is not None for v in rows)
        if not whole or len(set(rows)) != len(rows):
            raise self.wrong_type(name, "a list of different row numbers")
        return RowNumbers(rows)

    def pattern(self, name: str, module: str, default: float) -> float:
        """Return the number under the first key, a regular expression, that matches the module's path or its end."""
        table = self.get(name)
        if not table:
            return default
        patterns = self._patterns(name)
        with self._refusing(name):
            key = patterns.first(self._path(module), self.steps)
        return default if key is None else self._number(f"{name}[{key[:80]!r}]", table[key], default)

    def _patterns(self, name: str) -> Ends:
        """Return the index of a table of patterns, which is checked once."""

        def make() -> Ends:
            table = self.get(name)
            if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
                raise self.wrong_type(name, "an object")
            return Ends(table)

        return self.index(("patterns", name), make)

    def is_ambiguous(self, name: str, module: str) -> bool:
        """Return whether several keys of a pattern field match the module and have different values.

        False for a field that `pattern` was not called for yet.
        """
        if ("patterns", name) not in self._indexes:
            return False
        try:
            keys = self._patterns(name).every(self._path(module), self.steps)
        except Refused:  # by a pattern that the merge does not need
            return False
        return any(self.values[name][key] != self.values[name][keys[0]] for key in keys)

    def matches(self, expression: str, module: str, name: str) -> bool:
        """Return whether the regular expression in field `name` matches the whole of the module's path."""
        with self._refusing(name):
            self.steps.allow()
            return self.steps.pattern(expression, WHOLE_NAME).matches(self._path(module), self.steps)

    def _path(self, module: str) -> str:
        return module.removeprefix(self.inside).removesuffix(".default")  # see suffixes.KEY_REWRITES

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Raise InputError that names the field if a pattern is refused."""
        try:
            yield
        except Refused as e:
            fix = "write out the modules that it matches"
            raise InputError(f"{name} holds a pattern that is {e}", f"{self.where}: {name}", fix) from e

    def version(self, default: str = "") -> tuple[int, ...]:
        """Return the release of PEFT that wrote the file, (0, 17) or (0, 17, 1); () if the field is absent."""
        release = VERSION_NUMBER.match(self.text("peft_version", default))
        return tuple(int(part) for part in release.groups() if part) if release else ()

    def wrong_type(self, name: str, expected: str) -> InputError:
        """Return the error for a field of the wrong type."""
        shown = repr(beginning(self.get(name.partition("[")[0]), 80))[:80]
        return InputError(f"{name} is not {expected}", f"{self.where}: {name} = {shown}", RETAKE)

    def _number(self, name: str, value: Any, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong_type(name, "a number")
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise self.wrong_type(name, "a finite number")
        return float(value)


def refuse(method: str, why: str, instead: str, where: str) -> InputError:
    """Return the error for an adapter that has no merged form, or none that follows from its files."""
    return InputError(f"{method} adapters cannot be merged: {why}", where, instead)


def refuse_lora(fields: PeftConfig) -> None:
    """Raise InputError if a LoRA configuration selects another method, or a start that changed the base."""
    for name, (method, why, instead) in REFUSED_LORA.items():
        if fields.get(name):
            raise refuse(method, why, instead, f"{fields.where}: {name}")
    refuse_start(fields, fields.get("init_lora_weights"))
    for name, value in fields.values.items():
        switch = name.startswith("use_") or name.endswith("_config")
        if value and switch and name not in KNOWN_SWITCHES:
            why = "its effect on the weights is unknown to lora-merge"
            raise refuse(f"LoRA with {name[:40]!r}", why, CONVERT, fields.where)


def refuse_start(fields: PeftConfig, start: object) -> None:
    """Raise InputError if the factors started in a way that changed the base for good."""
    if start is None or isinstance(start, bool):
        return
    if not isinstance(start, str):
        raise fields.wrong_type("init_lora_weights", "true, false or a string")
    where = f"{fields.where}: init_lora_weights = {start[:40]!r}"
    for prefix, method in REFUSED_INIT.items():
        if start.lower().startswith(prefix):
            raise refuse(method, CHANGED_BASE, RESAVE, where)
    if start.lower() not in PLAIN_INIT | REPEATED_INIT:
        raise refuse("LoRA", "how its factors were initialised is unknown to lora-merge", RESAVE, where)
