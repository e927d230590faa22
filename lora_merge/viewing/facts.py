"""The result of inspect, compare and verify: a table of plain values that shows itself as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ..text import Lines, html_table, json_text
from .words.rows import Fact

SCHEMA: Final = "lora-merge/{}/{}"
"""The entry `schema` of every JSON object: what it describes, and the version of its format."""


def schema(kind: str, version: int = 1) -> str:
    """Return the entry `schema` of a JSON object. The version rises when an entry is renamed, removed or gets another
    meaning; new entries leave it as it is."""
    return SCHEMA.format(kind, version)


class Facts(Mapping[str, Any]):
    """A table of names and values, all of which JSON can hold; it shows itself as the text of the command line.

    Examples:
        >>> facts = lora_merge.inspect("style.safetensors")
        >>> facts["kind"], facts["modules"], len(facts.text.splitlines()) > 3
        ('adapter', 264, True)
    """

    def __init__(self, found: Mapping[str, Any], rows: Callable[[Mapping[str, Any]], Iterable[Fact]]) -> None:
        self._found, self._rows = dict(found), rows

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def text(self) -> Lines:
        """The text that the command line prints."""
        return Lines.of(map(str, self._rows(self._found)))

    def to_json(self) -> str:
        """Return everything as one JSON object.

        Returns:
            A line of JSON, as `--json` prints it.
        """
        return json_text(self._found)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = [(row.name, f"{row.value}  {row.right}".strip()) for row in self._rows(self._found)]
        return html_table(str(self._found.get("path", self._found.get("schema", ""))), rows)
