"""Headers, folders, pickles and readers. Run: pytest tests/files/test_checkpoint.py"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from lora_merge.disk import pages, system, volumes
from lora_merge.disk import reader as reader_module
from lora_merge.disk.files import FileState, Header
from lora_merge.disk.pages import PAGE, aligned_buffer
from lora_merge.disk.reader import Reader, read_bytes
from lora_merge.disk.volumes import Mode
from lora_merge.dtypes import ITEM_BITS, Memory
from lora_merge.errors import InputError
from lora_merge.files.checkpoint import Index, open_checkpoint
from lora_merge.files.pickles import FORMAT_NAMES
from lora_merge.files.safetensors import parse
from tests.conftest import to_disk
from tests.kit.cost import steps
from tests.kit.files import blob
from tests.kit.pairs import examples


def library_accepts(content: bytes) -> bool:
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


def we_accept(content: bytes) -> bool:
    (length,) = struct.unpack("<Q", content[:8])
    try:
        parse(content[8 : 8 + length], Path("x"), len(content))
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- differential


json_numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**53, 2**63, 2**64 - 1, 2**64, -1, 1.0, 0.5, True, None]),
)
odd = st.one_of(json_numbers, st.text(max_size=3), st.lists(json_numbers, max_size=3), st.just({}))
names = st.text(st.characters(codec="utf-8"), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Any, int]:
    """A right header with a few of its values replaced, and how many bytes of data follow."""
    table: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(ITEM_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = ITEM_BITS[dtype]
        for n in shape:
            size *= n
        begin, end = end, end + size // 8
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    if draw(st.booleans()):
        table["__metadata__"] = draw(
            st.one_of(st.dictionaries(names, names, max_size=2), odd, st.dictionaries(names, odd))
        )
    entries = [e for n, e in table.items() if n != "__metadata__"]
    for _ in range(draw(st.integers(0, 2))):
        if not entries:
            break
        entry = draw(st.sampled_from(entries))
        match draw(st.integers(0, 4)):
            case 0:
                entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(odd)
            case 1:
                entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
            case 2 if isinstance(entry.get("shape"), list) and entry["shape"]:
                entry["shape"][0] = draw(json_numbers)
            case 3 if isinstance(entry.get("data_offsets"), list):
                entry["data_offsets"] = [draw(json_numbers), *entry["data_offsets"][1:]]
            case 4:
                entry["dtype"] = draw(st.sampled_from(["F32", "f32", "F128", "U8", "", "F4"]))
    return table, max(0, end + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))


@settings(max_examples=examples(300))
@given(headers())
def test_header_is_accepted_where_the_library_accepts_it(case: tuple[Any, int]) -> None:
    table, size = case
    content = blob(table, bytes(size))
    assert we_accept(content) == library_accepts(content)


@settings(max_examples=examples(150))
@given(headers(), st.data())
def test_damaged_header_text_is_refused_as_by_the_library(case: tuple[Any, int], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(case[0], ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.sampled_from(list(b'"{}[]:,.-0128eE \\\tnuld\x00\x80\xff')))
    content = blob(bytes(raw), bytes(case[1]))
    if we_accept(content) != library_accepts(content):
        # the one difference that damage can make: a name that has become the name of another
        assert not we_accept(content)
        with pytest.raises(ValueError, match="appears twice"):
            parse(bytes(raw), Path("x"), len(content))


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY},"__metadata__":{{"k":"1","k":"2"}}}}',
        '{"a":["U8",[1],[0,1]]}',
        '{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_deliberate_differences_are_these(text: str) -> None:
    content = blob(text.encode(), b"\0")
    assert library_accepts(content)
    assert not we_accept(content)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', 1),
        ('{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":NaN}}', 1),
        ('{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":1e999}}', 1),
        ('{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"\\ud83d\\ude00":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}', 1),
        ('{"a":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}}', 3),
        ('{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3),
        ('{"a":{"dtype":"F32","shape":[9223372036854775808,4,0],"data_offsets":[0,0]}}', 0),
        ('{"a":{"dtype":"F32","shape":[0,9223372036854775808,4],"data_offsets":[0,0]}}', 0),
        ('{"a":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,0]}}', 0),
        ('{"__metadata__":null}', 0),
        ('{"__metadata__":{},"__metadata__":{}}', 0),
        ("{}", 0),
        (" {} ", 0),
        ("\ufeff{}", 0),
        ("{}\0", 0),
        ("", 0),
        ("[]", 0),
        ("[" * 200_000, 0),
        ('{"a":' * 200_000, 0),
    ],
)
def test_corner_cases_agree_with_the_library(text: str, size: int) -> None:
    content = blob(text.encode(), bytes(size))
    assert we_accept(content) == library_accepts(content)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(5, dtype=torch.bfloat16),
        "e": torch.zeros(0, 2),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"k": "v"})
    index = open_checkpoint(tmp_path / "x.safetensors")
    assert index.metadata == {"k": "v"}
    assert {n: (t.shape, t.nbytes) for n, t in index.tensors.items()} == {
        n: (tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors.items()
    }
    assert read_bytes(index.tensors["b"]) == tensors["b"].numpy().tobytes()
    offsets = [t.offset for t in index.tensors.values()]
    assert offsets == sorted(offsets)


# ---------------------------------------------------------------- folders


def shard(path: Path, **tensors: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n.replace("__", "."): torch.full((2,), float(v)) for n, v in tensors.items()}, path)


def index_file(path: Path, **weight_map: str) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def value(index: Index, name: str) -> float:
    return float(struct.unpack("<2f", read_bytes(index.tensors[name]))[0])


@pytest.mark.parametrize("told", [[], {}, 0, [1], {"a": []}, "x" * 999])
def test_type_of_a_model_is_a_short_text_whatever_the_configuration_says(told: object, tmp_path: Path) -> None:
    """Names are made of it, and tables asked for it, which have no answer for a list."""
    shard(tmp_path / "model.safetensors", a=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": told}))
    found = open_checkpoint(tmp_path).config["model_type"]
    assert isinstance(found, str)
    assert len(found) < 200


def test_shards_with_an_index(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shard(tmp_path / one, a=1)
    shard(tmp_path / two, b=2)
    index_file(tmp_path / "model.safetensors.index.json", b=two, a=one)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        index = open_checkpoint(path)
        assert index.path == tmp_path
        assert [f.name for f in index.files] == [one, two]
        assert index.index_files == (tmp_path / "model.safetensors.index.json",)
        assert (value(index, "a"), value(index, "b")) == (1, 2)
    assert open_checkpoint(tmp_path).config == {"model_type": "x"}
    assert "shard 1 of 2" in open_checkpoint(tmp_path / one).notes[0]


def test_shards_without_an_index(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        shard(tmp_path / f"diffusion_pytorch_model.fp16-0000{i}-of-00003.safetensors", **{f"t{i}": i})
    assert list(open_checkpoint(tmp_path).tensors) == ["t1", "t2", "t3"]
    (tmp_path / "diffusion_pytorch_model.fp16-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"2 of 3 are here[\s\S]*00002-of-00003"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        ({"a": "model-00003-of-00002.safetensors"}, "is not in the folder"),
        ({"a": "../secret.safetensors"}, "not the name of a file"),
        ({"a": "/etc/passwd"}, "not the name of a file"),
        ({"a": "..\\secret"}, "not the name of a file"),
        ({"a": ".."}, "not the name of a file"),
        ({"a": "C:x"}, "not the name of a file"),
        ({"a": "nul\0"}, "not the name of a file"),
        ({"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}, "'c' is not in the file"),
        ({"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}, "is not in the file"),
        ({"a": 1}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_index_that_lies_is_refused(tmp_path: Path, weight_map: Any, why: str) -> None:
    shard(tmp_path / "secret.safetensors", a=9)
    folder = tmp_path / "model"
    shard(folder / "model-00001-of-00002.safetensors", a=1)
    shard(folder / "model-00002-of-00002.safetensors", b=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=why):
        open_checkpoint(folder)


def test_name_in_two_shards_is_refused_and_one_that_no_index_lists_is_reported(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shard(tmp_path / one, a=1)
    shard(tmp_path / two, b=2, extra=3)
    index_file(tmp_path / "model.safetensors.index.json", a=one, b=two)
    assert "does not list extra" in open_checkpoint(tmp_path).notes[0]
    shard(tmp_path / two, a=1, b=2)
    with pytest.raises(InputError, match="'a' is in two files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_that_the_index_does_not_name(tmp_path: Path, suffix: str) -> None:
    """Of the same count: part of the model, though no library loads them. Of another count: left by an older export."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    one, two, old = (f"{stem}-{n}.{suffix}" for n in ("00001-of-00002", "00002-of-00002", "00003-of-00003"))
    shard(tmp_path / one, a=1)
    shard(tmp_path / two, b=2)
    shard(tmp_path / old, c=3)
    index_file(tmp_path / f"{stem}.{suffix}.index.json", a=one)
    if suffix == "bin":
        with pytest.raises(InputError, match="does not name pytorch_model-00002-of-00002"):
            open_checkpoint(tmp_path)
        return
    index = open_checkpoint(tmp_path)
    assert [*index.tensors] == ["a"]
    assert [p.name for p in index.unnamed] == [two]
    assert [n.partition(": ")[2] for n in index.notes] == ["copied as they are", "of another count, not copied"]
    assert (two in index.notes[0], old in index.notes[1]) == (True, True)


