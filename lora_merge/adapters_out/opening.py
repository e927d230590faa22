"""Opens the adapters of a job: on their base; without one joined by names without prefixes, or on a base that is
inferred from the names and shapes that they show. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.tensor_values import FileValues
from ..adapters.training_metadata import made_for
from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import Shape, StoredTensor
from ..errors import FitError, InputError, ShapeMismatch, UsageError
from ..files.checkpoint import Index
from ..files.folder_layouts import PEFT_PREFIX
from ..job import Adapter
from ..matching.fit_errors import check_scales
from ..matching.formula import AdapterContext, check_settings, choose
from ..matching.missing_tensors import gaps, incomplete
from ..matching.orientation import ALL_UPRIGHT, UPRIGHT
from ..matching.patch import PatchPart
from ..models.inferred_base import (
    InferredParameter,
    OtherModel,
    UnknownBaseError,
    candidates,
    complete,
    has_words,
    inferred_base,
)
from ..models.names import Names
from ..models.network import Component
from ..models.prefixes import prefixed
from ..models.weights import Weight, whole
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.inputs import Inputs, open_inputs
from ..text import Note, several
from .dialects import Dialect
from .groups import Place, Target, places, whole_place
from .input_adapters import NOWHERE, InputAdapters, chosen_of, on_base, without_values
from .job import GIVE_BASE, AdapterJob
from .output_names import styles_of

NO_SHAPE: Final = "the shape of a weight is not in the adapter's file"


def open_adapters(job: AdapterJob, opened: CheckpointCache | None = None) -> InputAdapters:
    """Return the weights that the job's adapters change, from headers; errors as for `merge`. `opened`: checkpoints
    that are open already."""
    opened = opened or CheckpointCache()
    inputs = _joined(job, opened) if job.base is None else on_base(open_inputs(job.inputs, opened, merged=False))
    return chosen_of(job, inputs)


NETWORK_ALIASES: Final = {"transformer": "denoiser", "prior": "denoiser", "te": "te1"}


def body_of(name: str) -> str:
    """Return a name that all dialects with the same words share: its network, and its path with underscores."""
    network, body = prefixed(name)[-1]
    return f"{NETWORK_ALIASES.get(network, network)}/{body.replace('.', '_')}"


Joined: TypeAlias = Mapping[tuple[str, str], Sequence[tuple[int, Module]]]
"""Name without its prefix, and parameter → the modules that change it, each with the number of its adapter."""


def joined(files: Sequence[AdapterFile]) -> Joined:
    """Return the modules of adapters, joined by their names alone; UsageError where these do not say which modules are
    the same, FitError for different models."""
    modules: dict[tuple[str, str], list[tuple[int, Module]]] = {}
    for number, file in enumerate(files):
        for module in file.modules:
            modules.setdefault((body_of(module.name), module.parameter), []).append((number, module))
    _check(modules, files)
    return modules


def _check(joined: Joined, files: Sequence[AdapterFile]) -> None:
    for members in joined.values():
        twice = [n for n, _ in members]
        if len(twice) != len(set(twice)):
            raise InputError("two modules of one adapter have one name without prefixes",
                             f"{files[twice[0]].path}: {members[0][1].name}", GIVE_BASE)  # fmt: skip
    known = [(f, frozenset(model.title for model in made_for(f.index, _shapes(f))[0])) for f in files]
    (first, its), *others = [(f, titles) for f, titles in known if titles] or [(files[0], frozenset())]
    if other := next(((f, titles) for f, titles in others if not titles & its), None):
        raise FitError(
            f"two adapters are for different models: {first.path.name} is for {' or '.join(sorted(its))}, "
            f"{other[0].path.name} for {' or '.join(sorted(other[1]))}",
            f"{first.path} and {other[0].path}", "combine adapters of one model",
        )  # fmt: skip
    if any({n for n, _ in members} != {*range(len(files))} for members in joined.values()):
        expect_one_layout([(f.path.name, _shown_changes(f)) for f in files])
    styles = [frozenset(_styles(f)) for f in files]
    for number in range(1, len(files)):
        if styles[number] & styles[0]:
            continue
        if not any({0, number} <= {n for n, _ in members} for members in joined.values()):
            raise UsageError("two adapters in different dialects share no module by name",
                             f"{files[0].path.name} and {files[number].path.name}", GIVE_BASE)  # fmt: skip
    for members in joined.values():
        number, module = members[0]
        if number and not styles_of(module.name) & styles[0]:
            raise UsageError("a module that the first adapter lacks has a name in another dialect",
                             f"{files[number].path}: {module.name}", GIVE_BASE)  # fmt: skip


def expect_one_layout(adapters: Sequence[tuple[str, Sequence[InferredParameter]]]) -> None:
    """Raise UsageError where adapters have names of one model in the words of two layouts, such as its authors' and
    diffusers': a weight would have two names. `adapters`: the name of each, and its changes."""
    if _is_one_layout([change for _, changes in adapters for change in changes]):
        return
    (first, its), *others = adapters
    if not _is_one_layout(its):
        return
    for name, changes in others:
        if _is_one_layout(changes) and not _is_one_layout([*its, *changes]):
            raise UsageError("two adapters name the weights of the model in different words", f"{first} and {name}",
                             GIVE_BASE)  # fmt: skip


