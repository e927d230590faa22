"""A full-size SDXL checkpoint, 6.9 GB, through the command line: python -m pytest -m slow tests/engine/test_full_size.py

Needs 14 GB of disk in ./bench-data. Not part of the normal run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.bench import inputs

DATA = Path("bench-data")


@pytest.mark.slow
def test_sdxl_with_three_networks_is_right_and_stays_small(capsys: pytest.CaptureFixture[str]) -> None:
    DATA.mkdir(exist_ok=True)
    base = inputs.base(DATA / "sdxl.safetensors", "sdxl")
    adapter = inputs.adapter(DATA / "sdxl-lora.safetensors", "sdxl")
    out = DATA / "checked.safetensors"
    command = [
        sys.executable,
        "-m",
        "lora_merge",
        str(base),
        f"{adapter}:0.8",
        "-o",
        str(out),
        "--overwrite",
        "--device",
        "cpu",
        "--report",
        str(DATA / "checked.json"),
    ]
    subprocess.run(command, check=True)
    report = json.loads((DATA / "checked.json").read_text())
    peak = report["peak_memory"]  # that of wait4 begins with this process's own
    with capsys.disabled():
        print(f"\n{report['seconds']:.1f} s, {report['stages']}, peak {peak / 2**20:.0f} MiB")
    assert peak <= 10**9

    layers = list(inputs.layers("sdxl"))
    kinds: dict[tuple[str, int, str], list[inputs.Layer]] = {}
    for layer in layers:
        kinds.setdefault((layer.name.split("_")[1], len(layer.shape), layer.name.split("_")[-1]), []).append(layer)
    chosen = [found[i * len(found) // 6] for found in kinds.values() for i in range(min(6, len(found)))]
    assert len(chosen) >= 50
    with safe_open(base, "pt") as b, safe_open(adapter, "pt") as a, safe_open(out, "pt") as o:
        for layer in chosen:
            rows = slice(layer.start, layer.start + layer.shape[0])
            up, down = (a.get_tensor(f"{layer.name}.lora_{s}.weight").double().flatten(1) for s in ("up", "down"))
            scale = a.get_tensor(f"{layer.name}.alpha").double() / down.shape[0]
            exact = b.get_tensor(layer.key)[rows].double().flatten(1) + 0.8 * scale * (up @ down)
            got = o.get_tensor(layer.key)[rows].flatten(1)
            differ = (got != exact.float().half()).sum().item()
            assert differ <= got.numel() / 1000, layer
        touched = {layer.key for layer in layers}
        untouched = [k for k in b.keys() if k not in touched][::37]  # noqa: SIM118
        assert len(untouched) > 20
        for key in untouched:
            assert torch.equal(b.get_tensor(key).view(torch.uint8), o.get_tensor(key).view(torch.uint8)), key
    out.unlink()
