"""A small base in every quantised format, and its adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.files.checkpoint import open_checkpoint
from tests.files import quantised_forms
from tests.files.quantised_forms import SHAPE, Form, note
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

ALL = [f"model.layers.{i}.self_attn.q_proj" for i in range(5)]


NAMES = ALL[:3]


SIZES = (0.0005, 0.02, 0.0, 1e-6, 50.0)
"""Adapters of the layers: one that the scales cover, one that they do not, none; tiny and huge numbers."""


SHAPES = (SHAPE, SHAPE, SHAPE, (32, 64), (288, 64))


WEIGHTS = (0.02, 0.02, 0.02, 2e-6, 60.0)
"""Deviation of the numbers of each layer."""


@contextmanager
def layer_of(name: str) -> Iterator[tuple[int, ...]]:
    """Let the functions of a form work in the shape of a layer."""
    shape = SHAPES[ALL.index(name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", shape)
        yield shape


def base(form: Form, folder: Path, layers: Sequence[str] = NAMES) -> tuple[Path, Tensors]:
    """A checkpoint of quantised layers and a norm: a file, or a folder with its config.json."""
    tensors: Tensors = {"model.norm.weight": rand(8).bfloat16()}
    for number, layer in enumerate(layers):
        with layer_of(layer) as shape:
            weight = rand(*shape, seed=number, scale=WEIGHTS[number])
            weight[3, :64] = 0
            parts = form.make(weight) | note(form)
        if "weight_scale" in parts and (form.config or form.note):
            parts["input_scale"] = torch.tensor(1.5)
        tensors |= {f"{layer}.{last}": value.clone().contiguous() for last, value in parts.items()}
    folder.mkdir()
    file = save(tensors, folder / "model.safetensors")
    tensors = load(file)  # in the order of the file
    if not form.config:
        return file, tensors
    config = {"model_type": "x", "torch_dtype": "bfloat16", "quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


def adapter(layers: Sequence[str] = NAMES) -> Tensors:
    tensors = {}
    for number, (layer, size, (rows, cols)) in enumerate(zip(ALL, SIZES, SHAPES, strict=True)):
        if size and layer in layers:
            tensors[f"base_model.model.{layer}.lora_A.weight"] = rand(4, cols, seed=100 + number)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = rand(rows, 4, seed=200 + number, scale=size)
    return tensors


def parts(tensors: Tensors, layer: str) -> Tensors:
    return {key.removeprefix(f"{layer}."): value for key, value in tensors.items() if key.startswith(f"{layer}.")}


def stored(form: Form, tensors: Tensors, layer: str) -> Tensor:
    with layer_of(layer):
        return form.read(parts(tensors, layer)).double()


def exact(form: Form, tensors: Tensors, layer: str) -> Tensor:
    weight, lora = stored(form, tensors, layer), adapter(ALL)
    if (key := f"base_model.model.{layer}.lora_A.weight") in lora:
        weight = weight + lora[key.replace("_A", "_B")].double() @ lora[key].double()
    return weight


def same(a: Tensor, b: Tensor) -> bool:
    raw = [t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def kept(form: Form, tmp_path: Path) -> None:
    """Merge into a base of the form, and hold the output to what its library reads."""
    source, tensors = base(form, tmp_path / "base", ALL)
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    report = lora_merge.merge(source, save(adapter(ALL), tmp_path / "lora.safetensors"), out)
    written = out / "model.safetensors" if source.is_dir() else out
    merged = load(written)
    assert list(merged) == list(tensors)
    for layer, size in zip(ALL, SIZES, strict=True):
        want, got = (form.turn(v) for v in (exact(form, tensors, layer), stored(form, merged, layer)))
        with layer_of(layer):
            half = form.half_step(parts(merged, layer), want) + form.slack * want.abs()
        worst = float(((got - want).abs() / half.clamp(min=1e-12)).max())
        assert worst <= 1.001, f"{size}: {worst} half steps"
    touched = {f"{layer}.{last}" for layer in ALL if layer != ALL[2] for last in parts(tensors, layer)}
    fixed = ("input_scale", "comfy_quant", "weight_shape", "quant_map", "__nf4", "__fp4", "weight_format")
    assert all(same(merged[k], tensors[k]) for k in tensors if k not in touched or k.endswith(fixed))
    assert all((merged[k].dtype, merged[k].shape) == (tensors[k].dtype, tensors[k].shape) for k in tensors)
    assert report.verified is not None
    assert report.verified["tensors"] == len(ALL) - 1
    noted = any("activation scales stay as they are" in note for note in report.notes)
    assert noted == any(key.endswith("input_scale") for key in tensors)
    if source.is_dir():
        assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def made_plain(form: Form, tmp_path: Path) -> None:
    """Merge a base of the form into plain numbers, and hold them to what its library reads."""
    source, tensors = base(form, tmp_path / "base", ALL)
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora = save(adapter(ALL), tmp_path / "lora.safetensors")
    (tmp_path / "base" / "hf_quant_config.json").write_text("{}")
    lora_merge.merge(source, lora, out, dtype="bf16")
    merged = load(out / "model.safetensors" if source.is_dir() else out)
    assert list(merged) == sorted(["model.norm.weight", *(f"{layer}.weight" for layer in ALL)])
    for layer in ALL:
        want = exact(form, tensors, layer)
        assert (merged[f"{layer}.weight"].double() - want).abs().max() <= want.abs().max() * (2.0**-8 + form.slack)
    if source.is_dir():
        config = json.loads((out / "config.json").read_text())
        assert config == {"model_type": "x", "torch_dtype": "bfloat16"}
        assert not (out / "hf_quant_config.json").exists()
    assert not open_checkpoint(out).packed
