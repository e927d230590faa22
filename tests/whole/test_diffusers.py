"""Tiny diffusers models with a LoRA on every layer: fused by diffusers itself, merged by us, equal in every row.

The same adapter in every dialect, and as sharded folder.
"""

from __future__ import annotations

import copy
import gzip
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from tests.kit.diffusers_models import CONFIGS, WAN, diffusers
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

ltx2 = pytest.importorskip("diffusers.pipelines.ltx2.connectors")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

HEADERS = Path(__file__).parents[1] / "headers"
RANK, ALPHA = 2, 6


@dataclass(frozen=True)
class Trained:
    """A model, an adapter for it as the library saves it, and the weights that the library makes of the two."""

    name: str
    kind: Any
    base: Any
    weights: Tensors
    adapter: Path
    tensors: Tensors  # of the adapter, under the names of its layers


@pytest.fixture(scope="module", params=CONFIGS)
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(0)
    kind = getattr(diffusers, request.param.split(" ")[0])
    base, trained = (kind(**CONFIGS[request.param]) for _ in range(2))
    trained.load_state_dict(base.state_dict())
    layers = [
        n
        for n, m in base.named_modules()
        if isinstance(m, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)
        and getattr(m, "groups", 1) == 1
    ]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers, init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    if not hasattr(trained, "add_adapter"):  # diffusers has no adapters for it, so people wrap it themselves
        wrapped = peft.get_peft_model(trained, config)
        wrapped.save_pretrained(folder)
        weights = wrapped.merge_and_unload().state_dict()
        saved = load(folder / "adapter_model.safetensors")
        return Trained(
            request.param,
            kind,
            base,
            weights,
            folder,
            {k.removeprefix("base_model.model."): v for k, v in saved.items()},
        )
    trained.add_adapter(config)
    trained.save_lora_adapter(folder)
    trained.fuse_lora()
    weights = {k.replace(".base_layer", ""): t for k, t in trained.state_dict().items() if ".lora_" not in k}
    file = folder / "pytorch_lora_weights.safetensors"
    return Trained(request.param, kind, base, weights, file, load(file))


def kohya(prefix: str) -> Callable[[Tensors], Tensors]:
    """The adapter flat, with down, up and alpha."""

    def write(tensors: Tensors) -> Tensors:
        new: Tensors = {}
        for key, value in tensors.items():
            module, which = key.removesuffix(".weight").rsplit(".", 1)
            flat = prefix + module.replace(".", "_")
            new[f"{flat}.lora_{'down' if which == 'lora_A' else 'up'}.weight"] = value
            new[f"{flat}.alpha"] = torch.tensor(ALPHA)
        return new

    return write


def dotted(prefix: str, *, default: bool = False) -> Callable[[Tensors], Tensors]:
    """The adapter with a dotted prefix; α folded into the up matrix, as files without any metadata need it."""

    def write(tensors: Tensors) -> Tensors:
        factor = ALPHA / RANK
        infix = ".default.weight" if default else ".weight"
        return {
            f"{prefix}{k.removesuffix('.weight')}{infix}": v * factor if ".lora_B" in k else v
            for k, v in tensors.items()
        }

    return write


DIALECTS: dict[str, Callable[[Tensors], Tensors]] = {
    "lora_unet_": kohya("lora_unet_"),
    "lora_transformer_": kohya("lora_transformer_"),
    "lycoris_": kohya("lycoris_"),
    "bare": dotted(""),
    "transformer.": dotted("transformer."),
    "diffusion_model.": dotted("diffusion_model."),
    "base_model.model.": dotted("base_model.model."),
    ".default.": dotted("transformer.", default=True),
    "wrapped": dotted("_orig_mod.module."),
}


@pytest.mark.few(2)
def test_dialects_give_the_weights_that_the_library_makes(fused: Trained) -> None:
    """Three dialects for every model, so that each is written for a dozen models."""
    number = list(CONFIGS).index(fused.name)
    for dialect in [*DIALECTS, *DIALECTS][number % len(DIALECTS) :][:3]:
        merged = lora_merge.merge_state_dict(fused.base.state_dict(), DIALECTS[dialect](fused.tensors))
        _assert_same(merged, fused.weights, dialect)


