"""New quantised weights: plain numbers are merged and quantised in one pass, and a library reads the output."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.dtypes import ITEM_BYTES
from lora_merge.engine.merge import run
from lora_merge.errors import InputError, UsageError, VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.formats.output import FILE_FORMATS, FOLDER_FORMATS
from lora_merge.recipes.replay import plan_again, prove
from tests.files.libraries import LIBRARIES
from tests.files.quantised_forms import FORMS, SHAPE, Form
from tests.kit.files import load, save
from tests.kit.tensors import Tensors, rand

NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
KEPT = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight"

FILE = {
    "fp8_scaled": FORMS["ComfyUI fp8 rows"], "int8": FORMS["ComfyUI int8 rows"], "mxfp8": FORMS["ComfyUI mxfp8"],
    "nvfp4": FORMS["ComfyUI nvfp4"],
}  # fmt: skip
FOLDER = {
    "int8": FORMS["bitsandbytes int8"], "nf4": FORMS["bitsandbytes nf4"],
    "nvfp4": FORMS["compressed-tensors nvfp4"], "mxfp8": FORMS["compressed-tensors mxfp8"],
}  # fmt: skip


def base(folder: Path, *, config: bool = False) -> tuple[Path, Tensors]:
    """Three layers, the last one unchanged; a block, a row and a tile of zeros; one large number; a vector of F32."""
    found: Tensors = {KEPT[0]: rand(8), **{name: rand(64, 64).bfloat16() for name in KEPT[1:]}}
    for number, layer in enumerate(NAMES):
        weight = rand(*SHAPE, seed=number, scale=0.02)
        weight[3] = 0
        weight[128:, 128:] = 0
        weight[7, 9] = 0.5
        found[f"{layer}.weight"] = weight.bfloat16()
    found[f"{NAMES[2]}.weight"] *= 1e-6
    folder.mkdir()
    if config:
        told = {"model_type": "x", "torch_dtype": "bfloat16", "architectures": ["X"]}
        (folder / "config.json").write_text(json.dumps(told))
    file = save(found, folder / "model.safetensors")
    return folder if config else file, found


def adapter(path: Path) -> tuple[Path, Tensors]:
    """An adapter of the first two layers, which leaves a row of zeros, and the sum of base and adapter without it."""
    found, changes = {}, {}
    for number, layer in enumerate(NAMES[:2]):
        up, down = rand(SHAPE[0], 4, seed=20 + number, scale=0.01), rand(4, SHAPE[1], seed=10 + number)
        up[3] = 0
        up[128:] = 0
        found |= {f"base_model.model.{layer}.lora_A.weight": down, f"base_model.model.{layer}.lora_B.weight": up}
        changes[layer] = up.double() @ down.double()
    return save(found, path), changes


def adapter_of(weights: Tensors, folder: Path) -> tuple[Path, Tensors]:
    """An adapter of some layers, and its tensors."""
    found = {}
    for n, (name, weight) in enumerate(weights.items()):
        found[f"{name.removesuffix('.weight')}.lora_A.weight"] = rand(2, weight.shape[1], seed=n)
        found[f"{name.removesuffix('.weight')}.lora_B.weight"] = rand(weight.shape[0], 2, seed=n + 50, scale=0.01)
    return save(found, folder / "lora.safetensors"), found


def parts(tensors: Tensors, layer: str) -> Tensors:
    return {key.removeprefix(f"{layer}."): value for key, value in tensors.items() if key.startswith(f"{layer}.")}


def as_kitchen(found: Tensors) -> Tensors:
    """The scales of mxfp8 as the library wants them; files hold their bytes."""
    scale = found.get("weight_scale")
    if scale is None or scale.dtype != torch.uint8:
        return found
    return found | {"weight_scale": scale.view(torch.float8_e8m0fnu)}


def half_steps(form: Form, found: Tensors, want: Tensor) -> float:
    half = form.half_step(found, want) + form.slack * want.abs()
    return float(((form.read(found).double() - want).abs() / half.clamp(min=1e-15)).max())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dtype", "config"), [*((name, False) for name in FILE_FORMATS), *((name, True) for name in FOLDER_FORMATS)]
)
def test_every_tensor_begins_at_a_multiple_of_its_numbers_size(dtype: str, *, config: bool, tmp_path: Path) -> None:
    """As the library writes files, also where a layer has an odd number of rows, scales or blocks."""
    shapes = ((33, 64), (35, 96), (128, 128), (384, 128), (160, 192), (64, 64))
    found = {f"model.layers.{n}.self_attn.q_proj.weight": rand(*shape).bfloat16() for n, shape in enumerate(shapes)}
    found |= {"model.layers.1.norm.weight": rand(3).bfloat16(), "model.layers.4.gate": rand(1).bfloat16(),
              "model.ids": torch.arange(3), "model.mask": torch.ones(5, dtype=torch.uint8), "model.norm.weight": rand(8)}  # fmt: skip
    source = tmp_path / "base"
    source.mkdir()
    file = save(found, source / "model.safetensors")
    if config:
        (source / "config.json").write_text('{"model_type": "x", "architectures": ["X"]}')
    lora, _ = adapter_of({name: found[name] for name in found if name.endswith("q_proj.weight")}, tmp_path)
    out = tmp_path / "out"
    lora_merge.merge(source if config else file, lora, out if config else out.with_suffix(".safetensors"), dtype=dtype)
    written = open_checkpoint(out if config else out.with_suffix(".safetensors"))
    (header,) = written.headers.values()
    assert written.packed and header.tensors.keys() > {"model.ids", "model.mask"}
    assert not [t.name for t in header.tensors.values() if t.offset % ITEM_BYTES[t.dtype]]


@pytest.mark.parametrize(("name", "form"), FILE.items())
def test_file_is_quantised_as_comfyui_reads_it(name: str, form: Form, tmp_path: Path) -> None:
    source, tensors = base(tmp_path / "base")
    lora, changes = adapter(tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    report = lora_merge.merge(source, lora, out, dtype=name)
    made = load(out)
    for layer in NAMES:
        want = tensors[f"{layer}.weight"].double() + changes.get(layer, 0)
        found = parts(made, layer)
        told = json.loads(bytes(found.pop("comfy_quant").tolist()))
        assert told["format"] == form.note["format"]
        assert half_steps(form, as_kitchen(found), want) <= 1.001
        own = form.make(want.float()) if name != "fp8_scaled" else {"weight_scale": (want.abs().max() / 448).float()}
        for last in own.keys() - {"weight"}:
            scales = (t[last].reshape(-1).view(torch.uint8 if t[last].element_size() == 1 else torch.float32).double()
                      for t in (found, own))  # fmt: skip
            pairs = torch.stack([*scales], 1)
            ours, theirs = pairs[(pairs > 1e-29).all(1)].unbind(1)  # which scale a block of zeros has does not matter
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=float(found[last].element_size() == 1))
    assert all(torch.equal(made[name], tensors[name]) for name in KEPT)
    assert report.verified is not None
    assert report.changed == report.verified["tensors"] == 2
    assert {*open_checkpoint(out).packed} == {f"{layer}.weight" for layer in NAMES}
    with out.open("rb") as f:
        data = 8 + int.from_bytes(f.read(8), "little")
    infos = open_checkpoint(out).headers[out].tensors.values()
    assert all((i.offset - data) % min(i.nbytes // max(torch.Size(i.shape).numel(), 1), 8) == 0 for i in infos)


def test_file_of_nf4_has_the_tensors_of_bitsandbytes(tmp_path: Path) -> None:
    """Forge takes all tensors below the weight's name for the state of a weight."""
    source, tensors = base(tmp_path / "base")
    lora, changes = adapter(tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, tmp_path / "out.safetensors", dtype="nf4")
    made, form = load(tmp_path / "out.safetensors"), FORMS["bitsandbytes nf4"]
    for layer in NAMES:
        found, want = parts(made, layer), tensors[f"{layer}.weight"].double() + changes.get(layer, 0)
        assert found.keys() == form.make(want.float()).keys()
        assert half_steps(form, found, want) <= 1.001
        if find_spec("bitsandbytes") is not None:
            read = LIBRARIES["bitsandbytes nf4"].form.read(found)
            assert (read.float() - form.read(found)).abs().max() <= want.abs().max() * 2.0**-8  # in bf16
    assert all(torch.equal(made[name], tensors[name]) for name in KEPT)
    assert lora_merge.verify(tmp_path / "out.safetensors", full=True)["full"]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "form"), FOLDER.items())
