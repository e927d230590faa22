"""Full disks, failing disks, changing inputs, rivals, odd places. Run: pytest tests/faults/test_faults.py"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_merge.disk.volumes import CLONES, file_system
from tests.conftest import Nursery
from tests.faults.conftest import PART, Scene, furnish, send
from tests.kit.files import sha

STEPS = [("pwrite", 0), ("pwrite", 1), ("pwrite", 3), ("ftruncate", 0), ("fsync", 0), ("fsync", 1), ("name", 0)]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT", "EIO"])
@pytest.mark.parametrize(("call", "at"), [*STEPS, ("fallocate", 0)])
def test_disk_that_fails_at_any_step(scene: Scene, call: str, at: int, kind: str) -> None:
    scene.reset()
    if (call, kind) == ("fallocate", "ENOSPC") and file_system(scene.folder) in CLONES:
        pytest.skip("blocks may be shared here, and take no space")
    code = scene.run(**scene.armed(call, at, kind))
    assert code == (1 if kind == "EIO" else 5), scene.log()
    scene.check(finished=False)
    assert scene.strays() == []
    assert "error: " in scene.log()
    assert "fix:" in scene.log()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["lost", "lie", "lost plain", "lie plain"])
@pytest.mark.parametrize("at", [0, 1])
def test_exit_code_agrees_with_the_output_where_a_reply_is_lost(scene: Scene, kind: str, at: int) -> None:
    scene.reset()
    code = scene.run(**scene.armed("name", at, kind, "out.safetensors"))
    scene.check(finished=code == 0)
    assert code == 0 or kind.startswith("lie"), scene.log()
    assert scene.strays() == []


@pytest.mark.few(2)
@pytest.mark.parametrize("file", ["base.safetensors", "a.safetensors"])
@pytest.mark.parametrize("at", [0, 2])
def test_input_that_cannot_be_read(scene: Scene, file: str, at: int) -> None:
    scene.reset()
    assert scene.run(**scene.armed("preadv", at, "EIO", file)) == 3, scene.log()
    scene.check(finished=False)
    assert scene.strays() == []
    assert file in scene.log()


@pytest.mark.parametrize(("call", "path"), [("pwrite", PART), ("preadv", ".safetensors")])
def test_calls_that_do_only_half_are_continued(scene: Scene, call: str, path: str) -> None:
    scene.reset()
    assert scene.run(**scene.armed(call, 0, "short", path)) == 0, scene.log()
    scene.check(finished=True)


@pytest.mark.parametrize("limit", [1 << 16, 2 << 20])
def test_limit_on_the_size_of_files(scene: Scene, limit: int) -> None:
    scene.reset()
    assert scene.run(limits={"FSIZE": limit}) == 5, scene.log()
    scene.check(finished=False)
    assert scene.strays() == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda p: os.truncate(p, p.stat().st_size // 2),
    "emptied": lambda p: os.truncate(p, 0),
    "longer": lambda p: p.open("ab").write(b"more"),
    "written": lambda p: p.open("r+b").write(p.read_bytes()[:64]),
    "replaced": lambda p: p.with_name("x").write_bytes(b"x" * p.stat().st_size) and p.with_name("x").replace(p),
    "gone": Path.unlink,
    "written, its time put back": lambda p: put_back(p, lambda: flip(p)),
    "mapped, its time put back": lambda p: put_back(p, lambda: flip_mapped(p)),
}


def flip(path: Path) -> None:
    """The last byte changed in place."""
    with path.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last ^ 1]))


def flip_mapped(path: Path) -> None:
    with path.open("r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        m[-1] ^= 1
        m.flush()


def put_back(path: Path, act: Callable[[], object]) -> None:
    """The act, and the file's times as they were."""
    old = path.stat()
    act()
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("file", ["base.safetensors", "a.safetensors"])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_input_that_changes_while_it_is_read(scene: Scene, file: str, change: str) -> None:
    scene.reset()
    path = scene.folder / file
    kept = path.with_name("kept")
    shutil.copy2(path, kept)
    pid = scene.start(**scene.armed("pwrite", 1, "stop"))
    scene.stopped(pid)
    CHANGES[change](path)
    send(pid, signal.SIGCONT)
    code = scene.nursery.wait(pid)
    kept.replace(path)
    assert code == 3, scene.log()
    assert file in scene.log()
    scene.check(finished=False)
    assert scene.strays() == []


@pytest.mark.pairs
@pytest.mark.parametrize("file", ["base.safetensors", "a.safetensors"])
@pytest.mark.parametrize("touch", [lambda p: p.chmod(0o600), lambda p: os.link(p, p.parents[1] / "linked"),
                                   lambda p: put_back(p, lambda: (flip(p), flip(p)))])  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--no-verify"]])
def test_input_that_was_touched_but_has_its_bytes(
    scene: Scene, file: str, touch: Callable[[Path], object], more: list[str]
) -> None:
    """Permissions, a link, bytes written anew: what counts is that they are the same. The output is proven whole."""
    scene.reset()
    report = scene.folder.parent / "report.json"
    pid = scene.start(argv=scene.argv("--report", str(report), *more), **scene.armed("pwrite", 1, "stop"))
    scene.stopped(pid)
    touch(scene.folder / file)
    send(pid, signal.SIGCONT)
    code = scene.nursery.wait(pid)
    (scene.folder.parent / "linked").unlink(missing_ok=True)
    assert code == 0, scene.log()
    scene.check(finished=True)
    assert json.loads(report.read_text())["verified"]["full"]


