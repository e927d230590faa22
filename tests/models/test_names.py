"""Every name of every dialect lands on exactly the rows it means."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lora_merge.adapters.modules import group, weight_shape, weight_shapes
from lora_merge.algorithms import Shape
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import AmbiguousName, InputError
from lora_merge.files.checkpoint import Index, open_checkpoint
from lora_merge.matching.fit_errors import explain, missing_networks, variant_doubt
from lora_merge.models.adapter_architecture import architectures, described, modules_of
from lora_merge.models.components import components
from lora_merge.models.experts import as_matrices
from lora_merge.models.names import Names, denoiser_of, names, of_the_denoiser
from lora_merge.models.prefixes import innermost
from lora_merge.models.weights import RowSlice, WeightView, stacked, transposed, whole
from tests.kit.cost import steps
from tests.kit.files import blob, index
from tests.kit.pipeline_names import STORED, base, header, modules, pipeline

PATCHES = ("img_in", "x_embedder", "final_layer.linear", "proj_out")

PAIRS = (
    # native file                diffusers or transformers      in other sizes there, or not at all
    ("native/sd15",              "diffusers/sd15",              ()),
    ("native/sd21",              "diffusers/sd21",              ()),
    ("native/sdxl",              "diffusers/sdxl",              ()),
    ("native/sdxl-refiner",      "diffusers/sdxl-refiner",      ()),
    ("native/vae-sd",            "diffusers/vae-sd",            ()),
    ("native/openclip-bigg-text", "transformers/clip-bigg",     ()),
    ("native/flux-dev",          "diffusers/flux-dev",          ()),
    ("native/flux2",             "diffusers/flux2",             ()),
    ("native/chroma",            "diffusers/chroma",            ()),
    ("native/sd3",               "diffusers/sd3",               ()),
    ("native/sd35-medium",       "diffusers/sd35-medium",       ("pos_embed($|.weight|.pos)",)),
    ("native/sd35-large",        "diffusers/sd35-large",        ()),
    ("native/auraflow",          "diffusers/aura-flow",         ("pos_embed.pos", "positional")),
    ("native/lumina2",           "diffusers/lumina2",           ("cap", "time_caption_embed.cap", "norm_final")),
    ("native/zimage-fused",      "diffusers/zimage",            ()),
    ("native/zimage-original",   "diffusers/zimage",            ()),
    ("native/qwen-image",        "diffusers/qwen-image",        ()),
    ("native/wan-t2v-1.3B",      "diffusers/wan-t2v-1.3B",      ()),
    ("native/wan-t2v-14B",       "diffusers/wan",               ()),
    ("native/wan-i2v-14B",       "diffusers/wan-i2v-14B",       ()),
    ("native/hunyuanvideo",      "diffusers/hunyuan-video",     PATCHES),
    ("native/hunyuanvideo-comfy", "diffusers/hunyuan-video",    ()),
    ("native/hunyuanvideo-comfy", "native/hunyuanvideo",        PATCHES),
    ("native/hunyuan-image-2.1", "diffusers/hunyuan-image",     ("byt5_in",)),
    ("native/hunyuanvideo-1.5",  "diffusers/hunyuan-video15",   ()),
    ("native/ltxv",              "diffusers/ltxvideo",          ()),
    ("native/mochi",             "diffusers/mochi",             ()),
    ("native/cosmos2-2B",        "diffusers/cosmos2-2B",        ()),
    ("native/stable-audio",      "diffusers/stable-audio",      ("transformer.rotary", r".*\.norm\d\.bias")),
    ("native/cascade-c",         "diffusers/cascade-c",         ()),
    ("native/hidream-o1",        "native/hidream-o1-comfy",     ("lm_head", ".*deepstack")),
    ("native/minimax-music3",    "diffusers/minimax-music3",    ("cond", "latent_cond", ".*rotary")),
    ("transformers/clip-l.text_model", "transformers/clip-l",   ()),
    ("transformers/mixtral-8x7b", "transformers/mixtral-8x7b.in-memory", ()),
    ("transformers/qwen3-30b-a3b", "transformers/qwen3-30b-a3b.in-memory", ()),
    ("transformers/gpt-neox-20b", "transformers/gpt-neox-20b.in-memory", ()),
    ("transformers/vit-base",    "transformers/vit-base.in-memory", ()),
    ("transformers/gpt2",        "transformers/gpt2.in-memory", ("lm_head",)),
    ("transformers/exaone-3.5-2.4b", "transformers/exaone-3.5-2.4b.in-memory", ()),
)  # fmt: skip

ANY = ("", "base_model.model.", "lycoris_")
DENOISER = (*ANY, "diffusion_model.", "model.diffusion_model.", "transformer.", "unet.", "unet.base_model.model.",
            "base_model.model.transformer.", "lora_unet_", "lora_unet__", "lora_transformer_", "oft_unet_",
            "transformer._orig_mod.", "module.", "pipe.dit.", "pipe.unet.", "pipe.vace.")  # fmt: skip
ENCODER = (*ANY, "lora_te_")


def guess(modules: Mapping[str, tuple[int, ...]]) -> str:
    """What an adapter is for, by its names and shapes."""
    flat = modules_of(of_the_denoiser(modules))
    return described(architectures(flat), flat)


def called(dialect: str, module: str) -> str:
    return dialect + (module.replace(".", "_") if dialect.endswith("_") else module)


def assert_one_to_one(here: str, there: str, other_sizes: tuple[str, ...]) -> None:
    """All names of `there` are found on `here`, each kind of them in every dialect, and cover every row once.

    Names are of one kind if they differ in numbers alone; they share the dialects, so that each is told in one at least.
    """
    shapes, found = header(here), base(here)
    encoder = "clip" in here or "t5" in here
    dialects = ENCODER if encoder else ANY if "vae" in here or here.startswith("transf") else DENOISER
    rows, seen = defaultdict(list), Counter[tuple[str, str]]()
    told = {n: shape for n, shape in modules(header(there)).items() if not unlike(".".join(n), other_sizes)}
    kinds = {(module, parameter): (re.sub(r"\d+", "#", module), parameter) for module, parameter in told}
    counts = Counter(kinds.values())
    for (module, parameter), shape in told.items():
        view = found.find(module, parameter)
        assert view is not None, f"{module} ({parameter})"
        assert prod(view.shape) == prod(shape), f"{module}: {view} {shape}"
        if not view.row_slices[0].transposed:
            assert view.shape[:1] == shape[:1], f"{module}: {view} {shape}"
        kind = kinds[module, parameter]
        for dialect in dialects[seen[kind] % len(dialects) :: counts[kind]]:
            assert found.find(called(dialect, module), parameter) == view, called(dialect, module)
        seen[kind] += 1
        for piece in view.row_slices:
            rows[piece.key].append((piece.start, piece.stop, piece.cols))
    for key, shape in shapes.items():
        if unlike(key, other_sizes):
            continue
        at = 0
        for start, stop, cols in sorted(rows.get(key, ())):
            assert start == at, f"{key}: rows {at} to {start}"
            at, size = stop, stop * cols
        assert at, f"{key} is nobody's"
        assert size == prod(shape), f"{key}: rows from {at} on are nobody's"


def unlike(key: str, other_sizes: tuple[str, ...]) -> bool:
    return any(re.match(pattern, key) for pattern in other_sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize(("one", "other", "other_sizes"), PAIRS, ids=[f"{a}-{b}" for a, b, _ in PAIRS])
def test_names_of_the_other_layout_cover_the_base_once(one: str, other: str, other_sizes: tuple[str, ...]) -> None:
    assert_one_to_one(one, other, other_sizes)
    if len(header(one)) < 5000:  # 18867 names of experts are told in the other direction alone
        assert_one_to_one(other, one, other_sizes)


def test_names_in_memory_cover_a_base_that_fuses_q_k_and_v() -> None:
    """Sarvam. The other direction has no files: its names in memory are those of many models."""
    assert_one_to_one("transformers/sarvam-30b", "transformers/sarvam-30b.in-memory", ())


@pytest.mark.parametrize("model", ["native/wan-i2v-14B", "diffusers/wan-i2v-14B"])
def test_adapters_of_wan_animate_2_fit_files_with_the_names_of_wan(model: str) -> None:
    """Its authors and diffusers have names of their own; ComfyUI has Wan's, by which its files are recognised."""
    for wan, authors, diffusers in (
        ("self_attn.q", "block.self_attn.q", "self_attn.to_q"),
        ("self_attn.o", "block.self_attn.o", "self_attn.to_out.0"),
        ("cross_attn.v_img", "block.cross_attn.v_img", "cross_attn.add_v_proj"),
        ("ffn.2", "block.ffn.2", "ffn.2"),
    ):
        want = base(model).find(f"blocks.7.{wan}")
        assert want is not None
        for name in (f"diffusion_model.blocks.7.{authors}", f"transformer.blocks.7.{diffusers}"):
            assert base(model).find(name) == want


