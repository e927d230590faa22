"""What people type by habit: taken where its meaning is plain, else answered with the form that is right here."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lora_merge
from lora_merge.addresses import CURL
from lora_merge.cli import main as program
from lora_merge.cli.compat import FOREIGN_COMMANDS
from lora_merge.cli.main import app
from lora_merge.disk.files import unreadable
from lora_merge.job import make_job
from lora_merge.option_texts import in_python
from lora_merge.paths import typed
from lora_merge.planning import fitting_files
from tests.kit import command_line, gguf_files
from tests.kit.adapters import kohya
from tests.kit.command_line import Answer
from tests.kit.files import load, save
from tests.kit.flux import flux, of_flux
from tests.kit.models import sd1_sample
from tests.kit.option_names import FOREIGN_OPTIONS
from tests.kit.tensors import rand

Run = Callable[..., Answer]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The program in this process, in a folder with base.safetensors and two adapters: exit code, stdout, stderr."""
    save(sd1_sample(), tmp_path / "base.safetensors")
    save(kohya(sd1_sample()), tmp_path / "lora.safetensors")
    (tmp_path / "loras").mkdir()
    save(kohya(sd1_sample(), seed=3), tmp_path / "loras" / "ink.safetensors")
    monkeypatch.chdir(tmp_path)

    return command_line.run


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["help"]])
def test_help_of_the_program_names_the_commands(run: Run, words: list[str]) -> None:
    code, out, _ = run(*words)
    assert code == 0
    assert all(name in out for name in ("merge", "batch", "inspect", "verify"))
    assert "BASE ADAPTER" in out


@pytest.mark.parametrize("command", ["merge", "batch", "inspect", "parts", "verify", "doctor"])
def test_help_of_a_command(run: Run, command: str) -> None:
    assert run("help", command)[:2] == run(command, "--help")[:2]
    assert run("help", command)[0] == 0


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]])
def test_version_of_the_program(run: Run, words: list[str]) -> None:
    assert run(*words) == (0, f"lora-merge {lora_merge.__version__}\n", "")


def test_diff_extracts_whole_matrices(run: Run) -> None:
    assert run("help", "diff")[:2] == run("extract", "--help")[:2]
    written = [
        run(*words, "a.safetensors", "b.safetensors")[2] for words in (["diff"], ["extract", "--algorithm", "full"])
    ]
    assert written[0] == written[1]
    assert "a.safetensors" in written[0]


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("info", "write lora-merge inspect lora.safetensors"),
        ("cmp", "compare … (say where two models differ"),
        ("inspct", "inspect … (say"),
        ("algo", "did you mean lora-merge algorithms …"),
        ("frobnicate", "merge, batch"),
    ],
)
def test_unknown_word_is_answered_with_the_commands(run: Run, word: str, right: str) -> None:
    code, _, err = run(word, "lora.safetensors")
    assert code == 2
    assert "neither such a command nor such a file" in err
    assert right in err
    assert {*FOREIGN_COMMANDS.values()} <= {*program.typer.main.get_command(app).commands}  # type: ignore[attr-defined]


OWN = {
    name
    for command in program.typer.main.get_command(app).commands.values()
    for p in command.params
    for name in (*p.opts, *p.secondary_opts)
}  # type: ignore[attr-defined]


