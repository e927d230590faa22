"""LoRA of a parameter that PEFT's `target_parameters` names: which parameter a module changes, and whether stacked
experts are [in, out] or [out, in]. No torch.

PEFT wraps the module that owns the parameter once for every parameter; the parameter registered last is outermost.
The patterns of ranks and alphas match the parameter's whole name. Source: PEFT 0.21.2, tuners/tuners_utils.py
(`_inject_parameters`) and tuners/lora/layer.py (`ParamWrapper`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ...algorithms import DoesNotFit
from ...algorithms.lora_experts import LORA_EXPERTS, LORA_EXPERTS_TRANSPOSED
from ...files.folder_layouts import PEFT_PREFIX
from ...models.prefixes import TRAINING_WRAPPERS
from .config import PeftConfig

TARGET_PARAMETERS: Final = "target_parameters"
_LEVELS: Final = re.compile(rf"(?:^|(?<=\.)){TRAINING_WRAPPERS}\.")
OUTSIDE: Final = re.compile(r"(?:module\.|model\.)*")
"""Prefix that a training loop may add to the names of the model that PEFT wrapped."""
WRAPPER: Final = ".base_layer"
REGISTERED: Final = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Expert parameters in the order in which transformers' modules register them."""

IN_OUT_EXPERTS: Final = ("gptoss", "aria", "openaiprivacyfilter")
"""Starts of the model types of transformers whose experts are stored [in, out] (`is_transposed`)."""

UPRIGHT_SINCE: Final = (0, 19, 1)
"""First release of PEFT whose factors for [E, out, in] are of [out, in]; older factors are of the transpose."""

SQUARE: Final = (
    "the experts are square, and {unknown} does not show whether their factors are of [in, out] or of [out, in]"
)


TOWER: Final = re.compile(r"\w*(Text|Vision)Model(?:WithProjection)?")
"""Classes of transformers for one of two towers, such as CLIP's text model."""

MOST_WITHOUT_MODULE: Final = 1000
"""Most entries of `target_parameters` without a module; models have a dozen."""

MLX_EMBEDDINGS: Final = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
)
"""Names of input embeddings, which mlx-lm treats as layers whose input is the vocabulary (LoRAEmbedding)."""


def bare(module: str) -> str:
    """Return the module's path in the model that PEFT wrapped, as the patterns of a configuration spell it."""
    path = _LEVELS.sub("", module) if "_mod" in module else module  # every wrapper's name contains "_mod"
    before, mark, rest = path.partition(PEFT_PREFIX)
    return rest if mark and OUTSIDE.fullmatch(before) else path  # other prefixes may name another model in the file


def paths(fields: PeftConfig, module: str) -> tuple[str, ...]:
    """Return the paths that a module may have, best first. A tower trained alone lacks the first level of a model with
    two towers."""
    tower = TOWER.fullmatch(_trained_class(fields))
    return (f"{tower[1].lower()}_model.{bare(module)}", module) if tower else (module,)


def shared_kind(path: str) -> str:
    """Return FRoD's name of the layers that share a basis, from the end of the path; tuners/frod/model.py."""
    *above, last = path.split(".")
    if not above or above[-1].isdigit():
        return last
    if (above[-1], last) == ("output", "dense") and above[-2:-1] == ["attention"]:
        return "attention_output"
    return f"{above[-1]}_{last}"


def saved_inside(fields: PeftConfig, name: str) -> bool:
    """Return whether `modules_to_save` names the tensor's module and also a module around it."""
    if not fields.get("modules_to_save"):
        return False
    levels = bare(name).split(".")[:-1]
    return sum(fields.is_end("modules_to_save", ".".join(levels[:i])) for i in range(1, len(levels) + 1)) > 1


