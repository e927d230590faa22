"""Weights that were trained in addition to the adapter and stored in files of their own, next to the adapter's.

Trainers store so what they trained whole: projectors and norms of vision-language models (LLaVA), diffusion heads and
connectors of speech models (VibeVoice), new heads. Such a file has names of the base, below a prefix of training, or
only the names inside one of its modules. It is applied if each of its tensors matches one of the base by name and
shape. It is refused if only a part of them does, if several modules fit, or if a trainer calls the file so: a merge
without it would be another model. Any other file is left out by name. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from ..adapters.modules import AdapterFile
from ..adapters.peft.rules import STORED_VALUES
from ..adapters.suffixes import split_parameter
from ..disk.files import Header
from ..dtypes import StoredTensor
from ..errors import FitError, InputError, MergeError
from ..files.checkpoint import TRAINED_FILES, in_two_files, read_header
from ..files.file_uses import NEEDS_BASE, Folder
from ..models.names import Names
from ..models.weights import whole
from ..options import Unmatched
from ..paths import real_path
from ..text import Note, listed, plural, quoted

NO_MATCH: Final = "no tensor of the base has these names"
UNMATCHED_LEFT_OUT: Final = "it matches nothing in the base, and --unmatched skip leaves it out"
IS_BASE: Final = "it is the base"
MOST_DROPPED_LEVELS: Final = 6  # of a name that are taken off
APPENDED: Final = frozenset({"input_embeddings", "output_embeddings"})
"""Names of the rows of new tokens that vLLM put behind those of the base (vllm/lora/models.py; fms-hf-tuning
writes them for it). PEFT and transformers do not read them."""

OTHER_BASE: Final = "use the base of that training"
APPEND: Final = (
    "append them to the embeddings and the head of the base, save it, and merge into that, with this file elsewhere"
)


class _Ambiguous(Exception):
    """Several modules of the base, named in its arguments, have the names and shapes of a file."""


class _Problem(NamedTuple):
    """Why the weights of a file cannot be matched, and what to do; empty texts without a problem."""

    what: str = ""
    fix: str = OTHER_BASE


def with_trained_weights(
    adapter: AdapterFile, folder: Folder | None, names: Names, base: Mapping[str, StoredTensor], unmatched: Unmatched
) -> tuple[AdapterFile, Folder | None]:
    """Return the adapter with the weights of the other files of its folder, and the folder's table with their use.

    FitError if a file is a part of what was trained and matches nothing in the base.
    """
    uses, index = [], adapter.index
    tensors, headers = dict(index.tensors), dict(index.headers)
    strange, notes = [*adapter.strange], [*adapter.notes]
    undecided = [use for use in folder.files if use.why == NEEDS_BASE] if folder else []
    of_base = {real_path(path) for path in {info.file for info in base.values()}} if undecided else set()
    # Read each file without a use yet, but the base itself.
    for use in undecided:
        path = index.path / use.name
        if real_path(path) in of_base:
            uses.append(use._replace(why=IS_BASE))
            continue
        try:
            header = read_header(path)
        except InputError as e:
            if TRAINED_FILES.fullmatch(path.name):
                raise
            uses.append(use._replace(why=f"it cannot be read: {e.what}"))
            continue
        # The matches of its tensors with the base.
        matched, problem = _matched(path, header, names, base)
        if problem.what and unmatched == "error":
            first = listed(map(quoted, header.tensors), 3)
            raise FitError(f"further weights that were trained with the adapter {problem.what}", f"{path}: {first}",
                           f"{problem.fix}; or leave the file out with `--unmatched skip`")  # fmt: skip
        if problem.what or not matched:
            uses.append(use._replace(why=UNMATCHED_LEFT_OUT if problem.what else NO_MATCH))
            continue
        # They are values of the adapter.
        for info in matched:
            if info.name in tensors:
                raise in_two_files(tensors[info.name], info)
            tensors[info.name] = info
        headers[path] = header
        strange += matched
        uses.append(use._replace(use="read", why="", tensors=False))
        notes.append(Note(f"{use.name}: {plural(len(matched), 'tensor')} replace those of the base"))
    if folder is None or not uses:
        return adapter, folder
    index = replace(index, tensors=tensors, headers=headers, files=tuple(headers))
    return replace(adapter, index=index, strange=tuple(strange), notes=tuple(notes)), folder.replaced(uses)


def _matched(
    path: Path, header: Header, names: Names, base: Mapping[str, StoredTensor]
) -> tuple[list[StoredTensor], _Problem]:
    """Return the tensors of a file under the names of the base's; none, with the problem if there is one."""
    infos = [*header.tensors.values()]
    known = [_key(info, names, base) for info in infos]
    if infos and all(known):
        return _renamed(infos, [str(key) for key in known]), _Problem()
    try:
        keys = _below_one_prefix(infos, base, {path.stem, path.parent.name})
    except _Ambiguous as e:
        named = f"{e.args[0].rpartition('.')[2]}{path.suffix}"
        return [], _Problem(f"fit several modules of the base: {listed(e.args)}", f"name it {named} if it is for that")
    if keys:
        return _renamed(infos, keys), _Problem()
    if any(known):
        count = f"{sum(map(bool, known))} of {plural(len(infos), 'tensor')}"
        return [], _Problem(f"match the base only in part: {count}")
    if APPENDED.issuperset(header.tensors) and infos:
        return [], _Problem("are rows of new tokens, which belong after those of the base", APPEND)
    return [], _Problem("match nothing in the base" if TRAINED_FILES.fullmatch(path.name) and infos else "")


