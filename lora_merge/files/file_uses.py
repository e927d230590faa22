"""The table of an input folder: every file with what a merge does with it, and why if that is nothing.

The table is made once for each folder, from the listing of the folder and the headers of its weights, while the merge
is planned. Notes, reports, `inspect` and the list of copied files are read from it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from ..disk.files import Header
from ..dtypes import Shape
from ..errors import InputError
from ..paths import WEIGHT_SUFFIXES
from ..text import Note, listed
from .checkpoint import Index, read_header
from .folder_layouts import ADAPTER_CONFIG, MODEL_CONFIG, PIPELINE_CONFIG, is_usual_name
from .json_files import read_json

Use: TypeAlias = Literal["read", "copied", "left out"]

NOT_LISTED: Final = re.compile(r"\.git|\.cache|__pycache__|\.gitattributes|\..*\.lora-merge\.(?:part(?:\.\w+)?|claim)")
"""Names of entries that belong to other programs or to a running merge; they are in no table."""

TRAINER_STATE: Final = re.compile(
    r"(?:optimi[sz]er|(?:lr_)?scheduler|scaler|rng_state|random_states|sampler|dataloader|custom_checkpoint)[\w.-]*"
    r"\.(?:pt|pth|bin|pkl|ckpt|safetensors|distcp)|training_args\.bin|(?:zero_pp_rank|bf16_zero_pp_rank)\w*\.pt|latest"
    r"|zero_to_fp32\.py|(?:trainer_state|scaler|all_results|train_results|eval_results)\.json|trainer_log\.jsonl"
)
"""Files in which trainers keep what they need to go on: states of optimizer, scheduler and random numbers, arguments.
Source: transformers trainer.py, accelerate checkpointing.py, DeepSpeed runtime/engine.py."""

OTHER_CHECKPOINT: Final = re.compile(
    r"(?:checkpoint|global_?step|epoch|step|iter)[-_=]?\d+|checkpoints|runs|wandb|logs"
)
"""Folders of a training: its earlier or later checkpoints, and its logs."""

EXPORTS: Final = re.compile(r"onnx|openvino|coreml|tflite|original|gguf")
"""Sub-folders that hold the same model in another format."""

EXPORTED: Final = re.compile(
    r"(?:(?:diffusion_)?(?:flax|tf|rust|pytorch)_|(?:en|de)coder_(?:with_past_)?)?model[\w.-]*"
    r"\.(?:onnx(?:[._]data\w*)?|h5|msgpack|ot|tflite|pdparams)"
    r"|weights\.npz|openvino_\w*\.(?:bin|xml)|.*\.ckpt\.(?:index|meta|data-\d+-of-\d+)"
)
"""Usual names of the same weights for other libraries, in formats whose headers are not read: Flax, TensorFlow, Rust,
ONNX, MLX, Paddle, OpenVINO."""

SECOND_SET_OF_MODEL: Final = "a second set of the model's weights"
SECOND_SET_OF_ADAPTER: Final = "a second set of the adapter's weights"
NEEDS_BASE: Final = "whether it matches is known only with a base"
OF_TRAINING: Final = "a state of the training, not a weight"
OF_MODEL: Final = "the model in the adapter's folder"
ANOTHER: Final = "another checkpoint of a training"
OTHER_ADAPTER: Final = "another adapter"
EXPORT: Final = "the same model in another format"
UNLISTED: Final = "model_index.json does not name the folder"
NO_WEIGHTS: Final = "the index of weights that are left out"
NOT_OF_MODEL: Final = "it belongs to the adapter, not to the model"
ONLY_FOR_CODES: Final = "it describes the codes of the base's weights, which the output does not have"

DUPLICATE_SHARE: Final = (
    0.5  # share of a file's values, or of the model's, from which two sets of tensors count as the same
)


class FileUse(NamedTuple):
    """One file of an input folder."""

    name: str  # relative to the folder, with forward slashes
    use: Use
    why: str = ""  # of a file that is left out
    tensors: bool = False  # whether it may hold tensors: then leaving it out is a warning


class Folder(NamedTuple):
    """An input folder and its files."""

    role: Literal["base", "adapter"]
    path: Path
    files: tuple[FileUse, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the copied files."""
        return tuple(file.name for file in self.files if file.use == "copied")

    def replaced(self, uses: Iterable[FileUse]) -> Folder:
        """Return the folder with other uses of some files."""
        new = {use.name: use for use in uses}
        return self._replace(files=tuple(new.get(file.name, file) for file in self.files))

    def to_dict(self) -> dict[str, object]:
        """Return the table as reports have it."""
        files = {f.name: {"use": f.use, **({"why": f.why} if f.why else {})} for f in self.files}
        return {"role": self.role, "path": str(self.path), "files": files}

    def lines(self) -> Iterator[str]:
        """Yield a line for each file."""
        yield from (f"{f.name}: {f.use}" + (f": {f.why}" if f.why else "") for f in self.files)

    def warning(self) -> tuple[Note, ...]:
        """Return the note on files with tensors that are left out; a whole folder is named once."""
        left: dict[str, dict[str, None]] = {}
        for file in (f for f in self.files if f.use == "left out" and f.tensors):
            left.setdefault(file.why, {})[self._outermost(file)] = None
        named = [f"{listed(names, 20)} ({why})" for why, names in left.items()]
        return (Note(f"{self.path.name}: weights are left out: {'; '.join(named)}"),) if named else ()

    def _outermost(self, file: FileUse) -> str:
        """Return the folder of which this reason holds for all files, or the file's name."""
        for parent in [*Path(file.name).parents][-2::-1]:
            inside = [f for f in self.files if f.name.startswith(f"{parent.as_posix()}/")]
            if all(f.use == "left out" and (f.why == file.why or not f.tensors) for f in inside):
                return parent.as_posix()
        return file.name


