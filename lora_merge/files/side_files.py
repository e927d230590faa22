"""Files of an output folder next to the weights: configuration, index, tokenizer and the others that a model needs."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from ..disk.files import unreadable
from ..dtypes import DTYPE_ROWS, Shape, StoredTensor
from ..errors import InputError
from ..paths import real_path
from ..text import from_json, listed
from .checkpoint import Index
from .file_uses import NO_WEIGHTS, NOT_LISTED, FileUse, Folder, duplicate, folder_reason, is_weights, lists_only
from .folder_layouts import entries
from .formats.quantization_config import SECTIONS
from .json_files import json_value, read_index

MODULES: Final = "modules.json"
"""File in which sentence-transformers lists the parts of a model: its transformer, pooling, dense layers."""

EMBEDDING: Final = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|shared|tok_embeddings|tokens_embed|(?:input_)?embeddings?|w)"
    r"\.weight"
)

PATCHES: Final = re.compile(r"(?:x_embedder|img_in|conv_in|proj_in|patch_embedding|\w+_embed)(?:\.proj)?\.weight")

HEAD: Final = re.compile(r"(?:.*\.)?(?:classifier|score|classification_head)(?:\.out_proj)?\.weight")
"""EMBEDDING, PATCHES, HEAD: tensors whose size config.json holds: rows = tokens, columns = channels, rows = labels."""

MODEL_CONFIGS: Final = ("config.json", "generation_config.json")
"""Names of the configuration of a model in its own folder."""

Resized: TypeAlias = Mapping[str, tuple[Shape, Shape]]
"""Tensor → its shape in the base, () if it was tied to another tensor there, and its shape in the output."""

CONFIG_DTYPES: Final = {name: DTYPE_ROWS[name].library for name in ("F32", "F16", "BF16")}
"""Dtype → its name in a config.json of transformers."""


def base_folder(base: Index) -> Folder:
    """Return every file of the base's folder and what becomes of it.

    A further file of weights is copied unless it is a second set of the base's. A sub-folder with weights is copied
    whole or left out whole; layers that sentence-transformers puts behind the model are copied. Raises InputError for
    pipes, devices, links that point nowhere, and links to folders that hold no weights of the base, since such a link
    may lead anywhere.
    """
    # Folders that belong to the model: those of its weights, of its components, of layers behind it.
    read = {*base.files, *base.index_files}
    homes = {folder for file in base.files for folder in file.parents}
    behind = _layers_behind(base.path) - homes
    ours = homes | behind | {base.path / name for name in base.config if base.components}  # a pipeline's parts
    left: dict[Path, str] = {}  # sub-folder → why it is left out
    reasons: dict[Path, str] = {}
    for folder, names, files in os.walk(base.path, onerror=_unreadable, followlinks=True):
        inside = [Path(folder, name) for name in sorted(names) if not NOT_LISTED.fullmatch(name)]
        # A sub-folder: left out with a folder above it, or for a reason of its own.
        above = next((left[path] for path in (Path(folder), *Path(folder).parents) if path in left), "")
        for path in inside:
            if path.is_symlink() and path not in homes and not above:
                raise InputError("the model folder contains a link to a folder", str(path),
                                 "put the folder itself there, or remove the link")  # fmt: skip
        if not above:
            others = [path for path in inside if path not in ours and _holds_weights(path)]
            left |= {path: why for path in others if (why := folder_reason(path, base))}
        names[:] = [path.name for path in inside if not path.is_symlink() or path in homes]
        # Its files: copied, but second sets of the base's weights.
        whole = above or not behind.isdisjoint((Path(folder), *Path(folder).parents)) or Path(folder) not in ours
        for path in (Path(folder, name) for name in sorted(files) if not NOT_LISTED.fullmatch(name)):
            part = whole or path in read or path in base.unnamed or not is_weights(path.name)
            reasons[path] = above if part else duplicate(path, base)
            if path not in read and not reasons[path]:
                _require_file(path)
    # Indexes are copied if their shards are.
    for path in [p for p in reasons if ".index." in p.name and p not in read and not reasons[p]]:
        copied = [p.name for p, why in reasons.items() if p.parent == path.parent and not why]
        reasons[path] = "" if lists_only(path, copied) or path.suffix != ".json" else NO_WEIGHTS
    return Folder("base", base.path, tuple(
        FileUse(path.relative_to(base.path).as_posix(), "read") if path in read
        else FileUse(path.relative_to(base.path).as_posix(), "left out" if why else "copied", why,
                     bool(why) and is_weights(path.name))
        for path, why in reasons.items()
    ))  # fmt: skip


def refuse_links_outside(base: Index, sides: Mapping[str, Path]) -> None:
    """Raise InputError if a file whose content goes into the output is a link that leads out of its folder.

    People publish outputs, and anybody can put a link to a key or to /proc/self/environ into a folder that others
    download. Links into the model cache of huggingface_hub are followed: it keeps files in `blobs` next to `snapshots`,
    and each snapshot is a folder of links to them; its older versions made such links in other folders, too. Whoever
    names a blob by the hash of its content knows the content. Weights may be anywhere: their tensors are read. So may a
    whole component of a pipeline, of which only weights and configuration are taken then.

    `sides`: name in the output → file, of the base's folder or of another one.
    """
    paths = (*sides.values(), *base.index_files)
    outside = [
        f"{path} -> {os.path.realpath(path)}"
        for path in paths
        if _leads_out(path, base.path if base.path in path.parents else path.parent) and not _is_linked(base, path)
    ]
    if outside:
        raise InputError(
            "files of the model folder are links that lead out of it: the output would hold their content",
            f"{base.path}: {listed(outside)}",
            "put the files in place of the links if they belong to the model; else remove the links",
        )


def _leads_out(path: Path, folder: Path) -> bool:
    """Return whether a file is a link to a place outside of a folder and of the model cache that holds the folder."""
    root, target = real_path(folder), real_path(path)
    blobs = [p.parent / "blobs" for p in (root, *root.parents) if p.name == "snapshots"]
    return {root, *blobs}.isdisjoint(target.parents) and not _is_blob(target)


def _is_linked(base: Index, path: Path) -> bool:
    """Return whether this is the configuration, or the index, in a component that is a link to a folder of weights."""
    of_weights = path.name in MODEL_CONFIGS or path in base.index_files
    return of_weights and not path.is_symlink() and any(file.parent == path.parent for file in base.files)


def _is_blob(path: Path) -> bool:
    """Return whether this is a file of a model cache, which is called by the SHA-1 or the SHA-256 of its content."""
    return path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", path.name) is not None


def _layers_behind(folder: Path) -> frozenset[Path]:
    """Return the sub-folders that `modules.json` names: layers behind the transformer, which no adapter changes.

    Its text is never used as a path.
    """
    file = folder / MODULES
    rows = json_value(file) if file.exists() else []
    named = [row.get("path") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return frozenset(path for path in entries(folder) if path.name in named and path.is_dir())


def _holds_weights(folder: Path) -> bool:
    return any(is_weights(name) for _, _, files in os.walk(folder, onerror=_unreadable) for name in files)


def _unreadable(e: OSError) -> NoReturn:
    raise unreadable(Path(e.filename), e) from e


def _require_file(path: Path) -> None:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as e:
        what = "a broken symbolic link" if path.is_symlink() else f"file cannot be read: {e.strerror}"
        raise InputError(what, str(path), "download the model again, all files of it, or remove this one") from e
    if not regular:
        raise InputError(
            "the model folder contains an entry that is not a file",
            f"{path}: a device, a pipe or the like",
            "remove it",
        )


def output_name(file: Path, base: Index) -> str:
    """Return the output's name for a file of the base, relative to the folder; pickles become .safetensors."""
    relative = file.relative_to(base.path)
    if relative.suffix == ".safetensors" or base.gguf is not None:
        return relative.as_posix()
    return relative.with_name(Path(_renamed(relative.name)).stem + ".safetensors").as_posix()


