"""Runs `convert`: an adapter in another dialect, algorithm, dtype or α; and the proof that it means the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..disk.destination import check_output
from ..disk.reader import Reader
from ..engine.devices import place
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import FitError, InputError, TooLarge, UsageError, VerificationFailed
from ..job import Adapter
from ..options import pairs, shown
from ..paths import absolute
from ..progress import Counting, Progress, unwatched
from .changes import Evaluator
from .conversion.assumed import WithoutBase, same_base, without_base
from .converting import KEEP, Converter, Made
from .dialects import DIALECTS, Dialect, dialect, names
from .job import FACTORS, STORED_AS, AdapterJob, make_adapter_job
from .peft.complete import completed
from .peft.folder import config
from .places import Filled, Place, filled, places
from .rank_rules import NO_NOISE, NOISE, RankRules
from .report import AdapterReport
from .run import Facts, Outcome, Run, coverage, entry, left_out, planned
from .sources import Sources, open_sources
from .written import CONTENTS, Entry, unique

BUDGET: Final = 2**27
"""Numbers of ΔW that are formed for a proof; weights are taken evenly over the file."""

REPORT: Final = "report it with the two inputs"

SLACK: Final = 1e-6
"""By how much the change of the output may differ from the input's, beyond the loss that was reported."""


RANKS: Final[tuple[str, ...]] = ("rank", "conv_rank", "max_rank", "rank_for")
OWN: Final = ("to", "algorithm", "include", "alpha", *RANKS)
"""The options of this command alone."""


@dataclass(frozen=True)
class Conversion:
    """The request of one run of `convert`."""

    job: AdapterJob
    to: Dialect
    rules: RankRules | None  # None: exactly
    include: tuple[str, ...] = ()


def make_conversion(
    adapter: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any]
) -> Conversion:
    """Return the job of `convert`; UsageError for an option or a value that is wrong."""
    given = {name: value for name, value in options.items() if value is not None}
    to, algorithm, include = given.pop("to", None), given.pop("algorithm", KEEP), given.pop("include", ())
    ranks: dict[str, Any] = {name: given.pop(name) for name in RANKS if name in given}
    found = dialect(to) if isinstance(to, str) else None
    if found is None:
        raise UsageError(f"the format {shown(to)!r} does not exist", "--to", f"use one of {', '.join(names())}")
    if algorithm not in (KEEP, *STORED_AS):
        raise UsageError(f"layers cannot be stored as {shown(algorithm)!r}", "--algorithm",
                         f"use one of {', '.join((KEEP, *STORED_AS))}")  # fmt: skip
    made = make_adapter_job("convert", [adapter], output, base, {"alpha": KEEP, **given})
    if output is None:
        name = made.adapters[0].path.stem + f".{found.name}"
        made = replace(made, inputs=replace(made.inputs, output=absolute(Path()) / name))
        if not found.folder:
            made = replace(made, inputs=replace(made.inputs, output=made.output.with_name(f"{name}.safetensors")))
    include = (include,) if isinstance(include, str) else tuple(include)
    told = {"to": found.name, "algorithm": algorithm, "include": [*include], **ranks}
    recorded = (*made.options, *((n, v) for n, v in told.items() if v not in (None, KEEP, [])))
    return Conversion(replace(made, algorithm=algorithm, options=recorded), found, _rules(ranks), include)


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


@undisturbed()
def run(task: Conversion, progress: Progress = unwatched) -> AdapterReport:
    """Run a conversion: the output appears under its name when it is complete and verified, or not at all."""
    job, this = task.job, Run(task.job, progress)
    sources, there, everywhere = opened(task)
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(sources.indexes))
        cache = cache_of(job, reader, sources)
        converter = Converter(job, task.to, task.rules, Evaluator(sources, cache, place("cpu", "F64")))
        made, zeros = _made(converter, there, this.counted)
        if not made:
            raise InputError("the adapter changes nothing", str(job.adapters[0].path), "check its strength")
        entries = entries_of(task.to, completed(made, everywhere, task.to, converter.value))
        own = config(made, sources.adapters[0].index.config) if task.to.folder else None
        layers = {prefix_name(task.to, m): m.layer for m in made}
        outcome = Outcome(job, [a.index for a in sources.adapters], layers, entries, own)
        notes = (*dict.fromkeys(sources.notes), *left_out(zeros))
        dtypes = Counter(e.dtype for e in entries).most_common(1)[0][0]
        worst = max(float(f["residual"]) for f in outcome.told.values())
        return outcome.finish(reader, Facts(coverage(job, sources), dtypes, notes, task.to.name),
                              lambda part: prove(task, sources, converter.evaluator, Claim(part, worst), this.counted),
                              this)  # fmt: skip


def plan(task: Conversion) -> AdapterReport:
    """Return what `run` would do, from headers alone."""
    sources, there, _ = opened(task)
    layers = {}
    for one in there:
        ranks = [s.patch.shapes["down"][0] for s in one.shares if "down" in s.patch.shapes]
        kinds = [s.patch.algorithm for s in one.shares] or ["replacement"]
        layers[one.place.label] = {"algorithm": kinds[0], "rank": sum(ranks)}
    job = task.job
    size = sum(i.nbytes for a in sources.adapters for m in a.modules for i in m.slots.values())
    dtype = next(i.dtype for a in sources.adapters for m in a.modules for i in m.slots.values())
    facts = Facts(coverage(job, sources), dtype, tuple(dict.fromkeys(sources.notes)), task.to.name)
    return planned(job, facts, layers, size)


