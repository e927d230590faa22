"""`python -m tests.bench`: full-size merges, ours and others', in turn; medians, ratios, JSON.

Suites: `main` (SDXL against rivals), `scale` (2, 7 and 24 GB), `algorithms`, `adapters` (three at once),
`dtypes` (fp32 ↔ bf16), `batch` (eight strengths at once), `start` (what a tiny merge and a large plan cost), `many`
(25 000 to 200 000 tensors, 100 to 1000 shards), `adapters_out` (combine, resize, extract, convert), `quantised`
(quantised bases and outputs beside plain bf16, and the codecs beside other libraries' quantisers), `host` (what a
device costs the processors), `remote` (a base from an object store beside one from disk), `gpu` (what the folds reach
of a CUDA device, and whole merges there).
About 60 GB of disk for all of them with `--keep`, else at most 55 GB at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from lora_merge.disk.volumes import file_system
from tests.bench import adapters_out, batch, gpu, host, inputs, many, quantised, remote
from tests.bench.measure import Cache, Run, prepare, run

GB: Final = 1e9
FIRST: Final = "first"  # begins the names of runs that have to hash their inputs, as nobody did before


@dataclass
class Bench:
    """The options, and what has been measured so far."""

    data: Path
    rounds: int
    caches: tuple[Cache, ...]
    size: str
    rivals: tuple[str, ...]
    keep: bool
    device: str = "cpu"
    small: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)

    def file(self, name: str) -> Path:
        """A place for an input."""
        return self.data / name

    @property
    def known(self) -> Path:
        """Where our runs remember what they have hashed."""
        return self.file("known")

    def forget(self) -> None:
        """As if no input had been seen before."""
        shutil.rmtree(self.known, ignore_errors=True)

    def ours(self, base: Path, *adapters: Path, options: Sequence[str] = (), device: str | None = None) -> list[str]:
        """Our command line; without a device, on the one that was asked for."""
        return [sys.executable, "-m", "lora_merge", str(base), *(f"{a}:0.7" for a in adapters), "-o",
                str(self.file("out.safetensors")), "--overwrite", "--json", "--device", device or self.device,
                *options]  # fmt: skip

    def rival(self, name: str, base: Path, adapter: Path) -> list[str]:
        """A rival's command line."""
        out = self.file("out.safetensors")
        if name == "cp":
            return ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "cp", str(base), str(out)]
        return [sys.executable, "-m", "tests.bench.rivals", name, str(base), str(adapter), str(out)]

    def drop(self, *names: str) -> None:
        """Delete inputs that no later suite needs, unless all are to be kept."""
        for name in names:
            if not self.keep:
                self.file(name).unlink(missing_ok=True)

    def compare(self, suite: str, commands: Mapping[str, Sequence[str]], files: Mapping[str, Sequence[Path]],
                cache: Cache) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Every command once a round, in turn, after a warm-up round; the first is what ratios are to."""
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for number in range(self.rounds + 1):
            for name, command in commands.items():
                self.file("out.safetensors").unlink(missing_ok=True)
                prepare(files[name], cache)
                if name.startswith(FIRST):
                    self.forget()
                one = run(command, known=self.known)
                if number or self.rounds == 0:
                    runs[name].append(one)
        self.file("out.safetensors").unlink(missing_ok=True)
        table = {name: _summary(some, files[name][0].stat().st_size) for name, some in runs.items()}
        first = next(iter(table.values()))
        for name, row in table.items():
            row["ratio"] = row["seconds"] / first["seconds"]
            self.results.append({"suite": suite, "cache": cache, "name": name, **row})
        _show(f"{suite}, {cache} cache", table)
        return table


def _summary(runs: Sequence[Run], size: int) -> dict[str, Any]:
    seconds = median(r.seconds for r in runs)
    row: dict[str, Any] = {
        "seconds": seconds, "all": [round(r.seconds, 3) for r in runs], "cpu": median(r.cpu for r in runs),
        "peak": max(r.peak for r in runs), "gb_per_s": size / GB / seconds,
    }  # fmt: skip
    report = _report(runs[-1].output)
    if report:
        row["stages"] = {k: round(v, 2) for k, v in report["stages"].items()}
    return row


def _report(output: str) -> dict[str, Any]:
    last = output.strip().rpartition("\n")[2]
    found = json.loads(last) if last.startswith("{") else {}
    return found if "stages" in found else {}


def _show(title: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{title}\n  {'':24}{'median s':>9}{'ratio':>8}{'GB/s':>7}{'cpu s':>8}{'peak GB':>9}  where the time went")
    for name, r in table.items():
        stages = " ".join(f"{k} {v}" for k, v in r.get("stages", {}).items())
        print(f"  {name:24}{r['seconds']:9.2f}{r['ratio']:8.2f}{r['gb_per_s']:7.2f}{r['cpu']:8.2f}"
              f"{r['peak'] / GB:9.2f}  {stages}", flush=True)  # fmt: skip


def main_suite(b: Bench) -> None:
    """One LoRA on one checkpoint, ours (with and without proof) and the rivals."""
    base, lora = (
        inputs.base(b.file(f"{b.size}.safetensors"), b.size),
        inputs.adapter(b.file(f"{b.size}-lora.safetensors"), b.size),
    )
    commands: dict[str, Sequence[str]] = {
        "lora-merge --no-verify": b.ours(base, lora, options=["--no-verify"]), "lora-merge": b.ours(base, lora),
        f"{FIRST} lora-merge": b.ours(base, lora),
        **{r: b.rival(r, base, lora) for r in b.rivals},
    }  # fmt: skip
    for cache in b.caches:
        b.compare("main", commands, dict.fromkeys(commands, (base, lora)), cache)


def scale(b: Bench) -> None:
    """Seconds and memory against the size of the checkpoint."""
    commands, files = {}, {}
    for size in ("sd1", "sdxl", "flux"):
        base, lora = (
            inputs.base(b.file(f"{size}.safetensors"), size),
            inputs.adapter(b.file(f"{size}-lora.safetensors"), size),
        )
        commands[size], files[size] = b.ours(base, lora, options=["--no-verify"]), (base, lora)
    for cache in b.caches:
        b.compare("scale", commands, files, cache)
    b.drop("flux.safetensors", "flux-lora.safetensors")


def algorithms(b: Bench) -> None:
    """Other formulas on every layer, against LoRA on every layer."""
    base = inputs.base(b.file(f"{b.size}.safetensors"), b.size)
    commands, files = {}, {}
    for name in inputs.SLOTS:
        adapter = inputs.adapter(b.file(f"{b.size}-{name}-every.safetensors"), b.size, name, every=True)
        commands[name], files[name] = b.ours(base, adapter, options=["--no-verify"]), (base, adapter)
    b.compare("algorithms", commands, files, b.caches[0])
    b.drop(*(f"{b.size}-{name}-every.safetensors" for name in inputs.SLOTS))


def adapters(b: Bench) -> None:
    """Three adapters at once against one."""
    base = inputs.base(b.file(f"{b.size}.safetensors"), b.size)
    three = [inputs.adapter(b.file(f"{b.size}-lora{i or ''}.safetensors"), b.size, seed=i) for i in range(3)]
    commands = {
        "one": b.ours(base, three[0], options=["--no-verify"]),
        "three": b.ours(base, *three, options=["--no-verify"]),
    }
    b.compare("adapters", commands, {"one": (base, three[0]), "three": (base, *three)}, b.caches[0])


def dtypes(b: Bench) -> None:
    """Other dtypes than the base's; GB/s here is of the base, so compare seconds per byte read and written."""
    lora = inputs.adapter(b.file(f"{b.size}-lora.safetensors"), b.size)
    bases = {d: inputs.base(b.file(f"{b.size}-{d}.safetensors"), b.size, d) for d in ("F16", "F32", "BF16")}
    cases = {"fp16 → fp16": ("F16", "keep", 4), "fp32 → bf16": ("F32", "bf16", 6), "bf16 → fp32": ("BF16", "fp32", 6),
             "fp32 → fp32": ("F32", "keep", 8)}  # fmt: skip
    commands = {n: b.ours(bases[d], lora, options=["--no-verify", "--dtype", to]) for n, (d, to, _) in cases.items()}
    table = b.compare("dtypes", commands, {n: (bases[d], lora) for n, (d, _, _) in cases.items()}, b.caches[0])
    first = table["fp16 → fp16"]["seconds"] / 4
    for name, (_, _, moved) in cases.items():
        print(f"  {name}: {table[name]['seconds'] / moved / first:.2f} × the time per byte moved")
    b.drop(*(f"{b.size}-{d}.safetensors" for d in bases))


