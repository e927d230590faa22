"""Killed and interrupted at random and at chosen moments. The full count: pytest -m slow tests/faults"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from .conftest import PART, ROOT, Scene, send


def kill_at_random(scene: Scene, count: int, seed: int) -> set[bool]:
    """Kill `count` merges; whether the output was complete, seen over all of them."""
    moments, seen = random.Random(seed), set()
    for _ in range(count):
        scene.reset()
        pid = scene.start()
        time.sleep(moments.uniform(0, scene.seconds * 1.05))
        send(pid, signal.SIGKILL)
        code = scene.nursery.wait(pid)
        assert code in (0, -signal.SIGKILL), scene.log()
        scene.check(finished=True if code == 0 else None)
        assert len(scene.strays()) <= 1, "the run before this one was not cleaned up"
        seen.add(scene.out.read_bytes() != scene.old)
    assert scene.run() == 0
    assert scene.strays() == []
    scene.check(finished=True)
    return seen


def test_a_killed_merge_leaves_the_old_file_or_the_new_one(scene: Scene) -> None:
    assert False in kill_at_random(scene, 8, seed=1)


@pytest.mark.slow
def test_a_merge_killed_at_300_moments_leaves_the_old_file_or_the_new_one(scene: Scene) -> None:
    assert kill_at_random(scene, 300, seed=2) == {False, True}


@pytest.mark.parametrize(
    ("call", "at"),
    [("pwrite", 0), ("pwrite", 1), ("pwrite", 3), ("fallocate", 0), ("ftruncate", 0), ("fsync", 0), ("fsync", 1),
     ("name", 0)],
)  # fmt: skip
def test_killed_at_each_step_of_writing_and_naming(scene: Scene, call: str, at: int) -> None:
    scene.reset()
    assert scene.run(**scene.armed(call, at, "kill")) == -signal.SIGKILL
    scene.check(finished=False)
    assert len(scene.strays()) == 1
    assert scene.run() == 0
    assert scene.strays() == []


def test_killed_between_the_two_steps_of_naming(scene: Scene) -> None:
    """Without --overwrite the name is a second link; killed before the first is removed, both are there."""
    scene.out.unlink()
    argv = [a for a in scene.argv() if a != "--overwrite"]
    assert scene.run(argv=argv, **scene.armed("unlink", 0, "kill")) == -signal.SIGKILL
    scene.check(finished=True)
    assert len(scene.strays()) == 1
    assert scene.run() == 0
    scene.check(finished=True)
    assert scene.strays() == []


STAGES = {
    "the base is told from others": ("read", 0, "base.safetensors"),
    "its header is read": ("read", 2, "base.safetensors"),
    "the adapter's header is read": ("read", 2, "a.safetensors"),
    "the base is read": ("preadv", 0, "base.safetensors"),
    "the adapter is read": ("preadv", 1, "a.safetensors"),
    "space is reserved": ("fallocate", 0, PART),
    "the first byte is written": ("pwrite", 0, PART),
    "half is written": ("pwrite", 3, PART),
    "the last byte is written": ("pwrite", 7, PART),
    "it is sent to the disk": ("fsync", 0, PART),
    "its header is proved": ("read", 0, PART),
    "its bytes are proved": ("preadv", 0, PART),
    "its numbers are proved": ("preadv", 5, PART),
    "it is sent once more": ("fsync", 1, PART),
}
"""What a merge is doing → the system call of that kind it is in: which one, counted from 0, on a file so named."""

STOPS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_merge_leaves_nothing(scene: Scene, stage: str) -> None:
    """It stops itself in that very call and is signalled then, however slow the machine is."""
    call, at, path = STAGES[stage]
    for number in STOPS:
        scene.reset()
        pid = scene.start(**scene.armed(call, at, "stop", path))
        scene.stopped(pid)
        send(pid, number)
        send(pid, signal.SIGCONT)
        assert scene.nursery.wait(pid) == 128 + number, scene.log()
        scene.check(finished=False)
        assert scene.strays() == []
        assert number.name in scene.log()


@pytest.mark.parametrize(("call", "at", "path"), [("name", 0, PART), ("fsync", 2, "work")])
@pytest.mark.parametrize("number", STOPS)
def test_interrupted_while_it_gets_its_name(
    scene: Scene, number: signal.Signals, call: str, at: int, path: str
) -> None:
    """Too late to stop it: the output is there, or it is not and the exit code says so."""
    scene.reset()
    pid = scene.start(**scene.armed(call, at, "stop", path))
    scene.stopped(pid)
    send(pid, number)
    send(pid, signal.SIGCONT)
    code = scene.nursery.wait(pid)
    assert code in (0, 128 + number), scene.log()
    scene.check(finished=code == 0)
    assert scene.strays() == []


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_twice(scene: Scene, stage: str) -> None:
    """What impatient people do; the second signal arrives while it cleans up after the first."""
    call, at, path = STAGES[stage]
    scene.reset()
    pid = scene.start(**scene.armed(call, at, "stop", path))
    scene.stopped(pid)
    for number in STOPS:
        send(pid, number)
    send(pid, signal.SIGCONT)
    assert scene.nursery.wait(pid) in {128 + n for n in STOPS}, scene.log()
    scene.check(finished=False)
    assert scene.strays() == []


def interrupted_at_import(command: list[str], module: str, number: signal.Signals, scene: Scene) -> tuple[int, str]:
    """Exit code and last line, with the rest if that is a traceback. Python tells every module that it has imported."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", *command], cwd=scene.folder, env=env, stdin=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.rpartition("|")[2].strip().startswith(module):
                process.send_signal(number)
                break
        told += process.stderr
    assert "Traceback" not in "".join(told), "".join(told[-20:])
    return process.returncode, told[-1]


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("module", ["typer.", "torch."])  # torch has hundreds, itself the last
def test_interrupted_during_imports(scene: Scene, module: str, number: signal.Signals) -> None:
    scene.reset()
    code, last = interrupted_at_import(["lora_merge", *scene.argv()], module, number, scene)
    assert code == 128 + number
    assert (number.name in last) is (module == "torch.")  # before that, there is nothing to tell
    scene.check(finished=False)
    assert scene.strays() == []


