"""GGUF files made of checkpoints in .safetensors: ComfyUI-GGUF's names, types and entries, as the `gguf` library reads
them, with the numbers of base and change within the type's step."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader

import lora_merge
from lora_merge.errors import FitError, InputError, MergeError, UsageError
from lora_merge.recipes.replay import prove
from tests.kit import gguf_files as by_library
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.hostile_inputs import command
from tests.kit.tensors import Tensors, rand

STEP = {"q8_0": 0.01, "q4_0": 0.15, "q4_k": 0.12, "fp16": 1e-3, "bf16": 8e-3, "keep": 8e-3, "fp32": 1e-6}
"""Value of `--dtype` → the error of the numbers, as a share of their root mean square."""


def checkpoint(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> Tensors:
    return {
        f"{prefix}{name}": rand(*shape, seed=n, scale=0.02).bfloat16() for n, (name, shape) in enumerate(shapes.items())
    }


QKV = "double_blocks.0.img_attn.qkv"
FLUX: dict[str, tuple[int, ...]] = {
    "double_blocks.0.img_attn.proj.weight": (64, 256), f"{QKV}.weight": (96, 256), f"{QKV}.bias": (96,),
    "double_blocks.0.img_attn.norm.query_norm.scale": (37,), "img_in.weight": (96, 64), "time_in.in_layer.weight": (8, 32),
}  # fmt: skip
WAN: dict[str, tuple[int, ...]] = {
    "blocks.0.self_attn.norm_q.weight": (256,), "text_embedding.2.weight": (64, 256), "head.modulation": (1, 2, 640),
    "patch_embedding.weight": (64, 8, 1, 2, 2), "blocks.0.self_attn.q.weight": (96, 256), "blocks.0.modulation": (1, 6, 256),
}  # fmt: skip
TO_Q = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
SDXL: dict[str, tuple[int, ...]] = {
    "input_blocks.3.0.op.weight": (32, 32, 3, 3), "label_emb.0.0.weight": (64, 96), f"{TO_Q}.weight": (96, 320),
}  # fmt: skip
CASES: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {
    "flux": (FLUX, QKV, "model.diffusion_model."), "wan": (WAN, "blocks.0.self_attn.q", ""), "sdxl": (SDXL, TO_Q, ""),
}  # fmt: skip
"""`general.architecture` → shapes, the layer that the adapter changes, prefix in the checkpoint."""


OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hyvid": ("double_blocks.0.img_attn_qkv", ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv",)),
    "sd3": ("joint_blocks.0.x_block.attn.qkv", ("joint_blocks.0.context_block.attn.qkv", "context_embedder")),
    "aura": ("double_layers.3.attn.w1q", ("double_layers.3.modX.1", "single_layers.0.attn.w1q")),
    "hidream": (
        "double_stream_blocks.0.block.attn1.to_q",
        ("caption_projection.0.linear", "double_stream_blocks.0.block.ff_i.shared_experts.w3"),
    ),
    "cosmos": ("blocks.0.self_attn.q_proj", ("blocks.0.mlp.layer1", "blocks.0.adaln_modulation_cross_attn.1")),
    "ltxv": (
        "transformer_blocks.0.attn1.to_q",
        ("adaln_single.emb.timestep_embedder.linear_2", "caption_projection.linear_2", "transformer_blocks.0.scale_shift_table"),
    ),
    "sd1": (
        "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
        ("input_blocks.3.0.op", "input_blocks.9.0.op", "input_blocks.4.1.transformer_blocks.0.attn2.to_k"),
    ),
    "lumina2": ("layers.0.attention.qkv", ("cap_embedder.1", "context_refiner.0.attention.qkv")),
    "qwen_image": ("transformer_blocks.0.attn.to_q", ("txt_norm", "transformer_blocks.0.img_mod.1", "img_in")),
}  # fmt: skip
"""`general.architecture` → the layer that the adapter changes, and the layers by which the loader knows the model."""


@pytest.mark.few(3)
@pytest.mark.parametrize("arch", list(OTHERS))
def test_every_kind_that_the_loader_knows_becomes_gguf_and_stays_what_it_is(arch: str, tmp_path: Path) -> None:
    layer, signs = OTHERS[arch]
    names = [f"{layer}.weight", *(n if n.endswith("table") else f"{n}.weight" for n in signs)]
    base = save(checkpoint({name: (64, 64) for name in names}), tmp_path / "base.safetensors")
    down, up = rand(4, 64, seed=1, scale=0.1), rand(64, 4, seed=2, scale=0.1)
    stem = f"diffusion_model.{layer}"
    lora = save({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "lora.safetensors")
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert command("merge", base, lora, "-o", first, "--dtype", "q8_0") == 0
    assert command("merge", first, lora, "-o", second) == 0
    assert by_library.fields(second)["general.architecture"] == arch
    read, change = by_library.read(second), (up.double() @ down.double()).numpy()
    assert {name: kind for name, (_, kind) in read.items()} == {n: k for n, (_, k) in by_library.read(first).items()}
    want = load(base)[f"{layer}.weight"].double().numpy() + 2 * change
    found, kind = read[f"{layer}.weight"]
    assert kind == "Q8_0"
    assert np.abs(found - want).max() <= 2.0 * np.abs(want).max() / 127


def inputs(folder: Path, arch: str) -> tuple[Path, Path, dict[str, Any]]:
    """Base, adapter, and name in the GGUF file → the wanted numbers."""
    shapes, layer, prefix = CASES[arch]
    base = checkpoint(shapes, prefix)
    rows, cols = shapes[f"{layer}.weight"]
    stem = "lora_unet_" + layer.replace(".", "_")
    lora = {f"{stem}.lora_down.weight": rand(4, cols, scale=0.1), f"{stem}.lora_up.weight": rand(rows, 4, scale=0.1)}
    want = {name.removeprefix(prefix): value.double() for name, value in base.items()}
    want[f"{layer}.weight"] += lora[f"{stem}.lora_up.weight"].double() @ lora[f"{stem}.lora_down.weight"].double()
    others = (
        {"first_stage_model.decoder.conv_in.weight": rand(4, 4), "cond_stage_model.x": torch.zeros(2)} if prefix else {}
    )
    return save({**others, **base}, folder / "base.safetensors"), save(lora, folder / "lora.safetensors"), want


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "bf16", "keep"])
@pytest.mark.parametrize("arch", list(CASES))
def test_checkpoint_becomes_gguf(tmp_path: Path, arch: str, dtype: str) -> None:
    base, lora, want = inputs(tmp_path, arch)
    out = tmp_path / "out.gguf"
    assert command("merge", base, lora, "-o", out, "--dtype", dtype) == 0
    assert prove(out, full=True)["full"]
    read, fields = by_library.read(out), by_library.fields(out)
    assert read.keys() == want.keys()
    kind = dtype.upper() if dtype.startswith("q") else "BF16"
    assert fields["general.architecture"] == arch
    assert fields["general.quantization_version"] == 2
    assert fields["general.file_type"] == {"Q8_0": 7, "Q4_K": 15, "BF16": 32}[kind]
    for name, exact in want.items():
        found, now = read[name]
        shape = tuple(fields.get(f"comfy.gguf.orig_shape.{name}", exact.shape))
        assert shape == tuple(exact.shape)
        touched = name == f"{CASES[arch][1]}.weight"
        vector = exact.dim() in (1, 3, 5) or exact.numel() <= 1024
        assert now == (kind if touched else "F32" if vector else now)
        assert (found.shape == shape) == (f"comfy.gguf.orig_shape.{name}" not in fields)
        error = np.sqrt(np.mean((found.reshape(shape) - exact.numpy()) ** 2))
        assert error <= (STEP[dtype] if now == kind else 1e-6) * np.sqrt(np.mean(exact.numpy() ** 2))


def test_fp8_file_becomes_gguf_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From scaled fp8 to Q8_0 with a name by default, and that file as a base again."""
    base, lora, want = inputs(tmp_path, "flux")
    scaled, little = (
        tmp_path / "scaled.safetensors",
        save({k: v * 1e-3 for k, v in load(lora).items()}, tmp_path / "n.safetensors"),
    )
    monkeypatch.chdir(tmp_path)
    lora_merge.merge(base, little, scaled, dtype="fp8_scaled")
    report = lora_merge.merge(scaled, lora, dtype="q8_0")
    assert Path(report.output).name == "scaled+lora.gguf"
    assert prove(Path(report.output), full=True)["full"]
    lora_merge.merge(report.output, little, tmp_path / "plain.safetensors", dtype="fp32")
    found = load(tmp_path / "plain.safetensors")[f"{QKV}.weight"].double()
    assert (found - want[f"{QKV}.weight"]).norm() < 0.04 * want[f"{QKV}.weight"].norm()


