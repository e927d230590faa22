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

from lora_merge.survival import ENOUGH, GRADES, grade, judged, lost, percent, spoken, survived, target
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.measured import survival_of
from tests.kit.tensors import Tensors, rand

WIDTH = 48
STORED = {"F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
KEYS = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(2) for part in "qv"]


@given(st.floats(-1e9, 1e9) | st.floats(-0.2, 1.2), st.floats(0, 1e9) | st.floats(0, 1))
def test_words_and_number_of_a_share_agree(applied: float, noise: float) -> None:
    """A share is never above all; the number that is shown never has another judgement than the share, and what is lost
    adds up to all."""
    share = survived(applied, noise)
    assert 0 <= share <= 1
    assert grade(percent(share) / 100) is grade(share)
    word = grade(share).word if percent(share) else "lost in rounding"
    assert judged(share, "x") == f"{spoken(share)} of x ({word})"
    assert grade(share).least <= share < min((g.least for g in GRADES if g.least > grade(share).least), default=2)
    assert float(lost(share).removesuffix(" %")) + percent(share) == pytest.approx(100, abs=0.06)
    if share < ENOUGH:
        assert grade(target(share)) is GRADES[GRADES.index(grade(share)) - 1]


@pytest.mark.parametrize(
    ("share", "words"),
    [(None, "?"), (1.0, "100 %"), (0.98999, "98.9 %"), (0.9497, "94.9 %"), (0.4567, "46 %"), (0.8999, "89.9 %"),
     (0.004, "0.4 %"), (0.0, "nothing"), (0.0004, "nothing")],
)  # fmt: skip
def test_share_is_rounded_and_never_up_to_a_bound(share: float | None, words: str) -> None:
    assert spoken(share) == words


@pytest.mark.parametrize("kind", ["same", "nothing", "opposite", "half the numbers", "noise", "drowned", "8 times"])
def test_share_is_the_signal_among_what_is_written(kind: str) -> None:
    """Of a written change with noise the share is signal / (signal + noise); of one that is cut, what the cut keeps of
    its square; neither nothing, nor the opposite, nor many times the change is the change."""
    change = rand(64, 64).double()
    off = rand(64, 64, seed=1).double()
    off *= change.norm() / off.norm()
    half = torch.arange(64) < 32
    written, share = {
        "same": (change, 1.0), "nothing": (0 * change, 0.0), "opposite": (-change, 0.0),
        "half the numbers": (change * half, float((change * half).square().sum() / change.square().sum())),
        "noise": (change + 0.2 * off, 1 / 1.04), "drowned": (change + 33 * off, 1 / 1090), "8 times": (8 * change, 8 / 57),
    }[kind]  # fmt: skip
    found = survival_of(change, written - change)
    assert found["share"] == pytest.approx(share, rel=0.5 if kind == "drowned" else 0.02, abs=1e-12)
    assert found["share"] == pytest.approx(
        max(found["retained"], 0) / (max(found["retained"], 0) + found["noise"] ** 2 or 1)
    )


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
    answer = run(*words, "--json", "--json-tensors", "-o", "out.safetensors", "--overwrite")
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


@pytest.mark.few(2)
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
        by_layer = " by layer" * (min(ranks) < max(ranks))
        assert f"{max(ranks)}{by_layer}: --rank" in survival["warning"]
        assert (" by layer" in survival["warning"]) == (min(ranks) < max(ranks))
    elif words[0] != "extract" and "--format" not in words:
        pytest.fail("the ranks are known")
    assert ("curve" in first["numbers"]) == ("lokr" not in words)
    curve = dict(first["numbers"].get("curve", ()))
    assert [*curve.values()] == sorted(curve.values()) and curve.keys() <= {*range(1, 97)}
    if len({layer["rank"] for layer in first["layers"].values()} & curve.keys()) == 1:
        assert curve[next(iter(first["layers"].values()))["rank"]] == pytest.approx(first["energy"], abs=1e-4)
    text = run(*words, "-o", "text.safetensors", "--overwrite")
    assert text.code == 0
    assert f"survives {judged(first['energy'], 'the change')}" in text.out
    assert f"warning: {survival['warning']}" in text.err
    assert survival["warning"].startswith(f"{lost(first['energy'])} of the change is lost at rank") or "lokr" in words


def test_advice_on_digits_is_a_dtype(files: Path) -> None:
    """A factor that fp16 cannot hold loses its digits: no rank helps, and fp32 does."""
    name = KEYS[0].replace(".", "_")
    pairs = {"a": (WIDTH, 2), "b": (2, WIDTH)}
    loha = {f"{name}.hada_w{n}_{end}": rand(*pairs[end], seed=n) * 2e-8 ** (n - 1) for n in (1, 2) for end in pairs}
    save(loha, files / "loha.safetensors")
    words = ["convert", "loha.safetensors", "--to", "kohya", "--base", "base.safetensors", "--dtype", "fp16"]
    first = reported(*words)
    assert first["energy"] < ENOUGH and first["survival"]["fix"] == "--dtype fp32"
    assert reported(*with_fix(words, first["survival"]["fix"]))["energy"] > 0.99


