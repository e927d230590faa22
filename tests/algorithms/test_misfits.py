"""Shapes that are wrong are refused, by every row: never a broadcast that happens to fit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.adapters.modules import Module
from lora_merge.adapters.peft.rules import rules
from lora_merge.adapters.suffixes import SUFFIXES
from lora_merge.algorithms import ALGORITHMS, DoesNotFit, Shape, dora
from lora_merge.dtypes import StoredTensor
from lora_merge.matching.missing_tensors import gaps
from tests.algorithms.adapter_examples import Example
from tests.algorithms.peft_examples import ALL_EXAMPLES as EXAMPLES
from tests.algorithms.peft_examples import every
from tests.algorithms.pipeline import candidates, stack
from tests.kit.pairs import examples

MISSING_IS_FINE = {
    ("lora", "tucker", "mid"): False,
    ("diag_oft", "conv, rescaled", "rescale"): True,
    ("boft", "linear", "rescale"): True,
    ("onetrainer_oft", "scaled", "scaled"): True,
    ("onetrainer_oft_conv", "scaled", "scaled"): True,
}
"""Slots whose absence no reader could notice."""


def _kept(slot: str, example: Example, slots: Mapping[str, Shape]) -> bool:
    return slot in slots and slots[slot] == example.slots[slot]


STAGES = ("boft", "blocks", 0)
"""Any number of butterfly stages makes sense."""


def refused(name: str, example: Example, slots: Mapping[str, Shape], target: Shape) -> bool:
    """Whether the plan would refuse: by shapes, by stored integers or by settings."""
    g = torch.Generator().manual_seed(0)
    made = {s: example.values[s](g).reshape(slots[s]) for s in example.values if _kept(s, example, slots)}
    stored = {s: made.get(s, torch.zeros(shape)) for s, shape in slots.items()}
    try:
        stack(ALGORITHMS[name], [(torch.zeros(target), stored)], None, example.settings)
    except DoesNotFit as e:
        assert str(e)
        return True
    return False


@pytest.mark.few(22)
@every
def test_each_dimension_wrong_by_one(name: str, example: Example) -> None:
    for slot, shape in example.slots.items():
        for axis, size in enumerate(shape):
            if (name, slot, axis) == STAGES or (slot, axis) in example.free:
                continue
            for step in (-1, 1):
                wrong = (*shape[:axis], size + step, *shape[axis + 1 :])
                assert refused(name, example, {**example.slots, slot: wrong}, example.target), (slot, wrong)


@pytest.mark.few(43)
@every
def test_weight_that_is_wrong_by_one(name: str, example: Example) -> None:
    for axis, size in enumerate(example.target):
        for step in (-1, 1) if axis not in example.blind else ():
            target = (*example.target[:axis], size + step, *example.target[axis + 1 :])
            assert refused(name, example, example.slots, target), target


@pytest.mark.few(43)
@every
def test_axis_too_many(name: str, example: Example) -> None:
    for slot, shape in example.slots.items():
        assert refused(name, example, {**example.slots, slot: (*shape, 2)}, example.target), slot


@pytest.mark.few(43)
@every
def test_shape_of_a_weight_is_never_read_from_axes_that_are_not_there(name: str, example: Example) -> None:
    for slot, shape in example.slots.items():
        for count in range(len(shape)):
            shown = ALGORITHMS[name].shown_shape({**example.slots, slot: shape[:count]})
            assert shown is None or isinstance(shown, tuple)


@pytest.mark.few(43)
@every
def test_each_tensor_missing_in_turn(name: str, example: Example) -> None:
    """What is left either fits no row of the table, by slots or shapes, or the slot was optional."""
    spelled = {r.slot: set(r.algorithms) for r in SUFFIXES if name in r.algorithms}
    for slot in sorted(set(example.slots) - set(example.unnoticed)):
        left = {s: shape for s, shape in example.slots.items() if s != slot}
        allowed = set(ALGORITHMS)
        for s in left:
            allowed &= spelled.get(s, set())
        takers = [n for n in candidates(left, sorted(allowed)) if left]
        fits = [n for n in takers if not refused(n, example, left, example.target)]
        if MISSING_IS_FINE.get((name, example.label, slot)):
            assert name in fits
        else:
            assert not fits, slot


def module(number: int, name: str, shapes: Mapping[str, Shape], *, alpha: bool) -> Module:
    """A module of a file, as its keys would make it."""
    spelled = [set(r.algorithms) for slot in shapes for r in SUFFIXES if r.slot == slot and name in r.algorithms]
    allowed = set.intersection(set(ALGORITHMS), *spelled)
    infos = {slot: StoredTensor(slot, "F32", shape, Path("a"), 0, 0) for slot, shape in shapes.items()}
    shared = {"alpha": StoredTensor("alpha", "F32", (), Path("a"), 0, 0)} if alpha else {}
    return Module(f"m{number}", "weight", infos, shared, tuple(n for n in ALGORITHMS if n in allowed))


@pytest.mark.few(22)
@every
def test_each_tensor_missing_from_one_of_four_modules(name: str, example: Example) -> None:
    """The others tell what it lacks, also where it would pass for another algorithm on its own."""
    shapes, told = dict(example.slots), rules({}, "a")
    whole = [module(i, name, shapes, alpha=True) for i in range(3)]
    assert gaps(whole, told) == {}
    assert gaps([*whole, module(3, name, shapes, alpha=False)], told)["m3"].slot == "alpha"
    for slot in shapes:
        left = {s: shape for s, shape in shapes.items() if s != slot}
        odd = module(3, name, left, alpha=True)
        fits = [n for n in candidates(left, odd.algorithms) if left and not refused(n, example, left, example.target)]
        assert not fits or {m: gap.slot for m, gap in gaps([*whole, odd], told).items()} == {"m3": slot}, slot


@pytest.mark.few(43)
@every
def test_tensor_the_other_way_round(name: str, example: Example) -> None:
    for slot, shape in example.slots.items():
        turned = (shape[1], shape[0], *shape[2:]) if len(shape) > 1 else shape
        if turned != shape and prod(shape) != max(shape):  # a row vector may stand upright
            assert refused(name, example, {**example.slots, slot: turned}, example.target), slot


@pytest.mark.few(43)
@every
def test_kernel_the_other_way_round(name: str, example: Example) -> None:
    """3×2 is not 2×3, though both flatten to six."""
    if len(example.target) < 4 or example.target[2] == example.target[3]:
        pytest.skip("no such kernel")
    for slot, shape in example.slots.items():
        if shape[-2:] == example.target[2:]:
            turned = (*shape[:-2], shape[-1], shape[-2])
            assert refused(name, example, {**example.slots, slot: turned}, example.target), slot


@pytest.mark.few(43)
@every
def test_empty_tensor(name: str, example: Example) -> None:
    for slot, shape in example.slots.items():
        assert refused(name, example, {**example.slots, slot: (0, *shape[1:])}, example.target) or not shape


@pytest.mark.few(13)
@every
@settings(max_examples=examples(8))
@given(data=st.data())
def test_any_shapes_are_refused_or_right(name: str, example: Example, data: st.DataObject) -> None:
    """fit never fails in another way, and what it lets through the formula can compute."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 10, 12]), max_size=4).map(tuple)
    slots = {s: data.draw(sizes) if data.draw(st.booleans()) else v for s, v in example.slots.items()}
    target = data.draw(st.one_of(st.just(example.target), sizes.filter(all).filter(len)))
    if refused(name, example, slots, target):
        return
    stored = {s: torch.zeros(v) for s, v in slots.items()}
    try:
        s = stack(ALGORITHMS[name], [(torch.zeros(target), stored)], None, example.settings)
    except DoesNotFit:
        return  # the values made the difference
    assert s.delta().shape == s.base.shape


