"""Layers that store their weight [in, out]: transformers' Conv1D, of GPT-2 and its kin. No torch.

PEFT trains factors of [out, in] on them and turns the change. What it writes of that is one `fan_in_fan_out` in the
configuration, which is that of the layer it wrapped last, and of HiRA always false; on loading it goes by each layer's
class (0.21.2, `_create_new_module` of each tuner). A checkpoint has no classes, so they are told here: by the type of
the model, by the architecture's table, by names that Conv1D has, and by the adapter's layers that are not square, whose
shapes tell. For a square weight whose signs contradict each other there is no answer but the user's.
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

CONTRADICTION: Final = "the weight is square, and nothing settles whether it is [in, out], a Conv1D's, or [out, in]"

NAMES: Final = frozenset({"c_attn", "q_attn", "c_proj", "c_fc", "conv1d"})
"""Last parts of the names of Conv1D layers: those of transformers' models, and the word itself, for what else is called
`conv1d` has a kernel of three axes."""

MODELS: Final = frozenset({"gpt2", "imagegpt", "decision_transformer", "openai-gpt", "clvp", "clvp_decoder"})
"""Model types whose layers of these names are Conv1D: transformers 5, modeling_*.py."""

UPRIGHT: Final = frozenset(
    {"gpt_bigcode", "gpt_neo", "gptj", "codegen", "qwen", "starcoder2", "nanochat", "bridgetower"}
)
"""Model types that have layers of these names, or were made after GPT-2, and are nn.Linear throughout; of Qwen 1
the code comes with the checkpoint."""


@dataclass(frozen=True)
class Layer:
    """One layer that an adapter changes."""

    name: str  # the last part of its module's path
    turned: bool | None  # whether its shapes say that it is [in, out]; None where they fit both ways


@cache
def known_types() -> frozenset[str]:
    """Return every model type of transformers 5.23 (CONFIG_MAPPING_NAMES), and those above that come with own code."""
    text = Path(__file__).with_name("model_types.json").read_text(encoding="ascii")
    return frozenset(json.loads(text)) | MODELS | UPRIGHT


def base_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the model types in a config.json, those of the model's parts too; "" stands for code that nothing is
    known of.
    """
    found = {str(config["model_type"])} if config.get("model_type") else set()
    if found - known_types() or ("auto_map" in config and not found & UPRIGHT):
        found.add("")
    for part in config.values():
        found |= base_types(part) if isinstance(part, Mapping) and "model_type" in part else set()
    return frozenset(found)


def stored(name: str, types: Collection[str], *, recognised: bool, kind: str) -> bool | None:
    """Return whether a layer of this name is a Conv1D, as far as base and method tell; None where they do not.

    `types`: of the base's config.json. `recognised`: whether a table knows the model, and so knows its Conv1D layers.
    `kind`: PEFT's name of the method, "" for a file without configuration.
    """
    types = frozenset(types)
    if (kind and not METHODS[kind].conv1d) or (recognised and name not in NAMES):
        return False
    if types & UPRIGHT and types & MODELS and name in NAMES:
        return None
    if types & UPRIGHT and not types & MODELS:
        return False
    if types & MODELS and "" not in types:
        return name in NAMES
    return None


def decide(name: str, layers: Sequence[Layer], types: Collection[str], *, flag: bool | None) -> bool | None:
    """Return whether a layer whose shapes fit both ways is a Conv1D, in a model that nothing is known of.

    None where signs contradict each other. `flag`: the configuration's, None where that says nothing. `types`: a
    model of a type of transformers that is none of ours is of nn.Linear, unless shapes say otherwise.
    """
    lie = [layer for layer in layers if layer.turned is not None]
    same = {layer.turned for layer in lie if layer.name == name}
    alike = {layer.turned for layer in lie if (layer.name in NAMES) == (name in NAMES)}
    told = same if len(same) == 1 else alike
    others = any(layer.turned for layer in lie)
    if types and "" not in types and not others:
        return False
    if told == {True}:
        return None if flag is False and same != told else True
    if flag and name not in NAMES:  # true for another layer, if there is one that it can be true for
        return False if any(layer.name in NAMES for layer in layers) or (told == {False} and others) else None
    if flag:
        return None if told else True
    return False if told == {False} or not (told or name in NAMES) else None


def stated(name: str, layers: Sequence[Layer], *, flag: bool) -> bool:
    """Return the same where the flag is beyond doubt: true speaks of layers called like a Conv1D, if there are any."""
    return flag and (name in NAMES or all(layer.name not in NAMES for layer in layers))
