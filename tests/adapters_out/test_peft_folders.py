"""Folders of PEFT, made from what PEFT has trained: PEFT loads them without a word, computes and merges what is meant."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.convert import opened, plan
from lora_merge.adapters_out.form import planned_modules
from lora_merge.errors import FitError, UsageError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.recipes.commands import COMMANDS
from tests.kit.tensors import Tensors, rand

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """Layers with and without biases, embeddings and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.q = torch.nn.Linear(6, 6)
        self.o = torch.nn.Linear(6, 6, bias=False)
        self.up = torch.nn.Linear(6, 8)
        self.conv = torch.nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.conv(self.norm(self.table(ids)).mT).mT
        return self.up(torch.tanh(self.o(torch.tanh(self.q(x)))))  # type: ignore[no-any-return]


def model() -> Model:
    torch.manual_seed(0)
    return Model().double().eval()


WEIGHTS = "adapter_model.safetensors"
IDS = torch.arange(9)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(model().state_dict(), path)
    return path


def trained(folder: Path, seed: int = 0, kind: Any = peft.LoraConfig, **options: Any) -> Path:
    """A folder that PEFT writes; each of its numbers is drawn."""
    made = peft.get_peft_model(model(), kind(r=2, **options))
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if value.requires_grad:
                value += 0.3 * torch.randn(value.shape)
                assert "lora_" not in name or value.abs().max()
    made.save_pretrained(folder)
    return folder