def test_folder_is_quantised_as_transformers_reads_it(name: str, form: Form, tmp_path: Path) -> None:
    source, tensors = base(tmp_path / "base", config=True)
    lora, changes = adapter(tmp_path / "lora.safetensors")
    out = tmp_path / "out"
    report = lora_merge.merge(source, lora, out, dtype=name)
    made = load(out / "model.safetensors")
    for layer in NAMES:
        want = tensors[f"{layer}.weight"].double() + changes.get(layer, 0)
        found = parts(made, layer)
        assert half_steps(form, found, want) <= 1.001
        own = form.make(want.float())
        assert own.keys() == found.keys()
        for last in own:
            assert (own[last].dtype, own[last].shape) == (found[last].dtype, found[last].shape) or "quant_state" in last
    assert all(torch.equal(made[name], tensors[name]) for name in KEPT)
    told = json.loads((out / "config.json").read_text())
    section = told.pop("quantization_config")
    assert told == json.loads((source / "config.json").read_text())
    assert section["quant_method"] == form.config["quant_method"]
    assert next(section[k] for k in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules") if k in section) == [
        "lm_head",
        "model.embed_tokens",
    ]
    assert report.verified is not None
    assert {*open_checkpoint(out).packed} == {f"{layer}.weight" for layer in NAMES}
    assert lora_merge.verify(out)["tensors"] == 2


