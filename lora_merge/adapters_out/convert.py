"""Plans and writes modules of a dialect, for all commands that read adapters; plans and runs `convert`: an adapter in
another dialect, algorithm, dtype or α.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from ..algorithms import ALGORITHMS
from ..command import Request
from ..disk.destination import check_output
from ..disk.draft import Heap
from ..disk.reader import Reader
from ..dtypes import spoken
from ..engine.torch_preload import load_library
from ..errors import UsageError
from ..files.folder_layouts import PEFT_PREFIX
from ..matching.formula import ALPHA_SETTING
from ..models.blocks import network_of
from ..models.names import Names
from ..options import KEEP, pairs
from ..paths import is_folder, names_folder, output_file
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Progress, unwatched
from ..text import Note
from .adapter_dialect import as_named, heads, in_memory, input_dialect, input_places, without_base
from .dialects import DIALECTS, OF_INPUT, Dialect, stated_dialect
from .factored_modules import Copies, FactoredModules, factored_modules
from .form import Conversion, Form, facts_of, form_of_module, memory_note, planned_modules, without_data
from .groups import Filled, components, filled, places, regrouped
from .job import FACTORS, RANK_OPTIONS, AdapterJob, adapter_job, algorithm_in, algorithm_of, one_rank
from .metadata import planned_size
from .module_tensors import StoredModule
from .output_file import CONTENTS, drafted, expect_room, text_of, unread
from .output_modules import Maker, bundled, entries_of, module_groups, named, prefix_name, stored_modules, weights_of
from .peft.config import FAN_IN_FAN_OUT, config, differing_ranks, expect_one, task_type
from .pipeline import (
    AdapterRun,
    Outcome,
    RunFacts,
    coverage,
    high_rank,
    idle_alpha,
    idle_rank,
    left_out,
    model_of,
    planned,
)
from .proof import CombinationClaims, ConversionClaims, prove_combination, prove_conversion
from .rank_rules import EXACT, NO_NOISE, NOISE, RankRules
from .report import AdapterReport
from .sources import NOWHERE, Sources, chosen_of, open_sources


def make_job(request: Request, _: CheckpointCache | None = None) -> AdapterJob:
    """Return the job of `convert`; UsageError for an option or a value that is wrong."""
    stated, output, rows = request.stated, request.output, request.command.options
    form_options = {name: stated.pop(name) for name in ("to", "algorithm", *RANK_OPTIONS) if name in stated}
    to = stated_dialect(form_options.get("to", KEEP), "--to")
    algorithm = algorithm_of(request.command, form_options.get("algorithm", KEEP))
    job = adapter_job(replace(request, options=stated))
    ranks: dict[str, Any] = {option: form_options[option] for option in RANK_OPTIONS if option in form_options}
    if ranks:
        job = replace(job, rules=_stated_rules(ranks), ranked=True)
    unnamed = output is None
    if output is not None and (not is_folder(job.adapters[0].path) if to is OF_INPUT else not to.folder):
        unnamed = names_folder(output)
        job = job.changed(output=job.output / "named when it is opened" if unnamed else output_file(output))
    changed = tuple((n, v) for n, v in form_options.items() if v != rows[n].default)
    return replace(job, algorithm=algorithm, format=to.name, options=(*job.options, *changed), unnamed=unnamed)


def _stated_rules(ranks: Mapping[str, Any]) -> RankRules:
    """Return the rules that the options of `convert` state."""
    if "rank" not in ranks:
        raise UsageError("convert needs a rank for all layers", "--rank", "give --rank too, such as exact")
    part_rules = pairs(ranks.get("rank_for", ()), "--rank-for")
    rules = RankRules.of(ranks["rank"], ranks.get("conv_rank"), ranks.get("max_rank"), part_rules)
    if rules.has(NOISE):
        raise UsageError(NO_NOISE, "`--rank noise`", "give a number or energy:x")
    return rules


def run(job: AdapterJob, progress: Progress = unwatched, _: CheckpointCache | None = None) -> AdapterReport:
    """Run a conversion: the output appears under its name when it is complete and verified, or not at all."""
    with AdapterRun(job, progress) as this:
        return write(opened(job, this.hash_adapters()), this)


def write(conversion: Conversion, this: AdapterRun) -> AdapterReport:
    """Write the modules of a dialect: the output appears under its name when it is complete and verified, or not at
    all. `this`: begun before the inputs were opened, so that its times include that."""
    with ExitStack() as stack:
        # Step 1: the modules of the output are planned.
        job, to, sources, modules, all_modules, forms = conversion
        this.name(job.output)
        inputs = [a.index for a in sources.adapters]
        rows = [tensor for _, layer in planned_modules(conversion) for tensor in layer.tensors]
        exact = job.command.combines and not job.command.cuts and job.rules.all_are(EXACT)
        if exact or not job.ranked:  # else numbers decide
            expect_room(job, rows)
        # Step 2: the modules are written to the draft: copied, or else computed.
        reader = this.reading(sources.indexes)
        draft = stack.enter_context(drafted(job, reader, rows, inputs, folder=to.folder))
        factored = factored_modules(conversion, reader) if job.command.combines else None
        if (make := _without_torch(conversion, reader, factored)) is not None:
            writing = stored_modules(module_groups(conversion), make, draft, this.counted)
        else:
            load_library()
            from .matrix_modules import combiner, computed, converter

            with_torch = combiner(conversion, reader, factored) if factored else partial(converter, conversion, reader)
            heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
            into = heap if to.folder else draft  # PEFT may ask for other tensors when all are known
            writing = computed(conversion, with_torch, reader, into, this.counted)
        # Step 3: the header, the proof and the report.
        entries = entries_of(to, writing.whole) + writing.embeddings
        folder_config = config(writing.whole, _before(sources), all_modules) if to.folder else None
        layers = {prefix_name(to, m.place): m.layer for m in writing.changed}
        outcome = Outcome(job, inputs, layers, entries, folder_config, model_of(sources))
        notes = (*dict.fromkeys(sources.notes), *_memory_note(job, modules, forms), *writing.notes,
                 *left_out(writing.zeros), *_stated_again(job, writing.changed), *differing_ranks(folder_config),
                 *idle_alpha(job, stored=to.alpha), *high_rank(job, layers.values()),
                 *idle_rank(job, (layer.rank for layer in layers.values())),
                 *(unread(e.name for e in entries) if folder_config is None else ()),
                 *dict.fromkeys(note for module in writing.changed for note in module.layer.notes))  # fmt: skip
        dtype = spoken(Counter(e.dtype for e in entries).most_common(1)[0][0])
        covered = coverage(job, sources, [entry.name for entry in writing.embeddings])
        facts = RunFacts(covered, dtype, notes, to.name, weights_of(job, modules))
        prove = partial(prove_conversion, ConversionClaims(job, sources, writing.changed))
        if job.command.combines and to.name == KEEP:
            nbytes = sum(entry.data.nbytes for entry in entries)
            prove = partial(prove_combination, CombinationClaims(job, sources, outcome.layer_facts, nbytes))
        return outcome.finish(reader, draft, facts, prove, this)


def _without_torch(
    conversion: Conversion, reader: Reader, factored: Callable[[], FactoredModules] | None
) -> Callable[[], Maker] | None:  # fmt: skip
    """Return what makes the modules of a file, for one thread, where headers show that all are copies or sums of stored
    factors; None for others."""
    job, to, sources, modules, _, forms = conversion
    if to.folder or "up_bias" in to.endings or job.inputs.device not in ("auto", "cpu"):
        return None
    if factored is not None:
        return factored if all(map(factored().has, modules)) else None
    copied = all(form.renamed for form in forms) and not bundled(sources.adapters[0], to)
    return partial(Copies, to, reader) if copied else None


def plan(job: AdapterJob, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do, from headers alone."""
    return planned_report(opened(job, cache or CheckpointCache()))


