"""The checklist for a GPU, as far as it can be tried without one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..support import save
from . import __main__ as checklist
from . import hostile, memory, probe, races
from .predictions import PREDICTIONS, Prediction, table
from .programs import ROOT, Failed, Figures, differences, printed
from .steps import STEPS, Part, Step, carry_out

PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def test_the_page_holds_every_prediction_and_every_step() -> None:
    held = re.search(r"<!-- figures -->\n(.*)\n<!-- end -->", PAGE, re.DOTALL)
    assert held is not None
    words = [line.split(" | ")[0].removeprefix("| ") for line in held[1].splitlines()[2:]]
    assert words == [p.words for p in PREDICTIONS]
    assert all(f"`{s.name}`" in PAGE for s in STEPS)
    assert sum(s.minutes for s in STEPS) <= 30
    assert all(hasattr(module, "main") for module in (hostile, memory, probe, races))


def test_a_figure_is_confirmed_or_refuted_and_goes_into_the_page() -> None:
    wanted = Prediction("share", "a share", 70, 100, "%", 100)
    assert [wanted.verdict({"share": x}) for x in (0.7, 0.69, 1.0, None)] == ["confirmed", "refuted", "confirmed", "not measured"]  # fmt: skip
    assert "| a share | 70 to 100 % | 70 % | confirmed |" in table({"share": 0.7}, [wanted])
    page = checklist.written({"context_s": 9.0}, PAGE)
    assert "| context and first kernel | 0.2 to 1.5 s | 9 s | refuted |" in page
    assert checklist.written({}, page) == checklist.written({}, PAGE)


def test_a_part_that_fails_is_told_and_the_others_go_on() -> None:
    """Also one that ends its step, has no time left, or fails after it has found something."""
    kept = list[Figures]()

    def one(_data: Path) -> Iterator[Part]:
        yield lambda _: {"first": 1}
        yield lambda _: 1 / 0  # type: ignore[arg-type, return-value]
        yield lambda _: printed("tests.gpu.test_checklist", seconds=60)
        yield lambda seconds: {"left": seconds}
        raise LookupError("no file")

    late = Step("late", 0.0, lambda _: iter([lambda _: {"never": 1}]))
    found = carry_out([Step("one", 1, one), late], Path(), say=str, keep=lambda f: kept.append(dict(f)))
    errors = [e.split(":")[0] for e in found["one_errors"]]
    assert errors == ["ZeroDivisionError", "Failed", "LookupError"] and 0 < found["left"] < 60
    assert "never" not in found and "TimeoutError" in found["late_errors"][0]
    assert kept[0]["first"] == 1 and len(kept) == 6
    assert checklist.failed(found | {"probe_errors": ["x"]}) and not checklist.failed({})


def test_what_a_program_has_found_before_it_fails_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text(
        "print('{\"a\": 1}', flush=True)\nimport time, sys\nif len(sys.argv) > 1: time.sleep(60)\nraise SystemExit('no luck')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for words, text in (((), "no luck"), (("wait",), "timed out")):
        with pytest.raises(Failed, match=text) as e:
            printed("halfway", *words, seconds=4)
        assert e.value.figures == {"a": 1}


def test_a_hostile_job_fails_alone(capsys: pytest.CaptureFixture[str]) -> None:
    hostile.main("cpu")
    found = json.loads(capsys.readouterr().out)
    assert found["hostile_lost"] == 0 and "numbers outside of" in found["hostile_refused"]


def test_differences_are_counted_in_units_of_the_last_place(tmp_path: Path) -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 6e-8, 2.0], dtype=torch.float16)
    b = torch.tensor([1.0009765625, -1.0, -6e-8, 6e-8, 2.0], dtype=torch.float16)
    one, other = save({"w": a, "same": a.clone()}, tmp_path / "a"), save({"w": b, "same": a.clone()}, tmp_path / "b")
    assert differences(one, other) == pytest.approx((0.4, 1.0))
    assert differences(one, one) == (0.0, 0.0)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checklist, "names", tuple)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert checklist.main() == 1
    assert "no CUDA device here: nothing was checked" in capsys.readouterr().err
    assert "python -m tests.gpu" in (ROOT / "Makefile").read_text(encoding="utf-8")
