"""The output as others read it: the `safetensors` library, and for folders transformers and diffusers.

The rest of the proof uses this project's own parser, which could share a mistake with the code that wrote the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..disk.remote import begin, remote
from ..dtypes import DTYPES, FLOATS, WHOLE_DTYPES
from ..errors import InputError, VerificationFailed
from ..files.json_files import read_json
from ..files.safetensors import metadata_of
from ..files.side_files import CONFIG_DTYPES
from ..paths import typed
from ..planning.plan import OutputFile, Plan
from ..text import Note, listed, quoted

READ_BY_ALL: Final = FLOATS | WHOLE_DTYPES
"""Dtypes that every supported version of the library reads."""

TIED_ENTRY: Final = "tie_word_embeddings"
MERGE_AGAIN: Final = "merge again; if it fails again with the same inputs, report it"


def instead(output: Path) -> str:
    """Return what to do about a wrong side file of a finished output."""
    return f"merge again, or take it from `lora-merge replay {typed([str(output)])} -o OTHER`"


def check_folder(plan: Plan, part: Path, *, new: bool) -> None:
    """Compare indexes and configurations of an output folder with the plan; VerificationFailed if one differs.

    `new`: whether the output was written just now.
    """
    if not plan.is_folder:
        return
    fix = MERGE_AGAIN if new else instead(part)
    try:
        for what, where in chain(_in_indexes(plan, part), _in_configs(plan, part), _in_pipeline(plan, part)):
            raise VerificationFailed(what, where, fix)
    except InputError as e:
        raise VerificationFailed(f"a file next to the weights cannot be read: {e.what}", e.where, fix) from e


def check_opened(file: OutputFile, path: Path, header: bytes | None = None) -> tuple[Note, ...]:
    """Compare the library's reading of a file with the plan; VerificationFailed if it reads something else.

    Returns a note if the library does not know a dtype in it. `header`: that of the file, where it was written just
    now. Only the header is read.
    """
    if file.alignment > 1:
        return ()  # GGUF: the library does not read it
    import safetensors

    # What the library should see, and what it sees.
    planned = (t.in_file for t in file.targets)
    expected = {name: (dtype, list(shape)) for name, dtype, shape in planned}
    if (far := remote(path)) is not None:
        size = bytearray(8)
        far.read_into(memoryview(size), 0)
        begin(path, 8 + int.from_bytes(size, "little"))
    try:
        with safetensors.safe_open(str(path), framework="np") as f:
            slices = ((key, f.get_slice(key)) for key in f.keys())  # noqa: SIM118  # it is no dict
            opened = {key: (piece.get_dtype(), list(piece.get_shape())) for key, piece in slices}
            metadata = f.metadata() or {}
    except safetensors.SafetensorError as e:
        if odd := {dtype for dtype, _ in expected.values()} - READ_BY_ALL:
            note = f"safetensors {safetensors.__version__} does not open the output, which holds {listed(sorted(odd))}"
            return (Note(note),)
        raise VerificationFailed(
            f"the safetensors library does not open the output: {e}", str(path), MERGE_AGAIN
        ) from e
    # Where the two differ.
    if opened != expected:
        name = next(n for n in (*expected, *opened) if opened.get(n) != expected.get(n))
        difference = f"{quoted(name)}: {_shown(opened.get(name))}, planned {_shown(expected.get(name))}"
        raise VerificationFailed(
            "the safetensors library sees another tensor than planned", f"{path}: {difference}", MERGE_AGAIN
        )
    if header and metadata != metadata_of(header):
        raise VerificationFailed("the safetensors library sees other metadata than planned", str(path), MERGE_AGAIN)
    return ()


def _shown(tensor: tuple[str, list[int]] | None) -> str:
    return f"{tensor[0]} {tensor[1]}" if tensor else "none"


def _in_indexes(plan: Plan, part: Path) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and where, unless every `*.index.json` names every tensor of its folder, with its file, and
    their total size."""
    for name in plan.indexes:
        if not (part / name).is_file():
            continue  # `lora-merge verify` reports it
        folder, content = PurePosixPath(name).parent, read_json(part / name)
        files = [f for f in plan.files if PurePosixPath(f.name).parent == folder]
        table, metadata = content.get("weight_map"), content.get("metadata")
        if (odd := _misplaced(table, files)) is not None:
            yield "an index does not name every tensor in the file that has it", f"{part / name}: {quoted(odd)}"
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum([t.nbytes for f in files for t in f.targets])
        if size != total:
            where = f"{part / name}: total_size {size}, the tensors have {total} bytes"
            yield "an index states another size than the tensors have", where


def _misplaced(table: object, files: Sequence[OutputFile]) -> str | None:
    """Return the name of a tensor that the weight map of an index leaves out, adds or puts elsewhere; None without one.

    No second table of all names is made unless one is wrong: of 200 000 names it takes 10 MiB.
    """
    if not isinstance(table, dict):
        return "weight_map"
    homes = ((t.stored, PurePosixPath(f.name).name) for f in files for t in f.targets)
    wrong = next((name for name, file in homes if table.get(name) != file), None)
    if wrong is not None or len(table) == sum(len(f.targets) for f in files):
        return wrong
    return str(next(iter(table.keys() - {t.stored for f in files for t in f.targets})))


def _in_configs(plan: Plan, part: Path) -> Iterator[tuple[str, str]]:
    """Yield the same unless every config.json has the dtype of the weights, and ties no weights that were separated."""
    due = CONFIG_DTYPES.get(DTYPES.get(plan.job.dtype, ""))
    for folder in dict.fromkeys(str(PurePosixPath(f.name).parent) for f in plan.files):
        path = part / folder / "config.json"
        if not path.is_file():
            continue
        config = read_json(path)
        dtypes = [config[key] for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
        if due is not None and any(dtype != due for dtype in dtypes):
            yield "a configuration states another dtype than the weights have", f"{path}: {dtypes[0]}"
        separated = [name for name, (old, _) in plan.resized(folder).items() if not old]
        if separated and any(_ties(config)):
            where = f"{path}: {TIED_ENTRY}, {quoted(separated[0])}"
            yield "a configuration ties what has weights of its own now", where


def _ties(config: Mapping[str, Any]) -> Iterator[bool]:
    """Yield whether head and embeddings are tied, for every level where transformers looks for the field."""
    yield config.get(TIED_ENTRY) is not False
    text = config.get("text_config")
    yield isinstance(text, dict) and text.get(TIED_ENTRY) is True


def _in_pipeline(plan: Plan, part: Path) -> Iterator[tuple[str, str]]:
    """Yield the same for each component that `model_index.json` names, the base has and the output lacks."""
    if not (part / "model_index.json").is_file():
        return
    for name, kind in read_json(part / "model_index.json").items():
        named = isinstance(kind, list) and len(kind) == 2 and all(isinstance(word, str) for word in kind)
        plain = not set(name) & set("/\\:\0") and name not in ("", ".", "..")
        if named and plain and (plan.base.path / name).is_dir() and not (part / name).is_dir():
            yield "a component of the pipeline is missing", f"{part}: {quoted(name)}"
