"""The command `lora-merge demo`: makes a small model and three adapters, merges them as users do, checks the result.

Offline and quick. The check is written out here once more in fp64, apart from everything that merges.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..disk.destination import failures
from ..disk.files import StoredTensor
from ..disk.publish import replacing
from ..engine.tensor_moves import FILE_DTYPES, host
from ..engine.tensors import view_bytes
from ..errors import MergeError, UsageError, VerificationFailed
from ..files.safetensors import layout, parse_file
from ..paths import typed
from ..process import command
from .reports import nearest

WIDTHS: Final = (32, 64, 128)  # channels per level; the real model has 320, 640, 1280
TEXT_WIDTH: Final = 96  # width of the text encoder; the real one has 768
RANK: Final = 8
DEMO_ALPHA: Final = 4.0

DEMO_METADATA: Final = {"format": "pt", "lora_merge.demo": "1"}
"""Of every file that is made here; a merge keeps that of its base."""

Tensors = dict[str, Tensor]


def demo(folder: Path, echo: Callable[[str], None]) -> None:
    """Run the whole demonstration in `folder`; VerificationFailed if the result is not what it must be."""
    started = time.monotonic()
    base, *adapters, output = (folder / f"{n}.safetensors" for n in ("base", "lora", "loha", "glora", "merged"))
    _require_ours(base, *adapters, output)
    model = _model(torch.Generator().manual_seed(1))
    parts = [make(torch.Generator().manual_seed(2 + n)) for n, make in enumerate((_lora, _loha, _glora))]
    _save(model, base)
    for adapter, path in zip(parts, adapters, strict=True):
        _save(adapter, path)
    echo(f"Made a small checkpoint in the layout of Stable Diffusion 1.5 and three adapters in {nearest(str(folder))}:")
    for path in (base, *adapters):
        echo(f"  {path.name}  {path.stat().st_size / 2**20:.1f} MiB")
    named = [nearest(str(path)) for path in (base, *adapters, output)]
    merged = (f"{path}:{strength:g}" for path, strength in zip(named[1:-1], DEMO_STRENGTHS, strict=True))
    arguments = [named[0], *merged, "--dtype", "bf16", "-o", named[-1], "--overwrite"]
    echo("")
    echo(f"$ lora-merge {typed(arguments)}")
    code = subprocess.run([*command("lora_merge.__main__", "start"), *arguments], check=False).returncode
    if code:
        raise SystemExit(code)  # the error is printed
    wrong, total = _check(model, parts, output)
    echo("")
    exact = f"{total - wrong} are rounded perfectly, {wrong} are the number next to that"
    echo(f"Checked all {total} numbers against fp64: {exact}.")
    if wrong > total // 1000:
        raise VerificationFailed("the demo's result is wrong", str(output), "report this with lora-merge doctor's text")
    echo(f"All in {time.monotonic() - started:.1f} s. Now with your own files:")
    echo("")
    echo("$ lora-merge MODEL.safetensors LORA.safetensors")


DEMO_STRENGTHS: Final = (0.8, 0.5, 1.0)


def _layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Return (diffusers name as kohya flattens it, key in the checkpoint, shape) of every layer that is trained."""
    for level, width in enumerate(WIDTHS):
        for n in range(2):
            block, at = f"down_blocks_{level}", f"model.diffusion_model.input_blocks.{3 * level + n + 1}"
            before = WIDTHS[max(level - 1, 0)] if n == 0 else width
            yield f"lora_unet_{block}_resnets_{n}_conv1", f"{at}.0.in_layers.2", (width, before, 3, 3)
            body = f"{block}_attentions_{n}_transformer_blocks_0"
            inner = f"{at}.1.transformer_blocks.0"
            for attention, inputs in (("attn1", width), ("attn2", TEXT_WIDTH)):
                for name, size in (("to_q", width), ("to_k", inputs), ("to_v", inputs)):
                    yield f"lora_unet_{body}_{attention}_{name}", f"{inner}.{attention}.{name}", (width, size)
            yield f"lora_unet_{body}_ff_net_0_proj", f"{inner}.ff.net.0.proj", (8 * width, width)
    for n in range(4):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            path = f"text_model.encoder.layers.{n}.self_attn.{name}"
            yield f"lora_te_{path.replace('.', '_')}", f"cond_stage_model.transformer.{path}", (TEXT_WIDTH, TEXT_WIDTH)


def _model(random: torch.Generator) -> Tensors:
    """Return a checkpoint in fp16 with the layers above and some that nobody trains."""
    tensors = {f"{key}.weight": torch.randn(shape, generator=random) * 0.02 for _, key, shape in _layers()}
    tensors |= {f"{key}.bias": torch.zeros(shape[0]) for _, key, shape in _layers() if "attn" not in key}
    first = "model.diffusion_model.input_blocks.0.0"
    tensors[f"{first}.weight"] = torch.randn(WIDTHS[0], 4, 3, 3, generator=random)
    tensors[f"{first}.bias"] = torch.zeros(WIDTHS[0])
    tensors["cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"] = torch.randn(
        4096, TEXT_WIDTH, generator=random
    )
    tensors["first_stage_model.decoder.conv_out.weight"] = torch.randn(3, WIDTHS[0], 3, 3, generator=random)
    return {key: host(t, torch.float16) for key, t in tensors.items()}