def _is_one_layout(changes: Sequence[InferredParameter]) -> bool:
    """Return whether one layout of a known model has all names."""
    changes = [*{(c.module, c.parameter): c for c in changes}.values()]
    try:
        known = candidates(changes)
    except UnknownBaseError:
        return False
    for architecture in known:
        with suppress(UnknownBaseError):
            return bool(inferred_base(changes, architecture))
    return False


def _shown_changes(file: AdapterFile) -> list[InferredParameter]:
    """Return the changes of weights whose shapes an adapter shows."""
    shapes = ((m, m.parameter_shape) for m in file.modules)
    return [InferredParameter(m.name, m.parameter, shape) for m, shape in shapes if shape is not None]


def _styles(file: AdapterFile) -> Iterator[str]:
    for module in file.modules:
        yield from styles_of(module.name)


def _shapes(file: AdapterFile) -> dict[str, Shape]:
    return {m.name: m.parameter_shape or () for m in file.modules if m.parameter == "weight"}


def _joined(job: AdapterJob, opened: CheckpointCache) -> InputAdapters:
    """Return adapters joined by names without their prefixes; only formulas that do not read the base, of shapes that
    files show."""
    files = tuple(opened.adapter(ref.path) for ref in job.adapters)
    for file in files:
        check_complete(file)
        if file.strange:
            raise UsageError("an adapter replaces whole tensors of the base", f"{file.path}: {file.strange[0].name}",
                             GIVE_BASE)  # fmt: skip
    weights, targets, remarks, used = dict[str, Weight](), [], dict[Note, dict[str, None]](), set[str]()
    with Reader(f.index for f in files) as reader:
        contexts = [_context(n, f, FileValues(reader), job) for n, f in enumerate(files)]
        for (body, parameter), members in joined(files).items():
            key = f"{body}.{parameter}"
            target, module_notes, settings = _joined_target(key, parameter, members, contexts, job.adapters)
            for where, text in module_notes:
                remarks.setdefault(text, {})[where] = None
            used |= settings
            weights[target.key] = without_values(target.key, target)
            targets.append(target)
    check_settings(dict(job.inputs.setting), used)
    for context in contexts:
        uses = (u for t in targets for u in t.uses if u.patch.adapter == context.number and u.strength)
        check_scales((u.patch for u in uses), context.adapter.path, context.rules)
    notes = (
        *(note for f in files for note in f.notes),
        *(Note(f"{several([*m])}: {text}") for text, m in remarks.items()),
    )
    return InputAdapters(files, tuple(targets), weights, tuple(f.index for f in files), notes)


def _context(number: int, file: AdapterFile, values: FileValues, job: AdapterJob) -> AdapterContext:
    settings = dict(job.inputs.setting)
    return AdapterContext(number, file, rules_of(file), values, user_settings=settings, base=ALL_UPRIGHT)


