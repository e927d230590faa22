"""Output folders that are not quite their base: sizes in configurations and index files, and they load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lora_merge
from lora_merge.errors import FitError
from tests.kit.adapters import flux_control
from tests.kit.diffusers_models import CONFIGS
from tests.kit.files import load, load_all, save
from tests.kit.tensors import rand

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
HEADS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "BertForSequenceClassification": ("BertConfig", "SEQ_CLS", SMALL, "classifier"),
    "LlamaForSequenceClassification": ("LlamaConfig", "SEQ_CLS", SMALL | dict(pad_token_id=0), "score"),
    "RobertaForSequenceClassification": ("RobertaConfig", "SEQ_CLS", SMALL, "classifier"),
    "ViTForImageClassification": ("ViTConfig", "FEATURE_EXTRACTION", {k: v for k, v in SMALL.items() if k != "vocab_size"} | dict(image_size=16, patch_size=8), "classifier"),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("labels", [2, 5])
def test_head_with_other_labels_loads(name: str, labels: int, tmp_path: Path) -> None:
    kind, task, arguments, head = HEADS[name]
    make, config = getattr(transformers, name), getattr(transformers, kind)
    torch.manual_seed(0)
    base, trained = make(config(**arguments, num_labels=3)), make(config(**arguments, num_labels=labels))
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    state = {k: v for k, v in base.state_dict().items() if not k.startswith(head)}
    trained.load_state_dict(state, strict=False)
    layers = ["q_proj", "v_proj", "query", "value"]
    lora = peft.LoraConfig(task_type=task, target_modules=layers, modules_to_save=[head], init_lora_weights=False)
    tuned = peft.get_peft_model(trained, lora)
    tuned.save_pretrained(tmp_path / "adapter")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    want = tuned.merge_and_unload()
    got = make.from_pretrained(tmp_path / "out")
    assert got.config.num_labels == labels
    for key, value in want.state_dict().items():
        assert torch.allclose(got.state_dict()[key], value, atol=2e-6), key
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = {k: t for f in (tmp_path / "out").glob("*.safetensors") for k, t in load(f).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())
    assert index["metadata"]["total_parameters"] == got.num_parameters()


def test_layers_with_more_channels_in_than_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = diffusers.FluxTransformer2DModel(**CONFIGS["FluxTransformer2DModel"])
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    lora = save(flux_control(16), tmp_path / "control.safetensors")
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "out")
    got = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    assert (got.config.in_channels, got.config.out_channels) == (8, 4)
    a = flux_control(16)
    delta = a["img_in.lora_B.weight"] @ a["img_in.lora_A.weight"]
    padded = torch.cat([base.x_embedder.weight, torch.zeros(16, 4)], dim=1)
    torch.testing.assert_close(got.x_embedder.weight, padded + delta)
    torch.testing.assert_close(got.proj_out.weight, base.proj_out.weight)


@pytest.mark.parametrize("bias", [True, False])
def test_control_lora_of_the_librarys_script_is_merged_into_both_layouts(*, bias: bool, tmp_path: Path) -> None:
    """As examples/flux-control of diffusers trains it; configurations of FLUX.1-dev do not speak of out_channels."""
    torch.manual_seed(0)
    base = diffusers.FluxTransformer2DModel(**CONFIGS["FluxTransformer2DModel"])
    base.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config.pop("out_channels", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    wide = torch.nn.Linear(8, 16)
    wide.load_state_dict({"weight": F.pad(base.x_embedder.weight, (0, 4)), "bias": base.x_embedder.bias})
    base.x_embedder = wide
    layers = ["x_embedder", "attn.to_q", "attn.to_out.0", "ff.net.2"]
    base.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=layers, lora_bias=bias, init_lora_weights=False))
    norms = {f"transformer.{k}": v + 1 for k, v in base.named_parameters() if "norm_q" in k or "norm_added" in k}
    diffusers.FluxControlPipeline.save_lora_weights(
        tmp_path, transformer_lora_layers={**peft.get_peft_model_state_dict(base), **norms}
    )
    lora_merge.merge(tmp_path / "base", tmp_path / "pytorch_lora_weights.safetensors", tmp_path / "out")
    base.load_state_dict({k.removeprefix("transformer."): v for k, v in norms.items()}, strict=False)
    base.fuse_lora()
    base.unload_lora()
    got = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    assert (got.config.in_channels, got.config.out_channels) == (8, 4)
    for key, value in base.state_dict().items():
        assert torch.allclose(got.state_dict()[key], value, atol=2e-6), key


@pytest.mark.parametrize("parts", [("transformer_2",), ("transformer", "transformer_2")])
def test_second_expert_alone_is_a_single_file(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """An adapter for it finds its place; one for both experts does not know which of them the file is."""
    torch.manual_seed(0)
    weights = diffusers.WanTransformer3DModel(**CONFIGS["WanTransformer3DModel T2V"]).state_dict()
    base = save(dict(weights), tmp_path / "low_noise.safetensors")
    lora = {}
    for part in parts:
        lora[f"{part}.blocks.0.attn1.to_q.lora_A.weight"] = rand(2, 24)
        lora[f"{part}.blocks.0.attn1.to_q.lora_B.weight"] = rand(24, 2)
    file = save(lora, tmp_path / "a.safetensors")
    if len(parts) == 2:
        with pytest.raises(FitError, match="second transformer"):
            lora_merge.merge(base, file, tmp_path / "out.safetensors")
        report = lora_merge.merge(base, file, tmp_path / "out.safetensors", unmatched="skip")
        assert "taken to be the first" in report.coverage["a.safetensors"]["notes"][0]
        return
    report = lora_merge.merge(base, file, tmp_path / "out.safetensors")
    assert "low noise" in report.coverage["a.safetensors"]["notes"][0]
    key = "blocks.0.attn1.to_q.weight"
    torch.testing.assert_close(load(tmp_path / "out.safetensors")[key], weights[key] + rand(24, 2) @ rand(2, 24))


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_adapter_of_both_experts_gives_a_folder_of_one_its_own_half(tmp_path: Path, expert: str) -> None:
    """By the folder's name; the half of the other is never merged into it, whatever was left out."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**CONFIGS["WanTransformer3DModel T2V"])
    model.save_pretrained(tmp_path / expert)
    lora, key = {}, "blocks.0.attn1.to_q"
    for number, part in enumerate(("transformer", "transformer_2")):
        lora |= {
            f"{part}.{key}.lora_A.weight": rand(2, 24, seed=number),
            f"{part}.{key}.lora_B.weight": rand(24, 2, seed=number),
        }
    file = save(lora, tmp_path / "a.safetensors")
    with pytest.raises(FitError, match="1 of 2 adapter modules") as error:
        lora_merge.merge(tmp_path / expert, file, tmp_path / "out")
    other = "the transformer" if expert == "transformer_2" else r"the second transformer \(low noise\)"
    assert re.search(f"some modules are for {other}, the base contains only", error.value.what)
    lora_merge.merge(tmp_path / expert, file, tmp_path / "out", unmatched="skip")
    mine = {k.removeprefix(f"{expert}."): v for k, v in lora.items() if k.startswith(f"{expert}.")}
    wanted = model.state_dict()[f"{key}.weight"] + mine[f"{key}.lora_B.weight"] @ mine[f"{key}.lora_A.weight"]
    got = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "out").state_dict()
    torch.testing.assert_close(got[f"{key}.weight"], wanted)


