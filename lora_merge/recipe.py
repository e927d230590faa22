"""Provenance: what goes into an output's metadata, and the way back from there to the same merge.

The text of a recipe comes out of a file that anybody may have written: it is checked, bounded, and its names
are compared with names of files, never used as paths.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from .checkpoint import Index
from .errors import InputError, UsageError, VerificationFailed
from .header import open_regular
from .job import Adapter, Job, make_job
from .kinds import quoted
from .publish import NAME_LIMIT

KEY: Final = "lora_merge.recipe"
OURS: Final = (KEY, "modelspec.merged_from", "sd_merge_recipe", "sd_merge_models")
"""Metadata entries that a merge writes."""

STALE: Final = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""Entries of the base that would be wrong on the merged bytes, and cannot be right: they would have to hold a hash
of the file that they are in. Dropped."""

LIMIT: Final = 2**22  # characters of a recipe that are read
FILES: Final = 20_000  # looked at while searching for inputs
DEPTH: Final = 3  # folders below the searched ones
LEGACY: Final = (0x100000, 0x10000)  # the bytes behind the 8 digits that old web UIs call a model's hash


def slot(number: int) -> str:
    """Stands in a header for the SHA-256 of input `number`, as long as one; replaced when it has been read."""
    return f"sha256:of-input-{number:03d}".ljust(64, ".")


def metadata(job: Job, base: Index, adapters: Sequence[Index], kept: Mapping[str, str]) -> dict[str, str]:
    """The `__metadata__` of an output file whose counterpart in the base has `kept`."""
    names = ", ".join(p.name for p in (job.base, *(a.path for a in job.adapters)))
    own = {KEY: _json(recipe(job, base, adapters)), "modelspec.merged_from": names}
    if not base.path.is_dir():
        own |= _web_ui(job, base, adapters)
    return {k: v for k, v in kept.items() if k not in STALE} | own


def recipe(job: Job, base: Index, adapters: Sequence[Index]) -> dict[str, Any]:
    """What was merged: names, sizes, hashes, strengths, and every option that changes a byte."""
    from . import __version__

    numbers = iter(range(10**6))
    found: dict[str, Any] = {
        "version": __version__,
        "base": _input(job.base, base, numbers),
        "adapters": [
            {**_input(ref.path, index, numbers), "strength": ref.strength, "parts": [list(p) for p in ref.parts]}
            for ref, index in zip(job.adapters, adapters, strict=True)
        ],
        "dtype": job.dtype, "compute_dtype": job.compute_dtype, "unmatched": job.unmatched,
    }  # fmt: skip
    earlier = _parsed(base.metadata.get(KEY, ""))
    if earlier is not None:
        found["base"]["recipe"] = earlier
    if job.setting:
        found["setting"] = dict(job.setting)
    if job.map is not None:
        found["map"] = {"name": job.map.name, "text": job.map.read_text(encoding="utf-8")}
    return found


def _input(path: Path, index: Index, numbers: Iterator[int]) -> dict[str, Any]:
    folder = index.path.is_dir()
    found: dict[str, Any] = {"name": path.name, "files": [
        {"name": f.relative_to(index.path).as_posix() if folder else f.name, "size": index.headers[f].state.size,
         "sha256": slot(next(numbers))}
        for f in index.files
    ]}  # fmt: skip
    if folder:
        found["folder"] = True
    if (path / "adapter_config.json").exists():
        found["config"] = _config_hash(path)
    return found


def _config_hash(folder: Path) -> str:
    with open_regular(folder / "adapter_config.json") as f:
        return hashlib.sha256(f.read()).hexdigest()


