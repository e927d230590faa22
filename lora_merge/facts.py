"""Facts in words: rows of a name and a value, which text, terminals, notebooks and pages show alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from .option_texts import in_python
from .text import Lines, html_table, json_text

THOUSANDS: Final = (1000, ("", "K", "M", "G", "T"))
"""For `size`: things are counted in thousands."""

VALUE_WIDTH: Final = 200  # characters of a value
LONGER: Final = {
    "undo": 3 * VALUE_WIDTH,
    "warning": 5 * VALUE_WIDTH,
    "verdict": 5 * VALUE_WIDTH,
    "note": 2 * VALUE_WIDTH,
}
"""Name of a row → characters of its value, where that is more."""

TEXT_SLACK: Final = 40
"""Characters by which a text may be longer before it is cut: the words about what is left out have as many."""

MOST_STRENGTHS: Final = 4
"""Strengths of one part that are named one by one; of more, the least and the largest."""

TABLE_ROWS: Final = 40  # rows of a table
DIGITS: Final = "0123456789"


STYLES: Final = {"output": "bold", "verified": "green", "note": "yellow", "warning": "bold yellow", "error": "red"}
"""Name of a fact → the style of its value on a terminal, and on the page of `lora-merge ui`."""


class Fact(NamedTuple):
    """A fact in words. Without a name it is a row of the table that the fact above begins."""

    name: str
    value: str
    right: str = ""  # the second cell of a row of a table
    style: str = ""  # its colour on a terminal, if not that of its name

    def __str__(self) -> str:
        """Return the row as a line of text."""
        return self.wide(13)

    def wide(self, width: int) -> str:
        """Return the row as a line of text; `width`: columns for the names of rows."""
        return (f"{self.name:<{width}} {self.value}" if self.name else f"  {self.value}  {self.right}").rstrip()


def line(name: str, value: object) -> Fact:
    """Return a fact; the words of its name may have underscores between them."""
    return Fact(name.replace("_", " "), str(value))


def rows_in_python(rows: Iterable[Fact]) -> Iterator[Fact]:
    """Yield rows with options and commands in Python's words."""
    return (row._replace(value=in_python(row.value), right=in_python(row.right)) for row in rows)


def table(rows: Iterable[tuple[str, str]]) -> Iterator[Fact]:
    """Yield rows of two columns, at most TABLE_ROWS, and how many are left out."""
    cells = [(cut(str(a), 80), b) for a, b in rows]
    wide = max((len(a) for a, _ in cells[:TABLE_ROWS]), default=0)
    yield from (Fact("", a.ljust(wide), b) for a, b in cells[:TABLE_ROWS])
    if len(cells) > TABLE_ROWS:
        yield Fact("", f"… and {len(cells) - TABLE_ROWS} more (--json has all)")


def section(title: str, rows: Iterable[Fact]) -> Iterator[Fact]:
    """Yield rows below an empty line and a heading, if there are any."""
    if lines := list(rows):
        yield Fact("", "")
        yield Fact(title.upper(), "")
        yield from lines


def aligned(rows: Iterable[Fact]) -> Iterator[str]:
    """Yield rows as lines of text; values begin in the column behind the longest name."""
    every = list(rows)
    width = max((len(row.name) for row in every), default=0)
    return (row.wide(max(width, 13)) for row in every)


def by_block(rows: Iterable[tuple[str, str]]) -> Iterator[Fact]:
    """Yield a table of blocks below the number of them, if there are any."""
    if lines := list(rows):
        yield line("by block", len(lines))
        yield from table(lines)


def cut_rows(rows: Iterable[Fact]) -> Iterator[Fact]:
    """Yield rows whose long values are cut."""
    return (row._replace(value=cut(row.value, LONGER.get(row.name, VALUE_WIDTH))) if row.name else row for row in rows)


def cut(text: str, width: int = VALUE_WIDTH) -> str:
    """Return the beginning of a long text, and how much is left out."""
    return (
        text
        if len(text) <= width + TEXT_SLACK
        else f"{text[:width]}… ({len(text) - width} more characters; --json has all)"
    )