def _lora(random: torch.Generator) -> Tensors:
    """Return a LoRA of every layer, in fp32; convolutions have a 1×1 up."""
    tensors: Tensors = {}
    for name, _, (out, *rest) in _layers():
        tensors[f"{name}.lora_up.weight"] = torch.randn(out, RANK, *[1] * (len(rest) - 1), generator=random) * 0.02
        tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, *rest, generator=random) * 0.1
        tensors[f"{name}.alpha"] = torch.tensor(DEMO_ALPHA)
    return tensors


def _loha(random: torch.Generator) -> Tensors:
    """Return a LoHa of the convolutions, in bf16."""
    tensors: Tensors = {}
    for name, _, shape in _layers():
        if len(shape) == 4:
            for k in ("1", "2"):
                tensors[f"{name}.hada_w{k}_a"] = torch.randn(shape[0], RANK, generator=random) * 0.1
                tensors[f"{name}.hada_w{k}_b"] = torch.randn(RANK, shape[1] * 9, generator=random) * 0.1
            tensors[f"{name}.alpha"] = torch.tensor(DEMO_ALPHA)
    return {key: host(t, torch.bfloat16) for key, t in tensors.items()}


def _glora(random: torch.Generator) -> Tensors:
    """Return a GLoRA of the cross-attention, in fp32 on an fp16 base."""
    tensors: Tensors = {}
    for name, _, shape in _layers():
        if "attn2" in name:
            out, width = shape
            sizes = {"a1": (width, RANK), "a2": (RANK, width), "b1": (out, RANK), "b2": (RANK, width)}
            for slot, size in sizes.items():
                tensors[f"{name}.{slot}.weight"] = torch.randn(size, generator=random) * 0.05
            tensors[f"{name}.alpha"] = torch.tensor(DEMO_ALPHA)
    return tensors


def _check(model: Tensors, parts: list[Tensors], output: Path) -> tuple[int, int]:
    """Return (elements that differ from the correctly rounded fp64 result, all elements)."""
    names = {f"{key}.weight": name for name, key, _ in _layers()}
    wrong = total = 0
    for key, info in parse_file(output).tensors.items():
        exact = host(model[key], torch.float64)
        for tensors, strength in zip(parts, DEMO_STRENGTHS, strict=True):
            if key in names:
                exact = exact + strength * _delta(names[key], tensors, host(model[key], torch.float64))
        got = _load(info)
        rounded = host(host(exact, torch.float32), got.dtype)
        wrong += int((got != rounded).sum())
        total += got.numel()
    return wrong, total


def _delta(name: str, tensors: Tensors, weight: Tensor) -> Tensor:
    """Return what the formulas give, written down plainly, in fp64."""
    t = {k.removeprefix(f"{name}."): host(v, torch.float64).flatten(1) for k, v in tensors.items()
         if k.startswith(f"{name}.") and v.ndim}  # fmt: skip
    scale = DEMO_ALPHA / RANK
    if "lora_up.weight" in t:
        return scale * (t["lora_up.weight"] @ t["lora_down.weight"]).reshape(weight.shape)
    if "hada_w1_a" in t:
        product = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
        return scale * product.reshape(weight.shape)
    if "a1.weight" in t:
        return scale * (weight @ t["a1.weight"] @ t["a2.weight"] + t["b1.weight"] @ t["b2.weight"])
    return torch.zeros_like(weight)


def _require_ours(*paths: Path) -> None:
    """Raise UsageError if anything but the files of an earlier demo has one of these names."""
    for path in paths:
        if os.path.lexists(path) and not _is_ours(path):
            raise UsageError("a file of yours has the name of one that the demo makes", str(path),
                             "name another folder: lora-merge demo DIR")  # fmt: skip


def _is_ours(path: Path) -> bool:
    try:
        return parse_file(path).metadata.items() >= DEMO_METADATA.items()
    except MergeError:
        return False


def _save(tensors: Tensors, path: Path) -> None:
    entries = [(key, FILE_DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()]
    with failures(path), replacing(path, overwrite=True) as part, part.open("wb") as f:
        f.write(layout(entries, DEMO_METADATA, 0))
        for t in tensors.values():
            f.write(t.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _load(info: StoredTensor) -> Tensor:
    with info.file.open("rb") as f:
        f.seek(info.offset)
        return view_bytes(memoryview(bytearray(f.read(info.nbytes))), info.dtype, info.shape)
