"""The command `lora-merge demo`: makes a small model and three adapters, merges two as users do, checks the result.

Offline and quick. The check is written out here once more in fp64, apart from everything that merges.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ..disk.destination import failures
from ..disk.publish import replacing
from ..dtypes import StoredTensor
from ..engine.tensor_moves import FILE_DTYPES, host
from ..engine.tensors import view_bytes
from ..errors import MergeError, UsageError, VerificationFailed
from ..files.safetensors import layout, parse_file
from ..paths import is_file, nearest, typed
from ..process import command

WIDTHS: Final = (16, 32, 64, 64)  # channels per level; the real model has 320, 640, 1280, 1280
TEXT_WIDTH: Final = 768  # width of the text encoder, as in the real model: adapters are known by it
TEXT_LAYERS: Final = 2  # layers of the text encoder; the real one has 12
UNET: Final = "model.diffusion_model."
TEXT: Final = "cond_stage_model.transformer."
RANK: Final = 8
DEMO_ALPHA: Final = 4.0

DEMO_ENTRY: Final = MappingProxyType({"lora_merge.demo": "1"})
"""In the header of every file that is made here; a merge keeps that of its base."""

BASE, STYLE, DETAIL, INK, MERGED = (f"{n}.safetensors" for n in ("base", "style", "detail", "ink", "merged"))

STRENGTHS: Final = MappingProxyType({STYLE: 0.8, INK: 0.5})
"""The adapters that the demo merges, each with its strength."""

COMMAND: Final = [BASE, *(f"{name}:{strength:g}" for name, strength in STRENGTHS.items()), "-o", MERGED]

JOBS: Final = "jobs.yaml"
JOBS_TEXT: Final = f"""\
# Every adapter of the list at every strength: four merges. Run it with:  lora-merge batch {JOBS}
version: 1
jobs:
  - base: {BASE}
    adapters: ["{{lora}}:{{strength}}"]
    matrix:
      lora: [{STYLE}, {INK}]
      strength: [0.5, 1]
    output: "out/{{lora.stem}}-{{strength}}.safetensors"
"""

FURTHER: Final = (
    (["inspect", BASE, STYLE], "does it match the model, and in which blocks?"),
    ([BASE, f"{STYLE}:0.8,IN04-IN08=0.5", "-o", "half.safetensors"], "half the strength in some blocks"),
    (["batch", JOBS], "four merges in one run"),
)
"""Commands that work on the demo's files, with what they are for."""

Tensors = dict[str, Tensor]


def demo(folder: Path, echo: Callable[[str], None]) -> None:
    """Run the whole demonstration in `folder`; VerificationFailed if the result is not what it must be."""
    output, here = folder / MERGED, nearest(str(folder))
    if is_file(folder):
        raise UsageError(
            "the demo writes a folder, and this is a file", str(folder), "name another folder: `lora-merge demo DIR`"
        )
    files = write_files(folder)
    echo(f"New in {here}: a small model with the layers of Stable Diffusion 1.5 and three adapters.")
    echo("")
    echo(f"$ cd {typed([here])}")
    echo(f"$ lora-merge {typed(COMMAND)}")
    program = [*command("lora_merge.__main__", "start"), *COMMAND]
    code = subprocess.run(program, cwd=folder, check=False).returncode
    if code:
        raise SystemExit(code)  # the error is printed
    echo("")
    if wrong := _wrong(files, output):
        raise VerificationFailed(f"{wrong} values of the demo's result are wrong", str(output),
                                 "report this with lora-merge doctor's text")  # fmt: skip
    echo(f"Right: every value of {MERGED} is the exact sum, computed separately in fp64, to within one step of fp16.")
    echo("")
    echo("Next, on these files, and then the same on your own:")
    echo(f"  cd {typed([here])}")
    for words, purpose in FURTHER:
        echo(f"  lora-merge {typed(words)}")
        echo(f"    {purpose}")


