"""Finds the files of a folder that make up the checkpoint (shards, variants, components) by their names alone.

The layouts are those of `save_pretrained` in transformers and diffusers. In the many versions of these libraries the
variant comes before or after the shard number, and before or after `index`.

If a folder holds several sets of weights, the output holds the set that those libraries would load from the base:

* One set is merged. `_rank` orders the sets: a whole file before shards, the plain variant before `fp16`, `model`
  before `consolidated`. The other sets are named in a note and not copied, since their weights would be unmerged.
* The index names the shards. A shard with the same total that the index does not name is copied unchanged and named
  in a note: the libraries never load it, but it belongs to the model. Such a shard in a pickle is refused.
* Shards with another total next to an index come from an earlier export. They are named in a note and not copied.
  Shards with two totals and no index are refused, since nothing shows which of them are the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..disk.files import unreadable
from ..disk.remote import has_remote
from ..errors import InputError
from ..paths import is_folder
from ..text import Note, listed

STEMS: Final = (
    "diffusion_pytorch_model",
    "model",
    "pytorch_model",
    "consolidated",
    "pytorch_lora_weights",
)
"""Usual names of the weights of a folder, the preferred one first."""

PRECISIONS: Final = ("", "fp32", "bf16", "fp16")
"""Variants that hold the same weights, the preferred one first. Variants such as `ema` hold different weights."""

ADAPTER_CONFIG: Final = "adapter_config.json"
PIPELINE_CONFIG: Final = "model_index.json"
MODEL_CONFIG: Final = "config.json"
FOLDER_CONFIGS: Final = (ADAPTER_CONFIG, PIPELINE_CONFIG, MODEL_CONFIG)  # the first that exists is read
FORMAT_SUFFIXES: Final = ("safetensors", "bin", "pt", "pth", "ckpt", "gguf")  # the preferred first

_SHARD: Final = r"-(?P<part>\d{5})-of-(?P<parts>\d{5})"

_NAME: Final = re.compile(
    rf"(?P<stem>{'|'.join(STEMS)})"
    rf"(?:\.(?P<before>[\w-]+?))?(?:{_SHARD})?(?:\.(?P<after>[\w-]+?))?\.(?P<suffix>{'|'.join(FORMAT_SUFFIXES)})"
    r"(?P<index>\.index(?:\.(?P<last>[\w-]+))?\.json)?"
)

_OTHER: Final = re.compile(
    rf"(?P<stem>.+?)(?:{_SHARD})?\.(?P<suffix>{'|'.join(FORMAT_SUFFIXES)})(?P<index>\.index\.json)?"
)

PEFT_PREFIX: Final = "base_model.model."
"""Prefix that PEFT puts before the names of a model's modules."""


@dataclass(frozen=True)
class Weights:
    """One set of weights in a folder: a single file, or shards with or without an index file."""

    stem: str
    variant: str  # "" or fp16, ema, non_ema …
    suffix: str
    files: tuple[Path, ...]  # in shard order; with an index, also the shards that the index does not name
    index: Path | None = None

    @property
    def label(self) -> str:
        """Return the file name for messages."""
        return (self.index or self.files[0]).name


def shard_of(path: Path) -> tuple[int, int] | None:
    """Return (2, 5) for `model-00002-of-00005.safetensors`; None for a whole file."""
    match = re.search(_SHARD, path.name)
    return (int(match["part"]), int(match["parts"])) if match else None


def is_usual_name(name: str) -> bool:
    """Return whether a file has the usual name of a model's weights, in any variant, or of their index."""
    return (match := _NAME.fullmatch(name)) is not None and match["stem"] != STEMS[-1]


def weights_in(folder: Path) -> list[Weights]:
    """Return every set of weights of this folder, the preferred one first."""
    groups: dict[tuple[str, str, str, int], list[Path]] = {}
    indexes: dict[tuple[str, str, str], Path] = {}
    for path in entries(folder):
        match = _NAME.fullmatch(path.name) or _OTHER.fullmatch(path.name)
        if match is None or path.is_dir():
            continue
        row = match.groupdict()
        variant = row.get("before") or row.get("after") or row.get("last") or ""
        key = (row["stem"], variant, row["suffix"])
        if row["index"]:
            indexes[key] = path
        else:
            groups.setdefault((*key, int(row["parts"] or 0)), []).append(path)
    sets: list[Weights] = []
    for key, index in indexes.items():  # the shards may all be missing: `open_checkpoint` reports that
        shards = [path for k in sorted(groups) if k[:3] == key and k[3] for path in groups.pop(k)]
        sets.append(Weights(*key, tuple(shards), index))
    sets += [Weights(*key[:3], tuple(files)) for key, files in groups.items()]
    return sorted(sets, key=_rank)


