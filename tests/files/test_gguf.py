"""GGUF bases: files of the `gguf` library are merged, and the library reads the outputs."""

from __future__ import annotations

import json
import shlex
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.engine.merge import run
from lora_merge.errors import FitError, InputError, MergeError, UsageError, VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.gguf import container
from lora_merge.files.gguf.types import ENCODED_TYPES
from lora_merge.recipes.replay import plan_again, prove
from lora_merge.viewing.inspect import inspect
from tests.kit import gguf_files as by_library
from tests.kit import gguf_models
from tests.kit.command_line import run as command_line
from tests.kit.files import load
from tests.kit.gguf_models import LAYERS, TOUCHED, change, flux, normal, style
from tests.kit.hostile_commands import ADAPTER, LLAMA
from tests.kit.hostile_commands import gguf as container_of
from tests.kit.tensors import rand

adapter = gguf_models.adapter


def check_kept(base: Path, merged: Path) -> None:
    """Everything but the touched layers and our own entries is as before."""
    old, new = by_library.read(base), by_library.read(merged)
    assert [(n, t) for n, (_, t) in old.items()] == [(n, t) for n, (_, t) in new.items()]
    entries, found = by_library.fields(base), by_library.fields(merged)
    assert {k: v for k, v in found.items() if not k.startswith(("lora_merge.", "modelspec."))} == entries
    for name, (values, _) in old.items():
        if name.removesuffix(".weight") not in TOUCHED:
            np.testing.assert_array_equal(new[name][0], values)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES | {"F16", "BF16", "F32"}))
def test_diffusion_model_keeps_its_types(tmp_path: Path, adapter: Path, kind: str) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux(kind), {"general.file_type": 2, "a.list": [1, 2]})
    report = lora_merge.merge(base, adapter, tmp_path / "out.gguf")
    assert report.changed == 2
    check_kept(base, tmp_path / "out.gguf")
    old, new = by_library.read(base), by_library.read(tmp_path / "out.gguf")
    for name in TOUCHED:
        exact = old[f"{name}.weight"][0] + change(name)
        error = np.abs(new[f"{name}.weight"][0] - exact)
        rms = np.sqrt(np.mean(exact**2))
        coarse = {"Q2_K": 0.4, "Q3_K": 0.2, "Q8_0": 0.01, "Q6_K": 0.04, "F16": 1e-3, "BF16": 1e-2, "F32": 1e-6,
                  "TQ1_0": 0.8, "TQ2_0": 0.8}  # fmt: skip
        assert np.sqrt(np.mean(error**2)) < coarse.get(kind, 0.15) * rms


def test_gguf_output_is_proven_and_replayed(tmp_path: Path, adapter: Path) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q4_K"))
    merged, again = tmp_path / "merged.gguf", tmp_path / "again.gguf"
    lora_merge.merge(base, adapter, merged)
    assert prove(merged, full=True)["full"]
    run(plan_again(merged, again))
    assert again.read_bytes() == merged.read_bytes()
    raw = bytearray(merged.read_bytes())
    place = open_checkpoint(merged).tensors[f"{TOUCHED[0]}.weight"].offset
    for bit in (place, place + 1, place + 6, place + 20):  # d, d, a scale, a code
        raw[bit] ^= 0x40
        merged.write_bytes(raw)
        with pytest.raises(VerificationFailed):
            prove(merged, full=True)
        raw[bit] ^= 0x40
    edited = again.read_bytes().replace(b"general.architecture", b"general.architectur3")
    again.write_bytes(edited)
    with pytest.raises(VerificationFailed, match="header was changed"):
        prove(again)


