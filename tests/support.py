"""Small checkpoints and adapters, and the plain fp64 arithmetic that results are held against."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lora_merge.disk.files import StoredTensor
from lora_merge.files.checkpoint import Index

Tensors = dict[str, Tensor]

UNET = "model.diffusion_model."
TE = "cond_stage_model.transformer."


def rand(*shape: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    """Normal numbers that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum((i + 1) * d for i, d in enumerate(shape)))
    return torch.randn(shape, generator=generator) * scale


def sd1(dtype: torch.dtype = torch.float16) -> Tensors:
    """A tiny checkpoint in the single-file layout of Stable Diffusion 1: linear layers, convolutions, norms, integers."""
    c, text = 16, 24
    shapes: dict[str, tuple[int, ...]] = {
        f"{UNET}input_blocks.0.0.weight": (c, 4, 3, 3),
        f"{UNET}input_blocks.0.0.bias": (c,),
        f"{UNET}time_embed.0.weight": (4 * c, c),
        f"{UNET}out.2.weight": (4, c, 3, 3),
    }
    for n in (1, 2):
        res, block = f"{UNET}input_blocks.{n}.0", f"{UNET}input_blocks.{n}.1"
        inner = f"{block}.transformer_blocks.0"
        shapes |= {f"{res}.in_layers.0.weight": (c,), f"{res}.in_layers.2.weight": (c, c, 3, 3)}
        shapes |= {f"{res}.in_layers.2.bias": (c,), f"{res}.emb_layers.1.weight": (c, 4 * c)}
        shapes |= {f"{block}.proj_in.weight": (c, c, 1, 1), f"{block}.norm.weight": (c,)}
        for attention, width in (("attn1", c), ("attn2", text)):
            shapes[f"{inner}.{attention}.to_q.weight"] = (c, c)
            shapes[f"{inner}.{attention}.to_k.weight"] = (c, width)
            shapes[f"{inner}.{attention}.to_v.weight"] = (c, width)
            shapes[f"{inner}.{attention}.to_out.0.weight"] = (c, c)
            shapes[f"{inner}.{attention}.to_out.0.bias"] = (c,)
        shapes[f"{inner}.ff.net.0.proj.weight"] = (8 * c, c)
    for n in range(2):
        layer = f"{TE}text_model.encoder.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (text, text) for p in ("q", "k", "v", "out")}
        shapes[f"{layer}.layer_norm1.weight"] = (text,)
    shapes["first_stage_model.decoder.conv_out.weight"] = (3, c, 3, 3)
    tensors = {name: rand(*shape, seed=n).to(dtype) for n, (name, shape) in enumerate(shapes.items())}
    tensors[f"{TE}text_model.embeddings.position_ids"] = torch.arange(77).unsqueeze(0)
    return tensors


def kohya(base: Tensors, *, te: bool = True, rank: int = 4, alpha: float = 2.0, seed: int = 100) -> Tensors:
    """A LoRA in kohya's names for every linear layer and convolution of the tiny checkpoint."""
    tensors: Tensors = {}
    for name, key in kohya_names(base).items():
        if name.startswith("lora_te") and not te:
            continue
        out, *rest = base[key].shape
        tensors[f"{name}.lora_up.weight"] = rand(out, rank, *[1] * (len(rest) - 1), seed=seed)
        tensors[f"{name}.lora_down.weight"] = rand(rank, *rest, seed=seed + 1)
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def kohya_names(base: Tensors) -> dict[str, str]:
    """kohya's flat name (diffusers words) → key, written down apart from the project's own tables."""
    names: dict[str, str] = {}
    words = {"in_layers.2": "conv1", "emb_layers.1": "time_emb_proj"}
    for key, tensor in base.items():
        if not key.endswith(".weight") or tensor.ndim < 2:
            continue
        path = key.removesuffix(".weight")
        if path.startswith(TE):
            names["lora_te_" + path.removeprefix(TE).replace(".", "_")] = key
        elif path.startswith(f"{UNET}input_blocks.") and ".0.0" not in path:
            number, part, rest = path.removeprefix(f"{UNET}input_blocks.").split(".", 2)
            block = f"down_blocks_0_{'resnets' if part == '0' else 'attentions'}_{int(number) - 1}"
            names[f"lora_unet_{block}_{words.get(rest, rest).replace('.', '_')}"] = key
    return names


