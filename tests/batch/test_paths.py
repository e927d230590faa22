"""Patterns of paths: what Python's `glob` finds, with a bound on how much is looked at."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_merge.batch import input_patterns
from lora_merge.batch.input_patterns import Search
from lora_merge.batch.templates import NoSuchName
from tests.kit.command_line import run
from tests.kit.pairs import examples

FILES = ("a", "b.x", "ab.x", ".h.x", "[c].x", "s/a.x", "s/b", "s/t/a.x", "s/.t/a.x", ".s/a.x", "s/t/u/a", "t/s/t/b.x")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree") / "1/2/3/4"  # four steps upwards stay in it
    for file in FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    (root / "none").symlink_to("nowhere")
    (root / "other").symlink_to("t")
    return root


steps = st.sampled_from(["*", "**", "*.x", "?", "s", "t", "a.x", ".*", "[ab]*", "[[]c].x", "..", "none", "a"])


def library(pattern: str, root: Path) -> list[str]:
    """As the library finds them; each once, without a slash too many, and without `s/s` for `s/s/**` if it is not there."""
    paths = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207  # Path.glob has other rules
    return sorted({str(Path(path)) for path in paths if os.path.lexists(root / path)} - {"."})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(st.lists(steps, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_search_finds_what_the_library_finds(tree: Path, parts: list[str], whole: bool, folder: bool) -> None:  # noqa: FBT001
    pattern = (f"{tree}/" if whole else "") + "/".join(parts) + "/" * folder
    wanted = [path for path in library(pattern, tree) if path != str(tree)]
    try:
        found = Search(tree).paths(pattern)
    except NoSuchName:
        found = []
    if not {"a", "a.x", "none"} & {*parts[:-1]} and ".." not in parts:  # below a file the library's answers vary
        assert [path for path in found if path != str(tree)] == wanted


def test_link_to_a_folder_around_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x").touch()
    (tmp_path / "s" / "up").symlink_to(tmp_path)
    (tmp_path / "s" / "self").symlink_to("self")
    assert Search(tmp_path).paths("**/x") == ["s/x".replace("/", os.sep)]


@pytest.mark.parametrize(
    "pattern",
    ["/**/no-such-name", "/*/*/*/*/*/*/*/no-such-name", "/**/**/*/**/no-such-name", "**/*/**/*/**/*/no-such-name"],
)
def test_patterns_do_not_look_through_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Counted, whatever the disk holds: no more folders are opened than fit into the bound."""
    for n in range(40):
        (tmp_path / f"{n % 4}/{n % 5}/{n}").mkdir(parents=True)
    monkeypatch.setattr(input_patterns, "MOST_SEARCHED", 500)
    opened: list[object] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(path) or scan(path))
    with pytest.raises(NoSuchName, match="more than 500 names would be looked at; name the folder"):
        Search(tmp_path).paths(pattern)
    assert len(opened) <= 500 // input_patterns.FOLDER_COST + 1


def test_all_patterns_of_a_file_share_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_patterns, "MOST_SEARCHED", 300)
    for n in range(30):
        (tmp_path / str(n)).touch()
    search = Search(tmp_path)
    for _ in range(6):
        assert len(search.paths("*")) == 30
    with pytest.raises(NoSuchName, match="looked at"):
        search.paths("*")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pattern", ["/**/no-such-name", "/**/" * 900 + "x", "../" * 10_000 + "*", "[" * 30_000, "*a" * 15_000]
)
def test_command_answers(tmp_path: Path, pattern: str) -> None:
    """On this disk; stopped where it hangs."""
    job = f"{{base: b, adapters: [a], output: 'o-{{f}}', matrix: {{f: {{glob: '{pattern}'}}}}}}"
    (tmp_path / "jobs.yaml").write_text(f"version: 1\njobs: [{job}]\n")
    code, _, told = run("batch", tmp_path / "jobs.yaml", "--dry-run")
    assert code == 2, told
    assert "jobs.yaml:2 (jobs[0].matrix.f.glob)" in told
    assert "Traceback" not in told
