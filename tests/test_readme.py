"""What the README says is what the program does."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lora_merge.cli import demo
from lora_merge.cli import main as program
from tests.kit.files import load
from tests.kit.readme import PAGES, README, ROOT, current

TEXT = README.read_text(encoding="utf-8")


EVERY = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        *(p for room in ("lora_merge", "algorithms", "configs", "tests") for p in (ROOT / room).rglob("README.md")),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.parent.name)
def test_tables_are_those_of_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!--" in text
    assert current(text) == text, "run python -m tests.kit.readme"


@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


COMMANDS = [
    line.partition("  #")[0].strip()
    for line in re.findall(r"work in the folder of the demo.*?```bash\n(.*?)```", TEXT, re.DOTALL)[0].splitlines()
]
"""The lines of README that work on the demo's files."""


def test_readme_commands_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as their plan; `test_readme_commands_run` runs them."""
    monkeypatch.chdir(tmp_path)
    demo.write_files(tmp_path)
    (tmp_path / "styled.safetensors").write_bytes((tmp_path / demo.BASE).read_bytes())  # of the second line
    for command in COMMANDS:
        words = shlex.split(command)
        if words[1] in ("inspect", "compare"):
            continue
        words += ["--dry-run"] if words[1] == "batch" else ["--dry-run", "--overwrite"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as e:
            program.main()
        assert e.value.code in (0, None), (command, capsys.readouterr().err)


@pytest.mark.slow
def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo.write_files(tmp_path)
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as e:
            program.main()
        assert e.value.code in (0, None), (command, capsys.readouterr().err)
    for output in re.findall(r"-o (\S+)", "\n".join(COMMANDS)):
        assert load(tmp_path / output)
    assert load(tmp_path / "base+style.safetensors")


def test_every_option_of_its_table_exists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lora-merge", "merge", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    text = capsys.readouterr().out
    for option in re.findall(r"^\| `(--[\w-]+)`", TEXT, re.MULTILINE):
        assert option in text
