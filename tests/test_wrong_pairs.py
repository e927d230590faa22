"""Adapters on bases that they were not made for: refused from headers, in a sentence that names both sides."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

import lora_merge
from lora_merge.errors import FitError
from lora_merge.formats import layout

HEADERS = Path(__file__).parent / "headers"


def shapes(inventory: str) -> dict[str, tuple[int, ...]]:
    table = json.loads(gzip.decompress((HEADERS / f"{inventory}.json.gz").read_bytes()))
    return {name: tuple(shape) for name, shape in table.items()}


def hollow(tensors: dict[str, tuple[int, ...]], path: Path) -> Path:
    """A file of full size without its data."""
    header = layout([(name, "BF16", shape) for name, shape in tensors.items()], {}, 0)
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + sum(2 * prod(s) for s in tensors.values()))
    return path


def adapter(inventory: str, prefix: str, path: Path, keep: Callable[[str], bool] = lambda _: True) -> Path:
    """A rank-4 LoRA on every linear layer of an inventory."""
    tensors: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes(inventory).items():
        if key.endswith(".weight") and len(shape) == 2 and keep(key):
            name = prefix + key.removesuffix(".weight").replace(".", "_")
            tensors |= {f"{name}.lora_up.weight": (shape[0], 4), f"{name}.lora_down.weight": (4, shape[1])}
    return hollow(tensors, path)


def attention(key: str) -> bool:
    return "attn" in key


PAIRS = [
    # adapter's inventory, base's inventory, words for the adapter, words for the base
    ("diffusers/sd15", "single-file/sdxl", "Stable Diffusion 1", "Stable Diffusion XL"),
    ("native/sdxl", "single-file/sd1", "Stable Diffusion XL", "Stable Diffusion 1"),
    ("native/wan-i2v-14B", "native/wan-t2v-14B", "I2V", "T2V or 2.2"),
    ("native/wan-t2v-14B", "native/wan-i2v-14B", "T2V or 2.2", "I2V"),
    ("native/wan-t2v-1.3B", "native/wan-t2v-14B", "1.3B", "14B"),
    ("native/wan-t2v-14B", "native/wan-t2v-1.3B", "14B", "1.3B"),
    ("native/flux-dev", "native/qwen-image", "Flux.1", "Qwen-Image"),
]


@pytest.mark.parametrize(("made_for", "given", "theirs", "ours"), PAIRS)
def test_both_sides_are_named(tmp_path: Path, made_for: str, given: str, theirs: str, ours: str) -> None:
    base = hollow(shapes(given), tmp_path / "base.safetensors")
    lora = adapter(made_for, "lora_unet_", tmp_path / "lora.safetensors", attention)
    with pytest.raises(FitError) as e:
        lora_merge.plan(base, lora, tmp_path / "out.safetensors")
    text = str(e.value)
    assert e.value.exit_code == 4
    assert theirs in text, text
    assert ours in text, text


def test_a_doubtful_pair_can_be_merged_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text-to-video adapters are used on image-to-video models; whoever wants that says so."""
    base = hollow(shapes("native/wan-i2v-14B"), tmp_path / "base.safetensors")
    lora = adapter("native/wan-t2v-14B", "lora_unet_", tmp_path / "lora.safetensors", attention)
    monkeypatch.setattr("lora_merge.disk.free_bytes", lambda _: 1 << 40)  # the plan of a 33 GB file asks for room
    plan = lora_merge.plan(base, lora, tmp_path / "out.safetensors", unmatched="skip")
    assert any("T2V" in note for note in plan.adapters[0].notes)
