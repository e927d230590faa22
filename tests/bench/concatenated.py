"""Adapters concatenated as other tools do it: all files in memory. `python -m tests.bench.concatenated ADAPTER … OUT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Load all, join the factors of each layer with their scales in the first, save, and wait for the disk."""
    *paths, out = map(Path, sys.argv[1:])
    adapters, made = [load_file(path) for path in paths], {}
    for name in (key.removesuffix(".alpha") for key in adapters[0] if key.endswith(".alpha")):
        ups, downs = [], []
        for one in adapters:
            up, down = one[f"{name}.lora_up.weight"], one[f"{name}.lora_down.weight"]
            ups.append(up.float() * (float(one[f"{name}.alpha"]) / len(down)))
            downs.append(down)
        made[f"{name}.lora_up.weight"] = torch.cat(ups, 1).half()
        made[f"{name}.lora_down.weight"] = torch.cat(downs)
        made[f"{name}.alpha"] = torch.tensor(float(sum(map(len, downs))))
    save_file(made, out)
    with out.open("rb+") as f:
        os.fsync(f.fileno())


if __name__ == "__main__":
    main()
