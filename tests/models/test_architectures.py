"""The tables against independent row maps, and the notation itself.

Oracle: the checkpoint converters of diffusers. Every row of a native checkpoint carries its own number
(key · 2²² + row), the converter moves the rows about, and where it puts them is compared with where the
tables say they are, both ways. Shapes have their true rows; columns hold one number.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_merge.algorithms import Shape
from lora_merge.errors import AmbiguousName, InputError
from lora_merge.models.architectures import FOLDER, load, recognise, shipped
from lora_merge.models.architectures.notation import BadRow, RowTable, parse
from lora_merge.models.components import LOOSE
from lora_merge.models.names import Names, names
from lora_merge.models.weights import WeightView
from tests.kit.architectures import ALL, CONVERTERS, RECORDED, header, native_of, recorded, rows
from tests.kit.files import index


def parameter(found: Names, key: str) -> WeightView | None:
    module, _, leaf = key.rpartition(".")
    return found.find(module, leaf) if module else found.find(key)


# --- recognition ------------------------------------------------------------------------------------


@pytest.mark.few(22)
@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith("single-file/")])
def test_exactly_one_row_recognises_a_model(name: str) -> None:
    shapes = header(name)
    for prefix in LOOSE:
        hits = recognise(lambda key, p=prefix: shapes.get(p + key), shipped())
        if hits:
            break
    assert len(hits) == 1, [(a.title, layout) for a, layout in hits]
    architecture, layout = hits[0]
    folder = name.split("/")[0]
    if architecture.tables.get("native") and folder in ("native", "diffusers") and name != "native/zimage-original":
        assert (layout == "diffusers") == (folder == "diffusers"), (architecture.title, layout)


ALIKE = {
    "native/chroma-radiance": "Chroma Radiance", "native/hunyuan3d-2": "Hunyuan3D 2", "native/boogu": "Boogu-Image",
    "native/mage-flow": "Mage-Flow", "native/zimage-pixel": "Z-Image, pixel space", "native/yue2": "YuE2",
    "native/hidream-o1": "HiDream-O1", "native/sensenova-u1.5": "SenseNova-U1.5", "native/pid": "PiD",
    "diffusers/cosmos3": "Cosmos 3", "diffusers/nucleus-image": "Nucleus-Image", "diffusers/kolors": "Kolors",
    "diffusers/allegro": "Allegro", "diffusers/bria-fibo": "FIBO", "diffusers/omnigen": "OmniGen 1",
    "diffusers/sana-video": "Sana-Video", "diffusers/sana-wm": "Sana-WM", "diffusers/stable-audio-3": "Stable Audio 3",
    "diffusers/kandinsky6-sr": "Kandinsky 6 super-resolution", "native/wan-s2v-14B": "Wan", "native/wan-scail-14B": "Wan",
    "diffusers/ming-image": "Ming-Image", "diffusers/dreamlite": "DreamLite", "diffusers/deepfloyd-if": "DeepFloyd IF",
}  # fmt: skip
"""Models with the names of another model, and more or wider ones."""


@pytest.mark.few(10)
@pytest.mark.parametrize("name", ALIKE)
def test_model_is_not_taken_for_one_of_its_kin(name: str) -> None:
    architecture = names(index(header(name))).parts[0].architecture
    assert architecture is not None and architecture.title == ALIKE[name]


def test_model_of_another_model_s_names_and_a_wider_input_is_that_model() -> None:
    """FlowRVS reads the latents of the video beside those of the mask, with the names of Wan in both layouts."""
    for layout in ("native", "diffusers"):
        shapes = header(f"{layout}/wan-t2v-1.3B") | {"patch_embedding.weight": (1536, 32, 1, 2, 2)}
        found = names(index(shapes))
        assert (found.architecture, found.parts[0].layout) == ("Wan", layout)
        query = {name: found.find(name) for name in ("blocks.3.self_attn.q", "blocks.3.attn1.to_q")}
        assert {view.shape for view in query.values() if view} == {(1536, 1536)}, query


def test_ming_image_in_one_file_is_not_lumina() -> None:
    """ComfyUI's file: Z-Image's words for fused rows, without the values of padding that tell Z-Image from Lumina."""
    fused = {key: shape for key, shape in header("native/zimage-fused").items() if "pad_token" not in key}
    found = names(index(fused))
    assert (found.architecture, found.parts[0].layout) == ("Ming-Image", "native")
    view = found.find("layers.4.attention.to_k")
    assert view is not None and [(p.start, p.stop) for p in view.row_slices] == [(3840, 7680)]


ROBOTS = [
    ("native/groot-n1.5", "_groot_model.", "GR00T (robot policy)"), ("native/groot-n1.7", "_groot_model.", "GR00T (robot policy)"),
    ("native/molmoact2", "model.", "MolmoAct 2 (robot policy)"), ("native/xvla-0.4", "", "X-VLA (robot policy)"),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "added", "title"), ROBOTS)
def test_robot_policy_has_its_names_in_every_layout(name: str, added: str, title: str) -> None:
    """Both ways: names of LeRobot's policy on the original checkpoint, and the checkpoint's names on LeRobot's folder."""
    original = header(name)
    renamed = (
        {key: old.removeprefix("model.") for key, old in zip(original, original, strict=True)} if not added else {}
    )
    folder = {(renamed.get(key) or f"{added}{key}"): shape for key, shape in original.items()}
    here, there = names(index(original)), names(index(folder))
    assert here.architecture == there.architecture == title
    assert here.parts[0].layout != there.parts[0].layout
    for key, other in zip(original, folder, strict=True):
        for found, asked, want in ((here, other, key), (there, key, other)):
            view = parameter(found, asked)
            assert view is not None and {p.key for p in view.row_slices} == {want}, (asked, want)


