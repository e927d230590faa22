"""The changes that meet on each weight: the modules of all adapters, joined by the base or by their names. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..adapters.modules import AdapterFile
from ..dtypes import StoredTensor
from ..errors import FitError, UsageError
from ..files.checkpoint import TRAINED_FILES, Index
from ..files.file_uses import NEEDS_BASE, adapter_folder
from ..matching.patch import Match
from ..models.architectures import Architecture
from ..models.blocks import network_of
from ..models.names import Names
from ..models.part_factors import ParameterChoice
from ..models.parts import NOT_CHANGED
from ..models.weights import Weight
from ..options import KEEP
from ..planning.checkpoint_cache import CheckpointCache
from ..text import Note, listed, plural
from .groups import Target
from .job import GIVE_BASE, AdapterJob
from .output_names import Naming

if TYPE_CHECKING:
    from ..planning.inputs import Inputs

NOWHERE: Final = Path("the base that was not given")

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