@pytest.mark.few(22)
@every
def test_weight_of_one_number_or_of_none_is_refused_or_accepted(name: str, example: Example) -> None:
    """The shapes of an adapter never make a formula fail in another way, whatever the shape of the weight."""
    odd: tuple[Shape, ...] = ((), (0,), (0, 0), (1,), (1, 1), (1, 1, 1), (1, 0, 0, 0), (0, 0, 0, 0))
    for target in (*odd, (4, 0), (4, 0, 3, 3), example.target):
        for slots in ({s: shape for s in example.slots} for shape in odd):
            accepts(name, slots, target)
        for slot, shape in ((s, shape) for s in example.slots for shape in odd):
            accepts(name, {**example.slots, slot: shape}, target)


def accepts(name: str, slots: Mapping[str, Shape], target: Shape) -> bool:
    """Whether the formula takes these shapes."""
    try:
        ALGORITHMS[name].fitted_shapes(slots, target)
    except DoesNotFit:
        return False
    return True


RANKED = {
    "lora": ({"up": (12, 0), "down": (0, 10)}, {}),
    "loha": ({"w1_a": (12, 0), "w1_b": (0, 10), "w2_a": (12, 0), "w2_b": (0, 10)}, {}),
    "lokr": ({"w1": (4, 5), "w2_a": (3, 0), "w2_b": (0, 2)}, {}),
    "glora": ({"a1": (10, 0), "a2": (0, 10), "b1": (12, 0), "b2": (0, 10)}, {}),
    "tlora": ({"p": (12, 0), "q": (0, 10), "lambdas": (1, 0)}, {"algo": "tlora"}),
    "lora_transposed": ({"up": (0, 12), "down": (10, 0)}, {"lora_alpha": 4.0}),
}


