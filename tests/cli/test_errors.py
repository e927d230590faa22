"""Errors as a beginner reads them: what, where, and one fix that can be typed; nothing of the wrong model is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.architectures import header
from tests.kit.files import save
from tests.kit.hollow import hollow
from tests.kit.models import TE, sd1
from tests.kit.tensors import Tensors, rand

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    lora = kohya(sd1())
    save(sd1(), folder / "base.safetensors")
    save(lora, folder / "lora.safetensors")
    save(kohya(sd1(), seed=3), folder / "ink.safetensors")
    save(_llm(), folder / "llm.safetensors")
    (folder / "loras").mkdir()
    for name in "ab":
        save(lora, folder / "loras" / f"{name}.safetensors")
    (folder / "text.safetensors").write_text("hello")
    (folder / "kit.yaml").write_text("models:\n- model: base.safetensors\nmerge_method: linear\n")
    (folder / "mixed.yaml").write_text(
        "version: 1\nbase: b.safetensors\nadapters: [lora.safetensors]\noutput: o.safetensors\n"
    )
    (folder / "strength.csv").write_text("base,adapters,strength,output\nbase.safetensors,lora.safetensors,1,o\n")
    (folder / "jobs.csv").write_text("base,adapter,output\nbase.safetensors,lora.safetensors,o.safetensors\n")
    (folder / "twice.yaml").write_text("version: 1\njobs:\n- base: base.safetensors\n  adapters: ['{l}']\n  output: o.safetensors\n"
                                       "  matrix: {l: [lora.safetensors, ink.safetensors]}\n")  # fmt: skip
    hollow(header("native/vae-sd"), folder / "vae.safetensors")
    save({f"model.0.sub.{n}.rdb1.weight": rand(4, 4) for n in range(3)}, folder / "upscaler.safetensors")
    (folder / "other").mkdir()
    save(sd1(), folder / "other" / "tuned.safetensors")
    save({name.removeprefix(TE): t for name, t in sd1().items() if name.startswith(TE)}
         | {"text_model.embeddings.token_embedding.weight": rand(77, 24)}, folder / "other" / "clip.safetensors")  # fmt: skip
    (folder / "oldest.ckpt").write_bytes(b"cposix\nsystem\np0\n(Vid\np1\ntp2\nRp3\n.")
    (folder / "words.ckpt").write_bytes(b"Not Found")
    (folder / "evil.ckpt").write_bytes(
        b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    )
    return folder


def _llm() -> Tensors:
    found = {
        "model.embed_tokens.weight": rand(32, 16),
        "model.norm.weight": torch.ones(16),
        "lm_head.weight": rand(32, 16),
    }
    for n in range(2):
        at = f"model.layers.{n}"
        found |= {f"{at}.self_attn.{name}_proj.weight": rand(16, 16) for name in "qkvo"}
        found |= {f"{at}.mlp.{name}_proj.weight": rand(32, 16) for name in ("gate", "up")}
        found |= {f"{at}.mlp.down_proj.weight": rand(16, 32)}
        found |= {f"{at}.{name}_layernorm.weight": torch.ones(16) for name in ("input", "post_attention")}
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, files: Path) -> Run:
    monkeypatch.chdir(files)

    def call(*arguments: object) -> tuple[int, str]:
        code, out, err = command_line.run(*arguments)
        return code, err + out

    return call


@pytest.mark.few(24)
@pytest.mark.parametrize(("words", "code", "what", "fix"), [
    ("llm.safetensors lora.safetensors", 4, "no module of the adapter is in the base (0 of 20): the adapter is for an image or video model", "use the base"),
    ("base.safetensors loraa.safetensors", 3, "file not found", "did you mean lora.safetensors"),
    ("stabilityai/sdxl-1.0 lora.safetensors", 2, "neither a file nor a folder", "hf download stabilityai/sdxl-1.0"),
    ("https://example.org/a.safetensors lora.safetensors", 2, "downloads are switched off", "-L -O -J"),
    ("lora.safetensors ink.safetensors", 3, "the base is itself an adapter", "lora-merge combine"),
    ("base.safetensors", 2, "no adapter is named", "write lora-merge base.safetensors ink.safetensors:0.8"),
    ("merge", 2, "no base and no adapter is named", "lora-merge base.safetensors ink.safetensors:0.8"),
    ("verify", 2, "missing argument", "write lora-merge verify MERGED\n"),
    ("base.safetensors lora.safetensors --dtpye bf16", 2, "there is no option --dtpye", "did you mean --dtype? see lora-merge help merge"),
    ("base.safetensors lora.safetensors --wieght 3", 2, "there is no option --wieght", "write lora-merge base.safetensors lora.safetensors:3"),
    ("base.safetensors lora.safetensors -z", 2, "there is no option -z", "leave it out: not known here; write lora-merge base.safetensors lora.safetensors"),
    ("extract --base base.safetensors --lora lora.safetensors", 2, "there is no option --base nor --lora", "lora-merge extract base.safetensors TUNED"),
    ("unmerge base.safetensors --base base.safetensors", 2, "there is no option --base", "lora-merge unmerge MERGED ADAPTER[:STRENGTH]..."),
    ("inspect base.safetensors --weight", 2, "there is no option --weight", "did you mean --weights?"),
    ("base.safetensors lora.safetensors --strength", 2, "requires an argument", "write its value after it"),
    ("base.safetensors lora.safetensors --html", 2, "requires an argument", "write lora-merge base.safetensors lora.safetensors --html report.html\n"),
    ("average 0.25 lora ink", 2, "a weight is not a snapshot", "write lora-merge average --weights=0.25,0.75 lora ink\n"),
    ("average lora ink --weights a,b", 2, "'a,b' are no weights", "write lora-merge average lora ink --weights 0.5,0.5\n"),
    ("convert lora --to comfy --dtype int4", 2, "adapters are not quantised", "write lora-merge convert lora --to comfy --dtype bf16 --base base.safetensors\n"),
    ("resize lora --rank half", 2, "not a rule for ranks", "write lora-merge resize lora --rank 16\n"),
    ("base lora --max-memory half", 2, "'half' is not a size", "write lora-merge base lora --max-memory 4GB\n"),
    ("base lora --strength-for te=off", 2, "does not give a part and its factor", "write te=0"),
    ("compare lora", 2, "missing argument 'B'", "write lora-merge compare lora ink.safetensors\n"),
    ("combine lora.safetensors ink.safetensors --rank", 2, "requires an argument", "see lora-merge help combine"),
    ("extract base.safetensors lora.safetensors", 3, "extract takes two checkpoints, and this is an adapter", "merge it first: lora-merge base.safetensors lora.safetensors"),
    ("extract lora.safetensors base.safetensors -o x", 3, "extract takes two checkpoints", "merge it first"),
    ("base.safetensors lora.safetensors --max-memory 1KiB", 5, "the memory limit is too low", "write lora-merge base.safetensors lora.safetensors --max-memory 8MiB"),
    ("batch base.safetensors", 2, "this is a model, not a jobs file", "lora-merge base.safetensors ink.safetensors:0.8"),
    ("parts lora.safetensors", 2, "an adapter, and parts are those of a base", "lora-merge inspect lora.safetensors"),
    ("resize base.safetensors --rank 2", 3, "it is a model: Stable Diffusion 1", "name a LoRA or another adapter\n"),
    ("base.safetensors lora.safetensors --strength-for foo=1", 2, "the base has no such part or block", "this base has te, unet, vae, and the blocks BASE"),
    ("base.safetensors lora.safetensors --strength-for unte=1", 2, "the base has no such part or block", "did you mean unet?"),
    ("base.safetensors lora.safetensors --strength-for b/c=1", 2, "no part is called 'b/c'", "lora-merge parts base.safetensors lists"),
    ("extract base.safetensors", 2, "missing argument 'TUNED'", "write lora-merge extract base.safetensors TUNED"),
    ("resize lora.safetensors", 2, "missing option '--rank'", "write lora-merge resize lora.safetensors --rank 16"),
    ("resize base.safetensors", 3, "it is a model: Stable Diffusion 1", "name a LoRA or another adapter\n"),
    ("base.safetensors lora.safetensors -o -", 2, "the output is a file, not a stream", "-o merged.safetensors"),
    ("extract base.safetensors vae.safetensors -o x", 4, "different models: Stable Diffusion 1 and a VAE", "give the base that it was tuned from"),
    ("upscaler.safetensors lora.safetensors", 4, "the base is an upscaler (ESRGAN)", "use the base"),
    ("base.safetensors zzz.safetensors", 3, "file not found", "its folder has ink.safetensors, lora.safetensors"),
    ("base.safetensors none/here/lora.safetensors", 3, "file not found", "check the path: there is no folder none in "),
    ("base.safetensors none/*.safetensors", 2, "no file matches none/*.safetensors", "check the folder: there is no none here"),
    ("base.safetensors lora.safetensors:high", 2, "neither a strength nor a part", "write lora.safetensors:0.8"),
    ("combine lora.safetensors ink.safetensors --method ties -o x", 4, "--method ties", "write lora-merge combine lora.safetensors ink.safetensors --method ties -o x --rank 32"),
    ("comfyui instal", 2, "there is no command 'instal'", "did you mean install? write lora-merge comfyui install\n"),
    ("verify base.safetensors lora.safetensors", 2, "1 word too many: lora.safetensors", "lora-merge inspect base.safetensors lora.safetensors"),
    ("resize lora.safetensors ink.safetensors --rank 2", 2, "1 word too many: ink.safetensors", "lora-merge resize lora.safetensors --rank 2"),
    ("combine base.safetensors lora.safetensors:0.5", 3, "it is a model", "to merge one into this model: lora-merge base.safetensors lora.safetensors:0.5\n"),
    *((f"{words} kit.yaml", 2, "a mergekit configuration: mergekit merges checkpoints with each other", "run mergekit-yaml; or")
      for words in ("batch", "", "inspect", "plan", "base.safetensors")),
    ("convert lora.safetensors q --to peft", 2, "q", "lora-merge convert lora.safetensors -o q --to peft"),
    ("extract base.safetensors other/tuned 16", 2, "1 word too many: 16", "write lora-merge extract base.safetensors other/tuned --rank 16"),
    ("convert lora.safetensors peft", 2, "a format has an option", "write lora-merge convert lora.safetensors --to peft"),
    ("convert lora.safetensors Comfy", 2, "a format has an option", "write lora-merge convert lora.safetensors --to comfy --base base.safetensors\n"),
    ("convert kohya lora.safetensors", 2, "a format has an option", "write lora-merge convert lora.safetensors --to kohya --base base.safetensors\n"),
    ("base.safetensors base", 2, "the base is named twice", "write lora-merge base.safetensors ink.safetensors:0.8\n"),
    ("base base lora:0.5", 2, "the base is named twice", "leave the second one out: lora-merge base lora:0.5\n"),
    ("batch base lora", 2, "this is a model, not a jobs file", "one merge needs no file: lora-merge base lora\n"),
    ("lora -s 0.8 ink -s 0.5", 3, "the base is itself an adapter", "lora-merge combine lora ink -s 0.8 -s 0.5 -o both.safetensors\n"),
    ("inspect lora.safetensors -o x", 2, "there is no option -o", "write lora-merge inspect lora.safetensors\n"),
    ("batch jobs.yml", 3, "file not found", "did you mean jobs.csv? write lora-merge batch jobs.csv\n"),
    ("batch mixd.yaml", 3, "file not found", "did you mean mixed.yaml? write lora-merge batch mixed.yaml\n"),
    ("demo --html x.html", 2, "there is no option --html", "write lora-merge demo\n"),
    ("unmerge lora.safetensors base.safetensors", 3, "an adapter, not a merged checkpoint", "write lora-merge unmerge base.safetensors lora.safetensors -o base-unmerged.safetensors\n"),
    ("unmerge other/tuned base.safetensors", 3, "it is a model: Stable Diffusion 1", "as an adapter: lora-merge extract base.safetensors other/tuned\n"),
    ("batch mixed.yaml", 2, "mistakes in the jobs file", "belong below jobs"),
    ("base.safetensors llm.safetensors", 3, "it is a model: transformers language model", "name a LoRA or another adapter\n"),
    ("batch strength.csv", 2, "no field is called 'strength'", "write it after the adapter: lora.safetensors:1\n"),
    ("batch jobs.csv", 2, "jobs.csv:2 (jobs[0].adapter): no field is called 'adapter'", "did you mean adapters?"),
    ("batch twice.yaml", 2, "1 output collides with the output of another job", "output: out/{l.stem}.safetensors"),
    ("batch", 2, "no jobs file was given", "--init writes a first one"),
    ("base.safetensors vae.safetensors", 3, "contains no adapter tensors, it is a VAE (AutoencoderKL)", "load it at generation time: a merge does not replace the VAE of a checkpoint\n"),
    ("evil.ckpt lora.safetensors", 3, "wants to run code", ".safetensors version"),
    ("base.safetensors evil.ckpt", 3, "it names posix.system", ".safetensors version"),
    ("base.safetensors oldest.ckpt", 3, "it names posix.system", ".safetensors version"),
    ("base.safetensors words.ckpt", 3, "not a valid .ckpt file", "download"),
    ("base.safetensors text.safetensors", 3, "it is text, 'hello'", "download"),
    ("base.safetensors loras", 3, "several checkpoints", "or, if all are adapters, write "),
    ("base.safetensors lora.safetensors -o out.ckpt", 2, "never pickles", "write lora-merge base.safetensors lora.safetensors -o out.safetensors"),
    ("--model base.safetensors --loras lora.safetensors --ratios 0.8 --save_to o", 2, "--model nor --loras nor --ratios", "lora-merge base.safetensors lora.safetensors:0.8 -o o"),
    ("--model base.safetensors --loras lora.safetensors loras/a.safetensors --ratios 0.8 --save_to o", 2, "--model nor --loras nor --ratios",
     "such as lora-merge base.safetensors lora.safetensors:0.8 loras/a.safetensors:0.8 -o o"),
])  # fmt: skip
def test_errors_name_the_mistake_and_the_fix(run: Run, words: str, code: int, what: str, fix: str) -> None:
    found, text = run(*words.split())
    assert found == code
    head, _, rest = text.partition("  where:")
    _, _, advice = rest.partition("  fix:")
    assert head.startswith("error: ")
    assert what in head + rest
    assert fix in advice
    assert len(rest.partition("  fix:")[0]) < 400, "what to do is not below a page of names"


@pytest.mark.parametrize(("name", "what", "fix"), [
    ("vae", "a VAE (AutoencoderKL)", "load it at generation time: a merge does not replace the VAE of a checkpoint"),
    ("other/clip", "a CLIP text encoder", "load it at generation time: a merge does not replace the text encoder of a checkpoint"),
    ("upscaler", "an upscaler (ESRGAN)", "load it at generation time: this file contains no weight changes, so there is nothing to merge"),
    ("llm", "a model: transformers language model", "name a LoRA or another adapter"),
    ("other/tuned", "a model: Stable Diffusion 1", "name a LoRA or another adapter; to write the difference of two models as an "
     "adapter: lora-merge extract base.safetensors other/tuned.safetensors"),
])  # fmt: skip
def test_extract_is_proposed_for_models_that_fit_alone(run: Run, name: str, what: str, fix: str) -> None:
    text = run("base.safetensors", f"{name}.safetensors")[1]
    assert f"no adapter tensors, it is {what}\n" in text and text.endswith(f"fix:   {fix}\n")


def test_program_alone_shows_its_help(run: Run) -> None:
    code, text = run()
    assert code == 2
    assert text.startswith("Usage: lora-merge")
    assert "\nMerge:\n  merge " in text


def test_unrelated_names_are_not_suggested(run: Run) -> None:
    Path("loraa.txt").write_text("words")
    text = run("base.safetensors", "loraa.safetensors")[1]
    assert (
        "llm" not in text
        and ".txt" not in text
        and "base.safetensors" not in text.partition("did you mean")[2].partition("?")[0]
    )


def test_arguments_that_cannot_be_taken_are_json_too(run: Run) -> None:
    code, text = run("base.safetensors", "--json")
    assert code == 2
    assert json.loads(text.splitlines()[-1])["error"]["what"] == "no adapter is named, and the model contains none"


def test_part_that_is_named_twice_is_multiplied_and_one_without_effect_is_refused(run: Run) -> None:
    parts = ("--strength-for", "te=0.5", "--strength-for", "te=0.5")
    code, out = run("base.safetensors", "lora.safetensors", *parts, "--dry-run")
    assert code == 0
    assert "note: lora.safetensors: te is named 2 times: its factors are multiplied" in out
    code, out = run("base.safetensors", "lora.safetensors", *parts, "--strength-for", "vae=0", "--dry-run")
    assert code == 2
    assert "without effect: no adapter changes weights there" in out and "--strength-for vae" in out


def test_adapter_at_strength_0_changes_nothing(run: Run) -> None:
    text = run("base.safetensors", "lora.safetensors:0", "--dry-run")[1]
    assert "20 of 20 modules matched" in text and "formula  none: it changes nothing" in text


@pytest.mark.parametrize("text", ["lora.safetensors:0.8,te=0", "lora.safetensors:0.8:te=0", "lora.safetensors:te=0"])
def test_parts_of_one_adapter_stand_behind_its_path(run: Run, text: str) -> None:
    code, out = run("base.safetensors", text, "--dry-run")
    assert code == 0
    assert "te 0: 5 left out" in out


def test_change_below_the_precision_of_the_output_is_a_warning(run: Run) -> None:
    code, text = run("base.safetensors", "lora.safetensors:0.00001", "-o", "small.safetensors", "--dtype", "bf16")
    assert code == 0
    assert "warning: " in text and "rounding" in text and "--dtype fp32" in text
    assert "survives nothing (lost in rounding): 1e-05 × lora.safetensors" in text


def test_device_that_is_not_here_says_why(run: Run) -> None:
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has CUDA")
    text = run("base.safetensors", "lora.safetensors", "--device", "gpu")[1]
    assert "where: --device cuda, or gpu: this torch" in text and "a build without CUDA" in text
    assert "matched" not in text
    assert "without CUDA" not in run("base.safetensors", "lora.safetensors", "-o", "a.safetensors")[1]