def changes(folder: Path) -> Tensors:
    """What PEFT adds to the weights; a missing key is an error, and so is an output that differs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        loaded = peft.PeftModel.from_pretrained(model(), folder, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        seen = loaded(IDS)
        merged = loaded.merge_and_unload()
        assert torch.allclose(seen, merged(IDS), rtol=0, atol=1e-9)
    before = model().state_dict()
    return {name: value - before[name] for name, value in merged.state_dict().items()}


def expect_planned(adapter: Path, out: Path, to: str, base: Path | None) -> None:
    """Convert an adapter. The plan has to tell the tensors of the output, those that PEFT asks for among them."""
    task = COMMANDS["convert"].job([adapter], out, base, {"to": to, "overwrite": True})
    found = opened(task, CheckpointCache())
    planned = {row for module in planned_modules(found) for row in module.rows(found.to)}
    told, made = plan(task), lora_merge.convert(adapter, out, base=base, to=to, overwrite=True)
    stored = open_checkpoint(out).tensors
    assert planned == {(name, info.dtype, info.shape) for name, info in stored.items()}
    assert {n: x["rank"] for n, x in told.layers.items()} == {n: x["rank"] for n, x in made.layers.items()}
    assert told.dtype == made.dtype and 0 <= told.written - made.written <= 2 * 4096


def check(folder: Path, wanted: Tensors, within: float = 1e-6) -> None:
    own, config = peft.load_peft_weights(str(folder)), peft.PeftConfig.from_pretrained(str(folder))
    assert not peft.set_peft_model_state_dict(peft.get_peft_model(model(), config), own).unexpected_keys
    found = changes(folder)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=within), name


BIASES: dict[str, dict[str, Any]] = {
    "of all layers": {"bias": "all", "target_modules": ["q"]},
    "of layers with factors": {"bias": "lora_only", "target_modules": ["q", "o"]},
    "beside DoRA": {"bias": "all", "use_dora": True, "target_modules": ["o", "conv"]},
    "beside embeddings": {"bias": "all", "target_modules": ["q", "table"]},
    "beside a whole layer": {"bias": "all", "target_modules": ["q"], "modules_to_save": ["up"]},
    "of factors": {"lora_bias": True, "target_modules": ["q", "up"]},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", BIASES)
def test_biases_are_loaded_and_merged(case: str, base: Path, tmp_path: Path) -> None:
    """Also where layers without factors have them, where some layers have none, and beside what `lora_bias` refuses."""
    options = BIASES[case]
    a, b = (trained(tmp_path / name, n, lora_alpha=3, **options) for n, name in enumerate("ab"))
    one, two = changes(a), changes(b)
    expect_planned(a, tmp_path / "same", "peft", base)
    check(tmp_path / "same", one)
    lora_merge.combine([(a, 0.5), (b, -1.5)], tmp_path / "sum", base=base, rank="energy:1")
    check(tmp_path / "sum", {name: 0.5 * value - 1.5 * two[name] for name, value in one.items()})
    own = json.loads((tmp_path / "sum" / "adapter_config.json").read_text())
    assert (own["bias"] == "none") == ("lora_bias" in own)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["table", "up"]},
    "DoRA": {"target_modules": ["table", "up"], "use_dora": True},
    "of other ranks": {"target_modules": ["table", "up"], "rank_pattern": {"table": 3}, "use_rslora": True},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_stay_embeddings_whatever_their_name(case: str, base: Path, tmp_path: Path) -> None:
    a = trained(tmp_path / "a", lora_alpha=3, **EMBEDDINGS[case])
    wanted, with_dora = changes(a), case == "DoRA"
    expect_planned(a, tmp_path / "same", "peft", base if with_dora else None)
    check(tmp_path / "same", wanted)
    lora_merge.combine([(a, 0.5)], tmp_path / "half", base=base if with_dora else None, rank="energy:1")
    check(tmp_path / "half", {name: 0.5 * value for name, value in wanted.items()})


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
def test_strength_goes_into_a_folder_of_another_algorithm(kind: str, tmp_path: Path) -> None:
    a = trained(tmp_path / "a", kind=getattr(peft, kind), alpha=3, target_modules=["q", "up"], init_weights=False)
    lora_merge.convert((a, 0.5), tmp_path / "half")
    check(tmp_path / "half", {name: value / 2 for name, value in changes(a).items()})


def test_changed_bias_is_extracted_into_a_folder(base: Path, tmp_path: Path) -> None:
    """That of `up` alone, whose weight is the same; `o` changes too and has none."""
    state = load_file(base)
    tuned = {**state, "up.bias": rand(8).double(), "o.weight": state["o.weight"] + 1.0}
    save_file(tuned, tmp_path / "tuned.safetensors")
    lora_merge.extract(base, tmp_path / "tuned.safetensors", tmp_path / "made", format="peft", rank=1)
    check(tmp_path / "made", {name: value - state[name] for name, value in tuned.items()})
    lora_merge.extract(
        base, tmp_path / "tuned.safetensors", out := tmp_path / "o.safetensors", format="diffusers", rank=1
    )
    assert not load_file(out)["transformer.up.lora_B.weight"].any()
    assert load_file(tmp_path / "made" / WEIGHTS).keys() == {
        "base_model.model.up.bias", "base_model.model.o.lora_A.weight", "base_model.model.o.lora_B.weight"
    }  # fmt: skip


def test_layers_without_dora_get_the_magnitudes_that_they_have_beside_others_with_it(
    base: Path, tmp_path: Path
) -> None:
    """PEFT gives all layers magnitudes or none, those of the unchanged weight where a folder lacks them. α is stored
    beside fp64 factors as it is."""
    tensors = {f"{name}.lora_{way}.weight": rand(*shape, seed=n).double() for name, out in (("q", 6), ("up", 8))
               for n, (way, shape) in enumerate((("up", (out, 2)), ("down", (2, 6))))}  # fmt: skip
    tensors |= {"q.dora_scale": rand(6, 1, seed=5).abs(), "q.alpha": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    state = load_file(base)
    merged = lora_merge.merge_state_dict(state, [tmp_path / "a.safetensors"])
    lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="kohya", base=base)
    expect_planned(tmp_path / "b.safetensors", tmp_path / "out", "peft", base)
    check(tmp_path / "out", {name: value - state[name] for name, value in merged.items()})


def of_up(folder: Path) -> Path:
    """A file with factors for one layer and the change of the bias of another one."""
    tensors = {"q.lora_up.weight": rand(6, 1), "q.lora_down.weight": rand(1, 6), "up.diff_b": rand(8)}
    save_file(tensors, folder / "a.safetensors")
    return folder / "a.safetensors"


def test_bias_alone_goes_into_a_file_of_diffusers_beside_factors_of_zeros(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    expect_planned(of_up(tmp_path), out, "diffusers", base)
    found, wanted = (lora_merge.merge_state_dict(load_file(base), [f]) for f in (out, tmp_path / "a.safetensors"))
    assert load_file(out)["transformer.up.lora_A.weight"].shape == (1, 6)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in wanted.items())


def test_new_value_of_a_bias_needs_the_base(tmp_path: Path) -> None:
    stem = "lora_unet_single_blocks_0_linear"
    tensors = {f"{stem}2.lora_up.weight": rand(8, 1), f"{stem}2.lora_down.weight": rand(1, 40),
               "lora_unet_double_blocks_0_img_mod_lin.diff_b": rand(48)}  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="bias") as told:
        lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "out", to="peft")
    assert "base=MODEL" in str(told.value.fix)
    assert not (tmp_path / "out").exists()


SMALL: dict[str, Any] = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)


def of_transformers(folder: Path, kind: str, head: str, lora: Any, **options: Any) -> tuple[Any, Path]:
    """A function that returns a tiny model of transformers, whose checkpoint is in folder/base, and an adapter of it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL, **options)
    torch.manual_seed(0)
    getattr(transformers, head).from_config(config).save_pretrained(folder / "base")

    def model() -> Any:
        return getattr(transformers, head).from_pretrained(folder / "base").eval()

    made = peft.get_peft_model(model(), lora)
    for value in (v for v in made.parameters() if v.requires_grad):
        torch.nn.init.normal_(value, std=0.3)
    made.save_pretrained(folder / "a")
    return model, folder / "a"


