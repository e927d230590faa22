"""Compares a plan with a second reading of its adapters: names → rows of the base, formula, scale, strength.

The recomputation of `verify` takes the plan's places and numbers as given. Here they are found again from the headers,
by code that shares nothing with the planner (claims.py). If the two disagree, the proof fails; modules
that the second reading does not know are counted and named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose, nan, prod
from pathlib import Path
from typing import Any, Final

from ...disk.reader import Reader
from ...dtypes import Shape, StoredTensor
from ...errors import VerificationFailed
from ...files.checkpoint import Index
from ...files.side_texts import side_texts
from ...job import Job
from ...matching.patch import COPY, Match, PatchPart
from ...planning.plan import OutputTensor, Plan
from ...text import listed, quoted
from ..proof_report import MOST_NAMED, REPORT_HEADERS
from ..reference.floats import decode
from .claims import AdapterClaims, BaseHeader, ModuleClaim, Strength, TargetRows
from .modules import groups
from .parts import StrengthParts
from .rows import PEFT_PREFIX, Networks
from .scales import AdapterTexts, ModuleScales, Number

SCALE_TOLERANCE: Final = 1e-9  # relative difference of scales that are the same sum in another order


SPELLING: Final = "their tensor names"
UNKNOWN_NAMES: Final = "their layer names"
UNKNOWN_PARTS: Final = "the blocks or parts of their strengths"
UNKNOWN_NUMBERS: Final = "their formula, scale or rows"
"""What the second reading may not know of a module, in the words of the report."""


WRAPPER_NAMES: Final = re.compile(r"\.(?:base_layer|modules_to_save|ln_tuning_layers)(\.\w+$)|(?<=\.)set_(?=weight$)")
"""Parts of the names that ComfyUI and PEFT give to whole trained values, and that the base's own names lack."""


@dataclass(frozen=True)
class Confirmation:
    """The number of the plan's modules that the second reading confirms."""

    modules: int = 0  # modules that the plan applies
    proven: int = 0  # modules to which the second reading gives the same places and numbers
    alone: list[str] = field(default_factory=list)  # names of the modules that only the plan knows
    why: Mapping[str, int] = field(default_factory=dict)  # what is not known of these → modules

    def to_dict(self) -> dict[str, Any]:
        """Return the reading as the report has it."""
        return {"modules": self.modules, "proven": self.proven, "alone": self.alone[:MOST_NAMED], "why": dict(self.why)}


@dataclass
class _PlannedModule:
    """One module, as the plan has it."""

    name: str
    uses: list[tuple[str, PatchPart]] = field(default_factory=list)  # name of the base tensor, use


def read_again(plan: Plan, reader: Reader) -> Confirmation:
    """Return how many modules the second reading confirms; VerificationFailed if it disagrees with the plan."""
    targets = plan.targets
    check_sources(plan.base, plan.adapters, targets, network=_network(plan, targets))
    return compare(plan.job, plan.base, plan.adapters, targets, partial(stored_number, reader))


def stored_number(reader: Reader, info: StoredTensor) -> float:
    """Return the first number of a tensor, such as α; NaN if there is none."""
    return float(decode(reader.read(info), info.dtype)[0]) if info.nbytes else nan


def compare(
    job: Job, base: Index, adapters: Sequence[Match], targets: Sequence[OutputTensor], number: Number
) -> Confirmation:
    """Return the same from headers alone; `number` gives the value of an α."""
    planned = _planned(targets)
    shapes = {name: info.shape for name, info in base.tensors.items()}
    read_base = BaseHeader(_as_floats(base), base.config, Networks(shapes, base.components))
    parts = StrengthParts(read_base.places)
    known: set[int] = set()
    why: dict[int, str] = {}
    for n, (ref, matched) in enumerate(zip(job.adapters, adapters, strict=True)):
        index = matched.adapter.index
        texts = AdapterTexts(index.config, index.metadata, index.tensors.keys(), partial(_texts, index))
        scales = ModuleScales(texts, dict(job.setting), number)
        of_adapter = [p for (at, _), p in planned.items() if at == n]
        copies = {name for name, why in matched.unused.items() if why == COPY}
        factor = partial(parts.strength, ref.strength, ref.parts)
        for claim in AdapterClaims(index.tensors, scales, read_base, factor, copies).certain():
            if copies.issuperset(claim.tensors.values()):
                claim = _of_original(claim, of_adapter, shapes)
            by_id = {id(p): p for t in claim.tensors.values() if (p := planned.get((n, t))) is not None}
            _compare(claim, list(by_id.values()), ref.path, shapes)
            known.update(by_id)
        left = {id(p): t for (at, t), p in planned.items() if at == n and id(p) not in known}
        why.update(_unknown(left, index, read_base, factor) if left else {})
    modules = {id(p): p.name for p in planned.values()}
    whole = [(info.name, key) for m in adapters for key, info in m.replaced.items()]
    others = [name for name, key in whole if WRAPPER_NAMES.sub(r"\1", name.removeprefix(PEFT_PREFIX)) != key]
    alone = [name for at, name in modules.items() if at not in known] + others
    reasons = Counter([why[at] for at in modules if at not in known] + [UNKNOWN_NAMES] * len(others))
    return Confirmation(len(modules) + len(whole), len(known) + len(whole) - len(others), alone, reasons)


