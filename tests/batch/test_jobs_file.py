"""Jobs files: what they mean, and that every mistake in them is told at once, with its line."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.batch.jobs_file import BatchJob, load
from lora_merge.batch.schema import JobsFile, Options
from lora_merge.batch.templates import NoSuchName, render, render_output
from lora_merge.dtypes import COMPUTE_DTYPES, DTYPES, QUANTISED_DTYPES
from lora_merge.errors import InputError, MergeError, UsageError
from lora_merge.files.yaml_source import parse
from lora_merge.option_texts import in_jobs_file
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.json_schema import fits
from tests.kit.models import sd1_sample
from tests.kit.pairs import examples
from tests.kit.tensors import rand


def read(folder: Path, text: str) -> tuple[BatchJob, ...]:
    """The jobs of a file, which the schema allows too."""
    (folder / "jobs.yaml").write_text(text, encoding="utf-8")
    found = load(folder / "jobs.yaml")
    assert fits(json.loads(json.dumps(parse(text, "jobs.yaml").value, default=str)))  # dates are texts to editors
    return found


def refused(folder: Path, text: str, kind: type[MergeError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        read(folder, text)
    assert caught.value.fix
    return f"{caught.value.what}\n{caught.value.where}"


@pytest.mark.parametrize(("told", "right"), [
    ("or leave them out with `--unmatched skip`", "or leave them out with unmatched: skip"),
    ("leave it out with `--strength-for re:NAME=0`", "leave it out with strength_for: {re:NAME: 0}"),
    ("leave it out with `--exclude re:REGEX`, or drop it", "leave it out with exclude: [re:REGEX], or drop it"),
    ("state it with `--setting lora_alpha=VALUE`", "state it with setting: {lora_alpha: VALUE}"),
    ("give --rank, such as 32, or `--algorithm full`", "give rank, such as 32, or algorithm: full"),
    ("choose another -o, or give `--overwrite`", "choose another output, or give --overwrite"),
    ("choose another -o", "choose another output"),
    (r"leave that out: `--exclude 're:^a\.(1|2)$'`", r"leave that out: exclude: ['re:^a\.(1|2)$']"),
    (r"or `--strength-for 're:^a\.b$=0'`", r"or strength_for: {'re:^a\.b$': 0}"),
    (r'or `--strength-for "re:^a\.b$=0"`', r"or strength_for: {'re:^a\.b$': 0}"),
    ("name a folder: `-o a/b`", "name a folder: output: a/b"),
    ("write a folder with `--format peft -o FOLDER`", "write a folder with format: peft, output: FOLDER"),
    ("write `--dtype bf16` or `--dtype fp32`, or change --keep-precision", "write dtype: bf16 or dtype: fp32, or change keep_precision"),
    ("`--strength-for lbw=1,2`, at x", "strength_for: {lbw: 1,2}, at x"),
    ("hf download a --local-dir b; else check", "hf download a --local-dir b; else check"),
    ("`lora-merge extract BASE TUNED --rank 8`; or `--rank 8`", "`lora-merge extract BASE TUNED --rank 8`; or rank: 8"),
])  # fmt: skip
def test_options_in_a_message_are_those_of_a_jobs_file(told: str, right: str) -> None:
    """Commands stay as they are typed."""
    assert in_jobs_file(told) == right


def test_job_that_does_not_fit_is_reported_in_the_words_of_the_file(tmp_path: Path) -> None:
    save(sd1_sample(), tmp_path / "base.safetensors")
    stray = {"lora_unet_b.lora_down.weight": rand(2, 4), "lora_unet_b.lora_up.weight": rand(4, 2)}
    save(kohya(sd1_sample()) | stray, tmp_path / "lora.safetensors")
    job = {"base": str(tmp_path / "base.safetensors"), "adapters": [str(tmp_path / "lora.safetensors")], "output": "o"}
    (report,) = lora_merge.run_batch([job])
    assert report.error is not None and "unmatched: skip" in report.error.fix and "--" not in report.error.fix


@pytest.mark.parametrize("word", ["strength", "strengths", "weight"])
def test_strength_among_the_defaults_is_sent_to_the_adapter(tmp_path: Path, word: str) -> None:
    text = f"version: 1\ndefaults: {{{word}: 0.5}}\njobs: [{{base: b, adapters: [a], output: o}}]\n"
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert caught.value.fix == "write it after the adapter: a:0.5"


def test_field_with_a_table_has_the_line_of_its_name(tmp_path: Path) -> None:
    """Not that of the first field inside; a job's field at the top is said to be one."""
    text = "version: 1\nmatrix:\n  a: [x]\njobs:\n- base: b\n  adapters: [a]\n  output: o\n  metadaten:\n    a: b\n"
    said = refused(tmp_path, text)
    assert ":2 (matrix): matrix is a field of a job" in said and ":8 (jobs[0].metadaten): no field" in said


