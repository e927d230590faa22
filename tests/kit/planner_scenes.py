"""Small merges of which the second reading knows every module: what `test_planner_mutants.py` breaks the planner with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import UNET, sd1
from tests.kit.tensors import Tensors, rand

WIDTH = 16


@dataclass(frozen=True)
class Scene:
    """A base and adapters as files, and the options of the merge."""

    base: Path
    adapters: list[tuple[Path, float]]
    options: dict[str, Any] = field(default_factory=dict)


def lora(name: str, rows: int, cols: int, seed: int, *, rank: int = 4, peft: bool = False) -> Tensors:
    up, down = ("lora_B", "lora_A") if peft else ("lora_up", "lora_down")
    return {
        f"{name}.{up}.weight": rand(rows, rank, seed=seed),
        f"{name}.{down}.weight": rand(rank, cols, seed=seed + 1),
    }


def folder(path: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """An adapter of PEFT."""
    path.mkdir()
    save(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def kohya_scene(at: Path) -> Scene:
    """Two networks of kohya on Stable Diffusion 1, one with DoRA on either axis and with a scale of its own."""
    base = sd1(torch.float32, repeated=True)
    first, second = kohya(base, alpha=2.0), kohya(base, te=False, alpha=3.0, seed=300)
    block = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1"
    first |= {
        f"{block}_to_q.dora_scale": rand(WIDTH, 1).abs() + 1,
        f"{block}_to_k.dora_scale": rand(1, WIDTH).abs() + 1,
    }
    first |= {f"{block}_to_v.scale": torch.tensor(0.25), f"{block}_to_out_0.alpha": torch.tensor(8.0)}
    first |= lora(f"{block}_to_out_0", WIDTH, WIDTH, 7, rank=WIDTH)
    return Scene(save(base, at / "base.safetensors"),
                 [(save(first, at / "first.safetensors"), 0.7), (save(second, at / "second.safetensors"), 0.4)],
                 {"strength_for": [("te", 0.5), ("re:attn2", 0.8)]})  # fmt: skip


def families_scene(at: Path) -> Scene:
    """Every family on square weights, which let the most mistakes pass."""
    base = {f"{n}.{leaf}": rand(WIDTH, *more, seed=i) for i, n in enumerate("abcdefgh")
            for leaf, more in (("weight", (WIDTH,)), ("bias", ()))}  # fmt: skip
    base |= {"norm.weight": rand(WIDTH, seed=20), "norm.bias": rand(WIDTH, seed=21)}
    pair = {f"hada_{w}": rand(*s, seed=i) for i, (w, s) in enumerate({"w1_a": (WIDTH, 4), "w1_b": (4, WIDTH),
                                                                  "w2_a": (WIDTH, 4), "w2_b": (4, WIDTH)}.items())}  # fmt: skip
    glora = {"a1": (WIDTH, 4), "a2": (4, WIDTH), "b1": (WIDTH, 4), "b2": (4, WIDTH)}
    adapter = {f"a.{k}": v for k, v in pair.items()} | {"a.alpha": torch.tensor(2.0)}
    adapter |= {"b.lokr_w1": rand(4, 4), "b.lokr_w2": rand(4, 4, seed=1), "b.alpha": torch.tensor(2.0)}
    adapter |= {
        "c.lokr_w1": rand(4, 4),
        "c.lokr_w2_a": rand(4, 2),
        "c.lokr_w2_b": rand(2, 4),
        "c.alpha": torch.tensor(3.0),
    }
    adapter |= {f"d.{s}.weight": rand(*shape, seed=i) for i, (s, shape) in enumerate(glora.items())}
    adapter |= {"d.alpha": torch.tensor(2.0), "e.diff": rand(WIDTH, WIDTH, seed=9), "e.diff_b": rand(WIDTH, seed=9)}
    adapter |= {"norm.w_norm": rand(WIDTH, seed=3), "norm.b_norm": rand(WIDTH, seed=4)}
    adapter |= lora("f", WIDTH, WIDTH, 5) | {
        "f.alpha": torch.tensor(2.0), "f.bias_indices": torch.tensor([[3, 9], [5, 14]], dtype=torch.int16),
        "f.bias_values": rand(2, seed=6), "f.bias_size": torch.tensor([WIDTH, WIDTH], dtype=torch.int16),
    }  # fmt: skip
    adapter |= {"g.weight": rand(WIDTH, seed=8), "g.on_input": torch.tensor(1)}
    return Scene(save(base, at / "base.safetensors"), [(save(adapter, at / "adapter.safetensors"), 0.7)])


def flux_scene(at: Path) -> Scene:
    """diffusers' names and split parts on the layout of Black Forest Labs."""
    h, base = WIDTH, {"img_in.weight": rand(WIDTH, 4), "txt_in.weight": rand(WIDTH, 8)}
    for n in range(2):
        double, single = f"double_blocks.{n}", f"single_blocks.{n}"
        base |= {f"{double}.{s}_attn.qkv.weight": rand(3 * h, h, seed=n) for s in ("img", "txt")}
        base |= {f"{double}.{s}_attn.proj.weight": rand(h, h, seed=n + 3) for s in ("img", "txt")}
        base |= {f"{double}.{s}_mod.lin.weight": rand(6 * h, h, seed=n + 6) for s in ("img", "txt")}
        base |= {f"{single}.linear1.weight": rand(7 * h, h, seed=n), f"{single}.linear2.weight": rand(h, 5 * h, seed=n)}
    adapter: Tensors = {}
    for n in range(2):
        for i, part in enumerate(("to_q", "to_k", "to_v", "add_k_proj", "to_out.0")):
            adapter |= lora(f"transformer.transformer_blocks.{n}.attn.{part}", h, h, 10 * n + i, peft=True)
        for i, (part, rows) in enumerate((("attn.to_q", h), ("attn.to_v", h), ("proj_mlp", 4 * h))):
            adapter |= lora(f"transformer.single_transformer_blocks.{n}.{part}", rows, h, 50 + 10 * n + i, peft=True)
    header = {f"transformer.{name}": value for name, value in (("r", 4), ("lora_alpha", 2), ("use_rslora", False))}
    parts: Tensors = {}
    for k in (1, 2):  # the query was pruned
        stem = "lora_unet_double_blocks_1_txt_attn_qkv"
        parts |= {
            f"{stem}.lora_up.{k}.weight": rand(h, 4, seed=k),
            f"{stem}.lora_down.{k}.weight": rand(4, h, seed=9 + k),
        }
    parts |= {f"{stem}.alpha": torch.tensor(2.0)}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(header)}
    return Scene(save(base, at / "base.safetensors"), [
        (save(adapter, at / "adapter.safetensors", metadata), 0.7), (save(parts, at / "parts.safetensors"), 0.6)])  # fmt: skip