def planned_report(conversion: Conversion) -> AdapterReport:
    """Return what `write` would do, from headers alone."""
    job, to, sources, modules, all_modules, forms = conversion
    planned_layers = planned_modules(conversion)
    facts = [facts_of(form, layer, to) for form, (_, layer) in zip(forms, planned_layers, strict=False)]
    layers = {
        prefix_name(to, place): module_facts for (place, _), module_facts in zip(planned_layers, facts, strict=False)
    }
    size = planned_size([layer for _, layer in planned_layers], job.rules.linear, [a.index for a in sources.adapters])
    folder_config = None
    if to.folder:
        kinds = [
            *(str(module_facts["algorithm"]) for module_facts in facts),
            *(FACTORS for _ in planned_layers[len(facts) :]),
        ]
        modules_without_data = [without_data(*pair, kind, to) for pair, kind in zip(planned_layers, kinds, strict=True)]
        folder_config = config(modules_without_data, _before(sources), all_modules)
        size += len(text_of(folder_config))
    kinds_of_tensors = Counter(kind for _, layer in planned_layers for _, kind, _ in sorted(layer.tensors))
    dtype = spoken(kinds_of_tensors.most_common(1)[0][0])
    notes = (*dict.fromkeys(sources.notes), *_memory_note(job, modules, forms), *differing_ranks(folder_config),
             *idle_alpha(job, stored=to.alpha), *idle_rank(job, (row["rank"] for row in facts)))  # fmt: skip
    return planned(job, RunFacts(coverage(job, sources), dtype, notes, to.name, weights_of(job, modules)), layers, size)


def _memory_note(job: AdapterJob, modules: Sequence[Filled], forms: Sequence[Form]) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    layers = ((m.place.label, m.place.view.matrix, form) for m, form in zip(modules, forms, strict=True))
    return memory_note(layers, job.inputs.max_memory)


