"""The table of scenes: each makes its inputs as files in a folder and returns the calls that read them.

Numbers follow from seeds. Only `record` reads this module; `replay` has the files and the calls as data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.algorithms import ALGORITHMS
from lora_merge.dtypes import GGUF_TYPES, QUANTISED_DTYPES
from tests.algorithms import row_files
from tests.corpus.calls import Call, printed
from tests.files.other_forms import FORMS as BY_LIBRARIES
from tests.files.quantised_forms import FORMS
from tests.files.torchao_forms import STORED as TORCHAO
from tests.kit import gguf_files, gguf_models, quantised
from tests.kit.adapters import kohya
from tests.kit.architectures import header
from tests.kit.dialects import in_drawn_order, matrices
from tests.kit.files import index, load, metadata, save
from tests.kit.layouts import few_blocks
from tests.kit.models import sd1
from tests.kit.planner_scenes import SCENES as PLANNER
from tests.kit.tensors import Tensors, rand

Options = Mapping[str, Any]

BASE = "base.safetensors"
WITH_BASE: Options = {"base": f"{{in}}/{BASE}"}
MERGED = "merged.safetensors"

# The parts of a scene: tables of options for each command.

MERGES: Mapping[str, Options] = {
    "plain": {}, "bf16": {"dtype": "bf16"}, "fp16": {"dtype": "fp16"}, "fp8": {"dtype": "fp8_e4m3fn"},
    "fp64": {"compute_dtype": "fp64"}, "compute-bf16": {"compute_dtype": "bf16"},
    "stochastic": {"dtype": "bf16", "rounding": "stochastic", "seed": 3}, "compose": {"method": "compose"},
    "no-metadata": {"no_metadata": True}, "title": {"title": "A title", "metadata": {"modelspec.author": "me"}},
    "card": {"card": True}, "parts": {"strength_for": {"re:attn|a|layers": 0.5}},
    "unproven": {"verify": False, "max_memory": "64MiB"},
}  # fmt: skip
METHODS: Mapping[str, Options] = {
    "mean": {"method": "mean"}, "ties": {"method": "ties", "density": 0.5, "elect": "count"},
    "dare": {"method": "dare", "density": 0.5, "seed": 2}, "dare_ties": {"method": "dare_ties", "density": 0.7},
    "della": {"method": "della", "density": 0.5, "epsilon": 0.1},
    "breadcrumbs": {"method": "breadcrumbs", "density": 0.6, "gamma": 0.1},
    "prune": {"method": "prune", "density": 0.3}, "slerp": {"method": "slerp", "t": 0.3},
    "karcher": {"method": "karcher"}, "consensus": {"method": "consensus", "agree": 2},
}  # fmt: skip
COMBINATIONS: Mapping[str, Options] = {
    "exact": {}, "rank-2": {"rank": 2}, "energy": {"rank": "energy:0.9", "max_rank": 6}, "full": {"algorithm": "full"},
    "auto": {"algorithm": "auto"}, "keep": {"alpha": "keep", "rank": "same"}, "fp16": {"dtype": "fp16", "rank": 3},
    "kohya": {"format": "kohya"}, "peft": {"format": "peft"},
    "part": {"exclude": ["re:1"], "rank_for": {"re:v": 1}, "rank": 3},
}  # fmt: skip
RESIZES: Mapping[str, Options] = {
    "rank-2": {"rank": 2}, "fro": {"rank": "fro:0.9"}, "sum": {"rank": "sum:0.8"}, "ratio": {"rank": "ratio:4"},
    "above": {"rank": "above:0.1"}, "size": {"rank": "size:20KiB"}, "alpha": {"rank": 3, "alpha": 1.5},
    "conv": {"rank": 3, "conv_rank": 1}, "fp16": {"rank": 2, "dtype": "bf16"}, "peft": {"rank": 2, "format": "peft"},
}  # fmt: skip
CONVERSIONS: Mapping[str, Options] = {
    **{name: {"to": name} for name in DIALECTS}, "lora": {"algorithm": "lora"}, "full": {"algorithm": "full"},
    "rank": {"rank": 2, "to": "kohya"}, "alpha": {"alpha": "rank", "to": "kohya"}, "bf16": {"dtype": "bf16"},
}  # fmt: skip
AVERAGES: Mapping[str, Options] = {
    "equal": {}, "ema": {"ema": 0.75}, "ema-to": {"ema": 0.5, "ema_to": 0.9}, "sigma": {"sigma_rel": 0.1},
    "weights": {"weights": "0.2,0.3,0.5"}, "factors": {"space": "factors"}, "rank": {"rank": 2, "format": "kohya"},
}  # fmt: skip
EXTRACTIONS: Mapping[str, Options] = {
    "rank-4": {"rank": 4}, "exact": {"rank": "exact"}, "noise": {"rank": "noise"}, "full": {"algorithm": "full"},
    "lokr": {"algorithm": "lokr", "factor": 4}, "kohya": {"rank": "energy:0.9", "format": "kohya"},
    "peft": {"rank": 4, "format": "peft"}, "skip": {"rank": 3, "others": "skip", "dtype": "fp16"},
}  # fmt: skip
IN_MEMORY: Mapping[str, Options] = {"plain": {}, "fp64": {"compute_dtype": "fp64"}, "bf16": {"dtype": "bf16"}}
LIVE: Mapping[str, Options] = {"host": {}, "compressed": {"keep": "compressed"}}


def output_of(options: Options, adapter: str = "") -> str:
    """The name of the output: that of a folder for PEFT."""
    to = options.get("to", options.get("format", ""))
    folder = to == "peft" or (not to and adapter and "." not in adapter)
    return "out" if folder else "out.safetensors"


def table(function: str, inputs: Sequence[str], rows: Mapping[str, Options], **more: Any) -> Iterator[Call]:
    """A call for each row of options."""
    for name, options in rows.items():
        output = more.get("output") or output_of(options, inputs[0].partition(":")[0])
        both = {**more.get("options", {}), **options}
        yield Call(f"{more.get('prefix', function)}-{name}", function, tuple(inputs), both, output)


def snapshots(folder: Path, adapter: str) -> list[str]:
    """Three snapshots of one training: the adapter, and two with other numbers near to its own."""
    names = [adapter]
    for n in (1, 2):
        copy = folder / f"{n}-{adapter}"
        (shutil.copytree if (folder / adapter).is_dir() else shutil.copyfile)(folder / adapter, copy)
        file = copy / "adapter_model.safetensors" if copy.is_dir() else copy
        tensors = load(file)
        for seed, (key, value) in enumerate(sorted(tensors.items())):
            if value.is_floating_point() and value.numel() > 1:
                tensors[key] = value + rand(*value.shape, seed=1000 * n + seed, scale=0.02)
        save(tensors, file, metadata(file))
        names.append(copy.name)
    return names


def merged(folder: Path, base: str, adapters: Sequence[str], output: str = MERGED) -> str:
    """A merged checkpoint as an input, with its recipe."""
    report = printed("merge", folder / base, *(folder / one for one in adapters), "-o", folder / output, "--json")
    assert (folder / output).exists(), report
    return output


# Scenes.


def planner(name: str, folder: Path) -> list[Call]:
    """Every command, with a small base and adapters in the names of several trainers."""
    scene = PLANNER[name](folder)
    refs = [f"{path.name}:{strength}" for path, strength in scene.adapters]
    more = {name: dict(value) if name == "strength_for" else value for name, value in scene.options.items()}
    two = refs if len(refs) > 1 else [refs[0], f"{refs[0].partition(':')[0]}:0.3"]
    adapters = [ref.partition(":")[0] for ref in refs]
    checkpoint = merged(folder, BASE, refs)
    single = [merged(folder, BASE, [ref], f"merged-{n}.safetensors") for n, ref in enumerate(refs)]
    trained = snapshots(folder, adapters[0])
    base = {"options": WITH_BASE}
    return [
        *table("merge", [BASE, *refs], MERGES, output="out.safetensors"),
        *table("merge", [BASE, *refs], {"stated": more} if more else {}, output="out.safetensors"),
        *table("merge", [BASE, *two], METHODS, output="out.safetensors"),
        *table("merge_state_dict", [BASE, *refs], IN_MEMORY, output="out.safetensors"),
        *table("merge_into", [BASE, *refs], LIVE, output="out.safetensors"),
        *table("combine", two, COMBINATIONS, **base),
        *table("combine", two, METHODS, prefix="combine-rank-4", options={**WITH_BASE, "rank": 4}),
        *table("combine", two, {"exact": {}, "rank-2": {"rank": 2}}, prefix="combine-without-base"),
        *table("resize", [refs[-1]], RESIZES, **base),
        *table("resize", [adapters[0]], {"rank-2": {"rank": 2}}, prefix="resize-without-base"),
        *(call for n, ref in enumerate(refs) for call in table("convert", [ref], CONVERSIONS, prefix=f"convert-{n}", **base)),
        *table("convert", [adapters[0]], {to: {"to": to} for to in ("kohya", "peft")}, prefix="convert-without-base"),
        *table("average", trained, AVERAGES, **base),
        *table("extract", [BASE, checkpoint], EXTRACTIONS),
        *table("unmerge", [checkpoint], {"recipe": {}, "bf16": {"dtype": "bf16"}}, output="out.safetensors"),
        *(call for n, one in enumerate(single) for call in table("unmerge", [one], {"recipe": {}}, prefix=f"unmerge-{n}")),
        *table("unmerge", [checkpoint, refs[-1]], {"last": {}}, output="out.safetensors"),
        *table("replay", [checkpoint], {"plain": {}}, output="out.safetensors"),
        *looks(checkpoint, refs),
    ]  # fmt: skip


def looks(checkpoint: str, refs: Sequence[str]) -> Iterator[Call]:
    """Commands that only print."""
    yield Call("verify", "verify", (checkpoint,), {"full": True}, "")
    yield Call("inspect-adapter", "inspect", (refs[0].partition(":")[0],), {"weights": True}, "")
    yield Call("inspect-fit", "inspect", (BASE, *refs), {}, "")
    yield Call("inspect-merged", "inspect", (checkpoint,), {"blocks": True}, "")
    yield Call("compare", "compare", (BASE, checkpoint), {}, "")


def row(name: str, folder: Path) -> list[Call]:
    """Two modules of one algorithm, in the files of its trainer."""
    job = row_files.write(name, folder)
    setting: Options = (
        {"setting": {key: json.loads(json.dumps(value)) for key, value in job.setting}} if job.setting else {}
    )
    adapter = job.adapters[0].path.name
    stated = {"options": setting}
    both = {"options": {**setting, **WITH_BASE}}
    return [
        *table("merge", [BASE, f"{adapter}:0.7"], {"bf16": {"dtype": "bf16"}}, output="out.safetensors", **stated),
        *table("merge_state_dict", [BASE, adapter], {"plain": {}}, output="out.safetensors", **stated),
        *table("merge_into", [BASE, f"{adapter}:0.5"], {"plain": {}}, output="out.safetensors", **stated),
        *table("combine", [adapter, f"{adapter}:0.5"], {"rank-2": {"rank": 2}}, **both),
        *table("resize", [f"{adapter}:0.5"], {"rank-3": {"rank": 3, "format": "kohya"}}, **both),
        *table(
            "convert", [adapter], {"lycoris": {"to": "lycoris"}, "full": {"to": "lycoris", "algorithm": "full"}}, **both
        ),
    ]


def form(name: str, folder: Path) -> list[Call]:
    """A base in a quantised format: its format is kept, or it becomes plain numbers; and what was tuned from it."""
    quantised.base(FORMS[name], folder / "base")
    base = "base" if FORMS[name].config else "base/model.safetensors"
    save(quantised.adapter(quantised.NAMES), folder / "adapter.safetensors")
    output = "out" if base == "base" else "out.safetensors"
    calls = [
        *table("merge", [base, "adapter.safetensors:0.8"], {"keep": {}, "bf16": {"dtype": "bf16"}}, output=output),
    ]
    if name in EXTRACTED:
        merged(folder, base, ["adapter.safetensors"], output)
        calls += table("extract", [base, output], {"rank-4": {"rank": 4, "format": "kohya"}})
        calls += table("unmerge", [output], {"recipe": {}}, output=f"{output}")
        calls += [Call("verify", "verify", (output,), {}, "")]
    return calls


EXTRACTED = ("ComfyUI nvfp4", "ComfyUI fp8 rows", "block fp8", "bitsandbytes nf4 doubled", "mlx 4 bit", "musubi groups")
"""One format of each way to lay codes and scales out; others share its decoder."""


def by_library(name: str, folder: Path) -> list[Call]:
    """One layer as quanto, HQQ, SDNQ or torchao stored it: its format is kept, or it becomes plain numbers."""
    layer = "model.layers.0.self_attn.q_proj"
    stored, mark = TORCHAO[name] if name in TORCHAO else (BY_LIBRARIES[name], "")
    tensors = {f"{layer}.{last}": value for last, value in stored.items() if last != "want"}
    method, _, kind = ("torchao", "", "") if mark else name.partition(" ")
    section = {"quant_method": method} | ({"weights_dtype": kind, "group_size": 32} if method == "sdnq" else {})
    (folder / "base").mkdir()
    marks = {f"{layer}.weight": mark, "tensor_names": "[]"} if mark else None
    save({**tensors, "model.norm.weight": rand(8)}, folder / "base" / "model.safetensors", marks)
    config = {"model_type": "x", "quantization_config": section}
    (folder / "base" / "config.json").write_text(json.dumps(config))
    rows, cols = stored["want"].shape
    stem = f"base_model.model.{layer}.lora"
    lora = {f"{stem}_A.weight": rand(4, cols, seed=1), f"{stem}_B.weight": rand(rows, 4, seed=2, scale=0.02)}
    save(lora, folder / "adapter.safetensors")
    options: dict[str, Options] = {"keep": {}, "bf16": {"dtype": "bf16"}}
    return [*table("merge", ["base", "adapter.safetensors:0.8"], options, output="out")]


def pickles(folder: Path) -> list[Call]:
    """Adapters and a base that torch pickled, and an adapter that is attached to its base."""
    base, tensors = sd1(torch.float32), kohya(sd1(torch.float32), te=False)
    save(base, folder / BASE)
    torch.save({"state_dict": base}, folder / "base.ckpt")
    torch.save(tensors, folder / "adapter.pt")
    attached = {f"base_model.model.{key}": value for key, value in attention().items()}
    save(attached, folder / "attached.safetensors")
    return [
        *table("merge", [BASE, "adapter.pt:0.8"], {"adapter": {}}, output="out.safetensors"),
        *table(
            "merge", ["base.ckpt", "adapter.pt:0.8"], {"base": {}, "bf16": {"dtype": "bf16"}}, output="out.safetensors"
        ),
        *table("convert", ["adapter.pt"], {"comfy": {"to": "comfy"}}, options=WITH_BASE),
        *table("resize", ["adapter.pt"], {"rank-2": {"rank": 2}}),
        *table("merge", ["attached.safetensors"], {"attached": {}}, output="out.safetensors"),
    ]


def attention() -> Tensors:
    """Layers of a language model as PEFT keeps them in memory: the weight, and the factors beside it."""
    tensors: Tensors = {}
    for n in range(2):
        name = f"model.layers.{n}.self_attn.q_proj"
        tensors |= {
            f"{name}.base_layer.weight": rand(16, 16, seed=n),
            f"{name}.lora_A.default.weight": rand(4, 16, seed=n),
        }
        tensors |= {f"{name}.lora_B.default.weight": rand(16, 4, seed=n + 5)}
    return tensors


def quantising(folder: Path) -> list[Call]:
    """A plain base that becomes a quantised one, a file and a folder."""
    layers = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    base = {f"{name}.weight": rand(128, 256, seed=n, scale=0.02).bfloat16() for n, name in enumerate(layers)}
    save(base | {"model.embed_tokens.weight": rand(64, 256).bfloat16()}, folder / BASE)
    (folder / "llama").mkdir()
    shutil.copyfile(folder / BASE, folder / "llama" / "model.safetensors")
    (folder / "llama" / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    lora: Tensors = {}
    for layer in layers[:2]:
        lora |= {f"{layer}.lora_A.weight": rand(4, 256, seed=5), f"{layer}.lora_B.weight": rand(128, 4, scale=0.01)}
    save(lora, folder / "adapter.safetensors")
    rows: dict[str, Options] = {}
    for kind in (kind for kind in QUANTISED_DTYPES if kind not in GGUF_TYPES):
        rows |= {kind: {"dtype": kind}, f"{kind}-drawn": {"dtype": kind, "rounding": "stochastic", "seed": 1}}
        rows |= {f"{kind}-none": {"dtype": kind, "keep_precision": ["none"]}}
    return [
        *table("merge", [BASE, "adapter.safetensors"], rows, output="out.safetensors"),
        *table("merge", ["llama", "adapter.safetensors"], rows, output="out", prefix="folder"),
    ]


KINDS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs")


def gguf(kind: str, folder: Path) -> list[Call]:
    """A GGUF base of one type."""
    gguf_files.write(folder / "base.gguf", "flux", gguf_models.flux(kind), {"general.file_type": 1})
    save(gguf_models.style(), folder / "style.safetensors")
    inputs = ["base.gguf", "style.safetensors:0.8"]
    rows: dict[str, Options] = {"keep": {}, "q8_0": {"dtype": "q8_0"}, "q4_k": {"dtype": "q4_k"}}
    calls = [*table("merge", inputs, rows, output="out.gguf"),
             *table("merge", inputs, {"bf16": {"dtype": "bf16"}}, output="out.safetensors")]  # fmt: skip
    if kind in ("F16", "Q8_0", "Q4_K"):
        merged(folder, inputs[0], inputs[1:], "merged.gguf")
        calls += table("extract", ["base.gguf", "merged.gguf"], {"rank-4": {"rank": 4, "format": "kohya"}})
        calls += table("unmerge", ["merged.gguf"], {"recipe": {}}, output="out.gguf")
        calls += [Call("verify", "verify", ("merged.gguf",), {"full": True}, "")]
        calls += table("combine", ["style.safetensors", "style.safetensors:0.5"], {"rank-3": {"rank": 3}},
                       options={"base": "{in}/base.gguf"})  # fmt: skip
    return calls


def to_gguf(folder: Path) -> list[Call]:
    """A checkpoint that becomes GGUF, of each type."""
    shapes = {name: values.shape for name, (values, _) in gguf_models.flux("F16").items()}
    shapes |= {"double_blocks.0.img_attn.proj.weight": (64, 256), "time_in.in_layer.weight": (8, 32)}
    tensors = {
        f"model.diffusion_model.{n}": rand(*shape, seed=i, scale=0.02) for i, (n, shape) in enumerate(shapes.items())
    }
    save({name: value.bfloat16() for name, value in tensors.items()}, folder / BASE)
    save(gguf_models.style(), folder / "style.safetensors")
    rows: dict[str, Options] = {kind: {"dtype": kind} for kind in ("keep", "fp16", "bf16", *KINDS)}
    return [*table("merge", [BASE, "style.safetensors"], rows, output="out.gguf")]


MODELS = {
    "native/flux-dev": "kohya", "native/sdxl": "onetrainer", "native/sd15": "diffusers", "native/sd3": "comfy",
    "native/hunyuanvideo": "kohya", "native/zimage-fused": "diffusers", "native/wan-t2v-14B": "comfy",
    "native/chroma": "lycoris", "native/lumina2": "comfy", "native/ltxv": "diffusers", "native/qwen-image": "kohya",
    "native/flux2": "diffusers", "native/auraflow": "comfy", "native/mochi": "diffusers", "diffusers/flux-dev": "comfy",
    "diffusers/sdxl": "kohya", "diffusers/sd15": "onetrainer", "diffusers/sd3": "ai-toolkit",
    "diffusers/wan-i2v-14B": "kohya", "diffusers/sana": "diffusers", "diffusers/pixart-sigma": "comfy",
    "diffusers/cog-video-x": "diffusers", "diffusers/hunyuan-video": "comfy", "diffusers/zimage": "kohya",
    "transformers/llama-3.2-1b": "peft", "transformers/qwen3-0.6b": "peft", "transformers/t5-small": "peft",
    "transformers/phi3-mini": "peft", "transformers/gpt2": "peft", "transformers/mixtral-8x7b": "peft",
}  # fmt: skip
"""Header of a full model → the dialect of its adapter."""


def small(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The model with few blocks, each axis a 64th of its length; of one that is no multiple of 64, its remainder too."""
    return {key: tuple(n // 64 + n % 64 if n > 64 else n for n in shape) for key, shape in few_blocks(shapes).items()}


def model(name: str, folder: Path) -> list[Call]:
    """An architecture in small, with an adapter in the names of one trainer, which become those of the others."""
    from lora_merge.models.names import names

    shapes = small(header(name))
    save({key: rand(*shape, seed=n).bfloat16() for n, (key, shape) in enumerate(shapes.items())}, folder / BASE)
    lora: Tensors = {}
    dialect = MODELS[name]
    modules = sorted(m for m in matrices(names(index(shapes)), dialect).items() if "embed" not in m[0])
    for n, (module, view) in enumerate(modules[:: max(1, len(modules) // 12)]):
        out, cols, *kernel = view.shape
        up, down = ("lora_up", "lora_down") if dialect in ("kohya", "lycoris", "onetrainer") else ("lora_B", "lora_A")
        lora |= {f"{module}.{down}.weight": rand(2, cols, *kernel, seed=n)}
        lora |= {f"{module}.{up}.weight": rand(out, 2, *(1 for _ in kernel), seed=n + 50)}
    adapter = "style.safetensors"
    if dialect == "peft":
        adapter = "style"
        (folder / adapter).mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
        (folder / adapter / "adapter_config.json").write_text(json.dumps(config))
        lora = {f"base_model.model.{key.removeprefix('base_model.model.')}": value for key, value in lora.items()}
        save(lora, folder / adapter / "adapter_model.safetensors")
    else:
        save(lora, folder / adapter)
    images = [to for to, row in DIALECTS.items() if to != dialect and not row.table]
    others = ["kohya"] if dialect == "peft" else in_drawn_order(name, images)[:3]
    return [
        *table("merge", [BASE, f"{adapter}:0.8"], {"plain": {}}, output="out.safetensors"),
        *table("convert", [adapter], {to: {"to": to} for to in others}, options=WITH_BASE),
        *table("convert", [adapter], {to: {"to": to} for to in others[:1]}, prefix="convert-without-base"),
        Call("inspect-fit", "inspect", (BASE, adapter), {}, ""),
    ]


def folders(folder: Path) -> list[Call]:
    """A model folder in two shards with side files, and a pipeline; an adapter of PEFT, and one attached to the base."""
    keys = [f"transformer_blocks.{n}.attn.to_{x}.weight" for n in range(2) for x in "qk"]
    tensors = {key: rand(24, 16, seed=n).bfloat16() for n, key in enumerate(keys)}
    network = folder / "pipeline" / "transformer"
    network.mkdir(parents=True)
    kinds = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "pipeline" / "model_index.json").write_text(json.dumps(kinds))
    (network / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    sharded(network, "diffusion_pytorch_model", tensors)
    lora: Tensors = {}
    for n, key in enumerate(keys):
        name = f"transformer.{key.removesuffix('.weight')}"
        lora |= {f"{name}.lora_A.weight": rand(2, 16, seed=n), f"{name}.lora_B.weight": rand(24, 2, seed=n + 9)}
    save(lora, folder / "style.safetensors")
    language(folder)
    checkpoint = merged(folder, "llama", ["peft:0.5"], "merged")
    return [
        *table("merge", ["pipeline", "style.safetensors"], {"keep": {}, "fp32": {"dtype": "fp32"}},
               output="out", prefix="pipeline"),
        *table("merge", ["pipeline/transformer", "style.safetensors"], {"keep": {}}, output="out", prefix="component"),
        *table("merge", ["llama", "peft:0.5"], {"keep": {}, "bf16": {"dtype": "bf16"},
                                            "no-card": {"card": False}, "base": {"tokenizer": "base"}},
               output="out"),
        *table("combine", ["peft", "peft:0.3"], COMBINATIONS, options={"base": "{in}/llama"}),
        *table("resize", ["peft"], RESIZES),
        *table("convert", ["peft"], CONVERSIONS, options={"base": "{in}/llama"}),
        *table("extract", ["llama", checkpoint], EXTRACTIONS, output="out"),
        *table("unmerge", [checkpoint], {"recipe": {}}, output="out"),
        *table("replay", [checkpoint], {"plain": {}}, output="out"),
        Call("verify", "verify", (checkpoint,), {"full": True}, ""),
    ]  # fmt: skip


def sharded(folder: Path, stem: str, tensors: Tensors) -> None:
    """Two shards and their index."""
    names = [f"{stem}-0000{n + 1}-of-00002.safetensors" for n in range(2)]
    for n, name in enumerate(names):
        save({key: tensors[key] for key in [*tensors][n::2]}, folder / name)
    weight_map = {key: names[n % 2] for n, key in enumerate(tensors)}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index_file = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index_file))


def language(folder: Path) -> None:
    """A Llama in shards, with a tokenizer, and a PEFT folder for it."""
    llama, adapter = folder / "llama", folder / "peft"
    llama.mkdir()
    adapter.mkdir()
    tensors: Tensors = {"model.embed_tokens.weight": rand(32, 16), "lm_head.weight": rand(32, 16, seed=1)}
    lora: Tensors = {}
    for n in range(2):
        layer = f"model.layers.{n}"
        tensors |= {
            f"{layer}.input_layernorm.weight": rand(16, seed=n),
            f"{layer}.mlp.up_proj.weight": rand(48, 16, seed=n),
        }
        for i, part in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            name = f"{layer}.self_attn.{part}"
            tensors[f"{name}.weight"] = rand(16, 16, seed=10 * n + i)
            lora[f"base_model.model.{name}.lora_A.weight"] = rand(4, 16, seed=10 * n + i + 1)
            lora[f"base_model.model.{name}.lora_B.weight"] = rand(16, 4, seed=10 * n + i + 2)
    sharded(llama, "model", tensors)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
              "num_attention_heads": 2, "hidden_size": 16}  # fmt: skip
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"vocab": {"a": 0, "b": 1}}}))
    (llama / "LICENSE").write_text("A licence.\n")
    save(lora, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"k_proj": 9},
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "base_model_name_or_path": "llama"}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def slug(name: str) -> str:
    """A name for a folder."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


SCENES: Mapping[str, Callable[[Path], list[Call]]] = {
    **{f"trainer-{name}": partial(planner, name) for name in PLANNER},
    "folders": folders,
    "pickles": pickles,
    "quantising": quantising,
    "to-gguf": to_gguf,
    **{f"gguf-{kind.lower()}": partial(gguf, kind) for kind in ("F16", "BF16", "F32", *map(str.upper, KINDS), "NVFP4")},
    **{f"model-{slug(name)}": partial(model, name) for name in MODELS},
    **{f"quantised-{slug(name)}": partial(form, name) for name in FORMS},
    **{f"quantised-by-{slug(name)}": partial(by_library, name) for name in (*BY_LIBRARIES, *TORCHAO)},
    **{f"algorithm-{slug(name)}": partial(row, name) for name in ALGORITHMS},
}
"""Name → what makes the inputs and returns the calls."""
