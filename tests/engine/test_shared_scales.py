"""Weights that vLLM joins and reads with one scale of the whole weight: q, k and v; gate and up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from tests.files.quantised_forms import FORMS
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

LAYER = "model.layers.0."
GROUPS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
ALONE = ("self_attn.o_proj", "mlp.down_proj")


def base(folder: Path) -> Path:
    """A model whose weights have other magnitudes, in two shards: q lies in another one than k and v."""
    names = [*GROUPS[0], *GROUPS[1], *ALONE]
    found = {f"{LAYER}{name}.weight": rand(64, 64, seed=n, scale=0.02 * 3**n) for n, name in enumerate(names)}
    shards = ([f"{LAYER}{name}.weight" for name in names[1:]], [f"{LAYER}{names[0]}.weight"])
    folder.mkdir()
    files = {}
    for n, keys in enumerate(shards):
        file = f"model-0000{n + 1}-of-00002.safetensors"
        save_file({key: found[key] for key in keys}, folder / file)
        files |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "float32"}))
    return folder


def lora(path: Path, module: str, scale: float) -> Path:
    stem = f"base_model.model.{LAYER}{module}.lora"
    return save({f"{stem}_A.weight": rand(4, 64, seed=50), f"{stem}_B.weight": rand(64, 4, seed=51, scale=scale)}, path)


def test_new_weights_that_servers_join_have_one_scale(tmp_path: Path) -> None:
    """It covers the largest number of all of them, as it is after the merge."""
    source = base(tmp_path / "base")
    adapter = lora(tmp_path / "lora.safetensors", "self_attn.q_proj", 5.0)
    made: Tensors = {}
    lora_merge.merge(source, adapter, tmp_path / "out", dtype="nvfp4")
    lora_merge.merge(source, adapter, tmp_path / "plain", dtype="fp32")
    assert lora_merge.verify(tmp_path / "out", full=True)["full"]
    plain: Tensors = {}
    for n in (1, 2):
        made |= load(tmp_path / "out" / f"model-0000{n}-of-00002.safetensors")
        plain |= load(tmp_path / "plain" / f"model-0000{n}-of-00002.safetensors")
    for group in (*GROUPS, *((name,) for name in ALONE)):
        largest = max(float(plain[f"{LAYER}{name}.weight"].abs().max()) for name in group)
        for name in group:
            assert made[f"{LAYER}{name}.weight_global_scale"].item() == pytest.approx(448 * 6 / largest, rel=1e-5)


@pytest.mark.parametrize("scale", [0.001, 2.0])
def test_scale_that_grows_alone_says_so(scale: float, tmp_path: Path) -> None:
    form = FORMS["compressed-tensors nvfp4"]
    found: Tensors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.files.quantised_forms.SHAPE", (64, 64))
        for n, name in enumerate(GROUPS[0]):
            found |= {f"{LAYER}{name}.{last}": t for last, t in form.make(rand(64, 64, seed=n, scale=0.02)).items()}
    (tmp_path / "base").mkdir()
    save(found, tmp_path / "base" / "model.safetensors")
    told = {"model_type": "x", "quantization_config": form.config}
    (tmp_path / "base" / "config.json").write_text(json.dumps(told))
    adapter = lora(tmp_path / "lora.safetensors", "self_attn.q_proj", scale)
    report = lora_merge.merge(tmp_path / "base", adapter, tmp_path / "out")
    made = load(tmp_path / "out" / "model.safetensors")
    key = f"{LAYER}self_attn.q_proj.weight_global_scale"
    grown = not torch.equal(made[key], found[key])
    assert grown == (scale > 1) == any("vLLM and SGLang" in note for note in report.notes)
