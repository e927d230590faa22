"""Modules that were trained in parts: every part lands in its own rows, whatever other parts the file has."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.adapters.suffixes import split_row_part
from lora_merge.errors import ShapeMismatch, UnmatchedModules
from lora_merge.models.fused_weights import agreed, splits
from lora_merge.models.weights import whole
from tests.kit.files import load, save
from tests.kit.fused_rows import FLUX, FLUX_DIFFUSERS, KV, PHI3, H
from tests.kit.pairs import examples
from tests.kit.pipeline_names import STORED
from tests.kit.pipeline_names import base as names_of
from tests.kit.tensors import Tensors, rand

THIRDS = {"model.blocks.0.attn.qkv.weight": rand(3 * H, H), "model.blocks.0.attn.proj.weight": rand(H, H)}
UNTOLD = {"model.blocks.0.attn.qkv.weight": rand(3 * H, H)}
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


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "chosen"), SUBSETS, ids=str)
def test_part_lands_in_its_rows_whatever_others_are_there(name: str, chosen: tuple[int, ...]) -> None:
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
        (UNTOLD, "model.blocks.0.attn.qkv", {1: H}),
        (UNTOLD, "model.blocks.0.attn.qkv", {0: H, 1: H}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 2: H}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 16}),
        (OTHER, "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 8, 4: 0}),
    ],
)
def test_parts_that_do_not_fill_their_place_are_refused(tensors: Tensors, module: str, heights: dict[int, int]) -> None:
    with pytest.raises(lora_merge.MergeError) as caught:
        lora_merge.merge_state_dict(tensors, parts(module, heights))
    assert caught.value.exit_code == 4
    assert module in str(caught.value)


def test_parts_of_a_weight_follow_each_other_without_evidence_in_the_base() -> None:
    module, split = "model.blocks.0.attn.to_kqv_mlp", {0: H, 1: H, 2: H, 3: 8}
    adapter = parts(module, split)
    expected = OTHER[f"{module}.weight"].double() + torch.cat([delta(adapter, module, k) for k in split])
    got = lora_merge.merge_state_dict(OTHER, adapter)[f"{module}.weight"]
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


class Fused(NamedTuple):
    """A fused weight in a model that no table knows, and the names of what lies beside it."""

    module: str
    fused: str
    behind: str  # the layer that reads what the fused weight writes
    layers: int  # that it holds


FUSED = (
    Fused("model.layers.3.self_attn", "qkv_proj", "o_proj", 3),
    Fused("blocks.3.attn", "qkv", "proj", 3),
    Fused("encoder.layers.3.self_attention", "query_key_value", "dense", 3),
    Fused("model.blocks.3.attn", "Wqkv", "out_proj", 3),
    Fused("decoder.blocks.3.attn", "c_attn", "c_proj", 3),
    Fused("blocks.3", "img_attn_qkv", "img_attn_proj", 3),
    Fused("model.layers.3.mlp", "gate_up_proj", "down_proj", 2),
    Fused("model.layers.3.mlp", "Wi", "Wo", 2),
    Fused("blocks.3.mlp", "w12", "w3", 2),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Fused, int, tuple[int, ...], str, dict[str, object], dict[str, tuple[int, ...]]]:
    """(the weight, columns, rows of its layers, an adapter's prefix, config.json, tensors beside it)."""
    weight, width = draw(st.sampled_from(FUSED)), draw(st.sampled_from([12, 16, 24]))
    heads, head = draw(st.integers(2, 6)), draw(st.sampled_from([2, 4]))
    groups = draw(st.integers(1, heads))
    q, kv = heads * head, groups * head
    split = (q, kv, kv) if weight.layers == 3 else (q, q)
    config: dict[str, object] = {"hidden_size": width}
    beside: dict[str, tuple[int, ...]] = {}
    teller = draw(st.sampled_from(["nobody", "config", "config of a part", "layer behind", "norms", "biases"]))
    if teller.startswith("config"):
        told = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head, "intermediate_size": q}
        other = {"hidden_size": width + 1, "num_attention_heads": heads + 1, "head_dim": head, "intermediate_size": 5}
        config = (
            {**config, **told} if teller == "config" else {"vision_config": other, "text_config": {**config, **told}}
        )
    elif teller == "layer behind":
        beside[f"{weight.behind}.weight"] = (width, q)
    elif teller == "norms" and weight.layers == 3:
        beside |= {"q_norm.weight": (q,), "k_norm.weight": (kv,)}
    elif teller == "biases" and weight.layers == 3:
        beside |= {"q_bias": (q,), "v_bias": (kv,)}
    prefix = draw(st.sampled_from(["", "base_model.model.", "lora_unet_", "diffusion_model."]))
    return weight, width, split, prefix, config, beside


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(cases(), st.data())
def test_split_is_recognised_by_the_configuration_or_the_neighbours_and_never_guessed(
    case: tuple[Fused, int, tuple[int, ...], str, dict[str, object], dict[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    weight, width, split, prefix, config, beside = case
    key, many = f"{weight.module}.{weight.fused}", len(split)
    before = weight.fused.removesuffix("qkv") if weight.fused.endswith("_qkv") else ""
    told = len(config) > 1 or "text_config" in config or bool(beside)
    base = {f"{key}.weight": rand(sum(split), width), "other.weight": rand(4, 4)}
    base |= {f"{weight.module}.{'' if n == f'{weight.behind}.weight' else before}{n}": rand(*shape, seed=3)
             for n, shape in beside.items()}  # fmt: skip
    chosen = data.draw(st.sets(st.integers(0, many - 1), min_size=1).map(sorted))
    sizes = {k: split[k] for k in chosen}
    if data.draw(st.booleans()):  # another split of as many rows
        sizes = {k: split[k] + (1 if k == 0 else -1 if k == 1 else 0) for k in chosen}
    module = prefix + (key.replace(".", "_") if prefix.endswith("_") else key)
    adapter = {f"{module}.alpha": torch.tensor(4.0)}
    for k, rows in sizes.items():
        adapter[f"{module}.lora_up.{k}.weight"] = rand(rows, 2, seed=k + 1)
        adapter[f"{module}.lora_down.{k}.weight"] = rand(2, width, seed=k + 9)
    right = all(sizes[k] == split[k] for k in chosen) if told else len(chosen) == many
    with TemporaryDirectory() as folder:
        model, out = Path(folder, "model"), Path(folder, "out")
        model.mkdir()
        save(base, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps(config))
        paths = model, save(adapter, Path(folder, "a.safetensors")), out
        if not right:
            with pytest.raises(ShapeMismatch) as caught:
                lora_merge.merge(*paths)
            assert weight.fused in str(caught.value)
            return
        lora_merge.merge(*paths)
        got = load(out / "model.safetensors")[f"{key}.weight"]
    expected = base[f"{key}.weight"].double()
    for k in chosen:
        start = sum(split[:k]) if told else sum(sizes[j] for j in range(k))
        expected[start : start + sizes[k]] += delta(adapter, module, k)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_model_that_only_its_configuration_names_is_split_by_that(tmp_path: Path) -> None:
    """Without its embeddings the table of Phi-3 does not know it; config.json does, and is named as the reason."""
    key = "model.layers.0.self_attn.qkv_proj"
    base = {k: t for k, t in PHI3.items() if "embed_tokens" not in k and "o_proj" not in k}
    (tmp_path / "base").mkdir()
    save(base, tmp_path / "base" / "model.safetensors")
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": H, "num_attention_heads": 8}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    for name, heights in {"right": {1: KV}, "wrong": {0: KV, 1: H, 2: KV}, "none": {3: KV}}.items():
        save(parts(key, heights), tmp_path / f"{name}.safetensors")
    lora_merge.merge(tmp_path / "base", tmp_path / "right.safetensors", tmp_path / "out")
    got = load(tmp_path / "out" / "model.safetensors")[f"{key}.weight"] - base[f"{key}.weight"]
    assert got[H : H + KV].any() and not got[:H].any() and not got[H + KV :].any()
    layers = f"by config.json the weight holds 3 layers, of {H}, {KV} and {KV} rows"
    with pytest.raises(ShapeMismatch, match=f"part 0 has {KV} rows; {layers}"):
        lora_merge.merge(tmp_path / "base", tmp_path / "wrong.safetensors", tmp_path / "no")
    with pytest.raises(ShapeMismatch, match=f"part 3 has {KV} rows; {layers}"):
        lora_merge.merge(tmp_path / "base", tmp_path / "none.safetensors", tmp_path / "no")
    save(parts("model.nowhere", {0: 2}), tmp_path / "lost.safetensors")
    with pytest.raises(UnmatchedModules, match=r"the base is Phi3ForCausalLM, in which no weight is \[2, 16\]") as e:
        lora_merge.merge(tmp_path / "base", tmp_path / "lost.safetensors", tmp_path / "no")
    assert "unknown" not in str(e.value)


def test_tellers_that_contradict_each_other_are_named() -> None:
    base = {"a.attn.qkv.weight": rand(24, 8), "a.attn.proj.weight": rand(8, 8), "a.attn.o_proj.weight": rand(8, 16)}
    for heights in ({0: 8}, {0: 8, 1: 8, 2: 8}):
        with pytest.raises(ShapeMismatch, match=r"by o_proj .* 16, 4 and 4 rows; by proj .* 8, 8 and 8 rows"):
            lora_merge.merge_state_dict(base, parts("a.attn.qkv", heights))


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
    assert split_row_part("x/2") == ("x", 2)
    assert split_row_part("x/٣") == ("x", 3)
    assert split_row_part(f"x/{'9' * 5000}") == (f"x/{'9' * 5000}", None)


def test_real_models_show_what_their_fused_weights_hold() -> None:
    for name, key, split in (
        ("native/flux-dev", "single_blocks.7.linear1.weight", (3072, 3072, 3072, 12288)),
        ("native/lumina2", "layers.3.attention.qkv.weight", (2304, 768, 768)),
        ("native/hunyuan-image-2.1", "single_blocks.0.linear1.weight", (3584, 3584, 3584, 14336)),
        ("native/sd35-large", "joint_blocks.3.x_block.attn.qkv.weight", (2432, 2432, 2432)),
        ("transformers/phi3-mini", "model.layers.3.self_attn.qkv_proj.weight", (3072, 3072, 3072)),
        ("transformers/gpt-neox-20b", "gpt_neox.layers.0.attention.query_key_value.weight", ()),  # head by head
    ):
        base = names_of(name)
        assert agreed(base.fused(whole(key, base.shapes[key]))) == split


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STORED)
def test_neighbours_never_contradict_the_tables(name: str) -> None:
    """Of every real model that a table knows: what the tensors beside a fused weight tell is what the table says."""
    base = names_of(name)
    for key, shape in base.shapes.items():
        told, known = splits(key, base.shapes, {}), base.fused(whole(key, shape))
        assert len({*told.values()}) <= 1
        if told and known and "table" in next(iter(known)):
            assert agreed(told) == agreed(known), key
