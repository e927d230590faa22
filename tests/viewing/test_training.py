"""What `inspect` tells of a training, from the metadata as each trainer writes it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_merge.viewing.inspect import inspect
from tests.kit.files import save
from tests.kit.inspected import lines

SET = {
    "resolution": [1024, 1024], "batch_size_per_device": 2, "tag_frequency": {"5_ink": {"ink": 40}},
    "bucket_info": {"buckets": {"0": {"resolution": [832, 1216], "count": 150}, "1": {"resolution": [1024, 1024], "count": 50}}},
    "subsets": [{"img_count": 40, "num_repeats": 5, "image_dir": "5_ink", "class_tokens": "ohwx woman", "is_reg": False}],
}  # fmt: skip
"""A data set of a configuration file, as train_network.py of sd-scripts notes it."""

SD_SCRIPTS = {
    "ss_network_module": "networks.lora", "ss_num_train_images": "200", "ss_training_finished_at": "1700003600.25",
    "ss_new_sd_model_hash": "31e35c80", "ss_datasets": json.dumps([SET]), "ss_text_encoder_lr": "[1e-05, 2e-05]",
    "ss_dataset_dirs": json.dumps({"5_ink": {"n_repeats": 5, "img_count": 40}}),
}  # fmt: skip
MUSUBI = {
    "ss_network_module": "networks.lora_wan", "ss_num_train_items": "60", "modelspec.resolution": "1280x720",
    "ss_datasets": json.dumps([{
        "resolution": [960, 544], "batch_size_per_device": 1, "num_repeats": 2, "video_directory": "clips",
        "target_frames": [1, 25],
    }]),
}  # fmt: skip
ONE_TRAINER = {"ot_branch": "master", "ot_revision": "abc", "modelspec.resolution": "1024x1024"}
WITH_CONFIG = ONE_TRAINER | {"ot_config": json.dumps({
    "base_model_name": "some/base", "learning_rate": 3e-4, "optimizer": {"optimizer": "PRODIGY"}, "epochs": 30,
    "resolution": "768,1024", "unet": {"learning_rate": None}, "text_encoder": {"learning_rate": 1e-5},
    "concepts": [{"name": "ink", "balancing": 3.0, "balancing_strategy": "REPEATS"}, {"name": "off", "enabled": False}],
})}  # fmt: skip
AI_TOOLKIT = {
    "training_info": json.dumps({"step": 2000, "epoch": 52}), "ss_tag_frequency": json.dumps({"1_c4t": {"c4t": 1}}),
    "ss_output_name": "cat",
}  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "trainer", "told", "words"),
    [
        (
            SD_SCRIPTS, "kohya sd-scripts",
            {"date": "2023-11-14 23:13:20 UTC", "base_hash": "31e35c80", "images": 40, "images_with_repeats": "200",
             "resolution": "1024x1024", "batch_size": "2", "buckets": {"832x1216": 150, "1024x1024": 50},
             "text_encoder_lr": "[1e-05, 2e-05]",
             "datasets": [{"name": "5_ink", "repeats": 5, "images": 40, "resolution": "1024x1024", "class_tokens": "ohwx woman"}]},
            "5_ink  40 images × 5, 1024x1024, class tokens ohwx woman",
        ),
        (
            MUSUBI, "musubi-tuner",
            {"resolution": "960x544", "images_with_repeats": "60",
             "datasets": [{"name": "clips", "repeats": 2, "images": None, "resolution": "960x544", "target_frames": [1, 25]}]},
            "clips  × 2, 960x544, target frames [1, 25]",
        ),
        (ONE_TRAINER, "OneTrainer", {"resolution": "1024x1024"}, "OneTrainer"),
        (
            WITH_CONFIG, "OneTrainer",
            {"base_model": "some/base", "learning_rate": "0.0003", "text_encoder_lr": "1e-05", "optimizer": "PRODIGY",
             "epochs": "30", "resolution": "768,1024", "datasets": [{"name": "ink", "repeats": 3.0, "images": None}]},
            "ink  × 3",
        ),
        (AI_TOOLKIT, "ai-toolkit", {"steps": "2000", "epochs": "52", "trigger_words": ["c4t"], "title": "cat"}, "trigger words c4t"),
    ],
    ids=("sd-scripts", "musubi-tuner", "OneTrainer", "OneTrainer with its configuration", "ai-toolkit"),
)  # fmt: skip
def test_every_trainer_is_understood(
    metadata: dict[str, str], trainer: str, told: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    facts = inspect(_adapter(tmp_path, metadata))
    assert facts["trainer"] == trainer
    assert {name: facts["trained"].get(name) for name in told} == told
    assert any(words in line for line in lines(facts))
    assert not any("None" in line for line in lines(facts))


@pytest.mark.parametrize("value", ["[3]", '[{"subsets": [3]}]', '[{"resolution": {"a": 1}, "bucket_info": {"buckets": [1]}}]',
                                   '{"optimizer": "x", "concepts": [3], "unet": 4}', '[{"num_repeats": {}, "image_dir": 3}]'])  # fmt: skip
@pytest.mark.parametrize("key", ["ss_datasets", "ot_config", "ss_bucket_info", "training_info"])
def test_odd_values_are_no_error(key: str, value: str, tmp_path: Path) -> None:
    facts = inspect(_adapter(tmp_path, {key: value, "ss_training_finished_at": "1e400"}))
    assert [*lines(facts)]
    assert facts["trained"]["date"] == "1e400"


def test_counts_below_zero_count_nothing(tmp_path: Path) -> None:
    """Of images, buckets and tags; the others stay."""
    buckets = {"buckets": {"0": {"resolution": [8, 8], "count": -5}, "1": {"resolution": [16, 16], "count": 3}}}
    told = {
        "ss_dataset_dirs": json.dumps({"5_ink": {"n_repeats": 5, "img_count": -40}}),
        "ss_bucket_info": json.dumps(buckets), "ss_tag_frequency": json.dumps({"5_ink": {"ink": 7, "cat": -2}}),
    }  # fmt: skip
    facts = inspect(
        save(
            {"a.lora_A.weight": torch.ones(1, 2), "a.lora_B.weight": torch.ones(2, 1)}, tmp_path / "a.safetensors", told
        )
    )
    text = json.dumps(facts["trained"])
    assert "5_ink" in text and "16x16" in text
    assert not re.search(r"-[0-9]|\b8x8", text)
    assert facts["trained"]["tags"] == {"ink": 7}


def test_each_network_says_what_it_does_and_which_layers_it_changes(tmp_path: Path) -> None:
    names = {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": ("te1", "feed-forward"),
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj": ("te1", "self-attention"),
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k": ("transformer", "cross-attention"),
        "lora_unet_down_blocks_1_attentions_0_proj_in": ("transformer", "ends of a block"),
        "lora_unet_down_blocks_1_resnets_0_conv1": ("transformer", "convolution"),
        "lora_unet_double_blocks_3_img_attn_qkv": ("transformer", "attention"),
        "lora_unet_double_blocks_3_txt_mod_lin": ("transformer", "modulation"),
        "lora_unet_single_blocks_3_linear1": ("transformer", "other"),
    }
    facts = inspect(_adapter(tmp_path, {}, *names))
    want: dict[str, dict[str, int]] = {}
    for network, kind in names.values():
        want.setdefault(network, {}).setdefault(kind, 0)
        want[network][kind] += 1
    assert {name: part["layers"] for name, part in facts["parts"].items()} == want
    assert facts["parts"]["te1"] == {"does": "reads the prompt", "modules": 2, "parameters": 32, "layers": want["te1"]}
    assert facts["parts"]["transformer"]["does"] == "makes the picture"


def _adapter(folder: Path, metadata: dict[str, str], *names: str) -> Path:
    tensors = {f"{n}.lora_{s}.weight": torch.zeros((4, 2) if s == "up" else (2, 4))
               for n in names or ("lora_unet_down_blocks_0_attentions_0_proj_in",) for s in ("up", "down")}  # fmt: skip
    return save(tensors, folder / "a.safetensors", metadata)


def test_preview_picture_is_shown_by_its_place_its_type_and_its_bytes(tmp_path: Path) -> None:
    """In the metadata as base64; a file whose name says so comes before one of the adapter's own name."""
    data = base64.b64encode(b"12345").decode()
    tensors, path = (
        {"a.lora_up.weight": torch.ones(2, 1), "a.lora_down.weight": torch.ones(1, 2)},
        tmp_path / "a.safetensors",
    )
    stored = inspect(save(tensors, path, {"modelspec.thumbnail": f"data:image/webp;base64,{data}"}))["trained"][
        "preview"
    ]
    assert stored == {"in": "modelspec.thumbnail", "type": "image/webp", "bytes": 5}
    save(tensors, path, {"modelspec.thumbnail": f"data:text/html;base64,{data}"})
    assert "preview" not in inspect(path)["trained"], "no picture"
    save(tensors, path)
    for n, name in enumerate(("a.jpg", "a.png", "a.preview.webp"), start=1):
        (tmp_path / name).write_bytes(b"0" * n)
        facts = inspect(path)
        kind = name.rpartition(".")[2].replace("jpg", "jpeg")
        assert facts["trained"]["preview"] == {"in": str(tmp_path / name), "type": f"image/{kind}", "bytes": n}
        assert any(line.endswith(f"{name} (image/{kind}, {n} B)") for line in lines(facts))
