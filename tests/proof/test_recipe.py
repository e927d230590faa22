"""Provenance: what an output says about itself, and the same bytes again. Run: pytest tests/proof/test_recipe.py"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine.admission import admit
from lora_merge.engine.merge import run
from lora_merge.errors import InputError, MergeError, UsageError, VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.safetensors import parse_file
from lora_merge.planning.recipe import KEY, LEGACY_HASH, MOST_CHARACTERS
from lora_merge.recipes.find_inputs import find
from lora_merge.recipes.read_recipe import read_recipe
from lora_merge.recipes.replay import plan_again, prove, refuse_to_unmerge
from tests.conftest import Nursery
from tests.kit.adapters import kohya
from tests.kit.files import load, metadata, save, sha
from tests.kit.models import sd1_sample


@pytest.fixture
def files(tmp_path: Path) -> Path:
    base = sd1_sample()
    kept = {"format": "pt", "author": "somebody", "sshs_model_hash": "stale", "modelspec.hash_sha256": "stale"}
    save(base, tmp_path / "base.safetensors", kept)
    save(kohya(base), tmp_path / "style.safetensors")
    return tmp_path


def merged(folder: Path, name: str = "out", **options: Any) -> Path:
    out = folder / f"{name}.safetensors"
    lora_merge.merge(folder / "base.safetensors", [(folder / "style.safetensors", 0.7)], out, **options)
    return out


def test_output_says_how_it_was_made(files: Path) -> None:
    found = metadata(merged(files, dtype="bf16", strength_for=[("te", 0.5)]))
    recipe = json.loads(found[KEY])
    assert recipe["version"] == lora_merge.__version__
    assert recipe["base"]["files"][0]["sha256"] == sha(files / "base.safetensors")
    assert recipe["base"]["files"][0]["size"] == (files / "base.safetensors").stat().st_size
    (adapter,) = recipe["adapters"]
    assert adapter["files"][0]["sha256"] == sha(files / "style.safetensors")
    assert (adapter["strength"], adapter["parts"]) == (0.7, [["te", 0.5]])
    assert adapter["strengths"] == {"unet": {"0.7": 4}, "te": {"0.35": 1}}
    assert (recipe["dtype"], recipe["compute_dtype"], recipe["unmatched"]) == ("bf16", "fp32", "error")
    assert found["author"] == "somebody"
    assert found["modelspec.merged_from"] == "base.safetensors, style.safetensors"
    assert not {"sshs_model_hash", "modelspec.hash_sha256"} & set(found)


def test_web_uis_find_their_own_entries(files: Path) -> None:
    """The keys that AUTOMATIC1111's merger writes: JSON objects, models by their SHA-256."""
    found = metadata(merged(files))
    recipe, models = json.loads(found["sd_merge_recipe"]), json.loads(found["sd_merge_models"])
    hashes = {name: sha(files / name) for name in ("base.safetensors", "style.safetensors")}
    assert recipe["primary_model_hash"] == hashes["base.safetensors"]
    assert recipe["multiplier"] == 0.7
    assert {v["name"]: k for k, v in models.items()} == hashes
    start = (files / "base.safetensors").read_bytes()[LEGACY_HASH[0] :][: LEGACY_HASH[1]]
    assert models[hashes["base.safetensors"]]["legacy_hash"] == hashlib.sha256(start).hexdigest()[:8]


def test_merge_into_a_merge_remembers_the_first(files: Path) -> None:
    first = merged(files, "first")
    second = files / "second.safetensors"
    lora_merge.merge(first, files / "style.safetensors", second)
    recipe = json.loads(metadata(second)[KEY])
    assert recipe["base"]["recipe"] == json.loads(metadata(first)[KEY])
    assert sha(files / "base.safetensors") in json.loads(metadata(second)["sd_merge_models"])
    assert prove(second, full=True)["proven"]


def test_same_merge_has_the_same_bytes_whatever_the_machine_gives_it(files: Path, nursery: Nursery) -> None:
    """Threads, memory bound (and so windows), other name of the output, another folder."""
    wanted, log = sha(merged(files, device="cpu")), files / "log"
    for n, (threads, memory) in enumerate(((1, "8MiB"), (2, "16MiB"), (3, "1GiB"))):
        argv = [files / "base.safetensors", f"{files / 'style.safetensors'}:0.7", "-o", files / f"t{n}.safetensors",
                "--device", "cpu"]  # fmt: skip
        code = f"import torch; torch.set_num_threads({threads}); from lora_merge.__main__ import start; start()"
        pid = nursery.start([*map(str, argv), "-q", "--max-memory", memory], Path("/"), log=str(log), code=code)
        assert nursery.wait(pid) == 0, log.read_text()
        assert sha(files / f"t{n}.safetensors") == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16", "strength_for": [("te", 0.5), ("re:attn1", 2.0)]}])
