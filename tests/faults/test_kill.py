"""Killed and interrupted at random and at chosen moments. The full count: pytest -m slow tests/faults"""

from __future__ import annotations

import random
import signal
import time

import pytest

from .conftest import Scene, send


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_merge_leaves_nothing(scene: Scene, number: signal.Signals) -> None:
    moments = random.Random(number)
    codes = set()
    for share in (0.3, 0.5, 0.7, *(moments.uniform(0.1, 1) for _ in range(1))):
        scene.reset()
        pid = scene.start()
        time.sleep(share * scene.seconds)
        send(pid, number)
        codes.add(code := scene.nursery.wait(pid))
        assert code in (0, 128 + number), scene.log()
        scene.check(finished=True if code == 0 else None)
        assert scene.strays() == []
    assert 128 + number in codes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("call", "at"), [("pwrite", 0), ("pwrite", 2), ("fsync", 0), ("preadv", 0)])
def test_interrupted_in_the_middle_of_a_system_call(scene: Scene, number: signal.Signals, call: str, at: int) -> None:
    scene.reset()
    path = "base.safetensors" if call == "preadv" else "lora-merge.part"
    pid = scene.start(**scene.armed(call, at, "stop", path))
    scene.stopped(pid)
    send(pid, number)
    send(pid, signal.SIGCONT)
    assert scene.nursery.wait(pid) == 128 + number, scene.log()
    scene.check(finished=False)
    assert scene.strays() == []
    assert signal.Signals(number).name in scene.log()
