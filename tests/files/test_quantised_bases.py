"""Quantised bases of every format that is merged: a library writes the base, the merge's output is read by it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.errors import InputError, MergeError, VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.safetensors import parse_file
from lora_merge.viewing.inspect import inspect
from tests.files import quantised_forms
from tests.files.quantised_forms import FORMS, SHAPE, Form
from tests.kit.files import load, save
from tests.kit.measured import survival_of
from tests.kit.quantised import ALL, NAMES, adapter, base, exact, kept, made_plain, parts, same, stored
from tests.kit.tensors import Tensors, rand


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [n for n, form in FORMS.items() if not form.decode_only])
def test_format_is_kept_and_rounded_once(name: str, tmp_path: Path) -> None:
    kept(FORMS[name], tmp_path)


SURVIVING = (
    "ComfyUI int8 rows", "ComfyUI int8 rotated", "ComfyUI nvfp4", "block fp8", "ModelOpt fp8",
    "compressed-tensors int4 with zero points", "bitsandbytes nf4",
)  # fmt: skip
"""Formats with a scale for a row, a block, and the whole weight; rotated, with zero points, in 8 and in 4 bits."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SURVIVING)
def test_inspect_shows_what_survives_before_the_merge(name: str, tmp_path: Path) -> None:
    """Against the merge's output, read by the library that made the base; one change is small, one needs new scales."""
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    out, lora = (
        tmp_path / ("out" if source.is_dir() else "out.safetensors"),
        save(adapter(), tmp_path / "l.safetensors"),
    )
    lora_merge.merge(source, lora, out, verify=False)
    made = load(out / "model.safetensors" if source.is_dir() else out)
    numbers = inspect(source, lora, weights=True)["match"]["numbers"]
    below = 0
    for layer in NAMES[:2]:
        before, after = (stored(form, of, layer) for of in (tensors, made))
        wanted = exact(form, tensors, layer) - before
        applied, found = after - before, numbers["tensors"][f"{layer}.weight"]
        retained = float((applied * wanted).sum() / wanted.square().sum())
        assert found["retained"] == pytest.approx(retained, abs=0.01)
        assert found["noise"] == pytest.approx(float((applied - wanted).norm() / wanted.norm()), rel=0.02, abs=0.002)
        assert found["share"] == pytest.approx(survival_of(wanted, applied - wanted)["share"], abs=0.01)
        below += found["share"] < 0.9
    assert all("--dtype" in text for text in numbers["warnings"])
    assert len(numbers["warnings"]) == (numbers["all"]["share"] < 0.95)
    assert (numbers["all"]["share"] < 0.9) <= below


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMS)
def test_ordinary_checkpoint_comes_out_of_it(name: str, tmp_path: Path) -> None:
    made_plain(FORMS[name], tmp_path)


@pytest.mark.parametrize("name", [n for n, form in FORMS.items() if form.decode_only])
def test_formats_that_need_calibration_are_not_written_again(name: str, tmp_path: Path) -> None:
    source, _ = base(FORMS[name], tmp_path / "base")
    with pytest.raises(InputError, match=r"calibration|fitted to the old values") as caught:
        lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out")
    assert 'dtype="bf16"' in caught.value.fix
    assert not (tmp_path / "out").exists()


FLIPPED = ("ComfyUI mxfp8", "ComfyUI nvfp4", "compressed-tensors int4 with zero points", "bitsandbytes nf4 doubled")
"""Formats with scales of every kind; the last one has tables too, which no merge changes."""


