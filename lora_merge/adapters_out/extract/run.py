"""Runs `extract`: weight by weight, the difference of two checkpoints is formed, cut to a rank and stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, prod
from pathlib import Path
from typing import Any

import torch

from ...command import Request
from ...disk.destination import check_output
from ...disk.draft import Heap
from ...disk.hashes import hash_once
from ...dtypes import DTYPES, ITEM_BYTES, spoken
from ...engine.devices import device_bytes, places, threads
from ...engine.tensor_moves import FILE_DTYPES, TORCH_DTYPES
from ...engine.torch_state import undisturbed
from ...errors import AdapterAsBase, FitError, InputError, MergeError, UsageError
from ...files.checkpoint import Index
from ...models.architectures import Architecture
from ...models.names import Names
from ...models.part_factors import ParameterChoice
from ...paths import is_folder, names_folder, nearest, output_file, typed, with_ending
from ...planning.checkpoint_cache import CheckpointCache
from ...planning.recipe import KEY, parsed
from ...progress import Counting, Progress, unwatched
from ...sources.inputs import origin
from ...text import Note, listed, plural, shown
from ..delta import Storage, rounded_value
from ..dialects import DIALECTS, Dialect, stated_dialect
from ..form import Form, form_of_difference, memory_note, planned_difference
from ..groups import OutputModule, Place
from ..job import AUTO, AUTO_FORMAT, FACTORS, FILE, OTHERS, SKIP, AdapterJob, adapter_job, algorithm_in, one_rank
from ..metadata import planned_size
from ..module_tensors import Layer, PlannedModule, StoredModule
from ..output_file import CONTENTS, drafted, expect_room, unread
from ..output_modules import ModuleGroups, entries_of, prefix_name, stored_modules, weights_of
from ..peft.completion import completed, with_biases
from ..peft.config import config, differing_ranks, expect_one, task_type
from ..pipeline import AdapterRun, Outcome, RunFacts, idle_alpha, planned
from ..rank_rules import SAME
from ..report import AdapterReport
from .extract_modules import Extractor, Side, batches, difference
from .extraction_proof import ExtractionClaims, prove_extraction
from .pairs import Pair, Pairs, paired


@dataclass(frozen=True)
class Extraction:
    """Both checkpoints, opened, and their parameters side by side."""

    job: AdapterJob
    base: Index
    tuned: Index
    pairs: Pairs
    to: Dialect
    dtype: torch.dtype
    architecture: Architecture | None  # of the base, if it is known


def make_job(request: Request, cache: CheckpointCache | None = None) -> AdapterJob:
    """Return the job of `extract` of one adapter, the tuned checkpoint; UsageError for an option or a value that is
    wrong.

    `cache`: the checkpoints that are open. With one, headers of the base decide the format if the user chooses none and
    `output` may be the name of a file or of a folder.
    """
    if request.base is None:
        raise UsageError("extract needs a base", "base", "name the checkpoint before the training")
    stated, output, rows = request.stated, request.output, request.command.options
    of_extract = {name: stated.pop(name) for name in ("others", "format", "factor") if name in stated}
    name, others, factor = (of_extract.get(option, rows[option].default) for option in ("format", "others", "factor"))
    to = None if str(name).lower() == AUTO_FORMAT else stated_dialect(name, "--format")
    if to is not None and not to.any_model:
        known = ", ".join(row.name for row in DIALECTS.values() if row.any_model)
        raise UsageError(f"{shown(name)!r} is no format of a difference", "--format", f"use one of {known}")
    if others not in OTHERS:
        raise UsageError(f"biases and norms cannot be treated as {shown(others)!r}", "--others",
                         f"use one of {', '.join(OTHERS)}")  # fmt: skip
    if not isinstance(factor, int) or not (factor == -1 or factor > 0):
        raise UsageError(f"{shown(factor)!r} cannot be the factor", "--factor", "use -1, or 1 and more")
    job = adapter_job(request._replace(options=stated))
    if job.rules.has(SAME):
        raise UsageError("a checkpoint has no rank to keep", "`--rank same`", "give a number or energy:x")
    if cache is not None:
        with suppress(InputError):  # the plan raises it
            _expect_order(job, cache)
    changed = tuple((n, v) for n, v in sorted(of_extract.items()) if v != rows[n].default)
    name = to.name if to else AUTO_FORMAT
    job = replace(job, format=name, options=(*job.options, *changed), others=others, factor=factor)
    if output is None:
        return job.changed(output=job.output.parent / _difference_name(job, to))
    if to is not None:
        return _in_dialect(job, to, output)
    if cache is not None and (names_folder(output) or with_ending(job.output) != job.output):
        with suppress(MergeError):  # the plan raises it
            return _in_dialect(job, _usual(_model(job, _base(job), cache)[1], job), output)
    return job


def _expect_order(job: AdapterJob, cache: CheckpointCache) -> None:
    """Raise UsageError if the base of a job was merged from its tuned checkpoint, by the hash in its recipe."""
    merged, base = cache.index(_base(job), adapter=False), cache.index(job.adapters[0].path, adapter=False)
    former = (parsed(merged.metadata.get(KEY, "")) or {}).get("base")
    files = former.get("files") if isinstance(former, Mapping) else None
    sizes = [base.headers[file].state.size for file in base.files]
    if not isinstance(files, list) or [f.get("size") for f in files if isinstance(f, Mapping)] != sizes:
        return
    if origin(base.path) is None and hash_once(base.files[0]) == files[0].get("sha256"):
        right = typed(["lora-merge", "extract", *map(nearest, map(str, (base.path, merged.path)))])
        fix = f"write `{right}`; at strength -1 that adapter takes the merge back"
        raise UsageError(f"{merged.path.name} was merged from {base.path.name}", str(merged.path), fix)


def _in_dialect(job: AdapterJob, to: Dialect, output: str | Path) -> AdapterJob:
    """Return the extraction in a dialect, with the output that the user names for it: in a folder, a file has the
    default name."""
    job = replace(job, format=to.name)
    if to.folder:
        return job
    inside = names_folder(output)
    return job.changed(output=job.output / _difference_name(job, to) if inside else output_file(output))


def _difference_name(job: AdapterJob, to: Dialect | None) -> str:
    """Return the default name of an extracted adapter."""
    pair = (job.adapters[0].path, job.base or Path())
    name = "-minus-".join(p.name if is_folder(p) else p.stem for p in pair)
    return name if to and to.folder else f"{name}{FILE}"


def opened(job: AdapterJob, cache: CheckpointCache) -> Extraction:
    """Return both checkpoints, from headers; errors as for `merge`, and where they are not of one model."""
    # Step 1: both checkpoints, and the dialect of the output.
    base, names = _model(job, _base(job), cache)
    tuned, tuned_names = _model(job, job.adapters[0].path, cache)
    to = one_rank(job, _usual(names, job) if job.format == AUTO_FORMAT else DIALECTS[job.format])
    output = job.output
    if job.format == AUTO_FORMAT and not to.folder and (right := with_ending(output)) != output:  # as headers show
        raise UsageError("the output is a file, and its name has no ending", str(output), f"name it {right.name}")
    check_output(output, [*base.files, *tuned.files], overwrite=job.inputs.overwrite, folder=to.folder,
                 contents=CONTENTS)  # fmt: skip
    # Step 2: the parameters of both, in pairs.
    lenient = job.inputs.unmatched != "error"
    chosen = ParameterChoice.of(job.include, job.exclude, names)
    pairs = paired((base, names), (tuned, tuned_names), to, chosen, lenient=lenient)
    if not pairs.pairs and (job.include or job.exclude):
        raise UsageError("no weight is left to compare", "--include and --exclude", "choose other parts of the model")
    if not pairs.pairs:
        where, fix = f"{base.path} and {tuned.path}", "use two checkpoints of one model"
        raise FitError("no weight is left to compare", where, fix)
    if to.folder:
        expect_one((p.place.component for p in pairs.pairs), "the base has", job.output)
    notes = dict.fromkeys((*base.notes, *tuned.notes, *pairs.notes))
    pairs = replace(pairs, notes=tuple(notes))
    # Step 3: the rule of each layer.
    layers = ((p.name, p.place.component, p.place.keys) for p in pairs.pairs)
    job = replace(job, rules=job.rules.on(names, layers))
    return Extraction(job, base, tuned, pairs, to, _dtype(job, tuned, pairs.pairs),
                      names.known)  # fmt: skip


def _base(job: AdapterJob) -> Path:
    """Return the path of the checkpoint before the training."""
    assert job.base is not None, "the command requires it"
    return job.base


def _model(job: AdapterJob, path: Path, cache: CheckpointCache) -> tuple[Index, Names]:
    """Return one of the two checkpoints; InputError for an adapter, whose change needs no extraction."""
    try:
        return cache.base(path, job.inputs.map, partners=[p for p in (_base(job), job.adapters[0].path) if p != path])
    except AdapterAsBase as e:
        fix = f"merge it first: `lora-merge BASE {typed([str(path)])}`"
        raise InputError("extract takes two checkpoints, and this is an adapter", e.where, fix) from e


def _usual(names: Names, job: AdapterJob) -> Dialect:
    """Return the dialect of `--format auto`: kohya's for models of images, for a file and for what a folder of PEFT has
    no place for, else that folder."""
    draws = any((p.role == "denoiser" and p.label != "model") or p.kind for p in names.parts)
    file = job.output.suffix == ".safetensors" or job.algorithm not in (AUTO, FACTORS)
    return DIALECTS["kohya" if draws or file else "peft"]


def _dtype(job: AdapterJob, tuned: Index, pairs: tuple[Pair, ...]) -> torch.dtype:
    """Return the dtype of the output: as asked, or the one that most values of the tuned checkpoint have."""
    asked = job.inputs.dtype
    if asked != "keep":
        if DTYPES.get(asked) not in TORCH_DTYPES:
            raise UsageError(f"{asked} cannot hold an adapter", "--dtype", "use fp32, fp16 or bf16")
        return TORCH_DTYPES[DTYPES[asked]]
    count: Counter[str] = Counter()
    for key in dict.fromkeys(piece.key for pair in pairs for piece in pair.tuned.row_slices):
        info = tuned.tensors[key]
        plain = key not in tuned.packed and ITEM_BYTES[info.dtype] > 1
        count[info.dtype if plain else "F16"] += prod(info.shape)
    return TORCH_DTYPES[count.most_common(1)[0][0]]


@undisturbed()
def run(
    job: AdapterJob, progress: Progress = unwatched, cache: CheckpointCache | None = None
) -> AdapterReport:  # fmt: skip
    """Run an extraction: the output appears under its name when it is complete and verified, or not at all.

    `cache`: the checkpoints that are open already."""
    cache = cache or CheckpointCache()
    with ExitStack() as stack:
        # Step 1: both checkpoints are opened.
        this = stack.enter_context(AdapterRun(job, progress))
        extraction = opened(job, cache)
        job, to = extraction.job, extraction.to
        reader = this.reading((extraction.base, extraction.tuned))
        sides = Side(extraction.base, reader), Side(extraction.tuned, reader)
        # Step 2: differences become modules, which wait in a temporary file.
        heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
        modules, heads, notes = _extracted_modules(extraction, sides, heap, this.counted)
        modules, whole = _completed(extraction, modules, heads, sides, heap)
        # Step 3: the draft, the header, the proof and the report.
        entries = entries_of(to, whole)
        layers = {prefix_name(to, m.place): m.layer for m in modules}
        before, all_places = {"task_type": task_type(extraction.base.config)}, [p.place for p in extraction.pairs.pairs]
        folder_config = config(whole, before, all_places) if to.folder else None
        outcome = Outcome(job, [extraction.tuned], layers, entries, folder_config, extraction.architecture)
        notes += (*(unread(e.name for e in entries) if folder_config is None else differing_ranks(folder_config)),)
        facts = _facts(extraction, len(modules), (*extraction.pairs.notes, *notes))
        rows = [(e.name, e.dtype, e.shape) for e in entries]
        expect_room(job, rows)
        draft = stack.enter_context(drafted(job, reader, rows, [extraction.tuned], folder=to.folder))
        claim = ExtractionClaims(job, extraction.pairs, (extraction.base, extraction.tuned), modules, cache)
        return outcome.finish(reader, draft, facts, partial(prove_extraction, claim), this)


def _facts(extraction: Extraction, layers: int, notes: tuple[Note, ...]) -> RunFacts:
    job, pairs = extraction.job, extraction.pairs.pairs
    forms = ((p.name, p.place.view.matrix, _form(extraction, p)) for p in pairs)
    notes = (*notes, *memory_note(forms, job.inputs.max_memory), *idle_alpha(job, stored=extraction.to.alpha))
    dtype = spoken(FILE_DTYPES[extraction.dtype])
    weights = weights_of(job, [OutputModule(pair.place, ()) for pair in pairs])
    return RunFacts(_coverage(extraction, layers), dtype, notes, extraction.to.name, weights)


def _form(extraction: Extraction, pair: Pair) -> Form:
    return form_of_difference(extraction.job, extraction.to, pair.place, fresh=pair.fresh)


def _completed(
    extraction: Extraction, modules: Sequence[StoredModule], heads: Sequence[StoredModule], sides: tuple[Side, Side],
    heap: Heap,
) -> tuple[list[StoredModule], list[StoredModule]]:  # fmt: skip
    """Return the changed modules with their biases as the dialect holds them, and these with the heads and with what it
    asks for of parameters that did not change."""
    pair_by_label = {p.place.label: p for p in extraction.pairs.pairs}
    places = [p.place for p in pair_by_label.values()]

    def value(place: Place) -> torch.Tensor:
        return sides[1].rows(pair_by_label[place.label].tuned).to(extraction.dtype)

    def renewed(place: Place) -> StoredModule:
        changed = difference(pair_by_label[place.label], *sides, extraction.job.compute_dtype)
        assert changed is not None, "its change was made"
        return rounded_value(place, changed.value, changed.change, extraction.dtype)

    changed_modules = with_biases(modules, places, extraction.to, renewed, heap)
    return changed_modules, completed([*changed_modules, *heads], places, extraction.to, value, heap)


def _coverage(extraction: Extraction, layers: int) -> dict[str, Any]:
    return {
        extraction.tuned.path.name: {
            "base": extraction.base.path.name,
            "modules": len(extraction.pairs.pairs),
            "layers": layers,
            "strength": 1.0,
            "ignored": {},
        }
    }


def _extracted_modules(
    extraction: Extraction, sides: tuple[Side, Side], heap: Heap, begin: Counting
) -> tuple[list[StoredModule], list[StoredModule], list[Note]]:
    """Return the tensors of every parameter that changed, those of a head that shares one of them, and notes."""
    # Step 1: what is compared, and what is made together.
    job, to = extraction.job, extraction.to
    head, head_notes = _head_apart(extraction, sides)
    notes = _changed_nameless(extraction, sides) + head_notes
    pairs = {id(pair.place): pair for pair in extraction.pairs.pairs if pair is not head}
    at = places(job.inputs.device, "F32")[0]
    room = 0 if at.device.type == "cpu" else device_bytes(job.inputs.max_vram) // threads([at])
    groups = [
        [OutputModule(pair.place, ()) for pair in batch]
        for batch in batches([*pairs.values()], room, job.inputs.max_memory // 2)
    ]
    chosen = [f"--{name}" for name in ("include", "exclude") if getattr(job, name)]
    nothing = InputError("nothing to extract: all compared weights are equal",
                         f"{extraction.base.path} and {extraction.tuned.path}",
                         f"leave {' and '.join(chosen)} out, to compare all" if chosen
                         else "give the base and the tuned checkpoint")  # fmt: skip
    # Step 2: the modules that changed, in the order of the base.
    storage = Storage(algorithm_in(job.algorithm, to), extraction.dtype, 0.0, at)
    extractor = Extractor(job, to, storage, sides, pairs, extraction.pairs.head if to.folder else None)
    modules, _, zeros, *_ = stored_modules(ModuleGroups(job, groups, nothing, at), lambda: extractor, heap, begin)
    order = {identity: number for number, identity in enumerate(pairs)}
    changed = sorted((m for m in modules if id(m.place) in order), key=lambda m: order[id(m.place)])
    heads = [m for m in modules if id(m.place) not in order]
    # Step 3: what the report says of the others.
    notes += _above_noise([module.layer for module in changed])
    skipped = [place.label for place in zeros if id(place) in extractor.skipped]
    equal = len(zeros) - len(skipped)
    same = plural(equal, "weight is", "weights are")
    notes += [Note(f"{same} the same in both checkpoints: no change to store")] if equal else []
    names = ", ".join(skipped[:3])
    notes += [Note(f"not written: {plural(len(skipped), 'changed vector')}: {names}")] if skipped else []
    return changed, heads, notes


def _above_noise(layers: Sequence[Layer]) -> list[Note]:
    """Return the note about the energy that rounding errors do not explain, where these are known."""
    known = [(layer.squares, layer.noise) for layer in layers if layer.noise is not None]
    whole = fsum(squares for squares, _ in known)
    above = 1 - fsum(squares * share**2 for squares, share in known) / (whole or 1.0)
    share = f"{100 * max(0.0, above):.4g} %"
    text = f"both checkpoints are 16-bit: {share} of the difference is a change, the rest rounding noise"
    return [Note(text)] * (bool(known) and share != "100 %")


def _changed_nameless(extraction: Extraction, sides: tuple[Side, Side]) -> list[Note]:
    """Return the note about weights that changed and have no name in the dialect; FitError unless --unmatched skip."""
    lost = [pair.name for pair in extraction.pairs.nameless if difference(pair, *sides) is not None]
    if not lost:
        return []
    what = f"{plural(len(lost), 'changed weight has', 'changed weights have')} no name in {extraction.to.name}"
    if extraction.job.inputs.unmatched == "error":
        raise FitError(what, listed(lost, 3), "choose another --format, or drop them with `--unmatched skip`")
    return [Note(f"{what}, not written: {listed(lost, 3)}")]


def _head_apart(extraction: Extraction, sides: tuple[Side, Side]) -> tuple[Pair | None, list[Note]]:
    """Return the head that the base shares with its embeddings where it cannot be written, and the note on it.

    Only a folder of PEFT has a place for it. FitError where the tuned checkpoint has another weight there than its
    embeddings, unless --unmatched skip."""
    head = next((p for p in extraction.pairs.pairs if p.head and not extraction.to.folder), None)
    if head is None:
        return None, []
    table = next((p for p in extraction.pairs.pairs if not p.head and p.place.view == head.place.view), head)
    if torch.equal(sides[1].rows(head.tuned), sides[1].rows(table.tuned)) and table is not head:
        return head, []
    if difference(head, *sides) is None:
        return head, []
    what = "the head has a weight of its own in the tuned checkpoint, and that of the embeddings in the base"
    if extraction.job.inputs.unmatched == "error":
        raise FitError(what, head.name, "write a PEFT folder with `--format peft -o FOLDER`, or drop it with "
                       "`--unmatched skip`")  # fmt: skip
    return head, [Note(f"{what}; it is not written: {head.name}")]


def plan(job: AdapterJob, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do at most, from headers alone: a parameter that did not change is not written."""
    extraction = opened(job, cache or CheckpointCache())
    job, to, dtype = extraction.job, extraction.to, FILE_DTYPES[extraction.dtype]
    facts, modules = dict[str, dict[str, Any]](), list[PlannedModule]()
    for pair in (p for p in extraction.pairs.pairs if not p.place.vector or job.others != SKIP):
        form = _form(extraction, pair)
        facts[prefix_name(to, pair.place)] = form.facts
        modules.append(planned_difference(pair.place, form, to, dtype))
    size = planned_size(((module.rank, module.rows(to)) for module in modules), job.rules.linear)
    return planned(job, _facts(extraction, len(modules), extraction.pairs.notes), facts, size)
