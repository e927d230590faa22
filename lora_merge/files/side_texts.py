"""The texts of the configurations next to an adapter, which may state what its tensors do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ..disk.files import open_regular, unreadable
from ..errors import InputError
from .checkpoint import Index
from .folder_layouts import FORMAT_SUFFIXES, entries

TOML: Final = ".toml"
TEXT_ENDINGS: Final = (".json", ".yaml", ".yml", TOML)
LONGEST_CONFIGURATION: Final = 1 << 18  # bytes of a configuration; tokenizers and indexes of shards are longer
MOST_TEXT_BYTES: Final = 1 << 25  # bytes of a file that is searched for words
MOST_TEXTS: Final = 64  # files of one folder


class SideText(NamedTuple):
    """One file next to an adapter."""

    path: Path
    text: str
    certain: bool  # whether it belongs to this adapter: its folder holds no other adapter
    unread: str = ""  # why its entries are not read; "" for one that is


def side_texts(index: Index) -> Iterator[SideText]:
    """Yield the files that may describe an adapter: all of its folder, without those named after another file there."""
    if not index.path.exists():  # in memory
        return
    whole = index.path.is_dir()
    files = list(entries(index.path if whole else index.path.parent))
    tensors = {p.name for p in files if p.suffix.lstrip(".") in FORMAT_SUFFIXES} - {f.name for f in index.files}
    mine = tuple(f.stem for f in index.files)
    others = {Path(name).stem for name in tensors}
    read = 0
    for path in files:
        if not path.name.endswith(TEXT_ENDINGS) or path.is_dir() or path.name.endswith(".index.json"):
            continue
        named = path.name.startswith(mine)
        parts = path.name.split(".")
        if not named and any(".".join(parts[:n]) in others for n in range(1, len(parts))):
            continue
        read += 1
        if read > MOST_TEXTS:
            raise InputError(f"more than {MOST_TEXTS} configurations are next to the adapter", str(path.parent),
                             "move the adapter into a folder of its own")  # fmt: skip
        if (text := _text(path)) is not None:
            long = f"it is longer than {LONGEST_CONFIGURATION >> 10} KiB" if len(text) > LONGEST_CONFIGURATION else ""
            yield SideText(
                path, text, named or whole or not others, long or "TOML is not read" * path.name.endswith(TOML)
            )


def _text(path: Path) -> str | None:
    """Return the text of a file; None for one that is too large or no text."""
    try:
        with open_regular(path) as f:
            raw = f.read(MOST_TEXT_BYTES + 1)
    except OSError as e:
        raise unreadable(path, e) from e
    try:
        return None if len(raw) > MOST_TEXT_BYTES else raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