def test_vision_model_of_groot_has_one_level_less_in_newer_folders() -> None:
    """The same tensors, saved with transformers 5."""
    shapes = {f"_groot_model.{key}": shape for key, shape in header("native/groot-n1.5").items()}
    newer = {key.replace("vision_model.vision_model.", "vision_model."): shape for key, shape in shapes.items()}
    assert newer.keys() != shapes.keys()
    found, older = names(index(newer)), names(index(shapes))
    for old, new in zip(shapes, newer, strict=True):
        assert (view := parameter(found, old)) and [p.key for p in view.row_slices] == [new]
        assert (view := parameter(older, new)) and [p.key for p in view.row_slices] == [old]


def xvla_of_lerobot(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of LeRobot's conversion of checkpoints before 0.6 (policies/xvla/modeling_xvla.py), in our words."""
    block = r"(model\.vlm\.vision_tower\.blocks\.\d+\.\d+\.(?:spatial|channel)_block\.)"
    rows = [
        (r"(model\.vlm\.vision_tower\.convs\.\d+\.)proj\.", r"\1conv."),
        (block + r"(conv[12])\.fn\.dw\.", r"\1\2."),
        (block + r"(?:window|channel)_attn\.norm\.", r"\1norm1."),
        (block + r"(window_attn|channel_attn)\.fn\.", r"\1\2."),
        (block + r"ffn\.norm\.", r"\1norm2."),
        (block + r"ffn\.fn\.net\.", r"\1ffn."),
        (r"model\.vlm\.(image_proj_norm|visual_temporal_embed)\.", r"model.vlm.multi_modal_projector.\1."),
        (r"model\.vlm\.image_pos_embed\.", "model.vlm.multi_modal_projector.image_position_embed."),
        (r"model\.vlm\.language_model\.model\.", "model.vlm.language_model."),
        (r"model\.vlm\.image_projection$", "model.vlm.multi_modal_projector.image_projection.weight"),
    ]
    return {
        next((re.sub(a, b, key) for a, b in rows if re.match(a, key)), key): value for key, value in tensors.items()
    }


def test_names_of_x_vla_are_where_lerobot_puts_them() -> None:
    """The older names became those of transformers; one matrix is turned on the way."""
    old, new = header("native/xvla-0.4"), header("native/xvla")
    arrived = dict(zip(xvla_of_lerobot(old), old, strict=True))
    del arrived["model.vlm.language_model.final_logits_bias"]
    assert arrived.keys() == new.keys()
    on_old, on_new = names(index(old)), names(index(new))
    for key, source in arrived.items():
        here, there = parameter(on_old, key), parameter(on_new, source)
        assert here is not None and there is not None, key
        turned = source == "model.vlm.image_projection"
        assert [(p.key, p.transposed) for p in here.row_slices] == [(source, turned)]
        assert [(p.key, p.transposed) for p in there.row_slices] == [(key, turned)]
        assert here.shape == new[key]


WITHOUT = ("diffusers/flux-dev", "native/flux-dev", "native/sdxl", "native/wan-t2v-14B", "diffusers/qwen-image",
           "native/lumina2", "native/chroma", "diffusers/zimage", "transformers/llama-3.2-1b")  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [
    n if n in WITHOUT else pytest.param(n, marks=pytest.mark.slow) for n in ALL if not n.startswith("single-file/")
])  # fmt: skip
def test_model_without_one_sign_tensor_is_its_own_architecture_or_unknown(name: str) -> None:
    """But where the tensor is the only difference to another architecture: SD 2 without one is SD 1."""
    shapes = header(name)
    part = names(index(shapes)).parts[0]
    assert part.architecture is not None
    signs = [c.key for c in part.architecture.layouts[part.layout] if not c.absent]
    for sign in signs:
        cut = {key: shape for key, shape in shapes.items() if key != part.keys[sign]}
        again = names(index(cut)).parts[0]
        other = recognise(lambda key, p=again.prefix, of=cut: of.get(p + key), shipped())
        its_own = (again.architecture, again.layout) == (part.architecture, part.layout)
        assert other or again.architecture is None or its_own, sign


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "sign"), [
    ("diffusers/flux-dev", "x_embedder.weight"), ("native/flux-dev", "single_blocks.0.linear1.weight"),
    ("diffusers/qwen-image", "txt_norm.weight"),
])  # fmt: skip
def test_model_without_one_sign_tensor_is_recognised_by_its_names(name: str, sign: str) -> None:
    """Without two, or with names of its own, it is not."""
    shapes = header(name)
    known = names(index(shapes)).parts[0]
    del shapes[sign]
    cut = names(index(shapes)).parts[0]
    assert (cut.architecture, cut.layout) == (known.architecture, known.layout) != (None, "")
    of_its_own = {f"other.{chr(97 + n)}.weight": (4, 4) for n in range(26)}
    assert names(index(shapes | of_its_own)).parts[0].architecture is None
    assert known.architecture is not None
    second = next(c.key for c in known.architecture.layouts[known.layout] if c.key in shapes)
    assert names(index({k: s for k, s in shapes.items() if k != second})).parts[0].architecture is None


