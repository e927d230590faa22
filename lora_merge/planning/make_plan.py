"""Makes the plan of a job from headers, before the first weight is read. Every foreseeable error is raised here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..adapters.modules import AdapterFile
from ..adapters.tensor_values import FileValues, Values
from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, WHOLE_DTYPES, Shape, StoredTensor, spoken
from ..errors import FitError, InputError, ShapeMismatch, UsageError
from ..files.checkpoint import Index
from ..files.encodings.base import Packing, plain
from ..files.file_uses import ONLY_FOR_CODES, FileUse, Folder, adapter_folder
from ..files.folder_layouts import FOLDER_CONFIGS
from ..files.formats.base import CODES_ALIGNMENT, NewWeight, fills_words
from ..files.formats.quantization_config import activation_notes
from ..files.gguf.types import QUANTISED_TYPES
from ..files.side_files import (
    EMBEDDING,
    ON_QUANTISATION,
    base_folder,
    index_names,
    output_name,
    refuse_links_outside,
    stored_name,
)
from ..files.tokenizers import OTHER_TOKENIZER, EmbeddingRows, taken
from ..job import Adapter, Job, ResolvedJob
from ..matching.conflicts import check_addable, with_overlap_notes
from ..matching.formula import check_settings
from ..matching.match import KnownBase, adapter_context, match_adapter
from ..matching.patch import Match, PatchPart
from ..matching.tied_embeddings import check_separations
from ..matching.trained_weights import with_trained_weights
from ..matching.values import replace_in_turn, values_as_changes
from ..merge_methods import ADDED_VECTORS, METHODS
from ..models.names import Names
from ..models.part_factors import Strengths, check_effect, on_base
from ..models.weights import Weight
from ..paths import is_split
from ..safe_regex import Steps
from ..text import Note
from .checkpoint_cache import CheckpointCache
from .combination import ADDITION, Combination
from .containers import OutputContainer, check_name, check_names, container_of, with_names_of
from .header_entries import other_entries
from .output_checksums import entry, summed
from .plan import OutputFile, OutputTensor, Plan, neighbour, weights
from .quantisation import quantising
from .recipe import blanks, entries

CHECKED_BYTES: Final = 64
"""Parts of quantised weights of up to so many bytes are checked here, larger ones when they are read."""

MERGED: Final = "the output already contains this adapter"

USUAL: Final = 4  # a larger strength is probably a mistake: 80 instead of 0.8


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a job: the base with the names of its weights, and its adapters as modules."""

    job: Job  # as the user asked for it
    base: Index
    names: Names
    adapters: tuple[AdapterFile, ...]
    folders: tuple[Folder | None, ...] = ()
    """For each adapter the files of its folder; None for a file."""

    @classmethod
    def joined(cls, job: Job, base: Index, lookup: Names, adapters: Iterable[AdapterFile]) -> Inputs:
        """Return the inputs, each adapter with the weights that were trained besides it; FitError for such without a
        place in the base."""
        both = []
        for file in adapters:
            whole = file.index.path.is_dir() and not {*file.index.files} & {*base.files}
            folder = adapter_folder(file.index) if whole else None
            both.append(with_trained_weights(file, folder, lookup, base.tensors, job.unmatched))
        return cls(job, base, lookup, tuple(file for file, _ in both), tuple(folder for _, folder in both))

    @cached_property
    def container(self) -> OutputContainer:
        """The container of the output; UsageError for one that cannot be written."""
        return container_of(self.job, self.base)

    @cached_property
    def resolved(self) -> ResolvedJob:
        """The job on its base."""
        asked = {f.name: getattr(self.job, f.name) for f in fields(Job)}
        adapters = tuple(on_base(ref, self.names) for ref in self.job.adapters)
        return ResolvedJob(**{**asked, "adapters": adapters, "output": self.container.output})


@dataclass(frozen=True)
class Matched:
    """The changes of each adapter of a job to its base."""

    inputs: Inputs
    adapters: tuple[Match, ...]

    @cached_property
    def weights(self) -> Mapping[str, Weight]:
        """Name → the weight before the changes."""
        return weights(self.inputs.base, self.adapters)


def plan_job(job: Job, cache: CheckpointCache) -> Plan:
    """Return the plan of a job; the output path is not checked here. `cache` opens and keeps the checkpoints."""
    return make_plan(match(open_inputs(job, cache)))


