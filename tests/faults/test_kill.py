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


@pytest.mark.parametrize("number", STOPS)
def test_interrupted_while_torch_is_imported(scene: Scene, number: signal.Signals) -> None:
    """Python tells every module that it has imported; torch has hundreds, itself the last."""
    scene.reset()
    command = [sys.executable, "-X", "importtime", "-m", "lora_merge", *scene.argv()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=scene.folder, env=env, stderr=subprocess.PIPE, text=True) as merge:
        assert merge.stderr is not None
        told = []
        for line in merge.stderr:
            told.append(line)
            if line.rpartition("|")[2].strip().startswith("torch."):
                merge.send_signal(number)
                break
        told += merge.stderr
    assert merge.returncode == 128 + number, "".join(told[-20:])
    scene.check(finished=False)
    assert scene.strays() == []
    assert number.name in told[-1]


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