@pytest.mark.parametrize("name", RANKED)
def test_rank_zero_changes_nothing(name: str) -> None:
    """AdaLoRA prunes whole modules to rank 0; that is no error."""
    slots, given_settings = RANKED[name]
    stored = {slot: torch.empty(shape) for slot, shape in slots.items()}
    s = stack(ALGORITHMS[name], [(torch.randn(12, 10), stored)], 4.0, given_settings)
    assert torch.equal(s.delta(), torch.zeros_like(s.base))


@pytest.mark.few(35)
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_alpha_that_is_no_number(name: str, alpha: float) -> None:
    row, example = ALGORITHMS[name], EXAMPLES[name][0]
    fitted = row.fitted_shapes(example.slots, example.target)
    if name == "lokr" or not row.scalars:  # both factors whole: alpha means nothing
        return
    if name in ("diag_oft", "boft") and alpha == float("inf"):
        assert row.scalars_from(alpha, fitted, example.target) == {"limit": alpha}
        return
    with pytest.raises(DoesNotFit, match="alpha"):
        row.scalars_from(alpha, fitted, example.target)


def test_indices_that_point_beyond_the_weight() -> None:
    weight = torch.zeros(12, 10)
    base = {"up": torch.zeros(12, 2), "down": torch.zeros(2, 10), "values": torch.ones(1)}

    def fits(row: int, column: int, size: tuple[int, int] = (12, 10)) -> bool:
        where = {"indices": torch.tensor([[row], [column]]), "size": torch.tensor(size)}
        try:
            stack(ALGORITHMS["lora_sparse"], [(weight, {**base, **where})])
        except DoesNotFit:
            return False
        return True

    assert fits(11, 9)
    assert not fits(12, 0)
    assert not fits(0, 10)
    assert not fits(-1, 0)
    assert not fits(0, 0, size=(10, 12))


def test_int16_indices_wrap() -> None:
    """LyCORIS stores row 40000 as −25536."""
    weight = torch.zeros(40001, 2)
    stored = {
        "up": torch.zeros(40001, 1), "down": torch.zeros(1, 2), "values": torch.tensor([5.0]),
        "indices": torch.tensor([[40000], [1]]).to(torch.int16),
        "size": torch.tensor([40001, 2]).to(torch.int16),
    }  # fmt: skip
    change = stack(ALGORITHMS["lora_sparse"], [(weight, stored)]).delta()
    assert change[0, 40000].tolist() == [0.0, 5.0]
    assert change.count_nonzero() == 1


@pytest.mark.parametrize(
    "given_settings",
    [{}, {"algo": "tlora", "use_data_init": False}, {"algo": "tlora", "sig_type": "random"}],
)
def test_tlora_is_refused_where_its_start_is_unknown(given_settings: dict[str, Any]) -> None:
    example = EXAMPLES["tlora"][0]
    layer = example.layer(torch.Generator().manual_seed(0), torch.float32)
    with pytest.raises(DoesNotFit, match=r"algo|random"):
        stack(ALGORITHMS["tlora"], [layer], 4.0, given_settings)


def test_full_rank_with_an_alpha_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="unknown rank"):
        ALGORITHMS["full_rank"].scalars_from(16.0, {"down": (12, 10)}, (12, 10))


