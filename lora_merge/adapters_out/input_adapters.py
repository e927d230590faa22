"""The adapters that a job reads: the changes that meet on each weight. The modules of all adapters are joined by the
base; without one by names without prefixes, or by a base that is inferred from the names and shapes that they show. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
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
from ..files.checkpoint import TRAINED_FILES, Index
from ..files.file_uses import NEEDS_BASE, adapter_folder
from ..files.folder_layouts import PEFT_PREFIX
from ..job import Adapter
from ..matching.fit_errors import check_scales
from ..matching.formula import AdapterContext, check_settings, choose
from ..matching.missing_tensors import gaps, incomplete
from ..matching.orientation import ALL_UPRIGHT, UPRIGHT
from ..matching.patch import Match, PatchPart
from ..models.architectures import Architecture
from ..models.blocks import network_of
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
from ..models.part_factors import ParameterChoice
from ..models.parts import NOT_CHANGED
from ..models.prefixes import prefixed
from ..models.weights import Weight, whole
from ..options import KEEP
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.inputs import Inputs, open_inputs
from ..text import Note, listed, plural, several
from .dialects import Dialect
from .groups import Place, Target, places, whole_place
from .job import GIVE_BASE, AdapterJob
from .output_names import Naming, styles_of

NOWHERE: Final = Path("the base that was not given")

NO_SHAPE: Final = "the shape of a weight is not in the adapter's file"

NOW_APART: Final = "is now stored apart"  # what becomes of a head when a checkpoint is written
HEAD_APART: Final = Note(
    "the head was trained apart from the embeddings that share its weight: a merge of the output changes both, unless "
    "it is a PEFT folder"
)


@dataclass(frozen=True)
class InputAdapters:
    """All weights that the adapters of a job change, with what is needed to read them."""

    adapters: tuple[AdapterFile, ...]
    targets: tuple[Target, ...]
    weights: Mapping[str, Weight]
    indexes: tuple[Index, ...]
    notes: tuple[Note, ...] = ()
    opened: Inputs | None = None  # with the base and its names; None where names alone join the adapters
    fused: str = KEEP
    """The first adapter's dialect, where it has one module for several weights of the base; "" for an unknown one."""
    matches: tuple[Match, ...] = ()
    """The changes of each adapter, if the base is a checkpoint that was read."""

    @property
    def names(self) -> Names | None:
        """The names of the base, which may be assumed; None where names alone join the adapters."""
        return self.opened.names if self.opened else None

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the base, if it is known."""
        return self.names.known if self.names else None

    @property
    def base(self) -> Index | None:
        """The base that was given."""
        return self.opened.base if self.opened and self.opened.base.path != NOWHERE else None


def chosen_of(job: AdapterJob, inputs: InputAdapters) -> InputAdapters:
    """Return the inputs with the weights that `--include` and `--exclude` choose, and a note of how many they leave;
    without a base, names and networks are those of the modules."""
    inputs = replace(inputs, notes=(*inputs.notes, *_other_files(job, inputs)))
    if not job.include and not job.exclude:
        return inputs
    names, named = _named(inputs)
    networks = {name: label for label, some in named for name in some}
    chosen = ParameterChoice.of(job.include, job.exclude, names, networks.values())
    chosen.check(networks, NOT_CHANGED)
    targets = tuple(t for t, (label, some) in zip(inputs.targets, named, strict=True) if chosen.takes(label, some))
    if not targets:
        raise UsageError("no module is chosen", "--include and --exclude", "choose other parts of the model")
    left = len(inputs.targets) - len(targets)
    note = [Note(f"left out by --include and --exclude: {plural(left, 'weight')}")] if left else []
    return replace(inputs, targets=targets, notes=(*inputs.notes, *note))


def _named(inputs: InputAdapters) -> tuple[Names | None, list[tuple[str, tuple[str, ...]]]]:
    """Return the names of the base, None without one, and network and names of each target: its key in the base,
    without a base the names of its modules."""
    if (names := inputs.names) is not None and inputs.base is not None:
        return names, [(names.component(target.key), (target.key,)) for target in inputs.targets]
    return None, [
        (
            network_of(target.places[0].module),
            (*(place.module for place in target.places), *(use.patch.module.name for use in target.uses)),
        )
        for target in inputs.targets
    ]


def _other_files(job: AdapterJob, inputs: InputAdapters) -> Iterator[Note]:
    """Yield the notes on files with weights in the adapters' folders that are left out.

    UsageError without a base for weights that were trained with an adapter: only a base has their place.
    """
    tables = inputs.opened.folders if inputs.opened is not None else ()
    folders = tables or [adapter_folder(f.index) for f in inputs.adapters if f.index.path.is_dir()]
    for folder in (f for f in folders if f is not None):
        undecided = (file.name for file in folder.files if file.why == NEEDS_BASE)
        trained = [name for name in undecided if TRAINED_FILES.fullmatch(Path(name).name)]
        if trained and job.base is None:
            raise UsageError("an adapter replaces whole tensors of the base", f"{folder.path}: {trained[0]}", GIVE_BASE)
        yield from folder.warning()


def reshaped(key: str) -> FitError:
    """Return the error for a weight of the base to which an adapter gives another shape."""
    what = "an adapter gives a weight another shape, which a file of an adapter cannot say"
    return FitError(what, key, "merge it into the base instead")


def on_base(opened: Inputs, *, stored: bool = True, every_setting: bool = True) -> InputAdapters:
    """Join by the weights of the base: every dialect, fused or split names, and formulas that read the base.

    `stored`: whether the base is a checkpoint whose weights can be read. `every_setting`: whether a setting that no
    formula uses is a mistake.
    """
    from ..planning.changes import match, weights  # not needed without a base

    matched = match(opened, every_setting=every_setting)
    base, matches = matched.inputs.base, matched.adapters
    if grown := sorted({key for m in matches for key in m.grown}):
        raise reshaped(grown[0])
    changed_weights = weights(base, matches)
    naming = Naming(matches, base, opened.names)
    targets = []
    for key in (k for k in changed_weights if any(k in m.uses or k in m.replaced for m in matches)):
        uses = tuple(use for m in matches for use in m.uses.get(key, ()))
        values = tuple((n, m.replaced[key], 1.0) for n, m in enumerate(matches) if key in m.replaced)
        target = Target(key, changed_weights[key].shape, uses, values)
        targets.append(replace(target, places=naming.places(target)))
    notes = tuple(n for m in matches for n in (*m.adapter.notes, *m.notes) if not (m.separated and NOW_APART in n))
    if any(m.separated for m in matches):
        notes = (*notes, HEAD_APART)
    if naming.nameless:
        notes = (*notes, Note(f"no name in the first adapter's format, so under that of the base: "
                              f"{listed(naming.nameless, 3)}"))  # fmt: skip
    indexes = (*([base] if stored else []), *(m.adapter.index for m in matches))
    return InputAdapters(opened.adapters, tuple(targets), changed_weights, indexes, notes, opened, naming.fused,
                         matches if stored else ())  # fmt: skip


def same_base(opened: Inputs, job: AdapterJob) -> InputAdapters:
    """Return the inputs of a job with other adapters on the base of these opened."""
    cache = CheckpointCache()
    adapters = tuple(cache.adapter(ref.path) for ref in job.adapters)
    again = replace(opened, job=job.inputs, adapters=adapters)
    return on_base(again, stored=opened.base.path != NOWHERE, every_setting=False)


def without_values(key: str, target: Target) -> Weight:
    """Return the weight that a target changes, if the base lacks it or is not known: its shape alone."""
    info = next(iter(target.uses[0].patch.module.slots.values()))
    return Weight(target.shape, StoredTensor(key, info.dtype, target.shape, info.source, 0, 0))


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