# --- rows against diffusers' converters ---------------------------------------------------------------


def tagged(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """A tensor per key: as many rows, one column, and in row r of key k the number k · 2²² + r."""
    import torch

    return {
        key: (torch.arange(shape[0] if shape else 1) + (n << 22)).reshape(-1, *[1] * (len(shape) - 1))
        for n, (key, shape) in enumerate(shapes.items())
    }


def convert(name: str, arguments: Mapping[str, Any], tags: dict[str, Any]) -> dict[str, Any]:
    from diffusers.loaders import single_file_utils

    converter: Callable[..., dict[str, Any]] = getattr(single_file_utils, f"convert_{name}")
    if name == "open_clip_checkpoint":
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=1280))
        return converter(model, {f"x.{k}": v for k, v in tags.items()}, prefix="x.")
    prefix = {
        "ldm_unet_checkpoint": "model.diffusion_model.",
        "ldm_vae_checkpoint": "first_stage_model.",
    }.get(name, "")
    return converter({prefix + k: v for k, v in tags.items()}, **arguments)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("native", "diffusers", "converter", "arguments"),
    CONVERTERS,
    ids=[c[1].split("/")[1] for c in CONVERTERS],
)
def test_rows_are_where_diffusers_puts_them(
    native: str, diffusers: str, converter: str, arguments: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    there = header(diffusers)
    here = header(native) if native else native_of(there)
    if converter == "sana_transformer_to_diffusers":  # it insists on these two, which have no counterpart
        here |= {"pos_embed": (1, 1024, 2240), "y_embedder.y_embedding": (300, 2304)}
    tags = tagged(here)
    moved = convert(converter, arguments, dict(tags))
    on_native = names(index(here))
    on_diffusers = names(index(there | {k: (*v.shape[:1], *there[k][1:]) for k, v in moved.items() if k in there}))
    numbers = {key: n for n, key in enumerate(here)}
    arrived = torch.cat([t.flatten() for t in moved.values()])
    assert set(moved) <= set(there), sorted(set(moved) - set(there))[:5]
    for key, rows_there in moved.items():
        view = parameter(on_native, key)
        assert view is not None, key
        if not any(p.transposed for p in view.row_slices) and rows_there.numel() == (
            there[key][0] if there[key] else 1
        ):
            assert torch.equal(rows(view, tags), rows_there.flatten()), (key, view)
    present = set(torch.bincount(arrived >> 22).nonzero().flatten().tolist())
    for key in here:
        if numbers[key] not in present or not here[key]:
            continue  # not in the diffusers model: buffers, heads that are never run
        view = parameter(on_diffusers, key)
        assert view is not None, key
        if not any(p.transposed for p in view.row_slices):
            assert torch.equal(rows(view, moved), tags[key].flatten()), (key, view)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [True, False])