def runs(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], str]]:
    """Yield (names, value) of rows of one value whose names count on, such as `IN00` to `IN11`, as one."""
    parted = [(name, head := name.rstrip(DIGITS), name[len(head) :], value) for name, value in rows]
    for (_, _, value), some in groupby(enumerate(parted), lambda entry: _run(entry[0], *entry[1])):
        yield [name for _, (name, *_) in some], value


def _run(at: int, _: str, head: str, digits: str, value: str) -> tuple[str, object, str]:
    return head, digits and int(digits) - at, value


def run_label(names: Sequence[str]) -> str:
    """Return names that count on as one, as `--strength-for` takes them: `IN00–IN11`, `double_blocks.0–9`."""
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    return f"{first}–{last if last.isalnum() else last[len(last.rstrip(DIGITS)) :]}"


def between(of: Mapping[str, float]) -> str:
    """Return `4 to 32, median 16`; one number where all are equal, nothing where there are none."""
    if not of:
        return ""
    low, high = of["min"], of["max"]
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}, median {of['median']:.4g}"


def counts_by_kind(counts: Mapping[str, Any]) -> str:
    """Return numbers of things by kind: `unet 192, te 72`."""
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def times(strength: float | str, spec: str = "g") -> str:
    """Return a strength in words, with a minus sign: "0.8", "−0.5"."""
    text = strength if isinstance(strength, str) else f"{strength:{spec}}"
    return f"−{text[1:]}" if text.startswith("-") else text


def strengths(parts: Mapping[str, Mapping[Any, int]]) -> str:
    """Return "0.8× unet (48), te 0: 16 left out" for {"unet": {0.8: 48}, "te": {0: 16}}; JSON has strengths as text."""
    pieces = []
    for part, counts in parts.items():
        modules = {float(strength): count for strength, count in counts.items()}
        used = sorted((strength for strength in modules if strength), reverse=True)
        if len(used) > MOST_STRENGTHS:
            pieces.append(f"{times(used[-1])} to {times(used[0])}× {part} ({sum(modules[s] for s in used)})")
        else:
            pieces += [f"{times(strength)}× {part} ({modules[strength]})" for strength in used]
        if left := modules.get(0.0):
            pieces.append(f"{part} 0: {left} left out")
    return ", ".join(pieces)


MANY_TIMES: Final = 10
"""A ratio from which on it is no longer in percent."""


def percent(ratio: float, digits: int = 3) -> str:
    """Return a ratio in percent: "1.43 %", "199 %", "0.0000012 %"; "140 times" where it is large."""
    from decimal import Decimal

    often = ratio >= MANY_TIMES
    number = f"{Decimal(f'{ratio if often else 100 * ratio:.{digits}g}'):f}"  # without an exponent
    return f"{number} {'times' if often else '%'}"


def share_of(ratio: float, of: str) -> str:
    """Return how large a thing is compared with another: "2 % of the weights", "140 times the weights"; with as many
    digits as a sample has, so that all commands say the same of one thing."""
    return f"{percent(ratio, 2)} {'of ' * (ratio < MANY_TIMES)}{of}"


class Facts(Mapping[str, Any]):
    """A table of names and values that JSON can hold; it shows itself as the text of the command line, with options in
    Python's words.

    Examples:
        >>> facts = lora_merge.inspect("style.safetensors")
        >>> facts["kind"], facts["modules"], len(facts.text.splitlines()) > 3
        ('adapter', 264, True)
    """

    def __init__(self, values: Mapping[str, Any], rows: Callable[[Mapping[str, Any]], Iterable[Fact]]) -> None:
        self._values, self._make = dict(values), rows

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def changed(self, values: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Facts:
        """Return the facts with other values.

        Parameters:
            values: The values in place of these.

        Returns:
            Other facts, which show themselves as these do.
        """
        return Facts(values(self._values), self._make)

    def _rows(self) -> Iterator[Fact]:
        return rows_in_python(self._make(self._values))

    @property
    def text(self) -> Lines:
        """The text that the command line prints, with options in Python's words."""
        return Lines.of(aligned(self._rows()))

    def to_json(self) -> str:
        """Return everything as one JSON object.

        Returns:
            A line of JSON, as `--json` prints it.
        """
        return json_text(self._values)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = [(row.name, f"{row.value}  {row.right}".strip()) for row in self._rows()]
        return html_table(str(self._values.get("path", self._values.get("schema", ""))), rows)
