"""Texts for messages, and plain values: as JSON, of which untrusted files may have few levels, and in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from math import isfinite
from numbers import Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NewType

from .grouping import by_key

if TYPE_CHECKING:
    from typing_extensions import Self

Note = NewType("Note", str)
"""A remark for the user, no error: the text of a note or a warning in reports. The documentation has a line on each; a
test finds them by the calls `Note(…)`, and mypy finds a remark without one."""


NUMBER: Final = re.compile(r"(?<![^._/])[0-9]+(?![^._/])")
"""A whole part of a name that is a number: the 12 of `layers.12.attn1`, not the 1."""


HUGE: Final = 2**63  # larger than any number of bytes or rows

MOST_JSON_LEVELS: Final = 100  # levels of lists and objects; functions elsewhere recurse once per level

MOST_KINDS: Final = 6
"""The most kinds of names in a regular expression of a message."""

MOST_NUMBERS: Final = 32
"""The most numbers in one place of it; of more all are meant."""


def from_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if the text is not JSON or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as e:  # the library's own limit: 990 levels in Python 3.11, thousands from 3.12 on
        raise ValueError("nested too deeply") from e
    level = [value]
    for _ in range(MOST_JSON_LEVELS):
        level = [item for v in level if type(v) in (dict, list) for item in (v.values() if type(v) is dict else v)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON. Numbers that are NaN or infinite, which JSON lacks, are null; what is no plain value is
    text. Hidden characters are escapes in it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=str)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, indent=indent, default=str)
    return text.translate(CONTROLS)


def _finite(value: object) -> object:
    """Return the value with None for every number that is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [*map(_finite, value)] if isinstance(value, list | tuple) else value


