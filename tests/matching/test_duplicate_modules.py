"""A module that a file holds twice: a copy has the same α, not the same factors alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError, VerificationFailed
from lora_merge.matching.conflicts import DuplicateCheck
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

SPELLINGS = ("m.a", "diffusion_model.m.a")


def twice(*alphas: float | None) -> Tensors:
    """The same factors under two names, with an α each."""
    found: Tensors = {}
    for name, alpha in zip(SPELLINGS, alphas, strict=True):
        found |= {f"{name}.lora_up.weight": rand(8, 2), f"{name}.lora_down.weight": rand(2, 8, seed=1)}
        found |= {} if alpha is None else {f"{name}.alpha": torch.tensor(alpha)}
    return found


@pytest.mark.parametrize(("alphas", "scale"), [((1.0, 1.0), 0.5), ((None, None), 1.0)])
def test_copies_with_the_same_alpha_are_applied_once(
    tmp_path: Path, alphas: tuple[float | None, ...], scale: float
) -> None:
    """The second reading finds the place of either."""
    base, adapter = rand(8, 8, seed=2), twice(*alphas)
    out = tmp_path / "o.safetensors"
    report = lora_merge.merge(
        save({"m.a.weight": base}, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors"), out
    )
    change = adapter["m.a.lora_up.weight"] @ adapter["m.a.lora_down.weight"]
    torch.testing.assert_close(load(out)["m.a.weight"], base + scale * change)
    assert report.verified is not None


@pytest.mark.parametrize("alphas", [(1.0, 2.0), (1.0, None), (None, 4.0)])
def test_modules_of_one_weight_with_other_alphas_are_no_copies(
    tmp_path: Path, alphas: tuple[float | None, ...]
) -> None:
    base = save({"m.a.weight": rand(8, 8, seed=2)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="two modules of the adapter change the same weight"):
        lora_merge.plan(base, save(twice(*alphas), tmp_path / "a.safetensors"), tmp_path / "o.safetensors")


def peft_twice(folder: Path, pattern: dict[str, int]) -> tuple[Path, Path]:
    """A base and an adapter folder with the same factors under two names; no tensor states an α."""
    folder /= "adapter"
    folder.mkdir()
    pair = {"lora_A.weight": rand(2, 8), "lora_B.weight": rand(8, 2, seed=1)}
    save(
        {f"base_model.model.{n}.{slot}": t.clone() for n in SPELLINGS for slot, t in pair.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "alpha_pattern": pattern, "target_modules": ["a"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return save({"m.a.weight": rand(8, 8, seed=2)}, folder / "b.safetensors"), folder


@pytest.mark.parametrize("pattern", [{}, {"diffusion_model.m.a": 6}])
def test_alpha_of_the_configuration_decides_too(tmp_path: Path, pattern: dict[str, int]) -> None:
    base, folder = peft_twice(tmp_path, pattern)
    if pattern:
        with pytest.raises(InputError, match="two modules of the adapter change the same weight"):
            lora_merge.plan(base, folder, tmp_path / "o.safetensors")
        return
    verified = lora_merge.merge(base, folder, tmp_path / "o.safetensors").verified
    assert verified is not None
    assert verified["matching"] == {"modules": 1, "proven": 1, "alone": [], "why": {}}


def test_plan_of_copies_with_other_alphas_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account of tensors sees equal bytes: only the second reading compares the scale of a copy with the other's."""
    monkeypatch.setattr(DuplicateCheck, "repeats", lambda self, patch: SPELLINGS[1] in patch.module.name)
    base, folder = peft_twice(tmp_path, {"diffusion_model.m.a": 6})
    with pytest.raises(VerificationFailed, match="the scale of an adapter's module"):
        lora_merge.merge(base, folder, tmp_path / "o.safetensors")
