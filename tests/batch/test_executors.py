"""Executors: the same bytes wherever passes run, also when a worker dies in the middle of a job."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lora_merge
from lora_merge.batch import executors, shared_reads
from lora_merge.batch import ray as on_ray
from lora_merge.batch import run as batch
from lora_merge.batch.executors import EXECUTORS, Workers, executor
from lora_merge.batch.jobs_file import BatchJob
from lora_merge.batch.report import JobReport, failed
from lora_merge.batch.run import make_batch
from lora_merge.batch.shared_reads import JobGroup, carry_out
from lora_merge.batch.worker import GroupTask
from lora_merge.errors import DeviceFailed, MergeError, ResourceError, UsageError
from lora_merge.job import Adapter
from lora_merge.planning import make_plan
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.progress import Step
from tests.conftest import Nursery
from tests.kit.adapters import kohya
from tests.kit.files import save, strays
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

ROOT = Path(__file__).parents[2]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    base = sd1_sample()
    save(base, tmp_path / "base.safetensors")
    save(kohya(base), tmp_path / "ink.safetensors")
    return tmp_path


def jobs(models: Path, count: int, out: str = "out") -> list[dict[str, Any]]:
    return [
        {"base": str(models / "base.safetensors"), "adapters": [str(models / f"ink.safetensors:{n / 8}")],
         "output": str(models / out / f"{n}.safetensors"), "device": "cpu"}
        for n in range(1, count + 1)
    ]  # fmt: skip


def heavy(models: Path, count: int = 12) -> None:
    """More bytes, so that a job takes long enough to be killed in."""
    base = sd1_sample() | {f"model.diffusion_model.extra.{n}": rand(2048, 4096, seed=n).half() for n in range(count)}
    save(base, models / "base.safetensors")


PIPES = """
    import os, sys

    os.dup2(os.open("tasks", os.O_RDONLY), 0)
    os.dup2(os.open("reports", os.O_WRONLY), 1)
    sys.stdin = open(0)
"""
"""Two pipes with names, in place of those that `subprocess` makes."""


@dataclass
class Forked:
    """A worker as `subprocess.Popen`, forked from a process that has imported everything."""

    nursery: Nursery
    folder: Path
    code: str = "from lora_merge.batch import worker; worker.main()"

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for name in ("tasks", "reports"):
            os.mkfifo(self.folder / name)
        self.log, self.code = self.folder / "log", textwrap.dedent(PIPES) + textwrap.dedent(self.code)
        self.pid = self.nursery.start([], self.folder, log=str(self.log), code=self.code)
        self.stdin, self.stdout = (self.folder / "tasks").open("wb"), (self.folder / "reports").open("rb")
        self.returncode: int | None = None

    def wait(self) -> int:
        """Its exit code."""
        if self.returncode is None:
            self.returncode = self.nursery.wait(self.pid)
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, if it was waited for."""
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.pid, signal.SIGTERM)

    def goes_on(self, *, after: signal.Signals | None = None) -> tuple[int, str]:
        """Its exit code, and what it says besides reports, where it has stopped itself."""
        if after is not None:
            os.kill(self.pid, after)
        os.kill(self.pid, signal.SIGCONT)
        self.stdin.close()
        if not self.stdout.closed:
            self.stdout.read()
            self.stdout.close()
        return self.wait(), self.log.read_text(encoding="utf-8")


DYING = """
    import os, signal
    from lora_merge.batch import worker
    from lora_merge.batch.report import JobReport

    def send(reports, message, real=worker._send):
        real(reports, message)
        if isinstance(message, JobReport):
            os.kill(os.getpid(), signal.SIGKILL)

    worker._send = send
    worker.main()
"""
"""A worker that is killed when it has told of its first job and is at the second."""


