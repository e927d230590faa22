"""Outputs load in the programs that they are for: their loaders, or the keys that these ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.places import places
from lora_merge.models.names import names
from tests.support import Tensors, index, rand
from tests.whole.test_diffusers import CONFIGS

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK = 2
QUICK = ("UNet2DConditionModel SDXL", "FluxTransformer2DModel", "MochiTransformer3DModel", "ZImageTransformer2DModel")
"""Families of every day's tests; the others take half a minute."""
NO_LOADER = ("PixArt", "HunyuanDiT", "StableAudio", "StableCascade", "LTX2TextConnectors", "Transformer3DModel Animate")
"""Classes without `load_lora_adapter`, and those that are parts of others."""
FAMILIES = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in CONFIGS
            if not kind.startswith(NO_LOADER) and hasattr(getattr(diffusers, kind.split(" ")[0], None), "load_lora_adapter")]  # fmt: skip


LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def trained(model: torch.nn.Module, base: Tensors, to: str) -> Tensors:
    """An adapter in a dialect for every layer of a model; α is half of the rank, and the first has another rank."""
    layers = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    found: Tensors = {}
    known = names(index({k: tuple(v.shape) for k, v in base.items()}))
    dialect = DIALECTS[to]
    for n, place in enumerate(places(known, dialect)):
        shape = place.view.shape
        grouped = len(shape) > 2 and shape[1] == 1  # a rank has to be a multiple of the groups
        if grouped or not {piece.key for piece in place.view.row_slices} <= layers:
            continue
        rank = RANK + (not found)
        found[dialect.key(place.prefix, place.module, dialect.endings["up"])] = rand(
            shape[0], rank, *[1] * (len(shape) - 2), seed=n
        )
        found[dialect.key(place.prefix, place.module, dialect.endings["down"])] = rand(rank, *shape[1:], seed=n + 1)
        found[dialect.key(place.prefix, place.module, ".alpha")] = torch.tensor(rank / 2)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_diffusers_loads_and_fuses_what_was_converted(kind: str, tmp_path: Path) -> None:
    """From kohya's words: rows are cut and swapped, and the ranks come from the file's own entry."""
    torch.manual_seed(0)
    model: Any = getattr(diffusers, kind.split(" ")[0])(**CONFIGS[kind])
    base = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(trained(model, base, "kohya"), tmp_path / "kohya.safetensors")
    lora_merge.convert(
        tmp_path / "kohya.safetensors",
        tmp_path / "lora.safetensors",
        to="diffusers",
        base=tmp_path / "base.safetensors",
    )
    prefix = "unet" if "UNet" in kind else "transformer"
    model.load_lora_adapter(str(tmp_path), weight_name="lora.safetensors", prefix=prefix, use_safetensors=True)
    model.fuse_lora()
    fused = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    wanted = lora_merge.merge_state_dict(base, [tmp_path / "kohya.safetensors"])
    assert sum(not torch.equal(wanted[name], base[name]) for name in base) > 5
    for name, value in wanted.items():
        assert torch.allclose(value, fused[name], rtol=0, atol=1e-5), name