def _web_ui(job: Job, base: Index, adapters: Sequence[Index]) -> dict[str, str]:
    """The entries that AUTOMATIC1111's web UI and its relatives write for a merged checkpoint and show in it."""
    files = [(base.files[0], job.base.name, 0)]
    number = len(base.files)
    for ref, index in zip(job.adapters, adapters, strict=True):
        files.append((index.files[0], ref.path.name, number))
        number += len(index.files)
    shown = {
        "type": "lora-merge", "primary_model_hash": slot(0), "secondary_model_hash": None,
        "tertiary_model_hash": None, "interp_method": "LoRA", "multiplier": job.adapters[0].strength,
        "save_as_half": job.dtype == "fp16", "custom_name": None, "config_source": None, "bake_in_vae": None,
        "discard_weights": "", "is_inpainting": False, "is_instruct_pix2pix": False,
        "loras": [
            {"name": name, "hash": slot(n), "strength": ref.strength}
            for ref, (_, name, n) in zip(job.adapters, files[1:], strict=True)
        ],
    }  # fmt: skip
    models = _parsed(base.metadata.get("sd_merge_models", "")) or {}
    earlier = _parsed(base.metadata.get("sd_merge_recipe", ""))
    for file, name, n in files:
        models[slot(n)] = {"name": name, "legacy_hash": _legacy(file), "sd_merge_recipe": None if n else earlier}
    return {"sd_merge_recipe": _json(shown), "sd_merge_models": _json(models)}


