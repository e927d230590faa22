"""Opens a checkpoint (a file, shards, a folder, a whole pipeline) as one table of tensors.

Only headers are read, so plans and `inspect` need no torch, except for pickled files (pickles.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from ..disk.files import FileState, Header, open_regular, unreadable
from ..dtypes import StoredTensor
from ..errors import InputError
from ..paths import exists, is_folder, is_index, is_split, of_index
from ..text import Note, listed, quoted, shown
from .encodings.base import Packing
from .file_signatures import begins_with, missing
from .folder_layouts import (
    ADAPTER_CONFIG,
    FOLDER_CONFIGS,
    MODEL_CONFIG,
    PEFT_PREFIX,
    PIPELINE_CONFIG,
    STEMS,
    Weights,
    choose,
    components,
    entries,
    require_all,
    shard_of,
    unnamed,
    weights_in,
)
from .formats import packing_names, recognised
from .formats.quantization_config import SIDE_FILES, of_cache, smoothed, with_side_file
from .formats.unread import UnreadParts, together, unread_parts
from .gguf.adapter import adapter_tensors, family_of, is_adapter
from .gguf.container import MAGIC, parse_gguf
from .gguf.view import GgufModel, viewed
from .json_files import bad_index, read_index, read_json
from .safetensors import parse_file

PEFT_STEM: Final = "adapter_model"
PEFT_FILES: Final = (f"{PEFT_STEM}.safetensors", f"{PEFT_STEM}.bin")
MLX_FILE: Final = "adapters.safetensors"  # of mlx-lm; files saved during training have a number before this name
LONGEST_TYPE: Final = 100  # letters of a type of model; the longest of transformers has 33
TRAINED_FILES: Final = re.compile(r"(?:non_lora_\w+|trainable_params|new_embeddings)\.(?:bin|pt|pth|safetensors)")
"""Files in which trainers store weights that they trained with the adapter: LLaVA and its descendants, LongLoRA, and
the rows of new tokens that vLLM reads (vllm/lora/models.py)."""

PICKLED: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files of torch.save: a zip archive, or before torch 1.6 a bare pickle."""

PICKLED_AS_TEXT: Final = re.compile(rb"\(?[ci][A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\([dl]p\d")
"""The beginning of a pickle of Python's oldest protocol, which torch.save never writes: it names a function first."""


