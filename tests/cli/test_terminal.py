"""The look on a terminal: tables and a panel there, plain text in pipes, and what a beginner has to find in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lora_merge.paths import removal
from tests.cli.terminal import played_here
from tests.kit.adapters import kohya
from tests.kit.command_line import run_anew
from tests.kit.files import save
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

MERGE = ["base.safetensors", "style.safetensors:0.8,te=0", "-o", "o.safetensors", "--overwrite"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(sd1_sample(), tmp_path / "base.safetensors")
    save(kohya(sd1_sample()), tmp_path / "style.safetensors")
    monkeypatch.chdir(tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("columns", [60, 80, 160])
def test_panel_says_what_changed_where_it_lies_how_it_was_proven_and_how_to_undo_it(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    found = played_here(MERGE, monkeypatch, columns=columns)
    assert found.code == 0
    rows = found.screen
    at = next(n for n, row in enumerate(rows) if "✓ merged" in row)
    panel = " ".join(" ".join(row.strip("│╭╮╰╯─ ") for row in rows[at:]).split())
    for words in (
        "change 4 of 14 tensors", "survives 100 % (good): 0.8 × style.safetensors (unet)", "output o.safetensors", "verified ✓ 4 of 4 merged tensors", f"undo {' '.join(removal('o.safetensors', folder=False))}", "base.safetensors is as it was",
    ):  # fmt: skip
        assert words in panel
    above = " ".join(" ".join(rows[:at]).split())
    assert "base.safetensors: Stable Diffusion 1" in above
    assert "style.safetensors: 5 of 5 modules matched: 0.8× unet (4), te 0: 1 left out" in above
    assert "left out" not in panel and "unused" not in panel
    assert all(len(row) <= columns for row in rows)
    assert "\x1b[32m" in found.text, "green"
    assert "\\u001b" not in found.text


def test_undoing_does_not_bring_back_what_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("replaced is gone" in row for row in played_here(MERGE, monkeypatch).screen)
    found = played_here([*MERGE, "--overwrite"], monkeypatch, columns=160)
    assert "the output that was replaced is gone" in " ".join(" ".join(found.screen).replace("│", "").split())


def test_no_color_takes_the_colours_and_never_takes_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    found = played_here(MERGE, monkeypatch, keep=("NO_COLOR",))
    assert any("✓ merged" in row for row in found.screen)
    assert not re.search("\x1b\\[[0-9;]*m", found.text)
    again = played_here([*MERGE, "--color", "never", "--overwrite"], monkeypatch)
    first, second = ([re.sub(r" in [0-9.]+ s", "", row) for row in shown.screen[:5]] for shown in (found, again))
    assert first == second
    for words in (["inspect", "base.safetensors", "style.safetensors", "--weights"], ["inspect", "no.safetensors"]):  # fmt: skip
        coloured, plain = played_here(words, monkeypatch), played_here([*words, "--color", "never"], monkeypatch)
        assert re.search("\x1b\\[[0-9;]*m", coloured.text), words
        assert not re.search("\x1b\\[[0-9;]*m", plain.text)
        assert len(plain.screen) == len(coloured.screen), words
    assert played_here([*MERGE, "--color=pink"], monkeypatch).code == 2


def test_proof_is_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played_here([*MERGE, "-q"], monkeypatch).code == 0
    found = played_here(["verify", "o.safetensors"], monkeypatch)
    assert any("✓ verified" in row for row in found.screen)


@pytest.mark.slow
def test_proof_of_copied_tensors_speaks_of_no_computation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An embedding table with more tokens replaces that of the base."""
    save({"model.embed_tokens.weight": rand(6, 4), "lm_head.weight": rand(6, 4)}, tmp_path / "b.safetensors")
    (tmp_path / "a").mkdir()
    save({"base_model.model.lm_head.weight": rand(9, 4)}, tmp_path / "a/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q"], "modules_to_save": ["lm_head"]}
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config))
    words = ["b.safetensors", "a", "-o", "o.safetensors", "--overwrite"]
    told = run_anew(*words, cwd=tmp_path).out
    assert "verified all tensors were copied" in told
    found = played_here(words, monkeypatch, columns=160)
    assert any("verified" in row and "all tensors were copied" in row for row in found.screen)
    for shown in (told, found.text):
        assert "0 of 0" not in shown and "ulp" not in shown