def test_rows_of_minimax_h3_lie_head_by_head_in_shards_and_by_the_name_of_diffsynth(sharded: bool) -> None:  # noqa: FBT001
    """The same tensors in one file hold q, then k, then v: the converter has to be told which it is, we look at the files."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    shapes = native_of(header("diffusers/mini-max-h3"))
    tags = tagged(shapes)
    there = index(shapes)
    if sharded:
        first = next(iter(there.tensors))
        there.tensors[first] = dataclasses.replace(there.tensors[first], source=Path("another.safetensors"))
    assert bool(names(there).notes) == sharded
    assert not names(index({**header("diffusers/mini-max-h3")})).notes
    config = {"num_attention_heads": 56, "attention_head_dim": 128}
    name = "minimax_h3_transformer_checkpoint_to_diffusers"
    orders = {
        layout: convert(name, {"config": config, "qkv_layout": layout}, dict(tags))
        for layout in ("stacked", "interleaved")
    }
    base = names(there)
    for key, want in orders["interleaved" if sharded else "stacked"].items():
        view = parameter(base, key)
        assert view is not None, key
        if want.numel() == view.shape[0]:
            assert torch.equal(rows(view, tags), want.flatten()), key
    moved = orders["stacked"]
    on_diffusers = names(index({k: v.shape for k, v in moved.items()} | {"audio_proj_in.weight": (1, 1)}))
    for block in ("blocks.7", "token_refiner.blocks.1"):
        own = f"{block}.attn.qkv_proj"
        heads = tags[f"{own}.weight"].reshape(3, 56, 128)  # what a trainer of the shards, and one of single files, sees
        turned = heads.transpose(0, 1).reshape(-1)
        assert torch.equal(rows(on_diffusers.find(own), moved), heads.flatten())
        assert torch.equal(rows(on_diffusers.find(f"{own}.default"), moved), turned)
        here = tags[f"{own}.weight"].flatten()
        by_turns, stacked = here, here.reshape(56, 3, 128).transpose(0, 1).reshape(-1)
        assert torch.equal(rows(base.find(own), tags), stacked if sharded else here)
        assert torch.equal(rows(base.find(f"{own}.default"), tags), by_turns if sharded else turned)


@pytest.mark.parametrize("module", ["blocks.0.attn.qkv_proj.default", "blocks.0.attn.qkv_proj"])
def test_heads_of_another_width_than_the_table_has_are_refused(module: str) -> None:
    shapes = {"token_refiner.blocks.0.attn.qkv_proj.weight": (96, 8), "blocks.0.attn.qkv_proj.weight": (96, 8)}
    there = index(shapes)
    if not module.endswith("default"):
        key = "token_refiner.blocks.0.attn.qkv_proj.weight"
        there.tensors[key] = dataclasses.replace(there.tensors[key], source=Path("another.safetensors"))
    with pytest.raises(AmbiguousName):
        names(there).find(module)


SWAPPED = re.compile(r"blocks\.\d+\.norm[23]\.")
"""HunyuanDiT's norms change their names with each other between the layouts, so the names alone fit both."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RECORDED)
def test_rows_are_where_the_scripts_of_diffusers_put_them(name: str) -> None:
    native, there = recorded(name)
    on_native, on_diffusers = names(index(native)), names(index({k: shape for k, (shape, _) in there.items()}))
    back: dict[str, list[tuple[int, str, int, int]]] = {}
    for key, (_, rows_there) in there.items():
        at = 0
        for source, start, stop in rows_there:
            back.setdefault(source, []).append((start, key, at, at + stop - start))
            at += stop - start
        if name == "hunyuandit" and SWAPPED.match(key):
            with pytest.raises(AmbiguousName):
                parameter(on_native, key)
            continue
        view = parameter(on_native, key)
        assert view is not None, key
        assert [(p.key, p.start, p.stop) for p in view.row_slices] == rows_there, key
    assert set(back) == set(native)
    for key, rows_here in back.items():
        if name == "hunyuandit" and SWAPPED.match(key):
            continue
        view = parameter(on_diffusers, key)
        assert view is not None, key
        assert [(p.key, p.start, p.stop) for p in view.row_slices] == [tuple(r[1:]) for r in sorted(rows_here)], key