def write_files(folder: Path) -> dict[str, Tensors]:
    """Write the demo's inputs, remove the output of an earlier demo, and return the tensors of each input."""
    for name in (BASE, STYLE, DETAIL, INK, MERGED, JOBS):
        _require_ours(folder / name)
    files = {BASE: _model(torch.Generator().manual_seed(1))}
    for n, (name, make) in enumerate({STYLE: _lora, DETAIL: _lora_of_the_unet, INK: _loha}.items(), 2):
        files[name] = make(torch.Generator().manual_seed(n))
    for name, tensors in files.items():
        _save(tensors, folder / name, METADATA[name])
    jobs = folder / JOBS
    with failures(jobs), replacing(jobs, overwrite=True) as part:
        part.write_text(JOBS_TEXT, encoding="utf-8")
    (folder / MERGED).unlink(missing_ok=True)
    return files


def _trained(module: str, **entries: str) -> dict[str, str]:
    """Return the metadata of an adapter as its trainer writes them."""
    return {
        "ss_base_model_version": "sd_v1", "ss_sd_model_name": BASE, "ss_network_module": module,
        "ss_network_dim": str(RANK), "ss_network_alpha": str(DEMO_ALPHA), **entries, **DEMO_ENTRY,
    }  # fmt: skip


METADATA: Final[Mapping[str, dict[str, str]]] = MappingProxyType({
    BASE: {"format": "pt", **DEMO_ENTRY},
    STYLE: _trained("networks.lora", ss_output_name="style", **{"modelspec.trigger_phrase": "demo style"}),
    DETAIL: _trained("networks.lora", ss_output_name="detail"),
    INK: _trained("lycoris.kohya", ss_output_name="ink", ss_network_args='{"algo": "loha"}'),
})  # fmt: skip


def _transformers() -> Iterator[tuple[str, str, int]]:
    """Yield (name in diffusers, key in the checkpoint, level) of every transformer of the U-Net."""
    for level in range(3):
        yield from (
            (f"down_blocks_{level}_attentions_{n}", f"input_blocks.{3 * level + n + 1}.1", level) for n in range(2)
        )
    yield "mid_block_attentions_0", "middle_block.1", 3
    for level in range(3):
        yield from (
            (f"up_blocks_{3 - level}_attentions_{n}", f"output_blocks.{11 - 3 * level - 2 + n}.1", level)
            for n in range(3)
        )