def _joined_target(
    key: str, parameter: str, members: Sequence[tuple[int, Module]], contexts: Sequence[AdapterContext],
    refs: Sequence[Adapter],
) -> tuple[Target, list[tuple[str, Note]], set[str]]:  # fmt: skip
    """Return the change of one parameter by all adapters, a module and a sentence for each remark on them, and the
    user's settings that it needed."""
    name, shape = members[0][1].name, next(filter(None, (m.parameter_shape for _, m in members)), None)
    if shape is None:
        raise UsageError(NO_SHAPE, f"{contexts[0].adapter.path}: {name}", GIVE_BASE)
    view, uses, module_notes, used = whole(key, shape), list[PatchPart](), [], set[str]()
    for number, module in members:
        context = contexts[number]
        try:
            patch, remarks, settings = choose(module, view, context, {parameter: view})
        except ShapeMismatch as e:
            if module.parameter_shape == shape:
                raise FitError(e.what, e.where, e.fix) from e
            first, other = contexts[0].adapter.path, context.adapter.path
            sizes = f"{list(shape)} in {first.name}, {list(module.parameter_shape or ())} in {other.name}"
            where = f"{first} and {other}: the weight of {module.name} is {sizes}"
            raise FitError("two adapters are for different models", where, "combine adapters of one model") from e
        if patch.reads_base or patch.base_slots or ALGORITHMS[patch.algorithm].is_rebuilt(patch.shapes):
            raise UsageError(f"ΔW of {patch.algorithm if patch.magnitude is None else 'DoRA'} depends on the base",
                             f"{context.adapter.path}: {module.where}", GIVE_BASE)  # fmt: skip
        if refs[number].parts:
            raise UsageError("parts of a model are known from its base", f"`--strength-for {refs[number].parts[0][0]}`",
                             GIVE_BASE)  # fmt: skip
        uses.append(PatchPart(patch, patch.view.row_slices[0], 0, refs[number].strength))
        module_notes += [(module.where, text) for text in remarks]
        used |= settings
    places = (whole_place(name, parameter, view, uses),)
    return Target(key, shape, tuple(uses), places=places), module_notes, used


def check_complete(file: AdapterFile) -> None:
    """Raise InputError if a module lacks a tensor that the others have; UsageError if it changes stacked experts, as
    its factors alone do not show how many there are."""
    known = rules_of(file)
    for module in file.modules:
        if not any(name.endswith("weight") for name in known.of(module.name).targets(module.name)):
            raise UsageError("the adapter changes stacked experts", f"{file.path}: {module.where}", GIVE_BASE)
    lacking = gaps(file.modules, known)
    for where, gap in lacking.items():
        raise incomplete(f"{where} has no {gap.key}", file.path)


def without_base(job: AdapterJob, files: Sequence[AdapterFile], to: Dialect) -> InputAdapters:
    """Return the inputs of a job whose base is assumed; UsageError where its adapters do not show enough of it.

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
                parts = [complete(p, to.of(architecture).layout(p)) for p in inferred_base(changes, architecture)]
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


def as_named(job: AdapterJob, files: Sequence[AdapterFile]) -> InputAdapters:
    """Return the inputs of a job on a base whose weights have the adapters' names, and are [out, in] as theirs are."""
    shapes = {f"{c.module.removeprefix(PEFT_PREFIX)}.{c.parameter}": c.shape for c in _changes(files)}
    part = Component("denoiser", "model", "", keys={name: name for name in shapes}, shapes=shapes)
    return _on_shapes(job, Names([part], shapes), files, UPRIGHT)


def _on_shapes(
    job: AdapterJob, names: Names, files: Sequence[AdapterFile], model: Mapping[str, Any] = MappingProxyType({})
) -> InputAdapters:
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
            if (shape := module.parameter_shape) is None:
                raise UsageError(NO_SHAPE, f"{file.path}: {module.where}", GIVE_BASE)
            changes[InferredParameter(module.name, module.parameter, shape)] = None
    return [*changes]
