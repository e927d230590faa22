"""Finds the tensors of a live model or pipeline, under the names that its saved files would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Buffer, Module, Parameter

from ..errors import InputError, UsageError
from ..files.checkpoint import Index
from ..files.formats.unread import OF_OTHERS
from .state_index import codes, index_of

TENSOR_CLASSES: Final = (Tensor, Parameter, Buffer)
"""Classes of tensors whose bytes are the numbers; libraries of quantisation and sharding have classes of their own."""

FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

PLAIN_MODEL: Final = "give the unquantised model, or merge into its files with `merge`"


class LivePipeline(Protocol):
    """A diffusers pipeline, or another object with named parts, some of which are torch modules."""

    @property
    def components(self) -> Mapping[str, object]:
        """Name → part, such as "unet", "text_encoder", "scheduler"."""


Original: TypeAlias = Callable[[str], Tensor]
"""Function that returns the tensor of a name with the numbers that it had before the merge."""


def live_model(model: object, tensors: dict[str, Tensor], original: Original) -> Index:
    """Return a torch module, or the modules of a diffusers pipeline, as a checkpoint; adds its tensors to `tensors`.

    A tensor that several layers share has the name of the first one, as in files. Raises UsageError for other objects,
    and InputError for tensors that cannot be changed in place.
    """
    label = type(model).__name__
    if isinstance(model, Module):
        tensors.update(_tensors(model, label))
        return replace(index_of(label, tensors, original), config=_config(model))
    modules = _modules(model)
    if not modules:
        fix = "give a torch.nn.Module, a diffusers pipeline, or a model of transformers"
        fix = "for a state dict use merge_state_dict()" if isinstance(model, Mapping) else fix
        fix = "for a file use merge()" if isinstance(model, str | Path) else fix
        raise UsageError(f"{label} has no weights that can be changed", "merge_into", fix)
    components = {}
    for part, module in modules.items():
        part_tensors = _tensors(module, f"{label}: {part}")
        tensors.update({f"{part}.{name}": tensor for name, tensor in part_tensors.items()})
        components[part] = replace(index_of(label, part_tensors), config=_config(module))
    return replace(index_of(label, tensors, original), config={"_class_name": label}, components=components)


def live_tensors(model: object, *, aliases: bool = False) -> dict[str, Tensor]:
    """Return the tensors that a model or pipeline has now, under the names that `live_model` gives them.

    `aliases`: also under all other names that they have.
    """
    if isinstance(model, Module):
        return _all(model, aliases=aliases)
    return {f"{part}.{name}": tensor for part, module in _modules(model).items()
            for name, tensor in _all(module, aliases=aliases).items()}  # fmt: skip


def _modules(pipeline: object) -> dict[str, Module]:
    parts = getattr(pipeline, "components", None)
    return {k: v for k, v in parts.items() if isinstance(v, Module)} if isinstance(parts, Mapping) else {}


def _all(module: Module, *, aliases: bool = False) -> dict[str, Tensor]:
    tensors = module.named_parameters, module.named_buffers
    return {name: tensor for named in tensors for name, tensor in named(remove_duplicate=not aliases)}


def _tensors(module: Module, where: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name; InputError for classes that are not plain numbers."""
    tensors = _all(module)
    for name, tensor in tensors.items():
        if not _is_plain(tensor) or codes(tensor):
            raise InputError(f"a {type(tensor).__name__} cannot be changed in place", f"{where}: {name}", PLAIN_MODEL)
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors.values()):
        _expect_no_scales(module, where)
    return tensors


def _expect_no_scales(module: Module, where: str) -> None:
    """Raise InputError if a layer multiplies its fp8 codes by a scale that is an attribute, no parameter or buffer:
    those are recognised by their names, as in files."""
    for path, layer in module.named_modules():
        if any(p.dtype in FP8_DTYPES for p in layer.parameters(recurse=False)):
            for name, value in vars(layer).items():
                scale = value is not None and isinstance(value, Tensor | float) and "scale" in name
                if scale and not OF_OTHERS.search(name) and not _is_one(value):
                    raise InputError("a weight in fp8 has a scale of its own", f"{where}: {path}.{name}", PLAIN_MODEL)


def _is_one(scale: Tensor | float) -> bool:
    return bool((scale == 1).all()) if isinstance(scale, Tensor) else scale == 1


def _is_plain(tensor: Tensor) -> bool:
    try:
        return type(tensor) in TENSOR_CLASSES or type(tensor.data) in TENSOR_CLASSES
    except RuntimeError:  # of a class that refuses what it does not know
        return False


def _config(module: Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers or diffusers, as its config.json has it."""
    config = getattr(module, "config", None)
    if config is None:
        return {"architectures": [type(module).__name__]}
    value = config.to_dict() if hasattr(config, "to_dict") else config
    entries = dict(value) if isinstance(value, Mapping) else {}
    return {**entries, "architectures": entries.get("architectures") or [type(module).__name__]}
