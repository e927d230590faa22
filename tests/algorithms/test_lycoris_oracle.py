"""Every LyCORIS algorithm against LyCORIS' own modules: build, fill with noise, save, merge with ours.

The forward of the training module is the oracle. Its merges are compared too where they are not known to
be wrong: LoHa and LoKr apply α / r twice in 4.1.3, and T-LoRA pads kernels to the corner.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.lycoris_layers import LAYERS, build, inputs, table
from tests.algorithms.pipeline import merge_module


def cases() -> list[Any]:
    return [
        pytest.param(module, layer, options, tolerance, merges, id=_label(module, layer, options))
        for module, layers, options, tolerance, merges in table()
        for layer in layers
    ]


def _label(module: str, layer: str, options: dict[str, Any]) -> str:
    return "-".join([module.split(".")[0], layer, *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.few(7)
@pytest.mark.parametrize(("path", "kind", "options", "tolerance", "merges"), cases())
def test_forward_and_merge_agree(
    path: str,
    kind: str,
    options: dict[str, Any],
    tolerance: float,
    merges: bool,  # noqa: FBT001
) -> None:
    torch.manual_seed(1)
    dtype = torch.float64 if tolerance < 1e-9 else torch.float32
    layer = LAYERS[kind]().to(dtype)
    weight = layer.weight.detach().double()
    plain = LAYERS[kind]().to(dtype)
    plain.load_state_dict(layer.state_dict())
    module = build(path, layer, options)
    saved = {f"m.{k}": v.detach().clone() for k, v in module.state_dict().items()}
    settings = {"algo": path.split(".")[0], **options}
    ours = merge_module(saved, weight, **settings)
    with torch.no_grad():
        plain.double().weight.copy_(ours)
        if "m.diff_b" in saved:
            plain.bias.copy_(merge_module(saved, plain.bias.detach(), "bias"))
        x = inputs(plain)
        theirs, mine = module(x.to(dtype)), plain(x)
    assert (ours - weight).abs().max() > 1e-3  # the adapter does something
    assert _relative(mine, theirs) < tolerance
    own, _ = module.get_merged_weight(1.0, weight.shape)
    right = merges or getattr(module, "scale", None) == 1
    assert (_relative(ours, own.detach()) < tolerance) is right, "algorithms/README.md lists where it is wrong"


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
