"""A batch on a GPU with a damaged adapter in its middle: `python -m tests.gpu.hostile`; prints JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

import lora_merge
from tests.kit.files import save
from tests.kit.tensors import rand


def main(device: str = "cuda") -> None:
    """Merge three jobs; the second one has indices outside of the weight, which would end the device for the third."""
    folder = Path(tempfile.mkdtemp())
    base = save({f"m.{n}.weight": rand(64, 48, seed=n).half() for n in range(3)}, folder / "base.safetensors")
    good = {f"m.0.lora_{k}.weight": rand(*s) for k, s in (("up", (64, 4)), ("down", (4, 48)))}
    indices = torch.tensor([[0, -70000], [1, 2]], dtype=torch.int64)
    bad = good | {
        "m.0.bias_indices": indices,
        "m.0.bias_values": torch.ones(2),
        "m.0.bias_size": torch.tensor([64, 48]),
    }
    jobs = []
    for n, adapter in enumerate((good, bad, good)):
        path = save(adapter, folder / f"{n}.safetensors")
        jobs.append({"base": str(base), "adapters": [str(path)], "output": f"out{n}.safetensors"})
    (folder / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": jobs, "defaults": {"device": device}}))
    first, second, third = lora_merge.run_batch(folder / "jobs.yaml")
    lost = sum(job.error is not None for job in (first, third))
    print(json.dumps({"hostile_lost": lost, "hostile_refused": str(second.error)}))


if __name__ == "__main__":
    main()