def open_inputs(job: Job, cache: CheckpointCache, *, merged: bool = True) -> Inputs:
    """Return the inputs of a job, opened or taken from the cache; InputError for a file that cannot be used.

    `merged`: whether the output is a checkpoint like the base, and not an adapter.
    """
    paths = [ref.path for ref in job.adapters]
    base, lookup = cache.base(job.base, job.map, plain=job.base in paths, partners=paths)
    if merged:
        check_name(container_of(job, base))
    files = (cache.own_adapter(path) if path == job.base else cache.adapter(path, job.base) for path in paths)
    adapters = [with_names_of(base, file) for file in files]
    check_names(job, base, adapters)
    return Inputs.joined(job, base, lookup, adapters)


def match(inputs: Inputs, *, every_setting: bool = True) -> Matched:
    """Return the changes of every adapter to the base; FitError if one does not fit.

    `every_setting`: whether a setting of the user that no formula uses is an error.
    """
    with Reader(a.index for a in inputs.adapters) as reader, inputs.base.quantised.blamed(inputs.base.path):
        for adapter in inputs.adapters:
            reader.expect_numbers(adapter.index.tensors.values())
        return Matched(inputs, matches(inputs, FileValues(reader), every_setting=every_setting))


def make_plan(matched: Matched) -> Plan:
    """Return the plan, in which every output tensor has its origin and its place."""
    job, base, names = matched.inputs.resolved, matched.inputs.base, matched.inputs.names
    # The weights: whether they can be changed, their forms in the output, their places in its files.
    check_stored(matched)
    quantised = quantising(job, base, names)
    files, indexes = _files(matched, quantised.forms), index_names(base)
    # The other files of a folder.
    folders, sides, notes = _folders(matched)
    refuse_links_outside(base, sides)
    # Notes for the user.
    if METHODS[job.method].directions and any(len(t.shape) < 2 and t.combines for f in files for t in f.targets):
        notes.append(Note(f"{job.method}: {ADDED_VECTORS}"))
    if job.dtype == "keep":
        notes += activation_notes((t.name for f in files for t in f.targets if t.uses), base.packed)
    if notes:
        base = replace(base, notes=(*base.notes, *notes))
    return Plan(job, base, names, matched.adapters, files, matched.weights, sides, indexes, quantised, folders)


def _folders(matched: Matched) -> tuple[tuple[Folder, ...], dict[str, Path], list[Note]]:
    """Return the files of every input folder and what becomes of them, the side files of the output, and notes."""
    job, base = matched.inputs.job, matched.inputs.base
    others = tuple(folder for folder in matched.inputs.folders if folder is not None)
    if not base.path.is_dir() or is_split(job.base):
        if job.tokenizer is not None:
            raise UsageError("the output is a file, which has no tokenizer", f"`--tokenizer {job.tokenizer}`",
                             "leave it out")  # fmt: skip
        return others, {}, [note for folder in others for note in folder.warning()]
    # Files of the base's folder: read, left out, or copied.
    of_base = base_folder(base)
    read = {path for match in matched.adapters for path in match.adapter.index.files}
    of_adapters = {path for path in read if base.path in path.parents and path not in base.files}
    within = {path.parent for path in {*of_adapters, *read.intersection(base.files)}}
    unpacked = bool(base.packed) and job.dtype != "keep"
    uses = []
    for file in of_base.files:
        path = base.path / file.name
        if path in of_adapters:
            uses.append(FileUse(file.name, "read"))
        elif path.name == FOLDER_CONFIGS[0] and path.parent in within:
            uses.append(FileUse(file.name, "left out", MERGED))
        elif unpacked and path.name in ON_QUANTISATION:
            uses.append(FileUse(file.name, "left out", ONLY_FOR_CODES))
    of_base = of_base.replaced(uses)
    # The tokenizer, of the base or of an adapter.
    rows = [_embedding_rows(matched, number) for number, folder in enumerate(matched.inputs.folders) if folder]
    tokenizer, notes = taken(job.tokenizer, of_base, others, rows)
    sides = {name: base.path / name for name in of_base.names}
    if tokenizer is not None:
        replaced = {*tokenizer.files, *tokenizer.dropped}
        of_base = of_base.replaced(FileUse(name, "left out", OTHER_TOKENIZER) for name in sides if name in replaced)
        sides = {name: path for name, path in sides.items() if name not in tokenizer.dropped} | dict(tokenizer.files)
        others = tuple(
            folder.replaced(FileUse(name, "copied") for name in tokenizer.files if folder.path == tokenizer.folder)
            for folder in others
        )
    folders = (of_base, *others)
    return folders, sides, [*(note for folder in folders for note in folder.warning()), *notes]