def _legacy(file: Path) -> str:
    with open_regular(file) as f:
        f.seek(LEGACY[0])
        return hashlib.sha256(f.read(LEGACY[1])).hexdigest()[:8]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parsed(text: str) -> dict[str, Any] | None:
    """The JSON object in a metadata entry; None for anything else."""
    if not text.startswith("{") or len(text) > LIMIT:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Input:
    """One input as a recipe names it: its files by name inside it, size and SHA-256."""

    name: str
    files: tuple[tuple[str, int, str], ...]
    folder: bool
    config: str  # SHA-256 of its adapter_config.json, where it has one


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    version: str
    base: Input
    adapters: tuple[tuple[Input, float, tuple[tuple[str, float], ...]], ...]
    options: Mapping[str, Any]
    map_name: str
    map_text: str | None

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The base and the adapters."""
        return (self.base, *(a for a, _, _ in self.adapters))

    def job(self, paths: Sequence[Path], output: Path, **options: Any) -> Job:
        """The job it describes, for inputs found at `paths`; UsageError where its values make none."""
        adapters = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths[1:], self.adapters, strict=True)]
        return make_job(paths[0], adapters, output, **{**self.options, **options})


def read_recipe(index: Index) -> Recipe:
    """The recipe of an output; InputError where it has none or a damaged one."""
    text = index.metadata.get(KEY)
    if text is None:
        raise InputError("the file says nothing about how it was made", str(index.path),
                         "only outputs of lora-merge carry a recipe; give --base and --adapter")  # fmt: skip
    value = _parsed(text)
    try:
        if value is None:
            raise ValueError("it is no JSON object")
        found = _recipe_of(value)
        found.job([index.path] * len(found.inputs), index.path)  # its values, before any that a user adds
        return found
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(index.path, str(e)) from e
    except UsageError as e:
        raise damaged(index.path, f"{e.what} ({e.where})") from e


def damaged(path: Path, why: str) -> InputError:
    """What to raise where the recipe in the file at `path` cannot be followed."""
    return InputError(f"the recipe is damaged: {why}", f"{path}: {KEY}", "give --base and --adapter")


def _recipe_of(value: Mapping[str, Any]) -> Recipe:
    adapters = tuple(
        (_input_of(a), _number(a["strength"]), tuple((_text(p), _number(f)) for p, f in a["parts"]))
        for a in value["adapters"]
    )
    if not adapters:
        raise ValueError("it names no adapter")
    options: dict[str, Any] = {k: _text(value[k]) for k in ("dtype", "compute_dtype", "unmatched")}
    if "setting" in value:
        options["setting"] = dict(value["setting"])
    table = value.get("map", {"name": "", "text": None})
    map_text = None if table["text"] is None else _text(table["text"])
    name = "" if map_text is None else _file_name(table["name"])
    return Recipe(_text(value["version"]), _input_of(value["base"]), adapters, options, name, map_text)


def _input_of(value: Mapping[str, Any]) -> Input:
    files = tuple((_inside(f["name"]), int(f["size"]), _text(f["sha256"])) for f in value["files"])
    if not files:
        raise ValueError("an input without files")
    return Input(_text(value["name"]), files, bool(value.get("folder")), _text(value.get("config", "")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{quoted(str(value))} is no text")
    value.encode()  # ValueError for half a character
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{quoted(str(value))} is no number")
    return float(value)


def _inside(value: Any) -> str:
    """A name of a file inside its input; ValueError for one that leads out of it."""
    path = PurePosixPath(_text(value))
    if path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value or not path.parts:
        raise ValueError(f"{quoted(value)} is no file of an input")
    return str(path)


def _file_name(value: Any) -> str:
    """A name that a file in any folder can have."""
    if "/" in _inside(value) or len(value.encode()) > NAME_LIMIT or not value.isprintable():
        raise ValueError(f"{quoted(value)} is no name of a file")
    return str(value)


def find(recipe: Recipe, folders: Iterable[Path]) -> list[Path]:
    """Where the inputs are, by content; searched in these folders and a few levels below.

    VerificationFailed if there is a file of the right name but other content; InputError if there is none.
    """
    present = list(_walk(folders))
    return [_find(one, present) for one in recipe.inputs]


def _find(one: Input, present: Sequence[Path]) -> Path:
    name, size, digest = one.files[0]
    depth = len(PurePosixPath(name).parts)
    last = PurePosixPath(name).name
    alike = sorted((p for p in present if _size(p) == size), key=lambda p: p.name != last)
    for path in alike:
        if one.folder and depth > len(path.parents):
            continue  # it lies not as deep
        root = path.parents[depth - 1] if one.folder else path
        if sha256(path) == digest and (not one.folder or not different(one, root)):
            return root
    namesake = next((p for p in present if p.name == (last if not one.folder else one.name)), None)
    if namesake is not None:
        raise VerificationFailed("the output is older or newer than one of its inputs",
                                 f"{namesake} is not the {quoted(one.name)} that it was made from (SHA-256 {digest})",
                                 "merge again, or name the folder of the former version with --search")  # fmt: skip
    raise InputError(f"the input {quoted(one.name)} is not found", f"SHA-256 {digest}, {size} bytes",
                     "name its folder with --search")  # fmt: skip


def different(one: Input, path: Path) -> str | None:
    """What of the input at `path` is not as the recipe says; None if it is the same."""
    for name, size, digest in one.files:
        file = path / name if path.is_dir() else path
        if _size(file) != size or sha256(file) != digest:
            return str(file)
    has = path.is_dir() and (path / "adapter_config.json").exists()
    if one.config and (not has or _config_hash(path) != one.config):
        return str(path / "adapter_config.json")
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def sha256(path: Path) -> str:
    """SHA-256 of a regular file; reads all of it."""
    digest = hashlib.sha256()
    with open_regular(path) as f:
        while data := f.read(1 << 24):
            digest.update(data)
    return digest.hexdigest()


def _walk(folders: Iterable[Path]) -> Iterator[Path]:
    """Regular files in these folders and below, not too deep, not too many; links to folders are not followed."""
    seen: set[Path] = set()
    for top in folders:
        if not top.is_dir():
            raise UsageError("no such folder", str(top), "name a folder with --search")
        for here, below, files in os.walk(top):
            level = len(Path(here).relative_to(top).parts)
            below[:] = [] if level >= DEPTH else sorted(b for b in below if not b.startswith("."))
            for name in sorted(files):
                path = Path(here) / name
                if path not in seen and not name.startswith(".") and path.is_file():
                    seen.add(path)
                    yield path
                if len(seen) >= FILES:
                    return