def start(b: Bench) -> None:
    """What does not depend on the size: a tiny merge, and a plan of 40 GB with 3003 layers."""
    base, lora = inputs.tiny(b.data)
    commands: dict[str, Sequence[str]] = {
        "import torch": [sys.executable, "-c", "import torch"],
        "tiny merge": b.ours(base, lora, options=["--no-verify"]), "tiny merge, verified": b.ours(base, lora),
    }  # fmt: skip
    b.compare("start", commands, dict.fromkeys(commands, (base, lora)), "warm")
    large, alphas = inputs.large(b.data)
    code = ("import sys, time; from lora_merge.job import make_job; from lora_merge.engine.admission import plan_merge; "
            "from lora_merge.process import collect_rarely; collect_rarely(); "  # as the command does
            "t = time.perf_counter(); plan_merge(make_job(*sys.argv[1:])); print(time.perf_counter() - t)")  # fmt: skip
    times = [float(run([sys.executable, "-c", code, str(large), str(alphas)]).output) for _ in range(b.rounds + 1)][
        -max(1, b.rounds) :
    ]
    print(f"  planning 40 GB, 3003 layers: {median(times):.2f} s")
    b.results.append({"suite": "start", "name": "plan", "seconds": median(times)})


SUITES: Final[dict[str, Callable[[Bench], None]]] = {
    "main": main_suite, "algorithms": algorithms, "adapters": adapters, "dtypes": dtypes, "scale": scale,
    "start": start, "many": many.suite, "batch": batch.suite,
    "adapters_out": adapters_out.suite, "quantised": quantised.suite, "host": host.suite, "remote": remote.suite, "gpu": gpu.suite,
}  # fmt: skip