def test_replay_gives_the_same_bytes(files: Path, options: dict[str, Any]) -> None:
    out = merged(files, **options)
    (files / "deep").mkdir()
    (files / "style.safetensors").rename(files / "deep" / "style.safetensors")
    run(plan_again(out, files / "again.safetensors", [files / "deep"]))
    assert sha(files / "again.safetensors") == sha(out)


def test_replay_needs_its_inputs(files: Path) -> None:
    out = merged(files)
    tensors = load(files / "style.safetensors")
    (files / "style.safetensors").unlink()
    with pytest.raises(InputError, match=r"the input 'style\.safetensors' is not found"):
        plan_again(out, files / "again.safetensors")
    save({k: v * 2 for k, v in tensors.items()}, files / "style.safetensors")
    with pytest.raises(VerificationFailed, match="older or newer"):
        plan_again(out, files / "again.safetensors")
    with pytest.raises(UsageError, match="no such folder"):
        plan_again(out, files / "again.safetensors", [files / "none"])


def test_folders_and_name_tables_are_replayed(files: Path) -> None:
    """A PEFT folder is one input; its configuration belongs to it."""
    import torch
    from safetensors.torch import save_file

    folder = files / "peft"
    folder.mkdir()
    save(
        {f"base_model.model.layer.lora_{s}.weight": torch.ones(*d) for s, d in (("A", (2, 8)), ("B", (8, 2)))},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["layer"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"layer.weight": torch.eye(8)}, files / "linear.safetensors")
    out = files / "linear-out.safetensors"
    lora_merge.merge(files / "linear.safetensors", folder, out)
    run(plan_again(out, files / "again.safetensors"))
    assert sha(files / "again.safetensors") == sha(out)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    with pytest.raises(VerificationFailed, match="older or newer"):
        prove(out)
    folder.rename(files / "other")
    with pytest.raises(InputError, match="'peft' is not found"):
        prove(out)


