"""Two tensors for one shared slot of one module: alpha, magnitude, shape. They are equal or refused, in any order."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.adapters.suffixes import ANY_ALGORITHM, SUFFIXES
from tests.kit.files import save
from tests.kit.pairs import examples
from tests.kit.tensors import Tensors, rand

X = "model.layers.0.mlp.up_proj"
ENDINGS = [
    ending
    for row in SUFFIXES
    if row.algorithms == ANY_ALGORITHM
    for ending in (row.ending, *([f"{row.ending}.default", f"{row.ending}.other"] if row.named else []))
    if not (row.named and row.ending.endswith(".weight"))
]
ENDINGS += [".lora_magnitude_vector.default.weight", ".lora_magnitude_vector.other.weight"]
SLOT = {row.ending: row.slot for row in SUFFIXES}
PAIRS = [
    pair for pair in [*combinations(ENDINGS, 2), (".alpha", "_alpha")]
    if len({"magnitude" if "mag" in e or e in (".m", ".dora_scale") else SLOT.get(e, "alpha") for e in pair}) == 1
]  # fmt: skip


def base() -> Tensors:
    return {f"{X}.weight": rand(8, 6)}


def factors(module: str = X) -> Tensors:
    return {f"{module}.lora_up.weight": rand(8, 2, seed=1), f"{module}.lora_down.weight": rand(2, 6, seed=2)}


def values(ending: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if "mag" in ending or ending in (".m", ".dora_scale"):
        return rand(8, seed=seed).abs().to(dtype) + 1
    return torch.tensor([8, 6]) if ending == ".reshape_weight" else torch.tensor(float(seed), dtype=dtype)


def merged(tensors: Tensors) -> torch.Tensor:
    return lora_merge.merge_state_dict(base(), tensors)[f"{X}.weight"]


@pytest.mark.few(6)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_different_values_are_refused_in_either_order(pair: tuple[str, str]) -> None:
    one, two = ({f"{X}{ending}": values(ending, seed)} for ending, seed in zip(pair, (2, 40), strict=True))
    for tensors in (factors() | one | two, factors() | two | one, one | two | factors()):
        with pytest.raises(lora_merge.MergeError) as caught:
            merged(tensors)
        assert caught.value.exit_code == 3
        assert all(f"{X}{ending}" in str(caught.value) for ending in pair)


@pytest.mark.few(6)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_equal_values_count_once(pair: tuple[str, str]) -> None:
    one, two = ({f"{X}{ending}": values(ending, 2)} for ending in pair)
    alone = merged(factors() | one)
    assert torch.equal(merged(factors() | one | two), alone)
    assert torch.equal(merged(factors() | two | one), alone)


@pytest.mark.parametrize(("shape", "other", "equal"), [
    ((8, 1), (8,), True), ((8,), (8, 1), True), ((8, 1), (1, 8, 1, 1), True), ((1, 8), (8,), False), ((1, 8), (1, 8), False),
])  # fmt: skip
def test_equal_magnitudes_lie_along_one_axis(shape: tuple[int, ...], other: tuple[int, ...], *, equal: bool) -> None:
    """The shape of `.dora_scale` tells its axis; `.magnitude` always lies along the output."""
    square, scale = {f"{X}.weight": rand(8, 8)}, rand(8, seed=3).abs() + 1
    pair = {f"{X}.lora_up.weight": rand(8, 2, seed=1), f"{X}.lora_down.weight": rand(2, 8, seed=2)}
    both = pair | {f"{X}.dora_scale": scale.reshape(shape), f"{X}.magnitude": scale.reshape(other)}
    if equal:
        alone = lora_merge.merge_state_dict(square, pair | {f"{X}.magnitude": scale})
        assert torch.equal(lora_merge.merge_state_dict(square, both)[f"{X}.weight"], alone[f"{X}.weight"])
        return
    with pytest.raises(lora_merge.MergeError, match="not equal"):
        lora_merge.merge_state_dict(square, both)


def test_equal_values_are_noted(tmp_path: Path) -> None:
    alphas = {f"{X}.alpha": torch.tensor(2.0), f"{X}.lora_alpha": torch.tensor([2])}
    paths = save(base(), tmp_path / "b.safetensors"), [save(factors() | alphas, tmp_path / "a.safetensors")]
    (found,) = lora_merge.plan(*paths, tmp_path / "o.safetensors").adapters
    assert any("alpha is stored twice" in note for note in found.notes)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from(PAIRS),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.randoms(use_true_random=False),
)
def test_order_in_the_file_changes_nothing(pair, dtype, seeds, random) -> None:  # type: ignore[no-untyped-def]
    tensors = factors() | {
        f"{X}{pair[0]}": values(pair[0], seeds[0]),
        f"{X}{pair[1]}": values(pair[1], seeds[1], dtype),
    }
    outcomes = []
    for _ in range(3):
        items = [*tensors.items()]
        random.shuffle(items)
        try:
            outcomes.append(merged(dict(items)))
        except lora_merge.MergeError as e:
            outcomes.append(torch.tensor(float(e.exit_code)))
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
    if seeds[0] != seeds[1]:
        assume(pair[0] != ".reshape_weight")
        assert outcomes[0].shape == ()


@pytest.mark.parametrize("alphas", [(2.0, 40.0), (2.0, 2.0)])
def test_part_and_its_whole_have_one_alpha(alphas: tuple[float, float]) -> None:
    """A part of a split module shares the alpha of the whole; one of its own has to be the same."""
    tensors = factors(f"{X}/0") | {f"{X}.alpha": torch.tensor(alphas[0]), f"{X}/0.alpha": torch.tensor(alphas[1])}
    if alphas[0] == alphas[1]:
        assert torch.equal(merged(tensors), merged(factors() | {f"{X}.alpha": torch.tensor(2.0)}))
        return
    with pytest.raises(lora_merge.MergeError) as caught:
        merged(tensors)
    assert caught.value.exit_code == 3
