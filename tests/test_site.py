"""The documentation site: it builds without a warning, and its commands are commands."""

from __future__ import annotations

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
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="lora_merge.{name}"' in api for name in ("merge", "merge_into", "Report", "MergeError"))
    notes = (tmp_path / "notes" / "index.html").read_text(encoding="utf-8")
    assert notes.count("<tr>") > 90
    loaded = re.findall(r'<script[^>]+src="(http[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(http[^"]+)"', api)
    assert not loaded, "a page loads nothing from other servers"


@pytest.fixture(scope="module")
def index(hooks: ModuleType) -> str:
    return str(hooks.errors())


@pytest.mark.release
def test_error_index_names_messages_with_their_fix(index: str) -> None:
    assert "| file not found | did you mean …? |" in index
    assert "UnmatchedModules: exit code 4" in index
    assert len(re.findall(r"^\| ", index, re.MULTILINE)) > 200


@pytest.mark.release
def test_error_index_has_the_text_of_nearly_every_error(hooks: ModuleType) -> None:
    """Some pass on the text of another error."""
    from lora_merge import errors

    names = vars(errors).items()
    kinds = frozenset(name for name, kind in names if isinstance(kind, type) and issubclass(kind, Exception))
    assert share_with_text(hooks, kinds) > 0.97


@pytest.mark.release
def test_page_of_notes_has_the_text_of_nearly_every_note(hooks: ModuleType) -> None:
    assert share_with_text(hooks, frozenset({"Note"})) > 0.9


def share_with_text(hooks: ModuleType, kinds: frozenset[str]) -> float:
    """The share of the calls of these classes whose text the hooks read out of the code."""
    calls = [row for path in sorted((ROOT / "lora_merge").rglob("*.py")) for row in hooks.made(path, kinds)]
    assert len(calls) > 100
    texts = [[text for text in hooks.texts(call.args[0], known) if text.strip("…:; ")] for _, call, known in calls]
    return sum(map(bool, texts)) / len(calls)


PAGE = """# Notes
| message | what it means | what to do |
|---|---|---|
| strength … is unusual | More than usual. | Look. |
| … is named … times: its factors are multiplied | Twice. | Once. |
| a message of yesterday | Gone. | Nothing. |"""


def test_page_of_notes_has_each_message_of_the_code_once(hooks: ModuleType) -> None:
    """A row whose message was worded anew keeps its explanation."""
    messages = {"strength … is unusual", "… is named … times, so its factors are multiplied", "a new_one"}
    lines = hooks.explained(PAGE, messages).splitlines()
    assert lines[:5] == [
        *PAGE.splitlines()[:4],
        "| … is named … times, so its factors are multiplied | Twice. | Once. |",
    ]
    assert lines[5:] == ["", "## Others", "", "* a new\\_one"]


@pytest.mark.release
def test_page_of_blocks_has_every_preset_and_model(hooks: ModuleType) -> None:
    page = hooks.blocks()
    assert "| `MIDD` |" in page
    assert "| Stable Diffusion 1 | `unet`, `te`, `te1` | `BASE`, `IN00`–`IN11`, `M00`, `OUT00`–`OUT11` |" in page
    flux = "`CLIP`, `T5`, `IN`, `D00`–`D18`, `S00`–`S37`, `OUT` |"
    assert re.search(rf"^\| Flux.1 \| .* \| {flux}", page, re.MULTILINE)
    rows = page.partition("## Models with a table of names")[2].splitlines()
    assert sum("`BASE`" in row or flux in row for row in rows) > 40


def test_recipes_are_twenty() -> None:
    recipes = (SITE / "pages" / "recipes.md").read_text(encoding="utf-8")
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
def test_commands_of_the_pages_are_understood(
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
    elsewhere = e.value.code == 2 and "downloads are switched off" in said  # the tests make no request
    assert no_block or elsewhere or e.value.code in ((3, 4) if missing else (0, None)), said


COMING = re.findall(r"`(lora-merge [^`]+)`", (SITE / "pages" / "coming-from.md").read_text(encoding="utf-8"))


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMING)
def test_commands_for_users_of_other_programs_run(
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
