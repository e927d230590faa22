"""From a written adapter back to its job: to make it again, or to prove that these inputs give these bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..adapter_options import OF_MERGE
from ..errors import FitError, UsageError, VerificationFailed
from ..files.checkpoint import open_checkpoint
from ..job import Adapter
from ..paths import absolute, current_folders
from ..planning.header_entries import TITLE
from ..planning.recipe import KEY, parsed, sha256
from ..progress import Progress, unwatched
from ..proof.find_inputs import find_all
from ..proof.read_recipe import damaged, input_of, number_of, text_of
from ..proof.replay import refuse_stated
from .average import MOVING
from .commands import COMMANDS
from .job import AdapterJob
from .output_file import CONTENTS
from .report import AdapterReport

SHARED: Final = frozenset(("dtype", "unmatched", "setting"))
"""The options of `merge` that a recipe states. Its other entries are ignored: anybody may have written the file, so it
does not decide where something is written or how much memory is used."""


def job_of(
    made: Path,
    output: str | Path,
    folders: Sequence[Path],
    *,
    links: Path | None = None,
    full: bool = False,
    **options: Any,
) -> AdapterJob:
    """Return the job that wrote a file; InputError for a damaged recipe, or for an input that is not found.

    `links`: a folder for links to inputs that have other names now, which the output tells. `full`: whether its proof
    computes every layer again.
    """
    metadata = open_checkpoint(made).metadata
    recipe = parsed(metadata.get(KEY, "")) or {}
    command = COMMANDS[recipe["command"]]
    try:
        adapters = [
            (input_of(a), number_of(a["strength"]), tuple((text_of(p), number_of(f)) for p, f in a["parts"]))
            for a in recipe["tuned" if command.inputs == "checkpoints" else "adapters"]
        ]
        if not adapters:
            raise ValueError("it names no adapter")
        base = input_of(recipe["base"]) if "base" in recipe else None
        taken = {name for name in command.options if name not in OF_MERGE} | SHARED
        stated = {name: value for name, value in recipe["options"].items() if name in taken}
        if "weights" in command.options and not any(name in stated for name in MOVING):
            stated = {"weights": [strength for _, strength, _ in adapters], **stated}

        def job(paths: Sequence[Path], **more: Any) -> AdapterJob:
            refs = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, adapters, strict=False)]
            if "weights" in command.options:  # the strengths of the recipe
                refs = [replace(ref, strength=1.0) for ref in refs]
            return command.job(refs, output, paths[-1] if base else None, {**stated, **more})

        inputs = [*(a for a, _, _ in adapters), *([base] if base else [])]
        job([made] * len(inputs))  # checks its values before a user adds others
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(made, str(e)) from e
    except (UsageError, FitError) as e:
        raise damaged(made, f"{e.what} ({e.where})") from e
    paths = find_all(inputs, [*folders, absolute(made).parent, *current_folders()])
    if links is not None:
        paths = [_as_named(path, one.name, links) for path, one in zip(paths, inputs, strict=True)]
    again = job(paths, **options)
    return replace(again, inputs=replace(again.inputs, title=metadata.get(TITLE)), full=full)  # not one by its own name


def _as_named(path: Path, name: str, links: Path) -> Path:
    """Return a path of an input that ends in the name of its recipe, where the disk allows a link."""
    if path.name == name or Path(name).name != name:
        return path
    link = Path(tempfile.mkdtemp(dir=links)) / name
    try:
        link.symlink_to(absolute(path), target_is_directory=path.is_dir())
    except OSError:
        return path
    return link


def replay(
    made: Path, output: str | Path, folders: Sequence[Path], *, progress: Progress = unwatched, **options: Any
) -> AdapterReport:
    """Make a file again from its recipe."""
    job = job_of(made, output, folders, **options)
    return COMMANDS[job.command].run(job, progress, None)


def prove(
    made: Path, folders: Sequence[Path], progress: Progress = unwatched, *, full: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Make a file again beside it, with its own proof, and compare the bytes; VerificationFailed where they differ.

    `full`: whether every layer is computed again in float64. `options`: none, as the recipe states all: UsageError.
    """
    refuse_stated(options)
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / made.name
        report = replay(made, again, folders, progress=progress, verify=True, links=Path(folder), full=full)
        pairs = zip(_files(Path(report.output)), _files(made), strict=True)
        if any(sha256(a) != sha256(b) for a, b in pairs):
            raise VerificationFailed("its inputs and its recipe give other bytes", str(made),
                                     "it was changed after it was made, or made by another version")  # fmt: skip
    return {"output": str(made), "proven": True, "full": full, "same_bytes": True, **(report.verified or {}),
            "schema": "lora-merge/adapter-proof/1"}  # fmt: skip


def _files(made: Path) -> list[Path]:
    return [made / name for name in CONTENTS] if made.is_dir() else [made]
