"""Small inputs that are built to take long, or much memory: files by name, and what to do with the folder they are in.

`python -m tests.hostile_inputs FOLDER` makes and opens all of them in one process, and prints one JSON line for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 120_000  # bytes of an input; with 1 000 000 all hold as well, and take eight times as long
Files = dict[str, bytes]


# ------------------------------------------------------------------ pickles


def op(name: str, *args: int) -> bytes:
    """One operation of the unpickler."""
    return getattr(pickle, name) + b"".join(struct.pack("<I", a) for a in args)


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return op("BINUNICODE", len(raw)) + raw


def named(name: str) -> bytes:
    module, _, what = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{what}\n".encode()


def archive(stream: bytes) -> bytes:
    """A torch file with this pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        z.writestr("x/data.pkl", stream)
        z.writestr("x/byteorder", b"little")
        z.writestr("x/version", b"3\n")
        z.writestr("x/data/0", bytes(64))
    return out.getvalue()


def stream(*parts: bytes) -> bytes:
    return archive(b"\x80\x02" + b"".join(parts) + pickle.STOP)


def put(n: int) -> bytes:
    return op("LONG_BINPUT", n)


def get(n: int) -> bytes:
    return op("LONG_BINGET", n)


def pickles() -> Iterator[tuple[str, bytes]]:
    """Each is one state dict to torch, or would be."""
    call, one, none = pickle.REDUCE, pickle.TUPLE1, pickle.NONE
    huge = op("LONG1")[:1] + b"\x08" + struct.pack("<q", 6 << 30)
    yield "bytearray of a number", stream(named("__builtin__.bytearray"), huge, one, call)
    yield "bytearray of a number, by name of 3", stream(named("builtins.bytearray"), huge, one, call)
    hexed = text("a" * 100) + put(0) + b"".join(
        put(0) + named("_codecs.encode") + get(0) + text("hex") + pickle.TUPLE2 + call for _ in range(30)
    )  # fmt: skip
    yield "codec after codec", stream(hexed)
    yield (
        "a codec that grows",
        stream(named("_codecs.encode"), text("a" * 100_000), text("utf-32"), pickle.TUPLE2, call),
    )
    numbers = pickle.EMPTY_LIST + put(0) + pickle.MARK + b"K\1" * (LIMIT // 10) + pickle.APPENDS
    for name in ("builtins.set", "collections.Counter", "torch.Size", "collections.OrderedDict"):
        yield (
            f"{name} of one list, again and again",
            stream(numbers, *(named(name) + get(0) + one + call for _ in range(LIMIT // 50))),
        )
    table = (
        pickle.EMPTY_DICT
        + put(0)
        + pickle.MARK
        + b"".join(text(str(n)) + none for n in range(LIMIT // 50))
        + pickle.SETITEMS
    )
    made = named("collections.OrderedDict") + pickle.EMPTY_TUPLE + call
    yield "a state, again and again", stream(table, *(made + get(0) + pickle.BUILD for _ in range(LIMIT // 50)))
    row = pickle.EMPTY_LIST + put(0) + pickle.MARK + b"K\1" * (LIMIT // 10) + pickle.APPENDS + put(1)
    rows = pickle.EMPTY_LIST + pickle.MARK + b"".join(get(1) for _ in range(LIMIT // 10)) + pickle.APPENDS
    yield "a list of one list, a hundred thousand times", stream(row, rows)
    levels = pickle.EMPTY_LIST + put(0) + b"".join(
        pickle.EMPTY_LIST + pickle.MARK + get(n) * 20 + pickle.APPENDS + put(n + 1) for n in range(40)
    )  # fmt: skip
    yield "lists of lists", stream(levels)
    pairs = pickle.EMPTY_TUPLE + put(0) + b"".join(get(n) * 2 + pickle.TUPLE2 + put(n + 1) for n in range(60))
    yield "tuples of tuples", stream(pairs)
    yield "tuples of tuples as a key", stream(pickle.EMPTY_DICT, pairs, none, pickle.SETITEM)
    yield "tuples of tuples in a set", stream(named("builtins.set"), pairs, one, one, call)
    yield "tuples of tuples as a storage", stream(pairs, pickle.BINPERSID)
    yield "tables", stream(pickle.MARK, pickle.EMPTY_DICT * (LIMIT - 600), pickle.TUPLE)
    yield "sets", stream(pickle.MARK, pickle.EMPTY_SET * (LIMIT - 600), pickle.TUPLE)
    yield "marks", stream(pickle.MARK * (LIMIT - 600))
    yield "memos", stream(none, *(put(n) for n in range(LIMIT // 5 - 200)))
    yield "one tuple in the other", stream(none, one * (LIMIT - 600))
    yield "counters", stream(named("collections.Counter"), put(0), *((get(0) + b")R") for _ in range(LIMIT // 7 - 200)))
    yield "short names", stream(pickle.MARK, *(b"U\1a" for _ in range(LIMIT // 3 - 200)), pickle.TUPLE)
    yield "a name without an end", stream(pickle.GLOBAL + b"a" * (LIMIT - 700))
    yield "a text of four gigabytes", stream(op("BINUNICODE", 0xFFFFFFFF))
    storage = text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
    giant = pickle.MARK + storage + huge + pickle.TUPLE + pickle.BINPERSID
    yield "a storage of gigabytes", stream(giant)
    sizes = b"J\xff\xff\xff\x7f" + one + b"K\0" + one
    strewn = (
        named("torch._utils._rebuild_tensor_v2")
        + pickle.MARK
        + giant
        + b"K\0"
        + sizes
        + pickle.NEWFALSE
        + made
        + pickle.TUPLE
        + call
    )
    yield "a number seen as gigabytes", stream(pickle.EMPTY_DICT, text("a.weight"), strewn, pickle.SETITEM)
    yield "a set of a tensor's numbers", stream(named("builtins.set"), strewn, one, call)
    yield "a set of a storage's numbers", stream(named("builtins.set"), giant, one, call)
    yield "a state that is a tensor", stream(made, strewn, pickle.BUILD)
    for name in ("torch.Tensor", "torch.FloatTensor", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"):
        yield f"{name} of a number", stream(named(name), huge, one, call)
        yield f"a new {name} of a number", stream(named(name), huge, one, pickle.NEWOBJ)
    typed = named("torch._tensor._rebuild_from_type_v2") + pickle.MARK + named("builtins.bytearray")
    yield "a call of a call", stream(typed, named("torch.Tensor"), huge, one, pickle.EMPTY_DICT, pickle.TUPLE, call)
    legacy = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    yield (
        "a storage of gigabytes, without an archive",
        legacy + b"\x80\x02" + pickle.MARK + storage + huge + none + b"tQ.",
    )
    yield "a bytearray, without an archive", b"\x80\x02" + named("builtins.bytearray") + huge + one + call + b"."


# ------------------------------------------------------------------ all


def opened(folder: Path) -> None:
    from lora_merge.checkpoint import open_checkpoint

    for path in folder.iterdir():
        open_checkpoint(path)


def inputs() -> Iterator[tuple[str, Files, Callable[[Path], Any]]]:
    """(name, files, what to do with their folder)."""
    for name, content in pickles():
        yield f"pickle: {name}", {"x.pt": content}, opened


def peak() -> float:
    """The most memory since it was set back, in MB; 0 where the system does not say."""
    status = Path("/proc/self/status")
    line = (
        next((x for x in status.read_text().splitlines() if x.startswith("VmHWM")), "0 0") if status.exists() else "0 0"
    )
    return int(line.split()[1]) / 1024


def run(root: Path) -> None:
    """Every input; one line each."""
    import torch
    import torch._subclasses.fake_tensor

    import lora_merge
    from lora_merge.errors import MergeError

    torch.set_num_threads(1)
    assert lora_merge.__version__
    for number, (name, files, act) in enumerate(inputs()):
        folder = root / str(number)
        folder.mkdir()
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before, started = peak(), time.process_time()
        try:
            act(folder)
            told: Any = 0
        except MergeError as e:
            told = e.exit_code
        except Exception as e:  # noqa: BLE001  # one that is none of ours is what is looked for
            told = repr(e)[:300]
        spent = time.process_time() - started
        print(
            json.dumps([name, max(map(len, files.values())), told, round(spent, 2), round(peak() - before)]), flush=True
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
