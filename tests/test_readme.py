"""What the README says is what the program does."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lora_merge.cli import main as program
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.models import sd1_sample
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


def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(sd1_sample(), tmp_path / "sdxl.safetensors")
    for n, name in enumerate(("style", "detail")):
        save(kohya(sd1_sample(), seed=n), tmp_path / f"{name}.safetensors")
    commands = [
        c for c in re.findall(r"^(lora-merge .*?)(?:\s+#.*)?$", TEXT, re.MULTILINE) if "sdxl" in c or "inspect" in c
    ]
    assert len(commands) == 5
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as e:
            program.main()
        assert e.value.code in (0, None), capsys.readouterr().err
    assert load(tmp_path / "sdxl+style.safetensors")
    assert load(tmp_path / "styled.safetensors")


def test_every_option_of_its_table_exists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lora-merge", "merge", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    text = capsys.readouterr().out
    for option in re.findall(r"^\| `(--[\w-]+)`", TEXT, re.MULTILINE):
        assert option in text
