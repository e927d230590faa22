"""Orientation, [out, in] or [in, out], of the weights that one adapter changes in one base. No torch.

Conv1D layers of transformers, in GPT-2 and models that descend from it, store their weight [in, out]. PEFT trains
factors of [out, in] on such layers and transposes the change. The configuration holds one `fan_in_fan_out`: the flag of
the layer that PEFT wrapped last, and always false for HiRA. On loading, PEFT looks at each layer's class (0.21.2,
`_create_new_module` of each tuner). A checkpoint has no classes, so this module decides by the type of the model, the
architecture's table, the names that Conv1D layers have, and the shapes of the adapter's layers that are not square.
If these signs contradict each other about a square weight, only the user can decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from ..adapters.modules import Module
from ..adapters.peft.methods import PEFT_METHODS
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import MLX_EMBEDDINGS
from ..algorithms import ALGORITHMS
from ..files.folder_layouts import PEFT_PREFIX
from ..job import SETTING
from ..models.weights import WeightView, transposed

STATE_ORIENTATION: Final = (
    f"state whether weights are [in, out] with `--setting {SETTING}=true` or `--setting {SETTING}=false`; the wrong "
    "one transposes the change"
)

CONTRADICTION: Final = "the weight is square, and nothing settles whether it is stored [in, out] (Conv1D) or [out, in]"

CONV1D_NAMES: Final = frozenset({"c_attn", "q_attn", "c_proj", "c_fc", "conv1d"})
"""Last parts of the names of Conv1D layers in transformers' models, and `conv1d`: other layers of this name have
a kernel of three axes."""

CONV1D_TYPES: Final = frozenset({"gpt2", "imagegpt", "decision_transformer", "openai-gpt", "clvp", "clvp_decoder"})
"""Model types whose layers named in `CONV1D_NAMES` are Conv1D: transformers 5, modeling_*.py."""

LINEAR_TYPES: Final = frozenset(
    {"gpt_bigcode", "gpt_neo", "gptj", "codegen", "qwen", "starcoder2", "nanochat", "bridgetower"}
)
"""Model types that have layers of these names, or descend from GPT-2, but use nn.Linear throughout. The code of `qwen`
(Qwen 1) comes with the checkpoint."""


UPRIGHT: Final = {"model_type": "gpt_neo"}
"""The config.json of a model whose weights are all [out, in]."""


@dataclass(frozen=True)
class LayerOrientation:
    """One layer that an adapter changes."""

    name: str  # the last part of its module's path
    in_out: bool | None  # what its shapes say: stored [in, out] or not; None if the weight is square


@cache
def known_types() -> frozenset[str]:
    """Return every model type of transformers 5.24 (CONFIG_MAPPING_NAMES), and the types listed above."""
    text = Path(__file__).with_name("model_types.json").read_text(encoding="ascii")
    return frozenset(json.loads(text)) | CONV1D_TYPES | LINEAR_TYPES


def base_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the model types in a config.json, including the types of the model's parts; "" means unknown code."""
    types = {str(config["model_type"])} if config.get("model_type") else set()
    if types - known_types() or ("auto_map" in config and not types & LINEAR_TYPES):
        types.add("")
    for part in config.values():
        types |= base_types(part) if isinstance(part, Mapping) and "model_type" in part else set()
    return frozenset(types)


def conv1d_by_base(name: str, types: Collection[str], *, recognised: bool, kind: str) -> bool | None:
    """Return whether a layer of this name is a Conv1D by base and method alone; None if they do not decide.

    `types`: model types in the base's config.json. `recognised`: whether an architecture's table knows the model.
    `kind`: the peft_type, "" for a file without configuration.
    """
    types = frozenset(types)
    if (kind and not PEFT_METHODS[kind].conv1d) or (recognised and name not in CONV1D_NAMES):
        return False
    if types & LINEAR_TYPES and types & CONV1D_TYPES and name in CONV1D_NAMES:
        return None
    if types & LINEAR_TYPES and not types & CONV1D_TYPES:
        return False
    if types & CONV1D_TYPES and "" not in types:
        return name in CONV1D_NAMES
    return None


def conv1d_by_shapes(
    name: str, layers: Sequence[LayerOrientation], types: Collection[str], *, flag: bool | None
) -> bool | None:
    """Return whether a layer whose shapes fit both ways is a Conv1D, in a model that no table knows.

    None if signs contradict each other. `flag`: `fan_in_fan_out`, None if the configuration does not hold the
    field. `types`: other model types of transformers than those above use nn.Linear, unless shapes say otherwise.
    """
    known = [layer for layer in layers if layer.in_out is not None]
    same_name = {layer.in_out for layer in known if layer.name == name}
    same_kind = {layer.in_out for layer in known if (layer.name in CONV1D_NAMES) == (name in CONV1D_NAMES)}
    signs = same_name if len(same_name) == 1 else same_kind
    any_in_out = any(layer.in_out for layer in known)
    if types and "" not in types and not any_in_out:
        return False
    if signs == {True}:
        return None if flag is False and same_name != signs else True
    if flag and name not in CONV1D_NAMES:  # the flag may describe another layer, if one is or may be a Conv1D
        another = any(layer.name in CONV1D_NAMES for layer in layers) or (signs == {False} and any_in_out)
        return False if another else None
    if flag:
        return None if signs else True
    return False if signs == {False} or not (signs or name in CONV1D_NAMES) else None


