"""The final headers of an output. They are planned before any weight is read; its inputs' digests are known after it.

Nothing is searched for in a header to be replaced: it may hold names and texts of strangers that look like anything.
Our own metadata entries are made a second time, with the digests, and the others are what the base's file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..files.layout_check import with_metadata
from ..files.seal import sealed
from .plan import Plan
from .recipe import entries


def headings(plan: Plan, digests: Sequence[str]) -> Iterator[bytes]:
    """Yields the header of every file of the plan, as long as the planned one.

    `digests`: SHA-256 of `plan.inputs`, in hexadecimal digits and the same order.
    """
    found = entries(plan.job, plan.base, [m.adapter.index for m in plan.adapters], digests)
    for file, own in zip(plan.files, found, strict=True):
        yield sealed(with_metadata(file.header, {**file.kept, **own}))
