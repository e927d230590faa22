"""Pipelines of diffusers whose transformer is quantised on the way out, and the lists by which loaders leave layers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import UsageError
from lora_merge.files.checkpoint import open_checkpoint
from tests.files.quantised_forms import FORMS
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

WIDTH = 64
INNER = [f"transformer_blocks.{i}.attn.to_q" for i in range(2)]
OUTER = [f"single_transformer_blocks.{i}.proj_out" for i in range(2)]
NAMES = [*INNER, *OUTER, "proj_out", "x_embedder", "norm_out.linear"]


def pipeline(folder: Path, last: int = WIDTH) -> Tensors:
    """A little of Flux as diffusers has it; the last layer has so many rows."""
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"],
             "text_encoder": ["transformers", "CLIPTextModel"], "vae": ["diffusers", "AutoencoderKL"]}  # fmt: skip
    shapes = {name: (last if name == "proj_out" else WIDTH, WIDTH) for name in NAMES}
    network = {f"{name}.weight": rand(*shape, seed=n, scale=0.02) for n, (name, shape) in enumerate(shapes.items())}
    parts = {
        "transformer": ("diffusion_pytorch_model", {"_class_name": "FluxTransformer2DModel"}, network),
        "text_encoder": ("model", {"model_type": "clip_text_model"},
                         {"text_model.encoder.layers.0.self_attn.q_proj.weight": rand(WIDTH, WIDTH)}),
        "vae": ("diffusion_pytorch_model", {"_class_name": "AutoencoderKL"}, {"decoder.mid.attn.to_q.weight": rand(WIDTH, WIDTH)}),
    }  # fmt: skip
    for part, (file, config, tensors) in parts.items():
        (folder / part).mkdir(parents=True)
        save(tensors, folder / part / f"{file}.safetensors")
        (folder / part / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(index))
    return network


def adapter(path: Path) -> Path:
    lora = {}
    for n, name in enumerate((INNER[0], OUTER[0])):
        lora[f"transformer.{name}.lora_A.weight"] = rand(4, WIDTH, seed=20 + n)
        lora[f"transformer.{name}.lora_B.weight"] = rand(WIDTH, 4, seed=30 + n, scale=0.02)
    return save(lora, path)


def left_out(name: str, listed: list[str]) -> bool:
    """Whether a loader takes a layer for one that is not quantised: diffusers' rule, and that of transformers."""
    by_diffusers = name.rpartition(".")[2] in listed or any(f"{one}." in name or one == name for one in listed)
    return by_diffusers or any(name.endswith(one) or f"{name}.".startswith(f"{one}.") for one in listed)


@pytest.mark.few(2)
@pytest.mark.parametrize(("last", "kept"), [(WIDTH, ()), (4, ()), (WIDTH, ("re:^transformer\\.proj_out",))])
@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_transformer_is_quantised_and_the_rest_is_copied(dtype: str, last: int, kept: Any, tmp_path: Path) -> None:
    base = pipeline(tmp_path / "base", last)
    lora = adapter(tmp_path / "lora.safetensors")
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", dtype=dtype, keep_precision=kept)
    assert lora_merge.verify(tmp_path / "out", full=True)["full"]
    for part, file in (("text_encoder", "model"), ("vae", "diffusion_pytorch_model")):
        before, after = (load(tmp_path / where / part / f"{file}.safetensors") for where in ("base", "out"))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
    for name in ("model_index.json", "text_encoder/config.json", "vae/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    section = json.loads((tmp_path / "out/transformer/config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "bitsandbytes"
    made = load(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
    coded = {name for name in NAMES if made[f"{name}.weight"].dtype in {torch.uint8, torch.int8}}
    assert coded == {*INNER, *(() if kept or last < WIDTH else (*OUTER, "proj_out"))}
    assert coded == {name for name in NAMES if not left_out(name, section["llm_int8_skip_modules"])}
    assert {*open_checkpoint(tmp_path / "out").packed} == {f"transformer.{name}.weight" for name in coded}
    form, added, old = FORMS[f"bitsandbytes {dtype}"], load(lora), base[f"{INNER[0]}.weight"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.files.quantised_forms.SHAPE", (WIDTH, WIDTH))
        found = form.read({key.removeprefix(f"{INNER[0]}."): t for key, t in made.items() if key.startswith(INNER[0])})
    stem = f"transformer.{INNER[0]}"
    want = old + added[f"{stem}.lora_B.weight"] @ added[f"{stem}.lora_A.weight"]
    assert (found - want).norm() < (0.12 if dtype == "nf4" else 0.012) * want.norm()


def test_folder_without_a_configuration_cannot_be_quantised(tmp_path: Path) -> None:
    """A loader of transformers learns from config.json how the weights are stored."""
    (tmp_path / "base").mkdir()
    save({"a.weight": rand(64, 64)}, tmp_path / "base" / "model.safetensors")
    pair = {"a.lora_up.weight": rand(64, 2), "a.lora_down.weight": rand(2, 64)}
    lora = save(pair, tmp_path / "lora.safetensors")
    with pytest.raises(UsageError, match=r"a folder without config\.json") as caught:
        lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", dtype="int8")
    assert "give the file in it" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_formats_that_diffusers_does_not_read_are_refused_with_what_it_reads(tmp_path: Path) -> None:
    pipeline(tmp_path / "base")
    lora = adapter(tmp_path / "lora.safetensors")
    for dtype in ("fp8_scaled", "fp8_block", "nvfp4", "mxfp8"):
        with pytest.raises(UsageError, match=f"diffusers reads no folder in {dtype}") as caught:
            lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", dtype=dtype)
        assert caught.value.fix == 'write dtype="nf4" or dtype="int8"'
    assert not (tmp_path / "out").exists()
