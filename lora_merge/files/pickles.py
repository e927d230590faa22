"""Reads `.pt .pth .bin .ckpt` files as headers: the byte range of each tensor, without loading it.

`weights_only=True` is always set: torch's unpickler then builds tensors and containers and calls only the functions on
its list. It runs under FakeTensorMode, so storages get an offset in the zip archive and no memory. Tensors whose bytes
are not consecutive in the file (transposed tensors, files from before torch 1.6) are made in memory; together they
take at most the size of the file.
"""

from __future__ import annotations

import logging
import mmap
import pickle
import re
import struct
import threading
import warnings
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..disk.files import FileState, Header, open_regular
from ..disk.reader import read_bytes
from ..disk.remote import complete
from ..dtypes import DTYPE_ROWS, ITEM_BITS, Memory, StoredTensor
from ..errors import InputError, as_resource_error
from ..text import Note, listed, quoted
from .file_signatures import BY_ITS_PACKAGE, CLONEOFSIMO, are_factors, foreign, instead, nested
from .pickle_scan import NotRun, scan

if TYPE_CHECKING:
    from torch import Tensor

STATE_DICT_KEYS: Final = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "params_ema",
    "params",
    "ema",
    "net",
    "weights",
    *("lora_state_dict", "adapter_state_dict", "lora", "adapter"),
)
"""Keys under which training programs store a state dict, the preferred one first."""

UNPICKLING_ERRORS: Final = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, EOFError, LookupError, ValueError,
    AttributeError, TypeError, AssertionError, ArithmeticError, MemoryError,
    OSError, NotImplementedError, BufferError, Warning,
)  # fmt: skip
"""Errors that the unpickler raises for malformed input: a damaged stream can break any of its steps."""

TELLS_PLACES: Final = (2, 7)
"""The first torch that reports the place of a storage in the archive. Up to 2.5, `weights_only` can run code
(CVE-2025-32434)."""

PICKLES: Final = 5
"""Pickles at the start of a file without an archive: magic number, version, machine, content, names of storages."""

NUMBER_NAMES: Final = re.compile(r"(.+)[._](?:alpha|scale)")
"""Names of numbers that scale a module; some programs store them as Python numbers next to its tensors."""

FORMAT_NAMES: Final = {row.library: name for name, row in DTYPE_ROWS.items() if row.bits >= 8}
"""torch's name of a dtype → its name in .safetensors."""


@dataclass
class _Loading:
    """One file being read."""

    path: Path
    size: int
    records: Mapping[int, int] | None  # start of a record → its size in bytes; None without an archive
    memory: int = 0  # bytes of tensors made so far


def read_pickled(path: Path) -> Header:
    """Return the tensors of a torch file; InputError for code in it, damage, or tensors that cannot be stored."""
    import torch  # outside the try: an error here is not the fault of the file

    if tuple(map(int, torch.__version__.split(".")[:2])) < TELLS_PLACES:
        raise InputError(f"torch {torch.__version__} is too old to read torch files safely", str(path),
                         "update torch to 2.7 or later, or take the .safetensors version of this file")  # fmt: skip
    try:
        return _read(path)
    except UNPICKLING_ERRORS as e:  # a damaged file can make objects that fail when they are used
        raise as_resource_error(e) or _damaged(path, _reason(e)) from e


def _read(path: Path) -> Header:
    complete(path)  # torch opens it by its path
    with open_regular(path) as f:
        state = FileState.of(f.fileno())
        zipped = f.read(2) == b"PK"
    loading = _Loading(path, state.size, _records(path) if zipped else None)
    table, notes = _state_dict(_load(path, fake=True), path)
    values = dict(_tensors(table, path))
    if loading.records is None:
        storages = [v.untyped_storage() for v in values.values()]  # tensors that share a storage share this object
        if sum({id(s): s.nbytes() for s in storages}.values()) > state.size:
            raise _damaged(path, "it describes more data than it holds")
        values = dict(_tensors(_state_dict(_load(path, fake=False), path)[0], path))
    infos = [*(_info(loading, n, v) for n, v in values.items()), *_numbers(table, sorted(values), loading)]
    infos.sort(key=lambda t: (1, 0, 0) if isinstance(t.source, Memory) else (0, t.offset, t.nbytes))
    tensors = {t.name: t for t in infos}
    if not tensors and (what := foreign(name for name in nested(table) if "." in name)):
        raise InputError(f"not a state dict but {what}", str(path), instead(what))
    left = [f"{quoted(str(n))} ({type(v).__name__})" for n, v in dict.items(table) if n not in tensors]
    if left:
        notes = (*notes, Note(f"{path.name}: left out entries that are not tensors: {listed(left)}"))
    return Header(tensors, {}, 0, state, notes)


