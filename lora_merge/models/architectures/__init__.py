"""Architectures as data: one YAML file each, with the conditions that recognise it and its name tables.

title: Flux.1
component: transformer              # label of the network: unet, transformer, te, vae, model
text_encoders: {te1: clip_l, te2: t5}
layouts:                            # how to recognise each; exactly one row of all files may match, or all names do
  native:
    - double_blocks.0.img_attn.qkv.weight          # there is such a tensor
    - no txt_in.input_embedder.weight              # there is no such tensor
    - img_in.weight _x64                           # of this shape: _ any, 3H three times H
canonical: diffusers                # the layout that the right-hand sides below name
native: {double_blocks.{i}.img_mlp.0: transformer_blocks.{i}.ff.net.0.proj, …}     # notation.py
native in shards: {…}               # the table if several files hold the base, if the names then mean other rows
spellings: {…}                      # further names that only adapters use, same notation
xlabs: {…}                          # those of XLabs' files
native: sdxl                        # or: the same table as in sdxl.yaml
adapter:                            # conditions on an adapter's names, see ../adapter_architecture.py
lbw: {MINE: 1,0,0.5,…}              # a user's lists of block weights

A user's file may have `lbw` and `spellings` alone: the names of an adapter in the names of any base, as in
`spellings: {layers.{i}.attn.q: blocks.{i}.attn.wq}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from ...algorithms import COUNT
from ...dtypes import Shape
from ...errors import InputError
from ...files.yaml_source import YAML_LOADER, check_depth, read_text
from .notation import VARIABLE, BadRow, Row, RowTable, parse

FOLDER: Final = Path(__file__).parent
IN_SHARDS: Final = " in shards"
OF_ADAPTERS: Final = ("spellings", "xlabs")
"""Tables of names that only adapters have."""

MOST_TABLE_ROWS: Final = 50_000  # of a table
LONGEST_FILE: Final = 1 << 20  # bytes of a file; the longest shipped file has 5 140

_GROUP: Final = r"\\g<\1>"
_BEFORE: Final = r"(?P<before>(?:.*[._])?)"

_AXIS: Final = r"(?:_|(?:[1-9][0-9]{0,8})?[A-Z]|[0-9]{1,9})"
_SHAPE: Final = re.compile(rf"{_AXIS}(?:x{_AXIS})*")


@dataclass(frozen=True)
class Condition:
    """One line of a `layouts` entry."""

    key: str
    shape: tuple[str, ...] | None
    absent: bool

    def holds(self, shape_of: Callable[[str], Shape | None]) -> bool:
        """Return whether the condition holds; `shape_of` returns a tensor's shape, None for a missing tensor."""
        shape = shape_of(self.key)
        present = shape is not None and (self.shape is None or fits(self.shape, shape))
        return present != self.absent


@dataclass(frozen=True)
class Architecture:
    """The content of one architecture file."""

    title: str
    file: Path
    component: str = "transformer"
    text_encoders: Mapping[str, str] = field(default_factory=dict)  # name in adapters → kind
    kind: str = ""  # of a text encoder, as in `text_encoders`
    layouts: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    canonical: str = "diffusers"
    tables: Mapping[str, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)
    adapter: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lbw: Mapping[str, str] = field(default_factory=dict)  # a user's preset → its block weights; see models/blocks.py

    @cached_property
    def renames(self) -> Sequence[tuple[re.Pattern[str], str]]:
        """The names of adapters in a file without a title: pattern of a whole name, template of the base's."""
        if self.title:
            return ()
        rows = [(name, new) for name, new, _ in self.tables.get(OF_ADAPTERS[0], ())]
        return [(re.compile(_BEFORE + _pattern(name)), rf"\g<before>{VARIABLE.sub(_GROUP, new)}") for name, new in rows]

    @cached_property
    def spellings(self) -> Mapping[str, RowTable]:
        """Layout or `spellings` → its table; made on first use."""
        return MappingProxyType({n: RowTable(self._rows(n)) for n in self.tables})

    def _rows(self, table: str, without: Set[str] = frozenset()) -> list[Row]:
        rows: list[Row] = []
        lines = self.tables[table]
        names = {name for name, _, _ in lines}
        for name, canonical, line in lines:
            if name == "<<":
                stem, _, included = canonical.partition(".")
                other = next(a for a in shipped() if a.file.stem == stem)
                if (included := included or table) not in other.tables:
                    raise _bad(self.file, line, f"{other.file.name} has no table {included}")
                rows.extend(other._rows(included, names | without))
                continue
            if name in without:
                continue
            try:
                rows.extend(islice(parse(name, canonical, self.ranges), MOST_TABLE_ROWS + 1))
            except BadRow as e:
                raise _bad(self.file, line, f"{name}: {e}") from e
            if len(rows) > MOST_TABLE_ROWS:
                raise _bad(self.file, line, f"more than {MOST_TABLE_ROWS} rows up to here")
        return rows