def test_workers_give_the_same_bytes_and_one_that_dies_costs_nothing(
    models: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    """The first is one that dies, the second a real one, and the third has the first one's place."""
    monkeypatch.setattr(batch, "JOBS_TOGETHER", 2)
    started: list[subprocess.Popen[bytes] | Forked] = []
    start = executors._start

    def recorded() -> subprocess.Popen[bytes] | Forked:
        folder = models / f"worker{len(started)}"
        forked = (lambda: Forked(nursery, folder, DYING), start, lambda: Forked(nursery, folder))
        started.append(forked[len(started)]())
        return started[-1]

    monkeypatch.setattr(executors, "_start", recorded)
    (models / "typing.py").write_text("raise SystemExit('code that came with a model')")
    monkeypatch.chdir(models)  # no worker runs code of the current folder
    monkeypatch.syspath_prepend("elsewhere")  # what this process can import, a worker can
    reports = lora_merge.run_batch(jobs(models, 8), workers=2)
    assert Counter(r.status for r in reports) + Counter() in (
        Counter(merged=8), Counter(merged=8 - (again := sum(r.status == "skipped" for r in reports)), skipped=again),
    )  # fmt: skip
    assert sorted(r.number for r in reports) == list(range(1, 9))
    assert len({r.worker for r in reports}) >= 3
    assert len(started) == 3
    assert all(p.poll() is not None for p in started)
    lora_merge.run_batch(jobs(models, 8, "here"))
    for n in range(1, 9):
        assert (models / "out" / f"{n}.safetensors").read_bytes() == (models / "here" / f"{n}.safetensors").read_bytes()
    assert not strays(models)


def repeated(models: Path, runs: int, count: int = 24) -> Iterator[lora_merge.Reports]:
    """The reports of many runs of small jobs on two workers, with an observer that fails at once."""

    def observer(_: Step) -> None:
        raise RuntimeError("the bar is broken")

    for _ in range(runs):
        yield lora_merge.run_batch(jobs(models, count), workers=2, redo=True, progress=observer)


def test_progress_fails_no_job_of_many_small_ones_on_workers(
    models: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    numbers = iter(range(2))
    monkeypatch.setattr(executors, "_start", lambda: Forked(nursery, models / f"worker{next(numbers)}"))
    for reports in repeated(models, 1, 8):
        assert Counter(r.status for r in reports) == {"merged": 8}, [str(r.error) for r in reports if r.error]


@pytest.mark.slow
def test_progress_fails_no_job_of_forty_runs(models: Path) -> None:
    for reports in repeated(models, 40):
        assert Counter(r.status for r in reports) == {"merged": 24}, [str(r.error) for r in reports if r.error]


def test_job_that_always_kills_its_worker_fails_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(executors, "_start", lambda: subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ))  # fmt: skip
    reports = lora_merge.run_batch(jobs(models, 2), workers=2)
    assert [r.status for r in reports] == ["failed"] * 2
    assert all(r.error is not None and "signal 9" in r.error.what for r in reports)


def failing(entry: BatchJob) -> JobReport:
    return failed(entry, DeviceFailed("cuda:0", "CUDA error: device-side assert triggered"))


@pytest.mark.few(1)
@pytest.mark.parametrize("together", [1, 4])
def test_failed_device_is_replaced_by_another_process(
    models: Path, monkeypatch: pytest.MonkeyPatch, together: int, nursery: Nursery
) -> None:
    """This process fails in its second group; jobs of that group are run again, and later ones in the new process."""
    monkeypatch.setattr(batch, "JOBS_TOGETHER", together)
    begun: list[JobGroup] = []

    def half(group: JobGroup, *given: Any) -> Iterator[JobReport]:
        begun.append(group)
        yield from carry_out(group, *given) if len(begun) == 1 else map(failing, group.entries)

    monkeypatch.setattr(executors, "carry_out", half)
    monkeypatch.setattr(executors, "_start", lambda: Forked(nursery, models / "worker"))
    reports = lora_merge.run_batch(jobs(models, 8))
    assert [r.status for r in reports] == ["merged"] * 8
    assert len(begun) == 2
    assert len({r.worker for r in reports}) == 2
    assert {r.number for r in reports if r.worker == reports[0].worker} == set(range(1, together + 1))


BROKEN = """
    from lora_merge.batch import shared_reads, worker
    from lora_merge.errors import DeviceFailed

    def run_together(plans, progress):
        for n, plan in enumerate(plans):
            bad = len(plans) > 1 or plan.job.output.name == "1.safetensors"
            yield n, DeviceFailed("cuda:0", "CUDA error") if bad else next(real([plan], progress))[1]

    real, shared_reads.run_together = shared_reads.run_together, run_together
    worker.main()
"""
"""A worker whose device fails under every group with the first job."""


@pytest.mark.slow
def test_job_under_which_the_device_always_fails_fails_alone(
    models: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    started: list[Forked] = []

    def start() -> Forked:
        started.append(Forked(nursery, models / f"worker{len(started)}", BROKEN))
        return started[-1]

    monkeypatch.setattr(executors, "_start", start)
    reports = {r.number: r for r in lora_merge.run_batch(jobs(models, 6), workers=2)}
    assert [reports[n].status for n in range(1, 7)] == ["failed"] + ["merged"] * 5
    assert isinstance(reports[1].error, DeviceFailed)
    codes = Counter(worker.poll() for worker in started)
    assert codes[1] == 3, "two groups of three, and the first job alone"
    assert codes == {1: 3, 0: len(started) - 3} and len(started) in (4, 5), "one or two that go on, as it happens"
    assert not strays(models)


def test_ray_runs_jobs_of_a_failed_device_once_more_alone(models: Path) -> None:
    entries = tuple(s.entry for s in make_batch(jobs(models, 2)).planned)
    driver = on_ray._Ray(FakeRay(1), lambda _: None)
    driver.left = {e.number: e for e in entries}
    driver.ray.get, driver.ray.exceptions = lambda task: [failing(e) for e in task], SimpleNamespace(RayError=OSError)
    assert list(driver._end(entries, JobGroup(entries))) == []
    assert [group.entries for group in driver.waiting] == [entries[:1], entries[1:]]
    (report,) = driver._end(entries[:1], driver.waiting[0])
    assert isinstance(report.error, DeviceFailed)


STOPPING = """
    import os, signal
    from lora_merge.batch import worker
    from lora_merge.disk.writer import Writer

    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    real = Writer.write

    def write(*args):
        Writer.write = real
        os.kill(os.getpid(), signal.SIGSTOP)
        real(*args)

    Writer.write = write
    worker.main()
"""


def begun(models: Path, nursery: Nursery, code: str = STOPPING) -> Forked:
    """A worker that has stopped itself in the middle of a job."""
    worker = Forked(nursery, models / "worker", code)
    entries = tuple(s.entry for s in make_batch(jobs(models, 1)).planned)
    pickle.dump(GroupTask(JobGroup(entries), 0), worker.stdin)
    worker.stdin.flush()
    nursery.stopped(worker.pid, worker.log.read_text)
    assert list(models.glob("out/.*.part"))
    return worker


def test_worker_whose_parent_is_gone_ends_quietly(models: Path, nursery: Nursery) -> None:
    worker = begun(models, nursery)
    worker.stdout.close()
    assert worker.goes_on() == (1, "")
    assert not strays(models)


def test_task_that_is_cut_off_is_the_end(models: Path, nursery: Nursery) -> None:
    entries = tuple(s.entry for s in make_batch(jobs(models, 1)).planned)
    text = pickle.dumps(GroupTask(JobGroup(entries), 0))
    module = "import runpy; runpy.run_module('lora_merge.batch.worker', run_name='__main__')"
    worker = Forked(nursery, models / "worker", module)
    worker.stdin.write(text[: len(text) // 2])
    worker.stdin.close()
    assert (worker.stdout.read(), worker.wait(), worker.log.read_text()) == (b"", 0, "")
    worker.stdout.close()


def test_worker_whose_terminal_is_gone_leaves_nothing(models: Path, nursery: Nursery) -> None:
    assert begun(models, nursery).goes_on(after=signal.SIGHUP) == (1, "")
    assert not strays(models)


def test_worker_under_nohup_goes_on(models: Path, nursery: Nursery) -> None:
    code = STOPPING.replace("SIG_DFL", "SIG_IGN")
    assert begun(models, nursery, code).goes_on(after=signal.SIGHUP) == (0, "")
    assert [p.name for p in (models / "out").iterdir()] == ["1.safetensors"]


def test_unknown_executors_and_a_missing_ray_are_reported(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="slurm"):
        executor("slurm")
    assert set(EXECUTORS) == {"local", "ray"}
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        lora_merge.run_batch(jobs(models, 1), executor="ray")
    assert caught.value.fix == 'pip install -U "ray>=2.60"'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Ray head with two CPUs."""
    pytest.importorskip("ray")
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray = str(Path(sys.executable).parent / "ray")
    folder = tmp_path_factory.mktemp("r")
    subprocess.run(
        [ray, "start", "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats",
         f"--port={(port := 20000 + os.getpid() % 20000)}", f"--temp-dir=/tmp/{folder.name}-{os.getpid()}"],
        check=True, capture_output=True, timeout=120, env=env,
    )  # fmt: skip
    yield f"127.0.0.1:{port}"
    subprocess.run([ray, "stop", "--force"], capture_output=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_the_same_bytes_and_survives_a_worker_killed_in_mid_job(models: Path, cluster: str) -> None:
    heavy(models)
    mine = jobs(models, 20)
    victims: list[int] = []

    def kill_one() -> None:
        """The process that holds the first claim it sees, while it is at work."""
        deadline = time.monotonic() + 120
        while not victims and time.monotonic() < deadline:
            for claim in (models / "out").glob(".*.claim") if (models / "out").exists() else ():
                text = claim.read_text().strip() if claim.exists() else ""
                if ":" in text and any((models / "out").glob(".*.part")):
                    victims.append(int(text.rpartition(":")[2]))
                    os.kill(victims[0], 9)
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill_one)
    thread.start()
    reports, written, alone = [], [0], 0
    planned = make_batch(mine, workers=Workers(2))
    for report in planned.run(
        Workers(2, cluster),
        name="ray",
        progress=lambda s: written.__setitem__(0, written[0] + (s.done if s.stage == "merge" else 0)),
    ):
        reports.append(report)
        alone += planned.size > written[0] > 0
    thread.join()
    assert alone > 2, "reports come while others are at work, as the progress does"
    assert written[0] >= 0.5 * planned.size
    assert victims, "a worker was killed"
    assert sorted(r.number for r in reports) == list(range(1, 21))
    assert all(r.ok for r in reports), [r.error for r in reports if r.error]
    workers = {r.worker for r in reports}
    assert len(workers) >= 2
    assert not any(w.endswith(f":{victims[0]}") for w in workers)
    lora_merge.run_batch(jobs(models, 20, "here"))
    for n in range(1, 21):
        assert (models / "out" / f"{n}.safetensors").read_bytes() == (models / "here" / f"{n}.safetensors").read_bytes()
    assert not strays(models)
    again = lora_merge.run_batch(mine, executor="ray", ray_address=cluster)
    assert [r.status for r in again] == ["skipped"] * 20
    shutil.rmtree(models / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_batch_on_ray_that_is_closed_leaves_nothing_unfinished(models: Path, cluster: str) -> None:
    heavy(models)

    def stop(report: JobReport) -> None:
        assert report.ok
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lora_merge.run_batch(jobs(models, 20), executor="ray", ray_address=cluster, workers=2, on_report=stop)
    made = list((models / "out").iterdir())
    assert 0 < len(made) < 20
    assert not strays(models)


def test_path_that_a_node_does_not_see_is_reported(models: Path) -> None:
    """The task as it runs on a node, and the driver's look at what a node has made."""
    entries = [s.entry for s in make_batch(jobs(models, 3)).planned]
    ink, told = entries[1].job.adapters[0].path, list[Any]()
    inbox = SimpleNamespace(put=SimpleNamespace(remote=told.append))
    elsewhere = entries[1].changed(adapters=(Adapter(ink.with_name("local")),))
    found = {r.number: r for r in on_ray._task(JobGroup((entries[0], elsewhere)), inbox)}
    assert found[1].status == "merged"
    assert isinstance(found[2].error, ResourceError)
    assert f"local, missing on the node {socket.gethostname()}" in found[2].error.where
    assert [m for m in told if isinstance(m, JobReport)] == [found[2], found[1]]
    assert sum(m.done for m in told if isinstance(m, Step)) > 0, "progress"
    driver = object.__new__(on_ray._Ray)
    driver.left = {e.number: e for e in entries}
    assert list(driver._reachable(found[1])) == [found[1]]
    assert list(driver._reachable(found[1])) == [], "once"
    (unseen,) = driver._reachable(replace(found[1], number=3, output=str(models / "on-the-node-only")))
    assert unseen.error is not None
    assert "on-the-node-only, made on" in unseen.error.where


class FakeRay:
    """What the driver asks Ray for; nothing runs."""

    def __init__(self, *gpus: int) -> None:
        self.on_nodes, self.asked, self.sent = gpus, list[dict[str, Any]](), list[JobGroup]()
        self.task = SimpleNamespace(options=self.options)

    def nodes(self) -> list[dict[str, Any]]:
        nodes = [{"Alive": True, "Resources": {"CPU": 4.0} | ({"GPU": float(n)} if n else {})} for n in self.on_nodes]
        return [*nodes, {"Alive": False, "Resources": {"GPU": 64.0}}]

    def remote(self, _: Any) -> Any:
        return self.task

    def options(self, **options: Any) -> Any:
        self.asked.append(options)
        return SimpleNamespace(remote=lambda *given: self.sent.append(given[0]) if given else None)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("device", "nodes", "asked", "sent"),
    [
        ("cpu", (8,), 0, "cpu"), ("auto", (0, 0), 0, "auto"), ("auto", (0, 1), 1, "auto"), ("cuda", (4,), 1, "cuda"),
        ("cuda:3", (4,), 1, "cuda:0"), ("cuda:1,cuda:3", (1, 4), 2, "cuda:0,cuda:1"),
        ("cuda:2, cuda", (2,), 2, "cuda:0,cuda:1"), ("cuda:0,cuda:0", (2,), 1, "cuda:0,cuda:0"),
        ("xpu:1", (2,), 1, "xpu:0"), ("mps", (2,), 0, "mps"),
        ("cuda:0,cuda:1", (1, 1), 1, "cuda:0,cuda:1"), ("cuda:1", (0,), 0, "cuda:1"),  # told on the node, as written
    ],
)  # fmt: skip
def test_task_asks_for_the_gpus_of_its_list_and_names_them_as_it_sees_them(
    models: Path, device: str, nodes: tuple[int, ...], asked: int, sent: str
) -> None:
    entries = tuple(s.entry for s in make_batch([j | {"device": device} for j in jobs(models, 2)]).planned)
    ray = FakeRay(*nodes)
    driver = on_ray._Ray(ray, lambda _: None)
    driver._start(JobGroup(entries))
    assert ray.asked[-1]["num_gpus"] == asked
    assert [e.job.device for e in ray.sent[-1].entries] == [sent, sent]
    assert [(e.number, e.job.output) for e in ray.sent[-1].entries] == [(e.number, e.job.output) for e in entries]
    (left,) = driver.running.values()
    assert [e.job.device for e in left.entries] == [device, device], "told by the names of the file"


def test_workers_share_both_memory_bounds(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plan_job = make_plan.plan_job
    some = [j | {"max_memory": "1GiB", "max_vram": "8GiB"} for j in jobs(models, 2)]
    entries = tuple(s.entry for s in make_batch(some).planned)
    monkeypatch.setattr(make_plan, "plan_job", lambda job, opened: made.append(job) or plan_job(job, opened))
    assert all(r.ok for r in shared_reads.carry_out(JobGroup(entries, workers=4), CheckpointCache()))
    assert [(job.max_memory, job.max_vram) for job in made] == [(2**28, 2**31)] * 2


def test_memory_is_shared_by_as_many_workers_as_have_jobs(models: Path) -> None:
    """And on a cluster nobody does: hundreds of tasks have a machine each."""
    some = [j | {"max_memory": "64MiB"} for j in jobs(models, 4)]
    for name, shares in (("local", 4), ("ray", 1)):
        pytest.importorskip("ray") if name == "ray" else None
        batched = make_batch(some, workers=Workers(500), executor=name)
        assert [s.error for s in batched.planned] == [None] * 4
        assert {p.workers for p in batched.grouped(batched.planned)} == {shares}
    narrow = make_batch([j | {"max_memory": "20MiB"} for j in some], workers=Workers(4))
    assert all("5242880, the share of one of 4 workers" in str(s.error) for s in narrow.planned)


def test_jobs_with_other_bounds_go_through_passes_of_their_own(models: Path) -> None:
    bounds: list[dict[str, Any]] = [{}, {}, {"max_vram": "4GiB"}, {"max_vram": "2GiB"}, {"max_memory": "512MiB"}]
    batched = make_batch([j | more for j, more in zip(jobs(models, 5), bounds, strict=True)])
    found = batched.grouped(batched.planned)
    assert [[e.number for e in p.entries] for p in found] == [[1, 2], [3], [4], [5]]


@pytest.mark.filterwarnings("ignore")
def test_no_cluster_at_the_address_is_reported(models: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(MergeError, match="no Ray cluster"):
        lora_merge.run_batch(jobs(models, 1), executor="ray", ray_address="127.0.0.1:1")


class Listening(BaseException):
    """Raised in the place of a cluster; no Exception, which a public function makes a MergeError."""


def started(monkeypatch: pytest.MonkeyPatch, models: Path, version: str = "2.60.0", **options: Any) -> dict[str, Any]:
    """What a cluster is started with: its options and the environment."""
    seen: dict[str, Any] = {}

    def init(**given: Any) -> None:
        seen.update(given, env={k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")})
        raise Listening

    ray = SimpleNamespace(__version__=version, is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(Listening):
        lora_merge.run_batch(jobs(models, 1), executor="ray", **options)
    return seen


def test_cluster_that_is_started_here_asks_for_a_token(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    first, second = (started(monkeypatch, models) for _ in range(2))
    assert [*first["env"]] == ["RAY_AUTH_TOKEN"]
    assert len(first["env"]["RAY_AUTH_TOKEN"]) == 64
    assert second == first, "Ray reads the token once in the life of a process"
    assert not any(name.startswith("RAY_AUTH") for name in os.environ)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/mine")
    assert started(monkeypatch, models)["env"] == {"RAY_AUTH_TOKEN_PATH": "/mine"}


@pytest.mark.parametrize("by", ["option", "environment"])
def test_cluster_that_is_named_keeps_its_own_rules(models: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    seen = started(monkeypatch, models, ray_address="auto" if by == "option" else None)
    assert seen["env"] == {"RAY_AUTH_MODE": "disabled"}
    assert "include_dashboard" not in seen


def test_cluster_without_a_token_is_not_started(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "Disabled")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.60.0", is_initialized=lambda: False))
    with pytest.raises(UsageError, match="anyone on the network"):
        lora_merge.run_batch(jobs(models, 1), executor="ray")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.59.2"))
    with pytest.raises(UsageError, match=r"Ray 2\.59\.2 is too old"):
        lora_merge.run_batch(jobs(models, 1), executor="ray")


@pytest.mark.slow
def test_cluster_started_here_admits_nobody_without_the_token(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))
    answers: list[str] = []

    def knock() -> None:
        address = ray.get_runtime_context().gcs_address
        code = f"import ray; ray.init(address={address!r}, logging_level='error'); print(ray.get(ray.remote(lambda: 1).remote()))"
        for mode in ("disabled", "token"):
            env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_AUTH_MODE": mode}
            if mode == "token":
                env["RAY_AUTH_TOKEN"] = "0" * 64
            try:
                done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                answers.append("nothing")
            else:
                answers.append(done.stdout)

    reports = lora_merge.run_batch(jobs(models, 2), executor="ray", on_report=lambda _: answers or knock())
    assert all(report.ok for report in reports)
    assert not any("1" in answer for answer in answers)
    assert len(answers) == 2
    assert not (tmp_path / ".ray").exists()