def spoilt(form: Form, tensors: Tensors, number: float) -> Tensors | None:
    """The tensors with one scale that is `number`, or with the byte of it; None where the format has no such scale."""
    key = f"{NAMES[0]}.{form.scale}"
    scale = tensors[key].clone()
    if scale.dtype in {torch.uint8, torch.float8_e8m0fnu}:  # powers of two: only 255 is not a number
        scale.view(-1).view(torch.uint8)[0] = 255
    elif number == 0.0 and (form.scale in {"SCB", "weight.absmax"} or scale.dtype == torch.float8_e4m3fn):
        return None  # a block of zeros may have the scale 0
    else:
        flat = scale.float().view(-1)
        flat[0] = number
        scale = flat.view(scale.shape).to(scale.dtype)
    return {**tensors, key: scale}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "scale"),
    [("ComfyUI int8", "weight_scale"), ("ComfyUI fp8 rows", "weight_scale"), ("ComfyUI nvfp4", "weight_scale_2"),
     ("compressed-tensors int8", "weight_scale"), ("block fp8", "weight_scale_inv"), ("FBGEMM", "weight_scale")],
)  # fmt: skip
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_layer_of_zeros_with_the_scale_0_is_merged(name: str, scale: str, rounding: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    for last in ("weight", scale):
        tensors[f"{NAMES[0]}.{last}"] = torch.zeros_like(tensors[f"{NAMES[0]}.{last}"])
    save(tensors, source / "model.safetensors" if source.is_dir() else source)
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), out, rounding=rounding)
    made = load(out / "model.safetensors" if source.is_dir() else out)
    want, got = form.turn(exact(form, tensors, NAMES[0])), form.turn(stored(form, made, NAMES[0]))
    half = form.half_step(parts(made, NAMES[0]), want)
    assert want.any() and float(((got - want).abs() / half).max()) <= (1.001 if rounding == "nearest" else 2.001)


