"""Layers that store their weight [in, out]: transformers' Conv1D, of GPT-2 and its kin. No torch.

PEFT trains factors of [out, in] on such layers and transposes the change. The configuration holds one `fan_in_fan_out`:
the flag of the layer that PEFT wrapped last, and always false for HiRA. On loading, PEFT looks at each layer's class
(0.21.2, `_create_new_module` of each tuner). A checkpoint has no classes, so this module decides by the type of the
model, the architecture's table, the names that Conv1D layers have, and the shapes of the adapter's layers that are not
square. Where these signs contradict each other about a square weight, only the user can decide.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..job import SETTING
from .peft.methods import METHODS

STATE: Final = (
    f"state whether weights are [in, out] with --setting {SETTING}=true or false; the wrong one transposes the change"
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
class Layer:
    """One layer that an adapter changes."""

    name: str  # the last part of its module's path
    in_out: bool | None  # what its shapes say: stored [in, out] or not; None where the weight is square


@cache
def known_types() -> frozenset[str]:
    """Return every model type of transformers 5.24 (CONFIG_MAPPING_NAMES), and the types listed above."""
    text = Path(__file__).with_name("model_types.json").read_text(encoding="ascii")
    return frozenset(json.loads(text)) | CONV1D_TYPES | LINEAR_TYPES


def base_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the model types in a config.json, including the types of the model's parts; "" stands for unknown code."""
    found = {str(config["model_type"])} if config.get("model_type") else set()
    if found - known_types() or ("auto_map" in config and not found & LINEAR_TYPES):
        found.add("")
    for part in config.values():
        found |= base_types(part) if isinstance(part, Mapping) and "model_type" in part else set()
    return frozenset(found)


def conv1d_by_base(name: str, types: Collection[str], *, recognised: bool, kind: str) -> bool | None:
    """Return whether a layer of this name is a Conv1D by base and method alone; None where they do not decide.

    `types`: model types in the base's config.json. `recognised`: whether an architecture's table knows the model.
    `kind`: the peft_type, "" for a file without configuration.
    """
    types = frozenset(types)
    if (kind and not METHODS[kind].conv1d) or (recognised and name not in CONV1D_NAMES):
        return False
    if types & LINEAR_TYPES and types & CONV1D_TYPES and name in CONV1D_NAMES:
        return None
    if types & LINEAR_TYPES and not types & CONV1D_TYPES:
        return False
    if types & CONV1D_TYPES and "" not in types:
        return name in CONV1D_NAMES
    return None


def conv1d_by_shapes(name: str, layers: Sequence[Layer], types: Collection[str], *, flag: bool | None) -> bool | None:
    """Return whether a layer whose shapes fit both ways is a Conv1D, in a model that no table knows.

    None where signs contradict each other. `flag`: `fan_in_fan_out`, None where the configuration does not hold the
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


def conv1d_by_setting(name: str, layers: Sequence[Layer], *, flag: bool) -> bool:
    """Return whether a layer is a Conv1D by a flag that the user states: true is for layers named like one, if any."""
    return flag and (name in CONV1D_NAMES or all(layer.name not in CONV1D_NAMES for layer in layers))
