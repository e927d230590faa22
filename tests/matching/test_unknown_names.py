"""Factors under names that no table has, and layers that the base stores as a part of another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from lora_merge.errors import FitError, InputError, UnmatchedModules

Pair = tuple[Tensor, Tensor]


def factors(out: int, width: int, rank: int = 3) -> Pair:
    """B and A."""
    return torch.randn(out, rank, dtype=torch.float64), torch.randn(rank, width, dtype=torch.float64)


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor], folder: Path, **options: object) -> dict[str, Tensor]:
    save_file(adapter, folder / "a.safetensors")
    return lora_merge.merge_state_dict(base, folder / "a.safetensors", compute_dtype="fp64", **options)


NAMES = [("first.weight", "second.weight"), ("adapter.x", "adapter.y"), ("down_factor", "up_factor")]


@pytest.mark.parametrize(("up", "down"), [*NAMES, *(pair[::-1] for pair in NAMES)])
def test_two_factors_of_any_names_are_recognised_by_their_shapes(up: str, down: str, tmp_path: Path) -> None:
    """Of a square layer the others of the file show which is which."""
    torch.manual_seed(1)
    base = {f"m.layers.0.{n}.weight": torch.randn(*s, dtype=torch.float64) for n, s in
            {"square": (32, 32), "wide": (48, 32)}.items()}  # fmt: skip
    pairs = {key: factors(*weight.shape) for key, weight in base.items()}
    adapter = {
        key.replace("weight", name): t for key, pair in pairs.items() for name, t in zip((up, down), pair, strict=True)
    }
    found = merged(base, adapter, tmp_path)
    torch.testing.assert_close(found, {k: w + pairs[k][0] @ pairs[k][1] for k, w in base.items()}, rtol=0, atol=1e-9)


def test_two_factors_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """x A B: the layer that is not square shows it for the one that is."""
    torch.manual_seed(1)
    base = {f"m.layers.0.{n}.weight": torch.randn(*s, dtype=torch.float64) for n, s in
            {"square": (32, 32), "wide": (48, 32)}.items()}  # fmt: skip
    pairs = {key: factors(weight.shape[1], weight.shape[0]) for key, weight in base.items()}
    adapter = {
        key.replace("weight", f"net.{n}"): t for key, pair in pairs.items() for n, t in zip("ab", pair, strict=True)
    }
    found = merged(base, adapter, tmp_path, setting={"lora_alpha": 3})
    wanted = {key: weight + (pairs[key][0] @ pairs[key][1]).T for key, weight in base.items()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_two_factors_of_square_layers_alone_are_refused_with_the_names_that_settle_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base, at = {"m.layers.0.q.weight": torch.randn(32, 32, dtype=torch.float64)}, "m.layers.0.q."
    left, right = factors(32, 32)
    with pytest.raises(FitError, match="square") as e:
        merged(base, {f"{at}first": left, f"{at}second": right}, tmp_path)
    assert "lora_B.weight" in e.value.fix and "lora.A" in e.value.fix
    found = merged(base, {f"{at}lora_B.weight": left, f"{at}lora_A.weight": right}, tmp_path)
    torch.testing.assert_close(found["m.layers.0.q.weight"], base["m.layers.0.q.weight"] + left @ right)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("transformer_blocks.0.qkv_proj.lora_down", "nunchaku"),
        ("double_blocks.0.processor.q_loras.0.down.weight", "EasyControl"),
    ],
)
def test_sound_files_that_cannot_be_merged_are_called_by_their_kind(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=what) as e:
        merged({"x.weight": torch.zeros(4, 4)}, {name: torch.zeros(64, 8)}, tmp_path)
    assert "download" not in str(e.value)


@pytest.mark.parametrize("told", ["by its configuration", "by the gate"])
@pytest.mark.parametrize("parts", ["qkv", "v", "k"])
def test_parts_of_linear_attention_are_rows_of_unequal_numbers(parts: str, told: str, tmp_path: Path) -> None:
    """Tinker trains q, k and v of Qwen 3.5 apart: q and k are as long as each other, v is longer."""
    torch.manual_seed(1)
    at, rows = "model.layers.0.linear_attn.", {"q": (0, 8), "k": (8, 16), "v": (16, 32)}
    base = {f"{at}in_proj_qkv.weight": torch.randn(32, 20, dtype=torch.float64),
            f"{at}out_proj.weight": torch.randn(20, 16, dtype=torch.float64)}  # fmt: skip
    config = {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4,
              "linear_value_head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    if told == "by the gate":
        base[f"{at}in_proj_z.weight"], config = torch.randn(16, 20, dtype=torch.float64), {}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "a_new_one", **config}))
    wanted, adapter = base[f"{at}in_proj_qkv.weight"].clone(), {}
    for part in parts:
        (low, high) = rows[part]
        up, down = factors(high - low, 20)
        adapter |= {f"{at}in_proj_{part}.lora_B.weight": up, f"{at}in_proj_{part}.lora_A.weight": down}
        wanted[low:high] += up @ down
    save_file(adapter, tmp_path / "a.safetensors")
    lora_merge.merge(tmp_path / "base", tmp_path / "a.safetensors", tmp_path / "out", compute_dtype="fp64")
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{at}in_proj_qkv.weight"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_parts_of_a_mamba_layer_are_its_first_rows(tmp_path: Path) -> None:
    """Tinker trains gate and inputs of Nemotron's `in_proj` apart; B, C and the steps stay."""
    torch.manual_seed(1)
    at = "backbone.layers.0.mixer."
    base = {f"{at}in_proj.weight": torch.randn(16 + 16 + 6, 20, dtype=torch.float64), f"{at}A_log": torch.zeros(2),
            f"{at}out_proj.weight": torch.randn(20, 16, dtype=torch.float64)}  # fmt: skip
    gate, x = factors(16, 20), factors(16, 20)
    adapter = {f"{at}{n}.lora_{k}.weight": t for n, pair in (("gate_proj", gate), ("x_proj", x))
               for k, t in zip("BA", pair, strict=True)}  # fmt: skip
    wanted = base[f"{at}in_proj.weight"].clone()
    wanted[:16] += gate[0] @ gate[1]
    wanted[16:32] += x[0] @ x[1]
    torch.testing.assert_close(merged(base, adapter, tmp_path)[f"{at}in_proj.weight"], wanted, rtol=0, atol=1e-9)