def _unknown(
    left: Mapping[int, str], index: Index, read_base: BaseHeader, factor: Strength
) -> Iterator[tuple[int, str]]:
    """Yield what the second reading does not know of modules; `left`: any key of each → the name of a tensor of it."""
    grouped = {info.name: group for group in groups(index.tensors.values()) for info in group.roles.values()}
    for at, tensor in left.items():
        group = grouped.get(tensor)
        place = read_base.places.find(group.stem, group.parameter) if group is not None else None
        if place is None:
            yield at, UNKNOWN_NAMES if group is not None else SPELLING
        else:
            yield (
                at,
                UNKNOWN_PARTS if any(factor(r.key, place.network) is None for r in place.rows) else UNKNOWN_NUMBERS,
            )


def _texts(index: Index) -> Iterator[str]:
    return (side.text for side in side_texts(index) if not side.unread)


def _as_floats(base: Index) -> Mapping[str, StoredTensor]:
    """Return the tensors of a base; weights of codes count as floating-point numbers."""
    return {**base.tensors, **{key: replace(base.tensors[key], dtype="F32") for key in base.packed}}


def _planned(targets: Sequence[OutputTensor]) -> Mapping[tuple[int, str], _PlannedModule]:
    """Return (number of the adapter, name of one of its tensors) → the module that the plan gives the tensor to."""
    modules: dict[tuple[int, str], _PlannedModule] = {}
    patches: dict[tuple[int, str], _PlannedModule] = {}
    for target in targets:
        for use in target.uses:
            number, module = use.patch.adapter, use.patch.module
            planned = modules.setdefault((number, module.where), _PlannedModule(module.where))
            planned.uses.append((target.name, use))
            for info in module.slots.values():
                patches[number, info.name] = planned  # the last module, for a tensor that several share
    return patches


def _of_original(claim: ModuleClaim, planned: Sequence[_PlannedModule], shapes: Mapping[str, Shape]) -> ModuleClaim:
    """Return the claim of a module that the file holds twice, with the tensors of the module that is applied.

    They are found by their place, as the names may be any that the planner takes for one. The account of the adapter's
    tensors (../account.py) compares the bytes of both.
    """
    for module in planned:
        slots = {slot: info.name for slot, info in module.uses[0][1].patch.module.slots.items()}
        if dict(_spans(module.uses, shapes)).keys() == claim.spans.keys() and {*claim.tensors, *claim.shared} == {
            *slots
        }:
            tensors, shared = ({slot: slots[slot] for slot in part} for part in (claim.tensors, claim.shared))
            return replace(claim, tensors=tensors, shared=shared)
    return claim


def _compare(claim: ModuleClaim, planned: Sequence[_PlannedModule], path: Path, shapes: Mapping[str, Shape]) -> None:
    """Raise VerificationFailed unless the plan has the claim's places, tensors and numbers."""
    if len(planned) > 1:
        raise _disagreement(claim, path, "the tensors of one module are applied as those of several",
                            ", ".join(quoted(p.name) for p in planned), claim.name)  # fmt: skip
    uses = planned[0].uses if planned else []
    applied = dict(_spans(uses, shapes))
    if len(applied) < len(uses):
        raise _disagreement(claim, path, "how often an adapter's module is applied", "twice", "once")
    for span in sorted({*applied, *claim.spans}):
        if span not in applied or span not in claim.spans:
            raise _disagreement(claim, path, "what an adapter's module changes", _places(applied), _places(claim.spans))
        if not isclose(applied[span], claim.spans[span], rel_tol=SCALE_TOLERANCE):
            raise _disagreement(claim, path, "how strongly an adapter's module is applied",
                                f"{applied[span]:g} on {quoted(span.key)}", f"{claim.spans[span]:g}")  # fmt: skip
    for _, use in uses:
        _compare_formula(claim, use, path)