def _embedding_rows(matched: Matched, number: int) -> EmbeddingRows:
    """Return the rows of the largest table of tokens, before and after an adapter."""
    base, match = matched.inputs.base, matched.adapters[number]
    tables = [key for key, info in base.tensors.items() if len(info.shape) == 2 and EMBEDDING.fullmatch(key)]
    key = max(tables, key=lambda name: base.tensors[name].shape[0], default=None)
    if key is None:
        return EmbeddingRows(0, 0, changed=False)
    after = match.replaced[key].shape if key in match.replaced else matched.weights[key].shape
    changed = key in match.uses or key in match.replaced or key in match.bases
    return EmbeddingRows(base.tensors[key].shape[0], after[0], changed=changed)


def matches(inputs: Inputs, values: Values, *, every_setting: bool = True) -> tuple[Match, ...]:
    """Return the match of every adapter; `values` reads the few stored tensors whose numbers the match depends on."""
    job, base, lookup, adapters = inputs.job, inputs.base, inputs.names, inputs.adapters
    # The strengths of each adapter in the parts of the base.
    steps = Steps()
    strengths = [Strengths(ref, lookup, steps) for ref in job.adapters]
    components = {key: lookup.component(key) for key in base.tensors} if any(r.parts for r in job.adapters) else {}
    for by_part in strengths:
        by_part.check(components)
    # The modules of each adapter.
    matched: list[Match] = []
    known = KnownBase.of(base, lookup)
    for number, adapter in enumerate(adapters):
        context = adapter_context(number, adapter, values, base, lookup, dict(job.setting))
        matched.append(match_adapter(context, known, strengths[number], job.unmatched))
    # How several adapters change one weight.
    method = METHODS[job.method]
    if method.in_turn:
        matched = replace_in_turn(matched, base.tensors)
    if method.combines:
        alone = bool(method.keeps) or job.scale != 1
        matched = values_as_changes(matched, base.tensors, alone=alone)
    check_addable(job.adapters, matched, values)
    check_separations(job.adapters, matched)
    # Mistakes of the user, and notes.
    used = {name for match in matched for name in match.settings}
    if every_setting:
        check_settings(dict(job.setting), used)
    files = [os.path.realpath(ref.path) for ref in job.adapters]
    check_effect(strengths)
    with_notes = []
    for n, match in enumerate(with_overlap_notes(job, matched)):
        usual = _unusual(match, job.adapters[n], again=files.index(files[n]) < n)
        weights = strengths[n].notes({**match.uses, **match.replaced})
        with_notes.append(replace(match, notes=(*match.notes, *usual, *weights, *strengths[n].repeated())))
    return tuple(with_notes)


def _unusual(match: Match, adapter: Adapter, *, again: bool) -> Iterator[Note]:
    """Yield notes on a probable mistake of the user: an adapter that is named again, an unusual strength."""
    if again:
        yield Note("the adapter is listed more than once: its change is added each time")
    if not adapter.strength:
        yield Note("strength 0: it changes nothing")
    largest = max((use.strength for uses in match.uses.values() for use in uses), key=abs, default=adapter.strength)
    if abs(largest) > USUAL:
        where = "" if largest == adapter.strength else " of some weights"
        yield Note(f"strength {largest:g}{where} is unusual; most adapters are trained for 0 to 2")


