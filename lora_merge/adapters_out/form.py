"""What becomes of each module of an output, from headers alone. No torch.

A plan prints forms and a run fills them. What a dialect cannot hold is refused here, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from ..adapter_options import KEEP
from ..algorithms import ALGORITHMS
from ..algorithms.whole import FULL, SET
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES
from ..errors import FitError
from ..merge_methods import COMBINATIONS
from .dialects import Dialect
from .groups import Filled, Place, PlaceChange, Target, is_plain, rank_of_change
from .job import AUTO, FACTORS, GIVE_RANK, IN_FULL, WHOLE, AdapterJob, algorithm_in
from .peft.config import is_table
from .peft.kronecker import TO_LORA
from .rank_rules import COUNT, EXACT, SAME, Rule

NOT_LOW_RANK: Final = "the result is not low-rank, so it has no exact factors"
NO_FACTORS_OF_STACKS: Final = "the weights of stacked experts have no factors in these formats"

FOR_KOHYA: Final = f"{GIVE_RANK} --to kohya"

MATRIX_ALGORITHMS: Final = (FULL.name, SET.name)
"""Algorithms whose change of any rows is a whole matrix again."""


Kind: TypeAlias = Literal["value", "vector", "copy", "matrix"]
"""What is stored: a new value, the change of a vector, the input's tensors as they are, or a change of a matrix."""


@dataclass(frozen=True)
class Form:
    """What becomes of one module, as far as headers show it."""

    kind: Kind
    algorithm: str
    """Of a copy that of the input. Else whole matrices, factors, or AUTO: the smaller of both, when ranks are known."""
    rule: Rule
    """By which factors are cut."""
    rank: int | None = 0
    """Of the factors; None: the numbers decide."""
    highest: int = 0
    """The most that the rank can be, which is what the disk has to hold."""
    whole: bool = True
    """Whether a whole parameter is stored: by AUTO, if factors of the highest rank are not smaller."""
    dense: bool = False
    """Whether the change has no factors, and is decomposed as a whole matrix."""
    renamed: bool = False
    """Whether the stored factors of a plain LoRA are written as they are, with the same scale."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan prints: the algorithm, and the rank if headers show it, else 0."""
        if self.whole and self.rank is not None:
            return {"algorithm": WHOLE, "rank": 0}
        algorithm = FACTORS if self.algorithm == AUTO else self.algorithm
        return {"algorithm": algorithm, "rank": 0 if self.whole else self.rank or 0}


def matrix_form(  # noqa: PLR0913  # facts of one matrix
    algorithm: str, rule: Rule, matrix: tuple[int, int], ranks: Sequence[int | None], *, name: str, fix: str,
    same: Sequence[int | None] | None = None, cut: bool = False,
) -> Form:  # fmt: skip
    """Return the form of the change of a matrix; FitError for factors of a change that has none and that no rule cuts.

    `ranks`: of the terms of the change; None for one that is not a product of factors. `same`: the ranks to which the
    rule `same` refers, if they are others. `cut`: whether small directions are cut even if the rule is `exact`.
    """
    if algorithm == WHOLE:
        return Form("matrix", WHOLE, rule)
    # Step 1: the rank.
    (out, cols), short = matrix, min(matrix)
    most = short if None in ranks else min(short, sum(r or 0 for r in ranks))
    rank: int | None = None
    if rule.name == EXACT:
        rank = most
    elif rule.name == SAME:
        rank = min(most, max((r or most for r in same or ranks), default=most), rule.ceiling or most)
    elif rule.name == COUNT:
        rank = min(most, rule.ceiling or most)
    highest = min(most, rule.ceiling or most) if rank is None else rank
    # Step 2: factors, or a whole matrix.
    exactly = rule.name == EXACT and not cut
    uncut = exactly and None in ranks
    if uncut and algorithm != AUTO:
        raise FitError(NOT_LOW_RANK, name, fix)
    whole = algorithm == AUTO and (uncut or highest * (out + cols) >= out * cols)
    rule = replace(rule, name="energy", value=1.0) if rule.name == EXACT and cut else rule
    dense = algorithm in (FACTORS, AUTO) and None in ranks and not exactly
    return Form("matrix", algorithm, rule, rank, highest, whole, dense)


