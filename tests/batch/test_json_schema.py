"""The JSON Schema of jobs files takes what `lora-merge batch` takes, and refuses what that refuses by its shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lora_merge.batch.jobs_file import load
from lora_merge.errors import MergeError
from tests.kit.json_schema import fits

ROOT = Path(__file__).parents[2]


def taken(folder: Path, text: str) -> bool:
    """Whether `lora-merge batch` takes a jobs file."""
    (folder / "jobs.yaml").write_text(text, encoding="utf-8")
    try:
        load(folder / "jobs.yaml")
    except MergeError:
        return False
    return True


JOB = "base: b, adapters: [a], output: o"

TAKEN = (
    f"{{{JOB}}}", f"[{{{JOB}}}]", f"[{{{JOB}}}, {{{JOB}, dtype: fp16, command: null, rank: null}}]",
    "base: b\nadapters: ['a:0.8', {path: c}]\noutput: o", "{command: combine, adapters: [a, b:-1], rank: 4, output: o}",
    f"{{jobs: [{{{JOB}}}]}}", f"{{version: 1, jobs: [{{{JOB}}}]}}", f"{{version: 1, defaults: {{}}, jobs: [{{{JOB}}}]}}",
    "{version: 1, defaults: {base: b, adapters: [a]}, jobs: [{output: o}, {output: p, base: null, adapters: null}]}",
    "{version: 1, defaults: {command: combine, adapters: [a, c], rank: 8}, jobs: [{output: o}, {output: p, method: ties, density: 0.5}]}",
    "{version: 1, defaults: {command: combine, adapters: [a, c]}, jobs: [{command: merge, base: b, output: o}]}",
    "{version: 1, defaults: {base: b, rank: 8}, jobs: [{adapters: [a], output: o}, {command: resize, adapters: [a], output: p}]}",
    "{base: b, adapters: [{path: a, strength: '{s}', strength_for: {te: '0.5', unet: 1}}], output: 'o{s}', matrix: {s: [1, '2e-1', 0.5], exclude: [{s: 1}]}}",
    "{base: b, adapters: ['a:{s}'], output: 'o{s}.safetensors', matrix: {s: [.5, 1.]}}",
    "{base: b, adapters: [{path: a, strength: ' +1e-1 '}], output: o, strength_for: {lbw: [1, 0]}}",
    f"{{{JOB}, max_memory: 512MiB, device: 'cpu', setting: {{lora_alpha: 16}}, seed: 3, keep_precision: [norm]}}",
    f"{{{JOB}, max_memory: 2000000000, overwrite: true, metadata: {{a: b}}, title: x, card: false}}",
    "{command: extract, base: b, adapters: [c], rank: 4, output: o}", "{command: unmerge, base: b, adapters: [a], output: o}",
    "{base: b, output: o}", "{base: b, adapters: null, output: o}", "{base: b, adapters: [], output: o, tokenizer: base}",
    "{version: 1, defaults: {base: b}, jobs: [{output: o}]}", "{command: convert, adapters: [a], to: peft, output: o/}", "{command: average, adapters: [a, c], output: o}",
)  # fmt: skip
REFUSED = (
    "5", "text", "[]", "[5]", "{}", "[{}]", "{version: 1}", "{version: 1, jobs: []}", "{version: 1, jobs: {a: 1}}",
    f"{{version: 2, jobs: [{{{JOB}}}]}}", f"{{version: '1', jobs: [{{{JOB}}}]}}", f"{{version: 1, {JOB}}}",
    f"{{version: true, jobs: [{{{JOB}}}]}}", f"{{version: 1, jobs: [{{{JOB}}}], more: 1}}", f"{{version: 1, defaults: 5, jobs: [{{{JOB}}}]}}",
    "{base: b, adapters: [a]}", "{adapters: [a], output: o}", "{command: combine, output: o}",
    "{base: b, adapters: a, output: o}", "{base: b, adapters: [[a, 0.5]], output: o}",
    "{base: b, adapters: [''], output: o}", "{base: b, adapters: [5], output: o}", "{base: b, adapters: [a], output: ''}",
    "{base: b, adapters: [{pth: a}], output: o}", "{base: b, adapters: [{path: a, strength: x}], output: o}",
    "{base: b, adapters: [{path: a, strength: true}], output: o}", "{base: b, adapters: [{path: a, strength: 1_0}], output: o}".replace("1_0", "'1_0'"),
    "{base: b, adapters: [{path: a, strength: inf}], output: o}", "{base: b, adapters: [{path: a, strength_for: {te: x}}], output: o}",
    f"{{{JOB}, dtyp: fp16}}", f"{{{JOB}, dtype: fp61}}", f"{{{JOB}, overwrite: 1}}", f"{{{JOB}, max_memory: much}}", f"{{{JOB}, max_memory: 0}}",
    f"{{{JOB}, device: tpu}}", f"{{{JOB}, command: mix}}", f"{{{JOB}, rank: 4}}", f"{{{JOB}, density: some}}", f"{{{JOB}, seed: x}}",
    f"{{{JOB}, matrix: 5}}", f"{{{JOB}, matrix: {{x: []}}}}", f"{{{JOB}, matrix: {{x: [[1]]}}}}", f"{{{JOB}, matrix: {{x: {{globs: y}}}}}}",
    f"{{{JOB}, matrix: {{x: [1], exclude: [{{}}]}}}}", f"{{{JOB}, command: combine, dtypes: fp16}}", f"{{{JOB}, command: unmerge, method: ties}}",
    "{command: resize, adapters: [a, b], rank: 2, output: o}", "{command: extract, adapters: [a], rank: 4, output: o}",
    "{version: 1, jobs: [{adapters: [a], output: o}]}", "{version: 1, defaults: {command: unmerge, base: b}, jobs: [{output: o}]}",
    "{version: 1, defaults: {command: combine}, jobs: [{adapters: [a, b], output: o, to: peft}]}",
    "{version: 1, defaults: {command: combine}, jobs: [{command: merge, adapters: [a], output: o}]}",
    "{version: 1, defaults: {base: b, adapters: [a], output: o}, jobs: [{output: o}]}",
)  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize("text", [*TAKEN, *REFUSED])
def test_schema_and_the_program_take_the_same_files(tmp_path: Path, text: str) -> None:
    assert taken(tmp_path, text) == fits(yaml.safe_load(text)) == (text in TAKEN)


@pytest.mark.parametrize("option", ["dtype: BF16", "dtype: half", "device: gpu", "method: TIES"])
def test_words_of_other_programs_are_taken_and_the_schema_names_ours(option: str, tmp_path: Path) -> None:
    text = f"{{{JOB}, {option}}}"
    assert taken(tmp_path, text)
    assert not fits(yaml.safe_load(text))


def test_jobs_files_that_we_show_fit() -> None:
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.y*ml")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "configs").rglob("*.md"), *(ROOT / "lora_merge").rglob("*.md")]
    for page in pages:
        files += re.findall(r"```ya?ml\n(version: 1\n.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert len(files) > 4
    for text in files:
        assert fits(yaml.safe_load(text)), text
