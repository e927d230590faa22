"""How several changes of one weight meet: the method of a job, its parameters, the seeds of its random draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from ..adapters.modules import AdapterFile
from ..disk.files import sha256
from ..dtypes import Memory
from ..job import Job, parameters
from ..matching.patch import PatchPart
from ..merge_methods import METHODS, SUM, MergeMethod, MethodParameters


@dataclass(frozen=True, eq=False)
class Combination:
    """The method of one job with its parameters, and the adapters, of which the seeds of random draws are made."""

    method: MergeMethod
    parameters: MethodParameters = field(default_factory=MethodParameters)
    adapters: Sequence[AdapterFile] = ()
    uses: Mapping[str, Sequence[PatchPart]] = field(default_factory=dict)
    """Base key → all its changes, where adapters act in turn: formulas read weights that others have changed."""

    @staticmethod
    def of(job: Job, adapters: Sequence[AdapterFile], uses: Mapping[str, Sequence[PatchPart]]) -> Combination:
        """Return the combination of a job, whose adapters make these changes of the base."""
        row = METHODS[job.method]
        return Combination(row, parameters(job), adapters, uses if row.in_turn else {})

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """For each adapter, the SHA-256 of its files and how often the same one comes before it."""
        of_files = [digest(a) for a in self.adapters]
        return tuple(
            f"{digest_of_files}#{of_files[:n].count(digest_of_files)}" for n, digest_of_files in enumerate(of_files)
        )

    def seed(self, adapter: int, uses: Sequence[PatchPart]) -> str:
        """Return the seed of the random draws for the changes that an adapter makes to a weight; "" without draws.

        It names the adapter, its module, and the row of that module with which the weight begins. `uses`: these
        changes.
        """
        if not self.method.draws:
            return ""
        first = min(uses, key=lambda u: (u.piece.start, u.patch.algorithm))
        module = first.patch.module
        return f"{self.digests[adapter]}/{module.name}.{module.parameter}/{first.patch.algorithm}@{first.start}"


ADDITION: Final = Combination(METHODS[SUM])
"""The combination of weights without changes."""


def digest(adapter: AdapterFile) -> str:
    """Return the SHA-256 of an adapter's files, joined by +; of an adapter in memory, that of its tensors."""
    if all(f.exists() for f in adapter.index.files):
        return "+".join(sha256(f) for f in adapter.index.files)
    import hashlib

    sha256_of_tensors = hashlib.sha256()
    for name, info in sorted(adapter.index.tensors.items()):
        assert isinstance(info.source, Memory), "tensors without a file are in memory"
        sha256_of_tensors.update(f"{name}/{info.dtype}/{info.shape}".encode(errors="replace"))
        sha256_of_tensors.update(info.source.content()[info.offset : info.offset + info.nbytes])
    return sha256_of_tensors.hexdigest()