def test_shards_of_two_counts_and_no_index_are_refused(tmp_path: Path) -> None:
    for name in ("1-of-00001", "1-of-00002", "2-of-00002"):
        shard(tmp_path / f"model-0000{name}.safetensors", **{name: 1})
    with pytest.raises(InputError, match=r"shards of two counts[\s\S]*00001-of-00001[\s\S]*00001-of-00002"):
        open_checkpoint(tmp_path)
    index_file(tmp_path / "model.safetensors.index.json", **{"1-of-00002": "model-00001-of-00002.safetensors",
                                                             "2-of-00002": "model-00002-of-00002.safetensors"})  # fmt: skip
    index = open_checkpoint(tmp_path)
    assert [*index.tensors] == ["1-of-00002", "2-of-00002"]
    (note,) = index.notes
    assert "model-00001-of-00001.safetensors: of another count, not copied" in note


def test_variants_side_by_side(tmp_path: Path) -> None:
    shard(tmp_path / "diffusion_pytorch_model.fp16.safetensors", w=16)
    assert value(open_checkpoint(tmp_path), "w") == 16
    assert not open_checkpoint(tmp_path).notes
    shard(tmp_path / "diffusion_pytorch_model.safetensors", w=32)
    index = open_checkpoint(tmp_path)
    assert value(index, "w") == 32
    assert "diffusion_pytorch_model.fp16.safetensors" in index.notes[0]
    torch.save({"w": torch.zeros(2)}, tmp_path / "diffusion_pytorch_model.bin")
    assert value(open_checkpoint(tmp_path), "w") == 32


