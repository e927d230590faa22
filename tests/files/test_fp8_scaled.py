"""fp8 with one scale for a weight, in both of ComfyUI's styles. Its own library writes the bases and reads the outputs."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import TensorCoreFP8Layout
from torch import Tensor

import lora_merge
from lora_merge.errors import InputError, VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.viewing.inspect import inspect
from tests.kit.command_line import run
from tests.kit.files import load, metadata, save
from tests.kit.tensors import Tensors, rand

COVERED = {torch.float8_e4m3fn: 464, torch.float8_e5m2: 61440}
"""Dtype → what still rounds to its largest number."""
STYLES = ("old", "new", "entry")
CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
HALF_STEPS = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.float8_e5m2: (2.0**-3, 2.0**-17)}
"""Dtype → half a step, as a share of a number, and the least it is."""
LAYERS = [f"model.layers.{i}.self_attn.{n}_proj" for i, n in product(range(3), "qk")]
PLAIN = "model.layers.0.input_layernorm"
UNSCALED = "model.layers.0.mlp.up_proj"
ENTRY = "_quantization_metadata"


def packed(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    codes, params = TensorCoreFP8Layout.quantize(weight, scale="recalculate", dtype=CODES[form])
    return codes, params.scale


def unpacked(codes: Tensor, scale: Tensor) -> Tensor:
    params = TensorCoreFP8Layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=tuple(codes.shape))
    return TensorCoreFP8Layout.dequantize(codes, params)


def scale_name(style: str, layer: str) -> str:
    return f"{layer}.{'scale_weight' if style == 'old' else 'weight_scale'}"


def base(style: str, form: str = "float8_e4m3fn") -> tuple[Tensors, dict[str, str]]:
    """Six quantised layers, a plain one, a norm; and the metadata of the file."""
    found: Tensors = {f"{PLAIN}.weight": rand(8).bfloat16(), f"{UNSCALED}.weight": rand(16, 8).to(CODES[form])}
    for n, layer in enumerate(LAYERS):
        codes, scale = packed(rand(48, 32, seed=n, scale=0.02), form)
        found[f"{layer}.weight"], found[scale_name(style, layer)] = codes, scale if n % 2 else scale.reshape(1)
        found[f"{layer}.{'scale_input' if style == 'old' else 'input_scale'}"] = torch.tensor(1.5)
        if style == "new":
            text = json.dumps({"format": form, "full_precision_matrix_mult": True}).encode()
            found[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    if style == "old":
        found["scaled_fp8"] = torch.zeros(2).to(CODES[form])
    entry = {"format_version": "1.0", "layers": {layer: {"format": form} for layer in LAYERS}}
    return found, {"made by": "a test", **({ENTRY: json.dumps(entry)} if style == "entry" else {})}


def adapter(layers: list[str], size: float = 0.02, **more: Tensor) -> Tensors:
    found = {}
    for n, layer in enumerate(layers):
        found[f"base_model.model.{layer}.lora_A.weight"] = rand(4, 32, seed=100 + n)
        found[f"base_model.model.{layer}.lora_B.weight"] = rand(48, 4, seed=200 + n, scale=size)
    return found | more


def exact(tensors: Tensors, style: str, lora: Tensors) -> dict[str, Tensor]:
    """Every quantised weight with its change, in fp64."""
    found = {}
    for layer in LAYERS:
        found[layer] = unpacked(tensors[f"{layer}.weight"], tensors[scale_name(style, layer)]).double()
        if f"base_model.model.{layer}.lora_A.weight" in lora:
            down, up = (lora[f"base_model.model.{layer}.lora_{x}.weight"].double() for x in "AB")
            found[layer] = found[layer] + up @ down
    return found


def within_half_a_step(codes: Tensor, scale: Tensor, want: Tensor) -> None:
    share, least = HALF_STEPS[codes.dtype]
    step = torch.maximum(2.0 ** torch.floor(torch.log2(want.abs() / scale)) * share, torch.tensor(least)) * scale
    assert ((unpacked(codes, scale).double() - want).abs() <= step * 1.0001).all()


def same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "growing"), [(0.002, 0), (0.02, 1), (2.0, 3)])
@pytest.mark.parametrize("form", list(CODES))
@pytest.mark.parametrize("style", STYLES)
def test_unchanged_weights_stay_and_others_are_rounded_once(
    style: str, form: str, size: float, growing: int, tmp_path: Path
) -> None:
    tensors, entries = base(style, form)
    lora = adapter(LAYERS[:3], size)
    source, out = save(tensors, tmp_path / "base.safetensors", entries), tmp_path / "out.safetensors"
    report = lora_merge.merge(source, save(lora, tmp_path / "lora.safetensors"), out)
    made, want = load(out), exact(tensors, style, lora)
    assert [*open_checkpoint(out).tensors] == [*open_checkpoint(source).tensors]
    assert entries.items() <= metadata(out).items()
    grown = 0
    for layer in LAYERS[:3]:
        scale, old = made.pop(scale_name(style, layer)), tensors[scale_name(style, layer)]
        within_half_a_step(made.pop(f"{layer}.weight"), scale, want[layer])
        assert (scale.dtype, scale.shape) == (old.dtype, old.shape)
        assert torch.equal(scale, old) == (want[layer].abs().max() <= old * COVERED[CODES[form]])
        if not torch.equal(scale, old):
            grown += 1
            torch.testing.assert_close(scale.reshape(()), packed(want[layer].float(), form)[1], rtol=1e-6, atol=0)
    assert grown == growing
    assert all(same(made[key], tensors[key]) for key in made)
    assert report.verified is not None
    assert report.verified["tensors"] == 3


def test_change_that_depends_on_the_weight_is_made_of_the_weight_with_its_scale(tmp_path: Path) -> None:
    """DoRA; other changes are added in units of the scale. Scales far from 1 make no difference to either."""
    tensors, entries = base("old")
    for n, layer in enumerate(LAYERS):
        tensors[scale_name("old", layer)] *= (1, 2.0**-40, 2.0**20)[n % 3]
    magnitude = {f"base_model.model.{LAYERS[0]}.lora_magnitude_vector": torch.full((48,), 0.15)}
    source = save(tensors, tmp_path / "base.safetensors", entries)
    lora = save(adapter(LAYERS[:3], **magnitude), tmp_path / "lora.safetensors")
    report = lora_merge.merge(source, lora, tmp_path / "out.safetensors")
    want = lora_merge.verify(tmp_path / "out.safetensors", full=True)["numbers"]["tensors"]
    assert len(want) == 3
    for key, numbers in report.numbers["tensors"].items():
        assert numbers["weight"] == pytest.approx(want[key]["weight"], rel=1e-3)
        assert numbers["change"] == pytest.approx(want[key]["change"], rel=1e-3)


@pytest.mark.parametrize("style", STYLES)
def test_ordinary_checkpoint_comes_out_of_another_dtype(style: str, tmp_path: Path) -> None:
    tensors, entries = base(style)
    lora = adapter(LAYERS[:3])
    source, out = save(tensors, tmp_path / "base.safetensors", entries), tmp_path / "out.safetensors"
    lora_merge.merge(source, save(lora, tmp_path / "lora.safetensors"), out, dtype="bf16")
    made = load(out)
    assert made.keys() == {f"{layer}.weight" for layer in (*LAYERS, PLAIN, UNSCALED)}
    assert ENTRY not in metadata(out)
    for layer, want in exact(tensors, style, lora).items():
        assert made[f"{layer}.weight"].dtype == torch.bfloat16
        torch.testing.assert_close(made[f"{layer}.weight"].double(), want, rtol=2.0**-8, atol=0)
    assert not open_checkpoint(out).packed
    assert run("verify", out, "--full").code == 0


def test_windows_threads_and_memory_do_not_change_a_byte(tmp_path: Path) -> None:
    """Also where the scale lies in another shard than its weight, and where two outputs share their windows."""
    tensors, _ = base("new")
    folder = tmp_path / "sharded"
    folder.mkdir()
    shards = [{k: v for k, v in tensors.items() if k.endswith("scale") != first} for first in (True, False)]
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save(shard, folder / name)
    table = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    whole = save(tensors, tmp_path / "base.safetensors")
    lora = save(adapter(LAYERS[:4], 2.0), tmp_path / "lora.safetensors")
    lora_merge.merge(whole, lora, tmp_path / "one.safetensors", max_memory=8 << 20)
    lora_merge.merge(folder, lora, tmp_path / "two")
    jobs = tmp_path / "jobs.yaml"
    entry = "  - {adapters: [{path: lora.safetensors, strength: %s}], output: at-%s.safetensors}\n"
    lines = "".join(entry % (strength, strength) for strength in (1.0, 0.001))
    jobs.write_text(f"version: 1\ndefaults: {{base: base.safetensors}}\njobs:\n{lines}")
    lora_merge.run_batch(jobs)
    found = [load(tmp_path / "one.safetensors"), load(tmp_path / "at-1.0.safetensors")]
    found.append(load(tmp_path / "two" / names[0]) | load(tmp_path / "two" / names[1]))
    found.append(lora_merge.merge_state_dict(tensors, [load(lora)]))
    weak = load(tmp_path / "at-0.001.safetensors")
    for key in tensors:
        assert all(same(found[0][key], other[key]) for other in found[1:]), key
        assert not key.endswith("scale") or same(weak[key], tensors[key])


def test_component_of_a_pipeline_keeps_its_scales_under_its_own_names(tmp_path: Path) -> None:
    tensors, _ = base("new")
    (tmp_path / "text_encoder").mkdir()
    save(tensors, tmp_path / "text_encoder" / "model.safetensors")
    classes = {"_class_name": "A", "text_encoder": ["transformers", "B"]}
    (tmp_path / "model_index.json").write_text(json.dumps(classes))
    index = open_checkpoint(tmp_path)
    assert index.packed.keys() == {f"text_encoder.{layer}.weight" for layer in LAYERS}
    for packing in index.packed.values():
        assert packing.names <= index.tensors.keys()
        assert all(index.tensors[part.info.name] is part.info for part in packing.parts.values())
    assert not index.unread.parts


def test_formula_reads_the_weights_and_not_their_codes(tmp_path: Path) -> None:
    """DoRA divides by the length of the merged rows."""
    tensors, entries = base("new")
    magnitude = rand(48, seed=7, scale=1.0).abs()
    lora = adapter(LAYERS[:1], **{f"base_model.model.{LAYERS[0]}.lora_magnitude_vector": magnitude})
    source = save(tensors, tmp_path / "base.safetensors", entries)
    lora_merge.merge(source, save(lora, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors", dtype="fp32")
    sums = exact(tensors, "new", lora)[LAYERS[0]]
    want = magnitude.double()[:, None] * sums / sums.norm(dim=1, keepdim=True)
    made = load(tmp_path / "out.safetensors")[f"{LAYERS[0]}.weight"].double()
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_scale_that_is_no_positive_number_is_refused(number: float, dtype: str, tmp_path: Path) -> None:
    tensors, entries = base("old")
    tensors[f"{LAYERS[0]}.scale_weight"] = torch.tensor(number)
    source = save(tensors, tmp_path / "base.safetensors", entries)
    lora = save(adapter(LAYERS[:1]), tmp_path / "lora.safetensors")
    with pytest.raises(InputError, match="scale is not a positive number") as caught:
        lora_merge.merge(source, lora, tmp_path / "out.safetensors", dtype=dtype)
    assert LAYERS[0] in caught.value.where
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(InputError, match="scale is not a positive number"):
        lora_merge.merge_state_dict(tensors, [load(lora)], dtype=dtype)


STRANGE: dict[str, dict[str, Any]] = {
    "two numbers": {"weight_scale": torch.ones(2)},
    "a scale for every row but one": {"weight_scale": torch.ones(47, 1)},
    "a scale of whole numbers": {"weight_scale": torch.tensor(1, dtype=torch.int32)},
    "codes of another dtype": {"weight": torch.zeros(48, 32, dtype=torch.int8)},
    "another format": {"comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)},
    "no JSON": {"comfy_quant": torch.tensor(list(b"{" * 300), dtype=torch.uint8)},
    "a JSON without end": {"comfy_quant": torch.tensor(list(b"[" * 5000), dtype=torch.uint8)},
    "a list": {"comfy_quant": torch.tensor(list(b"[1, 2]"), dtype=torch.uint8)},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", list(STRANGE))
def test_layer_that_is_stored_otherwise_is_refused_and_the_others_are_not(case: str, tmp_path: Path) -> None:
    tensors, entries = base("new")
    tensors.update({f"{LAYERS[0]}.{last}": value for last, value in STRANGE[case].items()})
    source = save(tensors, tmp_path / "base.safetensors", entries)
    loras = [save(adapter([layer]), tmp_path / f"{n}.safetensors") for n, layer in enumerate(LAYERS[:2])]
    for dtype, lora in (("keep", loras[0]), ("bf16", loras[1])):
        with pytest.raises(InputError, match="the base is quantised"):
            lora_merge.merge(source, lora, tmp_path / "out.safetensors", dtype=dtype)
        with pytest.raises(InputError, match="the base is quantised"):
            lora_merge.merge_state_dict(tensors, [load(lora)], dtype=dtype)
    lora_merge.merge(source, loras[1], tmp_path / "out.safetensors")
    made = load(tmp_path / "out.safetensors")
    assert all(same(made[key], tensors[key]) for key in tensors if not key.startswith(LAYERS[1]))


@pytest.mark.parametrize("last", ["strange_scale", "weight_rescale", "scales_of_rows"])
def test_scale_of_an_unknown_kind_is_not_ignored(last: str, tmp_path: Path) -> None:
    """The codes alone are not the weight. Scales of activations, and of what is no weight, are no sign."""
    key = "double_blocks.0.img_attn.qkv"
    plain = {f"{key}.weight": rand(48, 32).to(torch.float8_e4m3fn), f"{key}.input_scale": torch.tensor(2.0)}
    lora = save(adapter([key]), tmp_path / "lora.safetensors")
    lora_merge.merge(save(plain, tmp_path / "plain.safetensors"), lora, tmp_path / "out.safetensors")
    source = save(plain | {f"{key}.{last}": torch.tensor(2.0)}, tmp_path / "base.safetensors")
    with pytest.raises(InputError, match="scales of an unknown kind"):
        lora_merge.merge(source, lora, tmp_path / "again.safetensors")


@pytest.mark.parametrize("text", ["", "[]", '{"layers": 3}', '{"layers": {"x": 1}}', "[" * 3000])
def test_metadata_that_says_nothing_of_layers_is_a_reason_to_refuse(text: str, tmp_path: Path) -> None:
    tensors, _ = base("entry")
    source = save(tensors, tmp_path / "base.safetensors", {ENTRY: text})
    with pytest.raises(InputError, match="the base is quantised"):
        lora_merge.merge(source, save(adapter(LAYERS[:1]), tmp_path / "a.safetensors"), tmp_path / "out.safetensors")


def test_whole_weight_in_its_place_is_stored_in_the_same_format(tmp_path: Path) -> None:
    tensors, entries = base("new")
    for scale in (0.001, 30.0):  # one that the scale of the base covers, and one that it does not
        new = rand(48, 32, scale=scale)
        lora = adapter(LAYERS[:1]) | {f"base_model.model.{LAYERS[1]}.weight": new}
        source, out = save(tensors, tmp_path / "base.safetensors", entries), tmp_path / "out.safetensors"
        lora_merge.merge(source, save(lora, tmp_path / "a.safetensors"), out, overwrite=True)
        made = load(out)
        assert made.keys() == tensors.keys()
        codes, factor = made[f"{LAYERS[1]}.weight"], made[f"{LAYERS[1]}.weight_scale"]
        error = (codes.float() * factor - new).abs()
        assert (error <= new.abs() * 2.0**-4 + factor * 2.0**-10).all()


@pytest.mark.parametrize("style", STYLES)
def test_inspect_shows_how_weights_are_stored(style: str, tmp_path: Path) -> None:
    tensors, entries = base(style)
    assert inspect(save(tensors, tmp_path / "base.safetensors", entries))["quantised"] == "6 weights as fp8_scaled"


@pytest.mark.parametrize("what", ["a scale", "a code", "an untouched scale", "an untouched code"])
def test_proof_finds_what_was_changed(what: str, tmp_path: Path) -> None:
    tensors, entries = base("new")
    source = save(tensors, tmp_path / "base.safetensors", entries)
    out = tmp_path / "out.safetensors"
    lora_merge.merge(source, save(adapter(LAYERS[:1]), tmp_path / "lora.safetensors"), out)
    layer = LAYERS[1] if "untouched" in what else LAYERS[0]
    info = open_checkpoint(out).tensors[f"{layer}.{'weight_scale' if 'scale' in what else 'weight'}"]
    raw = bytearray(out.read_bytes())
    raw[info.offset + (2 if "scale" in what else 5)] ^= 0x10
    out.write_bytes(raw)
    done = run("verify", out, "--full")
    assert done.code == VerificationFailed.exit_code, done.err + done.out


@pytest.mark.parametrize("kind", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_fp8_without_a_negative_zero_is_read_and_never_written(kind: str, tmp_path: Path) -> None:
    """A byte of it read as e4m3fn or e5m2 would be twice the number."""
    name, out = "model.layers.0.self_attn.q_proj", tmp_path / "out.safetensors"
    weight = rand(64, 48).to(getattr(torch, kind))
    down, up = rand(4, 48, seed=1), rand(64, 4, seed=2)
    source = save({f"{name}.weight": weight, "norm.weight": torch.ones(8)}, tmp_path / "base.safetensors")
    lora = save({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, out, dtype="fp32")
    torch.testing.assert_close(load(out)[f"{name}.weight"], weight.float() + up @ down)
    assert lora_merge.verify(out, full=True)["full"]
    with pytest.raises(InputError, match="only some AMD devices") as caught:
        lora_merge.merge(source, lora, tmp_path / "kept.safetensors")
    assert 'dtype="bf16"' in caught.value.fix
    scaled = {f"{name}.weight": weight, f"{name}.weight_scale": torch.tensor(0.5)}
    with pytest.raises(InputError, match="quantised"):
        lora_merge.merge(save(scaled, source), lora, tmp_path / "kept.safetensors", dtype="bf16")


@pytest.mark.parametrize("shape", [(16, 8, 3), (16, 8, 3, 3), (16, 4, 3, 3, 3)])
@pytest.mark.parametrize("axes", ["all", "one"])
def test_convolution_has_a_scale_for_each_output_channel(shape: tuple[int, ...], axes: str, tmp_path: Path) -> None:
    """Its scales have as many axes as its weight, or one."""
    name, plain, single = "input_blocks.3.0.op", rand(*shape, scale=0.02), (1,) * (len(shape) - 1)
    scale = (plain.flatten(1).abs().amax(1) / 127).view(-1, *single)
    codes = (plain / scale).round().to(torch.int8)
    mark = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    stored = {
        f"{name}.weight": codes,
        f"{name}.weight_scale": scale if axes == "all" else scale.flatten(),
        f"{name}.comfy_quant": mark,
    }
    up, down = rand(16, 4, seed=1, scale=0.05), rand(4, codes[0].numel(), seed=2, scale=0.05)
    lora = {f"{name}.lora_up.weight": up.view(16, 4, *single[1:]), f"{name}.lora_down.weight": down.view(4, *shape[1:])}
    out = tmp_path / "out.safetensors"
    lora_merge.merge(save(stored, tmp_path / "base.safetensors"), save(lora, tmp_path / "lora.safetensors"), out)
    made, want = load(out), codes * scale + (up @ down).view(shape)
    new = made[f"{name}.weight_scale"]
    assert new.shape == stored[f"{name}.weight_scale"].shape
    steps = (made[f"{name}.weight"] * new.view(-1, *single) - want) / new.view(-1, *single)
    assert float(steps.abs().max()) <= 0.50001


@pytest.mark.parametrize("last", ["weight_zero_point", "weight_scale_2", "pre_quant_scale"])
def test_weight_without_a_mark_is_not_read_without_its_other_parts(last: str, tmp_path: Path) -> None:
    stored = {
        "a.weight": torch.ones(32, 32, dtype=torch.int8),
        "a.weight_scale": torch.ones(32, 1),
        f"a.{last}": torch.ones(32),
    }
    lora = {"a.lora_up.weight": rand(32, 4), "a.lora_down.weight": rand(4, 32)}
    base, adapter = save(stored, tmp_path / "base.safetensors"), save(lora, tmp_path / "lora.safetensors")
    with pytest.raises(InputError, match="the base is quantised"):
        lora_merge.merge(base, adapter, tmp_path / "out.safetensors", dtype="bf16")
