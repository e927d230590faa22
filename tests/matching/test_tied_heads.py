"""Values that an adapter holds of a head that shares the embeddings' weight: each goes to the parameter of its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import UnmatchedModules
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

V, H = 10, 8
TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
HEADS = {
    "cls.predictions.decoder": ("BertForMaskedLM", {TABLE: rand(V, H), BIAS: rand(V)}),
    "lm_head": ("LlamaForCausalLM", {"model.embed_tokens.weight": rand(V, H)}),
}


def merged(
    folder: Path, head: str, saved: dict[str, torch.Tensor], *, one: bool = False, skip: bool = False
) -> Tensors:
    """The tensors of the base after these values of the head's parameters were merged."""
    kind, base = HEADS[head]
    base = {**base, "layer.0.query.weight": rand(H, H)}
    (folder / "base").mkdir()
    save(base, folder / "base" / "model.safetensors")
    told = {"architectures": [kind], "tie_word_embeddings": True}
    (folder / "base" / "config.json").write_text(json.dumps(told))
    (folder / "adapter").mkdir()
    factors = {"base_model.model.layer.0.query.lora_A.weight": rand(2, H),
               "base_model.model.layer.0.query.lora_B.weight": rand(H, 2)}  # fmt: skip
    values = {f"base_model.model.{head}.{name}": value for name, value in saved.items()}
    if one:  # PEFT saves the embeddings too
        values["base_model.model.model.embed_tokens.weight"] = saved["weight"].clone()
    save({**factors, **values}, folder / "adapter" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query"], "ensure_weight_tying": one,
            "modules_to_save": [head.rpartition(".")[2]]}  # fmt: skip
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    unmatched = "skip" if skip else "error"
    lora_merge.merge(folder / "base", folder / "adapter", folder / "out", unmatched=unmatched)
    got = load(folder / "out" / "model.safetensors")
    return {k: t for k, t in got.items() if k not in base or not torch.equal(t, base[k])}


@pytest.mark.parametrize(
    ("saved", "changed"),
    [
        (["weight", "bias"], {"cls.predictions.decoder.weight": "weight", "cls.predictions.decoder.bias": "bias"}),
        (["bias"], {BIAS: "bias"}),  # one parameter of two names
        (["weight"], {"cls.predictions.decoder.weight": "weight", "cls.predictions.decoder.bias": BIAS}),
    ],
    ids=lambda v: "+".join(v),
)
def test_every_value_of_a_head_lands_in_the_parameter_of_its_name(
    saved: list[str], changed: dict[str, str], tmp_path: Path
) -> None:
    values = {"weight": rand(V, H, seed=5), "bias": rand(V, seed=6), BIAS: HEADS["cls.predictions.decoder"][1][BIAS]}
    got = merged(tmp_path, "cls.predictions.decoder", {name: values[name] for name in saved})
    assert got.keys() == {*changed, "layer.0.query.weight"}
    assert all(torch.equal(got[key], values[name]) for key, name in changed.items())


@pytest.mark.few(4)
@pytest.mark.parametrize("one", [False, True], ids=["apart", "as one"])
@pytest.mark.parametrize("parameter", ["bias", "scale", "other"])
@pytest.mark.parametrize("shape", [(V,), (V, H)], ids=str)
def test_value_of_no_parameter_of_the_head_lands_nowhere(
    shape: tuple[int, ...],
    parameter: str,
    one: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """Whatever its shape is, and though a tensor of that shape has a place."""
    saved = {"weight": rand(V, H, seed=5), parameter: rand(*shape, seed=6)}
    key = f"lm_head.{parameter}"
    for skip in (False, True):
        (folder := tmp_path / str(skip)).mkdir()
        if not skip:
            with pytest.raises(UnmatchedModules, match=key):
                merged(folder, "lm_head", saved, one=one)
            continue
        got = merged(folder, "lm_head", saved, one=one, skip=skip)
        assert got.keys() == {"model.embed_tokens.weight" if one else "lm_head.weight", "layer.0.query.weight"}
        assert all(torch.equal(t, saved["weight"]) for k, t in got.items() if "query" not in k)
