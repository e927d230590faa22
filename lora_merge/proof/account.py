"""Accounts for every tensor of every adapter's file: the plan uses it, or gives a reason why it changes nothing.

The second reading (second_reading/) checks modules of known kinds. A module of any kind that the planner loses is
found here: the names are the ones that the `safetensors` library finds in the file, and the planner's counts are not
used. A reason is checked if bytes or strengths can show that it is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..disk.reader import Reader
from ..dtypes import Shape, StoredTensor
from ..errors import VerificationFailed
from ..files.checkpoint import Index
from ..files.side_files import stored_name
from ..job import Adapter
from ..matching.patch import COPY, NO_LAYER, OFF, ZEROS, Match, Patch
from ..models.weights import RowSlice
from ..options import BLOCK_LIST
from ..planning.plan import Plan
from ..text import listed, quoted
from .proof_report import MOST_NAMED, REPORT_HEADERS
from .reference.floats import Array, decode

FOR_ALL: Final = "base_model."
OF_LAYERS: Final = "base_model.model."
"""PEFT stores tensors that several layers share under the first prefix, those of a layer under the second."""


@dataclass(frozen=True)
class Account:
    """The use of every tensor of all adapters."""

    tensors: int
    used: int  # by a formula, or as they are
    unused: dict[str, str]  # tensor → why it changes nothing

    def to_dict(self) -> dict[str, Any]:
        """Return the account as the report has it."""
        few = dict([*self.unused.items()][:MOST_NAMED])
        return {"tensors": self.tensors, "used": self.used, "unused": len(self.unused), "reasons": few}


@dataclass
class _Usage:
    """The tensors and modules that the plan takes from one adapter."""

    tensors: set[str] = field(default_factory=set)
    patches: dict[int, Patch] = field(default_factory=dict)  # by identity
    written: dict[str, set[RowSlice]] = field(default_factory=dict)  # module → pieces that it changes

    def add(self, patch: Patch) -> None:
        """Add a patch, all of whose tensors are used."""
        if id(patch) not in self.patches:
            self.patches[id(patch)] = patch
            module = patch.module
            self.tensors.update(info.name for info in module.tensors)


def account(plan: Plan, reader: Reader) -> Account:
    """Return the use of every tensor of the adapters; VerificationFailed if the plan loses a tensor or a part of a
    module's place, or gives a reason that is wrong."""
    tensors, left_out, unused = 0, 0, dict[str, str]()
    for adapter, matched, used in zip(plan.job.adapters, plan.adapters, _used(plan), strict=True):
        names = [*_names(matched.adapter.index, plan.base)]
        _check_places(used, adapter)
        spare = dict(_unused(names, matched, used.tensors, adapter, reader))
        tensors, left_out, unused = tensors + len(names), left_out + len(spare), unused | spare
    return Account(tensors, tensors - left_out, unused)


def _used(plan: Plan) -> list[_Usage]:
    """Return what the output tensors take from each adapter."""
    used_of = [_Usage() for _ in plan.adapters]
    stored = plan.base.tensors
    by_file = {file: used for used, m in zip(used_of, plan.adapters, strict=True) for file in m.adapter.index.files}
    for target in plan.targets:
        source = target.source
        if source is not stored.get(target.name) and source.file in by_file:
            by_file[source.file].tensors.add(source.name)
        for use in target.uses:
            used = used_of[use.patch.adapter]
            used.add(use.patch)
            used.written.setdefault(use.patch.module.where, set()).add(use.piece)
    return used_of


def _names(index: Index, base: Index) -> Iterator[str]:
    """Yield the names of all tensors of an adapter as the library reads its files, or our own reader if it cannot.

    An adapter that is attached inside the base shares its files; the other tensors there are those of the base.
    """
    named = {(info.file, stored_name(info)): name for name, info in index.tensors.items()}
    for file in index.files:
        for stored in _stored(file, index):
            if file in base.headers and (file, stored) not in named:
                continue
            if (file, stored) not in named:
                raise VerificationFailed("an adapter tensor was not read", f"{file}: {quoted(stored)}", REPORT_HEADERS)
            yield named[file, stored]


def _stored(file: Path, index: Index) -> Collection[str]:
    """Return the names in one file."""
    import safetensors

    try:
        with safetensors.safe_open(str(file), framework="np") as f:
            return list(f.keys())
    except safetensors.SafetensorError:  # a pickle, or a dtype that the library does not know
        return [stored_name(info) for info in index.tensors.values() if info.file == file]


