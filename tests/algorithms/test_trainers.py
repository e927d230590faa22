"""Every trainer that is no test dependency: its file, merged by the tool, is what its layer computes.

The layers are those of trainers.py; `SOURCES` there says which version of the original each was compared with.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lora_merge
from lora_merge.viewing.inspect import inspect
from tests.algorithms import trainers

Make = Callable[[Any], trainers.Trained]

LAYERS: dict[str, Callable[[], nn.Linear | nn.Conv2d]] = {
    "linear": lambda: nn.Linear(24, 36),
    "plain": lambda: nn.Linear(36, 24, bias=False),
    "conv": lambda: nn.Conv2d(6, 12, 3, stride=2, padding=1),
    "point": lambda: nn.Conv2d(12, 24, 1),
}
BOTH, LINEAR, ALL = ("linear", "conv"), ("linear", "plain"), tuple(LAYERS)

CASES: dict[str, tuple[Make, tuple[str, ...], str, dict[str, Any]]] = {
    "KohyaOft": (trainers.KohyaOft, ALL, "oft_unet_blocks_0", {}),
    "KohyaOft, free": (lambda m: trainers.KohyaOft(m, alpha=10.0), ALL, "oft_unet_blocks_0", {}),
    "KohyaSplitOft": (lambda m: trainers.KohyaSplitOft(m, (12, 12, 12)), ("linear",), "oft_unet_blocks_0", {}),
    "KohyaSplitOft, free": (
        lambda m: trainers.KohyaSplitOft(m, (8, 8, 20), alpha=10.0), ("linear",), "oft_unet_blocks_0", {},
    ),
    "KohyaDylora": (trainers.KohyaDylora, ALL, "lora_unet_blocks_0", {}),
    "OneTrainerOft": (trainers.OneTrainerOft, ALL, "transformer.blocks.0", {}),
    "OneTrainerOft, shared": (lambda m: trainers.OneTrainerOft(m, share=True), ALL, "lora_unet_blocks_0", {}),
    "OneTrainerOft, scaled": (lambda m: trainers.OneTrainerOft(m, scaled=True), BOTH, "transformer.blocks.0", {}),
    "OneTrainerLoha": (trainers.OneTrainerLoha, ALL, "lora_unet_blocks_0", {}),
    "OneTrainerDora, inputs": (lambda m: trainers.OneTrainerDora(m, outputs=False), ALL, "lora_unet_blocks_0", {}),
    "OneTrainerDora, outputs": (lambda m: trainers.OneTrainerDora(m, outputs=True), ALL, "lora_unet_blocks_0", {}),
    "ToolkitLora": (trainers.ToolkitLora, ALL, "transformer.blocks.0", {}),
    "ToolkitLora, bias": (lambda m: trainers.ToolkitLora(m, bias=True), BOTH, "diffusion_model.blocks.0", {}),
    "ToolkitFullRank": (trainers.ToolkitFullRank, ALL, "transformer.blocks.0", {}),
    "ToolkitDora": (trainers.ToolkitDora, LINEAR, "transformer.blocks.0", {}),
    "ToolkitLokr, whole": (trainers.ToolkitLokr, ALL, "lycoris_blocks_0", {}),
    "ToolkitLokr, low": (lambda m: trainers.ToolkitLokr(m, rank=2), ALL, "transformer.blocks.0", {}),
    "ToolkitFull": (trainers.ToolkitFull, BOTH, "transformer.blocks.0", {}),
    "OldGlora": (trainers.OldGlora, ("linear", "plain", "point"), "lycoris_blocks_0", {}),
    "TuckerGlora": (trainers.TuckerGlora, ("conv",), "lycoris_blocks_0", {}),
    "OftDiag": (trainers.OftDiag, ALL, "lycoris_blocks_0", {}),
    "Litgpt": (trainers.Litgpt, LINEAR, "blocks.0", {"lora_alpha": 6.0}),
    "LitgptFused": (
        lambda m: trainers.LitgptFused(m, ((0, 12), (12, 24), (24, 36))), ("linear",), "blocks.0",
        {"lora_alpha": 6.0, "parts": [[0, 12], [12, 24], [24, 36]]},
    ),
    "LitgptFused, grouped": (
        lambda m: trainers.LitgptFused(m, ((0, 24), (30, 36))), ("linear",), "blocks.0",
        {"lora_alpha": 6.0, "parts": [[0, 24], [30, 36]]},
    ),
    "StableAudioXs": (trainers.StableAudioXs, ALL, "model.blocks.0", {"lora_alpha": 6.0}),
    "StableAudioBora": (trainers.StableAudioBora, ALL, "model.blocks.0", {"lora_alpha": 6.0}),
    "LongCatLora": (lambda m: trainers.LongCatLora(m, (16, 8, 12)), ("linear",), "blocks.0", {}),
    "Torchtune": (trainers.Torchtune, LINEAR, "blocks.0", {"lora_alpha": 6.0}),
    "TorchtuneDora": (trainers.TorchtuneDora, ("plain",), "blocks.0", {"lora_alpha": 6.0}),
    "Scratch": (lambda m: trainers.Scratch(m, over_rank=True), LINEAR, "blocks.0", {"lora_alpha": 6.0}),
    "Scratch, first editions": (
        lambda m: trainers.Scratch(m, over_rank=False), LINEAR, "blocks.0", {"lora_alpha": 6.0, "over_rank": False},
    ),
    "Mlx": (trainers.Mlx, LINEAR, "blocks.0", {"lora_alpha": 2.0, "over_rank": False}),
    "MlxDora": (trainers.MlxDora, LINEAR, "blocks.0", {"lora_alpha": 2.0, "over_rank": False}),
}  # fmt: skip


def inputs(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Something to feed it with."""
    shape = (5, layer.in_features) if isinstance(layer, nn.Linear) else (2, layer.in_channels, 7, 6)
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.few(6)
@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, one in CASES.items() for kind in one[1]])
def test_merged_file_is_the_trained_layer(case: str, kind: str, tmp_path: Path) -> None:
    make, _, name, setting = CASES[case]
    torch.manual_seed(3)
    layer = LAYERS[kind]()
    trained = make(layer).double()
    layer.double()
    saved = {f"{name}.{key}": value.detach().clone().contiguous() for key, value in trained.state_dict().items()}
    save_file(saved, tmp_path / "adapter.safetensors")
    base = {f"blocks.0.{key}": value.clone() for key, value in layer.state_dict().items()}
    merged = lora_merge.merge_state_dict(base, tmp_path / "adapter.safetensors", compute_dtype="fp64", setting=setting)

    plain = LAYERS[kind]().double()
    plain.load_state_dict({key: merged[f"blocks.0.{key}"] for key in plain.state_dict()})
    x = inputs(layer)
    with torch.no_grad():
        before, wanted, got = layer(x), trained(x), plain(x)
    assert (before - wanted).abs().max() > 1e-2, "the adapter does nothing"
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7 * float(wanted.abs().max()))