def _layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name as kohya writes it, key in the checkpoint, shape) of every layer that is trained."""
    for name, key, level in _transformers():
        width, inner = WIDTHS[level], "transformer_blocks.0"
        yield f"lora_unet_{name}_proj_in", f"{UNET}{key}.proj_in", (width, width, 1, 1)
        for attention, inputs in (("attn1", width), ("attn2", TEXT_WIDTH)):
            for layer, size in (("to_q", width), ("to_k", inputs), ("to_v", inputs), ("to_out.0", width)):
                path = f"{inner}.{attention}.{layer}"
                yield f"lora_unet_{name}_{path.replace('.', '_')}", f"{UNET}{key}.{path}", (width, size)
        for layer, shape in (("ff.net.0.proj", (8 * width, width)), ("ff.net.2", (width, 4 * width))):
            path = f"{inner}.{layer}"
            yield f"lora_unet_{name}_{path.replace('.', '_')}", f"{UNET}{key}.{path}", shape
        yield f"lora_unet_{name}_proj_out", f"{UNET}{key}.proj_out", (width, width, 1, 1)
    for n in range(TEXT_LAYERS):
        for layer in ("q_proj", "k_proj", "v_proj", "out_proj"):
            path = f"text_model.encoder.layers.{n}.self_attn.{layer}"
            yield f"lora_te_{path.replace('.', '_')}", f"{TEXT}{path}", (TEXT_WIDTH, TEXT_WIDTH)


def _model(random: torch.Generator) -> Tensors:
    """Return a checkpoint in fp16 with the layers above and some that nobody trains."""
    shapes = {f"{key}.weight": shape for _, key, shape in _layers()} | {
        f"{UNET}input_blocks.0.0.weight": (WIDTHS[0], 4, 3, 3),
        f"{UNET}out.2.weight": (4, WIDTHS[0], 3, 3),
        f"{TEXT}text_model.embeddings.token_embedding.weight": (512, TEXT_WIDTH),
        "first_stage_model.decoder.conv_out.weight": (3, WIDTHS[0], 3, 3),
    }
    return {key: host(torch.randn(shape, generator=random) * 0.02, torch.float16) for key, shape in shapes.items()}


def _lora(random: torch.Generator, prefix: str = "") -> Tensors:
    """Return a LoRA of every layer, in fp16; convolutions have a 1×1 up."""
    tensors: Tensors = {}
    for name, _, (out, *rest) in _layers():
        if name.startswith(prefix):
            tensors[f"{name}.lora_up.weight"] = torch.randn(out, RANK, *[1] * (len(rest) - 1), generator=random) * 0.02
            tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, *rest, generator=random) * 0.1
            tensors[f"{name}.alpha"] = torch.tensor(DEMO_ALPHA)
    return {key: host(t, torch.float16) for key, t in tensors.items()}


def _lora_of_the_unet(random: torch.Generator) -> Tensors:
    return _lora(random, "lora_unet_")


def _loha(random: torch.Generator) -> Tensors:
    """Return a LoHa of the cross-attention, in bf16."""
    tensors: Tensors = {}
    for name, _, (out, *rest) in _layers():
        if "attn2" in name:
            for k in ("1", "2"):
                tensors[f"{name}.hada_w{k}_a"] = torch.randn(out, RANK, generator=random) * 0.1
                tensors[f"{name}.hada_w{k}_b"] = torch.randn(RANK, *rest, generator=random) * 0.1
            tensors[f"{name}.alpha"] = torch.tensor(DEMO_ALPHA)
    return {key: host(t, torch.bfloat16) for key, t in tensors.items()}


def _wrong(files: Mapping[str, Tensors], output: Path) -> int:
    """Return how many values of the output are neither the rounded fp64 result nor the next number to it."""
    names, wrong = {f"{key}.weight": name for name, key, _ in _layers()}, 0
    for key, info in parse_file(output).tensors.items():
        weight = files[BASE][key]
        exact = host(weight, torch.float64)
        for adapter, strength in STRENGTHS.items():
            exact = exact + strength * _delta(names.get(key, ""), files[adapter], weight)
        values, rounded = _load(info), host(exact, torch.float16)
        steps = values.view(torch.int16).int() - rounded.view(torch.int16).int()
        wrong += int(((steps.abs() > 1) & (values != rounded)).sum())
    return wrong


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
    return torch.zeros_like(weight, dtype=torch.float64)


def _require_ours(path: Path) -> None:
    """Raise UsageError if a file with this name is not from an earlier demo."""
    if os.path.lexists(path) and not _is_ours(path):
        raise UsageError("a file of yours has the name of one that the demo makes", str(path),
                         "name another folder: `lora-merge demo DIR`")  # fmt: skip


def _is_ours(path: Path) -> bool:
    try:
        if path.name == JOBS:
            return path.read_text(encoding="utf-8") == JOBS_TEXT
        return parse_file(path).metadata.items() >= DEMO_ENTRY.items()
    except (MergeError, OSError, ValueError):
        return False


def _save(tensors: Tensors, path: Path, metadata: Mapping[str, str]) -> None:
    entries = [(key, FILE_DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()]
    with failures(path), replacing(path, overwrite=True) as part, part.open("wb") as f:
        f.write(layout(entries, metadata, 0))
        for t in tensors.values():
            f.write(t.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _load(info: StoredTensor) -> Tensor:
    with info.file.open("rb") as f:
        f.seek(info.offset)
        return view_bytes(memoryview(bytearray(f.read(info.nbytes))), info.dtype, info.shape)
