"""α of a rotation: the limit of the norm itself (ComfyUI's node), or per output (LyCORIS, sd-scripts)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge

LAYER = "input_blocks.1.0.in_layers.2"
K, B = 8, 4


def turned(weight: Tensor, blocks: Tensor, limit: float) -> Tensor:
    """R W by ComfyUI's OFTDiff (comfy/weight_adapter/oft.py): Q is cut to a norm of `limit`, R = (I + Q)(I − Q)⁻¹."""
    q = (blocks - blocks.mT).double()
    q = q * min(1.0, limit / q.norm().item())
    eye = torch.eye(B, dtype=torch.float64)
    r = (eye + q) @ torch.linalg.inv(eye - q)
    return torch.einsum("knm,kn...->km...", r, weight.double().unflatten(0, (K, B))).flatten(0, 1).float()


def files(
    folder: Path, name: str, alpha: float, header: dict[str, str] | None = None
) -> tuple[Path, Path, Tensor, Tensor]:
    torch.manual_seed(1)
    weight, blocks = torch.randn(K * B, 6, 3, 3), torch.randn(K, B, B)
    base = {f"model.diffusion_model.{LAYER}.weight": weight, f"model.diffusion_model.{LAYER}.bias": torch.zeros(K * B)}
    save_file(base, folder / "base.safetensors")
    save_file({f"{name}.oft_blocks": blocks, f"{name}.alpha": torch.tensor(alpha)}, folder / "oft.safetensors", header)
    return folder / "base.safetensors", folder / "oft.safetensors", weight, blocks


DOTTED, FLAT = f"diffusion_model.{LAYER}", f"lora_unet_{LAYER.replace('.', '_')}"


@pytest.mark.parametrize(
    ("name", "alpha", "header", "limit"),
    [
        (DOTTED, 1.0, None, 1.0),
        (DOTTED, 0.01, None, 0.01 * K * B),
        (FLAT, 1.0, None, K * B),
        (DOTTED, 1.0, {"ss_network_module": "networks.oft"}, K * B),
    ],
)
def test_alpha_of_a_rotation_is_the_limit_that_its_trainer_means(
    tmp_path: Path, name: str, alpha: float, header: dict[str, str] | None, limit: float
) -> None:
    base, oft, weight, blocks = files(tmp_path, name, alpha, header)
    report = lora_merge.merge(base, oft, tmp_path / "out.safetensors")
    merged = load_file(tmp_path / "out.safetensors")[f"model.diffusion_model.{LAYER}.weight"]
    torch.testing.assert_close(merged, turned(weight, blocks, limit))
    assert report.verified is not None and report.verified["matching"]["proven"] == 1
    noted = any("limit of the rotation's norm" in note for note in report.coverage[oft.name]["notes"])
    assert noted is (limit == 1.0)


def test_limit_survives_other_names(tmp_path: Path) -> None:
    base, oft, weight, blocks = files(tmp_path, DOTTED, 1.0)
    lora_merge.convert(oft, tmp_path / "flat.safetensors", to="kohya", base=base)
    assert FLAT in next(iter(load_file(tmp_path / "flat.safetensors")))
    lora_merge.merge(base, tmp_path / "flat.safetensors", tmp_path / "out.safetensors")
    merged = load_file(tmp_path / "out.safetensors")[f"model.diffusion_model.{LAYER}.weight"]
    torch.testing.assert_close(merged, turned(weight, blocks, 1.0))