@pytest.mark.few(5)
@pytest.mark.parametrize("name", STORED)
def test_own_names_mean_the_own_tensors(name: str) -> None:
    """Every parameter of every full-size model, in a dialect that changes from one to the next."""
    shapes, found = header(name), base(name)
    kind = name.partition("/")[0]
    dialects = ("",) if kind == "single-file" else DENOISER if kind in ("native", "diffusers") else ANY
    dialects = ANY if re.search("openclip|vae", name) else dialects
    for n, key in enumerate(shapes):
        module, _, leaf = key.rpartition(".")
        if name == "native/hunyuandit" and re.fullmatch(r"blocks\.\d+\.norm[23]", module):
            continue  # see test_architectures.SWAPPED
        dialect, named = dialects[n % len(dialects)], leaf in ("weight", "bias", "scale")
        asked = (called(dialect, module), leaf) if named else (called(dialect, key),)
        if (
            found.has_twins and key in found._twins and innermost(asked[0])[0] != "any"
        ):  # YuE2: which half the prefix means is not known
            with pytest.raises(AmbiguousName):
                found.find(*asked)
            asked = (module, leaf)
        view = found.find(*asked)
        assert view is not None, (dialect, key)
        assert {p.key for p in view.row_slices} == {key}, (dialect, key)
        assert sum((p.stop - p.start) * p.cols for p in view.row_slices) == prod(shapes[key]), (dialect, key)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["single-file/sd3", "diffusers/ltx2-video", "single-file/sdxl"])
def test_tables_are_built_in_few_steps(name: str) -> None:
    """A whole resolution takes 0.1 to 0.2 s."""
    shapes = header(name)
    base("native/sd15")  # the architecture files are read once

    def resolve() -> None:
        found = names(index(shapes))
        for module, parameter in modules(shapes):
            found.find(module, parameter)

    assert steps(resolve) / len(shapes) < 700  # 100 to 340


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("single-file/sd1", {"unet", "te", "vae"}),
        ("single-file/sd2", {"unet", "te", "vae"}),
        ("single-file/sdxl", {"unet", "te1", "te2", "vae"}),
        ("single-file/sdxl-refiner", {"unet", "te2", "vae"}),
        ("single-file/sd3", {"transformer", "te1", "te2", "te3", "vae", "other"}),
        ("single-file/flux1-dev-all-in-one", {"transformer", "te1", "te2", "vae"}),
        ("transformers/clip-l", {"te"}),
        ("transformers/llama-3.1-8b", {"model"}),
        ("diffusers/wan", {"transformer"}),
    ],
)
def test_components(name: str, parts: set[str]) -> None:
    assert {base(name).component(key) for key in header(name)} == parts


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "prefix", "inventory"),
    [
        ("sdxl", "unet.", "diffusers/sdxl"),
        ("sdxl", "lora_unet_", "native/sdxl"),
        ("sdxl", "text_encoder_2.", "transformers/clip-bigg"),
        ("sdxl", "lora_te2_", "transformers/clip-bigg"),
        ("sd1", "text_encoder.", "transformers/clip-l"),
        ("sd1", "lora_te_", "transformers/clip-l.text_model"),
        ("sd2", "lora_te_", "transformers/clip-h"),
        ("sd3", "lora_te1_", "transformers/clip-l.text_model"),
        ("sd3", "text_encoders.clip_g.transformer.", "transformers/clip-bigg"),
        ("sd3", "lora_te3_", "transformers/t5xxl-encoder"),
        ("flux1-dev-all-in-one", "lora_te1_", "transformers/clip-l"),
        ("flux1-dev-all-in-one", "lora_te2_", "transformers/t5xxl-encoder"),
        ("flux1-dev-all-in-one", "lora_te3_", "transformers/t5xxl-encoder"),
        ("flux1-dev-all-in-one", "text_encoder_2.", "transformers/t5xxl-encoder"),
        ("flux1-dev-all-in-one", "text_encoders.t5xxl.transformer.", "transformers/t5xxl-encoder"),
        ("flux1-dev-all-in-one", "transformer.", "diffusers/flux-dev"),
        ("flux1-dev-all-in-one", "transformer.", "native/flux-dev"),
    ],
)
def test_whole_checkpoints_answer_to_the_names_of_their_parts(name: str, prefix: str, inventory: str) -> None:
    found = base(f"single-file/{name}")
    for module, parameter in modules(header(inventory)):
        assert found.find(called(prefix, module), parameter) is not None, called(prefix, module)


def test_openclip_rows_and_transposed_projection() -> None:
    sdxl = base("single-file/sdxl")
    view = sdxl.find("lora_te2_text_model_encoder_layers_3_self_attn_k_proj")
    key = "conditioner.embedders.1.model.transformer.resblocks.3.attn.in_proj_weight"
    assert view == WeightView((RowSlice(key, 1280, 2560, 1280),), (1280, 1280))
    bias = sdxl.find("text_encoder_2.text_model.encoder.layers.3.self_attn.v_proj", "bias")
    assert bias is not None
    assert (bias.row_slices[0].start, bias.row_slices[0].stop) == (2560, 3840)
    projection = sdxl.find("text_encoder_2.text_projection")
    assert projection is not None
    assert projection.row_slices[0].transposed


def test_fused_adapter_on_split_base_and_back() -> None:
    split, fused = base("diffusers/flux-dev"), base("native/flux-dev")
    view = split.find("lora_unet_single_blocks_3_linear1")
    stem = "single_transformer_blocks.3"
    assert view is not None
    assert [p.key for p in view.row_slices] == [
        f"{stem}.{n}.weight" for n in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]
    assert view.shape == (21504, 3072)
    back = fused.find(f"transformer.{stem}.proj_mlp", "bias")
    assert back == WeightView((RowSlice("single_blocks.3.linear1.bias", 9216, 21504, 1),), (12288,))


