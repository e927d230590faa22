"""The tensors that a conversion will write, from headers alone."""

from __future__ import annotations

from ...disk.files import StoredTensor
from ...dtypes import FLOATS
from ...engine.placement import FILE_DTYPES
from ...shapes import Shape
from ..changes import is_plain
from ..converting import written_dtype
from ..dialects import Dialect
from ..job import WHOLE, AdapterJob
from ..metadata.sizes import PlannedLayer
from ..places import Filled


def planned_layer(one: Filled, rank: int, to: Dialect, job: AdapterJob, *, kept: bool) -> PlannedLayer:
    """Return the tensors of one module. `rank`: of its factors, or the most that they can have. `kept`: whether the
    algorithm is that of the input."""
    place, patches = one.place, [s.patch for s in one.shares]
    out, cols = place.view.matrix
    made = written_dtype(job, one.shares)
    dtype = "F32" if made is None else FILE_DTYPES[made]
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
    return FILE_DTYPES[made] if made is not None and info.dtype in FLOATS else info.dtype
