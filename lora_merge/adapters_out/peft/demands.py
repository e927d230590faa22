"""What PEFT asks of all modules together: biases in one of two forms, magnitudes for every layer or for none, whole
modules with all parameters, and one rank for all experts of a model. From names and ranks alone, for plans too. No
torch.

Source for experts: peft/utils/transformers_weight_conversion.py. It stacks their factors when it loads them; `r` counts
for the experts of all layers, and twice for gate and up, whatever `rank_pattern` says; an expert without factors leaves
the whole stack without them.

Changed biases of layers, where a dialect stores no changes of them: PEFT has two forms, and diffusers the first one.

* A bias of the up factor (`lora_bias`) is added to that of the layer. All layers with factors have one or none has, and
  there is none with DoRA, in embeddings and in stacked experts. PEFT's merge_and_unload refuses it where the layer of
  the model has no bias.
* The new bias itself (`bias: all`, or `lora_only` where all are of layers with factors) is loaded into the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from ...errors import FitError, UsageError
from ..dialects import Dialect
from ..groups import Place
from ..job import GIVE_BASE
from .config import BIAS_ENDING, EXPERT, whole_modules

if TYPE_CHECKING:
    pass

USE_KOHYA: Final = "use kohya or comfy"
NO_FORM: Final = "without the base, PEFT cannot store the change of this bias"
NEEDS_BASE_FOR_DORA: Final = "without the base, a layer without DoRA has no form if others have it"

EXPERT_PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Layers of an expert. The first two are one parameter in memory, which PEFT finds only where the third has factors
too."""

Places: TypeAlias = Mapping[tuple[str, str], Place]
"""(module, parameter) → its place, of all parameters that are known."""


class Parameter(Protocol):
    """One parameter of a folder of PEFT, planned or stored."""

    @property
    def place(self) -> Place: ...
    @property
    def rank(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, object]:
        """Its tensors by their endings."""


class Demands(NamedTuple):
    """The tensors that a folder needs in addition."""

    factors: list[Place]  # layers whose bias alone changes, which get factors of zeros
    biases: list[Place]  # of layers whose up factors get biases of zeros
    magnitudes: list[Place]  # layers without DoRA, where others have it
    values: list[Place]  # parameters of whole modules that did not change
    rank: int  # that all experts get, or all layers where the user gave one number; else 0
    low: frozenset[str]  # the ones that have a lower one
    zeros: list[Place]  # experts that get factors of zeros


def by_module(places: Iterable[Place]) -> Places:
    """Return all parameters by their names."""
    return {(p.module, p.parameter): p for p in places}


def new_biases(parameters: Sequence[Parameter], places: Places, to: Dialect, *, known: bool) -> list[Place]:
    """Return the changed biases that are written as new values, as no factor can hold their changes. `known`: whether
    the base is; UsageError if it has to be."""
    ending = to.endings.get("up_bias")
    changed = [m.place for m in parameters if ending in m.tensors and not m.rank]
    if not changed:
        return []
    if not to.folder:
        if any(to.endings["magnitude"] in m.tensors for m in parameters):
            raise FitError(f"{to.name} cannot store biases together with DoRA", changed[0].label, USE_KOHYA)
        return []
    factored = {m.place.module for m in parameters if m.rank}
    whole = whole_modules(((m.place, m.tensors) for m in parameters), places.values())
    values = any(BIAS_ENDING in m.tensors and m.place.module not in whole for m in parameters)
    biased = not known or all((name, "bias") in places for name in factored)
    if biased and not values and not _refuses(parameters, changed, factored):
        return []
    if not known:
        raise UsageError(NO_FORM, changed[0].label, GIVE_BASE)
    return changed


def _refuses(parameters: Sequence[Parameter], changed: Sequence[Place], factored: set[str]) -> bool:
    """Return whether PEFT has no biases of factors with these modules."""
    endings = {ending for m in parameters for ending in m.tensors}
    others = any("magnitude" in e or "embedding" in e or e.startswith((".hada", ".lokr")) for e in endings)
    return others or any(EXPERT.search(n) for n in factored) or not {p.module for p in changed} <= factored


