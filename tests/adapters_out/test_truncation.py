"""Truncations against numpy's SVD: not further from ΔW than the optimum, and not nearer either."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lora_merge.adapters_out import matrix_svd
from lora_merge.adapters_out.delta import apart_from
from lora_merge.adapters_out.factors import Triples, inverse_of_triangle, of_factors, rounded, squares_of, triangle
from lora_merge.adapters_out.matrix_svd import of_dense, of_stack, orthonormal
from lora_merge.adapters_out.rank_rules import COUNT, Rule, choose, parse
from lora_merge.adapters_out.values import widened
from lora_merge.engine.row_matrix import RowMatrix
from tests.kit.spectra import SPECTRA, example


def pair(rank: int, out: int = 30, cols: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -2, rank, dtype=torch.float64)
    return (torch.randn(out, rank, dtype=torch.float64, generator=generator) * scale,
            torch.randn(rank, cols, dtype=torch.float64, generator=generator))  # fmt: skip


def error(delta: torch.Tensor, found: Triples, rank: int) -> float:
    up, down = found.pair(rank)
    return float(np.linalg.norm(delta.numpy() - up @ down))


def optimum(delta: torch.Tensor, rank: int) -> float:
    return float(np.linalg.norm(np.linalg.svd(delta.double().numpy(), compute_uv=False)[rank:]))


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_factors_are_cut_to_the_best_of_their_rank(rank: int) -> None:
    for left, right in (pair(12, seed=0), pair(12, seed=1)):
        triples = of_factors(left, right)
        best = optimum(left @ right, rank)
        assert error(left @ right, triples, rank) == pytest.approx(best, rel=1e-9)
        assert triples.squares == pytest.approx(float((left @ right).square().sum()), rel=1e-12)


@pytest.mark.parametrize("size", [1, 32, 33, 150])
def test_inverse_of_a_triangle_has_the_digits_of_numpy(size: int) -> None:
    matrix = torch.randn(2 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).numpy()
    lower = np.linalg.cholesky(matrix.T @ matrix)
    inverse = inverse_of_triangle(lower)
    np.testing.assert_allclose(inverse @ lower, np.eye(size), atol=1e-14)
    np.testing.assert_allclose(inverse, np.linalg.inv(lower), rtol=1e-10, atol=1e-14)


def test_file_does_not_depend_on_the_factoring() -> None:
    left, right = pair(6)
    turn = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 100
    a, b = of_factors(left, right), of_factors(left @ turn, torch.linalg.solve(turn, right))
    for mine, other in zip(a.pair(4), b.pair(4), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-8, atol=1e-10)


def test_directions_that_cancel_are_not_stored() -> None:
    left, right = pair(5)
    found = of_factors(torch.cat((left, -left), 1), torch.cat((right, right), 0))
    assert found.values.size == 0 or float(found.values[0]) < 1e-12
    found = of_factors(torch.cat((left, left), 1), torch.cat((right, right), 0))
    assert len(found.values) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spectrum", [*SPECTRA])
def test_search_is_within_its_promise(spectrum: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_svd, "exactly", lambda *_: pytest.fail("the exact way"))
    delta = example(spectrum).to(dtype)
    found = of_dense(RowMatrix.of(delta), Rule(COUNT, 7))
    best = optimum(delta, 7)
    least = 1e-6 * float(delta.norm()) if dtype == torch.float32 else 1e-12
    assert best * (1 - 1e-6) - least <= error(delta.double(), found, 7) <= best * (1 + matrix_svd.EXCESS) + least


@pytest.mark.parametrize("text", ["energy:0.5", "fro:0.6", "ratio:4", "above:0.5", "sum:0.2", "9", "energy:0.9"])
@pytest.mark.parametrize("spectrum", ["slow", "signal above noise"])
def test_rules_choose_of_the_values_that_were_found_what_they_choose_of_all(
    spectrum: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the largest singular values tell the rank, the others are not computed."""
    monkeypatch.setattr(matrix_svd, "BLOCK_COLUMNS", 12)
    delta, rule = example(spectrum), parse(text)
    every = np.linalg.svd(delta.numpy(), compute_uv=False)
    every = every[every > 1e-9]
    found = of_dense(RowMatrix.of(delta), rule)
    assert choose(rule, found.values.tolist(), total=found.squares) == choose(rule, every.tolist())


