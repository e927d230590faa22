"""`inspect BASE ADAPTER`: what matches, exit codes, and numbers that a real merge has too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.job import Adapter
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.inspect_rows import match_rows
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.inspected import lines
from tests.kit.measured import survival_of
from tests.kit.models import sd1
from tests.kit.tensors import rand
from tests.viewing.conftest import Scene


def test_strength_behind_the_file_is_understood(scene: Scene) -> None:
    code, out, _ = run("inspect", scene.base, f"{scene.ink}:0.5,te=0", "--json")
    match = json.loads(out)["match"]
    assert code == 0
    assert match["fits"]
    assert match["strengths"] == {"unet": {"0.5": 15}, "te": {"0": 5}}
    assert run("inspect", f"{scene.ink}:0.5").code == 0
    assert run("inspect", scene.folder / "ink").code == 0


def test_misfit_ends_with_4(scene: Scene, tmp_path: Path) -> None:
    """Where some modules have no place, and where nothing can be merged at all."""
    unet = save({k: v for k, v in sd1().items() if k.startswith("model.")}, tmp_path / "unet.safetensors")
    wide = {
        k: rand(v.shape[0], 3 * v.shape[1]) if k.endswith("to_q.lora_down.weight") else v
        for k, v in kohya(sd1()).items()
    }
    for base, adapter, matched in ((unet, scene.ink, 15), (scene.base, save(wide, tmp_path / "w.safetensors"), None)):
        code, out, _ = run("inspect", base, adapter, "--json")
        match = json.loads(out)["match"]
        assert (code, match["fits"], match["matched"], match["total"]) == (4, False, matched, 20)
        assert match["why"]


def test_several_files_are_shown_one_after_the_other(scene: Scene) -> None:
    code, out, _ = run("inspect", scene.ink, scene.oil, scene.base, "--json")
    assert (code, [f["kind"] for f in json.loads(out)["files"]]) == (0, ["adapter", "adapter", "checkpoint"])
    code, out, _ = run("inspect", scene.base, scene.ink, scene.oil, "--json")
    assert [Path(f["match"]["adapter"]).stem for f in json.loads(out)["files"]] == ["ink", "oil"]
    assert run("inspect", scene.folder / "*.safetensors")[1].count("match ") == 2


def test_files_in_another_order_and_files_that_are_no_adapter_are_answered(scene: Scene, tmp_path: Path) -> None:
    """A check of a script ends with 4 where nothing after the base can fit it; a table of several files with 0."""
    vae = save({"decoder.conv_in.weight": rand(8, 4, 3, 3)}, tmp_path / "vae.safetensors")
    code, out, _ = run("inspect", scene.ink, scene.base)
    assert (
        code == 0
        and f"name the base first, and adapters alone after it: lora-merge inspect {scene.base} {scene.ink}" in out
    )
    code, out, _ = run("inspect", scene.base, vae)
    assert code == 4 and "vae.safetensors is no adapter: it is a VAE" in out
    code, out, _ = run("inspect", scene.base, scene.ink, vae)
    assert code == 0 and "vae.safetensors is no adapter" in out and f"inspect {scene.base} {scene.ink}\n" in out
    assert "no adapter" not in run("inspect", vae, scene.base)[1] + run("inspect", scene.base, scene.base)[1]
    assert run("inspect", scene.base, scene.folder / "nothing.safetensors").err.endswith(
        "its folder has ink.safetensors, oil.safetensors\n"
    )


def test_adapter_that_is_incomplete_does_not_fit(scene: Scene, tmp_path: Path) -> None:
    """Its base and the other adapters are shown all the same."""
    gone = next(key for key in load(scene.ink) if key.endswith("lora_down.weight"))
    half = save({k: v for k, v in load(scene.ink).items() if k != gone}, tmp_path / "half.safetensors")
    code, out, _ = run("inspect", scene.base, scene.ink, half)
    assert (
        code == 4
        and "ink.safetensors fits: all 20 modules match. half.safetensors does not fit: it is incomplete." in out
    )
    alone = run("inspect", half)[1]
    assert len(re.findall("1 module is incomplete", alone)) == 2 and "incomplete 1" in alone
    assert re.search(r"layers +incomplete.*: 1 module\n", alone) and re.search(r"layers +lora.*: 19 modules\n", alone)


def test_numbers_are_those_of_the_merge(scene: Scene, tmp_path: Path) -> None:
    report = lora_merge.merge(scene.base, [(scene.ink, 0.5)], tmp_path / "o.safetensors")
    numbers = inspect(scene.base, Adapter(scene.ink, 0.5), weights=True)["match"]["numbers"]
    before, after = load(scene.base), load(tmp_path / "o.safetensors")
    squares = {k: float((after[k].double() - before[k].double()).square().sum()) for k in numbers["tensors"]}
    assert numbers["all"]["change"] ** 2 == pytest.approx(sum(squares.values()), rel=1e-3)
    assert report.verified is not None
    assert numbers["all"]["retained"] == pytest.approx(report.verified["retained"][0]["retained"], abs=1e-3)
    weight = sum(float(before[k].double().square().sum()) for k in squares)
    assert numbers["all"]["weight"] ** 2 == pytest.approx(weight, rel=1e-5)
    for kind in ("components", "blocks", "tensors"):
        assert sum(n["change"] ** 2 for n in numbers[kind].values()) == pytest.approx(
            numbers["all"]["change"] ** 2, rel=1e-4
        )


def test_effective_strength_has_alpha_in_it(scene: Scene) -> None:
    """The factors of the scene have rank 4 and alpha 2."""
    match = inspect(scene.base, Adapter(scene.ink, 0.5, (("te", 0.5),)))["match"]
    assert match["effective"]["unet"] == {"min": 0.25, "median": 0.25, "max": 0.25}
    assert match["effective"]["te"]["max"] == 0.125
    assert any(
        "effective     te 0.125; unet 0.25 (strength × scale: alpha / rank, or / √rank)" in line
        for line in map(str, match_rows(match))
    )


def test_change_below_the_dtype_is_reported_before_the_merge(scene: Scene, tmp_path: Path) -> None:
    """The changes are a ten-thousandth of the weights, which bf16 cannot hold beside them."""
    base = save({k: v.bfloat16() if v.is_floating_point() else v for k, v in sd1().items()}, tmp_path / "b.safetensors")
    facts = inspect(base, Adapter(scene.ink, 0.001), weights=True)
    assert facts["match"]["numbers"]["all"]["retained"] < 0.9
    assert any("survives in the base's dtype" in line for line in lines(facts))
    (warning,) = facts["match"]["numbers"]["warnings"]
    assert all(words in warning for words in ("bf16", "--dtype fp32", "keep less than 90 %"))
    assert any(line.split(maxsplit=1) == ["warning", warning] for line in lines(facts))
    assert not inspect(base, Adapter(scene.ink, 1.0), weights=True)["match"]["numbers"]["warnings"]


def test_base_shows_its_blocks_its_storage_and_how_to_undo_a_merge(scene: Scene, tmp_path: Path) -> None:
    first, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    lora_merge.merge(scene.base, [(scene.ink, 0.5)], first)
    lora_merge.merge(first, [scene.oil], second)
    facts = inspect(second)
    assert [m["base"] for m in facts["merged"]] == ["one.safetensors", "base.safetensors"]
    (ink,) = facts["merged"][1]["adapters"]
    assert ink.pop("strengths") == {"te": {"0.5": 5}, "unet": {"0.5": 15}}
    assert ink == {"name": "ink.safetensors", "strength": 0.5, "parts": []}
    assert "one.safetensors" in facts["undo"]
    assert facts["bits_per_weight"] == pytest.approx(16, abs=1)
    assert {"B01", "BASE"} <= facts["blocks"].keys()
    assert sum(facts["blocks"].values()) <= facts["parameters"]
    assert "undo" not in inspect(scene.base)


@pytest.mark.parametrize(
    "recipe", ["{}", '{"base": 3}', '{"base": {"files": []}, "adapters": {}}', '{"base": {"files": [3]}}']
)
def test_recipe_of_another_program_does_no_harm(recipe: str, tmp_path: Path) -> None:
    facts = inspect(save({"a": torch.zeros(2)}, tmp_path / "m.safetensors", {"lora_merge.recipe": recipe}))
    assert not facts.get("merged")
    assert not facts.get("undo")


def test_tensor_that_takes_the_place_of_the_base_s_has_its_numbers(tmp_path: Path) -> None:
    """As in norms that PEFT trains; and without any other change nobody is told to ask for what is there."""
    base = {"model.layers.0.norm.weight": torch.ones(64).bfloat16(), "model.layers.0.q_proj.weight": rand(64, 64)}
    new = 1 + rand(64)
    adapter = tmp_path / "ln"
    adapter.mkdir()
    save({"base_model.model.model.layers.0.norm.ln_tuning_layers.weight": new}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LN_TUNING", "target_modules": ["norm"]}')
    facts = inspect(save(base, tmp_path / "base.safetensors"), adapter, weights=True)
    every = facts["match"]["numbers"]["all"]
    delta, applied = new.double() - 1, new.bfloat16().double() - 1
    want = survival_of(delta, applied - delta)
    assert every["change"] == pytest.approx(delta.norm().item(), rel=1e-4)
    assert every["weight"] == 8
    assert every["changed"] == pytest.approx((applied != 0).double().mean().item(), rel=1e-4)
    assert {entry: every[entry] for entry in want} == pytest.approx(want, rel=1e-4)
    assert "run with --weights" not in "\n".join(lines(facts))
    assert "run with --weights" in "\n".join(lines(inspect(tmp_path / "base.safetensors", adapter)))
    told = "\n".join(lines(inspect(adapter, weights=True)))
    assert "whole         1 tensor replaces the base's: " in told
    assert "‖ΔW‖" not in told
