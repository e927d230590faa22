"""The file of an adapter: its tensors, metadata, and the atomic write. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ..disk.draft import Draft, DraftBytes, HeapBytes
from ..disk.publish import named, replacing
from ..disk.reader import Reader
from ..disk.writer import require_space
from ..dtypes import bytes_of
from ..errors import MergeError
from ..files.checkpoint import Index
from ..files.folder_layouts import PEFT_PREFIX
from ..files.safetensors import layout, padded
from ..paths import input_name
from ..planning.recipe import configurations
from ..sources.inputs import origin
from ..text import Note
from ..version import __version__
from .job import AdapterJob
from .metadata import HeaderEntry, has_hashes, header_room

Proof: TypeAlias = Mapping[str, Any]
"""The results of a proof, for the report."""

PAIRS: Final = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
)
"""Endings of a pair of factors that readers of several programs know; the first is written where no input has one."""


CHANGES: Final = (".diff", ".diff_b")
"""Endings of the change of a weight, and of a bias."""

COMFY: Final = ("diffusion_model.", "text_encoders.")
"""Beginnings of names that ComfyUI alone reads."""


class Entry(NamedTuple):
    """One tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | HeapBytes | DraftBytes

    def pieces(self) -> Iterator[memoryview]:
        """Yield its bytes in order."""
        yield from (self.data,) if isinstance(self.data, memoryview) else self.data.pieces()


def recipe(
    job: AdapterJob, inputs: Sequence[Index], residual: float, dropped: Sequence[str],
    digest: Callable[[Path], str],
) -> dict[str, Any]:  # fmt: skip
    """Return how the file was made: inputs by name, size and hash, and every option that changes a byte."""
    tuned = job.command.inputs == "checkpoints"
    shared = {n: getattr(job.inputs, n) for n in ("dtype", "unmatched")}
    shared |= {"setting": dict(job.inputs.setting)} if job.inputs.setting else {}
    value: dict[str, Any] = {
        "version": __version__, "format": 2, "command": job.command.name,
        "tuned" if tuned else "adapters": [
            {**facts(ref.path, index, digest), **({} if tuned else configurations(ref.path, index)),
             "strength": ref.strength, "parts": [list(p) for p in ref.parts]}
            for ref, index in zip(job.adapters, inputs, strict=True)
        ],
        "options": {**shared, **dict(job.options)}, "residual": float(f"{residual:.6g}"),
    }  # fmt: skip
    if job.base is not None:
        from ..files.checkpoint import open_checkpoint

        value["base"] = facts(job.base, open_checkpoint(job.base), digest)
    if dropped:
        value["dropped_metadata"] = list(dropped)
    return value


def facts(path: Path, index: Index, digest: Callable[[Path], str]) -> dict[str, Any]:
    """Return an input by name, with size and SHA-256 of each of its files, and the address that it came from."""
    whole = index.path.is_dir()
    names = [(f, f.relative_to(index.path).as_posix() if whole else f.name) for f in index.files]
    files = [{"name": name, "size": f.stat().st_size, "sha256": digest(f)} for f, name in names]
    entry: dict[str, Any] = {"name": input_name(index.path), "folder": whole, "files": files}
    return entry if (address := origin(path)) is None else {**entry, "source": str(address)}


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONTENTS: Final = (CONFIG, WEIGHTS)
"""The files of a PEFT folder."""


def expect_room(job: AdapterJob, rows: Iterable[HeaderEntry]) -> None:
    """Raise ResourceError unless the disk has room for an output of these tensors: name, dtype and shape."""
    require_space(job.output, sum(bytes_of(dtype, shape) for _, dtype, shape in rows))