def test_each_matrix_of_a_stack_has_the_triples_that_it_has_alone() -> None:
    """They are ready after different numbers of steps."""
    stack, rule = [example("flat"), example("steep"), example("slow")], Rule(COUNT, 7)
    for one, alone in zip(
        of_stack([RowMatrix.of(m) for m in stack], [rule] * 3),
        (of_dense(RowMatrix.of(m), rule) for m in stack),
        strict=True,
    ):
        for mine, other in zip(one.pair(7), alone.pair(7), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(150, 140), (140, 150)])
def test_gram_matrix_gives_what_a_decomposition_gives(shape: tuple[int, int]) -> None:
    delta = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = of_dense(RowMatrix.of(delta), Rule(COUNT, 60))
    assert found.values.shape == (60,)
    assert error(delta, found, 60) == pytest.approx(optimum(delta, 60), rel=1e-10)
    u, _, v = torch.linalg.svd(delta, full_matrices=False)
    steep = u * torch.logspace(0, -9, 140, dtype=torch.float64) @ v  # its squares have too few digits
    assert error(steep, of_dense(RowMatrix.of(steep), Rule(COUNT, 130)), 130) == pytest.approx(
        optimum(steep, 130), rel=1e-3
    )


@pytest.mark.parametrize("nearly", [1.0, 1e-2, 1e-4, 1e-9, 0.0])
def test_triangles_of_columns_that_repeat_others_are_exact(nearly: float) -> None:
    generator = torch.Generator().manual_seed(2)
    one = torch.randn(2, 40, 5, generator=generator, dtype=torch.float64)
    matrix = torch.cat((one, one + nearly * torch.randn(2, 40, 5, generator=generator, dtype=torch.float64)), 2)
    q, r = orthonormal(matrix)
    torch.testing.assert_close(q @ r, matrix, rtol=0, atol=1e-13)
    torch.testing.assert_close(q.mT @ q, torch.eye(10, dtype=torch.float64).expand(2, -1, -1), rtol=0, atol=1e-10)
    for alone in matrix.numpy():
        basis, turn, r = triangle(alone)
        np.testing.assert_allclose(basis @ turn @ r, alone, rtol=0, atol=1e-13)
        np.testing.assert_allclose((basis @ turn).T @ basis @ turn, np.eye(10), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_matrix_is_decomposed_exactly(shape: tuple[int, int]) -> None:
    delta = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert error(delta, of_dense(RowMatrix.of(delta)), 5) == pytest.approx(optimum(delta, 5), rel=1e-12)


def test_rounding_one_factor_is_taken_back_by_the_other() -> None:
    """Only within the rows of A, so that much is gained where the rank is near the width."""
    left, right = of_factors(*pair(8, cols=10)).pair(8)
    up, down = (widened(bits, "BF16", np.float64) for bits in rounded(left, right, "BF16"))
    first, other = (torch.from_numpy(t).bfloat16().double().numpy() for t in (left, right))
    plain = np.linalg.norm(left @ right - first @ other)
    assert np.linalg.norm(left @ right - up @ down) < 0.85 * plain


@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-5, 1e-8, 1e-12])
def test_residual_of_a_pair_has_its_digits_however_small(share: float) -> None:
    """‖Δ − B A‖ in fp32, against fp64; as a difference of squares it would be noise from 1e-3 on."""
    left, right = pair(4, 300, 900)
    rest = torch.randn(300, 900, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    delta = (left @ right + rest * share * (left @ right).norm() / rest.norm()).float()
    off = apart_from(RowMatrix.of(delta), left, right, float(delta.double().square().sum()))
    assert math.sqrt(off) == pytest.approx(float((delta.double() - left @ right).norm()), rel=1e-3)


def test_norms_of_products_keep_their_digits() -> None:
    left, right = pair(3)
    near = torch.cat((left, -left * (1 + 1e-9)), 1), torch.cat((right, right), 0)
    assert math.sqrt(squares_of(*near)) == pytest.approx(1e-9 * float((left @ right).norm()), rel=1e-4)


def test_flat_spectrum_is_found_by_search_and_not_by_the_exact_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding noise has one; without enough rounds each such layer took ten times as long."""
    monkeypatch.setattr(matrix_svd, "exactly", lambda *_: pytest.fail("the exact way"))
    noise = torch.randn(800, 800, generator=torch.Generator().manual_seed(1))
    found = of_dense(RowMatrix.of(noise), Rule(COUNT, 16))
    values = np.linalg.svd(noise.double().numpy(), compute_uv=False)
    lost = found.squares - float(np.square(found.values[:16]).sum())
    assert lost**0.5 <= (1 + matrix_svd.EXCESS) * np.sqrt((values[16:] ** 2).sum())