# --- rows against transformers' conversion ------------------------------------------------------------


def tiny(name: str) -> Any:
    """A model of transformers whose in-memory names differ from those it stores."""
    import transformers as t

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 32}  # fmt: skip
    vit = {k: small[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    moe = {"num_local_experts": 3, "num_experts_per_tok": 1}
    experts = small | {"moe_intermediate_size": 12, "n_routed_experts": 3, "num_experts_per_tok": 1,
                       "n_shared_experts": 1, "first_k_dense_replace": 0}  # fmt: skip
    turned = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1],
                                                 "rope_theta": 1e4, "partial_rotary_factor": 0.5}}  # fmt: skip
    seeing = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
              "num_position_embeddings": 16}  # fmt: skip
    made = {
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**small, **moe)),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**small, num_experts=3, moe_intermediate_size=8, head_dim=8, num_experts_per_tok=1)
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=32,
            )
        ),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**vit, image_size=8, patch_size=4)),
        "clip": lambda: t.CLIPTextModel(
            t.CLIPTextConfig(**vit, vocab_size=32, max_position_embeddings=8, projection_dim=16)
        ),
        "clip_projection": lambda: t.CLIPTextModelWithProjection(
            t.CLIPTextConfig(**vit, vocab_size=32, max_position_embeddings=8, projection_dim=16)
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**small, pad_token_id=0)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small)),
        "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**vit, image_size=8, patch_size=4)),
        "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**vit, image_size=8, patch_size=4)),
        "jamba": lambda: t.JambaForCausalLM(t.JambaConfig(**small, num_experts=3)),
        "phimoe": lambda: t.PhimoeForCausalLM(t.PhimoeConfig(**small, **moe)),
        "granite_moe": lambda: t.GraniteMoeForCausalLM(t.GraniteMoeConfig(**small, **moe)),
        "glm4v_moe": lambda: t.Glm4vMoeForConditionalGeneration(
            t.Glm4vMoeConfig(text_config=experts | turned, vision_config=seeing)
        ),
        "qwen3_vl_moe": lambda: t.Qwen3VLMoeForConditionalGeneration(
            t.Qwen3VLMoeConfig(
                text_config=experts | turned | {"num_experts": 3},
                vision_config=seeing | {"deepstack_visual_indexes": [0]},
            )
        ),
        "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(
            t.DeepseekV3Config(
                **experts,
                n_group=1,
                topk_group=1,
                q_lora_rank=4,
                kv_lora_rank=4,
                qk_rope_head_dim=4,
                qk_nope_head_dim=4,
                v_head_dim=4,
            )
        ),
        "qwen2_moe": lambda: t.Qwen2MoeForCausalLM(
            t.Qwen2MoeConfig(**experts, num_experts=3, shared_expert_intermediate_size=8)
        ),
        "gemma3": lambda: t.Gemma3ForConditionalGeneration(
            t.Gemma3Config(
                text_config=small | {"head_dim": 8}, vision_config=vit | {"image_size": 28, "patch_size": 14}
            )
        ),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config={**small, "model_type": "llama"},
                vision_config={**vit, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
            )
        ),
    }
    return made[name]()


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "qwen3_moe",
        "gpt_neox",
        "vit",
        "clip",
        "clip_projection",
        "gpt2",
        "phi3",
        "llama",
        "deit",
        "dinov2",
        "jamba",
        "phimoe",
        "granite_moe",
        "llava",
        "glm4v_moe",
        "qwen3_vl_moe",
        "deepseek_v3",
        "qwen2_moe",
        "gemma3",
    ],
)
def test_names_in_memory_are_where_transformers_stores_them(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = tiny(name)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = names(index({k: tuple(v.shape) for k, v in stored.items()}))
    checked = 0
    for key, value in model.named_parameters():
        if key == "lm_head.weight" and name == "gpt2":
            continue  # tied, not stored
        view = parameter(found, f"base_model.model.{key}")
        assert view is not None, key
        parts = [stored[p.key].reshape(-1, p.cols)[p.start : p.stop] for p in view.row_slices]
        there = torch.cat([part.T if p.transposed else part for part, p in zip(parts, view.row_slices, strict=True)])
        want = value.T if view.row_slices[0].transposed else value
        assert tuple(view.shape) == tuple(want.shape), key
        assert torch.equal(there.reshape(want.shape), want), key
        checked += view.row_slices[0].transposed
    assert bool(checked) == (name == "gpt2")


# --- the notation -------------------------------------------------------------------------------------


def expanded(name: str, canonical: str, **ranges: int) -> list[tuple[str, list[str]]]:
    return [(".".join(r.name), [".".join(p.path) for p in r.parts]) for r in parse(name, canonical, ranges)]


def test_alternatives_and_arithmetic_are_worked_out() -> None:
    assert expanded("a.(x|y).b", "c.(p.q|r)") == [("a.x.b", ["c.p.q"]), ("a.y.b", ["c.r"])]
    assert expanded("in.{3*i+j+1}", "down.{i}.{j}", i=2, j=2) == [
        ("in.1", ["down.0.0"]), ("in.2", ["down.0.1"]), ("in.4", ["down.1.0"]), ("in.5", ["down.1.1"]),
    ]  # fmt: skip


def test_parts_sizes_halves_and_signs() -> None:
    (row,) = parse("a", "b.[q:H, k<, k>].w", {})
    assert [(p.path, p.half, p.sized) for p in row.parts] == [
        (("b", "q", "w"), None, True), (("b", "k", "w"), 0, False), (("b", "k", "w"), 1, False),
    ]  # fmt: skip
    (row,) = parse("a", "~b", {})
    assert [p.half for p in row.parts] == [1, 0]
    (row,) = parse("a", "^b", {})
    assert row.parts[0].transposed
    (row,) = parse("a", "b.[q, k].w/64", {})
    assert ([p.path for p in row.parts], row.block) == ([("b", "q", "w"), ("b", "k", "w")], 64)
    (row,) = parse("a.{i}", "b.{i}.{e}.c", {})
    assert row.stack == "e"


@pytest.mark.parametrize(
    ("name", "canonical", "why"),
    [
        ("a.(x|y)", "b.(x|y|z)", "differ in number"),
        ("a.{i+1}", "b.{i}", "no range"),
        ("a.{i/2}", "b.{i}", "arithmetic"),
        ("a.{i}", "b", "braces differ"),
        ("a.{i}", "b.{i}.{j}.{k}", "braces differ"),
        ("a b", "c", "not a path"),
        ("a", "b.[x y]", "not a path"),
        ("a", "^b.[x, y]", "whole weight"),
        ("a", "b.[x:H, y]/8", "take turns"),
        ("a", "~b.[x, y]/8", "take turns"),
        ("a", "b.[x, y]/0", "not a path"),
    ],
)
def test_rows_that_make_no_sense_are_refused(name: str, canonical: str, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        list(parse(name, canonical, {"i": 2} if "/" in name else {}))


def test_longest_and_the_most_literal_row_wins() -> None:
    rows = [
        *parse("a.{i}", "x.{i}", {}),
        *parse("a.{i}.q", "x.{i}.to_q", {}),
        *parse("a.{last}.q", "x.{last}.last_q", {}),
    ]
    table = RowTable(rows).settled(["a.0.q.weight", "a.11.q.weight", "a.3.r.weight"])

    def canonical(name: str) -> str:
        hit = table.canonical(tuple(name.split(".")))
        assert hit is not None
        return ".".join((*hit.row.parts[0].path, *hit.tail))

    assert canonical("a.2.r.weight") == "x.{i}.r.weight"
    assert canonical("a.1.q.weight") == "x.{i}.to_q.weight"
    assert canonical("a.11.q.weight") == "x.11.last_q.weight"
    assert table.canonical(("b", "0")) is None


@pytest.mark.few(13)
@pytest.mark.parametrize("file", sorted(p.stem for p in FOLDER.glob("*.yaml")))
def test_shipped_files_are_sound(file: str) -> None:
    from lora_merge.models.adapter_architecture import parsed

    architecture = load(FOLDER / f"{file}.yaml")
    assert architecture.layouts
    assert all(table.settled([]) for table in architecture.spellings.values())
    assert set(architecture.layouts) <= {*architecture.tables, architecture.canonical}
    for condition in (*architecture.adapter, *chain(*architecture.variants.values())):
        _, _, shape = parsed(condition)
        assert condition.removeprefix("no ").count(" ") == (shape is not None), condition
        assert all(re.fullmatch("_|[0-9]*[A-Z]|[0-9]+", axis) for axis in shape or ()), condition


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("title: [", 2, "not YAML"),
        ("layouts: {}", 1, "no title"),
        ("title: A\nnative: {a: b}", 1, "neither a setting nor one of its layouts"),
        ("title: A\nlayouts: {native: [a b c d]}", 2, "`no key`"),
        ("title: A\nlayouts: {native: [a]}\nnative:\n  x: y\n  a b: c", 5, "not a path"),
        ("title: A\nlayouts: {native: [a]}\nnative:\n  x: y\n  x: z", 5, "twice"),
        ("title: A\nlayouts: {native: [a]}\nnative: {<<: nothing}", 3, "no architecture file"),
        ("title: A\nranges: {i: many}", 2, "number"),
        ("- title", 1, "mapping"),
        ("title: A\nlayouts: {native: [a]}\nnative: {<<: sdxl.none}", 3, "no table none"),
        ("title: A\nlayouts: {native: [a]}\nnative: {a..b: c}", 3, "nothing between"),
        ("title: A\nlayouts: {native: [a]}\nnative: {a.b: c.}", 3, "nothing between"),
        ("title: A\nranges: {i: 999999999}\nlayouts: {native: [a]}\nnative: {'a.{i+1}': 'b.{i}'}", 4, "more than"),
        ("title: A\nranges: {i: 99}\nlayouts: {native: [a]}\nnative:\n" +
         "\n".join(f" a{n}.{{i+1}}: 'b.{{i}}'" for n in range(99)), 10, "more than"),
        (f"title: A\nranges: {{i: 1}}\nlayouts: {{native: [a]}}\nnative: {{a: 'b.{{{'i+' * 99999}i}}'}}", 4, "too long"),
        (f"title: A\n{'? ' * 30}\n", 2, "a name"),
        ("title: A\n? [&a [x, x], &b [*a, *a], &c [*b, *b], *c]\n: 1\n", 2, "a name"),
    ],
)  # fmt: skip
def test_bad_map_is_refused_with_its_line(
    text: str, line: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_merge.models.architectures.MOST_TABLE_ROWS", 500)  # so many are made before it is refused
    file = tmp_path / "map.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=why) as error:
        load(file)
    assert f"map.yaml, line {line}:" in error.value.where


def test_missing_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        load(tmp_path / "nowhere.yaml")


def test_map_that_nests_without_end_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 300_000)
    with pytest.raises(InputError, match="absurd"):
        load(tmp_path / "deep.yaml")
    with pytest.raises(InputError, match="regular"):
        load(Path("/dev/zero"))


@pytest.mark.slow
def test_names_of_every_architecture_are_those_of_its_headers() -> None:
    """Otherwise: python -m tests.models.module_forms."""
    from tests.models.module_forms import FILE, made

    assert json.loads(FILE.read_text(encoding="ascii")) == made()
