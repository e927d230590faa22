"""A merge taken back: every number is within one rounding step of what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import FitError, InputError
from tests.support import Tensors, in_process, kohya, load, rand, save, sd1, ulp


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unmerge")
    save(sd1(), folder / "base.safetensors")
    save(kohya(sd1()), folder / "a.safetensors")
    dora = kohya(sd1(), seed=7)
    dora |= {n.replace("lora_up.weight", "dora_scale"): rand(1, *load_in(dora, n), seed=3).abs() + 0.5
             for n in kohya(sd1(), seed=7) if n.endswith("to_q.lora_up.weight")}  # fmt: skip
    save(dora, folder / "dora.safetensors")
    pair = [folder / "a.safetensors", (folder / "b.safetensors", 0.7)]
    save(kohya(sd1(), seed=9), folder / "b.safetensors")
    lora_merge.merge(folder / "base.safetensors", pair, folder / "merged.safetensors")
    return folder


def load_in(tensors: Tensors, up: str) -> tuple[int, ...]:
    return (tensors[up.replace("lora_up", "lora_down")].shape[1],)


def check(before: Tensors, merged: Tensors, after: Tensors) -> None:
    for name, value in before.items():
        if value.is_floating_point():
            step = torch.maximum(ulp(value), ulp(merged[name]))
            assert bool(((after[name].double() - value.double()).abs() <= step).all()), name


@pytest.mark.parametrize("named", [True, False])
def test_every_number_is_within_a_rounding_step(files: Path, tmp_path: Path, *, named: bool) -> None:
    out = tmp_path / "out.safetensors"
    adapters = [files / "a.safetensors", f"{files / 'b.safetensors'}:0.7"] if named else []
    code, told = in_process("unmerge", files / "merged.safetensors", *adapters, "-o", out)
    assert code == 0, told
    check(load(files / "base.safetensors"), load(files / "merged.safetensors"), load(out))
    lora_merge.unmerge(files / "merged.safetensors", [(files / "b.safetensors", 0.7)], tmp_path / "half.safetensors")
    alone = lora_merge.merge_state_dict(load(files / "base.safetensors"), [files / "a.safetensors"])
    check(alone, load(files / "merged.safetensors"), load(tmp_path / "half.safetensors"))


def test_it_has_the_manners_of_a_merge(files: Path, tmp_path: Path) -> None:
    """A plan from headers, and a report in a file: of what was done, or of why it was not."""
    out, told = tmp_path / "out.safetensors", tmp_path / "told.json"
    asked = ("unmerge", files / "merged.safetensors", "-o", out, "--report", told)
    code, said = in_process(*asked, "--dry-run")
    assert (code, out.exists(), json.loads(told.read_text())["dry_run"]) == (0, False, True), said
    assert in_process(*asked, "--compute-dtype", "fp64")[0] == 0
    assert json.loads(told.read_text())["output"] == str(out)
    assert in_process(*asked)[0] == 2
    assert json.loads(told.read_text())["error"]["what"] == "the output exists"
    assert (
        in_process("unmerge", files / "merged.safetensors", "-o", out, "--report", files / "base.safetensors")[0] == 2
    )
    assert load(files / "base.safetensors")


def test_what_depends_on_the_base_is_refused_and_the_base_is_named(files: Path, tmp_path: Path) -> None:
    merged = tmp_path / "m.safetensors"
    lora_merge.merge(files / "base.safetensors", files / "dora.safetensors", merged)
    for adapters in ([files / "dora.safetensors"], []):
        with pytest.raises(FitError, match="cannot be taken back") as caught:
            lora_merge.unmerge(merged, adapters, tmp_path / "out.safetensors", search=[files])
        assert "base.safetensors" in caught.value.fix
    with pytest.raises(FitError, match="ties"):
        lora_merge.merge(files / "base.safetensors", [files / "a.safetensors", files / "b.safetensors"],
                         tmp_path / "t.safetensors", method="ties", density=0.5)  # fmt: skip
        lora_merge.unmerge(tmp_path / "t.safetensors", [], tmp_path / "out.safetensors", search=[files])
    with pytest.raises(InputError, match="says nothing"):
        lora_merge.unmerge(files / "base.safetensors", [], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["b.safetensors"], "b.safetensors was merged as b.safetensors:0.7"),
    (["a.safetensors:1,te=0"], "a.safetensors was merged as a.safetensors:1"),
    (["a.safetensors", "b.safetensors:0.7"], "at most one rounding step"),
])  # fmt: skip
def test_other_strengths_than_those_of_the_merge_are_told(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(files)
    code, told = in_process("unmerge", "merged.safetensors", *words, "-q", "-o", tmp_path / "out.safetensors")
    assert code == 0
    assert said in told
    assert ("at most one rounding step" in told) == said.startswith("at most"), "a promise that is kept"
