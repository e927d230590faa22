"""The documentation site: it builds without a warning, and its commands are commands."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lora_merge.cli import main as program
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1
from tests.kit.readme import ROOT

SITE = ROOT / "configs" / "site"
PAGES = sorted((SITE / "pages").glob("*.md"))
COMMANDS = [
    c for page in PAGES for c in re.findall(r"^(lora-merge .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.release
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="lora_merge.{name}"' in api for name in ("merge", "merge_into", "Report", "MergeError"))
    loaded = re.findall(r'<script[^>]+src="(http[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(http[^"]+)"', api)
    assert not loaded, "a page loads nothing from other servers"


@pytest.fixture(scope="module")
def index(hooks: ModuleType) -> str:
    return str(hooks.errors())


def test_the_index_of_errors_names_messages_with_their_fix(index: str) -> None:
    assert "| file not found | did you mean …? |" in index
    assert "UnmatchedModules: exit code 4" in index
    assert len(re.findall(r"^\| ", index, re.MULTILINE)) > 200


PASSED_ON = ("what", "e.what", "f'{text[:1].lower()}{text[1:]}'.rstrip('.')", "str(where)")
"""Messages that another error has already, or that the library of the command line makes; and a class with its own."""


def test_the_index_of_errors_has_every_message(hooks: ModuleType, index: str) -> None:
    from lora_merge import errors

    every = vars(errors).items()
    kinds = frozenset(name for name, kind in every if isinstance(kind, type) and issubclass(kind, Exception))
    counted = 0
    for path in sorted((ROOT / "lora_merge").rglob("*.py")):
        for _, call, known in hooks.made(path, kinds):
            texts = [text for text in hooks.texts(call.args[0], known) if text.strip("… ")]
            assert texts or ast.unparse(call.args[0]) in PASSED_ON, f"{path}:{call.lineno}"
            for text in texts if len(call.args) == 3 else ():
                counted += 1
                assert f"| {hooks.cell(text)} |" in index, f"{path}:{call.lineno}"
    assert counted > 400


@pytest.mark.release
def test_the_page_of_notes_has_every_remark_of_the_code_once_and_no_other(hooks: ModuleType) -> None:
    rows = [line.split(" | ") for line in (SITE / "pages" / "notes.md").read_text(encoding="utf-8").splitlines()]
    told = [row[0].removeprefix("| ") for row in rows if len(row) == 3 and row[0] not in ("| message", "|---")]
    assert sorted(told) == sorted(map(hooks.cell, hooks.notes()))
    assert len(told) > 90


PASSED_ON_NOTES = (
    "f'{part}: {note}'", "f'{listed(modules, 2)}: {text}'", "f'{listed(m, 2)}: {text}'",
    "'; '.join(filter(None, (of_rank, of_alpha, self.method.doubts(self.fields))))",
    "f'{info.name}: {self.unused[info.name]}'", "f'{name}: {note}'", "why",
)  # fmt: skip
"""Remarks that hold another remark, or the reason that a refusal gives (`--unmatched skip`)."""


def test_every_remark_has_a_text(hooks: ModuleType) -> None:
    for path in sorted((ROOT / "lora_merge").rglob("*.py")):
        for _, call, known in hooks.made(path, frozenset({"Note"})):
            text = ast.unparse(call.args[0])
            assert text in PASSED_ON_NOTES or all(t.strip("…:; ") for t in hooks.texts(call.args[0], known)), text


@pytest.mark.release
def test_the_page_of_blocks_has_every_preset_and_model(hooks: ModuleType) -> None:
    page = hooks.blocks()
    assert "| `MIDD` |" in page
    assert "| Stable Diffusion 1 | `unet`, `te`, `te1` | `BASE`, `IN00`–`IN11`, `M00`, `OUT00`–`OUT11` |" in page
    flux = "`CLIP`, `T5`, `IN`, `D00`–`D18`, `S00`–`S37`, `OUT` |"
    assert re.search(rf"^\| Flux.1 \| .* \| {flux}", page, re.MULTILINE)
    rows = page.partition("## Models with a table of names")[2].splitlines()
    assert sum("`BASE`" in row or flux in row for row in rows) > 40


def test_there_are_twenty_recipes() -> None:
    recipes = (SITE / "pages" / "recipes.md").read_text(encoding="utf-8").partition("\n# Coming from")[0]
    assert recipes.count("\n## ") >= 20


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of most recipes."""
    folder = tmp_path_factory.mktemp("shelf")
    base = sd1()
    save(base, folder / "sdxl.safetensors")
    save({k: v * 1.5 if ".attn1." in k else v for k, v in base.items()}, folder / "tuned.safetensors")
    for n, name in enumerate(("style", "detail", "lightning", "epoch1", "epoch2")):
        save(kohya(sd1(), seed=n), folder / f"{name}.safetensors")
    grid = (SITE / "pages" / "recipes.md").read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (folder / "grid.yaml").write_text(grid, encoding="utf-8")
    return folder


@pytest.mark.few(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(
    command: str, shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shelf)
    words = shlex.split(command, comments=True)
    inputs = words[1 : words.index("-o")] if "-o" in words else words[1:]
    named = [w.partition(":")[0] for w in inputs if "/" in w or ".safetensors" in w or ".gguf" in w or ".yaml" in w]
    missing = [name for name in named if not (shelf / name).exists()]
    makes = words[1] in ("batch", "inspect", "parts", "compare", "verify", "replay") or "--overwrite" in words
    monkeypatch.setattr(sys, "argv", words if makes else [*words, "--overwrite"])
    with pytest.raises(SystemExit) as e:
        program.main()
    said = capsys.readouterr().err
    no_block = e.value.code == 2 and "BASE, B00" in said  # the small base is no U-Net
    assert no_block or e.value.code in ((3, 4) if missing else (0, None)), said


COMING = re.findall(r"`(lora-merge [^`]+)`", (SITE / "pages" / "recipes.md").read_text(encoding="utf-8").partition("\n# Coming from")[2])  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMING)
def test_the_commands_for_users_of_other_programs_run(
    command: str, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their names stand for files: the first one of `merge` and all of `extract` are models, the others adapters."""
    words = shlex.split(command)
    models = 2 if words[1] == "extract" else 0 if words[1] in ("combine", "resize") else 1
    named = words[1 + (models != 1) : next((n for n, w in enumerate(words) if w.startswith("-")), len(words))]
    for number, name in enumerate(re.split(r"[:,]", word)[0].removesuffix(".safetensors") for word in named):
        stems = ("sdxl", "tuned") if number < models else ("style", "style", "detail")
        (tmp_path / f"{name}.safetensors").symlink_to(shelf / f"{stems[number]}.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as e:
        program.main()
    said = capsys.readouterr().err
    assert e.value.code in (0, None) or "BASE, B00" in said, said  # the small base is no U-Net
