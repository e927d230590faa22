"""The facts about one adapter on one base that are known before its first module is placed. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Final

from ..adapters.file import AdapterFile, Module, Values
from ..adapters.kohya_args import Trained, trained
from ..adapters.peft.methods import SHARED
from ..adapters.peft.rules import PeftRules
from ..adapters.stated import Statement, statement
from ..algorithms import ALGORITHMS, DoesNotFit
from ..algorithms.lora import LORA
from ..algorithms.lora_experts import LORA_EXPERTS, LORA_EXPERTS_TRANSPOSED
from ..algorithms.lora_stacked import STACKED
from ..dtypes import WHOLE
from ..errors import MergeError, ShapeMismatch
from ..job import SETTING
from ..models.weights import WeightView
from ..shapes import Shape, flat
from .orientation import NO_FACTS, Base, Orientation

EXPERTS: Final = (LORA_EXPERTS.name, LORA_EXPERTS_TRANSPOSED.name)

LACKS_FACTS: Final = "the adapter's file does not hold all that its formula needs"
FROM_THE_TRAINING: Final = (
    "put the adapter_config.json of the training beside the adapter, and the base's config.json beside the base"
)


@dataclass(frozen=True)
class AdapterContext:
    """One adapter with the facts from its files, the base's files and the user's settings."""

    number: int  # position among the job's adapters
    adapter: AdapterFile
    rules: PeftRules
    values: Values
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the base
    model: str = ""  # architecture or model type of the base
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that the user states
    base: Base = NO_FACTS  # layers of the base
    without_start: Collection[str] = frozenset()  # tensors with the values of the adapter's copy, without the start
    widest: tuple[int, int] = (0, 0)  # most rows and columns of the weights whose formula needs it
    _trained: dict[str, Trained] = field(default_factory=dict, init=False, repr=False, compare=False)  # cache

    @property
    def by_config(self) -> bool:
        """Whether the base has a configuration from which its model is built, with the layers that are stored."""
        return not {"model_type", "_class_name"}.isdisjoint(self.config)

    @cached_property
    def weights(self) -> Mapping[str, Module]:
        """Modules that change a weight, by name."""
        return {m.name: m for m in self.adapter.modules if m.parameter == "weight"}

    @cached_property
    def has_whole_numbers(self) -> bool:
        """Whether a tensor of the file holds whole numbers; a switch is not a number."""
        return any(info.dtype in WHOLE and info.dtype != "BOOL" for info in self.adapter.index.tensors.values())

    @cached_property
    def stated(self) -> Statement:
        """What the adapter's header and the files next to it state about the scale."""
        return statement(self.adapter)

    @cached_property
    def dylora(self) -> bool:
        """Whether a convolution has the shapes that LyCORIS' DyLoRA saves; then the linear layers are DyLoRA too."""
        pairs = (m.shapes for m in self.adapter.modules if LORA.name in m.algorithms)
        return any(len(shapes.get("up", ())) == 2 < len(shapes.get("down", ())) for shapes in pairs)

    @cached_property
    def orientation(self) -> Orientation:
        """Finds the orientation of each layer's weight."""
        return Orientation(self.rules, self.weights.values(), self._fits, self.base, self.given.get(SETTING))

    def trained(self, name: str) -> Trained:
        """Return the trainer's arguments for a formula, from the file's metadata."""
        if name not in self._trained:
            self._trained[name] = trained(ALGORITHMS[name], self.adapter.index.metadata, str(self.adapter.path))
        return self._trained[name]

    def with_shared(self, module: Module, name: str) -> Module:
        """Return the module with the shared tensors of the file that a formula takes."""
        if name not in SHARED:
            return module
        keys, tensors = self.rules.of(module.name).shared(name, module.name), self.adapter.index.tensors
        found = {slot: tensors[key] for slot, key in keys.items() if key in tensors}
        return replace(module, slots={**found, **module.slots}) if found else module

    def candidates(
        self, module: Module, view: WeightView, near: Mapping[str, WeightView] = MappingProxyType({})
    ) -> tuple[Sequence[str], str | None]:
        """Return (the rows of ALGORITHMS to try, the row that the configuration selects or None).

        ShapeMismatch if the files do not hold enough to decide.
        """
        complete, rules = module.complete, self.rules.of(module.name)
        try:
            chosen = rules.algorithm(module.name, complete, view, self.model)
        except DoesNotFit as e:
            where = f"{self.adapter.path}: {module.where} {shapes_of(module)}: {e}"
            raise ShapeMismatch(LACKS_FACTS, where, FROM_THE_TRAINING) from e
        if chosen is None:
            stored = module.slots.keys()
            return [
                n for n in complete
                if ALGORITHMS[n].required <= stored or _has_required(self.with_shared(module, n), n, near)
            ], None  # fmt: skip
        if chosen in EXPERTS and len(module.shapes.get("up", ())) == 3:  # other programs' form of the same factors
            return [row.name for row in STACKED if row.name in complete], None
        left = ALGORITHMS[chosen].starts_in_base and view.row_slices[0].key in self.without_start
        chosen = LORA.name if left and LORA.name in complete else chosen
        return [chosen] if _has_required(self.with_shared(module, chosen), chosen, near) else [], chosen

    def _fits(self, module: Module, view: WeightView) -> bool:
        """Return whether some formula accepts the module's tensors for this view of the weight."""
        try:
            rows, _ = self.candidates(module, view)
        except MergeError:
            return False
        return any(_formula_takes(name, self.with_shared(module, name).shapes, view) for name in rows)


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few shapes
def fit(
    name: str, stored: tuple[tuple[str, Shape], ...], weight: Shape, matrix: tuple[int, int]
) -> Mapping[str, Shape]:
    """Return the shapes as the formula needs them; DoesNotFit for stacked experts in a formula for one matrix."""
    shapes = ALGORITHMS[name].fitted_shapes(dict(stored), weight)
    if matrix != flat(weight) and not ALGORITHMS[name].stacked:
        raise DoesNotFit(f"the weight {list(weight)} is stacked experts, which {name} does not support")
    return shapes


def shapes_of(module: Module) -> str:
    """Return the shapes of a module's tensors, for a message."""
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())


def _formula_takes(name: str, shapes: Mapping[str, Shape], view: WeightView) -> bool:
    try:
        fit(name, tuple(shapes.items()), view.shape, view.matrix)
    except DoesNotFit:
        return False
    return True


def _has_required(module: Module, name: str, near: Mapping[str, WeightView]) -> bool:
    """Return whether the module has the slots that a formula requires, or the base has weights that fill them."""
    row = ALGORITHMS[name]
    return all(row.beside.get(slot) in near for slot in row.required - module.slots.keys())