def drafted(
    job: AdapterJob, reader: Reader, rows: Iterable[HeaderEntry], inputs: Sequence[Index], *, folder: bool
) -> Draft:
    """Return the place where the tensors of an output are put. `rows`: their names, dtypes and shapes, as far as they
    are known. `inputs`: those whose metadata the output keeps."""
    rows = [*rows]
    most = sum(bytes_of(dtype, shape) for _, dtype, shape in rows)
    begin = partial(replacing, job.output, reader.paths, overwrite=job.inputs.overwrite, folder=folder,
                    contents=CONTENTS if folder else ())  # fmt: skip
    return Draft(job.output, begin, inside=WEIGHTS if folder else "", room=header_room(rows, inputs),
                 hashed=has_hashes(job.command, inputs), most=most)  # fmt: skip


def put(entries: Iterable[Entry], draft: Draft) -> list[Entry]:
    """Return the tensors in the order of the draft, to which the others are added."""
    placed: list[tuple[int, Entry]] = []
    for entry in entries:
        data = entry.data
        if isinstance(data, HeapBytes):
            parts = [draft.put(piece) for piece in data.pieces()]
            data = DraftBytes(draft, parts[0].first if parts else draft.nbytes, data.nbytes)
        elif isinstance(data, memoryview):
            data = draft.put(data)
        placed.append((data.first, entry._replace(data=data)))
    assert sum(entry.data.nbytes for _, entry in placed) == draft.nbytes, "every tensor that was put is in the file"
    return [entry for _, entry in sorted(placed, key=lambda pair: pair[0])]


class Content(NamedTuple):
    """The content of an output."""

    entries: Sequence[Entry]  # in the order of the draft
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None  # the configuration of a PEFT folder; None: a file is written


def text_of(config: Mapping[str, Any]) -> bytes:
    """Return the configuration of a PEFT folder as it is written."""
    return json.dumps(config, indent=2, sort_keys=True).encode()


def write(
    job: AdapterJob, reader: Reader, draft: Draft, content: Content, prove: Callable[[Path], Proof]
) -> tuple[int, Proof | None]:
    """Complete the file or folder under its temporary name, prove it, and give it its name; return its bytes and the
    proof.

    `prove` gets the temporary path, if the job asks for a proof. The reader's files must be as they were when they were
    opened.
    """
    entries, metadata, configuration = content
    text = b"" if configuration is None else text_of(configuration)
    header = layout([(e.name, e.dtype, e.shape) for e in entries], metadata, 0)
    part = draft.part
    require_space(job.output, len(header) + draft.waiting + len(text))
    size = len(text) + draft.complete(lambda least: padded(header, least))
    if configuration is not None:
        (part / CONFIG).write_bytes(text)
    try:
        proof = prove(part) if job.inputs.verify else None
    except MergeError as e:
        e.reword(named(part, job.output))
        raise
    reader.check_unchanged()
    draft.publish()
    return size, proof


OF_PEFT: Final = Note("PEFT's names in a file: PEFT loads a folder, which --format peft writes")
WHOLE_CHANGES: Final = Note(
    "it has whole changes (.diff, .diff_b), which diffusers silently leaves out; --format diffusers stores those of "
    "biases as diffusers reads them"
)
BIASES_NEXT_TO_FACTORS: Final = Note(
    "changes of biases (.diff_b) next to factors: ComfyUI reads them, LyCORIS silently leaves them out"
)


def unread(keys: Iterable[str]) -> Iterator[Note]:
    """Yield notes on what loaders whose names a file has do not take."""
    keys = {*keys}
    of_diffusers = [key for key in keys if key.endswith(PAIRS[1][0])]
    if any(key.startswith(PEFT_PREFIX) for key in keys):
        yield OF_PEFT
    elif of_diffusers and not of_diffusers[0].startswith(COMFY) and any(key.endswith(CHANGES) for key in keys):
        yield WHOLE_CHANGES
    stems = {key.removesuffix(PAIRS[0][0]) for key in keys if key.endswith(PAIRS[0][0])}
    if any(key.endswith(CHANGES[1]) and key.removesuffix(CHANGES[1]) in stems for key in keys):
        yield BIASES_NEXT_TO_FACTORS


def unique(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield names that two entries have."""
    yield from (name for name, count in Counter(e.name for e in entries).items() if count > 1)