@pytest.mark.few(2)
def test_adapter_as_the_library_saves_it(fused: Trained, tmp_path: Path) -> None:
    """α in its metadata or configuration; onto a sharded folder, and the result loads with from_pretrained."""
    fused.base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    lora_merge.merge(tmp_path / "base", fused.adapter, tmp_path / "merged")
    _assert_same(fused.kind.from_pretrained(tmp_path / "merged").state_dict(), fused.weights, "folder")
    for index in (tmp_path / "base").glob("*.index.json"):
        before, after = (json.loads((tmp_path / f / index.name).read_text()) for f in ("base", "merged"))
        assert before == after


@pytest.mark.few(2)
def test_prefixed_metadata_entry_holds_for_its_component(fused: Trained, tmp_path: Path) -> None:
    tensors = {f"transformer.{k}": v for k, v in fused.tensors.items()}
    config = {"transformer.r": RANK, "transformer.lora_alpha": ALPHA, "transformer.target_modules": ["to_q"]}
    path = save(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(config)})
    _assert_same(lora_merge.merge_state_dict(fused.base.state_dict(), path), fused.weights, "metadata")


def test_metadata_with_anchored_patterns_and_other_names_as_the_library_takes_it(tmp_path: Path) -> None:
    """What diffusers' own loader makes of it: patterns that begin with ^, and names that are not in diffusers' words."""
    base = diffusers.WanTransformer3DModel(**WAN)
    layers = ["blocks.0.attn1.to_q", "blocks.1.attn1.to_q", "blocks.0.ffn.net.2"]
    sizes = {name: base.get_submodule(name).weight.shape for name in layers}
    tensors = {
        f"{n}.lora_{x}.weight": torch.randn((RANK, i) if x == "A" else (o, RANK))
        for n, (o, i) in sizes.items()
        for x in "AB"
    }
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": layers}
    words = {
        "blocks.0.attn1.to_q": "blocks.0.self_attn.q",
        "blocks.1.attn1.to_q": "blocks.1.self_attn.q",
        "blocks.0.ffn.net.2": "blocks.0.ffn.2",
    }
    native = {
        f"diffusion_model.{words[k.partition('.lora')[0]]}.lora{k.partition('.lora')[2]}": v for k, v in tensors.items()
    }
    for names, more in (
        (
            {f"transformer.{k}": v for k, v in tensors.items()},
            {"alpha_pattern": {"^blocks.0.attn1.to_q": 5, "^blocks.0": 9}},
        ),
        (native, {}),
    ):
        packed = {f"transformer.{k}": v for k, v in (config | more).items()}
        path = save(names, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(packed)})
        model = copy.deepcopy(base)
        state, metadata = diffusers.WanPipeline.lora_state_dict(path, return_lora_metadata=True)
        diffusers.WanPipeline.load_lora_into_transformer(state, transformer=model, metadata=metadata)
        model.fuse_lora()
        wanted = {k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if ".lora_" not in k}
        _assert_same(lora_merge.merge_state_dict(base.state_dict(), path), wanted, str(more))


