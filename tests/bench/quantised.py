"""Quantised bases and outputs beside the plain bf16 merge of the same weights, in one run; then the codecs alone.

Every matrix is changed. For each format: out of bf16, kept, and back to bf16. Processor seconds are without those of
a tiny merge, so that they grow with the bytes; a kept base is compared by the byte of its file, the others as a whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tests.bench import inputs
from tests.bench.inputs import Table
from tests.bench.measure import Run, prepare, run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

FLUX: Final = ("double_blocks.0.img", "img_in")
"""The part of Flux that is the small image model: 0.3 GB in bf16."""

UNET: Final = "model.diffusion_model."
"""The part of SDXL that is the large image model: 5.1 GB in bf16. A GGUF file holds no other."""

LAYERS: Final = {True: 4, False: 20}  # of the language model, with 38 M numbers each
CONFIG: Final = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
TOLD: Final = 0.2  # seconds beyond those of a tiny merge, below which no ratio is told

FILE: Final = {"fp8_scaled": ".safetensors", "fp8_e4m3fn": ".safetensors", "int8": ".safetensors", "mxfp8": ".safetensors", "nvfp4": ".safetensors",
               "q8_0": ".gguf", "q4_k": ".gguf"}  # fmt: skip
FOLDER: Final = {"fp8_block": "", "nf4": ""}
KEPT: Final = {"fp8_scaled": 1.5, "fp8_e4m3fn": 1.5, "fp8_block": 1.5, "nvfp4": 3.0, "q4_k": 3.0}
MADE: Final = {"fp8_scaled": 2.0, "fp8_e4m3fn": 2.0, "fp8_block": 2.0}
"""Format → the most times that plain bf16 takes, for a kept base by the byte, for a new one as a whole."""


@dataclass(frozen=True)
class Case:
    """One merge: of a base, into an output."""

    name: str
    base: Path
    out: Path
    dtype: str
    bound: float | None = None
    by_byte: bool = False


def suite(b: Bench) -> None:
    """Measure both models, then the codecs."""
    tiny = _measured(b, Case("start", *_tiny(b)), [inputs.tiny(b.data)[1]])
    for make, formats in ((_image_model, FILE), (_language_model, FOLDER)):
        base, lora = make(b)
        plain: dict[str, Any] = {}
        print(f"\nquantised, {base.name}: {'seconds':>12}{'cpu s':>8}{'GB':>7}{'time':>14}{'cpu':>7}  of bf16"
              f"{'peak GB':>10}")  # fmt: skip
        for case in _cases(b, base, formats):
            runs = [_measured(b, case, [lora]) for _ in range(b.rounds + 1)]
            row = _row(case, runs[1:] or runs, tiny)
            plain = plain or row
            _tell(b, case, row, plain)
        b.drop(*(f"{base.name}-{name}{suffix}" for name, suffix in formats.items() if suffix), lora.name)
    _codecs(b)


def _cases(b: Bench, base: Path, formats: Mapping[str, str]) -> Iterator[Case]:
    """Yield the cases; the bases of later ones are outputs of earlier ones."""
    out = b.file("quantised-out" + (".safetensors" if base.is_file() else ""))
    yield Case("bf16", base, out, "keep")
    for name, suffix in formats.items():
        own = b.file(f"{base.name}-{name}{suffix}")
        yield Case(f"bf16 → {name}", base, own, name, MADE.get(name))
        yield Case(f"{name} → {name}", own, b.file(f"quantised-out{suffix}"), "keep", KEPT.get(name), by_byte=True)
        yield Case(f"{name} → bf16", own, out, "bf16")


def _measured(b: Bench, case: Case, adapters: Sequence[Path]) -> Run:
    prepare([f for f in (*_files(case.base), *adapters)], b.caches[0])
    return run([sys.executable, "-m", "lora_merge", str(case.base), *(f"{a}:0.7" for a in adapters), "-o", str(case.out),
                "--overwrite", "--json", "--no-verify", "--device", b.device, "--dtype", case.dtype], known=b.known)  # fmt: skip


def _row(case: Case, runs: Sequence[Run], start: Run) -> dict[str, Any]:
    nbytes = sum(f.stat().st_size for f in _files(case.base))
    return {
        "seconds": median(r.seconds for r in runs), "cpu": median(r.cpu for r in runs), "peak": max(r.peak for r in runs),
        "bytes": nbytes, "beyond_start": [median(r.seconds for r in runs) - start.seconds,
                                          median(r.cpu for r in runs) - start.cpu],
    }  # fmt: skip


def _tell(b: Bench, case: Case, row: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    bytes_of_plain = plain["bytes"] / row["bytes"] if case.by_byte else 1.0
    ratios = [
        own / first * bytes_of_plain if min(own, first) > TOLD else None
        for own, first in zip(row["beyond_start"], plain["beyond_start"], strict=True)
    ]
    time, cpu = ("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    target = f"≤ {case.bound:g}{' by the byte' if case.by_byte else ''}" if case.bound else ""
    print(f"  {case.name:24}{row['seconds']:10.2f}{row['cpu']:8.2f}{row['bytes'] / 1e9:7.2f}{time:>14}"
          f"{cpu:>7}{row['peak'] / 1e9:19.2f}  {target}", flush=True)  # fmt: skip
    b.results.append({"suite": "quantised", "name": case.name, **row, "ratio": ratios[0], "cpu_ratio": ratios[1],
                      "by_byte": case.by_byte, "bound": case.bound})  # fmt: skip


def _codecs(b: Bench) -> None:
    """Tell what the codecs alone take, beside the quantisers of other libraries on the same numbers."""
    told = run([sys.executable, "-m", "tests.bench.codecs", "1024" if b.small else "3072"], threads=1)
    print(f"\ncodecs, one thread, ns a number {'encode':>8}{'decode':>9}")
    for row in json.loads(told.output.strip().rpartition("\n")[2]):
        for who in (k for k in row if k not in ("format", "without")):
            encode, decode = (f"{v:9.2f}" if v is not None else "        –" for v in row[who].values())
            print(f"  {row['format'] if who == 'ours' else '':14}{who:16}{encode}{decode}")
        if "without" in row:
            print(f"{'':16}beside none: {row['without']}")
        b.results.append({"suite": "quantised", "name": f"codec {row['format']}", **row})


def _files(base: Path) -> list[Path]:
    return [base] if base.is_file() else sorted(base.glob("*.safetensors"))


def _tiny(b: Bench) -> tuple[Path, Path, str]:
    return inputs.tiny(b.data)[0], b.file("quantised-out.safetensors"), "keep"


def _image_model(b: Bench) -> tuple[Path, Path]:
    """Make an image model, a part of Flux or the U-Net of SDXL, and an adapter of all its matrices."""
    name, table, starts, prefix = (
        ("flux-part", "native/flux-dev", FLUX, "") if b.small else ("sdxl-unet", "single-file/sdxl", (UNET,), UNET)
    )
    shapes = {k: ("BF16", s) for k, s in inputs.table(table).items() if k.startswith(starts)}
    return _model(b, shapes, name, lambda key: "lora_unet_" + key.removeprefix(prefix).replace(".", "_"))


def _language_model(b: Bench) -> tuple[Path, Path]:
    """Make a folder of a language model, and an adapter of all its matrices."""
    weights: Table = {
        f"model.layers.{i}.{name}.weight": ("BF16", shape)
        for i in range(LAYERS[b.small]) for name, shape in inputs.LLM.items()
    }  # fmt: skip
    file, lora = _model(b, weights, "llm-part", str)
    folder = b.file("llm-part")
    folder.mkdir(exist_ok=True)
    file.rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder, lora


def _model(b: Bench, weights: Table, name: str, called: Callable[[str], str]) -> tuple[Path, Path]:
    """Make a checkpoint, and an adapter of its matrices. `called`: what the adapter calls a module."""
    adapter: Table = {}
    for key, (_, shape) in weights.items():
        if len(shape) == 2:
            for slot, size in inputs.SLOTS["lora"](shape, 16).items():
                adapter[f"{called(key.removesuffix('.weight'))}.{slot}"] = ("F16", size)
    lora = inputs.trained(b.file(f"{name}-lora.safetensors"), adapter, 16)
    return inputs.write(b.file(f"{name}.safetensors"), weights), lora
