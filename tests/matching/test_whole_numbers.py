"""Whole numbers in adapters: factors that were quantised and lost their scale, and differences of integer buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

BASE: Tensors = {
    "m.weight": rand(8, 6), "n.weight": rand(8, 6, 3, 3), "bn.weight": rand(8), "bn.num_batches_tracked": torch.tensor(7),
    "te.position_ids": torch.arange(5).unsqueeze(0),
}  # fmt: skip
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def lora(dtype: torch.dtype) -> Tensors:
    made = {"m.lora_up.weight": 9 * rand(8, 2), "m.lora_down.weight": 9 * rand(2, 6), "m.alpha": torch.tensor(1)}
    return {key: value.to(dtype) for key, value in made.items()}


ADAPTERS: dict[str, Tensors] = {
    "loha": {f"m.hada_{s}": rand(*(8, 2) if s.endswith("a") else (2, 6)) for s in ("w1_a", "w1_b", "w2_a", "w2_b")},
    "lokr": {"m.lokr_w1": rand(2, 2), "m.lokr_w2": rand(4, 3)},
    "glora": {"m.a1.weight": rand(6, 2), "m.a2.weight": rand(2, 6), "m.b1.weight": rand(8, 2), "m.b2.weight": rand(2, 6)},
    "full": {"m.diff": rand(8, 6)},
    "norm": {"bn.w_norm": rand(8)},
    "oft": {"m.oft_blocks": rand(2, 4, 4)},
    "dora": {**lora(torch.float32), "m.dora_scale": rand(8, 1)},
    "conv": {"n.lora_up.weight": rand(8, 2, 1, 1), "n.lora_down.weight": rand(2, 6, 3, 3)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", WHOLE)
def test_factors_of_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(lora_merge.MergeError, match="whole numbers without a scale") as caught:
        lora_merge.merge_state_dict(BASE, lora(dtype))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ADAPTERS)
def test_whole_numbers_are_refused_for_every_tensor_of_every_formula(name: str) -> None:
    lora_merge.merge_state_dict(BASE, ADAPTERS[name])
    for key in ADAPTERS[name]:
        if key.endswith(".alpha"):
            continue
        spoilt = ADAPTERS[name] | {key: (9 * ADAPTERS[name][key]).to(torch.int8)}
        with pytest.raises(lora_merge.MergeError) as caught:
            lora_merge.merge_state_dict(BASE, spoilt)
        assert (caught.value.exit_code, key in str(caught.value)) == (3, True)


def test_alpha_may_be_one() -> None:
    whole = lora_merge.merge_state_dict(BASE, lora(torch.float32) | {"m.alpha": torch.tensor(2)})
    broken = lora_merge.merge_state_dict(BASE, lora(torch.float32) | {"m.alpha": torch.tensor(2.0)})
    assert torch.equal(whole["m.weight"], broken["m.weight"])


KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]


@pytest.mark.few(6)
@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_value_takes_the_place_of_its_kind_alone(tmp_path: Path, old: torch.dtype, new: torch.dtype) -> None:
    """Floating point numbers are cast to the base's; whole ones stay as they are, or are refused."""
    base = save({"m.weight": rand(4, 4), "m.counter": torch.ones(4, 4).to(old)}, tmp_path / "b.safetensors")
    value = {f"m.{slot}.weight": torch.ones(shape) for slot, shape in {"lora_up": (4, 2), "lora_down": (2, 4)}.items()}
    adapter = save({**value, "m.counter": torch.eye(4).to(new)}, tmp_path / "a.safetensors")
    if old == new or (old.is_floating_point and new.is_floating_point):
        lora_merge.merge(base, adapter, tmp_path / "o.safetensors")
        assert torch.equal(load(tmp_path / "o.safetensors")["m.counter"], torch.eye(4).to(old))
        return
    for how in ("error", "skip"):
        with pytest.raises(lora_merge.MergeError, match="whole numbers") as caught:
            lora_merge.merge(base, adapter, tmp_path / "o.safetensors", unmatched=how)  # type: ignore[arg-type]
        assert caught.value.exit_code == 3
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("key", ["bn.num_batches_tracked", "te.position_ids"])
def test_difference_of_zero_to_a_buffer_is_skipped_and_named(key: str, dtype: torch.dtype, tmp_path: Path) -> None:
    zero = {f"{key}.diff": torch.zeros(BASE[key].shape, dtype=dtype)}
    base = save(BASE, tmp_path / "b.safetensors")
    adapter = save(lora(torch.float32) | zero, tmp_path / "a.safetensors")
    with pytest.raises(lora_merge.MergeError) as caught:
        lora_merge.merge(base, [adapter], tmp_path / "o.safetensors")
    assert (caught.value.exit_code, 'unmatched="skip"' in caught.value.fix) == (4, True)
    report = lora_merge.merge(base, [adapter], tmp_path / "o.safetensors", unmatched="skip")
    assert report.coverage["a.safetensors"]["skipped"] == {key: "a change of 0 to a tensor of whole numbers"}
    assert torch.equal(load(tmp_path / "o.safetensors")[key], BASE[key])
    assert not torch.equal(load(tmp_path / "o.safetensors")["m.weight"], BASE["m.weight"])
    lora_merge.merge_state_dict(BASE, [adapter], unmatched="skip")


@pytest.mark.parametrize("strength", [0, 0.5, -1, 2])
def test_whole_numbers_without_a_halfway_hinder_no_strength(strength: float) -> None:
    """A saved batch norm holds a counter, a saved embedding the positions that the base has too."""
    same = {
        **lora(torch.float32),
        "te.position_ids": BASE["te.position_ids"],
        "bn.num_batches_tracked": torch.tensor(9),
    }
    merged = lora_merge.merge_state_dict(BASE, [(same, strength)])
    assert torch.equal(merged["te.position_ids"], BASE["te.position_ids"])
    assert merged["bn.num_batches_tracked"] == (9 if strength else 7)
    wanted = lora_merge.merge_state_dict(BASE, [(lora(torch.float32), strength)])
    assert torch.equal(merged["m.weight"], wanted["m.weight"])
    other = {**same, "te.position_ids": BASE["te.position_ids"] + 1}
    if strength:
        with pytest.raises(lora_merge.MergeError, match="whole numbers"):
            lora_merge.merge_state_dict(BASE, [(other, strength)])
    else:
        lora_merge.merge_state_dict(BASE, [(other, strength)])


@pytest.mark.few(5)
@pytest.mark.parametrize("unmatched", ["error", "skip"])
@pytest.mark.parametrize("place", range(5))
def test_any_other_difference_to_a_buffer_is_refused(unmatched: str, place: int, tmp_path: Path) -> None:
    """Whichever of its numbers is not 0, and wherever the adapter is read from."""
    one = lora(torch.float32) | {"te.position_ids.diff": torch.eye(5)[place][None]}
    counter = lora(torch.float32) | {"bn.num_batches_tracked.diff": torch.tensor(1.0)}
    for adapter in (one, counter):
        for given in (adapter, save(adapter, tmp_path / "a.safetensors")):
            with pytest.raises(lora_merge.MergeError) as caught:
                lora_merge.merge_state_dict(BASE, given, unmatched=unmatched)
            assert caught.value.exit_code == 4