@pytest.mark.few(15)
@pytest.mark.parametrize("option", FOREIGN_OPTIONS)
def test_options_of_other_programs_are_answered_with_ours(run: Run, option: str) -> None:
    code, _, err = run("base.safetensors", "lora.safetensors", option, "x")
    assert code == 2
    assert f"no option {option} here" in err
    meaning = FOREIGN_OPTIONS[option]
    assert meaning is not None and {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", meaning.advice)} <= OWN


@pytest.mark.parametrize("command", ["extract base.safetensors tuned.safetensors", "resize lora.safetensors"])
@pytest.mark.parametrize("option", ["--lora-rank", "--lora_dim", "--network-dim", "--dim", "-r"])
def test_rank_in_words_of_another_program_is_answered_for_the_command(run: Run, option: str, command: str) -> None:
    """Merges have no rank; commands that write adapters have --rank."""
    code, _, err = run(*command.split(), option, "16")
    assert code == 2 and f"fix:   write lora-merge {command} --rank 16" in err
    code, _, err = run("base.safetensors", "lora.safetensors", option, "16")
    assert code == 2 and "resize lora.safetensors --rank 16" in err


@pytest.mark.few(3)
@pytest.mark.parametrize(("words", "right"), [
    ("--model base.safetensors --loras lora.safetensors loras/ink.safetensors --ratios 0.8 0,5 --save_to o --precision fp16",
     "base.safetensors lora.safetensors:0.8 loras/ink.safetensors:0.5 -o o.safetensors --dtype fp16"),
    ("--sd_model=base.safetensors lora.safetensors --ratio=80% --half -f --seed 3",
     "base.safetensors lora.safetensors:0.8 --dtype fp16 --overwrite --seed 3"),
    ("base.safetensors lora.safetensors --te-strength 0.5 --exclude unet",
     "base.safetensors lora.safetensors --strength-for te=0.5 --strength-for unet=0"),
    ("base lora --strength_model 0.8 --strength_clip 0", "base lora --strength-for unet=0.8 --strength-for te=0"),
    ("base.safetensors lora.safetensors --save_precision fp16 --no_metadata", "base.safetensors lora.safetensors --dtype fp16 --no-metadata"),
    ("--base_model_name_or_path base --peft_model_path lora --output_dir o --safe_serialization", "base lora -o o.safetensors"),
    ("--ckpt_name base --lora_name lora --strength_model 0.8 --strength_clip 0", "base lora --strength-for unet=0.8 --strength-for te=0"),
    ("--sd_model base --save_to o --models lora loras/ink --ratios 0.8 0.5 --precision fp16 --concat --shuffle --v2",
     "base lora:0.8 loras/ink:0.5 -o o.safetensors --dtype fp16"),
    ("base lora --skip_verify", "base lora --no-verify"), ("base lora --no-te", "base lora --strength-for te=0"),
    ("base.safetensors lora.safetensors --only unet", "base.safetensors lora.safetensors --strength-for te=0"),
    ("base.safetensors --lora lora.safetensors --out o --verify -n", "base.safetensors lora.safetensors -o o.safetensors --verify --dry-run"),
])  # fmt: skip
def test_command_of_another_program_is_answered_with_ours(run: Run, words: str, right: str) -> None:
    """It can be typed as it stands, and does what was meant."""
    code, _, err = run(*words.split())
    assert code == 2
    (told,) = re.findall("fix:   (?:.*; )?write lora-merge (.*)", err)
    typed = told.split()
    assert sorted(typed) == sorted(right.replace("-o o.safetensors", "-o o").split())
    assert run(*typed, *{"--dry-run"} - {*typed})[0] == 0


@pytest.mark.parametrize("words", [
    "base.safetensors lora.safetensors loras/ink.safetensors --ratio 0.8",  # one strength for two
    "lora.safetensors --base",
])  # fmt: skip
def test_no_command_is_invented(run: Run, words: str) -> None:
    code, _, err = run(*words.split())
    assert code == 2
    assert "fix:" in err and "write lora-merge" not in err


@pytest.mark.parametrize(("words", "fix"), [
    ("base lora —dtype bf16", "write lora-merge base lora --dtype bf16"), ("base lora –o x", "write lora-merge base lora -o x"), ("base lora -output x", "write lora-merge base lora --output x"),
    ("base + lora", "leave it out"), ("base lora.safetensors:0.8:0.5", "write lora.safetensors:0.8, or by part lora.safetensors:1,unet=0.8,te=0.5"),
    ("base lora --no_verify", "did you mean --no-verify?"), ("base lora --no-overwrite", "leave it out: nothing is overwritten"),
    ("base lora --no-overwrte", "leave it out: nothing is overwritten"), ("base lora --fp8", "fp8_scaled: the base has no weight to quantise"),
    ("base lora --rank 16", "for --rank 16, use lora-merge resize lora --rank 16 first, as a merge keeps the rank; write lora-merge base lora"),
     ("base lora -o=x", "write -o x"), ("base lora --scale 0.8", "write lora-merge base lora:0.8"),
    ("base lora -o civitai:12345", "write a file here with -o NAME"), ("base lora -o out.safetensor", "write lora-merge base lora -o out.safetensors"),
    ("base lora -o x.safetensors.", "write lora-merge base lora -o x.safetensors"), ("lora.safetensors:0.8 base.safetensors", "name the base first: lora-merge base.safetensors lora.safetensors:0.8"),
    ("svd_merge_lora lora", "write lora-merge combine lora"), ("resize lora --new_rank 4", "write lora-merge resize lora --rank 4"), ("BASE.SAFETENSORS lora", "did you mean base.safetensors"),
])  # fmt: skip
def test_mistakes_of_beginners_are_answered(run: Run, words: str, fix: str) -> None:
    code, _, err = run(*words.split())
    assert code in (2, 3)
    assert f"fix:   {fix}" in err


@pytest.mark.few(3)
@pytest.mark.parametrize(("text", "right"), [
    ("lora:0.8;te=0;unet=0.5", "lora.safetensors:0.8,te=0,unet=0.5"), ("lora:0.8 te=0", "lora.safetensors:0.8,te=0"),
    ("lora:0.8,te:0", "lora.safetensors:0.8,te=0"), ("lora:0.8,te", "lora.safetensors:0.8,te=0.5"), ("lora:0.8,=1", "lora.safetensors:0.8,te=1"), ("lora te=0", "lora.safetensors:1,te=0"),
    ("lora:te=0,0.8", "lora.safetensors:0.8,te=0"), ("lora:0.8,te=80%", "lora.safetensors:0.8,te=0.8"),
    ("lora:0.8,lbw=1:0:1", "lora.safetensors:0.8,lbw=1,0,1"), ("lora,loras/ink", "lora loras/ink"), ("lora:0.8; loras/ink:0.5", "lora:0.8 loras/ink:0.5"),
    ("lora,", "lora"),
])  # fmt: skip
def test_parts_in_another_spelling_are_answered_with_ours(run: Run, text: str, right: str) -> None:
    """What is told can be typed as it stands."""
    code, _, err = run("base", text, "--dry-run")
    assert code == 2
    assert err.endswith(f"fix:   write lora-merge base {right} --dry-run\n")
    assert run("base", *right.split(), "--dry-run")[0] == 0


@pytest.mark.parametrize(("words", "fix"), [
    (["base,lora"], "write lora-merge base lora"), (["base lora"], "write lora-merge base lora"),
    (["base", "lora=0.8,loras/ink=0.5"], "write lora-merge base lora.safetensors:0.8 loras/ink.safetensors:0.5"),
    (["base", "^", "lora"], "write lora-merge base lora"), (["base", " --half", "lora"], "--half: there is no option --half here; write lora-merge base lora --dtype fp16"),
    *((["base", text], 'write "$LORA", or the path itself') for text in ("%LORA%", "$env:LORA", "$LORA:0.8", "${LORA}")),
])  # fmt: skip
def test_words_of_another_shell_and_lists_are_answered(run: Run, words: list[str], fix: str) -> None:
    assert run(*words)[2].partition("fix:   ")[2].startswith(fix) or os.name == "nt"


@pytest.mark.parametrize(("before", "strength"), [("", "1"), ("0.7:", "0.7"), ("0.7:0.3:", "1,unet=0.7,te=0.3")])
def test_block_weights_after_strengths_are_lbw(run: Run, before: str, strength: str) -> None:
    weights = ",".join(["1", *"0" * 16])
    answer = (
        f"write lora-merge base lora:{strength},lbw={weights}; that line has a mistake, too: 17 block weights do not"
    )
    assert answer in run("base", f"lora:{before}{weights}")[2]


def test_program_may_be_named_twice_and_executors_have_any_case(run: Run) -> None:
    assert run("lora-merge", "base", "lora", "--dry-run") == run("base", "lora", "--dry-run")
    assert run("plan", "base", "lora") == run("base", "lora", "--dry-run")
    Path("jobs.yaml").write_text("version: 1\njobs: [{base: base, adapters: [lora], output: o}]")
    assert run("batch", "jobs.yaml", "--executor", "Local", "--dry-run")[0] == 0


@pytest.mark.parametrize("text", ["lora:0.8,te=abc", "lora:0.8,te=0=1"])
def test_no_part_is_invented(run: Run, text: str) -> None:
    assert run("base", text, "--dry-run")[2].endswith("fix:   write it like te=0.5\n")


@pytest.mark.parametrize(("text", "fix"), [
    ("ink:unet=0.5", "write --strength-for 2:unet=0.5"), ("ink:0.5", "write the strength after the file name: loras/ink.safetensors:0.5"),
    ("te=0:5", "write it like te=0.5"), ("te=0 unet=1", "write it like te=0.5"), ("te:0.5", "write te=0.5"),
])  # fmt: skip
def test_parts_of_strength_for_in_another_spelling(run: Run, text: str, fix: str) -> None:
    assert run("base", "lora", "loras/ink", "--strength-for", text)[2].endswith(f"fix:   {fix}\n")


def test_expression_follows_one_adapter(run: Run) -> None:
    out = run("base", "lora:0.8,te=0,re:attn2=0.5", "--dry-run")[1]
    assert "0.8× unet (3), 0.4× unet (1), te 0: 1 left out" in out


@pytest.mark.parametrize("command", [["base"], ["inspect"], ["inspect", "--json"]])
def test_name_with_spaces_is_in_quotes(run: Run, command: list[str]) -> None:
    shutil.copy("lora.safetensors", "my new style.safetensors")
    code, _, err = run(*command, "my", "new", "style:0.5")
    assert code == 2
    assert err.endswith(f"fix:   write lora-merge {' '.join(command)} {typed(['my new style:0.5'])}\n")


def test_advice_names_options_that_the_command_has(run: Run) -> None:
    assert "write lora-merge inspect lora.safetensors\n" in run("inspect", "lora.safetensors", "--force")[2]


@pytest.mark.few(12)
@pytest.mark.parametrize(("text", "right"), [
    ("lora.safetensors=0.8", "lora.safetensors:0.8"), ("lora.safetensors@0.8", "lora.safetensors:0.8"),
    ("lora.safetensors:0,8", "lora.safetensors:0.8"), ("lora.safetensors:80%", "lora.safetensors:0.8"),
    ("lora.safetensors=80%", "lora.safetensors:0.8"), ("lora.safetensors:1/2", "lora.safetensors:0.5"),
    ("lora.safetensors:", "lora.safetensors:0.8"), ("lora.safetensors::", "write lora-merge base.safetensors lora.safetensors:0.8"), ("lora.safetensors:0.5:", "write lora-merge base.safetensors lora.safetensors:0.5"),
    ("lora.safetensors:0,8,te=0", "write lora-merge base.safetensors lora.safetensors:0.8,te=0"), ("lora@0.8,te=0", "write lora-merge base.safetensors lora.safetensors:0.8,te=0"),
    ("<lora:lora:0.8> <lora:ink:0.5>", "write lora-merge base.safetensors lora.safetensors:0.8 ink.safetensors:0.5"), ("my style@0.8", f"write lora-merge base.safetensors {typed(['my style.safetensors:0.8'])}"), ("<lora:lora:0.8>", "lora.safetensors:0.8"), ("0.8", "ADAPTER:0.8"),
    *((text, "write lora-merge base.safetensors lora.safetensors:0.8") for text in (
        "lora.safetensors::0.8", "lora.safetensors;0.8", "lora,0.8", "lora.safetensors(0.8)", "(lora.safetensors:0.8)", "lora[80%]",
        "lora.safetensors|0,8", "lora.safetensors:0.8x", "lora: x0.8", "0.8*lora.safetensors", "80% × lora", "lora.safetensors*4/5", "<lyco:lora:0.8>",
    )), ("<lora:lora>", "write lora-merge base.safetensors lora.safetensors:1"), ("<lora:lora:0.8:lbw=MIDD>", "write lora-merge base.safetensors lora.safetensors:0.8,lbw=MIDD"),
    ("<lora:lora:0.5:0.8>", "write lora-merge base.safetensors lora.safetensors:1,unet=0.8,te=0.5"), ("loras/ink(2)", "write lora-merge base.safetensors loras/ink.safetensors:2"),
    ("lora.safetensors:1/0", "lora.safetensors:0.8"), ("https://example.org/lora.safetensors", f"{CURL} https://example.org/lora.safetensors"),
    ("hf://owner/name", "hf download owner/name"), ("https://huggingface.co/o/n/resolve/main/a/b.safetensors?download=true", "hf download o/n a/b.safetensors"),
    ("https://civitai.com/models/5?modelVersionId=6", f"{CURL} https://civitai.com/api/download/models/6"), ("s3://b/x.safetensors", "aws s3 cp s3://b/x.safetensors ."), ("civitai:1234", "civitai.com/api/download/models/1234"),
])  # fmt: skip
def test_spellings_of_a_strength_are_answered_with_ours(run: Run, text: str, right: str) -> None:
    code, _, err = run("base.safetensors", text, "-o", "out.safetensors")
    assert code == 2
    assert right in err
    assert not Path("out.safetensors").exists()


@pytest.mark.few(8)
@pytest.mark.parametrize("text", ["0,8", "80%", "=0.8", "4/5"])
@pytest.mark.parametrize(
    ("words", "right"),
    [(["-s", "{}"], "-s 0.8"), (["--strength-for", "te={}"], "te=0.8"), (["--density", "{}"], "--density 0.8"),
     (["{}"], "lora.safetensors:0.8"), (["loras/ink.safetensors", "-s", "0.5", "{}"], "lora.safetensors:0.5 loras/ink.safetensors:0.8"),
     (["{}", "loras/ink.safetensors", "1/2"], "lora.safetensors:0.8 loras/ink.safetensors:0.5")],
)  # fmt: skip
def test_spellings_of_a_number_are_answered_with_ours(run: Run, words: list[str], right: str, text: str) -> None:
    code, _, err = run("base.safetensors", "lora.safetensors", *(word.format(text) for word in words))
    assert code == 2
    assert f" {right}" in err.partition("fix:")[2], err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["base.safetensors", "lora.safetensors", "-o", "a", "--output", "b"], "give it once"),
        (
            ["base", "lora", "--dtype=bf16", "-q", "--dtype", "fp16"],
            "give it once: --dtype fp16; write lora-merge base lora -q --dtype fp16",
        ),
        (["base.safetensors", "https://a.b/c?d=e"], f"{CURL} {typed(['https://a.b/c?…'])}"),
        (["base.safetensors", "hf://a/b/c.safetensors"], "hf download a/b c.safetensors"),
        (["civitai:1234", "lora.safetensors"], f"{CURL} https://civitai.com/api/download/models/1234"),
        (["base.safetensors", "nothing/*.safetensors"], "check the folder"),
        (["bas", "lora.safetensors"], "base.safetensors"),
        (["base.safetensors", "lora.safetensors", "--lbw", "1,0"], "lbw=1,0"),
        (["resize", "--hlep"], "--help"),
        (["batch", "loras"], "name a file in it"),
        (["comfyui", "install"], "write lora-merge comfyui install PATH"),
    ],
)
def test_slip_is_answered_with_what_to_type(run: Run, words: list[str], fix: str) -> None:
    code, _, err = run(*words)
    assert code in (2, 3)
    assert fix in err.partition("fix:")[2], err


