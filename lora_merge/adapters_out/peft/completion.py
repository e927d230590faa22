"""The tensors that `demands.py` asks for in addition: biases, values and magnitudes, zeros up to one rank; and factors
of embeddings under PEFT's names.

A layer with the magnitudes ‖W + ΔW‖ of its rows computes W + ΔW, so one without magnitudes gets these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...disk.draft import Draft, Heap
from ...engine.tensor_moves import TORCH_DTYPES
from ...engine.tensors import view_bytes
from ..delta import as_value, entry, stored_module
from ..dialects import Dialect
from ..groups import Place
from ..job import FACTORS, WHOLE
from ..metadata import factor_shapes
from ..module_tensors import Layer, StoredModule, waiting
from ..output_file import Entry
from .config import BIAS_ENDING, WRAPPED_BIAS, expect_table, magnitude_shape
from .demands import Demands, by_module, demands, is_pair, new_biases


def with_biases(
    modules: Sequence[StoredModule], all_places: Iterable[Place], to: Dialect,
    renewed: Callable[[Place], StoredModule] | None, put: Heap | Draft,
) -> list[StoredModule]:  # fmt: skip
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them.

    `all_places`: all parameters in the words of the dialect. `renewed`: returns a parameter's new value; None if
    the base is not known. UsageError if the base has to be. `put`: what keeps the bytes of a new one.
    """
    places = new_biases(modules, by_module(all_places), to, known=renewed is not None)
    new = {id(place): waiting(renewed(place), put) for place in places if renewed}
    factored = {m.place.module for m in modules if m.layer.rank}
    changed = [new.get(id(m.place), m) for m in modules]
    return [_in_its_layer(m, factored) for m in changed] if to.folder else changed


def _in_its_layer(module: StoredModule, factored: set[str]) -> StoredModule:
    """Return a new bias under the name that it has in memory: PEFT wraps layers with factors."""
    if BIAS_ENDING not in module.tensors or module.place.module not in factored:
        return module
    entry = module.tensors[BIAS_ENDING]._replace(name=WRAPPED_BIAS)
    return module._replace(tensors={WRAPPED_BIAS: entry})


def _factors_of_zeros(place: Place, to: Dialect, dtype: torch.dtype, rank: int = 1) -> StoredModule:
    """Return factors of zeros, of a layer whose weight does not change."""
    shapes = factor_shapes(place.view.shape, rank)
    tensors = {to.endings[slot]: torch.zeros(shape, dtype=dtype) for slot, shape in shapes.items()}
    return stored_module(place, tensors, Layer(FACTORS, rank, 0, float(rank), 0.0, 0.0))


def at_one_rank(modules: Sequence[StoredModule], asked: Demands, to: Dialect, put: Heap | Draft) -> list[StoredModule]:
    """Return the modules, those of a lower rank with zeros up to the largest of all, and with zeros where an expert of
    the same stack has factors. `put`: what keeps the bytes of an added one."""
    if not asked.rank:
        return list(modules)
    some = next(m for m in modules if m.layer.rank == asked.rank and is_pair(m, to))
    fill = (m.place.module in asked.low and is_pair(m, to) for m in modules)
    modules_at_rank = [
        waiting(_filled(m, to, asked.rank), put) if low else m for m, low in zip(modules, fill, strict=True)
    ]
    dtype = TORCH_DTYPES[some.tensors[to.endings["up"]].dtype]
    return modules_at_rank + [waiting(_factors_of_zeros(place, to, dtype, asked.rank), put) for place in asked.zeros]


def _filled(module: StoredModule, to: Dialect, rank: int) -> StoredModule:
    """Return the factors with zeros up to a rank."""
    up, down = (_tensor(module.tensors[to.endings[slot]]) for slot in ("up", "down"))
    more = rank - module.layer.rank
    tensors = {ending: _tensor(e) for ending, e in module.tensors.items()} | {
        to.endings["up"]: torch.cat((up, up.new_zeros(len(up), more, *up.shape[2:])), 1),
        to.endings["down"]: torch.cat((down, down.new_zeros(more, *down.shape[1:]))),
    }
    return stored_module(module.place, tensors, replace(module.layer, rank=rank, alpha=float(rank)))


