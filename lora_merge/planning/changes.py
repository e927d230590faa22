"""The changes of all adapters of a job to its base, and whether its stored weights can take them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ..adapters.tensor_values import FileValues
from ..disk.reader import Reader
from ..dtypes import WHOLE_DTYPES, StoredTensor, spoken
from ..errors import InputError
from ..files.checkpoint import Index
from ..job import Adapter
from ..matching.conflicts import check_addable, with_overlap_notes
from ..matching.formula import check_settings
from ..matching.match import KnownBase, adapter_context, match_adapter
from ..matching.patch import Match
from ..matching.tied_embeddings import check_separations
from ..matching.values import replace_in_turn, values_as_changes
from ..merge_methods import METHODS
from ..models.part_factors import Strengths, check_effect
from ..models.weights import Weight, absent_weight
from ..safe_regex import Steps
from ..text import Note
from .inputs import Inputs

CHECKED_BYTES: Final = 64
"""Parts of quantised weights of up to so many bytes are checked here, larger ones when they are read."""

USUAL: Final = 4  # a larger strength is probably a mistake: 80 instead of 0.8

IN_ITS_DTYPE: Final = "export the adapter again, this tensor in the dtype that the base has"


@dataclass(frozen=True)
class Matches:
    """The changes of each adapter of a job to its base."""

    inputs: Inputs
    adapters: tuple[Match, ...]

    @cached_property
    def weights(self) -> Mapping[str, Weight]:
        """Name → the weight before the changes."""
        return weights(self.inputs.base, self.adapters)


def match(inputs: Inputs, *, every_setting: bool = True) -> Matches:
    """Return the changes of every adapter to the base; FitError if one does not fit.

    `every_setting`: whether a setting of the user that no formula uses is an error.
    """
    with Reader(a.index for a in inputs.adapters) as reader, inputs.base.unread.blamed(inputs.base.path):
        for adapter in inputs.adapters:
            reader.expect_single_values(adapter.index.tensors.values())
        return Matches(inputs, matches(inputs, FileValues(reader), every_setting=every_setting))


def matches(inputs: Inputs, values: FileValues, *, every_setting: bool = True) -> tuple[Match, ...]:
    """Return the match of every adapter; `values` reads the few stored tensors whose values the match depends on."""
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
    largest = max((part.strength for part in match.parts), key=abs, default=adapter.strength)
    if abs(largest) > USUAL:
        where = "" if largest == adapter.strength else " of some weights"
        yield Note(f"strength {largest:g}{where} is unusual; most adapters are trained for 0 to 2")


def check_stored(matched: Matches) -> None:
    """Raise InputError if a changed weight is quantised and cannot be decoded, or cannot be encoded again."""
    job, base, matched_adapters = matched.inputs.job, matched.inputs.base, matched.adapters
    # Adapters: quantised weights that they change, and values that they replace.
    whole = {key for m in matched_adapters for key in (*m.replaced, *m.bases, *m.grown, *m.created)}
    replaced = {key for m in matched_adapters for key in (*m.replaced, *m.bases)}
    changed = whole.union(*(m.uses for m in matched_adapters))
    base.unread.check(base.path, job.dtype, changed)
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
                small = not part.group and part.info.nbytes <= CHECKED_BYTES
                if small and (fault := encoding.fault(role, values.elements(part.info))):
                    raise InputError(f"a weight cannot be decoded: {fault}", where, "download the model again")


def _check_values(base: Index, replaced: Mapping[str, StoredTensor]) -> None:
    """Raise InputError if a value cannot take the place of the base's: whole numbers, which may be codes without their
    scales, replace only whole numbers of the same dtype that are no codes."""
    for key, info in replaced.items():
        of_base = base.tensors.get(key)
        dtypes = {info.dtype} if of_base is None or key in base.packed else {info.dtype, of_base.dtype}
        if of_base is not None and not WHOLE_DTYPES.isdisjoint(dtypes) and (key in base.packed or len(dtypes) > 1):
            where = f"{info.file}: {info.name} is {spoken(info.dtype)}, the base has {spoken(of_base.dtype)}"
            raise InputError("whole numbers replace only a weight of the same dtype", where, IN_ITS_DTYPE)


def weights(base: Index, matched: Sequence[Match]) -> dict[str, Weight]:
    """Return key → the weight that changes are added to, in its new size; weights that the base lacks come last.

    An adapter that stores a weight of the base itself replaces the base's.
    """
    tensors = {**base.tensors, **{key: info for match in matched for key, info in match.bases.items()}}
    by_key = {key: Weight(info.shape, info) for key, info in tensors.items()}
    packed_keys = (key for key in base.packed if tensors[key] is base.tensors[key])
    by_key.update({key: Weight(tensors[key].shape, tensors[key], base.packed[key]) for key in packed_keys})
    separated = {key: info.name for match in matched for key, info in match.separated.items()}
    for match in matched:
        for key, shape in match.grown.items():
            if any(key in other.uses for other in matched):  # at strength 0 the weight keeps its size
                by_key[key] = Weight(shape, tensors[key])
        for key, (shape, near) in match.created.items():
            by_key[key] = (
                by_key[separated[key]] if key in separated else absent_weight(key, shape, neighbour(base, near))
            )
    return by_key


def neighbour(base: Index, key: str) -> StoredTensor:
    """Return the tensor whose dtype a new tensor next to it gets; in place of codes it has BF16."""
    info, packed = base.tensors[key], base.packed.get(key)
    return replace(info, dtype="BF16") if packed is not None and packed.encoding.quantised else info