def test_a_worker_interrupted_during_its_imports_is_quiet(scene: Scene) -> None:
    assert interrupted_at_import(["lora_merge.worker"], "yaml.", signal.SIGINT, scene)[0] == 1


AT = """
    import atexit, os, sys
    from pathlib import Path
    import lora_merge.cli, lora_merge.publish, lora_merge.run
    from lora_merge.__main__ import start

    def then(place, name):
        real = getattr(place, name)
        def both(*args, **more):
            try:
                return real(*args, **more)
            finally:
                os.kill(os.getpid(), int(os.environ["NUMBER"]))
        setattr(place, name, both)

    exec(os.environ["MOMENT"])
    start()
"""


def at(moment: str, number: signal.Signals, scene: Scene, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """A merge that is signalled at the end of what the moment names."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBER": str(int(number)), "MOMENT": moment}
    command = [sys.executable, "-c", textwrap.dedent(AT), *argv]
    return subprocess.run(command, cwd=scene.folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "moment",
    ['then(lora_merge.publish, "_remove")', 'then(lora_merge.run.Digests, "__exit__")', 'then(lora_merge.cli, "carry_out")',
     'atexit.register(os.kill, os.getpid(), int(os.environ["NUMBER"]))'],
)  # fmt: skip
def test_interrupted_after_it_has_its_name(scene: Scene, moment: str) -> None:
    """It has succeeded, and says so."""
    scene.reset()
    done = at(moment, signal.SIGTERM, scene, scene.argv())
    assert (done.returncode, done.stderr) == (0, "")
    scene.check(finished=True)
    assert scene.strays() == []


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_interrupted_after_one_has_its_name_makes_no_more(scene: Scene, *, together: bool) -> None:
    """Those that share a read of the base, and those that do not."""
    jobs = [f"{{base: {scene.folder}/base.safetensors, adapters: [{scene.folder}/a.safetensors], dtype: {dtype}, "
            f"output: {name}}}" for name, dtype in (("x", "keep"), ("y", "keep" if together else "fp32"))]  # fmt: skip
    folder = scene.folder.parent / f"batch-{together}"
    folder.mkdir()
    (folder / "jobs.yaml").write_text(f"version: 1\njobs: [{', '.join(jobs)}]\n")
    done = at('then(lora_merge.publish, "_remove")', signal.SIGTERM, scene, ["batch", str(folder / "jobs.yaml"), "-q"])
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert {p.name for p in folder.iterdir()} == {"jobs.yaml", "x"}


@pytest.mark.parametrize(
    "moment", ['then(Path, "mkdir")', 'then(lora_merge.publish, "make_parents")', 'then(lora_merge.publish, "_create")']
)
def test_interrupted_while_the_place_is_made(scene: Scene, moment: str) -> None:
    argv = scene.argv()
    argv[argv.index("-o") + 1] = "new/deep/out.safetensors"
    before = {p.name for p in scene.folder.iterdir()}
    done = at(moment, signal.SIGTERM, scene, argv)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert {p.name for p in scene.folder.iterdir()} == before


LOST = """
    import os, sys
    from lora_merge import planning
    from lora_merge.__main__ import start

    class Lost:
        def __del__(self):
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
            sys.stderr.write("")  # here the handler raises

    def make_plan(job, make=planning.make_plan):
        Lost()
        return make(job)

    planning.make_plan = make_plan
    start()
"""


@pytest.mark.parametrize("number", STOPS)
def test_interrupted_where_python_loses_what_is_raised(scene: Scene, number: signal.Signals) -> None:
    scene.reset()
    command = [sys.executable, "-c", textwrap.dedent(LOST), *scene.argv()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBER": str(int(number))}
    done = subprocess.run(command, cwd=scene.folder, env=env, capture_output=True, text=True)
    assert "Exception ignored in" in done.stderr
    assert done.returncode == 128 + number, done.stderr
    scene.check(finished=False)
    assert scene.strays() == []
