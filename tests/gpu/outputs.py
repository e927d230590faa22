"""Adapters that are made on a GPU: `python -m tests.gpu.outputs`; prints JSON."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import lora_merge
from tests.kit.files import save
from tests.kit.tensors import rand


def main(device: str = "cuda", width: int = 1024) -> None:
    """Extract the difference of two checkpoints, and make it smaller, there and on the CPU."""
    folder, found = Path(tempfile.mkdtemp()), dict[str, float]()
    keys = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(8)]
    base = {key: rand(width, width + 64, seed=n).half() for n, key in enumerate(keys)}
    tuned = {key: value + 0.3 * rand(width, width + 64, seed=50 + n).half() for n, (key, value) in enumerate(base.items())}  # fmt: skip
    files = save(base, folder / "base.safetensors"), save(tuned, folder / "tuned.safetensors")
    residuals = []
    for name in ("cpu", device):
        began = time.perf_counter()
        large = folder / f"{name.partition(':')[0]}.safetensors"
        made = [lora_merge.extract(*files, large, rank=16, device=name)]
        made.append(lora_merge.resize(large, folder / f"small-{large.name}", rank=4, device=name))
        found[f"outputs_{large.stem}_s"] = time.perf_counter() - began
        residuals.append([float(report.residual or 0) for report in made])
    found["outputs_residual"] = max(other / one for one, other in zip(*residuals, strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