def check_stored(matched: Matched) -> None:
    """Raise InputError if a changed weight is quantised and cannot be decoded, or cannot be encoded again."""
    job, base, matched_adapters = matched.inputs.job, matched.inputs.base, matched.adapters
    # Adapters: quantised weights that they change, and values that they replace.
    whole = {key for m in matched_adapters for key in (*m.replaced, *m.bases, *m.grown, *m.created)}
    replaced = {key for m in matched_adapters for key in (*m.replaced, *m.bases)}
    changed = whole.union(*(m.uses for m in matched_adapters))
    base.quantised.check(base.path, job.dtype, changed)
    for match in matched_adapters:
        _check_values(base, match.replaced)
    # Weights that are decoded: their format, and small parts such as one scale.
    decoded = {k: p for k, p in base.packed.items() if k in changed or job.dtype != "keep"}
    with Reader([base] if decoded else []) as reader:
        values = FileValues(reader)
        for key, (encoding, _, parts, _) in decoded.items():
            where = f"{base.tensors[key].file}: {key}"
            if encoding.decode_only and job.dtype == "keep":
                what = f"a changed weight cannot be stored as {encoding.title} again: {encoding.decode_only}"
                raise InputError(what, where, "write `--dtype bf16`")
            if key in whole and not (key in replaced and (encoding.from_zeros or job.dtype != "keep")):
                what = f"an adapter replaces a weight that is stored as {encoding.title}"
                other = "write `--dtype bf16`, or " if key in replaced else ""
                raise InputError(what, where, f"{other}merge into the unquantised model, in fp32, fp16 or bf16")
            for role, part in parts.items():
                small = not part.numbers and part.info.nbytes <= CHECKED_BYTES
                if small and (fault := encoding.fault(role, values.numbers(part.info))):
                    raise InputError(f"a weight cannot be decoded: {fault}", where, "download the model again")


IN_ITS_DTYPE: Final = "export the adapter again, this tensor in the dtype that the base has"


def _check_values(base: Index, replaced: Mapping[str, StoredTensor]) -> None:
    """Raise InputError if a value cannot take the place of the base's: whole numbers, which may be codes without their
    scales, replace only whole numbers of the same dtype that are no codes."""
    for key, info in replaced.items():
        of_base = base.tensors.get(key)
        dtypes = {info.dtype} if of_base is None or key in base.packed else {info.dtype, of_base.dtype}
        if of_base is not None and not WHOLE_DTYPES.isdisjoint(dtypes) and (key in base.packed or len(dtypes) > 1):
            where = f"{info.file}: {info.name} is {spoken(info.dtype)}, the base has {spoken(of_base.dtype)}"
            raise InputError("whole numbers replace only a weight of the same dtype", where, IN_ITS_DTYPE)


def _files(matched: Matched, forms: Mapping[str, NewWeight]) -> tuple[OutputFile, ...]:
    """Return an output file for every input file (same tensors, order and metadata, plus our entries)."""
    job, base, container = matched.inputs.resolved, matched.inputs.base, matched.inputs.container
    # The tensors of each file.
    by_file: dict[Path, list[OutputTensor]] = {path: [] for path in base.files}
    for path, target in outputs(matched, forms):
        by_file[path].append(target)
    container.check_tensors(t for targets in by_file.values() for t in targets)
    # Its header, with blanks for what is known after the merge: digests of the inputs, sums of codes.
    adapters = [m.adapter.index for m in matched.adapters]
    by_merge = entries(job, base, adapters, blanks(base, adapters), [m.strengths for m in matched.adapters])
    files = []
    coded = summed([*by_file.values()])
    for (path, targets), of_merge, changed in zip(by_file.items(), by_merge, coded, strict=True):
        others = other_entries(container, path)
        of_sums = entry([0] * len(changed)) if of_merge else {}
        header, alignment = container.header(path, targets, {**others, **of_merge, **of_sums})
        name = output_name(path, base) if base.path.is_dir() else ""
        files.append(OutputFile(name, header, _placed(targets, len(header), alignment), others, alignment))
    return tuple(files)


def outputs(
    matched: Matched, forms: Mapping[str, NewWeight] = MappingProxyType({})
) -> Iterator[tuple[Path, OutputTensor]]:
    """Yield (input file, output tensor); the tensor goes to the output of that file, its offset is not yet known.

    `forms`: weight → its quantised form in the output.
    """
    groups = _outputs(matched, forms)
    return _in_words(groups) if any(form.beside for form in forms.values()) else chain.from_iterable(groups)


