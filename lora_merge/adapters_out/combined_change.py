"""Makes the tensors of one layer of the output: the changes are combined, cut to a rank, and rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..engine.combination import coefficients, combined_rows
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import HOST, Placement, finite, odd
from ..errors import TooLarge, beyond_fp64
from ..merge_methods import COMBINATIONS
from .change import Change, largest_rank
from .decomposition.factors import of_factors
from .decomposition.matrix_svd import of_dense, values_of
from .decomposition.singular_triples import Triples
from .decomposition.storage_rounding import Grams, apart, apart_from, in_range, inner, rounded, squares_of, stored
from .groups import Target
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import Layer, Norms, Spectrum
from .rank_rules import EXACT, Rule, choose, share_out
from .rounding import Distinct, Effect, Totals, effect_of_product, totals_of_rows

LinAlgError: Final[type[RuntimeError]] = vars(torch.linalg)["LinAlgError"]  # torch's types lack it

LEAST_SCALE: Final = 2.0**-126
"""The smallest number that fp32 holds with all its digits."""

PLAIN: Final = 1e-3
"""The share of ‖Δ‖² that is left out is a difference of squares from this size on, where fp32 is exact enough too."""


@dataclass(frozen=True)
class Delta:
    """Δ of one layer before it is cut to a rank: factors, or a whole matrix by its rows."""

    left: Tensor | None
    right: Tensor | None
    whole: RowMatrix | None
    before: int  # the largest rank of the inputs; 0 where one of them is a matrix without factors
    norms: Mapping[str, Norms] = field(default_factory=dict)  # of each layer that the weight is stored as
    known: Totals | None = None  # of a whole matrix, where they are known

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) of Δ."""
        return self.rows.shape

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        assert self.left is not None and self.right is not None, "factors come in pairs"
        return self.left, self.right

    def of(self, part: Target) -> Delta:
        """Return the rows of Δ that a layer stores; of its factors, the columns that are not zero there."""
        if not part.runs:
            return self
        ranks, order = part.ranks, torch.cat([torch.arange(start, stop) for start, stop in part.runs])
        before = 0 if None in ranks else min(max((rank or 0 for rank in ranks), default=0), *part.matrix)
        if self.whole is not None:
            return Delta(None, None, self.whole.of_rows(order), before)
        left, right = self.factors
        left = left[order]
        used = left.any(0)
        if not bool(used.any()):
            used[:1] = True
        return Delta(left[:, used], right[used], None, before)

    @property
    def rows(self) -> RowMatrix:
        """Δ [out, cols] by rows."""
        return RowMatrix.product(*self.factors) if self.whole is None else self.whole

    def dense(self) -> Tensor:
        """Return Δ [out, cols]."""
        return self.rows.dense()

    @cached_property
    def totals(self) -> Totals:
        """The totals of a whole Δ."""
        return self.known or totals_of_rows(self.rows)

    @cached_property
    def squares(self) -> float:
        """‖Δ‖²: of factors from triangles, as R×R products of them would lose half of the digits where terms cancel."""
        return squares_of(*self.factors, self.grams) if self.whole is None else self.totals.squares

    @property
    def effect(self) -> Effect:
        """The numbers of Δ, as far as they are looked at."""
        return effect_of_product(*self.factors) if self.whole is None else self.totals.effect

    @cached_property
    def grams(self) -> Grams:
        """LᵀL and R Rᵀ of the factors."""
        return Grams.of(*self.factors)


def combine(job: AdapterJob, target: Target, changes: Sequence[Change], seeds: Sequence[str]) -> Delta:
    """Return Δ of one layer by the job's method. `seeds`: one for each change."""
    row = COMBINATIONS[job.method]
    factored = row.linear and not target.vector and all(c.left is not None for c in changes)
    before = largest_rank(changes)
    if not factored:
        whole = combined_rows(job.method, [c.rows() for c in changes], [c.strength for c in changes], job.numbers,
                              seeds, vector=target.vector)  # fmt: skip
        return Delta(None, None, whole.cached(), before)
    weights = coefficients(job.method, _products(changes) if job.method not in ("sum", "mean") else (),
                           [c.strength for c in changes], job.numbers)  # fmt: skip
    factors = []
    for c, weight in zip(changes, weights, strict=True):
        assert c.left is not None and c.right is not None, "all are factors"
        factors.append((c.left if weight == 1 else c.left * weight, c.right))
    return Delta(*stacked(factors), None, before)


