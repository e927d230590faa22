"""Checks an untrusted pickle before torch loads it: which functions it calls, and how much memory and time they take.

torch's `weights_only` unpickler calls only the functions on its list. Some of these can exhaust memory: `bytearray`
makes six gigabytes from four hundred bytes, each call of `_codecs.encode` doubles a text, and `set`, `Counter` and
`OrderedDict` copy a list as often as the file says. A tuple of two tuples of two tuples … takes 2^30 steps as the key
of a dict. So this module follows the stream without making objects: its stack holds the kind and the length of each
value. Only the operations and globals that state dicts need are allowed. All items that calls copy and keys hash must
together be no more than a few times the size of the file.

The operations are the ones of torch's unpickler (2.13, _weights_only_unpickler.py); their formats are in Python's
pickletools.py.
"""

from __future__ import annotations

import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Final, TypeAlias

MOST_COPIED: Final = 1_000_000  # items that calls may copy, in addition to one for each byte of the file
LATIN: Final = frozenset({"latin1", "latin-1", "iso-8859-1"})

REBUILT: Final = frozenset(
    f"torch._utils.{name}"
    for name in (
        *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        *("_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor"),
        "_rebuild_meta_tensor_no_storage",
    )
)
"""Functions that make a tensor from a storage; they reserve no memory."""

TYPED: Final = "torch._tensor._rebuild_from_type_v2"
"""Calls the function in its first argument, which must be one of `REBUILT`."""

ITEMS: Final = frozenset({"", "list", "tuple", "dict", "set", "copy", "text", "bytes"})
"""Kinds of values whose items the file itself holds; a tensor or a storage only states a number of items."""

COPIES: Final = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.set", "torch.Size"})
PLAIN_GLOBALS: Final = frozenset(
    {"torch.nn.parameter.Parameter", "builtins.complex", "torch.device", "torch.serialization._get_layout"}
)
ENCODE: Final = "_codecs.encode"
BYTEARRAY: Final = "builtins.bytearray"
CALLED: Final = REBUILT | COPIES | PLAIN_GLOBALS | {TYPED, ENCODE, BYTEARRAY}

NAMED_GLOBALS: Final = CALLED | {"torch.Tensor", "torch.storage.TypedStorage", "torch.storage.UntypedStorage"}
"""Globals that a file may name, in addition to torch's names for dtypes and storages (`_is_value`)."""

Data: TypeAlias = bytes | mmap

LOOKED: Final = 1 << 20  # bytes of a pickle that are looked through for names
HARMLESS: Final = ("torch", "collections", "numpy", "_codecs")
"""Modules whose functions make the values of state dicts."""


class NotRun(pickle.UnpicklingError):
    """The pickle holds something that no state dict needs; the message names it."""


@dataclass
class _Value:
    """One value of the scan: its kind, its number of items or characters, and for some kinds the value itself."""

    kind: str = ""
    size: int = 0
    what: Any = None
    weight: int = 1
    """Number of steps that hashing takes: nested values count once for each time that they occur."""


@dataclass
class _Scan:
    """The state of the scan of one pickle."""

    data: Data
    at: int
    left: int  # items that may still be copied
    stack: list[_Value] = field(default_factory=list)
    marks: list[list[_Value]] = field(default_factory=list)
    memo: dict[int, _Value] = field(default_factory=dict)
    stored: dict[Any, int] = field(default_factory=dict)  # storage → number of elements that the file states
    heaviest: int = 1

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes; EOFError at the end of the data."""
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise EOFError("the pickle ends too early")
        self.at += count
        return taken

    def number(self, count: int) -> int:
        """Return the next `count` bytes as an unsigned number."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data[self.at : self.at + 1000].find(b"\n")
        if end < 0:
            raise NotRun("a name of absurd length")
        return str(self.take(end + 1)[:-1], "utf-8")

    def items(self) -> list[_Value]:
        """Return the values above the last mark, and remove them from the stack."""
        values, self.stack = self.stack, self.marks.pop()
        return values

    def copy(self, count: int) -> None:
        """Count `count` copied items; NotRun if the calls of this pickle copy too many."""
        self.left -= count
        if self.left < 0:
            raise NotRun("calls that copy more than the file holds")