def is_weights(name: str) -> bool:
    """Return whether a file of this name may hold tensors."""
    return Path(name).suffix.lower() in WEIGHT_SUFFIXES or EXPORTED.fullmatch(name) is not None


def listing(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, sorted; links to folders are not followed."""
    for here, below, files in os.walk(folder):
        below[:] = sorted(name for name in below if not NOT_LISTED.fullmatch(name))
        yield from (Path(here, name) for name in sorted(files) if not NOT_LISTED.fullmatch(name))


def duplicate(path: Path, base: Index, *, by_name: bool = True) -> str:
    """Return why a file of weights is no further part of the model; "" for a part of its own.

    Names and shapes in its header decide. `by_name`: whether a pickle with the usual name of a model's weights is a
    second set without a look into it. Of formats without readable headers the usual names decide.
    """
    usual = is_usual_name(path.name)
    if EXPORTED.fullmatch(path.name) or (by_name and usual and path.suffix == ".bin"):
        return SECOND_SET_OF_MODEL
    try:
        header = read_header(path)
    except InputError:
        return SECOND_SET_OF_MODEL if usual else ""
    return SECOND_SET_OF_MODEL if same_tensors(header, base) else ""


def same_tensors(header: Header, base: Index) -> bool:
    """Return whether a file holds tensors of the base again: by name and shape half of its values, by name half of the
    base's tensors, or by shape alone nearly all of its values and half of the base's."""
    of_base = [(info.stored or info.name, info.shape) for info in base.tensors.values()]
    known, names = {*of_base}, {name for name, _ in of_base}
    total = sum(prod(info.shape) for info in header.tensors.values())
    forms = [(_tails(name), info.shape) for name, info in header.tensors.items()]
    same = sum(prod(shape) for tails, shape in forms if any((tail, shape) in known for tail in tails))
    named = sum(any(tail in names for tail in tails) for tails, _ in forms)
    if total and (same >= DUPLICATE_SHARE * total or named >= DUPLICATE_SHARE * len(of_base)):
        return True
    shapes = Counter(_matrix(shape) for _, shape in of_base) & Counter(_matrix(shape) for _, shape in forms)
    alike = sum(prod(shape) * count for shape, count in shapes.items())
    return total > 0 and alike >= 0.9 * total and alike >= DUPLICATE_SHARE * sum(prod(shape) for _, shape in of_base)


def _tails(name: str) -> list[str]:
    """Return a name, and without its first one, two or three words."""
    words = name.split(".")
    return [".".join(words[n:]) for n in range(min(4, len(words)))]


def _matrix(shape: Shape) -> tuple[int, ...]:
    """Return a shape whatever the order of its axes is."""
    return tuple(sorted(n for n in shape if n != 1))


def folder_reason(folder: Path, base: Index) -> str:
    """Return why a sub-folder with weights is no part of the base; "" for a part."""
    if OTHER_CHECKPOINT.fullmatch(folder.name):
        return ANOTHER
    if EXPORTS.fullmatch(folder.name):
        return EXPORT
    if base.components:
        return UNLISTED
    files = [path for path in listing(folder) if is_weights(path.name) and path.suffix != ".json"]
    return next((why for path in files if (why := duplicate(path, base, by_name=False))), "")


def adapter_folder(index: Index) -> Folder:
    """Return the files of an adapter's folder as they are without a base. `matching/trained_weights.py` looks for the
    match of the NEEDS_BASE ones in a base."""
    read, root = {*index.files, *index.index_files}, index.path
    stems = {path.stem for path in index.files}
    names_of_files = [header.tensors.keys() for header in index.headers.values()]
    models = any((root / config).exists() for config in (PIPELINE_CONFIG, MODEL_CONFIG))
    inner = {path.parent for path in listing(root) if path.name == ADAPTER_CONFIG} - {root}
    uses = []
    for path in listing(root):
        name, above = path.relative_to(root).as_posix(), [p for p in path.parents if root in p.parents]
        tensors = is_weights(path.name)
        if path in read or name == ADAPTER_CONFIG:
            use = FileUse(name, "read")
        elif TRAINER_STATE.fullmatch(path.name) or any(part.name.startswith("global_step") for part in above):
            use = FileUse(name, "left out", OF_TRAINING)
        elif any(OTHER_CHECKPOINT.fullmatch(part.name) for part in above):
            use = FileUse(name, "left out", ANOTHER, tensors)
        elif inner.intersection(above):
            use = FileUse(name, "left out", OTHER_ADAPTER, tensors)
        elif not tensors:
            use = FileUse(name, "left out", NOT_OF_MODEL)
        elif path.parent == root and models and is_usual_name(path.name):
            use = FileUse(name, "left out", OF_MODEL)
        elif (path.parent == root and path.stem in stems) or any(_same_names(path, names) for names in names_of_files):
            use = FileUse(name, "left out", SECOND_SET_OF_ADAPTER, tensors=True)
        else:
            use = FileUse(name, "left out", NEEDS_BASE, tensors=True)
        uses.append(use)
    return Folder("adapter", root, tuple(uses))


def _same_names(path: Path, names: Iterable[str]) -> bool:
    """Return whether a .safetensors file holds tensors of the same names, as saves from earlier in a training do."""
    if path.suffix != ".safetensors":
        return False
    try:
        return read_header(path).tensors.keys() == names
    except InputError:
        return False


def lists_only(path: Path, names: Iterable[str]) -> bool:
    """Return whether an index of shards lists only files of these names; False for one that cannot be read."""
    try:
        table = read_json(path).get("weight_map")
    except InputError:
        return False
    return isinstance(table, dict) and {*map(str, table.values())} <= {*names}