def test_names_in_a_folder_are_those_of_the_model_in_memory(tmp_path: Path) -> None:
    """transformers 5 loads the weights of ViT under other names than its checkpoints have."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    model, a = of_transformers(tmp_path, "vit", "AutoModelForImageClassification", lora, image_size=4, patch_size=2)
    base, kohya = tmp_path / "base", tmp_path / "k.safetensors"
    lora_merge.resize(a, tmp_path / "out", rank=2, base=base)
    lora_merge.convert(a, kohya, to="kohya", base=base)
    lora_merge.convert(kohya, tmp_path / "back", to="peft", base=base)
    picture, folders = rand(1, 3, 4, 4), (a, tmp_path / "out", tmp_path / "back")
    one, two, three = (peft.PeftModel.from_pretrained(model(), f)(picture).logits for f in folders)
    assert torch.allclose(one, two, atol=1e-5) and torch.allclose(one, three, atol=1e-5)
    assert not torch.allclose(one, model()(picture).logits, atol=1e-3)


def test_head_that_is_trained_apart_stays_apart(tmp_path: Path) -> None:
    """Its weight is that of the embeddings in the base."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model, a = of_transformers(tmp_path, "llama", "AutoModelForCausalLM", lora, vocab_size=9, tie_word_embeddings=True)
    lora_merge.convert(a, tmp_path / "out", to="peft", base=tmp_path / "base")
    lora_merge.convert((a, 0.5), tmp_path / "half", to="peft", base=tmp_path / "base")
    one, two = (peft.PeftModel.from_pretrained(model(), f)(IDS).logits for f in (a, tmp_path / "out"))
    assert torch.allclose(one, two, atol=1e-5)
    files = (tmp_path / "base" / "model.safetensors", a / WEIGHTS, tmp_path / "half" / WEIGHTS)
    table, own, half = (next(v for k, v in load_file(f).items() if k.endswith(e)) for f, e in zip(
        files, ("embed_tokens.weight", "lm_head.weight", "lm_head.weight"), strict=True))  # fmt: skip
    assert torch.allclose(half, (own + table) / 2, atol=1e-6)
    with pytest.raises(FitError, match="head"):
        lora_merge.combine([a, a], tmp_path / "sum", base=tmp_path / "base", rank=2)


@pytest.mark.parametrize("with_base", [True, False])
def test_lycoris_finds_the_layers_of_a_language_model(with_base: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Its wrapper names them from the top of the model, and an adapter of PEFT does."""
    lycoris = pytest.importorskip("lycoris")
    lora = peft.LoraConfig(r=2, target_modules=["query", "classifier"], init_lora_weights=False)
    model, a = of_transformers(tmp_path, "bert", "AutoModelForSequenceClassification", lora, vocab_size=9)
    out = tmp_path / "out.safetensors"
    lora_merge.convert(a, out, to="lycoris", base=tmp_path / "base" if with_base else None)
    merged = peft.PeftModel.from_pretrained(model(), a).merge_and_unload()
    loaded = model()
    network, _ = lycoris.create_lycoris_from_weights(1.0, str(out), loaded)
    assert len(network.loras) == 2
    network.merge_to(1.0)
    assert torch.allclose(loaded(IDS).logits, merged(IDS).logits, atol=1e-5)


def by_lora_alpha_alone(folder: Path) -> Tensors:
    """ΔW by llama.cpp's rule: lora_alpha over the rank of each tensor (convert_lora_to_gguf.py, llama-adapter.h)."""
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    t = load_file(folder / WEIGHTS)
    pairs = {key: key.replace("lora_A", "lora_B") for key in t if "lora_A" in key}
    return {a: alpha / len(t[a]) * (t[b].flatten(1) @ t[a].flatten(1)) for a, b in pairs.items()}


@pytest.mark.parametrize("rank", ["exact", 8])
def test_ranks_that_differ_are_noted_and_a_number_gives_all_layers_one(tmp_path: Path, rank: str | int) -> None:
    a = trained(tmp_path / "a", 1, target_modules=["q", "conv"], rank_pattern={"q": 4})
    b = trained(tmp_path / "b", 2, target_modules=["q", "up"])
    one, two = by_lora_alpha_alone(a), by_lora_alpha_alone(b)
    report = lora_merge.combine([a, b], tmp_path / "out", rank=rank)
    found = by_lora_alpha_alone(tmp_path / "out")
    right = [torch.allclose(found[key], one.get(key, 0) + two.get(key, 0)) for key in {*one, *two}]
    ranks = {len(value) for key, value in load_file(tmp_path / "out" / WEIGHTS).items() if "lora_A" in key}
    if rank == "exact":
        assert ranks == {2, 6} and not all(right)
        assert any("llama.cpp" in note and "rank=6" in note for note in report.notes)
    else:
        assert ranks == {6} and all(right)
        assert not any("llama.cpp" in note for note in report.notes)
