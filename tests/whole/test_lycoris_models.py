"""Tiny diffusers models wrapped by LyCORIS: what every layer computes while wrapped, it computes after our merge.

The wrapped layers are the oracle and not LyCORIS' own `merge_to`, which takes α/r twice for LoHa and LoKr (4.1.3).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from tests.kit.architectures import native_views
from tests.kit.diffusers_models import CONFIGS, diffusers
from tests.kit.files import load
from tests.kit.tensors import Tensors

lycoris = pytest.importorskip("lycoris")
pytestmark = pytest.mark.filterwarnings("ignore")

WRAPPED = {
    "FluxTransformer2DModel": ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
    "UNet2DConditionModel SD2": ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"],
}
"""Model → the classes whose layers are trained."""

ALGORITHMS: list[dict[str, Any]] = [
    {"algo": "lora"}, {"algo": "lora", "rs_lora": True}, {"algo": "lora", "conv_dim": 3, "use_tucker": True},
    {"algo": "lora", "dora_wd": True}, {"algo": "loha"},
    {"algo": "loha", "conv_dim": 3, "use_tucker": True}, {"algo": "loha", "dora_wd": True}, {"algo": "lokr", "factor": 2},
    {"algo": "lokr", "factor": -1, "full_matrix": True}, {"algo": "lokr", "dora_wd": True}, {"algo": "full"},
    {"algo": "diag-oft"}, {"algo": "glora"}, {"algo": "ia3"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def others_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a preset sets is the class's, and stays for every test after this one."""
    for name, value in vars(lycoris.LycorisNetwork).items():
        if name.isupper():
            monkeypatch.setattr(lycoris.LycorisNetwork, name, value)


def model(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name.split(" ")[0])(**CONFIGS[name])


def outputs(network: torch.nn.Module) -> Tensors:
    """What every layer makes of a random input."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name, layer in network.named_modules():
        match layer:
            case torch.nn.Linear():
                shape = (3, layer.in_features)
            case torch.nn.Conv2d():
                shape = (2, layer.in_channels, 5, 5)
            case torch.nn.GroupNorm():
                shape = (2, layer.num_channels, 3, 3)
            case _:
                continue
        found[name] = layer(torch.randn(shape, generator=generator))
    return found


@pytest.mark.few(2)
@torch.no_grad()
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("options", ALGORITHMS, ids=lambda o: " ".join(map(str, o.values())))
def test_layers_compute_what_they_did_while_wrapped(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    file, trained = tmp_path / "a.safetensors", model(name)
    base, before = {k: v.clone() for k, v in trained.state_dict().items()}, outputs(trained)
    lycoris.LycorisNetwork.apply_preset({"target_module": WRAPPED[name]})
    network = lycoris.create_lycoris(trained, 1.0, linear_dim=4, linear_alpha=2, **options)
    network.apply_to()
    for parameter in network.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_weights(str(file), torch.float32, {})
    want = outputs(trained)
    assert sum(not torch.equal(before[k], v) for k, v in want.items()) >= 10
    kohya = {k.replace("lycoris_", "lora_unet_", 1): v for k, v in load(file).items()}
    for adapter in (file, kohya):
        merged = model(name)
        merged.load_state_dict(lora_merge.merge_state_dict(base, adapter))
        got = outputs(merged)
        for key, value in want.items():
            assert torch.allclose(got[key], value, rtol=0, atol=1e-4), key
    if name.startswith("Flux"):
        assert_same_in_the_native_layout(base, file, merged.state_dict())


def assert_same_in_the_native_layout(base: Tensors, file: Path, merged: Tensors) -> None:
    """Where q, k, v and the MLP are rows of one tensor: the same rows, whatever can be sliced."""
    views = native_views({k: tuple(v.shape) for k, v in base.items()})

    def native(weights: Tensors) -> Tensors:
        return {k: torch.cat([weights[p.key][p.start : p.stop] for p in view.row_slices]) for k, view in views.items()}

    got, want = lora_merge.merge_state_dict(native(base), file), native(merged)
    assert any(key.endswith("linear1.weight") for key in want)
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=0, atol=2e-6), key
