"""The commands that write adapters, on a terminal, in pipes and from Python: stages of progress, and the last panel."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lora_merge
from lora_merge.cli import main as program
from lora_merge.cli import progress_display
from lora_merge.paths import removal, typed
from lora_merge.progress import Step
from tests.cli.terminal import played_here
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1_sample

COMMANDS = {
    "combine": ["style.safetensors", "other.safetensors"],
    "resize": ["style.safetensors", "--rank", "size:8KiB"],
    "convert": ["style.safetensors", "--to", "diffusers", "--base", "base.safetensors"],
    "average": ["style.safetensors", "other.safetensors"],
    "extract": ["base.safetensors", "tuned.safetensors", "--rank", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("making")
    base = sd1_sample()
    save(base, made / "base.safetensors")
    save({k: v + 1 if "attn1" in k else v for k, v in base.items()}, made / "tuned.safetensors")
    save(kohya(base), made / "style.safetensors")
    save(kohya(base, seed=7), made / "other.safetensors")
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_terminal_shows_the_stages_and_then_a_panel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(progress_display, "BEAT", 0.0001)
    monkeypatch.chdir(folder)
    found = played_here([command, *COMMANDS[command], "-o", f"{command}.safetensors"], monkeypatch, columns=100)
    assert found.code == 0, found.text
    assert all(f" {stage} " in found.text for stage in ("load", "make", "prove"))
    shown = "\n".join(found.screen)
    assert not any("%|" in row for row in found.screen), "the bar is gone at the end"
    for word in (
        "✓ ",
        "layers",
        f"output    {command}.safetensors",
        "verified",
        f"undo      {typed(removal(f'{command}.safetensors', folder=False))}",
    ):
        assert word in shown


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_python_gets_every_stage_and_all_of_its_bytes(folder: Path, tmp_path: Path, command: str) -> None:
    steps: list[Step] = []
    files = [folder / word if word.endswith(".safetensors") else word for word in COMMANDS[command]]
    paths, rest = [f for f in files if isinstance(f, Path)], [str(f) for f in files if not isinstance(f, Path)]
    options = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=False)}
    if command == "convert":
        options, paths = {"to": "diffusers", "base": str(paths[1])}, paths[:1]
    given = [paths] if command in ("combine", "average") else paths
    output = tmp_path / "out.safetensors"
    getattr(lora_merge, command)(*given, output, progress=steps.append, **options)
    assert list(dict.fromkeys(step.stage for step in steps)) == ["load", "make", "flush", "prove"]
    assert {step.output for step in steps} == {str(output)}
    for stage in ("make", "prove"):
        own = [step for step in steps if step.stage == stage]
        assert sum(step.done for step in own) == own[-1].total > 0


def test_pipes_get_plain_lines_and_no_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["lora-merge", "resize", "style.safetensors", "--rank", "2", "-o", "piped"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert re.fullmatch(r"warning: [0-9]+ % of the change is lost at rank 2; 90 % needs .*: --rank energy:0.9\n", err)
    assert [row.split()[0] for row in out.splitlines()] == [
        "output", "input", "layers", "survives", "verified", "undo",
    ]  # fmt: skip
    assert "recomputed in fp64: the same share survives" in out
    assert "│" not in out


@pytest.mark.parametrize(("output", "found"), [("named", "named.safetensors"), ("new/", "new/style-r2.safetensors")])
def test_output_gets_its_ending_or_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, found: str
) -> None:
    monkeypatch.chdir(folder)
    assert run("resize", "style.safetensors", "--rank", 2, "-o", output, "-q").code == 0
    assert Path(found).is_file()
    assert run("replay", found, "-o", f"{output}again", "-q").code == 0
    assert Path(f"{output}again.safetensors").read_bytes() == Path(found).read_bytes()


def test_replay_and_proof_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "BEAT", 0.0001)
    monkeypatch.chdir(folder)
    assert run("resize", "style.safetensors", "--rank", 2, "-o", "small.safetensors").code == 0
    found = played_here(["replay", "small.safetensors", "-o", "twice.safetensors"], monkeypatch)
    assert " make " in found.text and any("! made again" in row for row in found.screen)
    found = played_here(["verify", "small.safetensors"], monkeypatch)
    assert " make " in found.text and any("the same bytes" in row for row in found.screen)