def _form_of_combined(  # noqa: PLR0913  # facts of one matrix
    job: AdapterJob, rule: Rule, weights: Sequence[Target], matrix: tuple[int, int], *, ranks: Sequence[int | None],
    name: str,
) -> Form:  # fmt: skip
    """Return the form of a matrix of combined changes; errors as for `matrix_form`. `weights`: those with its rows;
    `ranks`: of the changes of these rows."""
    # All rows of a weight's change are computed in one way.
    linear = COMBINATIONS[job.method].linear and not any(strength for t in weights for _, _, strength in t.values)
    factored = linear and not any(None in target.ranks for target in weights)
    cut = job.command == "resize"
    form = matrix_form(job.algorithm, rule, matrix, ranks if factored else [None], name=name, fix=GIVE_RANK, same=ranks,
                       cut=cut)  # fmt: skip
    if any(t.stacked for t in weights) and not form.whole and (cut or rule.name != EXACT):
        raise FitError(NO_FACTORS_OF_STACKS, name, IN_FULL)
    return form


def form_of_module(job: AdapterJob, to: Dialect, module: Filled) -> Form:
    """Return the form of a module of a conversion; FitError if the dialect has none for it."""
    place, patches = module.place, [s.patch for s in module.shares]
    rule = job.rules.of_layer(place.label, kernel=place.kernel)
    # Step 1: what is no change of a matrix.
    if module.value is not None or place.vector:
        return _form_of_vector(to, module, rule)
    # Step 2: a module that keeps its algorithm.
    algorithm = FACTORS if job.algorithm == KEEP else job.algorithm
    if job.keeps_forms and not all(map(is_plain, patches)):
        if is_copied(module, to) or not any(p.algorithm in MATRIX_ALGORITHMS for p in patches):
            if not can_copy(module, to):
                raise FitError(f"{to.name} cannot hold {patches[0].algorithm} in this place", place.name, TO_LORA)
            row = ALGORITHMS[patches[0].algorithm]
            rank = row.rank(patches[0].shapes) if row.rank else 0
            return Form("copy", row.name, rule, rank, rank, whole=False)
        algorithm = WHOLE
    elif job.keeps_forms and any(p.magnitude for p in patches):
        _expect_magnitudes(module, to)
        patches = [replace(p, magnitude=None) for p in patches]  # it stays next to the factors
    # Step 3: a change of a matrix.
    if algorithm == WHOLE and "diff" not in to.endings and not to.whole:
        raise FitError(f"{to.name} has no place for whole matrices", place.name,
                       "write --rank 32, or choose the format kohya or comfy")  # fmt: skip
    matrix, name = place.view.matrix, place.name
    if job.combines:
        (first, *others) = module.parts  # the factors of one change in several weights have equal rows
        ranks = [rank_of_change(s.patch) for s in module.shares if s.strength] if others else first.layer.ranks
        return _form_of_combined(job, rule, [part.whole for part in module.parts], matrix, ranks=ranks, name=name)
    form = matrix_form(algorithm, rule, matrix, [rank_of_change(p) for p in patches], name=name, fix=FOR_KOHYA)
    return replace(form, renamed=_is_renamed(job, to, module))


def form_of_difference(job: AdapterJob, to: Dialect, place: Place, *, fresh: bool) -> Form:
    """Return the form of a parameter's difference between two checkpoints, if there is one. `fresh`: whether its new
    value is stored."""
    rule = job.rules.of_layer(place.label, kernel=place.kernel)
    if fresh or place.vector:
        return Form("value" if fresh else "vector", WHOLE, rule)
    if rule.name == EXACT:  # every direction that numbers have
        rule = replace(rule, name="energy", value=1.0)
    algorithm = algorithm_in(job.algorithm, to)
    return matrix_form(algorithm, rule, place.view.matrix, [None], name=place.label, fix=GIVE_RANK)


def _form_of_vector(to: Dialect, module: Filled, rule: Rule) -> Form:
    """Return the form of a new value or of the change of a vector; FitError if the dialect has none for it."""
    place = module.place
    if module.value is not None:
        ending, (_, strength) = "diff" if place.parameter == "weight" else "diff_b", module.value
        if ending not in to.endings and (not to.whole or strength != 1):
            raise FitError(f"{to.name} has no place for whole tensors", place.name, "convert to kohya, comfy or peft")
        return Form("value", WHOLE, rule)
    if vector_ending(place, to) is None and (place.bare or not to.whole):
        raise FitError(f"{to.name} has no place for biases and norms", place.name, "convert to kohya or comfy")
    return Form("vector", WHOLE, rule)


