"""What every row of ALGORITHMS must obey, whatever it computes. New rows are tested by being in the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_merge.algorithms import ALGORITHMS
from tests.algorithms.adapter_examples import Example, stacked
from tests.algorithms.peft_examples import ALL_EXAMPLES as EXAMPLES
from tests.algorithms.peft_examples import every
from tests.algorithms.pipeline import Stacked, stack

AWAY = "cuda:0" if torch.cuda.is_available() else "meta"
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def tensors_of(s: Stacked) -> dict[str, Tensor]:
    """All tensors that the formula is given."""
    held = s.tensors._asdict()
    return {"base": s.base, **{k: v for k, v in held.items() if isinstance(v, Tensor)}}


def with_tensors(s: Stacked, changed: dict[str, Tensor]) -> Stacked:
    base = changed.pop("base", s.base)
    return replace(s, base=base, tensors=s.tensors._replace(**changed))


@pytest.mark.few(17)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_has_an_example(name: str) -> None:
    assert EXAMPLES.get(name), f"add an example for {name} to adapter_examples.py"


@pytest.mark.few(17)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_use_every_slot_and_every_optional_absence(name: str) -> None:
    row, examples = ALGORITHMS[name], EXAMPLES[name]
    for slot, required in row.slots.items():
        if row.derive is None and not (name == "glora_old" and slot == "bm"):
            assert any(slot in e.slots for e in examples), slot
        free = row.derive or (row.rebuild and slot in row.rebuild.slots)
        assert required == all(slot in e.slots for e in examples) or free, slot


def test_formula_without_its_start_reads_the_same_factors() -> None:
    """A weight without the start takes the plain formula, which reads no slot that the other does not have."""
    started = [row for row in ALGORITHMS.values() if row.starts_in_base]
    assert started
    for row in started:
        plain = ALGORITHMS[row.without_start]
        assert plain.required <= row.required and row.reads_base and not plain.reads_base, row.name


@pytest.mark.few(22)
@every
def test_neutral_adapter_changes_nothing(name: str, example: Example) -> None:
    g = torch.Generator().manual_seed(1)
    weight, stored = example.layer(g, torch.float64)
    if example.neutral is not None:
        neutral = example.neutral(weight, stored)
    else:
        neutral = {s: torch.zeros_like(t) for s, t in stored.items() if s not in example.values}
    layer = weight, {**stored, **neutral}
    s = stack(ALGORITHMS[name], [layer], example.alpha, example.settings)
    torch.testing.assert_close(s.delta(), torch.zeros_like(s.base), rtol=0, atol=1e-12)


@pytest.mark.few(22)
@every
def test_adapter_changes_something(name: str, example: Example) -> None:
    assert stacked(name, example).delta().abs().max() > 1e-3


@pytest.mark.few(22)
@every
def test_batch_is_its_layers_one_by_one(name: str, example: Example) -> None:
    s = stacked(name, example, n=3)
    one_by_one = [with_tensors(s, {k: v[i : i + 1] for k, v in tensors_of(s).items()}).delta() for i in range(3)]
    torch.testing.assert_close(s.delta(), torch.cat(one_by_one), **CLOSE)


@pytest.mark.few(22)
@every
def test_inputs_are_untouched(name: str, example: Example) -> None:
    s = stacked(name, example)
    before = {k: v.clone() for k, v in tensors_of(s).items()}
    change = s.delta()
    change.mul_(2)  # nor does the result share memory with them
    if s.row.accumulate:
        s.row.accumulate(s.base.clone(), s.tensors, torch.full((2, 1, 1), 0.5, dtype=torch.float64))
    for key, value in tensors_of(s).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.few(22)
@every
def test_dtype_and_shape_come_back(name: str, example: Example) -> None:
    s = stacked(name, example, dtype=torch.float32)
    half = () if s.row.decomposes or s.row.prepare else (torch.bfloat16, torch.float16)  # never handed to those
    for dtype in (torch.float64, torch.float32, *half):
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors_of(s).items()}
        change = with_tensors(s, cast).delta()
        assert (change.dtype, change.shape) == (dtype, s.base.shape)
        assert change.isfinite().all(), dtype


@pytest.mark.few(22)
@every
def test_huge_numbers_give_what_they_give_in_float64_or_none(name: str, example: Example) -> None:
    """What overflows on the way is NaN or infinite in ΔW, where the caller sees it; never a number that is wrong."""
    s = stacked(name, example, dtype=torch.float32)
    if s.row.prepare and not (example.settings.get("limit") or example.alpha):
        pytest.skip("without a bound rotations by huge numbers have no digits in fp32; float64 is what they are given")
    for power in (20, 60, 100):
        own = {k: v * 2.0**power for k, v in tensors_of(s).items() if v.is_floating_point() and k in s.row.slots}
        own = {k: v for k, v in own.items() if v.isfinite().all()}
        huge = with_tensors(s, own)
        exact = with_tensors(s, {k: v.double() for k, v in tensors_of(huge).items() if v.is_floating_point()}).delta()
        found = huge.delta().double()
        seen = found.isfinite().flatten(1).all(1) & exact.isfinite().flatten(1).all(1)
        for got, right in zip(found[seen], exact[seen], strict=True):
            assert float((got - right).abs().max()) <= 1e-3 * float(right.abs().max()), power


@pytest.mark.few(29)
@every
def test_tensors_stay_on_the_device_of_the_inputs(name: str, example: Example) -> None:
    """Run without values on a device that is not the default: any tensor made elsewhere is an error."""
    s = stacked(name, example, dtype=torch.float32)
    with FakeTensorMode():
        away = {k: torch.empty(v.shape, dtype=v.dtype, device=AWAY) for k, v in tensors_of(s).items()}
        moved = with_tensors(s, away)
        change = moved.delta()
        assert (change.device.type, change.dtype) == (torch.device(AWAY).type, torch.float32)
        if s.row.accumulate:
            strength = torch.empty(2, 1, 1, device=AWAY)
            s.row.accumulate(torch.empty_like(moved.base), moved.tensors, strength)
        if s.row.accumulate and s.row.takes_one_number:
            numbers = {k: torch.tensor(0.5) for k in s.row.scalars & tensors_of(s).keys()}
            s.row.accumulate(torch.empty_like(moved.base), with_tensors(moved, numbers).tensors, torch.tensor(0.5))


@pytest.mark.few(22)
@every
def test_view_that_is_not_contiguous_will_do(name: str, example: Example) -> None:
    s = stacked(name, example)
    turned = s.base.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(replace(s, base=turned).delta(), s.delta(), **CLOSE)
    if s.row.accumulate:
        acc, strength = turned.clone(), torch.full((2, 1, 1), 0.5, dtype=torch.float64)
        acc = acc.transpose(1, 2).contiguous().transpose(1, 2)
        s.row.accumulate(acc, s.tensors, strength)
        torch.testing.assert_close(acc, s.base + 0.5 * s.delta(), **CLOSE)


@pytest.mark.few(22)
@every
def test_accumulate_is_delta(name: str, example: Example) -> None:
    s = stacked(name, example)
    if s.row.accumulate is None:
        pytest.skip("no accumulate")
    strength = torch.tensor([0.3, -1.7], dtype=torch.float64).view(2, 1, 1)
    acc = s.base.clone() if s.row.reads_base else torch.randn_like(s.base)
    want = acc + strength * s.delta()
    s.row.accumulate(acc, s.tensors, strength)
    torch.testing.assert_close(acc, want, **CLOSE)


@pytest.mark.few(22)
@every
def test_number_for_all_layers_is_that_number_for_each(name: str, example: Example) -> None:
    """Where a device holds the tensors, such a number stays on the host: nothing is uploaded or multiplied for it."""
    s = stacked(name, example)
    if s.row.accumulate is None or not s.row.takes_one_number:
        pytest.skip("its numbers have axes")
    number = {k: v.flatten()[0] for k, v in tensors_of(s).items() if k in s.row.scalars}
    acc = torch.randn_like(s.base)
    alone, whole = acc.clone(), {k: v.expand(2, 1, 1) for k, v in number.items()}
    s.row.accumulate(alone, with_tensors(s, number).tensors, torch.tensor(0.3, dtype=torch.float64))
    s.row.accumulate(acc, with_tensors(s, whole).tensors, torch.full((2, 1, 1), 0.3, dtype=torch.float64))
    torch.testing.assert_close(alone, acc, **CLOSE)


@pytest.mark.few(22)
@every
def test_rows_of_the_change_come_from_rows_of_the_slots(name: str, example: Example) -> None:
    s = stacked(name, example)
    held = {
        name
        for name in s.row.not_sliceable_with
        if getattr(s.tensors, name) is not None and getattr(s.tensors, name) is not False
    }
    if s.row.row_axes is None or held:
        pytest.skip("whole only")
    slots = {slot: (axis + (axis >= 0), getattr(s.tensors, slot)) for slot, axis in s.row.row_axes.items()}
    slots = {slot: (axis, value) for slot, (axis, value) in slots.items() if value is not None}
    (entries,) = {value.shape[axis] for axis, value in slots.values()} or {s.base.shape[1]}
    grain, first, count = s.base.shape[1] // entries, entries // 4, max(1, entries // 2)
    cut = {slot: value.narrow(axis, first, count) for slot, (axis, value) in slots.items()}
    rows = slice(grain * first, grain * (first + count))
    cut["base"] = s.base[:, rows]
    torch.testing.assert_close(with_tensors(s, cut).delta(), s.delta()[:, rows], **CLOSE)


@pytest.mark.few(22)
@every
def test_base_is_read_if_and_only_if_the_row_says_so(name: str, example: Example) -> None:
    s = stacked(name, example)
    other = replace(s, base=torch.randn_like(s.base))
    assert torch.equal(s.delta(), other.delta()) != s.row.reads_base


@pytest.mark.few(43)
@every
def test_fit_only_reshapes(name: str, example: Example) -> None:
    stored = {slot: tuple(shape) for slot, shape in example.slots.items()}
    fitted = ALGORITHMS[name].fitted_shapes(stored, example.target)
    assert fitted.keys() == stored.keys()
    for slot, shape in fitted.items():
        assert torch.empty(stored[slot]).numel() == torch.empty(shape).numel(), slot


@pytest.mark.few(43)
@every
def test_numbers_fill_every_scalar(name: str, example: Example) -> None:
    row = ALGORITHMS[name]
    fitted = row.fitted_shapes(example.slots, example.target)
    for alpha in (None, 0.0, 1.0, 8.0) if name != "full_rank" else (None, 0.0):
        assert row.scalars_from(alpha, fitted, example.target).keys() == row.scalars
