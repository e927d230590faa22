"""Runs `combine` and `resize`: layer by layer, changes are computed, combined, cut to a rank and stored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import torch

from ..disk.destination import check_output
from ..disk.reader import Reader
from ..dtypes import spoken
from ..engine.placement import TORCH_DTYPES
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import FitError, InputError
from ..proof.stored import Stored
from ..text import Note
from .changes import Evaluator
from .conversion.kept import waiting
from .job import AdapterJob
from .making import Maker
from .metadata.sizes import tensors_of
from .outcome.layer import Layer
from .outcome.outcome import Facts, Outcome, Run, coverage, left_out, model_of, output_dtype
from .outcome.planned import memory_note, planned_layers
from .proof import Claims, prove
from .rank_rules import EXACT
from .report import AdapterReport
from .sources import Sources
from .written import Entry, Spelling, drafted, unique

HIGH: Final = 256
"""The rank from which on a note advises a rank rule: most directions of such a sum are small."""


@undisturbed()
def run(job: AdapterJob, sources: Sources, this: Run, reader: Reader) -> AdapterReport:
    """Run a job whose sources are open: the output appears under its name when it is complete and verified, or not at
    all. `this`: begun before the sources were opened, so that its times include that. `reader`: of the sources."""
    files = [p for i in sources.indexes for p in i.files]
    check_output(job.output, files, overwrite=job.inputs.overwrite)
    inputs = [a.index for a in sources.adapters]
    dtype = output_dtype(job, sources.adapters)
    with ExitStack() as stack:
        own = frozenset(p for i in inputs for p in i.files)
        base = Stored(reader, sources.inputs.base) if sources.inputs else None
        maker = Maker(
            job, sources, lambda at: Evaluator(sources, TensorCache(reader, own), at), TORCH_DTYPES[dtype], base
        )
        own_layers = planned_layers(job, sources, dtype)
        draft = stack.enter_context(drafted(job, reader, tensors_of(own_layers), inputs, folder=False))
        kept: dict[str, dict[str, Entry]] = {}
        stores_alpha = Spelling.of(sources.adapters[0]).alpha

        def keep(name: str, layer: Layer) -> None:
            alpha = {"alpha": torch.tensor(layer.alpha, dtype=torch.float32)} if layer.rank and stores_alpha else {}
            kept[name] = waiting({**layer.tensors, **alpha}, draft)

        layers, zeros = maker.layers(this.counted, keep)
        if not layers:
            raise InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
        notes = (*dict.fromkeys(sources.notes), *memory_note(job, sources), *maker.notes, *left_out(zeros))
        highest = max(layer.rank for layer in layers.values())
        if job.rules.linear.name == EXACT and highest > HIGH:
            notes = (*notes, Note(f"the exact sum has rank {highest}; --rank energy:0.999 keeps 99.9% of it"))
        made = Outcome(job, inputs, layers, _entries(sources, layers, kept), model=model_of(sources))
        claims = Claims(job, sources, made.told, sum(e.data.nbytes for e in made.entries))
        facts = Facts(coverage(job, sources), spoken(dtype), notes, weights=maker.weights)
        return made.finish(reader, draft, facts, lambda part: prove(claims, reader, part, this.counted), this)


def _entries(
    sources: Sources, layers: Mapping[str, Layer], kept: Mapping[str, Mapping[str, Entry]]
) -> list[Entry]:  # fmt: skip
    """Return the tensors of the output in the order of the layers; FitError where two have one name."""
    spelling = Spelling.of(sources.adapters[0])
    found = []
    for target in (part for whole in sources.targets for part in whole.stored):
        if target.label not in layers:
            continue
        for slot, one in kept[target.label].items():
            key = spelling.key(target.name, target.parameter, slot, norm=target.norm)
            found.append(replace(one, name=key))
    if twice := next(unique(found), None):
        raise FitError("two layers of the output would have one name", twice, "give --base, so that names are known")
    return found
