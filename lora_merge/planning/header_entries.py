"""The metadata of an output: the entries of the base that stay, the entries of the user, and the final headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from ..errors import UsageError
from ..files.formats.torchao import NAMES_ENTRY as TORCHAO_NAMES
from ..files.formats.unread import METADATA_FORMATS
from ..files.safetensors import SEAL, sealed, with_metadata
from .containers import OutputContainer
from .plan import Plan
from .recipe import OURS, STALE, entries

TITLE: Final = "modelspec.title"

NEEDED: Final = frozenset(
    {"format", "config", *(f"modelspec.{name}" for name in (
        "sai_model_spec", "architecture", "implementation", "prediction_type", "predict_key", "resolution",
        "encoder_layer", "timestep_range",
    ))}
)  # fmt: skip
"""Entries that programs read to load the weights; the others say where a model comes from. Specification:
https://github.com/Stability-AI/ModelSpec. `config` holds the configuration of single-file LTX-Video models."""


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
    adapters = [m.adapter.index for m in plan.adapters]
    written = entries(plan.job, plan.base, adapters, digests, [m.strengths for m in plan.adapters])
    for file, of_merge, of_sums in islice(zip(plan.files, written, sums, strict=True), first, None):
        header = with_metadata(file.header, {**file.entries, **of_merge, **of_sums})
        yield sealed(header) if SEAL in of_merge else header
