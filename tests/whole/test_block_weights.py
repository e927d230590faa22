"""Strengths by block: every way to write them gives base + Σ strength × factor of the block × difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.batch.run import run_batch
from lora_merge.errors import MergeError, PartWithoutEffect, UsageError
from lora_merge.job import Adapter
from lora_merge.recipes.replay import prove
from tests.kit.command_line import run

LAYERS = 4
KEY = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    made = torch.Generator().manual_seed(0)
    base = {"model.embed_tokens.weight": torch.randn(8, 6, generator=made)}
    for n in range(LAYERS):
        base[KEY.format(n)] = torch.randn(8, 6, generator=made)
        base[f"model.layers.{n}.self_attn.q_proj.weight"] = torch.randn(6, 6, generator=made)
    save_file(base, tmp_path / "base.safetensors")
    for name in ("one", "two"):
        adapter = {}
        for n in range(LAYERS):
            stem = f"base_model.model.{KEY.format(n).removesuffix('.weight')}"
            adapter[f"{stem}.lora_A.weight"] = torch.randn(2, 6, generator=made)
            adapter[f"{stem}.lora_B.weight"] = torch.randn(8, 2, generator=made)
            adapter[f"{stem}.alpha"] = torch.tensor(2.0)
        save_file(adapter, tmp_path / f"{name}.safetensors")
    return tmp_path


def wanted(files: Path, factors: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    base = load_file(files / "base.safetensors")
    for name, by_layer in factors.items():
        adapter = load_file(files / f"{name}.safetensors")
        for n, factor in enumerate(by_layer):
            stem = f"base_model.model.{KEY.format(n).removesuffix('.weight')}"
            base[KEY.format(n)] += factor * (adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"])
    return base


def check(out: Path, want: dict[str, torch.Tensor]) -> None:
    got = load_file(out)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6)


CASES: dict[str, tuple[list[str], dict[str, list[float]]]] = {
    "a block": (["one.safetensors", "--strength-for", "L01=0.5"], {"one": [1, 0.5, 1, 1]}),
    "a range": (["one.safetensors", "--strength-for", "L01-L02=0.5"], {"one": [1, 0.5, 0.5, 1]}),
    "two with a comma": (["one.safetensors", "--strength-for", "L00=0,L03=2"], {"one": [0, 1, 1, 2]}),
    "parts multiply": (["one.safetensors:0.5", "--strength-for", "L=2", "--strength-for", "L00=0.25"], {"one": [0.25, 1, 1, 1]}),
    "a path": (["one.safetensors", "--strength-for", "layers.2-3=0"], {"one": [1, 1, 0, 0]}),
    "a list": (["one.safetensors", "--strength-for", "lbw=9,1,0,0.5,-1"], {"one": [1, 0, 0.5, -1]}),
    "a preset": (["one.safetensors", "--strength-for", "lbw=ALL0.5"], {"one": [0.5] * 4}),
    "behind the adapter": (["one.safetensors:0.8,L00=0", "two.safetensors"], {"one": [0, 0.8, 0.8, 0.8], "two": [1] * 4}),
    "behind an adapter without strength": (["one.safetensors,L00-L01=0"], {"one": [0, 0, 1, 1]}),
    "a list behind the adapter": (["one.safetensors:2,lbw=1,1,0,0,0.5"], {"one": [2, 0, 0, 1]}),
    "for the second": (["one.safetensors", "two.safetensors:0.5", "--strength-for", "2:L03=0"], {"one": [1] * 4, "two": [0.5, 0.5, 0.5, 0]}),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_block_weights_on_the_command_line(files: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    arguments, factors = CASES[case]
    result = run("merge", "base.safetensors", *arguments, "-o", "out.safetensors")
    assert result.code == 0, result.err
    check(files / "out.safetensors", wanted(files, factors))
    assert prove(files / "out.safetensors", full=True)["proven"]  # by its recipe, which names the parts


def test_block_weights_in_python_and_in_batches(files: Path) -> None:
    want = wanted(files, {"one": [1, 0, 0.5, -1]})
    numbers = [9, 1, 0, 0.5, -1]
    for n, parts in enumerate(({"lbw": numbers}, {"lbw": "9,1,0,0.5,-1"}, {"L01": 0, "L02": 0.5, "L03": -1})):
        lora_merge.merge(
            files / "base.safetensors", files / "one.safetensors", files / f"{n}.safetensors", strength_for=parts
        )  # type: ignore[arg-type]
        check(files / f"{n}.safetensors", want)
    own = Adapter(files / "one.safetensors", 1.0, (("lbw", "9,1,0,0.5,-1"),))  # type: ignore[arg-type]
    lora_merge.merge(files / "base.safetensors", [own], files / "own.safetensors")
    check(files / "own.safetensors", want)
    jobs = {"version": 1, "jobs": [{"base": "base.safetensors", "output": "batch.safetensors",
            "adapters": [{"path": "one.safetensors", "strength_for": {"lbw": "9,1,0,0.5,-1"}}]}]}  # fmt: skip
    (files / "jobs.yaml").write_text(json.dumps(jobs))
    assert all(not report.error for report in run_batch(files / "jobs.yaml"))
    check(files / "batch.safetensors", want)


@pytest.mark.parametrize(
    "text",
    ["L04=1", "L00-L09=1", "lbw=1,0", "lbw=NOPE", "lbw=MIDD", "QQ=1", "layers.7=0", "3:L00=1", "nonsense=1", "IN04=0"],
)
def test_blocks_that_the_base_lacks_are_refused_with_those_it_has(
    files: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    arguments = ["merge", "base.safetensors", "one.safetensors", "--strength-for", text, "-o", "out.safetensors"]
    result = run(*arguments)
    assert result.code == UsageError.exit_code
    assert "fix: " in result.err
    assert not (files / "out.safetensors").exists()


def test_parts_lists_what_the_option_takes(files: Path) -> None:
    result = run("parts", files / "base.safetensors", "--json")
    found = json.loads(result.out)
    assert [*found["blocks"]] == ["BASE", "L00", "L01", "L02", "L03"] == found["lists"]["5"]
    assert found["blocks"]["L01"]["tensors"] == 2
    text = run("parts", files / "base.safetensors").out
    assert "L03" in text
    assert "lbw=" in text
    for name in found["blocks"]:
        try:
            lora_merge.plan(
                files / "base.safetensors", files / "one.safetensors", files / "x.safetensors", strength_for={name: 0.5}
            )
        except PartWithoutEffect:
            assert name == "BASE", name  # which the adapter does not change
        except MergeError as e:
            raise AssertionError(name) from e


def test_report_says_what_was_applied(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    words = [
        "merge",
        "base.safetensors",
        "one.safetensors:0.8,L00=0,L01=0.5",
        "-o",
        "out.safetensors",
        "--report",
        "r.json",
    ]
    for more in ([], ["--dry-run"]):
        result = run(*words, "--overwrite", *more)
        assert "0.8× model (2), 0.4× model (1), model 0: 1 left out" in result.out
        (told,) = json.loads((files / "r.json").read_text())["coverage"].values()
        assert told["strengths"] == {"model": {"0": 1, "0.4": 1, "0.8": 2}}


def test_adapter_that_is_named_twice_or_has_an_odd_strength_is_noted(files: Path) -> None:
    plan = lora_merge.plan(
        files / "base.safetensors",
        [(files / "one.safetensors", 80), files / "one.safetensors"],
        files / "x.safetensors",
    )
    first, second = (" ".join(m.notes) for m in plan.adapters)
    assert "strength 80 is unusual" in first and "again" not in first
    assert "added each time" in second and "unusual" not in second
    (files / "link.safetensors").symlink_to(files / "one.safetensors")
    parts = (("model", 10.0),)
    linked = [lora_merge.Adapter(files / "one.safetensors", 0.5, parts), files / "link.safetensors"]
    plan = lora_merge.plan(files / "base.safetensors", linked, files / "x.safetensors")
    first, second = (" ".join(m.notes) for m in plan.adapters)
    assert "strength 5 of some weights is unusual" in first
    (none,) = lora_merge.plan(
        files / "base.safetensors", [(files / "one.safetensors", 0)], files / "x.safetensors"
    ).adapters
    assert "strength 0: it changes nothing" in none.notes
    assert "added each time" in second


def test_map_may_hold_presets_of_the_users_own(files: Path) -> None:
    """A file of nothing else, and beside names."""
    table = files / "mine.yaml"
    table.write_text("lbw:\n  MINE: 1,0,0.5,1,0\n  LISTED: [1, 0, 0.5, 1, 0]\n  OTHER: ALL0.5\n")
    for name, factors in (("MINE", [0, 0.5, 1, 0]), ("LISTED", [0, 0.5, 1, 0]), ("OTHER", [0.5] * 4)):
        out = files / f"{name}.safetensors"
        options = {"strength_for": {"lbw": name}, "map": table}
        lora_merge.merge(files / "base.safetensors", files / "one.safetensors", out, **options)  # type: ignore[arg-type]
        check(out, wanted(files, {"one": factors}))
        assert prove(out, search=[files])["proven"]
    with pytest.raises(UsageError, match="neither a list of block weights nor a preset"):
        lora_merge.merge(files / "base.safetensors", files / "one.safetensors", files / "no", map=table,
                         strength_for={"lbw": "NOT"})  # fmt: skip


def test_inspect_shows_blocks_too(files: Path) -> None:
    one, other = (run(*words) for words in (["inspect", str(files / "base.safetensors"), "--blocks"],
                                                               ["parts", str(files / "base.safetensors")]))  # fmt: skip
    assert one.code == 0 and one.out == other.out and "5 numbers: BASE" in one.out
