"""A model that was saved with an adapter attached: PEFT's layers around those of the model.

PEFT wraps a layer as `L.base_layer`, and a module that is trained whole as `L.original_module` and
`L.modules_to_save.NAME`; the adapter's own tensors are `L.lora_A.NAME.weight` and the like. Before 0.6 PEFT
left the layer's own weight at `L.weight`. Source: PEFT 0.21, tuners/tuners_utils.py, utils/other.py. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from ..dtypes import StoredTensor
from ..errors import InputError
from ..files.checkpoint import Index, adapter_config, of_components
from ..files.folder_layouts import PEFT_PREFIX
from ..text import Note, listed, plural, quoted
from .peft.rules import ADAPTER_METADATA

WRAPPED_LAYERS: Final = ("base_layer", "original_module")
MODULES_TO_SAVE: Final = "modules_to_save"
WRAPPER_LEVELS: Final = (*WRAPPED_LAYERS, "token_adapter")
"""Levels of a name that only the wrapped model has."""

FACTOR: Final = "lora_"
"""The beginning of the word for a factor of LoRA."""

WEIGHT_AND_BIAS: Final = ("weight", "bias")


def detached(index: Index, config: Mapping[str, Any]) -> tuple[Index, Index] | None:
    """Return the plain model and its adapter, with the names of PEFT's files; None for a model without one.

    `config`: the adapter_config.json of its training. InputError for several adapters, since a file does not say which
    of them are in use.
    """
    if index.components:
        return _of_components(index)
    stored = index.stored
    layers = {
        ".".join(words[:n]) for words in map(_words, stored) for n, word in enumerate(words) if word in WRAPPED_LAYERS
    }
    layers |= {".".join(words[:n]) for words in map(_words, stored) for n, word in enumerate(words)
               if word.startswith(FACTOR) and f"{'.'.join(words[:n])}.weight" in stored}  # fmt: skip
    if not layers:
        return None
    # The tensors of the one adapter.
    of_adapter = {name: words for name in stored if (words := _own_words(name, layers))}
    adapters = {words[1] for words in of_adapter.values() if len(words) > 1 and words[1] not in WEIGHT_AND_BIAS}
    if not of_adapter:
        return None
    if len(adapters) > 1:
        raise InputError("the model was saved with several adapters attached",
                         f"{index.path}: {listed(map(quoted, sorted(adapters)))}",
                         "delete all but one with delete_adapter of PEFT, and save it again")  # fmt: skip
    adapter = next(iter(adapters), "")
    # Plain names for the model, PEFT's names for the adapter.
    prefix = PEFT_PREFIX if all(name.startswith(PEFT_PREFIX) for name in stored) else ""
    plain = _plain((info for name, info in stored.items() if name not in of_adapter), prefix)
    changes: dict[str, StoredTensor] = {}
    for name, words in of_adapter.items():
        layer = name.removesuffix("." + ".".join(words)).removeprefix(PEFT_PREFIX)
        rest = [words[0], *(words[2:] if words[1:2] == [adapter] else words[1:])]
        key = f"{layer}.{'.'.join(rest)}"
        whole = f"{layer}.{'.'.join(rest[1:])}"
        if (
            words[0] == MODULES_TO_SAVE and whole not in plain
        ):  # without the untrained module the trained one is the model's
            plain[whole] = replace(stored[name], name=whole)
        else:
            changes[f"{PEFT_PREFIX}{key}"] = replace(stored[name], name=f"{PEFT_PREFIX}{key}", stored=name)
    files = tuple(path for path in index.files if any(info.file == path for info in changes.values()))
    note = Note(f"an adapter is attached inside the model: {plural(len(changes), 'tensor')} of it")
    headers = {path: index.headers[path] for path in files}
    configuration = {} if "peft_type" in index.config else index.config
    model = replace(index, tensors=plain, packed={}, config=configuration).recognised()
    return model, Index(index.path, changes, {}, files, config, headers, notes=(note,))


def _of_components(index: Index) -> tuple[Index, Index] | None:
    """Return the plain pipeline, and one adapter for its components with names as diffusers saves them."""
    detachments = {name: detached(part, adapter_config(part.path)) for name, part in index.components.items()}
    models = {name: both[0] for name, both in detachments.items() if both}
    adapters = {name: both[1] for name, both in detachments.items() if both}
    if not models:
        return None
    plain = of_components(index.path, index.config, {**index.components, **models})
    # One adapter, with the name of the component before each name.
    changes, stated = dict[str, StoredTensor](), dict[str, Any]()
    for name, adapter in adapters.items():
        for key, info in adapter.tensors.items():
            inner = f"{name}.{key.removeprefix(PEFT_PREFIX)}"
            changes[inner] = replace(info, name=inner)
        stated |= {f"{name}.{field}": value for field, value in adapter.config.items()}
    headers = {path: header for adapter in adapters.values() for path, header in adapter.headers.items()}
    notes = tuple(Note(f"{name}: {note}") for name, adapter in adapters.items() for note in adapter.notes)
    metadata = {ADAPTER_METADATA: json.dumps(stated)} if stated else {}
    return plain, Index(index.path, changes, metadata, (*headers,), {}, headers, notes=notes)


def _words(name: str) -> list[str]:
    return name.split(".")


def _own_words(name: str, layers: Iterable[str]) -> list[str]:
    """Return the words of an adapter's tensor below its layer; none for a tensor of the model."""
    words = _words(name)
    for n in range(len(words) - 1, 0, -1):
        if (
            ".".join(words[:n]) in layers
            and words[n] not in WRAPPER_LEVELS
            and words[n:] not in ([leaf] for leaf in WEIGHT_AND_BIAS)
        ):
            return words[n:]
    return []


def _plain(infos: Iterable[StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """Return the tensors of the model by their plain names."""
    tensors = {}
    for info in infos:
        name = ".".join(word for word in _words(info.name.removeprefix(prefix)) if word not in WRAPPER_LEVELS)
        tensors[name] = replace(info, name=name)
    return tensors
