"""The seam between addresses and outputs: every other room writes to local paths alone.

`stage` returns the path of a local copy for an address. The output is written and proven there; `disk/publish.py` then
hands it to the sink of its address, which uploads it and reads what it has uploaded, and the local copy is removed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ..addresses import HUB, UPLOADS, Address, upload_address, upload_path
from ..disk.publish import remove_stale
from ..disk.uploads import Sink
from ..disk.volumes import free_bytes
from ..errors import InputError, UsageError
from ..text import size as spoken_size
from .contents import is_offline, switches
from .inputs import forget, locate
from .store import Store


def stage(address: Address) -> Path:
    """Return the path of the local copy of an output. UsageError if no request can be made.

    It is in the folder of `--cache` or `$LORA_MERGE_CACHE`, or else in the user's cache folder or the temporary one,
    whichever has more space.
    """
    if is_offline():
        raise UsageError("network access is switched off, but the output is on another machine", str(address),
                         f"unset {switches()}, or write a file here with `-o NAME`")  # fmt: skip
    return upload_path(address, outbox(Store.of_user()))


def on_this_machine(output: Path) -> Path:
    """Return the path of an output as this machine has it, for one that another machine has planned."""
    address = upload_address(output)
    return output if address is None else stage(address)


def sink_at(path: Path) -> Sink | None:
    """Return the sink of the local copy at a path; None for an output of this machine."""
    address = upload_address(path)
    if address is None:
        return None
    if address.scheme == HUB:
        from .hub_upload import HubSink

        return HubSink()
    from .object_upload import ObjectSink

    return ObjectSink()


@lru_cache
def outbox(cache: Store) -> Path:
    """Return the folder of local copies; what killed runs have left there is removed."""
    import tempfile

    folders = [cache.root] if cache.named else [cache.root, Path(tempfile.gettempdir())]
    folder = max(folders, key=free_bytes)
    for path in sorted((folder / UPLOADS).rglob("*"), reverse=True):  # the innermost first
        if path.is_dir() and not any(part.endswith(".part") for part in path.parts):
            with suppress(OSError):  # another run writes there
                remove_stale(path)
                path.rmdir()
    return folder


def announcement(output: Path, size: int | None = None) -> str:
    """Return where the local copy of an output is, for people; "" for an output of this machine."""
    address = upload_address(output)
    if address is None:
        return ""
    folder = next(p for p in output.parents if p.name == UPLOADS)
    what = "the output is" if size is None else f"{spoken_size(size)} are"
    free = spoken_size(free_bytes(folder))
    return f"{what} written into {folder.parent} first, with {free} free, and uploaded from there to {address}"


def present(output: Path) -> Path | None:
    """Return the path of placeholders for what is at an output's address now; None if nothing is there, and for an
    output of this machine."""
    address = upload_address(output)
    if address is None:
        return None
    forget(address)
    try:
        return locate(str(address))
    except InputError:
        return None
