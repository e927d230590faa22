"""Methods of PEFT that count the layers of a model, on classes of diffusers: their order is that of the class."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch

import lora_merge
from lora_merge.errors import MergeError
from lora_merge.models.module_order import in_order, tables
from tests.kit.peft_oracle import assert_close, save, train

UNET = {
    "block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1, "transformer_layers_per_block": (1, 2),
}  # fmt: skip
SDXL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32,
    "use_linear_projection": True,
}  # fmt: skip
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("UNet2DConditionModel", UNET),
    "sdxl": ("UNet2DConditionModel", UNET | SDXL),
    "flux": ("FluxTransformer2DModel", {
        "num_layers": 2, "num_single_layers": 11, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 2, 2), "in_channels": 4,
        "guidance_embeds": True,
    }),
    "sd3": ("SD3Transformer2DModel", {
        "sample_size": 8, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8, "out_channels": 4,
        "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }),
    "wan": ("WanTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
        "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "image_dim": 8, "added_kv_proj_dim": 24,
    }),
    "qwen-image": ("QwenImageTransformer2DModel", {
        "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8,
        "in_channels": 16, "axes_dims_rope": (4, 6, 6),
    }),
    "pixart": ("PixArtTransformer2DModel", {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "cross_attention_dim": 16, "sample_size": 8,
        "caption_channels": 8,
    }),
}  # fmt: skip
SMALL |= {
    "controlnet": ("ControlNetModel", {
        name: UNET[name] for name in UNET if not name.startswith("up")
    } | SDXL | {"conditioning_embedding_out_channels": (4, 8)}),
    "controlnet-xs": ("UNetControlNetXSModel", {
        "block_out_channels": (8, 16), "ctrl_block_out_channels": (4, 8), "norm_num_groups": 4, "cross_attention_dim": 8,
        "down_block_types": UNET["down_block_types"], "up_block_types": UNET["up_block_types"],
        "ctrl_conditioning_embedding_out_channels": (4, 8), "ctrl_num_attention_heads": 2, "num_attention_heads": 2,
        "ctrl_max_norm_num_groups": 4,
    }),
    "flux-controlnet": ("FluxControlNetModel", SMALL["flux"][1] | {"num_single_layers": 2, "num_mode": 3}),
    "sd3-controlnet": ("SD3ControlNetModel", {
        name: value for name, value in SMALL["sd3"][1].items() if name not in ("dual_attention_layers", "qk_norm")
    } | {"extra_conditioning_channels": 1}),
    "z-image-controlnet": ("ZImageControlNetModel", {
        "control_layers_places": [0, 2], "control_refiner_layers_places": [0], "control_in_dim": 4, "dim": 16,
        "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
    }),
}  # fmt: skip
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unilora": (peft.UniLoraConfig, {"r": 2, "theta_d_length": 50}),
    "tinylora": (peft.TinyLoraConfig, {"r": 3, "u": 4, "save_projection": False, "weight_tying": 0.6}),
}
CASES = [
    *(("unilora", name) for name in SMALL if name not in ("sd", "controlnet-xs", "z-image-controlnet")),
    ("tinylora", "sd"),
    ("tinylora", "flux"),
]
TARGETS = ["to_q", "to_k", "to_v", "net.0.proj", "add_q_proj", "to_out.0", "linear_1"]


def small(name: str) -> Any:
    """A model of the class, of a few layers."""
    kind, options = SMALL[name]
    torch.manual_seed(1)
    return getattr(diffusers, kind)(**options).eval()


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_order_is_that_of_the_class(name: str) -> None:
    modules = small(name).named_modules()
    names = [n for n, m in modules if getattr(getattr(m, "weight", None), "ndim", 0) > 1]
    shuffled = random.Random(4).sample(names, len(names))
    assert in_order(shuffled, SMALL[name][0]) == names


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "name"), CASES)
def test_layers_are_counted_as_the_class_lists_them(method: str, name: str, tmp_path: Path) -> None:
    how, options = METHODS[method]
    base, tuned = train(how(target_modules=TARGETS, **options), model=small(name))
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", device="cpu")
    done = type(base).from_pretrained(tmp_path / "out").state_dict()
    changed = 0
    for key, value in copy.deepcopy(tuned).merge_and_unload().state_dict().items():
        assert_close(done[key], value, key)
        changed += not torch.equal(value, base.state_dict()[key])
    assert changed > 4


@pytest.mark.filterwarnings("ignore")
def test_layers_of_another_class_than_the_base_s_are_not_guessed(tmp_path: Path) -> None:
    base, tuned = train(peft.UniLoraConfig(target_modules=TARGETS, r=2), model=small("sd"))
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    told = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(
        json.dumps(told | {"_class_name": "UNetSpatioTemporalConditionModel"})
    )
    with pytest.raises(MergeError, match=r"class|order"):
        lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_every_denoiser_and_controlnet_of_diffusers_is_known() -> None:
    """Not those that hold several others, nor the two that are only ever a part of a model."""
    classes = (
        name for name in dir(diffusers) if re.search("Transformer|UNet|ControlNet", name) and "Multi" not in name
    )
    models = {name for name in classes if issubclass(type(made := getattr(diffusers, name)), type)
              and issubclass(made, diffusers.ModelMixin)}  # fmt: skip
    assert models - tables().keys() == {"Transformer2DModel", "TransformerTemporalModel"}
