"""Every file of an input folder is read, copied, or left out for a reason; nothing with tensors is left out in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_merge
from lora_merge.cli.reports import dry
from lora_merge.errors import FitError, UsageError
from lora_merge.viewing.inspect import inspect
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.tensors import rand

HIDDEN = 8
NAMES = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(2) for part in "qkv"]
CONNECTOR = {"fc1.weight": rand(HIDDEN, HIDDEN, seed=3), "fc1.bias": rand(HIDDEN, seed=4), "norm.weight": rand(HIDDEN)}
OPTIMIZER = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A language model with two connectors of equal shapes and a head of diffusion, and an adapter folder beside it."""
    tensors = {f"{name}.weight": rand(HIDDEN, HIDDEN, seed=n) for n, name in enumerate(NAMES)}
    tensors |= {"model.embed_tokens.weight": rand(12, HIDDEN), "lm_head.weight": rand(12, HIDDEN, seed=9)}
    for part in ("acoustic_connector", "semantic_connector"):
        tensors |= {f"model.{part}.{name}": torch.zeros_like(value) for name, value in CONNECTOR.items()}
    tensors["model.prediction_head.noisy.weight"] = torch.zeros(4, HIDDEN)
    tensors["model.prediction_head.cond.weight"] = torch.zeros(HIDDEN, 4)
    base, adapter = tmp_path / "base", tmp_path / "ad"
    for folder in (base, adapter):
        folder.mkdir()
    save(tensors, base / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 12}
    (base / "config.json").write_text(json.dumps(config))
    lora = {
        f"base_model.model.{NAMES[0]}.lora_{x}.weight": rand(*shape)
        for x, shape in zip("AB", ((2, HIDDEN), (HIDDEN, 2)), strict=True)
    }
    save(lora, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return tmp_path


def merged(model: Path, **options: Any) -> tuple[lora_merge.Report, dict[str, torch.Tensor]]:
    report = lora_merge.merge(model / "base", model / "ad", model / "out", **options)
    return report, load_file(model / "out" / "model.safetensors")


def uses(report: Any, role: str) -> dict[str, Any]:
    (folder,) = [one for one in report.files if one["role"] == role]
    return dict(folder["files"])


def test_every_file_of_both_folders_has_a_use(model: Path) -> None:
    """Reports, plans and `inspect` have the same table; text has it with -v."""
    for name in (*OPTIMIZER, "README.md", "checkpoint-5/model.safetensors", "deep/notes.txt"):
        path = model / "ad" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x80")
    (model / "base" / "vocab.txt").write_text("words")
    (model / "base" / "pytorch_model.bin").write_bytes(b"\x80")
    report, _ = merged(model)
    for role, folder in (("base", model / "base"), ("adapter", model / "ad")):
        listed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert uses(report, role).keys() == listed
        assert all(("why" in file) == (file["use"] == "left out") for file in uses(report, role).values())
        (planned,) = [
            one
            for one in dry(lora_merge.plan(model / "base", model / "ad", model / "o"))["files"]
            if one["role"] == role
        ]
        assert planned == inspect(folder)["folder"] == {"role": role, "path": str(folder), "files": uses(report, role)}
    own = uses(report, "base")
    assert own["model.safetensors"]["use"] == "read"
    assert own["vocab.txt"]["use"] == "copied"
    assert any("pytorch_model.bin" in note for note in report.notes)
    said = " ".join(report.notes)
    assert "checkpoint-5" in said
    assert not any(name in said for name in OPTIMIZER)
    done = run(model / "base", model / "ad", "-o", model / "o", "--dry-run", "-v")
    assert "  optimizer.pt: left out: a state of the training" in done.out
    assert "optimizer" not in run(model / "base", model / "ad", "-o", model / "o", "--dry-run").out


PREFIXES = ("", "base_model.model.", "module.", "base_model.model.module.")


@pytest.mark.few(2)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["non_lora_state_dict.bin", "deep/mm_projector.bin", "trained.safetensors"])
def test_weights_by_the_names_of_the_base_are_merged(model: Path, name: str, prefix: str) -> None:
    new = {f"{prefix}model.acoustic_connector.{key}": value for key, value in CONNECTOR.items()}
    write(model / "ad" / name, new)
    report, out = merged(model)
    assert all(torch.equal(out[f"model.acoustic_connector.{key}"], value) for key, value in CONNECTOR.items())
    assert not out["model.semantic_connector.fc1.weight"].any()
    assert uses(report, "adapter")[name] == {"use": "read"}
    assert lora_merge.verify(model / "out")["proven"]
    again = lora_merge.replay(model / "out", model / "again")
    assert load_file(Path(again.output) / "model.safetensors").keys() == out.keys()
    state = load_file(model / "base" / "model.safetensors")
    in_memory = lora_merge.merge_state_dict(state, model / "ad")
    assert torch.equal(in_memory["model.acoustic_connector.fc1.weight"], CONNECTOR["fc1.weight"])


