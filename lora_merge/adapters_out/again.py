"""From a written adapter back to its job: to make it again, or to prove that these inputs give these bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, VerificationFailed
from ..files.checkpoint import open_checkpoint
from ..job import Adapter
from ..planning.recipe import KEY, parsed, sha256
from ..proof.find_inputs import find_all
from ..proof.read_recipe import Input
from .job import AdapterJob, make_adapter_job
from .report import AdapterReport

COMMANDS: Final = ("combine", "resize")
AGAIN: Final = "make it again from its adapters"


def is_ours(made: Path) -> bool:
    """Return whether a file says that `combine` or `resize` made it."""
    found = parsed(open_checkpoint(made).metadata.get(KEY, ""))
    return found is not None and found.get("command") in COMMANDS


def job_of(made: Path, output: str | Path, folders: Sequence[Path], **options: Any) -> AdapterJob:
    """Return the job that made a file; InputError for a damaged recipe, or for an input that is not found."""
    told = parsed(open_checkpoint(made).metadata.get(KEY, "")) or {}
    try:
        adapters = [(_input(a), float(a["strength"]), tuple((str(p), float(f)) for p, f in a["parts"]))
                    for a in told["adapters"]]  # fmt: skip
        base = _input(told["base"]) if "base" in told else None
        given = {str(name): value for name, value in told["options"].items()}
        command = str(told["command"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InputError("the recipe is damaged", f"{made}: {KEY}", AGAIN) from e
    around = [*folders, made.absolute().parent, Path.cwd()]
    paths = find_all([*(a for a, _, _ in adapters), *([base] if base else [])], around)
    refs = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, adapters, strict=False)]
    return make_adapter_job(command, refs, output, paths[-1] if base else None, {**given, **options})


def _input(told: Any) -> Input:
    files = tuple((str(f["name"]), int(f["size"]), str(f["sha256"])) for f in told["files"])
    if not files:
        raise ValueError("an input without files")
    return Input(str(told["name"]), files, bool(told.get("folder")), "")


def replay(made: Path, output: str | Path, folders: Sequence[Path], **options: Any) -> AdapterReport:
    """Make a file again from its recipe."""
    from .run import run

    return run(job_of(made, output, folders, **options))


def prove(made: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Make a file again beside it, with its own proof, and compare the bytes; VerificationFailed where they differ."""
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "again.safetensors"
        report = replay(made, again, folders, verify=True)
        if sha256(again) != sha256(made):
            raise VerificationFailed("its inputs and its recipe give other bytes", str(made),
                                     "it was changed after it was made, or made by another version")  # fmt: skip
    return {"ok": True, "same_bytes": True, **dict(report.verified or {})}
