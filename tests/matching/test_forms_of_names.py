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


def test_a_layer_of_another_name_is_no_part_without_evidence(tmp_path: Path) -> None:
    base = {
        "m.layers.0.mixer.in_proj.weight": torch.zeros(38, 20),
        "m.layers.0.mixer.out_proj.weight": torch.zeros(20, 16),
    }
    up, down = factors(16, 20)
    with pytest.raises(UnmatchedModules):
        merged(
            base, {"m.layers.0.mixer.x_proj.lora_B.weight": up, "m.layers.0.mixer.x_proj.lora_A.weight": down}, tmp_path
        )


def test_connectors_of_ltx_2_by_the_names_of_diffusers_on_the_single_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    at = "model.diffusion_model."
    signs = ("audio_patchify_proj", "patchify_proj", "adaln_single.linear", "audio_adaln_single.linear")
    base = {f"{at}{name}.weight": torch.randn(8, 8, dtype=torch.float64) for name in signs}
    key = f"{at}video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q.weight"
    base[key] = torch.randn(8, 8, dtype=torch.float64)
    up, down = factors(8, 8)
    name = "connectors.video_connector.transformer_blocks.0.attn1.to_q"
    found = merged(base, {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}, tmp_path)
    torch.testing.assert_close(found[key], base[key] + up @ down, rtol=0, atol=1e-9)
