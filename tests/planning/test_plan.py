"""What a plan reports of its adapters. Run: pytest tests/planning/test_plan.py"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.disk import pages, reader, system
from lora_merge.errors import UnmatchedModules
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.planning.plan import coverage
from lora_merge.text import NUMBER
from tests.kit.files import save
from tests.kit.models import sd1
from tests.kit.tensors import rand

LAYERS, EXPERTS = 3, 40


def base(path: Path) -> Path:
    """A small mixture of experts."""
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(LAYERS) for e in range(EXPERTS)]
    names += [f"model.layers.{n}.self_attn.q_proj" for n in range(LAYERS)]
    return save({f"{name}.weight": rand(4, 4) for name in names} | {"model.norm.weight": rand(4)}, path)


def lora(path: Path, modules: list[str]) -> Path:
    factors = {"lora_A": (1, 4), "lora_B": (4, 1)}
    return save({f"base_model.model.{m}.{s}.weight": rand(*of) for m in modules for s, of in factors.items()}, path)


def test_patterns_count_every_module_that_has_its_place(tmp_path: Path) -> None:
    modules = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(LAYERS) for e in range(EXPERTS - 1)]
    modules += ["model.layers.1.self_attn.q_proj", "model.layers.9.self_attn.q_proj"]
    plan = lora_merge.plan(
        base(tmp_path / "b.safetensors"), [lora(tmp_path / "a.safetensors", modules)], unmatched="skip",
        output=tmp_path / "o.safetensors",
    )  # fmt: skip
    (found,) = coverage(plan).values()
    placed = Counter(NUMBER.sub("{i}", f"base_model.model.{m}") for m in modules if "layers.9." not in m)
    assert found["patterns"] == placed
    assert sum(found["patterns"].values()) == found["matched"] == len(modules) - 1
    assert list(found["skipped"]) == ["base_model.model.model.layers.9.self_attn.q_proj"]


def test_hundreds_of_modules_without_a_place_are_reported_by_pattern(tmp_path: Path) -> None:
    modules = [f"model.layers.{n}.mlp.experts.{e}.gate" for n in range(LAYERS) for e in range(EXPERTS)]
    adapter = lora(tmp_path / "a.safetensors", ["model.layers.0.self_attn.q_proj", *modules])
    with pytest.raises(UnmatchedModules) as failure:
        lora_merge.plan(base(tmp_path / "b.safetensors"), [adapter], output=tmp_path / "o.safetensors")
    pattern = "base_model.model.model.layers.{i}.mlp.experts.{i}.gate"
    example = "base_model.model.model.layers.0.mlp.experts.0.gate"
    assert f"{pattern} × {len(modules)}, e.g. {example}" in failure.value.where


def test_alphas_are_read_ahead_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that turns would take 10 ms for each alpha, and an adapter has thousands."""
    name = "lora_unet_time_embed_0"
    factors = {f"{name}.lora_down.weight": rand(2, 16), f"{name}.lora_up.weight": rand(64, 2)}
    adapter = save(factors | {f"{name}.alpha": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    happened = []

    def advise(_fd: int, offset: int, size: int, advice: int) -> None:
        happened.extend([("ahead", offset, size)] if advice == system.WILL_NEED else [])

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        happened.append(("read", offset, len(buffer)))
        return system.read_at(fd, buffer, offset)

    monkeypatch.setattr(pages, "advise", advise)
    monkeypatch.setattr(reader, "read_at", read_at)
    lora_merge.plan(save(sd1(), tmp_path / "b.safetensors"), [adapter], output=tmp_path / "o.safetensors")
    alpha = open_checkpoint(adapter).tensors[f"{name}.alpha"]
    assert happened == [("ahead", alpha.offset, 4), ("read", alpha.offset, 4)]