def write(path: Path, tensors: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save(tensors, path)
    else:
        torch.save(tensors, path)


def test_part_by_its_own_names_goes_below_the_module_that_its_folder_names(model: Path) -> None:
    """Two connectors have the same names and shapes; the head of diffusion has its names alone, under another name."""
    write(model / "ad" / "semantic_connector" / "pytorch_model.bin", CONNECTOR)
    head = {"noisy.weight": rand(4, HIDDEN), "cond.weight": rand(HIDDEN, 4)}
    write(model / "ad" / "diffusion_head_full.bin", head)
    _, out = merged(model)
    assert torch.equal(out["model.semantic_connector.fc1.weight"], CONNECTOR["fc1.weight"])
    assert not out["model.acoustic_connector.fc1.weight"].any()
    assert all(torch.equal(out[f"model.prediction_head.{key}"], value) for key, value in head.items())


REFUSED = {
    "several modules": ("part.bin", CONNECTOR),
    "rows of new tokens": ("new_embeddings.safetensors", {"input_embeddings": torch.ones(2, HIDDEN)}),
    "match nothing in": ("non_lora_trainables.bin", {"base_model.model.other.weight": torch.ones(3)}),
    "only in part": ("x.safetensors", {"model.embed_tokens.weight": torch.ones(12, HIDDEN), "strange": torch.ones(2)}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_weights_without_one_place_are_refused_and_the_fix_works(model: Path, why: str) -> None:
    name, tensors = REFUSED[why]
    write(model / "ad" / name, tensors)
    with pytest.raises(FitError, match=why) as caught:
        merged(model)
    assert name in caught.value.where
    assert 'unmatched="skip"' in caught.value.fix
    report, _ = merged(model, unmatched="skip")
    assert any(name in note for note in report.notes)
    assert uses(report, "adapter")[name]["use"] == "left out"


@pytest.mark.parametrize("name", ["value_head.safetensors", "ema.pt", "score/model.safetensors"])
def test_left_out_weights_are_named(model: Path, name: str) -> None:
    write(model / "ad" / name, {"v_head.summary.weight": torch.ones(1, HIDDEN)})
    report, _ = merged(model)
    assert any(Path(name).parts[0] in note for note in report.notes)
    assert any(Path(name).parts[0] in note for note in inspect(model / "ad")["notes"])


def test_commands_that_write_adapters_name_other_weights_and_refuse_to_lose_trained_ones(model: Path) -> None:
    write(model / "ad" / "value_head.bin", {"v_head.summary.weight": torch.ones(1, HIDDEN)})
    made = lora_merge.resize(model / "ad", model / "small", rank=1)
    assert any("value_head.bin" in note for note in made.notes)
    write(model / "ad" / "non_lora_trainables.bin", {"base_model.model.lm_head.weight": torch.ones(12, HIDDEN)})
    with pytest.raises(UsageError, match="replaces whole tensors"):
        lora_merge.resize(model / "ad", model / "smaller", rank=1)
    with_base = lora_merge.resize(model / "ad", model / "smaller", rank=1, base=model / "base")
    assert any("non_lora_trainables.bin" in note and "replace" in note for note in with_base.notes)


SECOND: dict[str, Any] = {
    "consolidated.00.pth": lambda own: {f"old.{n}": value for n, value in enumerate(own.values())},
    "full.safetensors": lambda own: {f"module.{key}": value.half() for key, value in own.items()},
    "part.pt": lambda own: {"model.embed_tokens.weight": own["model.embed_tokens.weight"]},
    "model.fp16.safetensors": lambda own: {key: value.half() for key, value in own.items()},
}


@pytest.mark.parametrize("name", SECOND)
def test_second_set_of_the_weights_stays_behind(model: Path, name: str) -> None:
    write(model / "base" / name, SECOND[name](load_file(model / "base" / "model.safetensors")))
    report, _ = merged(model)
    assert not (model / "out" / name).exists()
    assert any(name in note and "second set" in note for note in report.notes)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [
    "flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model_quantized.onnx", "pytorch_model-00001-of-00002.bin",
    "openvino_model.bin", "weights.npz", "bert_model.ckpt.data-00000-of-00001", "decoder_model_merged.onnx",
])  # fmt: skip
def test_second_set_in_a_format_without_headers_is_known_by_its_name(model: Path, name: str) -> None:
    (model / "base" / name).write_bytes(b"\x08\x07" * 40)
    report, _ = merged(model)
    assert not (model / "out" / name).exists()
    assert any(name in note for note in report.notes)


@pytest.mark.parametrize("name", ["spk_dict.pt", "audiovae.pth", "campplus.onnx", "flow.bin", "voice/vae.safetensors"])
def test_part_of_its_own_comes_along(model: Path, name: str) -> None:
    path = model / "base" / name
    if path.suffix == ".onnx":
        path.write_bytes(b"\x08\x07" * 40)
    else:
        write(path, {"a.cond": rand(3, 5), "b": rand(7)})
    report, _ = merged(model)
    assert (model / "out" / name).read_bytes() == path.read_bytes()
    assert uses(report, "base")[name] == {"use": "copied"}


def vocabulary(folder: Path, tokens: int, **config: Any) -> None:
    words = {f"w{n}": n for n in range(12)}
    added = [{"id": n, "content": f"<{n}>"} for n in range(12, tokens)]
    content = {"model": {"type": "WordLevel", "vocab": words}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def grown(model: Path) -> Path:
    """The adapter has two more tokens, and saved its tokenizer with a chat template."""
    file = model / "ad" / "adapter_model.safetensors"
    more = {f"base_model.model.{n}.weight": rand(14, HIDDEN) for n in ("model.embed_tokens", "lm_head")}
    save(load_file(file) | more, file)
    vocabulary(model / "base", 12)
    vocabulary(model / "ad", 14, chat_template="{{ a }}")
    (model / "base" / "chat_template.jinja").write_text("old")
    (model / "base" / "added_tokens.json").write_text("{}")
    (model / "base" / "preprocessor_config.json").write_text("{}")
    (model / "ad" / "generation_config.json").write_text('{"eos_token_id": 13}')
    return model


def test_grown_embeddings_bring_their_tokenizer(grown: Path) -> None:
    """A vocabulary and what belongs to it are all from one folder; files of processors one by one."""
    report, _ = merged(grown)
    out = grown / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (grown / "ad" / name).read_bytes()
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "added_tokens.json").exists()
    assert (out / "preprocessor_config.json").exists()
    assert any("the tokenizer of the output is that of ad" in note for note in report.notes)
    assert uses(report, "adapter")["tokenizer.json"] == {"use": "copied"}
    assert uses(report, "base")["chat_template.jinja"]["use"] == "left out"
    assert not lora_merge.verify(out)["warnings"]


@pytest.mark.few(2)
@pytest.mark.parametrize("whose", ["adapter", "base", "other"])
def test_user_decides_whose_tokenizer_it_is(grown: Path, whose: str) -> None:
    """A replay of the output has the same, from the folder of that name."""
    (grown / "other").mkdir()
    vocabulary(grown / "other", 13)
    value = str(grown / "other") if whose == "other" else whose
    source = {"adapter": grown / "ad", "base": grown / "base", "other": grown / "other"}[whose]
    done = run(grown / "base", grown / "ad", "-o", grown / "out", "--tokenizer", value)
    assert done.code == 0, done.err
    lora_merge.replay(grown / "out", grown / "again")
    for out in (grown / "out", grown / "again"):
        assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    jobs = {"version": 1, "jobs": [{"base": "base", "adapters": ["ad"], "output": "b", "tokenizer": whose}]}
    (grown / "jobs.json").write_text(json.dumps(jobs))
    (one,) = lora_merge.run_batch(grown / "jobs.json")
    assert one.status == "merged"
    assert (grown / "b" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("value", ["adapter", "ad", "nowhere"])
def test_tokenizer_that_is_not_there_is_refused(model: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    with pytest.raises(UsageError, match=r"whole tokenizer|no such folder"):
        merged(model, tokenizer=value)


def test_tokenizer_of_several_adapters_is_named(grown: Path) -> None:
    shutil.copytree(grown / "ad", grown / "other")
    file = grown / "other" / "adapter_model.safetensors"
    save({name: value for name, value in load_file(file).items() if "lora_" in name}, file)
    with pytest.raises(UsageError, match="several adapter folders contain a tokenizer"):
        lora_merge.merge(grown / "base", [grown / "ad", grown / "other"], grown / "out", tokenizer="adapter")


def test_folder_of_the_tokenizer_is_not_replaced(grown: Path) -> None:
    (grown / "other").mkdir()
    vocabulary(grown / "other", 13)
    done = run(grown / "base", grown / "ad", "-o", grown / "other", "--overwrite", "--tokenizer", grown / "other")
    assert done.code == 2, done.out
    assert [path.name for path in sorted((grown / "other").iterdir())] == ["tokenizer.json", "tokenizer_config.json"]


def test_model_folder_that_holds_an_adapter_is_a_base_and_an_adapter(model: Path) -> None:
    base = model / "base"
    for path in (model / "ad").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    report, out = merged(model)
    assert (model / "out" / "adapter_model.safetensors").exists()
    assert lora_merge.verify(model / "out")["proven"]
    assert "tensors changed" in str(lora_merge.compare(base, model / "out"))
    for adapters in ([], [base], [base / "adapter_model.safetensors"]):
        made = lora_merge.merge(base, adapters, model / "alone", overwrite=True)
        alone = load_file(model / "alone" / "model.safetensors")
        assert all(torch.equal(alone[key], value) for key, value in out.items())
        assert not {"adapter_model.safetensors", "adapter_config.json"} & {p.name for p in (model / "alone").iterdir()}
        assert "left out" in {file["use"] for file in uses(made, "base").values()}
    (file,) = {*(model / "ad").glob("*.safetensors")}
    assert lora_merge.merge(model / "base", base, model / "as-adapter").changed == report.changed, file
    assert inspect(base)["kind"] == "checkpoint"


@pytest.mark.parametrize("stated", [False, True])
def test_adapters_attached_inside_the_components_of_a_pipeline_are_merged(tmp_path: Path, *, stated: bool) -> None:
    """Each component is a plain model then; its own adapter_config.json states α, else α is the rank."""
    base, wanted = tmp_path / "base", dict[str, dict[str, torch.Tensor]]()
    parts = {"transformer": "diffusion_pytorch_model", "text_encoder": "model", "vae": "diffusion_pytorch_model"}
    base.mkdir()
    for seed, (part, stem) in enumerate(parts.items()):
        (base / part).mkdir()
        (base / part / "config.json").write_text("{}")
        weights = {f"{part[0]}.blocks.{n}.to_q.weight": rand(HIDDEN, HIDDEN, seed=seed + n) for n in range(2)}
        wanted[part] = dict(weights)
        if part != "vae":
            name = f"{part[0]}.blocks.0.to_q"
            up, down = rand(HIDDEN, 2, seed=7 + seed), rand(2, HIDDEN, seed=9)
            weights |= {
                f"{name}.base_layer.weight": weights.pop(f"{name}.weight"),
                f"{name}.lora_A.style.weight": down,
                f"{name}.lora_B.style.weight": up,
            }
            scale = 3.0 if stated and part == "text_encoder" else 1.0
            wanted[part][f"{name}.weight"] = wanted[part][f"{name}.weight"] + scale * up @ down
        save(weights, base / part / f"{stem}.safetensors")
    if stated:
        (base / "text_encoder" / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6})
        )
    index = {"_class_name": "APipeline", **{part: ["diffusers", "AModel"] for part in parts}}
    (base / "model_index.json").write_text(json.dumps(index))
    report = lora_merge.merge(base, [], tmp_path / "out")
    for part, stem in parts.items():
        found = load_file(tmp_path / "out" / part / f"{stem}.safetensors")
        assert found.keys() == wanted[part].keys()
        assert all(torch.allclose(value, wanted[part][key], atol=1e-5) for key, value in found.items()), part
    assert lora_merge.verify(tmp_path / "out")["proven"]
    assert "an adapter is attached inside the model" in report.to_json()
    assert not (tmp_path / "out" / "text_encoder" / "adapter_config.json").exists()