@pytest.mark.parametrize(("name", "noise"), [("mxfp8", 0.06), ("nvfp4", 0.2)])
def test_transformers_computes_with_a_folder_of_compressed_tensors(name: str, noise: float, tmp_path: Path) -> None:
    """The outputs of a small model: those of the merge in bf16 within the format's noise, and far from the base's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    stem = "base_model.model.model.layers.0.mlp.up_proj"
    lora = save(
        {f"{stem}.lora_A.weight": rand(4, 64), f"{stem}.lora_B.weight": rand(128, 4, scale=1.0)}, tmp_path / "lora"
    )
    logits = {}
    for out, options in (("plain", {}), (name, {"dtype": name})):
        lora_merge.merge(tmp_path / "base", lora, tmp_path / out, verify=False, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            made = LlamaForCausalLM.from_pretrained(tmp_path / out, dtype=torch.bfloat16)
            logits[out] = made(torch.arange(20)[None]).logits.float()
    with torch.no_grad():
        before = model(torch.arange(20)[None]).logits.float()
    want = logits["plain"]
    assert (logits[name] - want).norm() < noise * want.norm() < (before - want).norm()


@pytest.mark.parametrize("name", ["fp8_scaled", "nvfp4"])
def test_quantised_output_is_proven_and_replayed_and_does_not_depend_on_windows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_merge.engine import windows

    source, _ = base(tmp_path / "base")
    lora, _ = adapter(tmp_path / "lora.safetensors")
    out, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    lora_merge.merge(source, lora, out, dtype=name, rounding="stochastic", seed=3)
    assert prove(out, full=True)["full"]
    monkeypatch.setattr(windows, "WINDOW_BYTES", 20_000)
    monkeypatch.setattr(windows, "SMALLEST_WINDOW", 20_000)
    run(plan_again(out, again))
    assert again.read_bytes() == out.read_bytes()
    raw = bytearray(out.read_bytes())
    for key in (f"{NAMES[0]}.weight", f"{NAMES[2]}.weight", f"{NAMES[2]}.weight_scale", f"{NAMES[0]}.comfy_quant"):
        info = open_checkpoint(out).headers[out].tensors[key]
        place = info.offset + (3 if info.dtype == "F32" else 0)  # the exponent
        raw[place] ^= 0x40
        out.write_bytes(raw)
        with pytest.raises((VerificationFailed, InputError)):
            prove(out, full=True)
        raw[place] ^= 0x40


def test_weights_that_servers_join_have_one_format(tmp_path: Path) -> None:
    """A pattern of the user keeps q; k and v stay with it. A file for ComfyUI has no such rule."""
    source, tensors = base(tmp_path / "base", config=True)
    names = [f"{NAMES[0].removesuffix('q_proj')}{part}_proj.weight" for part in "qkvo"]
    more = {name: tensors[f"{NAMES[0]}.weight"].clone() for name in names[1:]}
    save({**tensors, **more}, source / "model.safetensors")
    lora, _ = adapter(tmp_path / "lora.safetensors")
    kept = [f"re:{NAMES[0]}"]
    for dtype, of, out in (("mxfp8", source, "out"), ("fp8_scaled", source / "model.safetensors", "out.safetensors")):
        plan = lora_merge.plan(of, lora, tmp_path / out, dtype=dtype, keep_precision=kept)
        assert [name in plan.quantising.forms for name in names] == [False, of.is_file(), of.is_file(), True]


def test_batch_reads_the_base_once_for_all_jobs(tmp_path: Path) -> None:
    source, _ = base(tmp_path / "base")
    lora, _ = adapter(tmp_path / "lora.safetensors")
    jobs = [{"base": str(source), "adapters": [{"path": str(lora), "strength": s}], "output": f"{s}.safetensors"}
            for s in (0.5, 1.0)]  # fmt: skip
    text = {"version": 1, "defaults": {"dtype": "fp8_scaled", "keep_precision": [f"re:{NAMES[1]}"]}, "jobs": jobs}
    (tmp_path / "jobs.yaml").write_text(json.dumps(text))
    reports = lora_merge.run_batch(tmp_path / "jobs.yaml")
    assert all(report.error is None for report in reports)
    for s in (0.5, 1.0):
        alone = tmp_path / "alone.safetensors"
        lora_merge.merge(
            source, (lora, s), alone, dtype="fp8_scaled", keep_precision=[f"re:{NAMES[1]}"], overwrite=True
        )
        assert alone.read_bytes() == (tmp_path / f"{s}.safetensors").read_bytes()


def test_patterns_leave_weights_as_they_are(tmp_path: Path) -> None:
    source, _ = base(tmp_path / "base")
    lora, _ = adapter(tmp_path / "lora.safetensors")

    def quantised(*patterns: str) -> set[str]:
        out = tmp_path / "out.safetensors"
        lora_merge.merge(source, lora, out, dtype="int8", keep_precision=patterns, overwrite=True)
        return {key for key, value in load(out).items() if value.dtype == torch.int8}

    weights = {f"{layer}.weight" for layer in NAMES}
    assert quantised() == weights
    assert quantised("re:layers.0") == quantised("model.layers.0.*") == weights - {f"{NAMES[0]}.weight"}
    assert quantised("re:layers.0", "*.2.*") == {f"{NAMES[1]}.weight"}
    assert quantised("none") == weights | {*KEPT[1:]}
    assert quantised("none", "lm_*") == weights | {KEPT[1]}
    assert quantised("layers.0") == quantised("L00") == quantised("re:layers.0")
    for text in ("layers.9", "re:nothing", "re:norm", "lm_head", "nothing.*", "te"):
        with pytest.raises(UsageError, match="without effect") as caught:
            lora_merge.plan(source, lora, dtype="int8", keep_precision=["layers.0", text])
        assert caught.value.where == f"keep_precision=[{json.dumps(text)}]"


def test_formats_that_no_loader_reads_are_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    file, _ = base(tmp_path / "file")
    folder, _ = base(tmp_path / "folder", config=True)
    lora, _ = adapter(tmp_path / "lora.safetensors")

    def refused(source: Path, **options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            lora_merge.merge(source, lora, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        return f"{caught.value.what}; {caught.value.fix}"

    assert "fp8_scaled" in refused(file, dtype="fp8_block")
    assert "fp8_block" in refused(folder, dtype="fp8_scaled")
    assert "llama.cpp" in refused(file, dtype="q4_0")
    assert "keep_precision" in refused(file, dtype="nvfp4", keep_precision=["*"])
    assert "regular expression is not valid" in refused(file, dtype="int8", keep_precision=["re:("])
    assert "nothing is quantised" in refused(file, keep_precision=["re:x"])
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    for name in ("fp8_block", "mxfp8", "nvfp4"):
        assert "nf4" in refused(folder, dtype=name)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "transposed" in refused(folder, dtype="nf4")
    with pytest.raises(UsageError, match="in memory"):
        lora_merge.merge_state_dict(load(file), lora, dtype="fp8_scaled")
    with pytest.raises(UsageError, match="not quantised"):
        lora_merge.combine([lora], tmp_path / "x.safetensors", dtype="int8")


def test_numbers_without_a_code_are_refused(tmp_path: Path) -> None:
    source, tensors = base(tmp_path / "base")
    lora, _ = adapter(tmp_path / "lora.safetensors")
    for layer in (NAMES[0], NAMES[2]):
        tensors[f"{layer}.weight"][5, 5] = float("nan")
        save(tensors, source)
        for name in ("fp8_scaled", "int8"):
            with pytest.raises(InputError, match="NaN or infinite"):
                lora_merge.merge(source, lora, tmp_path / "out", dtype=name)
        assert not (tmp_path / "out").exists()


def test_format_becomes_another(tmp_path: Path) -> None:
    """Dequantised, merged and quantised: the scales of the old format are gone."""
    source, _ = base(tmp_path / "base")
    lora, changes = adapter(tmp_path / "lora.safetensors")
    lora_merge.merge(source, (lora, 0.0), tmp_path / "int8.safetensors", dtype="int8", unmatched="skip")
    before = load(tmp_path / "int8.safetensors")
    lora_merge.merge(tmp_path / "int8.safetensors", lora, tmp_path / "out.safetensors", dtype="nvfp4")
    made, form = load(tmp_path / "out.safetensors"), FILE["nvfp4"]
    for layer in NAMES:
        want = FILE["int8"].read(parts(before, layer)).double() + changes.get(layer, 0)
        found = parts(made, layer)
        assert json.loads(bytes(found.pop("comfy_quant").tolist()))["format"] == "nvfp4"
        assert half_steps(form, found, want) <= 1.001
    assert {*open_checkpoint(tmp_path / "out.safetensors").packed} == {f"{layer}.weight" for layer in NAMES}