@lru_cache(maxsize=1)
def shipped() -> tuple[Architecture, ...]:
    """Return all architectures that come with the program."""
    return tuple(load(p) for p in sorted(FOLDER.glob("*.yaml")))


def recognise(shape_of: Callable[[str], Shape | None], among: Iterable[Architecture]) -> list[tuple[Architecture, str]]:
    """Return every (architecture, layout) whose conditions hold; for a known model exactly one."""
    layouts = ((a, layout, conditions) for a in among for layout, conditions in a.layouts.items())
    return [(a, layout) for a, layout, conditions in layouts if all(c.holds(shape_of) for c in conditions)]


def nearly(shape_of: Callable[[str], Shape | None], among: Iterable[Architecture]) -> list[tuple[Architecture, str]]:
    """Return every (architecture, layout) of whose tensors one is missing, while another one and all else holds."""
    near = []
    for a in among:
        for layout, conditions in a.layouts.items():
            failed = [c for c in conditions if not c.holds(shape_of)]
            absent = len(failed) == 1 and not failed[0].absent and shape_of(failed[0].key) is None
            if absent and sum(not c.absent for c in conditions) > 1:
                near.append((a, layout))
    return near


def load(file: Path) -> Architecture:
    """Return the architecture in a file; InputError with file and line for any mistake in the file."""
    text = read_text(file, LONGEST_FILE)
    try:
        if file.parent != FOLDER:
            check_depth(text, str(file))
        node = yaml.compose(text, YAML_LOADER)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise _bad(file, mark.line + 1 if mark else 1, "it is not YAML") from e
    return _Reader(file).architecture(node)


