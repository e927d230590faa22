"""From a written adapter back to its job: to make it again, or to prove that these inputs give these bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import FitError, UsageError, VerificationFailed
from ..files.checkpoint import open_checkpoint
from ..job import Adapter
from ..planning.recipe import KEY, parsed, sha256
from ..proof.find_inputs import find_all
from ..proof.read_recipe import damaged, input_of, number_of, text_of
from .job import OWN, AdapterJob, make_adapter_job
from .report import AdapterReport

COMMANDS: Final = ("combine", "resize")
RECORDED: Final = frozenset((*OWN, "dtype", "unmatched", "setting"))
"""The options that a recipe states; others that it names are ignored, as whose file it is does not decide them."""


def is_ours(made: Path) -> bool:
    """Return whether a file says that `combine` or `resize` made it."""
    found = parsed(open_checkpoint(made).metadata.get(KEY, ""))
    return found is not None and found.get("command") in COMMANDS


def job_of(made: Path, output: str | Path, folders: Sequence[Path], **options: Any) -> AdapterJob:
    """Return the job that made a file; InputError for a damaged recipe, or for an input that is not found."""
    told = parsed(open_checkpoint(made).metadata.get(KEY, "")) or {}
    try:
        adapters = [
            (input_of(a), number_of(a["strength"]), tuple((text_of(p), number_of(f)) for p, f in a["parts"]))
            for a in told["adapters"]
        ]
        base = input_of(told["base"]) if "base" in told else None
        given = {name: value for name, value in told["options"].items() if name in RECORDED}

        def job(paths: Sequence[Path], **more: Any) -> AdapterJob:
            refs = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, adapters, strict=False)]
            return make_adapter_job(told["command"], refs, output, paths[-1] if base else None, {**given, **more})

        inputs = [*(a for a, _, _ in adapters), *([base] if base else [])]
        job([made] * len(inputs))  # checks its values before a user adds others
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(made, str(e)) from e
    except (UsageError, FitError) as e:
        raise damaged(made, f"{e.what} ({e.where})") from e
    return job(find_all(inputs, [*folders, made.absolute().parent, Path.cwd()]), **options)


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