def machine(data: Path) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1),
            "gpu": ", ".join(gpu.names()) or "none", "file_system": file_system(data), "system": platform.platform(), "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d %H:%M")}  # fmt: skip


def main() -> None:
    """Parse the options, run the suites, write the JSON."""
    p = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)}; without one, all that can run here"
    )
    p.add_argument("--size", default="sdxl", choices=list(inputs.MODELS), help="the checkpoint of all suites but scale")
    p.add_argument("--rivals", default="cp,load-all,sd-mecha", help="a list with commas; empty for none")
    p.add_argument("--rounds", type=int, default=5, help="measured ones, after a warm-up; 0: the warm-up alone counts")
    p.add_argument(
        "--cache", default="warm", choices=["warm", "cold", "both"], help="whether inputs are in the page cache"
    )
    p.add_argument(
        "--device", default="cpu", help="where ours computes: cpu, cuda, cuda:0,cuda:1, …; gpu takes cuda for cpu"
    )
    p.add_argument(
        "--small",
        action="store_true",
        help="adapters_out: a part of SD1, in two minutes; quantised: 0.3 GB in place of 5",
    )
    p.add_argument("--data", type=Path, default=Path("bench-data"), help="where inputs are made and outputs written")
    p.add_argument("--keep", action="store_true", help="keep all inputs for the next time")
    p.add_argument("--json", type=Path, default=None, help="where results go; DATA/results.json without it")
    o = p.parse_args()
    unknown = [s for s in o.suites if s not in SUITES]
    if unknown:
        p.error(f"no suite is called {unknown[0]!r}; there are {', '.join(SUITES)}")
    o.data.mkdir(exist_ok=True)
    o.size = "sd1" if o.small else o.size
    caches: tuple[Cache, ...] = ("warm", "cold") if o.cache == "both" else (o.cache,)
    b = Bench(o.data.absolute(), o.rounds, caches, o.size, tuple(r for r in o.rivals.split(",") if r), o.keep,
              o.device, o.small)  # fmt: skip
    about = machine(b.data)
    print(" · ".join(f"{k} {v}" for k, v in about.items()))
    for name in o.suites or [s for s in SUITES if s != "gpu" or gpu.names()]:
        SUITES[name](b)
    path = o.json or b.file("results.json")
    path.write_text(json.dumps({"machine": about, "command": sys.argv[1:], "results": b.results}, indent=1))
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