def test_report_names_every_adapter_and_the_notes_of_opening(tmp_path: Path) -> None:
    """Files of one name, one of them twice; a folder with a variant that was not used."""
    base = {"model.a.weight": rand(4, 4)}
    (tmp_path / "base").mkdir()
    for name in ("model", "model.fp16"):
        save(base, tmp_path / "base" / f"{name}.safetensors")
    paths = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        lora = {"model.a.lora_up.weight": rand(4, 1), "model.a.lora_down.weight": rand(1, 4)}
        paths.append(save(lora, tmp_path / folder / "a.safetensors"))
    report = lora_merge.merge(tmp_path / "base", [*paths, paths[0]], tmp_path / "out")
    assert list(report.coverage) == [str(paths[0]), str(paths[1]), f"{paths[0]} (3)"]
    assert report.matched == 3
    assert any("model.fp16" in note for note in report.notes)


def test_two_experts_of_one_pipeline_keep_an_index_each(tmp_path: Path) -> None:
    """Their tensors have the same names."""
    pipeline, lora = tmp_path / "pipeline", {}
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text(
        json.dumps({"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"],
                    "transformer_2": ["diffusers", "WanTransformer3DModel"]})
    )  # fmt: skip
    models = {}
    for number, part in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(number)
        models[part] = diffusers.WanTransformer3DModel(**CONFIGS["WanTransformer3DModel T2V"])
        models[part].save_pretrained(pipeline / part, max_shard_size="30KB")
        for leaf, shape in {"lora_A": (2, 24), "lora_B": (24, 2)}.items():
            lora[f"{part}.blocks.0.attn1.to_q.{leaf}.weight"] = rand(*shape, seed=number)
    lora_merge.merge(pipeline, save(lora, tmp_path / "a.safetensors"), tmp_path / "out")
    for number, (part, model) in enumerate(models.items()):
        index = "diffusion_pytorch_model.safetensors.index.json"
        before, after = (json.loads((f / part / index).read_text()) for f in (pipeline, tmp_path / "out"))
        assert before == after
        got = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "out" / part)
        key = "blocks.0.attn1.to_q.weight"
        delta = rand(24, 2, seed=number) @ rand(2, 24, seed=number)
        torch.testing.assert_close(got.state_dict()[key], model.state_dict()[key] + delta)


