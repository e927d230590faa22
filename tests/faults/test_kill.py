"""Killed and interrupted at random and at chosen moments. The full count: pytest -m slow tests/faults"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from lora_merge import process
from lora_merge.process import on_stop
from tests.conftest import ROOT
from tests.faults.conftest import PART, Scene, send


def kill_at_random(scene: Scene, count: int, seed: int) -> set[bool]:
    """Kill `count` merges; whether the output was complete, seen over all of them and those that ended before that.

    The span of the moments follows the machine: shorter after each that had ended, longer after each that had not.
    """
    moments, seen, span, killed = random.Random(seed), set(), scene.seconds, 0
    while killed < count:
        scene.reset()
        pid = scene.start()
        time.sleep(moments.uniform(0, span))
        send(pid, signal.SIGKILL)
        code = scene.nursery.wait(pid)
        assert code in (0, -signal.SIGKILL), scene.log()
        scene.check(finished=True if code == 0 else None)
        killed += code != 0
        span *= 1.02 if code else 0.9
        assert len(scene.strays()) <= 1, "the run before this one was not cleaned up"
        seen.add(scene.out.read_bytes() != scene.old)
    assert scene.run() == 0
    assert scene.strays() == []
    scene.check(finished=True)
    return seen


def test_killed_merge_leaves_the_old_file_or_the_new_one(scene: Scene) -> None:
    assert False in kill_at_random(scene, 8, seed=1)


@pytest.mark.slow
def test_merge_killed_at_300_moments_leaves_the_old_file_or_the_new_one(scene: Scene) -> None:
    assert kill_at_random(scene, 300, seed=2) == {False, True}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("call", "at"),
    [("pwrite", 0), ("pwrite", 1), ("pwrite", 3), ("fallocate", 0), ("ftruncate", 0), ("fsync", 0), ("fsync", 1),
     ("name", 0)],
)  # fmt: skip
def test_kill_at_each_step_of_writing_and_naming(scene: Scene, call: str, at: int) -> None:
    scene.reset()
    assert scene.run(**scene.armed(call, at, "kill")) == -signal.SIGKILL
    scene.check(finished=False)
    assert len(scene.strays()) == 1
    assert scene.run() == 0
    assert scene.strays() == []


def test_kill_between_the_two_steps_of_naming(scene: Scene) -> None:
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


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_merge_leaves_nothing(scene: Scene, stage: str) -> None:
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


@pytest.mark.few(2)
@pytest.mark.parametrize(("call", "at", "path"), [("name", 0, PART), ("fsync", 2, "work"), ("fsync", 3, "work")])
@pytest.mark.parametrize("number", STOPS)
def test_interrupt_while_the_output_gets_its_name(
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


@pytest.mark.few(3)
@pytest.mark.parametrize("stage", STAGES)
def test_interrupt_that_comes_twice(scene: Scene, stage: str) -> None:
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


IMPORT = """
    import os, runpy, sys

    class Signalled:
        @staticmethod
        def find_spec(name, *_):
            if name.startswith(os.environ["MODULE"]):
                sys.meta_path.remove(Signalled)
                os.kill(os.getpid(), int(os.environ["NUMBER"]))

    sys.meta_path.insert(0, Signalled)
    runpy.run_module(os.environ["RUN"], run_name="__main__", alter_sys=True)
"""


def interrupted_at_import(
    run: str, argv: list[str], module: str, number: signal.Signals, scene: Scene
) -> tuple[int, str]:
    """Exit code and what was told, of `python -m RUN` that is signalled when it looks for the first of these modules."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RUN": run, "MODULE": module, "NUMBER": str(int(number))}
    command = [sys.executable, "-c", textwrap.dedent(IMPORT), *argv]
    done = subprocess.run(
        command, cwd=scene.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def test_signals_are_handled_before_anything_is_imported() -> None:
    code = "import os, sys; before = {*sys.modules}; import lora_merge.__main__; print(*{*sys.modules} - before)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {*found.split()} <= {"lora_merge", "lora_merge.__main__"}


def test_interruption_that_python_has_dropped_ends_the_program() -> None:
    """In a callback of its imports, between taking their lock and the block that gives it back."""
    code = (
        "import _imp, sys; _imp.acquire_lock(); from lora_merge.__main__ import start; sys.argv[1:] = ['-V']; start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")


def _stop_inside(number: int) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("call", [signal.raise_signal, _stop_inside])
def test_no_exception_is_raised_where_it_would_keep_the_lock_of_imports(call: Callable[[int], None]) -> None:
    """A function is used in place of Python's own. What it calls, as a handler of signals, can be interrupted too."""
    scope: dict[str, Any] = {}
    source = "def _get_module_lock(call, number):\n    call(number)\n    return 'the lock is given back'\n"
    exec(compile(source, "<frozen importlib._bootstrap>", "exec"), scope)

    class StoppedError(BaseException):
        pass

    def stop(*_: object) -> None:
        raise StoppedError

    before = process._stops, {number: signal.getsignal(number) for number in process.SIGNALS}
    on_stop(stop)
    try:
        assert scope["_get_module_lock"](call, signal.SIGINT) == "the lock is given back"
        with pytest.raises(StoppedError):
            for _ in range(500):
                time.sleep(0.01)
    finally:
        process._stops = before[0]
        for number, handler in before[1].items():
            signal.signal(number, handler)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("module", ["lora_merge.cli", "typer.", "torch."])
def test_interrupt_during_imports(scene: Scene, module: str, number: signal.Signals) -> None:
    scene.reset()
    code, told = interrupted_at_import("lora_merge", scene.argv(), module, number, scene)
    assert code == 128 + number
    assert (number.name in told) is (module == "torch.")  # before that, there is nothing to tell
    scene.check(finished=False)
    assert scene.strays() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("module", ["yaml.", "pydantic_core."])
def test_worker_interrupted_during_its_imports_is_quiet(scene: Scene, module: str) -> None:
    assert interrupted_at_import("lora_merge.batch.worker", [], module, signal.SIGINT, scene) == (1, "")


AT = """
    import atexit, os, sys
    from pathlib import Path
    import lora_merge.cli.main, lora_merge.cli.reports, lora_merge.disk.publish, lora_merge.engine.merge
    from lora_merge.__main__ import start

    def then(place, name):
        real = getattr(place, name)
        def both(*args, **more):
            try:
                return real(*args, **more)
            finally:
                os.kill(os.getpid(), NUMBER)
        setattr(place, name, both)

    MOMENT
    start()
"""


def at(moment: str, scene: Scene, argv: list[str]) -> int:
    """The exit code of a merge that gets SIGTERM at the end of what the moment names."""
    code = textwrap.dedent(AT).replace("MOMENT", moment).replace("NUMBER", str(int(signal.SIGTERM)))
    return scene.run(argv=argv, code=code)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "moment",
    ['then(lora_merge.disk.publish, "remove")', 'then(lora_merge.engine.merge.RunningHashes, "__exit__")', 'then(lora_merge.cli.reports, "carry_out")',
     "atexit.register(os.kill, os.getpid(), NUMBER)"],
)  # fmt: skip
def test_interrupt_after_the_output_has_its_name(scene: Scene, moment: str) -> None:
    """It has succeeded, and says so."""
    scene.reset()
    assert at(moment, scene, scene.argv()) == 0
    assert all(line.startswith("note: ") for line in scene.log().splitlines()), scene.log()
    scene.check(finished=True)
    assert scene.strays() == []