def test_torchtune_scales_a_bias_in_its_forward_pass_but_not_in_its_merge(tmp_path: Path) -> None:
    """Only its Qwen 2 has DoRA on layers with a bias. torchtune 0.6.1: modules/peft/dora.py, _utils.py."""
    trained = trainers.TorchtuneDora(nn.Linear(24, 36))
    saved = {f"blocks.0.{key}": value.detach() for key, value in trained.state_dict().items()}
    save_file(saved, tmp_path / "adapter.safetensors")
    base = {f"blocks.0.{key}": value for key, value in trained.layer.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out.safetensors"
    report = lora_merge.merge(*paths, setting={"lora_alpha": 6.0})
    assert any("scales the bias" in note for note in report.coverage["adapter.safetensors"]["notes"])
    plain, x = nn.Linear(24, 36), torch.randn(5, 24)
    plain.load_state_dict({key.removeprefix("blocks.0."): value for key, value in load_file(paths[2]).items()})
    factor = trained(x) - plain(x)  # what is left is the bias alone, the same for every input
    torch.testing.assert_close(factor, factor[:1].expand(5, -1), rtol=0, atol=1e-4)
    assert factor.abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("small_conv", [False, True])
def test_lycoris_extraction_and_its_remainder_are_the_tuned_model(small_conv: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """`bias_indices` and the like come from no training; LyCORIS writes them when it takes two models' difference."""
    extraction = pytest.importorskip("lycoris.utils", reason="lycoris-lora is not installed")
    base = nn.ModuleDict({"linear": nn.Linear(24, 36), "conv": nn.Conv2d(8, 20, 3), "point": nn.Conv2d(24, 36, 1)})
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for name in base:
            tuned[name].weight.add_(torch.randn_like(base[name].weight) * 0.1)
    tensors = extraction.extract_diff(
        [], [], base, tuned, "fixed", 4, 4, use_bias=True, sparsity=0.0, small_conv=small_conv
    )
    save_file(tensors, tmp_path / "adapter.safetensors")
    merged = lora_merge.merge_state_dict(base.state_dict(), tmp_path / "adapter.safetensors", compute_dtype="fp64")
    for name in base:  # the file is in fp16
        torch.testing.assert_close(merged[f"{name}.weight"], tuned[name].weight.detach(), rtol=0, atol=1e-3)


def test_every_layer_says_what_it_was_compared_with() -> None:
    written = {name for name, one in vars(trainers).items()
               if isinstance(one, type) and issubclass(one, trainers.Trained)} - {"Trained", "Parametrized", "StableAudioColumns"}  # fmt: skip
    assert written == set(trainers.SOURCES) == {case.partition(",")[0] for case in CASES}


@pytest.mark.parametrize(
    "name", ["", "adapters.safetensors", "0000100_adapters.safetensors"], ids=["folder", "last", "middle"]
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_folder_of_mlx_lm_shows_its_scale(kind: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = LAYERS["linear"]()
    trained = (trainers.MlxDora if kind == "dora" else trainers.Mlx)(layer, scale=20.0)
    saved = {f"model.blocks.0.{k}": v.detach() for k, v in trained.state_dict().items()}
    for file in ("adapters.safetensors", "0000100_adapters.safetensors"):
        save_file(saved, tmp_path / file)
    told = {"fine_tune_type": kind, "num_layers": 16, "lora_parameters": {"rank": 3, "dropout": 0.0, "scale": 20.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    facts = inspect(tmp_path / name)
    assert (facts["trainer"], facts["ranks"]) == ("mlx-lm", [3])
    base = {f"model.blocks.0.{k}": v.clone() for k, v in layer.state_dict().items()}
    merged = lora_merge.merge_state_dict(base, tmp_path / name)
    x = torch.randn(5, 24)
    with torch.no_grad():
        wanted = trained(x)
    got = nn.functional.linear(x, merged["model.blocks.0.weight"], merged["model.blocks.0.bias"])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "told", [{"rank": 3, "scale": 10.0, "alpha": 16}, {"rank": 3}, {"rank": 3, "scale": 10.0, "alpha": 3}]
)
def test_scale_of_mlx_lm_that_versions_read_differently_is_asked_for(told: dict[str, float], tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = LAYERS["plain"]()
    save_file(
        {f"b.{k}": v.detach() for k, v in trainers.Mlx(layer).state_dict().items()}, tmp_path / "adapters.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": told}))
    base = {"b.weight": layer.weight.detach()}
    if told.get("alpha") == 3:
        lora_merge.merge_state_dict(base, tmp_path)
        return
    with pytest.raises(lora_merge.MergeError, match=r'setting=\{"lora_alpha"'):
        lora_merge.merge_state_dict(base, tmp_path)
    stated = lora_merge.merge_state_dict(base, tmp_path, setting={"lora_alpha": 10.0})
    saved = load_file(tmp_path / "adapters.safetensors")
    torch.testing.assert_close(stated["b.weight"], base["b.weight"] + 10 * (saved["b.lora_a"] @ saved["b.lora_b"]).T)


@pytest.mark.parametrize("layer", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("stored", ["apart", "stacked"])
def test_experts_of_mlx_lm(stored: str, layer: str, tmp_path: Path) -> None:
    """It calls the stack of a layer's experts `switch_mlp`; the base has them one by one, or gate and up in one stack."""
    torch.manual_seed(3)
    weights = {name: torch.randn(4, 8, 8) for name in ("gate_proj", "up_proj", "down_proj")}
    trained = {name: trainers.MlxSwitch(weight, scale=20.0) for name, weight in weights.items()}
    at = "model.layers.0."
    saved = {
        f"{at}{layer}.switch_mlp.{n}.{k}": v.detach() for n, t in trained.items() for k, v in t.state_dict().items()
    }
    save_file(saved, tmp_path / "adapters.safetensors")
    told = {"fine_tune_type": "lora", "lora_parameters": {"rank": 3, "dropout": 0.0, "scale": 20.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    assert inspect(tmp_path)["ranks"] == [3]
    base = {"model.embed_tokens.weight": torch.zeros(5, 8), f"{at}input_layernorm.weight": torch.zeros(8)}
    mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if layer != "mlp" else {n: n for n in weights}
    if stored == "apart":
        names = {n: [f"{at}{layer}.experts.{e}.{mixtral[n]}.weight" for e in range(4)] for n in weights}
        base |= {key: weights[n][e] for n, keys in names.items() for e, key in enumerate(keys)}
        done = lora_merge.merge_state_dict(base, tmp_path)
        merged = {n: torch.stack([done[key] for key in keys]) for n, keys in names.items()}
    else:
        base[f"{at}mlp.experts.gate_up_proj"] = torch.cat([weights["gate_proj"], weights["up_proj"]], 1)
        base[f"{at}mlp.experts.down_proj"] = weights["down_proj"]
        done = lora_merge.merge_state_dict(base, tmp_path)
        gate, up = done[f"{at}mlp.experts.gate_up_proj"].chunk(2, 1)
        merged = {"gate_proj": gate, "up_proj": up, "down_proj": done[f"{at}mlp.experts.down_proj"]}
    x, indices = torch.randn(9, 8), torch.arange(9) % 4
    for name, one in trained.items():
        got = torch.einsum("ti,toi->to", x, merged[name][indices])
        torch.testing.assert_close(got, one(x, indices), rtol=1e-5, atol=1e-3)


def test_header_of_stable_audio_says_which_lengths_are_set(tmp_path: Path) -> None:
    """Of a square weight the vector alone does not show it."""
    torch.manual_seed(3)
    trained = trainers.StableAudioColumns(nn.Linear(24, 24)).double()
    saved = {f"model.blocks.0.{key}": value.detach() for key, value in trained.state_dict().items()}
    save_file(saved, tmp_path / "adapter.safetensors", {"lora_config": json.dumps({"adapter_type": "dora-cols"})})
    base = {f"blocks.0.{key}": value.detach().clone() for key, value in trained.layer.double().state_dict().items()}
    merged = lora_merge.merge_state_dict(
        base, tmp_path / "adapter.safetensors", compute_dtype="fp64", setting={"lora_alpha": 6.0}
    )
    x = torch.randn(5, 24, dtype=torch.float64)
    got = nn.functional.linear(x, merged["blocks.0.weight"], merged["blocks.0.bias"])
    torch.testing.assert_close(got, trained(x), rtol=0, atol=1e-6)


def _moe(stored: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer of experts as bases store it: alone, [E, out, in], [E, in, out], or gpt-oss's rows in turn."""
    at, (gate, up, down) = "model.layers.0.", (weights[name] for name in ("gate_proj", "up_proj", "down_proj"))
    base = {"model.embed_tokens.weight": torch.zeros(5, 8), f"{at}input_layernorm.weight": torch.zeros(8)}
    if stored == "alone":
        return base | {f"{at}mlp.experts.{e}.{n}.weight": w[e] for n, w in weights.items() for e in range(len(w))}
    if stored == "in turn":
        base[f"{at}self_attn.sinks"] = torch.zeros(2)
        pair = torch.stack([gate, up], 2).flatten(1, 2)
    else:
        pair = torch.cat([gate, up], 1)
    turn = (lambda t: t) if stored == "upright" else (lambda t: t.mT.contiguous())
    return base | {f"{at}mlp.experts.gate_up_proj": turn(pair), f"{at}mlp.experts.down_proj": turn(down)}


def _unmoe(stored: str, merged: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """The weights of each layer of the experts, from what was merged."""
    at = "model.layers.0.mlp.experts."
    if stored == "alone":
        names = ("gate_proj", "up_proj", "down_proj")
        return {n: torch.stack([merged[f"{at}{e}.{n}.weight"] for e in range(experts)]) for n in names}
    pair, down = (merged[at + n] if stored == "upright" else merged[at + n].mT for n in ("gate_up_proj", "down_proj"))
    gate, up = (pair[:, ::2], pair[:, 1::2]) if stored == "in turn" else pair.chunk(2, 1)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


@pytest.mark.few(6)
@pytest.mark.parametrize("stored", ["alone", "upright", "turned", "in turn"])
@pytest.mark.parametrize("shared", ["", "outer", "inner"])
@pytest.mark.parametrize(("experts", "inside"), [(3, 6), (5, 4), (2, 1)])  # gate and value as wide as inputs: (5, 4)
def test_stacked_factors_of_experts(stored: str, shared: str, experts: int, inside: int, tmp_path: Path) -> None:
    """Gate, value and output have factors of three axes; a base stores the experts in any of four ways."""
    torch.manual_seed(3)
    sizes = {"gate_proj": (inside, 8), "up_proj": (inside, 8), "down_proj": (8, inside)}
    weights = {name: torch.randn(experts, *size, dtype=torch.float64) for name, size in sizes.items()}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def trained(name: str) -> trainers.StackedExperts:
        one = "lora_A" if (shared == "outer") == (name != "down_proj") else "lora_B"
        counts = (1 if shared and one == "lora_B" else experts), (1 if shared and one == "lora_A" else experts)
        return trainers.StackedExperts(weights[name], *counts).double()

    layers = {name: trained(name) for name in weights}
    saved = {
        f"base_model.model.model.layers.0.mlp.experts.{names[name]}.{key}.weight": value.detach()
        for name, layer in layers.items() for key, value in layer.state_dict().items()
    }  # fmt: skip
    save_file(saved, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    merged = lora_merge.merge_state_dict(_moe(stored, weights), tmp_path, compute_dtype="fp64")
    x = torch.randn(4, 8, dtype=torch.float64)
    for name, weight in _unmoe(stored, merged, experts).items():
        given = x if name != "down_proj" else x[:, :1].expand(-1, inside)
        for expert in range(experts):
            torch.testing.assert_close(given @ weight[expert].T, layers[name](given, expert), rtol=0, atol=1e-9)


@pytest.mark.parametrize("stored", ["alone", "upright", "turned"])
@pytest.mark.parametrize("name", ["gate_up_proj", "w13"])
def test_stacked_factors_of_gate_and_value_as_one(stored: str, name: str, tmp_path: Path) -> None:
    """SkyRL and Megatron train the two as one layer, SGLang with an inner side that all experts share."""
    torch.manual_seed(3)
    weights = {n: torch.randn(3, *size, dtype=torch.float64) for n, size in
               {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}.items()}  # fmt: skip
    layer = trainers.StackedExperts(torch.cat([weights["gate_proj"], weights["up_proj"]], 1), 3, 1).double()
    prefix = f"model.layers.0.mlp.experts.{name}"
    save_file(
        {f"{prefix}.{key}": value.detach() for key, value in layer.state_dict().items()}, tmp_path / "a.safetensors"
    )
    merged = lora_merge.merge_state_dict(
        _moe(stored, weights), tmp_path / "a.safetensors", compute_dtype="fp64", setting={"lora_alpha": 4}
    )
    found = _unmoe(stored, merged, 3)
    pair, x = torch.cat([found["gate_proj"], found["up_proj"]], 1), torch.randn(4, 8, dtype=torch.float64)
    for expert in range(3):
        torch.testing.assert_close(x @ pair[expert].T, layer(x, expert), rtol=0, atol=1e-9)


@pytest.mark.parametrize("stored", ["alone", "upright", "turned", "in turn"])
def test_lora_for_each_expert(stored: str, tmp_path: Path) -> None:
    """ms-swift, NeMo and vLLM name every expert; each has its own α."""
    torch.manual_seed(3)
    sizes = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
    weights = {name: torch.randn(3, *size, dtype=torch.float64) for name, size in sizes.items()}
    saved, wanted = {}, {name: weight.clone() for name, weight in weights.items()}
    for name, (out, width) in sizes.items():
        for expert in range(3):
            up, down = torch.randn(out, 2, dtype=torch.float64), torch.randn(2, width, dtype=torch.float64)
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            saved |= {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": down}
            saved[f"{module}.alpha"] = torch.tensor(float(expert + 1))
            wanted[name][expert] += (expert + 1) / 2 * up @ down
    save_file(saved, tmp_path / "a.safetensors")
    merged = lora_merge.merge_state_dict(_moe(stored, weights), tmp_path / "a.safetensors", compute_dtype="fp64")
    torch.testing.assert_close(_unmoe(stored, merged, 3), wanted, rtol=0, atol=1e-9)