@pytest.mark.parametrize(
    ("magnitude", "target", "ending", "expected"),
    [
        ((12, 1), (12, 10), ".dora_scale", ("out", (12, 1))),
        ((1, 10), (12, 10), ".dora_scale", ("in", (1, 10))),
        ((12, 1), (12, 12), ".dora_scale", ("out", (12, 1))),
        ((1, 12), (12, 12), ".dora_scale", ("in", (1, 12))),
        ((12,), (12, 12), ".dora_scale", ("out", (12, 1))),
        ((1, 5, 1, 1), (12, 5, 3, 3), ".dora_scale", ("in", (1, 5))),
        ((12, 1, 1, 1), (12, 5, 3, 3), ".dora_scale", ("out", (12, 1))),
        ((1, 12, 1, 1), (12, 12, 3, 3), ".lora_magnitude_vector", ("out", (12, 1))),
        ((1, 12, 1, 1), (12, 12, 3, 3), ".dora_scale", ("in", (1, 12))),
        ((12,), (12, 10), ".magnitude", ("out", (12, 1))),
        ((10,), (12, 10), ".magnitude", None),
        ((1, 10), (12, 10), ".lora_magnitude_vector", None),
        ((11, 1), (12, 10), ".dora_scale", None),
        ((1, 9), (12, 10), ".dora_scale", None),
        ((12, 10), (12, 10), ".dora_scale", None),
        ((), (12, 10), ".dora_scale", None),
        ((12,), (12,), ".dora_scale", None),
    ],
)
def test_magnitude_belongs_to_its_axis(
    magnitude: Shape, target: Shape, ending: str, expected: tuple[str, Shape] | None
) -> None:
    if expected is not None:
        assert dora.fit(magnitude, target, ending) == expected
        return
    with pytest.raises(DoesNotFit):
        dora.fit(magnitude, target, ending)


@pytest.mark.parametrize("axis", ["out", "in"])
def test_dora_of_an_untouched_magnitude_is_the_change_itself(axis: dora.Axis) -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(2, 6, 20, generator=g, dtype=torch.float64)
    change = torch.randn(2, 6, 20, generator=g, dtype=torch.float64)
    v = base + change
    channels = v.view(2, 6, 5, 4).norm(dim=(1, 3)).view(2, 1, 5)
    norm = v.norm(dim=2, keepdim=True) if axis == "out" else channels
    torch.testing.assert_close(dora.rescale(base, change, norm, axis), change)
    torch.testing.assert_close(dora.rescale(base, change, norm * 2, axis), change + v)


def test_dora_of_a_row_of_zeros_is_finite() -> None:
    zero = torch.zeros(1, 2, 3)
    assert torch.equal(dora.rescale(zero, zero, torch.ones(1, 2, 1), "out"), zero)


@settings(max_examples=examples(200), deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8),
    twin=st.integers(0, 8),
)
def test_tucker_sparse_places_are_each_named_once(places: list[tuple[int, int]], twin: int) -> None:
    """The base's value there is taken away, so a place named twice would lose it twice; a plain remainder adds up."""
    weight = torch.randn(4, 5, 2, 1)
    plain = {"up": torch.zeros(4, 1), "down": torch.zeros(1, 5, 2, 1)}
    tucker = {"up": torch.zeros(4, 3), "down": torch.zeros(3, 5), "mid": torch.zeros(3, 3, 2, 1)}
    rows, columns = (torch.tensor(side, dtype=torch.int64) for side in zip(*places, strict=True))
    if twin < len(places):
        with_twin = torch.cat([rows, rows[twin : twin + 1]]), torch.cat([columns, columns[twin : twin + 1]])
        rows, columns = with_twin
    indices = torch.stack([rows, columns])
    rest = {"indices": indices, "values": torch.ones(len(rows)), "size": torch.tensor([4, 10])}
    once = len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == len(rows)
    for name, factors, right in (("lora_sparse", plain, True), ("lora_sparse_tucker", tucker, once)):
        try:
            change = stack(ALGORITHMS[name], [(weight, factors | rest)]).delta()
        except DoesNotFit as e:
            assert not right and "twice" in str(e)
        else:
            assert right
            expected = torch.zeros(4, 10).index_put((rows, columns), torch.ones(len(rows)), accumulate=True)
            if name == "lora_sparse_tucker":
                expected[rows, columns] -= weight.flatten(1)[rows, columns]
            torch.testing.assert_close(change[0], expected)


def test_drawn_bases_cover_the_weight() -> None:
    shapes, settings = {"rank_scale": (4, 3), "side_scale": (3, 10)}, {"seed": 3, "widest": (14, 11)}
    row = ALGORITHMS["randlora"]
    assert row.derived(shapes, (14, 10), settings)["up"].shape == (14, 3, 4)
    with pytest.raises(DoesNotFit, match="do not cover sides 10 and 20"):
        row.derived(shapes, (10, 2, 10), settings)
