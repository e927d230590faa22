"""Bad input of every kind: one typed error, nothing run, nothing left behind. Run: pytest tests/files/test_hostile.py"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import InputError, MergeError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.planning.recipe import parsed
from lora_merge.text import from_json
from tests.kit.files import blob

ROOT = Path(__file__).parents[2]


def entry(shape: Any = (1,), span: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def good() -> bytes:
    return blob({"a.weight": entry((4, 4), (0, 64))}, bytes(64))


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(range(1, 8)), "too few"),
    "zeros": (bytes(10_000), "contains only zeros"),
    "noise": (bytes(range(256)) * 9, "header claims"),
    "header longer than the file": (struct.pack("<Q", 1 << 20) + b"{}", "claims 1048576 bytes, the file has 10"),
    "header longer than allowed": (struct.pack("<Q", 1 << 62) + b"{}", "the format allows"),
    "header of -1": (b"\xff" * 8 + b"{}", "the format allows"),
    "truncated header": (good()[:30], "the file has 30"),
    "truncated data": (good()[:-1], "1 bytes of its data are missing"),
    "more data": (good() + b"x", "1 bytes follow"),
    "no json": (blob(b"{]"), "not JSON"),
    "an array": (blob([]), "not a JSON object"),
    "a number": (blob(b"1"), "not a JSON object"),
    "not utf-8": (blob(b'{"\xff": 1}'), "not JSON"),
    "deep": (blob(b'{"a":' * 100_000), "nested too deeply|not JSON"),
    "deep array": (blob(b"[" * 1_000_000), "nested too deeply|not JSON"),
    "a number of 10000 digits": (blob(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
    "duplicate tensor": (blob(b'{"a":{"dtype":"F32"},"a":{"dtype":"F32"}}'), "'a' appears twice"),
    "duplicate field": (blob(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "'dtype' appears twice"),
    "duplicate metadata": (blob(b'{"__metadata__":{"k":"1","k":"2"}}'), "'k' appears twice"),
    "nan": (blob(b'{"a":NaN}'), "NaN"),
    "metadata of numbers": (blob({"__metadata__": {"k": 1}}), "table of strings"),
    "metadata of lists": (blob({"__metadata__": []}), "table of strings"),
    "entry of null": (blob({"a": None}), "not a JSON object"),
    "no dtype": (blob({"a": {"shape": [], "data_offsets": [0, 4]}}), "has no dtype"),
    "no shape": (blob({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "has no shape"),
    "no offsets": (blob({"a": {"dtype": "F32", "shape": []}}), "has no data_offsets"),
    "unknown dtype": (blob({"a": entry(dtype="F128")}, bytes(4)), "dtype 'F128'"),
    "dtype of null": (blob({"a": entry(dtype=None)}, bytes(4)), "dtype 'None'"),
    "dtype of a list": (blob({"a": entry(dtype=["F32"])}, bytes(4)), "which the format does not know"),
    "overlap": (blob({"a": entry(), "b": entry(span=(2, 6))}, bytes(6)), "'b' overlap"),
    "same bytes twice": (blob({"a": entry(), "b": entry()}, bytes(4)), "overlap"),
    "gap": (blob({"a": entry(), "b": entry(span=(8, 12))}, bytes(12)), "gap before"),
    "gap at the start": (blob({"a": entry(span=(4, 8))}, bytes(8)), "gap before"),
    "beyond the end": (blob({"a": entry((1 << 40,), (0, 1 << 42))}, bytes(4)), "are missing"),
    "backwards": (blob({"a": entry(span=(4, 0))}, bytes(4)), "ascending"),
    "negative offset": (blob({"a": entry(span=(-4, 0))}, bytes(4)), "ascending"),
    "negative shape": (blob({"a": entry((-1,))}, bytes(4)), "list of sizes"),
    "shape of a bool": (blob({"a": entry((True,))}, bytes(4)), "list of sizes"),
    "shape of a float": (blob({"a": entry((1.0,))}, bytes(4)), "list of sizes"),
    "shape of a string": (blob({"a": entry("1")}, bytes(4)), "list of sizes"),
    "shape too small": (blob({"a": entry((0,))}, bytes(4)), "is given 4 bytes"),
    "shape that overflows": (blob({"a": entry((1 << 62, 4), (0, 0))}), "is given 0 bytes"),
    "shape that wraps to the size": (blob({"a": entry((1 << 32, (1 << 30) + 1), (0, 0))}), "is given 0 bytes"),
    "offsets of 2^64": (blob({"a": entry(span=(0, 1 << 64))}), "ascending"),
    "three offsets": (blob({"a": entry(span=(0, 2, 4))}, bytes(4)), "ascending"),
    "half a byte": (blob({"a": entry((1,), (0, 1), "F4")}, b"x"), "no whole number"),
    "no tensors": (blob({}), "no tensors"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(90), "a valid GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs pointer"),
    "html": (b"<!DOCTYPE html><html><body>Please log in</body></html>", "a web page"),
    "json": (b'{"weight_map": {}}', "a JSON file"),
    "gzip": (b"\x1f\x8b\x08" + bytes(range(90)), "a gzip archive"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(90), "a picture"),
    "numpy": (b"\x93NUMPY\x01\0" + bytes(90), "a NumPy array"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5"),
    "damaged zip": (b"PK\x03\x04" + bytes(90), "not a valid torch file"),
    "damaged pickle": (b"\x80\x02" + bytes(90), "not a valid torch file"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(tmp_path: Path, name: str) -> None:
    content, why = FILES[name]
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 3
    assert str(path) in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize("as_adapter", ["base", "adapter"])
@pytest.mark.parametrize("name", [n for n in FILES if FILES[n][0][:2] not in (b"PK", b"\x80\x02")][::4])
def test_merge_with_them_leaves_everything_as_it_was(tmp_path: Path, name: str, as_adapter: str) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "base")
    save_file({"a.lora_A.weight": torch.zeros(1, 4), "a.lora_B.weight": torch.zeros(4, 1)}, tmp_path / "adapter")
    (tmp_path / as_adapter).write_bytes(FILES[name][0])
    before = state(tmp_path)
    with pytest.raises(MergeError) as caught:
        lora_merge.merge(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "new" / "out.safetensors", device="cpu")
    assert caught.value.exit_code == 3
    assert state(tmp_path) == before


def state(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in folder.rglob("*")
    }


# ------------------------------------------------------------------ paths


def test_paths_that_are_no_checkpoints(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    cases = {
        tmp_path / "missing": "not found",
        tmp_path / "fifo": "not a regular file",
        tmp_path / "loop": "a broken symbolic link|cannot be read",
        tmp_path / "dangling": "a broken symbolic link",
        Path("/dev/zero"): "not a regular file",
        tmp_path / ("n" * 300): "name too long",
        tmp_path / "nul\0": "not found",
        tmp_path / "fifo" / "x": "not found",
    }
    for path, why in cases.items():
        with pytest.raises(InputError, match=f"(?i){why}"):
            open_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000, b"null"])
@pytest.mark.parametrize(
    "name", ["adapter_config.json", "model_index.json", "config.json", "model.safetensors.index.json"]
)
def test_side_files_that_are_no_json(tmp_path: Path, name: str, content: bytes) -> None:
    for file in ("adapter_model.safetensors", "model-00001-of-00001.safetensors"):
        (tmp_path / file).write_bytes(good())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("depth", [102, 400, 980, 1010, 3000, 20_000])
def test_deep_json_is_refused_whatever_the_library_can_read(tmp_path: Path, depth: int) -> None:
    """Python 3.12 and later read thousands of levels, which code that walks them level by level does not survive."""
    deep = "[" * depth + "]" * depth
    file = tmp_path / "model.safetensors"
    for header in (f'{{"a": {deep}}}', f'{{"a": {{"dtype": {deep}, "shape": [], "data_offsets": [0, 0]}}}}'):
        file.write_bytes(blob(header.encode()))
        with pytest.raises(InputError):
            open_checkpoint(file)
    file.write_bytes(good())
    (tmp_path / "config.json").write_text(f'{{"a": {deep}}}')
    with pytest.raises(InputError, match="nested too deeply"):
        open_checkpoint(tmp_path)
    assert parsed(f'{{"a": {deep}}}') is None
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json(deep)


# ------------------------------------------------------------------ torch files


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.function, self.args, self.state = function, args, state

    def __reduce__(self) -> Any:
        return (self.function, self.args) if self.state is None else (self.function, self.args, self.state)


def storage(path: Path, function: Callable[[dict[str, bytes]], dict[str, bytes]], compression: int = 0) -> None:
    """Re-write a torch archive with other records."""
    with zipfile.ZipFile(path) as z:
        records = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w", compression) as z:
        for name, content in function(records).items():
            z.writestr(name, content)


def odd_dict() -> OrderedDict[str, torch.Tensor]:
    odd = OrderedDict(a=torch.ones(2))
    odd.__dict__.update(get=1, keys=2, values=3)
    return odd


def odd_tensor() -> Call:
    arguments = (torch.ones(2).storage(), 0, (2,), (1,), *[False], {})
    attributes = {"untyped_storage": 1, "stride": 2}
    return Call(
        torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, torch.Tensor, arguments, attributes
    )


def rebuilt(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Call:
    """A tensor of this geometry over eight bytes."""
    return Call(torch._utils._rebuild_tensor_v2, torch.ones(2).storage(), offset, size, stride, *[False], {})


DANGEROUS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Call(os.system, "touch executed"),
    "eval": lambda: Call(eval, "open('executed', 'w')"),
    "getattr": lambda: Call(getattr, torch.Size, "mro"),
    "a huge bytearray": lambda: Call(bytearray, 1 << 40),
    "a huge tensor": lambda: Call(torch.Tensor, 1 << 40),
    "attributes on a tensor": odd_tensor,
    "a negative offset": lambda: rebuilt(-1, (2,), (1,)),
    "beyond its storage": lambda: rebuilt(0, (99,), (1,)),
    "expanded to exabytes": lambda: rebuilt(0, (1 << 30, 1 << 30), (0, 0)),
    "expanded to a gigabyte": lambda: rebuilt(0, (1 << 14, 1 << 14), (0, 0)),
    "size and stride of other lengths": lambda: rebuilt(0, (2,), (1, 1)),
    "meta": lambda: torch.empty(1 << 40, device="meta"),
    "numpy": lambda: torch.ones(2).numpy(),
}  # fmt: skip


@pytest.mark.parametrize("zipped", ["zip", "legacy"])
@pytest.mark.parametrize("name", DANGEROUS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_torch_files_made_to_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, zipped: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": DANGEROUS[name]()}, "x.pt", _use_new_zipfile_serialization=zipped == "zip")
    with pytest.raises(InputError):
        open_checkpoint(Path("x.pt"))
    assert not Path("executed").exists()


@pytest.mark.parametrize("zipped", ["zip", "legacy"])
def test_attributes_that_a_file_gives_its_dict_do_not_matter(tmp_path: Path, zipped: str) -> None:
    torch.save(odd_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped == "zip")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == ["a"]


@pytest.mark.parametrize(
    ("change", "compression", "why"),
    [
        (lambda r: r, zipfile.ZIP_DEFLATED, "compressed"),
        (lambda r: {n: c for n, c in r.items() if "/data/" not in n}, 0, "not a valid torch file"),
        (lambda r: {n: c[:-4] if "/data/" in n else c for n, c in r.items()}, 0, "are not in it|not a valid"),
        (lambda r: {n: c for n, c in r.items() if not n.endswith("data.pkl")}, 0, "did not write"),
        (lambda r: {**r, "x/constants.pkl": b"", "x/code/x.py": b""}, 0, "TorchScript"),
        (lambda r: {n: b"big" if n.endswith("byteorder") else c for n, c in r.items()}, 0, "big-endian"),
        (lambda _: {"model.safetensors": b"x"}, 0, "unpack it first|did not write"),
        (
            lambda r: {n: c[: len(c) // 2] if n.endswith("data.pkl") else c for n, c in r.items()},
            0,
            "not a valid|run code",
        ),
    ],
)
def test_archives_that_are_not_as_torch_writes_them(
    tmp_path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], compression: int, why: str
) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    storage(tmp_path / "x.pt", change, compression)
    with pytest.raises(InputError, match=why):
        open_checkpoint(tmp_path / "x.pt")


def test_pickle_bomb_of_references_is_no_work(tmp_path: Path) -> None:
    """Thirty levels of [x, x]: a gigabyte if anyone walked through it."""
    nested: Any = []
    for _ in range(30):
        nested = [nested, nested]
    torch.save({"a": torch.ones(2), "bomb": nested, 7: 1}, tmp_path / "x.pt")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == ["a"]


# ------------------------------------------------------------------ resources

LIMITED = """
    import re, sys, time
    from pathlib import Path
    import lora_merge.files.checkpoint as c, lora_merge.files.pickles
    from lora_merge.errors import InputError
    if sys.argv[1] == "torch":
        import torch, torch._subclasses.fake_tensor

    def peak():  # of this program alone: getrusage(2) counts what its parent had as well
        status = Path("/proc/self/status")
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1024 if status.exists() else 0

    before = peak()
    start = time.process_time()
    for path in sorted(Path(sys.argv[2]).iterdir()):
        try:
            c.open_checkpoint(path)
        except InputError:
            continue
        sys.exit(f"accepted {path.name}")
    print(f"{peak() - before:.0f} {time.process_time() - start:.1f}")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["headers", "torch"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_small_files_take_little_memory_and_time(tmp_path: Path, kind: str) -> None:
    """All of the above, in one process: less than 150 MB and a few seconds together.

    It is torch's loading without values that takes memory, by what it imports: 100 MB, 170 where torch knows CUDA.
    """
    folder = tmp_path / "files"
    folder.mkdir()
    if kind == "headers":
        for i, (content, _) in enumerate(FILES.values()):
            if content[:2] not in (b"PK", b"\x80\x02"):
                (folder / str(i)).write_bytes(content)
    else:
        for i, make in enumerate(DANGEROUS.values()):
            for zipped in (True, False):
                torch.save({"a": make()}, folder / f"{i}{zipped}", _use_new_zipfile_serialization=zipped)
        torch.save({"a": torch.zeros(300)}, folder / "claims", _use_new_zipfile_serialization=False)
        claims = (folder / "claims").read_bytes()  # a storage of a gigabyte in a file of two kilobytes
        assert claims.count(b"M,\x01") > 1
        (folder / "claims").write_bytes(claims.replace(b"M,\x01", b"J" + struct.pack("<i", 1 << 28)))
        (folder / "memo").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")  # a memo of two billion entries
        (folder / "frame").write_bytes(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.")
        (folder / "bytes").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"}.")
    run = subprocess.run(
        [sys.executable, "-Wignore", "-c", textwrap.dedent(LIMITED), kind, str(folder)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    grown, seconds = map(float, run.stdout.split())
    assert grown < (150 if torch.version.cuda is None else 300)
    assert seconds < 30  # 2


def test_factors_of_truth_values_are_refused(tmp_path: Path) -> None:
    """A byte other than 0 and 1 reads as another number in every library."""
    (tmp_path / "base").write_bytes(good())
    up, down = entry((4, 2), (0, 8), "BOOL"), entry((2, 4), (8, 16), "BOOL")
    (tmp_path / "lora").write_bytes(blob({"a.lora_up.weight": up, "a.lora_down.weight": down}, b"\x05" * 16))
    with pytest.raises(InputError, match="bool values"):
        lora_merge.merge(tmp_path / "base", tmp_path / "lora", tmp_path / "out")


def test_pickle_of_another_program_is_refused_without_a_warning_of_torch(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"a": Path("b")}, protocol=4))  # a warning is an error here
    with pytest.raises(InputError) as e:
        open_checkpoint(tmp_path / "model.pt")
    assert "Detected pickle protocol" not in str(e.value)
    assert "weights_only" not in str(e.value)
