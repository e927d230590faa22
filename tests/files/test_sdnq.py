"""SDNQ with low-rank parts, rotations, convolutions and odd bits: read as its library reads them, written never."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError
from tests.files.sdnq_layers import ROWS, quantised, stored
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

LAYER = "transformer_blocks.0.attn.to_q"
OTHER = "transformer_blocks.1.attn.to_k"
STORED = stored()
KEPT = ("low-rank uint4", "low-rank int8", "low-rank float8", "rotated uint4")
"""Rows that are written again."""


def base(folder: Path, layers: Mapping[str, Tensors], settings: Mapping[str, Any]) -> Path:
    folder.mkdir()
    found = {
        f"{name}.{last}": t.clone() for name, layer in layers.items() for last, t in layer.items() if last != "want"
    }
    save({**found, "norm.weight": torch.ones(8)}, folder / "model.safetensors")
    section = {"quant_method": "sdnq", **settings}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": section}))
    return folder


def adapter(path: Path, shape: tuple[int, ...]) -> tuple[Path, torch.Tensor]:
    down, up = rand(2, *shape[1:], seed=1), rand(shape[0], 2, *[1] * (len(shape) - 2), seed=2, scale=0.02)
    save({f"{LAYER}.lora_A.weight": down, f"{LAYER}.lora_B.weight": up}, path)
    return path, (up.double().flatten(1) @ down.double().flatten(1)).view(shape)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ROWS)
def test_layer_is_read_as_its_library_reads_it(name: str, tmp_path: Path) -> None:
    shape, settings = ROWS[name]
    source = base(tmp_path / "base", {LAYER: STORED[name], OTHER: STORED[name]}, settings)
    lora, change = adapter(tmp_path / "lora.safetensors", shape)
    lora_merge.merge(source, lora, tmp_path / "out", dtype="fp32")
    made, want = load(tmp_path / "out" / "model.safetensors"), STORED[name]["want"].double()
    assert {*made} == {f"{LAYER}.weight", f"{OTHER}.weight", "norm.weight"}
    torch.testing.assert_close(made[f"{LAYER}.weight"].double(), want + change, rtol=0, atol=2e-7)
    torch.testing.assert_close(made[f"{OTHER}.weight"].double(), want, rtol=0, atol=1e-7)
    assert lora_merge.verify(tmp_path / "out", full=True)["full"]
    if name in KEPT:
        return
    with pytest.raises(InputError, match="8, 4 and 2 bits alone") as caught:
        lora_merge.merge(source, lora, tmp_path / "kept")
    assert 'dtype="bf16"' in caught.value.fix


@pytest.mark.few(2)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", KEPT)
def test_remainder_of_a_low_rank_part_is_encoded_again(name: str, rounding: str, tmp_path: Path) -> None:
    """In the rotated basis, where it is; within half a step of the scales in the output, or one."""
    layer, (shape, settings) = STORED[name], ROWS[name]
    source, (lora, change) = base(tmp_path / "base", {LAYER: layer}, settings), adapter(tmp_path / "lora", shape)
    lora_merge.merge(source, lora, tmp_path / "kept", rounding=rounding, seed=1)
    assert lora_merge.verify(tmp_path / "kept", full=True)["full"]
    made = {key.removeprefix(f"{LAYER}."): t for key, t in load(tmp_path / "kept" / "model.safetensors").items()}
    assert all(torch.equal(made[last], layer[last]) for last in ("svd_up", "svd_down") if last in layer)
    assert {last: (t.dtype, t.shape) for last, t in layer.items() if last != "want"} == {
        last: (t.dtype, t.shape) for last, t in made.items() if last != "norm.weight"
    }
    lora_merge.merge(tmp_path / "kept", [(lora, 0.0)], tmp_path / "plain", dtype="fp32")
    got = load(tmp_path / "plain" / "model.safetensors")[f"{LAYER}.weight"].double()
    off = (got - layer["want"].double() - change).reshape(shape[0], -1, 64 if settings.get("use_hadamard") else 1)
    size = int(shape[1] / (made["scale"].numel() / shape[0]))
    step = made["scale"].double().reshape(shape[0], -1).abs().repeat_interleave(size, 1)
    step = step * (16 if "float8" in name else 0.5) * (2 if rounding == "stochastic" else 1)
    assert (off.flatten(1).norm(dim=1) <= step.norm(dim=1)).all()
    if "use_hadamard" not in settings:
        assert (off.flatten(1).abs() <= 1.001 * step).all()
    if find_spec("sdnq") is not None:
        reader, _ = quantised(name, torch.zeros(shape))
        read = reader(**{k: t for k, t in made.items() if k != "norm.weight"}, dtype=torch.float32, skip_compile=True)
        torch.testing.assert_close(read.double(), got, rtol=0, atol=2e-7)


BY_LAYER: dict[str, dict[str, Any]] = {
    "a level": {"modules_dtype_dict": {"uint6": ["to_k"]}},
    "a beginning": {"modules_dtype_dict": {"uint6": [".transformer_blocks.1"]}},
    "a glob": {"modules_dtype_dict": {"uint6": ["transformer_blocks.*.to_k*"]}},
    "at least so many bits": {"modules_dtype_dict": {"minimum_uint6": ["to_k"]}},
    "its own settings": {"modules_quant_config": {"to_k": {"weights_dtype": "uint6"}}},
}


@pytest.mark.parametrize("how", BY_LAYER)
def test_single_layers_may_have_another_type(how: str, tmp_path: Path) -> None:
    settings = {"weights_dtype": "uint4", **BY_LAYER[how]}
    layers = {LAYER: STORED["low-rank uint4"], OTHER: STORED["uint6"]}
    source, (lora, change) = base(tmp_path / "base", layers, settings), adapter(tmp_path / "lora", (4, 64))
    lora_merge.merge(source, lora, tmp_path / "out", dtype="fp32")
    made = load(tmp_path / "out" / "model.safetensors")
    for name, extra in ((LAYER, change), (OTHER, torch.zeros(()))):
        torch.testing.assert_close(
            made[f"{name}.weight"].double(), layers[name]["want"].double() + extra, rtol=0, atol=2e-7
        )


BAD: dict[str, tuple[str, dict[str, torch.Tensor | None], dict[str, Any]]] = {
    "a type that is packed otherwise": ("uint6", {}, {"weights_dtype": "uint4"}),
    "a type without zero points": ("uint6", {}, {"weights_dtype": "int6"}),
    "one factor of two": ("low-rank uint4", {"svd_up": None}, {}),
    "factors of other ranks": ("low-rank uint4", {"svd_up": torch.ones(4, 3)}, {}),
    "codes of odd length": ("uint6", {"weight": torch.zeros(63, 3, dtype=torch.uint8)}, {}),
    "scales of other places": ("convolution int8", {"scale": torch.ones(4, 1, 3, 2)}, {}),
    "groups that do not divide": ("uint5", {"scale": torch.ones(4, 3, 1), "zero_point": torch.ones(4, 3, 1)}, {}),
    "a rotation of another kind": ("rotated uint4", {}, {"hadamard_group_size": 32}),
    "a codebook": ("low-rank uint4", {}, {"use_codebook": True}),
    "the order of a product": ("low-rank uint4", {}, {"use_quantized_matmul": True}),
    "scales that are codes": ("uint6", {"scale_2": torch.ones(1)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_settings_that_contradict_each_other_or_are_not_read_are_refused(what: str, tmp_path: Path) -> None:
    name, changes, entries = BAD[what]
    layer = {last: value for last, value in {**STORED[name], **changes}.items() if value is not None}
    source = base(tmp_path / "base", {LAYER: layer}, {**ROWS[name][1], **entries})
    lora, _ = adapter(tmp_path / "lora.safetensors", ROWS[name][0])
    with pytest.raises(InputError, match="the base is quantised: SDNQ"):
        lora_merge.merge(source, lora, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("last", ["scale", "zero_point", "svd_up", "svd_down"])
def test_factors_that_are_no_numbers_are_refused(last: str, tmp_path: Path) -> None:
    layer = {key: value.clone() for key, value in STORED["low-rank uint4"].items()}
    layer[last].view(-1)[-1] = float("nan")
    source = base(tmp_path / "base", {LAYER: layer}, ROWS["low-rank uint4"][1])
    lora, _ = adapter(tmp_path / "lora.safetensors", (4, 64))
    with pytest.raises(InputError, match="not a finite number"):
        lora_merge.merge(source, lora, tmp_path / "out", dtype="bf16")
