"""Short forms of jobs files mean what the full form says, and their mistakes have their lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from lora_merge.batch.jobs_file import load
from lora_merge.batch.short_form import FIRST_FILE
from lora_merge.errors import UsageError
from lora_merge.viewing.json_schemas import JOBS_SCHEMA, schema_of

JOB = {"base": "b.safetensors", "adapters": ["a.safetensors:0.5", "c.safetensors"], "output": "o.safetensors", "dtype": "fp16"}  # fmt: skip


def jobs(folder: Path, name: str, text: str) -> list[object]:
    (folder / name).write_text(text)
    return [entry.job for entry in load(folder / name)]


@pytest.mark.parametrize(("name", "text"), [
    ("x.yaml", json.dumps(JOB)), ("x.yaml", json.dumps([JOB])), ("x.yaml", "base: b.safetensors\nadapters: ['a.safetensors:0.5', c.safetensors]\noutput: o.safetensors\ndtype: fp16\n"),
    ("x.csv", "base,adapters,output,dtype\nb.safetensors,a.safetensors:0.5 c.safetensors,o.safetensors,fp16\n"),
    ("x.csv", 'adapters, output ,base,dtype,title\n\n"a.safetensors:0.5\nc.safetensors",o.safetensors,b.safetensors,fp16,\n'),
])  # fmt: skip
def test_short_form_is_the_full_one(tmp_path: Path, name: str, text: str) -> None:
    assert jobs(tmp_path, name, text) == jobs(tmp_path, "full.json", json.dumps({"version": 1, "jobs": [JOB]}))


@pytest.mark.parametrize(("name", "text", "where"), [
    ("x.yaml", "base: b\nadapters: [a]\noutput: o\ndtyp: fp16\n", "x.yaml:4 (jobs[0].dtyp)"),
    ("x.yaml", "- {base: b, adapters: [a], output: o}\n- {base: b, adapters: [a], output: 5, dtype: fp61}\n", "x.yaml:2 (jobs[1].dtype)"),
    ("x.csv", "base,adapters,output\nb,a,o\nb,a,{x}\n", "x.csv:3 (jobs[1].output)"),
    ("x.csv", "a,b\n1,2\n", "x.csv:1"), ("x.csv", "", "x.csv:1"), ("x.csv", "base,base\n", "x.csv:1"),
    ("x.csv", "base,output\nb,o,more\n", "x.csv:2"), ("x.csv", "base,adapters,output\n", "jobs"), ("x.csv", f"base,output\n{'x' * 200_000},o\n", "x.csv:2"),
])  # fmt: skip
def test_mistake_in_one_has_its_line(tmp_path: Path, name: str, text: str, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        jobs(tmp_path, name, text)
    assert where in caught.value.where


def test_first_file_is_right(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "a.safetensors").touch()
    text = FIRST_FILE.format(name="first.yaml")
    assert len(jobs(tmp_path, "first.yaml", text)) == 2
    assert text.startswith("# yaml-language-server: $schema=")  # editors read the schema's name there
    Draft202012Validator(schema_of(JOBS_SCHEMA)).validate(yaml.safe_load(text))
