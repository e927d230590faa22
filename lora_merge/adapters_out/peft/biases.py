"""Changed biases of layers, where a dialect stores no changes of them: PEFT has two forms, and diffusers the first one.

* A bias of the up factor (`lora_bias`) is added to that of the layer. All layers with factors have one or none has, and
  there is none beside DoRA, in embeddings and in stacked experts. PEFT's merge_and_unload refuses it where the layer of
  the model has no bias.
* The new bias itself (`bias: all`, or `lora_only` where all are of layers with factors) is loaded into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ...engine.placement import TORCH_DTYPES
from ...errors import FitError, UsageError
from ..conversion.assumed import GIVE_BASE
from ..conversion.made import Made
from ..dialects import Dialect
from ..job import FACTORS
from ..outcome.layer import Kept, Layer
from ..places import Place
from .folder import BIAS, EXPERT, WRAPPED, whole_modules

Own: TypeAlias = Mapping[tuple[str, str], Place]
"""(module, parameter) → its place, of all parameters that are known."""

KOHYA: Final = "use kohya or comfy; extract leaves biases out with --others skip"
NO_FORM: Final = "without the base, PEFT has no place for the change of this bias"


def with_biases(
    made: Sequence[Kept], there: Iterable[Place], to: Dialect, renewed: Callable[[Place], Made] | None,
    keep: Callable[[Made], Kept],
) -> list[Kept]:  # fmt: skip
    """Return the modules with the changes of biases in the form in which the dialect can hold all of them.

    `there`: all parameters in the words of the dialect. `renewed`: returns a parameter's new value; None where the base
    is not known. UsageError if the base has to be.
    """
    ending = to.endings.get("up_bias")
    if ending is None:
        return [*made]
    own = {(p.module, p.parameter): p for p in there}
    changed = [m for m in made if ending in m.tensors and not m.layer.rank]
    factored = {m.place.module for m in made if m.layer.rank}
    if not to.folder:
        if changed and any(to.endings["magnitude"] in m.tensors for m in made):
            raise FitError(f"{to.name} has no place for biases beside DoRA", changed[0].place.label, KOHYA)
        return [*made]
    whole = whole_modules(made, own.values())
    values = [m for m in made if BIAS in m.tensors and m.place.module not in whole]
    if not values and not _refuses(made, changed, factored):
        biased = all((name, "bias") in own for name in factored)
        if renewed is None or biased or not changed:
            return [*made]
    if changed and renewed is None:
        raise UsageError(NO_FORM, changed[0].place.label, GIVE_BASE)
    new = {id(m): keep(renewed(m.place)) for m in changed if renewed}
    return [_in_its_layer(new.get(id(m), m), factored) for m in made]


def _refuses(made: Sequence[Kept], changed: Sequence[Kept], factored: set[str]) -> bool:
    """Return whether PEFT has no biases of factors beside these modules."""
    endings = {ending for m in made for ending in m.tensors}
    others = any("magnitude" in e or "embedding" in e or e.startswith((".hada", ".lokr")) for e in endings)
    return others or any(EXPERT.search(n) for n in factored) or not {m.place.module for m in changed} <= factored


def _in_its_layer(made: Kept, factored: set[str]) -> Kept:
    """Return a new bias under the name that it has in memory: PEFT wraps layers with factors."""
    if BIAS not in made.tensors or made.place.module not in factored:
        return made
    entry = replace(made.tensors[BIAS], name=WRAPPED)
    return replace(made, tensors={WRAPPED: entry})


def factors_of_zeros(made: Sequence[Kept], own: Own, to: Dialect) -> Iterator[Made]:
    """Yield factors of zeros for layers whose bias alone changes: without factors it has no place in a file of
    diffusers."""
    ending = to.endings.get("up_bias", "")
    factored = {m.place.module for m in made if m.layer.rank}
    for one in (m for m in made if ending in m.tensors and m.place.module not in factored):
        place = own.get((one.place.module, "weight"))
        if place is None or len(place.view.shape) < 2:
            raise FitError(f"{to.name} has a place for the bias of a layer only beside factors of its weight",
                           one.place.module, KOHYA)  # fmt: skip
        dtype = TORCH_DTYPES[one.tensors[ending].dtype]
        out, *cols = place.view.shape
        tensors: dict[str, Tensor] = {
            to.endings["up"]: torch.zeros(out, 1, *(1 for _ in cols[1:]), dtype=dtype),
            to.endings["down"]: torch.zeros(1, *cols, dtype=dtype),
        }
        yield Made(place, tensors, Layer(tensors, FACTORS, 1, 0, 1.0, 0.0, 0.0))