class _Reader:
    """Reader of YAML nodes that names the line of every mistake."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def architecture(self, node: Any) -> Architecture:
        known: dict[str, Callable[[Any], Any]] = {
            "title": self.text,
            "component": self.text,
            "kind": self.text,
            "canonical": self.text,
            "text_encoders": lambda n: {k.value: self.text(v) for k, v in self.pairs(n)},
            "layouts": lambda n: {k.value: self.conditions(v) for k, v in self.pairs(n)},
            "ranges": lambda n: {k.value: self.number(v) for k, v in self.pairs(n)},
            "adapter": lambda n: tuple(self.text(v) for v in self.items(n)),
            "variants": lambda n: {k.value: tuple(self.text(v) for v in self.items(vs)) for k, vs in self.pairs(n)},
            "lbw": lambda n: {k.value: ",".join(self.text(v) for v in self.items(vs)) for k, vs in self.pairs(n)},
        }
        # Settings, and tables of names.
        fields: dict[str, Any] = {}
        tables: dict[str, tuple[tuple[str, str, int], ...]] = {}
        for key, value in self.pairs(node):
            if key.value in known:
                fields[key.value] = known[key.value](value)
            else:
                tables[key.value] = self.table(value)
        # A user's file may have one table alone, with the base's own names on the right.
        if fields.keys() <= {"lbw"} and tables.keys() <= {OF_ADAPTERS[0]}:
            for name, name_in_base, line in tables.get(OF_ADAPTERS[0], ()):
                letters = VARIABLE.findall(name)
                if len({*letters}) < len(letters) or not {*VARIABLE.findall(name_in_base)} <= {*letters}:
                    raise _bad(self.file, line, f"{name}: {name_in_base} has other numbers")
            return Architecture("", self.file, tables=tables, **fields)
        # Any other file is a model, whose tables are those of its layouts.
        if "title" not in fields:
            raise _bad(self.file, 1, "it has no title")
        layouts = {name + end for name in fields.get("layouts", ()) for end in ("", IN_SHARDS)} | {*OF_ADAPTERS}
        if strange := [t for t in tables if t not in layouts]:
            raise _bad(self.file, 1, f"{strange[0]} is neither a setting nor one of its layouts")
        architecture = Architecture(file=self.file, tables=tables, **fields)
        if self.file.parent != FOLDER:
            architecture.spellings  # noqa: B018  reports mistakes in a user's rows at once
        return architecture

    def pairs(self, node: Any) -> list[tuple[Any, Any]]:
        if node is None or node.id != "mapping":
            raise _bad(self.file, _line(node), "there should be a mapping")
        keys: set[str] = set()
        for key, _ in node.value:
            if key.id != "scalar":
                raise _bad(self.file, _line(key), "there should be a name")
            if key.value in keys:
                raise _bad(self.file, _line(key), f"{key.value} occurs twice")
            keys.add(key.value)
        return list(node.value)

    def items(self, node: Any) -> list[Any]:
        if node.id == "scalar":
            return [node]
        if node.id != "sequence":
            raise _bad(self.file, _line(node), "there should be a list")
        return list(node.value)

    def text(self, node: Any) -> str:
        if node.id != "scalar" or not node.value:
            raise _bad(self.file, _line(node), "there should be a word")
        return str(node.value)

    def number(self, node: Any) -> int:
        if (number := COUNT.number(self.text(node))) is None:
            raise _bad(self.file, _line(node), "there should be a number")
        return number

    def conditions(self, node: Any) -> tuple[Condition, ...]:
        conditions = []
        for item in self.items(node):
            m = re.fullmatch(r"(no )?(\S+)(?: (\S+))?", self.text(item))
            if m is None or not _SHAPE.fullmatch(m[3] or "_"):
                raise _bad(self.file, _line(item), "there should be `key`, `no key` or `key 64x_`")
            conditions.append(Condition(m[2], tuple(m[3].split("x")) if m[3] else None, bool(m[1])))
        return tuple(conditions)

    def table(self, node: Any) -> tuple[tuple[str, str, int], ...]:
        rows = tuple((k.value, self.text(v), _line(k)) for k, v in self.pairs(node))
        for name, other, line in rows:
            if name == "<<" and not (FOLDER / f"{other.partition('.')[0]}.yaml").is_file():
                raise _bad(self.file, line, f"there is no architecture file {other}")
        return rows


def _pattern(name: str) -> str:
    """Return the pattern of a module's name, dotted or flat, with numbers such as `{i}` in it."""
    texts = [re.escape(text).replace(r"\.", "[._]") for text in VARIABLE.split(name)[::2]]
    letters = [f"(?P<{letter}>[0-9]{{1,9}})" for letter in VARIABLE.findall(name)]
    return "".join(chain.from_iterable(zip_longest(texts, letters, fillvalue="")))


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1 if node is not None else 1


def _bad(file: Path, line: int, why: str) -> InputError:
    return InputError("the architecture file cannot be used", f"{file}, line {line}: {why}",
                      "compare it with the files in lora_merge/models/architectures")  # fmt: skip


def fits(want: tuple[str, ...], shape: Shape) -> bool:
    """Return whether a shape fits a condition such as ("H", "3H") or ("_", "64")."""
    letters: dict[str, int] = {}
    return len(want) == len(shape) and all(_axis(w, n, letters) for w, n in zip(want, shape, strict=True))


def _axis(want: str, size: int, letters: dict[str, int]) -> bool:
    if want == "_":
        return True
    if want.isdigit():
        return int(want) == size
    times = int(want[:-1] or 1)
    return size == times * letters.setdefault(want[-1], size // times)
