"""What `inspect` tells of an adapter: training, hashes, and numbers that plain dense arithmetic gives too."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.facts import TABLE_ROWS, VALUE_WIDTH
from lora_merge.models.blocks import adapter_groups
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.inspect_rows import TRAINING_KEYS
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.inspected import lines
from tests.kit.models import sd1
from tests.kit.oracles import lora_delta
from tests.kit.tensors import rand
from tests.viewing.conftest import TRAINED, Scene


def test_metadata_of_a_trainer_is_read(scene: Scene) -> None:
    trained = inspect(scene.ink)["trained"]
    assert trained["tags"] == {"cat": 11, "ink": 7}
    assert trained["datasets"] == [{"name": "5_ink", "repeats": 5, "images": 40}]
    told = {
        "title": "Ink",
        "base_model": "sd15.safetensors",
        "steps": "1200",
        "optimizer": "AdamW8bit",
        "unet_lr": "1e-4",
    }
    assert told.items() <= trained.items()
    assert trained["trigger_words"] == ["ohwx"]
    assert "text_encoder_lr" not in trained


def test_json_has_every_entry_and_the_text_says_what_it_leaves_out(scene: Scene) -> None:
    facts = inspect(scene.ink)
    assert facts["metadata"] == TRAINED
    text = "\n".join(lines(facts))
    shown = sum(line.startswith("metadata ") for line in text.splitlines()) - 1
    above = len(TRAINING_KEYS & TRAINED.keys())
    assert above > 3
    assert f"{shown + above} of {len(TRAINED)} entries shown; --json lists all" in text


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 3}', '{"a": {"b": "many"}}', '{"a": {"b": 1e999}}', "null"])
def test_metadata_of_other_kinds_is_passed_over(text: str, tmp_path: Path) -> None:
    entries = dict.fromkeys(("ss_tag_frequency", "ss_dataset_dirs", "ss_datasets"), text)
    trained = inspect(save(kohya(sd1()), tmp_path / "a.safetensors", entries))["trained"]
    assert "tags" not in trained
    assert all(row["repeats"] is None for row in trained.get("datasets", ()))


def test_hashes_are_those_of_model_sites(scene: Scene, tmp_path: Path) -> None:
    """AutoV3 covers the bytes behind the header, so other metadata leave it as it is."""
    raw, found = scene.ink.read_bytes(), inspect(scene.ink)["hashes"]
    data = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    assert found["sha256"] == hashlib.sha256(raw).hexdigest()
    assert found["auto_v2"] == found["sha256"][:10]
    assert found["sshs_model_hash"] == hashlib.sha256(data).hexdigest()
    assert found["auto_v3"] == found["sshs_model_hash"][:12]
    assert found["stored sshs_model_hash"] == "0" * 64
    other = inspect(save(load(scene.ink), tmp_path / "renamed.safetensors", {"a": "b"}))["hashes"]
    assert other["auto_v3"] == found["auto_v3"]
    assert other["auto_v2"] != found["auto_v2"]


def test_oldest_hash_covers_64_kib_from_1_mib_on(tmp_path: Path) -> None:
    path = save({"a": rand(700, 700)}, tmp_path / "m.safetensors")
    want = hashlib.sha256(path.read_bytes()[0x100000:0x110000]).hexdigest()[:8]
    assert inspect(path, hashes=True)["hashes"]["auto_v1"] == want
    assert not inspect(path)["hashes"]


def test_numbers_are_those_of_the_dense_change(scene: Scene) -> None:
    found, tensors = inspect(scene.ink, weights=True)["weights"], load(scene.ink)
    assert (found["measured"], found["unmeasured"]) == (20, 0)
    total = 0.0
    for name, row in found["modules"].items():
        values = torch.linalg.svdvals(lora_delta(tensors, name))
        energy = values.square().cumsum(0) / values.square().sum()
        total += float(values.square().sum())
        assert row["norm"] == pytest.approx(float(values.square().sum().sqrt()), rel=1e-5)
        assert row["stable_rank"] == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-4)
        for share, rank in row["rank_for_energy"].items():
            assert rank == int((energy < float(share.strip("%")) / 100).sum()) + 1
    assert found["norm"] == pytest.approx(total**0.5, rel=1e-5)
    assert sum(n**2 for n in found["blocks"].values()) == pytest.approx(total, rel=1e-5)


def test_products_are_not_the_only_changes_that_have_numbers(tmp_path: Path) -> None:
    """A whole difference and a LoHa are computed as matrices; DoRA needs the base."""
    full = {"lora_unet_a.diff": rand(6, 5)}
    loha = {f"lora_unet_b.hada_{slot}": rand(*shape, seed=n) for n, (slot, shape) in enumerate(
        {"w1_a": (6, 2), "w1_b": (2, 5), "w2_a": (6, 2), "w2_b": (2, 5)}.items())}  # fmt: skip
    dora = {"lora_unet_c.lora_up.weight": rand(6, 2), "lora_unet_c.lora_down.weight": rand(2, 5),
            "lora_unet_c.dora_scale": rand(6, 1)}  # fmt: skip
    found = inspect(save({**full, **loha, **dora}, tmp_path / "a.safetensors"), weights=True)["weights"]
    assert found["modules"].keys() == {"lora_unet_a", "lora_unet_b"}
    assert found["unmeasured"] == 1
    assert found["modules"]["lora_unet_a"]["norm"] == pytest.approx(float(full["lora_unet_a.diff"].norm()), rel=1e-5)
    a, b, c, d = (loha[f"lora_unet_b.hada_{slot}"] for slot in ("w1_a", "w1_b", "w2_a", "w2_b"))
    assert found["modules"]["lora_unet_b"]["norm"] == pytest.approx(float(((a @ b) * (c @ d)).norm()), rel=1e-5)


def test_module_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    tensors = kohya(sd1())
    gone = next(key for key in tensors if key.endswith("lora_up.weight"))
    facts = inspect(save({k: v for k, v in tensors.items() if k != gone}, tmp_path / "a.safetensors"))
    assert facts["incomplete"] == [f"{gone.partition('.')[0]} has no lora_up.weight"]
    assert facts["algorithms"] == {"lora": facts["modules"] - 1, "incomplete": 1}
    assert any("1 module is incomplete" in line for line in lines(facts))


def test_long_tables_are_cut_in_the_text_and_whole_in_json(tmp_path: Path) -> None:
    names = [f"base_model.model.{'x' * 40}.layers.{n}.q_proj" for n in range(300)]
    tensors = {f"{n}.lora_A.weight": torch.zeros(1 + i % 2, 2) for i, n in enumerate(names)}
    tensors |= {f"{n}.lora_B.weight": torch.zeros(2, 1 + i % 2) for i, n in enumerate(names)}
    save(tensors, tmp_path / "adapter_model.safetensors")
    pattern = {f"layers.{n}.q_proj": 2 for n in range(3000)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "rank_pattern": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    facts = inspect(tmp_path)
    assert facts["configuration"]["rank_pattern"] == pattern
    assert len(facts["blocks"]) == 300
    told = [*lines(facts)]
    assert len(told) < TABLE_ROWS + 40
    assert max(map(len, told)) < 500
    assert any("260 more" in line for line in told)


@pytest.mark.parametrize(("name", "block"), [
    ("lora_unet_down_blocks_1_attentions_0_proj_in", "denoiser IN04"), ("lora_unet_mid_block_attentions_0_proj_in", "denoiser M00"),
    ("lora_unet_output_blocks_3_1_proj_in", "denoiser OUT03"), ("lora_unet_input_blocks_4_1_proj_in", "denoiser IN04"),
    ("base_model.model.model.layers.3.self_attn.q_proj", "model L03"), ("lora_te_text_model_encoder_layers_0_mlp_fc1", "te BASE"),
    ("lora_unet_double_blocks_12_img_attn_qkv", "transformer D12"), ("transformer.single_transformer_blocks.7.attn.to_q", "transformer S07"),
    ("lora_unet_blocks_3_cross_attn_q", "transformer B03"), ("lora_vae_decoder_conv_in", "vae"),
])  # fmt: skip
def test_block_of_a_module_follows_from_its_name_alone(name: str, block: str) -> None:
    assert adapter_groups({name: ()}).block(name) == block


def test_most_frequent_tags_are_shown_whole() -> None:
    counts = {f"a tag of some length {n}": 40 - n for n in range(40)}
    (told,) = (line for line in lines({"kind": "adapter", "trained": {"tags": counts}}) if line.startswith("tags"))
    shown, more = re.fullmatch(r"tags +(.*) and ([0-9]+) more", told).groups()  # type: ignore[union-attr]
    assert [*counts][: len(shown.split(", "))] == [word.rpartition(" ")[0] for word in shown.split(", ")]
    assert len(shown.split(", ")) + int(more) == 40
    assert len(shown) <= VALUE_WIDTH


def test_blocks_that_count_on_are_shown_as_one() -> None:
    blocks = dict.fromkeys(["BASE", *(f"IN{n:02d}" for n in range(3)), "M00", "IN05", "OUT00", "OUT01"], 1)
    (told,) = (line for line in lines({"kind": "checkpoint", "blocks": blocks}) if line.startswith("blocks"))
    assert told.split()[1:7] == ["8:", "BASE", "IN00–IN02", "M00", "IN05", "OUT00–OUT01"]


def test_alphas_of_a_peft_folder_are_reported_by_module(tmp_path: Path) -> None:
    """Its configuration has them, not its tensors."""
    modules = [f"base_model.model.model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qk"]
    pairs = {f"{m}.lora_{x}.weight": rand(*shape) for m in modules for x, shape in (("A", (2, 8)), ("B", (8, 2)))}
    save(pairs, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "alpha_pattern": {"k_proj": 3}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    facts = inspect(tmp_path)
    assert facts["alpha_range"] == {"min": 3, "median": 5.5, "max": 8}
    assert sorted(facts["alphas"]) == [3, 8]
    assert {name[-6:]: row["alphas"] for name, row in facts["patterns"].items()} == {"q_proj": [8], "k_proj": [3]}
    assert all(row["alphas"] == facts["alpha_range"] for row in facts["blocks"].values())


def test_pattern_of_several_algorithms_names_all(tmp_path: Path) -> None:
    file = save(
        {"l.0.q.lora_up.weight": rand(8, 2), "l.0.q.lora_down.weight": rand(2, 8), "l.1.q.lokr_w1": rand(2, 2), "l.1.q.lokr_w2": rand(4, 4)},
        tmp_path / "a.safetensors",
    )  # fmt: skip
    (row,) = inspect(file)["patterns"].values()
    assert (row["algorithm"], row["modules"]) == ("lora, lokr", 2)


@pytest.mark.parametrize("encoder", ["clip_l", "t5xxl", "qwen25_7b", "gemma3_12b"])
def test_text_encoders_of_comfyui_read_the_prompt(encoder: str, tmp_path: Path) -> None:
    stem = f"text_encoders.{encoder}.transformer.model.layers.0.self_attn.q_proj"
    file = save(
        {f"{stem}.lora_up.weight": rand(8, 2), f"{stem}.lora_down.weight": rand(2, 8)}, tmp_path / "a.safetensors"
    )
    (part,) = inspect(file)["parts"].values()
    assert part["does"] == "reads the prompt"


def test_modules_that_need_their_base_are_no_part_of_the_norm(tmp_path: Path) -> None:
    plain = {"a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 8)}
    dora = {"b.lora_up.weight": rand(8, 2), "b.lora_down.weight": rand(2, 8), "b.dora_scale": torch.ones(8, 1)}
    file = save({**plain, **dora}, tmp_path / "a.safetensors")
    (told,) = [line for line in lines(inspect(file, weights=True)) if line.startswith("change ")]
    assert "in 1 module; 1 more needs its base" in told


def test_algorithm_has_the_name_that_the_configuration_gives_it(tmp_path: Path) -> None:
    """Tensors of OFT have one name in PEFT and OneTrainer, whose formulas differ: a merge takes the same one."""
    key = "model.layers.0.self_attn.q_proj"
    folder = tmp_path / "oft"
    folder.mkdir()
    save({f"base_model.model.{key}.oft_R.weight": rand(2, 6)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "OFT", "oft_block_size": 4, "use_cayley_neumann": true, "target_modules": ["q_proj"]}'
    )
    bare = save({f"{key}.oft_R.weight": rand(2, 6)}, tmp_path / "bare.safetensors")
    base = save({f"{key}.weight": rand(8, 8)}, tmp_path / "base.safetensors")
    for path, name in ((folder, "peft_oft"), (bare, "onetrainer_oft")):
        facts = inspect(path)
        assert facts["algorithms"] == {name: 1}
        assert [row["algorithm"] for row in facts["patterns"].values()] == [name]
        assert lora_merge.plan(base, path).adapters[0].algorithms == (name,)
