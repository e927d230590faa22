"""Modules that were trained in parts: every part lands in its own rows, whatever other parts the file has."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import lora_merge
from lora_merge.adapters.suffixes import part
from lora_merge.models.weights import whole

from ..models.test_names import base as names_of
from ..support import Tensors, rand

H, KV = 16, 4

PHI3 = {
    "model.embed_tokens.weight": rand(20, H), "model.layers.0.self_attn.o_proj.weight": rand(H, H),
    "model.layers.0.self_attn.qkv_proj.weight": rand(H + 2 * KV, H),
    "model.layers.0.mlp.gate_up_proj.weight": rand(64, H),
}  # fmt: skip
FLUX = {
    "img_in.weight": rand(H, 4), "double_blocks.0.img_mod.lin.weight": rand(6 * H, H),
    "double_blocks.0.img_attn.qkv.weight": rand(3 * H, H), "single_blocks.0.linear1.weight": rand(7 * H, H),
}  # fmt: skip
FLUX_DIFFUSERS = {
    "x_embedder.weight": rand(H, 4), "transformer_blocks.0.norm1.linear.weight": rand(6 * H, H),
    "transformer_blocks.0.attn.norm_added_q.weight": rand(H), "single_transformer_blocks.0.proj_mlp.weight": rand(64, H),
    "time_text_embed.text_embedder.linear_1.weight": rand(H, 8),
    **{f"transformer_blocks.0.attn.to_{n}.weight": rand(H, H, seed=i) for i, n in enumerate("qkv")},
    **{f"single_transformer_blocks.0.attn.to_{n}.weight": rand(H, H, seed=i + 5) for i, n in enumerate("qkv")},
}  # fmt: skip
THIRDS = {"model.blocks.0.attn.qkv.weight": rand(3 * H, H)}
OTHER = {"model.blocks.0.attn.to_kqv_mlp.weight": rand(3 * H + 8, H)}

KNOWN = {
    "phi3": (PHI3, "model.layers.0.self_attn.qkv_proj", (H, KV, KV)),
    "phi3 mlp": (PHI3, "model.layers.0.mlp.gate_up_proj", (32, 32)),
    "flux double": (FLUX, "lora_unet_double_blocks_0_img_attn_qkv", (H, H, H)),
    "flux single": (FLUX, "lora_unet_single_blocks_0_linear1", (H, H, H, 4 * H)),
    "flux, first rows": (FLUX, "single_blocks.0.linear1_qkv", (H, H, H)),
    "flux apart": (FLUX_DIFFUSERS, "lora_unet_double_blocks_0_img_attn_qkv", (H, H, H)),
    "flux apart single": (FLUX_DIFFUSERS, "lora_unet_single_blocks_0_linear1", (H, H, H, 4 * H)),
    "thirds": (THIRDS, "model.blocks.0.attn.qkv", (H, H, H)),
}
TENSORS = {
    "flux apart": [f"transformer_blocks.0.attn.to_{n}.weight" for n in "qkv"],
    "flux apart single": [*(f"single_transformer_blocks.0.attn.to_{n}.weight" for n in "qkv"),
                          "single_transformer_blocks.0.proj_mlp.weight"],
}  # fmt: skip
SUBSETS = [(name, chosen) for name, (_, _, split) in KNOWN.items()
           for n in range(1, len(split) + 1) for chosen in combinations(range(len(split)), n)]  # fmt: skip


def parts(module: str, heights: dict[int, int]) -> Tensors:
    found = {f"{module}.alpha": torch.tensor(4.0)}
    for k, height in heights.items():
        found[f"{module}.lora_up.{k}.weight"] = rand(height, 2, seed=k + 1)
        found[f"{module}.lora_down.{k}.weight"] = rand(2, H, seed=k + 9)
    return found


def delta(tensors: Tensors, module: str, k: int) -> torch.Tensor:
    return 2.0 * (tensors[f"{module}.lora_up.{k}.weight"].double() @ tensors[f"{module}.lora_down.{k}.weight"].double())


def stored(name: str, tensors: Tensors) -> torch.Tensor:
    """The weight as the adapter sees it, of however many tensors."""
    base, module, _ = KNOWN[name]
    last = module.rpartition("_")[2] if "lora_unet" in module else module.rpartition(".")[2].removesuffix("_qkv")
    keys = TENSORS.get(name) or [key for key in base if key.endswith(f"{last}.weight")]
    return torch.cat([tensors[key] for key in keys])


@pytest.mark.parametrize(("name", "chosen"), SUBSETS, ids=str)
def test_a_part_lands_in_its_rows_whatever_others_are_there(name: str, chosen: tuple[int, ...]) -> None:
    base, module, split = KNOWN[name]
    adapter = parts(module, {k: split[k] for k in chosen})
    expected = stored(name, base).double()
    for k in chosen:
        expected[sum(split[:k]) : sum(split[: k + 1])] += delta(adapter, module, k)
    got = lora_merge.merge_state_dict(base, adapter)
    torch.testing.assert_close(stored(name, got).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "module", "heights"),
    [
        (PHI3, "model.layers.0.self_attn.qkv_proj", {0: KV, 1: KV, 2: H}),  # they add up
        (PHI3, "model.layers.0.self_attn.qkv_proj", {0: H, 1: 2 * KV}),
        (PHI3, "model.layers.0.self_attn.qkv_proj", {0: H + KV}),
        (PHI3, "model.layers.0.self_attn.qkv_proj", {3: KV}),
        (PHI3, "model.layers.0.self_attn.qkv_proj", {9999: KV}),
        (PHI3, "model.layers.0.self_attn.o_proj", {0: 8}),
        (PHI3, "model.layers.0.self_attn.o_proj", {1: H}),
        (FLUX, "lora_unet_single_blocks_0_linear1", {0: 3 * H}),
        (FLUX, "lora_unet_double_blocks_0_img_attn_qkv", {0: 16, 1: 8, 2: 24}),
        (THIRDS, "model.blocks.0.attn.qkv", {0: H, 1: 8}),
        (THIRDS, "model.blocks.0.attn.qkv", {1: 8}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 2: H}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 16}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 8, 4: 0}),
    ],
)
def test_what_does_not_fill_its_place_is_refused(tensors: Tensors, module: str, heights: dict[int, int]) -> None:
    with pytest.raises(lora_merge.MergeError) as caught:
        lora_merge.merge_state_dict(tensors, parts(module, heights))
    assert caught.value.exit_code == 4
    assert module in str(caught.value)


def test_all_parts_of_a_weight_that_the_base_does_not_tell_of_follow_each_other() -> None:
    module, split = "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 8}
    adapter = parts(module, split)
    expected = OTHER[f"{module}.weight"].double() + torch.cat([delta(adapter, module, k) for k in split])
    got = lora_merge.merge_state_dict(OTHER, adapter)[f"{module}.weight"]
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chosen", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_blocks_of_a_rotation_turn_their_rows_alone(chosen: tuple[int, ...]) -> None:
    """kohya's OFT for Flux: of layers that it does not split the whole is part 0."""
    qkv, mod = "double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_mod.lin.weight"
    module = "oft_unet_double_blocks_0_img_attn_qkv"
    adapter = {f"{module}.oft_blocks.{k}": rand(4, 4, 4, seed=k) for k in chosen}
    adapter["oft_unet_double_blocks_0_img_mod_lin.oft_blocks.0"] = rand(6, 16, 16, seed=7)
    got = lora_merge.merge_state_dict(FLUX, adapter)
    for k in range(3):
        rows = slice(k * H, (k + 1) * H)
        if k not in chosen:
            assert torch.equal(got[qkv][rows], FLUX[qkv][rows])
            continue
        x = adapter[f"{module}.oft_blocks.{k}"].double()
        q, eye = x - x.mT, torch.eye(4, dtype=torch.float64)
        turned = torch.block_diag(*((eye + q) @ torch.linalg.inv(eye - q)))
        expected = turned.T @ FLUX[qkv][rows].double()
        torch.testing.assert_close(got[qkv][rows].double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(got[mod], FLUX[mod])


@pytest.mark.parametrize(
    ("module", "up"),
    [("999999999", (KV, 2)), ("9" * 5000, (KV, 2)), ("0", (0, 2)), ("0", ()), ("2", (0, 2)), ("2", ()), ("00002", (4, 2))],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_hostile_parts_are_refused_at_once(module: str, up: tuple[int, ...]) -> None:
    for tensors, name in ((PHI3, "model.layers.0.self_attn.qkv_proj"), (OTHER, "model.blocks.0.attn.to_kqv_mlp")):
        adapter = {f"{name}.lora_up.{module}.weight": rand(*up), f"{name}.lora_down.{module}.weight": rand(2, H)}
        with pytest.raises(lora_merge.MergeError) as caught:
            lora_merge.merge_state_dict(tensors, adapter)
        assert caught.value.exit_code in (3, 4)


def test_numbers_of_parts_are_bounded() -> None:
    assert part("x/2") == ("x", 2)
    assert part("x/٣") == ("x", 3)
    assert part(f"x/{'9' * 5000}") == (f"x/{'9' * 5000}", None)


def test_real_models_tell_what_their_fused_weights_hold() -> None:
    for name, key, split in (
        ("native/flux-dev", "single_blocks.7.linear1.weight", (3072, 3072, 3072, 12288)),
        ("native/lumina2", "layers.3.attention.qkv.weight", (2304, 768, 768)),
        ("native/hunyuan-image-2.1", "single_blocks.0.linear1.weight", (3584, 3584, 3584, 14336)),
        ("native/sd35-large", "joint_blocks.3.x_block.attn.qkv.weight", (2432, 2432, 2432)),
        ("transformers/phi3-mini", "model.layers.3.self_attn.qkv_proj.weight", (3072, 3072, 3072)),
        ("transformers/gpt-neox-20b", "gpt_neox.layers.0.attention.query_key_value.weight", ()),  # head by head
    ):
        base = names_of(name)
        assert base.fused(whole(key, base._shapes[key])) == split
