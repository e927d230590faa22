"""Changes of an output's headers after the merge, found by their seals and named entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..disk.files import open_regular
from ..errors import VerificationFailed
from ..files.checkpoint import Index
from ..files.safetensors import SEAL, ZERO_HASH, intact, metadata_of, sealed, with_metadata
from ..planning.recipe import FORMAT, KEY, OURS, entries, parsed
from ..text import Note, from_json, listed, quoted

if TYPE_CHECKING:
    from ..planning.plan import OutputFile, Plan

TENSOR_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
"""Fields of a tensor that a merge writes."""

MERGE_FOR_HEADER: Final = "merge again, to have a header that says what was merged"


@dataclass(frozen=True)
class HeaderChange:
    """One file whose header is not the one that the merge wrote."""

    path: Path
    differences: tuple[str, ...]  # none if another program wrote the same entries in other bytes


def changed_files(index: Index) -> list[Path]:
    """Return the files of an output whose header is not as it was sealed, or has lost the seal that goes with its
    recipe; those of adapters, whose recipes name their command, have none.
    """
    recipe = parsed(index.metadata.get(KEY, "")) or {}
    due = recipe.get("format") == FORMAT and "command" not in recipe
    states = {path: intact(path, index.headers[path]) for path in index.files}
    return [path for path, state in states.items() if state is False or (state is None and due)]


def header_changes(plan: Plan, index: Index) -> list[HeaderChange]:
    """Return what was changed after the merge in the headers of `index`; `plan` is the plan that gives it.

    Without a seal, as in files of earlier versions and other programs, only entries of the base are compared.
    """
    broken = changed_files(index)
    changes = []
    for file in plan.files:
        path = index.path / file.name if file.name else index.path
        if path not in index.headers:
            continue  # the proof of the weights reports the missing file
        if path in broken and not _is_written_again(file, path, index):
            differences = [*_differences(plan, file, path, index)]
            changes.append(
                HeaderChange(path, tuple(differences or [f"{KEY} or {SEAL} edited: all else is what the recipe gives"]))
            )
        elif path in broken:
            changes.append(HeaderChange(path, ()))
        elif differences := [*_of_base(file, index.headers[path].metadata)]:
            changes.append(HeaderChange(path, tuple(differences)))
    return changes


def notes(changes: Sequence[HeaderChange], index: Index) -> list[Note]:
    """Return notes on headers with the merge's entries in other bytes; VerificationFailed if an entry differs."""
    if edited := [change for change in changes if change.differences]:
        raise VerificationFailed("the weights are right, but the header was changed after the merge",
                                 f"{edited[0].path}: {'; '.join(edited[0].differences)}", MERGE_FOR_HEADER)  # fmt: skip
    if KEY not in index.metadata:
        return [
            Note(
                "the file contains no recipe: the inputs are the named ones, and edits of its metadata cannot be found"
            )
        ]
    again = [change.path.name for change in changes]
    rewritten = [Note(f"another program wrote the header anew, with the same entries in other bytes: {listed(again)}")]
    unsealed = [path.name for path in index.files if KEY in index.metadata and SEAL not in index.headers[path].metadata]
    why = f"no {SEAL}, which earlier versions did not write: {listed(unsealed)}"
    return [
        *(rewritten if again else ()),
        *([Note(f"changes of the metadata cannot be found: {why}")] if unsealed else ()),
    ]


def with_header_changes(failure: VerificationFailed, changes: Sequence[HeaderChange]) -> VerificationFailed:
    """Return the failure of a proof together with the changes of the header, whose recipe may have caused it."""
    changed = [f"{change.path}: {'; '.join(change.differences)}" for change in changes if change.differences]
    if not changed:
        return failure
    return VerificationFailed(
        f"the header was changed after the merge, and by what it says now, {failure.what}",
        f"{failure.where}; {changed[0]}",
        "put the header back as it was, and verify again; else merge again",
    )


def _is_written_again(file: OutputFile, path: Path, index: Index) -> bool:
    """Return whether a header has the sealed entries in another order or with other spaces."""
    return _fits_seal(file, index.headers[path].metadata) and not [*_odd_fields(path, index)]