def test_merge_of_a_merge_names_both(tmp_path: Path, adapter: Path) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q8_0"))
    lora_merge.merge(base, adapter, tmp_path / "once.gguf")
    lora_merge.merge(tmp_path / "once.gguf", (adapter, 0.5), tmp_path / "twice.gguf")
    recipe = json.loads(by_library.fields(tmp_path / "twice.gguf")["lora_merge.recipe"])
    assert recipe["base"]["recipe"]["base"]["name"] == "flux.gguf"
    prove(tmp_path / "twice.gguf")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_diffusion_model_becomes_an_ordinary_checkpoint(tmp_path: Path, adapter: Path, dtype: str) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q5_K"))
    report = lora_merge.merge(base, adapter, tmp_path / "out.safetensors", dtype=dtype)
    found, old = load(Path(report.output)), by_library.read(base)
    assert found.keys() == old.keys()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for name, tensor in found.items():
        stem = name.removesuffix(".weight")
        exact = old[name][0] + (change(stem) if stem in TOUCHED else 0)
        assert tensor.dtype == kind
        np.testing.assert_allclose(tensor.float().numpy(), exact, rtol=2.0**-8, atol=2e-7)
    assert not any(key.startswith("general.") for key in open_checkpoint(Path(report.output)).metadata)


def test_container_follows_from_the_base(tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q8_0"))
    assert Path(lora_merge.merge(base, adapter).output).name == "flux+style.gguf"
    assert Path(lora_merge.merge(base, adapter, dtype="bf16").output).name == "flux+style.safetensors"
    with pytest.raises(UsageError, match="a safetensors file cannot be named"):
        lora_merge.merge(base, adapter, "x.gguf", dtype="bf16")
    with pytest.raises(UsageError, match="a GGUF file cannot be named"):
        lora_merge.merge(base, adapter, "x.safetensors")
    save_file({f"{n}.weight": rand(96, 256) for n in LAYERS}, tmp_path / "plain.safetensors")
    with pytest.raises(UsageError, match="ComfyUI-GGUF loads no model with the names of this base"):
        lora_merge.merge("plain.safetensors", adapter, "x.gguf")


def test_original_shapes_are_those_of_the_model(tmp_path: Path) -> None:
    """SD1 and SDXL: rows that are no multiple of 256 are stored in rows of 256; blocks cross the model's rows."""
    name, shape = "input_blocks.1.1.transformer_blocks.0.attn1.to_q", (320, 40)
    values = normal(*shape)
    tensors = {f"{name}.weight": (values.reshape(-1, 256), "Q4_K"), "input_blocks.0.0.bias": (normal(320), "F32")}
    base = by_library.write(tmp_path / "sd.gguf", "sd1", tensors, {f"comfy.gguf.orig_shape.{name}.weight": [*shape]})
    down, up = rand(4, 40), rand(320, 4, seed=9)
    save_file({f"lora_unet_{name.replace('.', '_')}.lora_down.weight": down,
               f"lora_unet_{name.replace('.', '_')}.lora_up.weight": up}, tmp_path / "a.safetensors")  # fmt: skip
    lora_merge.merge(base, tmp_path / "a.safetensors", tmp_path / "out.safetensors", dtype="fp32")
    old = by_library.read(base)[f"{name}.weight"][0].reshape(shape)
    exact = old + (up @ down).numpy()
    np.testing.assert_allclose(load(tmp_path / "out.safetensors")[f"{name}.weight"], exact, atol=1e-6)
    lora_merge.merge(base, tmp_path / "a.safetensors", tmp_path / "out.gguf")
    kept = by_library.read(tmp_path / "out.gguf")[f"{name}.weight"][0]
    assert kept.shape == (50, 256)
    assert np.sqrt(np.mean((kept.reshape(shape) - exact) ** 2)) < 0.15 * np.sqrt(np.mean(exact**2))
    wrong = by_library.write(tmp_path / "w.gguf", "sd1", tensors, {f"comfy.gguf.orig_shape.{name}.weight": [320, 41]})
    with pytest.raises(InputError, match="original shape"):
        open_checkpoint(wrong)


def test_types_stay_unless_an_adapter_changes_them(tmp_path: Path, adapter: Path) -> None:
    """llama.cpp keeps Q8_1 in memory only; nothing of it is decoded."""
    for touched, name in enumerate(("double_blocks.0.txt_attn.qkv.weight", "double_blocks.1.img_attn.qkv.weight")):
        tensors = {**flux("Q8_0"), name: (np.zeros((96, 256)), "Q8_1")}
        base = by_library.write(tmp_path / f"{touched}.gguf", "flux", tensors)
        for dtype, out in (("keep", tmp_path / "out.gguf"), ("bf16", tmp_path / "no.safetensors")):
            if not touched and dtype == "keep":
                lora_merge.merge(base, adapter, out)
                assert by_library.encoded(np.zeros((96, 256)), "Q8_1").tobytes() in out.read_bytes()
                continue
            with pytest.raises(InputError, match=r"Q8_1"):
                lora_merge.merge(base, adapter, out, dtype=dtype, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"0.gguf", "1.gguf", "out.gguf", adapter.name}


@pytest.mark.parametrize("kind", ["IQ1_M", "IQ3_S"])
def test_points_of_grids_are_read_and_never_written(tmp_path: Path, adapter: Path, kind: str) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux(kind))
    with pytest.raises(InputError, match="importance matrix") as caught:
        lora_merge.merge(base, adapter, tmp_path / "kept.gguf")
    assert 'dtype="bf16"' in caught.value.fix
    old = by_library.read(base)
    lora_merge.merge(base, adapter, tmp_path / "out.safetensors", dtype="fp32")
    made = load(tmp_path / "out.safetensors")
    for name, (values, _) in old.items():
        stem = name.removesuffix(".weight")
        np.testing.assert_allclose(made[name].numpy(), values + (change(stem) if stem in TOUCHED else 0), atol=1e-6)
    assert lora_merge.verify(tmp_path / "out.safetensors", full=True)["full"]
    other = f"{LAYERS[1]}.weight"  # not changed by the adapter
    part = by_library.write(tmp_path / "part.gguf", "flux", {**flux("Q8_0"), other: flux(kind)[other]})
    lora_merge.merge(part, adapter, tmp_path / "part-out.gguf")
    found, before = by_library.read(tmp_path / "part-out.gguf"), by_library.read(part)
    np.testing.assert_array_equal(found[other][0], before[other][0])


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("name", [LAYERS[0], LAYERS[1]])
def test_scale_beside_blocks_is_part_of_the_weight(tmp_path: Path, adapter: Path, name: str, dtype: str) -> None:
    """llama.cpp multiplies by it; a weight that an adapter changes would be another one without it."""
    tensors = {**flux("NVFP4"), f"{name}.scale": (np.full(1, 0.5), "F32")}
    base = by_library.write(tmp_path / "flux.gguf", "flux", tensors)
    out = tmp_path / ("out.gguf" if dtype == "keep" else "out.safetensors")
    if name not in TOUCHED and dtype == "keep":
        lora_merge.merge(base, adapter, out)
        return
    with pytest.raises(InputError, match="a scale for the whole weight"):
        lora_merge.merge(base, adapter, out, dtype=dtype)
    assert not out.exists()