def require_all(weights: Weights) -> None:
    """Raise InputError if the set has no index and the numbers of its shards show that some are missing."""
    numbers = [n for n in (shard_of(f) for f in weights.files) if n]
    if not numbers or weights.index:
        return
    total = numbers[0][1]
    present = {i for i, _ in numbers}
    lacks = [f"-{i:05d}-of-{total:05d}" for i in range(1, total + 1) if i not in present]
    if not lacks and 0 not in present and len(present) == total:
        return
    more = f"without {listed(lacks, 6)}" if lacks else "their numbers make no sense"
    raise InputError(
        f"shards are missing: {len(present)} of {total} are here",
        f"{weights.files[0].parent}: {weights.stem} {more}",
        "download the folder again, all files of it",
    )


def _rank(w: Weights) -> tuple[int, int, int, int, str, bool]:
    stem = STEMS.index(w.stem) if w.stem in STEMS else len(STEMS)
    whole = w.index is None and shard_of(w.files[0]) is None
    return (
        stem == len(STEMS),
        FORMAT_SUFFIXES.index(w.suffix),
        stem,
        PRECISIONS.index(w.variant) if w.variant in PRECISIONS else len(PRECISIONS),
        w.variant + w.stem,
        not whole,
    )


def unnamed(weights: Weights, named: Iterable[str]) -> tuple[list[Path], list[Path]]:
    """Return the shards that the index does not name: those with the same total as the named ones, and all others."""
    names = {*named}
    counts = {shard[1] for path in weights.files if path.name in names and (shard := shard_of(path))}
    left = [(path, shard_of(path)) for path in weights.files if path.name not in names]
    same = [path for path, shard in left if shard and shard[1] in counts]
    return same, [path for path, _ in left if path not in same]


def _shards_of(w: Weights) -> tuple[str, str, str] | None:
    """Return stem, variant and suffix of shards without an index; None for other weights."""
    return (w.stem, w.variant, w.suffix) if w.index is None and shard_of(w.files[0]) else None


def several(folder: Path) -> list[Path]:
    """Return the files of a folder of models or adapters that have nothing to do with each other, such as `loras`, and
    the folders in it that have weights; [] for the folder of one model or adapter."""
    sets = weights_in(folder) if is_folder(folder) else []
    if len(sets) < 2 or sets[0].stem in STEMS:
        return []
    inner = () if has_remote(folder) else (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(
        [*(w.index or w.files[0] for w in sets), *(path for path in inner if is_folder(path) and weights_in(path))]
    )


def choose(folder: Path, sets: list[Weights]) -> tuple[Weights, tuple[Note, ...]]:
    """Return the set to use and notes about the other sets; InputError if the user has to choose."""
    first, others = sets[0], sets[1:]
    if first.stem not in STEMS and others:
        where = f"{folder}: {listed(w.label for w in sets)}"
        if has_remote(folder):  # no pattern is searched on another machine
            fix = f"name the file itself: {first.files[0]}"
            raise InputError("the folder contains several checkpoints", where, fix)
        raise InputError(
            "the folder contains several checkpoints",
            where,
            f"name the file itself; or, if all are adapters, write {folder}/*.{first.suffix} (in a jobs file: glob)",
        )
    if twin := next((w for w in others if _shards_of(w) == _shards_of(first) is not None), None):
        raise InputError(
            "the folder contains shards of two counts, and no index that says which are the model",
            f"{folder}: {first.label}, {twin.label}",
            "move the shards of the older export away",
        )
    rivals = [w.label for w in others if w.suffix == first.suffix]
    if not rivals:
        return first, ()
    return first, (Note(f"{folder.name} also holds {listed(rivals)}; used {first.label}"),)


def components(folder: Path, named: Iterable[str]) -> list[Path]:
    """Return the sub-folders with weights that `named` contains; text of model_index.json is never used as a path."""
    names = set(named)
    return [p for p in entries(folder) if p.name in names and p.is_dir() and weights_in(p)]


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder except hidden ones, sorted by name."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as e:
        raise unreadable(folder, e) from e
