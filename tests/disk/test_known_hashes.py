"""SHA-256 that earlier runs have computed. Run: pytest tests/disk/test_known_hashes.py"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lora_merge
from lora_merge.disk import hashes
from lora_merge.disk.hashes import MOST_CACHED_FILES, cache_file, recall, remember, state
from lora_merge.files.safetensors import parse_file
from lora_merge.planning.recipe import KEY
from lora_merge.recipes.replay import prove
from tests.kit.adapters import kohya
from tests.kit.files import save, sha
from tests.kit.models import sd1_sample

LATER = hashes.SETTLED + 1
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A merge of files that count as large, and as settled."""
    base = sd1_sample()
    save(base, tmp_path / "base.safetensors")
    save(kohya(base), tmp_path / "style.safetensors")
    monkeypatch.setattr(hashes, "REMEMBERED_ABOVE", 1)
    monkeypatch.setattr(hashes, "SETTLED", -1.0)
    monkeypatch.setattr(hashes, "file_system", lambda _: "ext4")
    return tmp_path


def merged(folder: Path) -> str:
    """The hash of the base that the recipe of a new merge tells."""
    out = folder / "out.safetensors"
    lora_merge.merge(folder / "base.safetensors", [folder / "style.safetensors"], out, overwrite=True)
    recipe = json.loads(parse_file(out).metadata[KEY])
    return str(recipe["base"]["files"][0]["sha256"])


def test_second_merge_does_not_hash_again(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = files / "base.safetensors"
    assert merged(files) == sha(base)
    assert {s: entry[:64] for s, entry in recall().items()} == {
        state(p): sha(p) for p in (base, files / "style.safetensors")
    }
    fed: list[int] = []
    monkeypatch.setattr("lora_merge.disk.hashes.hashlib", SimpleNamespace(sha256=lambda: Counted(fed)))
    assert merged(files) == sha(base)
    assert not fed


class Counted:
    def __init__(self, fed: list[int]) -> None:
        self.update = lambda data: fed.append(len(data))


def others() -> dict[str, torch.Tensor]:
    return {name: tensor * 2 for name, tensor in sd1_sample().items()}


def rewritten(base: Path) -> None:
    save(others(), base)


def replaced(base: Path) -> None:
    other = base.with_name("other")
    save(others(), other)
    old = base.stat()
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.replace(base)


def patched(base: Path) -> None:
    """One byte changed in place, the time of change set back: what cannot be set back is the inode's own time."""
    old = base.stat()
    with base.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))
    os.utime(base, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [rewritten, replaced, patched])
def test_changed_file_is_hashed_again(files: Path, change: Callable[[Path], None]) -> None:
    base = files / "base.safetensors"
    before = merged(files)
    change(base)
    assert merged(files) == sha(base) != before


def test_hash_of_a_file_changed_just_now_is_not_remembered(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "SETTLED", 3600.0)
    merged(files)
    assert not recall()
    now = time.time
    monkeypatch.setattr(hashes.time, "time", lambda: now() + 3700)
    merged(files)
    assert len(recall()) == 2


def test_small_file_is_not_worth_remembering(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "REMEMBERED_ABOVE", (files / "base.safetensors").stat().st_size)
    merged(files)
    assert list(recall()) == [state(files / "base.safetensors")]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["tmpfs", "squashfs", "nfs4", "fuseblk", "vfat", ""])