def parted_scene(at: Path) -> Scene:
    """ComfyUI's names of fused tensors on the layout of diffusers, which has them apart."""
    h, base = WIDTH, {"x_embedder.weight": rand(WIDTH, 4), "context_embedder.weight": rand(WIDTH, 8)}
    block, single = "transformer_blocks.0", "single_transformer_blocks.0"
    for i, part in enumerate(("attn.to_q", "attn.to_k", "attn.to_v")):
        base |= {f"{b}.{part}.weight": rand(h, h, seed=i) for b in (block, single)}
    base |= {
        f"{block}.attn.{p}.weight": rand(h, h, seed=5) for p in ("add_q_proj", "add_k_proj", "add_v_proj", "to_out.0")
    }
    base |= {f"{block}.{n}.linear.weight": rand(6 * h, h, seed=6) for n in ("norm1", "norm1_context")}
    base |= {f"{block}.attn.norm_added_q.weight": rand(8), f"{single}.proj_mlp.weight": rand(4 * h, h)}
    base |= {"time_text_embed.text_embedder.linear_1.weight": rand(h, 8)}
    adapter = lora("diffusion_model.double_blocks.0.img_attn.qkv", 3 * h, h, 1, peft=True)
    adapter |= lora("diffusion_model.single_blocks.0.linear1", 7 * h, h, 3, peft=True)
    return Scene(save(base, at / "base.safetensors"), [(save(adapter, at / "adapter.safetensors"), 0.7)])


def peft_scene(at: Path) -> Scene:
    """PEFT on a Llama with rs-LoRA, patterns and another adapter with LoHa."""
    base: Tensors = {"model.embed_tokens.weight": rand(32, WIDTH), "lm_head.weight": rand(32, WIDTH, seed=1)}
    adapter, loha = {}, {}
    for n in range(2):
        layer = f"model.layers.{n}"
        base[f"{layer}.input_layernorm.weight"] = rand(WIDTH, seed=n)
        base |= {
            f"{layer}.mlp.{p}.weight": rand(*s, seed=n)
            for p, s in (("up_proj", (32, WIDTH)), ("down_proj", (WIDTH, 32)))
        }
        for i, part in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            base[f"{layer}.self_attn.{part}.weight"] = rand(WIDTH, WIDTH, seed=10 * n + i)
            adapter |= lora(f"base_model.model.{layer}.self_attn.{part}", WIDTH, WIDTH, 40 + 10 * n + i, peft=True)
        for i, (w, shape) in enumerate(
            {"w1_a": (32, 2), "w1_b": (2, WIDTH), "w2_a": (32, 2), "w2_b": (2, WIDTH)}.items()
        ):
            loha[f"base_model.model.{layer}.mlp.up_proj.hada_{w}"] = rand(*shape, seed=70 + 10 * n + i)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"k_proj": 9}}
    other = {"peft_type": "LOHA", "r": 2, "alpha": 5, "rank_pattern": {"layers.1.mlp.up_proj": 3}}
    return Scene(save(base, at / "base.safetensors"), [
        (folder(at / "lora", adapter, config), 0.7), (folder(at / "loha", loha, other), 0.3)])  # fmt: skip


