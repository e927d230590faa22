"""What an output folder holds beside the weights, so that it loads like the one it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .checkpoint import Index, read_json
from .header import TensorInfo

WEIGHTS: Final = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".tflite")
)
"""Suffixes of files that hold weights; the base's own would be stale beside the merged ones."""

LEFT: Final = frozenset({".git", ".cache", "__pycache__", ".gitattributes"})

CONFIG_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def side_files(base: Index) -> Iterator[str]:
    """Names, relative to the base folder with forward slashes, of what is copied as it is."""
    written = {*base.files, *base.index_files}
    for folder, names, files in os.walk(base.path):
        names[:] = sorted(n for n in names if n not in LEFT)
        for name in sorted(files):
            path = Path(folder, name)
            stale = path.suffix in WEIGHTS or ".index." in name
            if path not in written and not stale and name not in LEFT:
                yield path.relative_to(base.path).as_posix()


def output_name(file: Path, base: Index) -> str:
    """The name of the output file for one of the base's, relative to the folder; pickles become .safetensors."""
    relative = file.relative_to(base.path)
    if relative.suffix == ".safetensors":
        return relative.as_posix()
    return relative.with_name(Path(_renamed(relative.name)).stem + ".safetensors").as_posix()


def _renamed(name: str) -> str:
    """transformers' name for pickled weights → its name for safetensors; diffusers has one name for both."""
    return "model" + name.removeprefix("pytorch_model") if name.startswith("pytorch_model") else name


def index_files(base: Index, sizes: Mapping[str, tuple[Path, int]]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every `*.index.json`: as the base's, with the output's file names and its `total_size`.

    `sizes`: stored name of every output tensor (created ones too) → the base file it belongs to, its bytes.
    """
    for path in base.index_files:
        content = read_json(path)
        here = {f.name for f in base.files if f.parent == path.parent}
        members = {name: f for name, (f, _) in sizes.items() if f.parent == path.parent and f.name in here}
        order = [*content.get("weight_map", {}), *members]
        content["weight_map"] = {name: Path(output_name(members[name], base)).name for name in order if name in members}
        metadata = content.setdefault("metadata", {})
        metadata["total_size"] = sum(sizes[name][1] for name in members)
        relative = path.relative_to(base.path)
        name = _renamed(relative.name).replace(".bin.index", ".safetensors.index")
        yield relative.with_name(name).as_posix(), (json.dumps(content, indent=2) + "\n").encode()


def configured(content: bytes, dtype: str | None, vocabulary: tuple[int, int] | None = None) -> bytes:
    """A model's config.json, saying the dtype and size of vocabulary (old, new) that the weights now have.

    As it was if there is nothing to say.
    """
    if dtype not in CONFIG_DTYPES and vocabulary is None:
        return content
    try:
        config: dict[str, Any] = json.loads(content)
    except ValueError:
        return content
    for key in ("dtype", "torch_dtype"):
        if dtype in CONFIG_DTYPES and isinstance(config.get(key), str):
            config[key] = CONFIG_DTYPES[dtype]
    for part in (config, config.get("text_config")):  # of a vision-language model
        if vocabulary and isinstance(part, dict) and part.get("vocab_size") == vocabulary[0]:
            part["vocab_size"] = vocabulary[1]
    return (json.dumps(config, indent=2) + "\n").encode()


def stored_name(info: TensorInfo) -> str:
    """The tensor's name inside its file; in a pipeline the plan's name has the component in front."""
    return info.stored or info.name