@pytest.mark.skipif(os.name == "nt", reason="it is a path there")
def test_path_of_windows_is_named_as_such(run: Run) -> None:
    code, _, err = run("base.safetensors", "C:\\loras\\style.safetensors:0.5")
    assert code == 2
    assert "/mnt/c/loras/style.safetensors" in err


def test_number_in_the_name_of_a_file_is_no_strength(run: Run) -> None:
    code, _, err = run("base.safetensors", "lora2")
    assert code == 3
    assert "did you mean lora.safetensors" in err


def test_pattern_may_have_a_strength(run: Run) -> None:
    code, out, _ = run("base.safetensors", "loras/*.safetensors:0.5", "--dry-run")
    assert code == 0
    assert "0.5× unet" in out


@pytest.mark.parametrize("command", ["combine", "average"])
def test_single_adapter_has_a_default_name(run: Run, command: str) -> None:
    code, out, _ = run(command, "lora.safetensors", "--dry-run")
    assert code == 0
    assert f"lora-{command}.safetensors" in out


def test_path_that_cannot_be_looked_at_has_a_typed_error(run: Run) -> None:
    """The system refuses a name of 300 letters in the same way as a folder that may not be entered."""
    odd = "a" * 300
    for words in (["base.safetensors", odd], [odd, "lora.safetensors"], ["resize", odd, "--rank", 2], ["inspect", odd],
                  ["base.safetensors", "lora.safetensors", "--report", f"{odd}/r.json"]):  # fmt: skip
        code, _, err = run(*words)
        assert code in (2, 3), err
        assert "run again" not in err


def test_permission_that_is_missing_is_answered_with_the_command_that_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("/models/my loras/style.safetensors")
    monkeypatch.setattr(os, "access", lambda path, _: path != file.parent)
    if os.name != "nt":
        assert "chmod a+x '/models/my loras'" in unreadable(file, PermissionError(13, "Permission denied")).fix
        monkeypatch.setattr(os, "access", lambda *_: True)
        assert "chmod a+r '/models/my loras/style" in unreadable(file, PermissionError(13, "Permission denied")).fix