def _is_renamed(job: AdapterJob, to: Dialect, module: Filled) -> bool:
    """Return whether no number of a module and not its α change."""
    if not job.keeps_forms or job.alpha != KEEP or not to.alpha or len(module.shares) != 1:
        return False
    (share,) = module.shares
    patch = share.patch
    plain = patch.algorithm == FACTORS and is_plain(patch) and patch.magnitude is None and patch.numbers.get("scale")
    if not plain or share.strength != 1 or not share.is_all(module.place):
        return False
    dtypes = {patch.module.slots[slot].dtype for slot in ("up", "down")}
    return dtypes == {written_dtype(job, (share,))} and 0 < patch.shapes["down"][0] <= min(module.place.view.matrix)


def holds_columns(module: Filled, to: Dialect) -> bool:
    """Return whether the magnitudes of a module are those of its columns, and a dialect has a place for them: PEFT's of
    embeddings are."""
    (share, *others) = module.shares
    of_columns = (share.patch.magnitude or ("out",))[0] == "in" and not others and share.is_all(module.place)
    has_place = to.copies or ("table_up" in to.endings and is_table(module.place, module.shares))
    return of_columns and share.strength == 1 and has_place


def _expect_magnitudes(module: Filled, to: Dialect) -> None:
    """Raise FitError for a dialect that has no place for the magnitudes of DoRA of a module."""
    of_rows = all(s.patch.magnitude is not None and s.patch.magnitude[0] == "out" for s in module.shares)
    if not holds_columns(module, to) and not (of_rows and "magnitude" in to.endings):
        raise FitError(f"{to.name} has no place for this magnitude of DoRA", module.place.name,
                       TO_LORA)  # fmt: skip


def can_copy(module: Filled, to: Dialect) -> bool:
    """Return whether the tensors of a module can be written in a dialect as they are, but for their scale."""
    (share, *others) = module.shares
    patch = share.patch
    known = all(to.copied(patch.module, patch.algorithm, module.place.parameter, slot) for slot in patch.module.slots)
    return known and not others and share.is_all(module.place) and (not to.products or is_product(share, to))


def is_product(share: PlaceChange, to: Dialect) -> bool:
    """Return whether a dialect writes the tensors of a module as they are and keeps α in its configuration."""
    return not to.alpha and share.patch.algorithm in to.products and share.patch.magnitude is None


def is_copied(filled: Filled, to: Dialect) -> bool:
    """Return whether the one tensor of a change is that of a place as it is, and the dialect has a key for it."""
    (share, *others) = filled.shares
    module, algorithm = share.patch.module, share.patch.algorithm
    known = all(to.copied(module, algorithm, filled.place.parameter, slot) for slot in module.slots)
    return known and not others and share.strength == 1 and share.is_all(filled.place)


def vector_ending(place: Place, to: Dialect) -> str | None:
    """Return the ending of the change of a bias, a norm or another vector; None where the dialect has none."""
    slot = {"weight": "w_norm" if place.norm else "diff", "bias": "b_norm" if place.norm else "diff_b"}
    slot_name = slot[place.parameter]
    plain = {"w_norm": "diff", "b_norm": "diff_b"}.get(slot_name, slot_name)
    ending = to.endings.get(slot_name, to.endings.get(plain))
    in_factors = slot_name == "diff_b" and place.view.matrix[1] == 1  # PEFT's lora_B is a layer: its bias is [out]
    return to.endings.get("up_bias") if ending is None and in_factors else ending


def written_dtype(job: AdapterJob, shares: Sequence[PlaceChange]) -> str | None:
    """Return the dtype of the output as files name it: as asked, else that of the first factor; None for as stored."""
    if job.dtype is not None:
        return job.dtype
    if job.inputs.dtype != KEEP:
        return DTYPES[job.inputs.dtype]
    kinds = [info.dtype for s in shares for info in s.patch.module.slots.values() if info.dtype in FLOATS]
    if not shares:
        return None
    wide = [k for k in kinds if ITEM_BYTES[k] > 1]
    return wide[0] if len({*wide}) == 1 else "F32"
