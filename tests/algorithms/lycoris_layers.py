"""Layers that `lycoris-lora` wraps, with its own results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

lycoris = pytest.importorskip("lycoris.modules", reason="lycoris-lora is not installed")


LAYERS = {
    "linear": lambda: nn.Linear(24, 36),
    "wide": lambda: nn.Linear(36, 24, bias=False),
    "conv1d": lambda: nn.Conv1d(24, 36, 3, padding=1),
    "conv2d": lambda: nn.Conv2d(24, 36, (3, 5), stride=2, padding=1),
    "conv1x1": lambda: nn.Conv2d(24, 36, 1),
    "conv3d": lambda: nn.Conv3d(8, 12, 3),
    "linear32": lambda: nn.Linear(24, 32),  # butterflies want powers of two
    "conv32": lambda: nn.Conv2d(24, 32, 3),
    "grouped": lambda: nn.Conv2d(24, 36, 3, groups=4),
}


CONVS = ("conv1d", "conv2d", "conv3d")


def table() -> list[tuple[str, tuple[str, ...], dict[str, Any], float, bool]]:
    """(module, layers, options, tolerance, whether its own merge is right)."""
    every = tuple(LAYERS)
    dense = tuple(name for name in LAYERS if name != "grouped")
    two = ("linear32", "conv32")
    exact, rounded = 1e-13, 5e-6  # rotations run in float32 only
    lora = "locon.LoConModule"
    loha = "loha.LohaModule"
    lokr = "lokr.LokrModule"
    return [
        (lora, every, {}, exact, True),
        (lora, every, {"rs_lora": True}, exact, True),
        (lora, every, {"use_scalar": True}, exact, True),
        (lora, CONVS, {"use_tucker": True}, exact, True),
        (lora, every, {"weight_decompose": True, "wd_on_out": True}, exact, True),
        (lora, dense, {"weight_decompose": True, "wd_on_out": False}, exact, True),
        (lora, CONVS, {"weight_decompose": True, "use_tucker": True}, exact, True),
        (loha, every, {}, exact, False),
        (loha, every, {"rs_lora": True}, exact, False),
        (loha, CONVS, {"use_tucker": True}, exact, False),
        (loha, every, {"weight_decompose": True, "wd_on_out": True}, exact, False),
        (loha, dense, {"weight_decompose": True, "wd_on_out": False}, exact, False),
        (lokr, every, {}, exact, False),
        (lokr, every, {"factor": 4}, exact, False),
        (lokr, dense, {"factor": 4, "unbalanced_factorization": True}, exact, False),
        (lokr, dense, {"decompose_both": True, "lora_dim": 1}, exact, False),
        (lokr, dense, {"decompose_both": True, "lora_dim": 1, "rs_lora": True}, exact, False),
        (lokr, every, {"full_matrix": True}, exact, True),
        (lokr, CONVS, {"use_tucker": True, "lora_dim": 2, "factor": 2}, exact, False),
        (lokr, every, {"weight_decompose": True, "wd_on_out": True}, exact, False),
        (lokr, dense, {"weight_decompose": True, "wd_on_out": False}, exact, False),
        ("glora.GLoRAModule", dense, {}, exact, True),
        ("glora.GLoRAModule", dense, {"rs_lora": True}, exact, True),
        ("ia3.IA3Module", dense, {"train_on_input": False}, exact, True),
        ("ia3.IA3Module", dense, {"train_on_input": True}, exact, True),
        ("full.FullModule", every, {}, exact, True),
        ("diag_oft.DiagOFTModule", every, {}, rounded, True),
        ("diag_oft.DiagOFTModule", every, {"rescaled": True}, rounded, True),
        ("diag_oft.DiagOFTModule", every, {"constraint": 1e-2, "rescaled": True}, rounded, True),
        ("diag_oft.DiagOFTModule", every, {"constraint": 1e3}, rounded, True),
        ("boft.ButterflyOFTModule", two, {}, rounded, True),
        ("boft.ButterflyOFTModule", two, {"rescaled": True, "constraint": 1e-2}, rounded, True),
        ("tlora.TLoraModule", ("linear", "wide", "conv1x1"), {}, rounded, True),
        ("tlora.TLoraModule", ("linear", "wide"), {"sig_type": "last"}, rounded, True),
        ("tlora.TLoraModule", ("linear", "wide"), {"sig_type": "middle"}, rounded, True),
    ]


def build(path: str, layer: nn.Module, options: dict[str, Any]) -> Any:
    """LyCORIS' module around the layer in the layer's dtype, every trainable number random and non-zero."""
    file, name = path.split(".")
    options = {"lora_dim": 4, "alpha": 2.0, **options}
    module = getattr(getattr(lycoris, file), name)("m", layer, 1.0, **options).to(next(layer.parameters()).dtype)
    module.apply_to()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module.eval()


def inputs(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(5, layer.in_features, dtype=torch.float64)
    kernel = len(layer.weight.shape) - 2
    return torch.randn(2, layer.in_channels, *[7] * kernel, dtype=torch.float64)
