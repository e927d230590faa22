"""Bases that torchao quantised, as transformers saves them: the class of each weight stands in the metadata."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import InputError

from ..support import Tensors, load, rand, save

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
def test_it_is_merged_kept_and_written_plain(
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


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = base(tmp_path / "base", "Int8Tensor", (1, COLS))
    file = folder / "model.safetensors"
    metadata = {f"{NAME}.weight": entry("Int4PreshuffledTensor", (1, COLS)), "tensor_names": "[]"}
    save_file(load(file), file, metadata)
    with pytest.raises(InputError, match="quantised: torchao"):
        lora_merge.merge(folder, lora(tmp_path / "lora.safetensors")[0], tmp_path / "out")


def stored() -> dict[str, tuple[Tensors, str]]:
    """Name → the tensors of a layer of 40 rows as torchao 0.18.0 stores it, with what it reads back in `want`, and its
    entry of the metadata. A part of one row is zeros."""
    raw = lzma.decompress((Path(__file__).parent / "torchao.safetensors.xz").read_bytes())
    size = int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8 : 8 + size])["__metadata__"]
    found: dict[str, Tensors] = {name: {} for name in metadata}
    for key, value in load_bytes(raw).items():
        name, _, last = key.partition("/")
        powers = last == "_weight_scale" and value.dtype == torch.uint8  # the library reads no such dtype from memory
        found[name][last] = value.view(torch.float8_e8m0fnu) if powers else value
    return {name: (tensors, metadata[name]) for name, tensors in found.items()}


STORED = stored()


@pytest.mark.parametrize("name", STORED)
def test_floats_of_few_bits_are_read_as_torchao_reads_them(name: str, tmp_path: Path) -> None:
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