def _fits_seal(file: OutputFile, entries: Mapping[str, str]) -> bool:
    """Return whether these entries, written as a merge writes them, have the seal that is among them."""
    planned = metadata_of(file.header)
    if entries.keys() != planned.keys():
        return False
    try:
        header = sealed(with_metadata(file.header, {key: entries[key] for key in planned} | {SEAL: ZERO_HASH}))
    except ValueError:  # longer than what was planned
        return False
    return metadata_of(header)[SEAL] == entries[SEAL]


def _differences(plan: Plan, file: OutputFile, path: Path, index: Index) -> Iterator[str]:
    """Yield the differences that can be found in a changed header."""
    entries_of, planned = index.headers[path].metadata, metadata_of(file.header)
    for what, keys in (
        ("added", entries_of.keys() - planned.keys()),
        ("taken out", planned.keys() - entries_of.keys()),
    ):
        if keys:
            yield f"{listed(map(quoted, sorted(keys)))} {what}"
    yield from _of_base(file, entries_of)
    yield from _of_recipe(file, entries_of, _own_entries(plan, file, entries_of))
    yield from _odd_fields(path, index)


def _of_base(file: OutputFile, stored: Mapping[str, str]) -> Iterator[str]:
    """Yield the entries of the base that are others here; of those only that are here, where no merge of ours wrote
    them.
    """
    edited = [key for key, text in file.entries.items() if key not in OURS and stored.get(key, text) != text]
    gone = [key for key in file.entries if KEY in stored and key not in OURS and key not in stored]
    for what, keys in (("edited", edited), ("taken out", gone)):
        if keys:
            yield f"{listed(map(quoted, sorted(keys)))} {what}"


def _of_recipe(file: OutputFile, stored: Mapping[str, str], due: Mapping[str, str]) -> Iterator[str]:
    """Yield which of our own entries was edited: alone, as the seal shows, or else the recipe."""
    odd = [key for key in due if key in stored and not _same(key, stored[key], due[key])]
    alone = [key for key in odd if _fits_seal(file, {**stored, key: due[key]})]
    if alone or odd == [KEY]:
        yield f"{quoted((alone or odd)[0])} edited"
    elif odd:
        yield f"edited so that {quoted(KEY)} contradicts {listed(quoted(key) for key in odd if key != KEY)}"


def _own_entries(plan: Plan, file: OutputFile, stored: Mapping[str, str]) -> Mapping[str, str]:
    """Return our own entries as the recipe gives them; its digests were compared with the inputs before."""
    recipe, number = parsed(stored.get(KEY, "")) or {}, plan.files.index(file)
    try:
        of_base, *others = [[f["sha256"] for f in entry["files"]] for entry in (recipe["base"], *recipe["adapters"])]
    except (LookupError, TypeError):
        return {}
    if number:  # a file other than the first: its recipe names one file of the base
        of_base = [ZERO_HASH] * number + of_base + [ZERO_HASH] * (len(plan.files) - number - 1)
    digests = [*of_base, *chain.from_iterable(others)]
    if len(digests) != len(plan.inputs):
        return {}
    headers = entries(plan.job, plan.base, plan.adapters, digests)
    return {key: text for key, text in next(islice(headers, number, None)).items() if key != SEAL}


def _same(key: str, text: str, due: str) -> bool:
    """Return whether two entries are equal; the versions of this program in two recipes may differ."""
    if key != KEY:
        return text == due
    recipe, other = parsed(text) or {}, parsed(due) or {}
    return {**recipe, "version": ""} == {**other, "version": ""}


def _odd_fields(path: Path, index: Index) -> Iterator[str]:
    """Yield the tensors with fields that a merge does not write."""
    if index.headers[path].fields is not None:
        return  # the entries of GGUF have no fields of their own
    with open_regular(path) as f:
        raw = f.read(index.headers[path].data_offset)[8:]
    try:
        table: dict[str, Any] = from_json(raw)
    except ValueError as e:
        yield str(e)
        return
    odd = [name for name, entry in table.items() if name != "__metadata__" and entry.keys() != TENSOR_FIELDS]
    if odd:
        yield f"more than dtype, shape and place of {listed(map(quoted, odd))}"
