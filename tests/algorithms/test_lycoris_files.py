"""LyCORIS from end to end: its modules saved as a trainer saves them, merged as files, against its forward.

Modules that share the arguments of a training run, as far as they matter, share a file.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lora_merge

pytest.importorskip("lycoris.modules", reason="lycoris-lora is not installed")
from test_lycoris_oracle import LAYERS, build, inputs, table

NAMINGS = ("lycoris_blocks_{}", "lora_unet_blocks_{}", "blocks.{}")


def runs() -> dict[str, list[tuple[str, str, dict[str, Any], float]]]:
    """Training run → modules: (LyCORIS class, layer, options, tolerance)."""
    found: dict[str, list[tuple[str, str, dict[str, Any], float]]] = {}
    for path, layers, options, tolerance, _ in table():
        told = {k: options[k] for k in ("rs_lora", "sig_type") if k in options}
        if path.startswith("tlora"):
            told["algo"] = "tlora"
        run = json.dumps({k: str(v) for k, v in told.items()})
        found.setdefault(run, []).extend((path, layer, options, tolerance) for layer in layers)
    return found


@pytest.mark.parametrize(("arguments", "modules"), runs().items(), ids=list(runs()))
def test_a_file_merges_into_the_trained_model(
    arguments: str, modules: list[tuple[str, str, dict[str, Any], float]], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    trained, adapter = nn.ModuleDict(), {}
    for i, (_, kind, _, tolerance) in enumerate(modules):
        trained[f"{i}"] = LAYERS[kind]().to(torch.float64 if tolerance < 1e-9 else torch.float32)
    base = {f"blocks.{k}": v.clone() for k, v in trained.state_dict().items()}
    for i, ((path, _, options, _), naming) in enumerate(zip(modules, cycle(NAMINGS), strict=False)):
        saved = build(path, trained[f"{i}"], options).state_dict()
        adapter |= {f"{naming.format(i)}.{k}": v.detach().clone().contiguous() for k, v in saved.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "adapter.safetensors", {"ss_network_args": arguments})

    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out.safetensors",
        compute_dtype="fp64", device="cpu",
    )  # fmt: skip
    assert report.coverage
    merged = load_file(tmp_path / "out.safetensors")
    for i, (_, kind, _, tolerance) in enumerate(modules):
        plain = LAYERS[kind]()
        plain.load_state_dict({k: merged[f"blocks.{i}.{k}"] for k in plain.state_dict()}, assign=True)
        x = inputs(plain).to(plain.weight.dtype)
        with torch.no_grad():
            theirs, mine = trained[f"{i}"](x), plain(x)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
