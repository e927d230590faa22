"""Runs `convert`: an adapter in another dialect, algorithm, dtype or α; and the proof that it means the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..adapter_options import KEEP
from ..algorithms import ALGORITHMS
from ..disk.destination import check_output
from ..disk.draft import Draft, Heap
from ..disk.reader import Reader
from ..dtypes import spoken
from ..engine.torch_preload import load_library
from ..errors import FitError, UsageError
from ..files.folder_layouts import PEFT
from ..matching.formula import ALPHA
from ..models.blocks import network_of
from ..models.names import Names
from ..options import pairs, shown
from ..paths import is_folder, names_folder, output_file
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Counting, Progress, unwatched
from ..text import Note
from .adapter_dialect import heads, in_memory, own_dialect, own_places
from .convert_job import Conversion, Opened, Writing, bundled, weight_of
from .copy_factors import all_factors, claimed, proven, renamed
from .decomposition.svd_memory import note
from .dialects import DIALECTS, OF_INPUT, Dialect, dialect, names
from .form import expect_held, kept, planned_layer, with_demands
from .groups import Filled, Place, filled, is_plain, places
from .job import CHOICE, FACTORS, STORED_AS, WHOLE, AdapterJob, make_adapter_job
from .metadata.sizes import PlannedLayer, planned_size, tensors_of
from .module_tensors import Kept
from .output_file import CONTENTS, Entry, drafted, expect_room, text_of, unique, unread
from .peft.config import FLAG, config, differing_ranks, expect_one, task_type
from .pipeline import Facts, Outcome, Run, coverage, idle_alpha, left_out, model_of, planned
from .planned_layers import known_rank
from .rank_rules import COUNT, EXACT, NO_NOISE, NOISE, RankRules, Rule
from .report import AdapterReport
from .sources import Sources, chosen_of, open_sources
from .without_base import NOWHERE, as_named, without_base

RANKS: Final[tuple[str, ...]] = ("rank", "conv_rank", "max_rank", "rank_for")
OWN: Final = ("to", "algorithm", "alpha", *CHOICE, *RANKS)
"""The options of this command alone."""


def _writes_file(to: Dialect, adapter: Path) -> bool:
    """Return whether a file is written, and no folder of PEFT."""
    return not is_folder(adapter) if to.name == KEEP else not to.folder


def make_conversion(
    adapter: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any]
) -> Conversion:
    """Return the job of `convert`; UsageError for an option or a value that is wrong."""
    given = {name: value for name, value in options.items() if value is not None}
    to, algorithm = given.pop("to", KEEP), given.pop("algorithm", KEEP)
    ranks: dict[str, Any] = {name: given.pop(name) for name in RANKS if name in given}
    found = dialect(to) if isinstance(to, str) else None
    if found is None:
        raise UsageError(f"the format {shown(to)!r} does not exist", "--to", f"use one of {', '.join(names())}")
    if algorithm not in (KEEP, *STORED_AS):
        raise UsageError(f"layers cannot be stored as {shown(algorithm)!r}", "--algorithm",
                         f"use one of {', '.join((KEEP, *STORED_AS))}")  # fmt: skip
    made = make_adapter_job("convert", [adapter], output, base, {"alpha": KEEP, **given})
    inside = False
    if output is not None and _writes_file(found, made.inputs.adapters[0].path):
        inside = names_folder(output)
        path = made.output / "named when it is opened" if inside else output_file(output)
        made = replace(made, inputs=replace(made.inputs, output=path))
    told = {"to": found.name, "algorithm": algorithm, **ranks}
    recorded = (*made.options, *((n, v) for n, v in told.items() if v not in (None, KEEP)))
    return Conversion(
        replace(made, algorithm=algorithm, options=recorded), found, _rules(ranks), output is None or inside
    )


def _rules(ranks: Mapping[str, Any]) -> RankRules | None:
    """Return the rules that the options state; None where they state none."""
    if not ranks:
        return None
    if "rank" not in ranks:
        raise UsageError("a rule for some layers, and none for the others", "--rank", "give --rank too, such as exact")
    parts = pairs(ranks.get("rank_for", ()), "--rank-for")
    rules = RankRules.of(ranks["rank"], ranks.get("conv_rank"), ranks.get("max_rank"), parts)
    if rules.has(NOISE):
        raise UsageError(NO_NOISE, "--rank noise", "give a number or energy:x")
    return rules


def run(
    task: Conversion, progress: Progress = unwatched, *, recipe: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None, tell: Callable[[Opened], object] | None = None,
) -> AdapterReport:  # fmt: skip
    """Run a conversion: the output appears under its name when it is complete and verified, or not at all.

    `recipe`, `before`: of a command whose result is converted; they stand in place of the conversion's recipe and of
    the configuration of its adapter. `tell`: is told the conversion when it is open.
    """
    with ExitStack() as stack:
        this = stack.enter_context(Run(task.job, progress))
        found = opened(task, this.hash_adapters())
        task, sources, job = found.task, found.sources, found.task.job
        this.name(job.output)
        if tell is not None:
            tell(found)
        inputs = [a.index for a in sources.adapters]
        rows = tensors_of(layer for _, layer in planned_modules(found))
        if task.rules is None:  # else numbers decide
            expect_room(job, rows)
        reader = this.reading(sources.indexes)
        begin = partial(drafted, job, reader, rows, inputs, folder=task.to.folder)
        draft = stack.enter_context(begin())
        writing = _renamed(found, reader, draft, this.counted)
        if writing is None:
            load_library()
            from .convert_modules import made

            draft = stack.enter_context(begin())
            heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
            into = heap if task.to.folder else draft  # PEFT may ask for other tensors when all are known
            writing = made(found, reader, into, this.counted)
        entries = entries_of(task.to, writing.whole) + writing.beside
        own = config(writing.whole, _before(sources, before), found.everywhere) if task.to.folder else None
        layers = {prefix_name(task.to, m.place): m.layer for m in writing.made}
        outcome = Outcome(job, inputs, layers, entries, own, model_of(sources), made_by=recipe)
        notes = (*dict.fromkeys(sources.notes), *_memory_note(task, found.there), *left_out(writing.zeros),
                 *_stated_again(job, writing.made), *differing_ranks(own), *idle_alpha(job, stored=task.to.alpha),
                 *(unread(e.name for e in entries) if own is None else ()),
                 *dict.fromkeys(note for one in writing.made for note in one.layer.notes))  # fmt: skip
        dtype = spoken(Counter(e.dtype for e in entries).most_common(1)[0][0])
        told = coverage(job, sources, [one.name for one in writing.beside])
        facts = Facts(told, dtype, notes, task.to.name, _weights(found.there))
        return outcome.finish(reader, draft, facts, writing.prove, this)


def _renamed(found: Opened, reader: Reader, draft: Draft, begin: Counting) -> Writing | None:
    """Return the modules of a conversion that changes no number; None for another one."""
    task, sources = found.task, found.sources
    whole = task.rules is None and not bundled(sources.adapters[0], task.to)
    factors = all_factors(found.there, task.to, task.job) if whole else []
    if not factors:
        return None
    made = renamed(factors, task.to, reader, draft, begin)

    def prove(part: Path) -> Mapping[str, Any]:
        alike = proven(sources, claimed(task.job, part), reader, begin)
        if alike is not None:
            return alike
        from .convert_modules import proof

        return proof(found, reader, made, begin)(part)

    return Writing(made, made, [], [], prove) if made else None


def plan(task: Conversion, found: Opened | None = None) -> AdapterReport:
    """Return what `run` would do, from headers alone. `found`: the conversion, where it is open."""
    found = found or opened(task, CheckpointCache())
    task, sources, there, job = found.task, found.sources, found.there, found.task.job
    own = planned_modules(found)
    facts_of = [_told(one, layer, task) for one, (_, layer) in zip(there, own, strict=False)]
    layers = {prefix_name(task.to, place): told for (place, _), told in zip(own, facts_of, strict=False)}
    size = planned_size([layer for _, layer in own], task.rules.linear if task.rules else Rule(EXACT),
                        [a.index for a in sources.adapters])  # fmt: skip
    of_folder = None
    if task.to.folder:
        kinds = [*(str(told["algorithm"]) for told in facts_of), *(FACTORS for _ in own[len(facts_of) :])]
        made = [kept(*one, kind, task.to) for one, kind in zip(own, kinds, strict=True)]
        of_folder = config(made, _before(sources, None), found.everywhere)
        size += len(text_of(of_folder))
    dtype = spoken(Counter(kind for _, layer in own for _, kind, _ in sorted(layer.tensors)).most_common(1)[0][0])
    notes = (*dict.fromkeys(sources.notes), *_memory_note(task, there), *differing_ranks(of_folder),
             *idle_alpha(job, stored=task.to.alpha))  # fmt: skip
    facts = Facts(coverage(job, sources), dtype, notes, task.to.name, _weights(there))
    return planned(job, facts, layers, size)


def planned_modules(found: Opened) -> list[tuple[Place, PlannedLayer]]:
    """Return the tensors of every module: factors at their highest rank, where the numbers decide it; then those that
    PEFT needs in addition."""
    ranks = [_planned(one, found.task)["rank"] or _most(one) for one in found.there]
    return with_demands([planned_layer(*pair, found) for pair in zip(found.there, ranks, strict=True)], found)


def _most(one: Filled) -> int:
    """Return the highest rank that the change of a module can have."""
    ranks, short = [known_rank(s.patch) for s in one.shares], min(one.place.view.matrix)
    return short if None in ranks else min(short, sum(r or 0 for r in ranks))


def _told(one: Filled, layer: PlannedLayer, task: Conversion) -> dict[str, Any]:
    """Return what a plan tells of a module, with the rank that PEFT asks of experts."""
    told = _planned(one, task)
    if told["rank"] and not layer.rank and told["algorithm"] == FACTORS:
        return {"algorithm": WHOLE, "rank": 0}
    if told["algorithm"] in task.to.products and layer.rank:
        return {**told, "rank": layer.rank}
    return {**told, "rank": told["rank"] and (layer.rank or told["rank"])}


def _memory_note(task: Conversion, there: Sequence[Filled]) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    rules = task.rules
    if rules is None or task.job.algorithm == WHOLE:
        return []
    dense = [one.place for one in there if not one.place.vector and not all(is_plain(s.patch) for s in one.shares)]
    tasks = [(p.label, p.view.matrix, rules.of_layer(p.label, kernel=p.kernel)) for p in dense]
    return note(tasks, task.job.inputs.max_memory)


def _planned(one: Filled, task: Conversion) -> dict[str, Any]:
    """Return what headers tell of a module: its algorithm, and its rank, or the most that it can be."""
    patches, most = [s.patch for s in one.shares], min(one.place.view.matrix)
    if one.place.vector or one.value is not None or task.job.algorithm == WHOLE:
        return {"algorithm": WHOLE, "rank": 0}
    if task.rules is None and task.job.algorithm == KEEP:
        if all(map(is_plain, patches)):
            ranks = [known_rank(replace(p, magnitude=None)) or 0 for p in patches]  # DoRA's stays beside the factors
            return {"algorithm": FACTORS, "rank": min(sum(ranks), most)}
        row = ALGORITHMS[patches[0].algorithm]
        return {"algorithm": row.name, "rank": row.rank(patches[0].shapes) if row.rank else 0}
    rule = task.rules.of_layer(one.place.label, kernel=one.place.kernel) if task.rules else Rule(EXACT)
    own = [known_rank(p) for p in patches]
    if None not in own and rule.name in (EXACT, COUNT):  # else the numbers decide
        most = min(most, sum(r or 0 for r in own))
        return {"algorithm": FACTORS, "rank": min(most, rule.ceiling or most)}
    return {"algorithm": FACTORS, "rank": min(most, rule.ceiling) if rule.name == COUNT and rule.ceiling else 0}


def opened(given: Conversion, cache: CheckpointCache) -> Opened:
    """Return the adapter of a conversion, and the modules that its changes become; FitError where headers tell that the
    dialect cannot hold one. `cache`: the checkpoints that are open."""
    job, kept = given.job, given.to is OF_INPUT
    file = cache.adapter(job.adapters[0].path)
    to = own_dialect(file) if kept else given.to
    if job.base is None:
        sources = chosen_of(job, as_named(job, file) if kept else without_base(job, file, to))
    else:
        sources = open_sources(job, cache)
    assert sources.inputs is not None, "it has a base, or one is assumed"
    task = given.written_as(to.of(sources.inputs.names.known))
    read = [f for index in sources.indexes for f in index.files]
    check_output(task.job.output, read, overwrite=job.inputs.overwrite, folder=task.to.folder,
                 contents=CONTENTS)  # fmt: skip
    everywhere = [*(own_places(sources, to) if kept else places(sources.inputs.names, task.to))]
    everywhere += heads(sources) if task.to.whole and not kept else ()
    there = filled(sources.targets, everywhere)
    if task.to.from_top and not kept:
        if (level := _level(there, sources.inputs.names)) is not None:
            task = replace(task, to=replace(task.to, level=level))
            everywhere = [*places(sources.inputs.names, task.to), *(heads(sources) if task.to.whole else ())]
            there = filled(sources.targets, everywhere)
        there, everywhere = in_memory(there, everywhere)
    order = {id(m): n for n, m in enumerate(sources.adapters[0].modules)}
    there.sort(key=lambda one: min((order.get(id(s.patch.module), len(order)) for s in one.shares), default=len(order)))
    if task.rules is not None:
        own = sources.inputs.names if job.base is not None else None
        task = replace(task, rules=task.rules.on(own, _layers(own, there)))
    if task.to.folder:
        expect_one((one.place.component for one in there), "the adapter changes")
    for one in there:
        expect_held(task, one)
    return Opened(task, sources, there, everywhere)


def _layers(names: Names | None, there: Sequence[Filled]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield label, network and names of each layer: its keys in the base, without a base the names of its modules."""
    for place, shares, _ in there:
        if names is not None:
            yield place.label, place.component, [piece.key for piece in place.view.row_slices]
        else:
            modules = [share.patch.module.name for share in shares] or [place.label]
            yield place.label, network_of(modules[0]), modules


