"""The suite `many`: what 25 000 to 200 000 nearly empty tensors cost, and 100 to 1000 shards: all of it bookkeeping.

The names are those of DeepSeek-V3: 256 experts a layer, with an adapter on the attention, or on all experts. Two runs each: the plan
alone, and the whole merge with its proof. The exponent tells the growth from the row before: 1 is linear.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from itertools import chain, count, islice
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench import inputs
from tests.bench.measure import Run, prepare, run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

MIB: Final = 2**20
EXPERTS: Final = 256
ATTENTION: Final = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
CASES: Final = {
    "tensors": ((25_000, 25), (50_000, 50), (100_000, 100), (200_000, 200)),
    "shards": ((20_000, 100), (20_000, 300), (20_000, 1000)),
    "modules": ((25_000, 25), (50_000, 50), (100_000, 100)),
}
"""What grows → (tensors, shards) of every row; where it is modules, the adapter is one on all experts."""

PLAN: Final = (
    "import sys; from lora_merge.process import collect_rarely; collect_rarely(); "
    "from lora_merge.job import make_job; from lora_merge.engine.admission import plan_merge; plan_merge(make_job(*sys.argv[1:]))"
)


def names(tensors: int) -> list[str]:
    """So many names of weights."""
    return list(islice(chain(["model.embed_tokens.weight"], chain.from_iterable(map(_layer, count()))), tensors))


def _layer(number: int) -> Iterator[str]:
    layer = f"model.layers.{number}"
    yield f"{layer}.input_layernorm.weight"
    yield from (f"{layer}.self_attn.{name}.weight" for name in ATTENTION)
    yield from (f"{layer}.mlp.experts.{e}.{name}.weight" for e in range(EXPERTS) for name in PROJECTIONS)


def model(folder: Path, tensors: int, shards: int, part: str = "self_attn") -> tuple[Path, Path]:
    """A base of weights of four numbers each, and an adapter on a part of its layers; made unless they are there."""
    base, adapter = folder / f"many-{tensors}-{shards}", folder / f"many-{tensors}-{part}.safetensors"
    weights = names(tensors)
    of_adapter: inputs.Table = {}
    for name in weights:
        if f".{part}." in name:
            stem = name.removesuffix(".weight")
            of_adapter[f"{stem}.lora_A.weight"] = ("BF16", (1, 2))
            of_adapter[f"{stem}.lora_B.weight"] = ("BF16", (2, 1))
    inputs.write(adapter, of_adapter)
    if (base / "config.json").exists():
        return base, adapter
    base.mkdir(exist_ok=True)
    homes: dict[str, str] = {}
    for n in range(shards):
        some = weights[n * tensors // shards : (n + 1) * tensors // shards]
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        inputs.write(base / file, {name: ("BF16", (2,) if "norm" in name else (2, 2)) for name in some})
        homes |= dict.fromkeys(some, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (base / "config.json").write_text(json.dumps(config))
    return base, adapter


def suite(b: Bench) -> None:
    """Seconds (wall and processor), peak memory and growth of plans and merges, against tensors and shards."""
    for grows, cases in CASES.items():
        print(f"\nmany {grows}, least of {max(1, b.rounds)}\n  {'tensors':>9}{'shards':>8}"
              f"{'plan s':>9}{'cpu s':>7}{'MiB':>6}{'growth':>8}{'merge s':>10}{'cpu s':>7}{'MiB':>6}{'growth':>8}")  # fmt: skip
        before: dict[str, tuple[int, float]] = {}
        part = "experts" if grows == "modules" else "self_attn"
        for tensors, shards in cases:
            line, size = f"  {tensors:9}{shards:8}", shards if grows == "shards" else tensors
            for name, one in _measured(b, tensors, shards, part).items():
                growth = exponent(*before[name], size, one.cpu) if name in before else None
                before[name] = size, one.cpu
                line += f"{one.seconds:{9 if name == 'plan' else 10}.2f}{one.cpu:7.2f}{one.peak / MIB:6.0f}"
                line += f"{growth:8.2f}" if growth is not None else " " * 8
                b.results.append({"suite": "many", "name": f"{name}, {tensors} in {shards}, {part}", "seconds": one.seconds,
                                  "cpu": one.cpu, "peak": one.peak, "growth": growth})  # fmt: skip
            print(line, flush=True)


def _measured(b: Bench, tensors: int, shards: int, part: str) -> dict[str, Run]:
    """The best of every kind of run, in turn."""
    base, lora = model(b.data, tensors, shards, part)
    out = b.file("many-out")
    plan = [sys.executable, "-c", PLAN, str(base), str(lora), str(out)]
    merge = [sys.executable, "-m", "lora_merge", str(base), f"{lora}:0.7", "-o", str(out), "--json"]
    runs: dict[str, list[Run]] = {"plan": [], "merge": []}
    prepare([*base.glob("*.safetensors"), lora], "warm")
    for _ in range(max(1, b.rounds)):
        for name, command in (("plan", plan), ("merge", merge)):
            shutil.rmtree(out, ignore_errors=True)
            runs[name].append(run(command, known=b.known))
    shutil.rmtree(out, ignore_errors=True)
    if not b.keep:
        shutil.rmtree(base)
        lora.unlink()
    return {name: min(some, key=lambda r: r.cpu) for name, some in runs.items()}


def exponent(size: int, cost: float, larger: int, more: float) -> float:
    """The power of the size with which the cost grows."""
    return log(more / cost) / log(larger / size)
