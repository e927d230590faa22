"""What lies in a model folder beside its weights: copied, or refused while planning; never waited for, never endless."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.disk.writer import copy_file
from lora_merge.engine.admission import plan_merge
from lora_merge.errors import FitError, InputError
from lora_merge.files.side_files import configured
from lora_merge.job import make_job
from lora_merge.recipes.replay import prove
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.tensors import rand

NAME = "layers.0.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of one file and a configuration, and an adapter beside it."""
    (tmp_path / "base").mkdir()
    save({NAME: rand(8, 8)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"torch_dtype": "float32"}')
    lora = {"layers.0.lora_up.weight": rand(8, 2), "layers.0.lora_down.weight": rand(2, 8)}
    save(lora, tmp_path / "lora.safetensors")
    return tmp_path


def merge(model: Path, **options: Any) -> Path:
    lora_merge.merge(model / "base", model / "lora.safetensors", model / "out", **options)
    return model / "out"


def bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)
    os.chdir(here)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "an entry that is not a file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "an entry that is not a file"),
    "a socket": (bind, "an entry that is not a file"),
    "a link to nowhere": (lambda path: path.symlink_to("gone"), "a broken symbolic link"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "a broken symbolic link"),
    "a link to a folder": (lambda path: path.symlink_to("/usr"), "link to a folder"),
    "a link to the folder": (lambda path: path.symlink_to("."), "link to a folder"),
}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "below/notes"])
@pytest.mark.parametrize("kind", ODD)
def test_side_files_that_cannot_be_copied_are_refused_while_planning(model: Path, kind: str, name: str) -> None:
    make, why = ODD[kind]
    path = model / "base" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(InputError, match=why if name != "config.json" else ".") as caught:
        plan_merge(make_job(model / "base", model / "lora.safetensors", model / "out"))
    assert str(path) in caught.value.where


def test_command_says_so(model: Path) -> None:
    os.mkfifo(model / "base" / "merges.txt")
    done = run(model / "base", model / "lora.safetensors", "-o", model / "out")
    assert done.code == 3
    assert str(model / "base" / "merges.txt") in done.err
    assert not (model / "out").exists()


def test_copy_is_of_a_file(tmp_path: Path) -> None:
    """Also where it became something else since the plan."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        copy_file(tmp_path / "pipe", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_linked_component_comes_with_its_configuration(model: Path) -> None:
    pipeline, elsewhere = model / "pipeline", model / "elsewhere"
    (model / "base").rename(elsewhere)
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    (pipeline / "unet").symlink_to(elsewhere)
    pipeline.rename(model / "base")
    out = merge(model)
    assert (out / "unet" / "config.json").exists()
    assert not (out / "unet").is_symlink()


def test_side_files_with_weights_are_left_out_and_noted(model: Path) -> None:
    """An output in the base's own folder, a checkpoint of the training, an export, a merge that is under way."""
    base, lora = model / "base", model / "lora.safetensors"
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "vocab.txt").write_text("words")
    first = lora_merge.merge(base, lora, base / "merged")
    assert first.notes == ()
    for folder, name in (("checkpoint-5", "model.safetensors"), ("onnx/deep", "model.onnx")):
        (base / folder).mkdir(parents=True)
        (base / folder / name).write_bytes(b"")
        (base / folder / "config.json").write_text("{}")
    (base / ".x.0123456789ab.lora-merge.part").write_bytes(b"")
    report = lora_merge.merge(base, lora, model / "out")
    assert report.notes == (
        "base: weights are left out: checkpoint-5 (another checkpoint of a training); merged (a second set of the "
        "model's weights); onnx (the same model in another format)",
    )
    names = {p.relative_to(model / "out").as_posix() for p in (model / "out").rglob("*") if p.is_file()}
    assert names == {"model.safetensors", "config.json", "tokenizer/vocab.txt", "README.md"}
    done = run(base, lora, "-o", model / "dry", "--dry-run")
    assert "onnx (the same model in another format)" in done.err + done.out