@pytest.mark.few(1)
@pytest.mark.parametrize("modalities", [False, True], ids=["2.0", "2.3"])
def test_ltx2_adapters_change_the_modules_that_the_library_finds(modalities: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """The transformer, and the connectors beside it, as a pipeline's folder."""
    sizes = dict(caption_channels=12, text_proj_in_factor=2)
    for side in ("video", "audio"):
        sizes |= {
            f"{side}_connector_{name}": 2 for name in ("num_attention_heads", "num_layers", "num_learnable_registers")
        }
        sizes |= {f"{side}_connector_attention_head_dim": 6, f"{side}_hidden_dim": 12}
    parts = {
        "transformer": diffusers.LTX2VideoTransformer3DModel(
            **CONFIGS["LTX2VideoTransformer3DModel"], cross_attn_mod=modalities, audio_cross_attn_mod=modalities
        ),
        "connectors": ltx2.LTX2TextConnectors(**sizes, per_modality_projections=modalities),
    }
    words = [
        "diffusion_model.transformer_blocks.0.attn1.to_q",
        "diffusion_model.patchify_proj",
        "diffusion_model.adaln_single.linear",
    ]
    new = [
        "diffusion_model.prompt_adaln_single.linear",
        "diffusion_model.audio_prompt_adaln_single.emb.timestep_embedder.linear_1",
    ]
    sides = ["video_", "audio_"] if modalities else [""]
    words += [*(new if modalities else ()), *(f"text_embedding_projection.{side}aggregate_embed" for side in sides)]
    keys = {f"{word}.lora_{x}.weight": torch.zeros(1) for word in words for x in "AB"}
    found = diffusers.LTX2Pipeline.lora_state_dict(keys)
    weights = {f"{name}.{k}": v for name, part in parts.items() for k, v in part.state_dict().items()}
    ours, wanted = {}, dict(weights)
    for word, theirs in zip(words, [k.removesuffix(".lora_A.weight") for k in found if ".lora_A" in k], strict=True):
        out, in_ = weights[f"{theirs}.weight"].shape
        up, down = torch.randn(out, RANK), torch.randn(RANK, in_)
        ours |= {f"{word}.lora_A.weight": down, f"{word}.lora_B.weight": up}
        wanted[f"{theirs}.weight"] = weights[f"{theirs}.weight"] + up @ down
    for name, part in parts.items():
        part.save_pretrained(tmp_path / "base" / name)
    (tmp_path / "base" / "model_index.json").write_text(json.dumps({name: ["", ""] for name in parts}))
    lora_merge.merge(tmp_path / "base", save(ours, tmp_path / "a.safetensors"), tmp_path / "merged")
    done = {
        f"{n}.{k}": v
        for n in parts
        for k, v in load(tmp_path / "merged" / n / "diffusion_pytorch_model.safetensors").items()
    }
    _assert_same(done, wanted, "LTX-2")


@pytest.mark.parametrize("native", [True, False])
def test_difference_of_wans_modulation_is_added_to_it(native: bool) -> None:  # noqa: FBT001
    base = diffusers.WanTransformer3DModel(**WAN).state_dict()
    names = {"blocks.1.diff_m": "blocks.1.scale_shift_table", "head.diff_m": "scale_shift_table"}
    adapter = {f"diffusion_model.{ours}": torch.randn_like(base[theirs]) for ours, theirs in names.items()}
    own = {theirs: ours.replace("diff_m", "modulation") if native else theirs for ours, theirs in names.items()}
    stored = {own.get(k, k.replace("attn1.to_q.", "self_attn.q.") if native else k): v for k, v in base.items()}
    wanted = stored | {own[theirs]: base[theirs] + adapter[f"diffusion_model.{ours}"] for ours, theirs in names.items()}
    _assert_same(lora_merge.merge_state_dict(stored, adapter), wanted, "modulation")


@pytest.mark.parametrize("kind", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_adapters_of_projections_that_the_library_fused(kind: str) -> None:
    model = getattr(diffusers, kind)(**CONFIGS[kind])
    base = model.state_dict()
    parts = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
    model.fuse_qkv_projections()
    fused = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in parts}
    assert any("added" in name for name in fused) and len(fused) > 1
    pairs = {name: (torch.randn(m.out_features, RANK), torch.randn(RANK, m.in_features)) for name, m in fused.items()}
    adapter = {
        f"transformer.{n}.lora_{x}.weight": t for n, pair in pairs.items() for x, t in zip("BA", pair, strict=True)
    }
    done = lora_merge.merge_state_dict(base, adapter)
    for name, module in fused.items():
        owner, _, kind = name.rpartition(".")
        merged = torch.cat([done[f"{owner}.{part}.weight"] for part in parts[kind]])
        torch.testing.assert_close(merged, module.weight + pairs[name][0] @ pairs[name][1], msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("whole", [True, False], ids=["in its UNet", "alone"])
def test_motion_lora_in_the_words_of_animatediff(whole: bool) -> None:  # noqa: FBT001
    """Attention processors under the authors' names, on diffusers' UNet with motion modules and on the modules alone."""
    model = diffusers.MotionAdapter(block_out_channels=(8, 16), motion_num_attention_heads=2, motion_norm_num_groups=4)
    if whole:
        unet = diffusers.UNet2DConditionModel(**CONFIGS["UNet2DConditionModel SD1"])
        model = diffusers.UNetMotionModel.from_unet2d(unet, model)
    base = model.state_dict()
    wanted, adapter = dict(base), {}
    for key in [k for k in base if "motion_modules" in k and re.search(r"attn\d\.to_\w+(\.0)?\.weight", k)]:
        pair = {"up": torch.randn(base[key].shape[0], RANK), "down": torch.randn(RANK, base[key].shape[1])}
        wanted[key] = base[key] + pair["up"] @ pair["down"]
        place, block, number, which = re.fullmatch(
            r"(.*)\.(transformer_blocks\.\d+)\.attn(\d)\.(to_\w+)(?:\.0)?\.weight", key
        ).groups()
        theirs = f"{place}.temporal_transformer.{block}.attention_blocks.{int(number) - 1}.processor.{which}_lora"
        adapter |= {f"{theirs}.{side}.weight": t for side, t in pair.items()}
    assert len(adapter) > 100
    _assert_same(lora_merge.merge_state_dict(base, adapter), wanted, "motion")


@pytest.mark.few(1)
@pytest.mark.parametrize("whole", [True, False], ids=["q, k, v, out", "k and v"])
def test_custom_diffusion_puts_its_layers_in_the_place_of_the_attentions(*, whole: bool, tmp_path: Path) -> None:
    """As examples/custom_diffusion sets its processors up; the model computes the same with its own once it is merged."""
    from diffusers.models.attention_processor import AttnProcessor2_0
    from diffusers.models.attention_processor import CustomDiffusionAttnProcessor2_0 as Processor

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(**CONFIGS["UNet2DConditionModel SD1"]).eval()
    before = {k: v.clone() for k, v in unet.state_dict().items()}
    processors = {}
    for name in unet.attn_processors:
        cross = name.endswith("attn2.processor")
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
        processors[name] = Processor(
            train_kv=cross, train_q_out=cross and whole, hidden_size=width,
            cross_attention_dim=unet.config.cross_attention_dim if cross else None,
        )  # fmt: skip
    given = torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 5, unet.config.cross_attention_dim)
    unet.set_attn_processor(processors)
    with torch.no_grad():
        want = unet(*given).sample
    unet.save_attn_procs(tmp_path, safe_serialization=False)
    merged = lora_merge.merge_state_dict(before, [tmp_path / "pytorch_custom_diffusion_weights.bin"])
    unet.set_attn_processor(AttnProcessor2_0())
    unet.load_state_dict(merged)
    with torch.no_grad():
        torch.testing.assert_close(unet(*given).sample, want, rtol=0, atol=1e-5)


def _assert_same(merged: Tensors, weights: Tensors, what: str) -> None:
    for key, value in weights.items():
        worst = (merged[key] - value).abs().max().item() if value.numel() else 0.0
        assert worst < 2e-5, f"{what}: {key} differs by {worst}"


@pytest.mark.few(1)
@pytest.mark.parametrize("turned", [False, True])
def test_model_equals_itself_in_the_words_of_its_authors(turned: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """One single file in the authors' words and a folder of shards in the library's; one weight differs."""
    converted = importlib.import_module("diffusers.loaders.single_file_utils").convert_ldm_unet_checkpoint
    table = json.loads(gzip.decompress((HEADERS / "native" / "sd15.json.gz").read_bytes()))
    native = {
        f"model.diffusion_model.{k}": rand(*(max(1, d // 64) if d > 31 else d for d in s)) for k, s in table.items()
    }
    kinds = {"layers_per_block": 2, "down_block_types": [""] * 4, "up_block_types": [""] * 4, "class_embed_type": None,
             "addition_embed_type": None}  # fmt: skip
    words = converted(dict(native), kinds)
    touched = next(name for name in words if name.endswith("attn1.to_q.weight"))
    words[touched] = words[touched] + 0.5
    folder, names = tmp_path / "unet", sorted(words)
    folder.mkdir()
    files = {f"diffusion_pytorch_model-{n + 1:05}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, own in files.items():
        save({name: words[name].contiguous() for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    both = [save(native, tmp_path / "native.safetensors"), folder]
    found = lora_merge.compare(*(reversed(both) if turned else both))
    assert (found["compared"], found["different"]) == (len(table), 1)
    assert not found["only_a"] + found["only_b"] + [*found["other_shapes"]]
    (one,) = found["tensors"].values()
    assert one["difference"] == pytest.approx(0.5 * words[touched].numel() ** 0.5, rel=1e-5)