@dataclass(frozen=True)
class Index:
    """All tensors of one checkpoint in the order of their bytes, and the headers of its files."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    """The entries of all files; if several files have an entry, that of the first file."""
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of the config.json, adapter_config.json or model_index.json next to the files."""
    headers: Mapping[Path, Header] = field(default_factory=dict, repr=False)
    index_files: tuple[Path, ...] = ()
    """The `*.index.json` of each sharded set."""
    components: Mapping[str, Index] = field(default_factory=dict)
    """Sub-folder → its checkpoint, for a pipeline; the names in `tensors` are then `<component>.<stored name>`."""
    notes: tuple[Note, ...] = ()
    """Messages for the user: variants that are not used, entries that are not tensors …"""
    packed: Mapping[str, Packing] = field(default_factory=dict, repr=False)
    """Name → packing of the weights that are not stored as plain values."""
    unnamed: tuple[Path, ...] = ()
    """Shards of this model that its index does not name; they are copied and never changed."""
    gguf: GgufModel | None = None
    """The model in GGUF files; None for other containers."""

    @cached_property
    def unread(self) -> UnreadParts:
        """Return the quantised parts of this checkpoint that no format reads."""
        if self.components:
            return together({name: part.unread for name, part in self.components.items()})
        return unread_parts(self.tensors, self.metadata, self.config, self.packed)

    @cached_property
    def packing_names(self) -> frozenset[str]:
        """Return the names of the tensors next to quantised weights that formats read, and of scales of caches."""
        return packing_names(self.packed).union(of_cache(self.tensors, self.config)) if self.packed else frozenset()

    @cached_property
    def parameters(self) -> Mapping[str, StoredTensor]:
        """Return the tensors of the model, without those next to quantised weights, such as their scales."""
        return {name: info for name, info in self.tensors.items() if name not in self.packing_names}

    @property
    def entries(self) -> Mapping[str, Any] | None:
        """Return the entries of GGUF files, none of which is required; None for other containers."""
        tables = [header.fields for header in self.headers.values() if header.fields is not None]
        return _of_first(tables) if tables else None

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Return the tensors with the names of the files."""
        return {name: info for header in self.headers.values() for name, info in header.tensors.items()}

    def with_notes(self, *notes: Note) -> Index:
        """Return the same checkpoint with further messages for the user."""
        return replace(self, notes=(*self.notes, *notes))

    def recognised(self) -> Index:
        """Return the same checkpoint with the names and shapes of quantised weights as the model knows them."""
        if (entries := self.entries) is not None:
            if is_adapter(entries):
                return replace(self, tensors=adapter_tensors(self.path, self.tensors, entries, family_of(entries)))
            view = viewed(self.tensors, entries)
            config = self.config or view.config
            return replace(self, tensors=view.tensors, packed=view.packed, config=config, gguf=view.model)
        tensors, packed = recognised(self.tensors, self.metadata, self.config)
        return replace(self, tensors=tensors, packed=packed) if packed else self


def open_checkpoint(path: Path, *, adapter: bool = False) -> Index:
    """Return the checkpoint at `path`: a file, an `*.index.json`, or a folder of any usual layout.

    `adapter`: whether a folder that holds a model and an adapter is opened as the adapter.

    Raises InputError for files that are missing, damaged, malicious or unknown. Links are followed, since model caches
    consist of links. Text inside files (index entries, component names) is never used as a path.
    """
    try:
        return _opened(path, adapter=adapter)
    except OSError as e:  # a name that is too long, a folder that may not be searched …
        raise unreadable(path, e) from e


def _opened(path: Path, *, adapter: bool) -> Index:
    if not path.exists():
        raise missing(path)
    # A folder, the index of its shards, or one of the parts of a split GGUF file.
    if path.is_dir():
        return _nonempty(_folder(path, adapter=adapter))
    if is_index(path):
        weights = next((w for w in weights_in(path.parent) if w.index == path), None)
        if weights is None:
            raise InputError("index of no known naming", str(path), "name it <model>.safetensors.index.json")
        return _nonempty(_indexed(path.parent, _sharded(path.parent, weights)))
    if is_split(path):
        parts = next(w for w in weights_in(path.parent) if path in w.files)
        require_all(parts)
        return _nonempty(_of_files(path.parent, parts.files).recognised())
    # One file, read with the configuration next to it.
    notes: tuple[Note, ...] = ()
    shard = shard_of(path)
    if shard and shard[1] > 1:
        notes = (Note(f"this is shard {shard[0]} of {shard[1]}; give the folder to merge into the whole model"),)
    if path.name in PEFT_FILES and (whole := [p for p in entries(path.parent) if TRAINED_FILES.fullmatch(p.name)]):
        raise InputError("more trained weights are next to the adapter", f"{path}: {listed(f.name for f in whole)}",
                         f"give the folder {path.parent}, which contains all of it")  # fmt: skip
    config_file = configuration(path)
    if config_file and not _is_called_trained(path):
        notes = (*notes, Note(f"read with the {config_file.name} next to it"))
    return _nonempty(
        _of_files(path, [path], config=_read_config(config_file) if config_file else {}, notes=notes).recognised()
    )


def configuration(path: Path) -> Path | None:
    """Return the path of the configuration of the folder or PEFT file at `path`; None if there is none.

    Any file with PEFT's tensors needs its configuration, which holds alpha. DeepSpeed's zero_to_fp32 writes such
    tensors to pytorch_model.bin.
    """
    path = of_index(path)
    whole = is_folder(path)
    folder = path if whole else path.parent
    files = [folder / name for name in (FOLDER_CONFIGS if whole else (ADAPTER_CONFIG,)) if exists(folder / name)]
    if whole or not files or _is_called_trained(path) or _holds_peft(path, FileState.at(path)):
        return next(iter(files), None)
    return None


@lru_cache(maxsize=1024)
def _holds_peft(path: Path, _: FileState | None) -> bool:
    """Return whether a file holds a tensor with PEFT's prefix; cached, since pickles are slow to open."""
    return any(PEFT_PREFIX in key for key in read_header(path).tensors)


def _is_called_trained(path: Path) -> bool:
    return path.name in PEFT_FILES or path.name.endswith(MLX_FILE)


