"""The tensors that a conversion will write, from headers alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapter_options import KEEP
from ...disk.files import StoredTensor
from ...dtypes import DTYPES, FLOATS, ITEM_BYTES
from ...shapes import Shape
from ..dialects import Dialect
from ..job import WHOLE, AdapterJob
from ..joining.targets import is_plain
from ..metadata.sizes import PlannedLayer
from ..places import Filled, Share


def planned_layer(one: Filled, rank: int, to: Dialect, job: AdapterJob, *, kept: bool) -> PlannedLayer:
    """Return the tensors of one module. `rank`: of its factors, or the most that they can have. `kept`: whether the
    algorithm is that of the input."""
    place, patches = one.place, [s.patch for s in one.shares]
    out, cols = place.view.matrix
    dtype = written_dtype(job, one.shares) or "F32"
    slots: dict[str, tuple[str, Shape]]
    if place.vector or one.value is not None or job.algorithm == WHOLE:
        slots, rank = {"diff": (dtype, (out, cols))}, 0
    elif kept and not all(map(is_plain, patches)):
        slots, rank = {slot: (_kind(i, job), i.shape) for p in patches for slot, i in p.module.slots.items()}, 0
        slots |= {"alpha": ("F32", ())} if to.alpha else {}
    else:
        slots = {"down": (dtype, (rank, cols)), "up": (dtype, (out, rank))}
        slots |= {"alpha": ("F32", ())} if to.alpha else {}
    magnitude = next((p.magnitude for p in patches if p.magnitude is not None), None)
    if kept and magnitude is not None:
        slots["magnitude"] = dtype, (out, 1) if magnitude[0] == "out" else magnitude[1]
    copied = {slot: to.copied(p.module, p.algorithm, place.parameter, slot) for p in patches for slot in p.module.slots}
    names = {slot: to.endings.get(slot) or copied.get(slot) or f".{slot}" for slot in slots}
    return PlannedLayer([(to.key(place.prefix, place.module, names[slot]), *own) for slot, own in slots.items()], rank)


def _kind(info: StoredTensor, job: AdapterJob) -> str:
    """Return the dtype of a tensor that is copied."""
    made = written_dtype(job, ())
    return made if made is not None and info.dtype in FLOATS else info.dtype


def written_dtype(job: AdapterJob, shares: Sequence[Share]) -> str | None:
    """Return the dtype of the output as files name it: as asked, else that of the first factor; None for as stored."""
    if job.inputs.dtype != KEEP:
        return DTYPES[job.inputs.dtype]
    kinds = [info.dtype for s in shares for info in s.patch.module.slots.values() if info.dtype in FLOATS]
    if not shares:
        return None
    wide = [k for k in kinds if ITEM_BYTES[k] > 1]
    return wide[0] if len({*wide}) == 1 else "F32"
