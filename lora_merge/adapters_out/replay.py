"""From a written adapter back to its job: to make it again, or to prove that these inputs give these bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

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
from .average import MOVING, Averaging, make_average
from .average import OWN as OF_AVERAGE
from .convert import OWN as OF_CONVERT
from .convert import make_conversion
from .convert import run as run_conversion
from .extract.extract_job import OWN as OF_EXTRACT
from .extract.extract_job import make_extraction
from .extract.run import run as run_extraction
from .format_option import run
from .job import OWN, AdapterJob, make_adapter_job
from .output_file import CONTENTS
from .report import AdapterReport


class Command(NamedTuple):
    """The two functions of a command: one makes its task of adapters, an output, a base and options, one runs it."""

    make: Callable[[Sequence[Adapter], Any, Any, Mapping[str, Any]], Any]
    run: Callable[[Any, Progress], AdapterReport]
    own: frozenset[str]  # its options that a recipe states
    inputs: str = "adapters"  # what the recipe calls them


def _plain(command: str) -> Command:
    return Command(lambda refs, *rest: make_adapter_job(command, refs, *rest), run, frozenset(OWN))


def _average(refs: Sequence[Adapter], output: Any, base: Any, options: Mapping[str, Any]) -> Averaging:
    """Return the task of `average`, whose weights are the strengths of a recipe where no option gives them."""
    given = {"weights": [a.strength for a in refs], **options}
    given |= {"weights": None} if any(name in options for name in MOVING) else {}
    return make_average([replace(a, strength=1.0) for a in refs], output, base, given)


COMMANDS: Final[Mapping[str, Command]] = {
    **{name: _plain(name) for name in ("combine", "resize")},
    "average": Command(_average, lambda task, progress: task.run(progress), frozenset((*OWN, *OF_AVERAGE))),
    "convert": Command(lambda refs, *rest: make_conversion(refs[0], *rest), run_conversion, frozenset(OF_CONVERT)),
    "extract": Command(lambda refs, output, base, options: make_extraction(base, refs[0].path, output, options),
                       run_extraction, frozenset((*OWN, *OF_EXTRACT)), "tuned"),
}  # fmt: skip
SHARED: Final = frozenset(("dtype", "unmatched", "setting"))
"""The options of `merge` that a recipe states. Its other entries are ignored: anybody may have written the file, so it
does not decide where something is written or how much memory is used."""


def task_of(
    made: Path,
    output: str | Path,
    folders: Sequence[Path],
    *,
    links: Path | None = None,
    full: bool = False,
    **options: Any,
) -> Callable[[Progress], AdapterReport]:
    """Return the run that made a file; InputError for a damaged recipe, or for an input that is not found.

    `links`: a folder for links to inputs that have other names now, which the output tells. `full`: whether its proof
    computes every layer again.
    """
    metadata = open_checkpoint(made).metadata
    told = parsed(metadata.get(KEY, "")) or {}
    command = COMMANDS[told["command"]]
    try:
        adapters = [
            (input_of(a), number_of(a["strength"]), tuple((text_of(p), number_of(f)) for p, f in a["parts"]))
            for a in told[command.inputs]
        ]
        if not adapters:
            raise ValueError("it names no adapter")
        base = input_of(told["base"]) if "base" in told else None
        given = {name: value for name, value in told["options"].items() if name in command.own | SHARED}

        def task(paths: Sequence[Path], **more: Any) -> Any:
            refs = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, adapters, strict=False)]
            return command.make(refs, output, paths[-1] if base else None, {**given, **more})

        inputs = [*(a for a, _, _ in adapters), *([base] if base else [])]
        task([made] * len(inputs))  # checks its values before a user adds others
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(made, str(e)) from e
    except (UsageError, FitError) as e:
        raise damaged(made, f"{e.what} ({e.where})") from e
    paths = find_all(inputs, [*folders, absolute(made).parent, *current_folders()])
    if links is not None:
        paths = [_as_named(path, one.name, links) for path, one in zip(paths, inputs, strict=True)]
    found = task(paths, **options)
    return partial(command.run, _with(found, metadata.get(TITLE), full=full))


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


def _with(task: Any, title: str | None, *, full: bool) -> Any:
    """Return a task whose output has the title of the file that is made again, and not one by its own name."""
    job = task if isinstance(task, AdapterJob) else task.job
    job = replace(job, inputs=replace(job.inputs, title=title), full=full)
    return job if isinstance(task, AdapterJob) else replace(task, job=job)


def replay(
    made: Path, output: str | Path, folders: Sequence[Path], *, progress: Progress = unwatched, **options: Any
) -> AdapterReport:
    """Make a file again from its recipe."""
    return task_of(made, output, folders, **options)(progress)


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