def flux_control(width: int) -> Tensors:
    """A control LoRA of Black Forest Labs on a tiny Flux of two heads: twice its four channels come in."""
    block = "single_blocks.0"
    return {
        "img_in.lora_A.weight": rand(2, 8), "img_in.lora_B.weight": rand(width, 2),
        "img_in.lora_B.bias": rand(width, seed=5), f"{block}.norm.key_norm.scale": rand(width // 2, seed=9),
        f"{block}.linear1.lora_A.weight": rand(2, width), f"{block}.linear1.lora_B.weight": rand(7 * width, 2),
    }  # fmt: skip


def lora_delta(tensors: Tensors, name: str, alpha: float | None = None) -> Tensor:
    """α / r · B A in fp64, flattened to [out, cols]."""
    up = tensors[f"{name}.lora_up.weight"].double().flatten(1)
    down = tensors[f"{name}.lora_down.weight"].double().flatten(1)
    alpha = float(tensors[f"{name}.alpha"]) if alpha is None else alpha
    return alpha / down.shape[0] * (up @ down)


def expected(base: Tensors, adapters: list[tuple[Tensors, float]]) -> Tensors:
    """The merged checkpoint in fp64."""
    names = {key: name for name, key in kohya_names(base).items()}
    merged = {}
    for key, weight in base.items():
        exact = weight.double() if weight.is_floating_point() else weight
        for tensors, strength in adapters:
            if f"{names.get(key)}.lora_up.weight" in tensors:
                exact = exact + strength * lora_delta(tensors, names[key]).reshape(weight.shape)
        merged[key] = exact
    return merged


def save(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Written by the safetensors library, not by ours."""
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata=metadata or {"format": "pt"})
    return path


def load(path: Path) -> Tensors:
    """Read by the safetensors library, not by ours."""
    with safe_open(path, "pt") as f:
        return {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118


def load_all(folder: Path) -> Tensors:
    """The tensors of all shards."""
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load(f).items()}


def metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` as the library reads it."""
    with safe_open(path, "pt") as f:
        return dict(f.metadata() or {})


def blob(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of this header, whatever it says, and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def index(shapes: Mapping[str, tuple[int, ...]]) -> Index:
    """A checkpoint of which there are names and shapes alone."""
    infos = {k: StoredTensor(k, "BF16", s, Path("base.safetensors"), 0, 0) for k, s in shapes.items()}
    return Index(Path("base.safetensors"), infos, {}, ())


def sha(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def strays(folder: Path) -> list[str]:
    """Hidden files: temporary ones and claims."""
    return [p.name for p in folder.rglob("*") if p.name.startswith(".")]


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """interface.md, accuracy: 16-bit outputs differ from the rounded fp64 value in 0.1 % at most, by one ulp at most; a
    number that is left of larger ones, which cancel, has the digits of these in fp32, on each processor other ones."""
    if not got.is_floating_point():
        assert torch.equal(got, exact)
    elif got.dtype.itemsize >= 4:
        assert (got.double() - exact).abs().max() <= 2e-6 * exact.abs().max()
    else:
        rounded = exact.float().to(got.dtype)
        differ = got != rounded
        assert differ.sum() <= max(1, got.numel() // 1000)
        room = ulp(rounded) + 2**-22 * exact.abs().max()
        near = (got.double() - exact).abs() <= 1.01 * (rounded.double() - exact).abs() + room
        assert bool(near.all())


def ulp(t: Tensor) -> Tensor:
    """Distance to the next larger number of its dtype, per element."""
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
    exponent = torch.floor(torch.log2(t.double().abs().clamp(min=1e-30)))
    return torch.exp2(exponent.clamp(min=-24) - mantissa[t.dtype])


def slowness() -> float:
    """How many times as long as the machine on which bounds were set this one takes just now for the same Python."""
    started = time.process_time()
    sorted({str(i): i % 7 for i in range(200_000)}.items(), key=lambda item: (item[1], item[0]))
    return max(1.0, (time.process_time() - started) / 0.17)


def steps(act: Callable[[], object]) -> int:
    """How many calls Python makes for it: work is counted, since seconds are another machine's and another hour's."""
    made = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return made


def in_process(*arguments: object, seconds: float = 60) -> tuple[int, str]:
    """Exit code and stderr of the command line in this process, where nothing is imported anew; TimeoutError where it
    has taken so much time of the processor."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGVTALRM, late)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        done = cli(*arguments)
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return done.returncode, done.stderr


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in this process, without a terminal: its exit code and what it says."""
    from lora_merge.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["lora-merge", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", argv)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def process(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it, in a process of its own, where everything is imported anew."""
    command = [sys.executable, "-m", "lora_merge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def unread(name: str, rows: int, cols: int, seed: int = 0) -> Tensors:
    """A module in torchtune's spelling, of which the proof's second reading knows nothing."""
    return {f"{name}.lora_a.weight": rand(4, cols, seed=seed), f"{name}.lora_b.weight": rand(rows, 4, seed=seed + 1)}
