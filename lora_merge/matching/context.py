"""What is known of one adapter on one base before the first of its modules is placed. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Final

from ..adapters.file import AdapterFile, Module, Values
from ..adapters.kohya_args import Trained, trained
from ..adapters.peft.rules import PeftRules
from ..algorithms import ALGORITHMS, DoesNotFit, Shape, flat
from ..algorithms.lora import LORA
from ..errors import MergeError, ShapeMismatch
from ..job import SETTING
from ..models.weights import WeightView
from .orientation import NOTHING, Base, Orientation

UNTOLD: Final = "the adapter's file does not tell all that its formula needs"
FROM_THE_TRAINING: Final = (
    "put the adapter_config.json of the training beside the adapter, and the base's config.json beside the base"
)


@dataclass(frozen=True)
class AdapterContext:
    """One adapter, what its files and the base's say of all of its modules, and what the user states."""

    number: int  # which of the job's adapters it is
    adapter: AdapterFile
    rules: PeftRules
    values: Values
    config: Mapping[str, Any] = field(default_factory=dict)  # the base's
    model: str = ""  # the base's type
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that the user states, because no file does
    base: Base = NOTHING  # what the base tells of its layers
    residual: Collection[str] = frozenset()  # base tensors in whose place the adapter's copy is: a start is out of it
    widest: tuple[int, int] = (0, 0)  # rows and columns, each the most of the weights whose formula asks for it
    _trained: dict[str, Trained] = field(default_factory=dict, init=False, repr=False, compare=False)  # remembered

    @property
    def by_config(self) -> bool:
        """Whether the base is built from a configuration: it has the layers that were stored."""
        return not {"model_type", "_class_name"}.isdisjoint(self.config)

    @cached_property
    def weights(self) -> Mapping[str, Module]:
        """Name → the module that changes a weight."""
        return {m.name: m for m in self.adapter.modules if m.parameter == "weight"}

    @cached_property
    def dylora(self) -> bool:
        """Whether a convolution of it has the shapes that LyCORIS' DyLoRA saves, so that its linear layers are such
        too, of which no tensor tells."""
        pairs = (m.shapes for m in self.adapter.modules if LORA.name in m.algorithms)
        return any(len(shapes.get("up", ())) == 2 < len(shapes.get("down", ())) for shapes in pairs)

    @cached_property
    def orientation(self) -> Orientation:
        """Which way round the weights of its layers are."""
        return Orientation(self.rules, self.weights.values(), self._fits, self.base, self.given.get(SETTING))

    def trained(self, name: str) -> Trained:
        """Return what the file's metadata says about a formula."""
        if name not in self._trained:
            self._trained[name] = trained(ALGORITHMS[name], self.adapter.index.metadata, str(self.adapter.path))
        return self._trained[name]

    def with_shared(self, module: Module, name: str) -> Module:
        """Return the module with the tensors that the file has once for all modules, as far as a formula takes them."""
        keys, tensors = self.rules.of(module.name).shared(name, module.name), self.adapter.index.tensors
        found = {slot: tensors[key] for slot, key in keys.items() if key in tensors}
        return replace(module, slots={**found, **module.slots}) if found else module

    def candidates(
        self, module: Module, view: WeightView, near: Mapping[str, WeightView] = MappingProxyType({})
    ) -> tuple[Sequence[str], str | None]:
        """(the rows of ALGORITHMS to try, the one that the configuration chose).

        ShapeMismatch if the files do not tell enough.
        """
        complete, told = module.complete, self.rules.of(module.name)
        try:
            chosen = told.algorithm(module.name, complete, view, self.model)
        except DoesNotFit as e:
            where = f"{self.adapter.path}: {module.where} {shapes_of(module)}: {e}"
            raise ShapeMismatch(UNTOLD, where, FROM_THE_TRAINING) from e
        if chosen is None:
            return complete, None
        left = ALGORITHMS[chosen].starts_in_base and view.pieces[0].key in self.residual
        chosen = LORA.name if left and LORA.name in complete else chosen
        return [chosen] if _has_all(self.with_shared(module, chosen), chosen, near) else [], chosen

    def _fits(self, module: Module, view: WeightView) -> bool:
        """Return whether some formula takes the module's tensors for a weight that is seen so."""
        try:
            rows, _ = self.candidates(module, view)
        except MergeError:
            return False
        return any(_takes(name, self.with_shared(module, name).shapes, view) for name in rows)


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few shapes
def fit(
    name: str, stored: tuple[tuple[str, Shape], ...], weight: Shape, matrix: tuple[int, int]
) -> Mapping[str, Shape]:
    """Return the shapes that the formula wants; DoesNotFit for one that would take stacked experts for one wide
    matrix.
    """
    shapes = ALGORITHMS[name].fitted_shapes(dict(stored), weight)
    if matrix != flat(weight) and not ALGORITHMS[name].stacked:
        raise DoesNotFit(f"the weight {list(weight)} is stacked experts, which {name} is not made for")
    return shapes


def shapes_of(module: Module) -> str:
    """Return the shapes of a module's tensors, for a message."""
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())


def _takes(name: str, shapes: Mapping[str, Shape], view: WeightView) -> bool:
    try:
        fit(name, tuple(shapes.items()), view.shape, view.matrix)
    except DoesNotFit:
        return False
    return True


def _has_all(module: Module, name: str, near: Mapping[str, WeightView]) -> bool:
    row = ALGORITHMS[name]
    return all(slot in module.slots or row.beside.get(slot) in near for slot, must in row.slots.items() if must)
