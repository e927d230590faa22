"""The sources of a conversion without a base: the weights that the adapter shows, by names and shapes alone. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..adapters.modules import AdapterFile
from ..disk.files import StoredTensor
from ..errors import UsageError
from ..files.checkpoint import Index
from ..files.folder_layouts import PEFT_PREFIX
from ..matching.orientation import UPRIGHT
from ..models.inferred_base import (
    InferredParameter,
    OtherModel,
    UnknownBaseError,
    assumed,
    candidates,
    complete,
    has_words,
)
from ..models.names import Names
from ..models.network import Component
from ..planning.make_plan import Inputs
from .dialects import Dialect
from .groups import Place, places
from .job import GIVE_BASE, AdapterJob
from .output_names import shape_of
from .sources import NO_SHAPE, NOWHERE, Sources, check_complete, on_base


def without_base(job: AdapterJob, files: Sequence[AdapterFile], to: Dialect) -> Sources:
    """Return the sources of a job whose base is assumed; UsageError where its adapters do not show enough of it.

    Where several architectures fit, the names that the output gets must be the same in all of them. A folder of PEFT
    has the names of the model that was wrapped, which an adapter in PEFT's words has already; and all dialects have
    these names of models whose words do not differ between programs, such as language models.
    """
    wrapped = all(module.name.startswith(PEFT_PREFIX) for file in files for module in file.modules)
    if to.folder and wrapped:
        return as_named(job, files)
    changes, by_model, why = _changes(files), dict[str, tuple[Names, set[Place]]](), ""
    try:
        fitting = candidates(changes)
    except UnknownBaseError:
        fitting = ()
    if wrapped and to.any_model and not any(map(has_words, fitting)):
        return as_named(job, files)
    try:
        for architecture in candidates(changes):
            if to.table and to.table not in architecture.spellings:
                why = f"{to.name} has no names for {architecture.title}"
                continue
            try:
                parts = [complete(p, to.of(architecture).layout(p)) for p in assumed(changes, architecture)]
            except OtherModel as e:
                why = str(e)
                continue
            names = Names(parts, {key: shape for part in parts for key, shape in part.shapes.items()})
            by_model[architecture.title] = names, {*places(names, to.of(architecture))}
        if not by_model:
            raise UnknownBaseError(why)
        if any(changed != next(iter(by_model.values()))[1] for _, changed in by_model.values()):
            raise UnknownBaseError(f"it may be for {' or '.join(by_model)}")
    except UnknownBaseError as e:
        raise UsageError(f"the base is needed to name the output: {e}", str(files[0].path), GIVE_BASE) from e
    return _on_shapes(job, next(iter(by_model.values()))[0], files)


def as_named(job: AdapterJob, files: Sequence[AdapterFile]) -> Sources:
    """Return the sources of a job on a base whose weights have the adapters' names, and are [out, in] as theirs are."""
    shapes = {f"{c.module.removeprefix(PEFT_PREFIX)}.{c.parameter}": c.shape for c in _changes(files)}
    part = Component("denoiser", "model", "", keys={name: name for name in shapes}, shapes=shapes)
    return _on_shapes(job, Names([part], shapes), files, UPRIGHT)


def _on_shapes(
    job: AdapterJob, names: Names, files: Sequence[AdapterFile], model: Mapping[str, Any] = MappingProxyType({})
) -> Sources:
    tensors = {key: StoredTensor(key, "F32", shape, NOWHERE, 0, 0) for key, shape in names.shapes.items()}
    return on_base(Inputs(job.inputs, Index(NOWHERE, tensors, {}, (), model), names, (*files,)), stored=False)


def _changes(files: Sequence[AdapterFile]) -> list[InferredParameter]:
    changes = dict[InferredParameter, None]()
    for file in files:
        check_complete(file)
        if file.strange:
            raise UsageError("the adapter replaces whole tensors of the base", f"{file.path}: {file.strange[0].name}",
                             GIVE_BASE)  # fmt: skip
        for module in file.modules:
            shape = shape_of(module)
            if shape is None:
                raise UsageError(NO_SHAPE, f"{file.path}: {module.where}", GIVE_BASE)
            changes[InferredParameter(module.name, module.parameter, shape)] = None
    return [*changes]