def conv1d_by_setting(name: str, layers: Sequence[LayerOrientation], *, flag: bool) -> bool:
    """Return whether a layer is a Conv1D by a flag that the user states: true is for layers named like one, if any."""
    return flag and (name in CONV1D_NAMES or all(layer.name not in CONV1D_NAMES for layer in layers))


class Undecided(ValueError):
    """Signs that contradict each other, so that only the user knows a weight's orientation."""


@dataclass(frozen=True)
class ModuleMatch:
    """A module with its weight in the base, and the bias of its layer if its length shows the orientation."""

    module: Module
    view: WeightView
    bias: WeightView | None


@dataclass(frozen=True)
class BaseLayers:
    """The facts about a base that decide the orientation of its layers."""

    types: Collection[str]  # model types in its config.json
    recognised: Callable[[str], bool]  # whether a table knows the model of a tensor
    matches: Callable[[], Iterable[ModuleMatch]]  # of the adapter's modules


NO_FACTS: Final = BaseLayers((), lambda _: False, tuple)
"""The empty facts, where only the adapter is known."""

ALL_UPRIGHT: Final = BaseLayers(base_types(UPRIGHT), lambda _: False, tuple)
"""Weights that an adapter alone shows: [out, in] as its own tensors, however the model stores them."""


class Orientation:
    """Orientation of one adapter's layers on one base.

    `fits`: whether a module's tensors fit a view of its weight. `setting`: the orientation that the user states.
    """

    def __init__(
        self,
        rules: PeftRules,
        modules: Iterable[Module],
        fits: Callable[[Module, WeightView], bool],
        base: BaseLayers,
        setting: bool | None,  # noqa: FBT001
    ) -> None:
        self._rules, self._modules, self._fits, self._base, self._setting = rules, modules, fits, base, setting
        self._decided: dict[tuple[str, bool | None], bool | None] = {}

    def ways(self, module: Module, row: str, view: WeightView) -> tuple[Sequence[WeightView], bool]:
        """Return (views of the weight to try, the likeliest first; whether the user's setting decided).

        Undecided if nothing decides which view is right.
        """
        if not _may_turn(view):
            return [view], False
        layout = ALGORITHMS[row].layout
        if layout == "in_out" and _leaf(module) in MLX_EMBEDDINGS:  # mlx-lm's layers of embeddings
            return [transposed(view), view], False
        if layout in ("in_out", "stored", "table") or not self._is_pefts(module):
            return [view], False  # PEFT has no flag for embeddings
        turned = self._is_turned(module, view)
        if turned is None:
            turned = conv1d_by_setting(_leaf(module), self._layers, flag=bool(self._setting))
            return [transposed(view) if turned else view], True
        return [transposed(view) if turned else view], False

    def _is_pefts(self, module: Module) -> bool:
        return bool(self._rules.of(module.name).kind) or module.name.startswith(PEFT_PREFIX)

    def _is_turned(self, module: Module, view: WeightView) -> bool | None:
        """Return whether the weight is [in, out]; None if the user's setting decides."""
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
        if self._setting is not None:
            return None
        flag = rules.fan_in_fan_out if rules.kind and rules.method.says_flag else None
        if (name, flag) not in self._decided:  # layers of one name are alike, and there are thousands
            self._decided[name, flag] = conv1d_by_shapes(name, self._layers, self._base.types, flag=flag)
        if (decided := self._decided[name, flag]) is None:
            raise Undecided(CONTRADICTION)
        return decided

    @cached_property
    def _by_shape(self) -> Mapping[str, bool | None]:
        """Module → whether its weight is [in, out] by the shapes; None if they fit both ways."""
        decided = {match.module.name: self._is_in_out(match) for match in self._base.matches()}
        return {module.name: None for module in self._modules} | decided

    @cached_property
    def _layers(self) -> tuple[LayerOrientation, ...]:
        return tuple(LayerOrientation(name.rpartition(".")[2], in_out) for name, in_out in self._by_shape.items())

    def _is_in_out(self, match: ModuleMatch) -> bool | None:
        """Return the orientation by the length of the bias, which is the output's, else by the adapter's tensors."""
        shape, bias = match.view.shape, match.bias.shape if match.bias else ()
        if not _may_turn(match.view) or is_square(match.view):
            return None
        if len(bias) == 1 and bias[0] in shape:
            return bias[0] == shape[1]
        upright, turned = (self._fits(match.module, view) for view in (match.view, transposed(match.view)))
        return turned if upright != turned else None


def is_square(view: WeightView) -> bool:
    """Return whether a matrix has as many rows as columns."""
    return len(view.shape) == 2 and view.shape[0] == view.shape[1]


def _may_turn(view: WeightView) -> bool:
    return len(view.shape) == 2 and len(view.row_slices) == 1 and not view.row_slices[0].transposed


def _leaf(module: Module) -> str:
    return module.name.rpartition(".")[2]
