"""What every command says when it ends: short, in the field's words, with its judgement.

Run: pytest tests/cli/test_closing_reports.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_merge.cli.reports import PANEL_LINES, fitted
from lora_merge.facts import Fact
from tests.cli.terminal import played_here
from tests.kit.adapters import kohya, unread
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

LONG = "an_adapter_with_a_rather_long_name_of_its_own_as_they_are_on_model_sites_v2.safetensors"
FORBIDDEN = re.compile(r"residual|\bulp|‖|ΔW|unused|\{i\}|retained|\b(tells?|told|stands?|lies|beside)\b|no second way")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, adapters with trigger words and odd modules, and outputs of earlier commands."""
    here, base = tmp_path_factory.mktemp("closing"), sd1_sample()
    save(base, here / "base.safetensors")
    save(kohya(base), here / "style.safetensors", {"modelspec.trigger_phrase": "ink style"})
    save(kohya(base, seed=7), here / "other.safetensors", {"ss_trigger_words": "oil, thick paint"})
    odd = {f"lora_unet_nowhere_{n}.{end}.weight": rand(4, 4) for n in range(9) for end in ("lora_up", "lora_down")}
    save(kohya(base, seed=9) | odd | unread("lora_unet_time_embed_0", 64, 16), here / LONG)
    moved = {k: t + 0.02 * rand(*t.shape) if t.ndim > 1 and t.is_floating_point() else t for k, t in base.items()}
    save(moved, here / "tuned.safetensors")
    for name in ("cut", "torn", "broken", "bad"):
        (here / f"{name}.safetensors").write_bytes((here / "style.safetensors").read_bytes()[: 900 + len(name)])
    job = {"base": "base.safetensors", "adapters": ["{a}.safetensors"], "output": "out/{a}.safetensors"}
    names = ["style", "cut", "torn", "none", "other", "base"]
    (here / "jobs.json").write_text(json.dumps({"version": 1, "jobs": [{**job, "matrix": {"a": names}}]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert run("base.safetensors", "style.safetensors:0.001", "-o", "lost.safetensors", "--dtype", "bf16").code == 0
        assert run("base.safetensors", "style.safetensors:0.5", "-o", "sound.safetensors").code == 0
        assert run("resize", "style.safetensors", "--rank", "2", "-o", "cut-down.safetensors").code == 0
        yield here


COMMANDS = {
    "a part": "base.safetensors style.safetensors:0.8,te=0",
    "several": f"base.safetensors style.safetensors:0.8 other.safetensors:0.3 {LONG}:0.5 --unmatched skip",
    "lost": f"base.safetensors style.safetensors:0.00001 {LONG}:0.001 --dtype bf16 --unmatched skip",
    "all lost": "base.safetensors style.safetensors:0.001 other.safetensors:0.001 style.safetensors:0.002 --dtype bf16",
    "cut": "base.safetensors style.safetensors:1e6 --dtype fp8_e4m3fn --on-overflow saturate",
    "draws": "base.safetensors style.safetensors:0.5 --rounding stochastic --dtype bf16",
    "no proof": "base.safetensors style.safetensors --no-verify",
    "verify": "verify sound.safetensors",
    "verify --full": "verify lost.safetensors --full",
    "verify an adapter": "verify cut-down.safetensors",
    "replay": "replay lost.safetensors",
    "replay an adapter": "replay cut-down.safetensors",
    "unmerge": "unmerge sound.safetensors",
    "combine": f"combine style.safetensors other.safetensors {LONG} --rank 3",
    "combine exactly": "combine style.safetensors other.safetensors",
    "resize": "resize style.safetensors --rank 2",
    "convert": "convert style.safetensors --to diffusers --base base.safetensors --rank 3",
    "average": "average style.safetensors other.safetensors",
    "extract": "extract base.safetensors tuned.safetensors --rank 2",
    "batch": "batch jobs.json --redo",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMMANDS)
def test_closing_report_is_short_and_in_plain_words(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At most eight lines of a terminal of 80 columns, no word of the arithmetic, and no ✓ over a bad result."""
    monkeypatch.chdir(folder)
    words = COMMANDS[name].split()
    # A short name: the row of a long one is cut last.
    output = [] if words[0] in ("verify", "batch") else ["-o", f"o{[*COMMANDS].index(name)}.safetensors"]
    found = played_here([*words, *output], monkeypatch)
    assert found.code == (7 if name == "batch" else 0), found.screen
    first = max(n for n, row in enumerate(found.screen) if re.match(r"[✓!✗] (?!error)", row))
    last = next((n for n, row in enumerate(found.screen) if "✗ error" in row), len(found.screen))
    report = [row for row in found.screen[first:last] if row]
    assert 2 <= len(report) <= PANEL_LINES == 8, report
    assert not FORBIDDEN.search("\n".join(report)), report
    assert len(report) == len({*report})
    text = " ".join(" ".join(report).split())
    if name != "batch":
        assert "verified" in text
        assert re.search(r"\((good|fair|weak|poor|lost in rounding)\)", text), report
        bad = re.search(r"\((weak|poor|lost in rounding)\)", text) or "not at all" in text
        assert report[0].startswith("! " if bad else "✓ "), report
    triggers = {"a part": "ink style", "several": "ink style, oil, thick paint"}
    assert triggers.get(name, "") in text


def test_part_left_out_on_purpose_is_no_news(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that an option leaves out are neither a note nor unused ones; with -v they are counted."""
    monkeypatch.chdir(folder)
    words = ["base.safetensors", "style.safetensors:0.8,te=0", "-o", "part.safetensors", "--overwrite"]
    answer = run(*words)
    assert answer.code == 0 and not re.search("unused|note|its strength is 0", answer.out + answer.err)
    assert re.search(r"unused +[0-9]+ of [0-9]+ adapter tensors .*its strength is 0", run(*words, "-v").out)


def test_trigger_words_are_in_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["base.safetensors", "style.safetensors", "other.safetensors", "-o", "words.safetensors", "--overwrite"]
    coverage = json.loads(run(*words, "--json").out)["coverage"]
    assert [row["trigger_words"] for row in coverage.values()] == [["ink style"], ["oil, thick paint"]]
    assert "triggers ink style, oil, thick paint\n" in run(*words).out


@pytest.mark.parametrize("width", [80, 100])
def test_report_of_many_rows_names_the_first_ones_and_counts_the_others(width: int) -> None:
    rows = [Fact("output", "o"), *(Fact("error", f"{n} " + "word " * 40) for n in range(9)), Fact("verified", "all")]
    fit = fitted(rows, width)
    assert len(fit) < PANEL_LINES and fit[0] == rows[0] and fit[-1] == rows[-1]
    errors = [row.value for row in fit if row.name == "error"]
    assert errors[0].startswith("0 word") and errors[-1] == f"and {9 - len(errors) + 1} more (--json names all)"


def test_before_a_merge_is_only_what_its_closing_report_does_not_say(folder: Path) -> None:
    del folder
    words = ("base.safetensors", "style.safetensors:0.8,te=0", "-o", "plan.safetensors", "--overwrite")
    names = [line.split()[0] for line in run(*words).out.splitlines()]
    assert names == ["base", "adapter", "output", "survives", "change", "triggers", "verified", "undo"]
    planned = [line.split()[0] for line in run(*words, "--dry-run").out.splitlines()]
    assert planned[:5] == ["base", "adapter", "formula", "output", "changes"]
    assert run(*words, "-v").out.count("output ") == 2


def test_verify_prints_units_on_request(folder: Path) -> None:
    del folder
    short, whole = run("verify", "lost.safetensors").out, run("verify", "lost.safetensors", "-v").out
    assert not FORBIDDEN.search(short) and "ulp" in whole and "matching" in whole


def test_unmerge_names_no_trigger_words_of_what_it_takes_out(folder: Path) -> None:
    del folder
    done = run("unmerge", "sound.safetensors", "-o", "unmerged.safetensors", "--overwrite")
    assert done.code == 0 and "ink style" not in done.out
