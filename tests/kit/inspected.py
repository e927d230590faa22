"""The facts of a file as the lines of text that `lora-merge inspect` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_merge.facts import aligned
from lora_merge.viewing.inspect_rows import rows


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts as text."""
    return aligned(rows(facts))
