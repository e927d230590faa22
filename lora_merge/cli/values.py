"""Values of options on the command line, taken apart."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..arguments import factor, number
from ..errors import UsageError
from ..json_text import from_json


def named_adapter(text: str) -> tuple[str, float | None]:
    """("a.safetensors", 0.8) for "a.safetensors:0.8"; no strength where none is named."""
    from ..job import exists, split_strength

    return (text, None) if exists(text) else split_strength(text)


def one_strength(text: str) -> float:
    """0.8 for "0.8"."""
    try:
        return number(text)
    except ValueError:
        return factor(text, "--strength")  # which says that it is none


def part(text: str) -> tuple[str, float]:
    """("te", 0.5) for "te=0.5"."""
    name, equals, value = text.rpartition("=")
    with suppress(ValueError):
        if equals:
            return name, number(value)
    raise UsageError(f"{text!r} is no PART=FLOAT", "--strength-for", "write it like te=0.5")


def one_setting(text: str) -> tuple[str, Any]:
    """("lora_alpha", 16) for "lora_alpha=16"; values are JSON, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is no NAME=VALUE", "--setting", "write it like lora_alpha=16")
    try:
        return name, from_json(value)
    except ValueError:
        return name, value