def test_folder_of_a_model_and_its_adapter_is_found_as_both_under_another_name(files: Path) -> None:
    (folder := files / "model").mkdir()
    save({"layer.weight": torch.eye(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x"}')
    factors = {f"base_model.model.layer.lora_{s}.weight": torch.ones(*d) for s, d in (("A", (2, 8)), ("B", (8, 2)))}
    save(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    lora_merge.merge(folder, folder, files / "out")
    folder.rename(files / "other")
    assert prove(files / "out")["proven"]


def test_configuration_of_the_base_is_one_of_its_files(files: Path) -> None:
    """It decides what is tied and by what names the model goes."""
    (files / "model").mkdir()
    (files / "base.safetensors").rename(files / "model" / "model.safetensors")
    config = files / "model" / "config.json"
    config.write_text('{"model_type": "sd"}')
    out = files / "out"
    lora_merge.merge(files / "model", files / "style.safetensors", out)
    prove(out)
    config.write_text('{"model_type": "sd1"}')
    for again in (lambda: prove(out), lambda: plan_again(out, files / "again"),
                  lambda: prove(out, files / "model", [(files / "style.safetensors", None)])):  # fmt: skip
        with pytest.raises(VerificationFailed, match=r"than one of its inputs|version of an input") as e:
            again()
        assert str(config) in e.value.where


def test_files_beside_the_weights_are_compared(files: Path) -> None:
    (files / "model").mkdir()
    (files / "base.safetensors").rename(files / "model" / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (files / "model" / name).write_text('{"model_type": "sd"}')
    out = files / "out"
    lora_merge.merge(files / "model", files / "style.safetensors", out, dtype="bf16")
    assert prove(out)["warnings"] == []
    (out / "config.json").write_text('{"model_type": "sd", "a": 1}')
    (out / "tokenizer.json").unlink()
    (warning,) = prove(out)["warnings"]
    assert "config.json, tokenizer.json" in warning
    for spoil in (lambda: (out / "config.json").write_text("{}"), (out / "config.json").unlink):
        spoil()
        with pytest.raises(VerificationFailed, match="not at all") as e:
            prove(out)
        assert e.value.where.endswith("config.json")


def test_named_inputs_that_are_missing_are_no_failed_proof(files: Path) -> None:
    out = merged(files)
    with pytest.raises(InputError, match="not found"):
        prove(out, files / "none.safetensors", [(files / "style.safetensors", None)])


def test_files_that_may_not_be_read_are_passed_over(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read anything, so the system's refusals are played."""
    out = merged(files)
    (files / "a_link").symlink_to("private")
    shutil.copy(files / "base.safetensors", files / "a_copy.safetensors")

    def refuse(name: str, *endings: str) -> None:
        really = getattr(os, name)

        def act(path: Any, *rest: Any, **more: Any) -> Any:
            if str(path).endswith(endings):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return really(path, *rest, **more)

        monkeypatch.setattr(os, name, act)

    refuse("stat", "a_link")
    refuse("open", "a_link", "a_copy.safetensors")
    (files / "base.safetensors").rename(files / "z.safetensors")
    assert prove(out)["proven"]


def test_recipe_that_gives_another_model_is_not_replayed(files: Path) -> None:
    """As it may be where an earlier version left something out of it."""
    out = merged(files)
    save({k: v for k, v in load(out).items() if "out.2" not in k}, out, metadata(out))
    with pytest.raises(VerificationFailed, match="another model"):
        plan_again(out, files / "again.safetensors")


def test_unmerging_is_refused_with_advice(files: Path) -> None:
    out = merged(files)
    with pytest.raises(UsageError, match="cannot be undone") as refusal:
        refuse_to_unmerge(out)
    assert sha(files / "base.safetensors") in refusal.value.fix
    for command, named in ((prove, True), (refuse_to_unmerge, False)):  # the other one has no such options
        with pytest.raises(InputError, match="says nothing") as error:
            command(files / "base.safetensors")
        assert ("--adapter" in error.value.fix) is named


GOOD = {"name": "b", "files": [{"name": "b.safetensors", "size": 1, "sha256": "0" * 64}]}


def told(**changes: Any) -> str:
    """A sound recipe with some fields in another way."""
    sound = {"version": "1", "base": GOOD, "adapters": [{**GOOD, "strength": 1, "parts": []}], "dtype": "keep",
             "compute_dtype": "fp32", "unmatched": "error"}  # fmt: skip
    return json.dumps({**sound, **changes})


def of(**changes: Any) -> dict[str, Any]:
    """An input with its file described in another way."""
    return {"name": "b", "files": [{**GOOD["files"][0], **changes}]}  # type: ignore[dict-item]


OUTSIDE = ("../b", "/etc/passwd", "a\\b", "a/../../b", "", "..", "a\0b", 7)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "{" * 10_000, told(adapters=[]), told(version=1), told(adapters=5),
     told(adapters=[{**GOOD, "strength": True, "parts": []}]), told(adapters=[{**GOOD, "strength": 10**400, "parts": []}]),
     told(base=of(size=float("inf"))), told(more="x" * MOST_CHARACTERS), *(told(base=of(name=n)) for n in OUTSIDE),
     *(told(map={"name": n, "text": "a"}) for n in (*OUTSIDE, "a/b", "." * 3000, "\ud800")),
     told(map={"name": "a", "text": "\ud800"}), told(base=of(name="\ud800")), told(setting={"x": 1}), told(dtype="int4"),
     told(setting={"lora_alpha": 10**400}), told(adapters=[{**GOOD, "strength": 1, "parts": [["t;e", 1]]}])],
)  # fmt: skip
def test_damaged_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = save(sd1_sample(), tmp_path / "x.safetensors", {KEY: text})
    with pytest.raises(InputError, match="the recipe is damaged"):
        read_recipe(open_checkpoint(path))


def test_values_of_a_recipe_are_checked_like_options(files: Path) -> None:
    out = merged(files)
    recipe = json.loads(parse_file(out).metadata[KEY])
    patterns = ("re:(a+)+\\1$", "re:(", "tee", "re:" + "a" * 100_001, "te3", "re:nothing")
    for change in (
        {"dtype": "int4"}, {"compute_dtype": ""}, {"unmatched": "maybe"}, {"setting": {"x": 1}},
        {"setting": {"lora_alpha": 3}},
        *({"adapters": [{**recipe["adapters"][0], "parts": [[p, 1]]}]} for p in patterns),
    ):  # fmt: skip
        save(load(out), out, {KEY: json.dumps({**recipe, **change})})
        with pytest.raises(InputError, match="the recipe is damaged"):
            prove(out)
        with pytest.raises(InputError, match="the recipe is damaged"):
            prove(out, files / "base.safetensors", [(files / "style.safetensors", None)])
        with pytest.raises(InputError, match="the recipe is damaged"):
            plan_again(out, files / "again.safetensors")


def test_options_of_the_user_are_no_damage_of_the_recipe(files: Path) -> None:
    out = merged(files)
    with pytest.raises(UsageError, match="the output exists"):
        admit(plan_again(out, out))
    with pytest.raises(UsageError, match="is not a size"):
        plan_again(out, files / "again.safetensors", max_memory="much")


def test_file_deeper_than_any_folder_is_not_found(files: Path) -> None:
    out = merged(files)
    recipe = json.loads(parse_file(out).metadata[KEY])
    file = recipe["base"]["files"][0]
    recipe["base"] |= {"folder": True, "files": [file | {"name": "a/" * 60 + "base.safetensors"}]}
    save(load(out), out, {KEY: json.dumps(recipe)})
    with pytest.raises(MergeError) as caught:
        prove(out)
    assert caught.value.exit_code in (3, 6)


def test_search_is_bounded_and_stays_below_its_folders(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = merged(files)
    deep = tmp_path / "a" / "b" / "c" / "d" / "e"
    deep.mkdir(parents=True)
    recipe, walked = read_recipe(open_checkpoint(out)), list[Path]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", lambda top, walk=os.walk: walked.append(top) or walk(top))
        assert find(recipe.inputs, [tmp_path, deep]) == [files / "base.safetensors", files / "style.safetensors"]
    assert walked == [tmp_path], "what is found lies in the first folder"
    (files / "style.safetensors").rename(deep / "style.safetensors")
    with pytest.raises(InputError, match="not found"):
        find(recipe.inputs, [tmp_path])
    assert find(recipe.inputs, [tmp_path, deep])[1] == deep / "style.safetensors"
    with pytest.raises(UsageError, match="no such folder"):
        find(recipe.inputs, [tmp_path, tmp_path / "none"])
    shutil.copy(deep / "style.safetensors", copied := tmp_path / "copied.safetensors")
    assert find(recipe.inputs, [tmp_path])[1] == copied
    assert find(recipe.inputs, [tmp_path, deep])[1] == deep / "style.safetensors", (
        "the file of that name, wherever it is"
    )
    copied.unlink()
    monkeypatch.setattr("lora_merge.recipes.find_inputs.MOST_FILES", 2)
    with pytest.raises(InputError, match="not found"):
        find(recipe.inputs, [tmp_path, deep])


def test_fold_thread_keeps_to_itself_and_leaves_others_alone() -> None:
    """Regression: 2 threads within a matrix product gave other bytes than 1 for six layers of a real model.

    Also in a program that has set a number of its own.
    """
    import threading

    import torch

    from lora_merge.engine.devices import one_core

    before, seen = torch.get_num_threads(), []

    def work() -> None:
        one_core()
        seen.append(torch.get_num_threads())
        seen.extend(int(n) for n in re.findall(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info()))

    try:
        for own in (before, 3):
            torch.set_num_threads(own)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)
    if sys.platform.startswith("linux"):
        assert {*seen} == {1} and len(seen) in (2, 4)


def test_file_that_states_the_scale_is_one_of_the_inputs(tmp_path: Path) -> None:
    """Bytes depend on it: another alpha in it is another merge, for `verify` and for a batch that is run again."""
    folder = tmp_path / "style"
    folder.mkdir()
    base, side, out = tmp_path / "base.safetensors", folder / "training.yaml", tmp_path / "out.safetensors"
    save({"layer.weight": torch.zeros(6, 5)}, base)
    save({"layer.lora_A.weight": torch.ones(4, 5), "layer.lora_B.weight": torch.ones(6, 4)},
              folder / "lora.safetensors")  # fmt: skip
    side.write_text("lora:\n  alpha: 8\n  rank: 4\n", encoding="utf-8")
    small = {"command": "resize", "adapters": [str(folder / "lora.safetensors")], "rank": 2,
             "output": str(tmp_path / "small.safetensors")}  # fmt: skip
    jobs: dict[str, Any] = {"version": 1, "jobs": [
        {"base": str(base), "adapters": [str(folder / "lora.safetensors")], "output": str(out)}, small,
    ]}  # fmt: skip
    assert {job.status for job in lora_merge.run_batch(jobs)} == {"merged", "made"}
    assert lora_merge.verify(out, search=[tmp_path])["proven"]
    assert {job.status for job in lora_merge.run_batch(jobs)} == {"skipped"}
    side.write_text("lora:\n  alpha: 2\n  rank: 4\n", encoding="utf-8")
    with pytest.raises(VerificationFailed, match="older or newer") as caught:
        lora_merge.verify(out, search=[tmp_path])
    assert "training.yaml" in caught.value.where
    assert {job.status for job in lora_merge.run_batch(jobs)} == {"failed"}  # another recipe is not replaced