@pytest.mark.few(2)
@pytest.mark.parametrize("given", ["folder", "index", "folder without index"])
def test_adapter_in_several_files_is_read_with_its_configuration(given: str, tmp_path: Path) -> None:
    """As transformers saves the adapters of its models, in shards of the size asked for."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter", max_shard_size="1KB")
    index = tmp_path / "adapter" / "model.safetensors.index.json"  # transformers 5.23 calls it so
    assert len(list((tmp_path / "adapter").glob("*.safetensors"))) > 2
    if given == "folder without index":
        index.unlink()
    base, adapter = tmp_path / "base", index if given == "index" else index.parent
    if given == "index":
        base /= "model.safetensors.index.json"
    report = lora_merge.merge(base, adapter, tmp_path / "out")
    assert not report.coverage["adapter"]["notes"]
    got = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    alone = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(alone, _in_one_file(index.parent)).merge_and_unload()
    for key, value in merged.state_dict().items():
        assert torch.allclose(got.state_dict()[key], value, atol=2e-6), key


def _in_one_file(folder: Path) -> Path:
    """The same adapter as PEFT, which reads no shards, takes it."""
    (folder.parent / "whole").mkdir()
    save(load_all(folder), folder.parent / "whole" / "adapter_model.safetensors")
    (folder.parent / "whole" / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    return folder.parent / "whole"


def test_outputs_of_an_index_are_called_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    name = "model.layers.0.mlp.up_proj"
    lora = save(
        {f"{name}.lora_A.weight": rand(2, 32), f"{name}.lora_B.weight": rand(64, 2)}, tmp_path / "a.safetensors"
    )
    for output in (None, "named"):
        made = {}
        for base in ("base", "base/model.safetensors.index.json"):
            report = lora_merge.merge(base, lora, output, overwrite=True)
            assert Path(report.output).name == (output or "base+a")
            made[base] = load_all(Path(report.output))
            assert (Path(report.output) / "config.json").is_file()
        one, other = made.values()
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
