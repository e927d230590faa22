"""Laws of the tables of spellings: every row leads to a slot that exists, every spelling comes back."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.adapters import suffixes
from lora_merge.adapters.modules import group
from lora_merge.adapters.peft.methods import SHARED_SLOTS_OF_ROW as SHARED_NAMES
from lora_merge.adapters.suffixes import (
    ANY_ALGORITHM,
    KEY_REWRITES,
    SHARED_SLOTS,
    SUFFIXES,
    Suffix,
    split,
    split_row_part,
)
from lora_merge.algorithms import ALGORITHMS
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import InputError, MergeError
from lora_merge.files.checkpoint import Index
from tests.kit.cost import steps
from tests.kit.files import save
from tests.kit.pairs import examples


def test_every_row_names_slots_that_exist() -> None:
    for row in SUFFIXES:
        if row.algorithms == ANY_ALGORITHM:
            assert row.slot in SHARED_SLOTS, row
            continue
        assert row.algorithms, row
        for name in row.algorithms:
            assert row.slot in ALGORITHMS[name].slots, (row, name)


def test_endings_do_not_repeat_and_begin_with_a_dot() -> None:
    endings = [row.ending for row in SUFFIXES]
    assert len(set(endings)) == len(endings)
    assert all(ending.startswith(".") and ending.count(".") <= 3 for ending in endings)


def test_every_slot_that_a_file_can_hold_has_a_spelling() -> None:
    spelled = {(name, row.slot) for row in SUFFIXES for name in row.algorithms}
    unspelled = {name: SHARED_NAMES[name].keys() for name in ("frod", "tinylora")}  # whose keys end as the layers do
    for name, row in ALGORITHMS.items():
        if row.derive is None and name not in FROM_A_CONFIGURATION:
            told = {*row.base_slots, row.value, *unspelled.get(name, ()), *(row.rebuild.slots if row.rebuild else ())}
            assert {slot for slot in row.slots if (name, slot) not in spelled} - told == set(), name


@pytest.mark.parametrize("path", ["lora_unet_mid_block_0", "transformer.blocks.10.attn.to_q"])
def test_every_ending_comes_back(path: str) -> None:
    for row in SUFFIXES:
        wrapped = row.ending.startswith(".lora.") and len(row.ending) == len(".lora.A")  # LLMs-from-scratch
        assert split(path + row.ending) == (path + ".linear" * wrapped, row)


@pytest.mark.parametrize("name", ["default", "my-style_2"])
def test_adapter_name_may_stand_inside(name: str) -> None:
    for row in [r for r in SUFFIXES if r.named]:
        stem, _, tail = row.ending.rpartition(".")
        key = f"{stem}.{name}.{tail}" if tail in ("weight", "bias") else f"{row.ending}.{name}"
        assert split(f"model.layers.0.q_proj{key}") == ("model.layers.0.q_proj", row)


def test_adapter_name_is_where_torch_puts_it_in_modules_of_modules() -> None:
    assert split("m.q.glora_A.default.Xd") == split("m.q.glora_A.Xd") != split("m.q.glora_B.Xd")


FROM_A_CONFIGURATION = ("lora_experts_transposed", "bdlora", "pissa", "olora")
"""Rows that are chosen over another with the same slots by what adapter_config.json says."""

SPELLED = {
    # diffusers' attention processors
    "unet.mid.attn1.processor.to_q_lora.down.weight": ("unet.mid.attn1.to_q", "down"),
    "unet.mid.attn1.processor.to_out_lora.up.weight": ("unet.mid.attn1.to_out.0", "up"),
    "unet.mid.attn2.processor.add_k_proj_lora.up.weight": ("unet.mid.attn2.add_k_proj", "up"),
    "unet.mid.attn1.to_k_lora.up.weight": ("unet.mid.attn1.to_k", "up"),
    "te.layers.3.self_attn.to_q_lora.up.weight": ("te.layers.3.self_attn.q_proj", "up"),
    "te.layers.3.self_attn.to_out_lora.down.weight": ("te.layers.3.self_attn.out_proj", "down"),
    "te.layers.3.mlp.fc1.lora_linear_layer.up.weight": ("te.layers.3.mlp.fc1", "up"),
    # Custom Diffusion
    "mid.attn2.processor.to_k_custom_diffusion.weight": ("mid.attn2.to_k.weight", "diff"),
    "mid.attn2.processor.to_out_custom_diffusion.0.bias": ("mid.attn2.to_out.0.bias", "diff"),
    # XLabs
    "double_blocks.7.processor.qkv_lora1.down.weight": ("double_blocks.7.img_attn.qkv", "down"),
    "double_blocks.7.processor.proj_lora2.up.weight": ("double_blocks.7.txt_attn.proj", "up"),
    "single_blocks.7.processor.qkv_lora.up.weight": ("single_blocks.7.linear1_qkv", "up"),
    "single_blocks.7.processor.proj_lora.up.weight": ("single_blocks.7.linear2", "up"),
    # modules in parts
    "lora_unet_blocks_0_qkv.lora_down.2.weight": ("lora_unet_blocks_0_qkv/2", "down"),
    "lora_unet_blocks_0_qkv.alpha": ("lora_unet_blocks_0_qkv", "alpha"),
    "oft_unet_double_blocks_0_img_attn_qkv.oft_blocks.1": (
        "oft_unet_double_blocks_0_img_attn_qkv/1", "blocks"),
    "blocks.3.diff_m": ("blocks.3", "diff"),
    # LongCat-Video, torch's parametrize, Tinker, minimind, mlx-vlm
    "blocks.0.attn.qkv.lora_up.blocks.2.weight": ("blocks.0.attn.qkv", "up_2"),
    "blocks.0.attn.qkv.alpha_scale": ("blocks.0.attn.qkv", "scale_override"),
    "model.layers.0.to_out.parametrizations.weight.0.lora_A": ("model.layers.0.to_out", "down"),
    "model.layers.0.to_out.parametrizations.weight.0.M_xs": ("model.layers.0.to_out", "core"),
    "base_model.model.model.unembed_tokens.lora_B.weight": ("base_model.model.lm_head", "up"),
    "model.layers.0.self_attn.q_proj.lora.A.weight": ("model.layers.0.self_attn.q_proj", "down"),
    "language_model.model.layers.0.self_attn.q_proj.B": ("language_model.model.layers.0.self_attn.q_proj", "up"),
    # MiniMax-H3
    "blocks.3.attn.qkv_proj.lora_A.default.weight": ("blocks.3.attn.qkv_proj.default", "down"),
    "blocks.3.attn.qkv_proj.lora_magnitude_vector.default": ("blocks.3.attn.qkv_proj.default", "magnitude"),
    "blocks.3.attn.qkv_proj.lora_A.weight": ("blocks.3.attn.qkv_proj", "down"),
    "blocks.3.attn.proj.lora_A.default.weight": ("blocks.3.attn.proj", "down"),
    # other trainers
    "trf_blocks.0.att.W_query.lora.A": ("trf_blocks.0.att.W_query.linear", "down"),
    "layers.0.attn.q_proj.lora_a.weight": ("layers.0.attn.q_proj", "down"),
    "layers.0.attn.q_proj.magnitude": ("layers.0.attn.q_proj", "magnitude"),
    "transformer.h.0.attn.attn.lora_A": ("transformer.h.0.attn.attn", "down"),
    "single_blocks.0.norm.key_norm.scale": ("single_blocks.0.norm.key_norm.scale", "diff"),
    "img_in.lora_B.bias": ("img_in", "diff"),
    "lora_unet_in.0.scale": ("lora_unet_in.0", "scale_override"),
    "blocks.0.attn.q.lora_alpha": ("blocks.0.attn.q", "alpha"),
    "lycoris_blocks_0.bias_indices": ("lycoris_blocks_0", "indices"),
    "q.lora_magnitude_vector.default.weight": ("q", "magnitude"),
    "q.lora_magnitude_vector": ("q", "magnitude"),
}  # fmt: skip


@pytest.mark.parametrize("key", SPELLED)
def test_known_spellings(key: str) -> None:
    found = split(key)
    assert found is not None
    assert (found[0], found[1].slot) == SPELLED[key]


def test_keys_of_models_are_no_adapter_tensors() -> None:
    for key in ("model.embed_tokens.position_ids", "x.lora_A.bias", "x.lora_B.y.z.weight2", "alpha",
                "weight", "", ".", ".weight", "a.b.running_mean", "q.lora_Aweight"):  # fmt: skip
        assert split(key) is None, key


def test_adapter_called_like_a_part_is_not_confused_with_one() -> None:
    path, row = split("q.lora_A.0.weight") or ("", None)
    assert (path, row and row.ending) == ("q", ".lora_A.weight")
    assert (split("q.lora_down.0.weight") or ("",))[0] == "q/0"


@pytest.mark.parametrize(("sign", "pattern", "template"), KEY_REWRITES, ids=lambda v: str(v)[:40])
def test_every_rewrite_can_be_reached(sign: str, pattern: str, template: str) -> None:
    hits = [key for key in SPELLED if re.search(sign, key) and re.fullmatch(pattern, key)]
    assert hits or sign == "_alpha"
    assert all(split(key) is not None for key in hits)


def test_ordinary_endings_are_split_without_the_patterns_of_whole_keys() -> None:
    """A file has ten thousand keys, and all patterns take ten times as long as a look into the table."""
    keys = [f"model.layers.0.self_attn.q_proj{row.ending}" for row in SUFFIXES]
    assert all(split(key) is not None for key in keys)
    ordinary = [key for key in keys if ".lora." not in key and not key.endswith("_alpha")]
    assert max(steps(partial(split, key)) for key in ordinary) < 20


@pytest.mark.parametrize("key", ["emb_params", "bundle_emb.cat.string_to_param.*"])
def test_embedding_beside_the_tensors_is_passed_over_with_its_reason(key: str) -> None:
    tensors = {"lora_unet_a.lora_up.weight": (4, 2), "lora_unet_a.lora_down.weight": (2, 4), key: (3, 768)}
    infos = {name: StoredTensor(name, "F32", shape, Path("a.safetensors"), 0, 0) for name, shape in tensors.items()}
    found = group(Index(Path("a.safetensors"), infos, {}, ()))
    assert list(found.ignored) == [key] and "textual-inversion" in found.ignored[key]
    assert [m.name for m in found.modules] == ["lora_unet_a"] and not found.strange


@given(st.text(max_size=60))
def test_any_text_is_split_or_refused(key: str) -> None:
    found = split(key)
    assert found is None or found[0]


@given(
    st.from_regex(r"[a-z_0-9]+(\.[a-z_0-9]+){0,4}", fullmatch=True),
    st.sampled_from([r for r in SUFFIXES if not r.ending.startswith(".lora.")]),
)
def test_paths_survive_whatever_they_are(path: str, row: Suffix) -> None:
    found = split(path + row.ending)
    assert found is not None
    if not any(c in path + row.ending for c in ("_lora", "_norm", "_alpha")):
        assert found == (path, row)


def test_parts() -> None:
    assert split_row_part("a.b/12") == ("a.b", 12)
    assert split_row_part("a.b") == ("a.b", None)
    assert split_row_part("a/b") == ("a/b", None)


def test_importing_the_tables_does_not_import_torch() -> None:
    code = "import sys, lora_merge.adapters.suffixes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensor_that_is_alone_is_merged_or_refused_in_one_way(tmp_path: Path) -> None:
    """As in a file that lacks the tensors that all layers share, and the configuration that names its method."""
    base = save({"layers.0.q.weight": torch.ones(1, 1)}, tmp_path / "base.safetensors")
    shares = [name for name, row in ALGORITHMS.items() if row.shared or row.base_slots]
    for row in [row for row in SUFFIXES if not {*shares}.isdisjoint(row.algorithms)]:
        adapter = save({f"layers.0.q{row.ending}": torch.ones(1, 1)}, tmp_path / "a.safetensors")
        with contextlib.suppress(MergeError):
            lora_merge.plan(base, adapter, output=tmp_path / "out.safetensors")


def test_numbers_of_layers_do_not_fill_the_memory_of_endings() -> None:
    """Else each of ten thousand layers is looked for anew, by every ending that it might have."""
    suffixes._longest.cache_clear()
    for n in range(500):
        assert suffixes.split(f"layers.{n}.q.w_norm") == (f"layers.{n}.q", suffixes._BY_ENDING[".w_norm"])
        assert suffixes.split(f"layers.{n}.self_attn.q_proj.table") is None
    assert suffixes._longest.cache_info().currsize < 5


@settings(max_examples=examples(60))
@given(
    st.sets(
        st.tuples(st.sampled_from(["a", "a.0", "b"]), st.sampled_from([r.ending for r in SUFFIXES])),
        min_size=1,
        max_size=5,
    )
)
def test_every_tensor_is_in_a_module_or_ignored_or_strange(keys: set[tuple[str, str]]) -> None:
    """An alpha beside a change of the bias alone belongs to no module, for example."""
    path = Path("a.safetensors")
    index = Index(path, {n: StoredTensor(n, "F32", (1, 1), path, 0, 0) for n in (m + end for m, end in keys)}, {}, ())
    try:
        file = group(index)
    except InputError:
        return
    owned = [info.name for m in file.modules for info in (*m.tensors, *(copy for _, copy in m.repeated))]
    assert {*owned, *file.ignored, *(info.name for info in file.strange)} == index.tensors.keys()