def test_file_of_the_contract(tmp_path: Path) -> None:
    entries = read(tmp_path, """\
version: 1
defaults: {dtype: bf16, device: auto}
jobs:
  - base: models/sdxl.safetensors
    adapters: [loras/style.safetensors, {path: loras/detail.safetensors, strength: 0.6}]
    output: out/styled.safetensors
  - base: models/sdxl.safetensors
    adapters: [{path: "loras/{style}.safetensors", strength: "{s}"}]
    matrix: {style: [ink, oil, photo], s: [0.5, 0.75, 1.0]}
    output: "out/{style}-{s}.safetensors"
""")  # fmt: skip
    assert len(entries) == 10
    assert [a.strength for a in entries[0].job.adapters] == [1.0, 0.6]
    assert {e.job.dtype for e in entries} == {"bf16"}
    assert all(e.job.base == tmp_path / "models/sdxl.safetensors" for e in entries)
    grid = {(e.job.adapters[0].path.stem, e.job.adapters[0].strength): e.job.output.name for e in entries[1:]}
    assert grid == {(a, s): f"{a}-{s}.safetensors" for a in ("ink", "oil", "photo") for s in (0.5, 0.75, 1.0)}
    assert entries[1].where == "jobs.yaml:7 (jobs[1])"


def test_values_are_filled_in_as_they_are_written(tmp_path: Path) -> None:
    entries = read(tmp_path, """\
version: 1
jobs:
  - {base: b, adapters: ["{a}:{s}"], output: "{a}-{s}", matrix: {a: [no, 007, 2024-01-01], s: [0.50, 1e-1]}}
""")  # fmt: skip
    assert [e.job.output.name for e in entries] == [
        f"{a}-{s}" for a in ("no", "007", "2024-01-01") for s in ("0.50", "1e-1")
    ]
    assert [e.job.adapters[0].strength for e in entries[:2]] == [0.5, 0.1]


def test_numbers_are_those_of_today(tmp_path: Path) -> None:
    """To YAML 1.1, and so to PyYAML, 010 is eight, 1_0 ten, 1:30 ninety and 0x10 sixteen."""
    job = "version: 1\njobs: [{{base: b, adapters: [{{path: a, strength: {}}}], output: o, matrix: {{x: [{}]}}}}]"
    assert read(tmp_path, job.format("010", "1"))[0].job.adapters[0].strength == 10
    for odd in ("1_0", "1:30", "0x10", "-1_0.5", "'1_0'"):
        assert "is not a number" in refused(tmp_path, job.format(odd, "1"))
        assert "which is not a number" in refused(tmp_path, job.format("'{x}'", odd))


def test_options_of_a_job_beat_the_defaults(tmp_path: Path) -> None:
    one, two = read(tmp_path, """\
version: 1
defaults: {base: b, adapters: [a], dtype: fp16, strength_for: {te: 0.5}, max_memory: 512MiB}
jobs:
  - {output: one}
  - {output: two, dtype: bf16, strength_for: {unet: 2}, adapters: [{path: c, strength_for: {te1: 0}}]}
""")  # fmt: skip
    assert (one.job.dtype, two.job.dtype) == ("fp16", "bf16")
    assert one.job.adapters[0].parts == (("te", 0.5),)
    assert two.job.adapters[0].parts == (("te1", 0.0), ("unet", 2.0))
    assert one.job.max_memory == 512 * 2**20


