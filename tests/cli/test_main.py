"""The command line: first impression, options, and one clear error for everything that can be wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.cli import reports as cli_text
from lora_merge.cli import stdio
from lora_merge.disk import publish
from lora_merge.engine.merge import run as carry_out
from lora_merge.errors import ResourceError
from lora_merge.progress import Step
from tests.conftest import Nursery
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.command_line import Answer, run_anew
from tests.kit.files import load, metadata, save, strays
from tests.kit.models import sd1_sample
from tests.kit.tensors import Tensors, rand


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(sd1_sample(), tmp_path / "base.safetensors")


@pytest.fixture
def style(tmp_path: Path) -> Path:
    return save(kohya(sd1_sample()), tmp_path / "style.safetensors")


@pytest.fixture
def run() -> Run:
    """The program in this process."""
    return command_line.run


Run = Callable[..., Answer]


def test_help_is_quick_and_imports_no_torch() -> None:
    code = """if True:
        import sys
        made = 0
        def count(_frame, event, _arg):
            global made
            made += event in ("call", "c_call")
        sys.setprofile(count)
        import lora_merge.cli.main
        sys.argv = ["lora-merge", "--help"]
        try:
            lora_merge.cli.main.main()
        except SystemExit:
            sys.setprofile(None)
        assert not {"torch", "numpy", "rich", "tqdm", "lora_merge.planning.plan"} & {*sys.modules}
        sys.exit(made > 200_000)  # half of that in 0.2 s; torch alone costs millions
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_two_paths_and_a_dtype_are_enough(tmp_path: Path, model: Path, style: Path) -> None:
    done = run_anew(model, style, "--dtype", "bf16", cwd=tmp_path)
    assert done.code == 0, done.err
    out = tmp_path / "base+style.safetensors"
    assert {t.dtype for t in load(out).values() if t.is_floating_point()} == {torch.bfloat16}
    for word in ("Stable Diffusion 1", "5 of 5 modules matched", "output", "verified"):
        assert word in done.out
    assert done.err == ""  # no progress bar without a terminal