def test_missing_ending_is_tried(run: Run) -> None:
    assert run("base", "lora", "-o", "a.safetensors")[0] == 0
    for words in (
        "verify a",
        "verify a --base base --adapter lora",
        "replay a -o r",
        "unmerge a -o u",
        "compare a base",
    ):
        assert run(*words.split())[0] == 0, words
    assert run("base", "lora:0.5", "-o", "b.safetensors")[0] == 0
    assert run("base.safetensors", "lora.safetensors:0.5", "-o", "c.safetensors")[0] == 0
    assert Path("b.safetensors").stat().st_size == Path("c.safetensors").stat().st_size
    assert all((load("b.safetensors")[k] == v).all() for k, v in load("c.safetensors").items())


def test_patterns_that_no_shell_expanded(run: Run) -> None:
    assert run("base.safetensors", "loras/*.safetensors", "-o", "a.safetensors")[0] == 0


def test_folder_with_a_slash_at_the_end_gets_the_model_inside(run: Run) -> None:
    """As cp has it: a folder of models that is there; another name with a slash is that of the output."""
    Path("llm").mkdir()
    shutil.copy("base.safetensors", "llm/model.safetensors")
    Path("models").mkdir()
    Path("models", "other.txt").touch()
    assert run("llm", "lora", "-o", "models/", "-q")[0] == 0
    assert Path("models", "llm+lora", "model.safetensors").exists()
    assert run("llm", "lora", "-o", "new/", "-q")[0] == 0
    assert Path("new", "model.safetensors").exists()
    code, _, err = run("llm", "lora", "-o", "new/", "-q")
    assert code == 2
    assert "the output exists" in err


@pytest.mark.few(2)
@pytest.mark.parametrize("words", [["-s", "[0.8, 0.5]"], ["-s", "0.8,0.5"], ["-s", "0.8", "-s", "0.5"]])
def test_several_strengths(run: Run, words: list[str]) -> None:
    code, out, _ = run("base.safetensors", "lora.safetensors", "loras/ink.safetensors", *words, "-o", "a.safetensors")
    assert code == 0
    assert "0.8×" in out and "0.5×" in out


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [1, 2])
def test_strength_and_a_part_of_one_adapter_go_together(run: Run, at: int) -> None:
    both = ("base.safetensors", "lora.safetensors", "loras/ink.safetensors")
    part = ("--strength-for", f"{at}:re:.*=0.5")
    own = [f"{path}:{s}" for path, s in zip(both[1:], ("0.8", "0.4"), strict=True)]
    assert run(both[0], *own, *part, "-o", "a.safetensors")[0] == 0
    assert run(*both, "-s", "0.8,0.4", *part, "-o", "b.safetensors")[0] == 0
    assert all((load("a.safetensors")[k] == v).all() for k, v in load("b.safetensors").items())
    code, _, err = run(*both, "-s", "0.8", *part)
    assert code == 2
    assert "1 strength for 2 adapters" in err
    assert run(both[0], own[0], both[2], "-s", "0.8,0.4", *part)[0] == 2  # one of its own, and another


def test_missing_strengths_are_answered_with_what_to_type(run: Run) -> None:
    code, _, err = run("base.safetensors", "lora.safetensors", "loras/ink.safetensors", "-s", "0.8")
    assert code == 2
    assert "1 strength for 2 adapters" in err
    assert err.endswith("such as lora-merge base.safetensors lora.safetensors:0.8 loras/ink.safetensors:0.8\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("BF16", "bf16"),
        ("half", "fp16"),
        ("Float16", "fp16"),
        ("torch.bfloat16", "bf16"),
        ("KEEP", "keep"),
        ("F16", "fp16"),
        ("E4M3", "fp8_e4m3fn"),
    ],
)
def test_names_of_dtypes(tmp_path: Path, text: str, name: str) -> None:
    assert make_job(tmp_path / "b", tmp_path / "a", tmp_path / "o", dtype=text).dtype == name


@pytest.mark.parametrize("name", ["fp8", "float8"])
def test_name_of_several_dtypes_is_answered_with_them(run: Run, name: str) -> None:
    """And with what each is for."""
    code, _, err = run("base.safetensors", "lora.safetensors", "--dtype", name)
    assert code == 2
    assert "fp8_e4m3fn, fp8_e5m2" in err and "fp8_scaled: scales, a file for ComfyUI; " in err
    assert "int8" not in err


@pytest.mark.few(4)
@pytest.mark.parametrize(("words", "fix"), [
    ("--method TIES --density 0.5", ""), ("--method dare-ties --density 0.5", ""), ("--unmatched Skip", ""), ("--on-overflow SATURATE", ""),
    ("--method tie", "did you mean ties?"), ("--rounding stochastik", "did you mean stochastic?"), ("--unmatched no", "use one of error, skip"),
    ("--dtype fp64", "--dtype fp32"), ("--dtype q9_0", "q8_0: ComfyUI-GGUF loads no model"), ("--dtype int16", "use one of fp16, bf16"), ("--dtype awq", "use one of nf4"),
    ("--on-overflow clip", "--on-overflow saturate"), ("--unmatched ignore", "--unmatched skip"), ("--seed -1", "--seed 0"),
    ("--method ties --density 50", "--density 0.5"), ("--strength-for te", "--strength-for te=0.5"), ("--strength-for lbw=midd", "lbw=MIDD"),
    ("--strength-for attn2=0.5", "--strength-for '*attn2*=0.5'"), ("--json=r.json", "--report r.json"), ("--report --dtype bf16", "write its value after --report"),
    ("/overwrite", "--overwrite"), ("—dtype=bf16", "--dtype=bf16"), ("-o x.safetensor", "-o x.safetensors"),
    ("--dtype zz", "bf16; lora-merge help merge lists all"), ("--method linear", "--method sum"), ("--device gpu0", "--device cuda:0"),
    ("--device 0,1", "--device cuda:0,cuda:1"), ("--device metal", "--device mps"), ("--max-memory 1e9", "--max-memory 1GB"),
    ("--max-memory -5", "--max-memory 5GB"), ("--max-vram 4gigs", "--max-vram 4GB"), ("--max-memory lots", "--max-memory 4GB"), ("--dtype int4", "use one of nf4, q4_0, q4_k"), ("--dtype auto", ""), ("--dtype single", ""),
    ("--dtype q8", "q8_0: ComfyUI-GGUF loads no model"), ("--dtype fp-16", "loras/ink --dtype fp16"), ("--dtype 7", "use one of keep"),
])  # fmt: skip
def test_choices_in_other_letters_are_taken_and_slips_are_answered(run: Run, words: str, fix: str) -> None:
    code, _, err = run("base", "lora", "loras/ink", *words.split(), "--dry-run", "-q")
    assert code == ((5 if "device" in words else 2) if fix else 0), err
    assert fix in err


def test_gpu_is_cuda(tmp_path: Path) -> None:
    assert make_job(tmp_path / "b", tmp_path / "a", tmp_path / "o", device="gpu").device == "cuda"