def test_numbers_that_no_scale_covers_are_refused(tmp_path: Path, adapter: Path) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q4_0"))
    with pytest.raises(MergeError, match="too large for Q4_0") as caught:
        lora_merge.merge(base, (adapter, 1e9), tmp_path / "out.gguf")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out.gguf").exists()


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, adapter: Path) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q6_K"))
    info, raw = open_checkpoint(base).tensors[f"{TOUCHED[0]}.weight"], bytearray(base.read_bytes())
    raw[info.offset + 208 : info.offset + 210] = b"\xff\xff"
    base.write_bytes(raw)
    with pytest.raises(InputError, match="scale is not a number"):
        lora_merge.merge(base, adapter, tmp_path / "out.gguf")


def test_inspect_shows_the_types(tmp_path: Path) -> None:
    facts = inspect(by_library.write(tmp_path / "flux.gguf", "flux", flux("Q4_K")))
    assert facts["dtypes"]["q4_k"] == 4 * 96 * 256
    assert facts["quantised"] == "4 weights as Q4_K"


def test_batches_share_the_base(tmp_path: Path, adapter: Path) -> None:
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q5_0"))
    jobs = [{"base": base.name, "adapters": [{"path": adapter.name, "strength": s}], "output": f"{s}.gguf"}
            for s in (0.5, 1.0)]  # fmt: skip
    (tmp_path / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": jobs}))
    reports = lora_merge.run_batch(tmp_path / "jobs.yaml")
    assert len(reports) == 2
    lora_merge.merge(base, adapter, tmp_path / "alone.gguf")
    assert by_library.read(tmp_path / "alone.gguf")[f"{TOUCHED[0]}.weight"][0].tobytes() == \
        by_library.read(tmp_path / "1.0.gguf")[f"{TOUCHED[0]}.weight"][0].tobytes()  # fmt: skip


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def gguf(entries: bytes = b"", infos: bytes = b"", data: bytes = b"", version: int = 3, counts: Any = None) -> bytes:
    """A file with any counts; one tensor and no entry unless told."""
    header = b"GGUF" + struct.pack("<I", version) + struct.pack("<QQ", *(counts or (1, 0))) + entries + infos
    return header + bytes(-len(header) % 32) + data


def info(name: bytes = b"a.weight", dims: tuple[int, ...] = (8, 4), kind: int = 0, offset: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", kind, offset)


LYING: dict[str, tuple[bytes, str]] = {
    "version 1": (gguf(version=1), "version is 1"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big endian"),
    "nothing more": (b"GGUF\x03\0\0\0\x01", "middle of an entry"),
    "2**60 tensors": (gguf(counts=(2**60, 0)), "claims 1152921504606846976"),
    "a million entries": (gguf(counts=(1, 2**20)), "1048576 entries"),
    "60000 entries that are not there": (gguf(counts=(1, 60_000)), "middle of an entry"),
    "a million tensors that are not there": (gguf(counts=(2**20, 0)), "middle of an entry|no bytes|is empty"),
    "a long key": (gguf(struct.pack("<Q", 2**62), counts=(1, 1)), "middle of an entry"),
    "a long text": (gguf(entry("k", 8, struct.pack("<Q", 2**63)), counts=(1, 1)), "middle of an entry"),
    "a text that is no UTF-8": (gguf(entry("k", 8, struct.pack("<Q", 1) + b"\xff"), counts=(1, 1)), "UTF-8"),
    "an unknown type": (gguf(entry("k", 77, b""), counts=(1, 1)), "type 77"),
    "arrays in arrays": (gguf(entry("k", 9, struct.pack("<IQ", 9, 2**40)), counts=(1, 1)), "items of the type 9"),
    "2**40 texts": (gguf(entry("k", 9, struct.pack("<IQ", 8, 2**40)), counts=(1, 1)), "claims 1099511627776 texts"),
    "a million texts": (gguf(entry("k", 9, struct.pack("<IQ", 8, 2**20)), counts=(1, 1)), "middle of an entry"),
    "2**60 numbers": (gguf(entry("k", 9, struct.pack("<IQ", 6, 2**60)), counts=(1, 1)), "middle of an entry"),
    "one key twice": (gguf(entry("k", 0, b"1") * 2, counts=(1, 2)), "'k' appears twice"),
    "alignment 0": (gguf(entry("general.alignment", 4, bytes(4)), counts=(1, 1)), "alignment is '0'"),
    "a text as alignment": (gguf(entry("general.alignment", 8, bytes(8)), counts=(1, 1)), "alignment is ''"),
    "one name twice": (gguf(infos=info() * 2, counts=(2, 0)), "appears twice"),
    "2**32 axes": (gguf(infos=struct.pack("<Q", 1) + b"a" + b"\xff" * 4), "4294967295 axes"),
    "a product beyond 64 bits": (gguf(infos=info(dims=(2**40, 2**40))), "cannot have"),
    "half a block": (gguf(infos=info(dims=(16, 4), kind=12)), "Q4_K cannot have"),
    "a type of the future": (gguf(infos=info(kind=999)), "type 999"),
    "data beyond the end": (gguf(infos=info(dims=(2**40,))), "the file has"),
    "data cut": (gguf(infos=info(), data=bytes(127)), "ends at byte"),
    "more data": (gguf(infos=info(), data=bytes(129)), "follow its data"),
    "an odd offset": (gguf(infos=info(offset=4), data=bytes(132)), "do not follow"),
    "a gap": (gguf(infos=info(offset=64), data=bytes(192)), "do not follow"),
    "tensors that overlap": (gguf(infos=info() + info(b"b"), data=bytes(128), counts=(2, 0)), "overlap"),
}


@pytest.mark.parametrize("name", LYING)
def test_headers_that_lie_are_refused_at_once(tmp_path: Path, name: str) -> None:
    content, why = LYING[name]
    (tmp_path / "x.gguf").write_bytes(content)
    started = time.process_time()
    with pytest.raises(InputError, match=why) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert time.process_time() - started < 1
    assert caught.value.exit_code == 3


def test_header_is_bounded_in_a_file_of_any_size(tmp_path: Path) -> None:
    """A million texts of no length in a file of a terabyte without blocks, and 2**60 numbers."""
    for kind, count, why in ((8, 2**20, "is empty|middle"), (6, 2**37, "longer than")):
        with (tmp_path / "x.gguf").open("wb") as f:
            f.write(gguf(entry("k", 9, struct.pack("<IQ", kind, count)), counts=(1, 1)))
            f.truncate(2**40)
        with pytest.raises(InputError, match=why):
            container.parse_gguf(tmp_path / "x.gguf")


def test_no_byte_of_a_header_may_be_missing(tmp_path: Path) -> None:
    content = gguf(entry("general.name", 8, struct.pack("<Q", 2) + b"ab"), info(), bytes(128), counts=(1, 1))
    (tmp_path / "x.gguf").write_bytes(content)
    assert open_checkpoint(tmp_path / "x.gguf").tensors["a.weight"].shape == (4, 8)
    for end in range(4, len(content), 5):
        (tmp_path / "x.gguf").write_bytes(content[:end])
        with pytest.raises(InputError):
            open_checkpoint(tmp_path / "x.gguf")


def test_unknown_architecture_of_llama_cpp_is_refused(tmp_path: Path, adapter: Path) -> None:
    tensors = {"token_embd.weight": (normal(8, 256), "F16"), "blk.0.attn_q.weight": (normal(8, 256), "F16")}
    base = by_library.write(tmp_path / "m.gguf", "bloom", tensors)
    with pytest.raises(InputError, match="architecture 'bloom'"):
        lora_merge.merge(base, adapter, tmp_path / "out.gguf")
    assert inspect(base)["tensors"] == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_file_without_entries_keeps_its_types(tmp_path: Path, adapter: Path, kind: str) -> None:
    """stable-diffusion.cpp writes no entry at all, and the names of the checkpoint (src/model_io/gguf_io.cpp)."""
    with_entry = by_library.write(tmp_path / "named.gguf", "flux", flux(kind))
    infos, data = b"", b""
    for name, (values, own) in flux(kind).items():
        number = by_library.GGMLQuantizationType[own]
        infos += info(f"model.diffusion_model.{name}".encode(), values.shape[::-1], int(number), len(data))
        data += (raw := by_library.encoded(values, own).tobytes()) + bytes(-len(raw) % 32)
    base = tmp_path / "flux.gguf"
    base.write_bytes(gguf(b"", infos, data, counts=(len(flux(kind)), 0)))
    for path in (base, with_entry):
        lora_merge.merge(path, adapter, path.with_suffix(".out.gguf"))
    found, wanted = (by_library.read(path.with_suffix(".out.gguf")) for path in (base, with_entry))
    assert {k.removeprefix("model.diffusion_model."): (v.tobytes(), t) for k, (v, t) in found.items()} == \
        {k: (v.tobytes(), t) for k, (v, t) in wanted.items()}  # fmt: skip
    assert inspect(base).get("quantised") == (None if kind == "F16" else f"4 weights as {kind}")
    prove(base.with_suffix(".out.gguf"))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_adapter_keeps_the_names_of_its_trainer_in_gguf(tmp_path: Path, kind: str) -> None:
    """As stable-diffusion.cpp converts one; its numbers are those that the library decodes."""
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("F32"))
    factors = {k: (v.numpy(), kind if v.shape[-1] % 32 == 0 else "F16") for k, v in style().items()}
    lora = by_library.write(tmp_path / "lora.gguf", "flux", factors)
    lora_merge.merge(base, lora, tmp_path / "out.gguf")
    stored, found = by_library.read(lora), by_library.read(tmp_path / "out.gguf")
    for name in TOUCHED:
        stem = f"lora_unet_{name.replace('.', '_')}.lora_"
        delta = stored[f"{stem}up.weight"][0].astype(np.float64) @ stored[f"{stem}down.weight"][0]
        wanted = by_library.read(base)[f"{name}.weight"][0] + delta
        np.testing.assert_allclose(found[f"{name}.weight"][0], wanted, atol=2e-5)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (normal(8, 256), "F16"), "blk.0.attn_q.weight": (normal(8, 256), "F16")}
    for entries in ({}, {"llama.attention.head_count": 3}, {"llama.attention.head_count": 8}):
        with pytest.raises(InputError, match="heads"):
            open_checkpoint(by_library.write(tmp_path / "m.gguf", "llama", tensors, entries))


@pytest.mark.parametrize(("entries", "names", "shape"), [
    ({}, [], (2, 2)), ({"adapter.lora.alpha": "many"}, ["ffn_up"], (2, 2)), ({"adapter.lora.alpha": [1]}, ["ffn_up"], (2, 2)),
    ({"general.alignment": []}, ["ffn_up"], (2, 2)), ({"general.alignment": "8"}, ["ffn_up"], (2, 2)),
    ({}, ["attn_q"], ()), ({}, ["attn_q"], (0, 2)), ({}, ["attn_q"], (3, 2)),
])  # fmt: skip
def test_entries_and_shapes_of_a_stranger_are_refused(
    tmp_path: Path, entries: dict[str, Any], names: list[str], shape: tuple[int, ...]
) -> None:
    weights = [f"blk.0.{name}.weight" for name in names]
    base, adapter = tmp_path / "m.gguf", tmp_path / "a.gguf"
    base.write_bytes(container_of(LLAMA, ["blk.0.ffn_up.weight", "blk.0.attn_q.weight"]))
    adapter.write_bytes(
        container_of({**ADAPTER, **entries}, [f"{name}.lora_{x}" for name in weights for x in "ab"], shape)
    )
    with pytest.raises((InputError, FitError)):
        lora_merge.merge(base, adapter, tmp_path / "out.gguf")
    if entries.keys() - {"adapter.lora.alpha"} or names == ["attn_q"]:
        base.write_bytes(container_of({**LLAMA, **entries}, weights, shape))
        adapter.write_bytes(container_of(ADAPTER, [f"{name}.lora_{x}" for name in weights for x in "ab"]))
        with pytest.raises((InputError, FitError)):
            lora_merge.merge(base, adapter, tmp_path / "out.gguf")


@pytest.mark.parametrize(("stated", "noted"), [("llama", False), ("qwen2", True), ("", False)])
def test_adapter_that_states_another_architecture_than_the_base_is_noted(
    tmp_path: Path, stated: str, *, noted: bool
) -> None:
    base, adapter = tmp_path / "m.gguf", tmp_path / "a.gguf"
    base.write_bytes(container_of(LLAMA, ["blk.0.ffn_up.weight"]))
    halves = [f"blk.0.ffn_up.weight.lora_{x}" for x in "ab"]
    adapter.write_bytes(container_of({**ADAPTER, "general.architecture": stated}, halves))
    plan = repr(lora_merge.plan(base, adapter, tmp_path / "out.gguf"))
    assert (f"note a.gguf: it states the architecture {stated!r}, the base 'llama'" in plan) == noted


@pytest.mark.parametrize("output", ["out.safetensors", "out.ckpt"])
def test_lines_for_another_ending_are_right(
    tmp_path: Path, adapter: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_library.write(tmp_path / "flux.gguf", "flux", flux("Q8_0"))
    answer = command_line("flux.gguf", adapter, "-o", output)
    assert answer.code == 2, answer
    lines = answer.err.strip().partition("; write lora-merge ")[2].split("; or lora-merge ")
    assert len(lines) == 2, answer.err
    assert [command_line(*shlex.split(line)).code for line in lines] == [0, 0]
    assert {path.name for path in tmp_path.glob("out.*")} == {"out.gguf", "out.safetensors"}