def _check_places(used: _Usage, adapter: Adapter) -> None:
    """Raise VerificationFailed if a module changes only some of the rows that it was placed on."""
    for patch in () if _may_be_off(adapter) else used.patches.values():
        missing = [p for p in patch.view.row_slices if p not in used.written[patch.module.where]]
        if missing:
            where = f"{adapter.path}: {quoted(patch.module.where)} on {quoted(missing[0].key)}"
            raise VerificationFailed("the plan loses a part of an adapter's module", where, REPORT_HEADERS)


def _unused(
    names: Collection[str], matched: Match, used: Collection[str], adapter: Adapter, reader: Reader
) -> Iterator[tuple[str, str]]:
    """Yield every unused tensor with the reason; VerificationFailed if there is none, or it is wrong."""
    reasons, tensors = _reasons(matched), matched.adapter.index.tensors
    shared, copies = any(map(_is_for_all, used)), _Copies([tensors[name] for name in used if name in tensors], reader)
    lost = []
    for name in names:
        if name in used:
            continue
        if name in reasons:
            why = reasons[name]
            if not _holds(why, tensors[name], adapter, copies):
                where = f"{adapter.path}: {quoted(name)}: {why}"
                raise VerificationFailed(
                    "the plan leaves out a tensor for a reason that does not hold", where, REPORT_HEADERS
                )
            yield name, why
        # RandLoRA stores its shared bases with each layer too
        elif _is_for_all(name) and (shared or copies.has(tensors[name])):
            yield name, "kept for all layers, but no layer needs it"
        else:
            lost.append(name)
    if lost:
        where = f"{adapter.path}: {listed(map(quoted, lost), 3)}"
        raise VerificationFailed("the plan loses tensors of an adapter", where, REPORT_HEADERS)


def _reasons(matched: Match) -> Mapping[str, str]:
    """Return tensor → the reason why it changes nothing, as the report gives it for the tensor or its module."""
    left = matched.unmatched
    of_modules = {
        info.name: left[module.where]
        for module in matched.adapter.modules
        if module.where in left
        for info in module.tensors
    }
    repeated = {info.name: COPY for module in matched.adapter.modules for _, info in module.repeated}
    return {**repeated, **of_modules, **left, **matched.adapter.ignored, **matched.unused}


def _is_for_all(name: str) -> bool:
    """Return whether PEFT stores this tensor for several layers."""
    return name.startswith(FOR_ALL) and not name.startswith(OF_LAYERS)


def _may_be_off(adapter: Adapter) -> bool:
    """Return whether an adapter's strength may be 0 for a part of the model."""
    return adapter.strength == 0 or any(factor == 0 or part.startswith(BLOCK_LIST) for part, factor in adapter.parts)


def _holds(why: str, info: StoredTensor, adapter: Adapter, copies: _Copies) -> bool:
    """Return whether a reason is right, as far as bytes and strengths show it."""
    if why == OFF:
        return _may_be_off(adapter)
    if why == ZEROS:
        return not np.any(copies.read(info))
    if why == NO_LAYER:
        return not info.nbytes
    return why != COPY or copies.has(info)


class _Copies:
    """The values of the used tensors, to find out whether a tensor is used under another name; read when needed."""

    def __init__(self, used: Collection[StoredTensor], reader: Reader) -> None:
        self._used, self._reader = used, reader
        self._digests: dict[Shape, set[bytes]] = {}  # shape → digests of the used tensors of that shape

    def read(self, info: StoredTensor) -> Array:
        """Return the values of a tensor, without axes of length 1."""
        return decode(self._reader.read(info), info.dtype).reshape(info.shape).squeeze()

    def has(self, info: StoredTensor) -> bool:
        """Return whether a used tensor holds the same values, or their transpose: PEFT saves the factors of a head
        that is tied to the embeddings transposed."""
        values = self.read(info)
        return any(_digest(form) in self._of(form.shape) for form in (values, values.T))

    def _of(self, shape: Shape) -> set[bytes]:
        if shape not in self._digests:
            alike = [info for info in self._used if tuple(n for n in info.shape if n != 1) == shape]
            self._digests[shape] = {_digest(self.read(info)) for info in alike}
        return self._digests[shape]


def _digest(values: Array) -> bytes:
    return hashlib.sha256(values.tobytes()).digest()
