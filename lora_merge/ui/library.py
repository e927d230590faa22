"""The library: models and adapters below the folders that the user named, and the names that outputs may get.

Nothing outside of these folders is read or written: a path that leads out of them, also by a link, is refused.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .. import MergeError
from ..errors import InputError, ResourceError, UsageError
from ..paths import ENDINGS, expand, real_path
from ..text import size

BASE: Final = "base"
ADAPTER: Final = "adapter"

LAYOUTS: Final = (
    # folder of a program          kind
    ("models/checkpoints",         BASE),  # ComfyUI
    ("models/diffusion_models",    BASE),
    ("models/unet",                BASE),
    ("models/text_encoders",       BASE),
    ("models/clip",                BASE),
    ("models/loras",               ADAPTER),
    ("models/Stable-diffusion",    BASE),  # A1111, Forge
    ("models/text_encoder",        BASE),
    ("models/Lora",                ADAPTER),
    ("models/LyCORIS",             ADAPTER),
)  # fmt: skip
"""Folders of ComfyUI, of A1111 and of Forge. A named folder with one of them is listed by these folders alone."""

HUB: Final = "models--*/snapshots/*"
"""The revisions in a cache of huggingface_hub."""

MODEL_FILES: Final = {"adapter_config.json": ADAPTER, "model_index.json": BASE, "config.json": BASE}
"""File by which a folder is one model or adapter → its kind."""

PEEKED: Final = (".safetensors", ".sft", ".gguf")
"""Endings of files whose header shows their kind at once; others are offered as both."""

DROPPED: Final = "dropped"
"""The folder for uploaded adapters, below that of the outputs."""

MOST: Final = 20_000  # entries of a library
DEEPEST: Final = 8  # folders below a named one
LARGEST: Final = 16 << 30  # bytes of an upload; the largest adapters have 5 GiB


@dataclass(frozen=True)
class LibraryFile:
    """One model or adapter of the library."""

    path: str
    group: str
    """The folder that it is listed with."""
    label: str
    """Its path below that folder."""
    bytes: int
    kinds: tuple[str, ...]


class Library:
    """What is below the named folders. Safe from several threads."""

    def __init__(self, folders: Sequence[str | Path], output: str | Path | None = None) -> None:
        """Raise InputError for a folder that is not there. `output`: where outputs go; by default the first folder."""
        self.folders = [*map(_folder, folders)]
        self.output = self.folders[0] if output is None else _folder(output)
        self._real = [real_path(folder) for folder in (*self.folders, self.output)]
        self._kinds: dict[tuple[str, int, int], tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def entries(self) -> list[LibraryFile]:
        """Return all models and adapters, by label."""
        entries: dict[str, LibraryFile] = {}
        for folder in dict.fromkeys((*self.folders, self.output)):
            for path, at, kinds in self._listed(folder):
                if len(entries) < MOST and self._inside(path):
                    entries.setdefault(
                        str(path), LibraryFile(str(path), *_names(path, at, folder), _bytes(path), kinds)
                    )
        return sorted(entries.values(), key=lambda entry: (entry.group, entry.label.casefold()))

    def to_dict(self) -> dict[str, Any]:
        """Return the library as plain data, for the page."""
        return {"entries": [asdict(entry) for entry in self.entries()], "output": str(self.output)}

    def places(self) -> list[Path]:
        """Return the folders that have the models and adapters: those of a program in place of the program's folder."""
        return [place for folder in self.folders for place in _known(folder) or [folder]]

    def path(self, text: str) -> Path:
        """Return the path of an input; UsageError if it, or a link in it, leads out of the named folders."""
        path = expand(text)
        if not self._inside(path):
            raise UsageError("the path is outside the page's folders", text[:300],
                             f"start the page with the folder that it is in, {path.parent}"
                             )  # fmt: skip
        for file in _below(path) if path.is_dir() else ():
            if not self._inside(file):
                raise UsageError("a link leads out of the page's folders", str(file),
                                 "put the file in place of the link, or name its folder too")  # fmt: skip
        return path

    def target(self, name: str) -> Path:
        """Return the path of an output; UsageError for a name that leads out of the folder of outputs."""
        name = name.strip()
        path = Path(os.path.normpath(self.output / name)) if "\0" not in name else self.output
        real = real_path(path)
        if path == self.output or not (path.is_relative_to(self.output) and real.is_relative_to(self._real[-1])):
            raise UsageError("the output is outside the output folder", name[:300] or "no name is given",
                             f"write a name such as merged.safetensors; outputs go to {self.output}")  # fmt: skip
        return path

    def find(self, name: str, size: int) -> LibraryFile | None:
        """Return the file with a name and a size in bytes; None if the library has none."""
        same = (e for e in self.entries() if Path(e.path).name == name and e.bytes == size)
        return next(same, None)

    def upload(self, name: str, length: int) -> DroppedAdapter:
        """Begin to write a dropped adapter; UsageError for its name or size, ResourceError if the disk is full."""
        if Path(name).suffix.lower() not in (*ENDINGS, ".sft") or name != Path(name.replace("\\", "/")).name:
            raise UsageError(
                "only files with weights can be dropped", name[:300], f"choose a file with one of {', '.join(ENDINGS)}"
            )
        if not 0 < length <= LARGEST:
            raise UsageError(f"the file has {size(length)}", name[:300],
                             "move it into a folder of this page, and choose it there")  # fmt: skip
        free = shutil.disk_usage(self.output).free
        if free < length:
            raise ResourceError("the disk is too full for the file", f"{size(length)} of {size(free)} free",
                                f"delete files on the disk of {self.output}")  # fmt: skip
        return DroppedAdapter(self.target(f"{DROPPED}/{name}"), length)

    def _inside(self, path: Path) -> bool:
        """Return whether a path, and what it links to, is below a named folder."""
        named = any(path.is_relative_to(folder) for folder in (*self.folders, self.output))
        real = real_path(path)
        return named and any(real.is_relative_to(folder) for folder in self._real)

    def _listed(self, folder: Path) -> Iterator[tuple[Path, Path, tuple[str, ...]]]:
        """Yield models and adapters below a folder, each with the folder that it is listed with, and the kinds as which
        it is offered."""
        known = _known(folder)
        hub = [*folder.glob(HUB)] or [*folder.glob(f"hub/{HUB}")]
        listed: dict[Path, tuple[str, ...]] = {**known} or dict.fromkeys(hub or [folder], ())
        if known and folder == self.output:
            listed |= {folder / DROPPED: (), folder: ()}
        for at, kinds in listed.items():
            deepest = 0 if known and at == folder else DEEPEST  # outputs that got names outside of those folders
            for path, kind in _models(at, deepest):
                yield path, at, kinds or ((kind,) if kind else self._kind(path))

    def _kind(self, path: Path) -> tuple[str, ...]:
        """Return the kinds as which a file is offered, from its header; () if it cannot be read."""
        if path.suffix.lower() not in PEEKED:
            return BASE, ADAPTER
        with suppress(MergeError, OSError):
            state = path.stat()
            key = str(path), state.st_size, state.st_mtime_ns
            with self._lock:
                known = self._kinds.get(key)
            if known is None:
                known = (ADAPTER if _is_adapter(path) else BASE,)
                with self._lock:
                    self._kinds[key] = known
            return known
        return ()


