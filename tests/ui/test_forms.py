"""A filled form, the copied command and the copied jobs file write the same bytes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lora_merge import merge, run_batch
from lora_merge.errors import UsageError
from lora_merge.option_texts import SPELLINGS
from lora_merge.options import OPTIONS, READING
from lora_merge.recipes.commands import COMMANDS
from lora_merge.ui.forms import FORMS, PLACES, READS, command_line, entry, jobs_file, runnable
from lora_merge.ui.library import Library
from tests.kit.command_line import run
from tests.kit.forms import FILLED, TINY, B, form


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FILLED)
def test_form_command_and_jobs_file_write_the_same_bytes(name: str, comfy: Path, tmp_path: Path) -> None:
    if name == "unmerge":
        models = comfy / "models"
        merge(models / TINY, (models / B, 0.5), models / "checkpoints/merged.safetensors")
    job = entry(form(name, comfy), Library([comfy]))
    written: list[bytes] = []

    def take(output: str | Path) -> None:
        written.append(Path(output).read_bytes())
        Path(output).unlink()

    (report,) = run_batch([runnable(job)])
    assert report.error is None, report.error
    take(report.output)
    answer = run(*shlex.split(command_line(job))[1:])
    assert answer.code == 0, answer.err
    take(report.output)
    (tmp_path / "jobs.yaml").write_text(jobs_file(job), encoding="utf-8")
    assert run("batch", tmp_path / "jobs.yaml").code == 0
    take(report.output)
    assert written[0] == written[1] == written[2]


def test_every_command_of_a_jobs_file_has_a_form_with_its_options() -> None:
    assert {name for name, row in FORMS.items() if row.writes} == {*COMMANDS, "replay"}
    for name, row in FORMS.items():
        fields = COMMANDS[name].fields if name in COMMANDS else READS.get(name, ())
        assert set(row.options) | {*PLACES} >= {*fields}
        assert set(row.main) <= set(row.options) | {"scale"}, name
        tables = {**OPTIONS, **(COMMANDS[name].options if name in COMMANDS else {}), **({} if row.writes else READING)}
        assert all(option is tables[n] for n, option in row.options.items())


def test_every_kind_of_value_that_is_no_text_is_read_and_written() -> None:
    kinds = {option.kind for row in FORMS.values() for option in row.options.values()}
    assert kinds <= {*SPELLINGS, "dtype", "device", "word", "text", "size", "rank", "alpha", "name", "path", "folder"}


def test_every_command_line_command_with_files_has_a_form_or_a_reason() -> None:
    """The page of the documentation says what is left out, and why."""
    commands = set(re.findall(r"^  ([a-z]+) {2,}[A-Z]", run("--help").out, re.MULTILINE))
    left_out = {"batch", "ui", "comfyui", "demo", "parts", "architectures", "algorithms", "doctor", "schema"}
    assert {*FORMS} | left_out == commands and not {*FORMS} & left_out
    page = (Path(__file__).parents[2] / "configs/site/pages/ui.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in left_out - {"ui"})


@pytest.mark.parametrize("command", FORMS)
def test_every_option_of_a_form_is_one_of_its_command(command: str) -> None:
    flags = set(re.findall(r"--[a-z-]+", run(command, "--help").out))
    form = FORMS[command]
    assert {option.flag for option in form.options.values() if option.group} <= flags


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"base": ""}, "no base is chosen"),
        ({"command": "delete"}, "no such form"),
        ({"options": {"seed": "x"}}, "is not a whole number"),
        ({"options": {"seed": "1.5"}}, "is not a whole number"),
        ({"options": {"metadata": "x"}}, "does not give an entry"),
        ({"options": {"map": "/etc/hostname"}}, "outside the page's folders"),
        ({"options": {"tokenizer": "/etc"}}, "outside the page's folders"),
        ({"output": "../x"}, "outside the output folder"),
        ({"output": ""}, "outside the output folder"),
    ],
)
def test_wrong_value_is_an_error_with_a_fix(change: dict[str, Any], what: str, comfy: Path) -> None:
    with pytest.raises(UsageError, match=what) as e:
        entry({**form("merge", comfy), **change}, Library([comfy]))
    assert e.value.fix
