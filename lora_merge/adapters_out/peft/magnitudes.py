"""DoRA in a folder of PEFT: all layers with factors have magnitudes, or none has.

A layer with the magnitudes ‖W + ΔW‖ of its rows computes W + ΔW, so those that have none get these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ...engine.tensors import view_bytes
from ..conversion.made import Made
from ..dialects import Dialect
from ..outcome.layer import Kept
from ..places import Place
from ..written import Entry
from .folder import magnitude_shape


def magnitudes(
    made: Sequence[Kept], places: Sequence[Place], to: Dialect, value: Callable[[Place], Tensor]
) -> Iterator[Made]:  # fmt: skip
    """Yield the magnitudes of the layers at these places, which have factors alone. `value`: gives a weight of the
    base."""
    ending, lacking = to.endings.get("magnitude", ""), {id(place) for place in places}
    for one in (m for m in made if id(m.place) in lacking):
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