def test_swapped_halves() -> None:
    view = base("native/flux-dev").find("transformer.norm_out.linear")
    key = "final_layer.adaLN_modulation.1.weight"
    assert view == WeightView((RowSlice(key, 3072, 6144, 3072), RowSlice(key, 0, 3072, 3072)), (6144, 3072))
    assert base("native/flux-dev").find("final_layer.adaLN_modulation.1") == whole(key, (6144, 3072))
    context = base("native/sd3").find("transformer.transformer_blocks.23.norm1_context.linear")
    assert context is not None
    assert len(context.row_slices) == 2  # the last block has no gate: scale and shift change places
    context = base("native/sd3").find("transformer.transformer_blocks.22.norm1_context.linear")
    assert context is not None
    assert len(context.row_slices) == 1


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("name", "module", "parameter", "key"),
    [
        (
            "native/flux-dev",
            "double_blocks.0.img_attn.norm.query_norm",
            "scale",
            "double_blocks.0.img_attn.norm.query_norm.scale",
        ),
        (
            "native/flux-dev",
            "transformer.transformer_blocks.0.attn.norm_q",
            "weight",
            "double_blocks.0.img_attn.norm.query_norm.scale",
        ),
        (
            "diffusers/flux-dev",
            "double_blocks.0.img_attn.norm.query_norm",
            "scale",
            "transformer_blocks.0.attn.norm_q.weight",
        ),
        ("native/wan-t2v-1.3B", "diffusion_model.blocks.0", "modulation", "blocks.0.modulation"),
        ("native/wan-t2v-1.3B", "diffusion_model.blocks.0.modulation", "weight", "blocks.0.modulation"),
        ("diffusers/wan-t2v-1.3B", "diffusion_model.head.modulation", "weight", "scale_shift_table"),
        ("native/wan-t2v-1.3B", "lora_unet__blocks_0_norm3", "bias", "blocks.0.norm3.bias"),
        ("diffusers/wan", "blocks.0.norm3", "weight", "blocks.0.norm2.weight"),
        (
            "native/openclip-h-text",
            "lora_te_text_model_embeddings_position_embedding",
            "weight",
            "positional_embedding",
        ),
        (
            "diffusers/sd15",
            "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out",
            "weight",
            "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0.weight",
        ),
        (
            "native/flux-dev",
            "transformer.sformer_blocks.0.attn.to_out.0",
            "weight",
            "double_blocks.0.img_attn.proj.weight",
        ),
        ("native/flux-dev", "double_blocks.0.processor.proj_lora2", "weight", "double_blocks.0.txt_attn.proj.weight"),
        *(  # mflux/dreambooth/lora_layers/lora_layers.py
            (
                name,
                f"transformer.transformer_blocks.3.{block}.linear{i + 1}",
                "weight",
                key.format(block, stream, 2 * i),
            )
            for name, key in (
                ("native/flux-dev", "double_blocks.3.{1}_mlp.{2}.weight"),
                ("diffusers/flux-dev", "transformer_blocks.3.{0}.net.{2}.weight"),
            )
            for block, stream in (("ff", "img"), ("ff_context", "txt"))
            for i in (0, 1)
            if name.startswith("native") or i
        ),
        ("native/zimage-fused", "diffusion_model.layers.0.attention.to.q", "weight", "layers.0.attention.qkv.weight"),
        (
            "native/flux-dev",
            "transformer.double_blocks.0.img_mlp.0.default",
            "weight",
            "double_blocks.0.img_mlp.0.weight",
        ),
        (
            "transformers/llama-3.1-8b",
            "base_model.model.layers.0.self_attn.q_proj",
            "weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "transformers/llama-3.1-8b",
            "base_model.model.model.layers.0.self_attn.q_proj",
            "weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("transformers/t5xxl-encoder", "lora_te3_encoder_embed_tokens", "weight", "shared.weight"),
        ("transformers/gpt-neox-20b", "base_model.model.lm_head", "weight", "embed_out.weight"),
        *(  # ComfyUI takes SDXL's embeddings for SD2's
            (name, f"{prefix}class_embedding{dot}linear_{i + 1}", "weight", key.format(i + 1, 2 * i))
            for name, key in (
                ("native/sdxl", "label_emb.0.{1}.weight"),
                ("native/sdxl-refiner", "label_emb.0.{1}.weight"),
                ("diffusers/sdxl", "add_embedding.linear_{0}.weight"),
                ("single-file/sdxl", "model.diffusion_model.label_emb.0.{1}.weight"),
            )
            for i in range(2)
            for prefix, dot in (("lora_unet_", "_"), ("lycoris_", "_"), ("unet.", "."), ("", "."))
        ),
        (
            "transformers/mixtral-8x7b",
            "base_model.model.model.layers.0.mlp.gate",
            "weight",
            "model.layers.0.block_sparse_moe.gate.weight",
        ),
    ],
)
def test_names_of_particular_layers(name: str, module: str, parameter: str, key: str) -> None:
    view = base(name).find(module, parameter)
    assert view is not None
    assert [p.key for p in view.row_slices] == [key]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_ace_step_as_published_holds_its_transformer_as_decoder(prefix: str) -> None:
    """Adapters name the layers of the decoder alone; the names are those of diffusers' convert_ace_step_to_diffusers.py."""
    shapes = header("diffusers/ace-step")
    words = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "o_proj", "_conv.": ".1."}
    stored = {key: prefix + "decoder." + _replaced(key, words) for key in shapes}
    others = {
        f"{prefix}{part}.layers.0.self_attn.q_proj.weight": (8, 8) for part in ("detokenizer", "encoder.lyric_encoder")
    }
    found = names(index({stored[key]: shape for key, shape in shapes.items()} | others))
    assert found.architecture == "ACE-Step 1.5"
    for module, parameter in modules(shapes):
        key = module if module in stored else f"{module}.{parameter}"
        inner = _replaced(f"{module}.", words).removesuffix(".")
        for name in (
            f"transformer.{module}",
            f"base_model.model.{inner}",
            called("lycoris_", inner),
            f"diffusion_model.decoder.{inner}",
        ):
            view = found.find(name, parameter)
            assert view is not None and [p.key for p in view.row_slices] == [stored[key]], name
    for key in others:
        view = found.find(key.removesuffix(".weight"))
        assert view is not None and view.row_slices[0].key == key


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def test_conditioner_of_anima_is_a_part_of_the_single_file_and_a_network_of_the_pipeline() -> None:
    """Blocks of the denoiser have the same names, which its prefix decides."""
    block = ("self_attn.q_proj", "self_attn.o_proj", "cross_attn.o_proj", "mlp.2")
    own = {f"{name}.weight": (8, 8) for name in ("embed", "out_proj", *(f"blocks.0.{one}" for one in block))}
    found = names(pipeline(transformer=header("diffusers/cosmos2-2B"), text_conditioner=own))
    for name, key in (
        ("diffusion_model.llm_adapter.blocks.0.self_attn.q_proj", "text_conditioner.blocks.0.self_attn.q_proj"),
        ("lora_unet_llm_adapter_blocks_0_cross_attn_o_proj", "text_conditioner.blocks.0.cross_attn.o_proj"),
        ("text_conditioner.blocks.0.self_attn.q_proj", "text_conditioner.blocks.0.self_attn.q_proj"),
        ("diffusion_model.blocks.0.self_attn.q_proj", "transformer.transformer_blocks.0.attn1.to_q"),
    ):
        view = found.find(name)
        assert view is not None and [p.key for p in view.row_slices] == [f"{key}.weight"], name
    with pytest.raises(AmbiguousName):
        found.find("blocks.0.self_attn.q_proj")


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_", "model.diffusion_model."])
def test_connectors_of_ltx2_are_a_part_of_the_single_file_and_a_network_of_the_pipeline(prefix: str) -> None:
    """The words of diffusers' scripts/convert_ltx2_to_diffusers.py."""
    words = {"_connector.": "_embeddings_connector.", "transformer_blocks": "transformer_1d_blocks", "norm_q": "q_norm"}
    layers = ("attn1.to_q", "attn1.to_out.0", "attn1.norm_q", "ff.net.0.proj")
    stored = [f"{w}_connector.transformer_blocks.{i}.{n}" for w in ("video", "audio") for i in (0, 1) for n in layers]
    connectors = {f"{name}.weight": (8,) if "norm" in name else (8, 6) for name in stored}
    found = names(pipeline(transformer=header("diffusers/ltx2-video"), connectors=connectors))
    for name in stored:
        view = found.find(called(prefix, _replaced(name, words)))
        assert view is not None and [p.key for p in view.row_slices] == [f"connectors.{name}.weight"]
    view = found.find(called(prefix, "transformer_blocks.0.attn1.to_q"))
    assert view is not None and view.row_slices[0].key == "transformer.transformer_blocks.0.attn1.to_q.weight"
    assert found.find(called(prefix, "video_embeddings_connector.transformer_1d_blocks.2.attn1.to_q")) is None