CODES = ("weight_packed", "qweight", "weight._data", "codes", "weight")
"""Last names of the tensors of codes; each of FORMS has one of them."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMS)
def test_scales_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    lora, out = (
        save(adapter(), tmp_path / "lora.safetensors"),
        tmp_path / ("out" if source.is_dir() else "out.safetensors"),
    )
    for number in (float("nan"), -1.0, 0.0) if name in FLIPPED else (float("nan"),):
        bad = spoilt(form, tensors, number)
        if bad is None or (not isnan(number) and name == "bitsandbytes nf4 doubled"):
            continue
        save(bad, file)
        with pytest.raises(InputError, match="scale") as caught:
            lora_merge.merge(source, lora, out, dtype="bf16")
        assert NAMES[0] in caught.value.where
    codes = next(last for last in CODES if f"{NAMES[0]}.{last}" in tensors)
    for last, count in ((form.scale, 0), (form.scale, -1), (codes, -1)):
        key = f"{NAMES[0]}.{last}"
        if tensors[key].numel() > 1 or not count:
            save({**tensors, key: tensors[key].reshape(-1)[:count].clone()}, file)
            with pytest.raises(MergeError, match=r"quantised|shape|fit"):
                lora_merge.merge(source, lora, out, dtype="bf16")
    assert not out.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "part", "number"),
    [
        ("ComfyUI int8", "weight_scale", 3e38), ("ComfyUI int8 rotated", "weight_scale", 3e38),
        ("ComfyUI nvfp4", "weight_scale_2", 3e38), ("block fp8, ue8m0", "weight_scale_inv", 2.0**127),
        ("compressed-tensors int4 with zero points", "weight_scale", 3e38), ("compressed-tensors mxfp4", "weight_scale", 254),
        ("compressed-tensors nvfp4", "weight_global_scale", 1e-45), ("mlx 8 bit", "scales", 3e38),
        ("SDNQ uint4", "scale", 3e38), ("bitsandbytes nf4", "weight.quant_map", 0.5),
        ("bitsandbytes nf4 doubled", "weight.nested_quant_map", -1.0),
    ],
)  # fmt: skip
def test_numbers_that_fp32_cannot_hold_are_refused(name: str, part: str, number: float, tmp_path: Path) -> None:
    """Scales that make them, tables of one number: nothing infinite is written, and nothing is called a bad merge."""
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base", ALL[:1])
    bad = {**tensors, f"{ALL[0]}.{part}": torch.full_like(tensors[f"{ALL[0]}.{part}"], number)}
    save(bad, source / "model.safetensors" if source.is_dir() else source)
    lora, out = save(adapter(ALL[:1]), tmp_path / "lora.safetensors"), tmp_path / "out"
    for dtype in ("bf16", "keep"):
        with pytest.raises(InputError, match="cannot be decoded"):
            lora_merge.merge(source, lora, out, dtype=dtype)
        assert not out.exists()


@pytest.mark.parametrize(
    ("name", "part"), [("ModelOpt fp8", "weight_scale"), ("compressed-tensors int8 with zero points", "weight_scale")]
)
def test_scales_of_a_dtype_that_the_format_does_not_have_are_refused(name: str, part: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base", ALL[:1])
    key = f"{ALL[0]}.{part}"
    save({**tensors, key: tensors[key].to(torch.float8_e8m0fnu)}, source / "model.safetensors")
    with pytest.raises(InputError, match="quantised"):
        lora_merge.merge(source, save(adapter(ALL[:1]), tmp_path / "lora.safetensors"), tmp_path / "out")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FLIPPED)
def test_proof_finds_changed_scales_and_codes(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora_merge.merge(source, save(adapter(), tmp_path / "lora.safetensors"), out)
    file = out / "model.safetensors" if source.is_dir() else out
    whole, header = file.read_bytes(), parse_file(file)
    lasts = [last for last in parts(tensors, NAMES[1]) if any(w in last for w in ("scale", "absmax", "weight"))]
    lasts = [n for n in lasts if "input" not in n and "shape" not in n and "state" not in n]
    for last in lasts:
        info = header.tensors[f"{NAMES[1]}.{last}"]
        raw = bytearray(whole)
        width = {"F32": 4, "BF16": 2}.get(info.dtype, 1)
        byte = 0 if "map" in last else width - 1  # of a float, the exponent; of a table, the last bits
        raw[info.offset + info.nbytes // 5 // width * width + byte] ^= 0x08
        file.write_bytes(raw)
        with pytest.raises(VerificationFailed):
            lora_merge.verify(out, full=True)


def test_mlx_layers_may_have_other_bits_than_the_model(tmp_path: Path) -> None:
    """config.json has an entry for each such layer, `false` for those that are not quantised (mlx-lm)."""
    few, many = FORMS["mlx 4 bit"], FORMS["mlx 8 bit"]
    weights = [rand(*SHAPE, seed=number, scale=0.02) for number in range(3)]
    found = {f"{NAMES[0]}.{last}": value for last, value in few.make(weights[0]).items()}
    found |= {f"{NAMES[1]}.{last}": value for last, value in many.make(weights[1]).items()}
    found |= {f"{NAMES[2]}.weight": weights[2].bfloat16()}
    config = {**few.config, NAMES[1]: many.config, NAMES[2]: False}
    folder = tmp_path / "base"
    folder.mkdir()
    save(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization": config, "quantization_config": config}))
    lora_merge.merge(folder, save(adapter(), tmp_path / "lora.safetensors"), tmp_path / "out")
    made = load(tmp_path / "out" / "model.safetensors")
    for layer, form in zip(NAMES[:2], (few, many), strict=True):
        want, got = exact(form, found, layer), stored(form, made, layer)
        assert ((got - want).abs() / form.half_step(parts(made, layer), want)).max() <= 1.001
    assert same(made[f"{NAMES[2]}.weight"], found[f"{NAMES[2]}.weight"])
    with pytest.raises(InputError, match="quantised: mlx"):
        (folder / "config.json").write_text(json.dumps({"quantization": {**config, "mode": "other"}}))
        lora_merge.merge(folder, tmp_path / "lora.safetensors", tmp_path / "out2")


@pytest.mark.parametrize("name", ["ComfyUI int8 rotated", "bitsandbytes nf4"])
def test_method_that_combines_changes_meets_the_decoded_base(name: str, tmp_path: Path) -> None:
    """And is rounded once to the codes; --full computes it again."""
    form = FORMS[name]
    source, _ = base(form, tmp_path / "base")
    more = {key: value.flip(0) for key, value in adapter().items()}
    adapters = [save(t, tmp_path / f"{n}.safetensors") for n, t in enumerate((adapter(), more))]
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora_merge.merge(source, adapters, out, method="ties", density=0.3)
    assert lora_merge.verify(out, full=True)["tensors"] == 2


def test_rotated_rows_with_one_scale_are_refused(tmp_path: Path) -> None:
    """ComfyUI rotates only what has a scale for each row; without the rotation the numbers would be others."""
    mark = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}).encode()
    layer = {"weight": torch.ones(SHAPE, dtype=torch.int8), "weight_scale": torch.tensor(0.1)}
    found = {f"{NAMES[0]}.{last}": value for last, value in layer.items()}
    source = save(
        {**found, f"{NAMES[0]}.comfy_quant": torch.tensor(list(mark), dtype=torch.uint8)}, tmp_path / "b.safetensors"
    )
    with pytest.raises(InputError, match="quantised"):
        lora_merge.merge(
            source, save(adapter(NAMES[:1]), tmp_path / "l.safetensors"), tmp_path / "o.safetensors", dtype="bf16"
        )
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.* of the change of .* is lost")  # four bits hold nine tenths of it
@pytest.mark.few(2)
@pytest.mark.parametrize(("told", "rows"), [("bias", 130), ("orig_shape", 7)])
@pytest.mark.parametrize("name", ["ComfyUI mxfp8", "ComfyUI nvfp4"])
def test_rows_that_fill_up_a_weight_are_none_of_the_model(name: str, rows: int, told: str, tmp_path: Path) -> None:
    """comfy-kitchen stores a multiple of 32 or 16 rows; a bias, or the JSON, says how many there are."""
    form, shape, layer = FORMS[name], (rows, 192), NAMES[0]
    weight = rand(*shape, seed=3, scale=0.02)
    found = {f"{layer}.{last}": value for last, value in form.make(weight).items()}
    mark = form.note | ({"orig_shape": list(shape)} if told == "orig_shape" else {})  # type: ignore[operator]
    found[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    if told == "bias":
        found[f"{layer}.bias"] = torch.zeros(rows)
    source, out = save(found, tmp_path / "base.safetensors"), tmp_path / "out.safetensors"
    lora = {f"{layer}.lora_A.weight": rand(4, 192, seed=4), f"{layer}.lora_B.weight": rand(rows, 4, seed=5, scale=0.02)}
    adapter_file = save(lora, tmp_path / "lora.safetensors")

    def read(tensors: Tensors) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantised_forms, "SHAPE", (found[f"{layer}.weight"].shape[0], 192))
            return form.read(parts(tensors, layer)).double()

    want = read(found)
    want[:rows] += lora[f"{layer}.lora_B.weight"].double() @ lora[f"{layer}.lora_A.weight"].double()
    lora_merge.merge(source, adapter_file, out)
    assert lora_merge.verify(out, full=True)["full"]
    made = load(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", tuple(want.shape))
        half = form.half_step(parts(made, layer), want)
    assert ((read(made) - want).abs() <= half * 1.001 + 1e-12).all()
    assert same(made[f"{layer}.weight"][rows:].contiguous(), found[f"{layer}.weight"][rows:].contiguous())
    in_memory = lora_merge.merge_state_dict(found, adapter_file)
    assert all(same(in_memory[key], tensor) for key, tensor in made.items())
    lora_merge.merge(source, adapter_file, tmp_path / "plain.safetensors", dtype="fp32")
    plain = load(tmp_path / "plain.safetensors")[f"{layer}.weight"]
    assert plain.shape == shape
    torch.testing.assert_close(plain.double(), want[:rows], rtol=1e-6, atol=1e-6)
    mark["orig_shape"] = [rows, 200]
    found[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    with pytest.raises(InputError, match="quantised"):
        lora_merge.merge(save(found, source), adapter_file, tmp_path / "no.safetensors")


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
@pytest.mark.parametrize("how", [{"compute_dtype": "fp64"}, {"method": "ties", "density": 0.5}])
@pytest.mark.parametrize("name", ["ComfyUI int8 rotated", "compressed-tensors int4 with zero points"])
def test_codes_are_decoded_in_fp32_whatever_the_sum_is_made_in(
    name: str, how: Mapping[str, Any], dtype: str, tmp_path: Path
) -> None:
    """The proof allows for that in every element of a sum in fp64, and the merge is not refused."""
    form = FORMS[name]
    source, _ = base(form, tmp_path / "base")
    more = {key: value.flip(0) for key, value in adapter().items()}
    adapters = [save(t, tmp_path / f"{n}.safetensors") for n, t in enumerate((adapter(), more))]
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora_merge.merge(source, adapters, out, dtype=dtype, **how)
    assert lora_merge.verify(out, full=True)["tensors"] == 2


@pytest.mark.parametrize("size", [2**14, 2**34, 10**30])
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_block_larger_than_the_weight_is_the_weight(size: int, dtype: str, tmp_path: Path) -> None:
    """Whatever the size is that a file tells: no memory is taken for numbers that are not there."""
    weight, lora = rand(*SHAPE, scale=0.02), save(adapter(NAMES[:1]), tmp_path / "lora.safetensors")
    scale = (weight.abs().max() / 448).reshape(1, 1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": [size, size]}
    folder, out = tmp_path / "base", tmp_path / "out"
    folder.mkdir()
    save({f"{NAMES[0]}.weight": codes, f"{NAMES[0]}.weight_scale_inv": scale}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": config}))
    lora_merge.merge(folder, lora, out, dtype=dtype)
    made, (down, up) = load(out / "model.safetensors"), adapter(NAMES[:1]).values()
    want = codes.double() * scale.double() + up.double() @ down.double()
    new = made.get(f"{NAMES[0]}.weight_scale_inv", torch.ones(1, 1)).double()
    got = made[f"{NAMES[0]}.weight"].double() * new
    half = quantised_forms.fp8_half(new, want) if dtype == "keep" else want.abs().max() * 2.0**-20
    assert ((got - want).abs() <= 1.001 * half).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "entry", "scales"),
    [("bitsandbytes nf4", "blocksize", "absmax"), ("bitsandbytes nf4 doubled", "nested_blocksize", "nested_absmax")],
)
def test_flat_block_larger_than_the_weight_is_the_weight(name: str, entry: str, scales: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base", ALL[:1])
    state, scale = f"{ALL[0]}.weight.quant_state.bitsandbytes__nf4", f"{ALL[0]}.weight.{scales}"
    made = {}
    for size in (2**20, 2**34):
        told = json.loads(bytes(tensors[state].tolist())) | {entry: size}
        mark = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
        save({**tensors, scale: tensors[scale][:1].clone(), state: mark}, source / "model.safetensors")
        out = tmp_path / f"out{size}"
        lora_merge.merge(source, save(adapter(ALL[:1]), tmp_path / "lora.safetensors"), out)
        made[size] = load(out / "model.safetensors")
        assert lora_merge.verify(out, full=True)["tensors"] == 1
    one, other = made.values()
    assert all(same(one[key], other[key]) for key in one if key != state)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["ComfyUI int8 rotated", "compressed-tensors int4", "mlx 4 bit"])
def test_value_takes_the_place_of_codes(name: str, tmp_path: Path) -> None:
    """Stored as they were; of another size only as plain numbers, and whole numbers without scales not at all."""
    form, layer = FORMS[name], NAMES[0]
    source, _ = base(form, tmp_path / "base", NAMES[:2])
    out, file = tmp_path / ("out" if source.is_dir() else "out.safetensors"), tmp_path / "adapter.safetensors"

    def merged(value: Tensor, dtype: str = "keep") -> Tensors:
        save({**adapter(NAMES[1:2]), f"base_model.model.{layer}.weight": value}, file)
        lora_merge.merge(source, file, out, dtype=dtype, overwrite=True)
        return load(out / "model.safetensors" if source.is_dir() else out)

    value, taller = rand(*SHAPE, seed=9, scale=0.02), rand(SHAPE[0] + 8, SHAPE[1])
    made = merged(value)
    want, got = form.turn(value.double()), form.turn(stored(form, made, layer))
    assert ((got - want).abs() / form.half_step(parts(made, layer), want)).max() <= 1.001
    with pytest.raises(InputError, match="whole numbers replace only"):
        merged(value.to(torch.int8))
    with pytest.raises(MergeError, match="changes the size of a quantised weight") as caught:
        merged(taller)
    assert caught.value.fix == 'write dtype="bf16"'
    assert torch.equal(merged(taller, "bf16")[f"{layer}.weight"], taller.bfloat16())


@pytest.mark.parametrize("of_head", ["lm_head", "Embedding"])
def test_groups_of_compressed_tensors_count_in_the_order_of_the_library(of_head: str, tmp_path: Path) -> None:
    """A name counts for that module alone, and before a class; a class is that of the module."""
    few, many = FORMS["compressed-tensors int4"], FORMS["compressed-tensors int8 packed"]
    other = "model.embed_tokens" if of_head == "Embedding" else "lm_head"
    weights = {NAMES[0]: few, other: many}
    found = {f"{n}.{last}": t for n, form in weights.items() for last, t in form.make(rand(*SHAPE, scale=0.02)).items()}
    groups = ((many, of_head), (few, "Linear"))
    rows = {target: {**form.config["config_groups"]["group_0"], "targets": [target]} for form, target in groups}
    config = {**few.config, "config_groups": rows}
    (tmp_path / "base").mkdir()
    save(found, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"quantization_config": config}))
    packed = open_checkpoint(tmp_path / "base").packed
    titles = {key: packing.encoding.title for key, packing in packed.items()}
    assert titles == {
        f"{NAMES[0]}.weight": "compressed-tensors int4", f"{other}.weight": "compressed-tensors int8",
    }  # fmt: skip


def test_head_that_is_parted_from_embeddings_of_codes_is_plain_numbers(tmp_path: Path) -> None:
    """mlx quantises embeddings too; a head in codes would need scales of its own."""
    form, table, side = FORMS["mlx 8 bit"], "model.embed_tokens", "base_model.model.model.embed_tokens"
    found = {f"{table}.{last}": value for last, value in form.make(rand(*SHAPE, scale=0.02)).items()}
    (tmp_path / "base").mkdir()
    save(found, tmp_path / "base" / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "quantization": form.config}))
    (lora := tmp_path / "lora").mkdir()
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens"]})
    )
    down, up, copy = rand(4, SHAPE[0]), rand(SHAPE[1], 4, scale=0.02), rand(*SHAPE, seed=3, scale=0.02)
    factors = {f"{side}.lora_embedding_A": down, f"{side}.lora_embedding_B": up}
    for more in ({}, {f"{side}.base_layer.weight": copy}):
        save({**factors, **more}, lora / "adapter_model.safetensors")
        lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", overwrite=True)
        made = load(tmp_path / "out" / "model.safetensors")
        old = copy if more else form.read(parts(found, table)).float()
        assert torch.equal(made["lm_head.weight"], old.bfloat16())
        want = old.double() + (up.double() @ down.double()).t()
        got = form.read(parts(made, table)).double()
        assert ((got - want).abs() / form.half_step(parts(made, table), want)).max() <= 1.001
    head = {key.replace(table, "lm_head"): value.clone() for key, value in found.items()}
    save({**found, **head}, tmp_path / "base" / "model.safetensors")  # the two ends are compared as they are stored
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "out", overwrite=True)
    made = load(tmp_path / "out" / "model.safetensors")
    assert (form.read(parts(made, "lm_head")).double() - copy).abs().max() < 1e-3