def _compare_formula(claim: ModuleClaim, use: PatchPart, path: Path) -> None:
    patch = use.patch
    if patch.algorithm != claim.kind:
        raise _disagreement(claim, path, "the formula of an adapter's module", patch.algorithm, claim.kind)
    claimed = {**claim.tensors, **claim.shared}
    planned = {slot: info.name for slot, info in patch.module.slots.items()}
    if claimed != planned:
        raise _disagreement(claim, path, "what the tensors of an adapter's module are", str(planned), str(claimed))
    scale = patch.scalars.get("scale", 1.0)
    if not isclose(scale, claim.scale, rel_tol=SCALE_TOLERANCE):
        raise _disagreement(claim, path, "the scale of an adapter's module", f"{scale:g}", f"{claim.scale:g}")
    stated = {**dict(patch.settings), **patch.scalars}
    for name, value in claim.settings.items():
        if name in stated and stated[name] != value:
            raise _disagreement(claim, path, f"{name} of an adapter's module", str(stated[name]), str(value))
    axis = patch.magnitude[0] if patch.magnitude else ""
    if axis != claim.axis:
        raise _disagreement(claim, path, "the axis of DoRA's magnitude", axis or "none", claim.axis or "none")


def _spans(uses: Sequence[tuple[str, PatchPart]], shapes: Mapping[str, Shape]) -> Iterator[tuple[TargetRows, float]]:
    for name, use in uses:
        p, shape = use.piece, shapes.get(name, use.patch.view.shape)
        if len(shape) == 3 and (p.start, p.size) == (0, prod(shape)):  # experts, seen as matrices or as rows of all
            p = p._replace(stop=shape[0], cols=prod(shape[1:]))
        yield TargetRows(name, p.start, p.stop, p.cols, p.transposed, use.start), use.strength


def _places(spans: Mapping[TargetRows, float]) -> str:
    """Return the spans as text for messages."""
    texts = [
        f"rows {s.start} to {s.stop} of {quoted(s.key)}{' transposed' if s.transposed else ''}" for s in sorted(spans)
    ]
    return "; ".join(texts) or "nowhere"


def _network(plan: Plan, targets: Sequence[OutputTensor]) -> str:
    """Return the prefix of the only network of the base that a GGUF file holds, made of a base of another container; ""
    for all other outputs."""
    if plan.base.gguf is not None or any(file.alignment == 1 for file in plan.files):
        return ""
    prefixes = {t.name.removesuffix(t.stored) for t in targets}
    if len(prefixes) > 1:
        raise VerificationFailed("the plan takes tensors of several networks", listed(sorted(prefixes)), REPORT_HEADERS)
    return next(iter(prefixes), "")


def check_sources(
    base: Index, adapters: Sequence[Match], targets: Sequence[OutputTensor], *, network: str = ""
) -> None:
    """Raise VerificationFailed unless every tensor of the base is written under its own name, from the base or from an
    adapter that replaces it, and no other tensor is. `network`: the prefix of the tensors that are written."""
    of_base, files = base.tensors, {f for m in adapters for f in m.adapter.index.files}
    written = {t.name: t for t in targets}
    added = {key for m in adapters for key in (*m.separated, *m.created)}
    recoded = [
        p for key, p in base.packed.items() if key in written and written[key].packing.encoding is not p.encoding
    ]
    dropped = {name for packing in recoded for name in packing.names}  # scales of weights that are stored otherwise now
    if recoded:  # and those of caches, which belong to no weight
        dropped |= base.packing_names.difference(*(packing.names for packing in base.packed.values()))
    new = {name for t in targets if t.packing.encoding.new_scales for name in t.packing.names}
    if left := sorted(dropped & written.keys() - new):
        raise VerificationFailed(
            "the plan keeps the scale of a weight that needs none", quoted(left[0]), REPORT_HEADERS
        )
    for name, info in of_base.items():
        if name in dropped or name in new or not name.startswith(network):
            continue
        target = written.get(name)
        source = target.source if target is not None else None
        if source is None or (source is not info and source != info and source.file not in files):
            where = f"{base.path}: {quoted(name)} from {quoted(source.name) if source else 'nowhere'}"
            raise VerificationFailed("the plan takes a tensor of the base from another place", where, REPORT_HEADERS)
    if extra := sorted(written.keys() - of_base.keys() - added - new):
        raise VerificationFailed(
            "the plan writes a tensor that the base does not have", quoted(extra[0]), REPORT_HEADERS
        )


def _disagreement(claim: ModuleClaim, path: Path, what: str, planned: str, read: str) -> VerificationFailed:
    keys = ", ".join(quoted(key) for key in dict.fromkeys(s.key for s in claim.spans)) or "nothing"
    where = f"{path}: {quoted(claim.name)} on {keys}: the plan says {planned}, the second reading {read}"
    return VerificationFailed(f"the plan and a second reading of the adapter disagree on {what}", where, REPORT_HEADERS)