@pytest.mark.few(3)
@pytest.mark.parametrize("words", [
    "base lora", "combine lora loras/ink", "resize lora --rank 2", "convert lora --dtype bf16", "average lora loras/ink",
    "extract base tuned --rank 1", "extract base tuned --rank 1 --format kohya", "unmerge base lora", "replay made",
])  # fmt: skip
def test_output_without_ending_and_one_in_a_folder(run: Run, words: str) -> None:
    """The .5 of v1.5 is none: user interfaces list files by their ending."""
    if "tuned" in words:
        save({k: v * 2 if "attn1" in k else v for k, v in load("base.safetensors").items()}, Path("tuned.safetensors"))
    if "made" in words:
        assert run("base", "lora", "-o", "made")[0] == 0
    assert run(*words.split(), "-o", "v1.5")[0] == 0
    assert Path("v1.5.safetensors").is_file()
    Path("there").mkdir()
    for folder in ("there", "new/"):
        assert run(*words.split(), "-o", folder)[0] == 0
        (inside,) = Path(folder).iterdir()
        assert inside.suffix == ".safetensors"


def test_dry_run_answers_where_the_output_exists(run: Run) -> None:
    Path("out.safetensors").write_bytes(b"mine")
    code, out, _ = run("base.safetensors", "lora.safetensors", "-o", "out.safetensors", "--dry-run")
    assert code == 0
    assert "--overwrite" in out
    assert Path("out.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--dry-run"]])
def test_no_option_replaces_the_base(run: Run, options: list[str]) -> None:
    before = Path("base.safetensors").read_bytes()
    code, _, err = run("base.safetensors", "lora.safetensors", "-o", "base.safetensors", *options)
    assert code == 2
    assert "--overwrite" not in err and "-o base-new.safetensors" in err
    assert Path("base.safetensors").read_bytes() == before


def test_file_address_is_a_path(run: Run) -> None:
    assert run(Path("base.safetensors").absolute().as_uri(), "lora.safetensors", "-o", "a.safetensors")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["nothing.safetensors", "lora.safetensors"],
        ["base.safetensors", "base.safetensors"],
        ["base.safetensors", "lora.safetensors", "--dtype", "no"],
    ],
)
def test_failure_with_json_is_json_on_stdout(run: Run, words: list[str]) -> None:
    code, out, err = run(*words, "--json")
    told = json.loads(out)
    assert told["exit_code"] == told["error"]["exit_code"] == code
    assert all(told["error"][name] in err for name in ("what", "fix"))


def test_fault_of_the_program_with_json_is_json_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lora_merge.cli.main._program", lambda: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["lora-merge", "base.safetensors", "lora.safetensors", "--json"])
    with pytest.raises(ZeroDivisionError):
        program.main()
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["error"]["kind"]) == (1, "ZeroDivisionError")


def test_main_command_comes_first_and_its_help_ends_with_examples(run: Run) -> None:
    listed = [line.split()[0] for line in run("--help")[1].partition("Merge:")[2].splitlines() if line.strip()]
    assert listed[0] == "merge"
    examples = run("merge", "--help")[1].partition("Examples:")[2].strip().splitlines()
    assert len(examples) >= 3
    assert all(line.strip().startswith("lora-merge ") for line in examples)


@pytest.mark.parametrize(("words", "fix"), [
    ("base lora out/", "if it is the output, write -o out/"), ("base lora new.safetensors", "if it is the output, write -o new.safetensors"),
    ("base lora loraa.safetensors", "did you mean lora.safetensors"), ("convert lora", "give --to"),
    ("batch jobs.yaml --strength 0.8", "write a strength after its path in the jobs file"),
    ("batch jobs.yaml --dtype bf16", "write it in the jobs file, for a job or under defaults: dtype: VALUE"),
    ("base lora --strength-for lbw=OUTAL", "did you mean OUTALL"),
])  # fmt: skip
def test_intended_command_is_named(run: Run, words: str, fix: str) -> None:
    code, _, err = run(*words.split())
    assert code in (2, 3) and f"fix:   {fix}" in err


def test_fix_for_a_folder_of_adapters_can_be_typed(run: Run) -> None:
    shutil.copy("lora.safetensors", "loras/b.safetensors")
    (told,) = re.findall(r"write (.*/\*\.safetensors)", run("base", "loras")[2])
    assert run("base", told, "--dry-run")[0] == 0


def test_adapter_in_the_same_format_has_a_name_of_its_own(run: Run) -> None:
    assert run("convert", "lora", "--dtype", "bf16")[0] == 0
    assert Path("lora-convert.safetensors").exists()


def test_effective_strengths_and_names_of_one_adapter_twice(run: Run) -> None:
    code, out, _ = run("base", "lora", "lora:0.5", "--strength-for", "te=0", "--json", "-o", "out")
    told = json.loads(out)
    assert code == 0 and [*told["coverage"]] == ["lora.safetensors", "lora.safetensors (2)"]
    assert [r["strengths"]["unet"] for r in told["verified"]["retained"]] == [{"1": 4}, {"0.5": 4}]
    assert [r["strengths"]["te"] for r in told["verified"]["retained"]] == [{"0": 1}] * 2


@pytest.mark.parametrize(("written", "right"), [
    ("lora:0.8,te=0", "write {path: lora.safetensors, strength: 0.8, strength_for: {te: 0}}"),
    ("lora,te=0,lbw=1,0", 'write {path: lora.safetensors, strength: 1, strength_for: {te: 0, lbw: "1,0"}}'),
    ("<lora:ink:0.8>", "write ink.safetensors:0.8"), ("<lora:ink:0.5:0.8>", "strength_for: {unet: 0.8, te: 0.5}"),
    ("lora=0.8", "write lora.safetensors:0.8"), ("lora.safetensors@0.8", "write lora.safetensors:0.8"),
    ("lora:80%", "write lora.safetensors:0.8"), ("lora.safetensors:0,8", "write lora.safetensors:0.8"),
    ("https://huggingface.co/me/style", "download it first: hf download me/style"), ("hf://a/b", "hf download a/b"),
    ("elsewhere/lora.safetensors:0.5;te=0", "write {path: elsewhere/lora.safetensors, strength: 0.5, strength_for: {te: 0}}"),
    ({"path": "lora", "strength": "80%"}, "write 0.8"),
])  # fmt: skip
def test_adapters_of_a_jobs_file_as_on_the_command_line(run: Run, written: str | dict[str, str], right: str) -> None:
    Path("jobs.json").write_text(json.dumps([{"base": "base", "adapters": [written], "output": "o"}]))
    code, _, err = run("batch", "jobs.json")
    assert code == 2 and right in err


PAIR = 'write ("lora.safetensors", 0.8) in the list of adapters, or strengths=[0.8]'


@pytest.mark.parametrize(("written", "right"), [
    *((text, PAIR) for text in ("lora.safetensors:0.8", "lora=0.8", "lora@0.8", "lora.safetensors:80%", "<lora:lora:0.8>")),
    ("lora.safetensors:0.8,te=0", 'write lora_merge.Adapter("lora.safetensors", 0.8, (("te", 0),))'),
    ("lora,te=0,lbw=1,0", 'write lora_merge.Adapter("lora.safetensors", 1, (("te", 0), ("lbw", "1,0"),))'),
    ("https://huggingface.co/me/style", "download it first: hf download me/style"),
    ("me/style", "download it first: hf download me/style --local-dir me/style"),
    ("loras/*.safetensors", "name each file"),
    ("lora:0.5;te=0", 'write lora_merge.Adapter("lora.safetensors", 0.5, (("te", 0),))'),
])  # fmt: skip
def test_adapters_in_python_as_on_the_command_line(run: Run, written: str, right: str) -> None:
    for act in (lora_merge.plan, lora_merge.merge, lambda base, one, *_: lora_merge.merge_state_dict(load(Path("base.safetensors")), one)):  # fmt: skip
        with pytest.raises(lora_merge.MergeError) as e:
            act("base", written, "o.safetensors")
        assert e.value.fix.startswith(right)


