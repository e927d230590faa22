"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_merge import paths
from lora_merge.disk.destination import check_output
from lora_merge.errors import UsageError
from lora_merge.paths import expand, forbidden, input_path, split_strength, typed


def test_steps_upwards_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    assert expand("../a/b/../x.safetensors") == tmp_path / "a" / "x.safetensors"
    assert expand("..") == tmp_path
    assert expand("b/../..") == tmp_path


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_step_upwards_out_of_a_link_leads_where_the_link_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "far" / "x").write_text("this")
    monkeypatch.chdir(tmp_path)
    assert expand("link/../x").read_text() == "this"
    assert expand("loop/../x").name == "x"


@pytest.mark.parametrize(
    "text", ["C:\\my loras\\style.safetensors", "\\\\server\\share\\style.safetensors", "D:style.safetensors"]
)
def test_colon_of_a_drive_is_no_strength(text: str) -> None:
    assert split_strength(f"{text}:0.8") == (text, 0.8)
    assert split_strength(text) == (text, None)


@pytest.mark.parametrize(("path", "part"), [
    ("C:\\out\\NUL", "NUL"), ("out/con.safetensors", "con.safetensors"), ("out/COM1.x.y", "COM1.x.y"), ("a:0.5.safetensors", "a:"),
    ("out/style.safetensors:0.5.safetensors", "style.safetensors:0.5.safetensors"), ("what?/x", "what?"), ("out/name.", "name."), ("lpt9 .txt", "lpt9 .txt"),
])  # fmt: skip
def test_names_that_windows_refuses_are_detected(path: str, part: str) -> None:
    assert forbidden(path) == part


@pytest.mark.parametrize(
    "path",
    [
        "C:\\out\\a.safetensors",
        "/data/x/../merged",
        "\\\\server\\share\\a",
        "console.txt",
        "COM10",
        ".hidden/a b+c",
        "..",
        "nullable",
    ],
)
def test_names_that_windows_takes_are_allowed(path: str) -> None:
    assert forbidden(path) == ""


def test_command_is_written_for_the_shell_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["lora-merge", "my base.safetensors", "a&b.safetensors:0.8", "C:\\x\\y.safetensors", "--dry-run"]
    assert typed(words) == "lora-merge 'my base.safetensors' 'a&b.safetensors:0.8' 'C:\\x\\y.safetensors' --dry-run"
    monkeypatch.setattr("lora_merge.paths.WINDOWS", True)
    assert typed(words) == 'lora-merge "my base.safetensors" "a&b.safetensors:0.8" C:\\x\\y.safetensors --dry-run'


def test_windows_gets_no_output_of_a_name_that_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output(tmp_path / "nul.safetensors")
    monkeypatch.setattr("lora_merge.disk.destination.WINDOWS", True)
    with pytest.raises(UsageError, match="Windows allows no such name"):
        check_output(tmp_path / "nul.safetensors")
    check_output(tmp_path / "null.safetensors")


def test_path_that_is_too_long_for_windows_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its temporary file has 35 characters more: 259 together, with the zero at the end 260."""
    longest = tmp_path / ("a" * (259 - 35 - len(str(tmp_path)) - len("/.safetensors")) + ".safetensors")
    longer = longest.with_name(f"a{longest.name}")
    monkeypatch.setattr("lora_merge.disk.destination.takes_long_paths", lambda: True)
    check_output(longer)
    monkeypatch.setattr("lora_merge.disk.destination.takes_long_paths", lambda: False)
    check_output(longest)
    with pytest.raises(UsageError, match="longer than Windows allows"):
        check_output(longer)


def test_missing_file_is_looked_for_once_under_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(paths, "exists", lambda path: asked.append(str(path)))
    assert input_path(tmp_path / "x") == tmp_path / "x"
    assert sorted(asked) == sorted({*asked}) and str(tmp_path / "x.safetensors") in asked


def test_removal_is_a_command_of_any_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rmdir /s` is one of cmd alone, and a name may begin as an option does."""
    monkeypatch.setattr(paths, "WINDOWS", False)
    assert typed(paths.removal("a b", folder=True)) == "rm -r 'a b'"
    monkeypatch.setattr(paths, "WINDOWS", True)
    assert typed(paths.removal("a b", folder=True)) == 'cmd /c rmdir /s "a b"'
    assert typed(paths.removal("-x", folder=False)) == f"del .{os.sep}-x"
