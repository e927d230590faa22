"""What is uploaded: the files of a local copy, sent while they are written, and how what is at an address then is
compared with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path
from threading import Condition
from typing import IO, Final, Generic, TypeAlias, TypeVar

from ..addresses import Address, upload_address
from ..disk.files import open_regular
from ..disk.remote import ReadRange
from ..errors import UsageError, VerificationFailed
from ..paths import WEIGHT_SUFFIXES
from ..progress import STEP_SECONDS, Progress, counted
from .inputs import origin

SAMPLES: Final = 16  # ranges of each file that are read back
SAMPLE: Final = 64 << 10  # bytes of one
HEAD: Final = 1 << 20  # bytes at the beginning of a file, with its header, that are read back
PIECE: Final = 8 << 20  # bytes that are read at once
SEED: Final = 45

Sent = TypeVar("Sent")


def refuse_input(address: Address, inputs: Sequence[Path]) -> None:
    """Raise UsageError if an output would replace an object that is read. A commit of the hub stays what it is."""
    for path in inputs:
        source = origin(path)
        if source is not None and source.scheme == address.scheme and f"{source.name}/".startswith(f"{address.name}/"):
            raise UsageError("the output would replace the base, an adapter or another file that is read",
                             str(address), "choose another name")  # fmt: skip


def address_of(target: Path) -> Address:
    """Return the address of an output whose local copy has a path."""
    address = upload_address(target)
    assert address is not None, "the path is that of a local copy"
    return address


FileSource: TypeAlias = Path | bytes
"""A file of a local copy, or the content of a card."""


def files_of(copy: Path) -> list[tuple[str, Path]]:
    """Return the files of a local copy in the order of their upload: name in the output ("" for a single file), path.

    Weights are first, then other files, then indexes, by which programs find the weights.
    """
    if not copy.is_dir():
        return [("", copy)]
    names = sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if not p.is_dir())

    def rank(name: str) -> int:
        return 2 if name.endswith(".index.json") else 0 if Path(name).suffix.lower() in WEIGHT_SUFFIXES else 1

    return [(name, copy / name) for name in sorted(names, key=rank)]


def size_of(source: FileSource) -> int:
    """Return the bytes of a file or of a card."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _opened(source: FileSource) -> IO[bytes]:
    return BytesIO(source) if isinstance(source, bytes) else open_regular(source)


class GrowingFile:
    """A file of a local copy, of which more and more of the first bytes are final."""

    def __init__(self, source: FileSource, size: int, end: int = 0) -> None:
        self.source, self.size = source, size
        self._end, self._stopped, self._changed = end, False, Condition()

    def grow(self, end: int) -> None:
        """Take note that the bytes before `end` are final."""
        with self._changed:
            self._end = max(self._end, end)
            self._changed.notify_all()

    def stop(self) -> None:
        """End `pieces`: no more bytes will come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in their order; waits until they are final. InterruptedError after `stop`."""
        at = 0
        with _opened(self.source) as f:
            while data := f.read(self._final_bytes(at)):  # some file systems return fewer at once
                yield data
                at += len(data)

    def _final_bytes(self, at: int) -> int:
        """Wait until the next piece is final; return its size."""
        count = min(PIECE, self.size - at)
        with self._changed:
            self._changed.wait_for(lambda: self._end >= at + count or self._stopped)
            if self._stopped:
                raise InterruptedError("the upload was stopped")
        return count


class Sending(Generic[Sent]):
    """Files of an output that a thread sends one after another, as their bytes become final."""

    def __init__(self, send: Callable[[str, GrowingFile], Sent]) -> None:
        """`send`: sends a file, counts its bytes with `count`, and returns what there is to do with it at the end."""
        self._send = send
        self._sent = 0
        self._files: dict[str, GrowingFile] = {}
        self._results: dict[str, Future[Sent]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def ready(self, name: str, source: FileSource, size: int, end: int) -> None:
        """Send a file up to a byte; raises the error of one that was to be sent before."""
        if name not in self._files:
            self._files[name] = GrowingFile(source, size)
            self._results[name] = self._pool.submit(self._send, name, self._files[name])
        self._files[name].grow(end)
        for result in self._results.values():
            if result.done():
                result.result()

    def count(self, sent: int) -> None:
        """Take note of bytes that were sent."""
        self._sent += sent

    def finish(self, files: Mapping[str, FileSource], address: Address, progress: Progress) -> list[Sent]:
        """Send all files whole, and wait for that; return the results in the order of the files."""
        sizes = {name: size_of(source) for name, source in files.items()}
        advance = counted(progress, "upload", str(address), sum(sizes.values()))
        for name, source in files.items():
            self.ready(name, source, sizes[name], sizes[name])
        reported, results = 0, list[Sent]()
        for name in files:
            while True:
                waited = wait([self._results[name]], STEP_SECONDS)
                advance((now := self._sent) - reported)
                reported = now
                if waited.done:
                    results.append(self._results[name].result())
                    break
        self._pool.shutdown(wait=False)
        return results

    def stop(self) -> Iterator[Sent]:
        """Send no more; return the results of the files that were sent whole. The first waits for the file under
        way."""
        for file in self._files.values():
            file.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        started = [result for result in self._results.values() if not result.cancelled()]
        return (result.result() for result in started if result.exception() is None)


def compare(read: ReadRange, source: FileSource, where: Address, *, whole: bool = False) -> None:
    """Compare an uploaded file with its local copy: the header and ranges with a fixed seed, or the `whole` of it.

    VerificationFailed if any byte differs.
    """
    size, draw = size_of(source), random.Random(SEED)
    if whole or size <= HEAD + SAMPLES * SAMPLE:
        ranges = [(at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    else:
        starts = sorted({draw.randrange(HEAD, size - SAMPLE) for _ in range(SAMPLES)} | {size - SAMPLE})
        ranges = [(0, HEAD), *((at, SAMPLE) for at in starts)]
    with _opened(source) as f:
        for at, length in ranges:
            f.seek(at)
            if f.read(length) != read(at, length):
                raise differs(where, f"bytes from {at} on")


def differs(where: Address, what: str) -> VerificationFailed:
    """Return the error for an upload that is not what was sent."""
    return VerificationFailed(f"the uploaded file is not the one that was sent: {what} differ", str(where),
                              "run again; if it happens again, ask the operator of the store")  # fmt: skip