def test_variant_of_the_same_weights_comes_before_one_of_others(tmp_path: Path) -> None:
    """`ema` are other weights than those that were saved beside it in fp16."""
    for number, variant in enumerate(("ema", "fp16", "fp32", "non_ema")):
        shard(tmp_path / f"diffusion_pytorch_model.{variant}.safetensors", w=number)
    assert value(open_checkpoint(tmp_path), "w") == 2
    (tmp_path / "diffusion_pytorch_model.fp32.safetensors").unlink()
    assert value(open_checkpoint(tmp_path), "w") == 1
    assert "diffusion_pytorch_model.ema.safetensors" in open_checkpoint(tmp_path).notes[0]


def test_cache_of_links_opens(tmp_path: Path) -> None:
    """Model caches keep files elsewhere, under their hash, and link to them."""
    shard(tmp_path / "blobs" / "abc", w=5)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert value(open_checkpoint(tmp_path / "snapshot"), "w") == 5


def pipeline(folder: Path) -> None:
    shard(folder / "unet" / "diffusion_pytorch_model.safetensors", down__weight=1)
    shard(folder / "text_encoder" / "model.fp16.safetensors", layer__weight=2)
    shard(folder / "not_listed" / "model.safetensors", x=3)
    (folder / "scheduler").mkdir()
    (folder / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    parts = {"unet": ["diffusers", "UNet2DConditionModel"], "text_encoder": ["transformers", "CLIPTextModel"],
             "scheduler": ["diffusers", "X"], "../not_listed": ["a", "b"], "_class_name": "P"}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(parts))