def test_adapter_that_is_opened_alone_has_its_strength_behind_it(run: Run) -> None:
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.load_adapter("lora.safetensors:0.8")
    right = e.value.fix.removeprefix("write ")
    assert right == 'load_adapter("lora.safetensors") * 0.8'
    (term,) = eval(f"lora_merge.{right}").terms
    assert term[1] == 0.8


@pytest.mark.parametrize(("adapters", "options", "right"), [
    (["lora", 0.5], {}, 'write ("lora", 0.5)'), ([(0.5, "lora")], {}, 'write ("lora", 0.5)'),
    ((0.5, "lora"), {}, 'write ("lora", 0.5)'), ([5], {}, 'give a path, or a pair such as ("a.safetensors", 0.8)'),
    ("lora", {"strength_for": ["te=0", "unet=0.5"]}, 'write strength_for={"te": 0, "unet": 0.5}'),
    ("lora", {"strength_for": [{"te": 0}]}, 'write strength_for={"te": 0}'),
    ("lora", {"setting": {"lora_alpa": 4}}, "did you mean lora_alpha?"),
    ("lora", {"strength_for": "te=0"}, 'write strength_for={"te": 0}'),
    ("lora", {"precision": "fp16"}, "did you mean dtype?"), ("lora", {"out": "x"}, "did you mean output?"),
    ("lora", {"weights": [1]}, "did you mean strengths?"),
])  # fmt: skip
def test_mistakes_in_python_are_answered_with_what_can_be_typed(run: Run, adapters: object, options: dict[str, object], right: str) -> None:  # fmt: skip
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.plan("base", adapters, **options)  # type: ignore[arg-type]
    assert e.value.fix == right


def test_path_for_a_state_dict_is_answered_with_the_function_for_files(run: Run) -> None:
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.merge_state_dict("base.safetensors", "lora")  # type: ignore[arg-type]
    assert (e.value.what, e.value.fix) == ("state_dict must be a state dict", "for a file use merge()")


def test_state_dict_for_a_path_is_answered_with_the_function_for_state_dicts(run: Run) -> None:
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.merge(load(Path("base.safetensors")), "lora")  # type: ignore[arg-type]
    assert (e.value.what, e.value.fix) == ("base must be a path", "for a state dict use merge_state_dict()")
    with pytest.raises(lora_merge.MergeError, match="the state dict is empty"):
        lora_merge.merge_state_dict({}, "lora")


def test_errors_of_python_name_keywords(run: Run) -> None:
    """The command line and jobs files have the same messages with options and fields."""
    save(kohya(sd1_sample()) | {"lora_unet_b.lora_down.weight": rand(2, 4), "lora_unet_b.lora_up.weight": rand(4, 2)},
         Path("stray.safetensors"))  # fmt: skip
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.plan("base", "stray")
    assert 'unmatched="skip"' in e.value.fix and "--" not in e.value.fix
    assert "--unmatched skip" in run("base", "stray", "--dry-run")[2]
    with pytest.raises(lora_merge.MergeError, match="did you mean progress"):
        lora_merge.merge("base", "lora", "o", progres=True)  # type: ignore[call-arg]
    with pytest.raises(lora_merge.MergeError, match="strength must be a list of numbers, one per adapter, not") as e:
        lora_merge.plan("base", ["lora", "loras/ink"], strength=0.5)  # type: ignore[arg-type]
    assert e.value.fix == "write strength=[0.5, 0.5]"


@pytest.mark.parametrize(("text", "right"), [
    ("or leave them out with `--unmatched skip`", 'or leave them out with unmatched="skip"'),
    ("leave it out with `--strength-for re:NAME=0`", 'leave it out with strength_for={"re:NAME": 0}'),
    ("state it with `--setting lora_alpha=VALUE`", 'state it with setting={"lora_alpha": VALUE}'),
    ("give --rank, such as 32, or `--algorithm full`", 'give rank, such as 32, or algorithm="full"'),
    ("choose another -o, or give `--overwrite`", "choose another output, or give overwrite=True"),
    ("--keep-precision is for a --dtype that quantises", "keep_precision is for a dtype that quantises"),
    ("give the base model of the training: `--base MODEL`", "give the base model of the training: base=MODEL"),
    ("--strength must be a list", "strength must be a list"), ("use --no-verify", "use verify=False"),
    ("`lora-merge extract BASE TUNED --rank 8`; or `--rank 8`", "extract(BASE, TUNED, rank=8); or rank=8"),
    ("the exact sum has rank 9; --rank energy:0.999 keeps more", 'the exact sum has rank 9; rank="energy:0.999" keeps more'),
    ("of --dtype that quantises, --format peft or --format if", 'of dtype that quantises, format="peft" or format if'),
    ("`lora-merge base.safetensors A:0.5 B --dtype bf16`", 'merge("base.safetensors", [(A, 0.5), B], dtype="bf16")'),
    ("`lora-merge combine A B -o 'a b'`, lora-merge verify", 'combine([A, B], output="a b"), verify()'),
    ("`--strength-for IN99`", 'strength_for="IN99"'), ("write a strength: ADAPTER:0.8.", "write a strength: (ADAPTER, 0.8)."),
    ("`lora-merge parts BASE` lists all", 'inspect(BASE)["blocks"] lists all'),
])  # fmt: skip
def test_options_in_a_message_are_keywords_in_python(text: str, right: str) -> None:
    """Also in sentences without backticks, where a value is a word that the option's row takes; commands are calls."""
    assert in_python(text) == right


