"""Adapters that make a weight larger: Flux control LoRAs, reshape_weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.cli.main import main
from lora_merge.engine import row_blocks
from lora_merge.errors import FitError, InputError
from lora_merge.matching.match import bias_beside
from lora_merge.matching.values import resized_values
from lora_merge.models.weights import RowSlice, WeightView
from tests.kit.adapters import flux_control
from tests.kit.files import index, load, save
from tests.kit.tensors import Tensors, rand


def flux() -> Tensors:
    return {
        "img_in.weight": rand(12, 4), "img_in.bias": rand(12),
        "double_blocks.0.img_attn.norm.key_norm.scale": rand(6), "double_blocks.0.img_attn.qkv.weight": rand(36, 12),
        "single_blocks.0.norm.key_norm.scale": rand(6, seed=3), "single_blocks.0.linear1.weight": rand(84, 12),
        "final_layer.linear.weight": rand(4, 12),
    }  # fmt: skip


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_flux_control_lora_widens_img_in(tmp_path: Path, strength: float) -> None:
    base, lora = save(flux(), tmp_path / "b.safetensors"), save(flux_control(12), tmp_path / "a.safetensors")
    lora_merge.merge(base, [(lora, strength)], tmp_path / "o.safetensors")
    got, w, a = load(tmp_path / "o.safetensors"), flux(), flux_control(12)
    padded = torch.cat([w["img_in.weight"], torch.zeros(12, 4)], dim=1)
    delta = a["img_in.lora_B.weight"] @ a["img_in.lora_A.weight"]
    torch.testing.assert_close(got["img_in.weight"], padded + strength * delta)
    torch.testing.assert_close(got["img_in.bias"], w["img_in.bias"] + strength * a["img_in.lora_B.bias"])
    key = "single_blocks.0.norm.key_norm.scale"
    torch.testing.assert_close(got[key], w[key] + strength * (a[key] - w[key]))
    assert torch.equal(got["final_layer.linear.weight"], w["final_layer.linear.weight"])


def test_reshape_weight_pads_before_anything_is_added(tmp_path: Path) -> None:
    base = {"m.a.weight": rand(6, 4), "m.b.weight": rand(3, 3)}
    lora = {
        "m.a.lora_up.weight": rand(8, 2),
        "m.a.lora_down.weight": rand(2, 5),
        "m.a.reshape_weight": torch.tensor([8, 5]),
    }
    merged = lora_merge.merge_state_dict(base, lora)["m.a.weight"]
    padded = torch.zeros(8, 5)
    padded[:6, :4] = base["m.a.weight"]
    torch.testing.assert_close(merged, padded + lora["m.a.lora_up.weight"] @ lora["m.a.lora_down.weight"])
    save(base, tmp_path / "b.safetensors")
    lora_merge.merge(
        tmp_path / "b.safetensors", save(lora, tmp_path / "a.safetensors"), tmp_path / "o.safetensors", dtype="bf16"
    )
    assert torch.equal(load(tmp_path / "o.safetensors")["m.a.weight"], merged.bfloat16())


def test_layers_that_shrink_or_only_look_wider_are_refused() -> None:
    base = {"m.a.weight": rand(6, 4)}
    lora = {
        "m.a.lora_up.weight": rand(5, 2),
        "m.a.lora_down.weight": rand(2, 4),
        "m.a.reshape_weight": torch.tensor([5, 4]),
    }
    with pytest.raises(FitError, match="smaller"):
        lora_merge.merge_state_dict(base, lora)
    with pytest.raises(FitError, match="number of axes"):
        lora_merge.merge_state_dict(base, lora | {"m.a.reshape_weight": torch.tensor([5, 4, 1])})
    wider = {k: v for k, v in flux_control(12).items() if "norm" not in k}
    with pytest.raises(FitError):
        lora_merge.merge_state_dict(flux(), wider)


NO_SIZES = {
    "NaN": torch.tensor([float("nan"), 5.0]),
    "infinite": torch.tensor([8.0, float("inf")]),
    "infinite, below zero": torch.tensor([float("-inf"), 5.0], dtype=torch.float64),
    "NaN in bf16": torch.tensor([8.0, float("nan")], dtype=torch.bfloat16),
    "a part of a row": torch.tensor([8.5, 5.0]),
    "below zero": torch.tensor([-8, 5]),
    "larger than any whole number": torch.tensor([1e300, 5.0], dtype=torch.float64),
    "more axes than a tensor has": torch.ones(1000, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", NO_SIZES)
def test_reshape_weight_that_is_no_list_of_sizes_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a state dict and as a file, with one error each and nothing written."""
    base = {"m.a.weight": rand(6, 4)}
    lora = {"m.a.lora_up.weight": rand(8, 2), "m.a.lora_down.weight": rand(2, 5), "m.a.reshape_weight": NO_SIZES[kind]}
    with pytest.raises(InputError, match="reshape_weight is not a list of sizes"):
        lora_merge.merge_state_dict(base, lora)
    files = save(base, tmp_path / "b.safetensors"), save(lora, tmp_path / "a.safetensors")
    monkeypatch.setattr("sys.argv", ["lora-merge", *map(str, files), "-o", str(tmp_path / "o.safetensors")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 3
    assert capsys.readouterr().err.startswith("error: reshape_weight is not a list of sizes\n  where: ")
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_two_adapters_that_disagree_about_the_size_are_refused() -> None:
    plain = {"img_in.lora_A.weight": rand(2, 4), "img_in.lora_B.weight": rand(12, 2)}
    with pytest.raises(FitError, match="larger"):
        lora_merge.merge_state_dict(flux(), [flux_control(12), plain])


def test_formula_that_reads_the_weight_sees_it_padded_and_is_verified(tmp_path: Path) -> None:
    weight, up, down, magnitude = rand(6, 4), rand(8, 2), rand(2, 5), rand(8, 1, seed=4).abs() + 1
    lora = {"m.a.lora_up.weight": up, "m.a.lora_down.weight": down, "m.a.dora_scale": magnitude}
    lora["m.a.reshape_weight"] = torch.tensor([8, 5])
    base = save({"m.a.weight": weight}, tmp_path / "b.safetensors")
    lora_merge.merge(base, save(lora, tmp_path / "a.safetensors"), tmp_path / "o.safetensors", verify=True)
    v = torch.zeros(8, 5).double()
    v[:6, :4] = weight
    v += up.double() @ down.double()
    exact = magnitude * v / v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(load(tmp_path / "o.safetensors")["m.a.weight"].double(), exact, rtol=0, atol=2e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("largest", [1, 12, 40])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_larger_weight_is_cut_into_blocks_as_all_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int, dtype: torch.dtype, *, dora: bool
) -> None:
    """A convolution with more outputs, more channels and a wider kernel; blocks end inside and behind what is stored."""
    base, up, down = {"m.a.weight": rand(6, 4, 2, 1).to(dtype)}, rand(9, 2, 1, 1), rand(2, 5, 2, 3)
    lora = {"m.a.lora_up.weight": up, "m.a.lora_down.weight": down, "m.a.reshape_weight": torch.tensor([9, 5, 2, 3])}
    lora |= {"m.a.dora_scale": rand(9, 1, 1, 1, seed=4).abs() + 1} if dora else {}
    at_once = lora_merge.merge_state_dict(base, lora, device="cpu")["m.a.weight"]
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", largest)
    in_blocks = lora_merge.merge_state_dict(base, lora, device="cpu")["m.a.weight"]
    torch.testing.assert_close(in_blocks, at_once)
    paths = save(base, tmp_path / "b.safetensors"), save(lora, tmp_path / "a.safetensors")
    lora_merge.merge(*paths, tmp_path / "o.safetensors", device="cpu", verify=True)
    assert torch.equal(load(tmp_path / "o.safetensors")["m.a.weight"], in_blocks)
    if not dora:
        padded = torch.zeros(9, 5, 2, 3)
        padded[:6, :4, :2, :1] = base["m.a.weight"]
        torch.testing.assert_close(in_blocks, (padded + torch.einsum("or,rikl->oikl", up[:, :, 0, 0], down)).to(dtype))


@pytest.mark.parametrize(
    ("pieces", "bias"),
    [([("a.weight", 0, 8)], "a.bias"), ([("a.weight", 0, 4)], ""), ([("a.weight", 4, 8)], ""),
     ([("a.weight", 0, 8), ("b.weight", 0, 8)], ""), ([("table", 0, 8)], ""), ([("table", 0, 4)], "")],
)  # fmt: skip
def test_new_bias_is_for_a_layer_that_is_one_whole_tensor(pieces: list[tuple[str, int, int]], bias: str) -> None:
    """A part of a fused weight, or several weights, have no bias of their own, and a bare parameter is no layer."""
    base = index({name: (8, 6) for name in ("a.weight", "b.weight", "table")}).tensors
    rows = tuple(RowSlice(key, start, stop, 6) for key, start, stop in pieces)
    view = WeightView(rows, (sum(piece.rows for piece in rows), 6))
    assert bias_beside(view, base) == bias


@pytest.mark.parametrize(
    ("values", "unfit"),
    [
        ({"m.weight": (6, 4)}, []),
        ({"m.weight": (6, 4), "m.bias": (6,)}, []),
        ({"m.weight": (6, 4), "m.bias": (5,)}, ["m.bias"]),
        ({"m.bias": (6,)}, ["m.bias"]),
        ({"norm.weight": (6,)}, ["norm.weight"]),
        ({"m.weight": (4, 4), "m.bias": (4,), "norm.weight": (4,)}, []),
    ],
)
def test_vector_has_another_size_only_with_the_weight_beside_it(
    values: dict[str, tuple[int, ...]], unfit: list[str]
) -> None:
    base = index({"m.weight": (4, 4), "m.bias": (4,), "norm.weight": (4,)}).tensors
    errors, notes = resized_values(index(values).tensors, base, Path("a"))
    assert [e.where.split(": ")[1].split(" is ")[0] for e in errors] == unfit
    assert len(notes) == sum(base[key].shape != shape for key, shape in values.items()) - len(unfit)