def test_options_may_stand_before_the_paths(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    assert run("--dtype", "fp32", "-o", tmp_path / "a.safetensors", model, f"{style}:0.5")[0] == 0
    assert run("merge", model, style, "-s", "0.5", "-o", tmp_path / "b.safetensors", "--dtype", "fp32")[0] == 0
    assert run(model, f"{style}:-0.5", "-o", tmp_path / "c.safetensors", "--dtype", "fp32", "-q")[1] == ""
    a, b = load(tmp_path / "a.safetensors"), load(tmp_path / "b.safetensors")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_json_is_one_object_and_nothing_else(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    code, out, _ = run(model, style, "--json", "-o", tmp_path / "o.safetensors", "--report", tmp_path / "r.json")
    report = json.loads(out)
    assert code == 0
    assert report["written"] == (tmp_path / "o.safetensors").stat().st_size
    assert report["coverage"]["style.safetensors"]["total"] == 5
    assert json.loads((tmp_path / "r.json").read_text()) == report


def test_dry_run_writes_nothing(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    before = sorted(tmp_path.iterdir())
    code, out, _ = run(model, style, "--dry-run", "--json", "-o", tmp_path / "new" / "o.safetensors")
    assert code == 0
    assert json.loads(out)["changed"] == 5
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["with space", "ünïcødé 画", "a:b", "odd:1.5x", "C:x"])
def test_paths_of_all_kinds(run: Run, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    base = save(sd1_sample(), folder / f"{name}.safetensors")
    adapter = save(kohya(sd1_sample()), folder / f"{name}-lora.safetensors")
    out = folder / "made on the way" / "o.safetensors"
    code, _, err = run(base, f"{adapter}:0.5", "-o", out)
    assert code == 0, err
    assert out.exists()


def test_progress_counts_every_byte(tmp_path: Path, model: Path, style: Path) -> None:
    plan, told = lora_merge.plan(model, style, tmp_path / "o.safetensors"), list[Step]()
    carry_out(plan, told.append)
    assert sum(s.done for s in told if s.stage == "merge") == plan.size == (tmp_path / "o.safetensors").stat().st_size
    assert list(dict.fromkeys(s.stage for s in told)) == ["load", "merge", "flush", "prove"]
    proven = [s for s in told if s.stage == "prove"]
    assert sum(s.done for s in proven) == proven[-1].total > 0


def test_home_and_relative_paths(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, _, err = run("~/base.safetensors", "./style.safetensors", "-o", "sub/o.safetensors")
    assert code == 0, err
    assert (tmp_path / "sub" / "o.safetensors").exists()


def test_names_that_begin_as_home_folders_do(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    style.rename("~style.safetensors")
    assert run(model, "./~style.safetensors", "-o", "./~o.safetensors", "--dry-run")[0] == 0
    _refused(run(model, "~style.safetensors"), 2, tmp_path, "no such user")


@pytest.fixture(scope="module")
def merged_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, a merge of them and a jobs file."""
    folder = tmp_path_factory.mktemp("merged")
    base, style = (
        save(sd1_sample(), folder / "base.safetensors"),
        save(kohya(sd1_sample()), folder / "style.safetensors"),
    )
    lora_merge.merge(base, style, folder / "merged.safetensors")
    (folder / "j.yaml").write_text(f"[{{base: {base.name}, adapters: [{style.name}], output: o.safetensors}}]")
    return folder


@pytest.fixture
def lost(merged_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """These models, and a current folder that is gone; what a test writes beside them goes with it."""
    before = {*merged_models.iterdir()}
    (tmp_path / "lost").mkdir()
    monkeypatch.chdir(tmp_path / "lost")
    (tmp_path / "lost").rmdir()
    yield merged_models
    for written in {*merged_models.iterdir()} - before:
        written.unlink()


@pytest.mark.parametrize("words", [
    "base.safetensors style.safetensors -o {}/o.safetensors", "combine {}/style.safetensors", "doctor", "demo",
    "resize style.safetensors --rank 2 -o {}/o.safetensors", "inspect style.safetensors", "batch j.yaml",
    "convert style.safetensors --to comfy -o {}/o.safetensors", "average style.safetensors -o {}/o.safetensors",
    "extract {}/base.safetensors merged.safetensors", "compare merged.safetensors {}/base.safetensors",
    "verify merged.safetensors", "replay {}/merged.safetensors -o o.safetensors", "unmerge merged.safetensors -o {}/o",
    "{}/base.safetensors {}/style.safetensors --report r.json -o {}/o.safetensors", "batch --init",
])  # fmt: skip
def test_relative_path_in_a_current_folder_that_is_gone_is_one_error(run: Run, lost: Path, words: str) -> None:
    code, _, err = run(*words.format(*[lost] * 3).split())
    assert code == 2
    assert err.startswith("error: the current folder was deleted\n") and err.count("\n") == 3, err
    assert not (lost / "o.safetensors").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("words", [
    "batch {}/j.yaml", "doctor {}", "unmerge {}/merged.safetensors -o {}/o.safetensors",
    "replay {}/merged.safetensors -o {}/o.safetensors", "compare {}/merged.safetensors {}/base.safetensors",
    "combine {}/style.safetensors {}/style.safetensors -o {}/o.safetensors",
])  # fmt: skip
def test_current_folder_that_is_gone_is_left(run: Run, lost: Path, words: str) -> None:
    """Torch's libraries end a process that loads them there."""
    code, _, err = run(*words.format(*[lost] * 3).split())
    assert code == 0, err
    assert Path.cwd() == Path("/")


# ---------------------------------------------------------------- bad input


def _raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _f32(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/lora-merge-was-here",)


BAD_BASES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "truncated length": b"\x10\0\0",
    "header longer than the file": _raw({}, length=1 << 40),
    "not json": _raw(b"{nonsense"),
    "a list": _raw([1, 2]),
    "deep": _raw(b'{"a":' * 50_000),
    "overlap": _raw({"a": _f32([2], 0, 8), "b": _f32([2], 4, 12)}, b"\0" * 12),
    "gap": _raw({"a": _f32([1], 0, 4), "b": _f32([1], 8, 12)}, b"\0" * 12),
    "out of range": _raw({"a": _f32([4], 0, 16)}, b"\0" * 8),
    "trailing bytes": _raw({"a": _f32([1], 0, 4)}, b"\0" * 8),
    "duplicate keys": _raw(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "unknown dtype": _raw({"a": _f32([1], 0, 4, "F31")}, b"\0" * 4),
    "wrong size": _raw({"a": _f32([3], 0, 4)}, b"\0" * 4),
    "negative offset": _raw({"a": _f32([1], -4, 0)}, b"\0" * 4),
    "huge shape": _raw({"a": _f32([1 << 62, 1 << 62], 0, 4)}, b"\0" * 4),
    "pickle with code": pickle.dumps(_Code()),
    "gguf": b"GGUF" + b"\0" * 64,
    "web page": b"<!DOCTYPE html><html>" + b" " * 99,
}


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", BAD_BASES)
def test_damaged_files(run: Run, tmp_path: Path, style: Path, model: Path, kind: str) -> None:
    bad = tmp_path / "bad.safetensors"
    if BAD_BASES[kind] is not None:
        bad.write_bytes(BAD_BASES[kind] or b"")
    for arguments in ((bad, style), (model, bad)):
        _refused(run(*arguments, "-o", tmp_path / "o.safetensors"), 3, tmp_path, "bad.safetensors")
    assert not Path("/tmp/lora-merge-was-here").exists()


def _without(tensors: Tensors, ending: str) -> Tensors:
    first = next(k for k in tensors if k.endswith(ending))
    return {k: v for k, v in tensors.items() if k != first}


def _with(tensors: Tensors, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    first = next(k for k in tensors if k.endswith(ending))
    return tensors | {first: change(tensors[first])}


BAD_ADAPTERS: dict[str, tuple[int, Callable[[Tensors], Tensors]]] = {
    "no partner: up": (3, lambda t: _without(t, ".lora_up.weight")),
    "no partner: down": (3, lambda t: _without(t, ".lora_down.weight")),
    "ranks differ": (4, lambda t: _with(t, ".lora_up.weight", lambda v: v[:, :-1])),
    "too few rows": (4, lambda t: _with(t, ".lora_up.weight", lambda v: v[:-1])),
    "too few columns": (4, lambda t: _with(t, ".lora_down.weight", lambda v: v[:, :-1])),
    "NaN": (3, lambda t: _with(t, ".lora_up.weight", lambda v: v * float("nan"))),
    "infinite": (3, lambda t: _with(t, ".lora_down.weight", lambda v: v / 0)),
    "NaN alpha": (3, lambda t: _with(t, ".alpha", lambda v: v * float("nan"))),
    "alpha of two numbers": (3, lambda t: _with(t, ".alpha", lambda v: torch.ones(2))),
    "unknown suffix": (4, lambda t: t | {"lora_unet_down_blocks_0_attentions_0_proj_in.lora_sideways": rand(2)}),
    "one module elsewhere": (4, lambda t: t | {"lora_unet_nowhere.lora_up.weight": rand(4, 2), "lora_unet_nowhere.lora_down.weight": rand(2, 4)}),
    "no match at all": (4, lambda _: {"lora_unet_x.lora_up.weight": rand(4, 2), "lora_unet_x.lora_down.weight": rand(2, 4)}),
    "no adapter": (3, lambda _: sd1_sample()),
    "two algorithms on one module": (3, lambda t: t | {next(iter(t)).split(".")[0] + ".hada_w1_a": rand(4, 4)}),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", BAD_ADAPTERS)
def test_adapters_that_cannot_be_merged(run: Run, tmp_path: Path, model: Path, kind: str) -> None:
    code, make = BAD_ADAPTERS[kind]
    adapter = save(make({k: v.contiguous() for k, v in kohya(sd1_sample()).items()}), tmp_path / "bad.safetensors")
    _refused(run(model, adapter, "-o", tmp_path / "o.safetensors"), code, tmp_path, "bad.safetensors")


def test_swapped_arguments(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    _refused(run(style, model, "-o", tmp_path / "o.safetensors"), 3, tmp_path, "style.safetensors")


def test_unmatched_modules_are_counted_and_can_be_skipped(run: Run, tmp_path: Path, style: Path) -> None:
    unet = save({k: v for k, v in sd1_sample().items() if k.startswith("model.")}, tmp_path / "unet.safetensors")
    code, _, err = run(unet, style, "-o", tmp_path / "o.safetensors")
    assert code == 4
    assert "1 of 5" in err and "lora_te_text_model_encoder_layers_0" in err and "--unmatched skip" in err
    code, out, err = run(unet, style, "-o", tmp_path / "o.safetensors", "--unmatched", "skip")
    assert code == 0, err
    assert "4 of 5" in out and out.count("left out") >= 1
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(
        "version: 1\njobs: [{base: unet.safetensors, adapters: [style.safetensors], unmatched: skip, output: b.safetensors}]"
    )
    for arguments in (
        [unet, style, "-o", tmp_path / "p.safetensors", "--unmatched", "skip", "-q", "--dry-run"],
        [unet, style, "-o", tmp_path / "p.safetensors", "--unmatched", "skip", "-q"],
        ["replay", tmp_path / "p.safetensors", "-o", tmp_path / "r", "-q"],
        ["batch", jobs, "-q"],
    ):
        code, _, err = run(*arguments)
        assert (code, err.count("left out 1: lora_te")) == (0, 1), err
    (tmp_path / "b.safetensors").unlink()
    assert "left out 1: lora_te" in run("batch", jobs)[1]


def test_outputs_that_must_not_be_written(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    link, hard = tmp_path / "link.safetensors", tmp_path / "hard.safetensors"
    link.symlink_to(model)
    hard.hardlink_to(style)
    for target in (model, style, link, hard, tmp_path / "." / "base.safetensors"):
        before = target.read_bytes()
        code, _, err = run(model, style, "-o", target)
        assert code == 2 and "--overwrite" not in err
        assert target.read_bytes() == before


@pytest.mark.slow
def test_slash_at_the_end_means_a_folder(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    """One that is there, or one that is not: the file in it gets the name that it has without -o."""
    (tmp_path / "there").mkdir()
    assert run(model, style, "-o", tmp_path / "o.safetensors")[0] == 0
    for name in ("there/", "new/"):
        made = tmp_path / name / "base+style.safetensors"
        jobs = f"version: 1\njobs: [{{base: base.safetensors, adapters: [style.safetensors], output: {name}}}]\n"
        (tmp_path / "j.yaml").write_text(jobs)
        for command in ((model, style, "-o", f"{tmp_path}/{name}"), ("batch", tmp_path / "j.yaml"),
                        ("replay", tmp_path / "o.safetensors", "-o", f"{tmp_path}/{name}")):  # fmt: skip
            assert run(*command)[0] == 0
            made.unlink()


def test_adapter_is_never_replaced(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    link, hard, folder = tmp_path / "link.safetensors", tmp_path / "hard.safetensors", tmp_path / "folder"
    link.symlink_to(style)
    os.link(style, hard)
    folder.mkdir()
    inside = Path(shutil.copy(style, folder / "adapter_model.safetensors"))
    before = style.read_bytes()
    for target, adapter in (
        (style, style),
        (link, style),
        (hard, style),
        (inside, folder),
        (style.parent / "new" / ".." / style.name, style),
    ):
        code, _, err = run(model, adapter, "-o", target, "--overwrite")
        assert code == 2 and "an adapter or another file" in err, err
        assert style.read_bytes() == inside.read_bytes() == before
    kept = Path(shutil.copy(style, folder / "model.safetensors"))  # an output folder with nothing else in it
    inside.unlink()
    (tmp_path / "base").mkdir()
    shutil.copy(model, tmp_path / "base" / "model.safetensors")
    code, _, err = run(tmp_path / "base", kept, "-o", folder, "--overwrite")
    assert code == 2 and "an adapter or another file" in err, err
    assert kept.read_bytes() == style.read_bytes()


USAGE: dict[str, tuple[int, list[str]]] = {
    "unknown device": (5, ["--device", "cuda:99"]),
    "no device at all": (5, ["--device", "toaster"]),
    "unknown dtype": (2, ["--dtype", "fp17"]),
    "unknown compute dtype": (2, ["--compute-dtype", "int8"]),
    "strengths twice": (2, ["-s", "0.5", "-s", "0.5"]),
    "bad part": (2, ["--strength-for", "nose=1"]),
    "bad part number": (2, ["--strength-for", "te=much"]),
    "bad expression": (2, ["--strength-for", "re:(=1"]),
    "infinite strength": (2, ["-s", "inf"]),
    "a strength in Python's notation": (2, ["-s", "1_0"]),
    "a part in Python's notation": (2, ["--strength-for", "unet=1_0"]),
    "no strength at all": (2, ["-s", "much"]),
    "bad memory": (2, ["--max-memory", "lots"]),
    "endless memory": (2, ["--max-memory", "9" * 320 + "GB"]),
    "endless video memory": (2, ["--max-vram", "9" * 30]),
    "endless setting": (2, ["--setting", "lora_alpha=" + "9" * 400]),
    "endless strength": (2, ["-s", "9" * 400]),
    "too little memory": (5, ["--max-memory", "1KiB"]),
    "bad unmatched": (2, ["--unmatched", "maybe"]),
    "unknown option": (2, ["--fast"]),
    "an empty path": (2, [""]),
    "an empty output": (2, ["-o", ""]),
    "an empty report": (2, ["--report", ""]),
    "another kind of file": (2, ["-o", "o.gguf"]),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", USAGE)
def test_requests_that_make_no_sense(run: Run, tmp_path: Path, model: Path, style: Path, kind: str) -> None:
    code, arguments = USAGE[kind]
    for dry in ([], ["--dry-run"]):
        got, _, err = run(model, style, "-o", tmp_path / "o.safetensors", *arguments, *dry)
        assert got == code, err
        assert "Traceback" not in err and err.strip()
        assert not list(tmp_path.glob("*o.safetensors*"))


def test_outputs_of_odd_names(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    _refused(run(model, style, "-o", tmp_path / "loop" / "o.safetensors"), 2, tmp_path, "link to itself")
    (tmp_path / "model").mkdir()
    model.rename(tmp_path / "model" / "model.safetensors")
    _refused(run(tmp_path / "model", style, "-o", tmp_path / "o.safetensors"), 2, tmp_path, "the output is a folder")


def test_name_behind_a_folder_that_is_not_there_yet(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    """new/../taken is there when new is made."""
    (tmp_path / "taken.safetensors").write_text("mine")
    for target, why in (
        (tmp_path / "new" / ".." / "taken.safetensors", "exists"),
        (tmp_path / "new" / ".." / model.name, "the base"),
    ):
        code, _, err = run(model, style, "-o", target)
        assert (code, why in err) == (2, True), err
    assert run(model, style, "-o", tmp_path / "new" / ".." / "o.safetensors")[0] == 0
    assert (tmp_path / "o.safetensors").exists()


def test_interrupt_while_folders_are_made(
    tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program that calls the API: no handler of ours is in the way."""
    really = Path.mkdir

    def interrupted(self: Path, *rest: Any, **more: Any) -> None:
        really(self, *rest, **more)
        if self.name == "deep":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lora_merge.merge(model, style, tmp_path / "new" / "deep" / "o.safetensors")
    assert not (tmp_path / "new").exists()


def test_options_before_a_command_get_advice_on_their_place(run: Run, model: Path) -> None:
    code, _, err = run("--json", "inspect", model)
    assert (code, "lora-merge inspect … --json" in err) == (2, True), err


def test_dry_run_shows_what_is_needed(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    arguments = [model, style, "-o", tmp_path / "o.safetensors", "--dry-run", "--report", tmp_path / "r.json"]
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "memory" in out and "disk" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert 0 < found["memory"] < found["max_memory"] == 2**30
    again = json.loads(run(*arguments, "--json")[1])
    assert found["disk"].pop("free") > 0 < again["disk"].pop("free")  # others use the disk between the two runs
    assert found == again
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("device", ["cuda:99", "cpu:3", "cuda:98,cuda:99"])
def test_absent_device_is_reported_by_the_plan(run: Run, tmp_path: Path, model: Path, style: Path, device: str) -> None:
    code, _, err = run(model, style, "-o", tmp_path / "o.safetensors", "--dry-run", "--device", device)
    assert (code, "no device" in err) == (5, True), err
    with pytest.raises(ResourceError, match="no device"):
        lora_merge.plan(model, style, tmp_path / "o.safetensors", device=device)


def test_folder_without_permission_is_reported_by_the_plan(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the system's answer is played."""
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, *rest: path != tmp_path and really(path, *rest))
    (tmp_path / "there.safetensors").write_text("mine")
    for target in (tmp_path / name for name in ("o.safetensors", "new/o.safetensors", "there.safetensors")):
        code, _, err = run(model, style, "-o", target, "--overwrite", "--dry-run")
        assert (code, "no permission" in err) == (2, True), err


def test_no_space_is_noticed_before_the_first_byte(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lora_merge.disk.writer

    monkeypatch.setattr(lora_merge.disk.writer, "free_bytes", lambda _: 1000)
    _refused(run(model, style, "-o", tmp_path / "o.safetensors"), 5, tmp_path, "")


def test_plan_without_room_on_the_disk_reports_it_and_ends_with_0(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each command that plans: a note in the text, on stderr with --quiet, and `disk` in the JSON."""
    import lora_merge.disk.writer

    out, jobs, note = tmp_path / "o.safetensors", tmp_path / "jobs.yaml", "note: the disk has no room for the output"
    jobs.write_text(
        json.dumps({"version": 1, "jobs": [{"base": str(model), "adapters": [str(style)], "output": str(out)}]})
    )
    words = {
        "merge": (model, style, "-o", out), "batch": (jobs,), "combine": (style, style, "-o", out),
        "resize": (style, "--rank", "1", "-o", out), "convert": (style, "--to", "diffusers", "--base", model, "-o", out),
        "average": (style, style, "-o", out), "extract": (model, model, "-o", out),
    }  # fmt: skip
    for free in (1000, 1 << 40):
        monkeypatch.setattr(lora_merge.disk.writer, "free_bytes", lambda _, free=free: free)
        for command, args in words.items():
            for option in ((), ("--quiet",), ("--json",)):
                code, printed, err = run(command, *args, "--dry-run", *option)
                assert code == 0, (command, err)
                if option == ("--json",):
                    disk = json.loads(printed)["disk"]
                    assert disk == {"needed": disk["needed"], "free": free, "enough": free > 1000}
                    assert disk["needed"] > 1000
                else:
                    assert (note in (err if option else printed)) == (free == 1000), (command, option)
                    assert note not in (printed if option else err)
    assert not out.exists()


def test_no_space_in_the_middle(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    _refused(run(model, style, "-o", tmp_path / "o.safetensors"), 5, tmp_path, "")


def test_no_permission(run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the system when the output is created; root may write anywhere, so the refusal is played."""
    really = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_CREAT and ".part" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    _refused(run(model, style, "-o", tmp_path / "o.safetensors"), 2, tmp_path, "o.safetensors")


def _refused(result: tuple[int, str, str], code: int, folder: Path, named: str) -> None:
    got, _, err = result
    assert got == code, err
    assert err.startswith("error: ") and "\n  where: " in err and "\n  fix:   " in err
    assert err.count("error: ") == 1 and "Traceback" not in err
    assert named in err
    assert not list(folder.glob("*o.safetensors*")) and not list(folder.glob(".*.part"))


# ---------------------------------------------------------------- what files do not tell


def test_llms_from_scratch_need_their_alpha_and_its_rule(run: Run, tmp_path: Path) -> None:
    base = {"trf_blocks.0.att.W_query.weight": rand(6, 4), "out_head.weight": rand(9, 4)}
    adapter = {f"trf_blocks.0.att.W_query.lora.{n}": rand(*s) for n, s in (("A", (4, 2)), ("B", (2, 6)))}
    adapter["trf_blocks.0.att.W_query.linear.weight"] = rand(6, 4)  # the file holds the wrapped layer too
    files = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    code, _, err = run(*files, "-o", tmp_path / "o.safetensors")
    assert code == 4 and "--setting lora_alpha=VALUE" in err
    product = (adapter["trf_blocks.0.att.W_query.lora.A"] @ adapter["trf_blocks.0.att.W_query.lora.B"]).T
    for more, factor in (([], 8.0), (["--setting", "over_rank=false"], 16.0)):
        arguments = (*files, "-o", tmp_path / "o.safetensors", "--overwrite", "--setting", "lora_alpha=16", *more)
        code, _, err = run(*arguments)
        assert code == 0, err
        assert torch.equal(load(tmp_path / "o.safetensors")["out_head.weight"], base["out_head.weight"])
        got = load(tmp_path / "o.safetensors")["trf_blocks.0.att.W_query.weight"]
        torch.testing.assert_close(got, base["trf_blocks.0.att.W_query.weight"] + factor * product)


def test_litgpt_needs_the_parts_of_its_fused_weight(run: Run, tmp_path: Path) -> None:
    base = {"transformer.h.0.attn.attn.weight": rand(16, 8)}
    adapter = {"transformer.h.0.attn.attn.lora_A": rand(4, 8), "transformer.h.0.attn.attn.lora_B": rand(12, 2)}
    files = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    assert run(*files, "-o", tmp_path / "o.safetensors")[0] == 4
    code, _, err = run(*files, "-o", tmp_path / "o.safetensors", "--setting", "parts=[[0,8],[12,16]]")
    assert code == 0, err
    a, b = adapter["transformer.h.0.attn.attn.lora_A"], adapter["transformer.h.0.attn.attn.lora_B"]
    delta = torch.zeros(16, 8)
    delta[0:8], delta[12:16] = b[:8] @ a[:2], b[8:] @ a[2:]
    torch.testing.assert_close(
        load(tmp_path / "o.safetensors")["transformer.h.0.attn.attn.weight"],
        base["transformer.h.0.attn.attn.weight"] + delta,
    )


@pytest.mark.parametrize("text", [
    "nonsense=1", "lora_alpha", "lora_alpha=many", "lora_alpha=true", "lora_alpha=[1]", "lora_alpha=1e999",
    "over_rank=1", "parts=7", "parts=[[0]]", 'parts=[[0,"a"]]', "parts=[[0.0,4.0]]", "terms=-1", "algo=3", "widest=[1,2]",
    "lora_alpha=16",  # kohya's files hold theirs
])  # fmt: skip
def test_settings_that_nobody_asks_for(run: Run, tmp_path: Path, model: Path, style: Path, text: str) -> None:
    assert run(model, style, "-o", tmp_path / "o.safetensors", "--setting", text)[0] == 2


def test_files_without_an_alpha_say_so_and_take_one(run: Run, tmp_path: Path) -> None:
    base = {"layers.0.attn.q_proj.weight": rand(6, 4)}
    adapter = {"layers.0.attn.q_proj.lora_a.weight": rand(2, 4), "layers.0.attn.q_proj.lora_b.weight": rand(6, 2)}
    files = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    product = adapter["layers.0.attn.q_proj.lora_b.weight"] @ adapter["layers.0.attn.q_proj.lora_a.weight"]
    for more, factor, warned in (([], 1.0, True), (["--setting", "lora_alpha=16"], 8.0, False)):
        code, out, err = run(*files, "-o", tmp_path / "o.safetensors", "--overwrite", "--json", *more)
        assert code == 0, err
        assert ("layers.0.attn.q_proj: no alpha is stored" in out) is warned
        got = load(tmp_path / "o.safetensors")["layers.0.attn.q_proj.weight"]
        torch.testing.assert_close(got, base["layers.0.attn.q_proj.weight"] + factor * product)


def test_alpha_that_trainers_store_is_missed_with_a_warning(run: Run, model: Path, style: Path, tmp_path: Path) -> None:
    """Names of kohya's trainers without alpha; not if metadata is of a trainer from before alpha, or for other names."""
    factors = {key: value for key, value in load(style).items() if not key.endswith(".alpha")}
    for entries, label in (({}, "warning"), ({"ss_network_module": "networks.lora"}, "note")):
        save(factors, tmp_path / "a.safetensors", entries)
        code, out, err = run(model, tmp_path / "a.safetensors", "--dry-run")
        assert code == 0, err
        (line,) = [line for line in (out + err).splitlines() if "no alpha is stored" in line]
        assert line.split()[0].rstrip(":") == label


@pytest.mark.parametrize("part", ["te3", "te2", "re:attn7"])
def test_part_that_the_base_does_not_have(run: Run, tmp_path: Path, model: Path, style: Path, part: str) -> None:
    code, _, err = run(model, style, "-o", tmp_path / "o.safetensors", "--strength-for", f"{part}=0.5")
    assert code == 2 and part in err and ("attn" if part.startswith("re:") else "te, unet, vae") in err


def test_debug_adds_the_traceback_and_keeps_the_exit_code(run: Run, tmp_path: Path, model: Path) -> None:
    for options, shown in (([], False), (["--debug"], True)):
        code, _, err = run(model, tmp_path / "absent.safetensors", "-o", tmp_path / "o.safetensors", *options)
        assert code == 3
        assert ("Traceback" in err) is shown
        assert "error: file not found" in err


def test_failure_is_reported_in_place_of_an_earlier_success(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, place = tmp_path / "o.safetensors", tmp_path / "r.json"
    arguments = [style, "-o", out, "--report", place]
    assert run(model, *arguments)[0] == 0
    assert json.loads(place.read_text())["written"] == out.stat().st_size
    code, _, err = run(model, *arguments)
    told = json.loads(place.read_text())["error"]
    assert (code, told["exit_code"], told["kind"]) == (2, 2, "OutputExists")
    assert told["what"] in err and told["where"] == str(out) and told["fix"] in err
    assert run(tmp_path / "absent.safetensors", *arguments)[0] == 3
    assert json.loads(place.read_text())["error"]["exit_code"] == 3
    assert run(model, *arguments, "--dtype", "no")[0] == 2
    assert json.loads(place.read_text())["error"]["where"] == "--dtype"
    out.unlink()
    seen = []

    def broken(*_: object, **__: object) -> None:
        seen.append(place.read_text())  # what would be there if the process were killed
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(cli_text, "carry_out", broken)
    assert run(model, *arguments)[0] == 5
    assert seen == [""]
    assert json.loads(place.read_text())["error"]["kind"] == "ResourceError"


def test_failure_is_reported_over_nothing_but_a_report(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    """A folder's links, as in the cache of huggingface_hub, lead to inputs that are not known before it is read."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(model)
    (tmp_path / "folder" / "config.json").write_text("{")
    before = model.read_bytes()
    assert run(tmp_path / "folder", tmp_path / "absent", "-o", tmp_path / "o", "--report", model)[0] == 2
    assert model.read_bytes() == before
    mine = tmp_path / "mine.json"
    mine.write_text('{"peft_type": "LORA"}')
    for place in (mine, tmp_path / "o.safetensors"):
        assert run(model, style, "-o", tmp_path / "o.safetensors", "--report", place, "--dtype", "no")[0] == 2
    assert mine.read_text() == '{"peft_type": "LORA"}' and not (tmp_path / "o.safetensors").exists()


def test_report_is_written_over_no_input_and_no_output(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    before = model.read_bytes(), style.read_bytes()
    for place in (model, style, tmp_path / "o.safetensors", tmp_path / "link", tmp_path, tmp_path / "no" / "r.json"):
        code, _, err = run(model, style, "-o", tmp_path / "o.safetensors", "--report", place)
        assert (code, "--report" in err) == (2, True), place
    assert before == (model.read_bytes(), style.read_bytes())
    assert not (tmp_path / "o.safetensors").exists()
    jobs = tmp_path / "j.yaml"
    jobs.write_text(
        "version: 1\njobs: [{base: base.safetensors, adapters: [style.safetensors], output: o.safetensors}]\n"
    )
    for place in (model, jobs, tmp_path / "o.safetensors"):
        assert run("batch", jobs, "--report", place)[0] == 2, place
    assert not (tmp_path / "o.safetensors").exists()
    assert model.read_bytes() == before[0]


@pytest.mark.skipif(os.name == "nt", reason="no such pipes")
@pytest.mark.parametrize("command", ["merge", "batch"])
def test_pipe_without_a_reader_is_refused_before_the_work(
    run: Run, tmp_path: Path, model: Path, style: Path, command: str
) -> None:
    pipe, out, jobs = tmp_path / "p", tmp_path / "o.safetensors", tmp_path / "j.yaml"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    jobs.write_text(f"version: 1\njobs: [{{base: {model}, adapters: [{style}], output: {out}}}]\n")
    for place in (pipe, tmp_path / "link"):
        arguments = [model, style, "-o", out] if command == "merge" else ["batch", jobs]
        code, _, err = run(*arguments, "--report", place)
        assert (code, "no reader" in err) == (2, True), err
    assert not out.exists()


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
@pytest.mark.parametrize("place", ["loop/r.json", "file/r.json", "none/r.json", "tty"])
def test_place_that_no_report_can_have_is_refused_before_the_work(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Below a link to itself, below a file that may be written, below a dangling link; a terminal that is gone."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "none").symlink_to("nowhere")
    (tmp_path / "file").touch(mode=0o777)
    if place == "tty":
        monkeypatch.setattr(stdio, "_stream", lambda _: failed(errno.ENXIO))
    out = tmp_path / "o.safetensors"
    code, _, err = run(model, model, "-o", out, "--report", tmp_path / place)
    assert (code, "cannot be written there" in err) == (2, True), err
    assert not out.exists()


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
@pytest.mark.parametrize("option", ["--report", "--html"])
def test_link_to_itself_is_replaced_like_other_links(
    run: Run, tmp_path: Path, model: Path, style: Path, option: str
) -> None:
    (tmp_path / "loop.html").symlink_to("loop.html")
    assert run(model, style, "-o", tmp_path / "o.safetensors", option, tmp_path / "loop.html")[0] == 0
    assert (tmp_path / "loop.html").is_file() and not (tmp_path / "loop.html").is_symlink()


@pytest.mark.few(2)
@pytest.mark.skipif(os.name == "nt", reason="no such pipes")
@pytest.mark.parametrize("place", ["p", "/dev/fd/{}", "link"])
def test_pipe_with_a_reader_gets_the_report_or_the_failure(
    run: Run, tmp_path: Path, model: Path, style: Path, place: str
) -> None:
    os.mkfifo(tmp_path / "p")
    for more, key in (([], "written"), (["--dtype", "no"], "error")):
        reader = os.open(tmp_path / "p", os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(tmp_path / "p", os.O_WRONLY)
        path = tmp_path / place.format(writer)
        with contextlib.suppress(FileExistsError):
            (tmp_path / "link").symlink_to("p")
        run(model, style, "-o", tmp_path / f"{key}.safetensors", "--report", path, *more)
        os.close(writer)
        assert key in json.loads(os.read(reader, 1 << 16))
        os.close(reader)


@pytest.mark.skipif(os.name == "nt", reason="no such pipes")
def test_reader_that_stops_costs_the_report_alone(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "READER_SECONDS", 0.01)
    pipe = tmp_path / "p"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, bytes(1 << 12))
    code, _, err = run(model, style, "-o", tmp_path / "o.safetensors", "--report", pipe)
    assert (code, "its reader does not read" in err) == (0, True), err
    assert (tmp_path / "o.safetensors").exists()
    os.close(filler)
    os.close(reader)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing shows which files are synced")
def test_files_next_to_the_output_follow_no_link_and_are_on_the_disk(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report, the lines of a batch, the page and the card: a link is replaced, its target stays as it is."""
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd))[1]
    )
    (tmp_path / "mine").mkdir()
    links = {tmp_path / f"r{ending}": tmp_path / "mine" / f"r{ending}" for ending in (".json", ".jsonl", ".html")}
    for link, place in links.items():
        place.write_text("<" if link.suffix == ".html" else '{"output": ')
        link.symlink_to(place)
    before = {place: place.read_text() for place in links.values()}
    out, jobs = tmp_path / "o.safetensors", tmp_path / "j.yaml"
    jobs.write_text(f"version: 1\njobs: [{{base: {model}, adapters: [{style}], output: {tmp_path}/p.safetensors}}]\n")
    assert (
        run(model, style, "-o", out, "--card", "--report", tmp_path / "r.json", "--html", tmp_path / "r.html")[0] == 0
    )
    assert run("batch", jobs, "--report", tmp_path / "r.jsonl")[0] == 0
    assert {place: place.read_text() for place in links.values()} == before
    assert json.loads((tmp_path / "r.json").read_text())["written"]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1
    for path in (*links, tmp_path / "o.md"):
        assert path.is_file() and not path.is_symlink()
        assert any(path.name in name for name in synced), path
    assert strays(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_card_that_is_a_link_or_a_pipe_stays(run: Run, tmp_path: Path, model: Path, style: Path) -> None:
    (tmp_path / "mine").write_text("my words")
    for n, put in enumerate((lambda p: p.symlink_to("mine"), os.mkfifo)):
        card = tmp_path / f"o{n}.md"
        put(card)
        mode = card.lstat().st_mode
        code, out, err = run(model, style, "-o", card.with_suffix(".safetensors"), "--card")
        assert (code, "no model card was written" in out + err) == (0, True), err
        assert card.lstat().st_mode == mode
    assert (tmp_path / "mine").read_text() == "my words"


@pytest.mark.skipif(os.name == "nt", reason="permissions are others there")
def test_report_in_a_folder_that_allows_no_new_file_is_written_in_place(
    run: Run, tmp_path: Path, model: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the system's answer is played; and a file that is mounted by itself."""
    really, folder = os.access, tmp_path / "closed"
    folder.mkdir()
    place = folder / "r.json"
    for n, mounted in enumerate((False, True)):
        place.write_text('{"output": ' + "x" * 100_000)
        inode = place.stat().st_ino
        with monkeypatch.context() as patch:
            if mounted:
                patch.setattr(publish, "create", lambda *_, **__: failed())
            else:
                patch.setattr(os, "access", lambda path, *rest: path != folder and really(path, *rest))
            report = stdio.ReportFile(str(place))
            report.protect([], [])
            report.begin()
        report.replace(f'{{"n": {n}}}')
        report.close()
        assert json.loads(place.read_text()) == {"n": n}
        assert place.stat().st_ino == inode


def failed(number: int = errno.EBUSY) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("line", "code"),
    [("PYTHONIOENCODING=ascii {} 2>/dev/full --dtype no", 2), ("{} 2>/dev/full --dtype no", 2),
     ("PYTHONIOENCODING=ascii {} >/dev/full --json --report /dev/full", 0), ("{} >&- 2>&- <&-", 0)],
)  # fmt: skip
def test_output_does_not_depend_on_broken_streams(
    tmp_path: Path, model: Path, style: Path, line: str, code: int
) -> None:
    """Typer goes around a stream that is ASCII."""
    out = tmp_path / "o.safetensors"
    line = line.format(f"{sys.executable} -m lora_merge {model} {style} -o {out}")
    assert subprocess.run(["sh", "-c", line], capture_output=True, check=False).returncode == code
    assert out.exists() == (code == 0)
    assert strays(tmp_path) == []


ODD = "日é😀\udcff"  # the last is a byte that is not UTF-8


@pytest.mark.slow
def test_names_command_no_terminal(tmp_path: Path) -> None:
    """Names of tensors come from strangers; what a terminal would obey is told as JSON escapes it."""
    evil = "\nerror: forged\x1b[2J\x07\x9b0m\x85"
    save({"a.weight": torch.zeros(8, 8), f"{evil}.weight": torch.zeros(8, 8)}, tmp_path / "b.safetensors")
    shapes = {"up": (8, 1), "down": (1, 8)}
    factors = {f"{m}.lora_{s}.weight": torch.zeros(shapes[s]) for m in ("a", f"q{evil}") for s in shapes}
    save(factors, tmp_path / "a.safetensors")
    said = ""
    for arguments, code in (([], 4), (["--unmatched", "skip", "-v"], 0), (["--unmatched", "skip", "--json"], 0)):
        argv = ["b.safetensors", "a.safetensors", "-o", "o.safetensors", "--dry-run", *arguments]
        done = run_anew(*argv, cwd=tmp_path)
        said = done.out + done.err
        assert done.code == code, said
        assert "\\u009b0m\\u0085" in said
        assert not {*said} & {"\x1b", "\x07", "\x9b", "\x85"}, said
        assert "\nerror: forged" not in done.err
    assert f"q{evil}" in json.loads(said)["coverage"]["a.safetensors"]["skipped"]


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("cp1252", (r"\u65e5", r"é\ud83d\ude00\udcff")), ("utf-8", ("日", r"é😀\udcff")),
     ("ascii", (r"\u65e5", r"\u00e9\ud83d\ude00\udcff"))],
)  # fmt: skip
def test_names_that_the_console_cannot_show(
    tmp_path: Path, style: Path, nursery: Nursery, encoding: str, shown: tuple[str, str]
) -> None:
    """Shown with escapes that JSON knows; in the file, which is UTF-8, as near as can be."""
    base, out = save(sd1_sample(), tmp_path / "b").rename(tmp_path / ODD), tmp_path / f"{ODD}.safetensors"
    log, err = tmp_path / "log", tmp_path / "err"
    code = f"""if True:
        import os, sys
        from lora_merge.__main__ import start
        os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT), 2)
        sys.stdout = open(1, "w", encoding="{encoding}", closefd=False)
        start()
    """

    def run(*arguments: object) -> str:
        exit_code = nursery.wait(nursery.start([*map(str, arguments)], tmp_path, log=str(log), code=code))
        assert (exit_code, err.read_bytes()) == (0, b"")
        return log.read_bytes().decode(encoding)

    told = json.loads(run(base, style, "-o", out, "--json", "--report", "r.json"))
    assert told["output"] == json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["output"] == str(out)
    assert "".join(shown) in run("inspect", base)
    (tmp_path / "j.yaml").write_text(
        "version: 1\njobs: [{base: o.safetensors, adapters: [style.safetensors], output: 日.safetensors}]\n", "utf-8"
    )
    assert metadata(out.rename(tmp_path / "o.safetensors"))["modelspec.merged_from"] == "日é😀?, style.safetensors"
    assert f"{shown[0]}.safetensors" in run("batch", "j.yaml")
    assert json.loads(run("verify", "o.safetensors", "--json"))["proven"]


@pytest.mark.parametrize("name", ["base.safetensors", "style.safetensors", "merged.safetensors", "jobs.yaml"])
def test_demo_takes_the_place_of_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("lora_merge.cli.demo.command", lambda *_: [sys.executable, "-c", ""])  # a merge takes seconds
    mine = save({"x.weight": rand(2)}, tmp_path / name)
    before = mine.read_bytes()
    _refused(run("demo", tmp_path), 2, tmp_path, mine.name)
    assert mine.read_bytes() == before and list(tmp_path.iterdir()) == [mine]


@pytest.mark.slow
def test_demo_can_be_run_again_and_needs_a_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("demo", tmp_path / "demo")[0] == 0
    code, out, err = run("demo", tmp_path / "demo")
    assert (code, err) == (0, "") and out.count("lora-merge base.safetensors style.safetensors:0.8") == 2
    _refused(run("demo", tmp_path / "demo" / "base.safetensors"), 2, tmp_path, "base.safetensors")


def test_demo_fails_as_its_merge_does(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lora_merge.cli.demo.command", lambda *_: [sys.executable, "-c", "import sys; sys.exit(5)"])
    assert run("demo", tmp_path / "demo")[0] == 5
    monkeypatch.setattr("lora_merge.cli.demo.layout", full)
    _refused(run("demo", tmp_path / "new"), 5, tmp_path, "no space left")


@pytest.fixture
def read_too(tmp_path: Path, model: Path, style: Path) -> list[Path]:
    """What is read besides weights: a name table, a jobs file, the configuration of an adapter."""
    table, jobs, peft = tmp_path / "map.yaml", tmp_path / "jobs.yaml", tmp_path / "peft"
    shutil.copy(Path(lora_merge.__file__).parent / "models" / "architectures" / "sd1.yaml", table)
    jobs.write_text(
        f"version: 1\njobs: [{{base: {model.name}, adapters: [{style.name}, peft], map: map.yaml, output: o.safetensors}}]"
    )
    peft.mkdir()
    save(kohya(sd1_sample(), seed=3), peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 2}')
    return [table, jobs, peft / "adapter_config.json"]


def test_no_report_and_no_output_replaces_what_is_read_too(
    run: Run, tmp_path: Path, model: Path, style: Path, read_too: list[Path]
) -> None:
    table, jobs, config = read_too
    before = [p.read_bytes() for p in read_too]
    ours, peft = ["-o", tmp_path / "o.safetensors"], config.parent / "adapter_model.safetensors"
    for place in (table, config):
        refused = [run(model, style, peft, "--map", table, *ours, "--report", place),
                   run(model, style, peft, "--map", table, "-o", place, "--overwrite")]  # fmt: skip
        assert [code for code, _, _ in refused] == [2, 2], refused
    for place in read_too:
        assert run("batch", jobs, "--report", place)[0] == 2, place
    text = jobs.read_text()
    for place in ("jobs.yaml", "map.yaml", "peft/adapter_config.json"):
        jobs.write_text(text.replace("o.safetensors", f"{place}, overwrite: true"))
        assert run("batch", jobs)[0] in (2, 7), place
    jobs.write_text(text)
    assert [p.read_bytes() for p in read_too] == before
    assert not (tmp_path / "o.safetensors").exists()


def test_no_report_replaces_a_file_of_a_base_however_the_base_is_named(
    run: Run, tmp_path: Path, model: Path, style: Path
) -> None:
    """By its folder or by its index: all files beside that one are the base. Beside a single file, others are not."""
    folder, own = tmp_path / "base", tmp_path / "report.json"
    folder.mkdir()
    shard, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shutil.copy(model, shard)
    table = dict.fromkeys(load(shard), shard.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for base in (folder, index):
        for place in before:
            code, _, said = run(base, style, "-o", tmp_path / "out", "--report", place)
            assert (code, "over an input" in said) == (2, True), said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    own.write_text('{"error": null}\n')
    assert run(model, style, "-o", tmp_path / "o.safetensors", "--report", own)[0] == 0