def test_pipeline_is_the_union_of_its_components(tmp_path: Path) -> None:
    pipeline(tmp_path)
    index = open_checkpoint(tmp_path)
    assert set(index.tensors) == {"unet.down.weight", "text_encoder.layer.weight"}
    assert index.tensors["unet.down.weight"].stored == "down.weight"
    assert index.tensors["unet.down.weight"].file == tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    assert value(index, "text_encoder.layer.weight") == 2
    assert index.components["unet"].config == {"_class_name": "UNet2DConditionModel"}
    assert index.config["_class_name"] == "P"
    assert set(index.files) == set(index.headers)
    inside = open_checkpoint(tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    assert list(inside.tensors) == ["down.weight"]


def test_peft_folder(tmp_path: Path) -> None:
    shard(tmp_path / "adapter_model.safetensors", x=1)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert open_checkpoint(tmp_path).config == {"r": 8}
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"x": torch.ones(2)}, tmp_path / "adapter_model.bin")
    assert value(open_checkpoint(tmp_path), "x") == 1
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(InputError, match=r"without adapter_model\.safetensors"):
        open_checkpoint(tmp_path)


def test_older_torch_is_not_let_near_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(InputError, match=r"torch 2\.5\.1\+cu124 is too old"):
        open_checkpoint(tmp_path / "x.pt")


def test_folders_that_leave_a_choice_or_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no weights"):
        open_checkpoint(tmp_path)
    shard(tmp_path / "deep" / "model.safetensors", x=1)
    with pytest.raises(InputError, match="sub-folders: deep"):
        open_checkpoint(tmp_path)
    shard(tmp_path / "sdxl v1.0.safetensors", x=1)
    assert value(open_checkpoint(tmp_path), "x") == 1
    shard(tmp_path / "other.safetensors", x=2)
    with pytest.raises(InputError, match="several checkpoints"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"did you mean other\.safetensors"):
        open_checkpoint(tmp_path / "othr.safetensors")


# ---------------------------------------------------------------- torch files


def test_every_dtype_of_torch_files_streams(tmp_path: Path) -> None:
    tensors = {n: torch.arange(6).to(getattr(torch, n)).reshape(2, 3) for n in FORMAT_NAMES if hasattr(torch, n)}
    torch.save({"epoch": 3, "state_dict": {**tensors, "step": 7}}, tmp_path / "x.ckpt")
    index = open_checkpoint(tmp_path / "x.ckpt")
    assert set(index.tensors) == set(tensors)
    for name, info in index.tensors.items():
        assert info.source == tmp_path / "x.ckpt"
        assert (info.dtype, info.shape) == (FORMAT_NAMES[name], (2, 3))
        assert read_bytes(info) == tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
    assert "'state_dict'" in index.notes[0]
    assert "'step' (int)" in index.notes[1]


@pytest.mark.parametrize("zipped", ["zip", "legacy"])
def test_views_shared_and_strewn_tensors_of_torch_files(tmp_path: Path, zipped: str) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": whole, "rows": whole[1:3], "transposed": whole.t(), "columns": whole[:, 2:4], "alias": whole,
        "parameter": torch.nn.Parameter(torch.ones(3)), "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 4),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped == "zip")
    index = open_checkpoint(tmp_path / "x.pt")
    assert set(index.tensors) == set(tensors)
    in_memory = {n for n, t in index.tensors.items() if isinstance(t.source, Memory)}
    assert in_memory == ({"transposed", "columns", "empty"} if zipped == "zip" else set(tensors))
    with Reader([index]) as reader:
        for name, tensor in tensors.items():
            info, want = index.tensors[name], tensor.detach().contiguous().numpy().tobytes()
            buffer = bytearray(info.nbytes)
            reader.read_into(memoryview(buffer), info.source, info.offset)
            assert bytes(buffer) == read_bytes(info) == bytes(reader.view(info)) == want
            inner = max(info.nbytes - 5, 0)
            assert reader.read(info, 3, inner) == read_bytes(info, 3, inner) == want[3 : 3 + inner]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("zipped", ["zip", "legacy"])
