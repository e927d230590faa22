"""The metadata of an output: the entries of the base that stay, the entries of the user, sums, and the final headers.

The sums are the CRC-32 of every tensor of codes or scales that a merge changes, eight digits for each, in the order of
the file. They find every damaged bit; values that are computed again cannot: a scale that is larger by a millionth
decodes to values that are right, and some bits no reader looks at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from ..disk.files import open_regular
from ..errors import UsageError
from ..files.formats.torchao import NAMES_ENTRY as TORCHAO_NAMES
from ..files.formats.unread import METADATA_FORMATS
from ..files.safetensors import SEAL, sealed, with_metadata
from .recipe import CHECKSUMS, OURS, STALE, entries

if TYPE_CHECKING:
    from .containers import OutputContainer
    from .plan import OutputTensor, Plan

TITLE: Final = "modelspec.title"

NEEDED: Final = frozenset(
    {"format", "config", *(f"modelspec.{name}" for name in (
        "sai_model_spec", "architecture", "implementation", "prediction_type", "predict_key", "resolution",
        "encoder_layer", "timestep_range",
    ))}
)  # fmt: skip
"""Entries that programs read to load the weights; the others say where a model comes from. Specification:
https://github.com/Stability-AI/ModelSpec. `config` holds the configuration of single-file LTX-Video models."""

CHECKSUM_DIGITS: Final = 8
SUMMED_BYTES: Final = 1 << 24  # bytes that are read at once


def other_entries(container: OutputContainer, path: Path) -> dict[str, str]:
    """Return the entries of the output of one file of the base; UsageError for an entry that only a merge can write."""
    # Entries of the user.
    job, base = container.job, container.base
    of_user = {**({TITLE: job.title} if job.title is not None else {}), **dict(job.metadata)}
    on_weights = {*METADATA_FORMATS, TORCHAO_NAMES, *base.tensors} if base.packed else METADATA_FORMATS.keys()
    if wrong := next((key for key in of_user if key in {*OURS, *STALE, *on_weights}), None):
        raise UsageError("a merge writes this entry itself, or its value would be wrong", f"`--metadata {wrong}`",
                         "leave it out")  # fmt: skip
    # Entries of the base, without the ones that would be wrong in the output.
    stale = STALE if job.dtype == "keep" or not base.packed else {*STALE, *on_weights}
    entries_left = {key: text for key, text in container.entries(path).items() if key not in stale}
    if not container.is_gguf and (path.suffix != ".safetensors" or job.no_metadata):
        entries_left = {"format": "pt"} | entries_left  # transformers requires this entry
    # Without metadata only entries that programs need: they read all entries of GGUF files.
    if job.no_metadata:
        needed = NEEDED.union(on_weights)
        entries_left = {
            key: text for key, text in entries_left.items() if key in needed or (container.is_gguf and key not in OURS)
        }
    return entries_left | of_user


def final_headers(
    plan: Plan, digests: Sequence[str], sums: Sequence[Mapping[str, str]], *, first: int = 0
) -> Iterator[bytes]:
    """Yield the final header of every file of the plan from the `first` on, as long as the planned header.

    A header is planned before any weight is read; the digests of the inputs are known after. Our own entries are
    made a second time, because names and texts of the base may look like the placeholders in the planned header.
    `digests`: SHA-256 of `plan.inputs`, in hexadecimal digits and the same order. `sums`: for every file the entry with
    the sums of its codes.
    """
    written = entries(plan.job, plan.base, plan.adapters, digests)
    for file, of_merge, of_sums in islice(zip(plan.files, written, sums, strict=True), first, None):
        header = with_metadata(file.header, {**file.entries, **of_merge, **of_sums})
        yield sealed(header) if SEAL in of_merge else header


def checksummed(files: Sequence[Iterable[OutputTensor]]) -> list[tuple[OutputTensor, ...]]:
    """Return, for the tensors of each file of an output, those of codes and scales that are not the base's."""
    coded = {t.name: t.packed for targets in files for t in targets if t.packed is not None and not t.copied}
    names = coded.keys() | frozenset[str]().union(*(packing.changing for packing in coded.values()))
    return [tuple(t for t in targets if t.name in names) if names else () for targets in files]


def checksum_entry(sums: Sequence[int]) -> dict[str, str]:
    """Return the entry of a file whose changed tensors have these sums; none for a file without such tensors."""
    return {CHECKSUMS: "".join(f"{crc:0{CHECKSUM_DIGITS}x}" for crc in sums)} if sums else {}


def sums_of(path: Path, tensors: Iterable[OutputTensor]) -> Iterator[int]:
    """Yield the sums of tensors of a written file; a sum of fewer bytes if the file ends before."""
    with open_regular(path) as f:
        for t in tensors:
            f.seek(t.offset)
            crc, left = 0, t.nbytes
            while left and (piece := f.read(min(left, SUMMED_BYTES))):
                crc, left = crc32(piece, crc), left - len(piece)
            yield crc


class Checksums:
    """The sums of one output. Codes are summed as they pass; what is written later is read again at the end."""

    def __init__(self, plan: Plan) -> None:
        """`plan`: the output's; without metadata there is no place for sums."""
        self._files = checksummed([() if plan.job.no_metadata else f.targets for f in plan.files])
        self._starts = [[t.offset for t in tensors] for tensors in self._files]
        self._names = [f.name for f in plan.files]
        self._sums: dict[str, tuple[int, int]] = {}  # codes → (sum, how many of their first bytes it has)

    def feed(self, file: int, at: int, data: memoryview) -> None:
        """Take bytes of a file from `at` on."""
        for t in self._files[file][max(0, bisect_right(self._starts[file], at) - 1) :]:
            if t.offset >= at + len(data):
                return
            low, high = max(at, t.offset), min(at + len(data), t.offset + t.nbytes)
            done, have = self._sums.get(t.name, (0, 0))
            if low < high and low - t.offset == have and t.packed is not None:
                self._sums[t.name] = crc32(data[low - at : high - at], done), high - t.offset

    def entries(self, part: Path, again: Collection[str]) -> list[dict[str, str]]:
        """Return the entry of each file of the output at `part`. `again`: codes that were written a second time."""
        by_file = []
        for name, tensors in zip(self._names, self._files, strict=True):
            path = part / name if name else part
            by_file.append(checksum_entry([self._sum(t, path, again) for t in tensors]))
        return by_file

    def _sum(self, target: OutputTensor, path: Path, again: Collection[str]) -> int:
        value, have = self._sums.get(target.name, (0, 0))
        fed = have == target.nbytes and target.name not in again
        return value if fed else next(sums_of(path, [target]))