def adapter_config(path: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder, or of the folder of a file; {} if there is none."""
    file = (path if is_folder(path) else path.parent) / ADAPTER_CONFIG
    return read_json(file) if file.is_file() else {}


def _model_config(folder: Path) -> Path | None:
    """Return the configuration of the model in a folder, with its weights next to it; None if there is no model."""
    file = next((folder / name for name in (PIPELINE_CONFIG, MODEL_CONFIG) if exists(folder / name)), None)
    if file is None or file.name == PIPELINE_CONFIG:
        return file
    return file if any(w.stem in STEMS[:-1] for w in weights_in(folder)) else None


def _read_config(path: Path) -> dict[str, Any]:
    """Return a configuration. Only the beginning of its `model_type` is kept, because names are made of it."""
    config = read_json(path)
    if (kind := config.get("model_type")) is not None:
        config["model_type"] = shown(kind, LONGEST_TYPE)
    return config


def _nonempty(index: Index) -> Index:
    if not index.tensors:
        raise InputError("the file contains no tensors", str(index.path), "export the model again")
    return index


def _folder(path: Path, *, adapter: bool = False) -> Index:
    file = configuration(path)
    if file and file.name == ADAPTER_CONFIG and not adapter:
        file = _model_config(path) or file
    config = _read_config(file) if file else {}
    if file and file.name in _KINDS:
        return _KINDS[file.name](path, config)
    return _of_model(path, config, _component(path))


def _indexed(path: Path, shards: Index) -> Index:
    """Return the shards of an index that the user named, with the configuration of their folder."""
    of_adapter, of_model = path / ADAPTER_CONFIG, path / MODEL_CONFIG
    if of_adapter.is_file() and any(PEFT_PREFIX in key for key in shards.tensors):
        return _peft_shards(path, _read_config(of_adapter), shards)
    return _of_model(path, _read_config(of_model) if of_model.is_file() else {}, shards)


def _of_model(path: Path, config: dict[str, Any], index: Index) -> Index:
    """Return the weights of a folder with its config.json and the side files of a quantised model."""
    for name in SIDE_FILES:
        if (path / name).is_file():
            config = dict(with_side_file(config, name, read_json(path / name), index.tensors))
    return replace(index, config=config).with_notes(*smoothed(config, path)).recognised()


def _component(path: Path) -> Index:
    sets = weights_in(path)
    if not sets:
        inside = [p.name for p in entries(path) if p.is_dir() and weights_in(p)]
        fix = (
            f"give one of its sub-folders: {listed(inside)}"
            if inside
            else "give the folder with the .safetensors files"
        )
        raise InputError("the folder contains no weights", str(path), fix)
    weights, notes = choose(path, sets)
    return _sharded(path, weights, notes)


def _peft(path: Path, config: Mapping[str, Any]) -> Index:
    """Return an adapter folder of PEFT or mlx-lm; `config` is its adapter_config.json."""
    for name in (*PEFT_FILES, MLX_FILE):
        if (path / name).exists():
            both = Note(f"the folder also holds a model; the adapter is {name}")
            notes = (both,) if _model_config(path) else ()
            return _of_files(path, [path / name], config=config, notes=notes)
    sets = weights_in(path)
    if shards := next((weights for weights in sets if weights.stem == PEFT_STEM), None):
        return _peft_shards(path, config, _sharded(path, shards))
    others = listed(weights.label for weights in sets)
    fix = f"if {others} is the adapter, name that file; if it is a whole model, move adapter_config.json away"
    fix = fix if others else "download the folder again"
    raise InputError(f"adapter_config.json without {PEFT_FILES[0]}", str(path), fix)


def _peft_shards(path: Path, config: Mapping[str, Any], shards: Index) -> Index:
    """Return an adapter in several files. transformers saves large ones so, with an index of the name of a model's."""
    index = _of_files(path, shards.files, config=config, notes=shards.notes)
    return replace(index, index_files=shards.index_files)


def _pipeline(path: Path, config: Mapping[str, Any]) -> Index:
    """Return a diffusers pipeline: all components with weights; tensors are named `<component>.<stored name>`."""
    parts = {p.name: _folder(p) for p in components(path, config)}
    if not parts:
        raise InputError(
            "the pipeline contains no weights", str(path), "download the folder again, with its sub-folders"
        )
    return of_components(path, config, parts)


def of_components(path: Path, config: Mapping[str, Any], parts: Mapping[str, Index]) -> Index:
    """Return a pipeline of these components."""
    tensors = {
        f"{part}.{name}": replace(info, name=f"{part}.{name}", stored=info.stored or name)
        for part, index in parts.items()
        for name, info in index.tensors.items()
    }
    if len(tensors) < sum(len(index.tensors) for index in parts.values()):
        raise InputError("two components use the same tensor name", str(path), "rename one sub-folder")
    packings = ((part, key, packing) for part, index in parts.items() for key, packing in index.packed.items())
    return Index(
        path, tensors, metadata=_of_first(index.metadata for index in parts.values()),
        files=tuple(f for index in parts.values() for f in index.files), config=config,
        headers={f: h for index in parts.values() for f, h in index.headers.items()},
        index_files=tuple(f for index in parts.values() for f in index.index_files), components=parts,
        notes=tuple(Note(f"{part}: {note}") for part, index in parts.items() for note in index.notes),
        packed={f"{part}.{key}": _inside(part, packing, tensors) for part, key, packing in packings},
        unnamed=tuple(f for index in parts.values() for f in index.unnamed),
    )  # fmt: skip


def _inside(component: str, packing: Packing, tensors: Mapping[str, StoredTensor]) -> Packing:
    """Return how a weight of a pipeline's component is stored; `tensors` are those of the pipeline."""
    infos = {role: tensors.get(f"{component}.{part.info.name}") for role, part in packing.parts.items()}
    parts = {role: part._replace(info=infos[role] or part.info) for role, part in packing.parts.items()}
    return packing._replace(parts=parts, marks=frozenset(f"{component}.{other}" for other in packing.marks))


_KINDS: Final = {ADAPTER_CONFIG: _peft, PIPELINE_CONFIG: _pipeline}


def _sharded(folder: Path, weights: Weights, notes: tuple[Note, ...] = ()) -> Index:
    """Return one file, or shards checked against their index."""
    if weights.index is None:
        require_all(weights)
        return _of_files(folder, weights.files, notes=notes)
    # The index names files of the folder.
    table = read_index(weights.index)["weight_map"]
    if not table or not all(isinstance(v, str) for v in table.values()):
        raise bad_index(weights.index, "it has no weight_map of names to files")
    present = {p.name: p for p in entries(folder) if not p.is_dir()}
    for name in dict.fromkeys(table.values()):
        if name not in present:
            plain = name not in (".", "..") and not set(name) & set("/\\:\0")
            why = (
                f"{quoted(name)} is not in the folder" if plain else f"{quoted(name)} is a path, not the name of a file"
            )
            raise bad_index(weights.index, why)
    # Each tensor is in the file that the index names.
    index = _of_files(folder, [present[n] for n in sorted(set(table.values()))], notes=notes)
    homes = {n: info.file for n, info in index.tensors.items()}
    wrong = [n for n, file in table.items() if (home := homes.get(n)) is not present[file] and home != present[file]]
    if wrong:
        raise bad_index(weights.index, f"{listed(map(quoted, wrong), 3)} is not in the file that it names")
    unlisted = [n for n in index.tensors if n not in table]
    if unlisted:
        index = index.with_notes(Note(f"{weights.index.name} does not list {listed(unlisted, 3)}"))
    # Further shards of the model, or of an earlier export.
    same, other = unnamed(weights, table.values())
    if same and weights.suffix != "safetensors":
        raise bad_index(weights.index, f"it does not name {listed(f.name for f in same)}")
    for shards, what in ((same, "copied as they are"), (other, "of another count, not copied")):
        if shards:
            some = listed(f.name for f in shards)
            index = index.with_notes(Note(f"{weights.index.name} does not name {some}: {what}"))
    return replace(index, index_files=(weights.index,), unnamed=tuple(same))


def _of_files(
    path: Path, files: Iterable[Path], *, config: Mapping[str, Any] | None = None, notes: tuple[Note, ...] = ()
) -> Index:
    """Return the tensors of several files as one checkpoint; InputError if two files hold the same name."""
    headers: dict[Path, Header] = {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        header = headers[file] = read_header(file)
        for name, info in header.tensors.items():
            other = tensors.setdefault(name, info)
            if other is not info:
                raise in_two_files(other, info)
        notes = (*notes, *header.notes)
    metadata = _of_first(h.metadata for h in headers.values())
    return Index(path, tensors, metadata, tuple(headers), config or {}, headers, notes=notes)


def in_two_files(first: StoredTensor, other: StoredTensor) -> InputError:
    """Return the error for one name in two files of a checkpoint."""
    return InputError(f"the tensor {quoted(first.name)} is in two files", f"{first.file} and {other.file.name}",
                      "keep the right one of them in the folder")  # fmt: skip


def _of_first(metadata: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of all entries; the first value of a key wins."""
    entries: dict[str, Any] = {}
    for of_file in metadata:
        entries |= {key: text for key, text in of_file.items() if key not in entries}
    return entries


def read_header(path: Path) -> Header:
    """Return the header of a .safetensors or GGUF file or a pickle; the first bytes decide, not the name."""
    with open_regular(path) as f:
        start = f.read(64)
    if begins_with(start, PICKLED) or PICKLED_AS_TEXT.match(start):
        from .pickles import read_pickled  # imports torch

        return read_pickled(path)
    if begins_with(start, MAGIC):
        return parse_gguf(path)
    return parse_file(path)