def test_code_in_torch_files_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "x.pt", _use_new_zipfile_serialization=zipped == "zip")
    with pytest.raises(InputError, match=r"run code[\s\S]*mkdir"):
        open_checkpoint(Path("x.pt"))
    assert not Path("executed").exists()


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage")
@pytest.mark.parametrize("zipped", ["zip", "legacy"])
@pytest.mark.parametrize("channels", [False, True])
def test_quantised_torch_files_are_called_that(tmp_path: Path, zipped: str, channels: bool) -> None:  # noqa: FBT001
    ones = torch.ones(4, 4)
    if channels:
        tensor = torch.quantize_per_channel(ones, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8)
    else:
        tensor = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    torch.save({"a": tensor}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped == "zip")
    with pytest.raises(InputError, match="quantised tensors") as e:
        open_checkpoint(tmp_path / "x.pt")
    assert "unquantised" in e.value.fix


def test_torch_files_that_no_checkpoint_can_be_made_of(tmp_path: Path) -> None:
    cases = {
        "sparse": ({"a": torch.ones(3).to_sparse()}, "cannot hold: sparse"),
        "complex": ({"a": torch.ones(3, dtype=torch.complex128)}, "cannot hold: strided complex128"),
        "list": ([torch.ones(3)], "holds a list"),
        "tensor": (torch.ones(3), "holds a Tensor|holds a FakeTensor"),
        "none": ({"a": 1}, "no tensors"),
        "name": ({"a\ud800": torch.ones(3)}, "name that cannot be stored"),
        "metadata": ({"__metadata__": torch.ones(3)}, "name that cannot be stored"),
    }
    for name, (content, why) in cases.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(InputError, match=why):
            open_checkpoint(tmp_path / name)


# ---------------------------------------------------------------- quantised