def phi3_scene(at: Path) -> Scene:
    """Names of split layers on a base that fuses them, and (IA)³."""
    base: Tensors = {"model.embed_tokens.weight": rand(32, WIDTH)}
    adapter: Tensors = {}
    for n in range(2):
        layer = f"model.layers.{n}"
        base |= {f"{layer}.self_attn.qkv_proj.weight": rand(2 * WIDTH, WIDTH, seed=n),
                 f"{layer}.self_attn.o_proj.weight": rand(WIDTH, WIDTH, seed=n + 2),
                 f"{layer}.mlp.gate_up_proj.weight": rand(64, WIDTH, seed=n + 4)}  # fmt: skip
        for i, (part, rows) in enumerate((("self_attn.q_proj", WIDTH), ("self_attn.k_proj", 8), ("self_attn.v_proj", 8),
                                          ("mlp.gate_proj", 32), ("mlp.up_proj", 32))):  # fmt: skip
            adapter |= lora(f"base_model.model.{layer}.{part}", rows, WIDTH, 30 + 10 * n + i, peft=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 6, "rank_pattern": {}}  # the tensors have rank 4
    scaled = {
        f"base_model.model.model.layers.{n}.self_attn.o_proj.ia3_l": rand(1, WIDTH, 1, seed=n)[..., 0] for n in range(2)
    }
    ia3 = {"peft_type": "IA3", "feedforward_modules": ["o_proj"]}
    return Scene(save(base, at / "base.safetensors"), [
        (folder(at / "lora", adapter, config), 0.7), (folder(at / "ia3", scaled, ia3), 1.0)])  # fmt: skip


def encoders_scene(at: Path) -> Scene:
    """Both encoders of Stable Diffusion XL, of one width here, the second fused as OpenCLIP has it."""
    one, two = (
        "conditioner.embedders.0.transformer.text_model.encoder.layers",
        "conditioner.embedders.1.model.transformer.resblocks",
    )
    base: Tensors = {f"{UNET}input_blocks.0.0.weight": rand(WIDTH, 4, 3, 3), f"{UNET}label_emb.0.0.weight": rand(WIDTH, 8),
                     f"{UNET}input_blocks.7.0.in_layers.0.weight": rand(WIDTH)}  # fmt: skip
    base |= {"conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight": rand(8, WIDTH),
             "conditioner.embedders.1.model.token_embedding.weight": rand(8, WIDTH, seed=1)}  # fmt: skip
    adapter: Tensors = {}
    for n in range(2):
        base |= {
            f"{one}.{n}.self_attn.{p}_proj.weight": rand(WIDTH, WIDTH, seed=10 * n + i)
            for i, p in enumerate(("q", "k", "v", "out"))
        }
        base |= {f"{one}.{n}.layer_norm1.weight": rand(WIDTH), f"{two}.{n}.ln_1.weight": rand(WIDTH)}
        base |= {
            f"{two}.{n}.attn.in_proj_weight": rand(3 * WIDTH, WIDTH, seed=n),
            f"{two}.{n}.attn.out_proj.weight": rand(WIDTH, WIDTH, seed=n),
        }
        for te in (1, 2):
            for i, p in enumerate(("q", "k", "v", "out")):
                name = f"lora_te{te}_text_model_encoder_layers_{n}_self_attn_{p}_proj"
                adapter |= lora(name, WIDTH, WIDTH, 100 * te + 10 * n + i) | {f"{name}.alpha": torch.tensor(2.0)}
    return Scene(save(base, at / "base.safetensors"), [(save(adapter, at / "adapter.safetensors"), 0.7)],
                 {"strength_for": [("te2", 0.5)]})  # fmt: skip


SCENES: dict[str, Callable[[Path], Scene]] = {
    "kohya": kohya_scene, "families": families_scene, "flux": flux_scene, "parted": parted_scene, "peft": peft_scene, "phi3": phi3_scene,
    "encoders": encoders_scene,
}  # fmt: skip
