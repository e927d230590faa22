"""Headers of outputs, and outputs that appear whole or not at all. Run: pytest tests/files/test_output_files.py"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open

from lora_merge.disk import publish
from lora_merge.disk import publish as temporary
from lora_merge.disk.destination import check_output
from lora_merge.disk.publish import replacing
from lora_merge.dtypes import ITEM_BITS, bytes_of
from lora_merge.errors import MergeError, UsageError
from lora_merge.files.safetensors import layout, metadata_of, parse, with_metadata
from tests.kit.pairs import examples

ROOT = Path(__file__).parents[2]
text = st.text(st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=examples(150))
@given(
    tensors=st.dictionaries(
        text.filter(lambda n: n != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(ITEM_BITS)),
            st.lists(st.integers(0, 4).map(lambda n: 4 * n), max_size=3),
        ),
        max_size=5,
    ),
    metadata=st.dictionaries(text, text, max_size=3),
    start=st.one_of(st.integers(8, 20_000), st.sampled_from([8, 96, 4096])),
)
def test_headers_are_accepted_and_aligned(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str], start: int
) -> None:
    rows = [(n, d, tuple(s) or (4,)) for n, (d, s) in tensors.items()]
    header = layout(rows, metadata, start)
    assert len(header) % 8 == 0
    assert len(header) % 4096 == (start % 4096 if start % 8 == 0 else 0)
    size = sum(bytes_of(d, s) for _, d, s in rows)
    deserialize(header + bytes(size))
    found, kept = parse(header[8:], Path("x"), len(header) + size)
    assert kept == metadata
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (d, s) for n, d, s in rows}
    assert [n for n in json.loads(header[8:]) if n != "__metadata__"] == [n for n, _, _ in rows]


def test_other_metadata_fit_to_the_last_byte_or_are_refused() -> None:
    header = layout([("w", "F32", (2,))], {"a": "x" * 40}, 8)
    room = len(header) - len(header.rstrip(b" "))
    for more in range(-8, room + 9):
        entries = {"a": "y" * (40 + more)}
        if more > room:
            with pytest.raises(ValueError, match="longer"):
                with_metadata(header, entries)
            continue
        changed = with_metadata(header, entries)
        assert (len(changed), metadata_of(changed)) == (len(header), entries)


def test_library_opens_a_file_laid_out_by_us(tmp_path: Path) -> None:
    header = layout([("b", "F32", (2, 2)), ("a", "U8", (3,))], {"k": "v"}, 96)
    (tmp_path / "x.safetensors").write_bytes(header + struct.pack("<4f", 1, 2, 3, 4) + b"abc")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as f:
        assert f.metadata() == {"k": "v"}
        assert f.get_tensor("b").tolist() == [[1, 2], [3, 4]]


# ------------------------------------------------------------------ replacing


def left(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_output_appears_with_its_contents(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "out ä:1.safetensors"
    with replacing(target) as part:
        part.write_bytes(b"done")
        assert not target.exists()
    assert target.read_bytes() == b"done"
    assert left(tmp_path) == ["new", "new/deep", "new/deep/out ä:1.safetensors"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing(tmp_path: Path, error: type[BaseException], kind: str) -> None:
    with (
        pytest.raises(error),
        replacing(tmp_path / "a" / "b" / "x", folder=kind == "folder") as part,
    ):
        (part / "f" if kind == "folder" else part).write_bytes(b"half")
        raise error
    assert left(tmp_path) == []


def test_failure_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(target, overwrite=True) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert left(tmp_path) == ["x"]


def test_overwriting_keeps_permissions_and_other_names_of_the_old_file(tmp_path: Path) -> None:
    target, other = tmp_path / "x", tmp_path / "hard"
    target.write_bytes(b"old")
    target.chmod(0o640)
    other.hardlink_to(target)
    with replacing(target, overwrite=True) as part:
        part.write_bytes(b"new")
    assert (target.read_bytes(), other.read_bytes()) == (b"new", b"old")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"base")
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "hard").hardlink_to(base)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    for name, why in {
        "base": "would replace the base, an adapter or another file that is read: base",
        "link": "would replace the base, an adapter or another file that is read: base",
        "hard": "would replace the base, an adapter or another file that is read: base",
        "folder/../base": "would replace the base, an adapter or another file that is read: base",
        "folder": "is a folder",
        "broken": "exists",
        "base/x": "folder is a file",
    }.items():
        before = left(tmp_path)
        with pytest.raises(UsageError, match=why), replacing(tmp_path / name, [base]):
            raise AssertionError
        assert left(tmp_path) == before
    assert base.read_bytes() == b"base"


@pytest.mark.parametrize("name", ["base", "link", "hard"])
def test_no_input_is_overwritten(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"base")
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "hard").hardlink_to(base)
    with pytest.raises(UsageError) as failure, replacing(tmp_path / name, [base], overwrite=True):
        raise AssertionError
    assert failure.value.fix == f"choose another name: -o {name}-new"
    assert left(tmp_path) == ["base", "hard", "link"]


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="created the output during the run"), replacing(tmp_path / "x") as part:
        part.write_bytes(b"mine")
        (tmp_path / "x").write_bytes(b"theirs")
    assert (tmp_path / "x").read_bytes() == b"theirs"
    assert left(tmp_path) == ["x"]


def test_names_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("ü" * 127)
    with replacing(target) as part:
        part.write_bytes(b"1")
    assert left(tmp_path) == [target.name]
    with pytest.raises(UsageError), replacing(tmp_path / ("n" * 300)):
        raise AssertionError
    assert left(tmp_path) == [target.name]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="no permission"), replacing(tmp_path / "closed" / "x"):
        raise AssertionError


def test_folder_replaces_its_older_self_only(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with replacing(target, folder=True) as part:
        (part / "unet").mkdir()
        (part / "unet" / "w").write_bytes(b"1")
    with pytest.raises(UsageError, match="exists"), replacing(target, folder=True):
        raise AssertionError
    with replacing(target, folder=True, overwrite=True, contents=["unet/w", "config.json"]) as part:
        (part / "unet").mkdir()
        (part / "unet" / "w").write_bytes(b"2")
        (part / "config.json").write_bytes(b"{}")
    assert left(tmp_path) == ["model", "model/config.json", "model/unet", "model/unet/w"]
    assert (target / "unet" / "w").read_bytes() == b"2"
    (target / "mine.txt").write_bytes(b"precious")
    with pytest.raises(UsageError, match="1 file that the merged model does not have"):
        check_output(target, folder=True, overwrite=True, contents=["unet/w", "config.json"])


def test_files_that_come_into_a_folder_meanwhile_are_not_lost(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "w").write_bytes(b"old")
    with (
        pytest.raises(UsageError, match="1 file that the merged model does not have"),
        replacing(target, folder=True, overwrite=True, contents=["w"]) as part,
    ):
        (part / "w").write_bytes(b"new")
        (target / "mine").write_bytes(b"notes")
    assert left(tmp_path) == ["model", "model/mine", "model/w"]
    assert (target / "w").read_bytes() == b"old"


def test_folders_are_replaced_also_where_names_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_merge.disk.publish._exchange", lambda *_: False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_bytes(b"1")
    with replacing(tmp_path / "model", folder=True, overwrite=True, contents=["w"]) as part:
        (part / "w").write_bytes(b"2")
    assert left(tmp_path) == ["model", "model/w"]
    assert (tmp_path / "model" / "w").read_bytes() == b"2"


@pytest.mark.parametrize("swapped", [True, False])
def test_link_to_a_folder_is_replaced_and_its_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, swapped: bool
) -> None:
    if not swapped:
        monkeypatch.setattr("lora_merge.disk.publish._exchange", lambda *_: False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_bytes(b"1")
    (tmp_path / "link").symlink_to("model")
    with replacing(tmp_path / "link", folder=True, overwrite=True, contents=["w"]) as part:
        (part / "w").write_bytes(b"2")
    assert left(tmp_path) == ["link", "link/w", "model", "model/w"]
    assert [(tmp_path / name / "w").read_bytes() for name in ("link", "model")] == [b"2", b"1"]


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(MergeError), replacing(Path("x.safetensors")):
        raise AssertionError


HOLD = """
    import sys
    from pathlib import Path
    from lora_merge.disk.publish import replacing
    with replacing(Path(sys.argv[1]), folder=sys.argv[2] == "folder") as part:
        print(part, flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_run_is_cleaned_up_after_and_a_live_one_is_left_alone(tmp_path: Path, kind: str) -> None:
    def start(name: str) -> tuple[subprocess.Popen[str], Path]:
        run = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path / name), kind],
            stdin=hold, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert run.stdout is not None
        with run.stdout:
            return run, Path(run.stdout.readline().strip())

    hold, release = os.pipe()

    killed, dead_part = start("killed")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert dead_part.exists()
    live, live_part = start("live")  # it already cleans up
    assert not dead_part.exists()
    try:
        with replacing(tmp_path / "next") as part:
            assert live_part.exists()
            part.write_bytes(b"x")
    finally:
        live.kill()
        live.wait()
        os.close(hold)
        os.close(release)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["next", live_part.name])


