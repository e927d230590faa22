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


@pytest.mark.parametrize("told", [{"algo": "dylora"}, {"algo": "dylora", "block_size": "2"}, {}])
def test_dylora_is_the_training_module_with_all_its_blocks(
    told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LyCORIS draws the rank anew in every forward pass; its scale is α over the number of blocks, and only the metadata
    says so. Other tools, and we without the metadata, read α / r."""
    size = int(told.get("block_size", 4))
    base, adapter, trained = {}, {}, nn.ModuleDict()
    for kind in ("linear", "conv2d"):
        trained[kind] = LAYERS[kind]().double()
        base |= {f"blocks.{kind}.{k}": v.clone() for k, v in trained[kind].state_dict().items()}
        module = build("dylora.DyLoraModule", trained[kind], {"lora_dim": 8, "alpha": 2.0, "block_size": size})
        adapter |= {f"lycoris_blocks_{kind}.{k}": v.detach().contiguous() for k, v in module.state_dict().items()}
    save_file(adapter, tmp_path / "adapter.safetensors", {"ss_network_args": json.dumps(told)})
    merged = lora_merge.merge_state_dict(base, tmp_path / "adapter.safetensors", compute_dtype="fp64")
    monkeypatch.setattr("random.randint", lambda _, last: last)
    for kind, layer in trained.items():
        plain = LAYERS[kind]()
        plain.load_state_dict({k: merged[f"blocks.{kind}.{k}"] for k in plain.state_dict()}, assign=True)
        x = inputs(plain)
        with torch.no_grad():
            theirs, mine, before = layer(x), plain(x), untrained(kind, base, x)
        wanted = theirs if told else before + (theirs - before) / size
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-9)


def untrained(kind: str, base: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The layer before training."""
    plain = LAYERS[kind]()
    plain.load_state_dict({k: base[f"blocks.{kind}.{k}"] for k in plain.state_dict()}, assign=True)
    return plain(x)
