"""An adapter that changes nothing at a strength other than 0 is an error; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from lora_merge.errors import NoChange
from tests.kit.tensors import Tensors, rand

BASE = {f"{name}.weight": rand(8, 6, seed=n) for n, name in enumerate("ab")}


def lora(up: float = 1.0, **more: Tensor) -> Tensors:
    pairs = {f"{name}.lora_B.weight": up * rand(8, 2, seed=3) for name in "ab"}
    return pairs | {f"{name}.lora_A.weight": rand(2, 6, seed=4) for name in "ab"} | more


ZEROS: dict[str, Tensors] = {
    "B of zeros, as before the first step": lora(0.0),
    "A of zeros": {k: 0 * v if "lora_A" in k else v for k, v in lora().items()},
    "LoHa": {f"{n}.hada_{s}": rand(*shape) * (s != "w1_a") for n in "ab" for s, shape in (
        ("w1_a", (8, 2)), ("w1_b", (2, 6)), ("w2_a", (8, 2)), ("w2_b", (2, 6)))},
    "LoKr": {f"{n}.lokr_{s}": rand(*shape) * (s == "w1") for n in "ab" for s, shape in (("w1", (2, 2)), ("w2", (4, 3)))},
    "OFT": {f"{n}.oft_blocks": torch.zeros(2, 4, 4) for n in "ab"},
    "differences": {f"{n}.diff": torch.zeros(8, 6) for n in "ab"},
    "DoRA with the base's norms": lora(0.0, **{
        f"{n}.dora_scale": BASE[f"{n}.weight"].norm(dim=1, keepdim=True) for n in "ab"}),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_file(BASE, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ZEROS)
def test_adapter_of_zeros_is_refused_and_strength_zero_merges_without_it(base: Path, kind: str) -> None:
    zero, out = base.with_name("zero.safetensors"), base.with_name("out.safetensors")
    save_file(ZEROS[kind], zero)
    with pytest.raises(NoChange, match=r"changes nothing") as caught:
        lora_merge.merge(base, zero, out)
    assert caught.value.exit_code == 4 and "strength 0" in caught.value.fix and not out.exists()
    with pytest.raises(NoChange):
        lora_merge.merge_state_dict(dict(BASE), zero)
    lora_merge.merge(base, [(zero, 0.0)], out)
    assert all(torch.equal(value, BASE[key]) for key, value in load_file(out).items())


def test_model_is_as_before_where_an_adapter_changes_nothing(base: Path) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 8) for name in "ab"})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(NoChange):
        lora_merge.merge_into(model, lora(0.0))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "tensors",
    [
        lora() | {"a.lora_B.weight": torch.zeros(8, 2)},
        lora(1e-9),
        lora(1e-30),
        lora(0.0, **{f"{n}.dora_scale": torch.ones(8, 1) for n in "ab"}),
    ],
    ids=["some modules are zero", "small", "smaller than rounding", "DoRA with other norms"],
)
def test_adapter_that_changes_something_is_merged(base: Path, tensors: Tensors) -> None:
    save_file(tensors, base.with_name("some.safetensors"))
    lora_merge.merge(base, base.with_name("some.safetensors"), base.with_name("out.safetensors"))


def test_adapter_of_two_that_changes_nothing_is_named(base: Path) -> None:
    save_file(lora(), base.with_name("good.safetensors"))
    save_file(lora(0.0), base.with_name("zero.safetensors"))
    both = [base.with_name(f"{name}.safetensors") for name in ("good", "zero")]
    with pytest.raises(NoChange, match=r"zero\.safetensors: a\.lora_B"):
        lora_merge.merge(base, both, base.with_name("out.safetensors"))


def peft(folder: Path, alpha: float, **more: object) -> Path:
    folder.mkdir()
    save_file({f"base_model.model.{k}": v for k, v in lora().items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["a", "b"], **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


Command = Callable[..., object]


@pytest.mark.parametrize("more", [{}, {"use_rslora": True}])
def test_alpha_of_zero_is_refused_from_the_plan_and_the_setting_answers(base: Path, more: dict[str, object]) -> None:
    """verl wrote 0 into every configuration until March 2026 (verl/model_merger/base_model_merger.py)."""
    zero, out = peft(base.with_name("zero"), 0, **more), base.with_name("out")
    right = lora_merge.merge_state_dict(dict(BASE), peft(base.with_name("right"), 4, **more))
    commands: list[Command] = [
        lambda **kw: lora_merge.plan(base, zero, out.with_suffix(".safetensors"), **kw),
        lambda **kw: lora_merge.merge_state_dict(dict(BASE), zero, **kw),
        lambda **kw: lora_merge.combine([zero, zero], out, overwrite=True, **kw),
        lambda **kw: lora_merge.resize(zero, out, rank=1, overwrite=True, **kw),
    ]
    for command in commands:
        with pytest.raises(NoChange, match=r'lora_alpha = 0[\s\S]*setting=\{"lora_alpha": VALUE\}') as caught:
            command()
        assert caught.value.exit_code == 4 and not out.exists()
    for command in commands:
        command(setting={"lora_alpha": 4})
    report = lora_merge.merge(base, zero, out.with_suffix(".safetensors"), setting={"lora_alpha": 4})
    assert all(torch.equal(value, right[key]) for key, value in load_file(out.with_suffix(".safetensors")).items())
    assert report.verified is not None and report.verified["matching"]["proven"] == 2


def test_alpha_of_zero_of_some_modules_is_merged(base: Path) -> None:
    folder = peft(base.with_name("some"), 4, alpha_pattern={"a": 0})
    done = lora_merge.merge_state_dict(dict(BASE), folder)
    assert torch.equal(done["a.weight"], BASE["a.weight"]) and not torch.equal(done["b.weight"], BASE["b.weight"])