def test_header_says_that_weights_were_quantised_again(tmp_path: Path) -> None:
    shapes, layer, _ = CASES["flux"]
    tensors = {name: (rand(*shape).numpy(), "F16" if len(shape) > 1 else "F32") for name, shape in shapes.items()}
    base, (_, lora, _) = by_library.write(tmp_path / "flux.gguf", "flux", tensors), inputs(tmp_path, "flux")
    lora_merge.merge(base, lora, tmp_path / "q.gguf", dtype="q5_0")
    lora_merge.merge(base, lora, tmp_path / "same.gguf")
    fields = by_library.fields(tmp_path / "q.gguf")
    assert (fields["general.quantization_version"], fields["general.file_type"]) == (2, 8)
    assert "general.quantization_version" not in by_library.fields(tmp_path / "same.gguf")
    assert by_library.read(tmp_path / "q.gguf")[f"{layer}.weight"][1] == "Q5_0"
    assert all(int(t.data_offset) % 32 == 0 for t in GGUFReader(tmp_path / "q.gguf").tensors)


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ("names of diffusers", UsageError, "ComfyUI-GGUF loads no model with the names of this base"),
        ("a folder", UsageError, "a folder cannot be converted to GGUF"),
        ("another type", UsageError, "GGUF has no such type"),
        ("scaled codes kept", UsageError, "no type for the quantised weights"),
        ("bytes", InputError, "GGUF has no type for uint8"),
        ("a text encoder", FitError, "a network that the GGUF file lacks"),
        ("another suffix", UsageError, "a GGUF file cannot be named .safetensors"),
    ],
)
def test_gguf_refuses_what_it_has_no_place_for(tmp_path: Path, change: str, error: type[MergeError], what: str) -> None:
    base, lora, _ = inputs(tmp_path, "flux")
    tensors, options, out = load(base), {"dtype": "q8_0"}, tmp_path / "out.gguf"
    if change == "names of diffusers":
        tensors = {name.replace("img_attn.proj", "attn.to_out.0"): value for name, value in tensors.items()}
    elif change == "another type":
        options = {"dtype": "nvfp4"}
    elif change == "bytes":
        tensors["model.diffusion_model.mark"] = torch.zeros(3, dtype=torch.uint8)
    elif change == "scaled codes kept":
        lora_merge.merge(base, lora, tmp_path / "scaled.safetensors", dtype="fp8_scaled")
        tensors, options = load(tmp_path / "scaled.safetensors"), {}
    elif change == "a text encoder":
        key = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q"
        tensors[f"{key}.weight"] = rand(64, 64)
        stem = "lora_te1_" + key.partition("transformer.")[2].replace(".", "_")
        more = {f"{stem}.lora_down.weight": rand(4, 64), f"{stem}.lora_up.weight": rand(64, 4)}
        lora = save({**load(lora), **more}, tmp_path / "lora.safetensors")
    elif change == "another suffix":
        out = tmp_path / "out.safetensors"
    base = save(tensors, base)
    if change == "a folder":
        (tmp_path / "folder").mkdir()
        base = base.rename(tmp_path / "folder" / "model.safetensors").parent
    with pytest.raises(error, match=what):
        lora_merge.merge(base, lora, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("output", ["out.safetensors", "out.gguf", "out.ckpt"])
def test_line_for_a_model_without_gguf_is_right(tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing names are named, and the line in the fix merges."""
    monkeypatch.chdir(tmp_path)
    base, lora, _ = inputs(tmp_path, "flux")
    sign = "model.diffusion_model.double_blocks.0.img_attn.proj.weight"
    save({name: value for name, value in load(base).items() if name != sign}, base)
    words = [base.name, lora.name, "--dtype", "q8_0", "--unmatched", "skip", "-o", output]
    answer = run(*words)
    assert answer.code == 2 and f"it recognises flux by {sign}: not in the base" in answer.err
    fix = shlex.split(answer.err.partition("; write lora-merge ")[2])
    assert run(*fix).code == 0 and (tmp_path / "out.safetensors").exists()


def test_weights_that_do_not_fill_blocks_are_the_reason(tmp_path: Path) -> None:
    shapes, _, _ = CASES["flux"]
    base = tmp_path / "base.safetensors"
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    factors = {f"{stem}.lora_down.weight": rand(4, 32), f"{stem}.lora_up.weight": rand(96, 4)}
    lora = save(factors, tmp_path / "lora.safetensors")
    save({name: rand(*shape[:-1], 32) if len(shape) == 2 else rand(*shape) for name, shape in shapes.items()}, base)
    with pytest.raises(UsageError, match="rows of 32 values do not fill blocks of 256") as caught:
        lora_merge.merge(base, lora, tmp_path / "out.gguf", dtype="q4_k")
    assert 'dtype="q4_1"' in caught.value.fix
