"""Eight strengths of one LoRA on SD1.5: one batch against eight single merges, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from tests.bench import inputs
from tests.bench.measure import Cache, Run, prepare, run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

STRENGTHS: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


def suite(b: Bench) -> None:
    """Times, peak memory and their ratios, for each state of the page cache, with proof of the outputs and without."""
    base, lora = b.file("sd15.safetensors"), b.file("sd15-lora.safetensors")
    if not base.exists():
        inputs.base(base, "sd1")
    if not lora.exists():
        inputs.adapter(lora, "sd1")
    print(f"\nbatch: {len(STRENGTHS)} strengths, base {base.stat().st_size / 1e9:.2f} GB")
    for cache in b.caches:
        for options in ([], ["--no-verify"]):
            together, alone = [], []
            for _ in range(b.rounds + 1):
                together.append(_together(b, base, lora, cache, verify=not options))
                alone.append(_alone(b, base, lora, cache, options))
            _tell(b, cache, bool(options), together[1:] or together, alone[1:] or alone)
    b.drop(base.name, lora.name)


def _together(b: Bench, base: Path, lora: Path, cache: Cache, *, verify: bool) -> Run:
    jobs = b.file("jobs.yaml")
    jobs.write_text(json.dumps({
        "version": 1, "defaults": {"device": b.device, "verify": verify},
        "jobs": [{"base": str(base), "adapters": [{"path": str(lora), "strength": "{s}"}],
                  "matrix": {"s": list(STRENGTHS)}, "output": "out-{s}.safetensors"}],
    }))  # fmt: skip
    _clear(b)
    prepare([base, lora], cache)
    b.forget()
    return run([sys.executable, "-m", "lora_merge", "batch", str(jobs), "--json"], known=b.known)


def _alone(b: Bench, base: Path, lora: Path, cache: Cache, options: list[str]) -> Run:
    _clear(b)
    prepare([base, lora], cache)
    b.forget()
    runs = [
        run([sys.executable, "-m", "lora_merge", str(base), f"{lora}:{s}", "-o", str(b.file(f"out-{s}.safetensors")),
             "--json", "--device", b.device, *options], known=b.known)
        for s in STRENGTHS
    ]  # fmt: skip
    return Run(sum(r.seconds for r in runs), sum(r.cpu for r in runs), max(r.peak for r in runs), "")


def _clear(b: Bench) -> None:
    for old in b.data.glob("out-*.safetensors"):
        old.unlink()


def _tell(b: Bench, cache: Cache, unproven: bool, together: list[Run], alone: list[Run]) -> None:  # noqa: FBT001
    name = f"{cache}, {'not verified' if unproven else 'verified'}"
    ours, single = median(r.seconds for r in together), median(r.seconds for r in alone)
    peak, peak_single = max(r.peak for r in together), max(r.peak for r in alone)
    print(f"  {name:22} batch {ours:6.1f} s  eight runs {single:6.1f} s  ratio {ours / single:.2f}  "
          f"peak {peak / 1e6:.0f} MB against {peak_single / 1e6:.0f} MB")  # fmt: skip
    b.results.append({"suite": "batch", "name": name, "seconds": ours, "alone": single, "ratio": ours / single,
                      "cpu": median(r.cpu for r in together), "cpu_alone": median(r.cpu for r in alone),
                      "peak": peak, "peak_alone": peak_single})  # fmt: skip
    _clear(b)