@pytest.mark.parametrize("together", [True, False])
def test_batch_interrupted_after_one_has_its_name_makes_no_more(scene: Scene, *, together: bool) -> None:
    """Those that share a read of the base, and those that do not."""
    jobs = [f"{{base: {scene.folder}/base.safetensors, adapters: [{scene.folder}/a.safetensors], dtype: {dtype}, "
            f"output: {name}}}" for name, dtype in (("x", "keep"), ("y", "keep" if together else "fp32"))]  # fmt: skip
    folder = scene.folder.parent / f"batch-{together}"
    folder.mkdir()
    (folder / "jobs.yaml").write_text(f"version: 1\njobs: [{', '.join(jobs)}]\n")
    code = at('then(lora_merge.disk.publish, "remove")', scene, ["batch", str(folder / "jobs.yaml"), "-q"])
    assert code == 128 + signal.SIGTERM, scene.log()
    assert {p.name for p in folder.iterdir()} == {"jobs.yaml", "x.safetensors"}


@pytest.mark.parametrize(
    "moment",
    [
        'then(Path, "mkdir")',
        'then(lora_merge.disk.publish, "make_parents")',
        'then(lora_merge.disk.publish, "create")',
    ],
)
def test_interrupt_while_the_folder_is_made(scene: Scene, moment: str) -> None:
    argv = scene.argv()
    argv[argv.index("-o") + 1] = "new/deep/out.safetensors"
    before = {p.name for p in scene.folder.iterdir()}
    assert at(moment, scene, argv) == 128 + signal.SIGTERM, scene.log()
    assert {p.name for p in scene.folder.iterdir()} == before


def stopped(scene: Scene, code: str, number: signal.Signals, *, quiet: bool = True) -> None:
    """A program that gets the signal at a place of its own ends by it, with nothing made and nothing left."""
    scene.reset()
    ended = scene.run(code=textwrap.dedent(code).replace("NUMBER", str(int(number))))
    assert ended == 128 + number, scene.log()
    scene.check(finished=False, quiet=quiet)
    assert scene.strays() == []


LOST = """
    import os, sys
    from lora_merge.engine import admission
    from lora_merge.__main__ import start

    class Lost:
        def __del__(self):
            os.kill(os.getpid(), NUMBER)
            sys.stderr.write("")  # here the handler raises

    def plan_merge(job, make=admission.plan_merge):
        Lost()
        return make(job)

    admission.plan_merge = plan_merge
    start()
"""


@pytest.mark.parametrize("number", STOPS)
def test_interrupt_where_python_loses_the_exception(scene: Scene, number: signal.Signals) -> None:
    stopped(scene, LOST, number, quiet=False)
    assert "Exception ignored in" in scene.log()


TURNED = """
    import os, time
    from lora_merge.engine import admission
    from lora_merge.__main__ import start

    def plan_merge(job):
        try:
            os.kill(os.getpid(), NUMBER)
            time.sleep(1)  # here the handler raises
        except BaseException as e:
            raise ValueError("in the words of a library") from e

    admission.plan_merge = plan_merge
    start()
"""


@pytest.mark.parametrize("number", STOPS)
def test_interrupt_that_a_library_turns_into_another_error(scene: Scene, number: signal.Signals) -> None:
    """As pydantic does while it builds its models, at the beginning of a batch."""
    stopped(scene, TURNED, number)
    assert "Traceback" not in scene.log()
