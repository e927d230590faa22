"""A merge taken back: every number is within one rounding step of what it was."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.disk import files as disk_files
from lora_merge.disk import hashes
from lora_merge.errors import FitError, InputError, UsageError
from lora_merge.recipes.commands import COMMANDS
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, metadata, save
from tests.kit.models import sd1_sample
from tests.kit.tensors import Tensors, rand, ulp


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unmerge")
    save(sd1_sample(), folder / "base.safetensors")
    save(kohya(sd1_sample()), folder / "a.safetensors")
    dora = kohya(sd1_sample(), seed=7)
    dora |= {n.replace("lora_up.weight", "dora_scale"): rand(1, *load_in(dora, n), seed=3).abs() + 0.5
             for n in kohya(sd1_sample(), seed=7) if n.endswith("to_q.lora_up.weight")}  # fmt: skip
    save(dora, folder / "dora.safetensors")
    pair = [folder / "a.safetensors", (folder / "b.safetensors", 0.7)]
    save(kohya(sd1_sample(), seed=9), folder / "b.safetensors")
    lora_merge.merge(folder / "base.safetensors", pair, folder / "merged.safetensors")
    return folder


DTYPES_OF = {"fp32": [torch.float32], "fp16": [torch.float16], "bf16": [torch.bfloat16],
             "fp8_e4m3fn": [torch.float8_e4m3fn]}  # fmt: skip


def load_in(tensors: Tensors, up: str) -> tuple[int, ...]:
    return (tensors[up.replace("lora_up", "lora_down")].shape[1],)


def check(before: Tensors, merged: Tensors, after: Tensors) -> None:
    for name, value in before.items():
        if value.is_floating_point():
            step = torch.maximum(ulp(value), ulp(merged[name]))
            assert bool(((after[name].double() - value.double()).abs() <= step).all()), name


@pytest.mark.parametrize("named", [True, False])
def test_bytes_of_an_adapter_are_hashed_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    """Its content decides which input of the recipe it is; the recipe of the output states it too."""
    counts, opened = Counter[str](), disk_files.open_regular
    monkeypatch.setattr(hashes, "_known", {})
    monkeypatch.setattr(disk_files, "open_regular", lambda path: counts.update([path.name]) or opened(path))
    monkeypatch.setattr(hashes.RunningHashes, "_read_others", lambda running: counts.update(
        path.name for path in running._others if path not in running._done))  # fmt: skip
    adapters = [files / "a.safetensors", f"{files / 'b.safetensors'}:0.7"] if named else []
    assert run("unmerge", files / "merged.safetensors", *adapters, "-o", tmp_path / "out.safetensors").code == 0
    assert counts == {"a.safetensors": 1, "b.safetensors": 1}


@pytest.mark.few(1)
@pytest.mark.parametrize("named", [True, False])
def test_every_number_is_within_a_rounding_step(files: Path, tmp_path: Path, *, named: bool) -> None:
    out = tmp_path / "out.safetensors"
    adapters = [files / "a.safetensors", f"{files / 'b.safetensors'}:0.7"] if named else []
    code, _, told = run("unmerge", files / "merged.safetensors", *adapters, "-o", out)
    assert code == 0, told
    check(load(files / "base.safetensors"), load(files / "merged.safetensors"), load(out))
    lora_merge.unmerge(files / "merged.safetensors", [(files / "b.safetensors", 0.7)], tmp_path / "half.safetensors")
    alone = lora_merge.merge_state_dict(load(files / "base.safetensors"), [files / "a.safetensors"])
    check(alone, load(files / "merged.safetensors"), load(tmp_path / "half.safetensors"))


def test_unmerge_has_the_manners_of_a_merge(files: Path, tmp_path: Path) -> None:
    """A plan from headers, and a report in a file: of what was done, or of why it was not."""
    out, told = tmp_path / "out.safetensors", tmp_path / "told.json"
    asked = ("unmerge", files / "merged.safetensors", "-o", out, "--report", told)
    code, _, said = run(*asked, "--dry-run")
    assert (code, out.exists(), json.loads(told.read_text())["dry_run"]) == (0, False, True), said
    assert run(*asked, "--compute-dtype", "fp64").code == 0
    assert json.loads(told.read_text())["output"] == str(out)
    assert run(*asked).code == 2
    assert json.loads(told.read_text())["error"]["what"] == "the output exists"
    assert run("unmerge", files / "merged.safetensors", "-o", out, "--report", files / "base.safetensors").code == 2
    assert load(files / "base.safetensors")


def test_changes_that_depend_on_the_base_are_refused_and_the_base_is_named(files: Path, tmp_path: Path) -> None:
    merged = tmp_path / "m.safetensors"
    lora_merge.merge(files / "base.safetensors", files / "dora.safetensors", merged)
    for adapters in ([files / "dora.safetensors"], []):
        with pytest.raises(FitError, match="cannot be undone") as caught:
            lora_merge.unmerge(merged, adapters, tmp_path / "out.safetensors", search=[files])
        assert "base.safetensors" in caught.value.fix
    with pytest.raises(FitError, match="ties"):
        lora_merge.merge(files / "base.safetensors", [files / "a.safetensors", files / "b.safetensors"],
                         tmp_path / "t.safetensors", method="ties", density=0.5)  # fmt: skip
        lora_merge.unmerge(tmp_path / "t.safetensors", [], tmp_path / "out.safetensors", search=[files])
    with pytest.raises(InputError, match="says nothing"):
        lora_merge.unmerge(files / "base.safetensors", [], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(("words", "said"), [
    (["b.safetensors:0.4"], "b.safetensors was merged as b.safetensors:0.7"),
    (["a.safetensors:1,te=0"], "a.safetensors was merged as a.safetensors:1"),
    (["a.safetensors", "b.safetensors:0.7"], "those before the merge by at most one rounding step"),
    (["b.safetensors"], "those of a merge without b.safetensors by at most one rounding step"),
])  # fmt: skip
def test_strengths_other_than_those_of_the_merge_are_noted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(files)
    code, _, told = run("unmerge", "merged.safetensors", *words, "-q", "-o", tmp_path / "out.safetensors")
    assert code == 0
    assert said in told
    assert ("at most one rounding step" in told) == said.startswith("those"), "a promise that is kept"
    assert ("warning: " in told) == (not said.startswith("those"))


PROMISES = {"at most one": 1.0, "at most two": 2.0, "some": 8.0}
"""The words of the note → rounding steps."""


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("options", "words", "dtype"), [
    ({}, None, None), ({"compute_dtype": "bf16"}, "some", "bf16"), ({"compute_dtype": "fp16"}, "some", "fp16"),
    ({"compute_dtype": "fp64"}, "at most one", None), ({"dtype": "bf16"}, "at most one", "bf16"),
    ({"dtype": "fp8_e4m3fn"}, "at most one", "fp8_e4m3fn"),
    ({"dtype": "bf16", "rounding": "stochastic"}, "at most two", "bf16"),
    ({"dtype": "bf16", "compute_dtype": "fp16"}, "some", "bf16"),
], ids=str)  # fmt: skip
def test_note_is_true_of_every_number(
    tmp_path: Path, stored: torch.dtype, options: Any, words: str | None, dtype: str | None
) -> None:
    """Of a change that is larger than the weights and of adapters that cancel too, whatever the recipe says."""
    base = save({"a.weight": rand(48, 48).to(stored)}, tmp_path / "base.safetensors")
    factors = [{"a.lora_up.weight": rand(48, 4, seed=n, scale=2.0), "a.lora_down.weight": rand(4, 48, seed=n + 1)}
               for n in (1, 3)]  # fmt: skip
    one, other = (save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate(factors))
    lora_merge.merge(base, [(one, 0.7), (other, 1.5), (one, -0.7)], made := tmp_path / "made.safetensors", **options)
    report = lora_merge.unmerge(made, [], out := tmp_path / "out.safetensors")
    note = next(str(note) for note in report.notes if "differ from those before the merge" in str(note))
    fine = torch.float32 == stored and not {"dtype", "compute_dtype"} & options.keys()
    words = words or ("some" if fine else "at most one")
    own = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[stored]
    assert f"by {words} rounding step" in note and f"of {dtype or own}" in note, note
    before, merged, after = (load(path)["a.weight"].double() for path in (base, made, out))
    pairs = [(t["a.lora_up.weight"].double(), t["a.lora_down.weight"].double()) for t in factors]
    # sums in the dtype of the output have the errors of every product inside them, by whatever kernel
    change = [up.abs() @ down.abs() if words == "some" else (up @ down).abs() for up, down in pairs]
    largest = torch.stack([before.abs(), merged.abs(), 0.7 * change[0] + before.abs() + 1.5 * change[1]]).amax(0)
    steps = torch.stack([ulp(largest.to(t)) for t in (*DTYPES_OF[dtype or own], load(out)["a.weight"].dtype)]).amax(0)
    assert bool(((after - before).abs() <= PROMISES[words] * 1.001 * steps).all()), note


def test_merge_that_cut_numbers_or_was_no_sum_is_not_taken_back(tmp_path: Path) -> None:
    """Its adapters may be named: the recipe is read all the same."""
    base = save({"a.weight": torch.full((8, 8), 6e4).half()}, tmp_path / "base.safetensors")
    lora = save(
        {"a.lora_up.weight": rand(8, 2, scale=1e4), "a.lora_down.weight": rand(2, 8)}, tmp_path / "l.safetensors"
    )
    for options in ({"on_overflow": "saturate"}, {"method": "compose", "on_overflow": "saturate"}):
        lora_merge.merge(base, lora, made := tmp_path / "made.safetensors", overwrite=True, **options)
        for adapters in ([], [lora]):
            with pytest.raises(
                FitError, match="compose.*cannot be undone" if "method" in options else "saturate"
            ) as failed:
                lora_merge.unmerge(made, adapters, tmp_path / "out.safetensors")
            assert "base.safetensors" in failed.value.fix


def test_quantisation_and_a_missing_recipe_are_named_in_the_note(tmp_path: Path) -> None:
    base = save({"a.weight": rand(64, 64).bfloat16()}, tmp_path / "base.safetensors")
    lora = save({"a.lora_up.weight": rand(64, 2), "a.lora_down.weight": rand(2, 64)}, tmp_path / "l.safetensors")
    said = []
    for options in ({"dtype": "int8"}, {"no_metadata": True}):
        lora_merge.merge(base, lora, made := tmp_path / "made.safetensors", overwrite=True, **options)
        report = lora_merge.unmerge(made, lora, tmp_path / "out.safetensors", overwrite=True)
        said.append(" ".join(map(str, report.notes)))
    assert "what quantisation loses" in said[0]
    assert "nothing in made.safetensors shows that l.safetensors was merged into it" in said[1]
    assert "rounding step" not in said[1]


def test_mistakes_are_answered_with_the_line(files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An adapter for a merge, a merge without a recipe or an output, a strength without its adapter, another adapter."""
    monkeypatch.chdir(files)
    plain = tmp_path / "plain.safetensors"
    lora_merge.merge("base.safetensors", "a.safetensors", plain, no_metadata=True)
    out = ["-o", str(tmp_path / "x.safetensors")]
    for words, right in (
        (["merged.safetensors", "-s", "0.5", *out], f"write lora-merge unmerge merged.safetensors b.safetensors -s 0.5 {' '.join(out)}"),
        (["merged.safetensors", "-s", "0.9,0.7", *out], f"write lora-merge unmerge merged.safetensors a.safetensors b.safetensors -s 0.9,0.7 {' '.join(out)}"),
        (["merged.safetensors", "-s", "2", *out], "name the adapter"),
        (["a.safetensors"], "name the merged checkpoint first, and after it the adapters to take out"),
        (["base.safetensors"], "only outputs of lora-merge carry a recipe; name its adapters"),
        ([plain, "a.safetensors"], f"write lora-merge unmerge {plain} a.safetensors -o plain-unmerged.safetensors"),
        (["merged.safetensors"], "write lora-merge unmerge merged.safetensors -o merged-unmerged.safetensors"),
        (["merged.safetensors", "dora.safetensors", *out], "merge it at a negative strength"),
        (["merged.safetensors", "dora.safetensors", "b.safetensors", *out],
         f"write lora-merge unmerge merged.safetensors a.safetensors b.safetensors {' '.join(out)}"),
    ):  # fmt: skip
        code, _, err = run("unmerge", *words)
        assert code in (2, 3, 4) and err.endswith(f"{right}\n") and "``" not in err, err
    report = lora_merge.unmerge(plain, "a.safetensors", out[1])
    assert any("merged into it as a.safetensors:1: unless it was" in note for note in report.notes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two merges one after the other: of ink at 0.5 and oil at 0.25 for a part, then of chalk; and an adapter apart."""
    folder = tmp_path_factory.mktemp("small")
    save({"a.weight": rand(16, 16).half(), "b.weight": rand(16, 16).half()}, folder / "base.safetensors")
    for seed, name in enumerate(("ink", "oil", "chalk", "other")):
        save({f"{n}.lora_{end}.weight": rand(*shape, seed=seed + 1) for n in "ab" for end, shape in (("up", (16, 2)), ("down", (2, 16)))},
             folder / f"{name}.safetensors")  # fmt: skip
    half = lora_merge.Adapter(folder / "oil.safetensors", 0.25, (("re:^a", 0.5),))
    lora_merge.merge(folder / "base", [(folder / "ink", 0.5), half], folder / "first.safetensors")
    lora_merge.merge(folder / "first", folder / "chalk", folder / "both.safetensors")
    shutil.copyfile(folder / "ink.safetensors", folder / "renamed.safetensors")
    return folder


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "strengths"), [
    ("ink", [-0.5]), ("renamed", [-0.5]), ("chalk", [-1.0]), ("oil", [-0.25]), (["ink", "ink"], [-0.5]),
    (["oil", "ink"], [-0.25, -0.5]), ([("ink", 0.25)], [-0.25]),
])  # fmt: skip
def test_adapter_alone_is_taken_out_at_the_strengths_of_its_merge(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, strengths: list[float]
) -> None:
    """Also of a merge before the last one, and of a copy with another name."""
    monkeypatch.chdir(small)
    report = lora_merge.unmerge("both", name, tmp_path / "out.safetensors")
    assert [
        a.strength for a in COMMANDS["unmerge"].job(name, "x", small / "both.safetensors", {}).adapters
    ] == strengths
    assert ("the result is not the base" in str(report.notes)) == (strengths == [-0.25] and name != "oil")


@pytest.mark.parametrize(("merged", "adapter", "what"), [
    ("both", "other", "other.safetensors is not merged into both.safetensors"),
    ("both", ("ink", 1), "ink.safetensors was merged as ink.safetensors:0.5, not ink.safetensors:1"),
    ("both", ("ink", -0.5), "ink.safetensors was merged as ink.safetensors:0.5, not ink.safetensors:-0.5"),
    ("both", ("oil", 0.25), "oil.safetensors was merged as oil.safetensors:0.25,re:^a=0.5, not oil.safetensors:0.25"),
    ("without", "ink", "ink.safetensors is not merged into without.safetensors"),
])  # fmt: skip
def test_more_than_was_merged_is_not_taken_out(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: str, adapter: Any, *, what: str
) -> None:
    """Nor twice. The error names what the recipes name."""
    monkeypatch.chdir(small)
    if merged == "without" and not Path("without.safetensors").exists():
        lora_merge.unmerge("both", "ink", "without")
    with pytest.raises(FitError, match=re.escape(what)) as failed:
        lora_merge.unmerge(merged, adapter, tmp_path / "out.safetensors")
    assert "ink.safetensors:0.5" in str(failed.value) or "oil" in what
    assert not (tmp_path / "out.safetensors").exists()


def test_namesake_with_other_bytes_is_no_all_clear(small: Path, tmp_path: Path) -> None:
    shutil.copyfile(small / "other.safetensors", tmp_path / "ink.safetensors")
    report = lora_merge.unmerge(small / "both", tmp_path / "ink", tmp_path / "out.safetensors")
    assert "ink.safetensors was edited since it was merged" in str(report.notes)
    assert "rounding step" not in str(report.notes)


def test_setting_of_a_recipe_that_no_adapter_uses_is_damage_and_no_mistake_of_the_user(
    files: Path, tmp_path: Path
) -> None:
    entries = metadata(files / "merged.safetensors")
    recipe = json.loads(entries["lora_merge.recipe"]) | {"setting": {"lora_alpha": 1.0}}
    save(
        load(files / "merged.safetensors"),
        made := tmp_path / "made.safetensors",
        entries | {"lora_merge.recipe": json.dumps(recipe)},
    )
    given = made, [files / "a.safetensors", (files / "b.safetensors", 0.7)], tmp_path / "out.safetensors"
    with pytest.raises(InputError, match="the recipe is damaged: no module of the adapters uses lora_alpha"):
        lora_merge.unmerge(*given)
    with pytest.raises(UsageError, match="no module of the adapters uses lora_alpha"):
        lora_merge.unmerge(*given, setting={"lora_alpha": 2})
