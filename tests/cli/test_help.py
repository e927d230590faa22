"""Help: groups, choices, examples, the tables of names, and what the shell offers on Tab."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_merge.algorithms import ALGORITHMS
from lora_merge.cli import main as program
from lora_merge.cli.help import BY_NAME, OPTION_GROUPS, UNRECORDED
from lora_merge.cli.help import COMMAND_GROUPS as COMMAND_GROUPS
from lora_merge.cli.terminal import COLOR_FLAG
from lora_merge.errors import UsageError
from lora_merge.models.architectures import shipped
from lora_merge.options import OPTIONS
from tests.cli.terminal import played_here
from tests.kit import command_line
from tests.kit.command_line import Answer
from tests.kit.files import save
from tests.kit.models import sd1

Run = Callable[..., Answer]

COMMANDS = program.typer.main.get_command(program.app).commands  # type: ignore[attr-defined]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    return command_line.run


def test_options_stand_under_headings_and_every_option_is_there(run: Run) -> None:
    text = run("help", "merge")[1]
    parts = re.split(r"^(\w+):$", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [name for name in found if name in OPTION_GROUPS] == [name for name in OPTION_GROUPS if name != UNRECORDED]
    assert {option.group for option in OPTIONS.values()} <= {*OPTION_GROUPS}
    for option in OPTIONS.values():
        assert re.search(rf"{option.flag}\b", found[option.group]), option.name
        for word in option.words:
            assert re.search(rf"[<|\s]{word}[|>,.]", found[option.group]), "a choice is shown as one"
    assert all(flag in found["Report"] for flag in ("--json", "--quiet", COLOR_FLAG, "--help"))
    assert "<str>" not in text
    assert "Examples:" in text.split("--help")[-1], "at the end"


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if not command.hidden])
def test_every_command_has_help_in_whole_words(run: Run, command: str) -> None:
    code, text, _ = run("help", command)
    assert code == 0
    assert "<str>" not in text and "{" not in text and COLOR_FLAG in text and "--debug" in text
    assert re.match(rf"Usage: lora-merge {command} .*\[OPTIONS\]$", text.splitlines()[0])
    assert max(map(len, text.splitlines())) <= 80
    (line,) = re.findall(rf"^  {command} +(.+)$", run("--help")[1], re.MULTILINE)
    assert line.endswith("."), "the line in the list of commands is a whole sentence"


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if not command.hidden])
def test_tracebacks_are_shown_where_they_are_asked_for(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise UsageError("what", "where", "fix")

    monkeypatch.setattr(program._program().commands[command], "invoke", broken)  # type: ignore[attr-defined]
    needed = ["x" for p in COMMANDS[command].params if p.param_type_name == "argument" and p.required]
    options = [
        w for p in COMMANDS[command].params if p.param_type_name == "option" and p.required for w in (p.opts[0], "x")
    ]
    for words in ([command, *needed, *options, "--debug"], ["--debug", command, *needed, *options]):
        code, _, err = run(*words)
        assert (code, "Traceback" in err) == (2, True), err


def test_commands_that_only_look_can_be_silent(run: Run) -> None:
    save(sd1(), Path("base.safetensors"))
    for words in (["inspect", "base.safetensors"], ["compare", "base.safetensors", "base.safetensors"]):
        assert run(*words, "-q") == (0, "", "")


@pytest.mark.parametrize("words", [("help", "frobnicate"), ("frobnicate", "x")])
def test_unknown_words_list_the_commands(run: Run, words: tuple[str, ...]) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert all(name in err for name in ("merge", "batch", "inspect", "algorithms"))


def test_names_of_common_options_are_those_of_parameters() -> None:
    known = {parameter.name for command in COMMANDS.values() for parameter in command.params}
    assert BY_NAME.keys() <= known


def test_tables_of_algorithms_and_architectures(run: Run) -> None:
    told = json.loads(run("algorithms", "--json")[1])["algorithms"]
    assert sorted(name for row in told for name in row["names"]) == sorted(ALGORITHMS)
    assert all(row["what"] and row["papers"] for row in told)
    lines = run("algorithms")[1].splitlines()
    assert len(lines) == len(told)
    assert "lora\tLoRA, ΔW = (α / r) · B A\tarXiv:2106.09685" in lines
    told = json.loads(run("architectures", "--json")[1])["architectures"]
    assert {row["title"] for row in told} == {one.title for one in shipped()}
    assert "Stable Diffusion 1\tunet\t" in run("architectures")[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("columns", [60, 80, 160])
def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int) -> None:
    save(sd1(), tmp_path / "base.safetensors")
    monkeypatch.chdir(tmp_path)
    for words in (["algorithms"], ["architectures"], ["parts", "base.safetensors"]):
        found = played_here(words, monkeypatch, columns=columns)
        assert found.code == 0
        assert all(len(row) <= columns for row in found.screen)
    assert any(re.match(r"\s*unet +26", row) for row in found.screen)


@pytest.mark.slow
def test_shell_offers_choices_where_choices_belong_and_files_where_files_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offered(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["lora-merge", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            program.app(prog_name="lora-merge")
        return capsys.readouterr().out.split()

    save(sd1(), tmp_path / "base.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_LORA_MERGE_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["lora-merge"])
    assert offered("ba") == ["batch", "base.safetensors"]
    assert offered("base.safetensors", "x", "--dtype", "b") == ["bf16"]
    assert offered("merge", "base.safetensors", "x", "--device", "cu") == ["cuda", "cuda:0"]
    assert offered("merge", "base.safetensors", "x", "--deb") == ["--debug"]
    assert offered("inspect", "--c") == ["--cache", "--color"] and "--html" in offered("inspect", "-")
    for option in ("--format", "--to"):
        command = "combine" if option == "--format" else "convert"
        assert "diffusers" in offered(command, "a", option, "d")
    assert offered("extract", "a", "b", "--alpha", "r") == ["rank"]
    assert offered("merge", "ba") == [], "bash itself offers files then"
    for line in (
        ["--color"],
        ["base.safetensors", "x", "--color"],
        ["inspect", "--color"],
        ["inspect", "x", "--color"],
    ):
        assert offered(*line, "") == ["auto", "always", "never"]
    assert offered("--color", "never", "ba") == ["batch", "base.safetensors"]
    assert offered("--color", "never", "base.safetensors", "x", "--dtype", "b") == ["bf16"]
    assert offered("help", "") == [name for name in offered("") if name in COMMANDS]
    assert offered("help", "ba") == ["batch"] and offered("help", "x") == []
    parts = ("merge", "base.safetensors", "x", "--strength-for")
    assert {*offered(*parts, "")} == {f"{name}=0" for name in ("unet", "te", "vae", "BASE", "B00", "B01", "B02")}
    assert offered(*parts, "te=0.5,B00") == ["te=0.5,B00=0"]
    assert offered("combine", "x", "--base", "base.safetensors", "--strength-for", "t") == ["te=0"]
    assert offered("merge", "nosuch", "x", "--strength-for", "t") == []


def test_no_line_of_the_list_of_commands_is_cut(run: Run) -> None:
    text = run("--help")[1]
    listed = text.partition("Merge:")[2].partition("Options")[0]
    assert "..." not in listed and listed.count("\n") > len(COMMANDS)


def test_commands_are_listed_in_four_groups_in_the_order_of_use(run: Run) -> None:
    text = run("--help")[1]
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == [*COMMAND_GROUPS, "Options"]
    listed = re.findall(r"^  (\w+) +[A-Z]", text.partition("Merge:")[2].partition("Options:")[0], re.MULTILINE)
    assert listed == [name for names in COMMAND_GROUPS.values() for name in names]


def test_options_of_verify_are_those_of_merge_under_one_heading(run: Run) -> None:
    text = run("help", "verify")[1]
    assert text.count(f"{UNRECORDED}:") == 1 and "--strength-for" in text.partition(UNRECORDED)[2]
    assert "Round merged weights" in text and "As for merge" not in text


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run("help", *command.split())
    assert code == 0
    long = [line for line in out.splitlines() if len(line) > 40]
    assert [line for line in long if len(line.split()) > 1 and not line.strip().startswith("lora-merge ")] == []