@pytest.mark.few(12)
@pytest.mark.parametrize(("words", "right"), [
    ("base lroa:0.8,te=0 --dry-run", "did you mean lora.safetensors, loras? write lora-merge base lora.safetensors:0.8,te=0 --dry-run"),
    ("base lora --dtype=bf61", "write lora-merge base lora --dtype=bf16"),
    ("base lora --dtype bf17", "write lora-merge base lora --dtype bf16"), ("base lora --dtype 16", "use one of fp16, bf16"),
    ("base lora --strength-for te 0", "write lora-merge base lora --strength-for te=0"), ("base lora --device tpu", "use auto, cpu, cuda, cuda:N, mps or xpu"),
    ("resize lora 4", "write lora-merge resize lora --rank 4"),
    ("base lora --save-dtype fp16", "write lora-merge base lora --dtype fp16"), ("base lora --use-safetensors", "leave it out: not needed here; write lora-merge base lora"),
    ("base lora --lora-alpha 8", "leave it out: the adapter states its alpha; write lora-merge base lora"),
    ("base lora --dytpe bf16", "did you mean --dtype? see lora-merge help merge; write lora-merge base lora --dtype bf16"),
    ("base lora --roundnig=nearest", "did you mean --rounding? see lora-merge help merge; write lora-merge base lora --rounding=nearest"),
    ("resize lora --rank 0.9", "did you mean energy:0.9? write lora-merge resize lora --rank energy:0.9"),
    ("resize lora --rank 90%", "did you mean energy:0.9? write lora-merge resize lora --rank energy:0.9"),
    ("convert lora --to PEFTT", "did you mean peft? write lora-merge convert lora --to peft"),
    ("lora base --dtype bf16", "name the base first: lora-merge base lora --dtype bf16"),
    ("lora", "name the base first: lora-merge base.safetensors lora"),
    ("lora loras/ink:0.5 -o both.safetensors", "name the base first: lora-merge base.safetensors lora loras/ink:0.5 -o both.safetensors; "
     "or combine the adapters: lora-merge combine lora loras/ink:0.5 -o both.safetensors"),
    ("lora:0.5 loras/ink -o both.safetensors", "name the base first: lora-merge base.safetensors lora:0.5 loras/ink -o both.safetensors; "
     "or combine the adapters: lora-merge combine lora:0.5 loras/ink -o both.safetensors"),
    ("lora:0.5 base --dtype bf16", "name the base first: lora-merge base lora:0.5 --dtype bf16"),
    ("base lora loras/ink -s 0.5", "give one for each adapter, such as lora-merge base lora:0.5 loras/ink:0.5"),
    ("base lora -o x.ckpt", "write lora-merge base lora -o x.safetensors"),
    ("base lora -o loras/ink.safetensors", "choose another -o, or give --overwrite; write lora-merge base lora -o loras/ink.safetensors --overwrite"),
    ("combine base lora -o x", "name a LoRA or another adapter; to merge one into this model: lora-merge base lora"),
    ("resize base --rank 2", "name a LoRA or another adapter"),
    ("base:0.5 lora", "a base has no strength: lora-merge base lora:0.5"),
    ("base", "name an adapter; its folder has lora.safetensors; write lora-merge base lora.safetensors:0.8"),
    ("base ADAPTER:0.8", "check the path; its folder has lora.safetensors; write lora-merge base lora.safetensors:0.8"),
    ("BASE loras/ink", "did you mean base.safetensors? write lora-merge base.safetensors loras/ink"),
    ("base lora --gpu 0", "write lora-merge base lora --device cuda:0"),
    ("resize lora --alpha 8", "write lora-merge resize lora --alpha 8 --rank 16"),
    ("base lora --max-memory 4", "write lora-merge base lora --max-memory 4GB"),
    ("average lora:0.7 loras/ink:0.3", "write lora-merge average lora.safetensors loras/ink.safetensors --weights 0.7,0.3"),
    ("average -s 0.7 -s 0.3 lora loras/ink", "write lora-merge average lora loras/ink --weights 0.7,0.3"),
    ("resize lora --new_rank 16 --dynamic_method sv_fro --dynamic_param 0.9 --save_to y",
     "write lora-merge resize lora -o y --rank fro:0.9 --max-rank 16"),
    ("combine --models lora loras/ink --ratios 0.7 0.3 --new_rank 4 --save_to o",
     "write lora-merge combine lora:0.7 loras/ink:0.3 -o o --rank 4"),
    ("extract --model_org base --model_tuned base --dim 4 --save_to d", "write lora-merge extract base base -o d --rank 4"),
    ("base lora --out-dtype fp16", "write lora-merge base lora --dtype fp16"),
    ("base lora --lora-weight 0.8", "write lora-merge base lora:0.8"),
])  # fmt: skip
def test_fix_is_the_corrected_line(run: Run, words: str, right: str) -> None:
    """It can be pasted, but for capitals; the JSON of the error has it too."""
    code, _, err = run(*words.split())
    assert code in (2, 3, 5) and re.search(f"fix:   {re.escape(right)}(; that line has a mistake, too: .*)?\n$", err), (
        err
    )
    assert json.loads(run(*words.split(), "--json")[1].splitlines()[-1])["error"]["fix"].startswith(right[:20])


def test_corrected_line_is_left_out_if_it_names_a_file_twice(run: Run) -> None:
    """The other adapter is the file that is most like the missing one: no line says to merge it twice."""
    assert run("base", "lora", "lara", "--dry-run")[2].endswith("fix:   did you mean lora.safetensors, loras?\n")


