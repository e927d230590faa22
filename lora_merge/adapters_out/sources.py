"""The changes that meet on each weight: the modules of all adapters, joined by the base or by their names. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import StoredTensor
from ..errors import FitError, ShapeMismatch, UsageError
from ..files.checkpoint import TRAINED_FILES, Index
from ..files.file_uses import NEEDS_BASE, adapter_folder
from ..job import Adapter
from ..matching.fit_errors import check_scales
from ..matching.formula import AdapterContext, check_settings, choose
from ..matching.missing_tensors import gaps, incomplete
from ..matching.orientation import ALL_UPRIGHT
from ..matching.patch import Match, PatchPart
from ..models.blocks import network_of
from ..models.names import Names
from ..models.part_factors import ParameterChoice
from ..models.parts import NOT_CHANGED
from ..models.weights import Weight, whole
from ..options import KEEP
from ..planning.checkpoint_cache import CheckpointCache
from ..text import Note, listed, plural, several
from .groups import Target, whole_place
from .job import GIVE_BASE, AdapterJob
from .output_names import joined

if TYPE_CHECKING:
    from ..planning.inputs import Inputs

NOWHERE: Final = Path("the base that was not given")
NO_SHAPE: Final = "the shape of a weight is not in the adapter's file"

NOW_APART: Final = "is now stored apart"  # what becomes of a head when a checkpoint is written
HEAD_APART: Final = Note(
    "the head was trained apart from the embeddings that share its weight: a merge of the output changes both, unless "
    "it is a PEFT folder"
)


@dataclass(frozen=True)
class Sources:
    """All weights that the adapters of a job change, with what is needed to read them."""

    adapters: tuple[AdapterFile, ...]
    targets: tuple[Target, ...]
    weights: Mapping[str, Weight]
    indexes: tuple[Index, ...]
    notes: tuple[Note, ...] = ()
    architecture: str = ""
    inputs: Inputs | None = None  # with the base and its names; None where names alone join the adapters
    fused: str = KEEP
    """The first adapter's dialect, where it has one module for several weights of the base; "" for an unknown one."""
    matches: tuple[Match, ...] = ()
    """The changes of each adapter, if the base is a checkpoint that was read."""


def open_sources(job: AdapterJob, opened: CheckpointCache | None = None) -> Sources:
    """Return the weights that the job's adapters change, from headers; errors as for `merge`. `opened`: checkpoints
    that are open already."""
    opened = opened or CheckpointCache()
    if job.base is None:
        return chosen_of(job, _without_base(job, opened))
    from ..planning.inputs import open_inputs

    return chosen_of(job, on_base(open_inputs(job.inputs, opened, merged=False)))


def chosen_of(job: AdapterJob, sources: Sources) -> Sources:
    """Return the sources with the weights that `--include` and `--exclude` choose, and a note of how many they leave;
    without a base, names and networks are those of the modules."""
    sources = replace(sources, notes=(*sources.notes, *_other_files(job, sources)))
    if not job.include and not job.exclude:
        return sources
    names, named = _named(job, sources)
    networks = {name: label for label, some in named for name in some}
    chosen = ParameterChoice.of(job.include, job.exclude, names, networks.values())
    chosen.check(networks, NOT_CHANGED)
    targets = tuple(t for t, (label, some) in zip(sources.targets, named, strict=True) if chosen.takes(label, some))
    if not targets:
        raise UsageError("no module is chosen", "--include and --exclude", "choose other parts of the model")
    left = len(sources.targets) - len(targets)
    note = [Note(f"left out by --include and --exclude: {plural(left, 'weight')}")] if left else []
    return replace(sources, targets=targets, notes=(*sources.notes, *note))


def ruled(job: AdapterJob, sources: Sources) -> AdapterJob:
    """Return the job with the rule of each layer, by its name; UsageError for a part of `--rank-for` without one."""
    names, named = _named(job, sources)
    layers = [
        (place.label, label, some)
        for target, (label, some) in zip(sources.targets, named, strict=True)
        for place in target.places
    ]
    return replace(job, rules=job.rules.on(names, layers))