def _in_words(groups: Iterable[Sequence[tuple[Path, OutputTensor]]]) -> Iterator[tuple[Path, OutputTensor]]:
    """Yield the tensors of weights, last the ones that move others from multiples of their numbers' size."""
    last: list[tuple[Path, OutputTensor]] = []
    for group in groups:
        in_place = fills_words([target for _, target in group])
        for path, target in group:
            if in_place or target.nbytes % CODES_ALIGNMENT == 0:
                yield path, target
            else:
                last.append((path, target))
    yield from sorted(last, key=lambda row: -ITEM_BYTES.get(row[1].dtype, 1))


def _outputs(matched: Matched, forms: Mapping[str, NewWeight]) -> Iterator[Sequence[tuple[Path, OutputTensor]]]:
    """Yield as `outputs` does the tensors of each weight."""
    job, base, container = matched.inputs.job, matched.inputs.base, matched.inputs.container
    adapters, before = matched.adapters, matched.weights
    # What the adapters do to each weight.
    uses: dict[str, list[PatchPart]] = {}
    created: dict[str, tuple[Shape, str]] = {}
    separated = {key for match in adapters for key in match.separated}
    replaced = {key: Weight(info.shape, info) for match in adapters for key, info in match.replaced.items()}
    for match in adapters:
        created.update(match.created)
        for key, more in match.uses.items():
            uses.setdefault(key, []).extend(more)
    combination = Combination.of(job, [match.adapter for match in adapters], uses)
    dropped = base.beside if job.dtype != "keep" else frozenset()
    # Tensors of the base, with the scales that a quantised form adds.
    for key, info in base.tensors.items():
        if key in dropped or not container.holds(info, changed=key in uses):
            continue
        form, weight = forms.get(key), replaced.get(key, before[key])
        like = container.named(info) if form is None else info
        target = _target(combination, like, weight, uses, container.stored_as(info, weight, form))
        scales = [OutputTensor(t.name, stored_name(t), t.dtype, Weight(t.shape, t), 0, t.nbytes)
                  for t in (form.beside if form else ())]  # fmt: skip
        yield [(info.file, t) for t in (target, *scales)]
    # Tensors that the base lacks, in the file of the tensor next to which they are.
    for key, (shape, near) in created.items():
        if key in uses or key in replaced or key in separated:
            sibling = neighbour(base, near)
            stored = stored_name(sibling).removesuffix(near.rpartition(".")[2]) + key.rpartition(".")[2]
            like = StoredTensor(key, sibling.dtype, shape, sibling.file, 0, 0, key if key in separated else stored)
            weight = replaced.get(key, before[key])
            if container.holds(like, changed=True):
                stored_as = container.stored_as(like, weight, None)
                yield [(sibling.file, _target(combination, container.named(like), weight, uses, stored_as))]


def _target(
    combination: Combination, info: StoredTensor, weight: Weight, all_uses: Mapping[str, Sequence[PatchPart]],
    stored_as: tuple[str, Packing | None],
) -> OutputTensor:  # fmt: skip
    name, (dtype, packed) = info.name, stored_as
    uses = tuple(all_uses.get(name, ()))
    if uses and packed is None and dtype not in FLOATS:
        kind = "whole numbers" if info.dtype[0] in "IUB" else "values that cannot be merged"
        raise ShapeMismatch(f"an adapter changes a tensor of {kind}", f"{info.file}: {name} is {spoken(info.dtype)}",
                            "merge into the unquantised model, in fp32, fp16 or bf16")  # fmt: skip
    if (
        weight.shape != info.shape
        and packed is not None
        and packed.encoding.quantised
        and info.dtype not in QUANTISED_TYPES
    ):
        raise FitError("an adapter changes the size of a quantised weight, whose scales have the old one",
                       f"{info.file}: {name} is {list(info.shape)}, the adapter has {list(weight.shape)}",
                       "write `--dtype bf16`")  # fmt: skip
    codes = packed.codes if packed is not None else None
    nbytes = plain(dtype).encoding.nbytes(prod(weight.shape)) if codes is None else codes.nbytes
    stored = stored_name(info if codes is None else codes)
    return OutputTensor(name, stored, dtype, weight, 0, nbytes, uses, combination if uses else ADDITION, packed)


def _placed(targets: Sequence[OutputTensor], data: int, alignment: int) -> tuple[OutputTensor, ...]:
    placed, start = [], data
    for t in targets:
        start += (data - start) % alignment
        placed.append(t._replace(offset=start))
        start += t.nbytes
    return tuple(placed)
