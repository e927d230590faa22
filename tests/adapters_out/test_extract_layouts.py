"""What is extracted of quantised checkpoints, shards and pipelines is the difference of the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from tests.files.quantised_forms import FORMS, SHAPE
from tests.kit.gguf_files import read, write
from tests.kit.quantised import NAMES, base, parts
from tests.kit.tensors import Tensors, rand


def product(found: Tensors, layer: str) -> Tensor:
    """ΔW that a layer's factors mean."""
    up, down = (found[f"{layer}.{end}.weight"].flatten(1).double() for end in ("lora_up", "lora_down"))
    return float(found[f"{layer}.alpha"]) / len(down) * up @ down


def words(layer: str) -> str:
    """How kohya's files name a layer."""
    return layer.replace(".", "_")


CODES = (
    "ComfyUI nvfp4",
    "ComfyUI fp8 rows",
    "block fp8",
    "bitsandbytes nf4 doubled",
    "mlx 4 bit",
    "GPTQ",
    "musubi groups",
)
"""One format of each way to lay codes and scales out; the others share its decoder."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CODES)
def test_quantised_base_is_compared_by_its_values(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    tuned: Tensors = {"model.norm.weight": tensors["model.norm.weight"]}
    changes = {layer: rand(SHAPE[0], 2, seed=n) @ rand(2, SHAPE[1], seed=9 + n) for n, layer in enumerate(NAMES)}
    for layer, change in changes.items():
        tuned[f"{layer}.weight"] = (form.read(parts(tensors, layer)).float() + change).contiguous()
    save_file(tuned, tmp_path / "tuned.safetensors")
    report = lora_merge.extract(
        source, tmp_path / "tuned.safetensors", tmp_path / "out.safetensors", rank=4, format="kohya"
    )
    assert report.verified is not None and len(report.layers) == len(NAMES)
    found = load_file(tmp_path / "out.safetensors")
    for layer, change in changes.items():
        (own,) = (
            key.removesuffix(".alpha") for key in found if key.endswith(f"{words(layer.removeprefix('model.'))}.alpha")
        )
        assert (product(found, own) - change).abs().max() <= (1e-5 + form.slack) * change.abs().max() + 1e-3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_gguf_base_is_compared_by_its_values(kind: str, tmp_path: Path) -> None:
    name, entries = "double_blocks.0.img_attn.proj.weight", {"general.architecture": "flux"}
    write(tmp_path / "base.gguf", "flux", {name: (rand(64, 96, scale=0.02).numpy(), kind)}, entries)
    held = torch.from_numpy(read(tmp_path / "base.gguf")[name][0]).float()
    change = rand(64, 2, seed=1) @ rand(2, 96, seed=2)
    save_file({name: held + change}, tmp_path / "tuned.safetensors")
    lora_merge.extract(tmp_path / "base.gguf", tmp_path / "tuned.safetensors", tmp_path / "out.safetensors", rank=2)
    found = load_file(tmp_path / "out.safetensors")
    (layer,) = (key.removesuffix(".alpha") for key in found if key.endswith(".alpha"))
    assert (product(found, layer) - change).abs().max() < 1e-4


def test_shards_and_a_pipeline_give_what_one_file_gives(tmp_path: Path) -> None:
    """The base in two shards; and a tuned pipeline of folders, where both have diffusers' names."""
    keys = [f"transformer_blocks.{n}.attn.to_q.weight" for n in range(4)]
    old = {key: rand(24, 16, seed=n) for n, key in enumerate(keys)}
    new = {
        key: value + rand(24, 2, seed=40 + n) @ rand(2, 16, seed=50 + n) for n, (key, value) in enumerate(old.items())
    }
    save_file(old, tmp_path / "base.safetensors")
    save_file(new, tmp_path / "tuned.safetensors")
    for name, tensors in (("old", old), ("new", new)):
        part = tmp_path / name / "transformer"
        part.mkdir(parents=True)
        (tmp_path / name / "model_index.json").write_text(
            json.dumps({"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]})
        )
        (part / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
        shards = {f"diffusion_pytorch_model-0000{n + 1}-of-00002.safetensors": keys[n::2] for n in range(2)}
        for shard, held in shards.items():
            save_file({key: tensors[key] for key in held}, part / shard)
        weight_map = {key: shard for shard, held in shards.items() for key in held}
        (part / "diffusion_pytorch_model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        )
    for number, (one, other) in enumerate((("old", "new"), ("old/transformer", "tuned.safetensors"),
                                           ("base.safetensors", "tuned.safetensors"))):  # fmt: skip
        out = tmp_path / f"{number}.safetensors"
        lora_merge.extract(tmp_path / one, tmp_path / other, out, rank=2, format="kohya")
        found = load_file(out)
        for key in keys:
            name = f"{words(key.removesuffix('.weight'))}.alpha"
            (own,) = (k.removesuffix(".alpha") for k in found if k.endswith(name))
            assert (product(found, own) - (new[key] - old[key])).abs().max() < 1e-4
