"""What becomes of the files of the input folders that hold no weights: read, copied to the output, or left out.

The tokenizer of an output folder is that of the base, of an adapter's folder, or of a folder that the user names. It is
a set of files that belong together: vocabulary, added tokens, chat template. Files of processors and generation
settings are taken one by one, since a trainer may save only some of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import InputError, UsageError
from ..files.file_uses import ONLY_FOR_CODES, FileUse, Folder
from ..files.folder_layouts import ADAPTER_CONFIG
from ..files.formats.quantization_config import QUANTISATION_FILES
from ..files.json_files import json_value
from ..files.side_files import EMBEDDING, base_folder
from ..paths import is_split, typed
from ..text import Note, listed
from .changes import Matches

MERGED: Final = "the output already contains this adapter"

VOCABULARY: Final = re.compile(
    r"tokenizer\.(?:json|model)|vocab\.(?:json|txt)|spiece\.model|sentencepiece(?:\.bpe)?\.model|tekken\.json"
    r"|[\w.-]*\.tiktoken"
)
"""Files without which a tokenizer is not whole."""

FILE_SET: Final = re.compile(
    rf"{VOCABULARY.pattern}|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|merges\.txt"
    r"|tokenization_\w+\.py"
)
"""Files that are taken all from one folder."""

TEMPLATE: Final = re.compile(r"chat_template\.(?:jinja|json)|additional_chat_templates/.*\.jinja")

SINGLE_FILES: Final = re.compile(
    r"(?:(?:image_|video_|audio_)?(?:pre)?processor_config|(?:audio|image|feature)_extractor_config|generation_config)\.json"
)
"""Files that are taken one by one."""

OTHER_TOKENIZER: Final = "the output has another tokenizer"


def folder_files(matched: Matches) -> tuple[tuple[Folder, ...], dict[str, Path], list[Note]]:
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
        elif path.name == ADAPTER_CONFIG and path.parent in within:
            uses.append(FileUse(file.name, "left out", MERGED))
        elif unpacked and path.name in QUANTISATION_FILES:
            uses.append(FileUse(file.name, "left out", ONLY_FOR_CODES))
    of_base = of_base.replaced(uses)
    # The tokenizer, of the base or of an adapter.
    rows = [_embedding_rows(matched, number) for number, folder in enumerate(matched.inputs.folders) if folder]
    tokenizer, notes = chosen_tokenizer(job.tokenizer, of_base, others, rows)
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


def _embedding_rows(matched: Matches, number: int) -> EmbeddingRows:
    """Return the rows of the largest table of tokens, before and after an adapter."""
    base, match = matched.inputs.base, matched.adapters[number]
    tables = [key for key, info in base.tensors.items() if len(info.shape) == 2 and EMBEDDING.fullmatch(key)]
    key = max(tables, key=lambda name: base.tensors[name].shape[0], default=None)
    if key is None:
        return EmbeddingRows(0, 0, changed=False)
    after = match.replaced[key].shape if key in match.replaced else matched.weights[key].shape
    changed = key in match.uses or key in match.replaced or key in match.bases
    return EmbeddingRows(base.tensors[key].shape[0], after[0], changed=changed)


class Tokenizer(NamedTuple):
    """The files of a tokenizer that replace those of the base."""

    folder: Path
    files: Mapping[str, Path]  # name in the output → file
    dropped: tuple[str, ...]  # files of the base that the output does not get
    why: str


class EmbeddingRows(NamedTuple):
    """The rows of the embeddings: in the base, in the output, and whether an adapter changes them."""

    before: int
    after: int
    changed: bool


def chosen_tokenizer(
    asked: str | None, base: Folder, adapters: Sequence[Folder], rows: Sequence[EmbeddingRows]
) -> tuple[Tokenizer | None, tuple[Note, ...]]:
    """Return the tokenizer that replaces the base's, None for the base's own, and notes.

    `asked`: the value of `--tokenizer`. `rows`: those of each adapter. Without an answer of the user an adapter's
    tokenizer is taken if its size shows that it is the right one. UsageError if no folder has what is asked for.
    """
    # What the user asks for.
    if asked == "base":
        return None, ()
    whole = [folder for folder in adapters if _is_whole(folder)]
    if asked is not None and asked != "adapter":
        folder = _tokenizer_folder(Path(asked))
        return _tokenizer(folder, base, "--tokenizer names it"), ()
    if asked == "adapter":
        if len({*(folder.path for folder in whole)}) != 1:
            what = (
                "several adapter folders contain a tokenizer"
                if whole
                else "no adapter folder contains a whole tokenizer"
            )
            where = listed(str(folder.path) for folder in whole or adapters) or "the adapters are files"
            fix = f"name the folder: `--tokenizer {typed([str((whole or adapters or [base])[0].path)])}`"
            raise UsageError(what, where, fix if whole else "name a folder that contains one, or leave --tokenizer out")
        return _tokenizer(whole[0], base, "--tokenizer adapter"), ()
    # Else the first tokenizer of an adapter whose size shows that it is the right one.
    other = {folder.path: names for folder in adapters if (names := _other_files(folder, base.path))}
    size_of_base = vocabulary_size(base.path) if other or any(row.after > row.before for row in rows) else None
    notes = []
    for folder, row in zip(adapters, rows, strict=True):
        size = vocabulary_size(folder.path) if folder in whole and folder.path in other else None
        if size is not None and (size_of_base or 0) < size <= row.after and (row.changed or size == row.after):
            tokenizer = _tokenizer(folder, base, f"it has {size} tokens, the embeddings have {row.after} rows")
            note = Note(f"the tokenizer of the output is that of {folder.path.name}: {tokenizer.why}")
            return tokenizer, (note,)
        if folder.path in other:
            differing = listed(other[folder.path])
            notes.append(Note(f"the output has the base's tokenizer; {folder.path} has another {differing}: "
                              "--tokenizer adapter takes it, with its chat template"))  # fmt: skip
        elif size_of_base is not None and row.before < row.after != size_of_base:
            notes.append(Note(
                f"the embeddings grow from {row.before} to {row.after} rows; the output has the base's tokenizer of "
                f"{size_of_base} tokens: --tokenizer PATH takes that of the training"
            ))  # fmt: skip
    return None, tuple(notes)


def _other_files(folder: Folder, base: Path) -> list[str]:
    """Return the files of a folder's tokenizer that differ in size from the base's; no file is read."""
    names = [f.name for f in folder.files if FILE_SET.fullmatch(f.name) or TEMPLATE.fullmatch(f.name)]
    return [name for name in names if _size(folder.path / name) != _size(base / name)]


def _is_whole(folder: Folder) -> bool:
    return any(VOCABULARY.fullmatch(file.name) for file in folder.files)


def _tokenizer_folder(path: Path) -> Folder:
    """Return the folder that the user names; UsageError if it holds no whole tokenizer."""
    files = sorted(path.iterdir()) if path.is_dir() else []
    folder = Folder("adapter", path, tuple(FileUse(file.name, "read") for file in files if file.is_file()))
    if not _is_whole(folder):
        raise UsageError("the folder contains no whole tokenizer", f"`--tokenizer {path}`",
                         "name a folder with tokenizer.json or the like, or write adapter or base")  # fmt: skip
    return folder


def _tokenizer(folder: Folder, base: Folder, why: str) -> Tokenizer:
    names = [file.name for file in folder.files]
    states_one = _table(folder.path / "tokenizer_config.json").get("chat_template")
    replaced = [FILE_SET, TEMPLATE] if states_one or any(map(TEMPLATE.fullmatch, names)) else [FILE_SET]
    files = {n: folder.path / n for n in names if any(kind.fullmatch(n) for kind in (FILE_SET, TEMPLATE, SINGLE_FILES))}
    dropped = (n for n in base.names if n not in files and any(kind.fullmatch(n) for kind in replaced))
    return Tokenizer(folder.path, files, tuple(dropped), why)


def vocabulary_size(folder: Path) -> int | None:
    """Return the number of tokens of the tokenizer in a folder, added ones included; None if no file states it."""
    whole, stated = _table(folder / "tokenizer.json"), _table(folder / "tokenizer_config.json")
    model = whole.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = [len(vocab) - 1] if isinstance(vocab, list) else _ids(vocab)
    added = whole.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids += [*_ids(_table(folder / "vocab.json")), *_ids(_table(folder / "added_tokens.json"))]
    decoder = stated.get("added_tokens_decoder")
    ids += [int(n) for n in decoder if str(n).isdigit()] if isinstance(decoder, dict) else []
    numbers = [n for n in ids if isinstance(n, int)]
    return max(numbers) + 1 if numbers else None


def _ids(table: object) -> list[Any]:
    return [*table.values()] if isinstance(table, dict) else []


def _table(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} for a file that is missing or holds something else."""
    try:
        value = json_value(path)
    except InputError:
        return {}
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