def test_exclude_leaves_combinations_out(tmp_path: Path) -> None:
    entries = read(tmp_path, """\
version: 1
jobs:
  - base: b
    adapters: ["{a}"]
    output: "{a}{n}"
    matrix: {a: [x, y], n: [1, 2, 3], exclude: [{a: x, n: 2}, {n: 3}]}
""")  # fmt: skip
    assert [e.job.output.name for e in entries] == ["x1", "y1", "y2"]


def test_path_that_no_disk_can_hold_is_a_path_all_the_same(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, f"version: 1\njobs: [{{base: b, adapters: ['{'a' * 5000}:x', b], output: o}}]")
    assert [len(a.path.name) for a in entry.job.adapters] == [5002, 1]


def test_patterns(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    for name in ("b.safetensors", "a.safetensors", "notes.txt"):
        (tmp_path / "loras" / name).touch()
    text = """\
version: 1
jobs:
  - {base: m, adapters: ["{f}"], output: "out/{f.stem}", matrix: {f: {glob: "loras/*.safetensors"}}}
"""
    assert [e.job.adapters[0].path.name for e in read(tmp_path, text)] == ["a.safetensors", "b.safetensors"]
    assert "matches" in refused(tmp_path, text.replace("loras/*", "lora/*"))


@pytest.mark.parametrize("table", ["defaults", "jobs"])
@pytest.mark.parametrize("field", ["base", "adapters", "output", "matrix", "path", "dtype", "version", "defaults"])
def test_field_in_the_wrong_table_is_a_mistake_like_others(tmp_path: Path, table: str, field: str) -> None:
    """Whatever its name means elsewhere in the file."""
    tables = {"version": 1, "defaults": {}, "jobs": [{"base": "m", "adapters": ["a"], "output": "o"}]}
    place = tables["defaults"] if table == "defaults" else tables["jobs"][0]  # type: ignore[index]
    place[field] = {"no": "value of it"}  # type: ignore[index]
    assert field in refused(tmp_path, json.dumps(tables))


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    told = refused(tmp_path, """\
version: 1
defalts: {}
jobs:
  - base: m
    adaptrs: [a]
    output: o
  - base: m
    adapters: [{path: "{styl}", strength: "{s}"}]
    matrix: {style: [a], s: [0.5, x], exclude: [{s: 7}]}
    output: "{style}-{s}"
  - {base: m, adapters: [{pth: a}], output: o2, dtype: bf61}
  - {base: 3, adapters: [], output: o3, overwrite: 1, max_memory: []}
  - {base: m, base: m, adapters: ["{x}:1", "a:{y"], output: [], device: tpu, setting: {lora_alfa: 1}, when: 2024-13-01}
""")  # fmt: skip
    for line, *words in (
        (2, "defalts", "did you mean defaults?"),
        (5, "jobs[0].adaptrs", "did you mean adapters?"),
        (8, "{styl}", "did you mean style?"),
        (8, "strength", "becomes 'x'"),
        (9, "exclude[0].s", "7 is not a value of s"),
        (11, "adapters[0].pth", "did you mean path?"),
        (11, "dtype", "did you mean bf16?"),
        (12, "jobs[3].base", "text"),
        (12, "jobs[3].overwrite", "true or false"),
        (12, "jobs[3].max_memory", "512MiB"),
        (13, "'base' is given twice"),
        (13, "month must be in 1..12"),
        (13, "jobs[4].output", "text"),
        (13, "jobs[4].device", "'tpu' is not a device"),
        (13, "jobs[4].adapters[0].path", "{x}", "no matrix"),
        (13, "jobs[4].adapters[1].path", "single '{'"),
        (13, "jobs[4].when", "no field"),
        (13, "lora_alfa", "lora_alpha"),
    ):
        found = [t for t in told.splitlines() if f"jobs.yaml:{line}" in t and all(w in t for w in words)]
        assert found, (line, words, told)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("[]", "table"),
        ("just text", "table"),
        ("version: 1\n", "required"),
        ("version: 1\njobs: []\n", "empty"),
        ("version: true\njobs: [{base: b, adapters: [a], output: o}]", "should be 1"),
        (
            "version: 1\njobs: [{base: b, adapters: [a], output: o, matrix: {x: [1], exclude: [{x: 1}]}}]",
            "no job at all",
        ),
        ("version: 1\njobs: [{base: b, adapters: [a], output: o, matrix: {x: [1], exclude: [{}]}}]", "an empty row"),
        ("version: 2\njobs: [{base: b, adapters: [a], output: o}]", "should be 1"),
        ("version: one\njobs: [{base: b, adapters: [a], output: o}]", "version"),
        ("version: 1\njobs: [{base: b, adapters: [a, output: o}]", "valid YAML"),
        ("version: 1\nversion: 1\njobs: []", "twice"),
        ("version: 1\njobs: [{command: unmerge, base: b, output: o}]", "adapters"),
        ("version: 1\njobs: [{base: b, adapters: ['{x}'], output: o}]", "no matrix"),
        ("version: 1\njobs: [{base: b, adapters: [{path: a, strength: .nan}], output: o}]", "finite"),
        ("version: 1\njobs: [{base: b, adapters: [{path: 'a:1', strength: 2}], output: o}]", "twice"),
        ("version: 1\njobs: [{base: b, adapters: [a], output: '{x', matrix: {x: [1]}}]", "single"),
        ("version: 1\njobs: [{base: b, adapters: [a], output: '{x.size}', matrix: {x: [1]}}]", "stem"),
        ('version: 1\njobs: [{base: b, adapters: [a], output: "o\\0"}]', "a NUL character in 'o"),
        ('version: 1\njobs: [{base: b, adapters: [a], output: "o\\0{x}", matrix: {x: [1]}}]', "a NUL character in 'o"),
        (
            f"version: 1\njobs: [{{base: b, adapters: [{{path: a, strength: {'9' * 400}}}], output: o}}]",
            "hundreds of digits",
        ),
        (f"version: 1\njobs: [{{base: b, adapters: [{{path: a, strength: -{'9' * 5000}}}], output: o}}]", "mistake"),
        (
            f"version: 1\njobs: [{{base: b, adapters: [a], output: o, strength_for: {{te: {'9' * 400}}}}}]",
            "hundreds of digits",
        ),
        (f"version: 1\njobs: [{{base: b, adapters: [a], output: o, max_memory: {'9' * 400}}}]", "not a size"),
        (
            f"version: 1\njobs: [{{base: b, adapters: [a], output: o, setting: {{lora_alpha: {'9' * 400}}}}}]",
            "lora_alpha is not a number",
        ),
        ("version: 1\njobs: [{base: b, adapters: [a], output: o, matrix: {x: [[1]]}}]", "one value"),
        ("version: 1\njobs: [{base: b, adapters: [a], output: o, strength_for: {te;e: 1}}]", "te;e"),
        ("version: 1\njobs: [{base: b, adapters: [{path: a, strength_for: {te;e: 1}}], output: o}]", "te;e"),
        (
            "version: 1\njobs: [{base: b, adapters: [a], output: o, strength_for: {'re:(a+': 1}}]",
            "is not valid: ",
        ),
        ("version: 1\njobs: [{base: b, adapters: [a], output: [o], max_memory: 4}]", "not a list; write output: o"),
        ("version: 1\njobs: [{base: b, adapters: [a], output: [o, p]}]", "one text, not a list"),
        ("version: 1\njobs: [{base: {f: b}, adapters: [a], output: o, max_memory: 4}]", "not a table; write base: b"),
        ("version: 1\njobs: [{base: b, adapters: [a], output: 5}]", 'should be text; quote it: "5"'),
        (
            "version: 1\njobs: [{base: b, adapters: [a], output: [o], max_memory: 500}]",
            "500 is a number of bytes; write 500MB",
        ),
        ("version: 1\njobs: [{base: b, adapters: ['a.pt:half'], output: o}]", "neither a strength nor a part"),
        (
            "version: 1\njobs: [{base: b, adapters: ['a.pt:half'], output: o, strength: 0.5}]",
            "after the adapter: a.pt:0.5",
        ),
        ("version: 1\njobs: !!python/object/apply:os.getcwd []", "tag"),
        ("version: 1\njobs: {a: 1}", "list"),
        ("version: 1\njobs: [{base: b, adapters: [[a, 0.5]], output: o}]", "should be a path, or a table"),
        ('version: 1\njobs: [{base: "\\0", adapters: [a], output: o, map: ~no-such-user/x}]', "2 mistakes"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, word: str) -> None:
    assert word in refused(tmp_path, text)


def test_bombs_are_refused_quickly(tmp_path: Path) -> None:
    letters = "abcdefghijkl"
    lists = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise(letters)
    )
    merges = "a: &a {x: 1}\n" + "".join(
        f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in pairwise(letters)
    )
    values = ", ".join(map(str, range(1000)))
    product = f"version: 1\njobs: [{{base: b, adapters: [a], output: 'o{{x}}{{y}}', matrix: {{x: [{values}], y: [{values}]}}}}]"
    started = time.process_time()
    table = "a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\n"
    again = f"{table}jobs: [{', '.join(['{<<: *a}'] * 3000)}]"
    for text in (lists, merges, again, "a: &a [*a]", "[" * 100_000, "{" * 100_000, "- " * 5000 + "1"):
        refused(tmp_path, text, InputError)
    refused(tmp_path, f"version: 1\njobs: [{'1:' * 400_000}1]")  # a number of base 60 in YAML 1.1
    assert "1000000 combinations" in refused(tmp_path, product)
    some = f"[{', '.join(map(str, range(250)))}]"  # two matrices, each of 62 500 jobs
    both = f"version: 1\njobs:\n- &j {{base: b, adapters: [a], output: 'o{{x}}{{y}}', matrix: {{x: {some}, y: {some}}}}}\n- *j"
    assert "62500 combinations, 125000 jobs in all" in refused(tmp_path, both)
    assert time.process_time() - started < 10
    (tmp_path / "jobs.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load(tmp_path / "jobs.yaml")
    with pytest.raises(InputError):
        load(tmp_path / "none.yaml")
    with pytest.raises(InputError):
        load(tmp_path)


@pytest.mark.slow
def test_no_file_means_more_work_than_it_can_ask_for(tmp_path: Path) -> None:
    """Small texts that multiply: names of a matrix, adapters, templates, values."""

    def of(**fields: Any) -> str:
        job = {"base": "b", "adapters": ["a"], "output": "o{x}", "matrix": {"x": [1]}, **fields}
        return json.dumps({"version": 1, "jobs": [job]})

    started = time.process_time()
    told = {
        of(matrix={f"x{n}": [1, 2] for n in range(20_000)}): "of too many digits combinations",
        of(matrix={"x": list(range(20_000))}): "20000 combinations",
        of(adapters=["a"] * 100_000): "should have at most 1000 entries",
        of(adapters=["a{x}"] * 900, matrix={"x": list(range(900))}): "more than 50000 adapters in all jobs",
        of(output="{x}" * 10_000, matrix={"x": ["b" * 400_000]}): "becomes longer than 32767 characters",
        of(output="{x}" * 100_000): "should have at most 32767 characters",
        of(base="b" * 100_000): "should have at most 32767 characters",
    }
    for text, why in told.items():
        assert why in refused(tmp_path, text)
    assert time.process_time() - started < 15  # 2


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    entries = read(tmp_path, """\
version: 1
jobs:
  - &first {base: b, adapters: [&x {path: a, strength: 0.5}], output: one}
  - {<<: *first, output: two}
  - {base: b, adapters: [*x, *x], output: three}
""")  # fmt: skip
    assert [e.job.output.name for e in entries] == ["one", "two", "three"]
    assert [len(e.job.adapters) for e in entries] == [1, 1, 2]


@pytest.mark.parametrize("value", ["../x", "/x", "~", "a/../../x", "..", "a\0"])
def test_values_do_not_lead_an_output_elsewhere(value: str) -> None:
    with pytest.raises(NoSuchName):
        render_output("{v}/o", {"v": value})


@pytest.mark.parametrize("value", ["ink.safetensors:0.5", "CON", "a|b", "x."])
def test_values_make_no_name_that_windows_refuses(value: str) -> None:
    """A jobs file has the same outputs on every system."""
    with pytest.raises(NoSuchName, match="Windows allows no file"):
        render_output("out/{v}", {"v": value})
    assert render_output("a:b/{v}", {"v": "c"}) == "a:b/c"


@pytest.mark.parametrize("rule", ["energy:0.9", "size:50MiB", "above:1e-3"])
def test_rules_for_ranks_have_the_names_that_commands_give_them(rule: str) -> None:
    assert render_output("out/{v}.safetensors", {"v": rule}) == f"out/{rule.replace(':', '-')}.safetensors"


def test_literal_paths_lead_anywhere() -> None:
    assert render_output("../{v}/o", {"v": "x/y"}) == "../x/y/o"
    assert render_output("/{v}", {"v": "x"}) == "/x"
    with pytest.raises(NoSuchName):
        render_output("out/.{v}/o", {"v": "."})


@given(st.text(max_size=30))
def test_values_are_never_templates_themselves(value: str) -> None:
    assert render("a{x}b{{c}}", {"x": value}) == f"a{value}b{{c}}"


@settings(max_examples=examples(200))
@given(st.text(alphabet="ab:-[]{}&*<>!|'\" \n#1.?,%\t", max_size=60))
def test_any_text_is_a_document_or_a_merge_error(text: str) -> None:
    try:
        parse(text, "t")
    except MergeError as e:
        assert e.what
        assert e.fix


def test_plain_data_and_jobs_are_taken_too(tmp_path: Path) -> None:
    (made,) = load([{"base": str(tmp_path / "b"), "adapters": ["a"], "output": str(tmp_path / "o")}])
    (again,) = load([made.job], overwrite=True)
    assert again.job.base == tmp_path / "b"
    assert again.job.overwrite
    with pytest.raises(UsageError, match="mistake"):
        load([{"bse": "b"}])


@pytest.mark.parametrize(
    ("field", "written", "meant"),
    [("dtype", "BF16", "bf16"), ("dtype", "half", "fp16"), ("dtype", "torch.bfloat16", "bf16"), ("device", "GPU", "cuda"),
     ("method", "DARE-TIES", "dare_ties"), ("unmatched", "Skip", "skip"), ("compute_dtype", "float32", "fp32")],
)  # fmt: skip
def test_words_are_understood_as_on_the_command_line(field: str, written: str, meant: str, tmp_path: Path) -> None:
    (made,) = load([{"base": str(tmp_path / "b"), "adapters": ["a"], "output": str(tmp_path / "o"), field: written}])
    assert getattr(made.job, field) == meant


def test_matrix_fills_in_words_too(tmp_path: Path) -> None:
    text = """
        version: 1
        defaults: {base: b, adapters: [a, c], density: 0.5, dtype: "{d}"}
        jobs:
        - output: "{m}-{d}"
          method: "{m}"
          matrix: {m: [ties, DARE-TIES, sum], d: [bf16, half]}
    """
    made = [(e.job.method, e.job.dtype, e.job.output.name) for e in read(tmp_path, text)]
    assert made == [("ties", "bf16", "ties-bf16"), ("ties", "fp16", "ties-half"),
                    ("dare_ties", "bf16", "DARE-TIES-bf16"), ("dare_ties", "fp16", "DARE-TIES-half"),
                    ("sum", "bf16", "sum-bf16"), ("sum", "fp16", "sum-half")]  # fmt: skip
    message = refused(tmp_path, text.replace("DARE-TIES", "tis"))
    assert "jobs[0].method" in message
    assert "not 'tis'" in message
    assert "no value for {x}" in refused(tmp_path, text.replace('method: "{m}"', 'method: "{x}"'))


@pytest.mark.parametrize("written", ["fp64", "fp12"])
def test_dtype_that_outputs_cannot_have_gets_no_suggestion(written: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load([{"base": str(tmp_path / "b"), "adapters": ["a"], "output": str(tmp_path / "o"), "dtype": written}])
    assert "did you mean" not in str(caught.value)


def test_schema_and_the_options_say_the_same() -> None:
    schema = json.dumps(JobsFile.model_json_schema())
    assert '"matrix"' in schema
    fields = {name: str(f.annotation) for name, f in Options.model_fields.items()}
    for table, field in ((("keep", *DTYPES, *QUANTISED_DTYPES), "dtype"), (tuple(COMPUTE_DTYPES), "compute_dtype")):
        literal = next(a for a in get_args(Options.model_fields[field].annotation) if get_args(a))
        assert get_args(get_args(literal)[0]) == table, fields


HABITS: Final = {
    "base: m\ndtype: bf16\njobs:\n- {adapters: [a], output: o}\n- {adapters: [b], output: p}":
        (1, "move base and dtype under defaults", "write defaults: {base: m, dtype: bf16}"),
    "jobs:\n- {adapters: [a], output: o}\n- {adapters: [b], output: p}": (1, "and 1 more job: this field is required", "write base: FILE"),
    "jobs:\n- {model: m, loras: [a], out: o}": (3, "'model'; did you mean base?", "correct them"),
    "jobs:\n- {base: m, adapters: [{path: a, weight: 0.8}], output: o}": (1, "'weight'", "did you mean strength?"),
    "jobs:\n- {base: m, adapters: [{file: a}], output: o}": (1, "'file'", "did you mean path?"),
    "jobs:\n- {base: m, adapters: a.safetensors, output: o}": (1, "a list", "write adapters: [a.safetensors]"),
    "jobs:\n- {base: m, adapters: {a: 0.8}, output: o}": (1, "a list", "write adapters: ['a:0.8']"),
    "jobs:\n- {base: m, adapters: [a.safetensors: 0.8], output: o}": (1, "without a space", "write a.safetensors:0.8"),
    "jobs:\n- {base: m, adapters: [{path: a.safetensors, strenght: 0.5}], output: o}": (1, "no field is called 'strenght'", "did you mean strength?"),
    "jobs:\n- {base: m, adapters: [{lora: a, strenght: 0.5}], output: o}": (2, "no field is called 'strenght'; did you mean strength?", "correct them"),
    "jobs:\n- base m.safetensors": (1, "jobs[0]): should be a table of fields: base, adapters, output", "write base: m.safetensors"),
    "jobs:\n- {base: m, adapters: [a], output: o, dtype: bf61}": (1, "there is no dtype 'bf61'", "did you mean bf16?"),
    "jobs:\n- {base: m, adapters: [a], output: o, dtype: bf61}\n- {base: m, adapters: ['{x}'], output: o}\n- {base: m, adapters: [a], output: o, whne: 1}":
        (3, "jobs.yaml:3 (jobs[1].adapters[0].path): no value for {x}", "correct them"),
    "jobs:\n- {base: m, adapters: [{lora}], matrix: {lora: [a]}, output: o}": (1, "needs quotes", 'write "{lora}"'),
    "jobs:\n- {base: m, adapters: ['{l}'], matrix: {l: 'x/*'}, output: o}": (1, "a list", "write l: {glob: x/*}"),
    "jobs: {base: m, adapters: [a], output: o}": (1, "a list", "write a dash before the first field of each job"),
    "merges:\n- {base: m, adapters: [a], output: o}": (1, "'merges'", "did you mean jobs?"),
    "jobs:\n- base: m\n  adapters: ['{l}']\n  matrix: {l: {glob: 'none/*.safetensors'}}\n  output: o":
        (1, "no file matches none/*.safetensors", "check the folder"),
    'jobs:\n- base: "C:\\models\\m"\n  adapters: [a]': (1, "escape", "write 'C:\\models\\m', in single quotes"),
    "jobs:\n- base:m.safetensors\n  adapters: [a]": (1, "not valid YAML", "write base: m.safetensors"),
    "jobs:\n  - base: m\n  adapters: [a]": (1, "not valid YAML", "indent this line by 4 spaces"),
}  # fmt: skip
"""A jobs file with a mistake of beginners → number of its mistakes, a part of the message, and of the fix."""


@pytest.mark.parametrize("text", HABITS)
def test_mistake_of_beginners_is_answered_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(path)
    count, what, fix = HABITS[text]
    error = caught.value
    assert what in f"{error.what} {error.where}" and fix in error.fix
    assert len(error.where.splitlines()) == count
    lines = [int(line) for line in re.findall(r"jobs\.yaml:(\d+)", error.where)]
    assert lines == sorted(lines)


def test_file_without_a_version_is_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs: [{base: b, adapters: [a], output: o}]", encoding="utf-8")
    assert len(load(path)) == 1
