"""What a merge did to the weights, as the proof measures it: held against numpy on the whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

import lora_merge
from tests.kit.files import load, save
from tests.kit.measured import NAMES, STRENGTHS, assert_same, lora, numbers_of
from tests.kit.models import sd1
from tests.kit.tensors import rand


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32", "fp8_e4m3fn"])
@pytest.mark.parametrize("count", [1, 2])
def test_every_number_is_what_numpy_says(count: int, dtype: str, tmp_path: Path) -> None:
    """With `full`, over all numbers: in all, by block, by tensor."""
    base, out = sd1(), tmp_path / "out.safetensors"
    save(base, tmp_path / "base.safetensors")
    files = [tmp_path / f"{n}.safetensors" for n in range(count)]
    made = [lora(file, NAMES[n:], 0.002, 10 * n) for n, file in enumerate(files)]
    pairs = list(zip(files, STRENGTHS, strict=False))
    changes = [{k: s * v for k, v in change.items()} for change, s in zip(made, STRENGTHS, strict=False)]
    lora_merge.merge(tmp_path / "base.safetensors", pairs, out, dtype=dtype)
    numbers, after = lora_merge.verify(out, full=True)["numbers"], load(out)
    keys = [f"{name}.weight" for name in NAMES]
    assert numbers["tensors"].keys() == {*keys}
    for key in keys:
        assert_same(numbers["tensors"][key], numbers_of(base, after, changes, [key]))
    assert_same(numbers["all"], numbers_of(base, after, changes, keys))
    assert_same(numbers["components"]["unet"], numbers["all"])
    first, second = numbers["blocks"].values()
    assert_same(first, numbers_of(base, after, changes, keys[:2]))
    assert_same(second, numbers_of(base, after, changes, keys[2:]))


def test_sample_estimates_the_whole(tmp_path: Path) -> None:
    """The default proof looks at a few rows; norms are those of all rows, within the sample's error."""
    name = "model.layers.0.self_attn.q_proj"
    base = {f"{name}.weight": rand(512, 64, seed=3)}
    factors = {f"{name}.lora_A.weight": rand(4, 64, seed=1), f"{name}.lora_B.weight": rand(512, 4, seed=2)}
    save(base, tmp_path / "base.safetensors")
    save(factors, tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", out)
    assert report.verified is not None
    few, every = lora_merge.verify(out)["numbers"]["all"], lora_merge.verify(out, full=True)["numbers"]["all"]
    assert 0 < few["elements"] < every["elements"] == 512 * 64
    for entry in ("weight", "change", "ratio"):
        assert few[entry] == pytest.approx(every[entry], rel=0.5)


def test_tensors_in_number_are_counted_and_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_merge.change_statistics.MOST_LISTED", 3)
    save(sd1(), tmp_path / "base.safetensors")
    lora(tmp_path / "lora.safetensors", NAMES, 0.1, 0)
    report = lora_merge.merge(*(tmp_path / f"{n}.safetensors" for n in ("base", "lora", "out")))
    assert report.verified is not None
    numbers = lora_merge.verify(report.output)["numbers"]
    assert (numbers["tensors"], numbers["unlisted"], len(numbers["blocks"])) == ({}, 4, 2)


def test_change_below_the_digits_of_the_sum_asks_for_more_of_them(tmp_path: Path) -> None:
    """A base in fp64 that is merged in fp32: the report's counts are those of fp32 and confirmed; the output's dtype is
    not to blame."""
    base = sd1()
    save({key: value.double() / 3 for key, value in base.items()}, tmp_path / "base.safetensors")
    lora(tmp_path / "a.safetensors", NAMES, 1e-9, 1)
    given = (tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    (told,) = lora_merge.merge(*given).verified["warnings"]
    assert "lost in the rounding to fp32, which is " in told and told.endswith('compute with compute_dtype="fp64"')
    assert not lora_merge.merge(*given, compute_dtype="fp64", overwrite=True).verified["warnings"]