def _reason(e: BaseException) -> str:
    """Return the reason for the user. Messages of Python, zipfile and torch name their internals; --debug has them."""
    if isinstance(e, NotRun):
        return str(e)
    archive = isinstance(e, zipfile.BadZipFile) or "PytorchStreamReader" in str(e)
    return f"its {'archive' if archive else 'pickle'} is cut short or damaged"


def _load(path: Path, *, fake: bool) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        if fake:  # the first of two loads
            _scan(path)
        # torch gets an open file: it would choose another loader by the suffix of a path.
        with path.open("rb") as f, _silent(), FakeTensorMode() if fake else nullcontext():
            return torch.load(f, map_location="cpu", weights_only=True)
    except UNPICKLING_ERRORS as e:
        match = re.search(r"(?:GLOBAL|global) (\S+)", str(e))
        if isinstance(e, pickle.UnpicklingError) and match:
            raise InputError(
                "the file wants to run code on loading; it was not run",
                f"{path}: it names {match[1].rstrip('.,')}",
                "get the .safetensors version of this model",
            ) from e
        if "quantized" in str(e):  # FakeTensorMode has no quantised tensors
            what = "the file contains quantised tensors: their values are not the weights"
            raise InputError(what, str(path), "take the unquantised version of it, best as .safetensors") from e
        raise as_resource_error(e) or _damaged(path, _reason(e)) from e


def _scan(path: Path) -> None:
    """Raise NotRun, or another of UNPICKLING_ERRORS, for a file whose pickles must not be loaded.

    An archive holds one pickle; a file from before torch 1.6 begins with five.
    """
    import torch

    with path.open("rb") as f:
        if f.read(2) == b"PK":
            f.seek(0)
            scan(torch._C.PyTorchFileReader(f).get_record("data.pkl"))
            return
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            at, most = 0, len(whole)
            if whole[257:262] == b"ustar":
                raise NotRun("a file of a torch before 0.1.10, which is a tar archive; save it again with torch.save")
            for _ in range(PICKLES):
                at, numbers = scan(whole, at)
                if numbers > most:
                    raise NotRun("it describes more data than it holds")


@contextmanager
def _silent() -> Iterator[None]:
    """Drop the tracebacks that FakeTensorMode logs in this thread, and torch's warning about foreign pickles.

    The typed error says more than both.
    """
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            yield
    finally:
        logger.removeFilter(keep)


def _records(path: Path) -> Mapping[int, int]:
    """Return start of the data → its size in bytes, for every record of the archive."""
    records = {}
    with zipfile.ZipFile(path) as z, open_regular(path) as f:
        _refuse_other_archives(path, z)
        for entry in z.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise InputError(  # torch.save never compresses; a small record could unpack to any size
                    "a torch file whose records are compressed", str(path), "save it again with torch.save"
                )
            f.seek(entry.header_offset + 26)  # in the local header: the lengths of the name and the extra field
            name, extra = struct.unpack("<HH", f.read(4))
            records[entry.header_offset + 30 + name + extra] = entry.file_size
            if entry.filename.endswith("byteorder") and (entry.file_size > 16 or z.read(entry) != b"little"):
                raise InputError(  # torch 2.13 crashes on these under FakeTensorMode
                    "a torch file from a big-endian machine", str(path), "save it again on a usual machine"
                )
    return records


def _refuse_other_archives(path: Path, z: zipfile.ZipFile) -> None:
    names = z.namelist()
    if any(n.endswith("/constants.pkl") for n in names) and any("/code/" in n for n in names):
        raise InputError("a TorchScript program, not a checkpoint", str(path), "give the weights as .safetensors")
    if not any(n.endswith("/data.pkl") for n in names):
        fix = "unpack it first" if any(n.endswith(".safetensors") for n in names) else "give a checkpoint"
        raise InputError("a zip archive that torch.save did not write", str(path), fix)