def test_files_that_only_look_like_parts_stay(tmp_path: Path) -> None:
    for name in (".x.part", "x.012345678901.lora-merge.part", ".x.0123.lora-merge.part"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "real").write_bytes(b"mine")
    before = left(tmp_path)
    (tmp_path / ".x.012345678901.lora-merge.part").symlink_to("real")  # left where a run was killed: goes, alone
    with replacing(tmp_path / "out") as part:
        part.write_bytes(b"x")
    assert left(tmp_path) == sorted([*before, "out"])


def _race(folder: str, number: int, results: multiprocessing.SimpleQueue[str]) -> None:
    try:
        with replacing(Path(folder) / "out") as part:
            part.write_bytes(bytes([number]) * 100_000)
            time.sleep(0.02)
        results.put("done")
    except UsageError:
        results.put("refused")


@pytest.mark.slow
def test_runs_that_write_one_output_have_one_winner(tmp_path: Path, children: Any) -> None:
    results = children.SimpleQueue()
    runs = [children.Process(target=_race, args=(str(tmp_path), i, results)) for i in range(6)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert sorted(results.get() for _ in runs) == ["done"] + ["refused"] * 5
    content = (tmp_path / "out").read_bytes()
    assert len(content) == 100_000
    assert len(set(content)) == 1
    assert left(tmp_path) == ["out"]


def test_folder_is_not_searched_for_every_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix may put 75 000 outputs into one folder: looking at all of them for each would take an hour."""
    looked: list[Path] = []
    monkeypatch.setattr(temporary, "SWEEPS", 3600.0)
    monkeypatch.setattr(temporary, "remove_stale", looked.append)
    for n in range(3):
        with publish.replacing(tmp_path / f"{n}") as part:
            part.write_bytes(b"x")
    assert looked == [tmp_path]
    monkeypatch.setattr(temporary, "SWEEPS", 0.0)
    with publish.replacing(tmp_path / "last"):
        pass
    assert looked == [tmp_path] * 2
