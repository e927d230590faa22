"""Bases that torchao quantised, as transformers saves them: the class of each weight stands in the metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import InputError, UsageError
from tests.files.torchao_forms import STORED
from tests.files.torchao_layers import LAYERS, flat, read
from tests.kit.files import load, save
from tests.kit.quantised import same
from tests.kit.tensors import Tensors, rand

NAME = "model.layers.0.self_attn.q_proj"
ROWS, COLS = 24, 32


def entry(kind: str, block: tuple[int, int]) -> str:
    """The metadata of one weight, as torchao 0.18 writes them; `kind` is the class."""
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    return json.dumps({"_type": kind, "_data": {"block_size": block, "dtype": dtype}, "_tensor_data_names": ["qdata"]})


def base(folder: Path, kind: str, block: tuple[int, int], zero: int | None = None) -> tuple[Path, Tensors]:
    """A folder with one quantised layer, and its tensors."""
    weight, limit = rand(ROWS, COLS, scale=0.02), 100.0
    blocks = weight.view(ROWS // block[0], block[0], COLS // block[1], block[1])
    scale = blocks.abs().amax((1, 3)) / limit
    levels = weight / spread(scale, block) + (zero or 0)
    codes = levels.round().to(torch.int8) if kind == "Int8Tensor" else levels.to(torch.float8_e4m3fn)
    parts = {"qdata": codes, "scale": scale}
    if zero is not None:
        parts["zero_point"] = torch.full(scale.shape, zero, dtype=torch.int8)
    found = {f"{NAME}._weight_{part}": value for part, value in parts.items()} | {"model.norm.weight": torch.ones(8)}
    folder.mkdir()
    plain = {"model.norm.weight": json.dumps({"_type": "Tensor"})}
    names = {"tensor_names": json.dumps([f"{NAME}.weight", *plain])}
    save_file(found, folder / "model.safetensors", {f"{NAME}.weight": entry(kind, block), **plain, **names})
    config = {"model_type": "x", "quantization_config": {"quant_method": "torchao"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, found


def spread(scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def decoded(found: Tensors, block: tuple[int, int]) -> torch.Tensor:
    """(q − z) · s, as torchao's dequantize_affine."""
    codes, scale = found[f"{NAME}._weight_qdata"].float(), found[f"{NAME}._weight_scale"]
    zero = found.get(f"{NAME}._weight_zero_point", torch.zeros(scale.shape))
    return (codes - spread(zero.float(), block)) * spread(scale, block)


def lora(path: Path) -> tuple[Path, torch.Tensor]:
    down, up = rand(4, COLS, seed=1), rand(ROWS, 4, seed=2, scale=0.02)
    name = f"base_model.model.{NAME}.lora"
    return save({f"{name}_A.weight": down, f"{name}_B.weight": up}, path), up @ down


@pytest.mark.parametrize(
    ("kind", "block", "zero"),
    [("Int8Tensor", (1, COLS), 0), ("Int8Tensor", (1, 8), 3), ("Float8Tensor", (1, COLS), None),
     ("Float8Tensor", (ROWS, COLS), None)],
)  # fmt: skip
def test_torchao_base_is_merged_kept_and_written_plain(
    kind: str, block: tuple[int, int], zero: int | None, tmp_path: Path
) -> None:
    folder, before = base(tmp_path / "base", kind, block, zero)
    adapter, change = lora(tmp_path / "lora.safetensors")
    want = decoded(before, block) + change
    lora_merge.merge(folder, adapter, tmp_path / "kept")
    after = load(tmp_path / "kept" / "model.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in after.items()} == {k: (v.dtype, v.shape) for k, v in before.items()}
    step = spread(after[f"{NAME}._weight_scale"], block) * (1 if kind == "Int8Tensor" else 32)
    assert ((decoded(after, block) - want).abs() <= step / 2 * 1.001).all()
    if zero == 0:  # kernels of torchao take such weights for symmetric
        assert not after[f"{NAME}._weight_zero_point"].any()
    with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as made:
        assert made.metadata()[f"{NAME}.weight"] == entry(kind, block)
    lora_merge.merge(folder, adapter, tmp_path / "plain", dtype="fp32")
    after = load(tmp_path / "plain" / "model.safetensors")
    torch.testing.assert_close(after[f"{NAME}.weight"], want)
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as made:
        assert not made.metadata().keys() & {f"{NAME}.weight", "tensor_names", "model.norm.weight"}


def test_unknown_classes_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = base(tmp_path / "base", "Int8Tensor", (1, COLS))
    file = folder / "model.safetensors"
    metadata = {f"{NAME}.weight": entry("Int4PreshuffledTensor", (1, COLS)), "tensor_names": "[]"}
    save_file(load(file), file, metadata)
    with pytest.raises(InputError, match="quantised: torchao"):
        lora_merge.merge(folder, lora(tmp_path / "lora.safetensors")[0], tmp_path / "out")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STORED)
