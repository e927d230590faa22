"""Makes the plan of a job from headers, before the first weight is read. Every foreseeable error is raised here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType

from ..dtypes import FLOATS, ITEM_BYTES, Shape, StoredTensor, spoken
from ..errors import FitError, ShapeMismatch
from ..files.encodings.base import Packing, plain
from ..files.formats.base import CODES_ALIGNMENT, NewWeight
from ..files.formats.quantization_config import activation_notes
from ..files.gguf.types import QUANTISED_TYPES
from ..files.side_files import index_names, output_name, refuse_links_outside, stored_name
from ..job import Job
from ..matching.patch import PatchPart
from ..merge_methods import ADDED_VECTORS, METHODS
from ..models.weights import Weight
from ..text import Note
from .changes import Matches, check_stored, match, neighbour
from .checkpoint_cache import CheckpointCache
from .combination import ADDITION, Combination
from .folder_files import folder_files
from .header_entries import checksum_entry, checksummed, other_entries
from .inputs import open_inputs
from .plan import OutputFile, OutputTensor, Plan
from .quantisation import quantising
from .recipe import blanks, entries


def plan_job(job: Job, cache: CheckpointCache) -> Plan:
    """Return the plan of a job; the output path is not checked here. `cache` opens and keeps the checkpoints."""
    return make_plan(match(open_inputs(job, cache)))


def make_plan(matched: Matches) -> Plan:
    """Return the plan, in which every output tensor has its origin and its place."""
    job, base, names = matched.inputs.resolved, matched.inputs.base, matched.inputs.names
    # The weights: whether they can be changed, their forms in the output, their places in its files.
    check_stored(matched)
    quantised = quantising(job, base, names)
    files, indexes = _files(matched, quantised.forms), index_names(base)
    # The other files of a folder.
    folders, sides, notes = folder_files(matched)
    refuse_links_outside(base, sides)
    plan = Plan(job, base, names, matched.adapters, files, matched.weights, sides, indexes, quantised, folders)
    # Notes for the user.
    if METHODS[job.method].directions and any(len(t.shape) < 2 and t.combines for t in plan.targets):
        notes.append(Note(f"{job.method}: {ADDED_VECTORS}"))
    if job.dtype == "keep":
        notes += activation_notes((t.name for t in plan.targets if t.uses), base.packed)
    return plan.with_notes(*notes)


def _files(matched: Matches, forms: Mapping[str, NewWeight]) -> tuple[OutputFile, ...]:
    """Return an output file for every input file (same tensors, order and metadata, plus our entries)."""
    job, base, container = matched.inputs.resolved, matched.inputs.base, matched.inputs.container
    # The tensors of each file.
    by_file: dict[Path, list[OutputTensor]] = {path: [] for path in base.files}
    for path, target in outputs(matched, forms):
        by_file[path].append(target)
    container.check_tensors(t for targets in by_file.values() for t in targets)
    # Its header, with blanks for what is known after the merge: digests of the inputs, sums of codes.
    digests = blanks(base, [m.adapter.index for m in matched.adapters])
    by_merge = entries(job, base, matched.adapters, digests, blank=True)
    files = []
    coded = checksummed([*by_file.values()])
    for (path, targets), of_merge, changed in zip(by_file.items(), by_merge, coded, strict=True):
        others = other_entries(container, path)
        of_sums = checksum_entry([0] * len(changed)) if of_merge else {}
        header, alignment = container.header(path, targets, {**others, **of_merge, **of_sums})
        name = output_name(path, base) if base.path.is_dir() else ""
        files.append(OutputFile(name, header, _placed(targets, len(header), alignment), others, alignment))
    return tuple(files)


def outputs(
    matched: Matches, forms: Mapping[str, NewWeight] = MappingProxyType({})
) -> Iterator[tuple[Path, OutputTensor]]:
    """Yield (input file, output tensor); the tensor goes to the output of that file, its offset is not yet known.

    `forms`: weight → its quantised form in the output.
    """
    groups = _outputs(matched, forms)
    return _in_words(groups) if any(form.others for form in forms.values()) else chain.from_iterable(groups)


def _in_words(groups: Iterable[Sequence[tuple[Path, OutputTensor]]]) -> Iterator[tuple[Path, OutputTensor]]:
    """Yield the tensors of weights, last the ones that move others from multiples of their values' size."""
    last: list[tuple[Path, OutputTensor]] = []
    for group in groups:
        in_place = _fills_words([target for _, target in group])
        for path, target in group:
            if in_place or target.nbytes % CODES_ALIGNMENT == 0:
                yield path, target
            else:
                last.append((path, target))
    yield from sorted(last, key=lambda row: -ITEM_BYTES.get(row[1].dtype, 1))


def _fills_words(tensors: Iterable[OutputTensor]) -> bool:
    """Return whether tensors behind each other each begin at a multiple of their values' size, and so does what
    follows."""
    at = 0
    for tensor in tensors:
        if at % ITEM_BYTES.get(tensor.dtype, 1):
            return False
        at += tensor.nbytes
    return at % CODES_ALIGNMENT == 0


def _outputs(matched: Matches, forms: Mapping[str, NewWeight]) -> Iterator[Sequence[tuple[Path, OutputTensor]]]:
    """Yield as `outputs` does the tensors of each weight."""
    job, base, container = matched.inputs.job, matched.inputs.base, matched.inputs.container
    adapters, before = matched.adapters, matched.weights
    # What the adapters do to each weight.
    uses: dict[str, list[PatchPart]] = {}
    created: dict[str, tuple[Shape, str]] = {}
    separated = {key for change in adapters for key in change.separated}
    replaced = {key: Weight(info.shape, info) for change in adapters for key, info in change.replaced.items()}
    for change in adapters:
        created.update(change.created)
        for key, more in change.uses.items():
            uses.setdefault(key, []).extend(more)
    combination = Combination.of(job, [change.adapter for change in adapters], uses)
    dropped = base.packing_names if job.dtype != "keep" else frozenset()
    # Tensors of the base, with the scales that a quantised form adds.
    for key, info in base.tensors.items():
        if key in dropped or not container.holds(info, changed=key in uses):
            continue
        form, weight = forms.get(key), replaced.get(key, before[key])
        like = container.named(info) if form is None else info
        target = _target(combination, like, weight, uses, container.stored_as(info, weight, form))
        scales = [OutputTensor(t.name, stored_name(t), t.dtype, Weight(t.shape, t), 0, t.nbytes)
                  for t in (form.others if form else ())]  # fmt: skip
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
    scaled = packed is not None and packed.encoding.quantised and info.dtype not in QUANTISED_TYPES
    if scaled and weight.shape != info.shape:
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
