"""The checklist for a GPU, as far as it can be tried without one."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import __main__ as checklist
from tests.gpu import hostile, memory, outputs, probe, races, ready, rightness
from tests.gpu.predictions import PREDICTIONS, Prediction, table
from tests.gpu.programs import ROOT, Failed, Figures, differences, printed, python
from tests.gpu.speed import Part
from tests.gpu.steps import MINUTES, STEPS, Step, carry_out
from tests.kit import cuda as gpu
from tests.kit.files import load, save
from tests.kit.pretended_cuda import pretended_cuda
from tests.kit.tensors import rand

tomllib = pytest.importorskip("tomllib")  # Python 3.11
PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def test_page_holds_every_prediction_and_every_step() -> None:
    held = re.search(r"<!-- figures -->\n(.*)\n<!-- end -->", PAGE, re.DOTALL)
    assert held is not None
    words = [line.split(" | ")[0].removeprefix("| ") for line in held[1].splitlines()[2:]]
    assert words == [p.words for p in PREDICTIONS]
    assert all(f"`{s.name}`" in PAGE for s in STEPS)
    assert sum(s.minutes for s in STEPS) == MINUTES < 30
    assert all(hasattr(module, "main") for module in (hostile, memory, outputs, probe, races))


def test_figure_is_confirmed_or_refuted_and_goes_into_the_page() -> None:
    wanted = Prediction("share", "a share", 70, 100, "%", 100)
    assert [wanted.verdict({"share": x}) for x in (0.7, 0.69, 1.0, None)] == ["confirmed", "refuted", "confirmed", "not measured"]  # fmt: skip
    assert "| a share | 70 to 100 % | 70 % | confirmed |" in table({"share": 0.7}, [wanted])
    page = checklist.written({"context_s": 9.0}, PAGE)
    assert "| context and first kernel | 0.2 to 1.5 s | 9 s | refuted |" in page
    assert checklist.written({}, page) == checklist.written({}, PAGE)


@pytest.mark.release
def test_part_that_fails_is_reported_and_the_others_go_on() -> None:
    """Also one that has no time left, or fails after it has found something."""
    kept = list[Figures]()

    def one(_data: Path) -> Iterator[Part]:
        yield lambda _: {"first": 1}
        yield lambda _: 1 / 0  # type: ignore[arg-type, return-value]
        yield lambda _: printed("tests.gpu.test_checklist", seconds=60)
        yield lambda seconds: {"left": seconds}
        raise LookupError("no file")

    found = carry_out([Step("one", 1, one)], Path(), 1, say=str, keep=lambda f: kept.append(dict(f)))
    errors = [e.split(":")[0] for e in found["one_errors"]]
    assert errors == ["ZeroDivisionError", "Failed", "LookupError"] and 0 < found["left"] < 60
    assert kept[0]["first"] == 1 and len(kept) == 5
    assert checklist.failed(found | {"probe_errors": ["x"]}) and not checklist.failed({})


def test_each_step_has_its_share_of_the_time_and_what_earlier_ones_leave() -> None:
    given: dict[str, list[float]] = {"short": [], "long": [], "last": []}

    def parts(name: str) -> Callable[[Path], Iterator[Part]]:
        return lambda _: iter([lambda seconds: given[name].append(seconds) or {}] * 2)

    steps = [Step("short", 1, parts("short")), Step("long", 2, parts("long")), Step("last", 1, parts("last"))]
    found = carry_out(steps, Path(), 10, say=str)
    assert [len(given[name]) for name in given] == [2, 2, 2] and not any(found.values())
    assert [round(seconds[0]) for seconds in given.values()] == [150, 400, 600]
    late = carry_out(steps, Path(), 0.2, say=str)
    assert late["short_errors"] == ["TimeoutError: no time was left for some parts"]
    assert not late["last_errors"] and len(given["last"]) == 4, "what the others left is enough for it"


@pytest.mark.release
def test_results_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text(
        "print('{\"a\": 1}', flush=True)\nimport time, sys\nif len(sys.argv) > 1: time.sleep(60)\nraise SystemExit('no luck')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for words, text in (((), "no luck"), (("wait",), "no time left")):
        with pytest.raises(Failed, match=text) as e:
            printed("halfway", *words, seconds=2)
        assert e.value.figures == {"a": 1}


def test_program_ends_with_all_that_it_has_started() -> None:
    """Workers of pytest and what a sanitizer runs would go on to use the GPU."""
    child = "import time; print('here', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=-1); c.stdout.read(4); print(c.pid)"
    done = python("-c", parent, seconds=120)
    state = Path(f"/proc/{int(done.output)}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)  # it gets the signal at once, and ends soon
    assert done.code == 0
    late = python("-c", "import time; time.sleep(600)", seconds=0.1)
    assert late.code is None and "no time was left" in late.text


SCENE = """
import pytest, warnings
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("n", range(4))
def test_good(n): warnings.warn("of little use")
def test_memory_of_a_device(): assert 1 == 2, "so it is"
"""


@pytest.mark.release
def test_tests_are_counted_whatever_else_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin of the machine that fails at its start is not loaded; a file that needs a missing library is told."""
    (tmp_path / "unlucky.py").write_text("raise RuntimeError('I was loaded')")
    facts = tmp_path / "unlucky-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: unlucky\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[pytest11]\nunlucky = unlucky\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scene, unreadable = tmp_path / "test_scene.py", tmp_path / "test_unreadable.py"
    unreadable.write_text("import no_such_library")
    monkeypatch.setattr(rightness, "FIRST", str(scene))
    monkeypatch.setattr(rightness, "OTHERS", (str(scene), str(unreadable)))
    monkeypatch.setattr(rightness.os, "cpu_count", lambda: 4)
    scene.write_text(SCENE + "pytestmark = [pytestmark, pytest.mark.skip('no device')]")
    with pytest.raises(Failed) as e:
        next(rightness.right(tmp_path))(60)
    assert "gpu_tests_failed" not in e.value.figures, "nothing was tested"
    scene.write_text(SCENE)
    first, several, filling, _ = rightness.right(tmp_path)
    found = first(60)
    assert found["gpu_tests_passed"] == 4 and found["warnings"] == ["UserWarning: of little use"]
    with pytest.raises(Failed, match="no_such_library") as e:
        several(60)
    assert (e.value.figures["gpu_tests_passed"], e.value.figures["gpu_tests_failed"]) == (8, 1)
    with pytest.raises(Failed) as e:
        filling(60)
    assert "so it is" in next(iter(e.value.figures["failed_tests"].values()))