def test_files_of_the_other_role_are_not_proposed(run: Run) -> None:
    """A base for an adapter, an adapter or an embedding for a base; what cannot be read in time counts as both."""
    save({"emb_params": rand(4, 8)}, Path("lorax.safetensors"))
    assert run("lorb.safetensors", "lora")[2].endswith("fix:   check the path; its folder has base.safetensors\n")
    assert run("base", "bose")[2].endswith("fix:   check the path; its folder has lora.safetensors\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting_files, "LOOK_SECONDS", 0.0)
        assert "base.safetensors" in run("base", "bose")[2].partition("fix:")[2]


@pytest.mark.few(6)
@pytest.mark.parametrize(("words", "right"), [
    ("flux", "name an adapter; its folder has of_flux.safetensors; write lora-merge flux of_flux.safetensors:0.8"),
    ("flux --dtype bf16", "name an adapter; its folder has of_flux.safetensors; write lora-merge flux of_flux.safetensors:0.8 --dtype bf16"),
    ("of_flux", "name the base first: lora-merge flux.safetensors of_flux"),
    ("of_flux.safetensors lora", "name the base first; or combine the adapters: lora-merge combine of_flux.safetensors lora -o both.safetensors"),
    ("batch flux.safetensors", "one merge needs no file: lora-merge flux.safetensors of_flux.safetensors:0.8"),
    ("batch of_flux.safetensors", "one merge needs no file: lora-merge flux.safetensors of_flux.safetensors"),
    ("flux qqq", "check the path; its folder has of_flux.safetensors"),
    ("flux of_flux qqq.safetensors", "if it is the output, write -o qqq.safetensors; else check the path; its folder has of_flux.safetensors; "
     "write lora-merge flux of_flux -o qqq.safetensors"),
    ("compare flux qqq", "check the path; its folder has no model that fits"), ("compare lora qqq", "check the path; its folder has of_flux.safetensors"),
    ("extract flux qqq -o y", "check the path; its folder has no model that fits"),
    ("qqq.safetensors of_flux", "check the path; its folder has flux.safetensors"), ("flux lorx", "check the path; its folder has of_flux.safetensors"),
    ("vae", "load it at generation time: a merge does not replace the VAE of a checkpoint"),
    ("merge", "lora-merge base.safetensors lora.safetensors:0.8; see lora-merge help merge"),
    ("alone/other", "name an adapter; its folder has no adapter that fits"),
    ("alone/other qqq", "check the path; its folder has no adapter that fits"),
    ("batch alone/other.safetensors", "one merge needs no file"),
])  # fmt: skip
def test_files_of_a_fix_fit_each_other(run: Run, words: str, right: str) -> None:
    """By their headers; without such a file none is named, and no place for one."""
    save(flux(), Path("flux.safetensors"))
    save(of_flux(), Path("of_flux.safetensors"))
    save(
        {"encoder.conv_in.weight": rand(8, 3, 3, 3), "decoder.conv_in.weight": rand(8, 4, 3, 3)},
        Path("vae.safetensors"),
    )
    Path("alone").mkdir()
    save(
        {name: rand(*t.shape[:-1], t.shape[-1] + 1) for name, t in sd1_sample().items()},
        Path("alone/other.safetensors"),
    )
    assert right in run(*words.split())[2]


CONTAINERS = {
    "flux.gguf style -o x.safetensors": ["-o x.gguf", "-o x.safetensors --dtype bf16"],
    "flux.gguf style -o x.safetensors --dtype nf4": ["--dtype q4_0 -o x.gguf"], "flux.gguf style --dtype int8": ["--dtype q8_0"],
    "base lora -o x.gguf --dtype fp16": ["-o x.safetensors --dtype fp16"], "base lora -o x.gguf --dtype q8_0": ["--dtype bf16 -o x.safetensors"],
    "base lora -o x.gguf --dtype fp8_block": ["--dtype bf16 -o x.safetensors"],
}  # fmt: skip
"""Line as it is typed → what its error says."""


@pytest.mark.parametrize("words", CONTAINERS)
def test_container_is_corrected_by_one_fix(run: Run, words: str) -> None:
    """A name for the format, or a format for the name; each line is accepted."""
    at = "single_blocks.0.linear2"
    gguf_files.write(
        Path("flux.gguf"), "flux", {f"{name}.weight": (rand(32, 32).numpy(), "F16") for name in (at, "img_in")}
    )
    save({f"{at}.lora_A.weight": rand(2, 32), f"{at}.lora_B.weight": rand(32, 2)}, Path("style.safetensors"))
    lines = run(*words.split())[2].rpartition("write lora-merge ")[2].strip().split("; or lora-merge ")
    assert lines == [f"{words[: words.index(' -')]} {options}" for options in CONTAINERS[words]]
    assert all(run(*line.split())[0] == 0 for line in lines)


@pytest.mark.parametrize("name", ["PEFT", "Kohya", "ComfyUI", "a1111", "AI_Toolkit", "Forge"])
def test_formats_are_understood_in_any_case_and_by_other_names(run: Run, name: str) -> None:
    of_unet = ("--include", "unet", "--base", "base", "-o", "c", "--dry-run")
    assert run("convert", "lora", "--to", name, *of_unet)[0] == 0
    assert run("combine", "lora", "loras/ink", "--format", name, "--method", "Ties", "--rank", "2", *of_unet)[0] == 0


def test_values_of_every_tensor_are_in_json_on_request(run: Run) -> None:
    merged = json.loads(run("base", "lora", "-o", "m", "--json")[1])
    assert merged["numbers"]["all"] and "tensors" not in merged["numbers"]
    assert "tensors" not in json.loads(run("verify", "m", "--json")[1])["numbers"]
    merged = json.loads(run("base", "lora", "-o", "m", "--overwrite", "--json", "--json-tensors")[1])
    assert len(merged["numbers"]["tensors"]) == merged["changed"]
    assert "tensors" in json.loads(run("verify", "m", "--json", "--json-tensors")[1])["numbers"]
    assert "tensors" in lora_merge.merge("base", "lora", "n").numbers


@pytest.mark.few(3)
@pytest.mark.parametrize(("words", "path"), [
    ("resize lora --rank 2 -o r", "layers"), ("combine lora loras/ink -o c --dry-run", "layers"),
    ("inspect base lora --weights", "match numbers tensors"), ("inspect lora --weights", "weights modules"),
    ("inspect base --weights", "sizes tensors"), ("compare lora loras/ink", "modules"), ("compare base base", "equal_tensors"),
])  # fmt: skip
def test_other_commands_have_values_of_every_tensor_on_request_too(run: Run, words: str, path: str) -> None:
    *outer, table = path.split()
    for more, present in (((), False), (("--json-tensors", "--overwrite")[: 1 + ("-o" in words)], True)):
        found = json.loads(run(*words.split(), "--json", *more)[1])
        for name in outer:
            found = found[name]
        assert (table in found) is present


@pytest.mark.parametrize(("words", "right"), [
    ("base lora :0.8 --dry-run", "base lora:0.8 --dry-run"), ("base lora: 0.8", "base lora:0.8"), ("base lora --max-memory 4 GB", "base lora --max-memory 4GB"),
    ("base lora --max-memory=1.5 gib", "base lora --max-memory=1.5gib"),
])  # fmt: skip
def test_space_inside_a_word_is_closed(run: Run, words: str, right: str) -> None:
    assert run(*words.split())[2].endswith(f"fix:   write lora-merge {right}\n")


def test_strength_of_a_base_named_second_is_that_of_the_adapter(run: Run) -> None:
    fix = run("lora.safetensors", "base.safetensors:0.8", "-o", "x")[2].splitlines()[-1]
    assert fix.endswith("lora-merge base.safetensors lora.safetensors:0.8 -o x")


def test_report_that_cannot_be_written_gets_another_name(run: Run) -> None:
    assert run("base", "lora", "--report", "none/r.json")[2].endswith("write lora-merge base lora --report r.json\n")
    assert "such as --html report.html\n" in run("base", "lora", "-o", "x.safetensors", "--html", "x.safetensors")[2]


def test_adapter_that_its_metadata_name_is_refused_by_both_names(run: Run) -> None:
    """Where shapes show no model, as of pruned ones; a combination of two models is refused too."""
    sdxl = {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}
    other = {f"{name}.{slot}.weight": rand(*shape) for name in ("lora_unet_input_blocks_4_1_proj_in", "lora_te2_layers_0_fc1")
             for slot, shape in (("lora_up", (24, 4)), ("lora_down", (4, 24)))}  # fmt: skip
    save(other, Path("xl.safetensors"), sdxl)
    save(kohya(sd1_sample()), Path("one.safetensors"), {"ss_base_model_version": "sd_v1"})
    refused = run("base", "xl")
    assert (
        refused[0] == 4
        and "the adapter is for Stable Diffusion XL (by its metadata), the base is Stable Diffusion 1" in refused[2]
    )
    save(other | kohya(sd1_sample()), Path("xl.safetensors"), sdxl)
    partly = run("base", "xl")
    assert partly[0] == 4 and "2 of" in partly[2] and "--unmatched" not in partly[2], "the rest of it is of no use"
    assert (
        "one.safetensors is for Stable Diffusion 1, xl.safetensors for Stable Diffusion XL"
        in run("combine", "one", "xl", "-o", "y")[2]
    )


def test_modules_without_a_place_are_left_out_by_the_own_line(run: Run) -> None:
    odd = {f"lora_unet_nowhere_0.{end}.weight": rand(4, 4) for end in ("lora_up", "lora_down")}
    save(kohya(sd1_sample()) | odd, Path("odd.safetensors"))
    assert run("base", "odd:0.5", "-o", "x")[2].endswith("write lora-merge base odd:0.5 --unmatched skip -o x\n")


def test_jobs_file_in_the_place_of_a_base_is_for_batch(run: Run) -> None:
    Path("jobs.yaml").write_text("")
    assert run("jobs.yaml")[2].endswith("fix:   write lora-merge batch jobs.yaml\n")
    assert "lora-merge batch --init OTHER.yaml" in run("batch", "jobs.yaml")[2]