def test_rank_above_that_of_all_layers_has_a_note(files: Path) -> None:
    del files
    notes = [reported("resize", "a.safetensors", "--rank", rank)["notes"] for rank in ("90", "16", "8")]
    idle = [[note for note in some if "no layer has a rank above" in note] for some in notes]
    assert idle == [["no layer has a rank above 16: --rank 90 leaves the ranks as they are"], [], []]


def test_change_that_survives_has_no_advice(files: Path) -> None:
    del files
    report = reported("resize", "a.safetensors", "--rank", "16")
    assert report["survival"] == {"share": report["energy"], "grade": "good"}
    assert set(load(Path("out.safetensors")))


MERGES = [  # a base, the size of the change, and options
    ("F8_E4M3", 2.0, []), ("F8_E4M3", 0.3, []), ("F16", 0.03, []), ("BF16", 0.1, []),
    ("BF16", 0.1, ["--compute-dtype", "bf16"]), ("F32", 0.1, ["--dtype", "int8"]),
    ("F32", 1.0, ["--dtype", "fp8_scaled"]), ("F32", 1e-8, []),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("dtype", "scale", "options"), MERGES, ids=str)
def test_advice_on_a_dtype_keeps_the_change(tmp_path: Path, dtype: str, scale: float, options: list[str]) -> None:
    """Each way that a warning about rounding names is carried out: 95 % of the change survives then."""
    key = "model.layers.0.mlp.up_proj"
    save({f"{key}.weight": rand(256, 512).to(STORED[dtype])}, tmp_path / "base.safetensors")
    up, down = rand(256, 4, seed=2) * scale, rand(4, 512, seed=3) * 0.05
    save({f"{key}.lora_B.weight": up, f"{key}.lora_A.weight": down}, tmp_path / "a.safetensors")

    def merged(*more: str) -> dict[str, Any]:
        files = tmp_path / "base.safetensors", tmp_path / "a.safetensors"
        answer = run(*files, "-o", tmp_path / "o.safetensors", "--overwrite", "--json", *more)
        assert answer.code == 0, answer
        report: dict[str, Any] = json.loads(answer.out)
        return report

    report = merged(*options)
    (judgement,), (warning,) = report["survival"], report["verified"]["warnings"]
    assert judgement["share"] < ENOUGH and judgement["grade"] == grade(judgement["share"]).word
    assert warning.startswith(f"{lost(judgement['share'])} of the change of a.safetensors is lost in the rounding")
    advice = warning.partition("; ")[2]
    dtypes = [word for word in ("bf16", "fp32") if word in advice.partition(",")[0]]
    assert dtypes or (dtype == "F32" and advice == "give a larger strength")
    exactly = ["--compute-dtype", "fp32"] * ("--compute-dtype" in advice)
    for value in dtypes:
        after = merged(*with_fix(options, shlex.join(["--dtype", value, *exactly])))
        assert after["numbers"]["all"]["share"] >= ENOUGH, value


def test_survival_in_a_coarse_dtype_falls_with_the_strength(files: Path) -> None:
    """Without a jump, and never "good" where rounding is larger than the change."""
    words = ["base.safetensors", "--dtype", "fp8_e4m3fn", "--no-verify"]
    reports = [reported(*words, f"a.safetensors:{strength}") for strength in (0.2, 0.05, 0.02, 0.005, 0.001)]
    shares, noises = zip(*((r["survival"][0]["share"], r["numbers"]["all"]["noise"]) for r in reports), strict=True)
    assert [*shares] == sorted(shares, reverse=True) and [*noises] == sorted(noises)
    assert shares[0] > 0.8 > 0.3 > shares[1] > 0.03 > 0.01 > shares[3] > shares[4]
    assert all(share < 0.55 for share, noise in zip(shares, noises, strict=True) if noise >= 1)
    text = run(*words, "a.safetensors:0.001", "-o", files / "text.safetensors")
    larger = f"which is {float(f'{noises[-1]:.2g}'):g} times as large; write --dtype fp32"
    assert larger in text.out and judged(shares[-1]) in text.out


@pytest.mark.parametrize("method", ["ties", "compose"])
def test_share_with_a_method_is_that_of_what_the_method_makes(files: Path, method: str) -> None:
    words = ["base.safetensors", "a.safetensors:0.1", "b.safetensors:0.1", "--method", method]
    text = run(*words, "-o", files / "m.safetensors", "--html", files / "page.html")
    part = "of what ties makes of it" if method == "ties" else "%"
    page = (files / "page.html").read_text(encoding="utf-8")
    for words_of in (text.out, run("verify", files / "m.safetensors").out):
        assert words_of.count(f"{part} (good): 0.1 × ") == 2
    assert ("what ties makes of the change (good) survives" in page) == (method == "ties")