def test_layers_that_sentence_transformers_put_behind_the_model_come_along(model: Path) -> None:
    for name in ("2_Dense", "checkpoint-7"):
        (model / "base" / name).mkdir()
        (model / "base" / name / "config.json").write_text("{}")
        save({"linear.weight": rand(4, 8)}, model / "base" / name / "model.safetensors")
    parts = [{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "name": "1", "path": "2_Dense"}]
    (model / "base" / "modules.json").write_text(json.dumps(parts))
    out = merge(model)
    assert not (out / "checkpoint-7").exists()
    for name in ("config.json", "model.safetensors"):
        assert (out / "2_Dense" / name).read_bytes() == (model / "base" / "2_Dense" / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["{}", "3", "[1]", '[{"path": []}, {"name": "a"}]', '[{"path": "../lora.safetensors"}]']
)
def test_list_of_parts_that_names_none_changes_nothing(model: Path, text: str) -> None:
    (model / "base" / "modules.json").write_text(text)
    assert sorted(p.name for p in merge(model).iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "modules.json")
    ]


def test_part_that_is_named_may_be_no_link_all_the_same(model: Path) -> None:
    """model_index.json is a file that anybody may have written."""
    base = model / "base"
    (model / "pipeline").mkdir()
    base.rename(model / "pipeline" / "unet")
    (model / "pipeline").rename(base)
    (base / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"], "tokenizer": ["a", "B"]}')
    (base / "tokenizer").symlink_to("/usr")
    with pytest.raises(InputError, match="link to a folder"):
        merge(model)


def test_component_keeps_its_files_whatever_its_weights_are(model: Path) -> None:
    pipeline = model / "pipeline"
    (pipeline / "flax").mkdir(parents=True)
    (pipeline / "vae_1_0").mkdir()
    (model / "base").rename(pipeline / "unet")
    (pipeline / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"], "flax": ["a", "B"]}')
    for name in ("flax", "vae_1_0"):
        (pipeline / name / "config.json").write_text("{}")
        (pipeline / name / "diffusion_flax_model.msgpack").write_bytes(b"")
    pipeline.rename(model / "base")
    out = merge(model)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "flax", "model_index.json", "unet"]
    assert [p.name for p in (out / "flax").iterdir()] == ["config.json"]


@pytest.mark.parametrize("inside", [5, "text", [1], True])
def test_index_with_odd_metadata_is_refused(model: Path, inside: Any) -> None:
    with pytest.raises(InputError, match="the shard index is wrong"):
        merge(indexed(model, inside))


def test_index_without_metadata_gets_it(model: Path) -> None:
    index = json.loads((merge(indexed(model, None)) / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 8 * 8 * 4


def indexed(model: Path, inside: Any) -> Path:
    file = "model-00001-of-00001.safetensors"
    (model / "base" / "model.safetensors").rename(model / "base" / file)
    index = {"metadata": inside, "weight_map": {NAME: file}}
    (model / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


@pytest.mark.parametrize("content", [b"[1]", b"5", b"[" * 100_000, b"\xff"])
def test_configuration_that_is_no_table_stays_as_it_is(content: bytes) -> None:
    assert configured(content, "F16", {NAME: (torch.Size([1]), torch.Size([2]))}) == content


@pytest.mark.parametrize("name", [
    "model.embed_tokens", "language_model.model.embed_tokens", "transformer.wte", "gpt_neox.embed_in", "shared",
    "bert.embeddings.word_embeddings",
    "model.embeddings.tok_embeddings",  # ModernBERT
    "backbone.embeddings",  # Mamba, Nemotron-H
    "rwkv.embeddings", "transformer.tokens_embed", "transformer.w",  # RWKV, GPT, CTRL
])  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_configuration_shows_the_size_of_a_resized_vocabulary(name: str, inside: bool) -> None:  # noqa: FBT001
    content = json.dumps({"text_config": {"vocab_size": 9}} if inside else {"vocab_size": 9}).encode()
    made = json.loads(configured(content, None, {f"{name}.weight": (torch.Size([9, 4]), torch.Size([12, 4]))}))
    assert made == json.loads(content.replace(b"9", b"12"))


@pytest.mark.parametrize(
    "name", ["embeddings.position_embeddings", "transformer.wpe", "embeddings.token_type_embeddings"]
)
def test_table_of_places_is_no_vocabulary(name: str) -> None:
    resized = {f"{name}.weight": (torch.Size([9, 4]), torch.Size([12, 4]))}
    assert json.loads(configured(b'{"vocab_size": 9}', None, resized)) == {"vocab_size": 9}


def test_tokenizer_beside_the_adapter_is_noted(model: Path) -> None:
    """The output has the base's, which knows neither the tokens nor the template that a training added."""
    adapter = model / "adapter"
    adapter.mkdir()
    lora = {f"base_model.model.layers.0.lora_{side}.weight": rand(8, 2) if side == "B" else rand(2, 8) for side in "AB"}
    save(lora, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    for folder in (model / "base", adapter):
        (folder / "tokenizer.json").write_text("{}")
    notes = lora_merge.merge(model / "base", adapter, model / "same").notes
    assert not any("tokenizer" in note for note in notes)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    notes = lora_merge.merge(model / "base", adapter, model / "other").notes
    assert any(f"{adapter} has another chat_template.jinja" in note for note in notes)
    assert not (model / "other" / "chat_template.jinja").exists()


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_shard_that_the_index_does_not_name_comes_along(model: Path, inside: str) -> None:
    """The output is then loaded as the base is; the report names the file. Shards of another count stay behind."""
    part = model / "base" / inside
    part.mkdir(exist_ok=True)
    if inside:
        (model / "base" / "model_index.json").write_text(
            '{"_class_name": "P", "transformer": ["diffusers", "QwenImageTransformer2DModel"]}'
        )
    one, two, old = (f"model-{n}.safetensors" for n in ("00001-of-00002", "00002-of-00002", "00001-of-00003"))
    (model / "base" / "model.safetensors").rename(part / one)
    save({"layers.1.weight": rand(8, 8)}, part / two)
    save({NAME: rand(8, 8)}, part / old)
    (part / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {NAME: one}}))
    report = lora_merge.merge(model / "base", model / "lora.safetensors", model / "out")
    out = model / "out" / inside
    assert (out / two).read_bytes() == (part / two).read_bytes()
    assert not (out / old).exists()
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == {NAME: one}
    assert any(two in note and "copied" in note for note in report.notes)
    assert any(old in note and "not copied" in note for note in report.notes)
    assert not prove(model / "out", full=True)["warnings"]
    (out / two).unlink()
    assert two in prove(model / "out")["warnings"][0]


def test_adapter_of_a_shard_that_the_index_does_not_name_is_not_merged_in_part(model: Path) -> None:
    base = model / "base"
    (base / "model.safetensors").rename(base / "model-00002-of-00002.safetensors")
    save({"layers.1.weight": rand(8, 8)}, base / "model-00001-of-00002.safetensors")
    table = {"layers.1.weight": "model-00001-of-00002.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    with pytest.raises(FitError):
        merge(model)


OUTSIDE = {
    "a file": lambda base: (base / "tokenizer.json").symlink_to("../id_key"),
    "a file, by an absolute path": lambda base: (base / "tokenizer.json").symlink_to(base.parent / "id_key"),
    "the environment": lambda base: (base / "vocab.txt").symlink_to("/proc/self/environ"),
    "a chain of links": lambda base: [(base / "a.txt").symlink_to("b"), (base / "b").symlink_to("../id_key")],
    "the configuration": lambda base: relinked(base / "config.json"),
    "the index": lambda base: linked_index(base),
    "the card": lambda base: (base / "README.md").symlink_to("../id_key"),
    "in a sub-folder": lambda base: [(base / "deep").mkdir(), (base / "deep" / "own.txt").symlink_to("../../id_key")],
    "in a folder that is no cache": lambda base: [
        (base.parent / "blobs").mkdir(), kept(base.parent / "blobs" / "key"), (base / "a.txt").symlink_to("../blobs/key"),
    ],
    "in a linked component": lambda base: [kept(base / "id_key"), base.rename(base.parent / "all"), base.mkdir(),
        kept(base / "model_index.json", '{"unet": ["diffusers", "UNet2DConditionModel"]}'),
        (base / "unet").symlink_to("../all")],
}  # fmt: skip
"""What a stranger's model folder may hold → a function that puts it there."""


def kept(path: Path, text: str = "private") -> Path:
    path.write_text(text)
    return path


def linked_index(base: Path) -> None:
    name, index = "model-00001-of-00001.safetensors", {"metadata": {"key": "private"}, "weight_map": {}}
    (base / "model.safetensors").rename(base / name)
    kept(base.parent / "index.json", json.dumps({**index, "weight_map": {NAME: name}}))
    (base / "model.safetensors.index.json").symlink_to("../index.json")


def relinked(path: Path) -> None:
    """The file moved out of its folder, with a link in its place."""
    out = path.parents[1] / path.name
    path.rename(out)
    path.symlink_to(out)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("what", OUTSIDE)
def test_links_that_lead_out_of_the_model_folder_are_refused(model: Path, what: str) -> None:
    kept(model / "id_key")
    OUTSIDE[what](model / "base")
    with pytest.raises(InputError, match="lead out of it") as refused:
        merge(model)
    assert " -> " in refused.value.where
    assert not (model / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_to_weights_and_links_inside_the_folder_are_followed(model: Path) -> None:
    base = model / "base"
    relinked(base / "model.safetensors")
    (base / "deep").mkdir()
    kept(base / "deep" / "own.txt", "own")
    (base / "near.txt").symlink_to("deep/own.txt")
    (base / "far.txt").symlink_to(base / "near.txt")
    merge(model)
    assert (model / "out" / "near.txt").read_text() == (model / "out" / "far.txt").read_text() == "own"
    assert not (model / "out" / "near.txt").is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_from_another_folder_into_a_model_cache_are_followed(model: Path) -> None:
    """As huggingface_hub made them for large files in `--local-dir`, before version 0.23."""
    blobs = model / "cache" / "models--me--model" / "blobs"
    blobs.mkdir(parents=True)
    kept(blobs / f"{1:064}", "{}")
    (model / "base" / "tokenizer.json").symlink_to(blobs / f"{1:064}")
    merge(model)
    assert (model / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("by", ["itself", "a link"])
def test_links_of_a_model_cache_are_no_such_links(model: Path, by: str) -> None:
    """As huggingface_hub lays them out: blobs beside snapshots, also for files in sub-folders."""
    cache = model / "models--me--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0a1b"
    (snapshot / "1_Pooling").mkdir(parents=True)
    names = ["model.safetensors", "config.json", "1_Pooling/config.json"]
    for n, name in enumerate(names):
        source = model / "base" / Path(name).name
        (cache / "blobs" / f"{n:040}").write_bytes(source.read_bytes())
        (snapshot / name).symlink_to(os.path.relpath(cache / "blobs" / f"{n:040}", (snapshot / name).parent))
    base = snapshot
    if by == "a link":
        base = model / "linked"
        base.symlink_to(snapshot)
    lora_merge.merge(base, model / "lora.safetensors", model / "out")
    (snapshot / "more.txt").symlink_to("../../refs")
    (cache / "refs").write_text("main")
    with pytest.raises(InputError, match="lead out of it") as refused:
        lora_merge.merge(base, model / "lora.safetensors", model / "again")
    assert f"more.txt -> {cache / 'refs'}" in refused.value.where
