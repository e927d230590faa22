"""Runs `extract`: weight by weight, the difference of two checkpoints is formed, cut to a rank and stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import fsum, prod
from pathlib import Path
from typing import Any

import torch

from ...algorithms.lokr import LOKR
from ...disk.destination import check_output
from ...disk.draft import Heap
from ...dtypes import DTYPES, ITEM_BYTES, spoken
from ...engine.devices import device_bytes, places, threads
from ...engine.tensor_moves import FILE_DTYPES, TORCH_DTYPES
from ...engine.torch_state import undisturbed
from ...errors import AdapterAsBase, FitError, InputError, UsageError
from ...files.checkpoint import Index
from ...models.names import Names
from ...models.part_factors import Chosen
from ...paths import typed, with_ending
from ...planning.checkpoint_cache import CheckpointCache
from ...progress import Counting, Progress, unwatched
from ...text import Note, listed, plural
from ..combined_change import Storage, Wanted, decomposing, expect_finite, shared_out
from ..convert import entries_of, prefix_name
from ..copied_tensors import Made, kept, value_made
from ..decomposition.svd_memory import note
from ..dialects import DIALECTS, Dialect
from ..groups import Place
from ..job import AUTO, FACTORS, WHOLE, AdapterJob, form
from ..metadata.sizes import PlannedLayer, Tensor, planned_size
from ..module_tensors import Kept, Layer
from ..output_file import CONTENTS, drafted, expect_room, unread
from ..parallel import side_by_side
from ..peft.completion import as_table, completed, with_biases
from ..peft.config import config, differing_ranks, expect_one, is_table, task_type
from ..pipeline import Facts, Outcome, Run, idle_alpha, planned
from ..rank_rules import COUNT
from ..report import AdapterReport
from .difference import Side, difference, differences
from .extract_job import SKIP, Extraction, make_extraction
from .extract_modules import Batch, Extractor, batches, measured, nbytes
from .extraction_proof import Claim, prove
from .pairs import Pair, Pairs, paired


@dataclass(frozen=True)
class Opened:
    """Both checkpoints and their parameters side by side."""

    task: Extraction
    base: Index
    tuned: Index
    pairs: Pairs
    to: Dialect
    dtype: torch.dtype
    model: str = ""  # the stem of the architecture's file; "" where it is unknown


def opened(task: Extraction, cache: CheckpointCache) -> Opened:
    """Return both checkpoints, from headers; errors as for `merge`, and where they are not of one model."""
    base, names = _model(task, task.base, cache)
    tuned, theirs = _model(task, task.tuned, cache)
    to = task.to or _usual(names, task.job)
    output = task.job.output
    if task.to is None and not to.folder and (right := with_ending(output)) != output:  # known from the headers alone
        raise UsageError("the output is a file, and its name has no ending", str(output), f"name it {right.name}")
    check_output(output, [*base.files, *tuned.files], overwrite=task.job.inputs.overwrite, folder=to.folder,
                 contents=CONTENTS)  # fmt: skip
    lenient = task.job.inputs.unmatched != "error"
    chosen = Chosen.of(task.job.include, task.job.exclude, names)
    pairs = paired((base, names), (tuned, theirs), to, chosen, lenient=lenient)
    if not pairs.pairs and (task.job.include or task.job.exclude):
        raise UsageError("no weight is left to compare", "--include and --exclude", "choose other parts of the model")
    if not pairs.pairs:
        where, fix = f"{task.base} and {task.tuned}", "use two checkpoints of one model"
        raise FitError("no weight is left to compare", where, fix)
    if to.folder:
        expect_one((p.place.component for p in pairs.pairs), "the base has")
    notes = dict.fromkeys((*base.notes, *tuned.notes, *pairs.notes))
    pairs = replace(pairs, notes=tuple(notes))
    layers = ((p.name, p.place.component, [piece.key for piece in p.place.view.row_slices]) for p in pairs.pairs)
    job = replace(task.job, rules=task.job.rules.on(names, layers))
    return Opened(replace(task, to=to, job=job), base, tuned, pairs, to, _dtype(task, tuned, pairs.pairs),
                  names.known.file.stem if names.known else "")  # fmt: skip


def prepared(
    base: str | Path, tuned: str | Path, output: str | Path | None, options: Mapping[str, Any], cache: CheckpointCache
) -> Extraction:
    """Return what `make_extraction` does; the output's name is that of a file or folder as the headers of the base say
    where no format is chosen."""
    task = make_extraction(base, tuned, output, options)
    if output is None or task.to is not None:
        return task
    return task.written_as(_usual(_model(task, task.base, cache)[1], task.job), output)


def _model(task: Extraction, path: Path, cache: CheckpointCache) -> tuple[Index, Names]:
    """Return one of the two checkpoints; InputError for an adapter, whose change needs no extraction."""
    try:
        return cache.base(path, task.job.inputs.map)
    except AdapterAsBase as e:
        fix = f"merge it first: lora-merge BASE {typed([str(path)])}"
        raise InputError("extract takes two checkpoints, and this is an adapter", e.where, fix) from e


def _usual(names: Names, job: AdapterJob) -> Dialect:
    """Return the dialect of `--format auto`: kohya's for models of images, for a file and for what a folder of PEFT has
    no place for, else that folder."""
    draws = any((p.role == "denoiser" and p.label != "model") or p.kind for p in names.parts)
    file = job.output.suffix == ".safetensors" or job.algorithm in (WHOLE, LOKR.name)
    return DIALECTS["kohya" if draws or file else "peft"]


def _dtype(task: Extraction, tuned: Index, pairs: tuple[Pair, ...]) -> torch.dtype:
    """Return the dtype of the output: as asked, or the one that most numbers of the tuned checkpoint have."""
    asked = task.job.inputs.dtype
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
    task: Extraction, progress: Progress = unwatched, cache: CheckpointCache | None = None
) -> AdapterReport:  # fmt: skip
    """Run an extraction: the output appears under its name when it is complete and verified, or not at all.

    `cache`: holds the checkpoints that are open already."""
    cache = cache or CheckpointCache()
    with ExitStack() as stack:
        this = stack.enter_context(Run(task.job, progress))
        found = opened(task, cache)
        task, job = found.task, task.job
        reader = this.reading((found.base, found.tuned))
        sides = Side(found.base, reader), Side(found.tuned, reader)
        heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
        made, heads, notes = _made(found, sides, heap, this.counted)
        made, whole = _completed(found, made, heads, sides, heap)
        entries = entries_of(found.to, whole)
        layers = {prefix_name(found.to, m.place): m.layer for m in made}
        before, there = {"task_type": task_type(found.base.config)}, [p.place for p in found.pairs.pairs]
        own = config(whole, before, there) if found.to.folder else None
        outcome = Outcome(job, [found.tuned], layers, entries, own, found.model)
        notes += (*(unread(e.name for e in entries) if own is None else differing_ranks(own)),)
        facts = _facts(found, len(made), (*found.pairs.notes, *notes))
        rows = [(e.name, e.dtype, e.shape) for e in entries]
        expect_room(job, rows)
        draft = stack.enter_context(drafted(job, reader, rows, [found.tuned], folder=found.to.folder))
        return outcome.finish(
            reader, draft, facts, lambda part: prove(task, found.pairs, sides, Claim(part, made, cache), this.counted),
            this,
        )  # fmt: skip


def _facts(found: Opened, layers: int, notes: tuple[Note, ...]) -> Facts:
    rules, algorithm = found.task.job.rules, found.task.job.algorithm
    tasks = [(p.name, p.place.view.matrix, rules.of_layer(p.name, kernel=p.place.kernel)) for p in found.pairs.pairs
             if algorithm in (FACTORS, AUTO) and not (p.place.vector or p.fresh)]  # fmt: skip
    notes = (*notes, *note(tasks, found.task.job.inputs.max_memory), *idle_alpha(found.task.job, stored=found.to.alpha))
    return Facts(_coverage(found, layers), spoken(FILE_DTYPES[found.dtype]), notes, found.to.name, _weights(found))


def _weights(found: Opened) -> int:
    """Return the bytes of both checkpoints that are compared; a rule for all layers together reads them twice."""
    return sum(p.nbytes for p in found.pairs.pairs) * (1 + found.task.job.rules.together)


def _completed(
    found: Opened, made: Sequence[Kept], heads: Sequence[Kept], sides: tuple[Side, Side], heap: Heap
) -> tuple[list[Kept], list[Kept]]:  # fmt: skip
    """Return the changed modules with their biases as the dialect holds them, and these with the heads and with what it
    asks for of parameters that did not change."""
    own = {p.place.label: p for p in found.pairs.pairs}
    places = [p.place for p in own.values()]

    def value(place: Place) -> torch.Tensor:
        return sides[1].rows(own[place.label].tuned).to(found.dtype)

    def renewed(place: Place) -> Made:
        changed = difference(own[place.label], *sides, found.task.job.compute_dtype)
        assert changed is not None, "its change was made"
        return value_made(place, changed.value, changed.change, found.dtype)

    own_made = with_biases(made, places, found.to, renewed, lambda one: kept(one, heap))
    return own_made, completed([*own_made, *heads], places, found.to, value, lambda one: kept(one, heap))


def _head(found: Opened, pair: Pair, made: Made) -> Iterator[Made]:
    """Yield the factors or the value of the embeddings once more for the head that shares their weight: PEFT adds
    each to one layer."""
    head, view = found.pairs.head, pair.before or pair.place.view
    if head is None or not found.to.folder or not (made.layer.rank or pair.fresh):
        return
    if view.row_slices[0].key == head.info.name:
        yield Made(made.place._replace(module=head.head), made.tensors, made.layer)


def _coverage(found: Opened, layers: int) -> dict[str, Any]:
    return {
        found.tuned.path.name: {"modules": len(found.pairs.pairs), "layers": layers, "strength": 1.0, "ignored": {}}
    }


def _made(
    found: Opened, sides: tuple[Side, Side], heap: Heap, begin: Counting
) -> tuple[list[Kept], list[Kept], list[Note]]:
    """Return the tensors of every parameter that changed, those of a head that shares one of them, and notes."""
    task = found.task
    at = places(task.job.inputs.device, "F32")[0]
    extractor = Extractor(task, Storage(form(task.job.algorithm, found.to), found.dtype, 0.0, at), found.to.endings)
    made, heads, skipped, equal = [], [], [], 0
    head, said = _head_apart(found, sides)
    notes = _changed_nameless(found, sides) + said
    rules, pairs = task.job.rules, tuple(p for p in found.pairs.pairs if p is not head)
    bound = task.job.inputs.max_memory // 2  # the rest: torch, and what waits
    told = begin("make", _weights(found))
    ranks = shared_out(rules.linear, _matrices(found, sides, told), found.dtype.itemsize, 0.0) if rules.together else {}

    def work(batch: Batch) -> list[Made | Pair | None]:
        """Return the tensors; the pair where they are not to be written, None where nothing changed."""
        changed = differences(batch, *sides, task.job.compute_dtype)
        some = [c for c in changed if c is not None]
        with decomposing(batch[0].name):
            made = (
                [extractor.made(c, ranks.get(c.pair.name)) for c in some]
                if ranks
                else extractor.all_made(some, alone=len(batch) == 1)
            )
        own = iter([measured(one, c) for one, c in zip(made, some, strict=True)])
        return [None if c is None else next(own) or c.pair for c in changed]

    room = 0 if at.device.type == "cpu" else device_bytes(task.job.inputs.max_vram) // threads([at])
    tasks = [*batches(pairs, room, bound)]
    for batch, results in zip(tasks, side_by_side(tasks, work, nbytes, bound, at), strict=True):
        for pair, one in zip(batch, results, strict=True):
            if one is None:
                equal += 1
            elif isinstance(one, Pair):
                skipped.append(pair.name)
            else:
                expect_finite(one.tensors.values(), pair.name)
                made.append(kept(as_table(one, found.to, table=is_table(one.place)), heap))
                heads += [kept(head, heap) for head in _head(found, pair, one)]
            told(pair.nbytes)
    order = {id(pair.place): number for number, pair in enumerate(pairs)}
    made.sort(key=lambda one: order[id(one.place)])
    if not made:
        raise InputError("nothing to extract: no weight that is compared differs",
                         f"{found.base.path} and {found.tuned.path}", "give the tuned checkpoint second")  # fmt: skip
    notes += _above_noise([one.layer for one in made])
    notes += [Note(f"{plural(equal, 'parameter is', 'parameters are')} equal in both")] if equal else []
    names = ", ".join(skipped[:3])
    notes += [Note(f"not written: {plural(len(skipped), 'changed vector')}: {names}")] if skipped else []
    return made, heads, notes


def _above_noise(layers: Sequence[Layer]) -> list[Note]:
    """Return the note about the energy that rounding errors do not explain, where these are known."""
    known = [(one.squares, one.noise) for one in layers if one.noise is not None]
    whole = fsum(squares for squares, _ in known)
    above = 1 - fsum(squares * share**2 for squares, share in known) / (whole or 1.0)
    return [Note(f"both checkpoints are in 16 bits: {100 * max(0.0, above):.4g}% of the energy is above the noise of "
                 f"rounding")] if known else []  # fmt: skip


def _changed_nameless(found: Opened, sides: tuple[Side, Side]) -> list[Note]:
    """Return the note about weights that changed and have no name in the dialect; FitError unless --unmatched skip."""
    lost = [pair.name for pair in found.pairs.nameless if difference(pair, *sides) is not None]
    if not lost:
        return []
    what = f"{plural(len(lost), 'changed weight has', 'changed weights have')} no name in {found.to.name}"
    if found.task.job.inputs.unmatched == "error":
        raise FitError(what, listed(lost, 3), "choose another --format, or drop them with --unmatched skip")
    return [Note(f"{what}, not written: {listed(lost, 3)}")]


def _head_apart(found: Opened, sides: tuple[Side, Side]) -> tuple[Pair | None, list[Note]]:
    """Return the head that the base shares with its embeddings where it cannot be written, and the note on it.

    Only a folder of PEFT has a place for it. FitError where the tuned checkpoint has another weight there than its
    embeddings, unless --unmatched skip."""
    head = next((p for p in found.pairs.pairs if p.head and not found.to.folder), None)
    if head is None:
        return None, []
    table = next((p for p in found.pairs.pairs if not p.head and p.place.view == head.place.view), head)
    if torch.equal(sides[1].rows(head.tuned), sides[1].rows(table.tuned)) and table is not head:
        return head, []
    if difference(head, *sides) is None:
        return head, []
    what = "the head has a weight of its own in the tuned checkpoint, and that of the embeddings in the base"
    if found.task.job.inputs.unmatched == "error":
        raise FitError(what, head.name, "write a folder of PEFT with --format peft -o FOLDER, or drop it with "
                       "--unmatched skip")  # fmt: skip
    return head, [Note(f"{what}; it is not written: {head.name}")]


def _matrices(found: Opened, sides: tuple[Side, Side], told: Callable[[int], object]) -> Iterator[tuple[str, Wanted]]:
    """Yield the difference of every matrix, for a rule that looks at all of them before one is stored."""
    for pair in found.pairs.pairs:
        matrix = not (pair.place.vector or pair.fresh)
        changed = difference(pair, *sides, found.task.job.compute_dtype) if matrix else None
        if changed is not None:
            yield pair.name, Wanted(None, None, changed.change, 0, known=changed.scanned[0])
        told(pair.nbytes)


def plan(task: Extraction, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do at most, from headers alone: a parameter that did not change is not written."""
    found = opened(task, cache or CheckpointCache())
    layers: dict[str, dict[str, Any]] = {}
    own, kind, endings = list[PlannedLayer](), FILE_DTYPES[found.dtype], found.to.endings
    algorithm = task.job.algorithm
    way = FACTORS if algorithm == AUTO else algorithm
    for pair in (p for p in found.pairs.pairs if not p.place.vector or task.others != SKIP):
        out, cols = pair.place.view.matrix
        rule = task.job.rules.of_layer(pair.name, kernel=pair.place.kernel)
        whole = pair.place.vector or algorithm == WHOLE or pair.fresh
        most = min(out, cols, rule.ceiling or min(out, cols))  # what the disk has to hold, where numbers decide
        layers[prefix_name(found.to, pair.place)] = {
            "algorithm": WHOLE if whole else way,
            "rank": most if rule.name == COUNT and not whole else 0,
        }
        slots = {"diff": (out, cols)} if whole else {"down": (most, cols), "up": (out, most)}
        where = pair.place
        named: list[Tensor] = [(found.to.key(where.prefix, where.module, endings.get(slot, slot)), kind, shape)
                 for slot, shape in slots.items()]  # fmt: skip
        if found.to.alpha and not whole:
            named.append((found.to.key(where.prefix, where.module, ".alpha"), "F32", ()))
        own.append(PlannedLayer(named, 0 if whole else most))
    size = planned_size(own, task.job.rules.linear)
    return planned(task.job, _facts(found, len(layers), found.pairs.notes), layers, size)
