"""Every index, seed, count and length of a file is held between two ends, in every row that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_merge.algorithms import ALGORITHMS, COUNT, SEED, Bounds, DoesNotFit, below
from lora_merge.engine.tensor_moves import whole
from lora_merge.errors import MergeError, VerificationFailed
from lora_merge.proof.examples import EXAMPLES, tensors, weight
from lora_merge.proof.examples import formula_input as asked
from lora_merge.proof.reference import REFERENCE
from tests.algorithms.peft_examples import ALL_EXAMPLES
from tests.algorithms.pipeline import stack

INDEXED = [
    (name, example, slot)
    for name, row in ALGORITHMS.items()
    for example in ALL_EXAMPLES.get(name, [])
    for slot in sorted(row.integer_slots & example.slots.keys())
]
FAR = (-(2**63), -(2**31), -70_000, -65_537, -65_536, -32_769, -2, -1, 2**15, 2**16, 2**31, 2**32 + 1, 2**63 - 1)
"""Beside the ends themselves: numbers that wrap to right ones in 16 or 32 bits, or count from the end."""


def refuses(name: str, example: Any, slot: str, at: int, number: int) -> bool:
    base, stored = example.layer(torch.Generator().manual_seed(0), torch.float32)
    stored = stored | {slot: stored[slot].long().clone()}
    stored[slot].view(-1)[at] = number
    try:
        stack(ALGORITHMS[name], [(base, stored)], example.alpha, example.settings)
    except DoesNotFit as e:
        return "traceback" not in str(e)
    return False


def test_every_row_with_stored_indices_says_their_bounds() -> None:
    """`derive` gives the others, which no file holds."""
    for name, row in ALGORITHMS.items():
        assert row.checks.bounds.keys() <= row.slots.keys() | row.settings.keys(), name
        stored = row.integer_slots if row.derive is None else frozenset()
        assert stored <= row.checks.bounds.keys(), name
        assert "seed" not in row.settings or "seed" in row.checks.bounds, name


@pytest.mark.few(10)
@pytest.mark.parametrize(("name", "example", "slot"), INDEXED, ids=[f"{n}: {e.label}: {s}" for n, e, s in INDEXED])
def test_number_past_either_end_is_refused(name: str, example: Any, slot: str) -> None:
    row = ALGORITHMS[name]
    bounds = row.checks.bounds[slot](row.fitted_shapes(example.slots, example.target), example.target)
    size = example.layer(torch.Generator().manual_seed(0), torch.float32)[1][slot].numel()
    for at in {0, size - 1}:
        mine = bounds[at * len(bounds) // size]
        for number in {mine.low - 1, mine.end, *(n for n in FAR if not mine.low <= n < mine.end)}:
            assert refuses(name, example, slot, at, max(min(number, 2**63 - 1), -(2**63))), number


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1), st.integers(1, 70_000), st.integers(1, 70_000))
def test_sparse_places_are_inside_of_the_weight_or_refused(number: int, axis: int, out: int, cols: int) -> None:
    """The class of −65537, which became −1 and landed at the end of the row above."""
    row, sides = ALGORITHMS["lora_sparse"], (out, cols)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    indices[axis] = number
    wrapped = number + 2**16 if -(2**15) <= number < 0 else number  # as int16 has it
    shapes = {"up": (out, 1), "down": (1, cols), "indices": (2, 1), "values": (1,), "size": (2,)}
    integers = {"indices": indices, "size": torch.tensor(sides)}
    if 0 <= wrapped < sides[axis]:
        row.checks.check_integers(integers, shapes, sides)
    else:
        with pytest.raises(DoesNotFit):
            row.checks.check_integers(integers, shapes, sides)


@pytest.mark.parametrize("name", sorted({n for n, _, _ in INDEXED} & EXAMPLES.keys()))
@pytest.mark.parametrize("number", [-70_000, -65_537, 2**31, 2**62])
def test_reference_checks_by_itself(name: str, number: int) -> None:
    """numpy would count a negative index from the end, and the proof agree with a merge that did so too."""
    example = EXAMPLES[name]
    for slot in ALGORITHMS[name].integer_slots - {"size"}:
        stored = tensors(name, example)
        stored[slot] = stored[slot].copy()
        stored[slot].flat[-1] = number
        with pytest.raises(VerificationFailed, match="point outside"):
            REFERENCE[name].formula(asked(name, example, weight(example), np.arange(2), stored))


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), -0.5, 1e300])
def test_indices_that_are_no_whole_numbers(value: float) -> None:
    with pytest.raises(DoesNotFit, match="whole"):
        whole(torch.tensor([1.0, value], dtype=torch.float64))


def test_indices_of_any_stored_dtype() -> None:
    for dtype in (torch.int16, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.uint64, torch.float64):
        assert whole(torch.ones(2, dtype=dtype)).tolist() == [1, 1]


NO_NUMBERS = (
    *("", " 1", "1 ", "+1", "-1", "1_0", "1.0", "²", "٣", "१", "0x1", "1e3", "½", "Ⅷ", "𝟏", "9" * 5000, "9" * 21),
    *(None, True, False, 1.5, float("nan"), float("inf"), -1, 2**63, 10**400, [], [1], {}, b"1"),
)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: str(v)[:20] if not isinstance(v, int) else "int")
def test_values_that_are_no_count(value: object) -> None:
    assert COUNT.number(value) is None


@given(st.integers(-(2**70), 2**70), st.integers(-(2**65), 2**65), st.integers(-(2**65), 2**65))
def test_bounds_have_two_ends(number: int, low: int, end: int) -> None:
    bounds = Bounds(low, end)
    assert (bounds.number(number) is not None) == (low <= number < end)
    if number >= 0 and len(str(number)) <= 20:
        assert bounds.number(str(number)) == bounds.number(number)
    if -(2**63) <= number < 2**63:
        assert bounds.hold(torch.tensor([[number]])) == (low <= number < end)


def test_empty_list_of_indices_is_inside_of_anything() -> None:
    assert below(0).hold(torch.zeros(2, 0, dtype=torch.int64))


SEEDED = [name for name, row in ALGORITHMS.items() if "seed" in row.settings]


@pytest.mark.few(20)
@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 1, 10**400, 1.5, float("nan"), "1_0", None, True])
def test_seed_that_torch_does_not_take(name: str, seed: Any) -> None:
    row, example = ALGORITHMS[name], ALL_EXAMPLES[name][0]
    shapes = row.fitted_shapes(example.slots, example.target)
    with pytest.raises(DoesNotFit, match="seed"):
        row.checks.check_settings({**example.settings, "seed": seed}, shapes, example.target)
    for end in (SEED.low, SEED.end - 1):
        row.checks.check_settings({**example.settings, "seed": end}, shapes, example.target)
        torch.Generator().manual_seed(end)


FIELDS = {
    "VERA": ("projection_prng_key", {"vera_lambda_b": (4,), "vera_lambda_d": (2,)}, {"r": 2}),
    "PVERA": ("projection_prng_key", {"pvera_lambda_b": (4,), "pvera_lambda_d": (4,)}, {"r": 2}),
    "RANDLORA": ("projection_prng_key", {"randlora_lambda": (2, 2), "randlora_gamma": (2, 4)}, {"r": 2}),
    "FOURIERFT": ("random_loc_seed", {"fourierft_spectrum": (3,)}, {"n_frequency": 3}),
    "WAVEFT": ("random_loc_seed", {"waveft_spectrum": (3,)}, {"n_frequency": 3}),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**64), 1e30, 0.5, "7", [7]])
def test_configuration_with_an_odd_seed_is_refused(tmp_path: Path, kind: str, seed: Any) -> None:
    import json

    from safetensors.torch import save_file

    import lora_merge

    field, slots, config = FIELDS[kind]
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({"x.weight": torch.zeros(4, 4)}, tmp_path / "base")
    save_file({f"base_model.model.x.{slot}": torch.ones(shape) for slot, shape in slots.items()},
              folder / "adapter_model.safetensors")  # fmt: skip

    def merge(seed: Any) -> None:
        text = json.dumps({"peft_type": kind, **config, field: seed, "target_modules": ["x"]})
        (folder / "adapter_config.json").write_text(text)
        lora_merge.merge(tmp_path / "base", [folder], tmp_path / "out", device="cpu", overwrite=True)

    with pytest.raises(MergeError, match=field) as caught:
        merge(seed)
    assert caught.value.exit_code == 3
    merge(2**53 + 1)
