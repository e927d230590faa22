"""Blocks that outputs share with the base. Run: pytest tests/disk/test_cloning.py

The file system of the tests does not know sharing, so a copy of whole pages stands for it: what counts is which bytes
are asked to be shared, and that the output is the same with and without. Slow: real xfs and btrfs, where root can mount.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.batch import batch_plan
from lora_merge.disk import hashes, volumes
from lora_merge.disk import writer as disk
from lora_merge.disk.pages import PAGE
from lora_merge.disk.reader import Reader
from lora_merge.disk.volumes import file_system
from lora_merge.disk.writer import clone_range
from lora_merge.engine import admission, windows
from lora_merge.engine import pipeline as writing
from lora_merge.engine.admission import disk_bytes, plan_merge
from lora_merge.engine.merge import run, run_together
from lora_merge.errors import ResourceError
from lora_merge.job import make_job
from tests.kit.files import save
from tests.kit.tensors import rand

ROWS, COLS = 512, 512  # 512 KiB a weight in fp16
LAYERS = 6
TOUCHED = "model.layers.3.mlp.up_proj"


@dataclass
class Clones:
    """A file system that shares blocks, and what was asked of it."""

    sizes: list[int] = field(default_factory=list)
    refuses: bool = False

    def __call__(self, old: int, offset: int, size: int, new: int, at: int) -> bool:
        assert not offset % PAGE and not size % PAGE and not at % PAGE, "file systems share whole blocks"
        assert size > 0, "size 0 means up to the end of the file"
        self.sizes.append(size)
        if self.refuses:
            return False
        os.lseek(new, at, os.SEEK_SET)
        os.write(new, os.pread(old, size, offset))
        return True


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clones:
    found = Clones()
    monkeypatch.setattr(writing, "CLONES", {file_system(tmp_path)})
    monkeypatch.setattr(windows, "STRETCH", 1 << 18)
    monkeypatch.setattr(disk, "clone_range", found)
    return found


def inputs(folder: Path, layers: int = LAYERS, rows: int = ROWS) -> tuple[Path, Path]:
    """A base of which one layer in the middle is changed; small tensors before it, so that nothing lies in pages."""
    names = [f"model.layers.{n}.mlp.up_proj" for n in range(layers)]
    base = {f"{name}.weight": rand(rows, COLS, seed=n).half() for n, name in enumerate(names)}
    base |= {f"model.layers.{n}.input_layernorm.weight": rand(13 + n, seed=n).half() for n in range(layers)}
    base["model.norm.weight"] = rand(7).half()
    lora = {
        f"base_model.model.{TOUCHED}.lora_A.weight": rand(4, COLS, seed=1),
        f"base_model.model.{TOUCHED}.lora_B.weight": rand(rows, 4, seed=2),
    }
    return save(base, folder / "base.safetensors"), save(lora, folder / "lora.safetensors")


def merged(base: Path, lora: Path, name: str, strength: float = 1.0) -> bytes:
    """The bytes of a new merge, but for its own name in them."""
    out = base.with_name(name)
    run(plan_merge(make_job(base, (str(lora), strength), output=out)))
    return out.read_bytes()


def test_output_is_the_same_and_most_of_it_shared(tmp_path: Path, clones: Clones) -> None:
    base, lora = inputs(tmp_path)
    shared = merged(base, lora, "shared.safetensors")
    untouched = base.stat().st_size - 2 * ROWS * COLS
    assert sum(clones.sizes) > 0.95 * untouched
    clones.refuses = True
    clones.sizes.clear()
    assert merged(base, lora, "refused.safetensors") == shared
    assert len(clones.sizes) < LAYERS, "asked again and again"


def test_shared_bytes_of_a_known_base_are_not_read(
    tmp_path: Path, clones: Clones, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "REMEMBERED_ABOVE", 1)
    monkeypatch.setattr(hashes, "SETTLED", -1.0)
    monkeypatch.setattr(hashes, "file_system", lambda _: "ext4")
    base, lora = inputs(tmp_path)
    first = merged(base, lora, "first.safetensors")
    got, read = [], Reader.read_into

    def counting(self: Reader, buffer: memoryview, file: Path, offset: int) -> None:
        if file == base:
            got.append(len(buffer))
        read(self, buffer, file, offset)

    monkeypatch.setattr(Reader, "read_into", counting)
    out = tmp_path / "again.safetensors"
    run(plan_merge(make_job(base, lora, output=out, verify=False)))
    assert out.read_bytes() == first
    assert sum(got) < 1.2 * 2 * ROWS * COLS


def test_several_outputs_share_with_one_base(tmp_path: Path, clones: Clones) -> None:
    base, lora = inputs(tmp_path)
    strengths = (1.0, 0.5, 0.25)
    alone = [merged(base, lora, f"{s}.safetensors", s) for s in strengths]
    clones.sizes.clear()
    jobs = [make_job(base, (str(lora), s), output=tmp_path / f"together-{s}.safetensors") for s in strengths]
    outcomes = dict(run_together([plan_merge(job) for job in jobs]))
    assert not [o for o in outcomes.values() if isinstance(o, Exception)]
    assert [job.output.read_bytes() for job in jobs] == alone
    assert sum(clones.sizes) > 0.95 * len(jobs) * (base.stat().st_size - 2 * ROWS * COLS)


def test_bytes_that_do_not_lie_in_the_same_pages_are_copied(tmp_path: Path, clones: Clones) -> None:
    """Behind a tensor that another dtype made half as long."""
    base, lora = inputs(tmp_path)
    tensors = {"first.weight": rand(3).float(), **{k: v for k, v in _load(base).items() if "layernorm" not in k}}
    mixed = save(tensors, tmp_path / "mixed.safetensors")
    out = tmp_path / "out.safetensors"
    run(plan_merge(make_job(mixed, lora, output=out, dtype="fp16")))
    assert not clones.sizes
    got = _load(out)
    assert all(torch.equal(got[k], tensors[k].half()) for k in tensors if k != f"{TOUCHED}.weight")


def _load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_space_is_asked_for_what_is_not_shared(tmp_path: Path, clones: Clones, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (volumes, batch_plan):
        monkeypatch.setattr(place, "CLONES", {file_system(tmp_path)})
    base, lora = inputs(tmp_path)
    changed = 2 * ROWS * COLS
    monkeypatch.setattr(disk, "free_bytes", lambda _: int(1.5 * changed))
    jobs = [{"base": base, "adapters": [lora], "output": tmp_path / f"{n}.safetensors"} for n in range(2)]
    assert changed < disk_bytes(plan_merge(make_job(base, lora, tmp_path / "a.safetensors"))) < 1.5 * changed
    assert [report.status for report in lora_merge.run_batch(jobs[:1])] == ["merged"]
    assert sum(clones.sizes) > base.stat().st_size / 2
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(ResourceError, match="no space"):  # there is room for one of them
        lora_merge.run_batch(jobs)
    with pytest.raises(ResourceError, match="no space"):  # where another dtype leaves nothing as it is
        plan_merge(make_job(base, lora, tmp_path / "b.safetensors", dtype="bf16"))
    for place in (admission, batch_plan):
        monkeypatch.setattr(place, "share_blocks", lambda *_: False)  # on two disks
    with pytest.raises(ResourceError, match="no space"):
        plan_merge(make_job(base, lora, tmp_path / "c.safetensors"))
    with pytest.raises(ResourceError, match="no space"):
        lora_merge.run_batch(jobs[:1])


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="nothing is reserved here")
def test_no_room_for_all_of_a_file_is_no_failure_where_blocks_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    monkeypatch.setattr(disk, "RESERVES", {file_system(tmp_path)})
    (tmp_path / "out").touch()
    with pytest.raises(ResourceError, match="no space"):
        disk.Writer(tmp_path / "out", PAGE)
    monkeypatch.setattr(disk, "CLONES", {file_system(tmp_path)})
    with disk.Writer(tmp_path / "out", PAGE) as writer:
        writer.write(memoryview(bytes(PAGE)), 0)
        writer.finish()
    assert (tmp_path / "out").read_bytes() == bytes(PAGE)


def test_clone_shares_blocks_or_writes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(os.urandom(4 * PAGE))
    new.write_bytes(bytes(4 * PAGE))
    with old.open("rb") as a, new.open("r+b") as b:
        done = clone_range(a.fileno(), PAGE, 2 * PAGE, b.fileno(), 0)
    assert new.read_bytes() == (old.read_bytes()[PAGE : 3 * PAGE] + bytes(2 * PAGE) if done else bytes(4 * PAGE))


@pytest.fixture(params=["xfs", "btrfs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system in a file."""
    make = shutil.which(f"mkfs.{request.param}")
    if make is None or not hasattr(os, "geteuid") or os.geteuid():
        pytest.skip(f"needs root and mkfs.{request.param}")
    image, point = tmp_path / "image", tmp_path / "mounted"
    point.mkdir()
    with image.open("wb") as f:
        f.truncate(1 << 30)
    subprocess.run([make, "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, point], check=False, capture_output=True).returncode:
        pytest.skip("loop devices cannot be mounted here")
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.mark.slow
def test_merge_takes_the_space_of_what_it_changes(mounted: Path, tmp_path: Path) -> None:
    base, lora = inputs(mounted, layers=12, rows=16 * ROWS)  # 8 MiB each
    elsewhere = merged(*inputs(tmp_path, layers=12, rows=16 * ROWS), "out.safetensors")
    os.sync()
    with (mounted / "filler").open("wb") as f:  # less is left than the size of the output
        os.posix_fallocate(f.fileno(), 0, shutil.disk_usage(mounted).free - base.stat().st_size // 2)
    os.sync()
    before = shutil.disk_usage(mounted).free
    assert before < base.stat().st_size
    assert merged(base, lora, "out.safetensors") == elsewhere
    os.sync()
    taken = before - shutil.disk_usage(mounted).free
    assert taken < base.stat().st_size / 4
