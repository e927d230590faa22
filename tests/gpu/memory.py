"""Merges in memory on a GPU: `python -m tests.gpu.memory BASE ADAPTER FOLDER`; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

import lora_merge


def main() -> None:
    """Merge tensors of the device and keep them there; two files at once; and under a bound."""
    base, adapter, folder = map(Path, sys.argv[1:])
    held = load_file(base, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    merged = lora_merge.merge_state_dict(held, adapter, device="keep")
    torch.cuda.synchronize()
    found: dict[str, float] = {
        "keep_s": time.perf_counter() - began,
        "keep_host_bytes": sum(t.nbytes for t in merged.values() if t.device.type != "cuda"),
    }
    tell(found)
    del held, merged
    torch.cuda.empty_cache()

    def once(name: str) -> bytes:
        path = folder / f"{name}.safetensors"
        lora_merge.merge(base, adapter, path, device="cuda", verify=False, overwrite=True)
        return path.read_bytes()

    alone = once("alone")
    with ThreadPoolExecutor(2) as pool:
        found["together_different"] = sum(other != alone for other in pool.map(once, ("one", "other")))
    for name in ("alone", "one", "other"):
        (folder / f"{name}.safetensors").unlink()
    tell(found)
    bound = 2**29
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {"device": "cuda", "verify": False, "overwrite": True, "max_vram": bound}
    lora_merge.merge(base, adapter, folder / "bounded.safetensors", **options)  # type: ignore[arg-type]
    (folder / "bounded.safetensors").unlink()
    found["vram_peak_share"] = (torch.cuda.max_memory_allocated() - before) / bound
    tell(found)


def tell(found: dict[str, float]) -> None:
    """Print what is known so far; the last line counts."""
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