@pytest.mark.parametrize(
    ("names", "dtype", "config", "expected"),
    [
        (["l.weight", "l.bias"], torch.float8_e4m3fn, {}, None),
        (["l.weight", "logit_scale", "alphas_cumprod", "q.scales_mlp"], torch.float16, {}, None),
        (["scaled_fp8", "l.weight", "l.scale_weight"], torch.float8_e4m3fn, {}, "scaled fp8"),
        (["l.weight", "l.weight_scale_inv"], torch.float32, {}, "block-scaled"),
        (["l.qweight", "l.qzeros", "l.scales"], torch.int32, {}, "GPTQ or AWQ"),
        (["l.weight", "l.weight.quant_state.bitsandbytes__nf4"], torch.uint8, {}, "nf4"),
        (["l.weight", "l.SCB"], torch.int8, {}, "int8"),
        (["l.weight._data", "l.weight._scale"], torch.int8, {}, "quanto"),
        (["l.comfy_quant"], torch.uint8, {}, "ComfyUI"),
        (["l.weight"], torch.float16, {"quantization_config": {"quant_method": "fp8"}}, "fp8, says"),
    ],
)
def test_quantised_checkpoints_are_named(
    tmp_path: Path, names: list[str], dtype: torch.dtype, config: dict[str, Any], expected: str | None
) -> None:
    save_file({n: torch.zeros(4).to(dtype) for n in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path).unread
    assert (found.how, found.holds(names[0])) == ("", False) if expected is None else expected in found.how
    assert expected is None or found.holds(names[0])


# ---------------------------------------------------------------- reader


def indexed(path: Path) -> Index:
    """A plain file as if it were a checkpoint."""
    with path.open("rb") as f:
        state = FileState.of(f.fileno())
    return Index(path, {}, {}, (path,), headers={path: Header({}, {}, 0, state)})


@settings(max_examples=examples(80))
@given(
    offset=st.sampled_from([0, 1, 4095, 4096, 8192, 10_000, 123_456]),
    size=st.sampled_from([0, 1, 100, 4096, 4097, 65_536, 300_001]),
    lead=st.sampled_from(["congruent", "other"]),
    way=st.sampled_from([("direct", 0), ("buffered", 0), ("buffered", 1 << 30)]),
    cold=st.booleans(),
)
def test_reads_are_exact(
    tmp_path_factory: pytest.TempPathFactory, offset: int, size: int, lead: str, way: tuple[Mode, int], *, cold: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "read"
    content = bytes(range(256)) * 2000
    if not path.exists():
        path.write_bytes(content)
        with path.open("rb") as f:
            to_disk(f.fileno())
    with path.open("rb") as f:
        if cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shift = offset % PAGE if lead == "congruent" else 17
    buffer = aligned_buffer(shift + size)[shift:]
    with patch.object(volumes, "DIRECT_ABOVE", way[1]), Reader([indexed(path)], way[0]) as reader:
        reader.read_into(buffer, path, offset)
        reader.check_unchanged()
    assert bytes(buffer) == content[offset : offset + size]


def test_short_and_refused_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    real = os.preadv

    def poor(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return real(fd, [buffers[0][:1000]], offset, flags)

    monkeypatch.setattr(os, "preadv", poor)
    buffer = bytearray(25_600)
    with Reader([indexed(tmp_path / "x")], "buffered") as reader:
        reader.read_into(memoryview(buffer), tmp_path / "x", 0)
    assert bytes(buffer) == bytes(range(256)) * 100
    monkeypatch.setattr(reader_module, "read_at", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with Reader([indexed(tmp_path / "x")], "buffered") as reader, pytest.raises(InputError, match="Input/output"):
        reader.read_into(memoryview(buffer), tmp_path / "x", 0)


def test_reading_where_there_is_no_preadv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    monkeypatch.setattr(system, "HAS_PREADV", False)
    buffer = bytearray(4)
    with Reader([indexed(tmp_path / "x")], "buffered") as reader:
        reader.read_into(memoryview(buffer), tmp_path / "x", 3)
    assert bytes(buffer) == b"3456"


def test_changed_inputs_are_noticed(tmp_path: Path) -> None:
    def truncate(p: Path) -> None:
        os.truncate(p, 100)

    def touch(p: Path) -> None:
        os.utime(p, ns=(1, 1))

    def replace(p: Path) -> None:
        p.with_name("new").write_bytes(bytes(8192))
        p.with_name("new").replace(p)

    def delete(p: Path) -> None:
        p.unlink()

    for change in (truncate, touch, replace, delete):
        path = tmp_path / change.__name__
        path.write_bytes(bytes(8192))
        index = indexed(path)
        with Reader([index]) as reader:
            reader.check_unchanged()
            change(path)
            with pytest.raises(InputError, match="changed while being read"):
                reader.check_unchanged()
            if change is truncate:
                with pytest.raises(InputError, match="ends at byte 100"):
                    reader.read_into(memoryview(bytearray(200)), path, 0)
        with pytest.raises(InputError):
            Reader([index])


def test_large_file_is_opened_in_few_steps(tmp_path: Path) -> None:
    """A 40 GB file of 6000 tensors."""
    table, end = {}, 0
    for i in range(6000):
        table[f"model.diffusion_model.blocks.{i // 30}.attention.{i % 30}.weight"] = {
            "dtype": "BF16", "shape": [1856, 1856], "data_offsets": [end, end + 2 * 1856**2],
        }  # fmt: skip
        end += 2 * 1856**2
    content = blob(table)
    with (tmp_path / "big.safetensors").open("wb") as f:
        f.write(content)
        f.truncate(len(content) + end)  # sparse
    assert end > 40e9
    opened: list[Index] = []
    made = steps(lambda: opened.append(open_checkpoint(tmp_path / "big.safetensors")))
    assert len(opened[0].tensors) == 6000
    assert made / 6000 < 30  # 20


def test_headers_need_no_torch() -> None:
    code = """
        import sys
        import lora_merge.files.checkpoint, lora_merge.files.safetensors
        assert "torch" not in sys.modules and "numpy" not in sys.modules
    """
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={**os.environ, "PYTHONPATH": root})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what its page cache holds")
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_reading_leaves_the_page_cache_as_it_was(tmp_path: Path, mode: Mode) -> None:
    """What of a file was not in the cache before still is not, and what was still is."""
    path, half = tmp_path / "x", 4 << 20
    path.write_bytes(bytes(2 * half))

    def cached(at: int) -> int:
        """Pages of this half that are in memory, by mincore(2); asking changes nothing."""
        with mmap.mmap(f, 0, access=mmap.ACCESS_COPY) as m:
            start = ctypes.addressof(ctypes.c_char.from_buffer(m)) + at
            pages = (ctypes.c_ubyte * (half // PAGE))()
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(half), pages) == 0
            return sum(p & 1 for p in pages)

    f = os.open(path, os.O_RDONLY)
    try:
        to_disk(f)
        os.posix_fadvise(f, half, half, os.POSIX_FADV_DONTNEED)
        if cached(half) > 16 or cached(0) < half // PAGE - 16:
            pytest.skip("this file system keeps its own cache")
        if mode == "buffered" and volumes.file_system(path) == "overlay":
            pytest.skip("nothing is dropped there")
        if pages._pages(f, 0, half) is None:
            pytest.skip("an older Linux says it wrongly now and then, on a busy machine")
        if mode == "buffered":  # decided for the file as a whole
            os.posix_fadvise(f, 0, half, os.POSIX_FADV_DONTNEED)
        before = cached(0)
        with patch.object(volumes, "DIRECT_ABOVE", 0), Reader([indexed(path)], mode) as reader:
            reader.read_into(aligned_buffer(2 * half), path, 0)
        assert abs(cached(0) - before) <= 16
        assert cached(half) <= 16
    finally:
        os.close(f)


@pytest.mark.parametrize("silent", ["overlay", "no hints"])
def test_pages_are_not_dropped_where_the_system_does_not_report_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """Of a file on overlayfs Linux says that nothing is held, and drops the pages of the file below it all the same."""

    def unknown(*_: object) -> bool:
        raise pages.Unknown

    if silent == "overlay":
        monkeypatch.setattr(volumes, "file_system", lambda _: "overlay")
        monkeypatch.setattr(reader_module, "holds", lambda *_: False)
    else:
        monkeypatch.setattr(reader_module, "holds", unknown)
    monkeypatch.setattr(volumes, "DIRECT_ABOVE", 0)
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    with Reader([indexed(path)], "buffered") as reader:
        assert not reader._files[path].drop


@pytest.mark.slow  # it goes by how fast the disk is
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what its page cache holds")
def test_pages_on_their_way_into_the_cache_are_not_waited_for(tmp_path: Path) -> None:
    """Waiting sets off the next read-ahead, and a whole cold file came through the cache, behind a hasher's beginning."""
    path, size = tmp_path / "x", 96 << 20
    path.write_bytes(bytes(size))
    f = os.open(path, os.O_RDONLY)
    try:
        to_disk(f)
        os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)
        if pages._pages(f, 0, size) != 0:
            pytest.skip("this system counts no pages, or keeps its own cache")
        os.pread(f, 4096, 0)  # as a header is read: the system reads on
        with Reader([indexed(path)], "direct") as reader:
            reader.read_into(memoryview(bytearray(8 << 20)), path, 0)  # through the cache, as a hasher reads
            for at in range(0, size, 16 << 20):
                reader.read_into(aligned_buffer(16 << 20), path, at)
        held = pages._pages(f, 0, size)
        assert held is not None
        assert held * PAGE < size // 2
    finally:
        os.close(f)


@pytest.mark.parametrize("key", ["lora", "adapter", "lora_state_dict", "adapter_state_dict"])
def test_adapter_in_the_checkpoint_of_a_training_is_found(key: str, tmp_path: Path) -> None:
    torch.save({key: {"a.lora_A.weight": torch.ones(2, 3)}, "epoch": 3, "optim": {"state": {}}}, tmp_path / "x.pt")
    index = open_checkpoint(tmp_path / "x.pt")
    assert [*index.tensors] == ["a.lora_A.weight"] and repr(key) in index.notes[0]
