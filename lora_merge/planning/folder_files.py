"""What becomes of the files of the input folders that hold no weights: read, copied to the output, or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..errors import UsageError
from ..files.file_uses import ONLY_FOR_CODES, FileUse, Folder
from ..files.folder_layouts import FOLDER_CONFIGS
from ..files.side_files import (
    EMBEDDING,
    ON_QUANTISATION,
    base_folder,
)
from ..files.tokenizers import OTHER_TOKENIZER, EmbeddingRows, taken
from ..paths import is_split
from ..text import Note
from .changes import Matched

MERGED: Final = "the output already contains this adapter"


def folder_files(matched: Matched) -> tuple[tuple[Folder, ...], dict[str, Path], list[Note]]:
    """Return the files of every input folder and what becomes of them, the side files of the output, and notes."""
    job, base = matched.inputs.job, matched.inputs.base
    others = tuple(folder for folder in matched.inputs.folders if folder is not None)
    if not base.path.is_dir() or is_split(job.base):
        if job.tokenizer is not None:
            raise UsageError("the output is a file, which has no tokenizer", f"`--tokenizer {job.tokenizer}`",
                             "leave it out")  # fmt: skip
        return others, {}, [note for folder in others for note in folder.warning()]
    # Files of the base's folder: read, left out, or copied.
    of_base = base_folder(base)
    read = {path for match in matched.adapters for path in match.adapter.index.files}
    of_adapters = {path for path in read if base.path in path.parents and path not in base.files}
    within = {path.parent for path in {*of_adapters, *read.intersection(base.files)}}
    unpacked = bool(base.packed) and job.dtype != "keep"
    uses = []
    for file in of_base.files:
        path = base.path / file.name
        if path in of_adapters:
            uses.append(FileUse(file.name, "read"))
        elif path.name == FOLDER_CONFIGS[0] and path.parent in within:
            uses.append(FileUse(file.name, "left out", MERGED))
        elif unpacked and path.name in ON_QUANTISATION:
            uses.append(FileUse(file.name, "left out", ONLY_FOR_CODES))
    of_base = of_base.replaced(uses)
    # The tokenizer, of the base or of an adapter.
    rows = [_embedding_rows(matched, number) for number, folder in enumerate(matched.inputs.folders) if folder]
    tokenizer, notes = taken(job.tokenizer, of_base, others, rows)
    sides = {name: base.path / name for name in of_base.names}
    if tokenizer is not None:
        replaced = {*tokenizer.files, *tokenizer.dropped}
        of_base = of_base.replaced(FileUse(name, "left out", OTHER_TOKENIZER) for name in sides if name in replaced)
        sides = {name: path for name, path in sides.items() if name not in tokenizer.dropped} | dict(tokenizer.files)
        others = tuple(
            folder.replaced(FileUse(name, "copied") for name in tokenizer.files if folder.path == tokenizer.folder)
            for folder in others
        )
    folders = (of_base, *others)
    return folders, sides, [*(note for folder in folders for note in folder.warning()), *notes]


def _embedding_rows(matched: Matched, number: int) -> EmbeddingRows:
    """Return the rows of the largest table of tokens, before and after an adapter."""
    base, match = matched.inputs.base, matched.adapters[number]
    tables = [key for key, info in base.tensors.items() if len(info.shape) == 2 and EMBEDDING.fullmatch(key)]
    key = max(tables, key=lambda name: base.tensors[name].shape[0], default=None)
    if key is None:
        return EmbeddingRows(0, 0, changed=False)
    after = match.replaced[key].shape if key in match.replaced else matched.weights[key].shape
    changed = key in match.uses or key in match.replaced or key in match.bases
    return EmbeddingRows(base.tensors[key].shape[0], after[0], changed=changed)
