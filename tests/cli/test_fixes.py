"""Every fix of a message is typed after a test, or listed with the reason why it is not."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
import yaml

import lora_merge
from lora_merge import errors
from lora_merge.batch.schema import JobEntry
from lora_merge.cli.foreign_names import MEANINGS
from lora_merge.models.part_factors import or_leave_out
from lora_merge.option_texts import in_jobs_file, in_python
from lora_merge.text import CODE, Message, expression
from tests.kit import gguf_files
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.fixes import BY_HAND, TYPED, UNTYPED
from tests.kit.flux import flux, of_flux
from tests.kit.models import TE, sd1
from tests.kit.option_names import FOREIGN_OPTIONS
from tests.kit.package import nodes
from tests.kit.pairs import WHOLE, spread
from tests.kit.readme import ROOT
from tests.kit.tensors import Tensors, rand
from tests.kit.typed_fixes import (
    CHOSEN,
    OPTION,
    OTHERS,
    OURS,
    Failure,
    commands,
    expect_typed,
    pattern,
    scene,
    taken_down,
    typed,
    ways,
)

ADVICES: Final = {meaning.advice for _, meaning in MEANINGS}


@pytest.fixture(scope="module")
def texts(hooks: ModuleType) -> set[str]:
    """What the code can print as a fix, as it is written; not what it passes on from another message."""
    kinds = frozenset(n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
    calls = [found for path in sorted((ROOT / "lora_merge").rglob("*.py")) for found in hooks.made(path, kinds)]
    found = {text for _, call, known in calls if len(call.args) == 3 for text in hooks.texts(call.args[2], known)}
    assert len(found) > 350
    return {text for text in found if text.strip("… ;")}


def test_fixes_with_an_option_or_a_command_have_a_row(texts: set[str]) -> None:
    ours = {str(Message(text)) for text in texts if OURS.search(text)}
    listed = [*TYPED, *SCENES, *(text for rows in UNTYPED.values() for text in rows)]
    ours -= {f"{text}; …" for text in ADVICES}  # see the test of these
    assert len(listed) == len({*listed})
    assert ours == {*listed}


def test_fixes_in_the_words_of_a_jobs_file_are_fields_that_a_job_takes(texts: set[str]) -> None:
    """What is left of options belongs to commands that no jobs file has, and to those of other programs."""
    field = re.compile(rf"(?<![\w-])({'|'.join(JobEntry.model_fields)}): (\{{[^}}]*\}}|\[[^]]*\]|'[^']*'|[^\s,;]+)")
    known, left = commands()["batch"].params, set[str]()
    for text in texts - {f"{text}; …" for text in ADVICES}:
        text = re.sub(r"(--[a-z-]+) …\w*", lambda found: f"{found[1]} {CHOSEN.get(found[1], 'x')}", text)
        said = in_jobs_file(re.sub(r"`lora-merge [^`]*`", "", text.replace("`…", "`")))
        left |= {*re.findall(r"(?<![\w-])(?:--[a-z-]+|-[os](?![\w-]))", said)} - {o for p in known for o in p.opts}
        for name, value in field.findall(said) if said != text else ():
            words = {name: yaml.safe_load(CHOSEN.get(value, value.replace("…", "x")))}
            JobEntry.model_validate({"base": "b", "adapters": ["a"], "output": "o", **words})
    assert left == {"--head", "--search", "-s"}


def test_fixes_and_remarks_in_python_have_keywords_and_calls(hooks: ModuleType, texts: set[str]) -> None:
    """What is left belongs to the command line alone, and to other programs."""
    left, names = set[str](), "|".join(commands())
    for text in (texts | hooks.notes()) - {f"{text}; …" for text in ADVICES}:
        left |= {*re.findall(rf"(?<![\w-])(?:--[a-z-]+|-[os](?![\w-])|lora-merge (?:{names}))", in_python(text))}
    assert left == {"--head", "-s", "lora-merge doctor"}  # of the command line alone, and of other programs


def test_options_with_values_are_written_as_code(hooks: ModuleType, texts: set[str]) -> None:
    """In backticks, by which the command line, jobs files and Python find them."""
    plain = {CODE.sub("", text) for text in texts - {f"{text}; …" for text in ADVICES}}
    left = {match[0] for text in plain for match in OPTION.finditer(OTHERS.sub("", text)) if match["value"]}
    assert left == set()


def test_remarks_have_no_code(hooks: ModuleType) -> None:
    """They are printed as they are written."""
    assert not [text for text in hooks.notes() if CODE.search(text)]


def test_fixes_by_hand_begin_with_a_word_that_has_a_reason(texts: set[str]) -> None:
    first = {re.split(r"[\s,;:]", text.lstrip("… ;"))[0] for text in texts if not OURS.search(text)}
    assert first == {word for words in BY_HAND.values() for word in words}


def test_tests_of_the_table_exist() -> None:
    for node in set(TYPED.values()):
        path, _, name = node.partition("::")
        assert name.partition("[")[0] in {n.name for n in nodes(ROOT / path) if isinstance(n, ast.FunctionDef)}


SCENES: Final[dict[str, str]] = {
    "use lora-merge inspect …; or give two adapters, or two models": "compare BASE A",
    "choose what both have: --include …": "extract BASE HALF -o x.safetensors",
    "write it with --others diff, or drop it with --others skip": "extract BASE VECTORS --others error -o x.safetensors",
    "drop them with --others skip, or use --format kohya": "extract BASE VECTORS --format diffusers -o x.safetensors",
    "use --format kohya, lycoris or comfy": "extract BASE TUNED --algorithm lokr --format diffusers -o x.safetensors",
    "use --algorithm lora, or --format kohya": "extract BASE TUNED --algorithm full --format diffusers -o x.safetensors",
    "give --ema too": "average A A --ema-to 0.9 -o x.safetensors",
    "write lora-merge convert … --to …": "convert A -o comfy",
    "give --rank too, such as exact": "convert A --to comfy --max-rank 4 -o x.safetensors",
    "give --to diffusers; or another --dtype, --rank, --algorithm or --alpha": "convert A",
    "write --dtype …, or --on-overflow saturate to cut such values to the largest": "BASE A:1e9 -o x.safetensors",
    "write --compute-dtype …, or lower the strength": "BASE A:1e300 -o x.safetensors",
    "name another: lora-merge batch --init OTHER.yaml": "batch --init JOBS.yaml",
    "correct it; lora-merge schema jobs lists the fields": "batch WRONG.yaml",
    "write -s …": "BASE A -s 80%",
    "write --weights …": "average A A --weights 0.7 -o x.safetensors",
    "write --t 0.5; 0 is the first adapter, 1 the second": "combine A B --method slerp --rank 4 -o x.safetensors",
    "if it is the output, write -o …; else …": "BASE A out/",
    "merge it first: lora-merge BASE …": "extract BASE A",
    "name the base first, adapters after it; adapters alone: lora-merge combine A B": "A A",
    "average changes: --space delta": "average PEFT PEFT --ema 0.9 --space factors -o x.safetensors",
    "choose another -o, or move them away": "FOLDER A -o FULL --overwrite",
    "choose another -o": "BASE A -o wrong.yaml/x.safetensors",
    "convert to another dialect, or leave that out: --exclude …": "convert OF_FLUX --to xlabs --base FLUX -o x.safetensors",
    "use kohya or comfy, or leave that out: --exclude …": "convert WORDS --to diffusers --base WORDED -o x.safetensors",
    "give a base that stores both (tie_word_embeddings: false), or leave that out: --exclude …": "combine HEADS --base TIED --format peft -o out",
    "give the base that it was tuned from, or leave that out: --exclude …": "extract BASE LACKING -o x.safetensors",
    "use another checkpoint of the training, or leave that out: --exclude …": "extract BASE BROKEN -o x.safetensors",
    "name a LoRA or another adapter; to merge one into this model: lora-merge … ADAPTER; to write the difference of two models as an adapter: lora-merge extract BASE TUNED": "combine BASE A -o x.safetensors",
    "name a folder with -o": "FOLDER A -o wrong.yaml",
    "see lora-merge help …": "extract BASE --strange x",
    "state what the training used: --setting lora_alpha=…, which is divided by the rank of each module, if it multiplies the change, or … if it does not": "SMALL SCALED -o x.safetensors",
    "write --dtype fp32 or --dtype bf16": "combine A:1e9 --base BASE --dtype fp16 --algorithm full -o x.safetensors",
    "…; or leave out what does not fit: --strength-for …": "BASE WIDE -o x.safetensors",
    "store whole matrices: --algorithm full": "combine STACK --base STACKED --rank 2 -o x.safetensors",
    "correct the layouts in the map, or leave --map out": "BASE A --map names.yaml -o x.safetensors",
    "correct it, or state what the training used: --setting lora_alpha=…, which is divided by the rank of each module": "SMALL UNREADABLE -o x.safetensors",
    "state what the training used: --setting lora_alpha=…, which is divided by the rank of each module": "SMALL STATED -o x.safetensors",
    "write --rank 32 or --rank energy:0.99, or store whole matrices: --algorithm full": "combine A B --method ties -o x.safetensors",
    "merge again with --compute-dtype fp64": "verify MADE --base small.safetensors --adapter lora.safetensors:0.1 --adapter lora.safetensors:1e7 "
    "--adapter lora.safetensors:-1e7 --full",
    "merge again, or name its folder with --search": "verify RETRAINED",
    "merge again, or take it from lora-merge replay … -o OTHER": "verify ELSEWHERE",
    "merge into its original .safetensors checkpoint, convert the adapter by llama.cpp's convert_lora_to_gguf.py, or give the names by --map": "STRANGE.gguf PEFT -o x.gguf",
    "name its folder with --search": "verify MOVED",
    "name a file in it: -o FOLDER/NAME.safetensors": "BASE A -o TWICE",
    "store whole matrices: --algorithm full, or give --algorithm lora --rank 32": "convert OFT:0.5 --dtype bf16 --base BASE -o x.safetensors",
    "write --dtype keep": "GGUFS PLAIN -o x --dtype bf16",
    "write --dtype keep, give the file in it, or add its config.json": "FOLDER A --dtype nf4 -o x",
    "write --setting musubi_t=true, with --sigma-rel": "average A A --setting musubi_t=true -o x.safetensors",
    "write -o …": "GGUFS PLAIN -o x.gguf",
    "write an ordinary checkpoint: --dtype bf16 -o …": "FLUX.gguf BIAS -o x.gguf",
    "store whole matrices: --algorithm full, or leave that out: --exclude …": "extract STACKED OTHER_STACKED -o x.safetensors",
    "name the output's dialect, such as --format kohya": "combine FUSED FUSED --base APART -o x.safetensors",
    "name another dialect with --to": "convert PEFT_OFT --alpha rank -o x",
}
"""Text of a fix → a command that is refused with it, for texts that no other test prints."""


def folder_of(tensors: Tensors, path: Path, name: str = "model.safetensors", **config: Any) -> Path:
    """A folder of one file, and of a configuration if there is one."""
    path.mkdir()
    save(tensors, path / name)
    if config:
        (path / ("adapter_config.json" if "r" in config else "config.json")).write_text(json.dumps(config))
    return path


def merged(folder: Path, **options: Any) -> Path:
    """A merged file, of which the adapter is in another folder now."""
    base, lora = save(sd1(), folder / "base.safetensors"), save(kohya(sd1()), folder / "style.safetensors")
    lora_merge.merge(base, lora, folder / "out.safetensors", **options)
    lora.rename(folder.with_name("former") / lora.name)
    return folder / "out.safetensors"


def retrained(folder: Path) -> Path:
    """A merged file, of which another version of the adapter has its name."""
    out = merged(folder)
    save(kohya(sd1(), seed=3), folder / "style.safetensors")
    return out


def elsewhere(folder: Path) -> Path:
    """A merged folder with a configuration of another dtype than its weights."""
    base = folder_of({"a.weight": rand(8, 8)}, folder / "base", dtype="float32")
    out = lora_merge.merge(base, save(SMALL_LORA, folder / "lora.safetensors"), folder / "out", dtype="bf16").output
    (Path(out) / "config.json").write_text('{"dtype": "float32"}')
    return Path(out)


def made(folder: Path) -> Path:
    """A merged file of another program, without a recipe and with coarse numbers."""
    weight = save({"a.weight": rand(64, 64)}, folder / "small.safetensors")
    lora = {"a.lora_A.weight": rand(4, 64, seed=2), "a.lora_B.weight": rand(64, 4, seed=1)}
    save(lora, folder / "lora.safetensors")
    delta = lora["a.lora_B.weight"] @ lora["a.lora_A.weight"]
    return save(
        {"a.weight": load(weight)["a.weight"] + 0.1 * delta + rand(64, 64, seed=3, scale=1e-3)},
        folder / "out.safetensors",
    )


def gguf(path: Path, kind: str, names: Sequence[str]) -> Path:
    """A GGUF file of small matrices."""
    path.parent.mkdir(exist_ok=True)
    return gguf_files.write(path, kind, {f"{name}.weight": (rand(32, 32).numpy(), "F16") for name in names})


SMALL_LORA: Final = {"a.lora_A.weight": rand(2, 8), "a.lora_B.weight": rand(8, 2)}
EXPERTS: Final = "model.layers.0.mlp.experts.gate_up_proj"
LAYER: Final = "model.layers.0.self_attn.q_proj"
Q_PROJ: Final = "base_model.model.layers.0.self_attn.q_proj"
LINEAR: Final = "single_blocks.0.linear2"
PLAIN: Final = {f"{LINEAR}.lora_A.weight": rand(2, 32), f"{LINEAR}.lora_B.weight": rand(32, 2)}
OF_FLUX: Final = (LINEAR, "img_in", "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj")
PEFT: Final = {f"{Q_PROJ}.lora_A.weight": rand(2, 32), f"{Q_PROJ}.lora_B.weight": rand(32, 2)}
MAP: Final = "title: A model\nlayouts:\n  native: [trunk.0.qkv.weight]\nnative:\n  trunk.{i}.qkv: trunk.{i}.qkv\n"
MADE: Final[dict[str, Callable[[Path], Path]]] = {
    "HALF": lambda at: save({k: v for k, v in sd1().items() if not k.startswith(TE)}, at / "half.safetensors"),
    "PEFT": lambda at: folder_of(PEFT, at / "peft", "adapter_model.safetensors", peft_type="LORA", r=2, lora_alpha=2,
                                 target_modules=["q_proj"]),
    "FOLDER": lambda at: folder_of(sd1(), at / "folder"),
    "FULL": lambda at: folder_of(sd1(), at / "full", "other.safetensors"),
    "FLUX": lambda at: save(flux(), at / "flux.safetensors"),
    "SMALL": lambda at: save({"a.weight": rand(8, 8)}, at / "small.safetensors"),
    "STATED": lambda at: save(SMALL_LORA, at / "lora.safetensors", {"alpha": "nan"}),
    "UNREADABLE": lambda at: folder_of(SMALL_LORA, at / "side", "lora.safetensors") / "lora.safetensors",
    "MADE": made,
    "MOVED": merged,
    "RETRAINED": retrained,
    "ELSEWHERE": elsewhere,
    "STRANGE.gguf": lambda at: gguf(at / "strange.gguf", "strange", ["blk.0.attn_q"]),
    "FLUX.gguf": lambda at: gguf(at / "flux.gguf", "flux", OF_FLUX),
    "GGUFS": lambda at: gguf(at / "ggufs" / "flux.gguf", "flux", OF_FLUX).parent,
    "PLAIN": lambda at: save(PLAIN, at / "plain.safetensors"),
    "BIAS": lambda at: save(PLAIN | {f"{LINEAR}.diff_b": rand(32)}, at / "bias.safetensors"),
    "TWICE": lambda at: folder_of({}, at / "base+lora.safetensors").parent,
    "LACKING": lambda at: save({k: v for k, v in sd1().items() if "to_q" not in k}, at / "lacking.safetensors"),
    "BROKEN": lambda at: save({k: v * (float("nan") if "2.1.transformer_blocks.0.attn1.to_q" in k else 1) for k, v in sd1().items()},
                              at / "broken.safetensors"),
    "SCALED": lambda at: save(SMALL_LORA, at / "lora.safetensors", {"lora_scale": "2.0"}),
    "WIDE": lambda at: save({k: torch.cat([v, v]) if "attn1_to_q.lora_up" in k else v for k, v in kohya(sd1()).items()},
                            at / "wide.safetensors"),
    "OF_FLUX": lambda at: save(
        {k: v for k, v in of_flux().items() if "img_in" in k or "img_attn_qkv" in k}, at / "of_flux.safetensors"
    ),
    "WORDED": lambda at: save(sd1() | {f"{TE}text_model.embeddings.token_embedding.weight": rand(77, 24)}, at / "w.safetensors"),
    "WORDS": lambda at: save({f"lora_te_text_model_embeddings_token_embedding.lora_{n}.weight": rand(*shape)
                              for n, shape in (("up", (77, 2)), ("down", (2, 24)))}, at / "words.safetensors"),
    "TIED": lambda at: folder_of(
        {"model.embed_tokens.weight": rand(32, 16), "model.norm.weight": rand(16), f"{LAYER}.weight": rand(16, 16)},
        at / "tied", model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=True, vocab_size=32,
    ),
    "HEADS": lambda at: folder_of(
        {f"base_model.model.{name}.lora_{n}.weight": rand(*shape) for name, rows in (("lm_head", 32), (LAYER, 16))
         for n, shape in (("A", (2, 16)), ("B", (rows, 2)))},
        at / "heads", "adapter_model.safetensors", peft_type="LORA", r=2, lora_alpha=2,
        target_modules=["lm_head", "q_proj"],
    ),
    "STACKED": lambda at: save({f"{EXPERTS}.weight": rand(3, 16, 8), f"{LAYER}.weight": rand(16, 16, seed=1)}, at / "stacked.safetensors"),
    "OTHER_STACKED": lambda at: save({f"{EXPERTS}.weight": rand(3, 16, 8, seed=5), f"{LAYER}.weight": rand(16, 16)}, at / "other_stacked.safetensors"),
    "APART": lambda at: save({f"trunk.0.attn.{n}_proj.weight": rand(16, 16) for n in "qkvo"}, at / "apart.safetensors"),
    "FUSED": lambda at: save({f"trunk.0.attn.qkv_proj.lora_{n}.weight": rand(*shape) for n, shape in (("A", (2, 16)), ("B", (48, 2)))},
                             at / "fused.safetensors"),
    "PEFT_OFT": lambda at: folder_of({f"{Q_PROJ}.oft_R.weight": rand(4, 6)}, at / "peft_oft", "adapter_model.safetensors",
                                     peft_type="OFT", oft_block_size=4, r=0, target_modules=["q_proj"]),
    "STACK": lambda at: save({f"{EXPERTS}.diff": rand(3, 16, 8)}, at / "stack.safetensors"),
    "OFT": lambda at: save({"lora_te_text_model_encoder_layers_0_self_attn_q_proj.oft_blocks": rand(4, 6, 6)},
                           at / "oft.safetensors"),
}  # fmt: skip
"""Placeholder of a command → what makes the file, or the folder, in a folder of the test."""


@pytest.mark.few(8)
@pytest.mark.parametrize(("text", "words"), SCENES.items(), ids=SCENES.values())
def test_refused_command_runs_as_its_fix_says(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path, former = tmp_path / "here", tmp_path / "former"
    tmp_path.mkdir(), former.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("version: 1\njobs:\n- {base: b, adapters: [a], output: o, unmatched: 5}\n")
    (tmp_path / "names.yaml").write_text(MAP)
    files = {**scene(), "WRONG.yaml": "wrong.yaml"}
    names = [word.partition(":") for word in words.split()]
    files |= {name: str(MADE[name](tmp_path)) for name in dict.fromkeys(name for name, *_ in names) if name in MADE}
    if "UNREADABLE" in words:
        (tmp_path / "side" / "config.json").write_text('{"lora_alpha": ')
    with taken_down() as failures:
        done = run(*(files.get(name, name) + "".join(more) for name, *more in names))
    assert done.code, done.out
    expect_typed(failures, [text])


@pytest.mark.few(3)
@pytest.mark.parametrize("text", sorted({text for text in ADVICES if OURS.search(text)}))
def test_option_of_another_program_is_answered_with_what_works(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = "bf16" if "--dtype" in text else "0.5"
    names = [name for name, meaning in FOREIGN_OPTIONS.items() if meaning and meaning.advice == text]
    for name in names if WHOLE else [names[n] for n in sorted(spread(len(names), 4))]:
        with taken_down() as failures:
            assert run("combine", scene()["A"], scene()["B"], "-o", "x.safetensors", f"{name}x", value).code
            assert run(scene()["BASE"], scene()["A"], "-o", "x.safetensors", name).code
        for outcome in filter(None, map(typed, failures)):
            ours = {words: code for words, code in outcome.items() if not words.startswith(name)}
            assert not any(ours.values()), ours


def test_packages_of_fixes_are_those_that_the_project_names(texts: set[str]) -> None:
    named = {name for text in texts for name in re.findall(r'pip install (?:-U )?"?([\w-]+)', text)}
    assert named == {"ray", "plotly", "matplotlib", "huggingface_hub", "obstore", "starlette", "fsspec"}
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf'"{name}>=', known) for name in named)


def test_fix_that_does_not_help_is_detected(tmp_path: Path) -> None:
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
def test_command_of_a_fix_is_typed(fix: str, what: str, wanted: list[str]) -> None:
    argv = ("base", "l", *(("--dtpye", "x") if what else ()))
    assert [" ".join(one or ()) for _, one in ways(Failure(argv, ".", what, fix))] == wanted


def test_text_of_the_code_is_that_of_the_message() -> None:
    assert pattern("name it ….safetensors").fullmatch("name it a.b.safetensors")
    assert not pattern("name it ….safetensors").fullmatch("name it a.gguf")


def test_names_are_left_out_by_what_is_printed() -> None:
    keys = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in (3, 12)]
    option = Message(or_leave_out("", keys)).removeprefix(", or leave that out: ")
    assert option == "--exclude 're:^model\\.layers\\.(3|12)\\.mlp\\.experts\\.gate_up_proj$'"
    named = re.compile(option.split("'")[1].removeprefix("re:"))
    assert [bool(named.search(f"model.layers.{n}.mlp.experts.gate_up_proj")) for n in (3, 12, 4)] == [True, True, False]
    assert expression(keys[:1]) == r"model\.layers\.3\.mlp\.experts\.gate_up_proj"
    assert expression(keys[:1], alike=True) == r"model\.layers\.[0-9]+\.mlp\.experts\.gate_up_proj"
    assert expression(["a.1.b", "c"]) == r"(?:a\.1\.b|c)"
    assert expression(f"name_{one}" for one in "abcdefg") == ""


def test_both_of_two_values_are_quoted_in_python() -> None:
    text = "write `--dtype bf16` or `--dtype fp32`, or round with `--rounding stochastic`"
    assert in_python(text) == 'write dtype="bf16" or dtype="fp32", or round with rounding="stochastic"'
    assert in_jobs_file(text) == "write dtype: bf16 or dtype: fp32, or round with rounding: stochastic"
