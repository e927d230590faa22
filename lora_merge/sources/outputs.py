"""The seam between addresses and outputs: every other room writes to local paths alone.

`stage` returns the path of a draft for an address. The draft is written and proven there; `disk/publish.py` then hands
it to the sink of its address, which uploads it and reads what it has uploaded, and the draft is removed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final, TypeAlias

from ..addresses import HUB, OBJECTS, UPLOADS, Address, upload_address, upload_path
from ..disk.files import open_regular
from ..disk.publish import remove_stale
from ..disk.remote import ReadRange
from ..disk.uploads import Sink
from ..errors import InputError, UsageError, VerificationFailed
from ..paths import WEIGHTS
from ..text import size as spoken_size
from .contents import is_offline, switches
from .inputs import forget, locate, origin
from .store import store


def _hub() -> Sink:
    from .hub_upload import HubSink

    return HubSink()


def _objects() -> Sink:
    from .object_upload import ObjectSink

    return ObjectSink()


SINKS: Final[Mapping[str, Callable[[], Sink]]] = MappingProxyType(
    {HUB: _hub, **dict.fromkeys(OBJECTS, _objects)}
)  # fmt: skip
"""Scheme → the sink that takes outputs with its addresses."""

SAMPLES: Final = 16  # ranges of each file that are read back
SAMPLE: Final = 64 << 10  # bytes of one
HEAD: Final = 1 << 20  # bytes at the beginning of a file, with its header, that are read back
PIECE: Final = 8 << 20  # bytes that are read at once
SEED: Final = 45


def stage(address: Address) -> Path:
    """Return the path of the draft of an output. UsageError if no request can be made.

    The draft is in `$LORA_MERGE_CACHE`, or else in the user's cache folder or the temporary one, whichever has more
    space.
    """
    if is_offline():
        raise UsageError("requests are switched off, and the output is on another machine", str(address),
                         f"unset {switches()}, or write a file here with -o NAME")  # fmt: skip
    return upload_path(address, drafts(store()))


def sink_at(path: Path) -> Sink | None:
    """Return the sink of the draft at a path; None for an output of this machine."""
    address = upload_address(path)
    return None if address is None else SINKS[address.scheme]()


@lru_cache
def drafts(cache: Path) -> Path:
    """Return the folder of drafts; those that killed runs have left there are removed."""
    folders = [cache] if os.environ.get("LORA_MERGE_CACHE") else [cache, Path(tempfile.gettempdir())]
    folder = max(folders, key=_free)
    for path in sorted((folder / UPLOADS).rglob("*"), reverse=True):  # the innermost first
        if path.is_dir() and not path.name.endswith(".part"):
            with suppress(OSError):  # another run writes there
                remove_stale(path)
                path.rmdir()
    return folder


def _free(folder: Path) -> int:
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def announcement(output: Path, size: int | None = None) -> str:
    """Return where the draft of an output is, for people; "" for an output of this machine."""
    address = upload_address(output)
    if address is None:
        return ""
    folder = next(p for p in output.parents if p.name == UPLOADS)
    what = "the output is" if size is None else f"{spoken_size(size)} are"
    return (f"{what} written into {folder.parent} first, where {spoken_size(_free(folder))} are free, and uploaded to "
            f"{address} from there")  # fmt: skip


def present(output: Path) -> Path | None:
    """Return the path of placeholders for what is at an output's address now; None if nothing is there."""
    address = upload_address(output)
    if address is None:
        return None
    forget(address)
    try:
        return locate(str(address))
    except InputError:
        return None


def refuse_input(address: Address, inputs: Sequence[Path]) -> None:
    """Raise UsageError if an output would replace an object that is read. A commit of the hub stays what it is."""
    for path in inputs:
        source = origin(path)
        if source is not None and source.scheme == address.scheme and f"{source.name}/".startswith(f"{address.name}/"):
            raise UsageError("the output would replace the base, an adapter or another file that is read",
                             str(address), "choose another name with -o")  # fmt: skip


Source: TypeAlias = Path | bytes
"""A file of a draft, or the content of a card."""


def files_of(draft: Path) -> list[tuple[str, Path]]:
    """Return the files of a draft in the order of their upload: name inside the output, "" for a single file, and path.

    Weights are first, then other files, then indexes, by which programs find the weights.
    """
    if not draft.is_dir():
        return [("", draft)]
    names = sorted(p.relative_to(draft).as_posix() for p in draft.rglob("*") if not p.is_dir())

    def rank(name: str) -> int:
        return 2 if name.endswith(".index.json") else 0 if Path(name).suffix.lower() in WEIGHTS else 1

    return [(name, draft / name) for name in sorted(names, key=rank)]


def size_of(source: Source) -> int:
    """Return the bytes of a file or of a card."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _opened(source: Source) -> IO[bytes]:
    return BytesIO(source) if isinstance(source, bytes) else open_regular(source)


def pieces(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a file or of a card."""
    with _opened(source) as f:
        while data := f.read(PIECE):
            yield data


def compare(read: ReadRange, source: Source, where: Address, *, whole: bool = False) -> None:
    """Compare an uploaded file with its draft: the header and ranges with a fixed seed, or the `whole` of it.

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
                              "run again; if it happens again, ask those who run the store")  # fmt: skip
