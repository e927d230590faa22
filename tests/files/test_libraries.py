"""Layers that libraries stored are read as the libraries read them; where a library is there, it reads the outputs too."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import lora_merge
from tests.files import quantised_forms
from tests.files.libraries import LIBRARIES, stored
from tests.files.quantised_forms import FORMS
from tests.kit.files import load, save
from tests.kit.quantised import kept, made_plain
from tests.kit.tensors import rand

STORED = stored()
LAYER = "model.layers.0.self_attn.q_proj"
STEM = f"base_model.model.{LAYER}.lora"


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LIBRARIES)
def test_layer_is_read_as_its_library_reads_it(name: str, tmp_path: Path) -> None:
    layer, config = {**STORED[name]}, LIBRARIES[name].form.config
    want, down, up = layer.pop("want"), rand(4, 64, seed=1), rand(32, 4, seed=2, scale=0.02)
    lora = save({f"{STEM}_A.weight": down, f"{STEM}_B.weight": up}, tmp_path / "lora.safetensors")
    (tmp_path / "base").mkdir()
    tensors = {f"{LAYER}.{last}": value for last, value in layer.items()}
    save({**tensors, "model.norm.weight": torch.ones(8)}, tmp_path / "base" / "model.safetensors")
    told = {"model_type": "x", "quantization_config": config}
    (tmp_path / "base" / "config.json").write_text(json.dumps(told))
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", dtype="fp32")
    made = load(tmp_path / "out" / "model.safetensors")
    assert {*made} == {f"{LAYER}.weight", "model.norm.weight"}
    near = 2e-6 * float(want.abs().max())
    torch.testing.assert_close(
        made[f"{LAYER}.weight"].double(), want.double() + up.double() @ down.double(), rtol=1e-6, atol=near
    )


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name in FORMS])
def test_formulas_of_the_tests_are_those_of_the_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests make and read such layers where the library is not there."""
    layer = {**STORED[name]}
    want = layer.pop("want")
    monkeypatch.setattr(quantised_forms, "SHAPE", tuple(want.shape))
    with monkeypatch.context():
        torch.testing.assert_close(
            FORMS[name].read(layer).float(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max())
        )


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # ModelOpt warns when it is imported: of other releases, of torch
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_reads_what_is_merged_into_its_own_layers(name: str, tmp_path: Path) -> None:
    module, form = LIBRARIES[name]
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed; pip install .[oracles] has what runs here")
    for check in (made_plain, kept)[: 1 if form.decode_only else 2]:
        (folder := tmp_path / check.__name__).mkdir()
        check(form, folder)