def stacked(factors: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return pairs of factors side by side; those with the same right factor become one."""
    distinct, rights, lefts = Distinct(), list[Tensor](), list[Tensor]()
    for left, right in factors:
        bits = right.contiguous().reshape(-1).view(torch.uint8).numpy().data
        first = distinct.first(len(rights), bits, right.shape)
        if first == len(rights):
            rights.append(right)
            lefts.append(left)
        else:
            lefts[first] = lefts[first] + left
    return torch.cat(lefts, 1), torch.cat(rights, 0)


def _products(changes: Sequence[Change]) -> list[list[float]]:
    """Return ⟨τᵢ, τⱼ⟩ = tr(LᵢᵀLⱼ · RⱼRᵢᵀ), from R×R matrices."""

    def product(a: Change, b: Change) -> float:
        assert a.left is not None and a.right is not None and b.left is not None and b.right is not None, "factors"
        return float(((a.left.mT @ b.left) * (a.right @ b.right.mT)).sum())

    return [[product(a, b) for b in changes] for a in changes]


@contextmanager
def decomposing(name: str) -> Iterator[None]:
    """Raise TooLarge, with the name of a layer, where the products of its numbers are too large for fp64."""
    try:
        yield
    except LinAlgError as e:
        raise beyond_fp64(name) from e


def spectrum(delta: Delta, rule: Rule, noise: float, at: Placement = HOST) -> Triples:
    """Return the singular triples of a layer, as many as its rule needs; matrices are decomposed at a placement."""
    if delta.whole is None:
        left, right = delta.factors
        if left.shape[1] <= min(left.shape[0], right.shape[1]):
            return of_factors(left[None], right[None], noise)[0]
    return of_dense(delta.rows, rule.of_inputs(delta.before), noise, at, delta.squares)


def shared_out(rule: Rule, layers: Iterable[tuple[str, Delta]], itemsize: int, noise: float) -> dict[str, int]:
    """Return the rank of each layer by the rule `size`, which looks at all of them; `itemsize`: bytes of a number."""
    spectra, widths = {}, {}
    everything = replace(rule, name="energy", value=1.0)
    for name, delta in layers:
        if delta.squares > 0:
            whole = delta.whole
            with decomposing(name):
                singular = spectrum(delta, everything, noise).values if whole is None else values_of(whole)
            values = singular.tolist()
            spectra[name] = values[: choose(everything, values)]
            widths[name] = sum(delta.matrix) * itemsize
    return share_out(spectra, widths, int(rule.value), rule.most)


class Cut(NamedTuple):
    """The cut of a layer: its rule, or a rank that is decided already; and its α, or α / rank where that is kept."""

    rule: Rule
    rank: int | None = None
    alpha: float | None = None
    scale: float = 1.0

    def alpha_of(self, rank: int) -> float:
        """Return α of a layer of this rank: the rank, where the α that is kept would be too small for fp32."""
        if self.alpha is not None:
            return self.alpha
        return rank * self.scale if abs(self.scale) >= LEAST_SCALE else float(rank)


def expect_finite(tensors: Iterable[Tensor], where: str) -> None:
    """Raise TooLarge, with the name of a layer, if a number that was cast to the dtype of the output is not finite."""
    if any(odd(t) and not bool(finite(t).all()) for t in tensors):
        raise TooLarge("a number is too large for the dtype of the output", where, "write --dtype fp32 or bf16")


@dataclass(frozen=True)
class Storage:
    """The form in which the layers of one run are stored."""

    algorithm: str
    dtype: torch.dtype
    noise: float  # singular values below this share of the largest one are noise of the inputs
    at: Placement = HOST  # where matrices are decomposed

    def layer(self, target: Target, delta: Delta, cut: Cut, triples: Triples | None = None) -> Layer:
        """Return the stored tensors of a layer. `triples`: of Δ, as many as the rule needs, if they are known."""
        if target.vector or self.algorithm == WHOLE:
            return self._whole(target, delta)
        layer = self._factored(target, delta, cut, triples)
        out, cols = delta.matrix
        if self.algorithm == AUTO and layer.algorithm == FACTORS and layer.rank * (out + cols) >= out * cols:
            return self._whole(target, delta)  # smaller, and nothing is cut
        return layer

    def _factored(self, target: Target, delta: Delta, cut: Cut, triples: Triples | None) -> Layer:
        """Return the layer as factors; as a whole matrix if it has none, which headers show (form.py)."""
        if cut.rule.name == EXACT and cut.rank is None:
            return self._exact(target, delta, cut) if delta.whole is None else self._whole(target, delta)
        rank = cut.rank
        rule = cut.rule if rank is None else replace(cut.rule, most=rank)  # no more vectors than are stored
        with decomposing(target.name):
            leading = triples or spectrum(delta, rule, self.noise, self.at)
        if rank is None:
            rank = choose(cut.rule.of_inputs(delta.before), leading.values.tolist(), total=leading.squares)
        return self._cut(target, delta, leading, rank, cut.alpha_of(rank))

    def _whole(self, target: Target, delta: Delta) -> Layer:
        """Return the whole matrix, rounded once."""
        stored = rounded(delta.rows, self.dtype)
        effect = None if delta.whole is None else stored.totals.effect
        tensors = {"diff": stored.numbers.reshape(target.shape)}
        return Layer(tensors, WHOLE, 0, delta.before, None, stored.totals.squares, stored.lost, effect=effect)

    def _exact(self, target: Target, delta: Delta, cut: Cut) -> Layer:
        """Return the factors side by side; where they have more columns than the weight has rank, one becomes the
        identity."""
        left, right = delta.factors
        out, cols = left.shape[0], right.shape[1]
        if left.shape[1] > min(out, cols):
            identity = torch.eye(min(out, cols), dtype=left.dtype, device=left.device)
            left, right = (identity, left @ right) if out <= cols else (left @ right, identity)
        alpha = cut.alpha_of(left.shape[1])
        scale = alpha / left.shape[1] if left.shape[1] else 1.0  # rank 0: no change
        grams = delta.grams if right is delta.right else None
        rows = None if grams is None else grams.rows
        if (shift := in_range(left, right, scale, self.dtype, grams)) is not None:
            left, right = left * shift, right / shift[:, None]
            rows = None if rows is None else rows / shift[:, None] / shift
        up, down = (left if scale == 1 else left / scale).to(self.dtype), right.to(self.dtype)
        rounded_up = up.to(left.dtype, copy=scale != 1)  # fp64 factors are stored as they are
        off = apart(left, right, rounded_up if scale == 1 else rounded_up.mul_(scale), down.to(right.dtype), rows)
        return self.pair(target.shape, delta.before, (up, down), alpha, (delta.squares, off))

    def _cut(self, target: Target, delta: Delta, triples: Triples, rank: int, alpha: float) -> Layer:
        """Return the leading triples as factors."""
        left, right = triples.pair(rank)
        scale = alpha / rank if rank else 1.0
        up, down = stored(left if scale == 1 else left / scale, right, self.dtype)
        real, wide = up.double() if scale == 1 else up.double() * scale, down.double()
        if delta.whole is not None:
            off = apart_from(delta.whole, real, wide, triples.squares)
        else:
            off = _left_out(delta, triples, (left, right), (real, wide))
        layer = self.pair(target.shape, delta.before, (up, down), alpha, (triples.squares, max(0.0, off)))
        return replace(layer, spectrum=Spectrum(triples.values.tolist(), triples.squares))

    def pair(
        self, shape: Sequence[int], before: int, pair: tuple[Tensor, Tensor], alpha: float, squares: tuple[float, float]
    ) -> Layer:  # fmt: skip
        """Return both factors in the shapes of a linear layer or of a convolution."""
        up, down = pair
        tensors = {
            "down": down.reshape(down.shape[0], *shape[1:]).contiguous(),
            "up": up.reshape(*up.shape, *(1 for _ in shape[2:])).contiguous(),
        }
        return Layer(tensors, FACTORS, down.shape[0], before, alpha, *squares)


def _left_out(
    delta: Delta, triples: Triples, leading: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor]
) -> float:  # fmt: skip
    """Return ‖Δ − Δ̂‖² for factors of Δ, the triples that are kept, and the stored pair.

    Where it is too small for a difference of squares, it is that of the triples left out, plus that of the rounding,
    less twice what Δ̂ has in common with the triples left out.
    """
    tail = max(0.0, triples.squares - float(triples.values[: leading[0].shape[1]].square().sum()))
    if tail > PLAIN * triples.squares:
        off = triples.squares - 2 * inner(*delta.factors, *pair) + inner(*pair, *pair)
        if off > PLAIN * triples.squares:
            return off
    off = apart(*leading, *pair)
    if tail > 1e-20 * triples.squares:
        off += tail - 2 * (inner(*delta.factors, *pair) - inner(*leading, *pair))
    return off
