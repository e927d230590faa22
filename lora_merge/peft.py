"""What an adapter's configuration means for the merge; the rules of PEFT replace this placeholder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .algorithms import Shape


class Rules:
    """No configuration: the file's own numbers hold."""

    def algorithm(self, module: str, candidates: Sequence[str]) -> str | None:
        """The row to use; None leaves it to the table."""
        return None

    def scale(self, module: str, shapes: Mapping[str, Shape]) -> float | None:
        """The scale to use; None leaves it to the table."""
        return None

    def settings(self, module: str, algorithm: str) -> Mapping[str, Any]:
        """Settings of the formula."""
        return {}


def rules(config: Mapping[str, Any], where: str) -> Rules:
    """The rules of a configuration."""
    return Rules()