def _renamed(infos: Sequence[StoredTensor], keys: Sequence[str]) -> list[StoredTensor]:
    return [replace(i, name=key, stored=i.stored or i.name) for i, key in zip(infos, keys, strict=True)]


def _key(info: StoredTensor, names: Names, base: Mapping[str, StoredTensor]) -> str | None:
    """Return the tensor of the base that a name means, by all names of adapters; None if it matches nothing."""
    name = info.name
    for pattern, kind, _ in STORED_VALUES:
        if kind == "value" and (match := pattern.fullmatch(name)):
            name = f"{match['module']}.{match['leaf'] or 'weight'}"
            break
    with suppress(MergeError):
        view = names.find(*split_parameter(name))
        key = view.row_slices[0].key if view is not None else ""
        if view is not None and view == whole(key, base[key].shape) and _fits(info, base[key]):
            return key
    return name if name in base and _fits(info, base[name]) else None


def _fits(info: StoredTensor, old: StoredTensor) -> bool:
    """Return whether a tensor can replace one of the base; tables of tokens may have more rows."""
    return info.shape == old.shape or (len(old.shape) == len(info.shape) == 2 and info.shape[0] >= old.shape[0]
                                       and info.shape[1:] == old.shape[1:])  # fmt: skip


def _below_one_prefix(infos: Sequence[StoredTensor], base: Mapping[str, StoredTensor], hints: set[str]) -> list[str]:
    """Return the keys of the base that have the names of a file below one prefix; its own first levels may be others.

    The names of the file and of its folder decide between several modules. For a single tensor one of them is required.
    """
    split = [info.name.split(".") for info in infos]
    for level in range(MOST_DROPPED_LEVELS if split else 0):
        if any(len(words) <= level or words[:level] != split[0][:level] for words in split):
            return []
        tails = [".".join(words[level:]) for words in split]
        fitting = [*dict.fromkeys(_prefixes(tails, infos, base))]
        named = [prefix for prefix in fitting if hints.intersection(prefix.split("."))]
        chosen = named if len(named) == 1 else fitting
        if len(chosen) > 1:
            raise _Ambiguous(*(prefix.rstrip(".") for prefix in chosen))
        if chosen and (named or len(infos) > 1 or not chosen[0]):
            return [f"{chosen[0]}{tail}" for tail in tails]
    return []


def _prefixes(tails: Sequence[str], infos: Sequence[StoredTensor], base: Mapping[str, StoredTensor]) -> Iterator[str]:
    longest = max(tails, key=len)
    for key in base:
        if key.endswith(longest) and (key == longest or key[: -len(longest)].endswith(".")):
            prefix = key[: -len(longest)]
            weights = [base.get(f"{prefix}{tail}") for tail in tails]
            pairs = zip(infos, weights, strict=True)
            if all(weight is not None and info.shape == weight.shape for info, weight in pairs):
                yield prefix