def opened(task: Conversion) -> tuple[Sources, list[Filled], list[Place]]:
    """Return the adapter's changes of the base, the modules that they become, and all modules that the dialect has."""
    job = task.job
    check_output(job.output, [a.path for a in job.adapters], overwrite=job.inputs.overwrite, folder=task.to.folder,
                 contents=CONTENTS)  # fmt: skip
    sources = open_sources(job) if job.base is not None else without_base(job, task.to)
    assert sources.inputs is not None, "it has a base, or one is assumed"
    everywhere = [*places(sources.inputs.names, task.to)]
    there = filled(sources.targets, everywhere)
    order = {id(m): n for n, m in enumerate(sources.adapters[0].modules)}
    there.sort(key=lambda one: min((order.get(id(s.patch.module), len(order)) for s in one.shares), default=len(order)))
    if task.include:
        there = [one for one in there if one.place.component in task.include]
    components = {one.place.component for one in there}
    if task.to.folder and len(components) > 1:
        raise UsageError(f"a folder of PEFT is for one component, the adapter changes {', '.join(sorted(components))}",
                         "--include", f"choose one: --include {min(components)}")  # fmt: skip
    return sources, there, everywhere


def _made(converter: Converter, there: Sequence[Filled], begin: Counting) -> tuple[list[Made], list[str]]:
    told = begin("make", sum(map(_numbers, there)))
    found, zeros, ranks = [], [], converter.ranks(there)
    for one in there:
        made = converter.made(one, ranks.get(one.place.label))
        if any(not bool(torch.isfinite(t).all()) for t in made.tensors.values() if t.dtype.itemsize > 1):
            raise TooLarge("a number is too large for the dtype of the output", one.place.name, "use --dtype fp32")
        if made.layer.algorithm == FACTORS and (not made.layer.rank or not made.layer.squares):
            zeros.append(one.place.name)
        else:
            found.append(made)
        told(_numbers(one))
        converter.evaluator.forget()
    return found, zeros


def cache_of(job: AdapterJob, reader: Reader, sources: Sources) -> TensorCache:
    """Return the reader of tensors; without a base, one that refuses those of the base."""
    own = frozenset(p for a in sources.adapters for p in a.index.files)
    return TensorCache(reader, own) if job.base is not None else WithoutBase(reader, own)


def _numbers(one: Filled) -> int:
    """Return the bytes of the weight that a module changes, in fp64."""
    return 8 * prod(one.place.view.shape)


def prefix_name(to: Dialect, made: Made) -> str:
    """Return the name of a module in the report: as in the output, without PEFT's own prefix."""
    name = to.key(made.place.prefix, made.place.module, "")
    name = name.removeprefix(DIALECTS["peft"].denoiser) if to.folder else name
    return name if made.place.parameter == "weight" else f"{name}.{made.place.parameter}"


def entries_of(to: Dialect, made: Sequence[Made]) -> list[Entry]:
    """Return the tensors of all modules under their keys; FitError where two have one."""
    found = [
        entry(to.key(m.place.prefix, m.place.module, ending), m.tensors[ending])
        for m in made for ending in sorted(m.tensors)
    ]  # fmt: skip
    if twice := next(unique(found), None):
        raise FitError("two layers of the output would have one name", twice, "convert to another dialect")
    return found


class Claim(NamedTuple):
    """The file that a run has written, and the largest residual of a layer that it reports."""

    part: Path
    residual: float


def prove(task: Conversion, sources: Sources, before: Evaluator, claim: Claim, begin: Counting) -> dict[str, Any]:
    """Read the output as an adapter of the base, and compare its changes with the input's in float64.

    VerificationFailed where a change differs by more than the run claims.
    """
    out = replace(task.job, inputs=replace(task.job.inputs, adapters=(Adapter(claim.part),)))
    assert sources.inputs is not None, "a conversion has a base"
    again = same_base(sources.inputs, out)
    theirs = {t.key: t for t in again.targets}
    chosen = [t for t in sources.targets if not task.include or t.key in theirs]
    layers = len(chosen)
    chosen = chosen[:: max(1, -(-sum(prod(t.matrix) for t in chosen) // BUDGET))]
    worst, name, told = 0.0, "", begin("prove", sum(8 * prod(t.matrix) for t in chosen))
    with Reader(again.indexes) as reader:
        cache = cache_of(out, reader, again)
        for one in (cache, before.cache):
            if isinstance(one, WithoutBase):
                one.drawn = True
        after = Evaluator(again, cache, before.at)
        for target in chosen:
            wanted, held = (
                sum((c.strength * c.dense() for c in e.changes(t)), torch.zeros(target.matrix, dtype=torch.float64))
                if t is not None else torch.zeros(target.matrix, dtype=torch.float64)
                for e, t in ((before, target), (after, theirs.get(target.key)))
            )  # fmt: skip
            size = float(wanted.norm())
            off = float((wanted - held).norm()) / size if size else float(held.norm())
            worst, name = max((worst, name), (off, target.key))
            if not off <= 1.01 * claim.residual + SLACK:
                where = f"{target.key}: off by {off:.3g} of ‖ΔW‖"
                raise VerificationFailed("the output changes a weight otherwise than the input", where, REPORT)
            told(8 * prod(target.matrix))
            before.forget()
            after.forget()
    return {"ok": True, "layers": layers, "recomputed": len(chosen), "worst_residual": worst,
            "worst_layer": name}  # fmt: skip
