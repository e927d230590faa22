"""No name out of a file, or of one, looks like a line of this program. Run: pytest tests/cli/test_hostile_names.py"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_merge.cli.main import app
from lora_merge.cli.stdio import SafeStream
from lora_merge.errors import InputError, MergeError
from lora_merge.text import CONTROLS, Lines, one_line
from tests.kit.files import save
from tests.kit.tensors import rand

BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
"""Where str.splitlines begins another line."""

FORGED = "verified 9 of 9 merged tensors"


def forged(start: str, end: str) -> str:
    return f"{start}{end}{FORGED}{end}error: x"


@given(st.text(), st.sampled_from(BREAKS), st.text())
def test_text_is_one_line(before: str, end: str, after: str) -> None:
    text = one_line(before + end + after)
    assert len((text + "x").splitlines()) == 1
    error = InputError(*[before + end + after] * 3)
    told = [row for row in str(error).split("\n")]
    assert [row[: len(start)] for row, start in zip(told, ("", "  where: ", "  fix:   "), strict=True)] == [
        "", "  where: ", "  fix:   ",
    ]  # fmt: skip
    assert len(str(error).splitlines()) == 3


def test_texts_of_the_program_may_have_several_lines() -> None:
    where = Lines.of(["a.yaml:1", "b\nc"])
    assert where == "a.yaml:1\nb\\u000ac"
    error = pickle.loads(pickle.dumps(InputError("x", where, "y")))
    assert str(error).splitlines() == ["x", "  where: a.yaml:1", "         b\\u000ac", "  fix:   y"]
    error.rename("a.yaml", "jobs.yaml")
    assert str(error).splitlines()[1:3] == ["  where: jobs.yaml:1", "         b\\u000ac"]


def test_directions_of_writing_are_escaped_and_json_stays_json() -> None:
    text = "\u202egnp.exe\u2066 \x1b[2J \u2028 \u200b\U000e0041"
    assert "\u202e" not in json.dumps(text, ensure_ascii=False).translate(CONTROLS)
    assert json.loads(json.dumps(text, ensure_ascii=False).translate(CONTROLS)) == text


@pytest.fixture(params=["\n", "\r", "\x85", "\u2028"], ids=ascii)
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """A base and an adapter whose names of tensors, entries and files have a line break in them."""
    end = request.param
    key, odd = f"a{end}{FORGED}", forged("n", end)
    folder = tmp_path / forged("dir", end)
    folder.mkdir()
    base = save(
        {"a.weight": rand(4, 4), f"{key}.weight": rand(4, 4), odd: rand(2)}, folder / f"{odd}.safetensors", {odd: odd}
    )
    lora = {f"{m}.lora_{d}.weight": rand(*s) for m in ("a", key) for d, s in (("up", (4, 2)), ("down", (2, 4)))}
    save(
        lora | {f"z{odd}.lora_up.weight": rand(3, 2), f"z{odd}.lora_down.weight": rand(2, 3)},
        folder / f"l{odd}.safetensors",
    )
    return end, base, folder / f"l{odd}.safetensors"


def commands(base: Path, lora: Path, out: Path) -> Iterator[list[str]]:
    """Whatever prints names, whether it succeeds or not; in this order."""
    yield ["merge", str(base), str(lora), "-o", str(out), "-v"]
    yield ["merge", str(base), str(lora), "-o", str(out), "-v", "--unmatched", "skip"]
    yield ["merge", str(base), str(lora), "-o", str(out)]
    yield [
        "merge",
        str(base),
        str(lora),
        "-o",
        f"{out}2",
        "-q",
        "--unmatched",
        "skip",
        "--strength-for",
        f"re:{lora.name}=1",
    ]
    yield ["merge", str(base), str(lora), "-o", f"{out}2", "-q", "--unmatched", "skip", "--dry-run"]
    yield ["inspect", str(base)]
    yield ["inspect", str(lora)]
    yield ["inspect", str(base), str(lora)]
    yield ["inspect", str(base.parent)]
    yield ["verify", str(out)]
    yield ["verify", str(base)]
    yield ["unmerge", str(out)]
    yield ["batch", str(out.with_name("jobs.json")), "--dry-run"]
    yield ["batch", str(out.with_name("jobs.json"))]
    yield ["batch", str(out.with_name("bad.json"))]


@pytest.mark.few(1)
def test_no_name_begins_a_line(
    hostile: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, base, lora = hostile
    out = base.parent / "out.safetensors"
    job = {"base": str(base), "adapters": [str(lora)], "output": str(base.parent / f"o{base.name}")}
    jobs = {"version": 1, "jobs": [job, job | {"unmatched": "skip", "output": str(out.with_name("three.safetensors"))}]}
    (base.parent / "jobs.json").write_text(json.dumps(jobs))
    (base.parent / "bad.json").write_text(json.dumps({"version": 1, "jobs": [{forged("k", end): forged("v", end)}]}))
    seen = []
    for arguments in commands(base, lora, out):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, SafeStream(getattr(sys, name)))
        code, told = 0, ""
        try:
            app(arguments, standalone_mode=False)
        except MergeError as e:
            code, told = e.exit_code, f"error: {e}"
        monkeypatch.undo()
        said = capsys.readouterr()
        rows = (said.out + said.err + told).splitlines()
        seen.append((arguments[0], code, rows[:4]))
        assert rows, arguments
        bad = [row for row in rows if row.strip().startswith((FORGED, "error: x"))]
        assert not bad, (arguments, code, rows)
    assert out.exists(), seen
    assert (base.parent / "three.safetensors").exists()
