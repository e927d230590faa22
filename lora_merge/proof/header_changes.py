"""Whether the headers of a finished output are still those that the merge wrote."""

from __future__ import annotations

from pathlib import Path

from ..errors import VerificationFailed
from ..files.checkpoint import Index
from ..files.safetensors import parse
from ..files.seal import SEAL, intact
from ..planning.plan import Plan
from ..planning.recipe import FORMAT, KEY, parsed
from ..text import listed, quoted


def header_changes(plan: Plan, made: Index) -> list[str]:
    """Returns warnings about headers of `made` that nothing can be said about: an earlier version wrote no seal.

    `plan` is the plan that gives `made`. VerificationFailed if a header was changed after the merge: an entry of the
    metadata was added, taken out or edited, also one of ours, or tensors were put in another order or place.
    """
    recipe = parsed(made.metadata.get(KEY, "")) or {}
    due = recipe.get("format") == FORMAT
    states = {path: intact(path, made.headers[path]) for path in made.files}
    changed = [path for path, state in states.items() if state is False or (state is None and due)]
    if changed:
        raise VerificationFailed("the weights are right, but the header was changed after the merge",
                                 f"{changed[0]}: {_differences(plan, made, changed[0])}",
                                 "merge again, to have a header that says what was merged")  # fmt: skip
    unsealed = [path.name for path, state in states.items() if state is None and KEY in made.metadata]
    why = f"no {SEAL}, which earlier versions did not write: {listed(unsealed)}"
    return [f"changes of the metadata cannot be found: {why}"] if unsealed else []


def _differences(plan: Plan, made: Index, path: Path) -> str:
    """What is seen to be different in a changed header."""
    name = path.relative_to(made.path).as_posix() if made.path.is_dir() else ""
    file = next(file for file in plan.files if file.name == name)
    _, planned = parse(file.header[8:], path, file.size)
    found = made.headers[path].metadata
    rows = (("added", found.keys() - planned.keys()), ("taken out", planned.keys() - found.keys()))
    told = [f"{listed(map(quoted, sorted(keys)))} {what}" for what, keys in rows if keys]
    return "; ".join(told) or "an entry was edited, or tensors have another order or place"