def _renamed(name: str) -> str:
    """Return transformers' .safetensors name for its name of a pickle; diffusers has one name for both."""
    return "model" + name.removeprefix("pytorch_model") if name.startswith("pytorch_model") else name


class WrittenTensor(Protocol):
    """A tensor of the output: `stored` is its name in its file."""

    @property
    def stored(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def nbytes(self) -> int: ...


def index_names(base: Index) -> tuple[str, ...]:
    """Return the output's name for every `*.index.json` of the base, in the order of `index_files`."""
    names = (path.relative_to(base.path) for path in base.index_files)
    return tuple(n.with_name(_renamed(n.name).replace(".bin.index", ".safetensors.index")).as_posix() for n in names)


def index_files(base: Index, written: Mapping[Path, Sequence[WrittenTensor]]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of every `*.index.json`: that of the base, with the file names and totals of the output.

    `written`: base file → the tensors of its output file.
    """
    for name, path in zip(index_names(base), base.index_files, strict=True):
        content = read_index(path)
        files = [f for f in base.files if f.parent == path.parent]
        members = {t.stored: t for f in files for t in written[f]}
        homes: dict[str, str] = {}
        for f in files:
            homes |= dict.fromkeys((t.stored for t in written[f]), Path(output_name(f, base)).name)
        content["weight_map"] = {n: homes[n] for n in content["weight_map"] if n in homes} | homes
        metadata = content["metadata"]
        metadata["total_size"] = sum(t.nbytes for t in members.values())
        if isinstance(metadata.get("total_parameters"), int):
            # only the difference is added: tied tensors may be counted twice
            old = sum(prod(t.shape) for t in base.tensors.values() if t.file in files)
            metadata["total_parameters"] += sum(prod(t.shape) for t in members.values()) - old
        yield name, (json.dumps(content, indent=2) + "\n").encode()


def configured(
    content: bytes, dtype: str | None, resized: Resized, *, unpacked: bool = False,
    section: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """Return a model's config.json with the new dtype and sizes of the weights; unchanged bytes if neither changed.

    `unpacked`: the weights were quantised and are plain values now, so nothing may say how they are quantised.
    `section`: what says how the output is quantised.
    """
    if dtype not in CONFIG_DTYPES and not resized and not unpacked and section is None:
        return content
    try:
        config = from_json(content)
    except ValueError:
        return content
    if not isinstance(config, dict):
        return content
    if unpacked or section is not None:
        _set_quantisation(config, section)
    for key in ("dtype", "torch_dtype"):
        if dtype in CONFIG_DTYPES and isinstance(config.get(key), str):
            config[key] = CONFIG_DTYPES[dtype]
    for name, (old, new) in resized.items():
        if old:
            _resize(config, name, old, new)
        else:  # the head was tied to the embeddings
            config["tie_word_embeddings"] = False
            if isinstance(text := config.get("text_config"), dict) and text.get("tie_word_embeddings"):
                text["tie_word_embeddings"] = False  # some models read it there too
    return (json.dumps(config, indent=2) + "\n").encode()


def _set_quantisation(config: dict[str, Any], section: Mapping[str, Any] | None) -> None:
    """Replace the entries of a configuration that say how the weights are quantised; `section`: the new one."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in SECTIONS:
            part.pop(key, None)
    if section is not None:
        config[SECTIONS[0]] = dict(section)


def _resize(config: dict[str, Any], name: str, old: Shape, new: Shape) -> None:
    """Correct the entries of a configuration that hold the size of this tensor."""
    if EMBEDDING.fullmatch(name):
        for part in (config, config.get("text_config")):  # of a vision-language model
            if isinstance(part, dict) and part.get("vocab_size") == old[0]:
                part["vocab_size"] = new[0]
    elif PATCHES.fullmatch(name) and config.get("in_channels") == old[1]:
        config["in_channels"] = new[1]
        if config.get("out_channels") is None and ("out_channels" in config or name == "x_embedder.weight"):
            # null means in_channels; Flux may leave the key out
            config["out_channels"] = old[1]
    elif HEAD.fullmatch(name) and old[0] != new[0]:
        labels = [f"LABEL_{i}" for i in range(new[0])]
        config["id2label"] = dict(enumerate(labels))
        config["label2id"] = {label: i for i, label in enumerate(labels)}
        if "num_labels" in config:
            config["num_labels"] = new[0]


def stored_name(info: StoredTensor) -> str:
    """Return the tensor's name inside its file; in a pipeline, `name` begins with the component."""
    return info.stored or info.name