def opened(job: AdapterJob, cache: CheckpointCache) -> Conversion:
    """Return the adapter of a conversion, and the modules that its changes become; FitError where headers show that the
    dialect cannot hold one. `cache`: the checkpoints that are open."""
    file = cache.adapter(job.adapters[0].path)
    to = input_dialect(file) if job.format == KEEP else DIALECTS[job.format]
    if job.base is None:
        sources = chosen_of(job, as_named(job, [file]) if job.format == KEEP else without_base(job, [file], to))
    else:
        sources = open_sources(job, cache)
    return grouped(job, sources, to)


def grouped(job: AdapterJob, sources: Sources, to: Dialect) -> Conversion:
    """Return the modules of a dialect that changes become; FitError where headers show that it cannot hold one."""
    # Step 1: the dialect of the output.
    keeps_dialect = job.format == KEEP
    assert sources.inputs is not None, "it has a base, or one is assumed"
    to = to.of(sources.inputs.names.known)
    job, to = named(job, to), one_rank(job, to)
    job = replace(job, algorithm=algorithm_in(job.algorithm, to))
    read = [f for index in sources.indexes for f in index.files]
    check_output(job.output, read, overwrite=job.inputs.overwrite, folder=to.folder, contents=CONTENTS)
    # Step 2: the modules that the dialect can name, with the rows that each changes.
    all_modules = [*(input_places(sources, to) if keeps_dialect else places(sources.inputs.names, to))]
    all_modules += heads(sources) if to.whole and not keeps_dialect else ()
    modules = filled(sources.targets, all_modules)
    if to.from_top and not keeps_dialect:
        if (level := _level(modules, sources.inputs.names)) is not None:
            to = replace(to, level=level)
            all_modules = [*places(sources.inputs.names, to), *(heads(sources) if to.whole else ())]
            modules = filled(sources.targets, all_modules)
        modules, all_modules = in_memory(modules, all_modules)
    if job.command.combines:
        modules = [module for group in components(regrouped(sources.targets, modules)) for module in group]
    else:
        order, last = {id(m): n for n, m in enumerate(sources.adapters[0].modules)}, len(sources.adapters[0].modules)
        modules.sort(key=lambda f: min((order.get(id(s.patch.module), last) for s in f.shares), default=last))
    # Step 3: the rule and the form of each module.
    base_names = sources.inputs.names if job.base is not None else None
    job = replace(job, rules=job.rules.on(base_names, _layers(base_names, modules)))
    if to.folder:
        expect_one((module.place.component for module in modules), "the adapter changes", job.output)
    forms = [form_of_module(job, to, module) for module in modules]
    return Conversion(job, to, sources, modules, all_modules, forms)


def _layers(names: Names | None, modules: Sequence[Filled]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield label, network and names of each layer: its keys in the base, without a base the names of its modules."""
    for place, shares, *_ in modules:
        if names is not None:
            yield place.label, place.component, [piece.key for piece in place.view.row_slices]
        else:
            named = [share.patch.module.name for share in shares] or [place.label]
            yield place.label, network_of(named[0]), named


def _level(modules: Sequence[Filled], names: Names) -> str | None:
    """Return the level above the layers that an adapter of PEFT names itself; None for another adapter."""
    bodies = {k: body for part in names.parts for body, k in part.keys.items() if k.startswith(part.prefix)}
    levels = set()
    for place, shares, *_ in modules:
        (piece, *others) = place.view.row_slices
        body = bodies.get(piece.key, "").rpartition(".")[0]
        for name in (s.patch.module.name for s in shares if s.is_all(place) and body and not others):
            if name.startswith(PEFT_PREFIX) and name.endswith(f".{body}"):
                levels.add(name[len(PEFT_PREFIX) : len(name) - len(body)])
    return levels.pop() if len(levels) == 1 else None


def _before(sources: Sources) -> Mapping[str, Any]:
    """Return the configuration of the first adapter, with the task of the base's model if it lacks one."""
    before = sources.adapters[0].index.config
    base = sources.inputs.base if sources.inputs and sources.inputs.base.path != NOWHERE else None
    stated = {**before, FAN_IN_FAN_OUT: base is None and before.get(FAN_IN_FAN_OUT) is True}  # else the base states it
    return stated if before.get("task_type") else {**stated, "task_type": task_type(base.config if base else {})}


def _stated_again(job: AdapterJob, modules: Sequence[StoredModule]) -> list[Note]:
    """Return the note about settings that the user stated and that copied tensors do not hold."""
    stated, needed = dict(job.inputs.setting), set()
    for module in modules:
        if module.copied:
            needed |= stated.keys() & ALGORITHMS[module.layer.algorithm].settings.keys()
            needed |= {ALPHA_SETTING} & stated.keys() if ".alpha" not in module.tensors else set()
    again = " ".join(f"--setting {name}={stated[name]}" for name in sorted(needed))
    return [Note(f"state {again} again when the output is merged or converted")] if again else []