def parameters(fields: PeftConfig, module: str) -> tuple[str, ...]:
    """Return the whole names of the parameters that a module may change; none if the module is a layer."""
    if not fields.get(TARGET_PARAMETERS):
        return ()
    # The parameters whose module's name is an end of this path, in the order of the configuration.
    named, loose = fields.index((TARGET_PARAMETERS,), lambda: _by_owner(fields))
    path = bare(module)
    owner = path.replace(WRAPPER, "")
    starts = (0, *(at + 1 for at, char in enumerate(owner) if char == "."))
    leaves = [leaf for _, leaf in sorted(entry for start in starts for entry in named.get(owner[start:], ()))]
    if "weight" not in leaves and loose and not is_layer(fields, owner):
        leaves += loose
    # Of several parameters of one module, the one that this level of wrappers is for.
    leaves, depth = list(dict.fromkeys(leaves)), path.count(WRAPPER)
    if all(leaf in REGISTERED for leaf in leaves) and depth < len(leaves):
        leaves = [sorted(leaves, key=REGISTERED.index)[-1 - depth]]
    return tuple(f"{owner}.{leaf}" for leaf in leaves)


def _by_owner(fields: PeftConfig) -> tuple[Mapping[str, list[tuple[int, str]]], list[str]]:
    """Return end of a module's path → (position, parameter), and the parameters of any module."""
    named: dict[str, list[tuple[int, str]]] = {}
    loose: dict[str, None] = {}
    for position, (module, _, leaf) in enumerate(name.rpartition(".") for name in fields.texts(TARGET_PARAMETERS)):
        if module:
            named.setdefault(module, []).append((position, leaf))
        else:
            loose[leaf] = None
    if len(loose) > MOST_WITHOUT_MODULE:
        raise fields.wrong_type(TARGET_PARAMETERS, f"at most {MOST_WITHOUT_MODULE} parameters without a module")
    return named, list(loose)


def is_layer(fields: PeftConfig, path: str) -> bool:
    """Return whether `target_modules` selects this module, so that its tensors are the LoRA of a layer."""
    if fields.get("target_modules") == "all-linear":
        return not path.endswith("experts")
    return _named(fields, "target_modules", path) and not _named(fields, "exclude_modules", path)


def _named(fields: PeftConfig, name: str, path: str) -> bool:
    """Return whether a field selects a path: a regular expression for all of it, or a list of ends."""
    value = fields.get(name)
    if isinstance(value, str):
        return fields.matches(value, path, name)
    return fields.is_end(name, f".{path}", ".")


def experts_row(fields: PeftConfig, sides: tuple[int, ...], model: str, *, separate: bool) -> str:
    """Return the row of ALGORITHMS for stacked experts, whose sides show the orientation unless they are equal.

    `model`: the base's type. `separate`: the base stores each expert alone, as no [in, out] model does. DoesNotFit if
    the orientation stays unknown.
    """
    if len(set(sides)) > 1:
        return LORA_EXPERTS.name
    release, version = fields.text("peft_version", ""), fields.version()
    version = version if len(version) == 3 else ()
    in_out = False if separate else _in_out(fields, model)
    if in_out and version != (0, 19, 0):  # this release used the other orientation
        return LORA_EXPERTS_TRANSPOSED.name
    if in_out is False and version >= UPRIGHT_SINCE:
        return LORA_EXPERTS.name
    unknown = "the base's type" if in_out is None else f"peft_version {release!r} in adapter_config.json"
    raise DoesNotFit(SQUARE.format(unknown=unknown))


def _in_out(fields: PeftConfig, model: str) -> bool | None:
    """Return whether the model's experts are [in, out]; None for an unknown model."""
    for known in (model, _trained_class(fields)):
        if known:
            return _plain(known).startswith(IN_OUT_EXPERTS)
    return True if IN_OUT_EXPERTS[0] in _plain(str(fields.get("base_model_name_or_path"))) else None


def _trained_class(fields: PeftConfig) -> str:
    """Return the class of the model that PEFT wrapped; "" if the configuration has a task type instead."""
    mapping = fields.get("auto_mapping")
    return str(mapping.get("base_model_class") or "") if isinstance(mapping, dict) else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
