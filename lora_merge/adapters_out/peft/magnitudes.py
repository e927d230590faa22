"""DoRA in a folder of PEFT: all layers with factors have magnitudes, or none has.

A layer with the magnitudes ‖W + ΔW‖ of its rows computes W + ΔW, so those that have none get these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ...engine.tensors import view_bytes
from ...errors import UsageError
from ..conversion.assumed import GIVE_BASE
from ..conversion.made import Made
from ..dialects import Dialect
from ..outcome.layer import Kept
from ..places import Place
from ..written import Entry
from .biases import Own


def magnitude_shape(place: Place) -> tuple[int, ...]:
    """Return the shape in which PEFT stores the magnitudes of a layer: [out], and [1, out, 1, 1] of a convolution."""
    return (1, -1, *(1 for _ in place.view.shape[2:])) if len(place.view.shape) > 2 else (-1,)


def magnitudes(
    made: Sequence[Kept], own: Own, to: Dialect, value: Callable[[Place], Tensor] | None
) -> Iterator[Made]:  # fmt: skip
    """Yield the magnitudes of layers without one, where others have them. `value`: gives a weight of the base; None
    where it is not known, which is a UsageError here."""
    ending = to.endings.get("magnitude", "")
    lacking = [m for m in made if m.layer.rank and ending not in m.tensors]
    if not lacking or not any(ending in m.tensors for m in made):
        return
    for one in lacking:
        if value is None:
            raise UsageError("without the base, a layer without DoRA has no form beside others that have it",
                             one.place.label, GIVE_BASE)  # fmt: skip
        weight = value(one.place)
        table = to.endings.get("table_up", "") in one.tensors
        names = ("table_up", "table_down") if table else ("up", "down")
        up, down = (_tensor(one.tensors[to.endings[name]]).double().flatten(1) for name in names)
        whole = weight.double().flatten(1) + ((up @ down).mT if table else up @ down)
        found = whole.norm(dim=0 if table else 1).float().reshape(magnitude_shape(one.place))
        layer = replace(one.layer, rank=0, squares=0.0, lost=0.0)
        yield Made(one.place, {ending: found}, replace(layer, tensors={ending: found}))


def _tensor(entry: Entry) -> Tensor:
    return view_bytes(memoryview(bytearray(b"".join(entry.pieces()))), entry.dtype, entry.shape)
