"""Orientation, [out, in] or [in, out], of the weights that one adapter changes in one base. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ..adapters.conv1d import (
    CONTRADICTION,
    UPRIGHT,
    Layer,
    base_types,
    conv1d_by_base,
    conv1d_by_setting,
    conv1d_by_shapes,
)
from ..adapters.file import Module
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import TABLES
from ..algorithms import ALGORITHMS
from ..files.layouts import PEFT
from ..models.weights import WeightView, transposed


class Undecided(ValueError):
    """Signs that contradict each other, so that only the user knows a weight's orientation."""


@dataclass(frozen=True)
class Place:
    """A module with its weight in the base, and the bias of its layer, if that can tell the orientation."""

    module: Module
    view: WeightView
    bias: WeightView | None


@dataclass(frozen=True)
class Base:
    """The facts about a base that decide the orientation of its layers."""

    types: Collection[str]  # model types in its config.json
    recognised: Callable[[str], bool]  # whether a table knows the model of a tensor
    places: Callable[[], Iterable[Place]]  # of the adapter's modules


NO_FACTS: Final = Base((), lambda _: False, tuple)
"""The empty facts, where only the adapter is known."""

ALL_UPRIGHT: Final = Base(base_types(UPRIGHT), lambda _: False, tuple)
"""Weights that an adapter alone shows: [out, in] as its own tensors, however the model stores them."""


class Orientation:
    """Orientation of one adapter's layers on one base.

    `fits`: whether a module's tensors fit a view of its weight. `given`: the orientation that the user states.
    """

    def __init__(
        self,
        rules: PeftRules,
        modules: Iterable[Module],
        fits: Callable[[Module, WeightView], bool],
        base: Base,
        given: bool | None,  # noqa: FBT001
    ) -> None:
        self._rules, self._modules, self._fits, self._base, self._given = rules, modules, fits, base, given
        self._decided: dict[tuple[str, bool | None], bool | None] = {}

    def ways(self, module: Module, row: str, view: WeightView) -> tuple[Sequence[WeightView], bool]:
        """Return (views of the weight to try, the likeliest first; whether the user's setting decided).

        Undecided if nothing decides which view is right.
        """
        if not _may_turn(view):
            return [view], False
        if ALGORITHMS[row].in_out:  # mlx-lm's
            return ([transposed(view), view] if _leaf(module) in TABLES else [view]), False
        if ALGORITHMS[row].as_stored or ALGORITHMS[row].of_table or not self._is_pefts(module):
            return [view], False  # PEFT has no flag for embeddings
        turned = self._is_turned(module, view)
        if turned is None:
            turned = conv1d_by_setting(_leaf(module), self._layers, flag=bool(self._given))
            return [transposed(view) if turned else view], True
        return [transposed(view) if turned else view], False

    def _is_pefts(self, module: Module) -> bool:
        return bool(self._rules.of(module.name).kind) or module.name.startswith(PEFT)

    def _is_turned(self, module: Module, view: WeightView) -> bool | None:
        """Return whether the weight is [in, out]; None where the user's setting decides."""
        rules, name = self._rules.of(module.name), _leaf(module)
        known = conv1d_by_base(
            name, self._base.types, recognised=self._base.recognised(view.row_slices[0].key), kind=rules.kind
        )
        if known is not None:
            return known
        upright = self._fits(module, view)
        turned = upright if is_square(view) else self._fits(module, transposed(view))
        if not (upright and turned):
            return turned and self._by_shape.get(module.name) is not False  # the layer's bias may show another one
        if (by_shape := self._by_shape.get(module.name)) is not None:
            return by_shape
        if self._given is not None:
            return None
        flag = rules.fan_in_fan_out if rules.kind and rules.method.says_flag else None
        if (name, flag) not in self._decided:  # layers of one name are alike, and there are thousands
            self._decided[name, flag] = conv1d_by_shapes(name, self._layers, self._base.types, flag=flag)
        if (decided := self._decided[name, flag]) is None:
            raise Undecided(CONTRADICTION)
        return decided

    @cached_property
    def _by_shape(self) -> Mapping[str, bool | None]:
        """Module → whether its weight is [in, out] by the shapes; None where they fit both ways."""
        places = {place.module.name: self._is_in_out(place) for place in self._base.places()}
        return {module.name: None for module in self._modules} | places

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return tuple(Layer(name.rpartition(".")[2], in_out) for name, in_out in self._by_shape.items())

    def _is_in_out(self, place: Place) -> bool | None:
        """Return the orientation by the length of the bias, which is the output's, else by the adapter's tensors."""
        shape, bias = place.view.shape, place.bias.shape if place.bias else ()
        if not _may_turn(place.view) or is_square(place.view):
            return None
        if len(bias) == 1 and bias[0] in shape:
            return bias[0] == shape[1]
        upright, turned = (self._fits(place.module, seen) for seen in (place.view, transposed(place.view)))
        return turned if upright != turned else None


def is_square(view: WeightView) -> bool:
    """Return whether a matrix has as many rows as columns."""
    return len(view.shape) == 2 and view.shape[0] == view.shape[1]


def _may_turn(view: WeightView) -> bool:
    return len(view.shape) == 2 and len(view.row_slices) == 1 and not view.row_slices[0].transposed


def _leaf(module: Module) -> str:
    return module.name.rpartition(".")[2]
