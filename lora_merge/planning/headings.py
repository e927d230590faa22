"""The final headers of an output. A header is planned before any weight is read; the inputs' digests are known after.

No placeholder is searched in the planned header, because the base's names and texts may look like one. Our own
metadata entries are made a second time, with the digests; the other entries are those of the base's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..files.headers import with_metadata
from ..files.seal import SEAL, sealed
from .plan import Plan
from .recipe import entries


def headings(plan: Plan, digests: Sequence[str]) -> Iterator[bytes]:
    """Yield the final header of every file of the plan, as long as the planned header.

    `digests`: SHA-256 of `plan.inputs`, in hexadecimal digits and the same order.
    """
    found = entries(plan.job, plan.base, [m.adapter.index for m in plan.adapters], digests)
    for file, own in zip(plan.files, found, strict=True):
        header = with_metadata(file.header, {**file.kept, **own})
        yield sealed(header) if SEAL in own else header
