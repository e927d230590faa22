"""Compares tensors that two adapters store whole: the values that take the place of the base's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from ...adapters.file import AdapterFile
from ...adapters.peft.rules import PeftRules
from ...adapters.stated import rules_of
from ...adapters.suffixes import split_parameter
from ...disk.files import StoredTensor
from ...disk.reader import Reader
from ...engine.measuring.replaced import Replaced, runs, values
from ...engine.tensors import Fetch
from ...errors import MergeError
from ...models.assumed import Name, plain
from ..difference import Difference, plain_sums

Key: TypeAlias = tuple[Name, str]
"""(network and name of a module, parameter), alike in all dialects of one layout."""

ROWS: Final = "rows of trained tokens: name a base with --base"


class Sums(NamedTuple):
    """Sums over two changes: of squares, and of products."""

    a: float = 0.0
    b: float = 0.0
    inner: float = 0.0


def compare_whole(a: AdapterFile, b: AdapterFile) -> dict[str, Any]:
    """Return how the values differ that both store: `equal`, `total`, `tensors` by A's names, `only_a`, `only_b`, and
    under `left` which tensors cannot be compared, and why."""
    left: dict[str, str] = {}
    one, other = dict(_values(a, left)), dict(_values(b, left))
    total, tensors = Difference(), dict[str, Difference]()
    with Reader([a.index, b.index]) as reader:
        for key, own in one.items():
            if (far := other.get(key)) is None:
                continue
            if own.shape != far.shape:
                left[own.name] = of_shapes(own.shape, far.shape)
                continue
            tensors[own.name] = plain_sums(own, far, reader)
            total.add(tensors[own.name])
    return {
        "equal": sum(found.equal for found in tensors.values()), "total": total.to_dict(),
        "tensors": {name: found.to_dict() for name, found in tensors.items()},
        "only_a": [own.name for key, own in one.items() if key not in other],
        "only_b": [far.name for key, far in other.items() if key not in one], "left": left,
    }  # fmt: skip


def of_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """Return why two weights cannot be compared."""
    return f"other shapes: {list(a)} in A, {list(b)} in B"


def _values(file: AdapterFile, left: dict[str, str]) -> Iterator[tuple[Key, StoredTensor]]:
    """Yield the tensors that take the place of the base's; the others come into `left`, with the reason."""
    known = rules_of(file)
    for info in file.strange:
        target = _target(info, known.of(info.name), left)
        name, parameter = split_parameter(target) if target else ("", "")
        if target:
            yield (plain(name or target), parameter), info


def _target(info: StoredTensor, known: PeftRules, left: dict[str, str]) -> str:
    """Return the name of the tensor that one takes the place of; "" for a tensor that is no such value."""
    try:
        value = known.stored_value(info.name)
    except MergeError as e:
        left[info.name] = e.what
        return ""
    if value is None:
        return info.name
    if value.kind != "value" or value.rows is not None:
        left[info.name] = ROWS if value.kind == "value" else value.why
        return ""
    return value.target


def sums_of_changes(a: Replaced, b: Replaced, read: Fetch) -> Sums:
    """Return the sums over V_A − W and V_B − W, which are read some numbers at a time. The shapes are equal."""
    found = Sums()
    for first, count in runs(a, 1):
        old = values(a.own, first, count, read)
        one, other = (values(x.target.weight, first, count, read) - old for x in (a, b))
        sound = one.isfinite() & other.isfinite()
        one, other = one[sound], other[sound]
        found = Sums(found.a + float(one @ one), found.b + float(other @ other), found.inner + float(one @ other))
    return found