def test_every_test_that_is_marked_is_named() -> None:
    marked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")
              if "mark.gpu" in p.read_text(encoding="utf-8")} - {"tests/gpu/test_checklist.py"}  # fmt: skip
    assert marked == {rightness.FIRST, *rightness.OTHERS}


def test_python_is_ready_if_it_has_what_the_project_needs() -> None:
    names = {"yaml": "PyYAML", "pytest": "", "hypothesis": ""}
    dependencies = {re.split("[><=]", d)[0] for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}  # fmt: skip
    assert {names.get(n, n) for n in ready.NEEDED} - {""} == dependencies
    assert bool(ready.lacking()) is not torch.cuda.is_available()


def test_files_go_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {Path("/dev/shm"): 1e9, Path(tempfile.gettempdir()): 30e9, ROOT: 90e9}
    monkeypatch.setattr(checklist.shutil, "disk_usage", lambda p: SimpleNamespace(free=free[p]))
    assert checklist.folder().parent == Path(tempfile.gettempdir())
    free[Path("/dev/shm")] = 24e9
    assert checklist.folder().parent == Path("/dev/shm")
    free.update({p: 2e9 for p in free} | {ROOT: 3e9})
    assert checklist.folder().parent == ROOT


def test_figures_and_page_go_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the machine with the GPU may keep nothing; they are there after every part."""
    step = Step("probe", 1, lambda _: iter([lambda _: {"context_s": 0.5}]))
    monkeypatch.setattr(checklist, "STEPS", [step])
    monkeypatch.setattr(checklist, "names", lambda: ("a GPU",))
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--minutes", "1", "--into", str(tmp_path / "out"), "--data", str(tmp_path)]
    )
    assert checklist.main() == 0
    assert json.loads((tmp_path / "out" / "figures.json").read_text())["context_s"] == 0.5
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| context and first kernel | 0.2 to 1.5 s | 0.5 s | confirmed |" in page
    assert Path(checklist.HERE, "README.md").read_text(encoding="utf-8") == PAGE


def test_race_is_noted_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several threads at once; the streams are pretended."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1))
    watch = races.Watch()

    def work(_: int) -> float:
        with watch:
            return float(torch.ones(8).add_(1).sum())

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(work, range(30))] == [16.0] * 30 and not watch.reports
    for stream in (1, 2):
        launch = stream, set(), {5}, set(), torch.ops.aten.add_.Tensor._schema, {5: []}
        assert watch.event_handler._handle_kernel_launch(*launch) == []
    (report,) = watch.reports
    assert "possible data race on tensor with data pointer 5" in report


@pytest.mark.release
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_programs_for_gpus_are_right_on_a_pretended_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test or a program that is wrong itself would cost the time on a real one."""
    base, adapter = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for n in range(4):
        base[f"layer.{n}.weight"] = rand(320, 320, seed=n, scale=1.0).half()
        adapter |= gpu.oft(n, 320) if n % 2 else gpu.lora(n, 320, 320)
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    monkeypatch.setattr(
        memory, "load_file", lambda path, device: {k: t.to(f"{device}:0") for k, t in load(path).items()}
    )
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, files), str(tmp_path)])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    with pretended_cuda(monkeypatch, 2) as cuda:
        gpu.expect_windows_apart(files, tmp_path, "keep", "16MiB")
        for dtype, options in (("bf16", {"max_vram": "64MiB"}), ("fp16", {"device": "cuda:0,cuda:1"})):
            (own := tmp_path / dtype).mkdir()
            gpu.expect_layers_rounded(own, dtype, options)
        hostile.main()
        memory.main()
        outputs.main("cuda:0", 96)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[0]["hostile_lost"] == found[-2]["together_different"] == found[-2]["keep_host_bytes"] == 0
    assert found[-1]["outputs_residual"] == pytest.approx(1, rel=1e-2)
    assert not cuda.races and not cuda.faults


def test_hostile_job_fails_alone(capsys: pytest.CaptureFixture[str]) -> None:
    hostile.main("cpu")
    found = json.loads(capsys.readouterr().out)
    assert found["hostile_lost"] == 0 and "numbers outside of" in found["hostile_refused"]


def test_differences_are_counted_in_units_of_the_last_place(tmp_path: Path) -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 6e-8, 2.0], dtype=torch.float16)
    b = torch.tensor([1.0009765625, -1.0, -6e-8, 6e-8, 2.0], dtype=torch.float16)
    one, other = save({"w": a, "same": a.clone()}, tmp_path / "a"), save({"w": b, "same": a.clone()}, tmp_path / "b")
    assert differences(one, other) == pytest.approx((0.4, 1.0))
    assert differences(one, one) == (0.0, 0.0)


def test_checklist_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checklist, "names", tuple)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert checklist.main() == 1
    assert "no CUDA device here: nothing was checked" in capsys.readouterr().err
    assert "-m tests.gpu --minutes" in (ROOT / "Makefile").read_text(encoding="utf-8")