def size(n: int, step: int = 1024, units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB")) -> str:
    """Return a number of bytes, or of other units, as text: "6.46 GiB", "6.94 G"."""
    value, at = float(n), 0
    while value >= step and at + 1 < len(units):
        value, at = value / step, at + 1
    return f"{value:.2f} {units[at]}" if at else f"{n} {units[0]}".rstrip()


def done_of(done: int, total: int) -> str:
    """Return some of a number of bytes, with three digits each: "1.30 of 6.41 GiB", "512 MiB of 1.00 GiB"."""
    (value, unit), every = _short(done), " ".join(_short(total))
    return f"{value} of {every}" if every.endswith(f" {unit}") else f"{value} {unit} of {every}"


def rate(bytes_: int) -> str:
    """Return bytes in a second with three digits: "51.2 MiB/s"."""
    return " ".join(_short(bytes_)) + "/s"


def _short(n: int) -> tuple[str, str]:
    """Return a number of bytes with three digits, and its unit."""
    value, unit = size(n).split()
    whole, dot, _ = value.partition(".")
    return f"{float(value):.{max(0, 3 - len(whole)) if dot else 0}f}", unit


def plural(count: int, singular: str, many: str = "") -> str:
    """Return "1 job" or "3 jobs"; `many`: the words for several, where that is not `singular` with an s."""
    return f"{count} {singular if count == 1 else many or singular + 's'}"


def with_article(noun: str) -> str:
    """Return "an int", "an ndarray", "a tensor"."""
    return f"{'an' if re.match('[aeiou]|nd', noun, re.IGNORECASE) else 'a'} {noun}"


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Return the first names and how many are left: `a, b, c and 7 more`."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def several(modules: Sequence[str]) -> str:
    """Return the names of one or two modules, or how many there are and the first of them."""
    return listed(modules) if len(modules) < 3 else f"{len(modules)} modules such as {modules[0]}"


def by_component(strengths: Mapping[str, Mapping[float, int]]) -> dict[str, dict[str, int]]:
    """Return component → strength as text → modules, for JSON."""
    return {part: {f"{s:g}": n for s, n in sorted(c.items())} for part, c in strengths.items()}


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Return pattern → its names, in their order; the numbers in a pattern are `{i}`: `layers.{i}.attn1.to_q`."""
    return by_key((NUMBER.sub("{i}", name), name) for name in names)


def expression(names: Iterable[str], *, alike: bool = False) -> str:
    """Return a regular expression for these names, to be typed in an option; "" for more than six kinds of names.

    `alike`: for all names that differ from these in numbers alone, as the layers of a model do.
    """
    kinds = []
    for pattern, some in by_pattern(names).items():
        words = re.split(r"\{i\}", pattern)
        columns = [sorted({*values}, key=int) for values in zip(*map(NUMBER.findall, some), strict=True)]
        many = "[0-9]+"
        numbers = [
            many if alike or len(values) > MOST_NUMBERS else f"({'|'.join(values)})" if values[1:] else values[0]
            for values in columns
        ]
        kinds.append("".join(map("".join, zip_longest(map(re.escape, words), numbers, fillvalue=""))))
    return "" if len(kinds) > MOST_KINDS else kinds[0] if len(kinds) == 1 else f"(?:{'|'.join(kinds)})"


def counted(patterns: Mapping[str, Sequence[str]], limit: int = 5) -> str:
    """Return the result of `by_pattern` as text: `layers.{i}.to_q × 70, e.g. layers.0.to_q; proj_out and 7 more`."""
    every = [f"{p} × {len(names)}, e.g. {names[0]}" if len(names) > 1 else names[0] for p, names in patterns.items()]
    several = any(len(names) > 1 for names in patterns.values())
    left = sum(map(len, [*patterns.values()][limit:]))
    return ("; " if several else ", ").join(every[:limit]) + (f" and {left} more" if left else "")


def by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (names of one pattern as text, their reason), from a table of name → reason."""
    for reason in dict.fromkeys(reasons.values()):
        for pattern, names in by_pattern(name for name in reasons if reasons[name] == reason).items():
            yield counted({pattern: names}), reason


def stored(dtype: str) -> str:
    """Return what becomes of the dtypes with this value of `--dtype`."""
    return "every tensor keeps its dtype" if dtype == "keep" else f"dtype {dtype}"


def quoted(name: str) -> str:
    """Return a name from a file, safe to print: quoted, in ASCII with escapes, cut to 120 characters."""
    return ascii(name) if len(name) <= 120 else ascii(name[:120]) + "…"


class Shown:
    """Shows a few facts: as one line of text, and as a table in notebooks."""

    def _facts(self) -> Iterable[tuple[Any, ...]]:
        """Return what a person wants to know first: names and values, here those of the object's own fields."""
        return [(name, value) for name, value in vars(self).items() if not name.startswith("_")]

    def _heading(self) -> str:
        """Return the words above the table."""
        return type(self).__name__

    def __repr__(self) -> str:
        return one_line(f"{type(self).__name__}: " + "; ".join(f"{name} {value}" for name, value, *_ in self._facts()))

    def _repr_html_(self) -> str:
        return html_table(self._heading(), self._facts())


def html_table(title: str, rows: Iterable[tuple[Any, ...]]) -> str:
    """Return a table of names and values as HTML, all of it escaped."""

    cells = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{_plain(name)}</th>"
        f"<td style='text-align:left'>{_plain(value)}</td></tr>"
        for name, value, *_ in rows
    )
    return f"<table><caption style='text-align:left'><b>{_plain(title)}</b></caption>{cells}</table>"


def _plain(value: Any) -> str:
    from html import escape  # its table of names takes long to load

    return escape(one_line(str(value)))