class DroppedAdapter:
    """A dropped adapter on its way to the disk: complete under its name, or not there."""

    def __init__(self, target: Path, length: int) -> None:
        self.target, self.length = target, length

    def receive(self, read: Callable[[], bytes]) -> Path:
        """Write the bytes that a function gives, until it gives none, and return the path; InputError for more or fewer
        bytes than were announced, or if they are no adapter."""
        from ..disk.publish import remove, replacing

        with replacing(self.target) as part:
            left = self.length
            with part.open("wb") as file:
                while left >= 0 and (some := read()):
                    left -= file.write(some)
            if left:
                raise InputError("the file did not arrive as a whole", self.target.name, "choose the file again")
        try:
            if not _is_adapter(self.target):
                raise InputError("only adapters can be dropped, and this is a model", self.target.name,
                                 "move it into a folder of this page, and choose it there")  # fmt: skip
        except MergeError:
            remove(self.target)
            raise
        return self.target


def _is_adapter(path: Path) -> bool:
    """Return whether a file with weights is an adapter, from its header."""
    from ..adapters.modules import is_adapter  # the server begins without them
    from ..files.checkpoint import open_checkpoint

    return is_adapter(open_checkpoint(path))


def _names(path: Path, at: Path, folder: Path) -> tuple[str, str]:
    """Return the group and the label of a model that is listed with the folder `at`."""
    label = path.relative_to(at).as_posix()
    if at.parent.name == "snapshots":
        name = at.parent.parent.name.removeprefix("models--").replace("--", "/")
        return folder.name, f"{name}@{at.name[:7]}" + f"/{label}" * (path != at)
    return at.relative_to(folder.parent).as_posix(), label


def _known(folder: Path) -> dict[Path, tuple[str, ...]]:
    """Return the folders of a program that a named folder has, with their kinds."""
    root = folder.parent if folder.name == "models" else folder
    return {root / name: (kind,) for name, kind in LAYOUTS if (root / name).is_dir()}


def _folder(path: str | Path) -> Path:
    folder = expand(path)
    if not folder.is_dir():
        raise InputError("folder not found", str(folder), "name a folder that is there")
    return folder


def _models(folder: Path, deepest: int) -> Iterator[tuple[Path, str]]:
    """Yield files with weights and folders of models below a folder, with the kind of a folder, else ""."""
    for at, folders, files in os.walk(folder):
        here = Path(at)
        kind = next((kind for name, kind in MODEL_FILES.items() if name in files), "")
        if kind and here != folder.parent and _is_model(files):
            folders.clear()
            yield here, kind
            continue
        deep = len(here.relative_to(folder).parts) >= deepest
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith((*ENDINGS, ".sft")) and not name.startswith("."):
                yield here / name, ""


def _is_model(files: Sequence[str]) -> bool:
    """Return whether a folder with a configuration is a model: with weights, or with components that have them."""
    return "model_index.json" in files or any(name.lower().endswith(ENDINGS) for name in files)


def _bytes(path: Path) -> int:
    """Return the size of a file, or of the files of a folder."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in _below(path)) if path.is_dir() else path.stat().st_size
    return 0


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder."""
    for at, folders, files in os.walk(folder):
        yield from (Path(at, name) for name in (*files, *folders))