def test_stacked_experts_are_pieces_in_their_order() -> None:
    view = base("transformers/mixtral-8x7b").find("base_model.model.model.layers.1.mlp.experts", "gate_up_proj")
    assert view is not None
    assert view.shape == (8, 28672, 4096)
    stem = "model.layers.1.block_sparse_moe.experts"
    assert [p.key for p in view.row_slices[:3]] == [
        f"{stem}.0.w1.weight",
        f"{stem}.0.w3.weight",
        f"{stem}.1.w1.weight",
    ]
    back = base("transformers/mixtral-8x7b.in-memory").find("model.layers.1.block_sparse_moe.experts.7.w3")
    assert back is not None
    assert back.row_slices == (RowSlice("model.layers.1.mlp.experts.gate_up_proj", 7 * 28672 + 14336, 8 * 28672, 4096),)


LLM = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
VLM = ("model.language_model.embed_tokens.weight",)
HEADLESS = ("embed_tokens.weight", "layers.0.input_layernorm.weight")
RENAMED = (
    # what tells the model                         on disk                                           in memory
    (LLM,                                          "model.layers.1.mlp.shared_expert.up_proj",       "model.layers.1.mlp.shared_experts.up_proj"),  # Laguna
    (LLM,                                          "model.layers.1.mlp.shared_mlp.up_proj",          "model.layers.1.mlp.shared_experts.up_proj"),  # HunYuan 3
    (LLM,                                          "model.layers.1.mlp.router.gate",                 "model.layers.1.mlp.gate"),
    (LLM,                                          "model.layers.0.block_sparse_moe.down_proj",      "model.layers.0.mlp.down_proj"),  # Kimi Linear
    (LLM,                                          "model.layers.0.self_attn.f_a_proj",              "model.layers.0.self_attn.forget_gate.f_a_proj"),
    (LLM,                                          "model.layers.0.mlp.experts.fc1",                 "model.layers.0.mlp.experts.gate_up_proj"),  # Aria
    (("model.embed_tokens.weight", "model.layers.0.operator_norm.weight"), "model.layers.2.self_attn.gate_proj", "model.layers.2.self_attn.g_proj"),  # LFM3
    (HEADLESS,                                     "layers.0.block_sparse_moe.gate",                 "layers.0.mlp.gate"),
    ((*VLM, "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),                                          "model.language_model.layers.0.mlp.up_proj",      "model.layers.0.mlp.up_proj"),  # its language model, loaded alone
    (("language_model.embed_tokens.weight",),      "language_model.layers.0.mlp.up_proj",            "model.language_model.layers.0.mlp.up_proj"),
    (("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "visual.vision_model.embeddings.patch_embedding.weight"),
                                                   "model.layers.0.mlp.up_proj",                     "model.language_model.layers.0.mlp.up_proj"),  # PaddleOCR
    *((("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "vit.embeddings.patch_embedding.weight", "vit.layers.0.self_attn.q_proj.weight"),
       disk, memory) for disk, memory in (  # HunYuan-VL
          ("model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
          ("vit.layers.1.self_attn.q_proj", "model.vision_tower.layers.1.self_attn.q_proj"),
          ("vit.layers.0.mlp.dense_4h_to_h", "model.vision_tower.layers.0.mlp.fc2"),
          ("vit.perceive.proj.2", "model.vision_tower.patch_merger.proj_out"),
    )),
    (("backbone.embeddings.weight", "backbone.norm_f.weight"), "backbone.layers.0.mixer.q_proj",     "model.layers.0.mixer.q_proj"),  # Nemotron-H
    *((LLM, f"model.layers.1.{of}.linear_gate", f"model.layers.1.{of}.gate_proj") for of in ("self_attn", "mlp", "mlp.shared_experts")),  # HunYuan 4
    *((("model.embed_tokens.weight", "model.layers.0.input_layernorm.W_down.weight"), disk, memory) for disk, memory in (  # A.X-K2
        ("model.layers.1.self_attn.q_b_proj", "model.layers.1.self_attn.q_gate_proj"),
        ("model.layers.1.post_attention_layernorm.W_up", "model.layers.1.post_attention_layernorm.mlp.fc2"),
    )),
    *((("model.word_embeddings.weight", "model.layers.0.attention.dense.weight", "model.layers.0.input_layernorm.weight"), disk, memory) for disk, memory in (
        ("model.layers.1.attention.q_proj", "model.layers.1.self_attn.q_proj"),  # Ling
        ("model.layers.1.attention.dense", "model.layers.1.self_attn.o_proj"),
        ("model.layers.1.attention.f_proj", "model.layers.1.self_attn.forget_gate.f_proj"),
    )),
    (VLM,                                          "model.vision_projector",                         "model.projector"),  # HyperCLOVA X
    *((("language_model.model.embed_tokens.weight",), disk, memory) for disk, memory in (  # MiniMax-M3
        ("language_model.model.layers.0.block_sparse_moe.gate", "model.language_model.layers.0.mlp.gate"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "model.vision_tower.layers.0.mlp.fc1"),
        ("patch_merge_mlp.linear_1", "model.multi_modal_projector.merge_linear_1"),
    )),
    (("model.encoder.embed_tokens.eoi_embedding", "model.encoder.layers.0.self_attn.q_proj.weight"),
                                                   "model.encoder.layers.1.mlp.up_proj",             "model.encoder.text_model.layers.1.mlp.up_proj"),  # T5Gemma 2
)  # fmt: skip


@pytest.mark.parametrize(("telling", "disk", "memory"), RENAMED, ids=[f"{d} {m}" for _, d, m in RENAMED])
def test_names_of_transformers_5_in_memory_mean_those_on_disk(telling: Sequence[str], disk: str, memory: str) -> None:
    shape = (3, 4, 5) if "experts.fc" in disk else (4, 5)
    found = names(index({**dict.fromkeys(telling, (4, 4)), f"{disk}.weight": shape}))
    module, parameter = memory.rsplit(".", 1) if len(shape) == 3 else (memory, "weight")
    for prefix in ("base_model.model.", ""):
        assert found.find(prefix + module, parameter) == as_matrices(whole(f"{disk}.weight", shape))
    assert found.find(f"base_model.model.{disk}") == as_matrices(whole(f"{disk}.weight", shape))


@pytest.mark.parametrize(
    "norm",
    [
        *("post_feedforward_layernorm", "operator_norm", "input_layernorm.0", "input_layernorm"),
        *("input_layernorm.W_down", "attn_hyper_connection.input_mix_weight_down"),
    ],
)
def test_stacks_of_experts_are_found_whatever_the_norms_are_called(norm: str) -> None:
    block = "feed_forward" if norm == "operator_norm" else "mlp"
    parts = ("w1", "w3", "w2") if norm == "operator_norm" else ("gate_proj", "up_proj", "down_proj")
    keys = [f"model.layers.0.{block}.experts.{e}.{p}.weight" for e in range(2) for p in parts[:2]]
    shapes = {"model.embed_tokens.weight": (4, 4), f"model.layers.0.{norm}.weight": (4,), **dict.fromkeys(keys, (3, 4))}
    view = names(index(shapes)).find(f"base_model.model.model.layers.0.{block}.experts", "gate_up_proj")
    assert view is not None
    assert (view.shape, [p.key for p in view.row_slices]) == ((2, 6, 4), keys)


def test_conv1d_has_the_shape_of_the_adapter() -> None:
    view = base("transformers/gpt2").find("base_model.model.transformer.h.0.attn.c_attn")
    assert view == WeightView(
        (RowSlice("transformer.h.0.attn.c_attn.weight", 0, 768, 2304, transposed=True),), (2304, 768)
    )


def test_stored_value_of_a_conv1d_is_taken_as_it_is() -> None:
    gpt2, clip = base("transformers/gpt2"), base("native/openclip-bigg-text")
    key = "transformer.h.0.attn.c_proj.weight"
    view = gpt2.find(f"base_model.model.{key.removesuffix('.weight')}")
    assert view is not None
    assert view.row_slices[0].transposed
    assert gpt2.value(view) == whole(key, (768, 768))
    projection = clip.find("text_projection", "weight")
    assert projection is not None
    assert clip.value(projection) == projection  # the adapter's own is [out, in], the base's is not


def test_unknown_model_with_any_prefix() -> None:
    shapes = {f"body.blocks.{i}.some_layer.weight": (4, 3) for i in range(12)}
    for stored in ("model.diffusion_model.", "", "net.", "transformer."):
        found = names(index({stored + key: shape for key, shape in shapes.items()}))
        assert found.architecture == "unknown"
        for prefix in DENOISER:
            for key in shapes:
                view = found.find(called(prefix, key.removesuffix(".weight")))
                assert view is not None, (stored, prefix)
                assert view.row_slices[0].key == stored + key
        assert found.find("body.blocks.12.some_layer") is None


@pytest.mark.few(2)
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(("name", "theirs"), [
    ("native/flux-dev", "diffusers/flux-dev"), ("diffusers/sdxl", "native/sdxl"), ("native/wan-t2v-1.3B", "diffusers/wan-t2v-1.3B"),
    ("transformers/qwen3-0.6b", "transformers/qwen3-0.6b"),
])  # fmt: skip
def test_base_saved_while_it_was_wrapped_is_the_same_base(wrapper: str, name: str, theirs: str) -> None:
    plain, found = base(name), names(index({wrapper + k: shape for k, shape in header(name).items()}))
    assert found.architecture == plain.architecture != "unknown"
    for number, key in enumerate(list(header(theirs))[::7]):
        module, _, leaf = key.rpartition(".")
        there = plain.find(module, leaf)
        wanted = there and [(wrapper + p.key, p.start, p.stop) for p in there.row_slices]
        view = found.find(called(ANY[number % len(ANY)], module) if leaf == "weight" else module, leaf)
        assert (view and [(p.key, p.start, p.stop) for p in view.row_slices]) == wanted, key


def test_name_that_fits_two_places_is_refused() -> None:
    found = names(index({"a.b_c.weight": (2, 2), "a_b.c.weight": (2, 2)}))
    assert found.find("a.b_c") == whole("a.b_c.weight", (2, 2))
    with pytest.raises(AmbiguousName, match="two places"):
        found.find("lora_unet_a_b_c")
    with pytest.raises(AmbiguousName):  # of which text encoder?
        base("single-file/sdxl").find("text_model.encoder.layers.0.mlp.fc1")


def test_two_experts_in_one_folder_are_distinguished() -> None:
    wan = header("diffusers/wan-t2v-1.3B")
    found = names(pipeline(transformer=wan, transformer_2=wan))
    for part in ("transformer", "transformer_2"):
        view = found.find(f"{part}.blocks.0.attn1.to_q")
        assert view is not None
        assert view.row_slices[0].key == f"{part}.blocks.0.attn1.to_q.weight"
    for name in ("lora_unet_blocks_0_self_attn_q", "diffusion_model.blocks.0.self_attn.q", "blocks.0.attn1.to_q"):
        with pytest.raises(AmbiguousName) as refused:
            found.find(name)
        assert refused.value.fix.endswith("as the base: transformer or transformer_2")


def test_comfyuis_name_of_an_encoder_means_the_only_one_of_a_folder_that_it_can() -> None:
    llm = {f"model.layers.{i}.self_attn.{p}_proj.weight": (4, 4) for i in range(2) for p in "qkv"}
    clip = header("transformers/clip-l")
    name = "text_encoders.{}.transformer.model.layers.1.self_attn.q_proj".format
    one = names(pipeline(transformer=header("diffusers/zimage"), text_encoder=llm))
    two = names(pipeline(transformer=header("diffusers/hunyuan-video"), text_encoder=llm, text_encoder_2=clip))
    for found in (one, two):
        view = found.find(name("qwen3_4b"))
        assert view is not None
        assert view.row_slices[0].key == "text_encoder.model.layers.1.self_attn.q_proj.weight"
    assert two.find("text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1") is not None
    assert two.find(name("transformer").replace("transformer.transformer", "transformer")) == view
    both = names(pipeline(transformer=header("diffusers/zimage"), text_encoder=llm, text_encoder_2=llm))
    assert both.find(name("qwen3_4b")) is None
    misfit = explain(both, [name("qwen3_4b")], {}, NO_METADATA)
    assert misfit is not None and "text encoder qwen3_4b" in misfit.reason


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [1280, 24])  # in other widths, only their places tell the encoders apart
@pytest.mark.parametrize("layers", ["text_encoders.{}.transformer.text_model.", "text_encoders.{}.text_model."])
def test_comfyuis_names_of_sdxls_encoders_on_its_single_file(layers: str, width: int) -> None:
    """As OneTrainer writes them; the second encoder is OpenCLIP's there: fused rows, a transposed projection."""
    shapes = header("single-file/sdxl")
    narrow = {
        k: tuple(width * d // 1280 if d % 1280 == 0 else d for d in s) for k, s in shapes.items() if ".1.model." in k
    }
    found = names(index(shapes | narrow))
    other = names(index(header("transformers/clip-bigg")))
    first, second = "conditioner.embedders.0.transformer.text_model.", "conditioner.embedders.1.model."
    view = found.find(layers.format("clip_l") + "encoder.layers.3.self_attn.v_proj")
    assert view is not None
    assert [p.key for p in view.row_slices] == [f"{first}encoder.layers.3.self_attn.v_proj.weight"]
    view = found.find(layers.format("clip_g") + "encoder.layers.3.self_attn.v_proj")
    place = RowSlice(f"{second}transformer.resblocks.3.attn.in_proj_weight", 2 * width, 3 * width, width)
    assert view is not None and view.row_slices == (place,)
    for key in header("transformers/clip-bigg"):
        module, _, leaf = key.rpartition(".")
        meant = found.find(layers.format("clip_g").replace("text_model.", "") + module, leaf)
        assert (meant is None) == (other.find(module, leaf) is None), key
    view = found.find("text_encoders.clip_g.transformer.text_projection")
    assert view is not None
    assert (view.row_slices[0].key, view.row_slices[0].transposed) == (f"{second}text_projection", True)


def test_flux_encoder_without_a_number_is_clip() -> None:
    """As diffusers' converter has it; the other one is no CLIP, so that nothing else can be meant."""
    parts = {"text_encoder": header("transformers/clip-l"), "text_encoder_2": header("transformers/t5xxl-encoder")}
    found = names(pipeline(transformer=header("diffusers/flux-dev"), **parts))
    view = found.find("lora_te_text_model_encoder_layers_3_self_attn_q_proj")
    assert view is not None
    assert view.row_slices[0].key == "text_encoder.encoder.layers.3.self_attn.q_proj.weight"
    assert found.component(view.row_slices[0].key) == "te1"


def test_pipeline_folder_answers_to_the_names_of_its_parts() -> None:
    parts = {"unet": "diffusers/sdxl", "text_encoder": "transformers/clip-l", "vae": "diffusers/vae-sd",
             "text_encoder_2": "transformers/clip-bigg", "image_encoder": "transformers/clip-vision-l"}  # fmt: skip
    found = names(pipeline(**{part: header(name) for part, name in parts.items()}))
    assert (found.architecture, found.layout) == ("Stable Diffusion XL", "diffusers")
    for dialect, inventory, part in (
        ("lora_unet_", "native/sdxl", "unet"),
        ("lora_te1_", "transformers/clip-l.text_model", "text_encoder"),
        ("lora_te2_", "transformers/clip-bigg", "text_encoder_2"),
        ("vae.", "native/vae-sd", "vae"),
    ):
        for module, parameter in modules(header(inventory)):
            view = found.find(called(dialect, module), parameter)
            assert view is not None, called(dialect, module)
            assert all(p.key.startswith(f"{part}.") for p in view.row_slices)
    assert found.component("text_encoder_2.text_projection.weight") == "te2"
    assert found.component("image_encoder.visual_projection.weight") == "other"


def narrow_clip(width: int = 32) -> dict[str, Shape]:
    """CLIP's text encoder at a width that tells nothing about which one it is, in the names of transformers 5."""
    shapes = {"embeddings.token_embedding.weight": (99, width)}
    return shapes | {f"encoder.layers.0.self_attn.{p}_proj.weight": (width, width) for p in ("q", "k", "v", "out")}


@pytest.mark.parametrize("name", ["sd15", "sd21"])
def test_single_text_encoder_may_be_called_the_first(name: str) -> None:
    found = names(pipeline(unet=header(f"diffusers/{name}"), text_encoder=narrow_clip()))
    for prefix in ("lora_te_", "lora_te1_", "lora_te1_text_model_", "text_encoder."):
        assert found.find(called(prefix, "encoder.layers.0.self_attn.q_proj")) is not None, prefix
    assert found.find("lora_te2_encoder_layers_0_self_attn_q_proj") is None


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma2-2b", "llama-3.2-1b", "t5xxl-encoder"])
def test_text_encoder_by_itself_answers_to_whatever_a_pipeline_calls_it(name: str) -> None:
    found, modules = base(f"transformers/{name}"), [*adapter(f"transformers/{name}", "", "attn.q_proj")]
    modules = modules or [*adapter(f"transformers/{name}", "", "SelfAttention.q")]
    assert len(modules) > 15
    for number, module in enumerate(modules):
        prefix = ("lora_te_", "lora_te1_", "text_encoder.")[number % 3]
        for inner in (module, module.removeprefix("model.")):
            assert found.find(called(prefix, inner)) == found.find(module), inner
    assert found.find("lora_te_text_model_encoder_layers_0_self_attn_q_proj") is None
    assert found.find("lora_unet_double_blocks_0_img_attn_qkv") is None


@pytest.mark.parametrize("prefix", ["text_encoders.qwen25_7b.transformer.", "text_encoder."])
def test_text_encoder_within_answers_to_the_names_of_its_model(prefix: str) -> None:
    """Qwen2.5-VL as transformers 4 stored it, in a checkpoint of Qwen-Image; transformers 5 has other names in memory."""
    stored = {"model.embed_tokens.weight": (9, 8), "visual.patch_embed.proj.weight": (8, 3, 2, 4, 4)}
    stored |= {"model.layers.0.mlp.up_proj.weight": (6, 8), "visual.blocks.0.attn.qkv.weight": (24, 8)}
    image = header("diffusers/qwen-image")
    if prefix == "text_encoder.":
        found = names(pipeline(transformer=image, text_encoder=stored))
    else:
        whole = {f"model.diffusion_model.{k}": s for k, s in image.items()} | {prefix + k: s for k, s in stored.items()}
        found = names(index(whole))
    for name, key in {"model.language_model.layers.0.mlp.up_proj": "model.layers.0.mlp.up_proj",
                      "model.visual.blocks.0.attn.qkv": "visual.blocks.0.attn.qkv"}.items():  # fmt: skip
        for module in (f"text_encoder.{name}", f"text_encoder.{key}", f"lora_te_{name.replace('.', '_')}"):
            view = found.find(module)
            assert view is not None
            assert view.row_slices[0].key == f"{prefix}{key}.weight", module


def test_text_encoders_of_two_are_not_the_only_one() -> None:
    both = {"text_encoder": narrow_clip(32), "text_encoder_2": narrow_clip(48)}
    found = names(pipeline(unet=header("diffusers/sdxl"), **both))
    for prefix, part in (("lora_te1_", "text_encoder"), ("lora_te2_", "text_encoder_2")):
        view = found.find(called(prefix, "encoder.layers.0.self_attn.q_proj"))
        assert view is not None
        assert view.row_slices[0].key.startswith(f"{part}.")
    assert found.find("lora_te_encoder_layers_0_self_attn_q_proj") is None


def test_absent_components_are_not_looked_for_elsewhere() -> None:
    found = base("native/sdxl")
    assert found.find("lora_te1_text_model_encoder_layers_0_mlp_fc1") is None
    assert found.network_of("lora_te1_text_model_encoder_layers_0_mlp_fc1") == "te1"
    assert found.network_of("lora_unet_input_blocks_1_0") == "unet"
    assert base("transformers/clip-l").find("lora_unet_encoder_layers_0_mlp_fc1") is None


# --- wrong pairs --------------------------------------------------------------------------------------


def adapter(name: str, prefix: str, part: str = "att") -> dict[str, Shape]:
    """Module → weight shape of an adapter made for a model, for its attention (or all with `part`)."""
    return {called(prefix, k.removesuffix(".weight")): s for k, s in header(name).items()
            if k.endswith(".weight") and len(s) > 1 and part in k}  # fmt: skip


WRONG = (
    # adapter for, its prefix, base, what both are called
    ("diffusers/sd15", "lora_unet_", "single-file/sdxl", ("Diffusion 1,", "is Stable Diffusion XL")),
    ("native/sdxl", "lora_unet_", "single-file/sd1", ("Diffusion XL,", "is Stable Diffusion 1")),
    ("native/flux-dev", "lora_unet_", "native/sd35-large", ("Flux.1", "Stable Diffusion 3")),
    ("diffusers/flux-dev", "transformer.", "native/flux2", ("Flux.1", "Flux.2")),
    ("native/flux2", "lora_unet_", "native/flux-dev", ("Flux.2", "Flux.1")),
    ("native/wan-i2v-14B", "diffusion_model.", "native/wan-t2v-14B", ("2.1 I2V with", "is Wan 14B, without image")),
    ("native/wan-t2v-1.3B", "diffusion_model.", "native/wan-t2v-14B", ("Wan 1.3B", "Wan 14B")),
    ("native/wan-t2v-14B", "lora_unet_", "diffusers/wan-t2v-1.3B", ("Wan 14B", "Wan 1.3B")),
    ("diffusers/qwen-image", "transformer.", "native/hidream", ("Qwen-Image", "HiDream")),
    ("diffusers/zimage", "diffusion_model.", "native/lumina2", ("Z-Image", "Lumina-Image 2")),
    ("native/hunyuanvideo-1.5", "lora_unet_", "native/hunyuanvideo", ("HunyuanVideo 1.5", "is HunyuanVideo")),
)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("made_for", "prefix", "name", "both"), WRONG, ids=[f"{a}-on-{b}" for a, _, b, _ in WRONG])
def test_wrong_pair_is_explained_with_both_sides(made_for: str, prefix: str, name: str, both: tuple[str, str]) -> None:
    modules = adapter(made_for, prefix)
    found = base(name)
    views = {m: found.find(m) for m in modules}
    wrong = [m for m, view in views.items() if view is None or view.shape[:2] != modules[m][:2]]
    assert wrong
    misfit = explain(found, wrong, modules, NO_METADATA)
    assert misfit is not None
    assert all(title in misfit.text for title in both), misfit
    assert (misfit.kind in ("model", "architecture", "variant")) == bool(misfit.adapter and misfit.base)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "prefix", "title"),
    [
        ("native/sdxl", "lora_unet_", "Stable Diffusion XL"),
        ("diffusers/sd15", "unet.", "Stable Diffusion 1"),
        ("diffusers/animatediff", "unet.", "AnimateDiff motion module"),
        ("native/flux-dev", "lora_unet_", "Chroma or Flux.1"),
        ("diffusers/flux2", "transformer.", "Flux.2"),
        ("native/sd35-large", "lora_unet_", "Stable Diffusion 3 3.5 large"),
        (
            "native/wan-i2v-14B",
            "diffusion_model.",
            "Wan 14B, 2.1 I2V with image embeddings (k_img)",
        ),
        ("native/auraflow", "diffusion_model.", "AuraFlow"),
        ("native/lumina2", "lora_unet_", "Lumina-Image 2"),
        ("diffusers/zimage", "diffusion_model.", "Z-Image"),
        ("diffusers/qwen-image", "lycoris_", "Qwen-Image"),
        ("native/mochi", "", "Mochi"),
        ("native/hidream", "transformer.", "HiDream"),
        ("native/hunyuandit", "base_model.model.", "HunyuanDiT"),
        ("diffusers/kandinsky5", "transformer.", "Kandinsky 5"),
        ("transformers/llama-3.1-8b", "base_model.model.", "transformers language model"),
    ],
)
def test_model_of_an_adapter_is_named(name: str, prefix: str, title: str) -> None:
    assert guess(adapter(name, prefix)) == title
    assert denoiser_of(adapter(name, prefix)) == base(name).parts[0].label  # one word, before a merge and after it


@pytest.mark.parametrize(("name", "part", "title"), [
    ("diffusers/cosmos2-2B", "attn", "unknown"), ("diffusers/mini-max-h3", "attn", "MiniMax-H3"),
    ("diffusers/mini-max-h3", "", "MiniMax-H3"), ("native/flux2", "mlp", "unknown"), ("native/flux-dev", "mlp", "Chroma or Flux.1"),
    ("diffusers/ltxvideo", "attn", "LTX-Video"), ("diffusers/ltx2-video", "", "LTX-2"), ("diffusers/hunyuan-video", "attn", "HunyuanVideo"),
])  # fmt: skip
def test_adapter_of_some_layers_is_not_taken_for_another_models(name: str, part: str, title: str) -> None:
    assert guess(adapter(name, "diffusion_model.", part)) == title


def test_doubt_where_names_fit_all_the_same() -> None:
    t2v, base_i2v = adapter("native/wan-t2v-14B", "diffusion_model."), base("native/wan-i2v-14B")
    assert all(base_i2v.find(m) for m in t2v)
    misfit = variant_doubt(base_i2v, lambda: t2v)
    assert misfit is not None
    assert (misfit.kind, "without image embeddings" in misfit.adapter) == ("variant", True)
    assert not variant_doubt(base_i2v, lambda: adapter("diffusers/wan-i2v-14B", "transformer."))
    assert not variant_doubt(base_i2v, lambda: adapter("native/wan-i2v-14B", "lora_unet_", "self_attn"))
    assert not variant_doubt(base("native/wan-t2v-14B"), lambda: t2v)
    misfit = variant_doubt(base_i2v, lambda: adapter("diffusers/wan", "transformer.", "blocks"))
    assert misfit is not None and "without image embeddings" in misfit.adapter
    for there in (base_i2v, base("diffusers/wan-i2v-14B")):  # their trainers' default: to_q, to_k, to_v, to_out.0
        assert not variant_doubt(there, lambda: adapter("diffusers/wan-i2v-14B", "transformer.", ".to_"))
    for name in ("sdxl", "sd15", "flux-dev", "sd35-medium", "chroma", "mochi"):
        assert not variant_doubt(base(f"native/{name}"), partial(adapter, f"diffusers/{name}", "lycoris_")), name


def test_reasons_of_a_mismatch() -> None:
    def reason(*args: Any) -> tuple[str, str]:
        misfit = explain(*args, NO_METADATA)
        assert misfit is not None
        return misfit.kind, misfit.reason

    kind, text = reason(base("native/sdxl"), ["lora_te1_text_model_encoder_layers_0_mlp_fc1"], {})
    assert (kind, "first text encoder" in text, "unet" in text) == ("network", True, True)
    kind, text = reason(base("transformers/llama-3.2-1b"), ["base_model.model.lm_head"], {})
    assert (kind, "input embeddings" in text) == ("layer", True)
    modules = adapter("transformers/llama-3.1-8b", "base_model.model.", "self_attn.q_proj")
    found = base("transformers/llama-3.2-1b")
    kind, text = reason(found, [m for m in modules if not found.find(m)], modules)
    assert (kind, "block 31" in text) == ("size", True)
    kind, text = reason(base("single-file/sdxl"), ["lora_te2_text_model_encoder_layers_40_self_attn_q_proj"], {})
    assert (kind, "block 40" in text) == ("size", True)
    assert "block 31" in text, "of the same encoder, not of the denoiser"
    assert guess({"strange.module": (3, 3)}) == "unknown"


def test_weight_shape_from_the_factors() -> None:
    assert weight_shape({"up": (320, 4), "down": (4, 768)}) == (320, 768)
    assert weight_shape({"up": (320, 4, 1, 1), "down": (4, 64, 3, 3)}) == (320, 64)
    assert weight_shape({"diff": (5, 6)}) == (5, 6)
    assert weight_shape({"w1": (2, 2)}) == ()


def test_bias_beside_the_factors_hides_no_width() -> None:
    """Each `lora_B.bias` is a module of its own, of the same name."""
    shapes = {"q.lora_A.weight": (4, 5120), "q.lora_B.weight": (5120, 4), "q.lora_B.bias": (5120,)}
    infos = {key: StoredTensor(key, "BF16", shape, Path("a.safetensors"), 0, 0) for key, shape in shapes.items()}
    modules = group(Index(Path("a.safetensors"), infos, {}, ())).modules
    assert weight_shapes(modules) == {"q": (5120, 5120)}


# --- a user's own map ---------------------------------------------------------------------------------

MAP = """
title: My model
layouts:
  native: [trunk.0.qkv.weight]
  diffusers: [layers.0.attn.q.weight]
native:
  trunk.{i}.qkv: layers.{i}.attn.[q:H, k, v]
  trunk.{i}.glu: ~layers.{i}.glu
"""


def test_users_map_works_like_ours(tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(MAP)
    shapes = {
        "trunk.0.qkv.weight": (10, 6),
        "trunk.0.qkv.bias": (10,),
        "trunk.0.glu.weight": (4, 6),
    }
    found = names(index({f"model.diffusion_model.{k}": s for k, s in shapes.items()}), file)
    assert (found.architecture, found.layout) == ("My model", "native")
    key = "model.diffusion_model.trunk.0.qkv"
    assert found.find("lora_unet_layers_0_attn_k") == WeightView((RowSlice(f"{key}.weight", 6, 8, 6),), (2, 6))
    assert found.find("layers.0.attn.q", "bias") == WeightView((RowSlice(f"{key}.bias", 0, 6, 1),), (6,))
    swapped = found.find("layers.0.glu")
    assert swapped is not None
    assert [(p.start, p.stop) for p in swapped.row_slices] == [(2, 4), (0, 2)]
    with pytest.raises(InputError, match="which this base is not"):
        names(index(header("native/sd15")), file)


# --- hostile names ------------------------------------------------------------------------------------

NO_METADATA = index({})
"""An adapter that states nothing."""

STRANGE = ("", ".", "..", "a..b", "{i}", "²", "9" * 5000, "0." * 20000, "model." * 20000, "_" * 50000, "transformer.")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native/flux-dev", "transformers/mixtral-8x7b"])
def test_strange_names_and_shapes_do_no_harm(name: str) -> None:
    shapes = {k: s for k, s in header(name).items() if ".0." in k or "embed" in k or "img_in" in k}
    stems = sorted({k.split(".0.")[0] for k in shapes})[:4]
    for strange in STRANGE:
        shapes |= {f"{stem}.{strange}.img_attn.qkv.weight": (3, 3) for stem in stems}
        shapes |= {strange: (), f"{strange}.weight": (0,)}
    shapes |= {"model.layers.1.mlp.experts.gate_up_proj": (2**50, 2, 0), "double_blocks.1.img_attn.qkv.weight": (0, 0)}
    start = time.process_time()
    found = names(index(shapes))
    for strange in STRANGE:
        for dialect in DENOISER:
            try:
                found.find(called(dialect, strange))
            except AmbiguousName:
                continue
    explain(found, STRANGE, {strange: (1,) for strange in STRANGE}, NO_METADATA)
    assert time.process_time() - start < 30  # 0.8


# --- views --------------------------------------------------------------------------------------------


def test_views_join_and_turn() -> None:
    a, b = WeightView((RowSlice("x", 0, 2, 3),), (2, 3)), WeightView((RowSlice("x", 2, 5, 3),), (3, 3))
    assert stacked((a, b)) == whole("x", (5, 3))
    swapped = stacked((b, a))
    assert swapped is not None
    assert swapped.row_slices == (*b.row_slices, *a.row_slices)
    assert stacked((a, whole("y", (2, 4)))) is None
    assert transposed(whole("x", (5, 3))).shape == (3, 5)
    assert transposed(transposed(whole("x", (5, 3)))) == whole("x", (5, 3))


def test_language_model_is_called_by_its_class() -> None:
    llama = base("transformers/llama-3.1-8b")
    assert llama.title == "transformers language model"
    stated = Names(llama.parts, llama.shapes, config={"architectures": ["LlamaForCausalLM"]})
    assert stated.title == "Llama (transformers language model)"
    assert Names(base("native/sdxl").parts, {}, config={"_class_name": "UNet2DModel"}).title == "Stable Diffusion XL"


@pytest.mark.parametrize("block", ["input_blocks_4_1", "down_blocks_1_attentions_1"])
def test_text_encoders_show_the_model_where_shapes_do_not(block: str) -> None:
    unet = f"lora_unet_{block}_transformer_blocks_0_attn2_to_k"
    te = [f"lora_te{n}_text_model_encoder_layers_0_self_attn_q_proj" for n in (1, 2)]
    shapes = {name: (24, 24) for name in (unet, *te)}
    misfit = explain(base("single-file/sd1"), te[1:], shapes, NO_METADATA)
    assert misfit and misfit.kind == "architecture"
    assert misfit.reason == "the adapter looks made for Stable Diffusion XL, the base is Stable Diffusion 1"
    misfit = explain(base("native/sdxl"), te, shapes, NO_METADATA)
    assert misfit and misfit.kind == "network", "a file of the U-Net alone"


def test_model_of_one_network_is_not_called_one_of_several() -> None:
    assert "single network" in missing_networks(["te"], ["model"]).reason
    assert "contains only the unet" in missing_networks(["te"], ["unet"]).reason


ALIKE = {
    "numbers in the names of levels": "p#.a.weight",
    "braces": "{i}.{i+#}.x.weight",
    "encoders by number": "text_encoder_#.x.weight",
    "encoders by name": "text_encoders.e#.transformer.x.weight",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ALIKE.values(), ids=ALIKE)
def test_cost_of_a_name_does_not_grow_with_their_number(form: str) -> None:
    """The flat names of these differ in digits alone, which belong to the names of their levels."""

    def look_up(count: int) -> None:
        keys = [form.replace("#", str(i)) for i in range(count)]
        found = names(index(dict.fromkeys(keys, (2, 2))))
        for key in keys:
            module = key.removesuffix(".weight")
            view = found.find(f"lora_unet_{module.replace('.', '_')}")
            assert view is not None
            assert view.row_slices[0].key == key

    look_up(1)  # what is made once
    assert steps(lambda: look_up(400)) < 3 * steps(lambda: look_up(200))


def test_flat_name_that_may_be_read_in_too_many_ways_fits_no_single_place() -> None:
    """Every underscore may have been a dot: 255 tensors that are one name in an adapter's spelling."""
    keys = ["".join(x) + "b.weight" for x in itertools.product(*(["a"], "._") * 8)][:-1]
    found = names(index(dict.fromkeys(keys, (2, 2))))
    with pytest.raises(AmbiguousName):
        found.find("lora_unet_a_a_a_a_a_a_a_a_b")
    assert found.find("a.a.a.a.a.a.a.a.b") is not None


@pytest.mark.parametrize("kind", ["x" * 10**5, {"a.b": 1.5, **{f"layers.{i}": i for i in range(10**4)}}, ["a"] * 10**5])
def test_value_in_place_of_a_models_type_costs_no_name_more(tmp_path: Path, kind: object) -> None:
    """Names may lack a first level that is called as the type of the model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "model.safetensors").write_bytes(
        blob({"a.weight": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    )
    found = names(open_checkpoint(tmp_path))
    assert found.find("a") is not None
    assert max(len(part.inner) for part in found.parts) < 200


@pytest.mark.parametrize("order", [1, -1])
def test_networks_of_a_pipeline_begin_with_a_whole_level(order: int) -> None:
    """`transformer` is the beginning of `transformer_2`, which is another folder."""
    folders = ["transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_20"][::order]
    shapes = {f"{folder}.a.weight": (4, 4) for folder in folders}
    parts = components(shapes, {}, folders, None)
    assert {p.prefix: dict(p.keys) for p in parts} == {f"{f}.": {"a.weight": f"{f}.a.weight"} for f in folders}
