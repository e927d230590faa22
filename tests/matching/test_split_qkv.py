"""LoRAs that sd-scripts trained side by side and saved as one (`split_qkv`), and DyLoRA without its metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lora_merge
from tests.kit.files import load, save
from tests.kit.fused_rows import FLUX, FLUX_DIFFUSERS, PHI3
from tests.kit.tensors import Tensors, rand

H, R, ALPHA = 16, 2, 1.0
SD3 = {
    "joint_blocks.0.context_block.attn.qkv.weight": rand(3 * H, H),
    "joint_blocks.0.x_block.attn.qkv.weight": rand(3 * H, H, seed=3), "final_layer.linear.weight": rand(4, H),
}  # fmt: skip
QKV, SINGLE = "lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_single_blocks_0_linear1"
MADE = {
    "flux": (FLUX, {QKV: ("double_blocks.0.img_attn.qkv", (H, H, H)),
                    SINGLE: ("single_blocks.0.linear1", (H, H, H, 4 * H))}),
    "sd3": (SD3, {"lora_unet_joint_blocks_0_x_block_attn_qkv": ("joint_blocks.0.x_block.attn.qkv", (H, H, H))}),
}  # fmt: skip
TOLD = {"ss_network_args": json.dumps({"split_qkv": "True"}), "ss_network_module": "networks.lora_flux"}


def saved_as_one(module: str, heights: tuple[int, ...]) -> tuple[Tensors, torch.Tensor]:
    """The file's tensors as sd-scripts' `state_dict` makes them of its layers, and the change that was trained."""
    ups = [rand(h, R, seed=k) for k, h in enumerate(heights)]
    downs = [rand(R, H, seed=k + 9) for k in range(len(heights))]
    tensors = {f"{module}.lora_up.weight": torch.block_diag(*ups), f"{module}.lora_down.weight": torch.cat(downs),
               f"{module}.alpha": torch.tensor(ALPHA)}  # fmt: skip
    change = torch.cat([ALPHA / R * (u.double() @ d.double()) for u, d in zip(ups, downs, strict=True)])
    return tensors, change


def merged(base: Tensors, adapter: Tensors, metadata: dict[str, str], folder: Path) -> tuple[Tensors, list[str]]:
    paths = save(base, folder / "b.safetensors"), save(adapter, folder / "a.safetensors", metadata)
    lora_merge.merge(*paths, folder / "o.safetensors", overwrite=True)
    (found,) = lora_merge.plan(*paths, folder / "p.safetensors").adapters
    return load(folder / "o.safetensors"), found.notes


def file_of(name: str) -> tuple[Tensors, dict[str, torch.Tensor]]:
    made = {key: saved_as_one(module, heights) for module, (key, heights) in MADE[name][1].items()}
    tensors = {k: t for one, _ in made.values() for k, t in one.items()}
    return tensors, {f"{key}.weight": change for key, (_, change) in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MADE)
def test_trained_networks_are_merged(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, changes = file_of(name)
    tensors = {k: t.to(dtype) for k, t in tensors.items()}
    got, notes = merged(MADE[name][0], tensors, TOLD, tmp_path)
    for key, change in changes.items():
        close = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got[key].double(), MADE[name][0][key].double() + change, rtol=0, atol=close)
    assert sum("trained with split_qkv" in note for note in notes) == len({len(h) for _, h in MADE[name][1].values()})
    in_memory = lora_merge.merge_state_dict(MADE[name][0], [tmp_path / "a.safetensors"])
    assert all(torch.equal(in_memory[key], got[key]) for key in changes)


def test_base_may_have_the_layers_apart(tmp_path: Path) -> None:
    tensors, change = saved_as_one(QKV, (H, H, H))
    got, _ = merged(FLUX_DIFFUSERS, tensors, TOLD, tmp_path)
    for k, n in enumerate("qkv"):
        key = f"transformer_blocks.0.attn.to_{n}.weight"
        expected = FLUX_DIFFUSERS[key].double() + change[k * H : (k + 1) * H]
        torch.testing.assert_close(got[key].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "spoilt", "said"),
    [
        ({}, False, "no metadata says so"),
        ({"ss_network_args": json.dumps({"split_qkv": "False"})}, False, "no metadata says so"),
        (TOLD, True, "are not 3 LoRAs side by side"),
        ({}, True, ""),
    ],
)
def test_lora_without_both_signs_is_what_it_is_stored_as(
    *, metadata: dict[str, str], spoilt: bool, said: str, tmp_path: Path
) -> None:
    tensors, change = saved_as_one(QKV, (H, H, H))
    if spoilt:
        tensors[f"{QKV}.lora_up.weight"][H + 3, 0] = 0.5
        change = ALPHA / R * tensors[f"{QKV}.lora_up.weight"].double() @ tensors[f"{QKV}.lora_down.weight"].double()
    key = "double_blocks.0.img_attn.qkv.weight"
    got, notes = merged(FLUX, tensors, metadata, tmp_path)
    torch.testing.assert_close(got[key].double(), FLUX[key].double() + change / 3, rtol=0, atol=1e-6)
    assert any(said in note for note in notes) if said else not notes


def test_ordinary_loras_are_left_alone(tmp_path: Path) -> None:
    """Of fused layers too, beside split ones, and on a language model."""
    plain = {
        f"{QKV}.lora_up.weight": rand(3 * H, 3),
        f"{QKV}.lora_down.weight": rand(3, H),
        f"{QKV}.alpha": torch.tensor(3.0),
    }
    assert not merged(FLUX, plain, {}, tmp_path)[1]
    zero = plain | {f"{QKV}.lora_up.weight": torch.zeros(3 * H, 3)}
    (planned,) = lora_merge.plan(
        save(FLUX, tmp_path / "b.safetensors"), save(zero, tmp_path / "zero.safetensors"), tmp_path / "p.safetensors"
    ).adapters
    assert not planned.notes
    tensors, _ = saved_as_one("model.layers.0.mlp.gate_up_proj", (32, 32))
    assert not merged(PHI3, tensors, TOLD, tmp_path)[1]


def test_arguments_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    tensors, _ = saved_as_one(QKV, (H, H, H))
    with pytest.raises(lora_merge.MergeError) as caught:
        merged(FLUX, tensors, {"ss_network_args": '{"split_qkv": "True"'}, tmp_path)
    assert caught.value.exit_code == 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(8, 12)


def test_dylora_without_metadata_is_what_lycoris_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    lycoris = pytest.importorskip("lycoris")
    monkeypatch.setattr(lycoris.LycorisNetwork, "TARGET_REPLACE_MODULE", ["Linear"])
    torch.manual_seed(0)
    model = Model()
    net = lycoris.create_lycoris(model, 1.0, linear_dim=8, linear_alpha=4, algo="dylora", block_size=2)
    base = {key: value.clone() for key, value in model.state_dict().items()}
    net.apply_to()
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter)
    tensors = {key: value.detach().clone() for key, value in net.state_dict().items()}
    again, _ = lycoris.create_lycoris_from_weights(1.0, None, Model(), weights_sd=tensors)
    wanted = base["lin.weight"] + again.loras[0].get_diff_weight()[0].detach()
    got = lora_merge.merge_state_dict(base, tensors)
    torch.testing.assert_close(got["lin.weight"], wanted, rtol=1e-5, atol=1e-5)


def test_linear_layers_beside_a_convolution_of_dylora_are_such_too(tmp_path: Path) -> None:
    base = {"conv.weight": rand(6, 4, 3, 3), "lin.weight": rand(8, 8)}
    pair = {"lin.lora_up.weight": rand(8, 4), "lin.lora_down.weight": rand(4, 8), "lin.alpha": torch.tensor(2.0)}
    conv = {"conv.lora_up.weight": rand(6, 8), "conv.lora_down.weight": rand(8, 4, 3, 3)}
    for adapter, told in ((pair, False), (pair | conv, True)):
        got, notes = merged(base, adapter, {}, tmp_path)
        assert any("DyLoRA" in note and "lin" in note for note in notes) == told
        change = 0.5 * pair["lin.lora_up.weight"].double() @ pair["lin.lora_down.weight"].double()
        torch.testing.assert_close(got["lin.weight"].double(), base["lin.weight"].double() + change, rtol=0, atol=1e-6)


def test_dylora_of_a_convolution_is_known_by_its_shapes(tmp_path: Path) -> None:
    base = {"conv.weight": rand(6, 4, 3, 3), "lin.weight": rand(8, 8)}
    dylora = {
        "conv.lora_up.weight": rand(6, 8),
        "conv.lora_down.weight": rand(8, 4, 3, 3),
        "conv.alpha": torch.tensor(4.0),
    }
    got, notes = merged(base, dylora, {}, tmp_path)
    change = 0.5 * dylora["conv.lora_up.weight"].double() @ dylora["conv.lora_down.weight"].double().flatten(1)
    expected = base["conv.weight"].double() + change.reshape(6, 4, 3, 3)
    torch.testing.assert_close(got["conv.weight"].double(), expected, rtol=0, atol=1e-6)
    assert any("DyLoRA" in note for note in notes)
    told = {"ss_network_args": json.dumps({"algo": "dylora", "block_size": "4"})}
    got, notes = merged(base, dylora, told, tmp_path)
    assert not any("no metadata" in note for note in notes)
    expected = base["conv.weight"].double() + 4 * change.reshape(6, 4, 3, 3)
    torch.testing.assert_close(got["conv.weight"].double(), expected, rtol=0, atol=1e-5)