def scan(data: Data, start: int = 0) -> tuple[int, int]:
    """Return the end of the pickle and the number of elements in all storages that it names.

    Raises NotRun if it must not be loaded; LookupError, ValueError, EOFError or UnpicklingError if it is damaged.
    """
    state = _Scan(data, start, MOST_COPIED + len(data))
    while True:
        code = state.take(1)[0]
        if code == pickle.STOP[0]:
            return state.at, sum(state.stored.values())
        operation = OPERATIONS.get(code)
        if operation is None:
            if name := foreign_call(data, start):
                raise NotRun(f"GLOBAL {name}")
            raise NotRun(f"byte {state.at} of its pickle is an operation that torch.save does not write")
        operation(state)


def foreign_call(data: Data, start: int) -> str:
    """Return the first function of another module that a pickle of any protocol names, such as posix.system; "" for
    none. Nothing is run."""
    texts = [""] * 2
    with suppress(ValueError, LookupError, EOFError, OverflowError):
        for operation, value, _ in pickletools.genops(bytes(data[start : start + LOOKED])):
            if isinstance(value, str) and operation.name != "GLOBAL":
                texts = [texts[1], value]
            if operation.name in ("GLOBAL", "STACK_GLOBAL"):
                module, _, name = str(value).partition(" ") if value else (texts[0], "", texts[1])
                if module.partition(".")[0] not in HARMLESS and len(f"{module}.{name}") < 100:
                    return f"{module}.{name}"
    return ""


def _push(kind: str, width: int, *, lengths: int = 0) -> Callable[[_Scan], None]:
    """Return the operation that pushes a value of `width` bytes, or of a length that is stored in `lengths` bytes."""

    def run(scan: _Scan) -> None:
        count = scan.number(lengths) if lengths else width
        raw = scan.take(count)
        what: Any = str(raw, "utf-8", "surrogatepass") if kind == "text" and count < 100 else None
        what = int.from_bytes(raw, "little", signed=width == 4) if kind == "int" and count <= 8 else what
        scan.stack.append(_Value(kind, count if kind in ("text", "bytes") else 0, what))

    return run


def _empty(kind: str) -> Callable[[_Scan], None]:
    return lambda scan: scan.stack.append(_Value(kind, 0, () if kind == "tuple" else None))


def _tuple(count: int | None) -> Callable[[_Scan], None]:
    def run(scan: _Scan) -> None:
        items = scan.items() if count is None else [scan.stack.pop() for _ in range(count)][::-1]
        weight = 1 + sum(item.weight for item in items)
        if weight > scan.left:
            raise NotRun("tuples that unfold to more than the file holds")
        scan.heaviest = max(scan.heaviest, weight)
        scan.stack.append(_Value("tuple", len(items), tuple(items), weight))

    return run


def _version(scan: _Scan) -> None:
    scan.take(1)


def _mark(scan: _Scan) -> None:
    scan.marks.append(scan.stack)
    scan.stack = []


def _append(scan: _Scan) -> None:
    scan.stack.pop()
    scan.stack[-1].size += 1


def _set_item(scan: _Scan) -> None:
    _, key = scan.stack.pop(), scan.stack.pop()
    scan.copy(key.weight - 1)
    scan.stack[-1].size += 1


def _extend(scan: _Scan) -> None:
    added = len(scan.items())  # before `stack[-1]`, since `items` replaces the stack
    scan.stack[-1].size += added


def _set_items(scan: _Scan) -> None:
    items = scan.items()
    scan.copy(sum(key.weight - 1 for key in items[::2]))
    scan.stack[-1].size += len(items) // 2


def _put(width: int) -> Callable[[_Scan], None]:
    def run(scan: _Scan) -> None:
        scan.memo[scan.number(width)] = scan.stack[-1]

    return run


def _get(width: int) -> Callable[[_Scan], None]:
    return lambda scan: scan.stack.append(scan.memo[scan.number(width)])


def _global(scan: _Scan) -> None:
    module, name = scan.line(), scan.line()
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    full = f"{module}.{name}"
    if full not in NAMED_GLOBALS and not _is_value(module, name):
        raise NotRun(f"GLOBAL {full}")
    scan.stack.append(_Value("global", 0, full))


