"""The tensors that `demands.py` asks for in addition: biases, values and magnitudes, zeros up to one rank; and factors
of embeddings under PEFT's names.

A layer with the magnitudes ‖W + ΔW‖ of its rows computes W + ΔW, so one without magnitudes gets these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...engine.tensor_moves import TORCH_DTYPES
from ...engine.tensors import view_bytes
from ..delta import ModuleTensors, as_value, entry
from ..dialects import Dialect
from ..groups import Place
from ..job import FACTORS, WHOLE
from ..metadata import factor_shapes
from ..module_tensors import Layer, StoredModule
from ..output_file import Entry
from .config import BIAS_ENDING, WRAPPED_BIAS, expect_table, magnitude_shape
from .demands import Demands, by_module, demands, is_pair, new_biases, parameter_of


def with_biases(
    modules: Sequence[StoredModule], all_places: Iterable[Place], to: Dialect,
    renewed: Callable[[Place], ModuleTensors] | None,
    keep: Callable[[ModuleTensors], StoredModule],
) -> list[StoredModule]:  # fmt: skip
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them.

    `all_places`: all parameters in the words of the dialect. `renewed`: returns a parameter's new value; None if
    the base is not known. UsageError if the base has to be.
    """
    places = new_biases([parameter_of(m) for m in modules], by_module(all_places), to, known=renewed is not None)
    new = {id(place): keep(renewed(place)) for place in places if renewed}
    factored = {m.place.module for m in modules if m.layer.rank}
    changed = [new.get(id(m.place), m) for m in modules]
    return [_in_its_layer(m, factored) for m in changed] if to.folder else changed


def _in_its_layer(module: StoredModule, factored: set[str]) -> StoredModule:
    """Return a new bias under the name that it has in memory: PEFT wraps layers with factors."""
    if BIAS_ENDING not in module.tensors or module.place.module not in factored:
        return module
    entry = replace(module.tensors[BIAS_ENDING], name=WRAPPED_BIAS)
    return replace(module, tensors={WRAPPED_BIAS: entry})


def _factors_of_zeros(place: Place, to: Dialect, dtype: torch.dtype, rank: int = 1) -> ModuleTensors:
    """Return factors of zeros, of a layer whose weight does not change."""
    shapes = factor_shapes(place.view.shape, rank)
    tensors = {to.endings[slot]: torch.zeros(shape, dtype=dtype) for slot, shape in shapes.items()}
    return ModuleTensors(place, tensors, Layer(tensors, FACTORS, rank, 0, float(rank), 0.0, 0.0))


def together(
    modules: Sequence[StoredModule], asked: Demands, to: Dialect, keep: Callable[[ModuleTensors], StoredModule]
) -> list[StoredModule]:
    """Return the modules, those of a lower rank with zeros up to the largest of all, and with zeros where an expert of
    the same stack has factors. `keep`: lets the bytes of an added one wait."""
    if not asked.rank:
        return list(modules)
    some = next(m for m in modules if m.layer.rank == asked.rank and is_pair(parameter_of(m), to))
    fill = (m.place.module in asked.low and is_pair(parameter_of(m), to) for m in modules)
    modules_at_rank = [keep(_filled(m, to, asked.rank)) if low else m for m, low in zip(modules, fill, strict=True)]
    dtype = TORCH_DTYPES[some.tensors[to.endings["up"]].dtype]
    return modules_at_rank + [keep(_factors_of_zeros(place, to, dtype, asked.rank)) for place in asked.zeros]


def _filled(module: StoredModule, to: Dialect, rank: int) -> ModuleTensors:
    """Return the factors with zeros up to a rank."""
    up, down = (_tensor(module.tensors[to.endings[slot]]) for slot in ("up", "down"))
    more = rank - module.layer.rank
    tensors = {ending: _tensor(e) for ending, e in module.tensors.items()} | {
        to.endings["up"]: torch.cat((up, up.new_zeros(len(up), more, *up.shape[2:])), 1),
        to.endings["down"]: torch.cat((down, down.new_zeros(more, *down.shape[1:]))),
    }
    layer = replace(module.layer, tensors=tensors, rank=rank, alpha=float(rank))
    return ModuleTensors(module.place, tensors, layer)


def _tensor(entry: Entry) -> Tensor:
    return view_bytes(memoryview(bytearray(b"".join(entry.pieces()))), entry.dtype, entry.shape)


def magnitudes(
    modules: Sequence[StoredModule], places: Sequence[Place], to: Dialect, value: Callable[[Place], Tensor]
) -> Iterator[ModuleTensors]:  # fmt: skip
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
        yield ModuleTensors(module.place, {ending: norms}, replace(layer, tensors={ending: norms}))


def completed(
    modules: Sequence[StoredModule], all_places: Iterable[Place], to: Dialect, value: Callable[[Place], Tensor] | None,
    keep: Callable[[ModuleTensors], StoredModule],
) -> list[StoredModule]:  # fmt: skip
    """Return the modules with what PEFT asks for in addition; FitError where it has no place for them.

    `all_places`: all parameters in the words of the dialect. `value`: gives that of a parameter that did not change;
    None if the base is not known. `keep`: lets the bytes of an added one wait.
    """
    bias = to.endings.get("up_bias")
    if bias is None:
        return list(modules)
    asked = demands([parameter_of(m) for m in modules], by_module(all_places), to, known=value is not None)
    dtypes = {m.place.module: TORCH_DTYPES[m.tensors[bias].dtype] for m in modules if bias in m.tensors}
    added = [keep(_factors_of_zeros(place, to, dtypes[place.module])) for place in asked.factors]
    usual = next(iter(dtypes.values()), torch.float32)
    added += [keep(_plain(p, bias, torch.zeros(p.view.matrix[0], dtype=usual))) for p in asked.biases]
    if value is not None:
        added += [keep(tensors) for tensors in magnitudes(modules, asked.magnitudes, to, value)]
        added += [keep(_plain(p, f".{p.parameter}", as_value(p, value(p)))) for p in asked.values]
    return together([*modules, *added], asked, to, keep)


def _plain(place: Place, ending: str, tensor: Tensor) -> ModuleTensors:
    tensors = {ending: tensor}
    return ModuleTensors(place, tensors, Layer(tensors, WHOLE, 0, 0, None, 0.0, 0.0))


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
    return replace(module, tensors={**turned, **others})
