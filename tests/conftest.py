"""What every test starts from."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

from lora_merge.process import SIGNALS, collect_rarely
from tests.kit.fixes import TYPED
from tests.kit.package import syntax
from tests.kit.pairs import WHOLE, examples, leave_out

ROOT = Path(__file__).resolve().parents[1]

to_disk = os.fsync


def _unwaited(fd: Any) -> None:
    os.fstat(fd if isinstance(fd, int) else fd.fileno())  # it still has to be open


os.fsync = _unwaited
"""A merge waits for the disk four times, longer than it works, and no test cuts the power. Where it matters that bytes
reach the disk, in `disk/` and in the processes of the nursery, they do."""
if hasattr(os, "fdatasync"):
    os.fdatasync = _unwaited


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(n) for n in itertools.count())


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _numbers: Iterator[int]) -> Path:
    """A new folder. Pytest's own fixture reads the names of all folders before it: 2 ms a test, 4 s a worker."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{next(_numbers)}-{name}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="session")
def _numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture(autouse=True)
def _nothing_remembered(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds or leaves anything in the user's cache, or finds what another has left, or asks another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(_caches)))
    monkeypatch.setenv("LORA_MERGE_OFFLINE", "1")


CPU_ONLY = {"CUDA_VISIBLE_DEVICES": ""}
"""For processes that come by the hundred and are killed: a GPU takes each a second, and nothing of it is tested."""


@pytest.fixture(scope="session")
def children() -> Any:
    """Processes that start at once, from one that has imported everything."""
    if sys.platform == "win32":
        pytest.skip("no fork server")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "lora_merge.engine.pipeline",
            "lora_merge.batch.run",
            "tests.batch.test_batch",
            "tests.files.test_output_files",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ONLY.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


@dataclass
class Nursery:
    """Children that run the command line, forked from a process that has imported everything."""

    to: IO[str]
    back: IO[str]
    shim: bool

    def start(self, argv: list[str], folder: Path, **more: Any) -> int:
        """The child's pid. What it says goes to a file; `code` takes the place of the program's."""
        request = {"argv": argv, "cwd": str(folder), "log": str(folder.parent / "log.txt"), **more}
        print(json.dumps(request), file=self.to, flush=True)
        return int(self.back.readline())

    def wait(self, pid: int) -> int:
        """Its exit code, negative for a signal."""
        print(json.dumps({"wait": pid}), file=self.to, flush=True)
        return int(self.back.readline())

    @staticmethod
    @contextmanager
    def gate(pid: int, folder: Path, log: Callable[[], str]) -> Iterator[None]:
        """Wait until the child is at its gate, a fault of the shim, and let it go on after the block."""
        gate = folder.parent / "waiting"
        while not gate.exists():
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX", log()
            time.sleep(0.005)
        try:
            yield
            assert gate.exists(), "it went on"
        finally:
            gate.unlink(missing_ok=True)

    @staticmethod
    def stopped(pid: int, log: Callable[[], str]) -> None:
        """Wait until the child has stopped itself, however long that takes; it must not end."""
        while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert state not in "ZX", log()
            time.sleep(0.005)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    if not sys.platform.startswith("linux"):
        pytest.skip("faults are made by Linux means")
    env = {**os.environ, **CPU_ONLY, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    gcc = shutil.which("gcc")
    if gcc is not None:
        source = Path(__file__).parent / "faults" / "shim.c"
        subprocess.run([gcc, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        env["LD_PRELOAD"] = str(library)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=env,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    yield Nursery(process.stdin, process.stdout, gcc is not None)
    process.stdin.close()
    process.wait(300)
    process.stdout.close()


@pytest.fixture(scope="session")
def hooks() -> ModuleType:
    """The texts of the code, as the documentation site collects them."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "configs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._tree = syntax  # type: ignore[attr-defined]  # the trees that other tests have too
    return module


@pytest.fixture(autouse=True)
def _fixes_typed(request: pytest.FixtureRequest, _caches: Iterator[Path]) -> Iterator[None]:
    """After a test that has a row in the table of fixes, the fixes of its errors are typed."""
    texts = [text for text, test in TYPED.items() if test == request.node.nodeid]
    if not texts:
        yield
        return
    from tests.kit.typed_fixes import expect_typed, taken_down

    with taken_down() as failures:
        yield
    expect_typed(failures, texts)


@pytest.fixture(autouse=True)
def _signals_restored() -> Iterator[None]:
    """After the command line ran in this process, Ctrl-C ends the tests again."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Prepare libraries in processes that run tests; the one that hands tests out to others starts them at once."""
    if session.config.pluginmanager.has_plugin("dsession"):
        return
    import jinja2
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "lane", max_examples=examples(100), derandomize=not WHOLE, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    settings.load_profile("lane")
    # PEFT saves a model card with every adapter, from one template that it compiles anew: half of the time of saving.
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]
    _save_quickly()


def _save_quickly() -> None:
    """The library makes an array of numpy of every tensor to learn its address: four fifths of the time of saving."""
    from safetensors import torch as library

    usual = getattr(library, "_flatten_as_ptr", None)
    if usual is None:
        return
    from safetensors import TensorSpec

    def quick(tensors: dict[str, Any], alive: list[Any]) -> dict[str, Any]:
        if not all(t.is_contiguous() and t.device.type == "cpu" and t.nbytes for t in tensors.values()):
            return usual(tensors, alive)
        library._evaluate_tensors_for_save(tensors)
        alive += tensors.values()
        return {
            name: TensorSpec(dtype=str(t.dtype)[6:], shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
            for name, t in tensors.items()
        }

    library._flatten_as_ptr = quick


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the fast lane, cases that repeat pairs of others are not made."""
    leave_out(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers depend on the test alone, not on which of them ran before it in this process."""
    import numpy as np
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for devices that are not there: 0.4 ms
    np.random.seed(0)
    random.seed(0)


gc.disable()  # while libraries are imported and tests collected: a fifth of that time


def pytest_collection_finish() -> None:
    """What the imported libraries consist of is not garbage; looking for it takes a tenth of the time of all tests.

    What the tests make is looked for as rarely as in the program.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    collect_rarely()