def test_hash_on_a_disk_without_true_times_is_not_remembered(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(hashes, "file_system", lambda _: kind)
    assert merged(files) == sha(files / "base.safetensors")
    assert not recall()


def test_image_for_reading_is_not_remembered(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, made to be reproducible, may differ in a byte and in nothing that stat(2) tells."""
    real = os.statvfs

    def for_reading(path: Path) -> SimpleNamespace:
        found = real(path)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return SimpleNamespace(**{**fields, "f_flag": found.f_flag | os.ST_RDONLY})

    monkeypatch.setattr(os, "statvfs", for_reading)
    assert merged(files) == sha(files / "base.safetensors")
    assert not recall()


def test_proof_reads_the_bytes(files: Path) -> None:
    """A remembered hash that is wrong, however it came about, is found out."""
    base = files / "base.safetensors"
    remember({base: (str(state(base)), DIGEST)})
    assert merged(files) == DIGEST
    with pytest.raises(lora_merge.MergeError, match="older or newer"):
        prove(files / "out.safetensors", search=[files])


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": "0"}', "[" * 100_000, "\0\xff"])
def test_damaged_memory_is_none(files: Path, text: str) -> None:
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(text, encoding="latin-1")
    assert recall() == {}
    assert merged(files) == sha(files / "base.safetensors")
    assert len(recall()) == 2


def test_strange_file_in_place_of_the_hashes_is_ignored(files: Path) -> None:
    cache_file().parent.mkdir(parents=True)
    os.mkfifo(cache_file())
    assert recall() == {}
    assert merged(files) == sha(files / "base.safetensors")
    assert recall() == {}  # nothing but files and links is replaced
    cache_file().unlink()
    cache_file().write_text("{" + " " * hashes.MOST_CACHE_BYTES + "}")
    assert recall() == {}
    merged(files)
    assert len(recall()) == 2


@pytest.mark.parametrize("name", ["key", "sha256.json"])
def test_files_that_others_can_read_or_write_are_replaced_by_private_ones(files: Path, name: str) -> None:
    """Their permissions are not taken over, as those of an output that is replaced are."""
    cache_file().parent.mkdir(mode=0o700, parents=True)
    cache_file().with_name(name).write_bytes(bytes(hashes.KEY_BYTES))
    cache_file().with_name(name).chmod(0o666)
    merged(files)
    assert {p.name: p.stat().st_mode & 0o777 for p in cache_file().parent.iterdir()} == {
        "key": 0o600,
        "sha256.json": 0o600,
    }
    assert len(recall()) == 2


def test_digests_are_on_the_disk_before_they_have_their_name(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file with that name after a power cut would be read as no digests, an empty key as none."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd, fsync=os.fsync: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    merged(files)
    assert {p.stat().st_ino for p in (cache_file(), cache_file().with_name("key"), cache_file().parent)} <= {*synced}


def test_hashes_work_without_a_cache_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = files / "file"
    taken.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    assert merged(files) == sha(files / "base.safetensors")
    assert recall() == {}
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(hashes, "cache_file", _homeless)
    assert merged(files) == sha(files / "base.safetensors")


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.fixture
def unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of files that are not there."""
    monkeypatch.setattr(hashes, "_signed", lambda _key, _path, _state, digest: f"{digest} {digest}")


def learnt(**digests: str) -> dict[Path, tuple[str, str]]:
    return {Path(name): (name, digest) for name, digest in digests.items()}


@pytest.mark.usefixtures("unsigned")
def test_oldest_are_forgotten() -> None:
    remember(learnt(**{f"file {n}": DIGEST for n in range(MOST_CACHED_FILES)}))
    remember(learnt(**{"file 0": DIGEST[::-1], "new": DIGEST}))
    known = recall()
    assert len(known) == MOST_CACHED_FILES
    assert known["file 0"][:64] == DIGEST[::-1]
    assert "file 1" not in known
    assert list(known)[-1] == "new"


@pytest.mark.usefixtures("unsigned")
def test_hashes_of_several_writers_at_once() -> None:
    threads = [threading.Thread(target=lambda n=n: remember(learnt(**{f"file {n}": DIGEST}))) for n in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert recall()
    assert {p.name for p in cache_file().parent.iterdir()} == {cache_file().name, "key"}


def test_batch_that_is_done_hashes_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = files / "jobs.yaml"
    jobs.write_text(
        "version: 1\njobs:\n- {base: base.safetensors, adapters: [style.safetensors], output: o.safetensors}\n"
    )
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["merged"]
    monkeypatch.setattr("lora_merge.recipes.resume.sha256", lambda _: pytest.fail("hashed again"))
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["skipped"]
    save({"other": torch.ones(4)}, files / "base.safetensors")


@pytest.mark.parametrize("named", ["", "not/absolute"])
def test_hashes_lie_where_caches_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "lora-merge" / "sha256.json"
    for homeless in ("", "relative"):  # then it is the system that knows the user's folder
        monkeypatch.setenv("HOME", homeless)
        assert cache_file().is_absolute()
        assert not cache_file().is_relative_to(Path.cwd())
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("USERPROFILE", "/")
    with pytest.raises(RuntimeError):
        cache_file()
    assert recall() == {}


def rewrite(change: Callable[[str, str], tuple[str, str]]) -> None:
    """Every entry of what is remembered in another way."""
    entries = json.loads(cache_file().read_text())
    cache_file().write_text(json.dumps(dict(change(s, e) for s, e in entries.items())))


FORGERIES: dict[str, Callable[[Path], object]] = {
    "another digest": lambda _: rewrite(lambda s, e: (s, DIGEST + e[64:])),
    "another code": lambda _: rewrite(lambda s, e: (s, f"{DIGEST} {DIGEST}")),
    "none, as earlier versions had": lambda _: rewrite(lambda s, e: (s, DIGEST)),
    "a link": lambda _: cache_file().rename(cache_file().with_name("x")) and forged_link(),
    "writable by the group": lambda base: (signed(base), cache_file().chmod(0o664)),
    "writable by all": lambda base: (signed(base), cache_file().chmod(0o606)),
    "a folder writable by the group": lambda base: (signed(base), cache_file().parent.chmod(0o770)),
    "a key that others can read": lambda base: (signed(base), cache_file().with_name("key").chmod(0o640)),
    "another key": lambda base: (signed(base), cache_file().with_name("key").write_bytes(os.urandom(32))),
    "a short key": lambda base: (signed(base), cache_file().with_name("key").write_bytes(b"")),
    "another user's file": lambda base: (signed(base), os.chown(cache_file(), 12345, 12345)),
    "another user's folder": lambda base: (
        os.chown(cache_file().parent, 0, 0),
        signed(base),
        os.chown(cache_file().parent, 12345, 12345),
    ),
}


def signed(base: Path) -> None:
    """A wrong entry, but one that would be believed."""
    remember({base: (str(state(base)), DIGEST)})
    assert hashes.RememberedHashes().digest(base) == DIGEST


def forged_link() -> bool:
    cache_file().symlink_to("x")
    return True


@pytest.mark.few(1)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_memory_is_none(files: Path, forgery: str) -> None:
    """Neither does a recipe lie nor is a job skipped; what is remembered afterwards is right again."""
    if "user's" in forgery and os.geteuid():
        pytest.skip("only root can give files away")
    base, jobs = files / "base.safetensors", files / "jobs.yaml"
    merged(files)
    FORGERIES[forgery](base)
    assert hashes.RememberedHashes().digest(base) in (None, sha(base))
    assert merged(files) == sha(base)
    jobs.write_text(
        "version: 1\njobs:\n- {base: base.safetensors, adapters: [style.safetensors], output: out.safetensors}\n"
    )
    rewritten(base)
    FORGERIES[forgery](base)
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["failed"], "it is the output of another base"
    assert hashes.RememberedHashes().digest(base) in (None, sha(base))


def test_entry_is_one_of_these_bytes(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing that stat(2) tells has changed, some of the bytes are still looked at."""
    base = files / "base.safetensors"
    monkeypatch.setattr(hashes, "state", lambda path: path.name)
    monkeypatch.setattr("lora_merge.disk.hashes.state", lambda path: path.name)
    assert merged(files) == sha(base)
    rewritten(base)
    assert merged(files) == sha(base)


@pytest.mark.parametrize("block", [0, 7, hashes.SAMPLES - 1])
def test_signature_covers_blocks_from_the_first_to_the_last(block: int, tmp_path: Path) -> None:
    content, size = bytearray(1 << 20), hashes.PAGE
    signed = []
    for value in (0, 1):
        content[(len(content) - size) * block // (hashes.SAMPLES - 1) + size - 1] = value
        (tmp_path / "x").write_bytes(content)
        signed.append(hashes._signed(b"key", tmp_path / "x", "now", DIGEST))
    assert signed[0] != signed[1]


def test_remembered_hashes_are_for_the_user_alone(files: Path) -> None:
    old = os.umask(0)
    try:
        merged(files)
    finally:
        os.umask(old)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (cache_file().parent, *cache_file().parent.iterdir())}
    assert modes == {"lora-merge": 0o700, "sha256.json": 0o600, "key": 0o600}


def test_new_folder_is_for_the_user_alone_from_its_first_moment(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(Path, "chmod", lambda self, _: made.append(self.stat().st_mode & 0o777))
    old = os.umask(0)
    try:
        merged(files)
    finally:
        os.umask(old)
    assert made == [0o700]