def test_layer_is_read_as_torchao_reads_it(name: str, tmp_path: Path) -> None:
    layer, told = STORED[name]
    tensors = {f"{NAME}.{last}": value for last, value in layer.items() if last != "want"}
    tensors[f"{NAME}._weight_act_per_tensor_scale"] = torch.tensor(0.5)
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors", {f"{NAME}.weight": told, "tensor_names": "[]"})
    config = {"model_type": "x", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    down, up = rand(4, 64, seed=1), rand(40, 4, seed=2, scale=0.02)
    stem = f"base_model.model.{NAME}.lora"
    adapter = save({f"{stem}_A.weight": down, f"{stem}_B.weight": up}, tmp_path / "lora.safetensors")
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "plain", dtype="fp32")
    made = load(tmp_path / "plain" / "model.safetensors")
    assert [*made] == [f"{NAME}.weight"]
    torch.testing.assert_close(made[f"{NAME}.weight"], layer["want"] + up @ down, rtol=1e-6, atol=1e-6)
    lora_merge.merge(tmp_path / "base", adapter, tmp_path / "kept")
    assert lora_merge.verify(tmp_path / "kept", full=True)["full"]
    kept = load(tmp_path / "kept" / "model.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in kept.items()} == {k: (v.dtype, v.shape) for k, v in tensors.items()}
    assert kept[f"{NAME}._weight_act_per_tensor_scale"] == 0.5


STEP = {"Int8": 0.5, "Intx": 0.5, "Float8": 16.0, "MX": 16.0, "NVFP4": 1.0}
"""Class → half a step, at most, of the codes where their scale is 1."""


def scales(name: str, tensors: Tensors, layer: str) -> torch.Tensor:
    """A scale for each number of a layer."""
    found = tensors[f"{layer}._weight_scale"]
    if "tiles" in name:
        from comfy_kitchen.float_utils import from_blocked

        rows, cols = (-(-ROWS // 128) * 128, 4)
        found = from_blocked(found.view(torch.uint8), num_rows=rows, num_cols=cols).view(found.dtype)[:ROWS]
        found = found[:, : 2 if name.startswith("MX") else 4].contiguous()
    found = found.float() * tensors.get(f"{layer}._weight_per_tensor_scale", torch.ones(()))
    wide = found.reshape(-1, found.shape[-1] if found.dim() > 1 else 1)
    return wide.repeat_interleave(ROWS // len(wide), 0).repeat_interleave(64 // wide.shape[1], 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_torchao_reads_what_is_merged_into_its_own_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed; pip install .[oracles] has it")
    layers = [f"model.layers.{n}.self_attn.q_proj" for n in range(2)]
    tensors, metadata = flat(name, {f"{n}.weight": rand(ROWS, 64, seed=i, scale=0.02) for i, n in enumerate(layers)})
    base, down = tmp_path / "base", rand(4, 64, seed=1)
    base.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, base / "model.safetensors", metadata)
    config = {"model_type": "x", "quantization_config": {"quant_method": "torchao"}}
    (base / "config.json").write_text(json.dumps(config))
    before, want = read(tensors, metadata), {}
    for size, layer in zip((0.0005, 0.02), layers, strict=True):
        up = rand(ROWS, 4, seed=2, scale=size)
        stem = f"base_model.model.{layer}.lora"
        adapter = save({f"{stem}_A.weight": down, f"{stem}_B.weight": up}, tmp_path / "lora.safetensors")
        want[layer] = before[f"{layer}.weight"].double() + up.double() @ down.double()
        lora_merge.merge(base, adapter, tmp_path / "plain", dtype="fp32", overwrite=True)
        lora_merge.merge(base, adapter, tmp_path / "kept", overwrite=True)
        plain = load(tmp_path / "plain" / "model.safetensors")
        torch.testing.assert_close(plain[f"{layer}.weight"].double(), want[layer], rtol=1e-6, atol=1e-7)
        with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as file:
            made, told = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        made = {key: value.view(tensors[key].dtype) for key, value in made.items()}
        after = read(made, told)
        kind = next(step for start, step in STEP.items() if name.startswith(start))
        kind = 1.0 if name == "MXTensor e2m1" else kind
        off = (after[f"{layer}.weight"].double() - want[layer]).abs()
        assert (off <= 1.01 * kind * scales(name, made, layer)).all()
        others = [key for key in tensors if not key.startswith(layer)]
        assert all(same(made[k], tensors[k]) for k in others)


def test_no_user_writes_an_entry_on_the_codes_of_the_base(tmp_path: Path) -> None:
    """Those of torchao are the names of its tensors, and the list of these."""
    folder, _ = base(tmp_path / "base", "Int8Tensor", (1, COLS), 0)
    adapter, _ = lora(tmp_path / "lora.safetensors")
    for key in ("tensor_names", f"{NAME}.weight", "model.norm.weight"):
        with pytest.raises(UsageError, match="writes this entry itself"):
            lora_merge.plan(folder, adapter, tmp_path / "out", metadata={key: "x"})
    lora_merge.plan(folder, adapter, tmp_path / "out", metadata={"note": "x"})