INVISIBLE: Final = (
    (0x00, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F), (0x600, 0x605), (0x61C, 0x61C), (0x6DD, 0x6DD),
    (0x70F, 0x70F), (0x890, 0x891), (0x8E2, 0x8E2), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x110BD, 0x110BD), (0x110CD, 0x110CD), (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
"""First and last of the characters that nobody sees, or that terminals and editors take for a command, a line end or a
change of direction: Unicode's categories Cc, Cf, Zl and Zp, and what it calls ignorable by default.
Source: unicode.org/Public/17.0.0/ucd/DerivedCoreProperties.txt."""


class _Escapes(dict[int, int | str]):
    """Character → its JSON escape if it is hidden, else itself; each is computed when a text first has it."""

    def __init__(self, unescaped: str) -> None:
        super().__init__({ord(c): c for c in unescaped})

    def __missing__(self, c: int) -> int | str:
        # Beyond 16 bits JSON has two surrogates.
        escape = f"\\u{c:04x}" if c < 0x10000 else f"\\u{0xD7C0 + (c >> 10):04x}\\u{0xDC00 + (c & 0x3FF):04x}"
        self[c] = escape if any(first <= c <= last for first, last in INVISIBLE) else c
        return self[c]


CONTROLS: Final = _Escapes("\t\n\r")
"""Those of texts of several lines: line feeds, which end our own lines, and carriage returns, which progress bars need,
stay."""

_ALL: Final = _Escapes("\t")


def one_line(text: str) -> str:
    """Return the text of a stranger, safe to show: hidden characters and line ends are JSON escapes."""
    return text.translate(_ALL)


CODE: Final = re.compile(r"(?<![^\s(…])`((?:--?[a-z]|lora-merge )(?:[^`]|`(?=[^\s,;.:)?…]))*)`(?![^\s,;.:)?…])")
"""What can be typed, in a text as it is written: options with their values, or a command of ours, in backticks."""


class Message(str):
    """A text of an error, without the backticks around what can be typed; the text as it is `written` has them."""

    written: str

    def __new__(cls, text: str) -> Self:
        """Return the text; a message as it is."""
        written = getattr(text, "written", text)
        message = super().__new__(cls, CODE.sub(r"\1", written))
        message.written = written
        return message


class Lines(str):
    """Text of several lines, each of which is escaped: the line feeds between them are ours."""

    @classmethod
    def of(cls, lines: Iterable[str]) -> Lines:
        """Return the lines, each escaped, joined by line feeds."""
        return cls("\n".join(map(one_line, lines)))

    @property
    def written(self) -> str:
        """The text itself, as of a `Message`."""
        return str(self)


def escaped(text: str) -> str:
    """Return the text escaped to one line; `Lines` stay as they are."""
    return text if isinstance(text, Lines) else one_line(text)


def codes_line(codes: Mapping[str, Any]) -> str:
    """Return what of an output is quantised, in a few words."""
    formats, coded = codes["formats"], sum(codes["formats"].values())
    counts = (f"{name} ({count})" if len(formats) > 1 else name for name, count in formats.items())
    anew = "all" if codes["encoded"] == coded else f"{codes['encoded']} of them"
    every = plural(coded + codes["plain"], "matrix", "matrices")
    return f"{coded} of {every} in {', '.join(counts)}, {anew} quantised anew; {codes['plain']} unquantised"


def shown(value: Any, length: int | None = 40) -> str:
    """Return the beginning of a value for a message; Python refuses to write out numbers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= HUGE:
        return "of too many digits"
    try:
        return str(value if length is None else beginning(value, length))[:length]
    except Exception as e:  # noqa: BLE001  # of a class of the caller
        return f"without a text ({type(e).__name__})"


def beginning(value: Any, length: int) -> Any:
    """Return a value as JSON has it, without what does not fit into so many letters: a list may have 100 000 items."""
    if isinstance(value, str):
        return value[:length]
    if isinstance(value, list):
        return [beginning(item, length // 3) for item in value[: length // 3 + 1]]
    if isinstance(value, dict):
        some = islice(value.items(), length // 3 + 1)
        return {beginning(key, length): beginning(item, length // 3) for key, item in some}
    return shown(value, None) if isinstance(value, int) and abs(value) >= HUGE else value


def python_code(value: Any, levels: int = 4) -> str:
    """Return a plain value as it is typed in Python: texts, numbers, paths, and short lists and tables of them.

    `levels`: of lists and tables.
    """
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False)
    if levels and isinstance(value, list | tuple | dict) and len(value) <= MOST_ITEMS:
        items = [python_code(item, levels - 1) for item in value]
        if isinstance(value, dict):
            items = [f"{k}: {python_code(v, levels - 1)}" for k, v in zip(items, value.values(), strict=True)]
        text = ", ".join(items)
        return (
            f"[{text}]"
            if isinstance(value, list)
            else (f"({text}{',' * (len(items) == 1)})" if isinstance(value, tuple) else f"{{{text}}}")
        )
    return shown(value)


def described(value: Any) -> str:
    """Return the type of a value, and the value itself if it is plain: `str "0.5"`, `dict`."""
    items = value[:MOST_ITEMS] if type(value) in (list, tuple) else [value]
    plain = all(item is None or isinstance(item, str | int | float | PurePath) for item in items)
    return f"{type(value).__name__}{f' {python_code(value)[:60]}' if plain else ''}"


MOST_ITEMS: Final = 1000
"""Items of a list that messages show as it is typed; a merge takes as many adapters."""


def number_of(text: object) -> int | float | None:
    """Return the number that a text holds; None for what is no such text."""
    if isinstance(text, str) and "_" not in text:
        for kind in (int, float):
            try:
                return number if is_finite(number := kind(text)) else None
            except ValueError:
                pass
    return None


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, but not a truth value, that is finite as a double."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