def _tensor(entry: Entry) -> Tensor:
    return view_bytes(memoryview(bytearray(b"".join(entry.pieces()))), entry.dtype, entry.shape)


def magnitudes(
    modules: Sequence[StoredModule], places: Sequence[Place], to: Dialect, value: Callable[[Place], Tensor]
) -> Iterator[StoredModule]:  # fmt: skip
    """Yield the magnitudes of the layers at these places, which have factors alone. `value`: gives a weight of the
    base."""
    ending, lacking = to.endings.get("magnitude", ""), {id(place) for place in places}
    for module in (m for m in modules if id(m.place) in lacking):
        weight = value(module.place)
        table = to.endings.get("table_up", "") in module.tensors
        names = ("table_up", "table_down") if table else ("up", "down")
        up, down = (_tensor(module.tensors[to.endings[name]]).double().flatten(1) for name in names)
        whole = weight.double().flatten(1) + ((up @ down).mT if table else up @ down)
        norms = whole.norm(dim=0 if table else 1).float().reshape(magnitude_shape(module.place))
        layer = replace(module.layer, rank=0, squares=0.0, lost=0.0)
        yield stored_module(module.place, {ending: norms}, layer)


def completed(
    modules: Sequence[StoredModule], all_places: Iterable[Place], to: Dialect, value: Callable[[Place], Tensor] | None,
    put: Heap | Draft,
) -> list[StoredModule]:  # fmt: skip
    """Return the modules with what PEFT asks for in addition; FitError where it cannot store them.

    `all_places`: all parameters in the words of the dialect. `value`: gives that of a parameter that did not change;
    None if the base is not known. `put`: what keeps the bytes of an added one.
    """
    bias = to.endings.get("up_bias")
    if bias is None:
        return list(modules)
    asked = demands(modules, by_module(all_places), to, known=value is not None)
    dtypes = {m.place.module: TORCH_DTYPES[m.tensors[bias].dtype] for m in modules if bias in m.tensors}
    added = [waiting(_factors_of_zeros(place, to, dtypes[place.module]), put) for place in asked.factors]
    usual = next(iter(dtypes.values()), torch.float32)
    added += [waiting(_plain(p, bias, torch.zeros(p.view.matrix[0], dtype=usual)), put) for p in asked.biases]
    if value is not None:
        added += [waiting(module, put) for module in magnitudes(modules, asked.magnitudes, to, value)]
        added += [waiting(_plain(p, f".{p.parameter}", as_value(p, value(p))), put) for p in asked.values]
    return at_one_rank([*modules, *added], asked, to, put)


def _plain(place: Place, ending: str, tensor: Tensor) -> StoredModule:
    return stored_module(place, {ending: tensor}, Layer(WHOLE, 0, 0, None, 0.0, 0.0))


def as_table(module: StoredModule, to: Dialect, *, table: bool) -> StoredModule:
    """Return the factors of an embedding as PEFT stores them: both transposed, under other endings. FitError for a
    dialect without such endings, whose loader puts factors on layers alone. `table`: whether they are those of one."""
    down, up = to.endings.get("down", ""), to.endings.get("up", "")
    if "up_bias" not in to.endings or up not in module.tensors or not table:
        return module
    expect_table(module.place, to)
    others = {ending: value for ending, value in module.tensors.items() if ending not in (down, up)}
    turned = {new: entry(new, _tensor(module.tensors[old]).mT)
              for new, old in ((to.endings["table_down"], up), (to.endings["table_up"], down))}  # fmt: skip
    return module._replace(tensors={**turned, **others})
