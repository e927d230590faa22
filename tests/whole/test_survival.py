"""What commands say of the share of a change that survives: one number, one table of bounds, and advice that is true.

Run: pytest tests/whole/test_survival.py
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_merge.survival import ENOUGH, GRADES, MOST, grade, judged, lost, percent, spoken, target
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

WIDTH = 48
KEYS = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(2) for part in "qv"]


@given(st.floats(1 - MOST, MOST))
def test_words_and_number_of_a_share_agree(share: float) -> None:
    """The number that is shown never has another judgement than the share, and what is lost adds up to all."""
    assert grade(percent(share) / 100) is grade(share)
    assert judged(share, "x") == f"{percent(share):g} % of x ({grade(share).word})"
    assert (
        grade(share).least <= share < min((g.least for g in GRADES if g.least > grade(share).least), default=MOST + 1)
    )
    if 0 <= share <= 1:
        assert float(lost(share).removesuffix(" %")) + percent(share) == pytest.approx(100, abs=0.06)
    if share < ENOUGH:
        assert grade(target(share)) is GRADES[GRADES.index(grade(share)) - 1]


@pytest.mark.parametrize(
    ("share", "words"),
    [(None, "?"), (1.0, "100 %"), (0.98999, "98.9 %"), (0.9497, "94.9 %"), (0.4567, "46 %"), (0.8999, "89.9 %"),
     (0.004, "0.4 %"), (1.1, "110 %"), (-0.05, "-5 %"), (4.61, "461 % (rounding is larger than the change)"),
     (-3.0, "none (rounding is larger than the change)")],
)  # fmt: skip
def test_share_is_rounded_and_never_up_to_a_bound(share: float | None, words: str) -> None:
    assert spoken(share) == words


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model, the same after a training, and two adapters of rank 16 whose singular values fall slowly."""
    base = {f"{key}.weight": rand(WIDTH, WIDTH, seed=n) for n, key in enumerate(KEYS)}
    save(base, tmp_path / "base.safetensors")
    save({key: t + 0.01 * rand(WIDTH, WIDTH, seed=9) for key, t in base.items()}, tmp_path / "tuned.safetensors")
    for seed, name in enumerate(("a", "b")):
        save(adapter(16, seed), tmp_path / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapter(rank: int, seed: int) -> Tensors:
    """An adapter whose layers have different spectra."""
    tensors: Tensors = {}
    for n, key in enumerate(KEYS):
        falling = torch.linspace(1, 0.2 + 0.2 * n, rank)
        tensors[f"{key}.lora_A.weight"] = rand(rank, WIDTH, seed=10 * seed + n)
        tensors[f"{key}.lora_B.weight"] = rand(WIDTH, rank, seed=20 * seed + n) * falling
    return tensors


def reported(*words: str) -> dict[str, Any]:
    """The JSON report of a command."""
    answer = run(*words, "--json", "-o", "out.safetensors", "--overwrite")
    assert answer.code == 0, answer
    report: dict[str, Any] = json.loads(answer.out)
    return report


def with_fix(words: Sequence[str], fix: str) -> list[str]:
    """The command with the options of a fix in place of those of these names."""
    advised, left, words = (
        shlex.split(fix.partition(" without ")[0]),
        fix.partition(" without ")[2].split(" and "),
        [*words],
    )
    for name in (*advised[::2], *filter(None, left)):
        while name in words:
            at = words.index(name)
            del words[at : at + 2]
    return [*words, *advised]


CUT = [
    ["resize", "a.safetensors", "--rank", "4"],
    ["resize", "a.safetensors", "--rank", "11"],
    ["resize", "a.safetensors", "--rank", "energy:0.9", "--max-rank", "3"],
    ["resize", "a.safetensors", "--rank", "8", "--rank-for", "re:layers.1=2"],
    ["resize", "a.safetensors", "--rank", "size:3KB"],
    ["combine", "a.safetensors", "b.safetensors", "--rank", "8"],
    ["combine", "a.safetensors", "b.safetensors", "--method", "ties", "--rank", "8"],
    ["combine", "a.safetensors", "b.safetensors", "--rank", "6", "--format", "diffusers", "--base", "base.safetensors"],
    ["average", "a.safetensors", "b.safetensors"],
    ["convert", "a.safetensors", "--to", "kohya", "--base", "base.safetensors", "--rank", "3"],
    ["extract", "base.safetensors", "tuned.safetensors", "--rank", "4"],
    ["extract", "base.safetensors", "tuned.safetensors", "--algorithm", "lokr", "--rank", "4"],
]


@pytest.mark.few(4)
@pytest.mark.parametrize("words", CUT, ids=" ".join)
def test_advice_on_a_rank_keeps_the_share_that_it_names(files: Path, words: list[str]) -> None:
    """The advised option is carried out: it keeps the share, at the ranks that were named; text and JSON agree."""
    del files
    first = reported(*words)
    survival = first["survival"]
    assert survival["share"] == first["energy"] < ENOUGH
    assert survival["grade"] == grade(first["energy"]).word
    again = reported(*with_fix(words, survival["fix"]))
    assert again["energy"] >= survival["target"] > first["energy"]
    ranks = [layer["rank"] for layer in again["layers"].values()]
    if survival["ranks"]:
        assert [min(ranks), max(ranks)] == survival["ranks"]
        assert f"{max(ranks)}: --rank" in survival["warning"]
    elif words[0] != "extract" and "--format" not in words:
        pytest.fail("the ranks are known")
    text = run(*words, "-o", "text.safetensors", "--overwrite")
    assert text.code == 0
    assert f"survives {judged(first['energy'], 'the change')}" in text.out
    assert f"warning: {survival['warning']}" in text.err
    assert survival["warning"].startswith(f"{lost(first['energy'])} of the change is lost at rank") or "lokr" in words


def test_change_that_survives_has_no_advice(files: Path) -> None:
    del files
    report = reported("resize", "a.safetensors", "--rank", "16")
    assert report["survival"] == {"share": report["energy"], "grade": "good"}
    assert set(load(Path("out.safetensors")))