def test_layer_of_another_name_is_no_part_without_evidence(tmp_path: Path) -> None:
    base = {
        "m.layers.0.mixer.in_proj.weight": torch.zeros(38, 20),
        "m.layers.0.mixer.out_proj.weight": torch.zeros(20, 16),
    }
    up, down = factors(16, 20)
    with pytest.raises(UnmatchedModules):
        merged(
            base, {"m.layers.0.mixer.x_proj.lora_B.weight": up, "m.layers.0.mixer.x_proj.lora_A.weight": down}, tmp_path
        )


H = 8
LTX2 = ("audio_patchify_proj", "patchify_proj", "adaln_single.linear", "audio_adaln_single.linear")
GPT_OSS = ("model.embed_tokens", "model.layers.0.self_attn.sinks")
FLUX = ("double_blocks.0.img_mod.lin", "single_blocks.0.modulation.lin")
SPELLINGS: dict[str, tuple[tuple[str, ...], dict[str, tuple[int, ...]], dict[str, str]]] = {
    "LTX-2 connectors, diffusers": (
        tuple(f"model.diffusion_model.{name}" for name in LTX2),
        {"model.diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q": (H, H),
         "text_embedding_projection.aggregate_embed": (H, 20)},
        {"connectors.video_connector.transformer_blocks.0.attn1.to_q":
         "model.diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q",
         "connectors.text_proj_in": "text_embedding_projection.aggregate_embed"},
    ),
    "LTX-2.3 connectors, diffusers": (
        tuple(f"model.diffusion_model.{name}" for name in LTX2),
        {f"text_embedding_projection.{name}_aggregate_embed": (H, 20) for name in ("video", "audio")},
        {f"connectors.{name}_text_proj_in": f"text_embedding_projection.{name}_aggregate_embed"
         for name in ("video", "audio")},
    ),
    "GPT-OSS, Tinker": (
        GPT_OSS, {f"model.layers.0.self_attn.{n}_proj": (H, H) for n in "qkvo"},
        {f"base_model.model.model.layers.0.attn.{n}_proj": f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"},
    ),
    "Flux, DiffSynth-Studio": (
        FLUX,
        {"double_blocks.0.img_attn.qkv": (3 * H, H), "double_blocks.0.txt_attn.qkv": (3 * H, H),
         "double_blocks.0.txt_attn.proj": (H, H), "double_blocks.0.img_mlp.2": (H, 4 * H),
         "single_blocks.0.linear1": (7 * H, H), "single_blocks.0.linear2": (H, 5 * H),
         "final_layer.adaLN_modulation.1": (2 * H, H), "vector_in.in_layer": (H, 20)},
        {"blocks.0.attn.a_to_qkv": "double_blocks.0.img_attn.qkv", "blocks.0.attn.b_to_qkv": "double_blocks.0.txt_attn.qkv",
         "blocks.0.attn.b_to_out": "double_blocks.0.txt_attn.proj", "blocks.0.ff_a.2": "double_blocks.0.img_mlp.2",
         "blocks.0.norm1_a.linear": "double_blocks.0.img_mod.lin", "single_blocks.0.to_qkv_mlp": "single_blocks.0.linear1",
         "single_blocks.0.proj_out": "single_blocks.0.linear2", "single_blocks.0.norm.linear": "single_blocks.0.modulation.lin",
         "final_norm_out.linear": "final_layer.adaLN_modulation.1", "pooled_text_embedder.0": "vector_in.in_layer"},
    ),
    "JoyImage-Edit, DiffSynth-Studio": (
        ("double_blocks.0.img_attn_qkv", "condition_embedder.time_proj"),
        {f"double_blocks.0.{s}_mlp.net.{n}": (H, H) for s in ("img", "txt") for n in ("0.proj", "2")},
        {f"double_blocks.0.{s}_mlp.{n}": f"double_blocks.0.{s}_mlp.net.{own}" for s in ("img", "txt")
         for n, own in (("proj", "0.proj"), ("out_proj", "2"))},
    ),
    "Anima's conditioner, diffusers": (
        ("net.blocks.0.mlp.layer1", "net.llm_adapter.blocks.0.self_attn.q_proj"),
        {"net.llm_adapter.blocks.0.mlp.0": (H, H)},
        {"text_conditioner.blocks.0.mlp.0": "net.llm_adapter.blocks.0.mlp.0",
         "text_conditioner.blocks.0.self_attn.q_proj": "net.llm_adapter.blocks.0.self_attn.q_proj"},
    ),
}  # fmt: skip
"""Trainer → layers by which the model is known, others with their shapes, name in the adapter → layer."""


@pytest.mark.parametrize("trainer", SPELLINGS)
def test_names_of_a_trainer_mean_the_layers_that_its_converter_says(trainer: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    signs, layers, names = SPELLINGS[trainer]
    shapes = {**dict.fromkeys(signs, (H, H)), **layers}
    base = {name if name.endswith("sinks") else f"{name}.weight": torch.randn(*shape, dtype=torch.float64)
            for name, shape in shapes.items()}  # fmt: skip
    adapter, wanted = dict[str, Tensor](), dict(base)
    for name, layer in names.items():
        up, down = factors(*shapes[layer])
        adapter |= {f"{name}.lora_B.default.weight": up, f"{name}.lora_A.default.weight": down}
        wanted[f"{layer}.weight"] = base[f"{layer}.weight"] + up @ down
    torch.testing.assert_close(merged(base, adapter, tmp_path), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(0,), (4, 0, 0)])
def test_empty_factors_stand_for_a_layer_that_experts_lack(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Tinker: experts without a gate have w1 and w2, and w3 is stored without elements."""
    torch.manual_seed(1)
    at, experts = "backbone.layers.0.mixer.experts.", range(4)
    base = {f"{at}{e}.{name}.weight": torch.randn(*s, dtype=torch.float64) for e in experts
            for name, s in (("up_proj", (12, 8)), ("down_proj", (8, 12)))}  # fmt: skip
    tensors = {
        "w1.lora_A": (1, 3, 8),
        "w1.lora_B": (4, 12, 3),
        "w2.lora_A": (4, 3, 12),
        "w2.lora_B": (1, 8, 3),
        "w3.lora_A": shape,
        "w3.lora_B": shape,
    }
    adapter = {f"{at}{name}.weight": torch.randn(*s, dtype=torch.float64) for name, s in tensors.items()}
    wanted = {}
    for e in experts:
        for name, own in (("up_proj", "w1"), ("down_proj", "w2")):
            up, down = (
                t[e % len(t)] for t in (adapter[f"{at}{own}.lora_B.weight"], adapter[f"{at}{own}.lora_A.weight"])
            )
            wanted[f"{at}{e}.{name}.weight"] = base[f"{at}{e}.{name}.weight"] + up @ down
    torch.testing.assert_close(merged(base, adapter, tmp_path), wanted, rtol=0, atol=1e-9)
    save_file(base, tmp_path / "base.safetensors")
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    assert "it has no elements" in report.to_json()
    with pytest.raises(UnmatchedModules):
        merged(base, {k: torch.zeros(0) for k in adapter if "w3" in k}, tmp_path)