def _is_value(module: str, name: str) -> bool:
    """Return whether a global is torch's name of a dtype, a storage type or the like, which is never called."""
    return module in ("torch", "torch.cuda") and (
        name.endswith(("Storage", "Tensor")) or (name.islower() and name.replace("_", "").isalnum())
    )


def _call(scan: _Scan) -> None:
    args, called = scan.stack.pop(), scan.stack.pop()
    scan.stack.append(_result(scan, called, args))


def _result(scan: _Scan, called: _Value, args: _Value) -> _Value:
    """Return the result of a call; NotRun if the call may make more than the file holds."""
    items: tuple[_Value, ...] = args.what if args.kind == "tuple" else ()
    if called.kind != "global" or called.what not in CALLED or args.kind != "tuple":
        raise NotRun(f"GLOBAL {called.what if called.kind == 'global' else called.kind}, which is called")
    first = items[0] if items else _Value()
    if called.what == TYPED and (len(items) < 3 or first.what not in REBUILT):
        raise NotRun(f"GLOBAL {TYPED} of {first.what}")
    if called.what == ENCODE and (first.kind != "text" or len(items) != 2 or items[1].what not in LATIN):
        raise NotRun("_codecs.encode that is not into latin1")
    if called.what == BYTEARRAY and first.kind not in ("", "bytes", "list", "text"):
        raise NotRun("a bytearray of a length that the file says")
    if called.what in (ENCODE, BYTEARRAY):
        scan.copy(first.size)
        return _Value("bytes", first.size)
    if called.what not in COPIES:
        return _Value("made")
    if first.kind not in ITEMS:
        raise NotRun(f"GLOBAL {called.what} of items that the file does not hold")
    scan.copy(first.size * scan.heaviest)
    return _Value("copy", first.size)


def _build(scan: _Scan) -> None:
    state = scan.stack.pop()
    if state.kind not in ITEMS:
        raise NotRun(f"a state that is {state.kind}")
    scan.copy(state.size * scan.heaviest)


def _stored(scan: _Scan) -> None:
    """Handle ("storage", type, key, device, count …); without an archive, torch allocates `count` elements."""
    named = scan.stack.pop()
    if named.kind == "tuple" and len(named.what) >= 5:
        key, count = named.what[2], named.what[4]
        if count.kind != "int" or count.what is None or count.what < 0:
            raise NotRun("a storage of an absurd size")
        scan.stored[key.what if key.what is not None else id(key)] = count.what
    scan.stack.append(_Value("storage"))


OPERATIONS: Final[Mapping[int, Callable[[_Scan], None]]] = {
    pickle.PROTO[0]: _version, pickle.MARK[0]: _mark, pickle.GLOBAL[0]: _global,
    pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.BUILD[0]: _build, pickle.BINPERSID[0]: _stored,
    pickle.NONE[0]: _push("none", 0), pickle.NEWTRUE[0]: _push("bool", 0), pickle.NEWFALSE[0]: _push("bool", 0),
    pickle.BININT[0]: _push("int", 4), pickle.BININT1[0]: _push("int", 1), pickle.BININT2[0]: _push("int", 2),
    pickle.LONG1[0]: _push("int", 0, lengths=1), pickle.BINFLOAT[0]: _push("float", 8),
    pickle.BINUNICODE[0]: _push("text", 0, lengths=4), pickle.SHORT_BINSTRING[0]: _push("bytes", 0, lengths=1),
    pickle.EMPTY_TUPLE[0]: _empty("tuple"), pickle.EMPTY_LIST[0]: _empty("list"), pickle.EMPTY_DICT[0]: _empty("dict"),
    pickle.EMPTY_SET[0]: _empty("set"), pickle.TUPLE[0]: _tuple(None), pickle.TUPLE1[0]: _tuple(1),
    pickle.TUPLE2[0]: _tuple(2), pickle.TUPLE3[0]: _tuple(3), pickle.APPEND[0]: _append, pickle.APPENDS[0]: _extend,
    pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items,
    pickle.BINPUT[0]: _put(1), pickle.LONG_BINPUT[0]: _put(4),
    pickle.BINGET[0]: _get(1), pickle.LONG_BINGET[0]: _get(4),
}  # fmt: skip