def test_error_has_its_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played_here(["base.safetensors", "stile.safetensors"], monkeypatch, columns=160)
    assert found.code == 3
    assert [row.split(":")[0].strip() for row in found.screen[:3]] == ["✗ error", "where", "fix"]
    assert "style.safetensors" in found.screen[2]


def test_error_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played_here(["base.safetensors", "style.safetensors", "--strenght-for", "te=0"], monkeypatch, columns=60)
    assert max(map(len, found.screen)) < 60
    heads = [row[:9].strip() for row in found.screen if row]
    assert [head for head in heads if head] == ["✗ error:", "where:", "fix:"] and heads.count("") > 1
    assert "lora-merge help merge" in " ".join(" ".join(found.screen).split())


@pytest.mark.parametrize(
    "words",
    [
        ["batch", "jobs.json", "--dry-run"],
        ["batch", "wrong.json"],
        [*MERGE, "--dry-run"],
    ],
)
def test_no_line_is_broken_within_a_word(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    job = {"base": "base.safetensors", "adapters": ["style.safetensors:0.5"], "output": "a folder/o.safetensors"}
    Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": [job]}))
    Path("wrong.json").write_text(json.dumps({"version": 1, "jobs": [{**job, "adapter": 1, "ouput": "2"}]}))
    found = played_here(words, monkeypatch, columns=50)
    lines = re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", found.text).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) > 40
    assert [line for line in lines if len(line) > 50 and len(line.split()) > 1] == []


def test_data_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played_here([*MERGE, "--json", "--dry-run"], monkeypatch, columns=50)
    (line,) = [row for row in found.text.splitlines() if '"dry_run"' in row]
    assert json.loads(line[line.index("{") :])["dry_run"]


def test_names_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("style.safetensors").rename("\x1b[31mred.safetensors")
    found = played_here(
        ["base.safetensors", "\x1b[31mred.safetensors", "-o", "o.safetensors"], monkeypatch, columns=160
    )
    assert found.code == 0
    assert "\x1b[31mred" not in found.text
    assert "\\u001b[31mred.safetensors" in found.text


def test_end_of_a_batch_is_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cut.safetensors").write_bytes(Path("style.safetensors").read_bytes()[:999])
    jobs = {"base": "base.safetensors", "adapters": ["{a}.safetensors"], "output": "out/{a}.safetensors"}
    for names, code, words in (
        (["style"], 0, ("✓ all jobs are done", "merged")),
        (["style", "cut"], 7, ("✗ some jobs have no output", "failed", "jobs[0]")),
    ):
        Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": [{**jobs, "matrix": {"a": names}}]}))
        found = played_here(["batch", "jobs.json"], monkeypatch)
        assert found.code == code
        at = next(n for n, row in enumerate(found.screen) if words[0] in row)
        assert all(any(word in row for row in found.screen[at:]) for word in words)


@pytest.mark.few(1)
@pytest.mark.parametrize(("problems", "word"), [(["no disk"], "✗ problems"), ([], "✓ all is well")])
def test_doctor_report_is_a_panel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problems: list[str], word: str
) -> None:
    from lora_merge.cli import doctor

    sound = doctor.examine(tmp_path, disk_bytes=1 << 16)
    monkeypatch.setattr(doctor, "examine", lambda _: {**sound, "problems": problems})
    found = played_here(["doctor"], monkeypatch)
    assert found.code == bool(problems)
    told = " ".join(found.screen)
    assert all(text in told for text in (word, "version", "machine", "auto", *problems))


@pytest.mark.slow
def test_pipes_get_plain_text_and_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a proof is made without torch, which takes a second to import."""
    assert played_here([*MERGE, "-q"], monkeypatch).code == 0
    code = """if True:
        import sys
        from lora_merge.cli.main import main
        sys.argv = ["lora-merge", "verify", "o.safetensors", "--json"]
        try:
            main()
        except SystemExit as end:
            assert not end.code
        assert "torch" not in sys.modules
        print()
        sys.argv = ["lora-merge", "base.safetensors", "style.safetensors", "--dry-run"]
        main()
        assert "rich" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.partition("\n\n")[2].splitlines()[0] == "base     base.safetensors: Stable Diffusion 1"
    assert done.stderr == ""


def test_always_is_for_pipes_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lora_merge.cli import main as program

    monkeypatch.setattr(sys, "argv", ["lora-merge", "--color", "always", *MERGE])
    with pytest.raises(SystemExit):
        program.main()
    assert "✓ merged" in capsys.readouterr().out
