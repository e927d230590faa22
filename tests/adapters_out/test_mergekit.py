"""Methods on ΔW against mergekit's formulas, written here again in numpy.

Source: mergekit 0.1.5, sparsify.py (magnitude_outliers, della_magprune), merge_methods/generalized_task_arithmetic.py
(sign consensus, `normalize`), karcher.py, model_stock.py, slerp.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kit.combining import SHAPE, changes, run

STRENGTHS = (0.5, 2.0, 1.25)


def arrays(count: int = 3) -> list[np.ndarray]:
    return [t.numpy() for t in changes(count)]


def magnitudes(x: np.ndarray, density: float) -> np.ndarray:
    """The ⌊density · numel⌋ numbers of the largest magnitude."""
    kept = np.zeros(x.size)
    kept[np.argsort(np.abs(x).ravel())[x.size - int(density * x.size) :]] = 1
    return x * kept.reshape(x.shape)


def outliers(x: np.ndarray, density: float, gamma: float) -> np.ndarray:
    """Those left when the ⌊γ · numel⌋ largest are gone and as many of the smallest that ⌊density · numel⌋ remain."""
    top = int(gamma * x.size)
    bottom = x.size - int(density * x.size) - top
    kept = np.zeros(x.size)
    kept[np.argsort(np.abs(x).ravel())[bottom : x.size - top]] = 1  # mergekit's [bottom:-top] is empty for top = 0
    return x * kept.reshape(x.shape)


def consensus(parts: list[np.ndarray], *, by_weight: bool) -> np.ndarray:
    """The sum of the weighted numbers that have the sign of their sum, over the weights that do."""
    scaled = np.stack([s * p for s, p in zip(STRENGTHS, parts, strict=True)])
    majority = (scaled.sum(0) >= 0) * 2 - 1
    agree = np.sign(scaled) == majority
    total, over = (scaled * agree).sum(0), (np.array(STRENGTHS)[:, None, None] * agree).sum(0)
    return total / np.where(over < 1e-8, 1, over) if by_weight else total


@pytest.mark.parametrize("normalise", ["weight", "none"])
@pytest.mark.parametrize(("method", "numbers"), [
    ("ties", {"density": 0.3}), ("ties", {"density": 1.0}),
    ("breadcrumbs_ties", {"density": 0.6, "gamma": 0.1}), ("breadcrumbs_ties", {"density": 0.9, "gamma": 0.0}),
])  # fmt: skip
def test_ties_and_breadcrumbs_of_models_are_those_of_changes(
    method: str, numbers: dict[str, float], normalise: str
) -> None:
    thin = magnitudes if method == "ties" else outliers
    right = consensus([thin(x, **numbers) for x in arrays()], by_weight=normalise == "weight")
    mine = run(method, changes(), list(STRENGTHS), normalise=normalise, **numbers)
    np.testing.assert_allclose(mine.numpy(), right, atol=1e-12)


def test_breadcrumbs_without_a_sign_are_added() -> None:
    right = sum(s * outliers(x, 0.5, 0.2) for s, x in zip(STRENGTHS, arrays(), strict=True))
    mine = run("breadcrumbs", changes(), list(STRENGTHS), density=0.5, gamma=0.2)
    np.testing.assert_allclose(mine.numpy(), right, atol=1e-12)


@pytest.mark.parametrize("method", ["dare", "della"])
def test_expectation_of_random_methods_is_the_sum(method: str) -> None:
    """Over 400 draws; della keeps a row's largest with the highest chance, and divides each by its own."""
    (one, two), total = changes(2), torch.zeros(SHAPE, dtype=torch.float64)
    from lora_merge.engine.combination import combined
    from lora_merge.merge_methods import MethodParameters

    numbers = MethodParameters(density=0.6, epsilon=0.2 if method == "della" else 0.0)
    for n in range(400):
        total += combined(method, [one.clone(), two.clone()], [1.0, -0.5], numbers, [f"a{n}", f"b{n}"])
    wanted = one - 0.5 * two
    chance = 0.4 if method == "della" else 0.6
    spread = torch.sqrt((one**2 + 0.25 * two**2) * (1 - chance) / chance / 400)
    assert float(((total / 400 - wanted).abs() / spread).max()) < 5


def test_karcher_is_the_mean_on_the_sphere_times_the_mean_length() -> None:
    """Steps along the mean of the tangents until it is zero."""
    given = [s * x for s, x in zip(STRENGTHS, arrays(), strict=True)]
    units = [x / np.linalg.norm(x) for x in given]
    point = sum(units) / np.linalg.norm(sum(units))
    for _ in range(200):
        tangent = np.zeros(SHAPE)
        for unit in units:
            cosine = float(np.clip((point * unit).sum(), -1, 1))
            angle = math.acos(cosine)
            tangent += angle / math.sin(angle) * (unit - cosine * point) / len(units)
        length = float(np.linalg.norm(tangent))
        if length < 1e-12:
            break
        point = math.cos(length) * point + math.sin(length) * tangent / length
    right = point * sum(float(np.linalg.norm(x)) for x in given) / len(given)
    np.testing.assert_allclose(run("karcher", changes(), list(STRENGTHS)).numpy(), right, atol=1e-8)


@pytest.mark.parametrize("count", [2, 3])
def test_model_stock_moves_from_the_base_to_the_mean_as_far_as_models_agree(count: int) -> None:
    """t = N cos θ / (1 + (N − 1) cos θ) of the mean cosine, and t · mean from the base on; close models, so that t > 0."""
    common = np.ones(SHAPE)
    given = [common + 0.5 * x for x in arrays(count)]
    pairs = [(a, b) for i, a in enumerate(given) for b in given[i + 1 :]]
    cosine = np.mean([(a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    t = count * cosine / (1 + (count - 1) * cosine)
    mine = run("model_stock", [torch.from_numpy(x) for x in given], [1.0] * count)
    np.testing.assert_allclose(mine.numpy(), t * sum(given) / count, atol=1e-12)


@pytest.mark.parametrize("near", [1.0, 1e-4])
def test_slerp_becomes_a_straight_line_between_directions_that_nearly_agree(near: float) -> None:
    """From |cos| > 0.9995 on, where the sine has too few digits."""
    a, b = arrays(2)
    b = a + near * b
    cosine = float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    t, angle = 0.3, math.acos(cosine)
    if abs(cosine) > 0.9995:
        right = (1 - t) * a + t * b
    else:
        right = (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)
    mine = run("slerp", [torch.from_numpy(a.copy()), torch.from_numpy(b)], [1.0, 1.0], t=t)
    np.testing.assert_allclose(mine.numpy(), right, atol=1e-12)