def test_two_merges_into_one_output(scene: Scene) -> None:
    """With --overwrite both succeed; without it the second says that the output appeared."""
    scene.reset()
    first = scene.start(**scene.armed("fsync", 0, "gate"))
    with scene.nursery.gate(first, scene.folder, scene.log):
        assert scene.run() == 0, scene.log()
        assert len(scene.strays()) == 1, "the live run's file was taken for a stale one"
        scene.check(finished=True)
    assert scene.nursery.wait(first) == 0, scene.log()
    scene.check(finished=True)
    scene.out.unlink()
    argv = [a for a in scene.argv() if a != "--overwrite"]
    first = scene.start(argv=argv, **scene.armed("fsync", 0, "gate"))
    with scene.nursery.gate(first, scene.folder, scene.log):
        assert scene.run(argv=argv) == 0, scene.log()
    assert scene.nursery.wait(first) == 2, scene.log()
    scene.check(finished=True)
    assert scene.strays() == []
    both = [scene.start() for _ in range(2)]
    assert [scene.nursery.wait(pid) for pid in both] == [0, 0], scene.log()
    scene.check(finished=True)
    assert scene.strays() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of a given size (`size=8m`) or kind (`ro`)."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / "disk"
        path.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("only root may mount")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("size", ["size=64k", "size=1m", "size=4m"])
def test_disk_that_is_too_small(scene: Scene, small_disk: Callable[[str], Path], size: str) -> None:
    """The last one holds the weights, but something else takes the room."""
    disk = small_disk(size)
    if size == "size=4m":
        (disk / "other").write_bytes(bytes(1 << 20))
    argv = scene.argv()
    argv[argv.index("-o") + 1] = str(disk / "out.safetensors")
    assert scene.run(argv=argv) == 5, scene.log()
    assert "no space" in scene.log()
    assert {p.name for p in disk.iterdir()} <= {"other"}


def test_folder_that_cannot_be_written(scene: Scene, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("ro,size=64m")
    argv = scene.argv()
    argv[argv.index("-o") + 1] = str(disk / "out.safetensors")
    assert scene.run(argv=argv) == 2, scene.log()
    assert "no permission" in scene.log()


@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["/proc/x", "/proc/self/fd/x", "/dev/null/x", "fifo", "a" * 300, "a" * 5000])
def test_outputs_where_no_file_can_be(scene: Scene, place: str) -> None:
    scene.reset()
    folder = scene.folder.parent / "places"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(folder / "fifo")
    argv = scene.argv()
    argv[argv.index("-o") + 1] = str(folder / place)
    assert scene.run(argv=argv) == 2, scene.log()
    assert (folder / "fifo").is_fifo()
    assert [p.name for p in folder.iterdir()] == ["fifo"]
    scene.check(finished=False)


def test_working_folder_that_is_gone(scene: Scene, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    argv = [str(scene.folder / "base.safetensors"), str(scene.folder / "a.safetensors"), "-q"]
    assert scene.nursery.wait(scene.nursery.start(argv, lost, lost=True)) == 2
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "error: " in said
    assert "Traceback" not in said
    lost.mkdir()
    argv += ["-o", str(tmp_path / "out.safetensors")]
    assert scene.nursery.wait(scene.nursery.start(argv, lost, lost=True)) == 0
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == ["out.safetensors"]
    lost.mkdir()
    argv = ["verify", str(tmp_path / "out.safetensors"), "--search", str(scene.folder)]
    assert scene.nursery.wait(scene.nursery.start(argv, lost, lost=True)) == 0, (tmp_path / "log.txt").read_text()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to nowhere", "socket"])
def test_inputs_that_are_no_files(scene: Scene, tmp_path: Path, kind: str) -> None:
    odd = tmp_path / "odd.safetensors"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(odd))
    else:
        odd.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    scene.reset()
    for where in ({"adapter": str(odd)}, {"base": str(odd)}):
        assert scene.run(argv=scene.argv(**where)) == 3, scene.log()  # type: ignore[arg-type]
        scene.check(finished=False)
        assert scene.strays() == []


@pytest.mark.slow
def test_seven_gigabytes_in_one_gibibyte_of_memory(nursery: Nursery, tmp_path: Path) -> None:
    """A sparse base, six tensors changed; anonymous memory is limited to 1 GiB."""
    folder = tmp_path / "work"
    folder.mkdir()
    scene = furnish(folder, nursery)
    if shutil.disk_usage(folder).free < 10 << 30:
        pytest.skip("needs 10 GB of disk")
    big, rows = folder / "base.safetensors", 4096
    header = {f"blocks.{i}.weight": {"dtype": "F16", "shape": [rows, 1024],
                                     "data_offsets": [i * rows * 2048, (i + 1) * rows * 2048]}
              for i in range(840)}  # fmt: skip
    text = json.dumps(header).encode()
    with big.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + 840 * rows * 2048)
    adapter = {f"blocks.{i}.lora_{d}.weight": torch.ones(*s) for i in range(6) for d, s in
               (("up", (rows, 8)), ("down", (8, 1024)))}  # fmt: skip
    save_file(adapter, folder / "a.safetensors")
    argv = [a if a != "8MiB" else "256MiB" for a in scene.argv()]
    assert scene.run(argv=argv, limits={"DATA": 1 << 30}) == 0, scene.log()
    assert scene.out.stat().st_size > 7_000_000_000
    assert scene.strays() == []


def test_harness_sees_what_it_should(scene: Scene) -> None:
    """A stray file and a half-written output are noticed."""
    scene.out.write_bytes(b"half")
    with pytest.raises(AssertionError, match="neither"):
        scene.check()
    scene.reset()
    (scene.folder / f".out.safetensors.{'0' * 12}.{PART}").write_bytes(b"")
    assert scene.strays()
    assert scene.run() == 0
    assert not scene.strays()
    assert sha(scene.out) == scene.new