def _level(there: Sequence[Filled], names: Names) -> str | None:
    """Return the level above the layers that an adapter of PEFT names itself; None for another adapter."""
    bodies = {k: body for part in names.parts for body, k in part.keys.items() if k.startswith(part.prefix)}
    levels = set()
    for place, shares, _ in there:
        (piece, *others) = place.view.row_slices
        body = bodies.get(piece.key, "").rpartition(".")[0]
        for name in (s.patch.module.name for s in shares if s.is_all(place) and body and not others):
            if name.startswith(PEFT) and name.endswith(f".{body}"):
                levels.add(name[len(PEFT) : len(name) - len(body)])
    return levels.pop() if len(levels) == 1 else None


def _before(sources: Sources, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the configuration of the adapter, or the given one; with the task of the base's model if it lacks one."""
    own = sources.adapters[0].index.config if given is None else given
    base = sources.inputs.base if sources.inputs and sources.inputs.base.path != NOWHERE else None
    told = {**own, FLAG: base is None and own.get(FLAG) is True}  # else the base tells it
    return told if own.get("task_type") else {**told, "task_type": task_type(base.config if base else {})}


def _stated_again(job: AdapterJob, made: Sequence[Kept]) -> list[Note]:
    """Return the note about settings that the user stated and that copied tensors do not hold."""
    given, needed = dict(job.inputs.setting), set()
    for one in made:
        if one.copied:
            needed |= given.keys() & ALGORITHMS[one.layer.algorithm].settings.keys()
            needed |= {ALPHA} & given.keys() if ".alpha" not in one.tensors else set()
    again = " ".join(f"--setting {name}={given[name]}" for name in sorted(needed))
    return [Note(f"whoever reads the output has to state {again} again")] if again else []


def _weights(there: Sequence[Filled]) -> int:
    return sum(map(weight_of, there))


def prefix_name(to: Dialect, place: Place) -> str:
    """Return the name of a module in the report: as in the output, without PEFT's own prefix."""
    name = to.key(place.prefix, place.module, "")
    name = name.removeprefix(DIALECTS["peft"].denoiser) if to.folder else name
    return name if place.parameter == "weight" else f"{name}.{place.parameter}"


def entries_of(to: Dialect, made: Sequence[Kept]) -> list[Entry]:
    """Return the tensors of all modules under their keys; FitError where two have one."""
    found = [
        replace(m.tensors[ending], name=to.key(m.place.prefix, m.place.module, ending))
        for m in made for ending in sorted(m.tensors)
    ]  # fmt: skip
    if twice := next(unique(found), None):
        raise FitError("two layers of the output would have one name", twice, "convert to another dialect")
    return found
