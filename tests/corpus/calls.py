"""A call of the Python API as plain JSON and files, and what came of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import lora_merge

LARGEST = 8 << 20
"""Bytes of one input. Larger ones are not kept: the corpus shall travel."""

OURS = ("lora_merge.", "modelspec.merged_from", "sd_merge_", "modelspec.hash_sha256", "sshs_model_hash")
"""Metadata that follows from the recipe, which may gain fields from one version to the next."""


class NotKept(Exception):
    """An argument that JSON and files cannot hold."""


def size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


class Keeper:
    """Copies the inputs of one call into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def plain(self, value: Any) -> Any:  # noqa: PLR0911  # a case a line
        """The value as JSON; files that it names are copied, with their names."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, lora_merge.Adapter):
            return {"adapter": [self.plain(value.path), value.strength, [list(p) for p in value.parts]]}
        if isinstance(value, tuple):
            return {"tuple": [self.plain(v) for v in value]}
        if isinstance(value, list):
            return [self.plain(v) for v in value]
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, Path) or (isinstance(value, str) and "/" in value and len(value) < 1000):
            return {"path": self._copied(Path(value))}
        if isinstance(value, str):
            return value
        raise NotKept(type(value).__name__)

    def _mapping(self, value: Mapping[str, Any]) -> Any:
        if value and all(isinstance(v, torch.Tensor) for v in value.values()):
            whole = {k: v.detach().clone().contiguous() for k, v in value.items()}
            if any(v.device.type != "cpu" or v.is_sparse for v in whole.values()):
                raise NotKept("tensors elsewhere")
            place = self._place() / "tensors.safetensors"
            save_file(whole, place, {"order": json.dumps(list(whole))})
            return {"tensors": str(place.relative_to(self.folder))}
        return {"mapping": [[k, self.plain(v)] for k, v in value.items()]}

    def _place(self) -> Path:
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir(parents=True)
        return place

    def _copied(self, path: Path) -> str:
        if not path.exists() or size(path) > LARGEST or any(p.is_symlink() for p in (path, *path.rglob("*"))):
            raise NotKept(str(path))
        copy = self._place() / path.name
        shutil.copytree(path, copy) if path.is_dir() else shutil.copyfile(path, copy)
        return str(copy.relative_to(self.folder))


def restored(value: Any, folder: Path) -> Any:  # noqa: PLR0911  # a case a line
    """The argument that `Keeper.plain` made JSON of."""
    if isinstance(value, list):
        return [restored(v, folder) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "dtype":
        return getattr(torch, held)
    if kind == "adapter":
        path, strength, parts = held
        return lora_merge.Adapter(restored(path, folder), strength, tuple(tuple(p) for p in parts))
    if kind == "tuple":
        return tuple(restored(v, folder) for v in held)
    if kind == "mapping":
        return {k: restored(v, folder) for k, v in held}
    if kind == "tensors":
        tensors = load_file(folder / held)
        with (folder / held).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tensors[name] for name in json.loads(header["__metadata__"]["order"])}
    return folder / held


def digest(path: Path) -> dict[str, str]:
    """File name → SHA-256 of what it holds; of a checkpoint all but the metadata that tell of the merge."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {p.name if p == path else p.relative_to(path).as_posix(): _digest(p) for p in files}


def _digest(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix != ".safetensors":
        return hashlib.sha256(raw).hexdigest()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    kept = {k: v for k, v in header.get("__metadata__", {}).items() if not k.startswith(OURS)}
    order = [[k, v] for k, v in header.items() if k != "__metadata__"]
    text = json.dumps([kept, order], sort_keys=True).encode()
    return hashlib.sha256(text + raw[8 + length :]).hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """One digest of a state dict: names in order, dtypes, shapes, bytes."""
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        whole.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return {"state dict": whole.hexdigest()}


def refusal(error: lora_merge.MergeError) -> dict[str, str]:
    """What is compared of a refusal: its exit code. Words may change."""
    return {"refused": str(error.exit_code)}