def _named(job: AdapterJob, sources: Sources) -> tuple[Names | None, list[tuple[str, tuple[str, ...]]]]:
    """Return the names of the base, None without one, and network and names of each target: its key in the base,
    without a base the names of its modules."""
    if job.base is not None and sources.inputs:
        names = sources.inputs.names
        return names, [(names.component(target.key), (target.key,)) for target in sources.targets]
    return None, [
        (
            network_of(target.places[0].module),
            (*(place.module for place in target.places), *(use.patch.module.name for use in target.uses)),
        )
        for target in sources.targets
    ]


def _other_files(job: AdapterJob, sources: Sources) -> Iterator[Note]:
    """Yield the notes on files with weights in the adapters' folders that are left out.

    UsageError without a base for weights that were trained with an adapter: only a base has their place.
    """
    tables = sources.inputs.folders if sources.inputs is not None else ()
    folders = tables or [adapter_folder(f.index) for f in sources.adapters if f.index.path.is_dir()]
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


def on_base(inputs: Inputs, *, stored: bool = True, every_setting: bool = True) -> Sources:
    """Join by the weights of the base: every dialect, fused or split names, and formulas that read the base.

    `stored`: whether the base is a checkpoint whose weights can be read. `every_setting`: whether a setting that no
    formula uses is a mistake.
    """
    from ..planning.changes import match, weights  # not needed without a base
    from .output_names import Naming

    matched = match(inputs, every_setting=every_setting)
    base, matches = matched.inputs.base, matched.adapters
    if grown := sorted({key for m in matches for key in m.grown}):
        raise reshaped(grown[0])
    changed_weights = weights(base, matches)
    naming = Naming(matches, base, inputs.names)
    targets = []
    for key in (k for k in changed_weights if any(k in m.uses or k in m.replaced for m in matches)):
        uses = tuple(use for m in matches for use in m.uses.get(key, ()))
        values = tuple((n, m.replaced[key], 1.0) for n, m in enumerate(matches) if key in m.replaced)
        shape = changed_weights[key].shape
        targets.append(Target(key, shape, uses, values, naming.places(key, shape, uses, values)))
    notes = tuple(n for m in matches for n in (*m.adapter.notes, *m.notes) if not (m.separated and NOW_APART in n))
    if any(m.separated for m in matches):
        notes = (*notes, HEAD_APART)
    if naming.nameless:
        notes = (*notes, Note(f"no name in the first adapter's format, so under that of the base: "
                              f"{listed(naming.nameless, 3)}"))  # fmt: skip
    indexes = (*([base] if stored else []), *(m.adapter.index for m in matches))
    architecture = inputs.names.architecture
    return Sources(inputs.adapters, tuple(targets), changed_weights, indexes, notes, architecture, inputs, naming.fused,
                   matches if stored else ())  # fmt: skip


def same_base(inputs: Inputs, job: AdapterJob) -> Sources:
    """Return the sources of a job with other adapters on the base of these inputs."""
    opened = CheckpointCache()
    adapters = tuple(opened.adapter(ref.path) for ref in job.adapters)
    again = replace(inputs, job=job.inputs, adapters=adapters)
    return on_base(again, stored=inputs.base.path != NOWHERE, every_setting=False)


def _without_base(job: AdapterJob, opened: CheckpointCache) -> Sources:
    """Join by names without their prefixes; only formulas that do not read the base, of shapes that files show."""
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
    return Sources(files, tuple(targets), weights, tuple(f.index for f in files), notes)


def without_values(key: str, target: Target) -> Weight:
    """Return the weight that a target changes, if the base lacks it or is not known: its shape alone."""
    info = next(iter(target.uses[0].patch.module.slots.values()))
    return Weight(target.shape, StoredTensor(key, info.dtype, target.shape, info.source, 0, 0))


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
    place = whole_place(name, parameter, key, shape, uses)
    return Target(key, shape, tuple(uses), places=(place,)), module_notes, used


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