def _state_dict(loaded: Any, path: Path) -> tuple[dict[Any, Any], tuple[Note, ...]]:
    """Return the dict that holds the tensors, without its wrappers, and notes for the user."""
    unwrapped: list[str] = []
    while isinstance(loaded, dict) and len(unwrapped) < len(STATE_DICT_KEYS):
        inner = next(
            (w for w in STATE_DICT_KEYS if isinstance(dict.get(loaded, w), dict) and dict.get(loaded, w)), None
        )
        if inner is None:
            break
        loaded = dict.get(loaded, inner)
        unwrapped.append(inner)
    if isinstance(loaded, list) and are_factors(loaded):
        raise InputError(
            f"not a state dict but {CLONEOFSIMO}", f"{path}: {len(loaded)} tensors in a list", BY_ITS_PACKAGE
        )
    if not isinstance(loaded, dict):
        raise InputError(
            "not a state dict",
            f"{path}: it holds a {type(loaded).__name__}",
            "save the model's state_dict(), best as .safetensors",
        )
    return loaded, ((Note(f"{path.name}: weights were under {'.'.join(unwrapped)!r}"),) if unwrapped else ())


def _tensors(table: dict[Any, Any], path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor; InputError for a tensor that a .safetensors file cannot hold."""
    import torch

    for name, value in dict.items(table):  # not table.items: a file can give its dicts attributes
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or value.is_quantized or dtype not in FORMAT_NAMES:
            layout = str(value.layout).removeprefix("torch.")
            raise InputError(
                f"a tensor that .safetensors cannot hold: {layout} {dtype}",
                f"{path}: {quoted(name)}",
                "convert the model",
            )
        if name == "__metadata__" or not name.isprintable():
            raise InputError("a tensor name that cannot be stored", f"{path}: {quoted(name)}", "rename it")
        yield name, value


def _numbers(table: dict[Any, Any], tensors: Sequence[str], loading: _Loading) -> Iterator[StoredTensor]:
    """Yield the Python numbers that scale a module of these tensors (sorted names), such as α, as 0-d doubles."""
    for name, value in dict.items(table):
        match = NUMBER_NAMES.fullmatch(name) if isinstance(name, str) and type(value) in (int, float) else None
        if match is None or not name.isprintable():
            continue
        position = bisect_left(tensors, match[1])
        if position < len(tensors) and tensors[position].startswith(match[1]):
            source = Memory.of(loading.path, memoryview(struct.pack("<d", value)))
            yield StoredTensor(name, "F64", (), source, 0, 8)


def _info(loading: _Loading, name: str, value: Tensor) -> StoredTensor:
    """Return the byte range of one tensor; if its bytes are not consecutive in the file, make them in memory."""
    dtype, item = FORMAT_NAMES[str(value.dtype).removeprefix("torch.")], value.element_size()
    shape, nbytes = tuple(value.shape), value.numel() * value.element_size()
    assert ITEM_BITS[dtype] == 8 * item, "the two libraries agree on dtypes"
    storage = value.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if loading.records is not None and nbytes:
        backwards = value.storage_offset() < 0 or min(value.stride(), default=0) < 0
        span = item * (
            value.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(shape, value.stride(), strict=True))
        )
        if (
            start is None or span > loading.records.get(start, -1) or backwards
        ):  # storage.nbytes() is wrong in torch 2.7
            raise _damaged(loading.path, f"the bytes of {quoted(name)} are not in it")
        if value.is_contiguous() and not value.is_conj() and not value.is_neg():
            offset = start + item * value.storage_offset()
            return StoredTensor(name, dtype, shape, loading.path, offset, nbytes)
    loading.memory += nbytes
    if loading.memory > loading.size:
        raise _damaged(loading.path, "it describes more data than it holds")
    data = raw_bytes(value) if loading.records is None else _gather(loading, value, start)
    return StoredTensor(name, dtype, shape, Memory.of(loading.path, data), 0, nbytes)


def _gather(loading: _Loading, value: Tensor, start: int | None) -> memoryview:
    """Return the bytes of a tensor that is not contiguous; its whole storage is read from the archive."""
    import torch

    if not value.numel() or start is None or loading.records is None:
        return memoryview(b"")
    nbytes = loading.records[start]
    raw = bytearray(read_bytes(StoredTensor("", "U8", (nbytes,), loading.path, start, nbytes)))
    stored = torch.frombuffer(raw, dtype=value.dtype)
    real = stored.as_strided(value.shape, value.stride(), value.storage_offset())
    return raw_bytes(real.conj() if value.is_conj() else real.neg() if value.is_neg() else real)


def raw_bytes(value: Tensor) -> memoryview:
    """Return the elements in order, as bytes; a contiguous tensor shares its memory with them."""
    import torch

    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return memoryview(b"")
    flat: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _damaged(path: Path, why: str) -> InputError:
    return InputError("not a valid torch file", f"{path}: {why}", "download it again, best as .safetensors")
