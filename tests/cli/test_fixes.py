"""Every fix of a message is typed after a test, or listed with the reason why it is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from lora_merge import errors
from lora_merge.models.chosen import leave_out
from lora_merge.text import expression
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.fixes import BY_HAND, TYPED, UNTYPED
from tests.kit.models import TE, sd1
from tests.kit.readme import ROOT
from tests.kit.tensors import rand
from tests.kit.typed_fixes import OURS, Failure, expect_typed, pattern, scene, taken_down, typed, ways


@pytest.fixture(scope="module")
def texts(hooks: ModuleType) -> set[str]:
    """What the code can print as a fix; not what it passes on from another message."""
    kinds = frozenset(n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
    calls = [found for path in sorted((ROOT / "lora_merge").rglob("*.py")) for found in hooks.made(path, kinds)]
    found = {text for _, call, known in calls if len(call.args) == 3 for text in hooks.texts(call.args[2], known)}
    assert len(found) > 350
    return {text for text in found if text.strip("… ;")}


def test_fixes_with_an_option_or_a_command_have_a_row(texts: set[str]) -> None:
    ours = {text for text in texts if OURS.search(text)}
    listed = [*TYPED, *SCENES, *(text for rows in UNTYPED.values() for text in rows)]
    assert sorted(ours) == sorted(listed)


def test_other_fixes_begin_with_a_word_that_has_a_reason(texts: set[str]) -> None:
    first = {re.split(r"[\s,;:]", text.lstrip("… ;"))[0] for text in texts if not OURS.search(text)}
    assert first == {word for words in BY_HAND.values() for word in words}


def test_the_tests_of_the_table_exist() -> None:
    for node in set(TYPED.values()):
        path, _, name = node.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert name.partition("[")[0] in {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}


SCENES: Final[dict[str, str]] = {
    "use lora-merge inspect BASE ADAPTER; or give two adapters, or two models": "compare BASE A",
    "choose what both have: --include …": "extract BASE HALF -o x.safetensors",
    "write it with --others diff, or drop it with --others skip": "extract BASE VECTORS --others error -o x.safetensors",
    "drop them with --others skip, or use --format kohya": "extract BASE VECTORS --format diffusers -o x.safetensors",
    "use --format kohya, lycoris or comfy": "extract BASE TUNED --algorithm lokr --format diffusers -o x.safetensors",
    "use --algorithm lora, or --format kohya": "extract BASE TUNED --algorithm full --format diffusers -o x.safetensors",
    "give --ema too": "average A A --ema-to 0.9 -o x.safetensors",
    "give --rank too, such as exact": "convert A --to comfy --max-rank 4 -o x.safetensors",
    "give --to, such as --to diffusers; or another --dtype, --rank, --algorithm or --alpha": "convert A",
    "write --dtype …, or --on-overflow saturate to cut such numbers to the largest": "BASE A:1e9 -o x.safetensors",
    "write --compute-dtype …, or lower the strength": "BASE A:1e300 -o x.safetensors",
    "name another: lora-merge batch --init OTHER.yaml": "batch --init JOBS.yaml",
    "correct it; lora-merge schema jobs prints what is allowed": "batch WRONG.yaml",
    "write -s …": "BASE A -s 80%",
    "if it is the output, write -o …; else …": "BASE A out/",
    "give the base model that it was trained on: --base MODEL": "convert STRANGE --to kohya -o x.safetensors",
    "merge it first: lora-merge BASE …": "extract BASE A",
    "name the base first, adapters after it; adapters alone: lora-merge combine A B": "A A",
}
"""Text of a fix → a command that is refused with it, for texts that no other test prints."""


@pytest.mark.few(6)
@pytest.mark.parametrize(("text", "words"), SCENES.items(), ids=SCENES.values())
def test_a_refused_command_runs_as_its_fix_says(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = dict(scene())
    if "HALF" in words:
        files["HALF"] = str(
            save({k: v for k, v in sd1().items() if not k.startswith(TE)}, tmp_path / "half.safetensors")
        )
    if "STRANGE" in words:
        pair = {"some.where.lora_A.weight": rand(2, 8), "some.where.lora_B.weight": rand(8, 2)}
        files["STRANGE"] = str(save(pair, tmp_path / "strange.safetensors"))
    (tmp_path / "wrong.yaml").write_text("version: 1\njobs:\n- {base: b, adapters: [a], output: o, unmatched: 5}\n")
    files["WRONG.yaml"] = "wrong.yaml"
    with taken_down() as failures:
        done = run(
            *(
                files.get(w.partition(":")[0], w.partition(":")[0]) + "".join(w.partition(":")[1:])
                for w in words.split()
            )
        )
    assert done.code, done.out
    expect_typed(failures, [text])


def test_packages_of_fixes_are_those_that_the_project_names(texts: set[str]) -> None:
    named = {name for text in texts for name in re.findall(r'pip install (?:-U )?"?([\w-]+)', text)}
    assert named == {"ray", "plotly", "matplotlib"}
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf'"{name}>=', known) for name in named)


def test_a_fix_that_does_not_help_is_seen(tmp_path: Path) -> None:
    argv = ("base.safetensors", "lora.safetensors")
    again = typed(Failure(argv, str(tmp_path), "file not found", "use --dtype bf16"))
    assert again is not None and again["--dtype bf16"].startswith("3: file not found")
    strange = typed(Failure(argv, str(tmp_path), "file not found", "write --dytpe bf16"))
    assert strange is not None and "there is no option --dytpe" in strange["--dytpe bf16"]
    assert typed(Failure(argv, str(tmp_path), "another error", "use --dtype bf16")) is None


@pytest.mark.parametrize(("fix", "what", "wanted"), [
    ("write --dtype bf16, or --on-overflow saturate to cut such numbers", "", ["base l --dtype bf16", "base l --on-overflow saturate"]),
    ("leave --rounding out, or write --dtype bf16", "", ["base l", "base l --dtype bf16"]),
    ("give one for each, in order: -s 0.8 -s 0.5; or write ADAPTER:0.8", "", ["base l -s 0.8 -s 0.5"]),
    ("did you mean --dtype? see lora-merge help merge", "there is no option --dtpye", ["help merge", "base l --dtype x"]),
    ("write `spellings: {a: b}` to names.yaml and add --map names.yaml; or leave it", "", ["base l --map names.yaml"]),
    ("leave it out: --exclude 're:^a\\.b$'", "", ["base l --exclude"]),
    ("hf download x/y --local-dir x/y; else check the path", "", []),
])  # fmt: skip
def test_what_is_typed_of_a_fix(fix: str, what: str, wanted: list[str]) -> None:
    argv = ("base", "l", *(("--dtpye", "x") if what else ()))
    assert [" ".join(one or ()) for _, one in ways(Failure(argv, ".", what, fix))] == wanted


def test_a_text_of_the_code_is_that_of_the_message() -> None:
    assert pattern("name it ….safetensors").fullmatch("name it a.b.safetensors")
    assert not pattern("name it ….safetensors").fullmatch("name it a.gguf")


def test_names_are_left_out_by_what_is_printed() -> None:
    keys = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in (3, 12)]
    option = leave_out(keys)
    assert option == "--exclude 're:^model\\.layers\\.(3|12)\\.mlp\\.experts\\.gate_up_proj$'"
    named = re.compile(option.split("'")[1].removeprefix("re:"))
    assert [bool(named.search(f"model.layers.{n}.mlp.experts.gate_up_proj")) for n in (3, 12, 4)] == [True, True, False]
    assert expression(keys[:1]) == r"model\.layers\.3\.mlp\.experts\.gate_up_proj"
    assert expression(keys[:1], alike=True) == r"model\.layers\.[0-9]+\.mlp\.experts\.gate_up_proj"
    assert expression(["a.1.b", "c"]) == r"(?:a\.1\.b|c)"
    assert expression(f"name_{one}" for one in "abcdefg") == ""