def demands(parameters: Sequence[Parameter], places: Places, to: Dialect, *, known: bool) -> Demands:
    """Return what the modules need in addition; FitError if a dialect cannot store it.

    `places`: all parameters in the words of the dialect. `known`: whether the base is; UsageError if it has to be.
    """
    bias = to.endings.get("up_bias")
    if bias is None:
        return Demands([], [], [], [], 0, frozenset(), [])
    factored = {m.place.module for m in parameters if m.rank}
    biased = {m.place.module for m in parameters if bias in m.tensors}
    whole = whole_modules(((m.place, m.tensors) for m in parameters), places.values())
    _check(factored, whole, to)
    whole_parameters = {(m.place.module, m.place.parameter) for m in parameters if f".{m.place.parameter}" in m.tensors}
    return Demands(
        _without_factors(parameters, places, to),
        [
            places.get((m, "bias"), places[m, "weight"]) for m in sorted(factored - biased) if biased
        ],  # some models lack one
        _without_dora(parameters, to, known=known),
        [place for key, place in places.items() if known and key[0] in whole and key not in whole_parameters],
        *_of_one_rank(parameters, places.values(), to),
    )


def _check(factored: set[str], whole: set[str], to: Dialect) -> None:
    """Raise FitError where a dialect cannot store these modules."""
    if expert := next((m for m in sorted(whole) if to.whole and EXPERT.search(m)), None):
        raise FitError(f"{to.name} has no module for whole values of one expert: transformers stacks all of them",
                       expert,
                       "bring it to LoRA: `--algorithm lora --rank 32`, or write another format (kohya)")  # fmt: skip
    if both := next((m for m in sorted(whole & factored)), None):
        raise FitError(f"{to.name} stores a layer as factors or as whole tensors; this one needs both", both, USE_KOHYA)


def _without_factors(parameters: Sequence[Parameter], places: Places, to: Dialect) -> list[Place]:
    """Return the layers whose bias alone changes: without factors it has no place in a file of diffusers."""
    ending, missing = to.endings.get("up_bias"), []
    factored = {m.place.module for m in parameters if m.rank}
    for module in (m.place.module for m in parameters if ending in m.tensors and m.place.module not in factored):
        place = places.get((module, "weight"))
        if place is None or len(place.view.shape) < 2:
            raise FitError(f"{to.name} has a place for the bias of a layer only together with factors of its weight",
                           module,
                           USE_KOHYA)  # fmt: skip
        missing.append(place)
    return missing


def _without_dora(parameters: Sequence[Parameter], to: Dialect, *, known: bool) -> list[Place]:
    """Return the layers with factors and without magnitudes, where others have them."""
    ending = to.endings.get("magnitude", "")
    if not any(ending in m.tensors for m in parameters):
        return []
    lacking = [m.place for m in parameters if m.rank and ending not in m.tensors]
    if lacking and not known:
        raise UsageError(NEEDS_BASE_FOR_DORA, lacking[0].label, GIVE_BASE)
    return lacking


def _of_one_rank(
    parameters: Sequence[Parameter], places: Iterable[Place], to: Dialect
) -> tuple[int, frozenset[str], list[Place]]:  # fmt: skip
    """Return the rank of all experts or layers, the ones of a lower rank, and experts without factors in stacks."""
    pairs = {m.place.module: m.rank for m in parameters if to.folder and is_pair(m, to)}
    experts = {module: rank for module, rank in pairs.items() if EXPERT.search(module)}
    alike = pairs if to.one_rank else experts
    if not alike:
        return 0, frozenset(), []
    rank, leaves = max(alike.values()), {_leaf(module) for module in experts}
    stacked = {leaf for names in EXPERT_PROJECTIONS for leaf in (names if leaves & {*names[:2]} else leaves & {*names})}
    zeros = [
        place
        for place in places
        if place.parameter == "weight" and EXPERT.search(place.module) and _leaf(place.module) in stacked
        and place.module not in alike
    ]  # fmt: skip
    return rank, frozenset(name for name, module_rank in alike.items() if module_rank < rank), zeros


def is_pair(parameter: Parameter, to: Dialect) -> bool:
    """Return whether a module is stored as the factors of LoRA."""
    return parameter.place.parameter == "weight" and {to.endings["up"], to.endings["down"]} <= parameter.tensors.keys()


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
