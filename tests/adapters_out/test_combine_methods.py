"""Methods on ΔW against PEFT's functions, where they are right, and against formulas written down again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.adapters_out import matrix_modules
from lora_merge.engine import combination
from lora_merge.engine.combination import combined, gram
from lora_merge.engine.row_matrix import RowMatrix, largest
from lora_merge.errors import VerificationFailed
from lora_merge.merge_methods import COMBINATIONS, MethodParameters
from tests.kit.adapters import kohya
from tests.kit.combining import SHAPE, changes, run
from tests.kit.models import sd1


def thinned(how: str, change: torch.Tensor, n: MethodParameters, seed: str) -> torch.Tensor:
    return combination.thinned(how, RowMatrix.of(change), n, seed).dense()


@pytest.mark.parametrize("elect", ["total", "frequency"])
def test_ties_and_prune_are_pefts(elect: str) -> None:
    from peft.utils.merge_utils import magnitude_prune, ties

    given, weights = changes(), torch.ones(3, dtype=torch.float64)
    mine = run("ties", given, [1.0] * 3, density=0.4, elect="sum" if elect == "total" else "count")
    torch.testing.assert_close(mine, ties(given, weights, 0.4, elect))
    torch.testing.assert_close(run("prune", given, [1.0] * 3, density=0.4), magnitude_prune(given, weights, 0.4))


def test_ties_by_weight_divides_by_the_strengths_that_agree() -> None:
    given, strengths = changes(), [0.5, 2.0, 1.0]
    cut = [thinned("largest", t, MethodParameters(density=0.5), "").numpy() for t in given]
    scaled = np.stack([s * t for s, t in zip(strengths, cut, strict=True)])
    agree = (np.sign(scaled) == np.where(scaled.sum(0) >= 0, 1, -1)) & (scaled != 0)
    total, divisor = (scaled * agree).sum(0), (np.array(strengths)[:, None, None] * agree).sum(0)
    right = np.divide(total, divisor, out=np.zeros(SHAPE), where=divisor > 0)
    mine = run("ties", given, strengths, density=0.5, normalise="weight")
    np.testing.assert_allclose(mine.numpy(), right, atol=1e-12)


@pytest.mark.parametrize("method", ["dare", "della"])
def test_random_methods_keep_what_they_say_and_divide_by_the_chance(method: str) -> None:
    change = torch.full((40, 100), 2.0, dtype=torch.float64) + torch.linspace(0, 1, 4000).view(40, 100)
    n = MethodParameters(density=0.6, epsilon=0.2 if method == "della" else 0.0)
    kept = thinned("random" if method == "dare" else "ranked", change, n, "a")
    share = float((kept != 0).double().mean())
    assert abs(share - 0.6) < 5 * math.sqrt(0.24 / 4000)
    ratios = (change / kept)[kept != 0]
    if method == "dare":
        torch.testing.assert_close(ratios, torch.full_like(ratios, 0.6))
    else:
        assert 0.4 - 1e-12 <= float(ratios.min()) <= float(ratios.max()) <= 0.8 + 1e-12
        assert (kept[:, 50:] != 0).double().mean() > (kept[:, :50] != 0).double().mean()
    assert torch.equal(kept, thinned("random" if method == "dare" else "ranked", change, n, "a"))
    assert not torch.equal(kept, thinned("random" if method == "dare" else "ranked", change, n, "b"))


def test_breadcrumbs_drop_both_ends_and_with_gamma_0_only_the_small() -> None:
    change = torch.arange(1.0, 101.0, dtype=torch.float64).view(10, 10)
    kept = thinned("middle", change, MethodParameters(density=0.5, gamma=0.1), "").flatten().nonzero().flatten()
    assert kept.tolist() == list(range(40, 90))
    assert torch.equal(thinned("middle", change, MethodParameters(density=0.5), ""),
                       thinned("largest", change, MethodParameters(density=0.5), ""))  # fmt: skip


def test_slerp_meets_its_ends_and_keeps_unit_length() -> None:
    a, b = (t / t.norm() for t in changes(2))
    torch.testing.assert_close(run("slerp", [a, b], [1.0, 1.0], t=0.0), a)
    torch.testing.assert_close(run("slerp", [a, b], [1.0, 1.0], t=1.0), b)
    assert float(run("slerp", [a, b], [1.0, 1.0], t=0.3).norm()) == pytest.approx(1)
    flipped = run("slerp", [a, -b], [1.0, -1.0], t=0.3)
    torch.testing.assert_close(flipped, run("slerp", [a, b], [1.0, 1.0], t=0.3))


def test_karcher_of_two_is_halfway_and_its_tangents_cancel() -> None:
    a, b = changes(2)
    units = [t / t.norm() for t in (a, b)]
    half = run("slerp", units, [1.0, 1.0], t=0.5) * float((a.norm() + b.norm()) / 2)
    torch.testing.assert_close(run("karcher", [a, b], [1.0, 1.0]), half, rtol=1e-8, atol=1e-8)
    three = changes(3)
    mean = run("karcher", three, [1.0] * 3)
    point = mean / mean.norm()
    tangents = []
    for t in three:
        u = t / t.norm()
        angle = math.acos(float((point * u).sum()))
        tangents.append((u - math.cos(angle) * point) * angle / math.sin(angle))
    assert float(sum(tangents, torch.zeros(SHAPE)).norm()) < 1e-8


def test_model_stock_scales_the_mean_by_the_agreement() -> None:
    given = changes(3)
    products = gram([RowMatrix.of(t) for t in given])
    cosines = [products[i][j] / math.sqrt(products[i][i] * products[j][j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    rho = sum(cosines) / 3
    right = max(0.0, 3 * rho / (1 + 2 * rho)) * sum(given, torch.zeros(SHAPE)) / 3
    torch.testing.assert_close(run("model_stock", given, [1.0] * 3), right)
    same = [given[0]] * 2
    torch.testing.assert_close(run("model_stock", same, [1.0] * 2), given[0])


def test_consensus_keeps_entries_of_one_sign() -> None:
    given = changes(3)
    kept = run("consensus", given, [1.0] * 3)
    signs = torch.stack(given).sign().sum(0).abs() == 3
    torch.testing.assert_close(kept, torch.where(signs, sum(given, torch.zeros(SHAPE)), 0.0))
    torch.testing.assert_close(run("consensus", given, [1.0] * 3, agree=1), sum(given, torch.zeros(SHAPE)))


@pytest.mark.parametrize(("agree", "kept"), [(None, True), (1, True), (2, False), (3, False)])
def test_consensus_of_fewer_adapters_than_agree_is_nothing(agree: int | None, kept: bool) -> None:  # noqa: FBT001
    (only,) = changes(1)
    torch.testing.assert_close(run("consensus", [only], [0.5], agree=agree), 0.5 * only if kept else 0 * only)


@pytest.mark.parametrize("method", sorted(set(COMBINATIONS) - {"slerp"}))
def test_order_of_adapters_does_not_matter(method: str) -> None:
    given, n = changes(), MethodParameters(density=0.5, gamma=0.1, epsilon=0.2)
    seeds = ["a", "b", "c"]
    strengths = [1.0, 0.5, -0.7]
    order = [2, 0, 1]
    one = combined(method, [t.clone() for t in given], strengths, n, seeds)
    turned = [given[i].clone() for i in order]
    other = combined(method, turned, [strengths[i] for i in order], n, [seeds[i] for i in order])
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["normal", "few values", "rising", "one far out"])
@pytest.mark.parametrize("few", [10, 2**21])
def test_largest_are_those_of_the_sorted_numbers(kind: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal ones the first; however many bits are counted before the rest is sorted, and however rows are cut."""
    monkeypatch.setattr("lora_merge.engine.row_matrix.SORTED_VALUES", few)
    values = torch.randn(34_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if kind == "few values":
        values = values.mul(2).round()
    if kind == "rising":
        values = values.sort().values
    if kind == "one far out":
        values[::7] = 1e9
    values[5] = -values[4]
    order = values.abs().argsort(descending=True, stable=True)
    matrix = values.view(-1, 17)
    monkeypatch.setattr("lora_merge.engine.row_matrix.BLOCK_VALUES", 17 * 50)
    for dtype in (torch.float64, torch.float32):
        whole = RowMatrix.of(matrix.to(dtype))
        order = whole.dense().abs().view(-1).argsort(descending=True, stable=True)
        for count in (0, 1, 1000, len(values) // 2, len(values) - 1, len(values)):
            found = largest(whole, count)
            kept = torch.cat([found.of(block, rows.start) for rows, block in whole.blocks()]).view(-1)
            assert set(kept.nonzero().view(-1).tolist()) == set(order[:count].tolist())


def test_opposite_directions_have_the_first_one_as_their_mean() -> None:
    """To rounding they cancel, and nothing is divided by what is left."""
    (one,) = changes(1)
    for factor in (-1.0, -0.3, -1 / 3):
        mean = run("karcher", [one, one * factor], [1.0, 1.0])
        torch.testing.assert_close(mean, one * (1 - factor) / 2)


def elected(parts: np.ndarray, strengths: np.ndarray, *, count: bool) -> np.ndarray:
    """The sum of what has the elected sign: that of the weighted sum, or that of most adapters; zero counts as +."""
    scaled = parts * strengths[:, None, None]
    votes = np.sign(scaled).sum(0) if count else scaled.sum(0)
    return np.where(np.sign(scaled) == np.where(votes >= 0, 1.0, -1.0), scaled, 0.0).sum(0)


@pytest.mark.parametrize("elect", ["sum", "count"])
@pytest.mark.parametrize(("method", "how"), [("ties", "largest"), ("dare_ties", "random"), ("della_ties", "ranked"),
                                             ("breadcrumbs_ties", "middle")])  # fmt: skip
def test_methods_with_signs_elect_among_what_their_method_keeps(method: str, how: str, elect: str) -> None:
    given, strengths = changes(), [0.5, 2.0, -1.0]
    numbers = {
        "density": 0.5,
        **({"epsilon": 0.2} if how == "ranked" else {}),
        **({"gamma": 0.1} if how == "middle" else {}),
    }
    parts = np.stack([thinned(how, t, MethodParameters(**numbers), f"seed {n}").numpy() for n, t in enumerate(given)])
    right = elected(parts, np.array(strengths), count=elect == "count")
    mine = run(method, given, strengths, normalise="none", elect=elect, **numbers)
    np.testing.assert_allclose(mine.numpy(), right, atol=1e-12)


@pytest.mark.parametrize("t", [0.2, 0.9])
def test_slerp_is_the_formula_on_the_sphere_for_lengths_of_their_own(t: float) -> None:
    """mergekit 0.1.5 gives the same to its rounding."""
    a, b = (x.numpy() for x in changes(2))
    angle = math.acos(float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)))
    right = (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)
    np.testing.assert_allclose(run("slerp", changes(2), [1.0, 1.0], t=t).numpy(), right, atol=1e-12)


@pytest.mark.parametrize("method", ["ties", "karcher"])
def test_wrong_result_of_a_method_is_not_proven(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ of the file is computed again from the inputs; the error names the output, which has a temporary name then."""
    right, given = matrix_modules.combine, {"density": 0.5} if method == "ties" else {}
    for n in range(2):
        save_file(kohya(sd1(), te=False, seed=100 * n + 1), tmp_path / f"{n}.safetensors")
    files: Any = [tmp_path / "0.safetensors", (tmp_path / "1.safetensors", -0.5)]
    options: Any = {"method": method, "algorithm": "full", "include": ["re:attn2"], **given}
    told = lora_merge.combine(files, tmp_path / "c.safetensors", **options).verified
    assert told is not None and told["recomputed"] == told["layers"] > 0

    def wrong(*some: Any) -> Any:
        wanted = right(*some)
        return replace(wanted, whole=RowMatrix.of(wanted.dense() * 1.01))

    monkeypatch.setattr(matrix_modules, "combine", wrong)
    with pytest.raises(VerificationFailed, match="not what the report says") as raised:
        lora_merge.combine(files, tmp_path / "d.safetensors", **options)
    assert raised.value.where.startswith(f"{tmp_path / 'd.safetensors'}: ")
