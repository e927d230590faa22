"""Folders of PEFT for models of transformers: names begin at the top of the model in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: dict[str, tuple[Any, str, dict[str, Any], list[str]]] = {
    "gpt2": ("AutoModelForCausalLM", "gpt2", dict(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=8), ["c_attn", "c_proj"]),
    "bert": ("AutoModelForMaskedLM", "bert", dict(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24), ["query", "dense"]),
    "llama": ("AutoModelForCausalLM", "llama", dict(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24), ["q_proj"]),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path, Path]:
    """The class of a model, its base, and an adapter that PEFT saved."""
    auto, kind, sizes, targets = KINDS[request.param]
    torch.manual_seed(0)
    model = getattr(transformers, auto)
    model.from_config(transformers.AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "base")
    trained = peft.get_peft_model(
        model.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=2, target_modules=targets)
    )
    for name, value in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.1)
    trained.save_pretrained(tmp_path / "lora")
    return model, tmp_path / "base", tmp_path / "lora"


def loaded(model: Any, base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The weights that PEFT gives, without a warning of keys that the folder lacks."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = peft.PeftModel.from_pretrained(model.from_pretrained(base), adapter)
    assert not [str(one.message) for one in told if "missing adapter keys" in str(one.message)]
    return {name: value.clone() for name, value in found.merge_and_unload().state_dict().items()}


def expect_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@pytest.mark.few(2)
def test_peft_finds_every_layer_of_a_folder(files: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, base, lora = files
    wanted = loaded(model, base, lora)
    lora_merge.convert(lora, tmp_path / "again", to="peft", base=base)
    expect_same(wanted, loaded(model, base, tmp_path / "again"))
    lora_merge.convert(lora, tmp_path / "kohya.safetensors", to="kohya", base=base)
    lora_merge.convert(tmp_path / "kohya.safetensors", tmp_path / "back", to="peft", base=base)
    expect_same(wanted, loaded(model, base, tmp_path / "back"))


def test_adapter_of_peft_shows_a_level_that_its_base_lacks(tmp_path: Path) -> None:
    """GPT-2 as it was published has no level, and the model with a head that PEFT adapts has one."""
    model, kind, sizes, targets = KINDS["gpt2"]
    torch.manual_seed(0)
    whole = getattr(transformers, model).from_config(transformers.AutoConfig.for_model(kind, **sizes))
    trained = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    trained.save_pretrained(tmp_path / "lora")
    trained.unload().save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): value for name, value in stored.items()},
        tmp_path / "base" / "model.safetensors",
        {"format": "pt"},
    )
    lora_merge.convert(tmp_path / "lora", tmp_path / "again", to="peft", base=tmp_path / "base", dtype="bf16")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "again"))
    assert before.keys() == after.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"rank": "energy:1"}, {"algorithm": "full"}, {"rank": "energy:1", "format": "peft"},
                                     {"algorithm": "full", "format": "peft"}, {"format": "kohya"}])  # fmt: skip
def test_sum_of_adapters_of_transposed_weights_is_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2 stores [in, out], and its adapters are [out, in]; c_proj of its attention is square."""
    auto, kind, sizes, _ = KINDS["gpt2"]
    model = getattr(transformers, auto)
    torch.manual_seed(0)
    model.from_config(transformers.AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "base")
    before = model.from_pretrained(tmp_path / "base").state_dict()
    wanted = {name: value.clone() for name, value in before.items()}
    given = []
    for name, strength, targets, whole in (
        ("a", 0.5, ["c_attn", "c_proj"], None),
        ("b", -1.5, ["c_proj"], ["h.0.mlp.c_fc"]),
    ):
        own = peft.LoraConfig(
            r=2, target_modules=targets, modules_to_save=whole if options == {"algorithm": "full"} else None
        )
        trained = peft.get_peft_model(model.from_pretrained(tmp_path / "base"), own)
        for value in (v for v in trained.parameters() if v.requires_grad):
            value.data += 0.1 * torch.randn_like(value)
        trained.save_pretrained(tmp_path / name)
        given.append((tmp_path / name, strength))
        made = loaded(model, tmp_path / "base", tmp_path / name)
        wanted = {key: value + strength * (made[key] - before[key]) for key, value in wanted.items()}
    out = tmp_path / ("out" if options.get("format") == "peft" else "out.safetensors")
    report = lora_merge.combine(given, out, base=tmp_path / "base", dtype="fp32", **options)
    assert report.verified is not None
    lora_merge.merge(tmp_path / "base", out, tmp_path / "merged", dtype="fp32")
    expect_same(wanted, model.from_pretrained(tmp_path / "merged").state_dict())
    if out.is_dir():
        expect_same(wanted, loaded(model, tmp_path / "base", out))
    lora_merge.resize(given[0][0], tmp_path / "r.safetensors", base=tmp_path / "base", rank=1, dtype="fp32")
    lora_merge.resize(given[0][0], tmp_path / "s.safetensors", rank=1, dtype="fp32")
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in "rs")
    assert one.keys() == other.keys() and all(one[key].shape == other[key].shape for key in one)


def test_head_that_was_trained_apart_is_reported_where_the_output_cannot_say_it(tmp_path: Path) -> None:
    auto, kind, sizes, _ = KINDS["llama"]
    model = getattr(transformers, auto)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)
    model.from_config(config).save_pretrained(tmp_path / "base")
    for name, targets in (("apart", ["embed_tokens"]), ("plain", ["q_proj"])):
        own = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        peft.get_peft_model(model.from_pretrained(tmp_path / "base"), own).save_pretrained(tmp_path / name)
        out = tmp_path / f"{name}.safetensors"
        report = lora_merge.convert(tmp_path / name, out, to="kohya", base=tmp_path / "base")
        assert any("trained apart from the embeddings" in str(note) for note in report.notes) is (name == "apart")
        assert not any("now stored apart" in str(note) for note in report.notes)
