"""What is around the code is true too: the notebook, the workflow for merges, the Dockerfile, templates and citation."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy
import pytest
import yaml

import lora_merge
from tests.kit import picture
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1
from tests.kit.readme import README, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

EXAMPLES: Final = ROOT / "configs" / "examples"
TEMPLATES: Final = ROOT / ".github" / "ISSUE_TEMPLATE"
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of a cell is shown, as Jupyter does."""
    (tmp_path / "demo").mkdir()
    save(sd1(), tmp_path / "demo" / "base.safetensors")
    for n, name in enumerate(("style", "ink")):
        save(kohya(sd1(), seed=n), tmp_path / "demo" / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "merge.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell["outputs"]
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module([*body] if isinstance(last, ast.Expr) else [*body, last], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            assert getattr(shown, "_repr_html_", shown.__repr__)()
    assert {"styled.safetensors", "small.safetensors"} <= {path.name for path in tmp_path.iterdir()}


EXPRESSIONS: Final[dict[str, Callable[[Any], bool]]] = {
    ".coverage | all(.matched == .total)": lambda plan: all(c["matched"] == c["total"] for c in plan["coverage"].values()),
    ".verified": lambda report: bool(report["verified"]),
    ".proven": lambda proof: proof["proven"] is True,
}  # fmt: skip
"""What the workflow asks jq → the same here."""


def test_workflow_merges_and_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters").mkdir()
    save(sd1(), tmp_path / "base.safetensors"), save(kohya(sd1()), tmp_path / "adapters" / "style.safetensors")
    monkeypatch.chdir(tmp_path)
    (job,) = yaml.safe_load((EXAMPLES / "merge.yml").read_text(encoding="utf-8"))["jobs"].values()
    asked = 0
    for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
        words = shlex.split(line)
        if words[0] == "lora-merge":
            target = words[words.index(">") + 1] if ">" in words else ""
            done = run(*(words[1 : words.index(">")] if target else words[1:]))
            assert done.code == 0, done.err
            if target:
                (tmp_path / target).write_text(done.out, encoding="utf-8")
        elif words[0] == "jq":
            asked += 1
            assert words[1] == "-e" and EXPRESSIONS[words[2]](
                json.loads((tmp_path / words[3]).read_text(encoding="utf-8"))
            )
        else:
            assert words[:2] == ["pip", "install"]
    assert asked == len(EXPRESSIONS)
    files = [step["with"]["path"].split() for step in job["steps"] if "upload" in step.get("uses", "")]
    assert all((tmp_path / name).exists() for name in files[0])


@pytest.mark.parametrize("path", [*sorted(TEMPLATES.glob("*.yml")), ROOT / "CITATION.cff"], ids=lambda p: p.name)
def test_yaml_can_be_read(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


@pytest.mark.parametrize("name", ["bug.yml", "format.yml"])
def test_templates_ask_for_commands_that_exist(name: str) -> None:
    form = yaml.safe_load((TEMPLATES / name).read_text(encoding="utf-8"))
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert "Output of `lora-merge doctor --json`" in labels
    commands = [re.search("`lora-merge (.*?)`", label) for label in labels]
    for command in filter(None, commands):
        assert run("help", command[1].split()[0]).code == 0
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_citation_names_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Homepage"]
    assert [row["name"] for row in citation["authors"]] == [row["name"] for row in PROJECT["project"]["authors"]]


def test_dockerfile_names_what_the_project_has() -> None:
    extras = {extra for names in re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE) for extra in names.split(",")}
    assert extras and extras <= PROJECT["project"]["optional-dependencies"].keys()
    (program,) = re.findall(r'^ENTRYPOINT \["([\w-]+)"\]', DOCKERFILE, re.MULTILINE)
    assert program in PROJECT["project"]["scripts"]
    assert {f"python:{v}-slim" for v in re.findall(r"^FROM python:([\d.]+)-slim", DOCKERFILE, re.MULTILINE)} == {
        "python:3.12-slim"
    }
    assert "Programming Language :: Python :: 3.12" in PROJECT["project"]["classifiers"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"lora_merge", "algorithms", "pyproject.toml", "README.md", "LICENSE"} & {*ignored}


@pytest.mark.release
def test_lines_of_the_dockerfile_run(tmp_path: Path) -> None:
    """In a virtual environment, with the torch that is here, and without a network."""
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, home = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "build", "bench-data", "*.egg-info")
    )
    lines = re.findall(r"^RUN (pip .*)$", DOCKERFILE, re.MULTILINE)
    build, _, install = (shlex.split(line.replace("/wheels", str(wheels))) for line in lines)
    python = [sys.executable, "-m", *build, "--no-build-isolation", "--quiet"]
    subprocess.run(python, cwd=source, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", home], check=True, capture_output=True)
    (packages,) = home.rglob("site-packages")
    (packages / "here.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n", encoding="utf-8")
    (wheel,) = wheels.glob("*.whl")
    assert install[-1].endswith("[plots]") and wheel.name.startswith("lora_merge-")
    bin = home / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run(
        [bin / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel], check=True, capture_output=True
    )
    done = subprocess.run([bin / "lora-merge", "--version"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == f"lora-merge {lora_merge.__version__}\n"


@pytest.mark.release
def test_picture_is_of_this_program(tmp_path: Path) -> None:
    """It shows what is printed now, but for numbers; `python -m tests.kit.picture` makes it anew."""
    picture.files(tmp_path, full=False)
    now, drawn = (
        picture.words_of(text) for text in (picture.screen(tmp_path), picture.PICTURE.read_text(encoding="utf-8"))
    )
    assert drawn - now <= {"sampled", "safetensors", "styled", "lora-merge"}, "run python -m tests.kit.picture"
    # The proof of large files is sampled: with this word the row has two lines, and the panel no room for the change.
    assert now - drawn <= {"about", "byte", "every", "change", "their", "weights"}, "run python -m tests.kit.picture"
    assert f"]({picture.PICTURE.relative_to(ROOT).as_posix()})" in README.read_text(encoding="utf-8")
    assert "http://www.w3.org/2000/svg" in picture.PICTURE.read_text(encoding="utf-8")
    assert not re.search(r"url\(\"?http", picture.PICTURE.read_text(encoding="utf-8")), (
        "it loads nothing from other servers"
    )


def test_picture_has_the_command_line() -> None:
    assert {*picture.words_of(picture.COMMAND)} <= picture.words_of(picture.PICTURE.read_text(encoding="utf-8"))
